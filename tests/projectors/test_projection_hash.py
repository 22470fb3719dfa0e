"""The hash: golden values, an independent reference, and the quality that projections rely on."""

from __future__ import annotations

import hashlib

import projection_reference as reference
import pytest
import torch

from trak_lite.projectors.random.hash import Stream, hash_words_, key32, mix32, mix32_, parameter_key, wrap32


def words(key: int, start: int, count: int) -> list[int]:
    out = hash_words_(torch.empty(count, dtype=torch.int32), key, start)
    return [word % 2**32 for word in out.tolist()]


def test_keys_have_their_golden_value():
    assert key32(0, 5, 0, 0) == 0xDAC49FE8


def test_the_first_million_words_have_their_golden_digest():
    out = hash_words_(torch.empty(1 << 20, dtype=torch.int32), key32(0, 5, 0, 0))

    digest = hashlib.sha256(out.numpy().astype("<i4").tobytes()).hexdigest()
    assert digest == "785ddea0640da4ea73734c39eb7c6f991399af2b6ab68f09b177063e8c6f8ade"


@pytest.mark.parametrize("start", [0, 2**31 - 3, 2**32 - 5, 2**32, 2**40 + 7, 2**62 + 2**32 - 2])
def test_words_agree_with_plain_integers_on_both_sides_of_word_boundaries(start):
    key = key32(3, 1)

    assert words(key, start, 11) == [reference.word_at(key, start + i) for i in range(11)]


def test_a_word_does_not_depend_on_where_the_draw_starts():
    assert words(7, 0, 100)[40:60] == words(7, 40, 20)


def test_scratch_of_the_caller_gives_the_same_words():
    out, scratch = torch.empty(50, dtype=torch.int32), torch.full((50,), -1, dtype=torch.int32)

    assert torch.equal(hash_words_(out, 9, 4, scratch=scratch), hash_words_(torch.empty_like(out), 9, 4))


def test_no_words_can_be_drawn():
    assert words(7, 0, 0) == []


def test_the_tensor_mixer_is_the_integer_mixer():
    numbers = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 0x12345678, 0xDEADBEEF]
    mixed = mix32_(torch.tensor([wrap32(number) for number in numbers], dtype=torch.int32))

    assert [word % 2**32 for word in mixed.tolist()] == [reference.mix(number) for number in numbers]
    assert [mix32(number) for number in numbers] == [reference.mix(number) for number in numbers]


def test_seeds_of_any_size_and_sign_have_keys_of_their_own():
    seeds = [
        0, 1, -1, 2**31, -(2**31), 2**32, 2**32 - 1, 2**63, -(2**63), 2**64 - 1,
        2**64, 2**64 + 1, -(2**64), 2**96 - 1, 2**96, -(2**96), 2**200, 2**200 + 2**64, 10**100,
    ]  # fmt: skip

    assert len({key32(seed) for seed in seeds}) == len(seeds)


def test_the_words_of_a_large_seed_do_not_run_into_the_next_number():
    assert key32(2**96) != key32(0, 2**32)
    assert key32(-1, 5) != key32(2**64 - 1, 2**32 - 1, 5)


def test_every_word_of_a_large_seed_counts():
    base = 2**300

    assert len({key32(base + (1 << shift)) for shift in range(0, 300, 16)}) == 19


def test_parameter_keys_agree_with_the_reference():
    for name in ("", "weight", "blocks.0.größe"):
        for stream in Stream:
            expected = reference.stream_key(12, 3, name, int(stream))
            assert parameter_key(12, 3, name, stream) == expected


def test_parameter_keys_differ_by_seed_model_name_and_stream():
    keys = [
        parameter_key(seed, model_id, name, stream)
        for seed in (0, 1, 1000)
        for model_id in (0, 1, 100)
        for name in ("weight", "bias", "Weight")
        for stream in Stream
    ]

    assert len(set(keys)) == len(keys)


def test_every_bit_is_one_half_of_the_time():
    count = 1 << 18
    out = hash_words_(torch.empty(count, dtype=torch.int32), key32(1))
    means = torch.stack([(out >> bit & 1).double().mean() for bit in range(32)])

    assert float((means - 0.5).abs().max()) < 5 * 0.5 / count**0.5


def test_bits_of_neighbouring_words_and_keys_are_uncorrelated():
    count = 1 << 17
    near = [
        hash_words_(torch.empty(count, dtype=torch.int32), key, start)
        for key, start in ((key32(0), 0), (key32(0), 1), (key32(1), 0), (key32(0) + 1, 0), (key32(0), 2**32))
    ]
    signs = torch.stack([1 - 2 * (out >> bit & 1).float() for out in near for bit in range(0, 32, 4)])
    correlations = signs @ signs.T / count - torch.eye(len(signs))

    assert float(correlations.abs().max()) < 5 / count**0.5


@pytest.mark.cuda
def test_words_are_the_same_on_cuda():
    for start in (0, 2**31 - 3, 2**32 - 500, 2**40):
        host = hash_words_(torch.empty(1000, dtype=torch.int32), 11, start)
        device = hash_words_(torch.empty(1000, dtype=torch.int32, device="cuda"), 11, start)
        assert torch.equal(device.cpu(), host)
