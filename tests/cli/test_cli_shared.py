"""``trak-lite featurize CONFIG``, started several times at once on one store."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from cli_cases import RECIPE, write_case
from forked import start_script

from trak_lite import cli
from trak_lite.store import ZarrFeatureStore, check_store

PROCESSES, ROWS = 3, 1024  # four chunks of the smallest size
MEETING = (
    RECIPE
    + '''

class Meeting(torch.utils.data.Dataset):
    """Who has a chunk waits, before the first row of its second batch, until so many others have one.

    A process without a chunk loads only rows of first batches: of a new table, or rows that are done, to compare them.
    """

    def __init__(self, rows, folder, others):
        self.rows, self.folder, self.others = rows, folder, others

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        import os, pathlib, time
        if index % 256 == 32:
            folder = pathlib.Path(self.folder)
            (folder / f"here-{os.getpid()}").touch()
            end = time.monotonic() + 500
            while len(list(folder.glob("here-*"))) <= self.others:
                assert time.monotonic() < end, "the others did not come"
                time.sleep(0.01)
        return self.rows[index]


def train_data(folder: str, others: int = 0):
    return Meeting(data(1024, 1), folder, others)
'''
)
MORE = "train_data: {batch_size: 32, name: rows}\nrecipe_arguments: {folder: FOLDER}\n"
SCRIPT = "import sys\nfrom trak_lite.cli import main\n\nsys.exit(main(sys.argv[1:]))\n"


def features(folder: Path) -> np.ndarray:
    with ZarrFeatureStore.open(folder / "run.zarr") as store:
        return store.open_table("ckpt-0").read("features")


@pytest.fixture
def configs(tmp_path: Path) -> dict[str, str]:
    """A config for a store of its own, by the folder's name."""
    found = {}
    for name in ("shared", "alone"):
        (tmp_path / name).mkdir()
        more = MORE.replace("FOLDER", str(tmp_path / name))
        found[name] = write_case(tmp_path / name, recipe=MEETING, more=more)
    return found


def test_commands_on_one_store_share_the_rows(
    tmp_path: Path, configs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of them does a part, no row is done twice, and the features have the bits of one command."""
    script = tmp_path / "command.py"
    script.write_text(SCRIPT)
    arguments = ["featurize", configs["shared"], "--checkpoints", "null"]
    arguments += ["--recipe_arguments.others", str(PROCESSES - 1)]
    said = [tmp_path / f"said-{number}.txt" for number in range(PROCESSES)]

    processes = [start_script(script, *arguments, output=output) for output in said]
    for process in processes:
        process.join(600)
        process.kill()  # one that waits for ever must not keep the others waiting

    assert [process.exitcode for process in processes] == [0] * PROCESSES, said[0].read_text()[-2000:]
    written = [int(re.search(r"featurized: (\d+) rows written", output.read_text())[1]) for output in said]
    assert sum(written) == ROWS
    assert min(written) > 0
    assert cli.main(["featurize", configs["alone"], "--checkpoints", "null"]) == 0
    assert f"{ROWS} rows written, 0 found" in capsys.readouterr().out
    np.testing.assert_array_equal(features(tmp_path / "shared"), features(tmp_path / "alone"))
    assert check_store(tmp_path / "shared" / "run.zarr").findings == ()
