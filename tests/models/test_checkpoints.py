"""Checkpoints: every source, natural order, prefixes, versions, and refusals that leave the model as it was."""

import collections
import io
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file, save_model
from tiny_runs import labelled
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import TensorDataset
from versioned import Old, Versioned

from trak_lite import Attributor, TRAKer, verify
from trak_lite.errors import CheckpointError, InvalidInputError


def filled(value):
    return {"weight": torch.full((2, 3), value), "bias": torch.full((2,), value)}


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@pytest.fixture
def values(load):
    """Return what gives the weight's value of each checkpoint of a source."""
    return lambda source, loader=None: [float(row[0]) for row in load(nn.Linear(3, 2), source, loader)[1]]


@pytest.mark.quick
@pytest.mark.parametrize("name", ["epoch-{}.safetensors", "checkpoint-{}/model.safetensors"])
def test_folders_of_files_or_of_hugging_face_are_read_in_natural_order(tmp_path, load, name):
    for step in (1000, 2, 500):
        file = tmp_path / name.format(step)
        file.parent.mkdir(exist_ok=True)
        save_file(filled(float(step)), file)
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    for source in (tmp_path, str(tmp_path)):
        summary, rows = load(nn.Linear(3, 2), source)
        assert [float(row[0]) for row in rows] == [2.0, 500.0, 1000.0]
        assert summary.checkpoints == tuple(f"{name.partition('-')[0]}-{step}" for step in (2, 500, 1000))


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model_state_dict", "model"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_pt_files_hold_a_state_dict_alone_or_under_a_usual_name_and_prefix(tmp_path, wrapper, prefix, values):
    state = {prefix + name: value for name, value in filled(3.0).items()}
    torch.save(state if wrapper is None else {wrapper: state, "epoch": 4}, tmp_path / "a.pt")
    assert values([tmp_path / "a.pt", state]) == [3.0]


class Wrapper(nn.Module):
    """Has a child called module, and a weight beside it."""

    def __init__(self, value):
        super().__init__()
        self.module = nn.Linear(3, 2)
        self.weight = nn.Parameter(torch.full((2, 3), value))


def test_a_wrapped_model_takes_plain_names_and_its_own(load):
    model = nn.Sequential(collections.OrderedDict(module=nn.Linear(3, 2)))
    assert load(model, filled(5.0))[1][0].tolist() == [5.0] * 8
    assert load(Wrapper(1.0), Wrapper(4.0).state_dict())[1][0][:6].tolist() == [4.0] * 6


def test_sources_may_be_lists_generators_and_loaders(tmp_path, values, load):
    save_file(filled(7.0), tmp_path / "seven.safetensors")
    assert values([filled(1.0), tmp_path / "seven.safetensors", filled(2.0)]) == [1.0, 7.0, 2.0]
    assert values(filled(float(n)) for n in range(1, 4)) == [1.0, 2.0, 3.0]
    assert values([4, 5], lambda n: filled(float(n))) == [4.0, 5.0]
    assert values(nn.Sequential(own := nn.Linear(3, 2)), lambda model: model[0].state_dict()) == [
        flat(own)[0]
    ]
    (tmp_path / "lr-0.1").mkdir()
    files = [tmp_path / "lr-0.1", tmp_path / "lr-0.2.ckpt"]
    names = load(nn.Linear(3, 2), files, lambda path: filled(float(len(path.name))))[0].checkpoints
    assert names == ("lr-0.1", "lr-0.2")
    own = nn.Linear(3, 2)
    assert values([own.state_dict(), filled(0.5)]) == [own.weight[0, 0].item(), 0.5]
    assert values([filled(0.5), same := filled(1.5), same]) == [0.5, 1.5]
    with pytest.raises(
        CheckpointError, match=r"state dicts 1 and 2 of the list share their tensors.*deepcopy"
    ):
        values([filled(0.5), own.state_dict(), own.state_dict()])
    with pytest.raises(CheckpointError, match="gave int, expected a mapping"):
        values([3], lambda item: item)


def test_only_one_checkpoint_of_an_iterable_is_made_at_a_time(load):
    model, events = nn.Linear(3, 2), []
    model.register_forward_hook(lambda *_: events.append("pass"))

    def state(number):
        events.append(f"made {number}")
        return filled(float(number))

    load(model, (state(number) for number in range(3)), task=lambda call, batch: call(batch[0]).sum(1))
    assert list(dict.fromkeys(events)) == ["made 0", "pass", "made 1", "made 2"]
    assert [event for event in events if event != "pass"] == ["made 0", "made 1", "made 2"]
    assert all(events[events.index(f"made {number}") + 1] == "pass" for number in range(3))


def test_no_source_means_the_model_as_it_is_also_between_others(load):
    model = nn.Linear(3, 2)
    own = flat(model)
    assert load(model, None)[1][0].tolist() == own
    assert [row.tolist() for row in load(model, [filled(3.0), None])[1]] == [[3.0] * 8, own]
    assert flat(model) == own


def tied():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def test_safetensors_of_tied_weights_load_without_the_dropped_name(tmp_path, load):
    saved = tied()
    save_model(saved, str(tmp_path / "tied.safetensors"))
    assert load(tied(), tmp_path / "tied.safetensors")[1][0].tolist() == flat(saved)


def test_a_tied_weight_has_one_value_in_a_checkpoint(load):
    model, unused = tied(), torch.tensor([math.nan, 1.0])
    for layer in model:
        layer.register_buffer("unused", unused)
    before = flat(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["0.weight"][0, 0] = 3.0
    state["1.weight"] = state["0.weight"].double()
    assert load(model, state)[1][0][0] == 3.0
    for name in ("1.weight", "1.unused"):
        other = {**state, name: state[name] + 1e-3}
        with pytest.raises(CheckpointError, match=rf"different values for '0.*' and '{name}', .* one tied"):
            load(model, other)
    assert flat(model) == before


class Summed(nn.Sequential):
    def forward(self, x):
        return sum(part(x) for part in self)


def test_extra_states_of_modules_are_no_tied_weights(load):
    pack = lambda scale: None if scale == 1.0 else torch.tensor(scale)  # noqa: E731
    model = Summed(Scaled(1.0, pack), Scaled(1.0, pack))
    states = {"0._extra_state": torch.tensor(2.0), "1._extra_state": torch.tensor(3.0)}
    _, (row,) = load(model, {**model.state_dict(), **states}, task=output)
    assert (row[7], row[-1]) == (2.0, 3.0)  # gradients of the biases


def test_weights_and_buffers_tell_checkpoints_apart_and_nothing_else(load):
    def state(seed=0, mean=0.0):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        model[1].running_mean += mean
        return model.state_dict()

    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    summary, _ = load(model, [state(), state(1), state(mean=1.0), dict(state())])
    assert (summary.rows_written, summary.rows_found) == (3, 1)


class Evil:
    def __reduce__(self):
        return (print, ("code from a checkpoint ran",))


def shards(folder, weight_map):
    """A folder as Hugging Face saves a large model: an index, and a file for every few weights."""
    folder.mkdir()
    for name, value in filled(6.0).items():
        save_file({name: value}, folder / f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards_that_an_index_lists_are_one_checkpoint(tmp_path, load):
    folder = shards(tmp_path / "checkpoint-7", {"weight": "weight.safetensors", "bias": "bias.safetensors"})
    for source in (tmp_path, folder, folder / "model.safetensors.index.json"):
        summary, rows = load(nn.Linear(3, 2), source)
        assert [row.tolist() for row in rows] == [[6.0] * 8]
        assert summary.checkpoints == ("checkpoint-7" if source.is_dir() else "model.safetensors.index",)
    save_file(
        {"weight": torch.ones(2, 3), "bias": torch.full((2,), 6.0)}, folder / "bias.safetensors"
    )  # an older one
    save_file({"weight": torch.full((2, 3), 6.0), "bias": torch.ones(2)}, folder / "weight.safetensors")
    assert [row.tolist() for row in load(nn.Linear(3, 2), folder)[1]] == [[6.0] * 8]


def test_a_mean_of_weights_and_its_model_take_checkpoints_of_each_other(load):
    model, mean = nn.Linear(3, 2), AveragedModel(nn.Linear(3, 2))
    mean.update_parameters(model)
    averaged = {**mean.state_dict(), **{f"module.{name}": value for name, value in filled(2.0).items()}}
    for one in (model, mean):
        _, rows = load(one, [averaged, filled(3.0), filled(2.0)])
        assert [row.tolist() for row in rows][:2] == [[2.0] * 8, [3.0] * 8]
    # The number of steps is no weight, but a buffer: what was loaded before is not kept.
    steps = averaged | {"n_averaged": torch.tensor(9)}
    assert load(mean, [steps, filled(2.0), averaged])[0].rows_found == 1
    # A buffer of this name in another model is one that passes may read.
    model.register_buffer("n_averaged", torch.tensor(2.0))
    with pytest.raises(CheckpointError, match=r"missing: \['n_averaged'\]"):
        load(model, filled(3.0))


@pytest.fixture
def files(tmp_path):
    """A folder of files that are no checkpoints, or not of a linear layer."""
    (tmp_path / "evil.pt").write_bytes(pickle.dumps({"state_dict": Evil()}, protocol=2))
    torch.save({"state_dict": Evil()}, tmp_path / "evil2.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save(filled(1.0), tmp_path / "whole.pt")
    save_file(filled(1.0), tmp_path / "whole.safetensors")
    for kind in ("pt", "safetensors"):
        (tmp_path / f"torn.{kind}").write_bytes((tmp_path / f"whole.{kind}").read_bytes()[:-40])
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "junk-1.pt").write_bytes(b"Gabc")
    (tmp_path / "junk-2.pt").write_bytes(b"a.")
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "run", tmp_path / "run/checkpoint-10", tmp_path / "run/checkpoint-9"):
        folder.mkdir()
        save_file(filled(1.0), folder / "model.safetensors")
    names = {"weight": "../weight.safetensors"}, {"weight": "gone.safetensors"}
    for number, weight_map in enumerate((None, {"weight": 3}, {}, *names)):
        shards(tmp_path / f"shards-{number}", weight_map)
    shards(tmp_path / "shards-5", {"weight": "weight.safetensors"})
    return tmp_path


UNREADABLE = ("evil.pt", "evil2.pt", "torn.pt", "torn.safetensors", "empty.pt", "junk-1.pt", "junk-2.pt")
REFUSED: list[tuple[Any, str]] = [
    *((name, rf"Cannot read the checkpoint .*{name}") for name in UNREADABLE),
    (
        "evil2.pt",
        r"evil2\.pt \(UnpicklingError: Weights only load failed: GLOBAL [\w.]+\)\. Files .* best with safetensors\.$",
    ),
    ("nowhere", "no checkpoint at .*nowhere"),
    ("empty", "holds no checkpoint.*safetensors"),
    ("list.pt", r"holds no state dict: found list.*checkpoint_loader"),
    ("run", r"model.safetensors and 2 checkpoint folders \(checkpoint-9 \.\.\.\)"),
    ("shards-0", "Cannot read the list of shards"),
    ("shards-1", "Cannot read the list of shards"),
    ("shards-2", "lists no files"),
    ("shards-3", "Expected names of files beside it"),
    ("shards-4", r"Cannot read the checkpoint .*gone\.safetensors"),
    ("shards-5", r"missing: \['bias'\]"),
    (3, "Cannot take checkpoints from int"),
    # These are iterable, but their items are no checkpoints.
    (nn.Sequential(nn.Linear(3, 2)), r"from Sequential\. Pass its weights: model\.state_dict\(\)\."),
    ([nn.Sequential(nn.Linear(3, 2))], r"from Sequential\. Pass its weights: model\.state_dict\(\)\."),
    (torch.ones(()), "Cannot take checkpoints from Tensor"),
    (np.ones(()), "Cannot take checkpoints from ndarray"),
    (
        {"weight": torch.zeros(2, 4), "extra": torch.zeros(1)},
        r"missing: \['bias'\]; unexpected: \['extra'\].*\(2, 4\) instead of \(2, 3\)",
    ),
    (
        {f"net.{name}": value for name, value in {**filled(1.0), "more": torch.zeros(1)}.items()},
        r"All names have the prefix 'net\.' there: pass a checkpoint_loader .*ckpt_weights, prefix='net\.'\)",
    ),
    ({"net.weight": torch.ones(2, 3)}, r"unexpected: \['net.weight'\]\. Build the model"),
    (
        {"a": filled(1.0), "b": filled(2.0)},
        r"missing: \['weight', 'bias'\]\. It has weights under a, b: pass those",
    ),
    (
        {"net": filled(1.0), "loss": torch.ones(()), "arch": "mlp"},
        r"It has weights under net: .* state\['net'\]",
    ),
    ({"late.1": Path("late.pt"), "late.2": "late.pt"}, r"It has weights under late\.1, late\.2: .* list of"),
    ({3: filled(1.0)}, r"gave names such as 3, expected .* It has weights under 3: pass those, state\[3\]"),
    *(
        ({**filled(1.0), "weight": kind}, r"cannot be loaded into Linear: .*" + cause)
        for kind, cause in (
            (torch.ones(2, 3, device="meta"), "meta tensor"),
            (torch.ones(2, 3).to_sparse(), "sparse Tensors"),
        )
    ),
    (b"a.pt", "Cannot take checkpoints from bytes"),
    (io.BytesIO(b"a\nb"), "Cannot take checkpoints from BytesIO"),
    ({0: torch.ones(2, 3)}, r"gave names such as 0, expected a mapping from names to tensors\.$"),
    ({name: value.numpy() for name, value in filled(1.0).items()}, r"weight ndarray instead of \(2, 3\)"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("source", "message"), REFUSED)
def test_what_is_no_checkpoint_of_the_model_is_refused_and_changes_nothing(
    source, message, files, load, capsys
):
    model = nn.Linear(3, 2)
    before = model.weight.tolist()
    with pytest.raises(CheckpointError, match=message) as caught:
        load(model, files / source if isinstance(source, str) else source)
    assert "\\x1b" not in str(caught.value)  # of the colours in torch's messages
    assert model.weight.tolist() == before
    assert capsys.readouterr().out == ""


# ---- Entries that are no tensors
class Scaled(nn.Module):
    """Keeps a number beside its weights, in the form that ``pack`` gives it."""

    def __init__(self, scale, pack):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)
        self.scale, self.pack = scale, pack

    def get_extra_state(self):
        return self.pack(self.scale)

    def set_extra_state(self, state):
        while isinstance(state, dict | list):
            state = state["scale"] if isinstance(state, dict) else state[0]
        self.scale = float(state)

    def forward(self, x):
        return self.scale * self.linear(x)


def output(call, batch):
    """Its gradient by the bias is the scale."""
    return call(batch[0]).sum(1)


PACKS: list[Callable[[float], Any]] = [
    float,
    str,
    lambda scale: {"scale": scale, "names": {"b", "a"}},
    lambda scale: [torch.tensor(scale), None],
    lambda scale: torch.full((int(scale), 1), scale)[0],
]


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("form", ["memory", "file", "wrapped"])
def test_other_entries_of_state_dicts_are_loaded_compared_and_given_back(tmp_path, pack, form, load):
    model, state = Scaled(1.0, pack), Scaled(2.0, pack).state_dict()
    if form != "memory":
        torch.save({"model": state, "epoch": 3} if form == "wrapped" else state, tmp_path / "a.pt")
        state = tmp_path / "a.pt"
    summary, rows = load(model, [state, None, state], task=output)
    assert [float(row[-1]) for row in rows] == [2.0, 1.0]
    assert (summary.rows_written, summary.rows_found) == (2, 1)
    assert model.scale == 1.0


def test_safetensors_have_no_other_entries_and_the_model_keeps_its_own(tmp_path, load):
    save_file(Scaled(2.0, float).linear.state_dict(prefix="linear."), tmp_path / "a.safetensors")
    with pytest.warns(UserWarning, match=r"has no _extra_state.*own values are used.*torch.save"):
        _, (row,) = load(Scaled(3.0, float), tmp_path / "a.safetensors", task=output)
    assert float(row[-1]) == 3.0


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_other_entries_have_to_fit(change, load):
    plain, scaled = (nn.ModuleDict({"a": part}) for part in (nn.Linear(3, 2), Scaled(1.0, float)))
    given = scaled.state_dict()
    if change == "missing":
        del given["a._extra_state"]
    with pytest.raises(CheckpointError, match=rf"{change}: \['a\._extra_state'"):
        load(plain if change == "unexpected" else scaled, given)


def test_entries_that_cannot_be_compared_are_named(load, caplog):
    load(Scaled(1.0, lambda scale: {"scale": scale, "by": lambda: scale}), None)
    assert "_extra_state" in caplog.text
    assert "cannot be compared" in caplog.text


# ---- Versions of modules, which state dicts record
def build(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), Versioned(5, 3)).eval()


def old(seed):
    """The same model as it was before the present version, whose state dicts are of version 1."""
    model, last = build(seed), Old(5, 3)
    last.weight, last.bias = nn.Parameter(-model[2].weight.detach()), model[2].bias
    model[2] = last
    return model


def prefixed(model):
    """The model under the names that ``DataParallel`` and ``torch.compile`` give it."""
    return nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": model})})


def pt_file(content, folder):
    torch.save(content, folder / "a.pt")
    return folder / "a.pt"


def versioned_shards(model, folder):
    """A file for each child with the version of its own modules, and the list of them."""
    folder.mkdir()
    parts = {f"{name}.bin": part.state_dict(prefix=f"{name}.") for name, part in model.named_children()}
    for file, state in parts.items():
        torch.save(state, folder / file)
    listed = {name: file for file, state in parts.items() for name in state}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": listed}))
    return folder


def safetensors_file(state, folder):
    save_file(dict(state), folder / "a.safetensors")
    return folder / "a.safetensors"


SOURCES: dict[str, Callable[[Path], Any]] = {
    "state dict": lambda folder: build(1).state_dict(),
    "state dict of version 1": lambda folder: old(1).state_dict(),
    "plain dict": lambda folder: dict(build(1).state_dict()),
    "prefixed, of version 1": lambda folder: prefixed(old(1)).state_dict(),
    "pt file": lambda folder: pt_file(build(1).state_dict(), folder),
    "pt file of version 1": lambda folder: pt_file(old(1).state_dict(), folder),
    "pt file, wrapped": lambda folder: pt_file({"state_dict": old(1).state_dict(), "epoch": 1}, folder),
    "pt file, prefixed": lambda folder: pt_file(prefixed(old(1)).state_dict(), folder),
    "pt file, plain dict": lambda folder: pt_file(dict(build(1).state_dict()), folder),
    "shards": lambda folder: versioned_shards(old(1), folder / "shards"),
    "safetensors": lambda folder: safetensors_file(build(1).state_dict(), folder),
}


@pytest.mark.parametrize("source", SOURCES)
def test_modules_see_the_version_that_their_weights_were_saved_with(tmp_path, source, load):
    """Where none was saved, the present one. Loading changes neither the checkpoint nor, in the end, the model."""
    given = SOURCES[source](tmp_path)
    versions = json.dumps(getattr(given, "_metadata", None))
    for model in (build(), prefixed(build())):
        _, rows = load(model, [given, None])
        assert [row.tolist() for row in rows] == [flat(build(1)), flat(build())]
        assert flat(model) == flat(build())
    assert json.dumps(getattr(given, "_metadata", None)) == versions


def test_a_traker_and_a_retrained_model_see_versions_too(tmp_path):
    train, targets = labelled(12, 0), labelled(3, 1)
    forms = [build, lambda seed: build(seed).state_dict(), lambda seed: old(seed).state_dict()]
    forms.append(lambda seed: dict(build(seed).state_dict()))
    found, retrained = [], []
    for number, form in enumerate(forms[1:]):
        settings = {"save_dir": tmp_path / str(number), "proj_dim": 4, "lambda_reg": 0.1}
        traker = TRAKer(build(), "image_classification", 12, **settings)
        traker.load_checkpoint(form(1), 0)
        traker.featurize(train.tensors, num_samples=12)
        traker.finalize_features()
        traker.start_scoring_checkpoint("test", form(1), 0, num_targets=3)
        traker.score(targets.tensors, num_samples=3)
        found.append(traker.finalize_scores("test"))
    np.testing.assert_array_equal(found[1:], found[:1] * 2)

    attributor = Attributor(build(), "image_classification", None, proj_dim=4, progress=False)
    attributor.featurize(train)
    scores = attributor.score(targets)
    for form in forms:
        verify(scores, lambda rows, seed, form=form: form(int(rows.sum())), targets, budget=3)
        retrained.append(attributor.scores().predictions.retrained)
    np.testing.assert_array_equal(retrained[1:], retrained[:1] * 3)


def test_a_lightning_checkpoint_keeps_the_versions_of_a_module_inside(tmp_path, load):
    lightning = pytest.importorskip("trak_lite.integrations.lightning", exc_type=ImportError)
    outer = nn.ModuleDict({"model": old(1), "loss": Versioned(1, 1)})
    file = pt_file({"state_dict": outer.state_dict()}, tmp_path)
    _, (row,) = load(build(), [file], lambda path: lightning.ckpt_weights(path, prefix="model."))
    assert row.tolist() == flat(build(1))


class WithFrozenTable(nn.Module):
    """A layer, and a frozen weight in a wrapper of two tensors, as the quantised weights of torchao."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.table = nn.Parameter(TwoTensor(torch.ones(3), torch.full((3,), 2.0)), requires_grad=False)
        self.codes = nn.Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)

    def forward(self, x):
        return self.layer(x) * self.table.a * self.table.b


def test_checkpoints_are_told_apart_by_what_a_wrapper_of_tensors_holds():
    model, data = WithFrozenTable(), TensorDataset(torch.randn(6, 4))
    states = [{name: value.clone() for name, value in model.state_dict().items()} for _ in range(2)]
    states[1]["table"].b.mul_(5)

    def scores(checkpoints):
        made = Attributor(
            model, lambda call, batch: call(batch[0]).sum(1), None, method="GradDot", projector="none"
        )
        made.featurize(data, checkpoints=checkpoints)
        return made.score(data).numpy()

    np.testing.assert_allclose(scores(states), 13 * scores(states[:1]), rtol=0.01)  # the mean of 1 and 25
    np.testing.assert_allclose(scores([states[1], model.state_dict()]), scores(states), rtol=0.01)
    with pytest.raises(CheckpointError, match="share their tensors"):
        scores([model.state_dict(), model.state_dict()])
    assert model.table.b.tolist() == [2.0, 2.0, 2.0]


class Neighbours(nn.Module):
    """A layer whose outputs are mixed by a sparse buffer, as of a graph."""

    def __init__(self, convert):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.register_buffer("edges", convert(torch.eye(3) + torch.eye(3).roll(1, 0)))

    def forward(self, x):
        return (self.edges @ self.layer(x).T).T


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_checkpoints_are_told_apart_by_sparse_buffers(convert):
    data = TensorDataset(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))

    def scores(convert):
        model = Neighbours(convert)
        edges = model.edges.to_dense()
        states = [dict(model.state_dict()) | {"edges": convert(edges * factor)} for factor in (1, 3, -2)]
        made = Attributor(
            model,
            lambda call, batch: call(batch[0]).square().sum(1),
            None,
            method="GradDot",
            projector="none",
        )
        assert len(made.featurize(data, checkpoints=states).checkpoints) == 3
        return made.score(data).numpy()

    np.testing.assert_allclose(scores(convert), scores(torch.Tensor.to_dense), rtol=1e-5)


def test_frozen_wrappers_of_tensors_are_left_out_and_refused_by_name(tmp_path):
    """Those of torchao have no ``new_zeros``, and torch computes no gradient of them."""
    made = TRAKer(WithFrozenTable(), "image_classification", 6, save_dir=tmp_path, proj_dim=4, device="cpu")
    assert list(made.parameters) == ["layer.weight", "layer.bias"]
    for named, kind in (["table"], "TwoTensor"), (["codes"], "Parameter"), ("*", "TwoTensor"):
        with pytest.raises(InvalidInputError, match=rf" {kind}: .* have no gradient. Leave them out of it"):
            Attributor(WithFrozenTable(), "image_classification", None, grad_wrt=named)
