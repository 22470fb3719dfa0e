"""Base class of gradient computers, which stream per-sample gradients of f block by block."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite.core.devices import Float32Products, float32_products
from trak_lite.data.batches import batch_size
from trak_lite.errors import InvalidInputError, UnsupportedModelError
from trak_lite.gradient_computers.parameters import differentiating_only, listed, select_parameters
from trak_lite.gradient_computers.replays import Replays
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall
from trak_lite.types import (
    Batch,
    BlockSink,
    DenseBlock,
    OutputTerms,
    ParameterChoice,
    ParameterShapes,
    by_name,
    collect,
    num_entries,
)


def products_fingerprint(products: Float32Products) -> dict[str, str]:
    """Return the part of a computer's fingerprint that says how float32 products are computed, if not in full."""
    return {} if products == "ieee" else {"float32_products": products}


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
    _replays: Replays | None = None
    """Runs recorded operations in place of a pass; set by computers whose passes can be recorded."""

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
        self.grad_wrt: Sequence[str | type[nn.Module]] | None = None if grad_wrt is None else listed(grad_wrt)

    @abstractmethod
    def load_model_params(self, model: nn.Module) -> None:
        """Use this model for all later calls."""

    @abstractmethod
    def compute_per_sample_grad(self, batch: Batch) -> Mapping[str, Tensor] | Tensor:
        """Return the per-sample gradients of f.

        While :meth:`stream_gradients` calls it, the parameters that ``grad_wrt`` selects require grad, frozen ones too.

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

    @property
    def compares_samples(self) -> bool:
        """Whether f of a sample was seen to depend on the other samples of its batch."""
        return False

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings that change the gradients beyond rounding, as JSON values, for the manifest.

        An autocast dtype is such a setting. The computer's class is not, because all computers give equal gradients.
        """
        return {}

    def name_rows(self, what: str, rows: NDArray[np.int64]) -> None:
        """Record the rows ``(B,)`` of the next batch in the data ``what``, for the error of a later self-check."""
        return

    def run(
        self,
        batch: Batch,
        projector: object,
        setting: Sequence[Hashable],
        work: Callable[[], Sequence[Tensor]],
        to_come: float | None = None,
    ) -> Sequence[Tensor]:
        """Return the tensors that ``work`` computes from a batch by :meth:`stream_gradients`.

        A computer may run recorded operations instead of ``work`` if these give the same bits. That is checked in the
        next batch, on the schedule of the self-check, and by :meth:`confirm`.

        Args:
            batch: The batch, on the model's device.
            projector: What ``work`` projects by.
            setting: All else that ``work`` depends on, compared by value.
            work: Streams the gradients of the batch, and returns what it computes from them.
            to_come: Number of batches that will follow, if it is known.
        """
        if self._replays is None:
            return work()
        return self._replays.run(cast("Any", self), batch, projector, setting, work, to_come)

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Leave the self-check out in the block, whose results are compared with others; they are off its schedule."""
        yield

    def confirm(self, complete: bool = True) -> None:
        """Compare the last recorded operations that :meth:`run` ran, of every shape, with ``work``.

        Call it after the last batch.

        Args:
            complete: ``False`` compares nothing and frees these batches, after a loop that was not finished.

        Raises:
            UnsupportedModelError: If they differ; the attribute ``rows`` of the error names the rows that may be wrong.
        """
        if self._replays is not None:
            with self._products():
                self._replays.confirm(complete)

    def _products(self) -> AbstractContextManager[None]:
        """Return the context for the model and the computations on its gradients: how float32 products are computed."""
        return float32_products(next(self.model.parameters()).device, self.float32_products)

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
        chosen = {} if self.grad_wrt is None else select_parameters(self.model, self.grad_wrt)
        # TRAKer names all parameters, and integers cannot require grad.
        kept = {name: one for name, one in chosen.items() if one.is_floating_point() or one.is_complex()}
        with differentiating_only(kept.values(), kept):
            grads = self.compute_per_sample_grad(batch)
        for name, grad in (self._by_name(grads) if isinstance(grads, Tensor) else grads).items():
            sink(DenseBlock(name, grad.detach()))
        with torch.no_grad():
            terms = self.modelout_fn.evaluate(ModelCall(self.model), batch)
        out_to_loss_grad = self.compute_loss_grad(batch).detach().reshape(-1)
        return OutputTerms(terms.output, out_to_loss_grad, terms.loss_curvature)

    def _by_name(self, grads: Tensor) -> dict[str, Tensor]:
        shapes = self.parameters
        if grads.dim() != 2 or grads.shape[1] != num_entries(shapes):
            raise InvalidInputError(
                f"{type(self).__name__}.compute_per_sample_grad returned shape {tuple(grads.shape)}, expected "
                f"(B, {num_entries(shapes)}): one column per entry of the {len(shapes)} kept parameters."
            )
        return by_name(grads, shapes)


def collect_gradients(computer: AbstractGradientComputer, batch: Batch) -> dict[str, Tensor]:
    """Return a computer's dense gradients ``(B, *parameter.shape)`` by parameter name, in model order."""
    return collected(computer.stream_gradients, computer.parameters, batch)


def collected(
    stream: Callable[[Batch, BlockSink], OutputTerms], shapes: ParameterShapes, batch: Batch
) -> dict[str, Tensor]:
    """Return the dense gradients of the blocks that ``stream`` passes to a sink, by parameter name."""
    count = batch_size(batch)
    grads: dict[str, Tensor] = {}
    stream(batch, lambda block: collect(block, grads, count))
    return {name: grads[name].reshape(count, *shape) for name, shape in shapes.items()}


def refusal(error: UnsupportedModelError) -> str:
    """Return why a gradient computer refused a model, without the last sentence, which names other computers."""
    return re.sub(r" Use [^.]*gradient_computer=.*", "", str(error), flags=re.DOTALL)
