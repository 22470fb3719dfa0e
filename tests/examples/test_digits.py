"""The main job on real input: finds planted labels, draws what it found, and survives being killed."""

from __future__ import annotations

import contextlib
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from forked import start_script

from trak_lite import cli

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
SMALL = ("--epochs", "5", "--proj-dim", "128", "--show", "2")
KILLED = """
import os, runpy, sys
os.environ["TRAK_LITE_FAILPOINT"] = {moment!r}
sys.path.insert(0, os.path.dirname({script!r}))
runpy.run_path({script!r}, run_name="__main__")
"""


def run(out: Path, moment: str = "") -> tuple[int, str]:
    """Run the script, killed at a moment; return its exit status and what it printed."""
    script, printed = out.with_suffix(".py"), out.with_suffix(".txt")  # outside its folder
    script.write_text(KILLED.format(moment=moment, script=str(DIGITS)))
    process = start_script(script, "--out", str(out), *SMALL, output=printed)
    process.join()
    return process.exitcode, printed.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run: its folder and what it printed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    status, printed = run(out)
    assert status == 0, printed
    return out, printed


def test_flipped_labels_are_found_and_every_target_is_explained_and_drawn(whole):
    import matplotlib.image

    out, printed = whole
    line = next(line for line in printed.splitlines() if "flipped labels" in line)
    assert float(line.split("self-influence ")[1].split(",")[0]) > 0.9
    assert "loss of the final model" in line
    explanations = (out / "explanations.txt").read_text()
    assert explanations.count("most helpful") == explanations.count("most harmful") == 297
    assert len(list((out / "checkpoints").glob("*.safetensors"))) == 5
    assert "row/s" in printed
    assert np.load(out / "scores.npy").shape == (1500, 297)
    picture = matplotlib.image.imread(out / "gallery.png")
    assert picture.shape[1] > 1000
    assert picture[..., :3].std() > 0.1


def test_the_config_finds_what_the_script_has_made(whole, tmp_path, capsys):
    out = tmp_path / "runs" / "digits"
    shutil.copytree(whole[0], out)
    config = DIGITS.parents[1] / "configs" / "digits.yaml"
    with contextlib.chdir(tmp_path):  # the paths of the config are those of the script
        assert cli.main(["run", str(config), "--proj_dim=128", "--recipe_arguments.epochs=5"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("featurized: 0 rows written, 7500 found")
    assert "proj_dim=128" in said
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in whole[0].iterdir())


def test_killed_at_five_moments_it_ends_with_bitwise_the_same_scores(whole, tmp_path):
    reference, out = whole[0], tmp_path / "run"
    for moment in (
        "folder_built:1",
        "rows_written:1",
        "rows_recorded:2",
        "chunk_published:1",
        "table_listed:1",
    ):
        assert run(out, moment)[0] == -signal.SIGKILL, moment
    assert run(out)[0] == 0
    np.testing.assert_array_equal(np.load(out / "scores.npy"), np.load(reference / "scores.npy"))
    assert (out / "explanations.txt").read_text() == (reference / "explanations.txt").read_text()
