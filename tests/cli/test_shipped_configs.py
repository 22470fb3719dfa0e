"""The configs that come with the source do their whole job, made small by the overrides that anyone can pass."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from trak_lite import Attributor, cli
from trak_lite.cli.recipes import Recipe, load_recipe
from trak_lite.evaluation import auc

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
SMALL = {
    "digits": {"epochs": 5, "num_checkpoints": 2},
    "stdlib_lm": {
        "num_train": 24,
        "num_targets": 6,
        "width": 8,
        "layers": 1,
        "steps": 4,
        "num_checkpoints": 2,
    },
    "cifar10": {"source": "stand-in", "width": 8, "epochs": 2, "num_checkpoints": 2, "num_targets": 4},
    "gpt2_wikitext": {"source": "stand-in", "length": 12, "epochs": 1, "num_targets": 4},
}
SHAPES = {"digits": (1500, 297), "stdlib_lm": (24, 6), "cifar10": (48, 4), "gpt2_wikitext": (24, 4)}
NAMES = {"digits": "held-out", "stdlib_lm": "held-out", "cifar10": "test", "gpt2_wikitext": "validation"}


def run(name: str, folder: Path) -> tuple[Recipe, Attributor]:
    """Run a config; return its recipe, and its store opened with a model of the recipe's."""
    options = {f"recipe_arguments.{key}": value for key, value in SMALL[name].items()}
    options |= {"path": folder / "run.zarr", "checkpoints": folder / "trained", "proj_dim": 128}
    arguments = [f"--{key}={value}" for key, value in options.items()]
    assert cli.main(["run", str(ROOT / "configs" / f"{name}.yaml"), *arguments]) == 0
    recipe = load_recipe(RECIPES / f"{name}.py")
    return recipe, Attributor.open(folder / "run.zarr", recipe.call("build_model", SMALL[name]))


@pytest.mark.parametrize("name", ["stdlib_lm", "cifar10", "gpt2_wikitext"])
def test_a_config_gives_scores_of_its_shape_and_renders_its_rows(name: str, tmp_path: Path) -> None:
    if name == "gpt2_wikitext":
        pytest.importorskip("transformers")
    recipe, attributor = run(name, tmp_path)

    scores = attributor.scores(NAMES[name])
    assert scores.shape == SHAPES[name]
    assert scores.numpy().any(axis=0).all()
    for function, rows in (("render", SHAPES[name][0]), ("render_target", SHAPES[name][1])):
        render = recipe.bound(function, SMALL[name])
        assert render is not None
        first, last = render(0), render(rows - 1)
        assert np.shape(first) == np.shape(last)
        assert not np.array_equal(first, last)


def test_the_digits_config_finds_the_labels_that_were_flipped(tmp_path: Path) -> None:
    recipe, attributor = run("digits", tmp_path)
    flipped = recipe.functions["train_data"].__globals__["load_data"](0)[2]

    assert auc(attributor.scores("held-out").self_influence(), flipped) > 0.9
    render = recipe.bound("render", {})
    assert render is not None
    assert render(0).shape == (8, 8)


def test_the_language_models_rows_are_the_librarys_source(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPES / "stdlib_lm.py")
    (tmp_path / "source").mkdir()
    for module in recipe.functions["train"].__globals__["MODULES"].split():
        (tmp_path / "source" / f"{module}.py").write_text(f"# {module} ".ljust(256, "x"))
    arguments = {"folder": str(tmp_path / "source"), "num_train": 30, "num_targets": 10}

    render = recipe.bound("render", arguments)
    assert render is not None
    texts = [render(row).partition("\n") for row in range(30)]
    for title, _, text in texts:
        module, place = title.split(".py, byte ")
        assert text == f"# {module} ".ljust(256, "x")[int(place) : int(place) + 128]
    assert recipe.call("train_data", arguments)[0][0].tolist() == list(texts[0][2].encode())


@pytest.mark.parametrize(
    ("name", "module"), [("cifar10", "torchvision.datasets"), ("gpt2_wikitext", "transformers")]
)
def test_what_a_config_lacks_is_named_in_one_line(
    name: str,
    module: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    arguments = [f"--path={tmp_path}/run.zarr", f"--checkpoints={tmp_path}/trained"]

    assert cli.main(["run", str(ROOT / "configs" / f"{name}.yaml"), *arguments]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert f"{module.partition('.')[0]}" in line
    assert "Install what it imports" in line


def test_an_unknown_source_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["run", str(ROOT / "configs" / "cifar10.yaml"), "--recipe_arguments.source=stand-on"]) == 2
    )

    said = "source must be Literal['torchvision', 'stand-in'], got 'stand-on'."
    assert said in capsys.readouterr().err
