"""Drawn labels of tasks that write to their batch or to the inputs of the model, against one draw at a time."""

import numpy as np
import pytest
import torch
from torch import nn

from trak_lite import Rows
from trak_lite.featurizing.fisher import DrawnRows
from trak_lite.modelout_functions import ImageClassificationModelOutput

ROWS = [{"x": torch.randn(5, generator=torch.Generator().manual_seed(i)), "y": 0} for i in range(8)]


def drawn(call, batch, noise):
    return (call(batch["x"]) - torch.log(-torch.log(noise((3,))))).argmax(1)


def replaces(call, batch, noise):
    batch["y"] = drawn(call, batch, noise)
    return batch


def overwrites(call, batch, noise):
    batch["y"].copy_(drawn(call, batch, noise))
    return {**batch}


def calls_with_changed_inputs(call, batch, noise):
    first = drawn(call, batch, noise)
    batch["x"][:, 0] += first
    return {**batch, "y": drawn(call, batch, noise)}


@pytest.mark.parametrize("sample", [replaces, overwrites, calls_with_changed_inputs])
def test_labels_drawn_ahead_are_those_of_one_draw_at_a_time(sample):
    class Sampling(ImageClassificationModelOutput):
        def sample_labels(self, model_call, batch, noise):
            return sample(model_call, batch, noise)

    torch.manual_seed(0)
    model, found = nn.Linear(5, 3), {}
    for ahead in (True, False):
        rows = DrawnRows(Rows(ROWS, batch_size=8), Sampling(), model, 8, 4, 0, at_once=8, draws_ahead=ahead)
        numbers = np.split(np.arange(32), 4)
        # Without drawing ahead every batch is loaded anew, as a user's task may expect.
        batches = rows.batches(iter(numbers)) if ahead else (next(rows.batches([one])) for one in numbers)
        found[ahead] = torch.stack([rows.prepared(batch, wanted)["y"].clone() for wanted, batch in batches])
    assert torch.equal(found[True], found[False])
    assert len(found[True].unique(dim=0)) > 1
