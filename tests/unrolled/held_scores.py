"""Scores from a matrix, of which nothing but a method is known; scores without a model; spoiled verdicts."""

import numpy as np
import torch

from trak_lite import Scores
from trak_lite.featurizing.stored_settings import StoredSettings
from trak_lite.methods import GradDot
from trak_lite.run.workspace import Workspace
from trak_lite.scoring.matrix import HeldMatrix
from trak_lite.scoring.stored import stored_scores
from trak_lite.store import Manifest, open_store


def held_scores(matrix):
    return Scores(HeldMatrix(np.asarray(matrix, np.float32)), "held", GradDot(), Manifest({}), {})


def scores_without_a_model(attributor, name):
    """Open stored scores as a server does that knows no model."""
    settings = StoredSettings(attributor.layout, attributor.method, torch.device("cpu"))
    return stored_scores(Workspace(str(attributor.path)), settings, name, attributor.method)


def spoil_verdict(path, name):
    """Put what is no verdict in the place of the one-run verdict of some scores."""
    with open_store(str(path), "r+") as store:
        spoiled = np.frombuffer(b'{"lds": 3}', np.uint8).copy()
        store.put_entry(f"one-run/scores/{name}", store.open_table(f"scores/{name}").content_key(), spoiled)
