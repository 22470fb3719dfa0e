"""Selects the gradient entries of a mask, and the features that they are added to.

The K' chosen entries of a segment are those with the smallest 32-bit words h(i), which depend on (seed, model_id,
parameter name, local index i). They are a uniform sample without replacement, independent of the order of the
parameters. The j-th chosen entry has the j-th smallest word. Words are drawn in tiles, and only words below a bound are
stored, so the memory holds K' entries and one tile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.projectors.random.hash import (
    Stream,
    hash_offsets,
    hash_signs,
    hash_words_,
    parameter_key,
    wrap32,
)
from trak_lite.types import ParameterShapes, num_entries

__all__ = ["ChosenEntries", "Fold", "MaskPlan", "make_plan"]

# These numbers are appended to the keys of the stream, which gives separate keys.
_STREAM: Final = Stream.MASK
_CHOICE, _BUCKET, _SIGN = 1, 2, 3
_TILE: Final = 1 << 20
_WORDS: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class ChosenEntries:
    """The chosen entries of one parameter."""

    index: Tensor
    """``(n,)`` int64 local indices."""
    column: Tensor
    """``(n,)`` int64 positions among all chosen entries."""


@dataclass(frozen=True, slots=True)
class Fold:
    """A sparse sketch in gather form: feature k is the sum over r of ``sign[r, k] * chosen[index[r, k]]``.

    Gathering has a fixed order of additions on every device; scattering would need atomic additions on a GPU.
    """

    index: Tensor
    """``(R, K)`` int64; the index after the last chosen entry selects a zero."""
    sign: Tensor
    """``(R, K)`` float32."""


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """Chosen entries, scales and sketch for the gradients of one model."""

    entries: Mapping[str, ChosenEntries]
    """Chosen entries by parameter name, without parameters that have none."""
    scale: Tensor
    """``(K',)`` float64 factors of the chosen entries."""
    fold: Fold | None
    """Sketch of the scaled entries; ``None`` if the entries are the features."""


def make_plan(
    segments: Mapping[str, ParameterShapes], *, mask_dim: int, proj_dim: int, seed: int, model_id: int
) -> MaskPlan:
    """Choose the entries of every segment and the features that they are added to.

    Args:
        segments: Parameters by segment, each with at least one entry.
        mask_dim: Number of chosen entries of a segment; all entries if it has fewer.
        proj_dim: Number of features of a segment; its number of entries if that is smaller.
        seed: Any integer.
        model_id: The checkpoint.
    """
    entries: dict[str, ChosenEntries] = {}
    scales = [torch.empty(0, dtype=torch.float64, device="cpu")]
    rounds: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []
    start = 0
    for segment, parameters in segments.items():
        size = num_entries(parameters)
        count = min(mask_dim, size)
        entries.update(_choose(parameters, count, start=start, seed=seed, model_id=model_id))
        scales.append(torch.full((count,), math.sqrt(size / count), dtype=torch.float64, device="cpu"))
        rounds.append(_rounds(segment, count, min(proj_dim, size), start=start, seed=seed, model_id=model_id))
        start += count
    fold = _joined(rounds, start) if mask_dim > proj_dim and rounds else None
    return MaskPlan(entries, torch.cat(scales), fold)


def _choose(
    parameters: ParameterShapes, count: int, *, start: int, seed: int, model_id: int
) -> dict[str, ChosenEntries]:
    """Return the ``count`` entries with the smallest words, at positions ``start, start + 1, ...``."""
    names = sorted(parameters)
    sizes = [num_entries({name: parameters[name]}) for name in names]
    keys = [parameter_key(seed, model_id, name, _STREAM, _CHOICE) for name in names]
    expected = count + 8 * math.isqrt(count) + 16  # fewer than count are found with probability 1e-15
    found: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    while sum(len(index) for _, index in found) < count:
        bound = min(_WORDS, expected * _WORDS // sum(sizes) + 1)
        found = [_words_below(bound, key, size) for key, size in zip(keys, sizes, strict=True)]
        expected *= 2
    owner = np.repeat(np.arange(len(names)), [len(index) for _, index in found])
    words, index = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.lexsort((index, owner, words))[:count]  # equal words: by name, then by index
    owner, index = owner[order], index[order]
    places = {int(rank): np.flatnonzero(owner == rank) for rank in np.unique(owner)}
    return {
        names[rank]: ChosenEntries(torch.from_numpy(index[place]), torch.from_numpy(place + start))
        for rank, place in places.items()
    }


def _words_below(bound: int, key: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the words of ``h(key, 0) .. h(key, size - 1)`` below ``bound``, minus 2**31, and their indices."""
    words, indices = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    tile, scratch = (torch.empty(min(size, _TILE), dtype=torch.int32, device="cpu") for _ in range(2))
    for start in range(0, size, _TILE):
        count = min(_TILE, size - start)
        drawn = hash_words_(tile[:count], key, start, scratch=scratch[:count])
        drawn.add_(wrap32(1 << 31))  # the signed numbers now have the order of the unsigned words
        (index,) = torch.nonzero(drawn <= bound - 1 - (1 << 31), as_tuple=True)
        words.append(drawn[index].numpy().astype(np.int64))
        indices.append(index.numpy() + start)
    return np.concatenate(words), np.concatenate(indices)


def _rounds(
    segment: str, count: int, width: int, *, start: int, seed: int, model_id: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the chosen entries that are added to each feature of a segment, ``(R, width)``, and their signs.

    Entry j is added to feature ``floor(h(j) * width / 2**32)``, in round r if r earlier entries have this feature. If
    there are not more entries than features, entry j is feature j. The sign 0 marks a position without an entry.
    """
    if count <= width:
        return np.arange(start, start + width)[None], np.ones((1, width), np.float32)
    key, sign_key = (parameter_key(seed, model_id, segment, _STREAM, part) for part in (_BUCKET, _SIGN))
    buckets = np.array(hash_offsets(key, 0, count, size=width))
    order = np.argsort(buckets, kind="stable")
    filled = np.bincount(buckets, minlength=width)
    place = np.arange(count) - (np.cumsum(filled) - filled)[buckets[order]]
    index = np.zeros((int(filled.max()), width), np.int64)
    sign = np.zeros(index.shape, np.float32)
    index[place, buckets[order]] = order + start
    sign[place, buckets[order]] = hash_signs(sign_key, 0, count, device=torch.device("cpu")).numpy()[order]
    return index, sign


def _joined(rounds: Sequence[tuple[NDArray[np.int64], NDArray[np.float32]]], count: int) -> Fold:
    """Concatenate the features of the segments; missing rounds of a segment are filled with zeros."""
    most = max(len(index) for index, _ in rounds)
    sign = np.concatenate([np.pad(s, ((0, most - len(s)), (0, 0))) for _, s in rounds], 1)
    index = np.concatenate([np.pad(i, ((0, most - len(i)), (0, 0))) for i, _ in rounds], 1)
    # A gradient that is not finite must not reach a feature through a sign of 0.
    return Fold(torch.from_numpy(np.where(sign == 0, count, index)), torch.from_numpy(sign))
