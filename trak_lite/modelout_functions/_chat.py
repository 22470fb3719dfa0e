"""Labels of conversations for supervised fine-tuning: the tokens of the assistant's answers. Shapes: T tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions.language_modeling import IGNORED

__all__ = ["response_labels"]

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
    answers = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    if not answers:
        raise InvalidInputError("The conversation has no message of the assistant. Expected at least one.")
    template = template_options.get("chat_template") or tokenizer.get_chat_template(
        tools=template_options.get("tools")
    )
    if _MARKED.search(template):
        found = _rendered(tokenizer, messages, template_options, return_assistant_tokens_mask=True)
        ids, answered = found["input_ids"], [bool(one) for one in found["assistant_masks"]]
    else:
        ids = _rendered(tokenizer, messages, template_options)["input_ids"]
        answered = [False] * len(ids)
        for place in answers:
            start, stop = _answer_span(tokenizer, messages, place, ids, template_options)
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
    place: int,
    ids: Sequence[int],
    options: Mapping[str, Any],
) -> tuple[int, int]:
    """Return the first token of the answer ``messages[place]``, and the first one after it."""
    before = _rendered(tokenizer, messages[:place], options, add_generation_prompt=True)["input_ids"]
    after = _rendered(tokenizer, messages[: place + 1], options)["input_ids"]
    if len(after) <= len(before) or list(ids[: len(after)]) != after or after[: len(before)] != before:
        raise InvalidInputError(
            f"The tokens of message {place} cannot be found: the chat template changes earlier messages, or merges "
            "tokens across messages. Use a template that marks answers with {% generation %}, or make the labels "
            "yourself: -100 outside the answers."
        )
    return len(before), len(after)
