"""The kernels of the sketches for CUDA and their test: the features are bitwise equal to those of the torch operations.

Gradients are read once. A term is a gradient entry times +1 or -1, which is exact, so the bits depend only on the order
of additions. Every sum in ``triton_vector.py`` and ``triton_matrix.py`` adds the same terms in the same order as the
torch operations of ``vector.py`` and ``matrix.py``, in one program, without atomic additions. A lane without a term
adds zero. Gradients in factors are the exception: they are formed by products and their blocks are added in another
order, so their features are equal up to rounding.

Import these modules only for gradients on CUDA, because triton is an optional package.

Shapes: b gradient rows (samples), n entries of a parameter, K columns (``proj_dim``).
Numerics: float64 gradients are summed in float64, all others in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trak_lite.projectors.random.hash import hash_signs
from trak_lite.projectors.sketch.blocks import BlockHashes
from trak_lite.projectors.sketch.triton_matrix import MatrixKernel
from trak_lite.projectors.sketch.triton_vector import VectorKernel


def are_right(device: torch.device) -> bool:
    """Return whether the kernels give the features of the torch operations on a device."""
    # Row i of the identity selects entry i of a vector or matrix.
    return all(
        torch.equal(sketch(torch.eye(len(expected), dtype=torch.float32, device=device)).cpu(), expected)
        for sketch, expected in _expected_entries(device)
    )


def _expected_entries(device: torch.device) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor]]:
    """Yield sketches, and the matrix of each: vectors of two segments and of one folded tile, a matrix of one block."""
    host = torch.device("cpu")

    def matrix(buckets: Tensor, signs: Tensor, size: int) -> Tensor:
        expected = torch.zeros(len(buckets), size, dtype=torch.float32, device=host)
        expected[torch.arange(len(buckets), device=host), buckets] = signs
        return expected

    def vector(offsets: list[int], folds: list[int], segment: int) -> VectorKernel:
        keys = {"sign_key": 5, "fold_key": 6}
        return VectorKernel(
            width=8, segment=segment, offsets=offsets, fold_offsets=folds, device=device, **keys
        )

    entries, offsets = torch.arange(20, device=host), torch.tensor([3, 0, 7], device=host)
    buckets = (entries + offsets[entries // 8]) % 8
    yield vector(offsets.tolist(), [0], 2), matrix(buckets, hash_signs(5, 0, 20, device=host), 8)

    folds = torch.tensor([1, 2], device=host)
    positions = (entries[:6] + 3) % 8
    signs = hash_signs(5, 0, 6, device=host) * hash_signs(6, 0, 8, device=host)[positions]
    yield vector([3], folds.tolist(), 1), matrix((positions % 4 + folds[positions // 4]) % 4, signs, 4)

    shifts, signs = torch.tensor([66, 2, 69], device=host), hash_signs(5, 0, 70, device=host)
    tables = (torch.arange(70, device=host), signs, torch.where(torch.arange(70, device=host) < 5, signs, 0))
    tables[0][:3] = shifts
    hashes = BlockHashes((3, 5), 70, *(table.view(1, 1, 70) for table in tables))
    rows, columns = entries[:15] // 5, entries[:15] % 5
    expected = matrix((shifts[rows] + columns) % 70, signs[rows] * signs[columns], 70)
    yield MatrixKernel(hashes, hashes.column_signs.to(device)).dense, expected
