"""The figures of a run for others: a file of JSON (`--status`), and a port that Prometheus reads (`--metrics`)."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import time
from typing import Any, Final

from shardc.errors import ClusterError
from shardc.launch.health.figures import RunFigures

_GAUGES: Final = {
    "processes": ("shardc_processes", "Processes that run now."),
    "step": ("shardc_step", "Steps of the training loop that are done."),
    "loss": ("shardc_loss", "The newest loss that is known."),
    "tokens_per_second": ("shardc_tokens_per_second", "Tokens per second."),
    "goodput": ("shardc_goodput_ratio", "The part of the run's time that went into steps that counted."),
    "last_step_age": ("shardc_last_step_age_seconds", "Seconds since the number of steps has changed."),
    "checkpoint": ("shardc_checkpoint_step", "The step of the last complete checkpoint."),
    "last_checkpoint_age": ("shardc_last_checkpoint_age_seconds", "Seconds since that checkpoint was seen first."),
}
Publish = Callable[[RunFigures], object]
"""Takes the newest figures, about once a second."""


@contextmanager
def publishing(status: Path | None, metrics: str | None) -> Generator[Publish]:
    """A context in which figures are written to a file and served at an address, as far as these are given.

    Args:
      status: the file. It is replaced as a whole, so that a reader finds one state.
      metrics: `HOST:PORT`, or a port of this machine alone.

    Raises:
      ClusterError: prometheus_client is not installed, or cannot listen.
    """
    newest: list[RunFigures] = []
    stop = _serve(metrics, newest) if metrics else None

    def publish(figures: RunFigures) -> None:
        newest[:] = [figures]
        if status is not None:
            _write(status, figures)

    try:
        yield publish
    finally:
        if stop is not None:
            stop()


def _write(path: Path, figures: RunFigures) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps({"time": time(), **asdict(figures)}) + "\n")
    part.replace(path)


def _serve(metrics: str, newest: list[RunFigures]) -> Callable[[], object]:
    """Serve the newest figures at an address. Returns a function that ends it."""
    try:
        library: Any = importlib.import_module("prometheus_client")
        core: Any = importlib.import_module("prometheus_client.core")
    except ImportError as error:
        raise ClusterError(f"--metrics needs prometheus_client: pip install 'shardc[metrics]' ({error}).") from error

    class Collector:
        """The collector that `prometheus_client` asks for metrics at each request."""

        def collect(self) -> Iterable[Any]:
            return [made for figures in newest for made in _metrics(core, figures)]

    registry = library.CollectorRegistry()
    registry.register(Collector())
    host, _, port = metrics.rpartition(":")
    try:
        server, thread = library.start_http_server(int(port), host or "127.0.0.1", registry)
    except OSError as error:
        raise ClusterError(f"--metrics {metrics}: nobody can listen there ({error.strerror}).") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def _metrics(core: Any, figures: RunFigures) -> Iterable[Any]:
    said = asdict(figures)
    for name, (metric, text) in _GAUGES.items():
        if said[name] is not None:
            yield core.GaugeMetricFamily(metric, text, value=said[name])
    yield core.CounterMetricFamily("shardc_restarts", "Restarts of lost processes.", value=figures.restarts)
    if figures.slowest is not None:
        text = "The part of the time that the others would gain if this process came with the next slowest one."
        family = core.GaugeMetricFamily("shardc_slowest_ratio", text, labels=["process"])
        family.add_metric([str(figures.slowest.process)], figures.slowest.share)
        yield family
