"""What the processes of a flow compare before a run. They are threads here; tests/processes/flows.py has real ones."""

import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardc
from shardc.arrays.remote_array import RemoteArray
from shardc.dataflow import remote as flows
from shardc.dataflow.remote import RunFacts, agree_on_run, values_of_nodes, values_of_state
from shardc.execute.process_group import ProcessGroup

MESH = shardc.make_mesh(data=1)
W = np.arange(3, dtype=np.float32)


class Threads:
    """A group of processes that are threads."""

    def __init__(self, processes):
        self.members = tuple(range(processes))
        self._said = {}
        self._barrier = threading.Barrier(processes, timeout=20)

    def gather(self, what, facts):
        self._said[me()] = what, facts
        self._barrier.wait()
        assert len({what for what, _ in self._said.values()}) == 1
        said = [self._said[p][1] for p in self.members]
        self._barrier.wait()
        return said

    agree = ProcessGroup.agree


def me():
    return int(threading.current_thread().name)


@pytest.fixture
def agree(monkeypatch):
    """`agree(plan, *facts)` gives the errors of processes that begin with these."""
    monkeypatch.setattr(flows, "me", me)

    def agree(plan, *facts):
        group, errors = Threads(len(facts)), {}

        def process(said):
            try:
                agree_on_run(plan, group, said)
            except shardc.DisagreementError as error:
                errors[me()] = str(error).partition("\n---")[0]

        threads = [threading.Thread(target=process, args=(said,), name=str(p)) for p, said in enumerate(facts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) in (0, len(facts)) and len(set(errors.values())) <= 1
        return errors.get(0, "")

    return agree


@pytest.fixture(scope="module")
def plan():
    add = shardc.function(lambda w, x: w + x, mesh=MESH)

    @shardc.flow
    def train(w, x):
        return add(w, x), {"old": shardc.late(add(w, x), 2, first=W)}

    return train.plan(W, W)


def facts(rounds=None, items=None, first=(), **values):
    return RunFacts(rounds, items, first, values)


DIFFER = "the flow train: the processes of this run differ in\n  "


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ([facts(5, w=W), facts(5, w=W)], ""),
        ([facts(5), facts(6)], DIFFER + "rounds=: process 0: 5; process 1: 6"),
        ([facts(None), facts(6)], DIFFER + "rounds=: process 0: None; process 1: 6"),
        ([facts(5, 3), facts(5, None), facts(5, 3)], ""),
        (
            [facts(5, 3), facts(5, None), facts(5, 4)],
            DIFFER + "the number of items: process 0: 3; process 2: 4",
        ),
        ([facts(w=W), facts(w=jnp.asarray(W))], ""),
        (
            [facts(w=W), facts(v=W, w=W), facts(v=W + 1, w=W)],
            DIFFER.replace(":", ", its values:", 1) + "the value of v: process 1: 30c8bc70; process 2: b20e96b1",
        ),
    ],
)  # fmt: skip
def test_what_differs_is_an_error_in_all_processes(agree, plan, said, error):
    found = agree(plan, *said)
    assert found.startswith(error) and bool(found) == bool(error)


def test_a_value_that_lives_elsewhere_agrees_with_any(agree, plan):
    remote = RemoteArray(jax.ShapeDtypeStruct((3,), jnp.float32), plan.nodes[1].work.takes[0].placement, MESH)
    assert agree(plan, facts(w=remote), facts(w=W), facts(w=remote)) == ""
    assert "the value of w: process 1: " in agree(plan, facts(w=remote), facts(w=W), facts(w=W + 1))


def test_items_that_are_not_read_are_told(agree, plan, caplog):
    with caplog.at_level(logging.WARNING, "shardc"):
        assert agree(plan, facts(first=[W]), facts(first=[W]), facts(first=[W])) == ""
        assert not caplog.records
        assert agree(plan, facts(first=[W]), facts(first=[W + 1]), facts(first=[W])) == ""
    (record,) = caplog.records
    assert "process 0 reads the inputs. Those of process 1 begin with another item, and are not read." in record.message


def test_all_arrays_that_a_run_begins_with_have_names(plan):
    assert values_of_state(plan, [W], {"a channel": [(W, W)], "returned 0": [W]}).keys() == {
        "state", "pending a channel, message 0, leaf 0", "pending a channel, message 0, leaf 1",
        "pending returned 0, message 0, leaf 0",
    }  # fmt: skip
    seed = jnp.arange(3.0)
    add = shardc.function(lambda w: w + seed, mesh=MESH)
    held = shardc.shared(W, on=MESH)

    @shardc.flow
    def train(w):
        return add(w), {"s": held.change(lambda s, g: s + g, add(w)), "late": add(shardc.late(add(w), 1, first=W))}

    named = values_of_nodes(train.plan(W), [held])
    assert {name.partition(" 0")[0] for name in named} >= {"captured array", "leaf", "first="}
    held.changes = 1
    assert not any("shared" in name for name in values_of_nodes(train.plan(W), [held]))


def test_a_function_of_a_flow_may_close_over_arrays():
    seed = np.full(3, 2, np.float32)
    add = shardc.function(lambda w: w + seed, mesh=MESH)

    @shardc.flow
    def train(w, k):
        return add(w), None

    state, _ = train.run(W, range(3))
    np.testing.assert_array_equal(state, W + 6)
