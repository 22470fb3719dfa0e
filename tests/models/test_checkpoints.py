"""Checkpoints: every source, natural order, prefixes, and refusals that leave the model as it was."""

from __future__ import annotations

import collections
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from trak_lite.errors import CheckpointError
from trak_lite.models.borrowing import borrow_model
from trak_lite.models.checkpoints import Checkpoint, iterate_checkpoints, load_into, weights_digest

pytestmark = pytest.mark.quick


def filled(value: float) -> dict[str, Tensor]:
    return {"weight": torch.full((2, 3), value), "bias": torch.full((2,), value)}


def values_of(source: object, **kwargs: object) -> list[float]:
    """The weight's value after loading each checkpoint of a source in turn."""
    model = nn.Linear(3, 2)
    found = []
    for checkpoint in iterate_checkpoints(source, **kwargs):
        load_into(model, checkpoint)
        found.append(model.weight[0, 0].item())
    return found


def test_a_folder_is_read_in_natural_order(tmp_path: Path) -> None:
    for epoch in (10, 2, 1):
        save_file(filled(float(epoch)), tmp_path / f"epoch-{epoch}.safetensors")
    (tmp_path / "notes.txt").write_text("not a checkpoint")

    assert values_of(tmp_path) == [1.0, 2.0, 10.0]
    assert [c.name for c in iterate_checkpoints(str(tmp_path))] == ["epoch-1", "epoch-2", "epoch-10"]


def test_folders_as_hugging_face_saves_them_are_checkpoints(tmp_path: Path) -> None:
    for step in (500, 1000):
        (tmp_path / f"checkpoint-{step}").mkdir()
        save_file(filled(float(step)), tmp_path / f"checkpoint-{step}" / "model.safetensors")

    assert values_of(tmp_path) == [500.0, 1000.0]
    assert [c.name for c in iterate_checkpoints(tmp_path)] == ["checkpoint-500", "checkpoint-1000"]


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model_state_dict", "model"])
def test_pt_files_hold_a_state_dict_alone_or_under_a_usual_name(tmp_path: Path, wrapper: str | None) -> None:
    state = filled(3.0)
    torch.save(state if wrapper is None else {wrapper: state, "epoch": 4}, tmp_path / "a.pt")

    assert values_of(tmp_path / "a.pt") == [3.0]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_wrapped_models_are_ignored(prefix: str) -> None:
    assert values_of({prefix + name: value for name, value in filled(2.0).items()}) == [2.0]


def test_a_wrapped_model_takes_plain_names() -> None:
    model = nn.Sequential(collections.OrderedDict(module=nn.Linear(3, 2)))

    load_into(model, next(iter(iterate_checkpoints(filled(5.0)))))

    assert model[0].weight[0, 0].item() == 5.0


def test_sources_may_be_lists_generators_and_loaders(tmp_path: Path) -> None:
    save_file(filled(7.0), tmp_path / "seven.safetensors")

    assert values_of([filled(1.0), tmp_path / "seven.safetensors", filled(2.0)]) == [1.0, 7.0, 2.0]
    assert values_of(filled(float(n)) for n in range(3)) == [0.0, 1.0, 2.0]
    assert values_of([4, 5], checkpoint_loader=lambda n: filled(float(n))) == [4.0, 5.0]


def test_only_one_checkpoint_of_an_iterable_is_made_at_a_time() -> None:
    made: list[int] = []

    def states() -> Iterator[dict[str, Tensor]]:
        for n in range(3):
            made.append(n)
            yield filled(float(n))

    source = iterate_checkpoints(states())
    next(source)

    assert made == [0]


def test_no_source_means_the_model_as_it_is() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.clone()

    (checkpoint,) = iterate_checkpoints(None)
    load_into(model, checkpoint)

    assert torch.equal(model.weight, before)


def test_safetensors_of_tied_weights_load_without_the_dropped_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    save_model(model, str(tmp_path / "tied.safetensors"))
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    other[1].weight = other[0].weight

    load_into(other, next(iter(iterate_checkpoints(tmp_path / "tied.safetensors"))))

    assert torch.equal(other[1].weight, model[0].weight)


def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_is_copied() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.clone()
    wrong = {"weight": torch.zeros(2, 4), "extra": torch.zeros(1)}

    with pytest.raises(
        CheckpointError, match=r"missing: \['bias'\]; unexpected: \['extra'\].*\(2, 4\) instead of \(2, 3\)"
    ):
        load_into(model, next(iter(iterate_checkpoints(wrong))))

    assert torch.equal(model.weight, before)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("code from a checkpoint ran",))


def test_a_file_that_would_run_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "evil.pt"
    path.write_bytes(pickle.dumps({"state_dict": Evil()}, protocol=2))
    torch.save({"state_dict": Evil()}, tmp_path / "evil2.pt")

    for name in ("evil.pt", "evil2.pt"):
        with pytest.raises(CheckpointError, match=rf"Cannot read the checkpoint .*{name}"):
            values_of(tmp_path / name)

    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["torn.safetensors", "torn.pt"])
def test_a_torn_file_is_named(tmp_path: Path, name: str) -> None:
    whole = tmp_path / f"whole.{name.split('.')[1]}"
    if whole.suffix == ".pt":
        torch.save(filled(1.0), whole)
    else:
        save_file(filled(1.0), whole)
    (tmp_path / name).write_bytes(whole.read_bytes()[:-40])

    with pytest.raises(CheckpointError, match=f"Cannot read the checkpoint .*{name}"):
        values_of(tmp_path / name)


def test_missing_paths_empty_folders_and_other_things_are_named(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")

    with pytest.raises(CheckpointError, match=r"no checkpoint at .*nowhere"):
        values_of(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"holds no checkpoint.*safetensors"):
        values_of(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="holds no state dict: found list"):
        values_of(tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="Cannot take checkpoints from int"):
        values_of(3)
    with pytest.raises(CheckpointError, match="gave int, expected a mapping"):
        values_of([3], checkpoint_loader=lambda item: item)


def test_the_digest_tells_weights_dtypes_and_buffers_apart_and_nothing_else() -> None:
    def model(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    moved = model()
    moved[1].running_mean += 1

    assert weights_digest(model()) == weights_digest(model().eval())
    assert (
        len({weights_digest(m) for m in (model(), model(1), model().double(), moved, model().bfloat16())})
        == 5
    )


def test_a_model_with_a_child_called_module_takes_its_own_state_dict() -> None:
    class Wrapper(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.module = nn.Linear(3, 2)
            self.weight = nn.Parameter(torch.full((2, 3), value))

    model = Wrapper(1.0)

    load_into(model, next(iter(iterate_checkpoints(Wrapper(4.0).state_dict()))))

    assert model.weight[0, 0].item() == 4.0


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.pt").write_bytes(b"")

    with pytest.raises(CheckpointError, match=r"Cannot read the checkpoint .*empty\.pt"):
        values_of(tmp_path / "empty.pt")


def test_values_that_are_no_tensors_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"weight ndarray instead of \(2, 3\)"):
        values_of({name: value.numpy() for name, value in filled(1.0).items()})


def sharded(folder: Path, weight_map: object) -> Path:
    """A folder as Hugging Face saves a large model: an index, and a file for every few weights."""
    folder.mkdir()
    for name, value in filled(6.0).items():
        save_file({name: value}, folder / f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards_that_an_index_lists_are_one_checkpoint(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "checkpoint-7", {"weight": "weight.safetensors", "bias": "bias.safetensors"})

    (checkpoint,) = iterate_checkpoints(tmp_path)

    assert (checkpoint.name, checkpoint.source) == (
        "checkpoint-7",
        str(folder / "model.safetensors.index.json"),
    )
    assert values_of(folder) == values_of(checkpoint.source) == [6.0]


@pytest.mark.parametrize(
    ("weight_map", "match"),
    [
        (None, "Cannot read the list of shards"),
        ({"weight": 3}, "Cannot read the list of shards"),
        ({}, "lists no files"),
        ({"weight": "../weight.safetensors"}, "Expected names of files beside it"),
        ({"weight": "gone.safetensors"}, r"Cannot read the checkpoint .*gone\.safetensors"),
        ({"weight": "weight.safetensors"}, r"missing: \['bias'\]"),
    ],
)
def test_an_index_that_does_not_list_all_shards_is_refused(
    tmp_path: Path, weight_map: object, match: str
) -> None:
    with pytest.raises(CheckpointError, match=match):
        values_of(sharded(tmp_path / "a", weight_map))


def test_a_trainers_folder_with_final_weights_and_checkpoints_is_ambiguous(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "checkpoint-10", tmp_path / "checkpoint-9"):
        folder.mkdir(exist_ok=True)
        save_file(filled(1.0), folder / "model.safetensors")

    with pytest.raises(
        CheckpointError, match=r"model.safetensors and 2 checkpoint folders \(checkpoint-9 \.\.\.\)"
    ):
        values_of(tmp_path)
    assert values_of([tmp_path / "model.safetensors", tmp_path / "checkpoint-10"]) == [1.0, 1.0]


def test_a_checkpoint_may_be_given_as_such() -> None:
    given = [Checkpoint("a", None, lambda: filled(8.0)), Checkpoint("b", None, None)]

    assert list(iterate_checkpoints(given)) == list(iterate_checkpoints(iter(given))) == given
    assert values_of(given) == [8.0, 8.0]


class Adapted(nn.Module):
    """A linear layer with an adapter, and a head that is trained as a whole, by the names of PEFT."""

    def __init__(self, active: object = "default", value: float = 0.0) -> None:
        super().__init__()
        self.active_adapter = active
        self.base_layer = nn.Linear(3, 3)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(3, 3, bias=False)})
        self.lora_magnitude_vector = nn.ModuleDict({"default": nn.Linear(1, 3, bias=False)})
        self.original_module = nn.Linear(3, 2)
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(3, 2)})
        for parameter in self.parameters():
            nn.init.constant_(parameter, value)


def adapter_file(folder: Path, *, without: str = "") -> Path:
    saved = {
        "head.lora_A.weight": torch.full((3, 3), 2.0),
        "head.lora_magnitude_vector": torch.full((3, 1), 3.0),
        "head.weight": torch.full((2, 3), 4.0),
        "head.bias": torch.full((2,), 5.0),
    }
    save_file(
        {name: value for name, value in saved.items() if name != without},
        folder / "adapter_model.safetensors",
    )
    return folder


def wrapped(adapted: nn.Module) -> nn.Module:
    outer = nn.Module()
    outer.head = adapted
    outer.active_adapter = adapted.active_adapter
    return outer


def test_an_adapter_is_loaded_over_the_models_own_weights(tmp_path: Path) -> None:
    """The weights of a checkpoint that was loaded before do not stay below it."""
    model = wrapped(Adapted(value=1.0))
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    full, adapter = iterate_checkpoints([wrapped(Adapted(value=9.0)).state_dict(), adapter_file(tmp_path)])

    load_into(model, full, own)
    load_into(model, adapter, own)

    assert {name: p.unique().tolist() for name, p in model.head.named_parameters()} == {
        "base_layer.weight": [1.0],
        "base_layer.bias": [1.0],
        "lora_A.default.weight": [2.0],
        "lora_magnitude_vector.default.weight": [3.0],
        "original_module.weight": [1.0],
        "original_module.bias": [1.0],
        "modules_to_save.default.weight": [4.0],
        "modules_to_save.default.bias": [5.0],
    }


@pytest.mark.parametrize(
    ("active", "without", "match"),
    [
        ("default", "head.weight", r"missing: \['head.modules_to_save.default.weight'\]"),
        (["default", "other"], "", r"the active adapters \['default', 'other'\]"),
        ("other", "", r"unexpected: .*'head.lora_A.weight'"),
        (None, "", "has no adapter"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    tmp_path: Path, active: object, without: str, match: str
) -> None:
    (checkpoint,) = iterate_checkpoints(adapter_file(tmp_path, without=without))

    with pytest.raises(CheckpointError, match=match):
        load_into(wrapped(Adapted(active)), checkpoint)


# ---------------------------------------------------------------- entries that are no tensors


class Scaled(nn.Module):
    """Keeps a number beside its weights, in the form that ``pack`` gives it."""

    def __init__(self, scale: float, pack: Callable[[float], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)
        self.scale, self.pack = scale, pack

    def get_extra_state(self) -> Any:
        return self.pack(self.scale)

    def set_extra_state(self, state: Any) -> None:
        while isinstance(state, dict | list):
            state = state["scale"] if isinstance(state, dict) else state[0]
        self.scale = float(state)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.linear(x)


PACKS: list[Callable[[float], Any]] = [
    float,
    str,
    lambda scale: {"scale": scale, "names": {"b", "a"}},
    lambda scale: [torch.tensor(scale), None],
    lambda scale: torch.full((int(scale), 1), scale)[0],
]


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("form", ["memory", "file", "wrapped"])
def test_other_entries_of_state_dicts_are_loaded_and_compared(
    tmp_path: Path, pack: Callable[[float], Any], form: str
) -> None:
    model, other = Scaled(1.0, pack), Scaled(2.0, pack)
    state: Any = other.state_dict()
    if form != "memory":
        torch.save({"model": state, "epoch": 3} if form == "wrapped" else state, tmp_path / "a.pt")
        state = tmp_path / "a.pt"
    (checkpoint,) = iterate_checkpoints(state)
    before = weights_digest(model)

    with borrow_model(model, torch.device("cpu")) as own:
        load_into(model, checkpoint, own)
        assert model.scale == 2.0
        assert weights_digest(model) == weights_digest(other) != before
        load_into(model, Checkpoint("current", None, None), own)
        assert model.scale == 1.0
        load_into(model, checkpoint, own)

    assert model.scale == 1.0
    assert weights_digest(model) == before


def test_safetensors_have_no_other_entries_and_the_model_keeps_its_own(tmp_path: Path) -> None:
    model = Scaled(3.0, float)
    save_file(Scaled(2.0, float).linear.state_dict(prefix="linear."), tmp_path / "a.safetensors")
    (checkpoint,) = iterate_checkpoints(tmp_path / "a.safetensors")

    with pytest.warns(UserWarning, match=r"has no _extra_state.*own values are used.*torch.save"):
        load_into(model, checkpoint)
    assert model.scale == 3.0


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_other_entries_have_to_fit(change: str) -> None:
    plain = nn.ModuleDict({"a": nn.Linear(3, 2)})
    model = plain if change == "unexpected" else nn.ModuleDict({"a": Scaled(1.0, float)})
    given = nn.ModuleDict({"a": Scaled(1.0, float)}).state_dict()
    if change == "missing":
        del given["a._extra_state"]
    (checkpoint,) = iterate_checkpoints(given)

    with pytest.raises(CheckpointError, match=rf"{change}: \['a\._extra_state'"):
        load_into(model, checkpoint)


def test_entries_that_cannot_be_compared_are_named(caplog: pytest.LogCaptureFixture) -> None:
    weights_digest(Scaled(1.0, lambda scale: lambda: scale))

    assert "_extra_state" in caplog.text
    assert "cannot be compared" in caplog.text
