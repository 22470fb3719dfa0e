"""Attributor with rows of int8 and int4: the numbers are those of quantised rows, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_runs import Counting
from torch import nn
from torch.utils.data import TensorDataset
from view_cases import Drawn, Given, GivenTerms, checkpoint_products, samples, scores_of, with_q

from trak_lite import Attributor, Rows
from trak_lite.errors import ManifestMismatchError, NonFiniteError, PrecisionError
from trak_lite.methods import GradDot

N, M, K = 300, 6, 15  # more rows than one block of 256; an odd K leaves half a byte of int4 empty
LARGEST = {"int8": 127, "int4": 7}
ROW_BYTES = {"float32": 60 + 8, "float16": 30 + 8, "int8": 15 + 4 + 8, "int4": 8 + 4 + 8}
DTYPES = pytest.mark.parametrize("dtype", [*LARGEST])


def quantised(rows, dtype):
    mantissa, exponent = np.frexp(np.abs(rows).max(axis=-1) / np.float32(LARGEST[dtype]))
    scale = np.ldexp(np.floor(mantissa * 2.0**16), exponent.astype(int) - 16)[..., None]
    return np.rint(rows / scale) * scale


def wide():
    generator = np.random.default_rng(0)
    train, targets = (generator.normal(size=(2, n, K)).astype(np.float32) for n in (N, M))
    q, w = generator.uniform(0.1, 1, size=(2, 2, N)).astype(np.float32)
    return Drawn(train, targets, q, w, (K,))


@DTYPES
def test_scores_are_those_of_quantised_train_rows_in_memory_on_disk_and_after_an_interruption(
    tmp_path, dtype
):
    """And of targets as they are."""
    rows = wide()
    rounded = quantised(rows.train, dtype)
    exact = Drawn(rounded, rows.targets, rows.q, rows.w, (K,))
    expected = with_q(checkpoint_products(exact), rows, "outside")
    itself = Drawn(rounded, rounded, rows.q, rows.w, (K,))
    diagonal = np.diagonal(with_q(checkpoint_products(itself), rows, "outside"))
    data = Rows(Counting(samples(rows.train, rows.q, rows.w), fail_at=290), name="train", batch_size=32)
    made = Attributor(
        Given((K,)), GivenTerms(), tmp_path / "a.zarr", projector="none", layout="module", dtype=dtype
    )
    with pytest.raises(KeyboardInterrupt):
        made.featurize(data, {**Given((K,)).state_dict(), "number": torch.tensor(0)})

    found = scores_of(rows.attributor(dtype=dtype), rows.targets)
    on_disk = scores_of(rows.attributor(tmp_path / "a.zarr", dtype=dtype), rows.targets)
    opened = Attributor.open(tmp_path / "a.zarr", Given((K,)), GivenTerms())

    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(found.self_influence(), diagonal, rtol=1e-4, atol=1e-6)
    streamed = scores_of(opened, rows.targets, dense=False, method=found.method)
    for one in (on_disk, streamed):
        np.testing.assert_array_equal(one.numpy(), found.numpy())
        np.testing.assert_array_equal(one.self_influence(), found.self_influence())
    for number, table in enumerate(on_disk.source.train):
        np.testing.assert_array_equal(table.read("features"), rounded[number])
        targets = on_disk.source.store.open_table(f"targets/test/ckpt-{number}")
        assert targets.column("features").dtype == "float32"
        np.testing.assert_array_equal(targets.read("features"), rows.targets[number])
    assert opened.dtype == dtype
    states = [{**Given((K,)).state_dict(), "number": torch.tensor(c)} for c in (0, 1)]
    again = scores_of(opened, rows.targets, "again", checkpoints=states, method=found.method)
    np.testing.assert_array_equal(again.numpy(), found.numpy())


def test_a_store_of_another_dtype_is_refused_and_the_quantisation_named(tmp_path):
    rows = wide()
    for dtype, row_bytes in ROW_BYTES.items():
        made = rows.attributor(tmp_path / dtype, dtype=dtype)
        assert scores_of(made, rows.targets).source.train[0].spec.row_bytes == made.row_bytes == row_bytes
    with pytest.raises(ManifestMismatchError, match="dtype is 'int8' there, 'int4' here"):
        rows.attributor(tmp_path / "int8", dtype="int4")
    with pytest.raises(ManifestMismatchError, match="quantisation is 1 there, 'absent' here"):
        rows.attributor(tmp_path / "int8", dtype="float32")


@DTYPES
@pytest.mark.parametrize("factor", [1e8, 1e-12])
def test_rows_beyond_the_range_of_float16_are_kept_as_well_as_others(dtype, factor):
    """Every row has a scale of its own."""
    rows = wide()
    rows.train[0, 3] *= factor
    stored = scores_of(rows.attributor(dtype=dtype), rows.targets).source.train[0].read("features")

    np.testing.assert_array_equal(stored, quantised(rows.train[0], dtype))
    if factor > 1:
        with pytest.raises(PrecisionError, match=r"float16 cannot hold the features of rows \[3\]"):
            rows.attributor(dtype="float16")


@DTYPES
def test_rows_that_are_not_finite_are_refused_and_named(tmp_path, dtype):
    """Before anything is quantised, and with nothing on disk."""
    rows = wide()
    rows.train[0, 3] = np.inf
    with pytest.raises(NonFiniteError, match=r"\b3\b"):
        rows.attributor(tmp_path / "run.zarr", dtype=dtype)
    assert not (tmp_path / "run.zarr").exists()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_in_bfloat16_are_rows_without_a_projection(dtype):
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
