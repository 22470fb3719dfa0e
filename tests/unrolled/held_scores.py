"""Scores from a matrix, of which nothing is known but their method: for tests of what is done with scores."""

import numpy as np

from trak_lite import Scores
from trak_lite.methods import GradDot
from trak_lite.scoring.matrix import HeldMatrix
from trak_lite.scoring.source import UnstoredRows
from trak_lite.store import Manifest


def held_scores(matrix):
    source = UnstoredRows("held", GradDot(), Manifest({}))
    return Scores(HeldMatrix(np.asarray(matrix, np.float32)), source, settings={}, location=None)
