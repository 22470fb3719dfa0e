"""Base classes of gradient computers, which stream per-sample gradients of f block by block."""

from __future__ import annotations

import copy
import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import is_not
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trak_lite._devices import Float32Products, float32_products
from trak_lite._validate import known_names, one_of, positive_int
from trak_lite.data.batches import batch_size, map_tensors, take_rows
from trak_lite.errors import (
    MODEL_FAILURES,
    InvalidInputError,
    TrakLiteError,
    UnsupportedModelError,
    refuse_machine_failure,
)
from trak_lite.gradient_computers.self_check import (
    Samples,
    SelfCheck,
    compare,
    refuse_random,
    structure_of,
)
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall
from trak_lite.models._adapters import adapter_parameters
from trak_lite.models.sharded import is_sharded, refuse_sharded, reshard
from trak_lite.models.tree import ModelTree
from trak_lite.types import (
    Batch,
    BlockSink,
    DenseBlock,
    GradientBlock,
    OutputTerms,
    ParameterShapes,
    num_entries,
)

__all__ = [
    "AbstractGradientComputer",
    "AbstractStreamingComputer",
    "ParameterChoice",
    "check_terms",
    "collect_gradients",
    "differentiating_only",
    "gradients_of",
    "joined_terms",
    "refuse_batch_statistics",
    "refuse_detached",
    "select_parameters",
]

ParameterChoice: TypeAlias = str | type[nn.Module] | Iterable[str | type[nn.Module]]
"""Parameters by name or pattern (``"layers.*.weight"``), or by the class of the module that owns them."""


class AbstractGradientComputer(ABC):
    """Per-sample gradients of a model output function with respect to the kept parameters.

    A native computer overrides :meth:`stream_gradients`. A computer written for the original TRAK, which
    defines ``load_model_params``, ``compute_per_sample_grad`` and ``compute_loss_grad``, works unchanged:
    its collected gradients are streamed parameter by parameter.

    Every gradient computer guarantees:

    - Row i is the gradient of f(z_i) alone and does not depend on the other samples of the batch.
    - Parameters have their canonical name, the first in ``named_parameters()`` order.
    - A kept parameter that f does not depend on has gradient zero.
    - The model's weights, mode and ``requires_grad`` flags are unchanged after each call.
    """

    runs_sharded: ClassVar[bool] = False
    """Whether the computer supports models sharded by FSDP2."""
    float32_products: Float32Products = "ieee"
    """How float32 products are computed on an accelerator while gradients are streamed and projected."""

    @abstractmethod
    def __init__(
        self,
        model: nn.Module,
        task: AbstractModelOutput,
        grad_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        grad_wrt: ParameterChoice | None = None,
    ) -> None:
        """Store the settings (the original TRAK's signature).

        Args:
            model: The module whose parameters are differentiated; it is not copied.
            task: Model output function.
            grad_dim: P, if the caller wants it checked.
            dtype: Accepted for the original's signature; gradients keep their parameter's dtype.
            device: Ignored, part of the original's signature; gradients are on the model's device.
            grad_wrt: Parameters to keep (:func:`select_parameters`); ``None`` keeps those that require grad.
        """
        self.model = model
        self.modelout_fn = task
        self.grad_dim = grad_dim
        self.dtype = dtype
        self.device = device
        self.grad_wrt: Sequence[str | type[nn.Module]] | None = (
            None if grad_wrt is None else _choices(grad_wrt)
        )

    @abstractmethod
    def load_model_params(self, model: nn.Module) -> None:
        """Use this model for all later calls."""

    @abstractmethod
    def compute_per_sample_grad(self, batch: Batch) -> Mapping[str, Tensor] | Tensor:
        """Return the per-sample gradients of f.

        Args:
            batch: B samples.

        Returns:
            Gradients ``(B, *parameter.shape)`` by parameter name, in model order; an original-style computer
            may return one ``(B, P)`` tensor instead.
        """

    @abstractmethod
    def compute_loss_grad(self, batch: Batch) -> Tensor:
        """Return q = -dL/df of every sample, ``(B, 1)``, detached."""

    @property
    def parameters(self) -> ParameterShapes:
        """Shapes of the kept parameters by canonical name, in model order."""
        return {name: tuple(p.shape) for name, p in select_parameters(self.model, self.grad_wrt).items()}

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings that change the gradients beyond rounding, as JSON values, for the manifest.

        An autocast dtype is such a setting. The computer's class is not, because all computers give equal gradients.
        """
        return {}

    def name_rows(self, what: str, rows: NDArray[np.int64]) -> None:
        """Record the data rows of the next batch, for the error message if a later self-check fails.

        Args:
            what: Name of the data in messages.
            rows: Row numbers of the batch's samples in the data, ``(B,)``.
        """
        return

    def run(
        self,
        batch: Batch,
        projector: object,
        setting: Sequence[Hashable],
        work: Callable[[], Sequence[Tensor]],
        is_scratch: Callable[[Tensor], bool],
    ) -> Sequence[Tensor]:
        """Return the tensors that ``work`` computes from a batch by :meth:`stream_gradients`.

        A computer may run recorded operations instead of ``work`` if these give the same bits.

        Args:
            batch: The batch, on the model's device.
            projector: What ``work`` projects by.
            setting: All else that ``work`` depends on, compared by value.
            work: Streams the gradients of the batch, and returns what it computes from them.
            is_scratch: Whether a tensor is memory that ``work`` writes to and nobody reads later.
        """
        del batch, projector, setting, is_scratch
        return work()

    def stream_gradients(self, batch: Batch, sink: BlockSink) -> OutputTerms:
        """Pass the gradient blocks of a batch to ``sink`` as they are computed, in any order.

        Args:
            batch: B samples, on the model's device.
            sink: Called with every block; the block is freed when the call returns.

        Returns:
            f, q and w of the batch, each ``(B,)`` and detached.

        Raises:
            InvalidInputError: If the batch or the output function's result has the wrong form.
            UnsupportedModelError: If this computer cannot differentiate the model sample by sample.
        """
        grads = self.compute_per_sample_grad(batch)
        for name, grad in self._by_name(grads).items():
            sink(DenseBlock(name, grad.detach()))
        with torch.no_grad():
            terms = self.modelout_fn.evaluate(ModelCall(self.model), batch)
        out_to_loss_grad = self.compute_loss_grad(batch).detach().reshape(-1)
        return OutputTerms(terms.output, out_to_loss_grad, terms.loss_curvature)

    def _by_name(self, grads: Mapping[str, Tensor] | Tensor) -> Mapping[str, Tensor]:
        """Split a ``(B, P)`` tensor into one tensor per parameter."""
        if not isinstance(grads, Tensor):
            return grads
        shapes = self.parameters
        if grads.dim() != 2 or grads.shape[1] != num_entries(shapes):
            raise InvalidInputError(
                f"{type(self).__name__}.compute_per_sample_grad returned shape {tuple(grads.shape)}, expected "
                f"(B, {num_entries(shapes)}): one column per entry of the {len(shapes)} kept parameters."
            )
        sizes = [num_entries({name: shape}) for name, shape in shapes.items()]
        parts = torch.split(grads, sizes, dim=1)
        return {
            name: part.reshape(len(grads), *shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }


class AbstractStreamingComputer(AbstractGradientComputer):
    """Base class of the package's own computers; subclasses implement ``_stream_samples``.

    The self-check compares samples with autograd's gradient on each sample alone. A structure is the shapes without
    the sample axis, the dtypes, and the flags beside the tensors of a batch. These samples are compared:

    - In the first batch of every size: up to eight samples, evenly spread from the first to the last.
    - In batches number 1, 2, 4, ... 64 of a structure, and every 64th after that: the first sample, the last, and a
      third whose position changes from check to check.

    If a sample differs by more than rounding, this batch and all later ones are refused. The error names the rows of
    all batches since the last check of their structure that passed.

    If a subclass overrides ``compute_per_sample_grad`` or ``compute_loss_grad``, as code for the original TRAK does,
    :meth:`stream_gradients` streams from those methods.
    """

    advice: ClassVar[str] = ""
    """End of the message of a failed self-check: the likely cause, and an alternative."""

    def __init__(
        self,
        model: nn.Module,
        task: AbstractModelOutput,
        grad_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        grad_wrt: ParameterChoice | None = None,
        *,
        chunk_size: int | None = None,
        autocast_dtype: torch.dtype | None = None,
        float32_products: Float32Products = "ieee",
        self_check: bool = True,
    ) -> None:
        """Store the settings.

        Args:
            model: The module whose parameters are differentiated; it is not copied.
            task: Model output function.
            grad_dim: P, if the caller wants it checked.
            dtype: Accepted for the original's signature; gradients keep their parameter's dtype.
            device: Ignored, part of the original's signature; gradients are on the model's device.
            grad_wrt: Parameters to keep (:func:`select_parameters`); ``None`` keeps those that require grad.
            chunk_size: Number of samples per pass; bounds the memory of a large batch.
            autocast_dtype: Run the forward pass under autocast in this dtype (float16 or bfloat16).
            float32_products: ``"ieee"`` for full float32 products, whatever torch's settings are. ``"tf32"`` rounds
                the factors of products and convolutions of the model, of its gradients and of their projection to 10
                bits of mantissa on an accelerator with TF32, and adds in float32. No effect on the CPU.
            self_check: Compare some samples' gradients with autograd's on each sample alone (see the class docstring).
        """
        super().__init__(model, task, grad_dim, dtype, device, grad_wrt)
        self.chunk_size = None if chunk_size is None else positive_int(chunk_size=chunk_size)
        self.autocast_dtype = autocast_dtype
        self.float32_products = one_of(("ieee", "tf32"), float32_products=float32_products)  # type: ignore[assignment]
        self.self_check = self_check
        self.checks = SelfCheck()
        self._is_repeatable = False
        """Whether f of the same samples is known to be the same in eval mode."""
        self._tree: ModelTree | None = None
        """The model, during a pass."""
        self._choice: tuple[Any, dict[str, nn.Parameter], dict[str, nn.Parameter]] | None = None
        """Names and ``grad_wrt`` of the last pass, all its parameters, and those that were selected."""

    @property
    def parameters(self) -> ParameterShapes:
        """Shapes of the kept parameters by canonical name, in model order."""
        return {name: tuple(p.shape) for name, p in self._kept(ModelTree(self.model)).items()}

    def load_model_params(self, model: nn.Module) -> None:
        """Use this model for all later calls; every call reads its current parameter values."""
        self.checks.restart()
        self._choice, self._is_repeatable = None, False
        self.model = model

    def name_rows(self, what: str, rows: NDArray[np.int64]) -> None:
        """Record the data rows of the next batch; see :class:`AbstractGradientComputer`."""
        self.checks.name_rows(what, rows)

    def repeated(self, batch: Batch, positions: Sequence[int]) -> Iterator[tuple[Self, Batch, list[int]]]:
        """Yield (computer without self-check, batch, positions in it) to stream some samples again.

        By default every sample is in a batch of its own. Subclasses that process samples together override this.
        """
        for position in positions:
            yield self._unchecked(), take_rows(batch, [position]), [0]

    def _unchecked(self) -> Self:
        again = copy.copy(self)
        again.self_check, again.chunk_size, again.checks = False, None, SelfCheck()
        return again

    def compute_per_sample_grad(self, batch: Batch) -> dict[str, Tensor]:
        """Return the per-sample gradients ``(B, *parameter.shape)`` by parameter name, in model order."""
        return _collected(self._stream, self.parameters, batch)

    def compute_loss_grad(self, batch: Batch) -> Tensor:
        """Return q = -dL/df of every sample, ``(B, 1)``, detached."""
        with torch.no_grad(), self._products():
            return self.terms(batch).out_to_loss_grad.detach().unsqueeze(-1)

    def stream_gradients(self, batch: Batch, sink: BlockSink) -> OutputTerms:
        """Pass one block per kept parameter (and chunk of samples) to ``sink``.

        Args:
            batch: B samples, on the model's device.
            sink: Called with every block; the block is freed when the call returns.

        Returns:
            f, q and w of the batch, each ``(B,)`` and detached.

        Raises:
            InvalidInputError: If the batch or the output function's result has the wrong form.
            UnsupportedModelError: If this computer cannot differentiate the model sample by sample.
        """
        if self._is_native():
            return self._stream(batch, sink)
        return AbstractGradientComputer.stream_gradients(self, batch, sink)

    def fingerprint(self) -> dict[str, Any]:
        """Return the autocast dtype, if one is set, and how float32 products are computed, if not in full."""
        dtype, products = self.autocast_dtype, self.float32_products
        return {
            **({} if dtype is None else {"autocast_dtype": str(dtype).removeprefix("torch.")}),
            **({} if products == "ieee" else {"float32_products": products}),
        }

    def terms(self, batch: Batch, call: ModelCall | None = None) -> OutputTerms:
        """Return f, q and w of a batch under this computer's settings; f keeps its autograd graph.

        Args:
            batch: B samples.
            call: Runs the model; by default with the model's own weights.

        Raises:
            InvalidInputError: If the output function does not return one number per sample.
        """
        # A pass in train mode would update running statistics, and probing a model takes several passes.
        tree = self._tree or ModelTree(self.model)
        with self._autocast(), _private_buffers(tree):
            call = call or self._call(modules=tree.modules)
            terms = self.modelout_fn.evaluate(call, batch)
        with torch._C.DisableTorchFunction():  # a pass would look at every question about a shape
            return check_terms(terms, batch_size(batch), self.modelout_fn)

    @property
    def differentiates_the_model(self) -> bool:
        """Whether the gradients are those of :meth:`terms`: no method is overridden, no other weights are assigned."""
        return self._is_native() and type(self).stream_gradients is AbstractStreamingComputer.stream_gradients

    @abstractmethod
    def _stream_samples(
        self, batch: Batch, count: int, kept: Mapping[str, nn.Parameter], sink: BlockSink
    ) -> OutputTerms:
        """Stream the blocks of a batch of at least one sample; see :meth:`stream_gradients`."""

    def _is_native(self) -> bool:
        own, given = AbstractStreamingComputer, type(self)
        return (
            given.compute_per_sample_grad is own.compute_per_sample_grad
            and given.compute_loss_grad is own.compute_loss_grad
        )

    def _stream(self, batch: Batch, sink: BlockSink) -> OutputTerms:
        if not self.runs_sharded:
            refuse_sharded(self.model, type(self).__name__, "Use gradient_computer='hook'")
        count = batch_size(batch)
        with self._walked() as tree:
            reshard(tree)
            refuse_batch_statistics(tree)
            kept = self._kept(tree)
            if count:
                with self._products():
                    self._refuse_random(tree, batch)
                    return self._stream_checked(map_tensors(Tensor.detach, batch), count, kept, sink)
        for name, parameter in kept.items():
            sink(DenseBlock(name, parameter.detach().new_empty(0, *parameter.shape)))
        empty = next(iter(kept.values())).detach().new_empty(0)
        return OutputTerms(empty, empty, empty)

    def _refuse_random(self, tree: ModelTree, batch: Batch) -> None:
        """Refuse a model whose f is random in eval mode, before its first batch."""
        checked = self.self_check and self.differentiates_the_model and not is_sharded(tree)
        if checked and not (self._is_repeatable or any(module.training for module in tree.modules)):
            refuse_random(self, map_tensors(Tensor.detach, take_rows(batch, slice(0, 8))))
            self._is_repeatable = True

    @contextmanager
    def _walked(self) -> Iterator[ModelTree]:
        """Yield the model's tree, which all steps inside the block use."""
        self._tree = ModelTree(self.model)
        try:
            yield self._tree
        finally:
            self._tree = None

    def _kept(self, tree: ModelTree) -> dict[str, nn.Parameter]:
        """Return the kept parameters; see :func:`select_parameters`."""
        if self.grad_wrt is None:
            return select_parameters(self.model, None, tree.parameters)
        known, own = self._choice, tree.parameters
        asked = list(own), tree.aliases, list(self.grad_wrt)
        if known is None or known[0] != asked or any(map(is_not, known[1].values(), own.values())):
            known = self._choice = asked, own, select_parameters(self.model, self.grad_wrt)
        return known[2]

    def _stream_checked(
        self, batch: Batch, count: int, kept: Mapping[str, nn.Parameter], sink: BlockSink
    ) -> OutputTerms:
        """Stream the blocks of a batch, and run the self-check if it is due."""
        if not (self.self_check and self.differentiates_the_model):
            return self._stream_samples(batch, count, kept, sink)
        conditions = self._conditions(kept)
        structure = (*structure_of(batch), conditions)
        self.checks.refuse_failed(conditions)
        samples = Samples(self.checks.positions(structure, count, kept), kept)
        with self.checks.batch(structure, conditions, count, samples.positions):
            terms = self._stream_samples(batch, count, kept, samples.passing(sink))
            compare(self, batch, kept, samples)
        return terms

    def _conditions(self, kept: Mapping[str, nn.Parameter]) -> Any:
        """Return the state outside the batch: the model's mode, the kept parameters, the caller's autocast state."""
        modes = (self._tree or ModelTree(self.model)).modes
        return modes, tuple(kept), torch.is_autocast_enabled(next(iter(kept.values())).device.type)

    def _chunks(self, count: int) -> Iterator[slice]:
        """Yield the row ranges that go through the model in one pass."""
        step = self.chunk_size or count
        return (slice(start, min(start + step, count)) for start in range(0, count, step))

    def _products(self) -> AbstractContextManager[None]:
        """Return the context for the model and the computations on its gradients: how float32 products are computed."""
        return float32_products(next(self.model.parameters()).device, self.float32_products)

    def _call(
        self,
        parameters: Mapping[str, Tensor] | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        *,
        modules: Sequence[nn.Module] | None = None,
    ) -> ModelCall:
        """Return a call of the model under this computer's settings; the arguments are those of ``ModelCall``."""
        return ModelCall(
            self.model, parameters, buffers, modules=modules, float32_products=self.float32_products
        )

    @contextmanager
    def _refusing(self, batch: Batch, message: Callable[[BaseException], str]) -> Iterator[None]:
        """Raise UnsupportedModelError with this message if the block fails, but not the model itself on ``batch``."""
        try:
            yield
        except (TrakLiteError, torch.OutOfMemoryError):
            raise
        except MODEL_FAILURES as error:
            refuse_machine_failure(error)
            if is_sharded(self._tree or self.model):
                raise  # another forward pass would need the other ranks
            # If the plain forward pass fails too, raise its error instead.
            with torch.no_grad():
                self.terms(batch)
            raise UnsupportedModelError(message(error)) from error

    def _autocast(self) -> Any:
        """Return the context for the forward pass: autocast, if a dtype is set."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(next(self.model.parameters()).device.type, dtype=self.autocast_dtype)


def gradients_of(total: Tensor, kept: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return a scalar's dense gradients by parameter name; zero where it does not depend on the parameter."""
    grads = torch.autograd.grad(total, list(kept.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if grad is None else grad.to_dense()
        for (name, p), grad in zip(kept.items(), grads, strict=True)
    }


def joined_terms(parts: Sequence[OutputTerms]) -> OutputTerms:
    """Concatenate the terms of a batch's chunks."""
    if len(parts) == 1:
        return parts[0]
    return OutputTerms(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def select_parameters(
    model: nn.Module, grad_wrt: ParameterChoice | None, canonical: Mapping[str, nn.Parameter] | None = None
) -> dict[str, nn.Parameter]:
    """Return the parameters to keep gradients for, by canonical name, in model order.

    Args:
        model: The module.
        grad_wrt: Names as in ``named_parameters``, patterns of names (``"layers.*.weight"``), and module classes. A
            class selects every parameter that a module of that class or of a subclass owns directly. Any name of a
            tied weight selects the weight. ``None`` selects every parameter that requires grad; if a PEFT model has
            none, those of its active adapter.
        canonical: ``dict(model.named_parameters())``, if the caller has it.

    Raises:
        InvalidInputError: If a name is unknown, a class has no parameter in the model, or nothing is selected.
    """
    canonical = dict(model.named_parameters()) if canonical is None else canonical
    if grad_wrt is None:
        selected = {name: p for name, p in canonical.items() if p.requires_grad}
        if not selected:  # PEFT freezes an adapter that is loaded for inference
            adapter = adapter_parameters(model)
            selected = {name: p for name, p in canonical.items() if name in adapter}
        if not selected:
            raise InvalidInputError(
                f"No parameter of {type(model).__name__} requires grad, so there is nothing to differentiate. Name "
                "parameters in grad_wrt; these may be frozen."
            )
        return selected
    choices = _choices(grad_wrt)
    by_class = [choice for choice in choices if isinstance(choice, type) and issubclass(choice, nn.Module)]
    wanted = {id(p) for module_class in by_class for p in _owned_by(model, module_class)}
    wanted |= _named(model, [choice for choice in choices if choice not in by_class])
    if not wanted:
        raise InvalidInputError("grad_wrt is empty. Name at least one parameter, or leave it out to use all.")
    return {name: p for name, p in canonical.items() if id(p) in wanted}


def _choices(grad_wrt: ParameterChoice) -> list[str | type[nn.Module]]:
    return [grad_wrt] if isinstance(grad_wrt, str | type) else list(grad_wrt)


def _named(model: nn.Module, given: Sequence[Any]) -> set[int]:
    """Return the ``id`` of every parameter that a name or a pattern selects."""
    every_name = dict(model.named_parameters(remove_duplicate=False))
    matched = {
        name: fnmatch.filter(every_name, name)
        for name in given
        if isinstance(name, str) and any(c in name for c in "*?[")
    }
    names = known_names(
        [name for pattern in given for name in matched.get(pattern) or [pattern]],
        every_name.keys(),
        what="parameter names in grad_wrt",
    )
    return {id(every_name[name]) for name in names}


def _owned_by(model: nn.Module, module_class: type[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that modules of a class own directly, including those of their parametrizations."""
    found: list[nn.Parameter] = []
    for module in model.modules():
        if isinstance(module, module_class):
            found += module.parameters(recurse=False)
            if parametrize.is_parametrized(module):
                found += module.parametrizations.parameters()  # type: ignore[union-attr]
    if not found:
        owners = {
            type(module).__name__ for module in model.modules() if list(module.parameters(recurse=False))
        }
        raise InvalidInputError(
            f"grad_wrt names the class {module_class.__name__}, and no module of that class in "
            f"{type(model).__name__} owns a parameter. Classes that do: {sorted(owners)}."
        )
    return found


@contextmanager
def differentiating_only(
    parameters: Iterable[nn.Parameter], kept: Mapping[str, nn.Parameter]
) -> Iterator[None]:
    """Let only the kept parameters require grad inside the block, so that autograd forms no other gradient.

    Args:
        parameters: All parameters of the model.
        kept: Some of them, by name.
    """
    flags = [(p, p.requires_grad) for p in parameters]
    wanted = {id(p) for p in kept.values()}
    try:
        for p, flag in flags:
            if flag != (id(p) in wanted):
                p.requires_grad_(not flag)
        yield
    finally:
        for p, flag in flags:
            if p.requires_grad != flag:
                p.requires_grad_(flag)


@contextmanager
def _private_buffers(tree: ModelTree) -> Iterator[None]:
    """Replace the buffers of modules in train mode by copies inside the block."""
    owners = [(m, dict(m._buffers)) for m in tree.modules if m.training and m._buffers]
    try:
        for module, own in owners:
            module._buffers.update({k: None if v is None else v.detach().clone() for k, v in own.items()})
        yield
    finally:
        for module, own in owners:
            module._buffers.update(own)


def refuse_batch_statistics(tree: ModelTree) -> None:
    """Raise if a batch-normalisation layer would mix the samples of a batch.

    Raises:
        UnsupportedModelError: If there are such layers; the message names them.
    """
    mixing = [
        name
        for name, module in tree.named_modules
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and (module.training or module.running_mean is None)
        and not isinstance(module, nn.modules.instancenorm._InstanceNorm)
    ]
    if mixing:
        raise UnsupportedModelError(
            f"{mixing[:5]} normalise over the batch, so the gradient of a sample would depend on the other samples. "
            "Call model.eval() and keep running statistics, or replace these layers (nn.GroupNorm)."
        )


def collect_gradients(computer: AbstractGradientComputer, batch: Batch) -> dict[str, Tensor]:
    """Return a computer's dense gradients ``(B, *parameter.shape)`` by parameter name, in model order."""
    return _collected(computer.stream_gradients, computer.parameters, batch)


def _collected(
    stream: Callable[[Batch, BlockSink], OutputTerms], shapes: ParameterShapes, batch: Batch
) -> dict[str, Tensor]:
    count = batch_size(batch)
    found: dict[str, Tensor] = {}

    def keep(block: GradientBlock) -> None:
        rows = block.dense()
        if rows.shape[0] == count:
            found[block.name] = rows
            return
        whole = found.setdefault(block.name, rows.new_zeros(count, rows.shape[1]))
        whole[block.start : block.start + rows.shape[0]] = rows

    stream(batch, keep)
    return {name: found[name].reshape(count, *shape) for name, shape in shapes.items()}


def refuse_detached(
    model: nn.Module, task: AbstractModelOutput, batch: Batch, kept: Mapping[str, Tensor]
) -> None:
    """Raise if f is detached from the model, or if a computer missed a nonzero gradient.

    Called only when every gradient of a batch is zero. This is correct if f does not depend on the kept parameters
    (an expert that receives no sample), and wrong if f is detached from autograd.

    Raises:
        UnsupportedModelError: If f does not require grad, or autograd finds a nonzero gradient.
    """
    parameters = dict(model.named_parameters())
    with differentiating_only(parameters.values(), parameters), torch.enable_grad():
        output = task.evaluate(ModelCall(model), batch).output
        cut_off = not output.requires_grad
        wanted = [parameters[name] for name in kept]
        grads = () if cut_off else torch.autograd.grad(output.sum(), wanted, allow_unused=True)
    if cut_off or any(grad is not None and bool(grad.any()) for grad in grads):
        raise UnsupportedModelError(
            f"f depends on none of the {len(kept)} kept parameters ({list(kept)[:3]}), so every gradient would be "
            "zero. The output function must run the model through model_call, inside autograd: no detach(), no NumPy, "
            "no torch.inference_mode()."
        )


def check_terms(terms: OutputTerms, num_samples: int, task: AbstractModelOutput) -> OutputTerms:
    """Return the terms unchanged if each has one number per sample.

    Raises:
        InvalidInputError: If a term has another shape; the message names the term.
    """
    for name, value in zip(terms._fields, terms, strict=True):
        if tuple(value.shape) != (num_samples,):
            raise InvalidInputError(
                f"{type(task).__name__} returned {name} of shape {tuple(value.shape)} for a batch of {num_samples} "
                f"samples, expected ({num_samples},): one number per sample. Do not reduce over the batch."
            )
    return terms
