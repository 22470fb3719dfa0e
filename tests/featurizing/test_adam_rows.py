"""Rows that Adam's state changes, against plain autograd and steps that torch.optim really makes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from trak_lite import Attributor, Normalization, Rows
from trak_lite.errors import CheckpointError, InvalidInputError, ManifestMismatchError, PrecisionError
from trak_lite.gradient_computers import normalized
from trak_lite.methods import EKFAC, LESS, GaussNewton, GradDot
from trak_lite.store import ZarrFeatureStore

N, M, CLASSES, WORDS = 21, 4, 3, 9
KINDS = ("adam", "adam_update")
COMPUTERS = ("hook", "functional", "iterative")


class Texts(nn.Module):
    """An embedding, layers with several positions, and a head that f does not use but training does."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.hidden = nn.Linear(4, 5)
        self.norm = nn.LayerNorm(5)
        self.auxiliary = nn.Linear(5, 2)
        self.head = nn.Linear(5, CLASSES)

    def inner(self, ids: Tensor) -> Tensor:
        return self.norm(self.hidden(self.words(ids)).tanh()).mean(-2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(ids))


def dataset(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS - 1, (count, 3), generator=generator)
    ids[0] = 2  # a word that occurs three times
    return TensorDataset(ids, torch.randint(CLASSES, (count,), generator=generator))


TRAIN = dataset(N, 0)
TARGETS = dataset(M, 1)
TARGETS.tensors[0][-1] = WORDS - 1
"""The last target has a word that no train row has, so that Adam's moments of its embedding are zero."""


def trained(steps: int = 4, **settings: Any) -> tuple[Texts, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Texts().double()
    optimizer = torch.optim.AdamW(
        net.parameters(), **{"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, **settings}
    )
    ids, labels = TRAIN.tensors
    for step in range(steps):
        optimizer.zero_grad()
        some = slice(step, step + 12)
        loss = nn.functional.cross_entropy(net(ids[some]), labels[some])
        (loss + net.auxiliary(net.inner(ids[some])).square().mean()).backward()
        optimizer.step()
    return net, optimizer


def saved(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()})


def attributor(path: Path | None, net: nn.Module, kind: str, **changes: Any) -> Attributor:
    settings = {"projector": "none", "dtype": "float32", "normalize": kind, "progress": False, **changes}
    return Attributor(net, "image_classification", path, **settings)


def margin_gradients(net: nn.Module, data: TensorDataset) -> list[list[Tensor]]:
    found = []
    for ids, label in data:
        logits = net(ids[None])[0]
        f = logits[label] - torch.cat([logits[:label], logits[label + 1 :]]).logsumexp(0)
        grads = torch.autograd.grad(f, list(net.parameters()), allow_unused=True)
        found.append(
            [torch.zeros_like(p) if g is None else g for p, g in zip(net.parameters(), grads, strict=True)]
        )
    return found


def scaled(net: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset) -> np.ndarray:
    """Gradients of f over the fourth root of the bias-corrected second moment."""
    group = optimizer.param_groups[0]
    rows = []
    for grads in margin_gradients(net, data):
        parts = []
        for p, g in zip(net.parameters(), grads, strict=True):
            state = optimizer.state[p]
            second = state.get("max_exp_avg_sq", state["exp_avg_sq"])
            root = (second / (1 - group["betas"][1] ** float(state["step"]))).sqrt() + group["eps"]
            parts.append(torch.where(second > 0, g / root.sqrt(), 0).flatten())
        rows.append(torch.cat(parts))
    return torch.stack(rows).numpy()


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset) -> np.ndarray:
    """The change of the weights over the learning rate, when Adam steps on the loss of one row."""
    rows = []
    for ids, label in data:
        own = copy.deepcopy(net)
        again = type(optimizer)(own.parameters())
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        again.param_groups[0].update(weight_decay=0.0, lr=1e-3)
        before = [p.detach().clone() for p in own.parameters()]
        for p in own.parameters():
            p.grad = torch.zeros_like(p)
        nn.functional.cross_entropy(own(ids[None]), label[None]).backward()
        again.step()
        pairs = zip(own.parameters(), before, strict=True)
        rows.append(torch.cat([(p.detach() - old).flatten() for p, old in pairs]) / 1e-3)
    return torch.stack(rows).numpy()


EXPECTED = {"adam": scaled, "adam_update": steps}


def columns(path: Path, table: str = "ckpt-0") -> dict[str, np.ndarray]:
    with ZarrFeatureStore.open(path, mode="r") as store:
        opened = store.open_table(table)
        return {column.name: opened.read(column.name) for column in opened.spec.columns}


def close(found: np.ndarray, expected: np.ndarray, rtol: float = 1e-6) -> None:
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol * np.abs(expected).max())


@pytest.mark.quick
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("computer", COMPUTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_autograd_and_of_real_steps(
    tmp_path: Path, kind: str, computer: str, amsgrad: bool
) -> None:
    net, optimizer = trained(amsgrad=amsgrad)
    made = attributor(tmp_path / "a.zarr", net, kind, gradient_computer=computer, store_norms=True)
    made.featurize(Rows(TRAIN, batch_size=8), saved(net, optimizer))
    made.score(TARGETS, name="test")

    found = columns(tmp_path / "a.zarr")
    close(found["features"], EXPECTED[kind](net, optimizer, TRAIN))
    plain = torch.stack(
        [torch.cat([g.flatten() for g in row]) for row in margin_gradients(net, TRAIN)]
    ).numpy()
    close(found["gradient_norm"], np.linalg.norm(plain, axis=1))
    targets = margin_gradients(net, TARGETS)
    expected = (
        scaled(net, optimizer, TARGETS)
        if kind == "adam"
        else torch.stack([torch.cat([g.flatten() for g in row]) for row in targets]).numpy()
    )
    close(columns(tmp_path / "a.zarr", "targets/test/ckpt-0")["features"], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_do_not_fit_at_once_give_the_same_rows(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(normalized, "_MOST_ENTRIES", 50)
    net, optimizer = trained()
    attributor(tmp_path / "a.zarr", net, kind).featurize(TRAIN, saved(net, optimizer))

    close(columns(tmp_path / "a.zarr")["features"], EXPECTED[kind](net, optimizer, TRAIN))


@pytest.mark.parametrize("kind", KINDS)
def test_projected_rows_are_the_projection_of_these(tmp_path: Path, kind: str) -> None:
    net, optimizer = trained()
    made = attributor(tmp_path / "a.zarr", net, kind, projector="gaussian", proj_dim=7, layout="joint")
    made.featurize(TRAIN, saved(net, optimizer))

    rows = torch.from_numpy(EXPECTED[kind](net, optimizer, TRAIN))
    sizes = [p.numel() for p in net.parameters()]
    parts = {
        name: part.view(N, *p.shape)
        for (name, p), part in zip(net.named_parameters(), rows.split(sizes, 1), strict=True)
    }
    close(columns(tmp_path / "a.zarr")["features"], made.projector.project(parts, 0).numpy(), rtol=1e-5)


def test_scores_of_scaled_rows_are_products_in_the_metric_of_adam() -> None:
    net, optimizer = trained()
    made = attributor(None, net, "adam", method=GradDot(q="off"))
    made.featurize(TRAIN, saved(net, optimizer))

    close(
        made.score(TARGETS).numpy(),
        scaled(net, optimizer, TRAIN) @ scaled(net, optimizer, TARGETS).T,
        rtol=1e-5,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_refuses_other_moments_and_other_kinds(tmp_path: Path, kind: str) -> None:
    net, optimizer = trained()
    made = attributor(tmp_path / "a.zarr", net, kind)
    first = saved(net, optimizer)
    made.featurize(TRAIN, first)
    assert made.featurize(TRAIN, first).rows_written == 0

    other = copy.deepcopy(first)
    other["optimizer"]["state"][0]["exp_avg_sq"][1] *= 1.5
    with pytest.raises(ManifestMismatchError, match="optimizer"):
        made.featurize(TRAIN, other)
    for another in ("none", "unit", *KINDS):
        if another != kind:
            with pytest.raises(ManifestMismatchError, match="normalization"):
                attributor(tmp_path / "a.zarr", net, another).featurize(TRAIN, first)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_each_have_their_own_moments(tmp_path: Path, kind: str) -> None:
    runs = [trained(steps=count) for count in (2, 5)]
    made = attributor(tmp_path / "a.zarr", runs[0][0], kind)
    made.featurize(TRAIN, [saved(*run) for run in runs])

    for number, run in enumerate(runs):
        close(columns(tmp_path / "a.zarr", f"ckpt-{number}")["features"], EXPECTED[kind](*run, TRAIN))


class Interrupted(Dataset[Any]):
    """Ctrl-C at row 13."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise KeyboardInterrupt
        return TRAIN[index]


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_is_opened_again_continues_and_scores(tmp_path: Path, kind: str) -> None:
    net, optimizer = trained()
    torch.save(saved(net, optimizer), tmp_path / "epoch-1.pt")
    made = attributor(tmp_path / "a.zarr", net, kind)
    with pytest.raises(KeyboardInterrupt):
        made.featurize(Rows(Interrupted(), batch_size=4, name="texts"), tmp_path / "epoch-1.pt")

    fresh = Texts().double()  # other weights: those of the checkpoint are found again
    opened = Attributor.open(tmp_path / "a.zarr", fresh, progress=False)
    assert opened.normalization == Normalization(kind)
    summary = opened.featurize(Rows(TRAIN, batch_size=4, name="texts"), tmp_path / "epoch-1.pt")
    assert 0 < summary.rows_written < N
    close(columns(tmp_path / "a.zarr")["features"], EXPECTED[kind](net, optimizer, TRAIN))

    scores = Attributor.open(tmp_path / "a.zarr", Texts().double(), progress=False).score(TARGETS)
    assert isinstance(scores.method, LESS if kind == "adam_update" else GaussNewton)
    again = attributor(None, net, kind)
    again.featurize(TRAIN, saved(net, optimizer))
    close(scores.numpy(), again.score(TARGETS).numpy(), rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_without_an_optimizer_are_refused_before_anything_is_stored(
    tmp_path: Path, kind: str
) -> None:
    net, _ = trained()
    made = attributor(tmp_path / "a.zarr", net, kind)

    for source in (None, net.state_dict()):
        with pytest.raises(CheckpointError, match="has no optimizer state"):
            made.featurize(TRAIN, source)
    assert not (tmp_path / "a.zarr").exists()


def test_the_fisher_information_is_that_of_scaled_gradients() -> None:
    """A diagonal change of coordinates: with all features and little damping the scores do not depend on it."""
    net, optimizer = trained()
    made = {kind: attributor(None, net, kind, grad_wrt="head.*", layout="joint") for kind in ("none", "adam")}
    method = {"name": "Fisher", "samples_per_feature": 60, "max_draws": 4000, "damping": 1e-6}
    scores = {}
    for kind, one in made.items():
        one.featurize(TRAIN, saved(net, optimizer))
        scores[kind] = one.score(TARGETS, method=method).numpy()

    assert np.corrcoef(scores["none"].ravel(), scores["adam"].ravel())[0, 1] > 0.99


def test_methods_that_the_rows_do_not_fit_are_refused() -> None:
    net, optimizer = trained()
    made = {kind: attributor(None, net, kind) for kind in ("none", *KINDS)}
    for one in made.values():
        one.featurize(TRAIN, saved(net, optimizer))

    for kind in ("none", "adam"):
        with pytest.raises(InvalidInputError, match="normalize='adam_update'"):
            made[kind].score(TARGETS, method="LESS")
    for method in ("GaussNewton", "TRAK", "TracIn", "GradDot", "Fisher"):
        with pytest.raises(InvalidInputError, match="rows are Adam updates"):
            made["adam_update"].score(TARGETS, method=method)
    for kind in KINDS:
        with pytest.raises(InvalidInputError, match=f"normalize='{kind}', and EKFAC"):
            made[kind].score(TARGETS, method=EKFAC())
    less = made["adam_update"].score(TARGETS)
    with pytest.raises(InvalidInputError, match="Self-influence"):
        less.self_influence()


def test_a_scope_is_refused_and_so_is_a_dtype_that_cannot_hold_the_rows(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="entry by entry"):
        Normalization("adam", scope="module")
    net, optimizer = trained(eps=0.0)
    content = saved(net, optimizer)
    for state in content["optimizer"]["state"].values():
        state["exp_avg_sq"] *= 1e-24
    with pytest.raises(PrecisionError):
        attributor(None, net, "adam", dtype="float16").featurize(TRAIN, content)
