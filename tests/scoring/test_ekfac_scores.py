"""EK-FAC through the facade: stored train rows, targets behind the curvature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor
from trak_lite.errors import InvalidInputError, ManifestMismatchError, ReadOnlyStoreError, StateError
from trak_lite.featurizing.kronecker import (
    KroneckerSettings,
    PreconditionedProjector,
    Preconditioner,
    fit_curvature,
)
from trak_lite.gradient_computers import HookGradientComputer
from trak_lite.modelout_functions import ImageClassificationModelOutput
from trak_lite.projectors import AbstractProjector
from trak_lite.store import ZarrFeatureStore

N, M = 40, 5
TASK = ImageClassificationModelOutput()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def dataset(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator)
    )


TRAIN, TARGETS = dataset(N, 0), dataset(M, 1)


def states(count: int = 2) -> list[dict[str, Tensor]]:
    shapes = model().state_dict()  # which seeds
    torch.manual_seed(1)
    return [{name: torch.randn_like(value) for name, value in shapes.items()} for _ in range(count)]


def attributor(path: Path | None, **changes: Any) -> Attributor:
    settings = {"proj_dim": 16, "dtype": "float32", **changes}
    return Attributor(model(), "image_classification", path, **settings)


def features(
    net: nn.Module, data: TensorDataset, projector: AbstractProjector, model_id: int
) -> tuple[Tensor, Tensor]:
    computer = HookGradientComputer(net, TASK)
    accumulator = projector.accumulator(len(data), model_id=model_id, parameters=computer.parameters)
    terms = computer.stream_gradients(tuple(data.tensors), accumulator.add)
    return accumulator.features(), terms.out_to_loss_grad


def expected(
    projector: AbstractProjector, settings: KroneckerSettings, damping: float
) -> tuple[np.ndarray, np.ndarray]:
    """Mean over checkpoints of the products, each times its q; and of the products of the rows' norms."""
    products, magnitudes = [], []
    for model_id, state in enumerate(states()):
        net = model().eval()
        net.load_state_dict(state)
        curvature = fit_curvature(
            net, TASK, lambda: [(np.arange(N), tuple(TRAIN.tensors))], settings=settings
        )
        rows, q = features(net, TRAIN, projector, model_id)
        behind = PreconditionedProjector(projector, Preconditioner(curvature, damping=damping))
        targets, _ = features(net, TARGETS, behind, model_id)
        products.append(rows @ targets.T * q[:, None])
        magnitudes.append(torch.outer(rows.norm(dim=1) * q.abs(), targets.norm(dim=1)))
    return torch.stack(products).mean(0).numpy(), torch.stack(magnitudes).mean(0).numpy()


@pytest.mark.parametrize(
    "settings",
    [
        KroneckerSettings(),
        KroneckerSettings(fisher="empirical", correct_eigenvalues=False),
        KroneckerSettings(fisher="sampled", draws=2, seed=4),
    ],
    ids=lambda s: f"{s.fisher}-{s.draws}",
)
def test_scores_are_products_of_stored_rows_with_preconditioned_targets(
    tmp_path: Path, settings: KroneckerSettings
) -> None:
    made = attributor(tmp_path / "store")
    made.featurize(TRAIN, states())
    made.fit_curvature(TRAIN, settings=settings, batch_size=7)

    found = made.score(TARGETS, kernel="ekfac", damping=0.2)

    # Both sides round in float32, in orders that differ with the batches and the processor. A score may be much smaller
    # than its terms: rounding is a part of the norms' product, 2 to 7 times 2**-23 of it under every instruction set.
    scores, magnitudes = expected(made.projector, settings, 0.2)
    assert (np.abs(np.asarray(found) - scores) <= 64 * 2.0**-23 * magnitudes).all()


def test_a_damping_and_trak_are_read_beside_each_other_and_after_reopening(tmp_path: Path) -> None:
    made = attributor(tmp_path / "store")
    made.featurize(TRAIN, states())
    plain = np.asarray(made.score(TARGETS))
    made.fit_curvature(TRAIN)
    first = np.asarray(made.score(TARGETS, kernel="ekfac"))
    other = np.asarray(made.score(TARGETS, kernel="ekfac", damping=5.0))

    again = Attributor.open(tmp_path / "store", model())

    np.testing.assert_array_equal(np.asarray(again.scores()), plain)
    np.testing.assert_array_equal(np.asarray(again.scores(kernel="ekfac")), first)
    np.testing.assert_array_equal(np.asarray(again.scores(kernel="ekfac", damping=5.0)), other)
    np.testing.assert_allclose(np.asarray(again.scores(kernel="ekfac", dense=False)), first, rtol=1e-6)
    assert not np.allclose(first, other)


def test_a_fit_is_found_again_and_fits_only_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = attributor(tmp_path / "store")
    one, two = states()
    made.featurize(TRAIN, [one])
    made.fit_curvature(TRAIN)
    made.featurize(TRAIN, [two])
    passes: list[int] = []
    stream = HookGradientComputer.stream_gradients
    monkeypatch.setattr(
        HookGradientComputer, "stream_gradients", lambda *given: passes.append(1) or stream(*given)
    )

    made.fit_curvature(TRAIN, batch_size=N)

    assert len(passes) == 3, "one checkpoint: two passes of one batch, and one that compares rows"
    made.fit_curvature(TRAIN, [one, two])
    assert len(passes) == 5, "nothing was left to fit: rows of each checkpoint are compared"


def test_a_part_of_the_rows_can_stand_for_all(tmp_path: Path) -> None:
    scores = []
    for count in (None, 30):
        made = attributor(None)
        made.featurize(TRAIN)
        made.fit_curvature(TRAIN, settings=KroneckerSettings(fisher="empirical", max_rows=count))
        scores.append(np.asarray(made.score(TARGETS, kernel="ekfac")).flatten())

    assert np.corrcoef(*scores)[0, 1] > 0.9
    assert 0.7 < np.linalg.norm(scores[1]) / np.linalg.norm(scores[0]) < 1.4


# What is refused


def test_scores_before_a_fit_say_what_to_call(tmp_path: Path) -> None:
    made = attributor(None)
    made.featurize(TRAIN)

    with pytest.raises(StateError, match="fit_curvature"):
        made.score(TARGETS, kernel="ekfac")


def test_a_checkpoint_that_was_not_fitted_is_named(tmp_path: Path) -> None:
    made = attributor(None)
    one, two = states()
    made.featurize(TRAIN, [one, two])
    made.fit_curvature(TRAIN, [one])

    with pytest.raises(StateError, match="was not fitted with"):
        made.score(TARGETS, kernel="ekfac")


def test_a_fit_before_featurizing_or_without_the_weights_is_refused(tmp_path: Path) -> None:
    made = attributor(tmp_path / "store")
    with pytest.raises(StateError, match="Call featurize"):
        made.fit_curvature(TRAIN)
    made.featurize(TRAIN, iter(states()))  # which nobody can go through again

    with pytest.raises(StateError, match="needed to fit a curvature"):
        made.fit_curvature(TRAIN)
    with pytest.raises(StateError, match="no features for 1 of the 1"):
        made.fit_curvature(TRAIN, [model().state_dict()])


def test_other_train_rows_are_refused() -> None:
    made = attributor(None)
    made.featurize(TRAIN)

    with pytest.raises(ManifestMismatchError, match="dataset"):
        made.fit_curvature(dataset(N, 7))


def test_scores_of_another_fit_are_not_taken_for_these() -> None:
    made = attributor(None)
    made.featurize(TRAIN)
    made.fit_curvature(TRAIN)
    made.score(TARGETS, kernel="ekfac")
    made.fit_curvature(TRAIN, settings=KroneckerSettings(fisher="empirical"))

    with pytest.raises(ManifestMismatchError, match="fisher"):
        made.score(TARGETS, kernel="ekfac")
    assert made.score(TARGETS, "other", kernel="ekfac").shape == (N, M)


def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = attributor(tmp_path / "store")
    made.featurize(TRAIN)
    monkeypatch.setattr(ZarrFeatureStore, "writable", property(lambda _: False))

    with pytest.raises(ReadOnlyStoreError, match="could not be kept"):
        made.fit_curvature(TRAIN)


def test_no_damping_no_path_and_no_self_influence_are_refused() -> None:
    made = attributor(None)
    made.featurize(TRAIN)
    made.fit_curvature(TRAIN)

    with pytest.raises(InvalidInputError, match="damping=0 with kernel='ekfac'"):
        made.score(TARGETS, kernel="ekfac", damping=0)
    with pytest.raises(InvalidInputError, match="nothing to damp"):
        made.damping_path(TARGETS, [0.1, 1], kernel="ekfac")
    with pytest.raises(InvalidInputError, match="take the diagonal"):
        made.score(TARGETS, kernel="ekfac").self_influence()


def test_a_curvature_of_fewer_train_rows_is_not_taken_for_that_of_all(tmp_path: Path) -> None:
    made = attributor(tmp_path / "a.zarr")
    made.featurize(TRAIN)
    made.fit_curvature(TRAIN)
    longer = TensorDataset(*(torch.cat([part, part[:3]]) for part in TRAIN.tensors))
    made.featurize(longer, append=True)
    with pytest.raises(StateError, match="rows were appended since"):
        made.score(TARGETS, kernel="ekfac")
    made.fit_curvature(longer)
    assert made.score(TARGETS, kernel="ekfac").shape == (N + 3, M)
