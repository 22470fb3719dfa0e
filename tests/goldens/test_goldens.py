"""Results are those that are committed, on any processor: features, scores, projections, ``TRAKer``, stored layouts.

``make.py`` has made the numbers. What is compared to 1e-12 is float64; what is compared exactly consists of hash values
or of stored bytes; scores come from rows that are stored in float32.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import golden_cases
import numpy as np
import pytest
import traker_cases
from golden_cases import (
    CASES,
    DTYPES,
    FIRST,
    METHODS,
    NUMBERS,
    STORE,
    VECTORS,
    M,
    N,
    attributor_of,
    checkpoints_of,
    model_of,
    targets_of,
    train_of,
)
from golden_traker import SETTINGS, settings

from trak_lite import Attributor, Rows
from trak_lite.methods import METHODS as OF_THE_PACKAGE
from trak_lite.projectors import PROJECTORS, AbstractProjector
from trak_lite.store import ZarrFeatureStore, check_store

pytestmark = pytest.mark.filterwarnings("ignore:LiSSA did not converge", "ignore:CG did not converge")


@pytest.fixture(scope="module")
def numbers() -> dict[str, np.ndarray]:
    with np.load(NUMBERS) as archive:
        return dict(archive)


def assert_scores_close(found: np.ndarray, expected: np.ndarray) -> None:
    """Relative to the largest score: float32 rows, whose last bits depend on the processor."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_reference_and_of_the_file(name, numbers):
    golden = numbers[f"gradients/{name}"]
    for gradients in (golden_cases.reference_gradients, golden_cases.gradients):
        np.testing.assert_allclose(gradients(name), golden, rtol=1e-12, atol=1e-12 * np.abs(golden).max())


@pytest.mark.parametrize("name", CASES)
def test_every_method_has_its_scores(name, numbers):
    found = dict(golden_cases.scores_of(name))
    assert set(found) == set(METHODS) == set(OF_THE_PACKAGE)
    for method, scores in found.items():
        golden = numbers[f"scores/{name}/{method}"]
        assert scores.shape == golden.shape, method  # (0,) where the method is refused
        if golden.size:
            assert_scores_close(scores, golden)


@pytest.mark.quick
def test_projections_are_the_matrices_of_the_file(numbers):
    found = dict(golden_cases.projections())
    assert {key.split("/")[0] for key in found} == set(PROJECTORS) - {"fast_jl"}
    for key, matrix in found.items():
        golden = numbers[f"projections/{key}"]
        if key.startswith("gaussian"):  # logarithms and cosines differ in their last bits
            np.testing.assert_allclose(matrix, golden, rtol=0, atol=1e-6)
        else:
            np.testing.assert_array_equal(matrix, golden, err_msg=key)


@pytest.mark.quick
def test_features_of_every_projector_and_terms_of_every_task_are_those_of_the_file() -> None:
    """Noise of denoisers is float32; everything else is float64."""
    with np.load(VECTORS) as archive:
        goldens = dict(archive)
    found = dict(golden_cases.vectors())

    assert set(found) == set(goldens)
    for key, vector in found.items():
        close = 1e-5 if key.startswith("terms/diffusion") else 1e-11
        largest = np.abs(goldens[key]).max()
        np.testing.assert_allclose(vector, goldens[key], rtol=0, atol=close * largest, err_msg=key)


@pytest.mark.parametrize("way", ["interrupted", "appended"])
@pytest.mark.parametrize("name", ["perceptron", "attention"])
def test_runs_in_parts_have_the_scores_of_the_file(name, way, tmp_path, numbers):
    def rows(**changes: int) -> Rows:
        return Rows(train_of(name, **changes), name="train", batch_size=16)

    path, checkpoints = tmp_path / "parts.zarr", checkpoints_of(name)
    if way == "interrupted":
        with pytest.raises(KeyboardInterrupt):
            attributor_of(name, path).featurize(rows(fail_at=FIRST), checkpoints)
    else:
        attributor_of(name, path).featurize(rows(count=FIRST), checkpoints)
    made = attributor_of(name, path)
    summary = made.featurize(rows(), checkpoints, append=way == "appended")

    assert 0 < summary.rows_written < len(checkpoints) * N
    scores = made.score(targets_of(name), method="GradDot").numpy()
    assert_scores_close(scores, numbers[f"scores/{name}/GradDot"])
    if way == "interrupted":
        whole = golden_cases.featurized(name, path=tmp_path / "whole.zarr", batch_size=16)
        expected = whole.score(targets_of(name), method="GradDot").numpy()
        np.testing.assert_array_equal(scores, expected)


@pytest.mark.parametrize("key", SETTINGS)
def test_traker_has_the_scores_of_the_original_release(key, tmp_path, numbers):
    made = traker_cases.make_traker(tmp_path, **settings(key, AbstractProjector))
    ours = traker_cases.run(made, key.split("/")[0])
    traker_cases.assert_scores_close(ours, numbers[f"traker/{key}"], rtol=1e-4)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    with zipfile.ZipFile(STORE) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_store_of_the_file_can_be_read_and_scored(dtype, stores, numbers):
    path = stores / f"{dtype}.zarr"
    assert check_store(path).findings == ()
    with ZarrFeatureStore.open(path) as store:
        rows = store.open_table("ckpt-0").read("features")
    assert (len(rows), np.isfinite(rows).all()) == (N, True)

    reader = Attributor.open(path, model_of("perceptron"))
    held_out = reader.scores("held-out").numpy()
    golden = numbers["scores/perceptron/GaussNewton"]
    errors = {"float32": 2e-5, "float16": 5e-3, "int8": 5e-2, "int4": 0.5}  # of the rows, in the kernel too
    np.testing.assert_allclose(held_out, golden, rtol=0, atol=errors[dtype] * np.abs(golden).max())
    few = reader.scores("few", dense=False).top(4, target=M - 1)
    np.testing.assert_array_equal(few.indices, np.argsort(-held_out[:, M - 1], kind="stable")[:4])

    made = attributor_of("perceptron", path, dtype=dtype, store_norms=True)
    summary = made.featurize(Rows(train_of("perceptron"), name="train"), checkpoints_of("perceptron"))
    assert (summary.rows_written, summary.rows_found) == (0, 2 * N)
    again = made.score(targets_of("perceptron"), "again").numpy()
    np.testing.assert_allclose(again, held_out, rtol=0, atol=2e-5 * np.abs(held_out).max())
