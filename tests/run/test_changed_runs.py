"""What rows depend on is changed between two calls on one path: noticed each time, by a named error.

Each kind is tried in three ways: a run that broke off is continued with the changed thing; a finished one is called
again; and targets that were scored are scored again under their name.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from trak_lite import Attributor, Rows
from trak_lite.errors import InvalidInputError, ManifestMismatchError
from trak_lite.modelout_functions import ImageClassificationModelOutput
from trak_lite.projectors import RademacherProjector
from trak_lite.types import OutputTerms

N, M, WIDTH, CLASSES = 72, 6, 4, 3
DONE, BROKEN_AT = 48, 49
"""Rows that are done when a run breaks off, and the row that it fails at: none of the 64 that are loaded before."""


class BrokeOffError(Exception):
    """What ends a run."""


class Plain(Dataset[Any]):
    """Samples from tensors, scaled; fails where it is told to."""

    def __init__(self, tensors: tuple[Tensor, ...], scale: float = 1.0) -> None:
        self.tensors, self.scale, self.fail_at = tensors, scale, -1

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        if index == self.fail_at:
            raise BrokeOffError
        x, *others = (tensor[index] for tensor in self.tensors)
        return x * self.scale, *others


class Edited(Plain):
    """The same, after an edit of its code."""

    def __getitem__(self, index: int) -> Any:
        x, *others = super().__getitem__(index)
        return x.flip(0), *others


class Transformed(TensorDataset):
    """A TensorDataset with a transform, as many people write one."""

    def __init__(self, tensors: tuple[Tensor, ...], scale: float) -> None:
        super().__init__(*tensors)
        self.scale, self.fail_at = scale, -1

    def __getitem__(self, index: int) -> Any:
        if index == self.fail_at:
            raise BrokeOffError
        x, y = super().__getitem__(index)
        return x * self.scale, y


def tensors(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = np.random.default_rng(seed)  # as below
    inputs = generator.normal(size=(count, WIDTH)).astype(np.float32)
    return torch.from_numpy(inputs), torch.from_numpy(generator.integers(CLASSES, size=count))


class Net(nn.Module):
    """A classifier with whatever a state dict does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES)
        self.activation: Callable[[Tensor], Tensor] = functional.silu
        self.leaky = nn.LeakyReLU(0.1)
        self.temperature = 1.0
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        generator = np.random.default_rng(0)  # torch's random numbers depend on the instruction set
        for p in self.parameters():
            p.data.copy_(torch.from_numpy(generator.normal(size=p.shape) / 2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.leaky(self.norm(self.activation(self.first(x - self.mean))))
        return self.last(hidden) / self.temperature * SETTINGS["factor"]


SETTINGS = {"factor": 1.0}
"""Global variables of the script."""


def edited_forward(net: Net, x: Tensor) -> Tensor:
    return net.last(net.leaky(net.norm(net.activation(net.first(x))))) - 0.5 * x[:, :CLASSES]


def calls_a_helper(model_call: Callable[..., Tensor], batch: Any) -> Tensor:
    return HELPERS["reduce"](model_call(batch[0]))


HELPERS: dict[str, Callable[[Tensor], Tensor]] = {"reduce": lambda logits: logits.sum(1)}


class Weighted(ImageClassificationModelOutput):
    """A task whose settings() leave out what its numbers depend on."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def evaluate(self, model_call: Any, batch: Any) -> OutputTerms:
        terms = super().evaluate(model_call, batch)
        return terms._replace(output=terms.output * self.weight)


class Doubled(RademacherProjector):
    """A projector whose fingerprint leaves out what its numbers depend on."""

    factor = 1.0

    def accumulator(self, *args: Any, **keywords: Any) -> Any:
        made = super().accumulator(*args, **keywords)
        features, factor = made.features, self.factor
        made.features = lambda: features() * factor
        return made


def collate_scaled(scale: float) -> Callable[[list[Any]], Any]:
    def collate(samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return x * scale, y

    return collate


@dataclass
class Script:
    """All that a user's script has of its own."""

    train: tuple[Tensor, ...] = field(default_factory=lambda: tensors(N, 0))
    targets: tuple[Tensor, ...] = field(default_factory=lambda: tensors(M, 1))
    dataset: Callable[[tuple[Tensor, ...]], Any] = Plain
    wrap: Callable[[Any], Any] = lambda data: data
    net: Net = field(default_factory=Net)
    task: Any = "image_classification"
    settings: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)

    def attributor(self, path: Path) -> Attributor:
        return Attributor(self.net, self.task, path, **{"proj_dim": 16, "progress": False, **self.settings})

    def featurize(self, path: Path, fail_at: int = -1) -> Attributor:
        data = self.dataset(self.train)
        data.fail_at = fail_at
        attributor = self.attributor(path)
        attributor.featurize(Rows(self.wrap(data), batch_size=8, **self.call))
        return attributor

    def score(self, attributor: Attributor) -> np.ndarray[Any, Any]:
        return attributor.score(Rows(self.wrap(self.dataset(self.targets)), **self.call)).numpy()


def shifted(script: Script, part: int) -> None:
    """Change one of the tensors, of train data and targets."""
    for name in ("train", "targets"):
        changed = [*getattr(script, name)]
        changed[part] = (changed[part] + 1) % CLASSES if part else changed[part] + 1
        setattr(script, name, tuple(changed))


def reversed_rows(script: Script) -> None:
    script.train, script.targets = (
        tuple(tensor.flip(0) for tensor in data) for data in (script.train, script.targets)
    )


def some_labels(script: Script) -> None:
    """Correct one label in ten."""
    for inputs, labels in (script.train, script.targets):
        assert len(inputs) == len(labels)
        labels[::10] = (labels[::10] + 1) % CLASSES


def patched(script: Script) -> None:
    script.net.forward = MethodType(edited_forward, script.net)  # type: ignore[method-assign]


def hooked(script: Script) -> None:
    script.net.first.register_forward_hook(lambda module, inputs, output: output * 1.5)


Change = Callable[[Script], Any]
KINDS: dict[str, tuple[Change, Change]] = {
    "values of a TensorDataset": (
        lambda s: setattr(s, "dataset", lambda data: Transformed(data, 1.0)),
        lambda s: shifted(s, 0),
    ),
    "samples": (lambda s: None, lambda s: shifted(s, 0)),
    "one label in ten": (lambda s: None, some_labels),
    "order of rows": (lambda s: None, reversed_rows),
    "setting of a transform": (lambda s: None, lambda s: setattr(s, "dataset", lambda d: Plain(d, 2.0))),
    "code of a dataset": (lambda s: None, lambda s: setattr(s, "dataset", Edited)),
    "transform of a subclass of TensorDataset": (
        lambda s: setattr(s, "dataset", lambda data: Transformed(data, 1.0)),
        lambda s: setattr(s, "dataset", lambda data: Transformed(data, 2.0)),
    ),
    "samples under one name": (
        lambda s: s.call.update(name="mine"),
        lambda s: shifted(s, 0),
    ),
    "collate function": (
        lambda s: s.settings.update(collate=collate_scaled(1.0)),
        lambda s: s.settings.update(collate=collate_scaled(2.0)),
    ),
    "collate function of a loader": (
        lambda s: setattr(s, "wrap", lambda d: DataLoader(d, 8, collate_fn=collate_scaled(1.0))),
        lambda s: setattr(s, "wrap", lambda d: DataLoader(d, 8, collate_fn=collate_scaled(2.0))),
    ),
    "forward method": (lambda s: None, patched),
    "activation": (lambda s: None, lambda s: setattr(s.net, "activation", torch.tanh)),
    "small change of an attribute of the model": (
        lambda s: None,
        lambda s: setattr(s.net, "temperature", 1.01),
    ),
    "attribute of a module inside": (lambda s: None, lambda s: setattr(s.net.leaky, "negative_slope", 0.3)),
    "epsilon of a normalisation": (lambda s: None, lambda s: setattr(s.net.norm, "eps", 1e-2)),
    "unsaved buffer": (lambda s: None, lambda s: s.net.mean.fill_(0.5)),
    "forward hook": (lambda s: None, hooked),
    "global variable that forward reads": (lambda s: None, lambda s: SETTINGS.update(factor=2.0)),
    "helper of the task": (
        lambda s: setattr(s, "task", calls_a_helper),
        lambda s: HELPERS.update(reduce=lambda logits: logits.square().sum(1)),
    ),
    "attribute of the task": (
        lambda s: setattr(s, "task", Weighted(1.0)),
        lambda s: setattr(s, "task", Weighted(2.0)),
    ),
    "code of the projector": (
        lambda s: s.settings.update(projector=Doubled(16, seed=0)),
        lambda s: setattr(s.settings["projector"], "factor", 2.0),
    ),
}


@pytest.fixture
def scripts(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[Script, Callable[[], Script]]:
    """Return a script, and what makes the changed one."""
    for name, value in {**SETTINGS}.items():
        monkeypatch.setitem(SETTINGS, name, value)
    monkeypatch.setitem(HELPERS, "reduce", HELPERS["reduce"])
    prepare, change = KINDS[request.param]

    def made() -> Script:
        script = Script()
        prepare(script)
        return script

    def changed() -> Script:
        script = made()
        change(script)
        return script

    return made(), changed


@pytest.mark.parametrize("scripts", KINDS, indirect=True)
def test_a_run_is_not_that_of_another_thing(
    scripts: tuple[Script, Callable[[], Script]], tmp_path: Path
) -> None:
    """Neither one that broke off nor a finished one is continued, and its scores are not those of other targets."""
    script, changed = scripts
    for name, fail_at in (("broken.zarr", BROKEN_AT), ("a.zarr", -1)):
        with contextlib.suppress(BrokeOffError):
            script.featurize(tmp_path / name, fail_at=fail_at)
    attributor = script.attributor(tmp_path / "a.zarr")
    first = script.score(attributor)
    assert np.array_equal(script.score(attributor), first), "nothing was changed"

    for name in ("broken.zarr", "a.zarr"):
        with pytest.raises(ManifestMismatchError):
            changed().featurize(tmp_path / name)
    other = changed()
    with pytest.raises(ManifestMismatchError):
        other.score(other.attributor(tmp_path / "a.zarr"))


MODEL_KINDS = [name for name in KINDS if "model" in name or "forward" in name or "buffer" in name]


@pytest.mark.parametrize("name", MODEL_KINDS)
def test_new_targets_are_not_scored_with_a_model_that_was_changed_since(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, "factor", 1.0)
    script = Script()
    attributor = script.featurize(tmp_path / "a.zarr")
    KINDS[name][1](script)

    with pytest.raises(
        ManifestMismatchError,
        match=r"ckpt-0: row 0 of the train data, computed again, differs from the stored row: features by",
    ):
        script.score(attributor)


def test_the_error_names_the_row_and_each_quantity(tmp_path: Path) -> None:
    script = Script()
    script.featurize(tmp_path / "a.zarr")
    script.net.temperature = 3.0

    with pytest.raises(
        ManifestMismatchError,
        match=r"row 0 of the train data, computed again, differs from the stored row: "
        r"features by 0\.\d+ of their norm .* out_to_loss is .* there, .* here.*"
        r"loss_curvature .*8 of 8 recomputed rows differ.* attributes or unsaved buffers",
    ):
        script.featurize(tmp_path / "a.zarr")


class Augmented(Plain):
    """Noise that is drawn anew at each access, or for each row once."""

    seeded = False

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        generator = torch.Generator().manual_seed(index) if self.seeded else None
        return x + torch.randn(x.shape, generator=generator), y


def test_samples_that_change_at_each_access_are_named_as_such_and_seeded_ones_pass(tmp_path: Path) -> None:
    script = Script(dataset=Augmented, call={"name": "augmented"})
    script.featurize(tmp_path / "a.zarr")
    with pytest.raises(ManifestMismatchError, match=r"sample itself changes .* seeded with the index"):
        script.featurize(tmp_path / "a.zarr")

    class Seeded(Augmented):
        seeded = True

    script = Script(dataset=Seeded)
    script.featurize(tmp_path / "b.zarr")
    assert script.featurize(tmp_path / "b.zarr") is not None


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int4"])
def test_other_batch_sizes_are_the_same_run_and_a_small_change_is_not(tmp_path: Path, dtype: str) -> None:
    for batch_size in (1, 7, 72):
        path = tmp_path / str(batch_size)
        script = Script(settings={"dtype": dtype})
        with pytest.raises(BrokeOffError):
            script.featurize(path, fail_at=BROKEN_AT)
        rows = Rows(script.dataset(script.train), batch_size=batch_size)
        assert script.attributor(path).featurize(rows).rows_written == N - DONE

    script.net.temperature = 1.02
    with pytest.raises(ManifestMismatchError, match="features by"):
        script.featurize(path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_other_dtypes_are_compared_within_their_rounding(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    def made(batch_size: int, temperature: float) -> int:
        script = Script(train=(tensors(N, 0)[0].to(dtype), tensors(N, 0)[1]))
        script.net.to(dtype).temperature = temperature
        data = script.dataset(script.train)
        return script.attributor(tmp_path / "a.zarr").featurize(Rows(data, batch_size=batch_size)).rows_found

    made(8, 1.0)
    assert made(3, 1.0) == N
    with pytest.raises(ManifestMismatchError):
        made(8, 2.0)


CONTINUED = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_changed_runs import Script
from trak_lite import Rows
import torch
torch.set_num_threads(2)
script = Script()
data = Rows(script.dataset(script.train), batch_size=5)
print(script.attributor(Path(sys.argv[1])).featurize(data).rows_written)
"""


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_another_instruction_set_continues(tmp_path: Path, capability: str) -> None:
    with pytest.raises(BrokeOffError):
        Script().featurize(tmp_path / "a.zarr", fail_at=BROKEN_AT)

    done = subprocess.run(
        [sys.executable, "-c", CONTINUED, str(tmp_path / "a.zarr"), str(Path(__file__).parent)],
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout.split() == [str(N - DONE)], done.stderr


def test_a_finished_run_is_compared_with_one_small_pass_per_checkpoint(tmp_path: Path) -> None:
    """Seen by the samples that reach the model."""
    script, seen = Script(), list[int]()
    states = [{name: value + k for name, value in script.net.state_dict().items()} for k in range(3)]
    script.attributor(tmp_path / "a.zarr").featurize(script.dataset(script.train), states)

    hook = script.net.first.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    assert (
        script.attributor(tmp_path / "a.zarr").featurize(script.dataset(script.train), states).rows_written
        == 0
    )
    hook.remove()
    assert (max(seen), seen.count(8)) == (8, 3), seen


class Growing(Plain):
    """Gets longer whenever it is asked."""

    extra = 0

    def __len__(self) -> int:
        self.extra += 1
        return N // 2 + self.extra


def test_a_dataset_whose_length_changes_during_a_call_is_refused(tmp_path: Path) -> None:
    script = Script()
    with pytest.raises(InvalidInputError, match="37 rows when the call began, and has 38 now"):
        script.attributor(tmp_path / "a.zarr").featurize(Growing(script.train))

    assert not (tmp_path / "a.zarr").exists()


NUMBERS = [[1, 23], [12, 3], [123], [1, 2, 3], [[1, 2], 3], [[1], [2, 3]], (1, 23.0), True, 1, 1.0, 1 + 0j]
TEXTS = [["1", "23"], ["12", "3"], ["1'", "'23"], "1", b"1", None, "None"]
DICTS = [{"a": 1, "b": 23}, {"a": 12, "b": 3}, {"ab": 1}, {"a": "b1"}, {1: "a"}, {"1": "a"}]
ARRAYS = [
    torch.tensor([1, 23]),
    torch.tensor([1, 23], dtype=torch.int32),
    torch.tensor([[1, 23]]),
    torch.tensor([1.0, 23.0]),
    np.array(["1", "23"]),
    np.array(["12", "3"]),
]


@pytest.mark.quick
def test_no_two_samples_have_the_same_digest() -> None:
    different = [*NUMBERS, *TEXTS, *DICTS, *ARRAYS]
    digests = [Rows([[sample]]).identity()["samples"] for sample in different]

    assert len(set(digests)) == len(digests)
