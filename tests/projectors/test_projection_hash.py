"""The hash and the entries drawn from it, against whole numbers of Python; estimates of costs on an accelerator.

What is drawn from the hash is unbiased by the kits' laws, and is held by tests/goldens.
"""

import hashlib
import itertools
import statistics

import pytest
import torch
from projection_cases import assert_close, lookups

from trak_lite.projectors import CountSketchProjector
from trak_lite.projectors.random import hash as hashing
from trak_lite.projectors.sketch.base import Keys
from trak_lite.projectors.sketch.blocks import fourier_takes_less_time
from trak_lite.projectors.sketch.matrix import MatrixSketch
from trak_lite.types import DenseBlock

CPU = torch.device("cpu")
KINDS = {"rademacher": hashing.RademacherEntries, "gaussian": hashing.GaussianEntries}
every_kind = pytest.mark.parametrize("kind", KINDS)


def mix(word):
    word = (word ^ (word >> 16)) * 0x21F0AAAD % 2**32
    word = (word ^ (word >> 15)) * 0x735A2D97 % 2**32
    return word ^ (word >> 15)


def key_of(*numbers):
    """Fold numbers of 64 bits, word by word."""
    key = 0x9E3779B9
    for number in numbers:
        for word in (number % 2**32, number // 2**32):
            key = mix(key ^ word) ^ (key * 0x85EBCA6B % 2**32)
    return key


def word_at(key, index):
    return mix((mix((index % 2**32) ^ key_of(key, index // 2**32)) + key) % 2**32)


def entry(kind, key, row, column):
    """One entry: bit ``j % 32`` of word ``(i, j // 32)``, or the sum of the quantiles of two halves, normalised."""
    place = column // 32 if kind == "rademacher" else column
    word = mix(word_at(key, row) ^ mix(place * 0x9E3779B1 % 2**32))
    if kind == "rademacher":
        return -1.0 if word >> (column % 32) & 1 else 1.0
    quantiles = hashing.normal_quantiles().double()
    scale = (2 * quantiles.square().mean()).rsqrt().float()
    return float((quantiles[word % 2**16] + quantiles[word // 2**16]).float() * scale)


def words(key, start, count, **options):
    out = hashing.hash_words_(torch.empty(count, dtype=torch.int32), key, start, **options)
    return [word % 2**32 for word in out.tolist()]


def draw(kind, num_rows, proj_dim, *, start=0, device=CPU, key=7):
    entries = KINDS[kind](proj_dim, max(1, num_rows), device)
    out = torch.empty(num_rows, KINDS[kind].width(proj_dim), device=device)
    return entries.draw_(out, key, start)[:, :proj_dim]


def test_quantiles_are_those_of_the_standard_library():
    """And the same bits in every version and on every processor."""
    golden = "ee46eda6f743ea9b2949c72134d6385025bcc7573bb0fba98b3bf40224779880"
    assert hashlib.sha256(hashing.normal_quantiles().numpy().astype("<i4").tobytes()).hexdigest() == golden
    normal = statistics.NormalDist()
    expected = [round(normal.inv_cdf((a + 0.5) / 2**16) * 2**16) for a in range(2**16)]
    assert hashing.normal_quantiles().tolist() == expected


@pytest.mark.parametrize("start", [0, 2**31 - 3, 2**32 - 5, 2**32, 2**40 + 7, 2**62 + 2**32 - 2])
def test_words_are_those_of_plain_integers_on_both_sides_of_word_boundaries(start):
    key, scratch = hashing.key32(3, 1), torch.full((11,), -1, dtype=torch.int32)
    expected = [word_at(key, start + i) for i in range(11)]
    assert words(key, start, 11) == words(key, start, 11, scratch=scratch) == expected
    assert words(key, start + 4, 5) == expected[4:9]
    assert words(key, start, 0) == []
    sign = [1.0 - 2.0 * (word_at(key, i // 32) >> i % 32 & 1) for i in range(start, start + 40)]
    assert hashing.hash_signs(key, start, 40, device=CPU).tolist() == sign


def test_numbers_of_any_size_and_sign_have_keys_of_their_own():
    seeds = [
        0, 1, -1, 2**31, -(2**31), 2**32, 2**32 - 1, 2**63, -(2**63), 2**64 - 1,
        2**64, 2**64 + 1, -(2**64), 2**96 - 1, 2**96, -(2**96), 2**200, 2**200 + 2**64, 10**100,
        *(2**300 + (1 << shift) for shift in range(0, 300, 16)),
    ]  # fmt: skip
    assert len({hashing.key32(seed) for seed in seeds}) == len(seeds)
    assert hashing.key32(2**96) != hashing.key32(
        0, 2**32
    )  # words of a large seed do not run into the next number
    assert hashing.key32(-1, 5) != hashing.key32(2**64 - 1, 2**32 - 1, 5)


def test_parameter_keys_are_those_of_plain_integers_and_differ():
    names = ("", "weight", "Weight", "blocks.0.größe")
    settings = list(itertools.product((0, 1, 1000), (0, 1, 100), names, hashing.Stream))
    digests = {
        name: int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        for name in names
    }
    keys = [hashing.parameter_key(*setting) for setting in settings]
    assert keys == [key_of(seed, model, digests[name], stream) for seed, model, name, stream in settings]
    assert len(set(keys)) == len(keys)


@every_kind
@pytest.mark.parametrize("start", [0, 2**31 - 2, 2**32 - 2, 2**35])
def test_entries_are_those_of_plain_integers_wherever_a_draw_starts(kind, start):
    key = hashing.parameter_key(5, 2, "layer.weight", KINDS[kind].stream)
    whole = draw(kind, 20, 37, start=start, key=key)
    assert whole.tolist() == [[entry(kind, key, start + i, j) for j in range(37)] for i in range(20)]
    pieces = [draw(kind, b - a, 37, start=start + a, key=key) for a, b in ((0, 1), (1, 15), (15, 20))]
    assert torch.equal(torch.cat(pieces), whole)


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
        drawn = hashing.hash_words_(torch.empty(1000, dtype=torch.int32, device=cuda), 11, start)
        assert [word % 2**32 for word in drawn.tolist()] == words(11, start, 1000)
        for kind in KINDS:
            found = draw(kind, 500, 200, start=start, device=cuda).cpu()
            assert torch.equal(found, draw(kind, 500, 200, start=start))


@pytest.mark.parametrize("budget", [1, 100_000, 1 << 28])
@pytest.mark.parametrize(("shape", "proj_dim"), [((90, 75), 7), ((60, 70), 500), ((64, 128), 64)])
def test_rows_of_tables_for_all_blocks_at_once_have_the_features_of_one_after_the_other(
    shape, proj_dim, budget, monkeypatch
):
    """As on an accelerator; tests/device needs a compiler."""
    monkeypatch.setattr("trak_lite.projectors.sketch.blocks.scratch_bytes", lambda device: budget)
    rows, projector = lookups(shape, 7), CountSketchProjector(proj_dim, seed=3)
    expected = projector.sketch(DenseBlock("w", rows.dense()), shape, 1)
    found = MatrixSketch(shape, proj_dim, Keys(3, 1, "w"), device=CPU)._hashes.looked_up(rows)
    assert_close(found, expected, 1e-12)


@pytest.mark.parametrize(
    ("shape", "proj_dim", "fewest"), [((3072, 768), 2048, 5), ((768, 768), 256, 65), ((768, 3072), 2048, 5)]
)
def test_on_an_accelerator_transforms_take_less_time_from_some_number_of_samples_on(shape, proj_dim, fewest):
    """By the costs that the module states; a launch counts less for more samples, a position more than a launch."""
    answers = [fourier_takes_less_time(shape, 64, proj_dim=proj_dim, samples=b) for b in range(1, 65)]
    assert answers == [samples >= fewest for samples in range(1, 65)]
    settings = {"proj_dim": proj_dim, "samples": 64}
    times = [fourier_takes_less_time(shape, count, **settings) for count in range(1, 600, 3)]
    assert times == sorted(times, reverse=True)
