"""Ctrl-C: what is on disk is told and stays, and the same command goes on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cli_cases import RECIPE, write_case

from trak_lite import Attributor, cli
from trak_lite.cli.recipes import load_recipe

INTERRUPTING = (
    RECIPE
    + '''

class Interrupting(torch.utils.data.Dataset):
    """Sends the signal of Ctrl-C when row 20 is loaded for featurizing, once."""

    def __init__(self, rows, flag):
        self.rows, self.flag, self.loads = rows, flag, 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        import os, signal
        self.loads += index == 20
        if self.loads == 2 and os.path.exists(self.flag):  # the first time it is the digest
            os.remove(self.flag)
            os.kill(os.getpid(), signal.SIGINT)
        return self.rows[index]


def train_data(num_train: int = 40, flag: str = ""):
    return Interrupting(data(num_train, 1), flag)


def train(indices, seed):
    return build_model().state_dict()
'''
)
MORE = "train_data: {batch_size: 8}\n"


@pytest.fixture(autouse=True)
def _sigint_is_ctrl_c() -> Iterator[None]:
    """Shells start background jobs with SIGINT ignored, and Python leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def scores(folder: Path) -> np.ndarray:
    model = load_recipe(folder / "recipe.py").call("build_model", {})
    return Attributor.open(folder / "run.zarr", model).scores("held-out").numpy()


def test_an_interrupted_run_says_what_is_safe_and_goes_on_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    assert cli.main(["run", write_case(tmp_path / "whole", recipe=INTERRUPTING, more=MORE)]) == 0
    flag = tmp_path / "flag"
    flag.touch()
    command = ["run", write_case(tmp_path / "broken", recipe=INTERRUPTING, more=MORE)]
    command.append(f"--recipe_arguments.flag={flag}")
    capsys.readouterr()

    assert cli.main(command) == 130
    said = capsys.readouterr().err
    assert "interrupted. The same command continues at the first missing row." in said
    assert f"Stored in {tmp_path}/broken/run.zarr:\n  ckpt-0  16 of 40 rows done" in said
    assert f"To continue: trak-lite {' '.join(command)}\n" in said

    assert cli.main(command) == 0
    assert "featurized: 24 rows written, 16 found" in capsys.readouterr().out
    np.testing.assert_array_equal(scores(tmp_path / "broken"), scores(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("where", "said"),
    [("def target_data():", "Stored in"), ("def build_model(width: int = 4):", "Nothing was written to")],
)
def test_an_interrupt_in_the_recipe_is_told_as_well(
    where: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = RECIPE.replace(where, f"{where}\n    raise KeyboardInterrupt\n")

    assert cli.main(["run", write_case(tmp_path, recipe=recipe)]) == 130
    assert said in capsys.readouterr().err


def test_an_interrupt_before_anything_was_begun_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", write_case(tmp_path, recipe="raise KeyboardInterrupt")]) == 130

    assert capsys.readouterr().err == "\ntrak-lite: interrupted before the command started.\n"
