"""The configs that come with the source do their whole job, made small by the overrides that anyone can pass."""

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_cases import refused

from trak_lite import Attributor, cli
from trak_lite.evaluation import auc

ROOT = Path(__file__).parents[2]
LM = {"num_train": 24, "num_targets": 6, "width": 8, "layers": 1, "steps": 4, "num_checkpoints": 2}
CIFAR = {"source": "stand-in", "width": 8, "epochs": 2, "num_checkpoints": 2, "num_targets": 4}
GPT2 = {"source": "stand-in", "length": 12, "epochs": 1, "num_targets": 4}
SMALL: dict[str, tuple[dict[str, Any], tuple[int, int], str]] = {
    "digits": ({"epochs": 12, "num_checkpoints": 1}, (500, 20), "held-out"),
    "stdlib_lm": (LM, (24, 6), "held-out"),
    "cifar10": (CIFAR, (48, 4), "test"),
    "gpt2_wikitext": (GPT2, (24, 4), "validation"),
}
"""Arguments of the recipe, shape of the scores, and their name."""


def recipe_of(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / "recipes" / f"{name}.py"))


def arguments_of(function: Any, given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key in function.__code__.co_varnames}


def run(name: str, folder: Path, **more: Any) -> tuple[dict[str, Any], Attributor]:
    """Run a config; return its recipe, and its store opened with a model of the recipe's."""
    given, recipe = SMALL[name][0], recipe_of(name)
    options = {f"recipe_arguments.{key}": value for key, value in given.items()}
    options |= {"path": folder / "run.zarr", "checkpoints": folder / "trained", "proj_dim": 128, **more}
    arguments = [f"--{key}={value}" for key, value in options.items()]
    assert cli.main(["run", str(ROOT / "configs" / f"{name}.yaml"), *arguments]) == 0
    build = recipe["build_model"]
    return recipe, Attributor.open(folder / "run.zarr", build(**arguments_of(build, given)))


@pytest.mark.parametrize("name", ["stdlib_lm", "cifar10", "gpt2_wikitext"])
def test_a_config_gives_scores_of_its_shape_and_renders_its_rows(name, tmp_path):
    if name == "gpt2_wikitext":
        pytest.importorskip("transformers")
    recipe, attributor = run(name, tmp_path)
    given, shape, scored = SMALL[name]
    scores = attributor.scores(scored)
    assert scores.shape == shape
    assert scores.numpy().any(axis=0).all()
    for function, rows in zip(("render", "render_target"), shape, strict=True):
        render = recipe[function]
        first, last = (render(row, **arguments_of(render, given)) for row in (0, rows - 1))
        assert np.shape(first) == np.shape(last)
        assert not np.array_equal(first, last)


def test_the_digits_config_finds_the_labels_that_were_flipped(tmp_path):
    some = {f"{part}_data.indices": [*range(count)] for part, count in (("train", 500), ("target", 20))}
    recipe, attributor = run("digits", tmp_path, **some)
    flipped, scores = recipe["load_data"](0)[2], attributor.scores("held-out")
    assert scores.shape == (500, 20)
    assert auc(scores.self_influence(), flipped[:500]) > 0.9
    assert recipe["render"](0).shape == (8, 8)


def test_the_language_models_rows_are_the_librarys_source(tmp_path):
    recipe = recipe_of("stdlib_lm")
    for module in recipe["MODULES"].split():
        (tmp_path / f"{module}.py").write_text(f"# {module} ".ljust(256, "x"))
    arguments = {"folder": str(tmp_path), "num_train": 30, "num_targets": 10}
    texts = [recipe["render"](row, **arguments).partition("\n") for row in range(30)]
    for title, _, text in texts:
        module, place = title.split(".py, byte ")
        assert text == f"# {module} ".ljust(256, "x")[int(place) : int(place) + 128]
    assert recipe["train_data"](**arguments)[0][0].tolist() == list(texts[0][2].encode())


def test_what_a_config_lacks_is_named_in_one_line(tmp_path, monkeypatch, capsys):
    for name, module in (("cifar10", "torchvision.datasets"), ("gpt2_wikitext", "transformers")):
        monkeypatch.setitem(sys.modules, module, None)
        arguments = [f"--path={tmp_path}/run.zarr", f"--checkpoints={tmp_path}/trained"]
        line = refused(["run", str(ROOT / "configs" / f"{name}.yaml"), *arguments], capsys)
        assert module.partition(".")[0] in line
        assert "Install what it imports" in line
    source = "--recipe_arguments.source=stand-on"
    said = "source must be 'torchvision' or 'stand-in', got 'stand-on'."
    assert said in refused(["run", str(ROOT / "configs" / "cifar10.yaml"), source], capsys)
