"""The main job on real input: finds planted labels, draws what it found, and survives being killed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import pytest
from forked import start_script

from trak_lite import cli

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
SMALL = ("--epochs", "5", "--proj-dim", "128", "--show", "2")


def start(out: Path) -> tuple[ForkServerProcess, Path]:
    """Start a run; return its process and the file of what it prints, which is outside its folder."""
    printed = out.with_suffix(".txt")
    return start_script(DIGITS, "--out", str(out), *SMALL, output=printed), printed


def finish(out: Path) -> str:
    """Run it to its end; return what it printed."""
    process, printed = start(out)
    process.join()
    text = printed.read_text(encoding="utf-8")
    assert process.exitcode == 0, text
    return text


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An undisturbed run: its folder and what it printed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, finish(out)


def test_flipped_labels_are_found_and_every_target_is_explained(whole: tuple[Path, str]) -> None:
    out, printed = whole

    line = next(line for line in printed.splitlines() if "flipped labels" in line)
    assert float(line.split("self-influence ")[1].split(",")[0]) > 0.9
    assert "loss of the final model" in line
    explanations = (out / "explanations.txt").read_text()
    assert explanations.count("most helpful") == explanations.count("most harmful") == 297
    assert len(list((out / "checkpoints").glob("*.safetensors"))) == 5
    assert "row/s" in printed
    assert np.load(out / "scores.npy").shape == (1500, 297)


def test_the_gallery_is_a_picture_of_targets_and_rows(whole: tuple[Path, str]) -> None:
    import matplotlib.image

    picture = matplotlib.image.imread(whole[0] / "gallery.png")

    assert picture.shape[1] > 1000
    assert picture[..., :3].std() > 0.1


def test_the_config_finds_what_the_script_has_made(
    whole: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs" / "digits"
    shutil.copytree(whole[0], out)
    config = DIGITS.parents[1] / "configs" / "digits.yaml"
    with contextlib.chdir(tmp_path):  # the paths of the config are those of the script
        assert cli.main(["run", str(config), "--proj_dim=128", "--recipe_arguments.epochs=5"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("featurized: 0 rows written, 7500 found")
    assert "proj_dim=128" in said
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in whole[0].iterdir())


def bytes_in(folder: Path) -> int:
    """Bytes of all files that are there at this moment; the measure of how far a run has come."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # renamed while we look
                total += os.stat(os.path.join(place, name)).st_size
    return total


def run_until(out: Path, size: int) -> bool:
    """Start a run and kill it when its folder holds so many bytes; return whether it was killed."""
    process, _ = start(out)
    while process.is_alive() and bytes_in(out) < size:
        time.sleep(0.001)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def test_killed_at_five_random_moments_it_ends_with_bitwise_the_same_scores(
    whole: tuple[Path, str], tmp_path: Path
) -> None:
    (reference, _), out = whole, tmp_path / "run"
    rng = random.Random(20)
    moments = sorted(rng.uniform(0.01, 0.95) for _ in range(5))

    killed = [run_until(out, int(moment * bytes_in(reference))) for moment in moments]
    finish(out)

    assert killed == [True] * 5, moments
    np.testing.assert_array_equal(
        np.load(out / "scores.npy"), np.load(reference / "scores.npy"), err_msg=str(moments)
    )
    assert (out / "explanations.txt").read_text() == (reference / "explanations.txt").read_text()
