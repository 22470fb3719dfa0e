"""The contract of a model output function: f, q and w of every sample from one forward pass."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trak_lite._batches import flatten_batch
from trak_lite.types import Batch, OutputTerms

__all__ = ["AbstractModelOutput", "ModelCall"]


class ModelCall:
    """Calls a model, with the parameters and buffers it holds or with others in their place.

    A model output function receives one of these instead of the model, so that the same function
    serves gradient computers that trace the model (``torch.func``) and computers that run it as it is.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor] | None = None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Hold the model and, if given, the tensors to run it with.

        Args:
            model: The module to call.
            parameters: Tensors by parameter name that replace the model's own; ``None`` calls the model as it is.
            buffers: Tensors by buffer name that replace the model's own.
        """
        self.model = model
        self._replaced = parameters is not None or buffers is not None
        self.parameters: Mapping[str, Tensor] = (
            dict(model.named_parameters()) if parameters is None else parameters
        )
        self.buffers: Mapping[str, Tensor] = dict(model.named_buffers()) if buffers is None else buffers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass."""
        if not self._replaced:
            return self.model(*args, **kwargs)
        return functional_call(self.model, (dict(self.parameters), dict(self.buffers)), args, kwargs)


class AbstractModelOutput(ABC):
    r"""Model output function :math:`f(z; \theta)`, its out-to-loss gradient q and its loss curvature w.

    A subclass defines :meth:`evaluate`. A subclass written for the original TRAK, which defines
    ``get_output`` (one sample without batch axis) and ``get_out_to_loss_grad`` instead, works unchanged.

    Laws, held by ``trak_lite.testing.ModelOutputTests``: with L the loss that belongs to f,
    :math:`\nabla L = -q\,\nabla f` and :math:`w = \partial^2 L / \partial f^2`; the terms of a sample do not
    depend on the other samples of its batch; a sample that has no valid terms (a label out of range) raises
    :class:`~trak_lite.errors.InvalidInputError` when run eagerly and gives NaN under ``torch.func`` transforms.

    Source: TRAK (arXiv:2303.14186), sections 2 and 3.4.
    """

    name: ClassVar[str] = ""
    """The task's name for ``task=...``; empty for a user's own class."""
    version: ClassVar[int] = 1
    """Raised whenever the numbers of a built-in function change; part of the store's fingerprint."""
    has_curvature: bool = True
    """False where the loss is linear in f (w is zero everywhere), so that no curvature weighting applies."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a subclass that defines neither contract."""
        super().__init_subclass__(**kwargs)
        native = cls.evaluate is not AbstractModelOutput.evaluate
        original = (
            cls.get_output is not AbstractModelOutput.get_output
            and cls.get_out_to_loss_grad is not AbstractModelOutput.get_out_to_loss_grad
        )
        if not (native or original):
            raise TypeError(
                f"{cls.__name__} must define evaluate(model_call, batch), "
                "or both get_output and get_out_to_loss_grad as in the original TRAK."
            )

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        """Return f, q and w of every sample of the batch from one forward pass where possible.

        Args:
            model_call: Calls the model; take ``model_call(*inputs)`` for the forward pass.
            batch: B samples.

        Returns:
            Three tensors of shape ``(B,)``; q and w are detached.

        Raises:
            InvalidInputError: If the batch is not what the task expects.
        """
        return _terms_of_original(self, model_call, batch)

    def get_output(
        self,
        model: nn.Module,
        weights: Mapping[str, Tensor] | None,
        buffers: Mapping[str, Tensor] | None,
        *sample: Tensor,
    ) -> Tensor:
        """Return f of one sample without a batch axis, as a scalar (the original TRAK's method)."""
        batch = tuple(part.unsqueeze(0) for part in sample)
        return self.evaluate(ModelCall(model, weights, buffers), batch).output.sum()

    def get_out_to_loss_grad(
        self,
        model: nn.Module,
        weights: Mapping[str, Tensor] | None,
        buffers: Mapping[str, Tensor] | None,
        batch: Batch,
    ) -> Tensor:
        """Return q of shape ``(B, 1)`` (the original TRAK's method)."""
        terms = self.evaluate(ModelCall(model, weights, buffers), batch)
        return terms.out_to_loss_grad.unsqueeze(-1)

    def settings(self) -> dict[str, Any]:
        """Return the JSON values that change the numbers (a temperature, a choice of f), for the fingerprint."""
        return {}


def _terms_of_original(task: AbstractModelOutput, call: ModelCall, batch: Batch) -> OutputTerms:
    """Evaluate a task that defines the original TRAK's two methods, sample by sample; w is taken as zero."""
    leaves, rebuild = flatten_batch(batch)

    def parts(index: int) -> tuple[Any, ...]:
        sample = rebuild([leaf[index] for leaf in leaves])
        return tuple(sample) if isinstance(sample, tuple | list) else (sample,)

    count = leaves[0].shape[0]
    outputs = [task.get_output(call.model, call.parameters, call.buffers, *parts(i)) for i in range(count)]
    output = torch.stack([value.reshape(()) for value in outputs])
    with torch.no_grad():
        grad = task.get_out_to_loss_grad(call.model, call.parameters, call.buffers, batch)
    grad = grad.detach().reshape(count)
    return OutputTerms(output, grad, torch.zeros_like(grad))


TaskFunction = Callable[[ModelCall, Batch], Tensor]
