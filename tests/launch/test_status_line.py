"""The live line of a run."""

import json

from shardc.launch.status_line import status_text


def test_one_line():
    said = {
        0: json.dumps({"step": 12, "loss": 3.2, "tokens": 5300.0, "waits": "process 1"}),
        1: json.dumps({"step": 13, "waits": None}),
        2: "",
    }
    assert status_text(said) == "step 12 | loss 3.20 | 5,300 tokens/s | process 0 waits for process 1"


def test_nothing_is_said():
    assert status_text({}) == status_text({0: "", 1: "{}"}) == ""


def test_the_lowest_process_that_knows():
    assert status_text({1: json.dumps({"loss": 1.0}), 0: json.dumps({"step": 3})}) == "step 3 | loss 1.00"


def test_a_status_that_failed_is_shown():
    said = {0: json.dumps({"step": 3}), 1: "TypeError: no number"}
    assert status_text(said) == "step 3 | process 1: TypeError: no number"
