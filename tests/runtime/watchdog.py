"""A time limit for tests of threads: a call that may block runs in a thread of its own."""

import threading


def within(seconds, fn, *args):
    """The result of `fn(*args)`, or its error; fails if it does not return in time."""
    outcome = []

    def call():
        try:
            outcome.append((fn(*args), None))
        except BaseException as error:  # noqa: BLE001 - raised below
            outcome.append((None, error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"still running after {seconds} s"
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


OTHERS = set()
"""The threads that were there when the tests of this file began: functions of other files may still be alive."""


def actor_threads():
    """The threads of executors that tests of this file have made."""
    return [t for t in threading.enumerate() if ": actor" in t.name and t not in OTHERS]
