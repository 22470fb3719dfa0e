"""Rows of a running training: against plain autograd with the weights of every step, mostly in float64."""

import copy
import pathlib
import random
import re
from typing import Any, cast

import numpy as np
import pytest
import torch
from dense_cases import close, columns
from tiny_runs import Merging
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows, errors, methods
from trak_lite.cli import main
from trak_lite.featurizing import capture as capturing
from trak_lite.gradient_computers import replays
from trak_lite.store import check_store

N, BATCH, RTOL = 80, 4, 1e-6


def data():
    inputs = torch.randn(N, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0.5).long())


class Network(nn.Sequential):
    def __init__(self, *middle):
        super().__init__(nn.Linear(5, 8), nn.GELU(), *middle, nn.Linear(8, 3))
        self.double()


class Odd(nn.Module):
    """A layer with one habit that a pass between two steps must survive."""

    def __init__(self, habit):
        super().__init__()
        self.habit, self.calls, self.shift = habit, 0, torch.zeros(8, dtype=torch.float64)
        self.gate = nn.Parameter(torch.zeros(8))
        self.register_buffer("seen", torch.ones(8))
        self.register_buffer("num_seen", torch.zeros(()))
        self.register_buffer("num_calls", torch.zeros(()))
        self.table = nn.Embedding(4, 8, max_norm=0.1 if habit == "max_norm" else None)

    def forward(self, x):
        if self.habit == "buffer":
            self.calls, self.num_seen = self.calls + 1, self.num_seen + len(x)
            self.num_calls.add_(1)
            if self.training:
                self.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        elif self.habit == "attribute" and self.training:
            self.shift += x.detach().mean(0)
        elif self.habit == "random":
            factor = random.uniform(0.5, 1.5)  # drawn in eval mode too
            x = x * factor if self.training else x
        elif self.habit == "in place":
            x.mul_(1.5)
        elif self.habit == "recomputed":
            x = checkpoint(torch.tanh, x, use_reentrant=False)
        elif self.habit == "branch" and float(self.gate.detach()[0]) < -0.02:
            x = x.flip(1) * self.gate
        x = x + 2 * self.shift + self.seen + self.table.weight[0] + self.table(x[:, 0].abs().long() % 4)
        return x + self.gate * (x @ self.table.weight.T @ self.table.weight)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Stores without a path of their own are in the folder of the test; replays begin at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(replays, "_SECONDS", 0.0)
    monkeypatch.setattr(replays, "_PASSES", 0.0)
    torch.manual_seed(0)


def attributor(model, path="run.zarr", **settings):
    given = {"projector": "none", "dtype": "float32", "progress": False, **settings}
    return Attributor(model, "image_classification", path, **given)


def order(seed=7):
    return list(torch.randperm(N, generator=torch.Generator().manual_seed(seed)).split(BATCH))


def gradients(model, x, y):
    """The gradients of the margin by plain autograd, sample by sample, in eval mode."""
    rows, own = [], copy.deepcopy(model).eval()
    for sample, label in zip(x, y, strict=True):
        logits = own(sample.clone()[None])[0]
        f = logits[label] - torch.cat([logits[:label], logits[label + 1 :]]).logsumexp(0)
        found = torch.autograd.grad(f, list(own.parameters()), allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([grad.flatten() for grad in found]).numpy())
    return np.stack(rows)


def epoch(model, capture, batches, *, optimizer=None, called=None, accumulate=1, augment=0.0):
    """A plain loop; returns the expected rows, those of the first visits, NaN for others."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02) if optimizer is None else optimizer
    rows = np.full((N, sum(p.numel() for p in model.parameters())), np.nan)
    inputs, labels = data().tensors
    for number, numbers in enumerate(batches):
        x, y = inputs[numbers] + augment * torch.randn(len(numbers), 5, dtype=torch.float64), labels[numbers]
        if capture is not None:
            state = torch.get_rng_state(), random.getstate()
            new = np.isnan(rows[numbers]).all(1)
            rows[numbers[new]] = gradients(model, x, y)[new]
            torch.set_rng_state(state[0])
            random.setstate(state[1])
            capture((x, y), numbers)
        (nn.functional.cross_entropy((called or model)(x), y) / accumulate).backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return rows


def stored(made, path="ckpt-0"):
    return columns(made.path, path)["features"]


HABITS = ["buffer", "attribute", "random", "in place", "recomputed", "branch"]
LAYERS = {
    "plain": list,
    "dropout": lambda: [nn.Dropout(0.3)],
    "batch norm": lambda: [nn.BatchNorm1d(8)],
    "merging": lambda: [Merging()],
    "keeping": lambda: [Keeping()],
    **{habit: lambda habit=habit: [Odd(habit)] for habit in HABITS},
}


class Keeping(nn.Module):
    """Keeps a value that it computes from its weight in the first pass in eval mode; a copy has none."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "kept"}

    def forward(self, x):
        if self.training:
            return x @ (self.weight + self.weight.detach().exp())
        if not hasattr(self, "kept"):
            self.kept = self.weight.detach().exp()
        return x @ (self.weight + self.kept)


@pytest.mark.parametrize("layers", LAYERS)
def test_rows_are_those_of_autograd_and_the_training_keeps_its_bits(layers, monkeypatch, caplog):
    monkeypatch.setattr(capturing, "_SETTLED_AFTER", 4)  # replays from the seventh
    model = Network(*LAYERS[layers]())
    plain = copy.deepcopy(model)
    loops = {"accumulate": 3 if layers == "dropout" else 1, "augment": 0.1}
    made = attributor(model)
    state = torch.get_rng_state(), random.getstate()
    with caplog.at_level("DEBUG", "trak_lite"), made.capture(data(), "epoch-0") as capture:
        rows = epoch(model, capture, order()[:10], **loops)
        # Rows that are visited again stay, beside new ones of the same batch.
        more = epoch(model, capture, order(8)[:6], **loops)
    ends = torch.get_rng_state(), random.getstate()
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    epoch(plain, None, order()[:10], **loops)
    epoch(plain, None, order(8)[:6], **loops)
    assert (torch.get_rng_state() == ends[0]).all()
    assert random.getstate() == ends[1]
    for (name, value), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(value, other), name
        assert (value.grad is None) == (other.grad is None)
    assert all(map(torch.equal, model.buffers(), plain.buffers()))
    assert all(module.training for module in model.modules())
    calls, others = ([m.calls for m in net.modules() if isinstance(m, Odd)] for net in (model, plain))
    assert calls == others
    rows = np.where(np.isnan(rows), more, rows)
    seen = ~np.isnan(rows).all(1)
    assert 10 * BATCH < seen.sum() < N
    close(stored(made)[seen], rows[seen], RTOL)
    if layers == "plain":
        assert "is recorded" in caplog.text


@pytest.mark.parametrize("wrapper", ["ddp", "compiled", "ema"])
def test_wrapped_models_are_captured(wrapper, tmp_path):
    model = Network()
    made, called, hook = attributor(model), cast("Any", model), None
    try:
        if wrapper == "ddp":
            address = f"file://{tmp_path / 'rendezvous'}"
            torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
            called = nn.parallel.DistributedDataParallel(model)
        elif wrapper == "compiled":
            called = torch.compile(model, backend="eager")
        else:
            averaged = torch.optim.swa_utils.AveragedModel(model)
            hook = model.register_forward_hook(lambda *_: averaged.update_parameters(model))
        with made.capture(data(), "epoch-0") as capture:
            rows = epoch(model, capture, order(), called=called)
    finally:
        if wrapper == "ddp":
            torch.distributed.destroy_process_group()
        torch._dynamo.reset()
    assert hook is None or hook.id in model._forward_hooks
    close(stored(made), rows, RTOL)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_a_module_that_storage_loses_is_told_when_the_capture_ends(dtype):
    model = Network()
    with torch.no_grad():
        model[-1].weight.mul_(1e-7)  # and with it the gradients of the first layer
    with (
        pytest.warns(UserWarning, match=f"'epoch-0': {dtype} loses .* of module '0'.* in 1 of 2 modules"),
        attributor(model, dtype=dtype).capture(data(), "epoch-0") as capture,
    ):
        capture(data().tensors, range(N))


def test_a_captured_table_is_used_as_any_other_and_described(tmp_path, capsys):
    folder, model = tmp_path / "weights", Network()
    made = attributor(model, dtype="int8", store_norms=True)
    for name in ("epoch-0", "epoch-1"):
        with made.capture(data(), name, folder=folder) as capture:
            rows = epoch(model, capture, order()[:-2])
            made.featurize(data(), Network().state_dict())  # of other weights: another id
            missing = capture.num_missing
        assert missing == 2 * BATCH
    left = np.isnan(rows).all(1)
    rows[left] = gradients(model, *(part[left] for part in data().tensors))
    np.testing.assert_allclose(stored(made, "ckpt-2"), rows, atol=0.02 * np.abs(rows).max())
    main(["inspect", str(made.path)])
    assert "captured: each row" in capsys.readouterr().out
    assert check_store(made.path).findings == ()
    later = attributor(Network(), dtype="int8", store_norms=True)
    later.drop_checkpoint("ckpt-1")
    later.drop_checkpoint("ckpt-3")
    assert later.score(data(), "test").shape == (N, N)  # finds the saved weights
    summary = later.featurize(data(), [folder / "epoch-0.pt", folder / "epoch-1.pt"])
    assert (summary.rows_written, summary.rows_found) == (0, 2 * N)
    assert later.score(data(), "fitted", method=methods.EKFAC()).shape == (N, N)
    assert later.gradient_norms().shape == (2, N)
    longer = torch.utils.data.ConcatDataset([data(), data()])
    with pytest.raises(errors.ManifestMismatchError):
        later.featurize(longer, append=True)
    later.drop_checkpoint("epoch-0")
    with pytest.raises(errors.ManifestMismatchError, match="epoch-2"), later.capture(data(), "epoch-2"):
        later.model.load_state_dict(model.state_dict())
    named = attributor(Network(), "named.zarr")
    with named.capture(Rows(data(), name="data"), "epoch-0"):
        pass
    with pytest.raises(errors.ManifestMismatchError, match="captured in a training"):
        named.featurize(Rows(longer, name="data"), append=True)


def test_lost_rows_of_a_capture_are_not_computed_with_the_weights_at_the_end(tmp_path):
    model = Network()
    start = copy.deepcopy(model.state_dict())
    made = attributor(model)
    with made.capture(data(), "a", folder=tmp_path / "weights") as capture:
        epoch(model, capture, order())
    next((tmp_path / "run.zarr" / "ckpt-0").glob("features/c*")).unlink()
    later = attributor(Network())
    said = "ckpt-0 has lost 80 of 80 rows that the capture 'a' took.*drop_checkpoint"
    with pytest.raises(errors.StateError, match=said):
        later.featurize(data(), tmp_path / "weights")
    with pytest.raises(errors.StateError, match=said), later.capture(data(), "a", resume=True):
        later.model.load_state_dict(model.state_dict())
    later.model.load_state_dict(start)
    later.drop_checkpoint("ckpt-0")
    with later.capture(data(), "a") as capture:
        rows = epoch(later.model, capture, order())
    close(stored(later), rows, RTOL)


def broken_off(capture, *args, lost=False, **options):
    """Train and capture rows of a block that an interrupt ends; the last ones may be killed before they are written."""
    with pytest.raises(KeyboardInterrupt), capture as taken:  # noqa: PT012
        rows = epoch(args[0], taken, *args[1:], **options)
        if lost:
            taken._kept.clear()
        raise KeyboardInterrupt
    return rows


@pytest.mark.parametrize("layers", ["plain", "merging"])
def test_a_killed_training_goes_on(layers):
    model = Network(*LAYERS[layers]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = broken_off(attributor(model).capture(data(), "a"), model, order()[:6], optimizer=optimizer)
    made = attributor(model)
    with pytest.raises(errors.StateError, match="No train row"):
        made.score(data(), "itself")
    with pytest.raises(errors.StateError, match="resume=True"), made.capture(data(), "a"):
        pass
    again = made.capture(data(), "a", resume=True)
    broken_off(again, model, order()[6:8], optimizer=optimizer, lost=True)
    with made.capture(data(), "a", resume=True) as capture:
        assert capture.num_missing == N - 6 * BATCH
        found = epoch(model, capture, order(), optimizer=optimizer)
    seen = torch.cat(order()[:6]).numpy()
    found[seen] = rows[seen]
    close(stored(made), found, RTOL)
    with made.capture(data(), "a", resume=True) as capture:
        assert capture.num_missing == 0
    epoch(model, None, order()[:1])
    with (
        pytest.raises(errors.ManifestMismatchError, match="another training"),
        made.capture(data(), "a", resume=True),
    ):
        pass
    for scale in (1.0, 2.0):  # of one name
        made.featurize(data(), {name: scale * value for name, value in model.state_dict().items()})
    for name in ("0", "b"):
        broken_off(made.capture(data(), name), model, order()[:1])
    for name, count in (("", 0), ("c", 0), ("0", 2)):
        with pytest.raises(errors.InvalidInputError, match=f"{count} checkpoints have the name"):
            made.drop_checkpoint(name)
    for name in ("0", "b"):
        with pytest.raises(errors.StateError, match=f"has {BATCH} rows of a capture '{name}'"):
            made.capture(data(), name).__enter__()
    with pytest.raises(errors.InvalidInputError, match=r"ckpt-1 \(0\), ckpt-2 \(0\), captured/0/") as several:
        made.drop_checkpoint("0")
    path = cast("re.Match[str]", re.search(r"captured/0/ckpt-\d+", str(several.value)))[0]
    made.drop_checkpoint(path)
    with pytest.raises(
        errors.InvalidInputError, match=f"0 checkpoints have the name '{path}'.*ckpt-2.*captured/b"
    ):
        made.drop_checkpoint(path)
    made.drop_checkpoint("b")
    with made.capture(data(), "b") as capture:
        assert capture.num_missing == N


def test_adam_states_of_the_steps_make_the_rows_of_less(tmp_path):
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    made = attributor(model, normalize="adam_update")
    with pytest.raises(errors.InvalidInputError, match="optimizer"), made.capture(data(), "epoch-0"):
        pass
    rows = []
    with made.capture(data(), "epoch-0", optimizer=optimizer, folder=tmp_path / "weights") as capture:
        for step, numbers in enumerate(order()[:4]):
            state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            later = attributor(Network(), f"step-{step}.zarr", normalize="adam_update")
            later.featurize(torch.utils.data.Subset(data(), numbers.tolist()), state)
            rows.append(stored(later))
            epoch(model, capture, [numbers], optimizer=optimizer)
    seen = torch.cat(order()[:4])
    np.testing.assert_allclose(stored(made)[seen], np.concatenate(rows), rtol=1e-5, atol=1e-6)
    assert made.score(data(), "itself").shape == (N, N)
    saved = attributor(Network(), "saved.zarr", normalize="adam_update")
    saved.featurize(data(), tmp_path / "weights" / "epoch-0.pt")  # with its optimizer state


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"folder": "a file"}, r"a file.epoch-0\.pt cannot be written: "),
        ({"folder": "a file/inside"}, r"inside.epoch-0\.pt cannot be written: "),
        ({"folder": "a folder"}, r"a folder.epoch-0\.pt cannot be written: "),
        ({"folder": 3}, "folder must be a path, got 3"),
        ({"optimizer": "adam"}, "optimizer is 'adam', expected the torch.optim.Optimizer"),
        ({"optimizer": torch.optim.Adam}, "optimizer is <class 'torch.*Adam'>, expected"),
        ({"optimizer": Network()}, "optimizer is Network"),
    ],
)
def test_what_cannot_be_saved_at_the_end_is_refused_before_the_first_step(given, said):
    pathlib.Path("a file").touch()
    pathlib.Path("a folder/epoch-0.pt").mkdir(parents=True)
    made = attributor(Network())
    with pytest.raises(errors.InvalidInputError, match=said), made.capture(data(), "epoch-0", **given):
        pytest.fail("a step was taken")
    assert not pathlib.Path("run.zarr").exists()


def test_capture_may_be_called_in_inference_mode():
    """Where a step measures something; the batch may be made there, too."""
    model, (x, y) = Network(Merging()), data().tensors
    made = attributor(model)
    with torch.inference_mode(), made.capture(data(), "epoch-0") as capture:
        capture((x[:4] + 0, y[:4]), range(4))
        capture.flush()
    close(stored(made)[:4], gradients(model, x[:4], y[:4]), RTOL)


def scaled():
    """A module that multiplies by a number and a tensor outside it, and these two."""
    values = [1.0, torch.ones(8, dtype=torch.float64)]

    class Scaled(nn.Module):
        def forward(self, x):
            return values[0] * values[1] * x

    return Scaled(), values


def test_rows_that_a_late_check_finds_wrong_are_removed():
    module, values = scaled()
    made = attributor(Network(module))
    with (  # noqa: PT012
        pytest.raises(errors.UnsupportedModelError, match="may be wrong too"),
        made.capture(data(), "a") as capture,
    ):
        epoch(made.model, capture, order()[:14])
        values[0] = 1.1  # where no recording of operations sees it
        epoch(made.model, capture, order()[14:])
    assert capture.num_missing == N
    with made.capture(data(), "a") as capture:
        rows = epoch(made.model, capture, order()[:14])
        values[1].mul_(1.1)  # replays hold the product
        more = epoch(made.model, capture, order()[14:])
    close(stored(made), np.where(np.isnan(rows), more, rows), RTOL)


class Augmented(TensorDataset):
    def __getitem__(self, index):
        return self.tensors[0][index] + torch.randn(5), self.tensors[1][index]


def test_of_a_sample_that_a_batch_holds_twice_the_first_is_taken():
    """As a sampler with replacement gives it; the second one may be augmented in another way."""
    made, (x, y) = attributor(Network()), data().tensors
    numbers = [3, 1, 3, 0, 2, *range(4, N)]
    given = x[numbers]
    given[2] += 1.0
    with made.capture(data(), "epoch-0") as capture:
        capture((given, y[numbers]), torch.tensor(numbers))
    assert capture.num_missing == 0
    close(stored(made), gradients(made.model, x, y), rtol=RTOL)


BORDERS = {"position_ids": [[0, 1, 2, 0, 1]], "seq_idx": [[0, 0, 0, 1, 1]], "cu_seq_lens_q": [0, 3, 5]}


@pytest.mark.parametrize("name", BORDERS)
def test_a_batch_of_joined_texts_is_refused_by_what_joins_them(name):
    ids = torch.arange(5)[None]
    batch = {"input_ids": ids, "labels": ids, name: torch.tensor(BORDERS[name])}
    said = rf"joins 2 texts .* in \['{name}'\].*padding_free=False"
    with attributor(Network()).capture(data(), "epoch-0") as capture:
        with pytest.raises(errors.InvalidInputError, match=said):
            capture(batch, [0, 1])
        with pytest.raises(errors.InvalidInputError, match="for a batch of 1 samples"):
            capture({"input_ids": ids}, [0, 1])


@pytest.mark.parametrize("trained_from", [0, N // BATCH - 1])
def test_a_loss_that_trains_with_the_model_is_refused_as_soon_as_it_has_changed(trained_from):
    model, loss = Network(), nn.Linear(3, 2).double()
    made = Attributor(model, lambda call, batch: loss(call(batch[0])).sum(1), "run.zarr", progress=False)
    called = []
    with (  # noqa: PT012
        pytest.raises(
            errors.ManifestMismatchError, match=r"values\.loss\..* by the training.*model\.loss = loss"
        ),
        made.capture(data(), "epoch-0") as capture,
    ):
        for rows in order():
            called.append(rows)
            capture([tensor[rows] for tensor in data().tensors], rows)
            if len(called) > trained_from:
                loss.weight.data += 0.1
    assert len(called) == (2 if trained_from == 0 else N // BATCH)


def test_mistakes_are_named():
    made, (x, y) = attributor(Network()), data().tensors
    few = (x[:4], y[:4])
    with pytest.raises(errors.NonFiniteError, match="3"), made.capture(data(), "epoch-0") as capture:  # noqa: PT012
        for rows in ([0, 1, 2], [0, 1, 2, 2, 3], [0, 1, 2, N]):
            with pytest.raises(errors.InvalidInputError):
                capture(few, rows)
        capture((torch.full_like(x[:1], torch.nan), y[:1]), [3])
    assert capture.num_missing == N
    with pytest.raises(errors.StateError, match="has ended"):
        capture(few, range(4))
    with (  # noqa: PT012
        pytest.raises(errors.StateError, match="were removed from the store"),
        made.capture(data(), "b") as capture,
    ):
        capture(few, range(4))
        made.drop_checkpoint("b")
    with (
        pytest.raises(errors.InvalidInputError, match="change from one access"),
        made.capture(Augmented(x, y), "epoch-0"),
    ):
        pass
    writing = Network()
    writing.insert(0, nn.ReLU(inplace=True))
    with attributor(writing, "writing.zarr").capture(data(), "epoch-0") as capture:
        capture(few, range(4))
    assert (x[:4] < 0).any()  # the batch is as it was
    capped = attributor(Network(Odd("max_norm")), "capped.zarr")
    with (
        pytest.raises(errors.UnsupportedModelError, match="writes into 1 of its parameters"),
        capped.capture(data(), "epoch-0") as capture,
    ):
        capture(few, range(4))
    assert capped.model[2].table.weight.norm(dim=1).min() > 0.5
