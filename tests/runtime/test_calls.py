"""Calls that several processes make together: the error if they differ."""

import pytest

from shardc.errors import DisagreementError
from shardc.runtime.calls import (
    call_text,
    calls_of,
    members_of,
    members_text,
    processes_text,
    refuse_other_calls,
    refuse_unlike,
)


def test_processes_in_few_characters():
    assert members_text([0, 1]) == "0,1" and members_text([0, 1, 2, 5, 7, 8, 9, 10]) == "0-2,5,7-10"
    assert all(members_of(members_text(ps)) == ps for ps in ([3], [0, 1], [0, 1, 2, 5, 7, 8, 9, 10]))


def test_all_that_differs_is_in_one_error():
    refuse_unlike("step", range(2), [{"plan": "1f", "jax": "0.12"}] * 2)
    facts = [
        {"plan": "1f", "jax": "0.12", "batch": "float32[8]"},
        {"plan": "1f", "jax": "0.11", "batch": "float32[8]", "x64": "on"},
        {"plan": "2e", "jax": "0.12", "batch": "float32[8]"},
    ]
    with pytest.raises(DisagreementError) as error:
        refuse_unlike("train_step", range(3), facts)
    assert str(error.value) == (
        "train_step: the processes of this run differ in\n"
        "  plan: processes 0, 1: 1f; process 2: 2e\n"
        "  jax: processes 0, 2: 0.12; process 1: 0.11\n"
        "  x64: processes 0, 2: nothing; process 1: on"
    )


def test_another_call_or_another_plan_is_an_error_and_other_facts_are_none():
    texts = {0: call_text("step, call 3", {"x": "1"}, "digest a"), 2: call_text("step, call 3", {"x": "2"}, "digest a")}
    refuse_other_calls("step, call 3", texts)
    with pytest.raises(DisagreementError, match="the call: processes 0, 2: step, call 3; process 4: save"):
        refuse_other_calls("step, call 3", {**texts, 4: call_text("save", {}, "digest a")})
    with pytest.raises(DisagreementError, match="the plan: process 0: digest a; process 1: digest b"):
        refuse_other_calls("step", {0: call_text("step", {}, "digest a"), 1: call_text("step", {}, "digest b")})


def test_names():
    assert calls_of(range(4)) == "calls of 0-3"
    assert (processes_text([1]), processes_text([0, 2])) == ("process 1", "processes 0, 2")
