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

pytestmark = pytest.mark.quick

BETAS, EPS, RATES = (0.9, 0.99), 1e-8, (0.05, 0.02, 0.01)
GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(30, 4, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.randint(3, (30,), generator=GENERATOR)
TRAIN, TARGETS = (TensorDataset(INPUTS[part], LABELS[part]) for part in (slice(24), slice(24, 30)))


def checkpoints() -> list[dict[str, Any]]:
    """Weights, and the state of AdamW, after three epochs of one step each."""
    torch.manual_seed(0)
    net = classifier()
    optimizer = torch.optim.AdamW(net.parameters(), betas=BETAS, eps=EPS)
    found = []
    for rate in RATES:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(TRAIN.tensors[0]), TRAIN.tensors[1]).backward()
        optimizer.step()
        found.append(copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()}))
    return found


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def loss_gradients(net: nn.Module, data: TensorDataset) -> Tensor:
    rows = []
    for x, label in data:
        loss = nn.functional.cross_entropy(net(x[None]), label[None])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]))
    return torch.stack(rows)


def published() -> np.ndarray:
    """Section 4.1 of arXiv:2402.04333: the sum over checkpoints of eta cos(Gamma(z), gradient of the target's loss)."""
    total = torch.zeros(len(TRAIN), len(TARGETS), dtype=torch.float64)
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


def attributor(**changes: Any) -> Attributor:
    settings = {"projector": "none", "dtype": "float32", "normalize": "adam_update", "progress": False}
    return Attributor(classifier(), "image_classification", None, **{**settings, **changes})


@pytest.mark.parametrize("layout", ["module", "joint"])
@pytest.mark.parametrize("computer", ["hook", "functional", "iterative"])
def test_scores_are_those_of_the_paper(computer: str, layout: str) -> None:
    made = attributor(gradient_computer=computer, layout=layout)
    made.featurize(TRAIN, checkpoints())

    scores = made.score(TARGETS, method=LESS(learning_rates=RATES))

    np.testing.assert_allclose(scores.numpy(), published(), atol=1e-6)
    by_name = made.score(TARGETS, method={"name": "LESS", "learning_rates": list(RATES)})
    assert by_name.numpy().tobytes() == scores.numpy().tobytes()


def test_without_learning_rates_it_is_the_cosine_of_whole_rows() -> None:
    made = attributor()
    made.featurize(TRAIN, checkpoints())

    assert made.method == LESS()
    np.testing.assert_allclose(
        made.score(TARGETS).numpy(), made.score(TARGETS, method=GradCos(layout="joint")).numpy(), atol=1e-6
    )


def test_projected_scores_are_near_those_of_the_paper() -> None:
    made = attributor(projector="countsketch", proj_dim=4096)
    made.featurize(TRAIN, checkpoints())

    scores = made.score(TARGETS, method=LESS(learning_rates=RATES)).numpy()

    assert np.corrcoef(scores.ravel(), published().ravel())[0, 1] > 0.98


def test_verify_compares_with_plain_products_of_updates_and_gradients() -> None:
    """The rows are updates of the loss, so the baseline of dot products has no q."""
    made = attributor()
    made.featurize(TRAIN, checkpoints())
    scores = made.score(TARGETS)
    subsets: dict[tuple[int, ...], None] = {}

    def train(rows: np.ndarray, seed: int) -> nn.Module:
        subsets[tuple(rows.tolist())] = None
        torch.manual_seed(seed)
        net = classifier()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(TRAIN.tensors[0][rows]), TRAIN.tensors[1][rows]).backward()
            optimizer.step()
        return net

    verdict = verify(scores, train, TARGETS, budget=6)

    masks = np.stack([np.isin(np.arange(len(TRAIN)), subset) for subset in subsets])
    found = scores.predictions
    np.testing.assert_allclose(found.summed, masks @ scores.numpy().astype(np.float64), rtol=1e-5)
    products = made.score(TARGETS, method=GradDot(q="off")).numpy()
    expected = linear_datamodeling_score(products, masks, found.retrained)
    (dot,) = (one for one in verdict.baselines if "dot product" in one.name)
    assert dot.lds.mean == pytest.approx(expected.mean, abs=1e-6)


def test_a_learning_rate_is_needed_for_every_checkpoint() -> None:
    made = attributor()
    made.featurize(TRAIN, checkpoints())
    with pytest.raises(InvalidInputError, match="learning_rates has 2 numbers, but 3 checkpoints"):
        made.score(TARGETS, method=LESS(learning_rates=RATES[:2]))


@pytest.mark.parametrize("output", ["prediction", "neg_squared_error"])
def test_a_positive_score_means_that_a_real_step_on_the_row_raises_the_targets_output(output: str) -> None:
    """A regression: Adam steps on the loss of one train row, and the output and the loss of every target change."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    values = (INPUTS @ torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64)).tanh()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02, betas=BETAS)
    for _ in range(5):
        optimizer.zero_grad()
        (net(INPUTS[:24]).squeeze(1) - values[:24]).square().mean().backward()
        optimizer.step()
    content = copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    train, targets = (TensorDataset(INPUTS[part], values[part]) for part in (slice(24), slice(24, 30)))
    made = Attributor(
        net,
        RegressionModelOutput(output=output),
        None,
        projector="none",
        dtype="float32",
        normalize="adam_update",
        progress=False,
    )
    made.featurize(train, content)
    first_order = made.score(targets, method=GradDot(q="off")).numpy()
    cosines = made.score(targets, method=LESS(learning_rates=[0.02])).numpy()

    rate = 1e-6
    changes, losses = (np.empty((24, 6)) for _ in range(2))
    with torch.no_grad():
        before = net(INPUTS[24:]).squeeze(1)
    for row in range(24):
        own = copy.deepcopy(net)
        again = torch.optim.Adam(own.parameters(), betas=BETAS)
        again.load_state_dict(copy.deepcopy(content["optimizer"]))
        again.param_groups[0]["lr"] = rate
        again.zero_grad()
        ((own(INPUTS[row][None])[0, 0] - values[row]).square() / 2).backward()
        again.step()
        with torch.no_grad():
            after = own(INPUTS[24:]).squeeze(1)
        losses[row] = ((after - values[24:]).square() - (before - values[24:]).square()).numpy() / 2 / rate
        changes[row] = (after - before).numpy() / rate if output == "prediction" else -losses[row]

    np.testing.assert_allclose(first_order, changes, rtol=1e-3, atol=1e-4 * np.abs(changes).max())
    assert (np.sign(cosines) == np.sign(changes)).all()
    q = (values[24:] - before).numpy() if output == "prediction" else 1.0
    assert (np.sign(cosines * q) == -np.sign(losses)).all()  # helpful for the target's loss, as in the paper
    if output == "prediction":
        assert (q < 0).any()
        assert (q > 0).any()
