"""From what a user passes as task to a model output function, and to a fingerprint."""

import functools
import json
import subprocess
import sys

import pytest
import torch
from modelout_cases import mean_of_squares
from torch import nn

from trak_lite.errors import InvalidInputError, UnknownTaskError
from trak_lite.modelout_functions import (
    MODEL_OUTPUTS,
    TASK_TO_MODELOUT,
    AbstractModelOutput,
    CallableModelOutput,
    CausalLanguageModelingModelOutput,
    CLIPModelOutput,
    ImageClassificationModelOutput,
    TextClassificationModelOutput,
    describe_task,
    resolve_task,
)


class Own(AbstractModelOutput):
    def evaluate(self, model_call, batch):
        raise NotImplementedError


class NeedsWidth(Own):
    def __init__(self, width, *rest, **options) -> None:
        self.width = width


class ForeignTask:
    """As if derived from the original package's class."""

    def get_output(self):
        raise NotImplementedError


def test_every_name_resolves_to_its_class():
    assert TASK_TO_MODELOUT is MODEL_OUTPUTS
    for name, cls in MODEL_OUTPUTS.items():
        assert type(resolve_task(name)) is cls
        assert cls.name == name


def test_an_instance_resolves_to_itself_and_a_class_to_an_instance():
    task = Own()

    assert resolve_task(task) is task
    assert type(resolve_task(Own)) is Own
    assert type(resolve_task(ImageClassificationModelOutput)) is ImageClassificationModelOutput


def test_a_function_becomes_a_task():
    task = resolve_task(mean_of_squares)

    assert isinstance(task, CallableModelOutput)
    assert task.function is mean_of_squares


@pytest.mark.parametrize(
    ("task", "seen"),
    [
        ("image_clasification", "Did you mean 'image_classification'.*Known names"),
        ("?", "Known names: .*'binary_classification'"),
        (nn.Linear(1, 1), "is a torch.nn.modules.linear.Linear.*model goes into its own argument"),
        (nn.Linear, "is the class torch.nn.modules.linear.Linear.*model goes into its own argument"),
        (3, "is a builtins.int"),
        (None, "is a builtins.NoneType"),
        (AbstractModelOutput, "is the class .*AbstractModelOutput"),
        (AbstractModelOutput(), "is a .*AbstractModelOutput"),
        (ForeignTask(), "Derive it from trak_lite.modelout_functions.AbstractModelOutput"),
        (ForeignTask, "Derive it from trak_lite.modelout_functions.AbstractModelOutput"),
        (NeedsWidth, r"needs the arguments \['width'\]. Pass an instance"),
        (CallableModelOutput, r"needs the arguments \['function'\]"),
    ],
)
def test_anything_else_is_an_unknown_task(task, seen):
    with pytest.raises(UnknownTaskError, match=seen):
        resolve_task(task)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ImageClassificationModelOutput(), ImageClassificationModelOutput(2.0)),
        (TextClassificationModelOutput(), TextClassificationModelOutput(input_names=("input_ids",))),
        (CausalLanguageModelingModelOutput(), CausalLanguageModelingModelOutput(shift=False)),
        (CausalLanguageModelingModelOutput(), CausalLanguageModelingModelOutput(output="log_prob")),
        (CLIPModelOutput(), CLIPModelOutput(seed=1)),
        (CLIPModelOutput(), CLIPModelOutput(simulated_batch_size=3)),
        (CLIPModelOutput(), CLIPModelOutput(1.0)),
    ],
)
def test_settings_that_change_numbers_change_the_description(one, other):
    assert describe_task(one) != describe_task(other)


def test_a_built_in_is_described_by_name_version_and_settings():
    assert describe_task(ImageClassificationModelOutput()) == {
        "name": "image_classification",
        "version": 1,
        "settings": {"temperature": 1.0},
    }


def from_text(text: str, name: str):
    """Define something without source, as at a prompt."""
    scope = {"AbstractModelOutput": AbstractModelOutput, "__name__": "prompt"}
    exec(text, scope)
    return scope[name]


CLASS = """
class Task(AbstractModelOutput):
    def evaluate(self, model_call, batch):
        return model_call(batch) * {factor}
    @staticmethod
    def helper(x):
        return x in {{{members}}}
    @property
    def width(self):
        return {factor}
"""


def test_a_users_class_is_described_by_name_source_and_settings():
    described = describe_task(Own())

    assert described["class"] == "test_modelout_registry.Own"
    assert len(described["source"]) == 64
    assert described["settings"] == {}
    assert describe_task(NeedsWidth(3))["source"] != described["source"]


def test_a_users_base_class_is_part_of_the_description():
    def derived(factor):
        base = from_text(CLASS.format(factor=factor, members="1"), "Task")
        return type("Derived", (base,), {})()

    assert describe_task(derived(1))["source"] != describe_task(derived(2))["source"]


def test_a_class_without_source_is_described_by_what_it_compiles_to():
    def source(**values):
        return describe_task(from_text(CLASS.format(**values), "Task")())["source"]

    assert source(factor=2, members="1") == source(factor=2, members="1")
    assert source(factor=2, members="1") != source(factor=3, members="1")
    assert source(factor=2, members="1") != source(factor=2, members="5")


def test_a_function_without_source_is_described_by_what_it_compiles_to():
    def source(factor):
        function = from_text(f"def f(call, batch):\n    return (lambda x: x * {factor})(call(batch))", "f")
        return describe_task(CallableModelOutput(function))["function"]

    assert source(2) == source(2)
    assert source(2) != source(3)


def test_a_description_without_source_is_the_same_in_another_process():
    """Sets of strings have another order in every process."""
    program = (
        "from trak_lite.modelout_functions import *\n"
        "scope = {'__name__': 'prompt'}\n"
        'exec(\'def f(call, batch):\\n    return call in {"a", "b", "c", "d", "e"}\', scope)\n'
        "print(describe_task(CallableModelOutput(scope['f']))['function']['source'])\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }

    assert len(found) == 1


def test_only_a_task_that_holds_tensors_has_a_state_digest():
    clip = CLIPModelOutput(simulated_batch_size=1)
    clip.set_embeddings(torch.ones(1, 2), torch.ones(1, 2))

    assert len(clip.state_digest()) == 64
    assert Own().state_digest() is None


def scaled(factor):
    def output(model_call, batch):
        return factor * model_call(batch[0])[:, 0]

    return output


def powered(model_call, batch, power=2, *, weights=None):
    return model_call(batch[0])[:, 0] ** power


class Scaler:
    def __call__(self, model_call, batch):
        return model_call(batch[0])[:, 0]

    def output(self, model_call, batch):
        return model_call(batch[0])[:, 1]


def describe(function):
    described = describe_task(CallableModelOutput(function))
    json.dumps(described, allow_nan=False)
    return described["function"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (scaled(1), scaled(2)),
        (scaled(1.0), scaled(float("inf"))),
        (scaled(torch.ones(2)), scaled(torch.zeros(2))),
        (scaled([1, {"a": 2}]), scaled([1, {"a": 3}])),
        (scaled(scaled(1)), scaled(scaled(2))),
        (scaled(len), scaled(Scaler())),
        (powered, mean_of_squares),
        (functools.partial(powered, power=2), functools.partial(powered, power=3)),
        (functools.partial(powered, "model_call"), functools.partial(powered, "other")),
        (Scaler(), Scaler().output),
        (max, min),
    ],
)
def test_values_that_a_function_carries_are_part_of_its_description(one, other):
    assert describe(one) == describe(one)
    assert describe(one) != describe(other)


def test_a_function_is_described_by_name_source_and_values():
    described = describe(powered)

    assert described["callable"] == "test_modelout_registry.powered"
    assert described["values"] == {"power": 2, "weights": None}
    assert len(described["source"]) == 64


def test_a_function_that_holds_itself_has_a_description():
    def output(model_call, batch):
        return output(model_call, batch)

    assert describe(output) == describe(output)


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, torch.ones(1)])
def test_settings_that_are_no_json_are_refused(value):
    class Odd(Own):
        def settings(self):
            return {"value": value}

    with pytest.raises(InvalidInputError, match=r"Odd.settings.. returned .*Expected JSON values"):
        describe_task(Odd())
