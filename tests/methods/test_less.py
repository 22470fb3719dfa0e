"""LESS against steps of torch.optim.Adam that change the output of a target; the formula: test_normalized_features."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, verify
from trak_lite.evaluation import linear_datamodeling_score
from trak_lite.methods import LESS, GradDot
from trak_lite.modelout_functions import RegressionModelOutput

BETAS = (0.9, 0.99)
SETTINGS = {"projector": "none", "dtype": "float32", "normalize": "adam_update", "progress": False}
GENERATOR = torch.Generator().manual_seed(0)
N, M = 16, 5
INPUTS = torch.randn(N + M, 4, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.randint(3, (N + M,), generator=GENERATOR)
TRAIN, TARGETS = (TensorDataset(INPUTS[part], LABELS[part]) for part in (slice(N), slice(N, None)))


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def step(net: nn.Module, optimizer: torch.optim.Optimizer, rows: Any = slice(N)) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(INPUTS[rows]), LABELS[rows]).backward()
    optimizer.step()


def test_verify_compares_with_plain_products_of_updates_and_gradients() -> None:
    """The rows are updates of the loss, so the baseline of dot products has no q."""
    torch.manual_seed(0)
    net = classifier()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, betas=BETAS)
    step(net, optimizer)
    made = Attributor(net, "image_classification", None, **SETTINGS)
    made.featurize(TRAIN, copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()}))
    scores = made.score(TARGETS)
    subsets: dict[tuple[int, ...], None] = {}

    def train(rows: np.ndarray, seed: int) -> nn.Module:
        subsets[tuple(rows.tolist())] = None
        torch.manual_seed(seed)
        net = classifier()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        for _ in range(3):
            step(net, optimizer, rows)
        return net

    verdict = verify(scores, train, TARGETS, budget=5)

    masks = np.stack([np.isin(np.arange(N), subset) for subset in subsets])
    found = scores.predictions
    np.testing.assert_allclose(found.summed, masks @ scores.numpy().astype(np.float64), rtol=1e-5)
    products = made.score(TARGETS, method=GradDot(q="off")).numpy()
    expected = linear_datamodeling_score(products, masks, found.retrained)
    (dot,) = (one for one in verdict.baselines if "dot product" in one.name)
    assert dot.lds.mean == pytest.approx(expected.mean, abs=1e-6)


@pytest.mark.parametrize("output", ["prediction", "neg_squared_error"])
def test_a_positive_score_means_that_a_real_step_on_the_row_raises_the_targets_output(output: str) -> None:
    """A regression: Adam steps on the loss of one train row, and the output of every target changes."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    values = (INPUTS @ torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64)).tanh()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02, betas=BETAS)
    for _ in range(5):
        optimizer.zero_grad()
        (net(INPUTS[:N]).squeeze(1) - values[:N]).square().mean().backward()
        optimizer.step()
    content = copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    made = Attributor(net, RegressionModelOutput(output=output), None, **SETTINGS)
    made.featurize(TensorDataset(INPUTS[:N], values[:N]), content)
    targets = TensorDataset(INPUTS[N:], values[N:])
    first_order = made.score(targets, method=GradDot(q="off")).numpy()
    cosines = made.score(targets, method=LESS(learning_rates=[0.02])).numpy()

    def outputs(own: nn.Module) -> Tensor:
        z = own(INPUTS[N:]).squeeze(1).detach()
        return z if output == "prediction" else -(z - values[N:]).square() / 2

    changes, rate = [], 1e-6
    for row in range(N):
        own = copy.deepcopy(net)
        again = torch.optim.Adam(own.parameters())
        again.load_state_dict(copy.deepcopy(content["optimizer"]))
        again.param_groups[0]["lr"] = rate
        again.zero_grad()
        ((own(INPUTS[row][None])[0, 0] - values[row]).square() / 2).backward()
        again.step()
        changes.append((outputs(own) - outputs(net)).numpy() / rate)

    np.testing.assert_allclose(first_order, changes, rtol=1e-3, atol=1e-4 * np.abs(changes).max())
    assert (np.sign(cosines) == np.sign(changes)).all()
