"""From what a user passes as task to a model output function, and to a fingerprint."""

import collections
import functools
import json
import operator
import pathlib
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from carried_values import Color, Frozen, Heavier, Options, Point, Slotted, Tags, Weighted
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
    resolve_task,
)
from trak_lite.modelout_functions._describe import describe_task


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
        (nn.Linear(1, 1), "is a torch.nn.modules.linear.Linear.*Pass the model as the argument `model`"),
        (nn.Linear, "is the class torch.nn.modules.linear.Linear.*Pass the model as the argument `model`"),
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
        (CausalLanguageModelingModelOutput(), CausalLanguageModelingModelOutput(output="margin")),
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
    """Sets of strings have another order in every process, and objects another address."""
    program = (
        "import enum, functools, torch\n"
        "from trak_lite.modelout_functions import CallableModelOutput\n"
        "from trak_lite.modelout_functions._describe import describe_task\n"
        "class Held:\n"
        "    def __init__(self): self.names, self.act = {'a', 'b', 'c', 'd', 'e'}, torch.nn.Tanh()\n"
        "    def output(self, call, batch): return self.names\n"
        "scope = {'__name__': 'prompt'}\n"
        'exec(\'def f(call, batch, *held):\\n    return call in {"a", "b", "c", "d", "e"}\', scope)\n'
        "held = [Held(), Held().output, lambda: Held, frozenset({'a', 'b', 'c'}), torch.ones(2), object()]\n"
        "print(describe_task(CallableModelOutput(functools.partial(scope['f'], *held))))\n"
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


def test_a_task_has_nothing_to_prepare_by_default():
    task, model = Own(), nn.Linear(2, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    assert task.prepare(model) is None
    assert vars(task) == {}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


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


def decorated(factor):
    @functools.wraps(powered)
    def wrapper(model_call, batch):
        return factor * powered(model_call, batch)

    return wrapper


def with_attribute(value):
    output = scaled(1)
    output.weight = value
    return output


def own_task(factor):
    class Task(Own):
        def evaluate(self, model_call, batch):
            return factor

    return Task()


def network(fill=1.0, *, train=False, **settings):
    layers = nn.Sequential(nn.Linear(2, 2), nn.Dropout(**settings), nn.BatchNorm1d(2))
    nn.init.constant_(layers[0].weight, fill)
    nn.init.zeros_(layers[0].bias)
    return layers.train(train)


CONTENT = {
    "NumPy array": lambda: (np.array([1, 2]), np.array([1, 3])),
    "array shape": lambda: (np.zeros((2, 3)), np.zeros((3, 2))),
    "array dtype": lambda: (np.zeros(2, "<f4"), np.zeros(1, "<f8")),
    "fields of a structured array": lambda: (np.zeros(1, [("a", "<i4")]), np.zeros(1, [("b", "<i4")])),
    "objects in an array": lambda: (np.array([Options(1.0)]), np.array([Options(2.0)])),
    "masked array": lambda: (np.ma.masked_equal([1, 2], 1), np.ma.masked_equal([1, 2], 2)),
    "NumPy scalar": lambda: (np.float32(1), np.float32(2)),
    "type of a NumPy scalar": lambda: (np.float32(1), np.float64(1)),
    "NumPy generator": lambda: (np.random.default_rng(0), np.random.default_rng(1)),
    "tensor": lambda: (torch.ones(2), torch.zeros(2)),
    "tensor dtype": lambda: (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "tensor shape": lambda: (torch.zeros(2, 3), torch.zeros(3, 2)),
    "conjugate": lambda: (torch.tensor([1j]), torch.tensor([1j]).conj()),
    "parameter": lambda: (nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))),
    "torch dtype": lambda: (torch.float32, torch.float64),
    "truth value": lambda: (True, 1),
    "number type": lambda: (1, 1.0),
    "sign of zero": lambda: (0.0, -0.0),
    "not a number": lambda: (float("nan"), "nan"),
    "complex": lambda: (1j, 2j),
    "bytes": lambda: (b"a", b"b"),
    "list or tuple": lambda: ([1, 2], (1, 2)),
    "deep list": lambda: ([[[[[[1]]]]]], [[[[[[2]]]]]]),
    "dict key": lambda: ({1: 0}, {"1": 0}),
    "dict order": lambda: ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "counter": lambda: (collections.Counter("a"), collections.Counter("b")),
    "default of a dict": lambda: (collections.defaultdict(list), collections.defaultdict(set)),
    "deque": lambda: (collections.deque([1]), collections.deque([2])),
    "set": lambda: ({1, 2}, {1, 3}),
    "subclass of set": lambda: ({1}, Tags({1})),
    "named tuple": lambda: (Point(1, 2), Point(1, 3)),
    "enumeration": lambda: (Color.RED, Color.BLUE),
    "pattern": lambda: (re.compile("a"), re.compile("b")),
    "path": lambda: (pathlib.PurePosixPath("a"), pathlib.PurePosixPath("b")),
    "range": lambda: (range(2), range(3)),
    "dataclass": lambda: (Options(1.0), Options(2.0)),
    "dataclass that holds an array": lambda: (Options(1.0, np.zeros(1)), Options(1.0, np.ones(1))),
    "frozen dataclass": lambda: (Frozen(1.0), Frozen(2.0)),
    "object": lambda: (Weighted(1), Weighted([1])),
    "class of an object": lambda: (Weighted(1), Heavier(1)),
    "slots": lambda: (Slotted(1), Slotted(2)),
    "task": lambda: (ImageClassificationModelOutput(1.0), ImageClassificationModelOutput(2.0)),
    "task of a function": lambda: (CallableModelOutput(scaled(1)), CallableModelOutput(scaled(2))),
    "class": lambda: (Weighted, Heavier),
    "Python module": lambda: (json, functools),
    "weights of a network": lambda: (network(1.0), network(2.0)),
    "settings of a network": lambda: (network(p=0.1), network(p=0.2)),
    "mode of a network": lambda: (network(train=True), network(train=False)),
    "layers of a network": lambda: (nn.Tanh(), nn.ReLU()),
    "torch function": lambda: (torch.nn.functional.gelu, torch.nn.functional.relu),
    "method of a built-in object": lambda: ("a".join, "b".join),
    "cached function": lambda: (functools.lru_cache(scaled(1)), functools.lru_cache(scaled(2))),
    "item getter": lambda: (operator.itemgetter(0), operator.itemgetter(1)),
}


@pytest.mark.parametrize("values", CONTENT.values(), ids=CONTENT)
@pytest.mark.parametrize(
    "carrier",
    [
        scaled,
        lambda value: functools.partial(powered, weights=value),
        lambda value: functools.partial(powered, value),
        lambda value: Weighted(value),
        lambda value: Weighted(value).output,
        lambda value: functools.partial(functools.partial(decorated(value), power=2), value),
    ],
    ids=["closure", "keyword", "argument", "callable object", "bound method", "chain"],
)
def test_a_carried_value_counts_by_its_content(carrier, values):
    """The same content made twice is the same task; other content is another one."""
    one, other = values()
    again, _ = values()

    described = describe(carrier(one))
    assert described == describe(carrier(again))
    assert described != describe(carrier(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda call, batch: call(batch[0])[:, 0], lambda call, batch: call(batch[0])[:, 1]),
        (lambda call, batch: call(batch[0]).amin(1), lambda call, batch: call(batch[0]).amax(1)),
        (lambda call, batch, power=1: power, lambda call, batch, *, power=1: power),
        (decorated(1), decorated(2)),
        (decorated(1), powered),
        (with_attribute(1), with_attribute(2)),
        (with_attribute(1), scaled(1)),
        (Weighted.of_class, Heavier.of_class),
    ],
)
def test_functions_alike_in_name_and_source_are_told_apart(one, other):
    assert describe(one) == describe(one)
    assert describe(one) != describe(other)


def test_defaults_are_those_of_the_function_and_not_of_what_it_wraps():
    assert describe(decorated(3))["values"]["factor"] == 3
    assert "power" not in describe(decorated(3))["values"]


def test_tasks_of_a_factory_are_told_apart():
    assert describe_task(own_task(1)) == describe_task(own_task(1))
    assert describe_task(own_task(1)) != describe_task(own_task(2))


def test_a_plain_attribute_of_a_class_made_at_run_time_counts():
    one, other = (type("Derived", (Own,), {"scale": scale})() for scale in (1, 2))

    assert describe_task(one) != describe_task(other)


def test_a_property_and_a_cached_property_of_a_class_count():
    def task(factor):
        members = {
            "width": property(lambda self: factor),
            "height": functools.cached_property(lambda self: factor),
        }
        return [type("Derived", (Own,), {name: member})() for name, member in members.items()]

    for one, other in zip(task(1), task(2), strict=True):
        assert describe_task(one) != describe_task(other)


def test_a_class_with_super_has_a_description():
    class Task(Own):
        def settings(self):
            return super().settings()

    assert describe_task(Task()) == describe_task(Task())


def test_a_class_that_carries_a_lock_is_described_without_it():
    """For a class, settings() say what matters."""
    assert describe_task(own_task(threading.Lock())) == describe_task(own_task(threading.Lock()))


def test_an_object_that_holds_itself_has_a_description():
    one, other = [1], [2]
    one.append(one)
    other.append(other)

    assert describe(scaled(one)) != describe(scaled(other))


def test_a_variable_that_has_no_value_yet_has_a_description():
    def output(model_call, batch):
        return later

    described = describe(output)
    later = 1

    assert described != describe(output)
    assert later == 1


def test_long_content_becomes_a_digest():
    described = describe(scaled(list(range(10_000))))

    assert len(json.dumps(described)) < 500
    assert described != describe(scaled([*range(9_999), 0]))


def nested(levels):
    return functools.reduce(lambda inner, _: [inner], range(levels), 1)


@pytest.mark.parametrize(
    ("function", "seen"),
    [
        (scaled(threading.Lock()), "captures factor, a _thread.lock"),
        (scaled({"a": [threading.Lock()]}), r"captures factor\['a'\]\[0\], a _thread.lock"),
        (scaled(x for x in "ab"), "captures factor, a builtins.generator"),
        (scaled(torch.ones(1).to_sparse()), "captures factor, a torch.Tensor.*no plain values"),
        (scaled(torch.ones(1, device="meta")), "captures factor, a torch.Tensor.*no plain values"),
        (scaled(nested(40)), r"captures factor\[0\].*, a builtins.list.*nested in more than 32 objects"),
        (Weighted(threading.Lock()), "captures function.weight, a _thread.lock"),
        (Weighted(threading.Lock()).output, "captures function.__self__.weight, a _thread.lock"),
        (functools.partial(powered, weights=threading.Lock()), "captures weights, a _thread.lock"),
        (with_attribute(threading.Lock()), "captures function.weight, a _thread.lock"),
    ],
)
def test_what_cannot_be_described_is_refused_by_its_name(function, seen):
    with pytest.raises(InvalidInputError, match=seen + r".*AbstractModelOutput, and return .*settings\(\)"):
        describe(function)


def test_an_open_file_is_refused(tmp_path):
    with (tmp_path / "weights").open("w") as file, pytest.raises(InvalidInputError, match="TextIOWrapper"):
        describe(scaled(file))


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
