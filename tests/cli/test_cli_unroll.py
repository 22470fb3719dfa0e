"""The command ``unroll``: the scores of the functions that it calls, resumed, and its refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cli_cases import RECIPE, refused, write_case

from trak_lite import cli
from trak_lite.cli.recipes import load_recipe
from trak_lite.unrolled import unrolled

TRAINING = """

def row_losses(model, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels, reduction="none")


def training(*, num_train: int = 40, width: int = 4):
    from trak_lite.unrolled import SGD, Recipe

    data = train_data(num_train)
    return Recipe(lambda seed: build_model(width), row_losses, data, SGD(lr=0.5), batch_size=10, epochs=2)
"""


def test_unroll_trains_replays_and_finds_its_scores_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_case(tmp_path, recipe=RECIPE + TRAINING, more="unroll:\n  block: 4\n")
    assert cli.main(["unroll", config]) == 0
    out = capsys.readouterr().out
    assert "40 train rows x 6 targets" in out
    assert "target 0, most helpful rows: " in out

    recipe = load_recipe(tmp_path / "recipe.py")
    run = recipe.functions["training"]().train(tmp_path / "run.run")
    stored = unrolled(run, recipe.call("target_data", {}), "image_classification", name="held-out", block=4)
    apart = unrolled(
        recipe.functions["training"]().train(),
        recipe.call("target_data", {}),
        "image_classification",
        block=4,
    )
    assert stored.stored
    np.testing.assert_array_equal(stored.numpy(), apart.numpy())

    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run.run").rglob("*") if path.is_file()}
    assert cli.main(["unroll", config]) == 0
    assert capsys.readouterr().out == out
    again = {path: path.stat().st_mtime_ns for path in (tmp_path / "run.run").rglob("*") if path.is_file()}
    assert {path.name for path in again} == {path.name for path in files}
    assert all(again[path] == files[path] for path in files if path.suffix == ".safetensors")


def test_unroll_uses_the_task_of_the_targets_and_has_no_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_case(tmp_path, recipe=RECIPE + TRAINING)

    assert "Unknown task 'nonsense'" in refused(["unroll", config, "--score.task", "nonsense"], capsys)
    for option in ("--where", "--by"):
        assert f"unknown key {option[2:]!r}" in refused(["unroll", config, option, "source=web"], capsys)


def test_a_recipe_without_a_training_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(["unroll", write_case(tmp_path)], capsys)
    assert "needs a function training() that returns a trak_lite.unrolled.Recipe, and defines none" in message
    wrong = RECIPE + "\n\ndef training():\n    return 3\n"
    message = refused(["unroll", write_case(tmp_path, recipe=wrong)], capsys)
    assert "got int" in message
