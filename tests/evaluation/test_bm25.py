"""BM25 against its formula, written out."""

import math

import numpy as np
import pytest

from trak_lite.errors import InvalidInputError
from trak_lite.evaluation import bm25

TRAIN = ["The cat sat on the mat.", "A dog and a cat", "dogs bark", "", "the dog the dog the dog"]
TARGETS = ["the DOG, the cat", "nothing known", "dog"]


def words(text):
    return text.lower().replace(".", "").replace(",", "").split()


def formula(train, query, k1, b):
    lengths = [len(words(text)) for text in train]
    mean = sum(lengths) / len(lengths)
    result = []
    for text, length in zip(train, lengths, strict=True):
        total = 0.0
        for token in words(query):
            containing = sum(token in words(other) for other in train)
            idf = math.log(1 + (len(train) - containing + 0.5) / (containing + 0.5))
            count = words(text).count(token)
            total += idf * count * (k1 + 1) / (count + k1 * (1 - b + b * length / mean))
        result.append(total)
    return result


@pytest.mark.parametrize("settings", [{"k1": 1.5, "b": 0.75}, {"k1": 0.9, "b": 0.4}])
def test_scores_are_those_of_the_formula(settings):
    expected = np.array([formula(TRAIN, query, **settings) for query in TARGETS]).T

    np.testing.assert_allclose(bm25(TRAIN, TARGETS, **settings), expected, rtol=1e-6)
    assert not expected[:, 1].any()


def test_tokens_stand_for_their_text():
    tokens = {word: number for number, word in enumerate({w for t in (*TRAIN, *TARGETS) for w in words(t)})}
    coded = [[[tokens[word] for word in words(text)] for text in texts] for texts in (TRAIN, TARGETS)]

    np.testing.assert_array_equal(bm25(*coded), bm25(TRAIN, TARGETS))


@pytest.mark.parametrize("train", [[], ["", "?"]])
def test_there_must_be_a_word(train):
    with pytest.raises(InvalidInputError, match="no word in the train texts"):
        bm25(train, ["dog"])
