"""No test of threads may hang: what blocks is run in a thread of its own and given so many seconds."""

import threading


def within(seconds, fn, *args):
    """`fn(*args)`, or what it raises; fails if it is not back in time."""
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


def actor_threads():
    """The threads of executors."""
    return [t for t in threading.enumerate() if ": actor" in t.name]
