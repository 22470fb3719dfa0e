"""The hash, the entries drawn from it, and sketches as accelerators compute them: bits, quality, references."""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import projection_reference as reference
import pytest
import torch
from projection_cases import assert_close, factors, formed, lookups

from trak_lite.projectors.random.hash import (
    GaussianEntries,
    RademacherEntries,
    Stream,
    hash_signs,
    hash_words_,
    key32,
    normal_quantiles,
    parameter_key,
)
from trak_lite.projectors.sketch.base import Keys
from trak_lite.projectors.sketch.blocks import convolved, fourier_takes_less_time
from trak_lite.projectors.sketch.matrix import MatrixSketch

CPU = torch.device("cpu")
KINDS = {"rademacher": RademacherEntries, "gaussian": GaussianEntries}
every_kind = pytest.mark.parametrize("kind", KINDS)


def digest(tensor: torch.Tensor, dtype: str) -> str:
    return hashlib.sha256(tensor.numpy().astype(dtype).tobytes()).hexdigest()


def words(key: int, start: int, count: int, **options) -> list[int]:
    out = hash_words_(torch.empty(count, dtype=torch.int32), key, start, **options)
    return [word % 2**32 for word in out.tolist()]


def draw(kind: str, num_rows: int, proj_dim: int, *, start: int = 0, device=CPU, key: int = 7):
    entries = KINDS[kind](proj_dim, max(1, num_rows), device)
    out = torch.empty(num_rows, KINDS[kind].width(proj_dim), device=device)
    return entries.draw_(out, key, start)[:, :proj_dim]


# ---- golden values: every version and processor has these


def test_quantiles_are_those_of_the_standard_library():
    golden = "ee46eda6f743ea9b2949c72134d6385025bcc7573bb0fba98b3bf40224779880"
    assert digest(normal_quantiles(), "<i4") == golden
    assert normal_quantiles().tolist() == reference.quantiles()
    assert torch.equal(normal_quantiles(), -normal_quantiles().flip(0))


# ---- the hash


@pytest.mark.parametrize("start", [0, 2**31 - 3, 2**32 - 5, 2**32, 2**40 + 7, 2**62 + 2**32 - 2])
def test_words_are_those_of_plain_integers_on_both_sides_of_word_boundaries(start):
    key, scratch = key32(3, 1), torch.full((11,), -1, dtype=torch.int32)
    expected = [reference.word_at(key, start + i) for i in range(11)]
    assert words(key, start, 11) == words(key, start, 11, scratch=scratch) == expected
    assert words(key, start + 4, 5) == expected[4:9]
    assert words(key, start, 0) == []
    sign = [1.0 - 2.0 * (reference.word_at(key, i // 32) >> i % 32 & 1) for i in range(start, start + 40)]
    assert hash_signs(key, start, 40, device=CPU).tolist() == sign


def test_numbers_of_any_size_and_sign_have_keys_of_their_own():
    seeds = [
        0, 1, -1, 2**31, -(2**31), 2**32, 2**32 - 1, 2**63, -(2**63), 2**64 - 1,
        2**64, 2**64 + 1, -(2**64), 2**96 - 1, 2**96, -(2**96), 2**200, 2**200 + 2**64, 10**100,
        *(2**300 + (1 << shift) for shift in range(0, 300, 16)),
    ]  # fmt: skip
    assert len({key32(seed) for seed in seeds}) == len(seeds)
    assert key32(2**96) != key32(0, 2**32)  # words of a large seed do not run into the next number
    assert key32(-1, 5) != key32(2**64 - 1, 2**32 - 1, 5)


def test_parameter_keys_are_those_of_the_reference_and_differ():
    settings = [
        (seed, model_id, name, stream)
        for seed in (0, 1, 1000)
        for model_id in (0, 1, 100)
        for name in ("", "weight", "Weight", "blocks.0.größe")
        for stream in Stream
    ]
    keys = [parameter_key(*setting) for setting in settings]

    assert keys == [reference.stream_key(*setting[:3], int(setting[3])) for setting in settings]
    assert len(set(keys)) == len(keys)


def test_bits_are_one_half_of_the_time_and_uncorrelated():
    count = 1 << 17
    near = [
        hash_words_(torch.empty(count, dtype=torch.int32), key, start)
        for key, start in ((key32(0), 0), (key32(0), 1), (key32(1), 0), (key32(0) + 1, 0), (key32(0), 2**32))
    ]
    means = torch.stack([(near[0] >> bit & 1).double().mean() for bit in range(32)])
    signs = torch.stack([1 - 2 * (out >> bit & 1).float() for out in near for bit in range(0, 32, 4)])
    correlations = signs @ signs.T / count - torch.eye(len(signs))

    assert float((means - 0.5).abs().max()) < 5 * 0.5 / count**0.5
    assert float(correlations.abs().max()) < 5 / count**0.5


# ---- entries of dense matrices


@every_kind
@pytest.mark.parametrize("start", [0, 2**31 - 2, 2**32 - 2, 2**35])
def test_entries_are_those_of_the_reference_wherever_a_draw_starts(kind, start):
    key = parameter_key(5, 2, "layer.weight", KINDS[kind].stream)
    whole = draw(kind, 20, 37, start=start, key=key)
    expected = [[reference.entry(kind, key, start + i, j) for j in range(37)] for i in range(20)]
    np.testing.assert_array_equal(whole.double().numpy(), expected)
    pieces = [draw(kind, b - a, 37, start=start + a, key=key) for a, b in ((0, 1), (1, 15), (15, 20))]
    assert torch.equal(torch.cat(pieces), whole)


@every_kind
def test_entries_have_their_distribution_and_are_uncorrelated(kind):
    """Kolmogorov-Smirnov distance below its 1e-4 critical value, moments within 4 standard errors."""
    entries = draw(kind, 2000, 512)
    for gram, long in ((entries @ entries.T, 512), (entries.T @ entries, 2000)):
        off_diagonal = (gram / long - torch.diag(gram.diagonal() / long)).abs()
        assert float(off_diagonal.max()) < 5.8 / long**0.5
    values = entries.double().flatten().sort().values
    count = len(values)
    assert abs(float(values.mean())) < 4 / count**0.5
    assert abs(float(values.square().mean()) - 1) < 4 * (2 / count) ** 0.5
    if kind == "rademacher":
        assert set(values.unique().tolist()) == {-1.0, 1.0}
    else:
        ranks = torch.arange(count, dtype=torch.float64) / count
        assert float((torch.special.ndtr(values) - ranks).abs().max()) < 2.23 / count**0.5
        assert abs(float(values.pow(4).mean()) - 3) < 4 * (96 / count) ** 0.5


@every_kind
def test_scratch_takes_the_bytes_that_are_announced(kind):
    for proj_dim, rows in ((1, 1), (33, 7), (512, 40)):
        entries = KINDS[kind](proj_dim, rows, CPU)
        held = sum(value.nbytes for value in vars(entries).values() if isinstance(value, torch.Tensor))
        assert held == KINDS[kind].scratch_bytes(proj_dim, rows)


@pytest.mark.cuda
def test_words_and_entries_are_the_same_on_cuda():
    cuda = torch.device("cuda")
    for start in (0, 2**31 - 3, 2**32 - 100, 2**40):
        drawn = hash_words_(torch.empty(1000, dtype=torch.int32, device=cuda), 11, start)
        assert [word % 2**32 for word in drawn.tolist()] == words(11, start, 1000)
        for kind in KINDS:
            found = draw(kind, 500, 200, start=start, device=cuda).cpu()
            assert torch.equal(found, draw(kind, 500, 200, start=start))


# ---- all blocks of a matrix at once, as on accelerators


@pytest.mark.parametrize("budget", [1, 100_000, 1 << 28])
@pytest.mark.parametrize("proj_dim", [7, 64, 500])
@pytest.mark.parametrize("shape", [(60, 70), (90, 75), (50, 8), (64, 128)])
def test_all_blocks_at_once_have_the_features_of_the_gradient(shape, proj_dim, budget, monkeypatch):
    monkeypatch.setattr("trak_lite.projectors.sketch.blocks.scratch_bytes", lambda device: budget)
    at_once = MatrixSketch(shape, proj_dim, Keys(3, 1, "w"), device=CPU)._at_once
    product, rows = factors(shape, 5), lookups(shape, 7)
    key = functools.partial(reference.stream_key, 3, 1, "w")
    bucket, sign = reference.matrix_entries(*shape, proj_dim, lambda stream, *parts: key(stream, 0, *parts))
    matrix = torch.zeros(shape[0] * shape[1], proj_dim, dtype=torch.float64)
    matrix[torch.arange(len(matrix)), torch.from_numpy(bucket)] = torch.from_numpy(sign)

    for block, made in [
        (product, convolved(product, proj_dim, at_once.spectra, budget)),
        (rows, at_once.looked_up(rows)),
    ]:
        assert_close(made, formed(block, shape).grad.flatten(1) @ matrix, 1e-12)


@pytest.mark.parametrize(
    ("shape", "positions", "proj_dim", "fewest"),
    [
        ((3072, 768), 64, 2048, 5),
        ((768, 768), 64, 256, None),
        ((768, 3072), 64, 2048, 5),
    ],
)
def test_on_an_accelerator_transforms_take_less_time_from_some_number_of_samples_on(
    shape, positions, proj_dim, fewest
):
    """By the costs that the module states; a launch counts less for more samples."""
    answers = [fourier_takes_less_time(shape, positions, proj_dim=proj_dim, samples=b) for b in range(1, 65)]
    assert answers == sorted(answers)
    assert (answers.index(True) + 1 if any(answers) else None) == fewest
    times = [
        fourier_takes_less_time(shape, count, proj_dim=proj_dim, samples=64) for count in range(1, 600, 3)
    ]
    assert times == sorted(times, reverse=True)
