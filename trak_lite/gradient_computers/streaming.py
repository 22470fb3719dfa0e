"""Base class of the package's own gradient computers, which check themselves and leave the model as it was."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite.core.devices import Float32Products
from trak_lite.core.eval_caches import StateBeforePass
from trak_lite.core.validate import one_of, positive_int
from trak_lite.data.batches import batch_size, map_tensors, take_rows, with_own_containers
from trak_lite.errors import (
    MODEL_FAILURES,
    InvalidInputError,
    TrakLiteError,
    UnsupportedModelError,
    refuse_machine_failure,
)
from trak_lite.gradient_computers._base import (
    AbstractGradientComputer,
    collected,
    products_fingerprint,
    refusal,
)
from trak_lite.gradient_computers.comparison import compare, refuse_changing
from trak_lite.gradient_computers.parameters import (
    Kept,
    differentiating_only,
    select_parameters,
)
from trak_lite.gradient_computers.randomness import (
    depends_on_batch,
    refusal_of_mixing,
    refuse_random,
    refuse_reading_of_flags,
)
from trak_lite.gradient_computers.reference import fits_in_float64
from trak_lite.gradient_computers.samples import Samples
from trak_lite.gradient_computers.self_check import SelfCheck, structure_of
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall
from trak_lite.models.sharded import is_sharded, refuse_sharded, reshard
from trak_lite.models.tree import ModelTree
from trak_lite.types import Batch, BlockSink, DenseBlock, GradientBlock, OutputTerms, ParameterChoice


class AbstractStreamingComputer(AbstractGradientComputer):
    """Base class of the package's own computers; subclasses implement ``_stream_samples``.

    Some samples are compared with autograd's gradient on each sample alone, on the schedule of
    :class:`~trak_lite.gradient_computers.self_check.SelfCheck`. A structure is the shapes without the sample axis, the
    dtypes, and the flags beside the tensors of a batch. If a sample differs by more than rounding, this batch and all
    later ones are refused. The error names the rows of all batches since the last check of their structure that passed.

    If a subclass overrides ``compute_per_sample_grad`` or ``compute_loss_grad``, as code for the original TRAK does,
    :meth:`stream_gradients` streams from those methods.
    """

    advice: ClassVar[str] = ""
    """End of the message of a failed self-check: the likely cause, and an alternative."""
    _calls_functions: ClassVar[bool] = False
    """Whether passes run with replaced parameters and buffers (``functional_call``)."""
    _takes_samples_alone: ClassVar[bool] = False
    """Whether f is computed of batches of one sample, so that a pass does not show what samples have to do with each
    other."""

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
        """Store the settings; the first six arguments are those of :class:`AbstractGradientComputer`.

        ``chunk_size`` is the number of samples per pass; it bounds the memory of a large batch. With
        ``autocast_dtype``, the forward pass runs under autocast in this dtype (float16 or bfloat16).

        ``float32_products="ieee"`` gives full float32 products, whatever torch's settings are. ``"tf32"`` rounds the
        factors of products and convolutions of the model, of its gradients and of their projection to 10 bits of
        mantissa on an accelerator with TF32, and adds in float32. It has no effect on the CPU.

        ``self_check=True`` compares some samples' gradients with autograd's (see the class docstring).
        """
        super().__init__(model, task, grad_dim, dtype, device, grad_wrt)
        self.chunk_size = None if chunk_size is None else positive_int(chunk_size=chunk_size)
        self.autocast_dtype = autocast_dtype
        self.float32_products = one_of(("ieee", "tf32"), float32_products=float32_products)  # type: ignore[assignment]
        self.self_check = self_check
        self.checks = SelfCheck()
        self._is_repeatable = False
        """Whether f of the same samples is known to be the same in eval mode."""
        self._looked_at: Any = None
        """Structure and size of the next batch, if :meth:`look_at_halves` has compared it."""
        self._tree: ModelTree | None = None
        """The model, during a pass."""
        self._state: StateBeforePass | None = None
        self._error_of_sink: Exception | None = None

    def load_model_params(self, model: nn.Module) -> None:
        """Use this model for all later calls; every call reads its current parameter values."""
        self.checks.restart()
        self._is_repeatable, self._looked_at = False, None
        self.model = model

    def renew(self) -> None:
        """Begin anew with other weights of the model; the schedule of the self-check goes on."""
        checks, self.checks = self.checks, SelfCheck()
        self.load_model_params(self.model)
        self.checks = checks
        checks.renew()

    def name_rows(self, what: str, rows: NDArray[np.int64]) -> None:
        """Record the data rows of the next batch; see :class:`AbstractGradientComputer`."""
        self.checks.name_rows(what, rows)

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Leave the self-check out in the block; see :class:`AbstractGradientComputer`."""
        checks = self.checks, self.self_check
        self.checks, self.self_check = SelfCheck(), False
        try:
            yield
        finally:
            self.checks, self.self_check = checks

    def repeated(self, batch: Batch, positions: Sequence[int]) -> Iterator[tuple[Self, Batch, list[int]]]:
        """Yield (computer without self-check, batch, positions in it) to stream some samples again.

        By default every sample is in a batch of its own. Subclasses that process samples together override this.
        """
        for position in positions:
            yield self._unchecked(), take_rows(batch, [position]), [0]

    def enough_for(self, batch: Batch, positions: Sequence[int]) -> tuple[Batch, list[int]]:
        """Return a part of a batch with some samples that shows as much of their gradients, and their places in it."""
        return batch, list(positions)

    def advice_for(self, batch: Batch) -> str:
        """Return the end of the message of a failed self-check of a batch."""
        return self.advice

    def _unchecked(self) -> Self:
        self.undo_passes()
        again = copy.copy(self)
        again.self_check, again.chunk_size, again.checks = False, None, SelfCheck()
        return again

    def compute_per_sample_grad(self, batch: Batch) -> dict[str, Tensor]:
        """Return the per-sample gradients ``(B, *parameter.shape)`` by parameter name, in model order."""
        return collected(self._stream, self.parameters, batch)

    def compute_loss_grad(self, batch: Batch) -> Tensor:
        """Return q = -dL/df of every sample, ``(B, 1)``, detached."""
        with torch.no_grad(), self._products():
            return self.terms(batch).out_to_loss_grad.detach().unsqueeze(-1)

    def stream_gradients(self, batch: Batch, sink: BlockSink) -> OutputTerms:
        """Pass one block per kept parameter (and chunk of samples) to ``sink``; see the base class."""
        if self._is_native():
            return self._stream(batch, sink)
        return AbstractGradientComputer.stream_gradients(self, batch, sink)

    def fingerprint(self) -> dict[str, Any]:
        """Return the autocast dtype, if one is set, and how float32 products are computed, if not in full."""
        autocast = str(self.autocast_dtype).removeprefix("torch.")
        settings = {"autocast_dtype": autocast} if self.autocast_dtype else {}
        return {**settings, **products_fingerprint(self.float32_products)}

    def terms(self, batch: Batch, call: ModelCall | None = None) -> OutputTerms:
        """Return f, q and w of a batch under this computer's settings; f keeps its autograd graph.

        Args:
            batch: B samples.
            call: Runs the model; by default with the model's own weights.

        Raises:
            InvalidInputError: If the output function does not return one number per sample.
        """
        # A pass in train mode would update running statistics, and probing a model takes several passes.
        tree, dtype = self._tree or ModelTree(self.model), self.autocast_dtype
        device = next(self.model.parameters()).device.type
        state = self._state or StateBeforePass(tree.modules)
        always = self._calls_functions or call is not None
        given = with_own_containers(batch)  # a task may take entries out of it
        state.restore(always)  # what the pass before has set, and read in its backward pass
        try:
            with (
                torch.autocast(device, dtype) if dtype is not None else nullcontext(),
                _private_buffers(tree),
            ):
                terms = self.modelout_fn.evaluate(call or self._call(modules=tree.modules), given)
        except Exception as error:  # code of the model (einx) may have wrapped a refusal of this package
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, UnsupportedModelError):
                cause = cause.__cause__
            if cause is None or cause is error:
                raise
            raise cause from None
        finally:
            if self._state is None:
                state.restore(always)
        with torch._C.DisableTorchFunction():  # a pass would look at every question about a shape
            count = batch_size(batch)
            for name, value in zip(terms._fields, terms, strict=True):
                if tuple(value.shape) != (count,):
                    raise InvalidInputError(
                        f"{type(self.modelout_fn).__name__} returned {name} of shape {tuple(value.shape)} for a batch "
                        f"of {count} samples, expected ({count},): one number per sample. Do not reduce over the batch."
                    )
        return terms

    def undo_passes(self) -> None:
        """Undo what passes have set, if they replaced a buffer or a submodule; no backward pass may be left."""
        if self._state is not None:
            self._state.restore(self._calls_functions)

    @property
    def differentiates_the_model(self) -> bool:
        """Whether the gradients are those of :meth:`terms`: no method is overridden, no other weights are assigned."""
        return self._is_native() and type(self).stream_gradients is AbstractStreamingComputer.stream_gradients

    @abstractmethod
    def _stream_samples(self, batch: Batch, count: int, kept: Kept, sink: BlockSink) -> OutputTerms:
        """Stream the blocks of a batch of at least one sample; see :meth:`stream_gradients`."""

    def _message(self, error: BaseException) -> str:
        """Return why a model that runs cannot be differentiated by this computer."""
        raise NotImplementedError

    def _is_native(self) -> bool:
        names = ("compute_per_sample_grad", "compute_loss_grad")
        return all(getattr(type(self), name) is getattr(AbstractStreamingComputer, name) for name in names)

    def _stream(self, batch: Batch, sink: BlockSink) -> OutputTerms:
        if not self.runs_sharded:
            refuse_sharded(self.model, type(self).__name__, "Use gradient_computer='hook'")

        def take(block: GradientBlock) -> None:
            try:
                sink(block)
            except Exception as error:
                self._error_of_sink = error
                raise

        count = batch_size(batch)
        outer = self._tree, self._state
        self._tree = tree = ModelTree(self.model)  # all steps use this one
        self._state = StateBeforePass(tree.modules)
        try:
            reshard(tree)
            refuse_batch_statistics(tree)
            kept = select_parameters(self.model, self.grad_wrt, tree.parameters)
            if count:
                with self._products():
                    self._refuse_random(tree, batch, kept)
                    return self._stream_checked(map_tensors(Tensor.detach, batch), count, kept, take)
        finally:
            self.undo_passes()
            self._tree, self._state = outer
            self._error_of_sink = None
        for name, parameter in kept.items():
            sink(DenseBlock(name, parameter.detach().new_empty(0, *parameter.shape)))
        empty = next(iter(kept.values())).detach().new_empty(0)
        return OutputTerms(empty, empty, empty)

    def _refuse_random(self, tree: ModelTree, batch: Batch, kept: Kept) -> None:
        """Refuse a model whose f is random in eval mode, or changes with the choice of parameters."""
        checked = self.self_check and self.differentiates_the_model and not is_sharded(tree)
        if checked and not (self._is_repeatable or any(tree.modes)):
            some = map_tensors(Tensor.detach, take_rows(batch, slice(0, 8)))
            refuse_random(self, some)
            refuse_reading_of_flags(self, some, kept)
            if self._takes_samples_alone and depends_on_batch(self, some):
                refuse_changing(self, some)
                self.look_at_mixing()
            self._is_repeatable = True

    def look_at_halves(self, batch: Batch) -> None:
        """Refuse or accept a model whose f of a sample is another one in half of its batch.

        A few samples need not show it: an expert with a capacity drops the last samples of some batches, and a loss
        that compares the samples of a label needs two of them.
        """
        if self.self_check and self.differentiates_the_model:
            with self._products():
                self._compare_halves(map_tensors(Tensor.detach, batch))
            self._looked_at = structure_of(batch), batch_size(batch)

    def _compare_halves(self, batch: Batch, **known: Tensor) -> None:
        """Look at a batch; ``known`` is f of a pass that was made, see :func:`depends_on_batch`."""
        count, tree = batch_size(batch), self._tree or ModelTree(self.model)
        looked_at, self._looked_at = self._looked_at, None
        if count < 2 or looked_at == (structure_of(batch), count):
            return
        # In float32 and less, rounding that depends on the batch size may send a row to another expert.
        if any(tree.modes) or is_sharded(tree) or not fits_in_float64(self.model):
            return
        if depends_on_batch(self, batch, -(-count // 2), sure=True, **known):
            refuse_changing(self, batch)
            self.look_at_mixing()

    def look_at_mixing(self) -> None:
        """Refuse or accept a model whose f of a sample depends on the other samples of its batch."""
        raise UnsupportedModelError(refusal_of_mixing(self.model))

    def _stream_checked(self, batch: Batch, count: int, kept: Kept, sink: BlockSink) -> OutputTerms:
        if not (self.self_check and self.differentiates_the_model):
            return self._stream_samples(batch, count, kept, sink)
        structure = self._structure(batch, kept)
        key = self.checks.key(structure)
        self.checks.refuse_failed(key)
        is_first = self.checks.is_first(key, count)
        samples = Samples(self.checks.positions(key, count, kept, always=key != structure), kept)
        with self.checks.batch(key, count, samples.positions):
            terms = self._stream_samples(batch, count, kept, samples.passing(sink))
            compare(self, batch, kept, samples)
            if is_first:
                rows = next(self._chunks(count))  # more need not fit into memory
                self._compare_halves(take_rows(batch, rows), alone=terms.output[rows])
        return terms

    def _structure(self, batch: Batch, kept: Kept) -> tuple[Any, ...]:
        """Return the structure of a batch and, last, what else a pass depends on."""
        modes = (self._tree or ModelTree(self.model)).modes
        autocast = torch.is_autocast_enabled(next(iter(kept.values())).device.type)
        hooked = tuple(name for name, parameter in kept.items() if parameter._backward_hooks)
        return *structure_of(batch), (modes, tuple(kept), hooked, autocast)

    def _chunks(self, count: int) -> Iterator[slice]:
        """Yield the row ranges that go through the model in one pass."""
        step = self.chunk_size or count
        return (slice(start, min(start + step, count)) for start in range(0, count, step))

    def _call(self, *weights: Mapping[str, Tensor], modules: Sequence[nn.Module] | None = None) -> ModelCall:
        """Return a call of the model under this computer's settings; the arguments are those of ``ModelCall``."""
        return ModelCall(self.model, *weights, modules=modules, float32_products=self.float32_products)

    @contextmanager
    def _refusing(self, batch: Batch) -> Iterator[None]:
        """Raise UnsupportedModelError if the block fails, but neither the sink nor the plain model does."""
        try:
            yield
        except (TrakLiteError, torch.OutOfMemoryError) as error:
            if type(error) is UnsupportedModelError and not self._takes_samples_alone:
                try:
                    self.look_at_halves(take_rows(batch, next(self._chunks(batch_size(batch)))))
                except UnsupportedModelError as cause:  # such as samples that depend on each other
                    raise UnsupportedModelError(f"{refusal(error)} {cause}") from error
            raise
        except MODEL_FAILURES as error:
            if error is self._error_of_sink:
                raise
            refuse_machine_failure(error)
            if is_sharded(self._tree or self.model):
                raise  # another forward pass would need the other ranks
            # If the plain forward pass fails too, raise its error instead.
            with torch.no_grad():
                self.terms(batch)
            raise UnsupportedModelError(self._message(error)) from error


def joined_terms(parts: Sequence[OutputTerms]) -> OutputTerms:
    """Concatenate the terms of a batch's chunks."""
    if len(parts) == 1:
        return parts[0]
    return OutputTerms(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


@contextmanager
def _private_buffers(tree: ModelTree) -> Iterator[None]:
    """Replace the buffers of modules in train mode by copies inside the block."""
    owners = [(m, dict(m._buffers)) for m in tree.modules if m.training and m._buffers]
    try:
        for module, buffers in owners:
            module._buffers.update({k: None if v is None else v.detach().clone() for k, v in buffers.items()})
        yield
    finally:
        for module, buffers in owners:
            module._buffers.update(buffers)


def refuse_batch_statistics(tree: ModelTree) -> None:
    """Raise if a batch-normalisation layer would mix the samples of a batch."""
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


def refuse_detached(
    model: nn.Module, task: AbstractModelOutput, batch: Batch, kept: Mapping[str, Tensor]
) -> None:
    """Raise if f is detached from autograd, or if autograd finds a nonzero gradient; called if all of a batch are zero.

    Zeros are right if f does not depend on the kept parameters (an expert that receives no sample).
    """
    parameters = dict(model.named_parameters())
    with differentiating_only(parameters.values(), parameters), torch.enable_grad():
        output = task.evaluate(ModelCall(model), batch).output
        cut_off = not output.requires_grad
        wanted = [parameters[name] for name in kept]
        grads = () if cut_off else torch.autograd.grad(output.sum(), wanted, allow_unused=True)
    if cut_off or any(grad is not None and bool(grad.any()) for grad in grads):
        named = f"f depends on none of the {len(kept)} kept parameters ({list(kept)[:3]})"
        raise UnsupportedModelError(
            f"{named}, so every gradient would be zero. The output function must run the model through model_call, "
            "inside autograd: no detach(), no NumPy, no torch.inference_mode()."
            if cut_off
            else f"{named} in the passes of this gradient computer, but does by autograd: they are read by a Python "
            "reference beside their modules' own attributes (a list, a closure, a partial), or the output function "
            "calls the model itself and not model_call. Use gradient_computer='hook' or 'iterative'."
        )
