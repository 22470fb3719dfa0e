"""Model output function of policy gradients on token sequences. Shapes: B samples, T positions, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from trak_lite._validate import one_of, real_at_least
from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions._base import AbstractModelOutput, ModelCall, UniformNoise
from trak_lite.modelout_functions._inputs import (
    columns_of,
    labels_tensor,
    positive_real,
    real_column,
    token_column,
)
from trak_lite.modelout_functions._margins import linear_terms
from trak_lite.modelout_functions._positions import IGNORED, aligned_tokens, label_terms
from trak_lite.modelout_functions._sampling import sampled_classes, with_labels
from trak_lite.modelout_functions.callable import CallableModelOutput
from trak_lite.types import Batch, OutputTerms

__all__ = ["PolicyGradientModelOutput"]

_ADVANTAGES, _OLD, _REFERENCE = "advantages", "old_logps", "ref_logps"
_NEEDED = ("labels", _ADVANTAGES)


@final
class PolicyGradientModelOutput(AbstractModelOutput):
    r"""Minus the loss of a policy gradient on the tokens of one answer (REINFORCE, PPO, GRPO).

    With the advantage A of the answer, log-probabilities :math:`l_t` of its tokens and the ratio
    :math:`r_t = e^{l_t - l_t^\mathrm{old}}`, f is a sum over the labelled tokens:

    - without ``old_logps``: :math:`f = \sum_t A\, l_t`;
    - with ``old_logps``: :math:`f = \sum_t A\, r_t`;
    - with ``clip=c``: :math:`f = \sum_t \min(A\, r_t, A \operatorname{clip}(r_t, 1 - c, 1 + c))`.

    ``kl_weight=k`` subtracts :math:`k \sum_t (e^{d_t} - d_t - 1)` with :math:`d_t = l_t^\mathrm{ref} - l_t`;
    ``kl_correction`` multiplies each term of this sum by :math:`r_t` (arXiv:2512.02556), whose gradient is that of
    :math:`l_t` without ``old_logps``.
    ``reduction="mean"`` divides by the number of labelled tokens, as the published GRPO does; ``"sum"`` is that of DAPO
    and Dr. GRPO up to a constant. ``temperature`` divides the logits, as in the sampling of the answers. L = -f, so
    q = 1 and w = 0.

    This loss is not a likelihood of labels. ``sample_labels`` draws tokens from the policy, and :meth:`log_likelihood`
    is their log-probability without advantages. The curvature of ``Fisher``, ``EKFAC`` and ``CG`` therefore is the
    Fisher information of the policy, as in the natural policy gradient.

    Batches: a mapping or dataclass with ``labels`` ``(B, T)`` (the input ids, -100 outside the answer) and
    ``advantages``, ``(B,)`` or ``(B, T)``. ``old_logps`` and ``ref_logps`` are ``(B, T)``. Position t of
    these columns belongs to ``labels[t]``; values where the label is -100 are not used. All other columns are keyword
    arguments of the model.

    Source: Shao et al. (arXiv:2402.03300), section 4.1; Kakade, "A natural policy gradient" (NeurIPS 2001).
    """

    name: ClassVar[str] = "policy_gradient"
    _setting_names = ("clip", "kl_weight", "reduction", "temperature", "kl_correction")
    has_curvature: bool = False

    def __init__(
        self,
        *,
        clip: float | Sequence[float] | None = None,
        kl_weight: float = 0.0,
        reduction: Literal["sum", "mean"] = "sum",
        temperature: float = 1.0,
        kl_correction: bool = False,
    ) -> None:
        """Store the settings.

        Args:
            clip: c, or two numbers below and above; ``None`` does not clip the ratio. Needs ``old_logps``.
            kl_weight: k. Above 0 it needs ``ref_logps``.
            reduction: Whether f is the sum over tokens or their mean.
            temperature: Divisor of the logits.
            kl_correction: Multiply the divergence of every token by its ratio.

        Raises:
            InvalidInputError: If a setting is out of range.
        """
        self.clip: tuple[float, float] | None = None
        if clip is not None:
            ends = [clip, clip] if isinstance(clip, int | float) else list(clip)
            if len(ends) != 2:
                raise InvalidInputError(
                    f"clip must be a number, two numbers (below, above) or None, got {clip!r}."
                )
            low, high = (real_at_least(0.0, clip=end) for end in ends)
            if low > 1:
                raise InvalidInputError(f"clip must be at most 1 below the ratio 1, got {clip!r}.")
            self.clip = low, high
        self.kl_weight = real_at_least(0.0, kl_weight=kl_weight)
        self.reduction = one_of(("sum", "mean"), reduction=reduction)
        self.temperature = positive_real(temperature=temperature)
        if not isinstance(kl_correction, bool):
            raise InvalidInputError(f"kl_correction must be True or False, got {kl_correction!r}.")
        self.kl_correction = kl_correction

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        """Return f, q and w; see :meth:`AbstractModelOutput.evaluate`."""
        needed = [*_NEEDED, *([] if self.clip is None else [_OLD]), *([_REFERENCE] if self.kl_weight else [])]
        fields = columns_of(batch, needed)
        logits, labels = _run(model_call, fields, self.temperature)
        log_probs, count = label_terms(logits, labels)
        predicted = labels != IGNORED
        # Without the old policy the ratio is 1, with the gradient of l.
        old = token_column(fields, _OLD, predicted, log_probs) if _OLD in fields else log_probs.detach()
        ratio = (log_probs - old).exp()
        if isinstance(fields[_ADVANTAGES], Tensor) and fields[_ADVANTAGES].dim() == 2:
            advantages = token_column(fields, _ADVANTAGES, predicted, log_probs)
        else:
            values, valid = real_column(fields, _ADVANTAGES, log_probs[:, 0])
            advantages = (values * valid).unsqueeze(1) * predicted
        terms = (ratio if _OLD in fields else log_probs) * advantages
        if self.clip is not None:
            low, high = self.clip
            terms = torch.minimum(terms, ratio.clamp(1 - low, 1 + high) * advantages)
        if self.kl_weight:
            gap = token_column(fields, _REFERENCE, predicted, log_probs) - log_probs
            divergence = gap.exp() - gap - 1
            terms = terms - self.kl_weight * (divergence * ratio if self.kl_correction else divergence)
        output = terms.sum(1)
        return linear_terms(output / count if self.reduction == "mean" else output)

    def sample_labels(self, model_call: ModelCall, batch: Batch, noise: UniformNoise) -> Batch:
        """Draw the tokens of the answers from the policy; see :meth:`AbstractModelOutput.sample_labels`.

        The model's input tokens remain those of the data.
        """
        fields = columns_of(batch, _NEEDED)
        logits, labels = _run(model_call, fields, self.temperature)
        drawn = fields["labels"].clone()
        drawn[:, 1:] = torch.where(labels == IGNORED, labels, sampled_classes(logits, noise))
        return with_labels(batch, drawn)

    def log_likelihood(self) -> AbstractModelOutput:
        """Return the sum of log p of the tokens, without advantages."""
        return CallableModelOutput(self._log_prob)

    def _log_prob(self, model_call: ModelCall, batch: Batch) -> Tensor:
        """Return the sum of log p of the labelled tokens ``(B,)``."""
        logits, labels = _run(model_call, columns_of(batch, _NEEDED), self.temperature)
        return label_terms(logits, labels)[0].sum(1)


def _run(model_call: ModelCall, fields: dict[str, Any], temperature: float) -> tuple[Tensor, Tensor]:
    """Call the model; return logits ``(B, T - 1, V)`` over temperature, and the labels ``(B, T - 1)`` they predict."""
    own = {"labels", _ADVANTAGES, _OLD, _REFERENCE}
    labels = labels_tensor(fields["labels"], "(B, T)")
    answer = model_call(**{name: value for name, value in fields.items() if name not in own})
    logits, labels = aligned_tokens(answer, labels, shift=True)
    return logits / temperature, labels
