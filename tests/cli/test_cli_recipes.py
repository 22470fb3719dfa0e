"""Recipes: which files are refused, and what their functions are given."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_cases import RECIPE
from torch import nn

from trak_lite.cli.recipes import Recipe, last_trained, load_recipe, trained_states
from trak_lite.errors import InvalidInputError
from trak_lite.run.sources import describe_source


def recipe(folder: Path, text: str = RECIPE) -> Recipe:
    (folder / "recipe.py").write_text(text)
    return load_recipe(folder / "recipe.py")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            RECIPE.replace("def train_data", "def data_of_train"),
            r"defines no function train_data\(\)\. Expected",
        ),
        (
            "train_data = target_data = build_model = 1",
            r"defines no function build_model\(\), train_data\(\)",
        ),
        (RECIPE + "\nrender = 'text'\n", r"defines no function render\(\)"),
        ("x = 1\ndef broken(:\n", r"cannot be executed: line 2: .*Correct it"),
        ("import no_such_package\n", "No module named 'no_such_package'. Correct it, or install"),
        (
            RECIPE + "\ndef render_target(index, width: int = 9): ...\n",
            r"'width' of render_target\(\) has another type or default than in another",
        ),
    ],
)
def test_a_recipe_that_cannot_be_used_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=said):
        recipe(tmp_path, text).keys()


def test_a_recipe_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"There is no recipe at .*nothing\.py .*Name a Python file"):
        load_recipe(tmp_path / "nothing.py")


def test_an_error_of_the_recipes_own_is_left_to_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        recipe(tmp_path, "1 / 0")


def test_what_is_passed_by_the_program_is_no_key(tmp_path: Path) -> None:
    found = recipe(tmp_path).keys()
    keys = {key.name: key for key in found}

    assert list(keys) == [f"recipe_arguments.{name}" for name in ("width", "num_train", "steps")]
    assert keys["recipe_arguments.width"].help == "Of its hidden layer."


def test_variables_with_the_names_of_functions_of_serve_are_no_functions(tmp_path: Path) -> None:
    found = recipe(
        tmp_path, RECIPE + "\ntokens = [1]\ndef sample(text, scale: float = 2.0):\n    return scale\n"
    )

    assert "tokens" not in found.functions
    names = {key.name for key in Recipe.keys(found)}
    assert {name for name in names if "scale" in name or "text" in name} == {"recipe_arguments.scale"}


def test_arguments_that_only_python_can_say_keep_their_defaults(tmp_path: Path) -> None:
    text = RECIPE.replace(
        "width: int = 4):",
        "width: int = 4, where: str = __import__('pathlib').Path(), make: type = nn.Linear,\n"
        "                clip: __import__('trak_lite').Normalization = None):",
    )
    found = recipe(tmp_path, text)

    names = {key.argument for key in found.keys()}  # noqa: SIM118  # a recipe is no dict
    assert names == {"width", "num_train", "steps"}
    assert found.call("build_model", {"width": 2})[0].out_features == 2


def test_every_function_gets_those_arguments_that_it_takes(tmp_path: Path) -> None:
    found = recipe(tmp_path)
    arguments = {"width": 3, "num_train": 7, "steps": 1}

    assert found.call("build_model", arguments)[0].out_features == 3
    assert len(found.call("train_data", arguments)) == 7
    train = found.bound("train", arguments)
    assert train is not None
    assert train.keywords == {"width": 3, "num_train": 7, "steps": 1}
    assert found.bound("render_target", arguments) is None


def test_a_package_that_a_function_lacks_is_named(tmp_path: Path) -> None:
    text = RECIPE.replace("return data(6, 2)", "import no_such_package")

    with pytest.raises(InvalidInputError, match=r"target_data\(\) .*No module named 'no_such_package'"):
        recipe(tmp_path, text).call("target_data", {})


def test_modules_beside_a_recipe_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "beside_the_recipe.py").write_text("WIDTH = 5\n")
    path = list(sys.path)
    try:
        found = recipe(tmp_path, RECIPE + "\nfrom beside_the_recipe import WIDTH\n")
    finally:
        sys.path[:] = path

    assert found.functions["build_model"].__globals__["WIDTH"] == 5


def test_a_module_a_state_dict_and_a_generator_are_checkpoints() -> None:
    model = nn.Linear(2, 1)
    weight = model.weight.detach().clone()

    def run() -> Any:
        for _ in range(2):
            yield model.state_dict()
            with torch.no_grad():
                model.weight.add_(1)

    first, second = trained_states(run())
    assert torch.equal(first["weight"], weight)
    assert torch.equal(second["weight"], weight + 1)
    assert [sorted(state) for form in (model, model.state_dict()) for state in trained_states(form)] == [
        ["bias", "weight"]
    ] * 2


@pytest.mark.parametrize("form", [3, "weights", torch.ones(2), [3]])
def test_other_results_of_training_are_refused(form: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"train\(\) returned (int|str|Tensor)\. Expected a module"):
        list(trained_states(form))


def test_the_final_weights_are_the_last_that_training_gives() -> None:
    states = [{"w": torch.tensor([float(i)])} for i in range(3)]

    assert last_trained(lambda rows, seed: states, np.arange(2), 0)["w"].item() == 2
    with pytest.raises(InvalidInputError, match="returned no weights"):
        last_trained(lambda rows, seed: [], np.arange(2), 0)


def test_a_training_is_recognised_by_its_source_and_all_values(tmp_path: Path) -> None:
    text = RECIPE.replace("steps: int = 3", "steps: int = 3, sizes: list[int] = ()")

    def described(**arguments: Any) -> Any:
        return describe_source(partial(last_trained, recipe(tmp_path, text).bound("train", arguments)))

    assert described(sizes=[1, 2]) == described(sizes=[1, 2])
    assert described(sizes=[1, 2]) != described(sizes=[1, 3])
    assert described(steps=1) != described(steps=2)
