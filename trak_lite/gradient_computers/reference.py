"""The gradient of one sample alone by plain autograd, and passes in float64.

The gradient comes from one forward pass over one sample and one backward pass whose operations read contiguous copies.
With a batch of one, torch's own backward pass gives wrong gradients for some channels-last tensors
(see ``docs/pages/limits.md``).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily

from trak_lite.core.devices import Float32Products, wide_dtype
from trak_lite.core.eval_caches import attributes_kept
from trak_lite.core.validate import some_of
from trak_lite.errors import (
    MODEL_FAILURES,
    TrakLiteError,
    UnsupportedModelError,
    refuse_machine_failure,
    refuse_signal,
    summary,
)
from trak_lite.gradient_computers.parameters import Kept, differentiating_only
from trak_lite.types import Batch, OutputTerms

_MOST_FLOAT64_BYTES = 1 << 30
"""Largest size of a temporary float64 copy, as of parameters and buffers."""
WRONG_ALONE: Final = (
    "torch's own backward pass over one sample is wrong here: it depends on the memory layout of a tensor, such as a "
    "channels-last one that batch normalisation reads. Call contiguous() on it in the model"
)
"""Why the gradient of a batch of one differs from that of contiguous copies."""


class CheckedComputer(Protocol):
    """Interface of a gradient computer that can be checked."""

    model: nn.Module
    autocast_dtype: torch.dtype | None
    float32_products: Float32Products

    def advice_for(self, batch: Batch, /) -> str:
        """Return the end of the error message for a batch: the likely cause, and an alternative."""

    def terms(self, batch: Batch, /) -> OutputTerms:
        """Return f, q and w of a batch under this computer's settings; f keeps its autograd graph."""

    def undo_passes(self) -> None:
        """Undo what passes have set, if they replaced a buffer or a submodule; no backward pass may be left."""

    def repeated(self, batch: Batch, positions: Sequence[int], /) -> Iterator[tuple[Any, Batch, list[int]]]:
        """Yield (computer without self-check, batch, positions in it) to stream some samples again."""

    def enough_for(self, batch: Batch, positions: Sequence[int], /) -> tuple[Batch, list[int]]:
        """Return a part of a batch with some samples that shows as much of their gradients, and their places in it."""


def gradients_alone(
    computer: CheckedComputer, batch: Batch, row: int, kept: Kept, take: Callable[[str, Tensor], None]
) -> None:
    """Call ``take`` with the gradient ``(1, P)`` of f of a row for each parameter that f depends on, one at a time."""
    passes: list[int] = []

    def begin(_: Tensor) -> None:
        passes.append(torch._C._current_graph_task_id())

    def catch(name: str, grad: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() not in passes:
            return grad  # a part, of an autograd.Function whose backward pass differentiates by parameters itself
        with _pop_mode_temporarily(), torch._C.DisableTorchFunction():
            take(name, grad.detach().to_dense().reshape(1, -1))
            # Replace the gradient by an expanded scalar: autograd holds it until it returns. A sparse one is small.
            empty = torch.zeros((), dtype=grad.dtype, device=grad.device).expand(grad.shape)
            return empty if grad.layout == torch.strided else grad

    handles: list[Any] = []
    try:
        with differentiating_only(computer.model.parameters(), kept):
            with torch.enable_grad():
                output = computer.terms(batch).output[row]
            if output.requires_grad:
                handles.append(output.register_hook(begin))  # type: ignore[no-untyped-call]
                handles += [p.register_hook(functools.partial(catch, name)) for name, p in kept.items()]  # type: ignore[no-untyped-call]
                with naming_graph_failures(computer.model), _ContiguousArguments():  # type: ignore[no-untyped-call]
                    torch.autograd.grad(output, list(kept.values()), allow_unused=True)
    except (TrakLiteError, torch.OutOfMemoryError):
        raise
    except MODEL_FAILURES as error:
        refuse_machine_failure(error)
        advice = "If yours does, this is a defect of trak_lite: please report it."
        if "offsets" in str(error):
            advice = "A column that points into another one (offsets) is not divided: make it in the model, from sizes."
        raise UnsupportedModelError(
            f"The gradients of {type(computer.model).__name__} were computed, but the self-check's own pass over one "
            f"sample alone failed ({summary(error)}). Expected a model that runs forward and backward "
            f"on a single sample. {advice}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()


class _ContiguousArguments(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes the operations of a backward pass read contiguous copies, so that results do not depend on strides.

    Some kernels take no such copy, because they demand strides or an alignment that the model arranges for: grouped and
    scaled products, attention with a bias. These read the original arguments.
    """

    # They read the original arguments, such as the blocks of flex_attention.
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch._dynamo is imported at the first operation: seconds, and 100 MB

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A checkpoint runs forward operations inside the backward pass with gradients enabled; these read the original
        # arguments, because views depend on strides.
        if not torch.is_grad_enabled() and not _keeps_strides(func):
            try:
                return func(*[_contiguous(arg) for arg in args], **(kwargs or {}))
            except MODEL_FAILURES as error:
                refuse_signal(error)
        return func(*args, **(kwargs or {}))


@functools.lru_cache(maxsize=4096)
def _keeps_strides(func: Any) -> bool:
    """Whether an operation writes into an argument, or gives a view, a copy or an empty tensor with its strides."""
    if not isinstance(func, OpOverload):
        return True
    name = func.overloadpacket.__name__
    copies = name in ("clone", "_to_copy") or name.endswith("_like")
    return copies or any(argument.alias_info for argument in func._schema.arguments)


def _contiguous(argument: Any) -> Any:
    """Return an argument with its tensors contiguous, also those in lists and tuples, and also on axes of length 1."""
    if isinstance(argument, list | tuple):
        return [_contiguous(entry) for entry in argument]
    if not isinstance(argument, Tensor) or argument.layout != torch.strided or argument.is_nested:
        return argument
    if argument.stride() == _strides(argument.shape):
        return argument
    return argument.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return torch.empty(shape, dtype=torch.bool, device="meta").stride()


@contextmanager
def naming_graph_failures(module: nn.Module | None = None) -> Iterator[None]:
    """Replace torch's errors about the graph of a backward pass by ones that name the cause.

    With a module, also refuse a backward pass inside this one: ``autograd.grad`` does not return what it adds to
    ``.grad``.
    """
    model, before = "The model" if module is None else type(module).__name__, _stored_gradients(module)
    try:
        yield
    except UnsupportedModelError:
        raise
    except RuntimeError as error:
        if "use_reentrant" in str(error):
            raise UnsupportedModelError(
                f"{model} uses checkpoint(..., use_reentrant=True), which hides its operations until a backward pass "
                f"over all leaves. Use checkpoint(..., use_reentrant=False). torch says: {error}"
            ) from error
        if "through the graph a second time" not in str(error):
            raise
        raise UnsupportedModelError(
            f"{model} stores a tensor with its graph in one forward pass and uses it in the next, such as a bias that "
            "it computes once in eval mode. Expected independent passes. Detach the tensor, or clear it in the output "
            "function."
        ) from error
    filled = {name for name, *_ in _stored_gradients(module) - before}
    if filled:
        raise UnsupportedModelError(
            f"The backward pass of {model} calls backward() inside, as reversible layers do, and leaves the gradients "
            f"of {some_of(sorted(filled))} in .grad, where those of one output cannot be read. Compute these layers "
            "without their autograd.Function, which saves memory in training: the gradients are the same."
        )


def _stored_gradients(module: nn.Module | None) -> set[tuple[str, int, int]]:
    """Return the names of the parameters with a gradient in ``.grad``, its identity and its version."""
    named = () if module is None else module.named_parameters()
    return {(name, id(p.grad), p.grad._version) for name, p in named if p.grad is not None}


class SeenDtypes(TorchFunctionMode):
    """Records the floating-point dtypes of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and (result.is_floating_point() or result.is_complex()):
            self.dtypes.add(result.dtype.to_real())
        return result


def fits_in_float64(model: nn.Module) -> bool:
    """Whether the device supports float64 and the model's float64 copy is below the size limit."""
    return fit_in_float64([*model.parameters(), *model.buffers()])


def fit_in_float64(tensors: Sequence[Tensor]) -> bool:
    """Whether the device of some tensors supports float64, where they take at most 1 GiB."""
    has = all(wide_dtype(tensor.device) == torch.float64 for tensor in tensors)
    return has and 8 * sum(tensor.numel() for tensor in tensors) <= _MOST_FLOAT64_BYTES


def leaves_of_graph(number: Tensor) -> list[Tensor]:
    """Return the tensors to which autograd leads from a number."""
    seen: set[Any] = set()
    waiting: list[Any] = [number.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [parent for parent, _ in node.next_functions]
    return [node.variable for node in seen if hasattr(node, "variable")]


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Run a model in float64 inside the block, and restore its storages afterwards.

    Only ``.data`` of the parameters is replaced, because a model may hold other references to the parameters. Buffers
    and attributes that a pass in float64 replaces are put back.
    """
    put_back = attributes_kept(model.modules())
    before: list[tuple[Tensor, Tensor]] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # recurrent layers warn of weights that are not contiguous
            for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values():
                wide = widened(tensor.data)
                if wide.dtype != tensor.dtype:
                    before.append((tensor, tensor.data))
                    tensor.data = wide
            yield
    finally:
        for tensor, data in before:
            tensor.data = data
        put_back()


def widened(tensor: Tensor) -> Tensor:
    """Return floating-point and complex numbers in double precision."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor
