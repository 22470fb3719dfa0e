"""Helpers for factored blocks that do not form the gradient."""

from __future__ import annotations

from collections.abc import Iterator

from trak_lite.errors import InvalidInputError
from trak_lite.projectors._blocks import check_block
from trak_lite.types import FactoredBlock, ParameterShapes

__all__ = ["check_factors", "sample_pieces"]

_PIECE_BYTES = 64 << 20  # size of the temporaries of a block that exist at once


def check_factors(block: FactoredBlock, num_samples: int, parameters: ParameterShapes) -> None:
    """Raise if a factored block does not fit the parameters and the batch of the accumulator.

    Raises:
        InvalidInputError: As :func:`check_block`, or if the factors disagree.
    """
    check_block(block, num_samples, parameters)
    inputs, output_grads = block.inputs, block.output_grads
    if inputs.shape[:2] != output_grads.shape[:2] or not output_grads.is_floating_point():
        raise InvalidInputError(
            f"The factors of {block.name!r} have shapes {tuple(inputs.shape)} and {tuple(output_grads.shape)} and "
            f"dtypes {inputs.dtype} and {output_grads.dtype}. Expected floating-point factors (b, T, d_in) and "
            "(b, T, d_out) with the same b and T."
        )


def sample_pieces(num_samples: int, bytes_per_sample: int) -> Iterator[slice]:
    """Yield consecutive slices of samples, each of at most about 64 MiB, or of one sample."""
    step = max(1, _PIECE_BYTES // max(1, bytes_per_sample))
    return (slice(start, min(start + step, num_samples)) for start in range(0, num_samples, step))
