"""Per-sample gradients of convolution weights.

A convolution is a matrix product with unfolded patches, so its weight gradient is a sum over positions of the output
gradient times the patch. For a transposed convolution the input and the output gradient are swapped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trak_lite.gradient_computers.hooks.calls import Contribution, Factors, OperationCall, Pieces, conjugate

__all__ = ["conv_rule", "conv_transpose_rule"]

_PIECE_BYTES = 3 << 19
"""Gradients formed at a time on a CPU. With more, one call takes up to five times as long; with fewer, up to twice."""
_FEWEST = 8
"""Samples per piece at least: a projection of fewer costs more per sample."""
_LARGE = 1 << 16
"""Number of weight entries from which one convolution per sample is faster on a CPU than one call: up to twice."""

_Parts = Iterator[tuple[Tensor, Contribution]]


def conv_rule(call: OperationCall, grad: Tensor) -> _Parts | None:
    """``conv(x, weight) + bias`` in one to three dimensions."""
    x, weight, bias, stride, padding, dilation, groups = call.bind(
        "input", "weight", "bias", "stride", "padding", "dilation", "groups"
    )
    dims = weight.dim() - 2
    if not _batch_first(call, x, dims):
        return None
    x, grad = conjugate(x.to(weight.dtype)), grad.to(weight.dtype)  # under autocast the dtypes differ
    step, spread = _each(stride, dims, 1), _each(dilation, dims, 1)
    x, pad = _padded(x, weight.shape[2:], padding, spread)

    def parts() -> _Parts:
        if call.wants(weight):
            kernel = tuple(weight.shape[2:])
            if call.keep_factors or weight.is_complex() or _factors_are_smaller(call, grad, weight):
                patches = _patches(x, kernel, step, pad, spread, tuple(grad.shape[2:]))
                yield weight, _contract(call, patches, grad.flatten(2), groups or 1, weight)
            else:
                # Under the caller's autocast a product would have another dtype, unlike a convolution's gradient.
                in_dtype = not torch.is_autocast_enabled(grad.device.type)
                if math.prod(kernel) == 1 and not any(pad) and in_dtype:
                    form = partial(_pointwise, x, grad, weight, step, groups or 1)
                else:
                    one_by_one = grad.device.type == "cpu" and weight.numel() >= _LARGE
                    formed = _one_by_one if one_by_one else _grouped
                    form = partial(formed, x, grad, weight, step, pad, spread, groups or 1)
                yield weight, _in_pieces(form, len(x), weight)
        if call.wants(bias):
            yield bias, _bias(call, grad)

    return parts()


def conv_transpose_rule(call: OperationCall, grad: Tensor) -> _Parts | None:
    """``conv_transpose(x, weight) + bias``: the patches are those of the output gradient."""
    x, weight, bias, stride, padding, _, groups, dilation = call.bind(
        "input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"
    )
    dims = weight.dim() - 2
    if not _batch_first(call, x, dims):
        return None
    x, grad = conjugate(x.to(weight.dtype)), grad.to(weight.dtype)

    def parts() -> _Parts:
        if call.wants(weight):
            step, spread = _each(stride, dims, 1), _each(dilation, dims, 1)
            pad = _each(padding, dims, 0)
            patches = _patches(grad, tuple(weight.shape[2:]), step, pad, spread, tuple(x.shape[2:]))
            yield weight, _contract(call, patches, x.flatten(2), groups or 1, weight)
        if call.wants(bias):
            yield bias, _bias(call, grad)

    return parts()


def _batch_first(call: OperationCall, x: Tensor, dims: int) -> bool:
    axis = call.axis_of(x)
    return axis is not None and axis.axis == 0 and x.dim() == dims + 2 and not call.wants(x)


def _each(value: Any, dims: int, default: int) -> tuple[int, ...]:
    """Return one number per spatial dimension."""
    if value is None:
        return (default,) * dims
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * dims if len(value) == 1 else tuple(value)


def _padded(
    x: Tensor, kernel: Sequence[int], padding: Any, dilation: Sequence[int]
) -> tuple[Tensor, tuple[int, ...]]:
    """Return x and the symmetric zero padding to apply later; asymmetric ``"same"`` padding is applied here."""
    dims = len(kernel)
    if padding == "valid":
        return x, (0,) * dims
    if padding != "same":
        return x, _each(padding, dims, 0)
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if all(t % 2 == 0 for t in total):
        return x, tuple(t // 2 for t in total)
    sides = [side for t in reversed(total) for side in (t // 2, t - t // 2)]
    return functional.pad(x, sides), (0,) * dims


def _bias(call: OperationCall, grad: Tensor) -> Tensor:
    if call.output_axis.multiple == 1:
        return grad.flatten(2).sum(2)
    samples = call.output_samples(grad)  # (B, m, C, *positions)
    return samples.sum([axis for axis in range(1, samples.dim()) if axis != 2])


def _patches(
    x: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    positions: tuple[int, ...],
) -> Tensor:
    """Return the patches ``(N, C * prod(kernel), L)`` under every kernel position, L = prod(positions)."""
    count, channels = x.shape[:2]
    if math.prod(kernel) == 1 and not any(padding) and set(stride) == {1} and tuple(x.shape[2:]) == positions:
        return x.flatten(2)
    if len(kernel) == 2 and _unfolded_size(x, kernel, stride, padding, dilation) == positions:
        return functional.unfold(x, kernel, dilation, padding, stride)
    if any(padding):
        x = functional.pad(x, [side for p in reversed(padding) for side in (p, p)])
    x = x.contiguous()
    steps = x.stride()[2:]
    patches = x.as_strided(
        (count, channels, *kernel, *positions),
        (
            *x.stride()[:2],
            *(s * d for s, d in zip(steps, dilation, strict=True)),
            *(s * d for s, d in zip(steps, stride, strict=True)),
        ),
    )
    return patches.reshape(count, channels * math.prod(kernel), math.prod(positions))


def _unfolded_size(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    return tuple(
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    )


def _contract(
    call: OperationCall, patches: Tensor, rows: Tensor, groups: int, weight: Tensor
) -> Contribution:
    """Return the weight gradients from patches ``(N, G * c, L)`` and rows ``(N, G * o, L)``."""
    samples = [_joined(call, value) for value in (rows, patches)]  # (B, C, m * L)
    if groups == 1:
        return Factors(samples[1].transpose(1, 2), samples[0].transpose(1, 2))
    out, patch = (torch.unflatten(value, 1, (groups, -1)) for value in samples)
    return torch.matmul(out, patch.transpose(-1, -2)).reshape(call.num_samples, *weight.shape)


def _joined(call: OperationCall, value: Tensor) -> Tensor:
    """Return ``(N, C, L)`` with N = B m as ``(B, C, m L)``."""
    if call.output_axis.multiple == 1:
        return value
    return call.output_samples(value).movedim(1, 2).flatten(2)


def _factors_are_smaller(call: OperationCall, grad: Tensor, weight: Tensor) -> bool:
    """Whether the factors (patches and output gradients at all positions) have at most as many entries as the weight.

    Otherwise one convolution with a group per sample is faster: measured 1.1 to 1.4 times the time of the plain weight
    gradient, compared with 2 to 4 times for patches and their product.
    """
    if call.output_axis.multiple > 1:  # only patches can join the positions of a sample's entries
        return True
    columns = weight[0].numel()
    return grad[0, 0].numel() * (columns + weight.shape[0]) <= columns * weight.shape[0]


def _in_pieces(form: Callable[[slice], Tensor], count: int, weight: Tensor) -> Contribution:
    """Return the weight gradients of all samples, or pieces of them that fit into a processor's cache."""
    step = max(_FEWEST, _PIECE_BYTES // (weight.numel() * weight.element_size()))
    return Pieces(count, step, form) if weight.device.type == "cpu" and step < count else form(slice(None))


def _pointwise(
    x: Tensor, grad: Tensor, weight: Tensor, stride: tuple[int, ...], groups: int, rows: slice
) -> Tensor:
    """Return the weight gradients ``(n, *weight.shape)`` of some rows of a convolution with kernels of one entry.

    One batched matrix product; measured at a fifth to nine tenths of the time of :func:`_grouped`.
    """
    x, grad = x[rows], grad[rows]
    if set(stride) != {1}:
        index: list[Any] = [..., *[slice(None, None, step) for step in stride]]
        x = x[tuple(index)]
    grads = grad.reshape(len(x) * groups, weight.shape[0] // groups, -1)
    inputs = x.reshape(len(x) * groups, weight.shape[1], -1)
    return torch.bmm(grads, inputs.transpose(1, 2)).view(len(x), *weight.shape)


def _one_by_one(
    x: Tensor,
    grad: Tensor,
    weight: Tensor,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    rows: slice,
) -> Tensor:
    """Return the weight gradients ``(n, *weight.shape)`` of some rows, by one convolution per sample."""
    wanted = range(*rows.indices(len(x)))
    found = grad.new_empty(len(wanted), *weight.shape)
    for row, i in zip(found, wanted, strict=True):
        row.copy_(_grouped(x, grad, weight, stride, padding, dilation, groups, slice(i, i + 1))[0])
    return found


def _grouped(
    x: Tensor,
    grad: Tensor,
    weight: Tensor,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    rows: slice,
) -> Tensor:
    """Return the weight gradients ``(n, *weight.shape)`` of some rows, by one convolution with n times the groups."""
    x, grad = x[rows], grad[rows]
    count = len(x)
    shape = (count * weight.shape[0], *weight.shape[1:])
    joined: Tensor = torch.ops.aten.convolution_backward(
        grad.reshape(1, -1, *grad.shape[2:]),
        x.reshape(1, -1, *x.shape[2:]),
        weight.new_empty(()).expand(shape),
        None,
        stride,
        padding,
        dilation,
        False,
        (0,) * len(stride),
        count * groups,
        (False, True, False),
    )[1]
    return joined.view(count, *weight.shape)
