"""Exact per-sample gradients of torch's operations, without running the operation again.

Every rule takes one :class:`OperationCall` and the gradient of its result, and returns the per-sample gradients of the
parameters among its arguments. :mod:`trak_lite.gradient_computers.hooks.rules.generic` handles operations without a
rule, and calls that a rule does not support.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers.hooks.calls import (
    Contribution,
    Factors,
    OperationCall,
    OperationRule,
    conjugate,
)
from trak_lite.gradient_computers.hooks.plan.axes import BatchAxis, by_sample, sum_to_parameter
from trak_lite.gradient_computers.hooks.rules.convolutions import conv_rule, conv_transpose_rule
from trak_lite.gradient_computers.hooks.rules.embeddings import embedding_bag_rule, embedding_rule

__all__ = ["MAY_DRAW", "RULES", "matrices_of", "reads_nothing"]

_Parts = Iterator[tuple[Tensor, Contribution]]


def _positions(tensor: Tensor, axis: BatchAxis, count: int) -> Tensor:
    """Return a tensor whose last axis holds the d entries of a position as ``(B, T, d)``."""
    if axis.axis == 0 and axis.sample_major and tensor.numel():
        return tensor.reshape(count, -1, tensor.shape[-1])
    return _flattened(by_sample(tensor, axis, count))


def _flattened(samples: Tensor) -> Tensor:
    """Flatten ``(B, ..., d)`` to ``(B, T, d)``."""
    return samples.reshape(
        samples.shape[0], samples[0].numel() // max(samples.shape[-1], 1), samples.shape[-1]
    )


def linear_rule(call: OperationCall, grad: Tensor) -> _Parts | None:
    """``x W^T + b``."""
    x, weight, bias = call.bind("input", "weight", "bias")
    return _matrix_product(call, grad, x=x, weight=weight, bias=bias, weight_is_in_out=False)


def addmm_rule(call: OperationCall, grad: Tensor) -> _Parts | None:
    """``b + x W``, the form of Hugging Face's Conv1D."""
    bias, x, weight, beta, alpha = call.bind("input", "mat1", "mat2", "beta", "alpha")
    if beta not in (None, 1) or alpha not in (None, 1) or call.wants(x):
        return None
    return _matrix_product(call, grad, x=x, weight=weight, bias=bias, weight_is_in_out=True)


def matmul_rule(call: OperationCall, grad: Tensor) -> _Parts | None:
    """``x W`` or ``W x`` with a matrix W."""
    left, right = matrices_of(call)
    if call.wants(left) and call.wants(right):
        return None
    if call.wants(right) and right.dim() == 2 and left.dim() >= 2:
        return _matrix_product(call, grad, x=left, weight=right, bias=None, weight_is_in_out=True)
    if call.wants(left) and left.dim() == 2 and right.dim() >= 2:
        return _left_product(call, grad, left, right)
    return None


def matrices_of(call: OperationCall) -> tuple[Any, Any]:
    """Return the left and the right factor of a matrix product; they may be keyword arguments."""
    named = [call.kwargs[name] for name in ("input", "other", "mat2", "tensor2") if name in call.kwargs]
    left, right = (*call.args, *named)
    return left, right


def _matrix_product(
    call: OperationCall, grad: Tensor, *, x: Tensor, weight: Tensor, bias: Any, weight_is_in_out: bool
) -> _Parts | None:
    axis = call.axis_of(x)
    if (
        axis is None
        or axis.axis == x.dim() - 1
        or (bias is not None and bias.dim() != 1)
        or weight.dim() != 2
    ):
        return None

    def parts() -> _Parts:
        grads = _positions(grad, call.output_axis, call.num_samples)
        if call.wants(weight):
            inputs = conjugate(_positions(x, axis, call.num_samples))
            yield weight, Factors(grads, inputs) if weight_is_in_out else Factors(inputs, grads)
        if call.wants(bias):
            yield bias, (grads.squeeze(1) if grads.shape[1] == 1 else grads.sum(1))

    return parts()


def _left_product(call: OperationCall, grad: Tensor, weight: Tensor, x: Tensor) -> _Parts | None:
    axis = call.axis_of(x)
    if axis is None or axis.axis == x.dim() - 2:
        return None

    def parts() -> _Parts:
        inputs = conjugate(_flattened(call.samples(x).transpose(-1, -2)))
        yield weight, Factors(inputs, _flattened(call.output_samples(grad).transpose(-1, -2)))

    return parts()


def einsum_rule(call: OperationCall, grad: Tensor) -> _Parts | None:
    """``einsum("ibh,hnd->ibnd", x, W)``: a product of one tensor of the samples with one parameter."""
    equation, operands = call.args[:2]
    terms = equation.replace(" ", "").replace("->", ",").split(",")
    if len(operands) != 2 or len(terms) != 3 or "->" not in equation or call.kwargs:
        return None
    place = int(call.wants(operands[1]))
    weight, x = operands[place], operands[1 - place]
    if call.wants(x) or call.axis_of(x) is None or not _is_plain_product(terms, [*operands, grad]):
        return None
    own, read, result = terms[place], terms[1 - place], terms[2]
    if not set(own) <= {*read, *result}:
        return None  # an axis that is summed in the parameter alone

    def parts() -> _Parts:
        # Under autocast the operation read a copy of another dtype; a real parameter may meet complex data.
        dtype = torch.promote_types(weight.dtype, grad.dtype) if grad.is_complex() else weight.dtype
        inputs, grads = call.samples(x).to(dtype), call.output_samples(grad).to(dtype)
        sample = next(letter for letter in string.ascii_letters if letter not in equation)
        pattern = f"{sample}{read},{sample}{result}->{sample}{own}"
        yield weight, torch.einsum(pattern, conjugate(inputs), grads)

    return parts()


def _is_plain_product(terms: Sequence[str], tensors: Sequence[Tensor]) -> bool:
    """Whether every letter stands for one axis of each tensor that has it, of one size."""
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, tensors, strict=True):
        if not term.isalpha() or len(set(term)) != len(term) or len(term) != tensor.dim():
            return False
        if any(
            sizes.setdefault(letter, size) != size for letter, size in zip(term, tensor.shape, strict=True)
        ):
            return False
    return True


def _elementwise(derivative: Callable[[OperationCall, int, Tensor], Tensor | None]) -> OperationRule:
    """Return the rule of ``a op b`` from the derivative with respect to argument 0 or 1, times the gradient."""

    def rule(call: OperationCall, grad: Tensor) -> _Parts | None:
        if len(call.args) > 2:
            return None  # torch.add(x, 2, y), where 2 is a factor of y
        operands = _operands(call)
        wanted = [place for place, value in enumerate(operands) if call.wants(value)]
        full = {place: derivative(call, place, grad) for place in wanted}

        def parts() -> _Parts:
            for place, value in full.items():
                if value is not None:
                    shape = operands[place].shape
                    yield operands[place], sum_to_parameter(call.output_samples(value), shape)

        return parts() if all(value is not None for value in full.values()) else None

    return rule


def _of_sum(call: OperationCall, place: int, grad: Tensor) -> Tensor:
    alpha = conjugate(call.kwargs.get("alpha", 1))
    scaled: Tensor = grad * alpha if place == 1 and alpha != 1 else grad
    return scaled


def _of_difference(call: OperationCall, place: int, grad: Tensor) -> Tensor:
    return -_of_sum(call, place, grad) if place == 1 else grad


def _of_reflected_difference(call: OperationCall, place: int, grad: Tensor) -> Tensor:
    return grad if place == 1 else -grad


def _operands(call: OperationCall) -> tuple[Any, ...]:
    """Return both operands in order; they may be keyword arguments."""
    return (*call.args, *(call.kwargs[name] for name in ("input", "other") if name in call.kwargs))[:2]


def _operand(call: OperationCall, place: int) -> Any:
    return _operands(call)[place]


def _of_product(call: OperationCall, place: int, grad: Tensor) -> Tensor:
    product: Tensor = grad * conjugate(_operand(call, 1 - place))
    return product


def _of_quotient(call: OperationCall, place: int, grad: Tensor) -> Tensor | None:
    if "rounding_mode" in call.kwargs:
        return None
    numerator, denominator = conjugate(_operand(call, 0)), conjugate(_operand(call, 1))
    quotient: Tensor = grad / denominator
    return quotient if place == 0 else -quotient * numerator / denominator


def where_rule(call: OperationCall, grad: Tensor) -> _Parts | None:
    """``torch.where(condition, a, b)``."""
    if len(call.args) != 3 or call.kwargs:
        return None
    condition, *operands = call.args

    def parts() -> _Parts:
        for operand, chosen in zip(operands, (condition, ~condition), strict=True):
            if call.wants(operand):
                samples = call.output_samples(grad.masked_fill(~chosen, 0.0))
                yield operand, sum_to_parameter(samples, operand.shape)

    return parts() if condition.dtype == torch.bool else None


_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def attention_rule(call: OperationCall, grad: Tensor) -> _Parts | None:
    """Scaled dot-product attention with a bias made of parameters (relative positions), which is its mask."""
    query, key, value, mask, dropout, causal, scale, grouped = call.bind(*_ATTENTION)
    plain = not (dropout or causal or grouped) and call.wants(mask) and mask.is_floating_point()
    if not plain or any(map(call.wants, (query, key, value))) or call.output_axis.axis >= grad.dim() - 2:
        return None

    def parts() -> _Parts:
        wide = torch.promote_types(mask.dtype, torch.float32)
        q, k, v, bias, grads = (tensor.to(wide) for tensor in (query, key, value, mask, grad))
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        weights = torch._safe_softmax(q @ k.transpose(-2, -1) * factor + bias, -1)
        products = weights * (grads @ v.transpose(-2, -1))
        scores = products - weights * products.sum(-1, keepdim=True)
        yield mask, sum_to_parameter(call.output_samples(scores), mask.shape)

    return parts()


def expand_rule(call: OperationCall, grad: Tensor) -> _Parts:
    """``parameter.expand(B, ...)``, for example a class token or a learned query."""
    value = call.args[0]
    yield value, sum_to_parameter(call.output_samples(grad), value.shape)


def _affine(
    call: OperationCall, grad: Tensor, normalised: Tensor, weight: Any, bias: Any, axes: range
) -> _Parts:
    """``normalised * weight + bias``, where the parameters have these axes of the result."""
    axis = call.output_axis
    alone = (axis.axis, axis.multiple) == (0, 1)
    summed = [i + (not alone) for i in range(alone, grad.dim()) if i not in axes]

    def reduced(value: Tensor, like: Tensor) -> Tensor:
        samples = value if alone else call.output_samples(value)
        return (samples.sum(summed) if summed else samples).reshape(-1, *like.shape)

    if call.wants(weight):
        yield weight, reduced(grad * normalised, weight)
    if call.wants(bias):
        yield bias, reduced(grad, bias)


def layer_norm_rule(call: OperationCall, grad: Tensor) -> _Parts | None:
    """Layer normalisation; recomputes the normalised input."""
    x, shape, weight, bias, eps = call.bind("input", "normalized_shape", "weight", "bias", "eps")
    axes = range(x.dim() - len(shape), x.dim())
    axis = call.axis_of(x)
    if axis is None or axis.axis in axes or call.wants(x):
        return None
    normalised = torch.layer_norm(x, tuple(shape), None, None, 1e-5 if eps is None else eps)
    return _affine(call, grad, normalised, weight, bias, axes)


def rms_norm_rule(call: OperationCall, grad: Tensor) -> _Parts | None:
    """Root-mean-square normalisation."""
    x, shape, weight, eps = call.bind("input", "normalized_shape", "weight", "eps")
    axes = range(x.dim() - len(shape), x.dim())
    axis = call.axis_of(x)
    if axis is None or axis.axis in axes or call.wants(x):
        return None
    return _affine(call, grad, torch.rms_norm(x, tuple(shape), None, eps), weight, None, axes)


def group_norm_rule(call: OperationCall, grad: Tensor) -> _Parts | None:
    """Group normalisation."""
    x, groups, weight, bias, eps = call.bind("input", "num_groups", "weight", "bias", "eps")
    axis = call.axis_of(x)
    if axis is None or axis.axis != 0 or call.wants(x):
        return None
    normalised = torch.group_norm(x, groups, None, None, 1e-5 if eps is None else eps)
    return _affine(call, grad, normalised, weight, bias, range(1, 2))


_NORM_ARGUMENTS = (
    "input",
    "weight",
    "bias",
    "running_mean",
    "running_var",
    "use_input_stats",
    "momentum",
    "eps",
)


def batch_norm_rule(call: OperationCall, grad: Tensor) -> _Parts | None:
    """Batch normalisation with running statistics: an affine map per channel."""
    x, weight, bias, mean, variance, training, momentum, eps = _norm_arguments(call)
    if training:
        raise UnsupportedModelError(
            "torch.batch_norm was called in training mode, which mixes the samples of a batch. "
            "Call model.eval() and keep running statistics."
        )
    axis = call.axis_of(x)
    if axis is None or axis.axis != 0 or call.wants(x):
        return None
    normalised = torch.batch_norm(x, None, None, mean, variance, False, momentum, eps, False)
    return _affine(call, grad, normalised, weight, bias, range(1, 2))


def instance_norm_rule(call: OperationCall, grad: Tensor) -> _Parts | None:
    """Instance normalisation."""
    x, weight, bias, mean, variance, own_statistics, momentum, eps = _norm_arguments(call)
    axis = call.axis_of(x)
    if axis is None or axis.axis != 0 or call.wants(x):
        return None
    if own_statistics:  # running statistics would only be updated, and they must not be updated twice
        mean = variance = None
    normalised = torch.instance_norm(x, None, None, mean, variance, own_statistics, momentum, eps, False)
    return _affine(call, grad, normalised, weight, bias, range(1, 2))


def _norm_arguments(call: OperationCall) -> list[Any]:
    values = call.bind(*_NORM_ARGUMENTS)
    if "training" in call.kwargs:
        values[5] = call.kwargs["training"]
    return values


_SUM = _elementwise(_of_sum)
_DIFFERENCE = _elementwise(_of_difference)
_PRODUCT = _elementwise(_of_product)
_QUOTIENT = _elementwise(_of_quotient)
T = Tensor

RULES: dict[Any, tuple[str, OperationRule]] = {
    torch._C._nn.linear: ("linear", linear_rule),
    torch.addmm: ("linear", addmm_rule),
    T.addmm: ("linear", addmm_rule),
    **dict.fromkeys((torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm), ("matmul", matmul_rule)),
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), ("convolution", conv_rule)),
    **dict.fromkeys(
        (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
        ("transposed convolution", conv_transpose_rule),
    ),
    torch._VF.einsum: ("einsum", einsum_rule),  # type: ignore[attr-defined]
    torch.embedding: ("embedding", embedding_rule),
    torch.embedding_bag: ("embedding bag", embedding_bag_rule),
    torch.layer_norm: ("layer norm", layer_norm_rule),
    torch.rms_norm: ("RMS norm", rms_norm_rule),
    torch.group_norm: ("group norm", group_norm_rule),
    torch.batch_norm: ("batch norm", batch_norm_rule),
    torch.instance_norm: ("instance norm", instance_norm_rule),
    **dict.fromkeys((torch.add, T.add, T.add_), ("elementwise", _SUM)),
    **dict.fromkeys((torch.sub, T.sub, T.sub_), ("elementwise", _DIFFERENCE)),
    T.__rsub__: ("elementwise", _elementwise(_of_reflected_difference)),
    **dict.fromkeys((torch.mul, T.mul, T.mul_, torch.multiply), ("elementwise", _PRODUCT)),
    **dict.fromkeys((torch.div, T.div, T.div_, torch.true_divide), ("elementwise", _QUOTIENT)),
    **dict.fromkeys((T.expand, T.expand_as), ("expansion", expand_rule)),
    torch.where: ("choice", where_rule),
    torch._C._nn.scaled_dot_product_attention: ("attention", attention_rule),
}
"""Name and rule by function; several functions may run the same operation."""

MAY_DRAW = frozenset({torch._C._nn.scaled_dot_product_attention})
"""Operations with a rule for calls that draw no random numbers."""

_READING_NOTHING = frozenset(
    {torch.add, T.add, T.add_, torch.sub, T.sub, T.sub_, T.__rsub__, T.expand, T.expand_as}
)


def reads_nothing(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether an operation's rule reads no input values, so that inputs may be freed or overwritten after the call."""
    expands = function in (T.expand, T.expand_as)  # takes any number of sizes
    return function in _READING_NOTHING and (expands or len(args) <= 2)
