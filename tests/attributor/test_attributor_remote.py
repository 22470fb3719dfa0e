"""The whole way with a store in an object store: the numbers are those of a run on a local disk."""

import uuid

import numpy as np
import pytest
from tiny_runs import Counting, labelled, perceptron

from trak_lite import Attributor, Rows
from trak_lite.errors import ManifestMismatchError, StateError, UnsupportedStoreError
from trak_lite.store import RemotePlace

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
obstore_store = pytest.importorskip("obstore.store", reason="obstore is not installed")
N, M = 70, 6
TRAIN, TARGETS = labelled(N, 0), labelled(M, 1)
CHECKPOINTS = [perceptron(seed=seed).state_dict() for seed in (1, 2)]


def attributor(path, **settings):
    return Attributor(perceptron(), "image_classification", path, proj_dim=16, progress=False, **settings)


def run(path):
    made = attributor(path)
    made.featurize(Rows(TRAIN, name="train", batch_size=16), CHECKPOINTS)
    return made.score(TARGETS, checkpoints=CHECKPOINTS)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return run(tmp_path_factory.mktemp("local") / "run.zarr")


@pytest.fixture(params=["memory", "obstore"])
def where(request, tmp_path, monkeypatch):
    """An address, staged in the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if request.param == "memory":
        yield f"memory://{uuid.uuid4().hex}/run.zarr"
        fsspec.filesystem("memory").store.clear()
        fsspec.filesystem("memory").pseudo_dirs[:] = [""]
    else:
        yield obstore_store.LocalStore(tmp_path / "objects", mkdir=True)


def test_scores_equal_those_of_a_local_run_bitwise(where, expected, tmp_path):
    """Also after an interrupt, and when read later, by an attributor that knows the address alone."""
    with pytest.raises(StateError, match="There is no store at"):
        attributor(where).score(TARGETS)
    with pytest.raises(KeyboardInterrupt):
        attributor(where).featurize(Rows(Counting(TRAIN, 48), name="train", batch_size=16), CHECKPOINTS)
    resumed = Counting(TRAIN)
    attributor(where).featurize(Rows(resumed, name="train", batch_size=16), CHECKPOINTS[:1])
    assert max(resumed.loaded[:8]) < 48  # few are loaded again, to be compared
    assert resumed.loaded[8:] == list(range(48, N))
    scores = run(where)
    np.testing.assert_array_equal(scores.numpy(), expected.numpy())
    np.testing.assert_array_equal(scores.self_influence(), expected.self_influence())
    assert scores.top(3, target=1).indices.tolist() == expected.top(3, target=1).indices.tolist()
    again = Attributor.open(where, perceptron(), progress=False)
    found = again.featurize(Rows(TRAIN, name="train"), CHECKPOINTS)
    assert (found.rows_written, found.rows_found) == (0, 2 * N)
    np.testing.assert_array_equal(again.scores().numpy(), expected.numpy())
    assert str(RemotePlace(where)) in repr(again.scores())
    other = attributor(where, seed=1)
    with pytest.raises(ManifestMismatchError, match=r"projector\.seed is 0 there, 1 here"):
        other.featurize(Rows(TRAIN, name="train"), CHECKPOINTS)
    with pytest.raises(UnsupportedStoreError, match=r"rows cannot be appended.*Copy the store to a local"):
        again.featurize(Rows(labelled(N + 1, 0), name="train"), CHECKPOINTS, append=True)
