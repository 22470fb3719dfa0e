"""Exact per-sample gradients of torch's operations, without running the operation again.

Every rule takes one :class:`OperationCall` and the gradient of its result, and returns the per-sample gradients of the
parameters among its arguments. :mod:`trak_lite.gradient_computers.hooks.rules.generic` handles operations without a
rule, and calls that a rule does not support.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers.hooks.calls import OperationCall, OperationRule, Parts, conjugate
from trak_lite.gradient_computers.hooks.plan.axes import sum_to_parameter
from trak_lite.gradient_computers.hooks.rules.convolutions import conv_rule
from trak_lite.gradient_computers.hooks.rules.embeddings import embedding_bag_rule, embedding_rule
from trak_lite.types import FactoredBlock


def linear_rule(call: OperationCall, grad: Tensor) -> Parts:
    """``x W^T + b``."""
    return _matrix_product(call, grad, *call.bind("input", "weight", "bias"), weight_is_in_out=False)


def addmm_rule(call: OperationCall, grad: Tensor) -> Parts:
    """``b + x W``, the form of Hugging Face's Conv1D."""
    bias, x, weight, beta, alpha = call.bind("input", "mat1", "mat2", "beta", "alpha")
    if beta in (None, 1) and alpha in (None, 1) and not call.wants(x):
        yield from _matrix_product(call, grad, x, weight, bias, weight_is_in_out=True)


def matmul_rule(call: OperationCall, grad: Tensor) -> Parts:
    """``x W`` or ``W x`` with a matrix W."""
    left, right = matrices_of(call)
    if call.wants(left) and call.wants(right):
        return
    if call.wants(right) and right.dim() == 2 and left.dim() >= 2:
        yield from _matrix_product(call, grad, left, right, None, weight_is_in_out=True)
    if call.wants(left) and left.dim() == 2 and right.dim() >= 2:
        axis = call.axis_of(right)
        if axis is not None and axis.axis != right.dim() - 2:
            columns = call.samples(right).mT.flatten(1, -2)
            yield left, FactoredBlock("", conjugate(columns), call.output_samples(grad).mT.flatten(1, -2))


def matrices_of(call: OperationCall) -> tuple[Any, Any]:
    """Return the left and the right factor of a matrix product; they may be keyword arguments."""
    left, right, mat2 = call.bind("input", "other", "mat2")
    return left, mat2 if right is None else right


def _matrix_product(
    call: OperationCall, grad: Tensor, x: Tensor, weight: Tensor, bias: Any, *, weight_is_in_out: bool
) -> Parts:
    axis = call.axis_of(x)
    if (
        axis is None
        or axis.axis == x.dim() - 1
        or weight.dim() != 2
        or (bias is not None and bias.dim() != 1)
    ):
        return
    grads = call.output_samples(grad).flatten(1, -2)  # (B, T, d)
    if call.wants(weight):
        inputs = conjugate(call.samples(x).flatten(1, -2))
        pair = (grads, inputs) if weight_is_in_out else (inputs, grads)
        yield weight, FactoredBlock("", *pair)
    if call.wants(bias):
        yield bias, (grads.squeeze(1) if grads.shape[1] == 1 else grads.sum(1))


def einsum_rule(call: OperationCall, grad: Tensor) -> Parts:
    """``einsum("ibh,hnd->ibnd", x, W)``: a product of one tensor of the samples with one parameter."""
    equation, operands = call.args[:2]
    terms = equation.replace(" ", "").replace("->", ",").split(",")
    if len(operands) != 2 or len(terms) != 3 or "->" not in equation or call.kwargs:
        return
    index = int(call.wants(operands[1]))
    weight, x = operands[index], operands[1 - index]
    if call.wants(x) or call.axis_of(x) is None or not _is_plain_product(terms, [*operands, grad]):
        return
    of_weight, read, result = terms[index], terms[1 - index], terms[2]
    if not set(of_weight) <= {*read, *result}:
        return  # an axis that is summed in the parameter alone
    # Under autocast the operation read a copy of another dtype; a real parameter may meet complex data.
    dtype = torch.promote_types(weight.dtype, grad.dtype) if grad.is_complex() else weight.dtype
    inputs, grads = call.samples(x).to(dtype), call.output_samples(grad).to(dtype)
    sample = next(letter for letter in string.ascii_letters if letter not in equation)
    pattern = f"{sample}{read},{sample}{result}->{sample}{of_weight}"
    yield weight, torch.einsum(pattern, conjugate(inputs), grads)


def _is_plain_product(terms: Sequence[str], tensors: Sequence[Tensor]) -> bool:
    """Whether every letter stands for one axis of each tensor that has it, of one size."""
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, tensors, strict=True):
        if not term.isalpha() or len(set(term)) != len(term) or len(term) != tensor.dim():
            return False
        pairs = zip(term, tensor.shape, strict=True)
        if any(sizes.setdefault(letter, size) != size for letter, size in pairs):
            return False
    return True


def _elementwise(derivative: Callable[[OperationCall, Any, int, Tensor], Tensor | None]) -> OperationRule:
    """Return the rule of ``a op b``.

    ``derivative(call, (a, b), index, grad)`` returns the derivative with respect to one operand times the gradient.
    """

    def rule(call: OperationCall, grad: Tensor) -> Parts:
        if len(call.args) > 2:
            return  # torch.add(x, 2, y), where 2 is a factor of y
        operands = call.bind("input", "other")
        for index, operand in enumerate(operands):
            value = derivative(call, operands, index, grad) if call.wants(operand) else None
            if value is not None:
                yield operand, sum_to_parameter(call.output_samples(value), operand.shape)

    return rule


def _of_sum(*signs: int) -> Callable[[OperationCall, Any, int, Tensor], Tensor]:
    def derivative(call: OperationCall, operands: Any, index: int, grad: Tensor) -> Tensor:
        factor = signs[index] * (conjugate(call.kwargs.get("alpha", 1)) if index else 1)
        return grad if factor == 1 else grad * factor

    return derivative


def _of_product(call: OperationCall, operands: Any, index: int, grad: Tensor) -> Tensor:
    product: Tensor = grad * conjugate(operands[1 - index])
    return product


def _of_quotient(call: OperationCall, operands: Any, index: int, grad: Tensor) -> Tensor | None:
    if "rounding_mode" in call.kwargs:
        return None
    numerator, denominator = map(conjugate, operands)
    quotient: Tensor = grad / denominator
    return quotient if index == 0 else -quotient * numerator / denominator


def where_rule(call: OperationCall, grad: Tensor) -> Parts:
    """``torch.where(condition, a, b)``."""
    if len(call.args) != 3 or call.kwargs or call.args[0].dtype != torch.bool:
        return
    condition, *operands = call.args
    for operand, chosen in zip(operands, (condition, ~condition), strict=True):
        if call.wants(operand):
            samples = call.output_samples(grad.masked_fill(~chosen, 0.0))
            yield operand, sum_to_parameter(samples, operand.shape)


def attention_rule(call: OperationCall, grad: Tensor) -> Parts:
    """Scaled dot-product attention with a bias made of parameters (relative positions), which is its mask."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    query, key, value, mask, dropout, causal, scale, grouped = call.bind(*names)
    plain = not (dropout or causal or grouped) and call.wants(mask) and mask.is_floating_point()
    if not plain or any(map(call.wants, (query, key, value))) or call.output_axis.axis >= grad.dim() - 2:
        return
    wide = torch.promote_types(mask.dtype, torch.float32)
    q, k, v, bias, grads = (tensor.to(wide) for tensor in (query, key, value, mask, grad))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    weights = torch._safe_softmax(q @ k.transpose(-2, -1) * factor + bias, -1)
    products = weights * (grads @ v.transpose(-2, -1))
    scores = products - weights * products.sum(-1, keepdim=True)
    yield mask, sum_to_parameter(call.output_samples(scores), mask.shape)


def expand_rule(call: OperationCall, grad: Tensor) -> Parts:
    """``parameter.expand(B, ...)``, for example a class token or a learned query."""
    value = call.args[0]
    yield value, sum_to_parameter(call.output_samples(grad), value.shape)


_OF_NORMS: dict[Any, str] = {
    torch.layer_norm: "input normalized_shape weight bias eps cudnn_enable",
    torch.rms_norm: "input normalized_shape weight eps",
    torch.group_norm: "input num_groups weight bias eps cudnn_enabled",
    torch.batch_norm: "input weight bias running_mean running_var training momentum eps cudnn_enabled",
    torch.instance_norm: "input weight bias running_mean running_var use_input_stats momentum eps cudnn_enabled",
}
"""Names of the arguments of normalisations."""


def norm_rule(call: OperationCall, grad: Tensor) -> Parts:
    """Normalisation, computed again without weight and bias: these have the last axes, or that of the channels."""
    arguments = {**dict(zip(_OF_NORMS[call.function].split(), call.args, strict=False)), **call.kwargs}
    x, parameters = arguments["input"], [name for name in ("weight", "bias") if name in arguments]
    if arguments.get("training"):
        raise UnsupportedModelError(
            "torch.batch_norm was called in training mode, which mixes the samples of a batch. "
            "Call model.eval() and keep running statistics."
        )
    axis, num_last = call.axis_of(x), len(arguments.get("normalized_shape", ()))
    axes = range(x.dim() - num_last, x.dim()) if num_last else range(1, 2)
    if axis is None or axis.axis in axes or (not num_last and axis.axis != 0) or call.wants(x):
        return
    plain: dict[str, Any] = {**arguments, **dict.fromkeys(parameters)}
    if arguments.get("use_input_stats"):
        # Running statistics would only be updated, and they must not be updated twice.
        plain |= {"running_mean": None, "running_var": None}
    summed = [i + 1 for i in range(grad.dim()) if i not in axes]
    for name in parameters:
        if call.wants(arguments[name]):
            value = grad * call.function(**plain) if name == "weight" else grad
            sums = call.output_samples(value).sum(summed)
            yield arguments[name], sums.reshape(call.num_samples, *arguments[name].shape)


T = Tensor

_TABLE: list[tuple[str, OperationRule, Sequence[Any]]] = [
    ("linear", linear_rule, (torch._C._nn.linear,)),
    ("linear", addmm_rule, (torch.addmm, T.addmm)),
    ("matmul", matmul_rule, (torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm)),
    ("convolution", conv_rule, (torch.conv1d, torch.conv2d, torch.conv3d)),
    (
        "transposed convolution",
        partial(conv_rule, transposed=True),
        (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
    ),
    ("einsum", einsum_rule, (torch._VF.einsum,)),  # type: ignore[attr-defined]
    ("embedding", embedding_rule, (torch.embedding,)),
    ("embedding bag", embedding_bag_rule, (torch.embedding_bag,)),
    ("layer norm", norm_rule, (torch.layer_norm,)),
    ("RMS norm", norm_rule, (torch.rms_norm,)),
    ("group norm", norm_rule, (torch.group_norm,)),
    ("batch norm", norm_rule, (torch.batch_norm,)),
    ("instance norm", norm_rule, (torch.instance_norm,)),
    ("elementwise", _elementwise(_of_sum(1, 1)), (torch.add, T.add, T.add_)),
    ("elementwise", _elementwise(_of_sum(1, -1)), (torch.sub, T.sub, T.sub_)),
    ("elementwise", _elementwise(_of_sum(-1, 1)), (T.__rsub__,)),
    ("elementwise", _elementwise(_of_product), (torch.mul, T.mul, T.mul_, torch.multiply)),
    ("elementwise", _elementwise(_of_quotient), (torch.div, T.div, T.div_, torch.true_divide)),
    ("expansion", expand_rule, (T.expand, T.expand_as)),
    ("choice", where_rule, (torch.where,)),
    ("attention", attention_rule, (torch._C._nn.scaled_dot_product_attention,)),
]
RULES = {function: (name, rule) for name, rule, functions in _TABLE for function in functions}
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
