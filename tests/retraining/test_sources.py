"""Which functions count as the same training."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from trak_lite.run.sources import describe_source

pytestmark = pytest.mark.quick


def closure(value):
    def train(indices, seed):
        return value

    return train


@dataclass(frozen=True)
class Recipe:
    lr: float
    data: torch.Tensor

    def train(self, indices, seed):
        return self.lr


DIFFERENT = [
    lambda indices, seed: 1,
    lambda indices, seed: 2,
    closure(1),
    closure(1.0),
    closure("1"),
    closure((1, 2)),
    closure(torch.ones(2)),
    closure(torch.zeros(2)),
    closure(np.ones(2)),
    closure(closure(1)),
    partial(closure(1), 1),
    partial(closure(1), seed=1),
    Recipe(0.1, torch.ones(2)).train,
    Recipe(0.2, torch.ones(2)).train,
    Recipe(0.1, torch.zeros(2)).train,
    torch.relu,
    torch.sigmoid,
    nn.Linear,
]


def test_other_source_settings_or_data_are_another_training():
    described = [repr(describe_source(function)) for function in DIFFERENT]

    assert len(set(described)) == len(described)


def test_what_changes_while_it_trains_is_the_same_training():
    model, calls, counts = nn.Linear(2, 2), [], {}
    before = [describe_source(closure(thing)) for thing in (model, calls, counts)]
    with torch.no_grad():
        model.weight.add_(1.0)
    calls.append(1)
    counts["a"] = 1

    assert [describe_source(closure(thing)) for thing in (model, calls, counts)] == before


def test_functions_that_call_themselves_or_read_what_is_not_there_yet_are_described():
    def again(indices, seed):
        return again(indices, later)

    described = describe_source(again)
    later = 1

    assert described["values"][0] == {"again": described["function"]}
    assert described["values"][1] == "'empty'"
    assert describe_source(again)["values"][1] == repr(later)
