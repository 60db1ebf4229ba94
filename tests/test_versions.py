"""Releases of JAX that are too old or too new."""

import re
import warnings
from pathlib import Path

import pytest

from shardc.versions import NEWEST, OLDEST, check_jax

LOCKS = Path(__file__).parent.parent / "locks"


def test_an_old_jax_is_an_error():
    with pytest.raises(ImportError) as info:
        check_jax("0.9.1")
    assert str(info.value) == (
        'shardc needs jax 0.10 or newer, and this is jax 0.9.1; install a newer one: pip install --upgrade "jax>=0.10"'
    )


def test_a_jax_that_nobody_has_tested_is_a_warning():
    with pytest.warns(UserWarning, match=re.escape(f"tested with jax {OLDEST}.2 to {NEWEST}, and this is jax 0.99.0")):
        check_jax("0.99.0.dev20270101+cpu")


@pytest.mark.parametrize("version", ["0.10.0", "0.10.2", "0.11.1", NEWEST, "0.12.0.dev3"])
def test_tested_releases_say_nothing(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_jax(version)


def test_the_range_is_that_of_the_locks():
    locked = {m[1] for f in LOCKS.glob("*.txt") if (m := re.search(r"^jax==(.*)$", f.read_text(), re.MULTILINE))}
    assert locked == {NEWEST, f"{OLDEST}.2"}
