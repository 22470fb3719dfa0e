"""Checks and helpers for gradient blocks, shared by all projectors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from torch import Tensor

from trak_lite.errors import InvalidInputError
from trak_lite.types import (
    DenseBlock,
    FactoredBlock,
    FeatureLayout,
    GradientBlock,
    LookupBlock,
    ParameterShapes,
    Segment,
    SummedBlock,
    num_entries,
)

__all__ = ["block_rows", "by_module", "check_block", "check_grad_dim", "sample_pieces", "side_by_side"]

_PIECE_BYTES = 64 << 20  # size of the temporaries of a block that exist at once


def block_rows(block: GradientBlock, num_samples: int, parameters: ParameterShapes) -> Tensor:
    """Check a block and return its gradient rows.

    Args:
        block: One block of the batch.
        num_samples: B, rows of the batch.
        parameters: Shapes of the kept parameters by canonical name.

    Returns:
        Detached ``(b, parameter.numel())`` tensor in the block's dtype; b may be 0.

    Raises:
        InvalidInputError: As :func:`check_block`.
    """
    check_block(block, num_samples, parameters)
    rows = block.grad if isinstance(block, DenseBlock) else block.dense()
    # reshape(b, -1) fails without samples or entries, so give the size of the parameter.
    return rows.detach().reshape(block.num_samples, math.prod(parameters[block.name]))


def check_block(block: GradientBlock, num_samples: int, parameters: ParameterShapes) -> None:
    """Raise if a block does not fit the parameters and the batch of the accumulator.

    Raises:
        InvalidInputError: If the name is unknown, the shape is not the parameter's, rows are outside the
            batch, the gradient is not real floating point, or its factors disagree.
    """
    _check_place(block, num_samples, parameters)
    shape = tuple(parameters[block.name])
    if isinstance(block, SummedBlock):
        for part in block.parts:
            check_block(part, num_samples, parameters)
        return
    if isinstance(block, DenseBlock):
        seen, rows = tuple(block.grad.shape[1:]), block.grad
    elif isinstance(block, LookupBlock):
        seen, rows = (block.num_rows, block.values.shape[-1]), block.values
    else:
        seen, rows = (block.output_grads.shape[-1], block.inputs.shape[-1]), block.inputs
    as_matrix = (shape[0], math.prod(shape[1:])) if shape else ()  # shape of the factors of a convolution
    if seen not in (shape, (math.prod(shape),), as_matrix):
        raise InvalidInputError(
            f"The gradient of {block.name!r} has shape {seen} per sample, expected {shape}. "
            "Axis 0 of a gradient is the sample, the rest is the parameter's shape."
        )
    if not rows.is_floating_point():
        raise InvalidInputError(
            f"The gradient of {block.name!r} has dtype {rows.dtype}, expected floating point."
        )
    if isinstance(block, FactoredBlock):
        inputs, output_grads = block.inputs, block.output_grads
        if inputs.shape[:2] != output_grads.shape[:2] or not output_grads.is_floating_point():
            raise InvalidInputError(
                f"The factors of {block.name!r} have shapes {tuple(inputs.shape)} and {tuple(output_grads.shape)} and "
                f"dtypes {inputs.dtype} and {output_grads.dtype}. Expected floating-point factors (b, T, d_in) and "
                "(b, T, d_out) with the same b and T."
            )


def _check_place(block: GradientBlock, num_samples: int, parameters: ParameterShapes) -> None:
    """Raise if a block has an unknown parameter or rows outside the batch."""
    if block.name not in parameters:
        raise InvalidInputError(
            f"Got a gradient block of parameter {block.name!r}, which is not among the {len(parameters)} "
            "parameters of this accumulator. Pass its shape in `parameters`."
        )
    if not 0 <= block.start <= block.start + block.num_samples <= num_samples:
        raise InvalidInputError(
            f"A block of {block.name!r} covers rows {block.start} to {block.start + block.num_samples} "
            f"of a batch of {num_samples}. Set `start` to the position of its first sample in the batch."
        )


def check_grad_dim(grad_dim: int, parameters: ParameterShapes) -> None:
    """Raise if the number of entries of the parameters is not ``grad_dim``; 0 accepts any number.

    Raises:
        InvalidInputError: If the numbers differ.
    """
    entries = num_entries(parameters)
    if grad_dim and entries != grad_dim:
        raise InvalidInputError(
            f"The gradients have {entries} entries per sample, but the projector has grad_dim={grad_dim}. "
            "Pass grad_dim = the number of entries of all parameters in grad_wrt."
        )


def by_module(parameters: ParameterShapes) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the parameters by the module that owns them, in model order; the root module has the name ``""``."""
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in parameters.items():
        groups.setdefault(name.rpartition(".")[0], {})[name] = tuple(shape)
    return groups


def side_by_side(widths: Iterable[tuple[str, int]]) -> FeatureLayout:
    """Return the layout of segments with these names and widths."""
    segments: list[Segment] = []
    for name, width in widths:
        start = segments[-1].stop if segments else 0
        segments.append(Segment(name, start, start + width))
    return FeatureLayout(tuple(segments))


def sample_pieces(num_samples: int, bytes_per_sample: int) -> Iterator[slice]:
    """Yield consecutive slices of samples, each of at most about 64 MiB, or of one sample."""
    step = max(1, _PIECE_BYTES // max(1, bytes_per_sample))
    return (slice(start, min(start + step, num_samples)) for start in range(0, num_samples, step))
