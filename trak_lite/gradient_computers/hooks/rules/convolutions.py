"""Per-sample gradients of convolution weights.

A convolution is a matrix product with unfolded patches, so its weight gradient is a sum over positions of the output
gradient times the patch. For a transposed convolution the input and the output gradient are swapped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trak_lite.gradient_computers.hooks.calls import Contribution, OperationCall, Parts, Pieces, conjugate
from trak_lite.types import FactoredBlock

_PIECE_BYTES = 3 << 19
"""Gradients formed at a time on a CPU. With more, one call takes up to five times as long; with fewer, up to twice."""
_FEWEST = 8
"""Samples per piece at least: a projection of fewer costs more per sample."""
_LARGE = 1 << 16
"""Number of weight entries from which one convolution per sample is faster on a CPU than one call: up to twice."""


_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_NAMES_TRANSPOSED = (*_NAMES[:5], "output_padding", "groups", "dilation")


def conv_rule(call: OperationCall, grad: Tensor, *, transposed: bool = False) -> Parts:
    """``conv(x, weight) + bias`` in one to three dimensions.

    ``transposed``: ``conv_transpose(x, weight) + bias``; the patches are those of the output gradient.
    """
    x, weight, bias, stride, padding, *others = call.bind(*(_NAMES_TRANSPOSED if transposed else _NAMES))
    groups, dilation = others[1:] if transposed else others[::-1]
    dims, axis = weight.dim() - 2, call.axis_of(x)
    if axis is None or axis.axis != 0 or x.dim() != dims + 2 or call.wants(x):
        return
    x, grad = conjugate(x.to(weight.dtype)), grad.to(weight.dtype)  # under autocast the dtypes differ
    if call.wants(weight):
        step, spread = _each(stride, dims, 1), _each(dilation, dims, 1)
        image, rows = (grad, x) if transposed else (x, grad)
        image, pad = _padded(image, weight.shape[2:], padding, spread)
        product = _Product(image, rows, weight, step, pad, spread, groups or 1)
        by_factors = transposed or call.keep_factors or weight.is_complex()
        if by_factors or _factors_are_smaller(call, grad, weight):
            yield weight, product.of_patches(call)
        else:
            yield weight, product.in_pieces()
    if call.wants(bias):
        samples = call.output_samples(grad)  # (B, m, C, *positions)
        yield bias, samples.sum([1, *range(3, samples.dim())])


def _each(value: Any, dims: int, default: int) -> tuple[int, ...]:
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


def _factors_are_smaller(call: OperationCall, grad: Tensor, weight: Tensor) -> bool:
    """Whether the factors (patches and output gradients at all positions) have at most as many entries as the weight.

    Otherwise one convolution with a group per sample is faster: measured 1.1 to 1.4 times the time of the plain weight
    gradient, compared with 2 to 4 times for patches and their product.
    """
    if call.output_axis.multiple > 1:  # only patches can join the positions of a sample's entries
        return True
    columns = weight[0].numel()
    return grad[0, 0].numel() * (columns + weight.shape[0]) <= columns * weight.shape[0]


@dataclass(frozen=True, slots=True)
class _Product:
    """A convolution as a product of a weight and the patches of ``x``, with the gradient of its result."""

    x: Tensor
    grad: Tensor
    weight: Tensor
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def of_patches(self, call: OperationCall) -> Contribution:
        """Return the weight gradients as factors, or, if there are several groups, as their product."""

        def by_sample(value: Tensor) -> Tensor:  # (N, C, L) with N = B m as (B, C, m L)
            if call.output_axis.multiple == 1:
                return value
            return call.output_samples(value).movedim(1, 2).flatten(2)

        rows, patches = by_sample(self.grad.flatten(2)), by_sample(self._patches())
        if self.groups == 1:
            return FactoredBlock("", patches.transpose(1, 2), rows.transpose(1, 2))
        out, patch = (torch.unflatten(value, 1, (self.groups, -1)) for value in (rows, patches))
        return torch.matmul(out, patch.transpose(-1, -2)).reshape(call.num_samples, *self.weight.shape)

    def _patches(self) -> Tensor:
        """Return the patches ``(N, C * prod(kernel), L)`` under every kernel position, L = prod(positions)."""
        x, kernel, positions = self.x, tuple(self.weight.shape[2:]), tuple(self.grad.shape[2:])
        if {*kernel, *self.stride} == {1} and not any(self.padding) and x.shape[2:] == positions:
            return x.flatten(2)
        if any(self.padding):
            x = functional.pad(x, [side for p in reversed(self.padding) for side in (p, p)])
        x = x.contiguous()
        count, channels, *steps = x.stride()
        pairs = (*zip(steps, self.dilation, strict=True), *zip(steps, self.stride, strict=True))
        patches = x.as_strided(
            (*x.shape[:2], *kernel, *positions), (count, channels, *[a * b for a, b in pairs])
        )
        return patches.reshape(len(x), x.shape[1] * math.prod(kernel), math.prod(positions))

    def in_pieces(self) -> Contribution:
        """Return the dense weight gradients, or pieces of them that fit into a processor's cache."""
        weight, on_cpu = self.weight, self.grad.device.type == "cpu"
        # Under the caller's autocast a product would have another dtype, unlike a convolution's gradient.
        in_dtype = not torch.is_autocast_enabled(self.grad.device.type)
        if math.prod(weight.shape[2:]) == 1 and not any(self.padding) and in_dtype:
            form = self._pointwise
        else:
            form = self._one_by_one if on_cpu and weight.numel() >= _LARGE else self._grouped
        step = max(_FEWEST, _PIECE_BYTES // (weight.numel() * weight.element_size()))
        if on_cpu and step < len(self.x):
            return Pieces(len(self.x), step, form)
        return form(slice(None))

    def _pointwise(self, rows: slice) -> Tensor:
        """Return the weight gradients ``(n, *weight.shape)`` of some rows of a convolution with kernels of one entry.

        One batched matrix product; measured at a fifth to nine tenths of the time of :meth:`_grouped`.
        """
        x, grad = self.x[rows], self.grad[rows]
        if set(self.stride) != {1}:
            index: list[Any] = [..., *[slice(None, None, step) for step in self.stride]]
            x = x[tuple(index)]
        grads = grad.reshape(len(x) * self.groups, self.weight.shape[0] // self.groups, -1)
        inputs = x.reshape(len(x) * self.groups, self.weight.shape[1], -1)
        return torch.bmm(grads, inputs.transpose(1, 2)).view(len(x), *self.weight.shape)

    def _one_by_one(self, rows: slice) -> Tensor:
        """Return the weight gradients ``(n, *weight.shape)`` of some rows, by one convolution per sample."""
        wanted = range(*rows.indices(len(self.x)))
        grads = self.grad.new_empty(len(wanted), *self.weight.shape)
        for row, i in zip(grads, wanted, strict=True):
            row.copy_(self._grouped(slice(i, i + 1))[0])
        return grads

    def _grouped(self, rows: slice) -> Tensor:
        """Return the weight gradients ``(n, *weight.shape)`` of some rows: one convolution with n times the groups."""
        x, grad, weight = self.x[rows], self.grad[rows], self.weight
        count = len(x)
        joined: Tensor = torch.ops.aten.convolution_backward(
            grad.reshape(1, -1, *grad.shape[2:]),
            x.reshape(1, -1, *x.shape[2:]),
            weight.new_empty(()).expand(count * weight.shape[0], *weight.shape[1:]),
            None,
            *(self.stride, self.padding, self.dilation, False),
            *((0,) * len(self.stride), count * self.groups),
            (False, True, False),
        )[1]
        return joined.view(count, *weight.shape)
