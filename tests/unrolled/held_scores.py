"""Scores from a matrix, of which nothing is known but their method: and verdicts that are none."""

import numpy as np

from trak_lite import Scores
from trak_lite.methods import GradDot
from trak_lite.scoring.matrix import HeldMatrix
from trak_lite.scoring.source import UnstoredRows
from trak_lite.scoring.stored import verdict_key
from trak_lite.store import Manifest, open_store


def held_scores(matrix):
    source = UnstoredRows("held", GradDot(), Manifest({}))
    return Scores(HeldMatrix(np.asarray(matrix, np.float32)), source, settings={}, location=None)


def spoil_verdict(path, name):
    """Put what is no verdict in the place of the one-run verdict of some scores."""
    with open_store(str(path), "r+") as store:
        spoiled = np.frombuffer(b'{"lds": 3}', np.uint8).copy()
        store.put_entry(f"one-run/scores/{name}", verdict_key(store, f"scores/{name}"), spoiled)
