r"""Model output functions of post-training: DPO, reward models, and policy gradients on token sequences.

A row of preferences holds both answers. f is a difference of two numbers, and the loss is that of Bradley and Terry,
:math:`L = -\log \sigma(\beta f - m)`: a function of the scalar f, so q and w exist without approximation.

Shapes: B samples, T positions of an answer (which may differ between the two), V vocabulary.
Source: Rafailov et al. (arXiv:2305.18290), section 4; Ouyang et al. (arXiv:2203.02155), section 3.5.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, cast, final

import torch
from torch import Tensor, nn

from trak_lite.core.devices import full_float32
from trak_lite.core.eval_caches import passes_undone
from trak_lite.core.validate import flag, one_of, positive_real, real_at_least
from trak_lite.data.batches import move_batch
from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions._base import AbstractModelOutput, CallableModelOutput, ModelCall, evaluating
from trak_lite.modelout_functions._inputs import (
    columns_of,
    labels_tensor,
    nan_unless,
    one_column,
    prefixed,
    real_column,
    refuse_invalid,
    tensor_of,
    token_column,
)
from trak_lite.modelout_functions._margins import (
    UniformNoise,
    linear_terms,
    sampled_answers,
    sampled_classes,
    with_labels,
)
from trak_lite.modelout_functions._pairs import SIDES, are_equal
from trak_lite.modelout_functions.language_modeling import IGNORED, aligned_tokens, label_terms
from trak_lite.types import Batch, OutputTerms

_PREFERRED, _MARGIN = "preferred", "margin"
_REFERENCES = ("ref_chosen_logps", "ref_rejected_logps")


class _PreferenceModelOutput(AbstractModelOutput):
    """Difference between the chosen and the rejected answer of each row."""

    needed: ClassVar[tuple[str, ...]]
    """Columns that a batch must have."""
    beta: float = 1.0

    @abstractmethod
    def _difference(self, model_call: ModelCall, fields: dict[str, Any]) -> Tensor:
        """Return f ``(B,)`` of rows whose chosen answer is preferred."""

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        output, margin, preferred = self._parts(model_call, batch)
        if preferred is not None:
            values, _ = real_column({_PREFERRED: preferred}, _PREFERRED, output)
            valid = (values == 0) | (values == 1)
            refuse_invalid(valid, values, expected="0 or 1", what=_PREFERRED)
            sign = (2 * values - 1) * nan_unless(valid, values)
            output, margin = output * sign, margin * sign
        logit = self.beta * output.detach() - margin
        wrong, right = torch.sigmoid(-logit), torch.sigmoid(logit)
        return OutputTerms(output, self.beta * wrong, self.beta**2 * wrong * right)

    def sample_labels(self, model_call: ModelCall, batch: Batch, noise: UniformNoise) -> Batch:
        output, margin, _ = self._parts(model_call, batch)
        drawn = sampled_answers(self.beta * output - margin, noise)
        return {**columns_of(batch, self.needed), _PREFERRED: drawn}

    def _parts(self, model_call: ModelCall, batch: Batch) -> tuple[Tensor, Tensor | float, Any]:
        """Return f ``(B,)`` of rows whose chosen answer is preferred, the margin, and the column ``preferred``."""
        fields = columns_of(batch, self.needed)
        preferred, margin = fields.pop(_PREFERRED, None), fields.pop(_MARGIN, None)
        output = self._difference(model_call, fields)
        # Of equal answers rounding would leave a direction, which counts as much as any in a cosine.
        output = torch.where(are_equal(fields, output), output.detach(), output)
        if margin is None:
            return output, 0.0, preferred
        margin, valid = real_column({_MARGIN: margin}, _MARGIN, output)
        return output * valid, margin, preferred


@final
@dataclass(eq=False, kw_only=True)
class DPOModelOutput(_PreferenceModelOutput):
    r"""Direct preference optimisation: the margin of implicit rewards, divided by beta.

    With the summed log-probabilities of the labelled tokens of the chosen answer c and the rejected answer r, under the
    policy and under a frozen reference:
    :math:`f = \log \pi(c) - \log \pi_\mathrm{ref}(c) - \log \pi(r) + \log \pi_\mathrm{ref}(r)`. The loss is
    :math:`L = -\log \sigma(\beta f)`, so :math:`q = \beta \sigma(-\beta f)` and
    :math:`w = \beta^2 \sigma(\beta f) \sigma(-\beta f)`. A column ``margin`` m (optional) changes :math:`\beta f` to
    :math:`\beta f - m`.

    Batches: a mapping or dataclass with ``chosen_input_ids``, ``chosen_labels``, ``rejected_input_ids`` and
    ``rejected_labels``, each ``(B, T)``, and the reference's log-probabilities ``ref_chosen_logps`` and
    ``ref_rejected_logps``, each ``(B,)``: :func:`reference_columns` computes them. Labels are -100 outside the answer.
    Other columns that begin with ``chosen_`` or ``rejected_`` (an attention mask) are inputs of that answer, without
    the prefix; columns without prefix are inputs of both. ``preferred`` (0 or 1 per row, optional) is 0 where the
    rejected answer is preferred.

    Source: Rafailov et al. (arXiv:2305.18290), equation 7. Columns are named as in TRL.
    """

    name: ClassVar[str] = "dpo"
    needed: ClassVar[tuple[str, ...]] = (
        "chosen_input_ids",
        "chosen_labels",
        "rejected_input_ids",
        "rejected_labels",
        *_REFERENCES,
    )

    beta: float = 0.1
    """Factor of the difference of log-probabilities in the loss, above 0."""
    _checks: ClassVar = {"beta": positive_real}

    def _difference(self, model_call: ModelCall, fields: dict[str, Any]) -> Tensor:
        chosen, rejected = _answers_log_probs(model_call, fields)
        for name, sign in zip(_REFERENCES, (-1.0, 1.0), strict=True):
            reference, valid = real_column(fields, name, chosen)
            chosen = (chosen + sign * reference) * valid
        return chosen - rejected


@final
class RewardModelOutput(_PreferenceModelOutput):
    r"""Reward models: the score of the chosen answer minus that of the rejected one.

    :math:`f = s(c) - s(r)` and :math:`L = -\log \sigma(f - m)` with the margin m of the row (0 without one), so
    :math:`q = \sigma(m - f)` and :math:`w = q (1 - q)`.

    Batches: a mapping or dataclass with ``chosen_input_ids`` and ``rejected_input_ids``. Columns that begin with
    ``chosen_`` or ``rejected_`` are inputs of that answer, without the prefix; columns without prefix are inputs of
    both. ``margin`` ``(B,)`` is optional, and so is ``preferred``, which is 0 where the rejected answer is preferred.
    The model returns one score per text, as ``(B,)`` or ``(B, 1)`` logits.

    Source: Ouyang et al. (arXiv:2203.02155), section 3.5; the margin: Touvron et al. (arXiv:2307.09288), section 3.2.2.
    """

    name: ClassVar[str] = "reward_modeling"
    needed: ClassVar[tuple[str, ...]] = ("chosen_input_ids", "rejected_input_ids")

    def _difference(self, model_call: ModelCall, fields: dict[str, Any]) -> Tensor:
        chosen, rejected = (
            one_column(
                tensor_of(model_call(**prefixed(fields, side, SIDES)), "logits"),
                "The model gave scores of shape",
                hint=": one score per text (num_labels=1).",
            )
            for side in SIDES
        )
        return chosen - rejected


@final
class AnswerDifferenceModelOutput(_PreferenceModelOutput):
    r"""Log-probability of one answer minus that of another, after the same or different prompts.

    :math:`f = \log p(c) - \log p(r)`, each a sum over labelled tokens. It is meant as a question about a language model
    (:class:`QuestionsModelOutput`). As a training loss, it is DPO's without a reference: :math:`L = -\log \sigma(f)`,
    :math:`q = \sigma(-f)`, :math:`w = q (1 - q)`.

    Batches: as for :class:`DPOModelOutput`, without the reference.
    """

    name: ClassVar[str] = "answer_difference"
    needed: ClassVar[tuple[str, ...]] = tuple(
        name for name in DPOModelOutput.needed if name not in _REFERENCES
    )

    def _difference(self, model_call: ModelCall, fields: dict[str, Any]) -> Tensor:
        chosen, rejected = _answers_log_probs(model_call, fields)
        return chosen - rejected


def reference_columns(
    reference: nn.Module, batches: Iterable[Batch], *, device: str | torch.device | None = None
) -> dict[str, Tensor]:
    """Return the log-probabilities of all answers under a reference model, for :class:`DPOModelOutput`.

    The model runs in eval mode without gradients, autocast and TF32, and its modes are restored. With a PEFT model,
    call this inside ``model.disable_adapter()`` to use the base model as the reference.

    Args:
        reference: The frozen reference model.
        batches: The rows in order (a list of batches or a loader without shuffling), with the columns of
            :class:`DPOModelOutput`, apart from those that are computed here.
        device: Device of the batches; ``None`` uses that of the model's first parameter.

    Returns:
        ``ref_chosen_logps`` and ``ref_rejected_logps``, each ``(N,)`` on the CPU.

    Raises:
        InvalidInputError: If there is no batch, or one lacks a column.
    """
    torch_device = next(reference.parameters()).device if device is None else torch.device(device)
    needed = AnswerDifferenceModelOutput.needed
    pairs: list[tuple[Tensor, Tensor]] = []
    with evaluating(reference), full_float32(torch_device):
        for batch in batches:
            fields = columns_of(move_batch(batch, torch_device), needed)
            answers = {name: value for name, value in fields.items() if name not in (_PREFERRED, _MARGIN)}
            with passes_undone(reference):
                pairs.append(_answers_log_probs(ModelCall(reference), answers))
    if not pairs:
        raise InvalidInputError("There is no batch. Expected the rows in order, in at least one batch.")
    columns = (torch.cat([pair[side].cpu() for pair in pairs]) for side in range(2))
    return dict(zip(_REFERENCES, columns, strict=True))


def _answers_log_probs(model_call: ModelCall, fields: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the summed log p of the labelled tokens of the chosen and of the rejected answers, each ``(B,)``."""
    fields = {name: value for name, value in fields.items() if name not in _REFERENCES}
    log_probs = []
    for side in SIDES:
        inputs = prefixed(fields, side, SIDES)
        labels = labels_tensor(inputs.pop("labels"), "(B, T)", f"The column '{side}labels' is")
        logits, labels = aligned_tokens(model_call(**inputs), labels, shift=True, what=f"{side}labels")
        log_probs.append(label_terms(logits, labels)[0].sum(1))
    return log_probs[0], log_probs[1]


_ADVANTAGES, _OLD, _REFERENCE = "advantages", "old_logps", "ref_logps"
_NEEDED = ("labels", _ADVANTAGES)


def _ends(**named: Any) -> tuple[float, float] | None:
    """Return the numbers below and above of the one keyword value; raise if they are none."""
    ((name, clip),) = named.items()
    if clip is None:
        return None
    ends = [clip, clip] if isinstance(clip, int | float) else list(clip)
    if len(ends) != 2:
        raise InvalidInputError(f"{name} must be a number, two numbers (below, above) or None, got {clip!r}.")
    low, high = (real_at_least(0.0, **{name: end}) for end in ends)
    if low > 1:
        raise InvalidInputError(f"{name} must be at most 1 below the ratio 1, got {clip!r}.")
    return low, high


@final
@dataclass(eq=False, kw_only=True)
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
    has_curvature = False

    clip: float | Sequence[float] | None = None
    """c, or two numbers below and above; ``None`` does not clip the ratio. Needs ``old_logps``."""
    kl_weight: float = 0.0
    """k. Above 0 it needs ``ref_logps``."""
    reduction: Literal["sum", "mean"] = "sum"
    """Whether f is the sum over tokens or their mean."""
    temperature: float = 1.0
    """Divisor of the logits."""
    kl_correction: bool = False
    """Multiply the divergence of every token by its ratio."""
    _checks: ClassVar = {
        "clip": _ends,
        "kl_weight": partial(real_at_least, 0.0),
        "reduction": partial(one_of, ("sum", "mean")),
        "temperature": positive_real,
        "kl_correction": flag,
    }

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
            low, high = cast("tuple[float, float]", self.clip)
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
    task_columns = {"labels", _ADVANTAGES, _OLD, _REFERENCE}
    labels = labels_tensor(fields["labels"], "(B, T)")
    answer = model_call(**{name: value for name, value in fields.items() if name not in task_columns})
    logits, labels = aligned_tokens(answer, labels, shift=True)
    return logits / temperature, labels


_MARKED = re.compile(r"\{%-?\s*generation\b")
"""Templates mark the assistant's tokens with this block."""


def response_labels(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], **template_options: Any
) -> dict[str, Tensor]:
    """Return the tokens of a conversation, and labels that are -100 outside the assistant's answers.

    If the chat template marks the answers (``{% generation %}``), these tokens are labelled. Otherwise an answer is
    what the template adds to the conversation before it, after the prompt for an answer: the end of the turn is part of
    it.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        messages: The conversation: mappings with ``role`` and ``content``, at least one with the role ``assistant``.
        **template_options: Further arguments of ``tokenizer.apply_chat_template``, for example ``tools``.

    Returns:
        ``input_ids`` and ``labels``, each ``(T,)`` int64, as one sample of ``task="causal_language_modeling"``.

    Raises:
        InvalidInputError: If no message is the assistant's, or the tokens of an answer cannot be found because the
            template changes earlier messages.
    """
    answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if not answers:
        raise InvalidInputError("The conversation has no message of the assistant. Expected at least one.")
    template = template_options.get("chat_template") or tokenizer.get_chat_template(
        tools=template_options.get("tools")
    )
    if _MARKED.search(template):
        rendered = _rendered(tokenizer, messages, template_options, return_assistant_tokens_mask=True)
        ids, answered = rendered["input_ids"], [bool(one) for one in rendered["assistant_masks"]]
    else:
        ids = _rendered(tokenizer, messages, template_options)["input_ids"]
        answered = [False] * len(ids)
        for index in answers:
            start, stop = _answer_span(tokenizer, messages, index, ids, template_options)
            answered[start:stop] = [True] * (stop - start)
    tokens = torch.tensor(ids, dtype=torch.int64, device="cpu")
    labels = tokens.masked_fill(~torch.tensor(answered, dtype=torch.bool, device="cpu"), IGNORED)
    return {"input_ids": tokens, "labels": labels}


def _rendered(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], **more: Any
) -> Any:
    """Return what the chat template gives for a conversation: at least ``input_ids``, a list."""
    return tokenizer.apply_chat_template(
        list(messages), **{**options, "tokenize": True, "return_dict": True, **more}
    )


def _answer_span(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    index: int,
    ids: Sequence[int],
    options: Mapping[str, Any],
) -> tuple[int, int]:
    """Return the first token of the answer ``messages[index]``, and the first one after it."""
    before = _rendered(tokenizer, messages[:index], options, add_generation_prompt=True)["input_ids"]
    after = _rendered(tokenizer, messages[: index + 1], options)["input_ids"]
    if len(after) <= len(before) or list(ids[: len(after)]) != after or after[: len(before)] != before:
        raise InvalidInputError(
            f"The tokens of message {index} cannot be found: the chat template changes earlier messages, or merges "
            "tokens across messages. Use a template that marks answers with {% generation %}, or make the labels "
            "yourself: -100 outside the answers."
        )
    return len(before), len(after)
