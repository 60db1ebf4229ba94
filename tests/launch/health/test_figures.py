"""The figures of a run, from the signs of life of its processes."""

import json
import random

import pytest

from shardc.launch.health.figures import RunHealth


def test_ages_count_from_the_last_change():
    health = RunHealth(100.0)

    def look(now, **said):
        return health.look(now, {0: (json.dumps({"epoch": 0, **said}), 0.0)} if said else {}, 0, 2, 1)[0]

    assert look(101.0).last_step_age is None
    found = look(102.0, step=3, loss=0.5, tokens=7.0)
    assert (found.step, found.loss, found.tokens_per_second, found.last_step_age) == (3, 0.5, 7.0, 0.0)
    assert (found.checkpoint, found.last_checkpoint_age, found.processes, found.restarts) == (None, None, 2, 1)
    found = look(109.0, step=3, saved=2)
    assert (found.last_step_age, found.checkpoint, found.last_checkpoint_age) == (7.0, 2, 0.0)
    found = look(111.0)  # the process is away
    assert (found.step, found.last_step_age, found.checkpoint) == (3, 9.0, 2)
    assert look(112.0, step=2, saved=2).last_step_age == 0.0  # it went on from the checkpoint
    assert look(113.0, step=4, saved=2).last_checkpoint_age == 4.0


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("seconds, life", [(0.04, (60, 200)), (0.7, (60, 200)), (0.05, (4, 8))])
def test_goodput_is_that_of_a_log_of_all_steps(every, seconds, life):
    """Twenty kills: signs of life come once a second, and the last one before a kill says less than the log."""
    chance = random.Random(f"{every} {seconds} {life}")
    health, now, epoch, done, log = RunHealth(0.0), 0.0, 0, 0, []
    for kill in range(21):
        now += chance.uniform(2, 6)  # it starts, restores and compiles
        until, clock = now + chance.uniform(*life), chance.uniform(0, 1e6)
        steps, beat = [], now + chance.random()
        while now < until:
            while now > beat:
                said = (
                    {"epoch": epoch, "steps": [steps[0], steps[-1]], "step": steps[-1][0]}
                    if steps
                    else {"epoch": epoch}
                )
                health.look(beat, {0: (json.dumps(said), 0.0)}, epoch, 1, kill)
                beat += 1
            now += seconds * chance.uniform(0.5, 1.5)
            done += 1
            steps.append((done, now + clock))
        log.append(steps)
        if kill < 20:
            epoch, done = epoch + 1, done // every * every
            health.goodput.begin(epoch)
    true, kept = 0.0, float("inf")
    for steps in reversed(log):
        counted = [at for step, at in steps if step < kept]
        true += counted[-1] - counted[0] if counted else 0.0
        kept = min(kept, steps[0][0])
    assert health.goodput.losses == 20
    assert health.goodput.seconds() == pytest.approx(true, rel=0.03)
    assert health.goodput.share(now) == pytest.approx(true / now, rel=0.03)
    assert sum(map(len, health.goodput._seen.values())) <= 21 * 1000
