"""Model output function defined by a custom function."""

from __future__ import annotations

from typing import final

from torch import Tensor

from trak_lite.data.batches import batch_size
from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions._base import AbstractModelOutput, ModelCall, TaskFunction
from trak_lite.modelout_functions._inputs import precise, shape_texts
from trak_lite.modelout_functions._margins import linear_terms
from trak_lite.types import Batch, OutputTerms

__all__ = ["CallableModelOutput"]


@final
class CallableModelOutput(AbstractModelOutput):
    """Computes f by ``function(model_call, batch) -> (B,)``. The loss is L = -f, so q = 1 and w = 0.

    The function calls the model through ``model_call(*inputs)``. Its value for a sample must not depend on
    the other samples of the batch. For another loss write a class with :meth:`AbstractModelOutput.evaluate`.
    """

    has_curvature: bool = False

    def __init__(self, function: TaskFunction) -> None:
        """Store the function.

        Args:
            function: Returns f of every sample, given a :class:`ModelCall` and a batch.

        Raises:
            InvalidInputError: If it cannot be called.
        """
        if not callable(function):
            raise InvalidInputError(
                f"The model output function is a {type(function).__name__}. Expected a callable "
                "f(model_call, batch)."
            )
        self.function = function

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        """Return f, q and w; see :meth:`AbstractModelOutput.evaluate`."""
        output = self.function(model_call, batch)
        expected = (batch_size(batch),)
        if not isinstance(output, Tensor) or output.shape != expected:
            shape = output.shape if isinstance(output, Tensor) else ()
            returned, wanted = shape_texts(shape, expected)
            seen = f"shape {returned}" if isinstance(output, Tensor) else type(output).__name__
            raise InvalidInputError(
                f"The model output function returned {seen}. Expected a tensor of shape {wanted}, one "
                "number per sample and no mean or sum over the batch."
            )
        return linear_terms(precise(output, what="The model output function's result"))
