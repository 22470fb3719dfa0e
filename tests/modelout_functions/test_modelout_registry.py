"""From what a user passes as task to a model output function, and to what tells its rows from those of another task.

``identity_of`` is what stored targets are recognised by: the same task made twice has the same one.
"""

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
from modelout_cases import identity_of, mean_of_squares
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, methods, projectors, unrolled
from trak_lite import modelout_functions as tasks
from trak_lite.errors import InvalidInputError, ManifestMismatchError
from trak_lite.modelout_functions._describe import name_of
from trak_lite.store import open_store


class Own(tasks.AbstractModelOutput):
    def evaluate(self, model_call, batch):
        raise NotImplementedError


class Wide(Own):
    def __init__(self, width):
        self.width = width


def test_every_name_resolves_to_its_class():
    assert tasks.TASK_TO_MODELOUT is tasks.MODEL_OUTPUTS
    for name, cls in tasks.MODEL_OUTPUTS.items():
        assert type(tasks.resolve_task(name)) is cls
        assert cls.name == name


def test_instances_classes_and_functions_resolve_to_tasks():
    task, made = Own(), tasks.resolve_task(mean_of_squares)
    assert tasks.resolve_task(task) is task
    assert type(tasks.resolve_task(Own)) is Own
    assert type(made) is tasks.CallableModelOutput
    assert made.function is mean_of_squares


def test_a_task_has_no_state_and_nothing_to_prepare_by_default():
    task, model = Own(), nn.Linear(2, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert task.prepare(model) is None
    assert (task.state_digest(), task.settings(), vars(task)) == (None, {}, {})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


CHANGES = {
    "image_classification": [{"temperature": 2.0}],
    "text_classification": [{"input_names": ("input_ids",)}],
    "causal_language_modeling": [{"shift": False}, {"output": "margin"}],
    "clip": [{"seed": 1}, {"simulated_batch_size": 3}, {"temperature": 1.0}],
    "dpo": [{"beta": 0.2}],
    "policy_gradient": [{"clip": 0.2}, {"clip": (0.2, 0.3)}, {"kl_weight": 0.1}, {"reduction": "mean"},
                        {"temperature": 0.7}, {"kl_correction": True}],
    "diffusion": [{"schedule": "cosine"}, {"prediction": "v_prediction"}, {"draws": 2}, {"num_steps": 100}],
    "contrastive": [{"similarity": "dot"}, {"pooling": "last"}, {"temperature": 1.0}],
    "dense_classification": [{"class_axis": -1}, {"ignore_index": 255}, {"upsample": True}],
    "sequence_to_sequence": [{"pad_token_id": 0}],
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_settings_that_change_numbers_change_the_identity(name):
    cls = tasks.MODEL_OUTPUTS[name]
    made = [identity_of(cls(**settings)) for settings in ({}, *CHANGES[name])]
    assert made == [identity_of(cls(**settings)) for settings in ({}, *CHANGES[name])]
    assert len({json.dumps(identity) for identity in made}) == len(made)


def stored_task(task, path):
    """What a store notes of the task of its rows."""
    attributor = Attributor(nn.Linear(2, 2), task, path, proj_dim=4, progress=False)
    attributor.featurize(TensorDataset(torch.ones(2, 2), torch.zeros(2, dtype=torch.int64)))
    with open_store(path) as store:
        return store.manifest.fingerprint["task"]


def powered(model_call, batch, power=2, *, weights=None):
    return model_call(batch[0])[:, 0] ** power


def test_a_store_notes_names_settings_and_values_of_its_task_in_few_words(tmp_path):
    assert stored_task("image_classification", tmp_path / "a.zarr") == {
        "name": "image_classification",
        "version": 1,
        "settings": {"temperature": 1.0},
    }
    noted = stored_task(powered, tmp_path / "b.zarr")["function"]
    assert noted["callable"] == "test_modelout_registry.powered"
    assert noted["values"] == {"power": 2, "weights": None}
    assert len(noted["source"]) == 64
    long = stored_task(scaled([1.0, float("inf"), *range(10_000)]), tmp_path / "c.zarr")
    assert len(json.dumps(long, allow_nan=False)) < 700
    with pytest.raises(ManifestMismatchError, match="task"):
        stored_task(scaled([1.0, float("inf"), *range(9_999), 0]), tmp_path / "c.zarr")


def from_text(text, name):
    """Define something without source, as at a prompt."""
    scope = {"AbstractModelOutput": tasks.AbstractModelOutput, "__name__": "prompt"}
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


def prompted(factor, members="1", *, derived=False):
    cls = from_text(CLASS.format(factor=factor, members=members), "Task")
    return (type("Derived", (cls,), {}) if derived else cls)()


def prompted_function(factor):
    return from_text(f"def f(call, batch):\n    return (lambda x: x * {factor})(call(batch))", "f")


def own_task(factor):
    class Task(Own):
        def evaluate(self, model_call, batch):
            return factor

        def settings(self):
            return super().settings()

    return Task()


def with_member(name, member):
    return type("Derived", (Own,), {name: member})()


def scaled(factor):
    def output(model_call, batch):
        first = factor[0] if isinstance(factor, list) else factor
        return first * model_call(batch[0])[:, 0]

    return output


def decorated(factor):
    @functools.wraps(powered)
    def wrapper(model_call, batch):
        return factor * powered(model_call, batch)

    return wrapper


def with_attribute(value):
    output = scaled(1)
    output.weight = value
    return output


def recursive(factor):
    def output(model_call, batch):
        return output(model_call, batch) * factor

    return output


def own_list(first):
    held = [first]
    held.append(held)
    return held


PAIRS = {
    "class": lambda: (Own(), Wide(3)),
    "class without source": lambda: (prompted(2), prompted(3)),
    "constants of a static method": lambda: (prompted(2), prompted(2, "5")),
    "base class": lambda: (prompted(1, derived=True), prompted(2, derived=True)),
    "class of a factory": lambda: (own_task(1), own_task(2)),
    "attribute of a class": lambda: (with_member("scale", 1), with_member("scale", 2)),
    "property": lambda: (with_member("width", property(scaled(1))), with_member("width", property(scaled(2)))),
    "cached property": lambda: (
        with_member("width", functools.cached_property(scaled(1))),
        with_member("width", functools.cached_property(scaled(2))),
    ),
    "function without source": lambda: (prompted_function(2), prompted_function(3)),
    "functions": lambda: (powered, mean_of_squares),
    "built-in functions": lambda: (max, min),
    "method of an object": lambda: (Weighted(1), Weighted(1).output),
    "class method": lambda: (Weighted.of_class, Heavier.of_class),
    "lambdas of one line": lambda: (
        lambda call, batch: call(batch[0])[:, 0],
        lambda call, batch: call(batch[0])[:, 1],
    ),
    "names in lambdas": lambda: (
        lambda call, batch: call(batch[0]).amin(1),
        lambda call, batch: call(batch[0]).amax(1),
    ),
    "form of arguments": lambda: (lambda call, batch, power=1: power, lambda call, batch, *, power=1: power),
    "wrapper": lambda: (decorated(1), decorated(2)),
    "wrapper or wrapped": lambda: (decorated(1), powered),
    "attribute of a function": lambda: (with_attribute(1), with_attribute(2)),
    "no attribute": lambda: (with_attribute(1), scaled(1)),
    "function that holds itself": lambda: (recursive(1), recursive(2)),
    "object that holds itself": lambda: (scaled(own_list(1)), scaled(own_list(2))),
    "end of a long list": lambda: (scaled([*range(9_999), 0]), scaled([*range(9_999), 1])),
    "function or object": lambda: (scaled(len), scaled(Weighted(1))),
}  # fmt: skip


@pytest.mark.parametrize("make", PAIRS.values(), ids=PAIRS)
def test_other_code_is_another_task(make):
    (one, other), (again, _) = make(), make()
    assert identity_of(one) == identity_of(again) != identity_of(other)


def test_a_variable_that_has_no_value_yet_is_told_from_its_value():
    def output(model_call, batch):
        return later

    before = identity_of(output)
    later = 1

    assert before != identity_of(output)
    assert later == 1


def test_a_class_that_carries_a_lock_is_described_without_it():
    """For a class, settings() say what matters."""
    assert identity_of(own_task(threading.Lock())) == identity_of(own_task(threading.Lock()))


@pytest.mark.parametrize(
    ("held", "stored"),
    [
        (unrolled.Recipe, "unrolled.recipe.Recipe"),
        (methods.EKFAC, "methods.ekfac.EKFAC"),
        (methods.GradDot, "methods.grad_dot.GradDot"),
        (projectors.MaskProjector, "projectors.mask.projectors.MaskProjector"),
        (projectors.FastJLProjector, "projectors.dense.fast_jl.FastJLProjector"),
        (tasks.CLIPModelOutput, "modelout_functions.clip.CLIPModelOutput"),
        (tasks.DPOModelOutput, "modelout_functions.preferences.DPOModelOutput"),
        (tasks.MultiLabelModelOutput, "modelout_functions.binary.MultiLabelModelOutput"),
        (
            tasks.TextClassificationModelOutput,
            "modelout_functions.classification.TextClassificationModelOutput",
        ),
        (projectors.NoOpProjector, "projectors.identity.NoOpProjector"),
        (tasks.reference_columns, "modelout_functions.preferences.reference_columns"),
    ],
)
def test_a_description_holds_the_name_that_stores_have(held, stored):
    """The classes stand in other modules than when descriptions with their names were first stored."""
    assert name_of(held) == f"trak_lite.{stored}"


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
    "infinity": lambda: (1.0, float("inf")),
    "sign of zero": lambda: (0.0, -0.0),
    "not a number": lambda: (float("nan"), "nan"),
    "complex": lambda: (1j, 2j),
    "bytes": lambda: (b"a", b"b"),
    "list or tuple": lambda: ([1, 2], (1, 2)),
    "deep list": lambda: ([[[[[[1]]]]]], [[[[[[2]]]]]]),
    "dict key": lambda: ({1: 0}, {"1": 0}),
    "dict order": lambda: ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "dict in a list": lambda: ([1, {"a": 2}], [1, {"a": 3}]),
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
    "task": lambda: (tasks.RegressionModelOutput(), tasks.RegressionModelOutput(output="neg_squared_error")),
    "task of a function": lambda: (tasks.CallableModelOutput(scaled(1)), tasks.CallableModelOutput(scaled(2))),
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
}  # fmt: skip
CARRIERS = {
    "closure": scaled,
    "keyword": lambda value: functools.partial(powered, weights=value),
    "argument": lambda value: functools.partial(powered, value),
    "callable object": Weighted,
    "bound method": lambda value: Weighted(value).output,
    "chain": lambda value: functools.partial(functools.partial(decorated(value), power=2), value),
    "function in a function": lambda value: scaled(scaled(value)),
}


@pytest.mark.parametrize("values", CONTENT.values(), ids=CONTENT)
@pytest.mark.parametrize("carrier", CARRIERS.values(), ids=CARRIERS)
def test_a_carried_value_counts_by_its_content(carrier, values):
    """The same content made twice is the same task; other content is another one."""
    (one, other), (again, _) = values(), values()
    assert identity_of(carrier(one)) == identity_of(carrier(again)) != identity_of(carrier(other))


def test_identities_are_the_same_in_another_process():
    """Sets of strings have another order in every process, and objects another address."""
    program = (
        "import functools, torch\n"
        "from modelout_cases import identity_of\n"
        "class Held:\n"
        "    def __init__(self): self.names, self.act = {'a', 'b', 'c', 'd', 'e'}, torch.nn.Tanh()\n"
        "    def output(self, call, batch): return self.names\n"
        "scope = {'__name__': 'prompt'}\n"
        'exec(\'def f(call, batch, *held):\\n    return call in {"a", "b", "c", "d", "e"}\', scope)\n'
        "held = [Held(), Held().output, lambda: Held, frozenset({'a', 'b', 'c'}), torch.ones(2), object()]\n"
        "print(identity_of(functools.partial(scope['f'], *held)))\n"
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


LOCK, NO_VALUES = threading.Lock(), "captures factor, a torch.Tensor.*no plain values"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (scaled(LOCK), "captures factor, a _thread.lock"),
        (scaled({"a": [LOCK]}), r"captures factor\['a'\]\[0\], a _thread.lock"),
        (scaled(x for x in "ab"), "captures factor, a builtins.generator"),
        (scaled(torch.ones(1).to_sparse()), NO_VALUES),
        (scaled(torch.ones(1, device="meta")), NO_VALUES),
        (scaled(functools.reduce(lambda inner, _: [inner], range(40), 1)),
         r"captures factor\[0\].*, a builtins.list.*nested in more than 32 objects"),
        (scaled(sys.__stdout__), "TextIOWrapper"),
        (Weighted(LOCK), "captures function.weight, a _thread.lock"),
        (Weighted(LOCK).output, "captures function.__self__.weight, a _thread.lock"),
        (functools.partial(powered, weights=LOCK), "captures weights, a _thread.lock"),
        (with_attribute(LOCK), "captures function.weight, a _thread.lock"),
    ],
)  # fmt: skip
def test_what_cannot_be_described_is_refused_by_its_name(function, message):
    with pytest.raises(
        InvalidInputError, match=message + r".*AbstractModelOutput, and return .*settings\(\)"
    ):
        identity_of(function)


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, torch.ones(1)])
def test_settings_that_are_no_json_are_refused(value):
    class Odd(Own):
        def settings(self):
            return {"value": value}

    with pytest.raises(InvalidInputError, match=r"Odd.settings.. returned .*Expected JSON values"):
        identity_of(Odd())
