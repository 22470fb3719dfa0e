"""Per-sample gradients of embedding tables; a sample's gradient is nonzero only in the rows of its ids."""

from __future__ import annotations

import torch
from torch import Tensor

from trak_lite.core.devices import add_at_, wide_dtype
from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers.hooks.calls import OperationCall, Parts
from trak_lite.gradient_computers.hooks.owners import Arrangement
from trak_lite.types import LookupBlock


def embedding_rule(call: OperationCall, grad: Tensor) -> Parts:
    """Rule of ``weight[ids]``; the padding row has gradient zero."""
    weight, ids, padding, by_frequency = call.bind("weight", "indices", "padding_idx", "scale_grad_by_freq")
    _refuse_frequency(by_frequency)
    if call.axis_of(ids) is None:
        return
    rows = call.samples(ids).reshape(call.num_samples, -1)
    values = call.output_samples(grad).reshape(*rows.shape, weight.shape[1])
    if padding is not None and padding >= 0:
        values = values.masked_fill((rows == padding).unsqueeze(-1), 0.0)
    yield weight, LookupBlock("", rows, values, weight.shape[0])


def embedding_bag_rule(call: OperationCall, grad: Tensor) -> Parts:
    """Rule of sums, means or maxima of bags of rows."""
    names = "weight indices offsets scale_grad_by_freq mode sparse per_sample_weights include_last_offset padding_idx"
    weight, ids, offsets, by_frequency, mode, _, scales, last_offset, padding = call.bind(*names.split())
    _refuse_frequency(by_frequency)
    if ids.dim() != 1 or call.output_axis.axis != 0 or call.wants(scales):
        return
    if mode == 2:
        yield weight, _largest(call, grad, weight)
        return
    starts = offsets[:-1] if last_offset else offsets
    bags = torch.searchsorted(starts, torch.arange(len(ids), device=ids.device), right=True) - 1
    shares = _shares(ids, bags, len(starts), mode, scales, padding)
    by_sample = Arrangement.of(_owner_of_bags(call, len(grad), ids.device)[bags])
    values = by_sample.take_gradients(grad[bags] * shares.to(grad.dtype).unsqueeze(1))
    shape = (len(by_sample.samples), by_sample.length)
    rows, values = by_sample.take(ids).view(shape), values.view(*shape, weight.shape[1])
    # Samples with fewer ids are padded with values of zero.
    rows, values = (by_sample.placed(part, call.num_samples) for part in (rows, values))
    yield weight, LookupBlock("", rows, values, weight.shape[0])


def _shares(
    ids: Tensor, bags: Tensor, num_bags: int, mode: int, scales: Tensor | None, padding: int | None
) -> Tensor:
    """Return the weight ``(n,)`` of each id in its bag."""
    counted = torch.ones_like(ids) if padding is None or padding < 0 else (ids != padding).to(ids.dtype)
    if mode == 0:
        return counted if scales is None else counted * scales
    sizes = torch.zeros(num_bags, dtype=ids.dtype, device=ids.device).index_add_(0, bags, counted)
    # Division of integer tensors would give float32.
    return counted.to(wide_dtype(counted.device)) / sizes.clamp(min=1)[bags]


def _owner_of_bags(call: OperationCall, num_bags: int, device: torch.device) -> Tensor:
    """Return the sample of every bag, ``(num_bags,)``."""
    axis, count = call.output_axis, call.num_samples
    bag = torch.arange(num_bags, device=device)
    return bag // axis.multiple if axis.sample_major else bag % count


def _largest(call: OperationCall, grad: Tensor, weight: Tensor) -> Tensor:
    """Return the gradients of maxima: each coordinate of a bag contributes to the row with its maximum."""
    sizes, winners = call.outputs[2:]
    size, width = weight.shape
    owner = _owner_of_bags(call, len(grad), grad.device).unsqueeze(1)
    empty = (sizes == 0).unsqueeze(1) | (winners < 0)  # torch may return row 0 as the argmax of an empty bag
    rows = owner * size + winners.clamp(min=0)
    entries = (rows * width + torch.arange(width, device=grad.device)).flatten()
    table = grad.new_zeros(call.num_samples * size * width)
    return add_at_(table, 0, entries, grad.masked_fill(empty, 0.0).flatten()).view(-1, size, width)


def _refuse_frequency(by_frequency: bool | None) -> None:
    if by_frequency:
        raise UnsupportedModelError(
            "An embedding has scale_grad_by_freq=True, which divides its gradient by counts over the whole batch. "
            "Create the embedding without scale_grad_by_freq."
        )
