r"""Products of the Gauss-Newton matrix of the training loss with vectors, without forming the matrix.

The matrix is :math:`\sum_i J_i^\top H_i J_i`, with the Jacobian J of the model's outputs and the Hessian H of a row's
loss in these outputs (Schraudolph, "Fast curvature matrix-vector products", 2002; Martens, arXiv:1412.1193, section 8).

Shapes: B samples of a batch, m vectors, P parameter entries.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import cache, cached_property
from typing import Any, TypeAlias, TypeVar, final

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.func import vjp as torch_vjp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from trak_lite.core.devices import full_float32, precise, switched_off
from trak_lite.core.eval_caches import StateBeforePass, passes_undone
from trak_lite.core.random import row_noise
from trak_lite.core.validate import some_of
from trak_lite.data.batches import batch_size, with_own_containers
from trak_lite.data.datasets import RowNumbers, Rows
from trak_lite.errors import MODEL_FAILURES, TrakLiteError, UnsupportedModelError, refuse_machine_failure
from trak_lite.gradient_computers import HookGradientComputer, select_parameters
from trak_lite.gradient_computers.parameters import differentiating_only
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall
from trak_lite.modelout_functions._base import LossModelOutput
from trak_lite.projectors import NoOpProjector
from trak_lite.types import Batch, OutputTerms, ParameterShapes, by_name

logger = logging.getLogger(__name__)

_TANGENTS = 1024
"""Samples times vectors that go through the model at once, if their outputs fit in :data:`_BYTES`."""
_BYTES = 2**28
"""Bytes of the outputs and gradients of the vectors that go through the model at once; several copies are made."""

_FORWARD_MODE = threading.Lock()
"""The level of torch's forward mode is that of the process: of two threads, one would end that of the other."""

Named: TypeAlias = dict[str, Tensor]
Outputs: TypeAlias = tuple[Tensor, ...]
_In = TypeVar("_In")
_Out = TypeVar("_Out")


@final
@dataclass(eq=False)
class CurvatureProducts:
    r"""Multiplies vectors by the Gauss-Newton matrix of the loss of some train rows, or by an estimate of it.

    The estimate is :math:`\frac1D \sum_{i,d} g_{i,d} g_{i,d}^\top`, where g is the loss gradient of row i for the d-th
    label drawn from the model. The gradients of a batch are computed once for all vectors. They are the same in every
    call, so the matrix is fixed.
    """

    model: nn.Module
    """With the weights and in the mode that its gradients are taken in."""
    task: AbstractModelOutput
    """Defines the loss. If q times the gradient of its f is not the loss gradient, its log-likelihood does."""
    rows: Rows
    parameters: ParameterShapes
    """Shapes of the kept parameters, in model order."""
    _: KW_ONLY
    draws: int | None
    """D, labels per row; ``None`` multiplies by the matrix itself."""
    seed: int
    device: torch.device
    _forward_mode: bool | None = None
    """Whether the model supports forward-mode differentiation; ``None`` before the first product."""
    _checked: bool = False
    """Whether f of a first batch was seen to reach the parameters only through what model calls return."""

    def __call__(self, vectors: Tensor, wanted: RowNumbers, /, *, scale: float = 1.0) -> Tensor:
        """Return the products ``(m, P)`` of vectors ``(m, P)`` with the matrix of some rows, times ``scale``."""
        total = torch.zeros_like(vectors)
        # The other kernels of fused attention, and the fused LSTM of oneDNN, have no second derivative.
        kernels = sdpa_kernel(SDPBackend.MATH) if self.draws is None else nullcontext()
        fused = self.draws is None and any(isinstance(module, nn.RNNBase) for module in self.model.modules())
        with full_float32(self.device), kernels, switched_off(torch.backends.mkldnn, fused):
            for rows, batch in self.rows.moved(wanted, self.device):
                if self.draws is None:
                    self._add(total, vectors, batch)
                for draw in range(self.draws or 0):
                    gradients = self._drawn(rows, batch, draw).to(vectors)
                    total.addmm_(vectors @ gradients.T, gradients)
        return total.mul_(scale / (self.draws or 1))

    @cached_property
    def _computer(self) -> HookGradientComputer:
        return HookGradientComputer(self.model, LossModelOutput(self.task), grad_wrt=list(self.parameters))

    def drawn_gradients(self, wanted: RowNumbers, draws: range) -> Iterator[Tensor]:
        """Yield the loss gradients ``(B, P)`` of some rows for labels drawn from the model, in float32 or better."""
        with full_float32(self.device):
            for rows, batch in self.rows.moved(wanted, self.device):
                yield from (precise(self._drawn(rows, batch, draw)) for draw in draws)

    @torch.no_grad()
    def _drawn(self, rows: RowNumbers, batch: Batch, draw: int) -> Tensor:
        noise = row_noise(rows, seed=self.seed, draw=draw)
        with passes_undone(self.model):
            labelled = self.task.sample_labels(ModelCall(self.model), with_own_containers(batch), noise)
        accumulator = NoOpProjector(device=self.device).accumulator(
            len(rows), model_id=0, parameters=self.parameters
        )
        with torch.enable_grad():
            self._computer.stream_gradients(labelled, accumulator.add)
        return accumulator.features()

    def _add(self, total: Tensor, vectors: Tensor, batch: Batch) -> None:
        try:
            with passes_undone(self.model, always=True) as state:
                task = self.task.log_likelihood() or self.task
                outputs = _ModelOutputs(self.model, task, batch, list(self.parameters), state)
                if not self._checked:
                    outputs.refuse_other_paths()
                    self._checked = True
                item = 4 * (outputs.num_values + vectors.shape[1])
                step = max(1, min(_TANGENTS // batch_size(batch), _BYTES // item))
                for start in range(0, len(vectors), step):
                    part = slice(start, start + step)
                    named = by_name(vectors[part], self.parameters)
                    # In the dtypes of the parameters, which forward mode expects.
                    own = {name: part.to(outputs.values[name].dtype) for name, part in named.items()}
                    products = self._products(outputs, own)
                    whole = [products[name].reshape(len(vectors[part]), -1) for name in self.parameters]
                    total[part] += torch.cat(whole, 1)
        except (TrakLiteError, torch.OutOfMemoryError):
            raise
        except MODEL_FAILURES as error:
            refuse_machine_failure(error)
            said = f"{error!s:.300}".rstrip(". ")
            raise UnsupportedModelError(
                f"torch.func cannot compute Gauss-Newton products of {type(self.model).__name__}: {said}. Switch "
                "gradient checkpointing off if the model uses it. Otherwise use CG(draws=) or EKFAC, which need "
                "gradients of samples only."
            ) from error

    def _products(self, outputs: _ModelOutputs, vectors: Named) -> Named:
        if self._forward_mode is None:
            try:
                outputs.forward({name: part[0] for name, part in vectors.items()})
                self._forward_mode = True
            except (RuntimeError, NotImplementedError) as error:
                refuse_machine_failure(error)
                logger.info(
                    "%s has an operation without forward-mode differentiation (%.200s): Jacobian products are computed "
                    "by two backward passes.",
                    type(self.model).__name__,
                    error,
                )
                self._forward_mode = False
        tangents = outputs.forward if self._forward_mode else outputs.twice_backward
        products: Named = vmap(
            lambda vector: outputs.backward(outputs.curved(tangents(vector))), randomness="same"
        )(vectors)
        return {name: part.detach() for name, part in products.items()}


@final
class _ModelOutputs:
    """The outputs of the model for a batch as a function of the kept parameters, and the loss of the outputs."""

    def __init__(
        self,
        model: nn.Module,
        task: AbstractModelOutput,
        batch: Batch,
        names: Sequence[str],
        state: StateBeforePass,
    ) -> None:
        self._kept = select_parameters(model, list(names))
        self.values = {name: self._kept[name].detach() for name in names}
        self._constants = {name: p.detach() for name, p in model.named_parameters()}
        self._model, self._task, self._batch, self._state = model, task, batch, state
        with torch.no_grad():
            recorded = _Recording(model, self._constants)
            self._terms = self._evaluated(recorded)
        self._calls = recorded.calls
        self._found, self._to_parameters = _vjp(self._outputs, self.values)
        self.num_values = sum(part.numel() for part in self._found)
        """Entries of the outputs of the batch."""

    def refuse_other_paths(self) -> None:
        """Raise ``UnsupportedModelError`` if f depends on a parameter otherwise than through the outputs.

        Such a part of f has no Jacobian here: f of outputs that are detached has its gradient alone. So have outputs
        that still depend on the model's own parameters where others stand for them.
        """
        self._state.restore(always=True)
        parameters = list(self._kept.values())
        with torch.enable_grad(), differentiating_only(self._model.parameters(), self._kept):
            recorded = _Recording(self._model, self._constants)
            self._evaluated(recorded)
            found = [leaf for leaves, _ in recorded.calls for leaf in leaves if _is_real(leaf)]
            if sums := [leaf.sum() for leaf in found if leaf.requires_grad]:
                # The graph of a tensor that the model keeps is needed again.
                gradients = torch.autograd.grad(sums, parameters, allow_unused=True, retain_graph=True)
                kept = [name for name, part in zip(self._kept, gradients, strict=True) if part is not None]
            if sums and kept:
                raise UnsupportedModelError(
                    f"{type(self._model).__name__} reads {some_of(map(repr, kept))} from a tensor that eval() or an "
                    "earlier pass has computed, or through a reference of its own, where the products of CG and LiSSA "
                    "would take the parameter for a constant. Let every pass compute with the parameters of the "
                    "modules, or use EKFAC, or CG(draws=) with a task that draws labels."
                )
            self._state.restore(always=True)
            recorded = _Recording(self._model, None)
            self._evaluated(recorded)
            constant = [leaf.detach() for leaves, _ in recorded.calls for leaf in leaves if _is_real(leaf)]
            f = self._replayed(tuple(constant))
            if not f.requires_grad:
                return
            gradients = torch.autograd.grad(f.sum(), parameters, allow_unused=True)
        beside = [
            name for name, part in zip(self._kept, gradients, strict=True) if part is not None and part.any()
        ]
        if beside:
            raise UnsupportedModelError(
                f"f depends on {some_of(map(repr, beside))} also beside what model calls return (a penalty, an "
                "attribute that the pass sets). The Gauss-Newton matrix of CG and LiSSA would leave this part out. Let "
                "the model return what f reads, or use EKFAC, or CG(draws=) with a task that draws labels."
            )

    def _evaluated(self, call: ModelCall) -> OutputTerms:
        return self._task.evaluate(call, with_own_containers(self._batch))

    def _outputs(self, values: Named) -> Outputs:
        """Return all floating outputs of the model for some values of the kept parameters."""
        self._state.restore(always=True)  # before the pass: f may read what the last one has set
        call = _Recording(self._model, {**self._constants, **values})
        self._evaluated(call)
        return tuple(leaf for leaves, _ in call.calls for leaf in leaves if _is_real(leaf))

    def forward(self, vector: Named) -> Outputs:
        """Return J v by forward-mode differentiation."""
        with forward_mode():
            tangents: Outputs = jvp(self._outputs, (self.values,), (vector,))[1]
        return tangents

    def twice_backward(self, vector: Named) -> Outputs:
        """Return J v as the derivative of u -> J^T u, which is linear."""

        def transposed(cotangents: Outputs) -> Named:
            return _vjp(self._outputs, self.values)[1](cotangents)[0]

        _, back = _vjp(transposed, tuple(torch.zeros_like(part) for part in self._found))
        return back(vector)[0]

    def backward(self, cotangents: Outputs) -> Named:
        """Return J^T u."""
        return self._to_parameters(cotangents)[0]

    def curved(self, tangents: Outputs) -> Outputs:
        """Return the product of the Hessian of the loss in the outputs with a tangent."""
        _, back = _vjp(grad(self._loss), tuple(part.detach() for part in self._found))
        return back(tangents)[0]

    def _loss(self, outputs: Outputs) -> Tensor:
        """Return the summed loss of the outputs, up to a constant, to second order in f."""
        change = self._replayed(outputs) - self._terms.output.detach()
        return (0.5 * self._terms.loss_curvature * change**2 - self._terms.out_to_loss_grad * change).sum()

    def _replayed(self, outputs: Outputs) -> Tensor:
        """Return f of the batch for some outputs of the model."""
        values = iter(outputs)
        calls = [
            ([next(values) if _is_real(leaf) else leaf for leaf in leaves], spec)
            for leaves, spec in self._calls
        ]
        return self._evaluated(_Replay(self._model, calls)).output


def _vjp(function: Callable[[_In], _Out], at: _In) -> tuple[_Out, Callable[[_Out], tuple[_In]]]:
    """Return the value of a function of one argument, and the map from cotangents to its gradient, in a tuple."""
    value, back = torch_vjp(function, at)[:2]
    return value, back


@contextmanager
def forward_mode() -> Iterator[None]:
    """Let one thread at a time use torch's forward mode."""
    with _FORWARD_MODE:
        _use_first()
        yield


@cache
def _use_first() -> None:
    """Use forward mode without torch's own warning from its first use in a process."""
    zero = torch.zeros((), device="cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
        jvp(torch.sin, (zero,), (zero,))


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


@final
class _Recording(ModelCall):
    def __init__(self, model: nn.Module, parameters: Named | None) -> None:
        super().__init__(model, parameters)
        self.calls: list[tuple[list[Any], TreeSpec]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        returned = super().__call__(*args, **kwargs)
        self.calls.append(tree_flatten(returned))
        return returned


@final
class _Replay(ModelCall):
    """Returns recorded outputs, in order, instead of calling the model."""

    def __init__(self, model: nn.Module, calls: Sequence[tuple[list[Any], TreeSpec]]) -> None:
        super().__init__(model)
        self._calls = iter(calls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = next(self._calls)
        return tree_unflatten(leaves, spec)
