"""The whole way with a store in an object store: the numbers are those of a run on a local disk."""

import uuid

import numpy as np
import pytest
from tiny_runs import Counting, labelled, perceptron

from trak_lite import Attributor, Rows
from trak_lite.errors import ManifestMismatchError, StateError
from trak_lite.featurizing.row_checks import PROBED_ROWS
from trak_lite.store import RemotePlace

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
obstore_store = pytest.importorskip("obstore.store", reason="obstore is not installed")

N, M = 70, 6
SETTINGS = {"proj_dim": 16, "progress": False}


TRAIN, TARGETS = labelled(N, 0), labelled(M, 1)
CHECKPOINTS = [perceptron(seed=seed).state_dict() for seed in (1, 2)]


def attributor(path):
    return Attributor(perceptron(), "image_classification", path, **SETTINGS)


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


def test_scores_equal_those_of_a_local_run_bitwise(where, expected):
    """Also when read later, by an attributor that knows the address alone; nothing is computed twice."""
    scores = run(where)
    np.testing.assert_array_equal(scores.numpy(), expected.numpy())
    np.testing.assert_array_equal(scores.self_influence(), expected.self_influence())
    assert scores.top(3, target=1).indices.tolist() == expected.top(3, target=1).indices.tolist()

    again = Attributor.open(where, perceptron(), progress=False)
    found = again.featurize(Rows(TRAIN, name="train"), CHECKPOINTS)
    assert (found.rows_written, found.rows_found) == (0, 2 * N)
    np.testing.assert_array_equal(again.scores().numpy(), expected.numpy())
    assert str(RemotePlace(where)) in repr(again.scores())


def test_a_run_that_broke_off_goes_on_where_it_stopped(where, expected):
    """Rows of chunks that were not complete are on this machine; few are loaded again, to be compared."""
    broken = Counting(TRAIN, fail_at=48)
    with pytest.raises(KeyboardInterrupt):
        attributor(where).featurize(Rows(broken, name="train", batch_size=16), CHECKPOINTS)
    resumed = Counting(TRAIN, fail_at=None)
    attributor(where).featurize(Rows(resumed, name="train", batch_size=16), CHECKPOINTS[:1])
    assert resumed.loaded[:PROBED_ROWS] == sorted(resumed.loaded[:PROBED_ROWS])
    assert max(resumed.loaded[:PROBED_ROWS]) < 48
    assert resumed.loaded[PROBED_ROWS:] == list(range(48, N))
    np.testing.assert_array_equal(run(where).numpy(), expected.numpy())


def test_a_machine_that_has_nothing_computes_what_is_not_committed(where, expected, tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        attributor(where).featurize(Rows(Counting(TRAIN, 48), name="train", batch_size=16), CHECKPOINTS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    np.testing.assert_array_equal(run(where).numpy(), expected.numpy())


def test_the_gram_matrix_is_kept_on_the_machine(where, expected, tmp_path):
    run(where)
    assert list((tmp_path / "cache").rglob("*.safetensors"))


def test_other_settings_are_refused_by_name(where, expected):
    run(where)
    other = Attributor(perceptron(), "image_classification", where, seed=1, **SETTINGS)
    with pytest.raises(ManifestMismatchError, match=r"projector\.seed is 0 there, 1 here"):
        other.featurize(Rows(TRAIN, name="train"), CHECKPOINTS)


def test_an_address_without_a_store_is_named(where):
    with pytest.raises(StateError, match="There is no store at"):
        attributor(where).score(TARGETS)
