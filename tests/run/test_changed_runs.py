"""What rows depend on is changed between two calls on one path: noticed each time, by a named error.

Each kind is tried in three ways: a run that broke off is continued with the changed thing; a finished one is called
again; and targets that were scored are scored again under their name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
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

    def __init__(self, tensors: tuple[Tensor, ...], scale: float) -> None:
        self.tensors, self.scale, self.fail_at = tensors, scale, -1

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        if index == self.fail_at:
            raise BrokeOffError
        return self.tensors[0][index] * self.scale, self.tensors[1][index]


class Transformed(Plain, TensorDataset):
    """A TensorDataset with a transform, as many people write one."""


def tensors(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = np.random.default_rng(seed)  # as below
    inputs = generator.normal(size=(count, WIDTH)).astype(np.float32)
    return torch.from_numpy(inputs), torch.from_numpy(generator.integers(CLASSES, size=count))


class Net(nn.Module):
    """A classifier with what a state dict does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.temperature = 1.0
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        generator = np.random.default_rng(0)  # torch's random numbers depend on the instruction set
        for p in self.parameters():
            p.data.copy_(torch.from_numpy(generator.normal(size=p.shape) / 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.silu(self.first(x - self.mean))) / self.temperature * SETTINGS["factor"]


PLAIN: dict[str, Any] = {"factor": 1.0, "reduce": lambda logits: logits.sum(1)}
SETTINGS = {**PLAIN}
"""Global variables of the script."""


def calls_a_helper(model_call: Callable[..., Tensor], batch: Any) -> Tensor:
    return SETTINGS["reduce"](model_call(batch[0]))


class Weighted(ImageClassificationModelOutput):
    """A task whose settings() leave out what its numbers depend on."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def evaluate(self, model_call: Any, batch: Any) -> OutputTerms:
        terms = super().evaluate(model_call, batch)
        return terms._replace(output=terms.output * self.weight)


class Scaled(RademacherProjector):
    """A projector whose fingerprint leaves out what its numbers depend on."""

    def __init__(self, factor: float) -> None:
        super().__init__(16, seed=0)
        self.factor = factor

    def accumulator(self, *args: Any, **keywords: Any) -> Any:
        made = super().accumulator(*args, **keywords)
        features, factor = made.features, self.factor
        made.features = lambda: features() * factor
        return made


def sum_of_squares(logits: Tensor) -> Tensor:
    return logits.square().sum(1)


def collate_scaled(scale: float) -> Callable[[list[Any]], Any]:
    def collate(samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return x * scale, y

    return collate


@dataclass(kw_only=True)
class Script:
    """All that a user's script has of its own."""

    shift: float = 0.0
    """Added to all inputs."""
    relabel: bool = False
    """Whether one label in ten was corrected."""
    backwards: bool = False
    """Whether the rows come in reverse."""
    dataset: type[Plain] = Plain
    scale: float = 1.0
    """Of the transform of the dataset."""
    loader_collate: Any = None
    dtype: torch.dtype = torch.float32
    net: Net = field(default_factory=Net)
    model: dict[str, Any] = field(default_factory=dict)
    """Attributes of the model by name, and ``"hook"``: a forward hook."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Global variables."""
    task: Any = "image_classification"
    settings: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        SETTINGS.update(PLAIN | self.variables)
        self.net.to(self.dtype)
        for name, value in self.model.items():
            if name == "hook":
                self.net.first.register_forward_hook(value)
            else:
                setattr(self.net, name, value)

    def data(self, count: int, seed: int) -> Any:
        inputs, labels = tensors(count, seed)
        if self.relabel:
            labels[::10] = (labels[::10] + 1) % CLASSES
        rows = torch.arange(count).flip(0) if self.backwards else slice(None)
        data = self.dataset(((inputs + self.shift).to(self.dtype)[rows], labels[rows]), self.scale)
        return data if self.loader_collate is None else DataLoader(data, 8, collate_fn=self.loader_collate)

    def attributor(self, path: Path) -> Attributor:
        return Attributor(self.net, self.task, path, **{"proj_dim": 16, "progress": False, **self.settings})

    def featurize(self, path: Path, fail_at: int = -1, batch_size: int = 8) -> Attributor:
        data, attributor = self.data(N, 0), self.attributor(path)
        getattr(data, "dataset", data).fail_at = fail_at
        self.summary = attributor.featurize(Rows(data, batch_size=batch_size, **self.call))
        return attributor

    def score(self, attributor: Attributor) -> np.ndarray[Any, Any]:
        return attributor.score(Rows(self.data(M, 1), **self.call)).numpy()


MINE: dict[str, Any] = {"call": {"name": "mine"}}
COLLATES = [{"settings": {"collate": collate_scaled(by)}} for by in (1.0, 2.0)]
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "samples": ({}, {"shift": 1.0}),
    "samples under one name": (MINE, {"shift": 1.0}),
    "one label in ten under one name": (MINE, {"relabel": True}),
    "order of rows": ({}, {"backwards": True}),
    "transform of a subclass of TensorDataset": ({"dataset": Transformed}, {"scale": 2.0}),
    "collate function": (COLLATES[0], COLLATES[1]),
    "collate function under one name": (COLLATES[0] | MINE, COLLATES[1]),
    "collate function of a loader": tuple({"loader_collate": collate_scaled(by)} for by in (1.0, 2.0)),
    "variable that the task calls": ({"task": calls_a_helper}, {"variables": {"reduce": sum_of_squares}}),
    "attribute of the task": ({"task": Weighted(1.0)}, {"task": Weighted(2.0)}),
    "code of the projector": tuple({"settings": {"projector": Scaled(by)}} for by in (1.0, 2.0)),
}
MODEL_KINDS: dict[str, dict[str, Any]] = {
    "small change of an attribute": {"model": {"temperature": 1.01}},
    "unsaved buffer": {"model": {"mean": torch.full((WIDTH,), 0.5)}},
    "forward hook": {"model": {"hook": lambda module, inputs, output: output * 1.5}},
    "global variable that forward reads": {"variables": {"factor": 2.0}},
}
KINDS |= {name: ({}, change) for name, change in MODEL_KINDS.items()}
"""Settings of a script, and those that were changed since."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_not_that_of_another_thing(kind, tmp_path):
    """Neither one that broke off nor a finished one is continued, and its scores are not those of other targets."""
    before, change = KINDS[kind]
    script = Script(**before)
    with pytest.raises(BrokeOffError):
        script.featurize(tmp_path / "broken.zarr", fail_at=BROKEN_AT)
    attributor = script.featurize(tmp_path / "a.zarr")
    first = script.score(attributor)
    assert np.array_equal(script.score(attributor), first), "nothing was changed"
    other = Script(**before | change)
    for name in ("broken.zarr", "a.zarr"):
        with pytest.raises(ManifestMismatchError):
            other.featurize(tmp_path / name)
    with pytest.raises(ManifestMismatchError):
        other.score(other.attributor(tmp_path / "a.zarr"))


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_new_targets_are_not_scored_with_a_model_that_was_changed_since(kind, tmp_path):
    script = Script()
    attributor = script.featurize(tmp_path / "a.zarr")
    Script(net=script.net, **MODEL_KINDS[kind])
    stated = r"ckpt-0: row 0 of the train data, computed again, differs from the stored row: features by"
    with pytest.raises(ManifestMismatchError, match=stated):
        script.score(attributor)


def test_the_error_names_the_row_and_each_quantity(tmp_path):
    script = Script()
    script.featurize(tmp_path / "a.zarr")
    script.net.temperature = 3.0
    said = (
        r"row 0 of the train data, computed again, differs from the stored row: features by 0\.\d+ of their norm .* "
        r"out_to_loss is .* there, .* here.*loss_curvature .*8 of 8 recomputed rows differ.* attributes or unsaved"
    )
    with pytest.raises(ManifestMismatchError, match=said):
        script.featurize(tmp_path / "a.zarr")


class Augmented(Plain):
    """Noise that is drawn anew at each access, or for each row once."""

    seeded = False

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        generator = torch.Generator().manual_seed(index) if self.seeded else None
        return x + torch.randn(x.shape, generator=generator), y


class Seeded(Augmented):
    seeded = True


def test_samples_that_change_at_each_access_are_named_as_such_and_seeded_ones_pass(tmp_path):
    script = Script(dataset=Augmented, call={"name": "augmented"})
    script.featurize(tmp_path / "a.zarr")
    with pytest.raises(ManifestMismatchError, match=r"sample itself changes .* seeded with the index"):
        script.featurize(tmp_path / "a.zarr")
    script = Script(dataset=Seeded)
    for _ in range(2):
        script.featurize(tmp_path / "b.zarr")
    assert script.summary.rows_written == 0


@pytest.mark.parametrize("name", ["dataset.zarr", "dataset.num_rows.zarr"])
def test_random_samples_are_a_hint_where_samples_differ_whatever_the_path_is(name, tmp_path):
    data, other = (TensorDataset(*tensors(12, seed)) for seed in (0, 1))

    def refused(samples: TensorDataset, seed: int) -> str:
        made = Attributor(nn.Linear(WIDTH, CLASSES), "image_classification", tmp_path / name, seed=seed)
        with pytest.raises(ManifestMismatchError) as error:
            made.featurize(samples)
        return str(error.value)

    Attributor(nn.Linear(WIDTH, CLASSES), "image_classification", tmp_path / name, seed=0).featurize(data)
    assert "augmentation" in refused(other, 0)
    assert "augmentation" not in refused(data, 1)
    assert "augmentation" not in refused(TensorDataset(*tensors(14, 0)), 0)


@pytest.mark.parametrize(
    ("lengths", "row"), [((4, 1, 2, 3, 7, 5), 1), ((1, 4, 2, 3, 5, 7), 0), ((3, 3, 4, 2, 5, 7), 3)]
)
def test_a_row_that_depends_on_the_padding_of_its_batch_is_named_as_such(lengths, row, tmp_path):
    def padded(samples: list[Any]) -> Any:
        return nn.utils.rnn.pad_sequence([x for (x,) in samples], batch_first=True)

    data = [(torch.full((length, 1), 0.5),) for length in lengths]
    model = nn.Linear(1, 3)
    made = Attributor(
        model,
        lambda call, x: call(x).sum(2).mean(1),
        tmp_path / "a.zarr",
        collate=padded,
        batch_size=2,
        progress=False,
    )
    with pytest.warns(
        UserWarning, match=rf"f of row {row} .* is .* in its batch .* depends on how far its batch is padded"
    ):
        made.featurize(data)
    with pytest.raises(ManifestMismatchError, match=r"padded to the longest .* Leave the padding out of f"):
        made.featurize(Rows(data, batch_size=6, collate=padded))


def relative_lengths(samples):
    lengths = torch.tensor([len(x) for x, _ in samples], device="cpu")
    return {**padded_pairs(samples), "lengths": lengths / lengths.max()}


def centred(samples):
    longest = max(len(x) for x, _ in samples)
    whole = [nn.functional.pad(x, (k := (longest - len(x)) // 2, longest - len(x) - k)) for x, _ in samples]
    return {**padded_pairs(samples), "x": torch.stack(whole)}


def masked_if_padded(samples):
    lengths = torch.tensor([len(x) for x, _ in samples], device="cpu")
    batch = padded_pairs(samples)
    return batch if len(set(lengths.tolist())) == 1 else {**batch, "mask": batch["x"] != 0}


def padded_pairs(samples):
    x = nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
    return {"x": x, "y": torch.stack([y for _, y in samples]), "number": 1}


def of_one_length(change):
    return lambda samples: change(padded_pairs([(x[:2], y) for x, y in samples]))


@pytest.mark.parametrize(
    ("collate", "cause"),
    [
        (relative_lengths, "how far its batch is padded"),
        (centred, "how far its batch is padded"),
        (masked_if_padded, "how far its batch is padded"),
        (of_one_length(lambda b: {**b, "number": len(b["x"])}), "what the collate function computes"),
        (
            of_one_length(lambda b: {**b, "number": torch.tensor(len(b["x"]), device="cpu")}),
            "what the collate function computes",
        ),
        (of_one_length(lambda b: {**b, "x": b["x"] - b["x"].mean(0)}), "what the collate function computes"),
        (of_one_length(lambda b: {**b, "x": b["x"] / b["x"].max()}), "what the collate function computes"),
        (lambda samples: {**padded_pairs(samples), "id": object()}, "how far its batch is padded"),
        (of_one_length(lambda b: {**b, "place": torch.arange(len(b["x"]), device="cpu")}), None),
        (
            of_one_length(lambda b: {**b, "x": b["x"] * torch.rand(1, device="cpu")}),
            None,
        ),  # refused elsewhere
    ],
    ids=[
        "lengths",
        "centred",
        "mask",
        "number",
        "0-d tensor",
        "mean",
        "largest",
        "object",
        "places",
        "drawn",
    ],
)
def test_a_row_that_depends_on_what_its_batch_is_collated_from_is_named(collate, cause, recwarn):
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.rand(2 + i % 3, generator=generator) + 1, torch.rand(1, generator=generator)[0])
        for i in range(8)
    ]

    def output(call: Any, batch: Any) -> Tensor:
        return call(batch["x"][..., None]).sum(2).mean(1) * batch["y"] / batch["number"]

    torch.manual_seed(0)
    made = Attributor(nn.Linear(1, 3), output, None, collate=collate, batch_size=4, progress=False)
    made.featurize(Rows(data, name="pairs"))

    messages = [str(one.message) for one in recwarn if "in its batch" in str(one.message)]
    assert len(messages) == (cause is not None)
    assert all(f"alone: it depends on {cause}" in message for message in messages)


def masked(samples):
    lengths = torch.tensor([len(x) for x in samples], device="cpu")
    x = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"x": x, "mask": (torch.arange(x.shape[1], device="cpu") < lengths[:, None])[..., None]}


def featurize_padded(model, output, data):
    """Rows are in one batch."""
    Attributor(model, output, None, collate=masked, batch_size=len(data), progress=False).featurize(data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weak_dependence_on_padding_is_named_whatever_the_other_rows_are(dtype):
    """Row 0 has a large f, the shorter row 1 an f that does not change, and the model does not run on row 3 alone."""

    def output(call: Any, batch: Any) -> Tensor:
        if batch["x"].shape[1] < 2:
            raise ValueError("too short")
        return (call(batch["x"]) * batch["mask"]).sum((1, 2)) * (1 + 1e-3 * batch["x"].mean((1, 2)))

    data = [torch.full((n, 1), x, dtype=dtype) for n, x in ((6, 100.0), (2, 0.0), (4, 1.0), (1, 1.0))]
    torch.manual_seed(0)
    with pytest.warns(
        UserWarning, match=r"f of row 2 of the train data is .* it depends on how far its batch is padded"
    ):
        featurize_padded(nn.Linear(1, 1, dtype=dtype), output, data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_f_that_padding_changes_by_rounding_alone_is_not_named(dtype, recwarn):
    """The two halves of a text, of large numbers that cancel, are others if it is padded; their sum is not."""

    def output(call: Any, batch: Any) -> Tensor:
        halves = (call(batch["x"]) * batch["mask"])[..., 0].tensor_split(2, 1)
        return halves[0].sum(1) + halves[1].sum(1)

    torch.manual_seed(0)
    model, data = nn.Linear(8, 1, dtype=dtype), []
    for n in (90, 40, 61, 17):
        x = 1e3 * torch.randn(n, 8, dtype=dtype)
        data.append(torch.cat([x, -x[torch.randperm(n)]]))
    together = output(model, masked(data))
    changes = [abs(1 - output(model, masked([x])) / f) for x, f in zip(data, together, strict=True)]
    assert max(changes) > 5e-5

    featurize_padded(model, output, data)
    assert not [str(one.message) for one in recwarn if "in its batch" in str(one.message)]


STORED = [(torch.float32, {"dtype": dtype}) for dtype in ("float32", "float16", "int8", "int4")]


@pytest.mark.parametrize(("dtype", "settings"), [*STORED, (torch.float64, {}), (torch.bfloat16, {})])
def test_other_batch_sizes_are_the_same_run_within_rounding(tmp_path, dtype, settings):
    """And a small change is not, where rounding lets it be told."""
    script = Script(settings=settings, dtype=dtype)
    for batch_size in (1, 7, 72):
        path = tmp_path / str(batch_size)
        with pytest.raises(BrokeOffError):
            script.featurize(path, fail_at=BROKEN_AT)
        script.featurize(path, batch_size=batch_size)
        assert script.summary.rows_written == N - DONE
    script.net.temperature = 2.0 if dtype == torch.bfloat16 else 1.02
    with pytest.raises(ManifestMismatchError, match="features by"):
        script.featurize(path)


CONTINUED = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_changed_runs import Script
import torch
torch.set_num_threads(2)
script = Script()
script.featurize(Path(sys.argv[1]), batch_size=5)
print(script.summary.rows_written)
"""


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_another_instruction_set_continues(tmp_path, capability):
    with pytest.raises(BrokeOffError):
        Script().featurize(tmp_path / "a.zarr", fail_at=BROKEN_AT)
    command = [sys.executable, "-c", CONTINUED, str(tmp_path / "a.zarr"), str(Path(__file__).parent)]
    env = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(N - DONE)], done.stderr


def test_a_finished_run_is_compared_with_one_small_pass_per_checkpoint(tmp_path):
    """Seen by the samples that reach the model."""
    script, seen = Script(), list[int]()
    data = script.data(N, 0)
    states = [{name: value + k for name, value in script.net.state_dict().items()} for k in range(3)]
    script.attributor(tmp_path / "a.zarr").featurize(data, states)
    hook = script.net.first.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    again = script.attributor(tmp_path / "a.zarr")
    assert again.featurize(data, states).rows_written == 0
    assert (max(seen), seen.count(8)) == (8, 1 + 3), seen  # and f of the first batch, beside its halves
    again.score(script.data(M, 1))
    hook.remove()
    assert seen.count(8) == 1 + 6


class Growing(Plain):
    """Gets longer whenever it is asked."""

    extra = 0

    def __len__(self) -> int:
        self.extra += 1
        return N // 2 + self.extra


def test_a_dataset_whose_length_changes_during_a_call_is_refused(tmp_path):
    script = Script()
    with pytest.raises(InvalidInputError, match="37 rows when the call began, and has 38 now"):
        script.attributor(tmp_path / "a.zarr").featurize(Growing(tensors(N, 0), 1.0))
    assert not (tmp_path / "a.zarr").exists()


NUMBERS = [[1, 23], [12, 3], [123], [1, 2, 3], [[1, 2], 3], [[1], [2, 3]], (1, 23.0), True, 1, 1.0, 1 + 0j]
TEXTS = [["1", "23"], ["12", "3"], ["1'", "'23"], "1", b"1", None, "None"]
DICTS = [{"a": 1, "b": 23}, {"a": 12, "b": 3}, {"ab": 1}, {"a": "b1"}, {1: "a"}, {"1": "a"}]
ARRAYS = [torch.tensor(numbers) for numbers in ([1, 23], [[1, 23]], [1.0, 23.0])]
ARRAYS += [torch.tensor([1, 23], dtype=torch.int32), np.array(["1", "23"]), np.array(["12", "3"])]


@pytest.mark.quick
def test_no_two_samples_have_the_same_digest():
    different = [*NUMBERS, *TEXTS, *DICTS, *ARRAYS]
    digests = [Rows([[sample]]).identity()["samples"] for sample in different]
    assert len(set(digests)) == len(digests)
