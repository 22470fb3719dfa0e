"""A training or a replay that is killed anywhere continues to the same bits."""

import signal

import numpy as np
import pytest
from forked import forkserver
from killed_runs import files, whole

pytestmark = pytest.mark.filterwarnings("ignore:The training has metasmoothness")

KILLS = 12


def killed(path, fatal):
    """Return whether the process died at the event (and did not get to the end)."""
    process = forkserver().Process(target=whole, args=(str(path), fatal))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def test_kills_at_random_moments_end_in_the_same_bits(tmp_path):
    scores = whole(tmp_path / "undisturbed")
    expected = files(tmp_path / "undisturbed")
    rng = np.random.default_rng(0)
    deaths = finished = 0

    while deaths < KILLS:
        path = tmp_path / f"killed-{finished}"
        while killed(path, int(rng.integers(1, 70))):
            deaths += 1
        finished += 1

        assert files(path) == expected
        assert whole(path) == scores
        assert not list((path / "replays").glob("*"))


def test_a_second_call_continues_and_does_not_train_again(tmp_path, monkeypatch):
    from trak_lite.unrolled import TrainingRun

    whole(tmp_path)
    steps = []
    step = TrainingRun.step
    monkeypatch.setattr(TrainingRun, "step", lambda run, *args: steps.append(args[1]) or step(run, *args))

    whole(tmp_path)

    assert steps == []
