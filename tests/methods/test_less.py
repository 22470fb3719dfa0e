"""LESS against the formula of the paper, and against steps of torch.optim.Adam that change the loss of a target."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, verify
from trak_lite.errors import InvalidInputError
from trak_lite.evaluation import linear_datamodeling_score
from trak_lite.methods import LESS, GradCos, GradDot
from trak_lite.modelout_functions import RegressionModelOutput

BETAS, EPS, RATES = (0.9, 0.99), 1e-8, (0.05, 0.02, 0.01)
GENERATOR = torch.Generator().manual_seed(0)
N, M = 16, 5
INPUTS = torch.randn(N + M, 4, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.randint(3, (N + M,), generator=GENERATOR)
TRAIN, TARGETS = (TensorDataset(INPUTS[part], LABELS[part]) for part in (slice(N), slice(N, None)))


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def stepped(
    net: nn.Module, optimizer: torch.optim.Optimizer, rates: Any, rows: Any = slice(N)
) -> list[dict[str, Any]]:
    """Weights and the state of the optimizer after every step on all these rows."""
    found = []
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(INPUTS[rows]), LABELS[rows]).backward()
        optimizer.step()
        found.append(copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()}))
    return found


def checkpoints() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    net = classifier()
    return stepped(net, torch.optim.AdamW(net.parameters(), betas=BETAS, eps=EPS), RATES)


def loss_gradients(net: nn.Module, data: TensorDataset) -> Tensor:
    rows = []
    for x, label in data:
        loss = nn.functional.cross_entropy(net(x[None]), label[None])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]))
    return torch.stack(rows)


def published() -> np.ndarray:
    """Section 4.1 of arXiv:2402.04333: the sum over checkpoints of eta cos(Gamma(z), gradient of the target's loss)."""
    total = torch.zeros(N, M, dtype=torch.float64)
    for rate, content in zip(RATES, checkpoints(), strict=True):
        net = classifier()
        net.load_state_dict(content["model"])
        state = content["optimizer"]["state"]
        m, v = (
            torch.cat([state[k][name].flatten() for k in sorted(state)]) for name in ("exp_avg", "exp_avg_sq")
        )
        step = int(state[0]["step"]) + 1
        g = loss_gradients(net, TRAIN)
        m = (BETAS[0] * m + (1 - BETAS[0]) * g) / (1 - BETAS[0] ** step)
        v = (BETAS[1] * v + (1 - BETAS[1]) * g**2) / (1 - BETAS[1] ** step)
        gamma = m / (v.sqrt() + EPS)
        targets = loss_gradients(net, TARGETS)
        total += rate * nn.functional.cosine_similarity(gamma[:, None], targets[None], dim=2)
    return total.numpy()


def featurized(**changes: Any) -> Attributor:
    settings = {"projector": "none", "dtype": "float32", "normalize": "adam_update", "progress": False}
    made = Attributor(classifier(), "image_classification", None, **{**settings, **changes})
    made.featurize(TRAIN, checkpoints())
    return made


@pytest.mark.parametrize(
    ("computer", "layout"), [("hook", "module"), ("functional", "joint"), ("iterative", "module")]
)
def test_scores_are_those_of_the_paper(computer: str, layout: str) -> None:
    made = featurized(gradient_computer=computer, layout=layout)

    scores = made.score(TARGETS, method=LESS(learning_rates=RATES))

    np.testing.assert_allclose(scores.numpy(), published(), atol=1e-6)
    by_name = made.score(TARGETS, method={"name": "LESS", "learning_rates": list(RATES)})
    assert by_name.numpy().tobytes() == scores.numpy().tobytes()
    assert made.method == LESS()  # without learning rates, the cosine of whole rows
    cosines = made.score(TARGETS, method=GradCos(layout="joint")).numpy()
    np.testing.assert_allclose(made.score(TARGETS).numpy(), cosines, atol=1e-6)
    with pytest.raises(InvalidInputError, match="learning_rates has 2 numbers, but 3 checkpoints"):
        made.score(TARGETS, method=LESS(learning_rates=RATES[:2]))


def test_projected_scores_are_near_those_of_the_paper() -> None:
    made = featurized(projector="countsketch", proj_dim=4096)
    scores = made.score(TARGETS, method=LESS(learning_rates=RATES)).numpy()

    assert np.corrcoef(scores.ravel(), published().ravel())[0, 1] > 0.98


def test_verify_compares_with_plain_products_of_updates_and_gradients() -> None:
    """The rows are updates of the loss, so the baseline of dot products has no q."""
    made = featurized()
    scores = made.score(TARGETS)
    subsets: dict[tuple[int, ...], None] = {}

    def train(rows: np.ndarray, seed: int) -> nn.Module:
        subsets[tuple(rows.tolist())] = None
        torch.manual_seed(seed)
        net = classifier()
        stepped(net, torch.optim.AdamW(net.parameters()), [0.05] * 3, rows)
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
    settings = {"projector": "none", "dtype": "float32", "normalize": "adam_update", "progress": False}
    made = Attributor(net, RegressionModelOutput(output=output), None, **settings)
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
