"""Entries of the dense matrices: golden digests, an independent reference, moments, prefixes and devices."""

from __future__ import annotations

import hashlib

import numpy as np
import projection_reference as reference
import pytest
import torch

from trak_lite.projectors.random.entries import GaussianEntries, RademacherEntries, normal_quantiles
from trak_lite.projectors.random.hash import parameter_key

KINDS = {"rademacher": RademacherEntries, "gaussian": GaussianEntries}
CPU = torch.device("cpu")


def draw(
    kind: str, num_rows: int, proj_dim: int, *, start: int = 0, device: torch.device = CPU, key: int = 7
):
    entries = KINDS[kind](proj_dim, max(1, num_rows), device)
    out = torch.empty(num_rows, KINDS[kind].width(proj_dim), device=device)
    return entries.draw_(out, key, start)[:, :proj_dim]


@pytest.mark.parametrize(
    ("kind", "digest"),
    [
        ("rademacher", "aeb50d76e518f3a03e728a0d8ed47d7a33fe4084bcc10d4ede2d7c9b489ef5c8"),
        ("gaussian", "5e4872221d22020fb4adbaa7e43f6bc9f8c91cf2140af42720c7f10cad826539"),
    ],
)
def test_entries_have_their_golden_digest(kind, digest):
    key = parameter_key(0, 0, "weight", KINDS[kind].stream)
    entries = draw(kind, 1000, 96, key=key).numpy().astype("<f4")

    assert hashlib.sha256(entries.tobytes()).hexdigest() == digest


def test_quantiles_have_their_golden_digest():
    table = normal_quantiles().numpy().astype("<i4")

    assert (
        hashlib.sha256(table.tobytes()).hexdigest()
        == "ee46eda6f743ea9b2949c72134d6385025bcc7573bb0fba98b3bf40224779880"
    )


def test_quantiles_agree_with_the_standard_library():
    assert normal_quantiles().tolist() == reference.quantiles()


def test_quantiles_are_symmetric():
    assert torch.equal(normal_quantiles(), -normal_quantiles().flip(0))


@pytest.mark.parametrize("kind", KINDS)
def test_entries_agree_with_the_reference_bit_for_bit(kind):
    key = parameter_key(5, 2, "layer.weight", KINDS[kind].stream)
    expected = reference.matrix(kind, (20, 37), seed=5, model_id=2, name="layer.weight")

    np.testing.assert_array_equal(draw(kind, 20, 37, key=key).double().numpy(), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [2**31 - 2, 2**32 - 2, 2**35])
def test_rows_beyond_32_bits_are_rows_of_their_own(kind, start):
    rows = draw(kind, 4, 40, start=start)
    first = draw(kind, 4, 40)

    assert not torch.equal(rows, first)
    for i in range(4):
        assert torch.equal(rows[i : i + 1], draw(kind, 1, 40, start=start + i))


@pytest.mark.parametrize("kind", KINDS)
def test_more_rows_or_columns_begin_with_the_same_entries(kind):
    large = draw(kind, 50, 130)

    for rows, columns in ((50, 1), (1, 130), (13, 31), (20, 32), (20, 33), (50, 129)):
        assert torch.equal(draw(kind, rows, columns), large[:rows, :columns])


@pytest.mark.parametrize("kind", KINDS)
def test_entries_do_not_depend_on_the_block_that_they_are_drawn_in(kind):
    whole = draw(kind, 60, 45)
    pieces = [draw(kind, stop - start, 45, start=start) for start, stop in ((0, 1), (1, 30), (30, 60))]

    assert torch.equal(torch.cat(pieces), whole)


def test_signs_are_signs():
    assert set(draw("rademacher", 100, 50).unique().tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("kind", KINDS)
def test_entries_have_mean_zero_and_variance_one(kind):
    entries = draw(kind, 2000, 512).double()
    count = entries.numel()

    assert abs(float(entries.mean())) < 4 / count**0.5
    assert abs(float(entries.square().mean()) - 1) < 4 * (2 / count) ** 0.5


def test_gaussian_entries_have_the_normal_distribution():
    """Kolmogorov-Smirnov distance below its 1e-4 critical value, fourth moment within 4 standard errors."""
    entries = draw("gaussian", 2000, 512).double().flatten().sort().values
    count = entries.numel()
    ranks = torch.arange(count, dtype=torch.float64) / count

    assert float((torch.special.ndtr(entries) - ranks).abs().max()) < 2.23 / count**0.5
    assert abs(float(entries.pow(4).mean()) - 3) < 4 * (96 / count) ** 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(4096, 256), (256, 4096)])
def test_rows_and_columns_are_uncorrelated(kind, rows, columns):
    entries = draw(kind, rows, columns)
    gram = entries @ entries.T if columns > rows else entries.T @ entries
    long = max(rows, columns)
    off_diagonal = (gram / long - torch.diag(gram.diagonal() / long)).abs()

    assert float(off_diagonal.max()) < 5.5 / long**0.5


@pytest.mark.parametrize("kind", KINDS)
def test_scratch_takes_the_bytes_that_are_announced(kind):
    for proj_dim, rows in ((1, 1), (33, 7), (512, 40)):
        entries = KINDS[kind](proj_dim, rows, CPU)
        held = sum(value.nbytes for value in vars(entries).values() if isinstance(value, torch.Tensor))
        assert held == KINDS[kind].scratch_bytes(proj_dim, rows)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_entries_are_the_same_on_cuda_bit_for_bit(kind):
    device = torch.device("cuda")

    for start in (0, 2**32 - 100):
        assert torch.equal(
            draw(kind, 500, 200, start=start, device=device).cpu(), draw(kind, 500, 200, start=start)
        )
