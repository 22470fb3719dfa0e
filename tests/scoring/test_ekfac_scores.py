"""EK-FAC through the facade: stored train rows, targets behind the curvature, fits that are found again."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from tiny_runs import Counting, labelled, random_states
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows
from trak_lite.errors import (
    InvalidInputError,
    ManifestMismatchError,
    ReadOnlyStoreError,
    StateError,
)
from trak_lite.methods import EKFAC
from trak_lite.store import ZarrFeatureStore

N, M = 28, 5  # one batch, also with three rows more


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))


TRAIN, TARGETS = labelled(N, 0), labelled(M, 1)
LONGER = TensorDataset(*(torch.cat([part, part[:3]]) for part in TRAIN.tensors))
states = partial(random_states, model)


def attributor(path=None, **changes):
    settings = {"proj_dim": 16, "dtype": "float32", **changes}
    return Attributor(model(), "image_classification", path, **settings)


def scored(made, *name, method="EKFAC", **options):
    return made.score(TARGETS, *name, method=method, **options).numpy()


class Watched:
    """Train rows that tell how many checkpoints were fitted to them since: a fit loads them twice."""

    def __init__(self, data=TRAIN):
        self.data = Counting(data)
        self.rows = Rows(self.data, name="train")

    def fits(self):
        loaded = len(self.data.loaded)  # and some rows to compare
        self.data.loaded.clear()
        return round(loaded / (2 * N))


def test_a_fit_is_found_again_and_fits_only_what_is_new(tmp_path):
    made, train = attributor(tmp_path / "store"), Watched()
    one, two = states()
    made.featurize(train.rows, [one])
    scored(made, "one")
    made.featurize(train.rows, [two])
    train.fits()

    scored(made, "one", checkpoints=[one])
    assert train.fits() == 0
    scored(made, "both")
    assert train.fits() == 1
    first, other = scored(made, "both"), scored(made, "both", method=EKFAC(damping=3.0))
    assert not np.allclose(first, other)
    scored(made, "third", method=EKFAC(damping=3.0))
    assert train.fits() == 0, "the fit is that of any damping"
    again = Attributor.open(tmp_path / "store", model())
    np.testing.assert_array_equal(again.scores("both", method="EKFAC").numpy(), first)
    np.testing.assert_array_equal(again.scores("both", method=EKFAC(damping=3.0)).numpy(), other)
    np.testing.assert_allclose(again.scores("both", method="EKFAC", dense=False).numpy(), first, rtol=1e-6)


def test_settings_of_the_fit_share_neither_targets_nor_scores(tmp_path):
    sampled, empirical = EKFAC(), EKFAC(fisher="empirical")
    made, train = attributor(tmp_path / "store"), Watched()
    made.featurize(train.rows)
    first, second = (scored(made, method=method) for method in (sampled, empirical))

    alone = attributor()
    alone.featurize(TRAIN)
    np.testing.assert_array_equal(second, scored(alone, method=empirical))
    assert not np.allclose(first, second)
    with ZarrFeatureStore.open(tmp_path / "store") as store:
        assert len(store.table_names("preconditioned")) == 2
    train.fits()

    # The second fit took the place of the first one in the store; what was made with it stays.
    again = Attributor.open(tmp_path / "store", model())
    for opened in (made, again):
        for checkpoints in (None, [model().state_dict()]):
            np.testing.assert_array_equal(scored(opened, method=sampled, checkpoints=checkpoints), first)
    assert train.fits() == 0
    np.testing.assert_array_equal(scored(made, "new", method=sampled), first)
    assert train.fits() == 1


# What is refused


def test_train_data_that_are_not_those_of_the_store_any_more_are_not_fitted_to(tmp_path):
    made, other = attributor(tmp_path / "store"), attributor(tmp_path / "store")
    made.featurize(TRAIN)
    with pytest.raises(ManifestMismatchError, match="dataset"):
        made.featurize(labelled(N, 7))
    other.featurize(LONGER, append=True)

    with pytest.raises(ManifestMismatchError, match=r"dataset.*featurize"):
        scored(made)


def test_a_store_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    made = attributor(tmp_path / "store")
    made.featurize(TRAIN)
    monkeypatch.setattr(ZarrFeatureStore, "writable", property(lambda _: False))

    with pytest.raises(ReadOnlyStoreError, match="open for reading only, and a fit must be stored"):
        scored(made)


def test_no_path_and_no_self_influence_are_refused():
    made = attributor()
    made.featurize(TRAIN)
    scores = made.score(TARGETS, method="EKFAC")

    with pytest.raises(InvalidInputError, match="EKFAC has no kernel, so it has no damping"):
        scores.damping_path([0.1, 1])
    with pytest.raises(InvalidInputError, match="take the diagonal"):
        scores.self_influence()


def test_a_curvature_of_fewer_train_rows_is_not_taken_for_that_of_all(tmp_path):
    made, fresh = attributor(tmp_path / "a.zarr"), attributor()
    made.featurize(TRAIN)
    scored(made)

    made.featurize(LONGER, append=True)
    fresh.featurize(LONGER)

    with pytest.raises(StateError, match=r"have 28 train rows, but the store has 31 now"):
        made.scores(method="EKFAC")
    with pytest.raises((StateError, ManifestMismatchError), match="under another name"):
        scored(made)
    # The appended rows came in another batch, which may change the last bits.
    np.testing.assert_allclose(scored(made, "longer"), scored(fresh), rtol=1e-5, atol=1e-6)
