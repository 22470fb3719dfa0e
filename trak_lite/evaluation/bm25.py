"""BM25 similarity of train and target texts, a baseline for attribution that uses no model.

Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009), with Lucene's inverse
document frequency, which is never negative.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trak_lite.errors import InvalidInputError

Text = str | Sequence[Hashable]
"""A text, which is split into lower-case words, or its tokens (also a one-dimensional array or tensor)."""


def bm25(
    train: Sequence[Text], targets: Sequence[Text], *, k1: float = 1.5, b: float = 0.75
) -> NDArray[np.float32]:
    r"""Return the BM25 score of every train text for every target text as the query.

    :math:`\sum_t \log\left(1 + \frac{N - n_t + .5}{n_t + .5}\right)
    \frac{f_t (k_1 + 1)}{f_t + k_1 (1 - b + b\,|d| / \overline{|d|})}` over the target's tokens t, repeated ones too.

    Args:
        train: N texts, or their tokens.
        targets: M texts, or their tokens.
        k1: Saturation of term frequency: repetitions of a word count less for smaller values.
        b: Strength of the length normalisation of train texts, from 0 (none) to 1.

    Returns:
        ``(N, M)``.

    Raises:
        InvalidInputError: If there is no train text, all are empty, or one is neither text nor tokens.

    Example:
        >>> bm25(["the cat", "a dog", "the dog barks"], ["dog!"]).argmax(axis=0).tolist()
        [1]
    """
    documents = [_counts(text) for text in train]
    lengths = np.array([document.total() for document in documents], dtype=np.float64)
    if not lengths.any():
        raise InvalidInputError("There is no word in the train texts. Give N texts, or their tokens.")
    rows_of: dict[Hashable, list[int]] = defaultdict(list)
    for row, document in enumerate(documents):
        for token in document:
            rows_of[token].append(row)
    norm = k1 * (1 - b + b * lengths / lengths.mean())
    scores = np.zeros((len(documents), len(targets)), np.float32)
    for column, target in enumerate(targets):
        for token, repeats in _counts(target).items():
            rows = rows_of.get(token, [])
            counts = np.array([documents[row][token] for row in rows], dtype=np.float64)
            idf = np.log1p((len(documents) - len(rows) + 0.5) / (len(rows) + 0.5))
            scores[rows, column] += repeats * idf * counts * (k1 + 1) / (counts + norm[rows])
    return scores


def _counts(text: Text) -> Counter[Hashable]:
    """Return how often each word or token occurs. A token in an array or a tensor is its number, which is hashed."""
    if isinstance(text, Mapping):
        return Counter(text)
    tokens = re.findall(r"\w+", text.lower()) if isinstance(text, str) else _plain(text)
    try:
        return Counter(map(_plain, tokens))
    except TypeError as error:
        raise InvalidInputError(
            f"A text must be a string or its tokens, one after the other, got {text!r:.100} ({error}). Give each text "
            "as a string or as a list of tokens."
        ) from error


def _plain(value: Any) -> Any:
    """Return an array or a tensor as lists or a number; other values as they are."""
    return value.tolist() if hasattr(value, "tolist") else value
