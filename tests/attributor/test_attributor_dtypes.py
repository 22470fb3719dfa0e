"""Attributor with rows of int8 and int4: the numbers are those of quantised rows, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from tiny_runs import labelled, perceptron
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows
from trak_lite.errors import ManifestMismatchError, NonFiniteError, PrecisionError
from trak_lite.methods import GaussNewton, GradDot
from trak_lite.store import ZarrFeatureStore

N, M, K = 300, 6, 15  # more rows than one block of 256; an odd K leaves half a byte of int4 empty
LARGEST = {"int8": 127, "int4": 7}
DTYPES = pytest.mark.parametrize("dtype", list(LARGEST))


TRAIN, TARGETS = labelled(N, 0), labelled(M, 1)
STATES = [
    {name: (1 + epoch) * value for name, value in perceptron().state_dict().items()} for epoch in range(2)
]


def attributor(path: Path | None, dtype: Any, **changes: Any) -> Attributor:
    method = GaussNewton(damping=0.1)
    settings = {"task": "image_classification", "proj_dim": K, "method": method, "layout": "joint", **changes}
    return Attributor(settings.pop("model", None) or perceptron(), path=path, dtype=dtype, **settings)


def scored(path: Path | None, dtype: str) -> np.ndarray:
    made = attributor(path, dtype)
    made.featurize(TRAIN, checkpoints=STATES)
    return made.score(TARGETS, name="test").numpy()


def quantised(rows: np.ndarray, dtype: str) -> np.ndarray:
    mantissa, exponent = np.frexp(np.abs(rows).max(axis=1) / np.float32(LARGEST[dtype]))
    scale = np.ldexp(np.floor(mantissa * 2.0**16), exponent.astype(int) - 16)[:, None]
    return np.rint(rows / scale) * scale


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    """Features, q, w and target features of each checkpoint in float32."""
    path = tmp_path_factory.mktemp("float32") / "run.zarr"
    scored(path, "float32")
    with ZarrFeatureStore.open(path) as store:
        return [
            {
                "targets": store.open_table(f"targets/test/ckpt-{number}").read("features"),
                **{
                    name: store.open_table(f"ckpt-{number}").read(name)
                    for name in ("features", "out_to_loss", "loss_curvature")
                },
            }
            for number in range(2)
        ]


@DTYPES
def test_scores_are_those_of_quantised_train_rows(
    tmp_path: Path, exact: list[dict[str, np.ndarray]], dtype: str
) -> None:
    """And of targets as they are; the dense reference quantises the rows of a float32 run itself."""
    expected = reference.kernel_scores(
        [quantised(rows["features"], dtype) for rows in exact],
        [rows["out_to_loss"].astype(float) for rows in exact],
        [rows["loss_curvature"].astype(float) for rows in exact],
        [rows["targets"].astype(float) for rows in exact],
        segments=[(0, K)],
        damping=0.1,
    )
    scores = scored(tmp_path / "run.zarr", dtype)

    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@DTYPES
def test_memory_and_disk_give_the_same_bits_and_a_killed_run_does(tmp_path: Path, dtype: str) -> None:
    class Stopping(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return N

        def __getitem__(self, row: int) -> Any:
            if row == 290:
                raise KeyboardInterrupt
            return TRAIN[row]

    expected = scored(None, dtype)
    path = tmp_path / "run.zarr"
    made = attributor(path, dtype)
    with pytest.raises(KeyboardInterrupt):
        made.featurize(Rows(Stopping(), name="train", batch_size=32), checkpoints=STATES)
    resumed = attributor(path, dtype)
    assert resumed.featurize(Rows(TRAIN, name="train"), checkpoints=STATES).rows_found == 288

    np.testing.assert_array_equal(resumed.score(TARGETS, name="test").numpy(), expected)


@DTYPES
def test_open_goes_on_with_the_dtype_of_the_store(tmp_path: Path, dtype: str) -> None:
    expected = scored(tmp_path / "run.zarr", dtype)
    opened = Attributor.open(tmp_path / "run.zarr", perceptron())

    assert opened.dtype == dtype
    np.testing.assert_array_equal(opened.score(TARGETS, name="again", checkpoints=STATES).numpy(), expected)


@DTYPES
def test_self_influence_is_that_of_the_quantised_rows(exact: list[dict[str, np.ndarray]], dtype: str) -> None:
    made = attributor(None, dtype)
    made.featurize(TRAIN, checkpoints=STATES[:1])
    rows = quantised(exact[0]["features"], dtype)
    kernel = reference.kernel(rows, exact[0]["loss_curvature"].astype(float), damping=0.1)
    expected = np.einsum("ik,ki->i", rows, np.linalg.solve(kernel, rows.T)) * exact[0]["out_to_loss"]

    found = made.score(TARGETS).self_influence()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())


def test_a_store_of_another_dtype_is_refused_and_the_quantisation_named(tmp_path: Path) -> None:
    scored(tmp_path / "run.zarr", "int8")
    with pytest.raises(ManifestMismatchError, match="dtype is 'int8' there, 'int4' here"):
        attributor(tmp_path / "run.zarr", "int4").featurize(TRAIN)
    with pytest.raises(ManifestMismatchError, match="quantisation is 1 there, 'absent' here"):
        attributor(tmp_path / "run.zarr", "float32").featurize(TRAIN)


@pytest.mark.parametrize(
    ("dtype", "row_bytes"),
    [("float32", 60 + 8), ("float16", 30 + 8), ("int8", 15 + 4 + 8), ("int4", 8 + 4 + 8)],
)
def test_row_bytes_are_those_of_the_stored_table(tmp_path: Path, dtype: str, row_bytes: int) -> None:
    made = attributor(tmp_path / "run.zarr", dtype)
    made.featurize(TRAIN)
    with ZarrFeatureStore.open(tmp_path / "run.zarr") as store:
        assert store.open_table("ckpt-0").spec.row_bytes == made.row_bytes == row_bytes


@DTYPES
def test_targets_are_kept_in_float32(tmp_path: Path, exact: list[dict[str, np.ndarray]], dtype: str) -> None:
    scored(tmp_path / "run.zarr", dtype)
    with ZarrFeatureStore.open(tmp_path / "run.zarr") as store:
        table = store.open_table("targets/test/ckpt-1")
        assert table.column("features").dtype == "float32"
        np.testing.assert_array_equal(table.read("features"), exact[1]["targets"])


def output(model_call: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return model_call(batch[0])[:, 0]


def with_row(factor: float) -> TensorDataset:
    """Rows whose gradients are the rows themselves, one of them multiplied."""
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    rows[3] *= factor
    return TensorDataset(rows)


def stored_features(path: Path, dtype: str, data: TensorDataset) -> np.ndarray:
    linear = nn.Linear(4, 1, bias=False)
    attributor(path, dtype, model=linear, task=output, projector="none", method="auto").featurize(data)
    with ZarrFeatureStore.open(path) as store:
        return store.open_table("ckpt-0").read("features")


@DTYPES
@pytest.mark.parametrize("factor", [1e8, 1e-12])
def test_rows_beyond_the_range_of_float16_are_kept_as_well_as_others(
    tmp_path: Path, dtype: str, factor: float
) -> None:
    """Every row has a scale of its own."""
    rows = stored_features(tmp_path / "float32", "float32", with_row(factor))
    np.testing.assert_array_equal(
        stored_features(tmp_path / dtype, dtype, with_row(factor)), quantised(rows, dtype)
    )
    if factor > 1:
        with pytest.raises(PrecisionError, match=r"float16 cannot hold the features of rows \[3\]"):
            stored_features(tmp_path / "float16", "float16", with_row(factor))


@DTYPES
def test_rows_that_are_not_finite_are_refused_and_named(tmp_path: Path, dtype: str) -> None:
    """Before anything is quantised, and with nothing on disk."""
    made = attributor(
        tmp_path / "run.zarr",
        dtype,
        model=nn.Linear(4, 1, bias=False),
        task=output,
        projector="none",
        method="auto",
    )
    with pytest.raises(NonFiniteError, match=r"\b3\b"):
        made.featurize(with_row(float("inf")))
    assert not (tmp_path / "run.zarr").exists()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_in_bfloat16_are_rows_without_a_projection(dtype: str) -> None:
    """NumPy has no bfloat16, in which these features are computed."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).bfloat16()
    x, y = torch.randn(6, 4).bfloat16(), torch.arange(6) % 2
    data = TensorDataset(x, y)
    made = Attributor(
        model, "image_classification", None, dtype=dtype, projector="none", method="GradDot", store_norms=True
    )

    made.featurize(Rows(data, batch_size=4))
    scores = made.score(data, method=GradDot(q="off")).numpy()

    rows = []
    for sample, label in zip(x, y, strict=True):
        logits = model(sample[None])[0].float()
        grads = torch.autograd.grad(logits[label] - logits[1 - label], list(model.parameters()))
        rows.append(torch.cat([grad.reshape(-1) for grad in grads]).double())
    expected = torch.stack(rows)
    products = (expected @ expected.T).numpy()
    np.testing.assert_allclose(made.gradient_norms()[0], expected.norm(dim=1), rtol=2e-2)
    np.testing.assert_allclose(scores, products, atol=2e-2 * np.abs(products).max())
