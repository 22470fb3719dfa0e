"""The steps of a training as pure functions, so that they can be repeated, replayed and differentiated.

Shapes: N train rows, B rows of a batch, R models that are trained side by side.
"""

from __future__ import annotations

import itertools
import logging
import warnings
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from trak_lite.core.devices import full_float32, switched_off
from trak_lite.data.batches import (
    batch_size,
    map_tensors,
    move_batch,
    rows_in_batches,
    take_rows,
    with_own_containers,
)
from trak_lite.data.datasets import spread_rows
from trak_lite.errors import (
    MODEL_FAILURES,
    InvalidInputError,
    TrakLiteError,
    UnsupportedModelError,
    refuse_machine_failure,
)
from trak_lite.gradient_computers import select_parameters
from trak_lite.gradient_computers.randomness import RandomState, differ
from trak_lite.gradient_computers.reference import leaves_of_graph
from trak_lite.modelout_functions import ModelCall
from trak_lite.models.borrowing import model_device
from trak_lite.types import Batch
from trak_lite.unrolled.dropout import SeededDropout, step_key
from trak_lite.unrolled.optimizers import Named, State
from trak_lite.unrolled.settings import TrainingSettings, rate_factor

logger = logging.getLogger(__name__)

LOOKED_AT: Final = 512
"""Rows, or targets, among which one that depends on the parameters is looked for."""
_CHECKPOINTING = "Gradient checkpointing cannot be replayed: switch it off"


class Frozen(NamedTuple):
    """Tensors of a model that the training does not change."""

    parameters: Named
    """Parameters outside ``grad_wrt``, by name."""
    buffers: Named
    """Buffers by name."""


class Part(NamedTuple):
    """A part of the batch of a step; all rows of the batch, unless gradients are accumulated."""

    rows: NDArray[np.int64]
    """Train rows ``(b,)``, or ``(R, b)`` for models side by side."""
    batch: Batch
    """Their samples."""


@final
class Program:
    """The steps of a recipe for one architecture, as functions of state, frozen tensors, batch and row weights."""

    def __init__(self, recipe: TrainingSettings, model: nn.Module) -> None:
        """Take a recipe and one of its models; the model's own tensors are not changed."""
        self.recipe = recipe
        self.model = model
        self.device = model_device(model)
        self.names = list(select_parameters(model, recipe.grad_wrt))
        parameters = dict(model.named_parameters())
        for name in self.names:
            if parameters[name]._backward_hooks or parameters[name]._post_accumulate_grad_hooks:
                raise UnsupportedModelError(
                    f"A hook of the parameter {name!r} may change its gradient, and the training of a recipe does not "
                    "run it. Remove it from the model of model_fn, and put what it does into the loss."
                )
        self._recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
        for name, module in model.named_modules():
            # Without running statistics, those of the batch are used in eval mode too.
            is_batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
            if is_batch_norm and (module.training or module.running_mean is None):
                raise UnsupportedModelError(
                    f"{name or 'The model'} ({type(module).__name__}) normalises with the statistics of the batch, so "
                    "the loss of a row depends on the others. Return the model from model_fn with this layer in eval "
                    "mode and with running statistics, or use group or layer normalisation."
                )

    def start(self, model: nn.Module) -> tuple[State, Frozen]:
        """Return copies of a model's tensors: the state before the first step, and what stays."""
        # Contiguous, as states that are read from files: bits depend on strides.
        contiguous, named = torch.contiguous_format, model.named_parameters()
        parameters = {name: p.detach().clone(memory_format=contiguous) for name, p in named}
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        trained = {name: parameters.pop(name) for name in self.names}
        return self.recipe.optimizer.start(trained), Frozen(parameters, buffers)

    def parts(self, rows: NDArray[np.int64]) -> list[Part]:
        """Return the samples of a batch of rows ``(b,)`` or ``(R, b)``, in as many parts as the recipe asks for."""
        pieces = np.array_split(rows, min(self.recipe.accumulate, rows.shape[-1]), axis=-1)
        batches = self.recipe.rows.batches([piece.reshape(-1) for piece in pieces])
        return [
            Part(piece, _shaped(move_batch(batch, self.device), piece.shape))
            for piece, (_, batch) in zip(pieces, batches, strict=True)
        ]

    def total(
        self,
        args: tuple[Frozen, Batch, Tensor],
        weights: Tensor,
        size: int,
        parameters: Named,
        *,
        many: bool = False,
    ) -> Tensor:
        """Return the losses of some rows, weighted ``(b,)``, or ``(R, b)`` of many models, and divided by ``size``.

        ``args`` are frozen tensors, samples and the key of the dropout masks, ``size`` the number of rows of the step.
        """
        losses = (vmap(self._losses) if many else self._losses)(parameters, *args)
        total: Tensor = (losses * weights.to(losses.dtype)).sum() / size
        return total

    def _losses(self, parameters: Named, frozen: Frozen, batch: Batch, key: Tensor) -> Tensor:
        call = ModelCall(self.model, {**frozen.parameters, **parameters}, frozen.buffers)
        # The fused LSTM of oneDNN has no second derivative.
        with SeededDropout(key), switched_off(torch.backends.mkldnn, self._recurrent):
            return self.recipe.loss(call, with_own_containers(batch))

    def update(self, state: State, gradients: Named, number: int) -> State:
        """Return the state after a step with these gradients, which are clipped first."""
        return self._optimized(state, self._clipped(gradients), number)

    def _clipped(self, gradients: Named) -> Named:
        if self.recipe.clip_norm is None:
            return gradients
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        scale = (self.recipe.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        return {name: scale * g for name, g in gradients.items()}

    def _optimized(self, state: State, gradients: Named, number: int) -> State:
        factor = rate_factor(self.recipe, number)
        updated = self.recipe.optimizer.step(state, gradients, factor=factor, number=number)
        return State(*tree_map(Tensor.contiguous, tuple(updated)))

    def step(
        self,
        state: State,
        frozen: Frozen,
        parts: Sequence[Part],
        weights: Tensor,
        number: int,
        seed: int | Tensor,
    ) -> State:
        """Return the state after step ``number``, of one model or of R models side by side.

        R is the first axis of all tensors of R models, whose row weights are ``(R, N)`` instead of ``(N,)``, and of
        their seeds ``(R,)``. A seed draws the dropout masks.
        """
        many = isinstance(seed, Tensor)
        size = sum(part.rows.shape[-1] for part in parts)
        total: Named = {}
        for index, part in enumerate(parts):
            rows = torch.from_numpy(part.rows).to(weights.device)
            args = (frozen, part.batch, step_key(seed, number, index, self.device))
            output = partial(self.total, args, weights.gather(-1, rows), size, many=many)
            gradient = gradient_of(output, state.parameters)
            total = {name: total[name] + g for name, g in gradient.items()} if total else gradient
        if not many:
            return self.update(state, total, number)
        if self.recipe.clip_norm is not None:
            total = vmap(self._clipped)(total)
        update = partial(self._optimized, number=number)
        # vmap costs as much as the arithmetic of small models.
        return update(state, total) if self.recipe.optimizer.elementwise else vmap(update)(state, total)

    def check(self, state: State, frozen: Frozen, part: Part) -> None:
        """Run the loss once, and raise if the training could not be repeated or differentiated."""
        buffers = {name: buffer.clone() for name, buffer in frozen.buffers.items()}
        parameters = {name: p.clone() for name, p in (*frozen.parameters.items(), *state.parameters.items())}
        for name in state.parameters:
            parameters[name].requires_grad_()
        copies = {**parameters, **buffers}
        versions = {name: copy._version for name, copy in copies.items()}
        random = RandomState.on({torch.device("cpu"), self.device})
        changed: set[str] = set()

        def compare(model: nn.Module, args: Any, output: Any) -> None:
            now = model.named_buffers()
            changed.update(name for name, buffer in now if buffer is not buffers.get(name, buffer))

        handle = self.model.register_forward_hook(compare)
        call = ModelCall(self.model, parameters, buffers)

        def passed(batch: Batch = part.batch) -> Any:
            seeded = SeededDropout(step_key(0, 0, 0, self.device))
            # Checkpointing runs parts again in the backward pass, outside the masks of the step.
            no_hooks = torch.autograd.graph.disable_saved_tensors_hooks(_CHECKPOINTING)
            with torch.enable_grad(), no_hooks, seeded, naming_failures(self.model, "train"):
                return self.recipe.loss(call, with_own_containers(batch))

        try:
            losses = through_the_call("loss", self.model, state.parameters, passed)
        finally:
            handle.remove()
        size = batch_size(part.batch)
        if not isinstance(losses, Tensor) or losses.shape != (size,):
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise InvalidInputError(
                f"loss(model, batch) returned {shape} for {size} rows. Return the loss of every row, (B,), without "
                'a mean: cross_entropy(model(inputs), labels, reduction="none").'
            )
        rows = rows_in_batches(spread_rows(len(self.recipe.rows), LOOKED_AT), self.recipe.batch_size)
        others = (passed(other.batch) for some in rows for other in self.parts(some))
        trained = [parameters[name] for name in state.parameters]
        require_parameters("loss", itertools.chain([losses], others), trained)
        changed.update(name for name, copy in copies.items() if copy._version != versions[name])
        if changed:
            raise UnsupportedModelError(
                f"The training pass changes {sorted(changed)[:5]} of {type(self.model).__name__}, which a "
                "replay does not follow. Return the model from model_fn with these layers in eval mode."
            )
        if random.has_moved():
            raise UnsupportedModelError(
                f"The training pass of {type(self.model).__name__} draws random numbers other than dropout masks, "
                "which a replay cannot repeat. Draw them in the dataset from a generator that is seeded with the row, "
                "or switch them off."
            )
        half = max(size // 2, 1)
        with_others = passed(take_rows(part.batch, [row % half for row in range(size)]))  # of the same masks
        if differ(torch.stack([losses[:half], with_others[:half]]).detach()):
            warnings.warn(
                f"The loss of a row of {type(self.model).__name__} depends on the other rows of its batch (negatives, "
                "statistics, a number of tokens). Derivatives are by the weight of its own loss: a row with the weight "
                "0 still changes the losses of the others, also in verify_run. Compute the loss of a row from this "
                "row alone; otherwise scores are the effects of its own loss only.",
                UserWarning,
                stacklevel=2,
            )


def through_the_call(what: str, model: nn.Module, trained: Container[str], values: Callable[[], Any]) -> Any:
    """Return ``values()``; raise if they depend on the trained tensors of the module, which a call replaces."""
    random = RandomState.on({torch.device("cpu"), model_device(model)})
    right = values()  # first, because code may keep something at its first call
    originals = [
        (p, p.data) for name, p in model.named_parameters() if name in trained and type(p.data) is Tensor
    ]

    def is_read(other: float) -> bool:
        """Whether the values are others with a number in place of all trained entries of the module."""
        output = None
        try:
            for parameter, value in originals:
                parameter.data = value.new_full((), other).expand(value.shape)
            output = values()
        except Exception as error:  # it reads the number, or raises without it too
            refuse_machine_failure(error)
            logger.debug("The %s with %s in the module: %.200s", what, other, error)
        finally:
            for parameter, value in originals:
                parameter.data = value
        if not isinstance(output, Tensor) or output.shape != right.shape:
            return True
        if not torch.equal(output.isfinite(), right.isfinite()):
            return True
        # Values that are others in every call, with random numbers or a counter of calls, tell nothing.
        return not random.has_moved() and not _is_close(output, right) and _is_close(values(), right)

    # A comparison with NaN is False, and so may be that with any one number.
    if isinstance(right, Tensor) and any(map(is_read, (torch.nan, -3.0))):
        raise UnsupportedModelError(
            f"The {what} reads trained parameters of {type(model).__name__} itself, which keep their values while the "
            "training changes copies of them. Use m(inputs) and m.parameters[name] of its first argument m, not "
            "m.model or a module from outside, and keep no parameters in lists or other attributes of a module."
        )
    return right


def _is_close(value: Any, right: Tensor) -> bool:
    """Return whether two values are the same where ``right`` is finite, but for rounding, as of sums in any order."""
    if not isinstance(value, Tensor) or value.shape != right.shape:
        return False
    finite = right.isfinite()
    apart = (value - right).detach()[finite].abs()
    eps = torch.finfo(right.dtype).eps if right.is_floating_point() else 0.0
    return not apart.numel() or bool((apart <= eps**0.75 * right.detach()[finite].abs().max()).all())


def require_parameters(what: str, values: Iterable[Tensor], parameters: Collection[Tensor]) -> None:
    """Raise if no path of autograd leads from any of the values to one of the parameters."""
    wanted = set(map(id, parameters))
    # A batch may use parts of the model that are not trained, as the heads of other domains.
    if not any(id(leaf) in wanted for value in values for leaf in leaves_of_graph(value)):
        raise UnsupportedModelError(
            f"The {what} depends on no trained parameter. Call the model that it is given, m(inputs), and read its "
            "tensors from m.parameters: a module from outside is not trained."
        )


def gradient_of(output: Callable[[Named], Tensor], at: Named) -> Named:
    """Return the gradient of a number by named tensors, which cannot be differentiated again.

    It is zero by those that the number does not depend on.
    """
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in at.items()}
        number = output(leaves)
        if not number.requires_grad:
            return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        gradients = torch.autograd.grad(number, list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, gradients, strict=True))


def _shaped(batch: Batch, shape: tuple[int, ...]) -> Batch:
    """Return the batch with its sample axis in the shape ``(b,)`` or ``(R, b)``."""
    if len(shape) == 1:
        return batch
    return map_tensors(  # a tensor without a sample axis is the same for all models
        lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]) if leaf.dim() else leaf.expand(shape[0]), batch
    )


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Run training steps in the block with the kernels that every repetition and every derivative use."""
    with full_float32(device), sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        yield


@contextmanager
def naming_failures(model: nn.Module, doing: str, advice: str = "") -> Iterator[None]:
    """Raise UnsupportedModelError that names the operation if torch cannot do something with a model."""
    try:
        yield
    except (TrakLiteError, torch.OutOfMemoryError):
        raise
    except MODEL_FAILURES as error:
        refuse_machine_failure(error)
        if "'dict' object is not callable" in str(error):
            advice += " In a loss or a task, model.parameters is a dict of tensors by name: model.parameters.values()."
        raise UnsupportedModelError(
            f"torch cannot {doing} {type(model).__name__} ({type(error).__name__}: {error!s:.300}).{advice}"
        ) from error


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Watches the operations in its context, also those of functions that are no modules."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self.dtypes: set[torch.dtype] = set()
        """Of the tensors that they made."""
        self.peak_bytes = 0
        """Largest sum of bytes of the tensors that they made and that existed at the same time."""
        self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.names.add(func.__name__)
        inputs = {id(storage) for storage in _storages((args, kwargs))}
        output = func(*args, **(kwargs or {}))
        self.dtypes.update(leaf.dtype for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        for storage in _storages(output):
            key, size = id(storage), storage.nbytes()
            if key not in inputs and key not in self._known:
                self._known.add(key)
                self._now += size
                weakref.finalize(storage, self._freed, key, size)
        self.peak_bytes = max(self.peak_bytes, self._now)
        return output

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """Return the memory of all strided tensors in nested values; sparse ones have none of their own."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return [leaf.untyped_storage() for leaf in leaves if leaf.layout is torch.strided]
