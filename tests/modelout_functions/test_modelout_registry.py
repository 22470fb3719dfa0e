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
import types

import numpy as np
import pytest
import torch
from carried_values import Color, Frozen, Heavier, Options, Point, Slotted, Tags, Weighted
from modelout_cases import identity_of, mean_of_squares
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, methods, projectors, unrolled
from trak_lite import modelout_functions as tasks
from trak_lite.errors import InvalidInputError, ManifestMismatchError, UnknownTaskError
from trak_lite.store import open_store


class Own(tasks.AbstractModelOutput):
    def evaluate(self, model_call, batch):
        raise NotImplementedError


class Wide(Own):
    def __init__(self, width):
        self.width = width


def test_names_instances_classes_and_functions_resolve_to_tasks():
    assert tasks.TASK_TO_MODELOUT is tasks.MODEL_OUTPUTS
    for name, cls in tasks.MODEL_OUTPUTS.items():
        assert type(tasks.resolve_task(name)) is cls
        assert cls.name == ("image_classification" if name == "classification" else name)
    task, made = Own(), tasks.resolve_task(mean_of_squares)
    assert tasks.resolve_task(task) is task
    assert type(tasks.resolve_task(Own)) is Own
    assert type(made) is tasks.CallableModelOutput
    assert made.function is mean_of_squares


@pytest.mark.parametrize("entry", [Wide(3), functools.partial(Wide, 3), lambda: Wide(3)])
def test_a_users_own_name_is_that_of_an_instance_or_of_a_class_with_its_arguments(entry, monkeypatch):
    monkeypatch.setitem(tasks.MODEL_OUTPUTS, "wide", entry)
    assert tasks.resolve_task("wide").width == 3


def test_a_users_own_name_is_that_of_a_function_or_of_a_class_without_needed_arguments(monkeypatch):
    function = functools.partial(powered, power=3)
    entries = {"own": Own, "wide": Wide, "powered": powered, "partial": function, "network": nn.Linear(2, 1)}
    for name, entry in entries.items():
        monkeypatch.setitem(tasks.MODEL_OUTPUTS, name, entry)
    assert type(tasks.resolve_task("own")) is Own
    assert [tasks.resolve_task(name).function for name in ("powered", "partial")] == [powered, function]
    for name, said in (("wide", r"needs the arguments \['width'\]"), ("network", "is a torch.nn.*Linear")):
        with pytest.raises(UnknownTaskError, match=said):
            tasks.resolve_task(name)


def test_a_name_of_the_package_with_settings_is_opened_with_those_of_the_store(monkeypatch, tmp_path):
    cls, path = tasks.ImageClassificationModelOutput, tmp_path / "a.zarr"
    monkeypatch.setitem(tasks.MODEL_OUTPUTS, cls.name, cls(temperature=2.0))
    assert stored_task(cls.name, path)["settings"] == {"temperature": 2.0}
    for other in (cls(temperature=3.0), functools.partial(cls, temperature=3.0), cls):
        monkeypatch.setitem(tasks.MODEL_OUTPUTS, cls.name, other)
        assert Attributor.open(path, nn.Linear(2, 2)).task.settings() == {"temperature": 2.0}


def test_a_task_has_no_state_and_nothing_to_prepare_by_default():
    task, model = Own(), nn.Linear(2, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert task.prepare(model) is None
    assert (task.state_digest(), task.settings(), vars(task)) == (None, {}, {})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# ---- what a store notes
def stored_task(task, path):
    attributor = Attributor(nn.Linear(2, 2), task, path, proj_dim=4, progress=False)
    attributor.featurize(TensorDataset(torch.ones(2, 2), torch.zeros(2, dtype=torch.int64)))
    with open_store(path) as store:
        return store.manifest.fingerprint["task"]


def powered(model_call, batch, power=2, *, weights=None, **held):
    return model_call(batch[0])[:, 0] ** power


def test_a_store_notes_names_settings_and_values_of_its_task_in_few_words(tmp_path):
    noted = {"name": "image_classification", "version": 1, "settings": {"temperature": 1.0}}
    assert stored_task("image_classification", tmp_path / "a.zarr") == noted
    noted = stored_task(powered, tmp_path / "b.zarr")["function"]
    assert noted["callable"] == "test_modelout_registry.powered"
    assert noted["values"] == {"power": 2, "weights": None}
    assert len(noted["source"]) == 64
    long = stored_task(scaled([1.0, float("inf"), *range(10_000)]), tmp_path / "c.zarr")
    assert len(json.dumps(long, allow_nan=False)) < 700
    with pytest.raises(ManifestMismatchError, match="task"):
        stored_task(scaled([1.0, float("inf"), *range(9_999), 0]), tmp_path / "c.zarr")


def test_classes_that_have_moved_have_the_names_that_stores_have(tmp_path):
    """Their modules are others than when descriptions with their names were first stored."""
    held = {
        "unrolled.recipe.Recipe": unrolled.Recipe,
        "methods.ekfac.EKFAC": methods.EKFAC,
        "methods.grad_dot.GradDot": methods.GradDot,
        "projectors.mask.projectors.MaskProjector": projectors.MaskProjector,
        "projectors.dense.fast_jl.FastJLProjector": projectors.FastJLProjector,
        "projectors.identity.NoOpProjector": projectors.NoOpProjector,
        "modelout_functions.clip.CLIPModelOutput": tasks.CLIPModelOutput,
        "modelout_functions.preferences.DPOModelOutput": tasks.DPOModelOutput,
        "modelout_functions.binary.MultiLabelModelOutput": tasks.MultiLabelModelOutput,
        "modelout_functions.classification.TextClassificationModelOutput": tasks.TextClassificationModelOutput,
        "modelout_functions.preferences.reference_columns": tasks.reference_columns,
    }
    noted = stored_task(functools.partial(powered, **held), tmp_path / "a.zarr")["function"]["keywords"]
    assert {name: one.get("class") or one["callable"] for name, one in noted.items()} == {
        name: f"trak_lite.{name}" for name in held
    }


# ---- tasks and values that are told from each other
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


def network(fill=1.0, *, train=False, **settings):
    layers = nn.Sequential(nn.Linear(2, 2), nn.Dropout(**settings), nn.BatchNorm1d(2))
    nn.init.constant_(layers[0].weight, fill)
    nn.init.zeros_(layers[0].bias)
    return layers.train(train)


SETTINGS = {
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
CARRIERS = {
    "closure": scaled,
    "keyword": lambda value: functools.partial(powered, weights=value),
    "argument": lambda value: functools.partial(powered, value),
    "callable object": Weighted,
    "bound method": lambda value: Weighted(value).output,
    "chain": lambda value: functools.partial(functools.partial(decorated(value), power=2), value),
    "function in a function": lambda value: scaled(scaled(value)),
}


def different_tasks():
    """Classes and functions by source, code, bases, members, closures, defaults and attributes; settings."""
    named = [(tasks.MODEL_OUTPUTS[name], some) for name, some in SETTINGS.items()]
    return [
        *(cls(**settings) for cls, some in named for settings in ({}, *some)),
        Own(), Wide(3), own_task(1), own_task(2), prompted(2), prompted(3), prompted(2, "5"),
        prompted(1, derived=True), prompted(2, derived=True),
        *(with_member("scale", value) for value in (1, 2)),
        *(with_member("width", property(scaled(value))) for value in (1, 2)),
        *(with_member("width", functools.cached_property(scaled(value))) for value in (3, 4)),
        powered, mean_of_squares, max, min, prompted_function(2), prompted_function(3), decorated(1), decorated(2),
        Weighted(1), Weighted(1).output, Weighted.of_class, Heavier.of_class, Heavier(1),
        lambda call, batch: call(batch[0])[:, 0], lambda call, batch: call(batch[0])[:, 1],
        lambda call, batch: call(batch[0]).amin(1), lambda call, batch: call(batch[0]).amax(1),
        lambda call, batch, power=1: power, lambda call, batch, *, power=1: power,
        with_attribute(1), with_attribute(2), recursive(1), recursive(2), scaled(len), scaled(Weighted(1)),
        *(scaled(value) for value in (1, own_list(1), own_list(2), [*range(9_999), 0], [*range(9_999), 1])),
    ]  # fmt: skip


def different_values():
    return [
        None, True, 1, 1.0, float("inf"), float("nan"), "nan", 0.0, -0.0, 1j, 2j, b"a", b"b", range(2), range(3),
        [1, 2], (1, 2), [[[[[[1]]]]]], [[[[[[2]]]]]], {1: 0}, {"1": 0}, {"a": 1, "b": 2}, {"b": 2, "a": 1},
        [1, {"a": 2}], [1, {"a": 3}], {1, 2}, {1, 3}, {1}, Tags({1}), Point(1, 2), Point(1, 3), Color.RED, Color.BLUE,
        *(collections.Counter(letter) for letter in "ab"), *(collections.defaultdict(kind) for kind in (list, set)),
        *(collections.deque([number]) for number in (1, 2)), *(re.compile(text) for text in "ab"),
        *(pathlib.PurePosixPath(text) for text in "ab"), *(text.join for text in "ab"),
        np.array([1, 2]), np.array([1, 3]), np.zeros((2, 3)), np.zeros((3, 2)), np.zeros(2, "<f4"), np.zeros(1, "<f8"),
        *(np.zeros(1, [(name, "<i4")]) for name in "ab"), *(np.array([Options(power)]) for power in (1.0, 2.0)),
        *(np.ma.masked_equal([1, 2], masked) for masked in (1, 2)), np.float32(1), np.float32(2), np.float64(1),
        *(np.random.default_rng(seed) for seed in (0, 1)), torch.ones(2), torch.zeros(2),
        torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3), torch.zeros(3, 2), torch.tensor([1j]),
        torch.tensor([1j]).conj(), nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1)), torch.float32,
        torch.float64, Options(1.0), Options(2.0), Options(1.0, np.zeros(1)), Options(1.0, np.ones(1)), Frozen(1.0),
        Frozen(2.0), Weighted(1), Weighted([1]), Heavier(1), Slotted(1), Slotted(2), Weighted, Heavier, json, functools,
        *(tasks.RegressionModelOutput(output=output) for output in ("prediction", "neg_squared_error")),
        *(tasks.CallableModelOutput(scaled(factor)) for factor in (1, 2)), network(1.0), network(2.0), network(p=0.1),
        network(train=True), nn.Tanh(), nn.ReLU(), torch.nn.functional.gelu, torch.nn.functional.relu,
        *(functools.lru_cache(scaled(factor)) for factor in (1, 2)), *(operator.itemgetter(item) for item in (0, 1)),
    ]  # fmt: skip


@pytest.mark.parametrize("carrier", ["as a task", *CARRIERS])
def test_the_same_made_twice_is_one_task_and_all_others_are_others(carrier):
    carried = CARRIERS.get(carrier, lambda task: task)
    values = different_values if carrier in CARRIERS else different_tasks
    found, again = ([json.dumps(identity_of(carried(value))) for value in values()] for _ in range(2))
    made = collections.defaultdict(list)
    for value, identity, second in zip(values(), found, again, strict=True):
        assert identity == second, value
        made[identity].append(value)
    assert [alike for alike in made.values() if len(alike) > 1] == []


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
    command, paths = [sys.executable, "-c", program], {"PYTHONPATH": ":".join(sys.path)}
    settings = {"capture_output": True, "text": True, "check": True}
    runs = (subprocess.run(command, env={"PYTHONHASHSEED": seed, **paths}, **settings) for seed in "12")
    assert len({run.stdout for run in runs}) == 1


class FrozenDict(collections.OrderedDict):
    """Like that of diffusers, which names the defaults among its entries and attributes, in the order of a set."""

    def __init__(self, *defaults, **entries):
        super().__init__(**entries, _use_default_values=list(defaults))
        vars(self).update(self)


def of_diffusers(*defaults, is_config=True, **entries):
    kind = type("FrozenDict", (FrozenDict,), {"__module__": f"diffusers.{'configuration_utils' * is_config}"})
    return kind(*defaults, **entries)


def test_the_order_in_which_diffusers_names_defaults_is_no_part_of_a_task():
    """It differs between processes. The same name in any other object counts."""
    first = identity_of(scaled(of_diffusers("a", "b", steps=100)))
    assert identity_of(scaled(of_diffusers("b", "a", steps=100))) == first
    assert identity_of(scaled(of_diffusers("a", "b", steps=99))) != first
    others = [of_diffusers("a", "b", is_config=False), of_diffusers("b", "a", is_config=False)]
    others += [{"_use_default_values": names} for names in (["a", "b"], ["b", "a"])]
    assert len({json.dumps(identity_of(scaled(other))) for other in others}) == 4
    model = [identity_of(scaled(Configured(_use_default_values=names))) for names in (["a", "b"], ["b", "a"])]
    assert model[0] == model[1]


@pytest.mark.parametrize("make", [scaled, lambda power: functools.partial(powered, power=power)])
def test_another_captured_value_is_not_said_to_be_a_setting_that_the_store_can_give(make, tmp_path):
    data = TensorDataset(torch.ones(2, 2))

    def featurize(value):
        given = {"proj_dim": 4, "progress": False}
        Attributor(nn.Linear(2, 2), make(value), tmp_path / "a.zarr", **given).featurize(data)

    featurize(1)
    said = r"(factor|power) is 1 there, 2 here\. .* a list that was made from a set.*settings"
    with pytest.raises(ManifestMismatchError, match=said) as raised:
        featurize(2)
    assert "Attributor.open" not in str(raised.value)


# ---- models that a task captures
def holding(held):
    def output(model_call, batch):
        return model_call(batch[0])[:, 0] * (1 if held is None else 2)

    return output


def classifier(fill):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    nn.init.constant_(model[0].weight, fill)
    nn.init.zeros_(model[0].bias)
    return model


CAPTURED = {
    "model": lambda model: model,
    "module": lambda model: [model[0]],
    "parameter": lambda model: model[0].weight,
    "view": lambda model: model[0].weight.detach()[:1],
    "module around it": lambda model: nn.ModuleList([model]),
    "bound method": lambda model: model.forward,
}


@pytest.mark.parametrize("held", CAPTURED)
def test_the_attributed_model_that_a_task_captures_is_known_without_its_weights(held, tmp_path):
    """A training goes on with one store, and so does another process."""
    data, weights = TensorDataset(torch.ones(2, 2)), classifier(1.0).state_dict()
    for fill in (2.0, 3.0):
        model = classifier(fill)
        attributor = Attributor(
            model, holding(CAPTURED[held](model)), tmp_path / "a.zarr", proj_dim=4, progress=False
        )
        for _ in range(2):
            model.scale = float(model[0].weight.detach().mean())
            attributor.featurize(data, model.state_dict())
            nn.init.constant_(model[0].weight, fill + 0.5)
        found = attributor.featurize(data, checkpoints=[weights]).rows_found
    assert found == 2


@pytest.mark.parametrize("held", CAPTURED)
def test_another_model_that_a_task_captures_is_known_by_its_weights(held, tmp_path):
    data, model, reference = TensorDataset(torch.ones(2, 2)), classifier(1.0), classifier(1.0)

    def featurize():
        task = holding(CAPTURED[held](reference))
        return Attributor(model, task, tmp_path / "a.zarr", proj_dim=4, progress=False).featurize(data)

    featurize()
    assert featurize().rows_found == 2
    nn.init.constant_(reference[0].weight, 2.0)
    with pytest.raises(ManifestMismatchError, match="task"):
        featurize()


class Configured(nn.Module):
    """A model of another library: its methods are wrapped in what cannot be described, and it has a configuration."""

    def __init__(self, **config):
        super().__init__()
        self.layer = network()
        self.config = types.SimpleNamespace(to_dict=lambda: {"_name_or_path": str(id(self)), **config})

    forward = functools.partial(powered, held=(x for x in "ab"))


def test_a_model_of_another_library_is_known_by_class_configuration_and_weights():
    made = [identity_of(scaled([Configured(width=width)])) for width in (1, 1, 2)]
    changed = Configured(width=1)
    nn.init.zeros_(changed.layer[0].weight)
    assert made[0] == made[1] != made[2]
    assert identity_of(scaled([changed])) not in made


LOCK, NO_VALUES = threading.Lock(), "captures factor, a torch.Tensor.*no plain values"
NESTED = functools.reduce(lambda inner, _: [inner], range(40), 1)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (scaled(LOCK), "captures factor, a _thread.lock"),
        (scaled({"a": [LOCK]}), r"captures factor\['a'\]\[0\], a _thread.lock"),
        (scaled(x for x in "ab"), "captures factor, a builtins.generator"),
        (scaled(scaled(LOCK)), r"captures factor, a _thread.lock"),
        (holding(scaled(LOCK)), r"captures factor \(a part of held\), a _thread.lock"),
        (scaled(torch.ones(1).to_sparse()), NO_VALUES),
        (scaled(torch.ones(1, device="meta")), NO_VALUES),
        (scaled(NESTED), r"captures factor\[0\].*, a builtins.list.*nested in more than 32 objects"),
        (scaled(sys.__stdout__), "TextIOWrapper"),
        (Weighted(LOCK), "captures function.weight, a _thread.lock"),
        (Weighted(LOCK).output, "captures function.__self__.weight, a _thread.lock"),
        (functools.partial(powered, weights=LOCK), "captures weights, a _thread.lock"),
        (with_attribute(LOCK), "captures function.weight, a _thread.lock"),
    ],
)
def test_what_cannot_be_described_is_refused_by_its_name(function, message):
    advice = r".*AbstractModelOutput, and return .*settings\(\)"
    with pytest.raises(InvalidInputError, match=message + advice):
        identity_of(function)


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, torch.ones(1)])
def test_settings_that_are_no_json_are_refused(value):
    task = with_member("settings", lambda self: {"value": value})
    with pytest.raises(InvalidInputError, match=r"Derived.settings.. returned .*Expected JSON values"):
        identity_of(task)
