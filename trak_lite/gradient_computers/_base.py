"""The contract of a gradient computer: per-sample gradients of f, streamed block by block."""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trak_lite._batches import batch_size
from trak_lite._validate import known_names
from trak_lite.errors import InvalidInputError, UnsupportedModelError
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall
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
    "collect_gradients",
    "differentiating_only",
    "refuse_batch_statistics",
    "select_parameters",
]


class AbstractGradientComputer(ABC):
    """Per-sample gradients of a model output function with respect to the kept parameters.

    A native computer overrides :meth:`stream_gradients`. A computer written for the original TRAK, which
    defines ``load_model_params``, ``compute_per_sample_grad`` and ``compute_loss_grad``, works unchanged:
    its collected gradients are streamed parameter by parameter.

    Laws: row i is the gradient of f(z_i) alone, whatever else is in the batch; parameters come under their
    canonical name (the first in ``named_parameters()`` order); a kept parameter that f does not depend on
    has gradient zero; the model comes back with the weights, mode and flags it had.
    """

    @abstractmethod
    def __init__(
        self,
        model: nn.Module,
        task: AbstractModelOutput,
        grad_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        grad_wrt: Iterable[str] | None = None,
    ) -> None:
        """Store the settings (the original TRAK's signature).

        Args:
            model: The module whose parameters are differentiated; it is not copied.
            task: Model output function.
            grad_dim: P, if the caller wants it checked.
            dtype: Accepted for the original's signature; gradients keep their parameter's dtype.
            device: Accepted for the original's signature; gradients live where the model lives.
            grad_wrt: Names of the parameters to keep gradients for; ``None`` keeps those that require grad.
        """
        self.model = model
        self.modelout_fn = task
        self.grad_dim = grad_dim
        self.dtype = dtype
        self.device = device
        self.grad_wrt = (
            None if grad_wrt is None else [grad_wrt] if isinstance(grad_wrt, str) else list(grad_wrt)
        )

    @abstractmethod
    def load_model_params(self, model: nn.Module) -> None:
        """Differentiate this model's parameters from now on."""

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

        The computers agree with each other, so which one it is does not belong here; an autocast dtype does.
        """
        return {}

    def stream_gradients(self, batch: Batch, sink: BlockSink) -> OutputTerms:
        """Pass the gradient blocks of a batch to ``sink`` as they come, in any order.

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
        """Cut a ``(B, P)`` tensor into the parameters it is made of."""
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


def select_parameters(model: nn.Module, grad_wrt: Iterable[str] | None) -> dict[str, nn.Parameter]:
    """Return the parameters to keep gradients for, by canonical name, in model order.

    Args:
        model: The module.
        grad_wrt: Names as in ``named_parameters``, or patterns of them (``"layers.*.weight"``); the name of a
            tied weight stands for the weight that it is tied to. ``None`` selects every parameter that requires grad.

    Raises:
        InvalidInputError: If a name is unknown, or nothing is selected.
    """
    canonical = dict(model.named_parameters())
    if grad_wrt is None:
        selected = {name: p for name, p in canonical.items() if p.requires_grad}
        if not selected:
            raise InvalidInputError(
                f"No parameter of {type(model).__name__} requires grad, so there is nothing to differentiate. "
                "Name the parameters to keep in grad_wrt; frozen ones are allowed there."
            )
        return selected
    every_name = dict(model.named_parameters(remove_duplicate=False))
    given = [grad_wrt] if isinstance(grad_wrt, str) else list(grad_wrt)
    matched = {name: fnmatch.filter(every_name, name) for name in given if any(c in name for c in "*?[")}
    names = known_names(
        [name for pattern in given for name in matched.get(pattern) or [pattern]],
        every_name.keys(),
        what="parameter names in grad_wrt",
    )
    wanted = {id(every_name[name]) for name in names}
    if not wanted:
        raise InvalidInputError(
            "grad_wrt is empty. Name at least one parameter, or leave it out to keep all."
        )
    return {name: p for name, p in canonical.items() if id(p) in wanted}


@contextmanager
def differentiating_only(model: nn.Module, kept: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Let exactly the kept parameters require grad inside the block, so that no other gradient is formed."""
    flags = [(p, p.requires_grad) for p in model.parameters()]
    wanted = {id(p) for p in kept.values()}
    try:
        for p, _ in flags:
            p.requires_grad_(id(p) in wanted)
        yield
    finally:
        for p, flag in flags:
            p.requires_grad_(flag)


def refuse_batch_statistics(model: nn.Module) -> None:
    """Raise if a layer would mix the samples of a batch.

    Raises:
        UnsupportedModelError: Names the batch-normalisation layers that are in train mode.
    """
    mixing = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and (module.training or module.running_mean is None)
        and not isinstance(module, nn.modules.instancenorm._InstanceNorm)
    ]
    if mixing:
        raise UnsupportedModelError(
            f"{mixing[:5]} normalise over the batch, so a sample's gradient would depend on the other samples. "
            "Call model.eval() and keep running statistics, or replace these layers (nn.GroupNorm)."
        )


def collect_gradients(computer: AbstractGradientComputer, batch: Batch) -> dict[str, Tensor]:
    """Return what a computer streams as dense gradients ``(B, *parameter.shape)`` by name, in model order."""
    shapes = computer.parameters
    count = batch_size(batch)
    found: dict[str, Tensor] = {}

    def keep(block: GradientBlock) -> None:
        rows = block.dense()
        if rows.shape[0] == count:
            found[block.name] = rows
            return
        whole = found.setdefault(block.name, rows.new_zeros(count, rows.shape[1]))
        whole[block.start : block.start + rows.shape[0]] = rows

    computer.stream_gradients(batch, keep)
    return {name: found[name].reshape(count, *shape) for name, shape in shapes.items()}


def refuse_detached(
    model: nn.Module, task: AbstractModelOutput, batch: Batch, kept: Mapping[str, Tensor]
) -> None:
    """Raise if a computer found no gradient where there is one, or f is cut off from the whole model.

    Called only when every gradient of a batch came out as zero. That is right where f really does not depend on
    the kept parameters (an expert that no sample is sent to), and wrong where f was cut off from autograd.

    Raises:
        UnsupportedModelError: If f is cut off, or autograd finds a gradient.
    """
    parameters = dict(model.named_parameters())
    with differentiating_only(model, parameters), torch.enable_grad():
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


def autocast(model: nn.Module, dtype: torch.dtype | None) -> Any:
    """Return the context that runs a model's forward pass in ``dtype``, or as it is for ``None``."""
    if dtype is None:
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype=dtype)


def autocast_fingerprint(dtype: torch.dtype | None) -> dict[str, Any]:
    """Return what a manifest says of an autocast dtype: nothing where there is none."""
    return {} if dtype is None else {"autocast_dtype": str(dtype).removeprefix("torch.")}


def check_terms(terms: OutputTerms, num_samples: int, task: AbstractModelOutput) -> OutputTerms:
    """Return the terms if each has one number per sample.

    Raises:
        InvalidInputError: Names the term with the wrong shape.
    """
    for name, value in zip(terms._fields, terms, strict=True):
        if tuple(value.shape) != (num_samples,):
            raise InvalidInputError(
                f"{type(task).__name__} returned {name} of shape {tuple(value.shape)} for a batch of {num_samples} "
                f"samples, expected ({num_samples},): one number per sample. Do not reduce over the batch."
            )
    return terms
