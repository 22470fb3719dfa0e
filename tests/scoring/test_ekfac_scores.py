"""EK-FAC through the facade: stored train rows, targets behind the curvature."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import labelled, random_states
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows
from trak_lite.errors import (
    InvalidInputError,
    ManifestMismatchError,
    MissingStoreError,
    ReadOnlyStoreError,
    StateError,
)
from trak_lite.featurizing.kronecker.fit import fit_curvature
from trak_lite.featurizing.kronecker.precondition import PreconditionedProjector, Preconditioner
from trak_lite.featurizing.kronecker_fits import KroneckerFits
from trak_lite.gradient_computers import HookGradientComputer
from trak_lite.methods import EKFAC
from trak_lite.modelout_functions import ImageClassificationModelOutput
from trak_lite.projectors import AbstractProjector
from trak_lite.run.tables import target_folder
from trak_lite.store import ZarrFeatureStore

N, M = 40, 5
TASK = ImageClassificationModelOutput()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))


TRAIN, TARGETS = labelled(N, 0), labelled(M, 1)
LONGER = TensorDataset(*(torch.cat([part, part[:3]]) for part in TRAIN.tensors))


states = partial(random_states, model)


def attributor(path: Path | None, **changes: Any) -> Attributor:
    settings = {"proj_dim": 16, "dtype": "float32", **changes}
    return Attributor(model(), "image_classification", path, **settings)


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The digests of the checkpoints that are fitted, in order."""
    fitted: list[str] = []
    fit = KroneckerFits.fit

    def noting(self: KroneckerFits, digest: str, *given: Any, **named: Any) -> None:
        fitted.append(digest)
        fit(self, digest, *given, **named)

    monkeypatch.setattr(KroneckerFits, "fit", noting)
    return fitted


def features(
    net: nn.Module, data: TensorDataset, projector: AbstractProjector, model_id: int
) -> tuple[Tensor, Tensor]:
    computer = HookGradientComputer(net, TASK)
    accumulator = projector.accumulator(len(data), model_id=model_id, parameters=computer.parameters)
    terms = computer.stream_gradients(tuple(data.tensors), accumulator.add)
    return accumulator.features(), terms.out_to_loss_grad


def expected(projector: AbstractProjector, method: EKFAC) -> tuple[np.ndarray, np.ndarray]:
    """Mean over checkpoints of the products, each times its q; and of the products of the rows' norms."""
    products, magnitudes = [], []
    for model_id, state in enumerate(states()):
        net = model().eval()
        net.load_state_dict(state)
        curvature = fit_curvature(net, TASK, lambda: [(np.arange(N), tuple(TRAIN.tensors))], method=method)
        rows, q = features(net, TRAIN, projector, model_id)
        behind = PreconditionedProjector(projector, Preconditioner(curvature, damping=method.damping))
        targets, _ = features(net, TARGETS, behind, model_id)
        products.append(rows @ targets.T * q[:, None])
        magnitudes.append(torch.outer(rows.norm(dim=1) * q.abs(), targets.norm(dim=1)))
    return torch.stack(products).mean(0).numpy(), torch.stack(magnitudes).mean(0).numpy()


@pytest.mark.parametrize(
    "method",
    [
        EKFAC(damping=0.2),
        EKFAC(damping=0.2, fisher="empirical", correct_eigenvalues=False),
        EKFAC(damping=0.2, fisher="sampled", draws=2, seed=4),
    ],
    ids=lambda method: f"{method.fisher}-{method.draws}",
)
def test_scores_are_products_of_stored_rows_with_preconditioned_targets(
    tmp_path: Path, method: EKFAC
) -> None:
    made = attributor(tmp_path / "store")
    made.featurize(Rows(TRAIN, batch_size=7), states())

    found = made.score(TARGETS, method=method)

    # Both sides round in float32, in orders that differ with the batches and the processor. A score may be much smaller
    # than its terms: rounding is a part of the norms' product, 2 to 7 times 2**-23 of it under every instruction set.
    scores, magnitudes = expected(made.projector, method)
    assert (np.abs(np.asarray(found) - scores) <= 64 * 2.0**-23 * magnitudes).all()


def test_a_damping_and_trak_are_read_beside_each_other_and_after_reopening(tmp_path: Path) -> None:
    made = attributor(tmp_path / "store")
    made.featurize(TRAIN, states())
    plain = np.asarray(made.score(TARGETS))
    first = np.asarray(made.score(TARGETS, method="EKFAC"))
    other = np.asarray(made.score(TARGETS, method=EKFAC(damping=5.0)))

    again = Attributor.open(tmp_path / "store", model())

    np.testing.assert_array_equal(np.asarray(again.scores()), plain)
    np.testing.assert_array_equal(np.asarray(again.scores(method="EKFAC")), first)
    np.testing.assert_array_equal(np.asarray(again.scores(method=EKFAC(damping=5.0))), other)
    np.testing.assert_allclose(np.asarray(again.scores(method="EKFAC", dense=False)), first, rtol=1e-6)
    assert not np.allclose(first, other)


def test_a_fit_is_found_again_and_fits_only_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: list[str]
) -> None:
    made = attributor(tmp_path / "store")
    one, two = states()
    made.featurize(TRAIN, [one])
    made.score(TARGETS, "one", method="EKFAC")
    made.featurize(Rows(TRAIN, batch_size=N), [two])
    passes: list[int] = []
    stream = HookGradientComputer.stream_gradients
    monkeypatch.setattr(
        HookGradientComputer, "stream_gradients", lambda *given: passes.append(1) or stream(*given)
    )

    made.score(TARGETS, "one", method="EKFAC", checkpoints=[one])
    assert len(passes) == 2, "nothing was left to fit: train rows and targets are compared"
    made.score(TARGETS, "both", method="EKFAC")

    assert len(passes) == 2 + 2 + 2 * 2, (
        "one checkpoint is fitted: two passes of one batch, beside rows and targets"
    )
    assert len(set(fits)) == len(fits) == 2
    made.score(TARGETS, "third", method=EKFAC(damping=3.0))
    assert len(fits) == 2, "the fit is that of any damping"


def test_a_second_score_fits_and_computes_nothing_again_also_after_reopening(
    tmp_path: Path, fits: list[str]
) -> None:
    made = attributor(tmp_path / "store", method="EKFAC")
    made.featurize(TRAIN, states())
    assert not fits, "no fit before the score that needs it"
    first = np.asarray(made.score(TARGETS))
    assert len(fits) == 2

    second = np.asarray(made.score(TARGETS))
    again = Attributor.open(tmp_path / "store", model())
    third = np.asarray(again.score(TARGETS))
    fourth = np.asarray(again.score(TARGETS, "again", checkpoints=states()))

    assert again.method == EKFAC()
    assert len(fits) == 2, "also for new targets of an attributor that never saw the train data"
    for found in (second, third, fourth):
        np.testing.assert_array_equal(found, first)


def test_settings_of_the_fit_share_neither_targets_nor_scores(tmp_path: Path, fits: list[str]) -> None:
    made, sampled, empirical = attributor(tmp_path / "store"), EKFAC(), EKFAC(fisher="empirical")
    made.featurize(TRAIN)
    first = np.asarray(made.score(TARGETS, method=sampled))
    second = np.asarray(made.score(TARGETS, method=empirical))

    alone = attributor(None)
    alone.featurize(TRAIN)
    np.testing.assert_array_equal(second, np.asarray(alone.score(TARGETS, method=empirical)))
    assert not np.allclose(first, second)
    folders = [target_folder("targets", method) for method in (sampled, empirical)]
    with ZarrFeatureStore.open(tmp_path / "store") as store:
        assert {f"{folder}/ckpt-0" for folder in folders} == set(store.table_names("preconditioned"))
        assert len(set(folders)) == 2
    assert len(fits) == 3

    # The second fit took the place of the first one in the store; what was made with it stays.
    again = Attributor.open(tmp_path / "store", model())
    for opened in (made, again):
        for checkpoints in (None, [model().state_dict()]):
            found = opened.score(TARGETS, method=sampled, checkpoints=checkpoints)
            np.testing.assert_array_equal(np.asarray(found), first)
    assert len(fits) == 3
    np.testing.assert_array_equal(np.asarray(made.score(TARGETS, "new", method=sampled)), first)
    assert len(fits) == 4


def test_a_part_of_the_rows_can_stand_for_all(tmp_path: Path) -> None:
    scores = []
    for count in (None, 30):
        made = attributor(None)
        made.featurize(TRAIN)
        method = EKFAC(fisher="empirical", max_rows=count)
        scores.append(np.asarray(made.score(TARGETS, method=method)).flatten())

    assert np.corrcoef(*scores)[0, 1] > 0.9
    assert 0.7 < np.linalg.norm(scores[1]) / np.linalg.norm(scores[0]) < 1.4


# What is refused


def test_an_attributor_that_was_not_given_the_train_data_says_what_to_call(tmp_path: Path) -> None:
    made = attributor(tmp_path / "store")
    made.featurize(TRAIN)
    expected = np.asarray(made.score(TARGETS, method="EKFAC"))
    made.drop_scores()

    again = Attributor.open(tmp_path / "store", model())
    with pytest.raises(StateError, match=r"EKFAC has to be fitted .* Call featurize\(train_data"):
        again.score(TARGETS, "empirical", method=EKFAC(fisher="empirical"))

    assert again.featurize(TRAIN).rows_written == 0
    assert again.score(TARGETS, "empirical", method=EKFAC(fisher="empirical")).shape == (N, M)
    np.testing.assert_array_equal(np.asarray(again.score(TARGETS, method="EKFAC")), expected)


def test_scores_before_featurizing_or_without_the_weights_are_refused(tmp_path: Path) -> None:
    made = attributor(tmp_path / "store")
    with pytest.raises((StateError, MissingStoreError), match=r"featurize"):
        made.score(TARGETS, method="EKFAC")
    made.featurize(TRAIN, iter(states()))  # which nobody can go through again

    with pytest.raises(StateError, match=r"weights of ckpt-0 .* are needed to score"):
        made.score(TARGETS, method="EKFAC")
    with pytest.raises(StateError, match="no features for 1 of the 1"):
        made.score(TARGETS, method="EKFAC", checkpoints=[model().state_dict()])


def test_train_data_that_are_not_those_of_the_store_any_more_are_not_fitted_to(
    tmp_path: Path, fits: list[str]
) -> None:
    made, other = attributor(tmp_path / "store"), attributor(tmp_path / "store")
    made.featurize(TRAIN)
    with pytest.raises(ManifestMismatchError, match="dataset"):
        made.featurize(labelled(N, 7))
    other.featurize(LONGER, append=True)

    with pytest.raises(ManifestMismatchError, match=r"dataset.*featurize"):
        made.score(TARGETS, method="EKFAC")
    assert not fits


def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = attributor(tmp_path / "store")
    made.featurize(TRAIN)
    monkeypatch.setattr(ZarrFeatureStore, "writable", property(lambda _: False))

    with pytest.raises(ReadOnlyStoreError, match="open for reading only, and a fit must be stored"):
        made.score(TARGETS, method="EKFAC")


def test_no_damping_no_path_and_no_self_influence_are_refused() -> None:
    made = attributor(None)
    made.featurize(TRAIN)

    with pytest.raises(InvalidInputError, match=r"EKFAC\(damping=0\) would divide by zero"):
        made.score(TARGETS, method=EKFAC(damping=0))
    with pytest.raises(InvalidInputError, match="EKFAC has no kernel, so it has no damping"):
        made.score(TARGETS, method="EKFAC", dense=False).damping_path([0.1, 1])
    with pytest.raises(InvalidInputError, match="take the diagonal"):
        made.score(TARGETS, method="EKFAC").self_influence()


def test_a_curvature_of_fewer_train_rows_is_not_taken_for_that_of_all(
    tmp_path: Path, fits: list[str]
) -> None:
    made, fresh = attributor(tmp_path / "a.zarr"), attributor(None)
    made.featurize(TRAIN)
    made.score(TARGETS, method="EKFAC")

    made.featurize(LONGER, append=True)
    fresh.featurize(LONGER)

    with pytest.raises(StateError, match=r"have 40 train rows, but the store has 43 now"):
        made.scores(method="EKFAC")
    with pytest.raises((StateError, ManifestMismatchError), match="under another name"):
        made.score(TARGETS, method="EKFAC")
    found = made.score(TARGETS, "longer", method="EKFAC")
    assert len(fits) == 2
    np.testing.assert_array_equal(np.asarray(found), np.asarray(fresh.score(TARGETS, method="EKFAC")))
