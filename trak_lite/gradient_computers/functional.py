"""Per-sample gradients by ``torch.func``: ``vmap`` over samples of ``grad`` of f.

Source: TRAK (arXiv:2303.14186), section 3.2; the transforms are those of ``torch.func``.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.func import grad, vmap

from trak_lite.data.batches import columns_of, flatten_batch, take_rows
from trak_lite.gradient_computers.parameters import Kept
from trak_lite.gradient_computers.streaming import AbstractStreamingComputer, joined_terms, refuse_detached
from trak_lite.types import Batch, BlockSink, DenseBlock, OutputTerms


class FunctionalGradientComputer(AbstractStreamingComputer):
    """Vectorised per-sample gradients: ``vmap(grad(f))`` over the kept parameters; one pass gives f, q and g.

    Only kept parameters are differentiated; the other parameters and the buffers are constants. Results are detached.
    Subclassing is supported, because code written for the original TRAK subclasses its gradient computer.

    ``torch.func.functional_call`` replaces a parameter only in the attribute of its module. If a model reads the
    parameter by another reference (a list, a closure, a partial), that part of the gradient is lost, and the self-check
    refuses the model.
    """

    advice = (
        "A parameter may be read by a Python reference beside its module's own attribute (a list, a closure, a "
        "partial), where torch.func.functional_call does not replace it. Use HookGradientComputer "
        "(gradient_computer='hook') or IterativeGradientComputer ('iterative')."
    )
    _calls_functions: ClassVar[bool] = True
    _takes_samples_alone: ClassVar[bool] = True
    _randomness: Literal["different", "same"] = "different"
    """How ``vmap`` shares random numbers among samples (dropout in train mode)."""
    _weights: dict[str, Tensor] | None = None
    _buffers: dict[str, Tensor] | None = None

    @property
    def func_weights(self) -> dict[str, Tensor]:
        """Parameters by name, detached: the model's, unless a subclass assigned others (the original's attribute)."""
        weights = self._weights or dict(self.model.named_parameters())
        return {name: p.detach() for name, p in weights.items()}

    @func_weights.setter
    def func_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = dict(weights)

    @property
    def func_buffers(self) -> dict[str, Tensor]:
        """Buffers by name: the model's, unless a subclass assigned others (the original's attribute)."""
        return self._buffers or dict(self.model.named_buffers())

    @func_buffers.setter
    def func_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        self._buffers = dict(buffers)

    @property
    def differentiates_the_model(self) -> bool:
        """Whether no method is overridden, and no other weights or buffers are assigned."""
        return super().differentiates_the_model and self._weights is None and self._buffers is None

    def repeated(self, batch: Batch, positions: Sequence[int]) -> Iterator[tuple[Self, Batch, list[int]]]:
        """Yield computers that stream each sample alone, with the random numbers of a pass over that sample alone."""
        for again, part, rows in super().repeated(batch, positions):
            again._randomness = "same"
            yield again, part, rows

    def _stream_samples(self, batch: Batch, count: int, kept: Kept, sink: BlockSink) -> OutputTerms:
        weights, buffers = self.func_weights, self.func_buffers
        values = {name: weights[name] for name in kept}

        def value(parameters: Mapping[str, Tensor], sample: Sequence[Tensor]) -> tuple[Tensor, OutputTerms]:
            one = rebuild([leaf.unsqueeze(0) for leaf in sample])
            terms = self.terms(one, self._call({**weights, **parameters}, buffers))
            numbers = OutputTerms(*(term.squeeze(0) for term in terms))
            return numbers.output, OutputTerms(*(number.detach() for number in numbers))

        transformed = vmap(grad(value, has_aux=True), in_dims=(None, 0), randomness=self._randomness)
        all_terms: list[OutputTerms] = []
        any_nonzero = False
        # vmap divides tensors only, so that samples with other columns are computed one by one.
        singly = bool(columns_of(batch))
        for rows in [slice(row, row + 1) for row in range(count)] if singly else self._chunks(count):
            part = take_rows(batch, rows)
            leaves, rebuild = flatten_batch(part)
            with self._refusing(part):
                grads, terms = transformed(values, leaves)
            all_terms.append(terms)
            any_nonzero = any_nonzero or any(bool(grad.any()) for grad in grads.values())
            for name in list(grads):
                # Detach: a parameter that is not kept but is read by a Python reference adds an autograd graph.
                sink(DenseBlock(name, grads.pop(name).detach(), rows.start))
        if not any_nonzero:
            refuse_detached(self.model, self.modelout_fn, batch, kept)
        return joined_terms(all_terms)

    def _message(self, error: BaseException) -> str:
        return (
            f"torch.func.vmap cannot transform {type(self.model).__name__}: {_operation(error)}. The model itself "
            "runs. Use IterativeGradientComputer (gradient_computer='iterative'), which needs only autograd."
        )


def _operation(error: BaseException) -> str:
    """Return the error's first line, the operator if the message names one, and the source line outside torch."""
    message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    operator = re.search(r"aten::\w+|\btorch\.[\w.]+", str(error))
    inside = str(Path(torch.__file__).parent)
    package = str(Path(__file__).parent.parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((inside, package)) and frame.line
    ]
    location = (
        f" at `{frames[-1].line}` ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    )
    named = f"{operator.group(0)}: " if operator and operator.group(0) not in message else ""
    return f"{named}{message.rstrip('.')}{location}"
