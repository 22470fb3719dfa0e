"""EK-FAC and K-FAC influence: agreement with kronfluence 1.0.1, effect of a projection, and cost of fitting.

Digits, an MLP and a CNN (linear and convolution layers with biases only), trained briefly. ``parity``: both packages
use the same gradients (TRAK's margin of the targets, cross-entropy of the train rows), the same damping of 0.1 mean
eigenvalues per layer, and no projection. ``error`` is the largest difference divided by the largest score,
``pearson`` the correlation over all pairs. With the empirical Fisher both packages are deterministic. Otherwise each
draws its own labels, and ``redrawn`` is the correlation of kronfluence with itself under another seed. kronfluence's
scores are means over rows, of the loss: they are multiplied by -1/N. Its K-FAC averages both factors of a
convolution over positions; Grosse & Martens (arXiv:1602.01407) sum one of them. This is a factor per layer, which
affects ``pearson`` of the CNN.

``projected``: correlation over all pairs of scores from rows of K numbers, as the Attributor stores them, with those
from unprojected gradients. ``fit``: CPU time of an EK-FAC fit with the empirical Fisher, for all rows repeated 16
times, in units of plain passes (forward and summed backward). The time of kronfluence includes writing its factors.

Run:  python -m benchmarks.ekfac_parity
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import measuring
from benchmarks.lds.peers import kronfluence_fit, kronfluence_scores
from benchmarks.models import train
from benchmarks.projection_quality import digits
from trak_lite.featurizing.kronecker.curvature import (
    KroneckerCurvature,
    PreconditionedProjector,
    Preconditioner,
)
from trak_lite.featurizing.kronecker.fit import fit_curvature
from trak_lite.gradient_computers import HookGradientComputer
from trak_lite.methods import EKFAC
from trak_lite.modelout_functions import ImageClassificationModelOutput
from trak_lite.projectors import AbstractProjector, CountSketchProjector, NoOpProjector

NUM_TRAIN, NUM_TARGETS, BATCH = 512, 64, 64
PROJ_DIMS = (512, 2048)
DAMPINGS = (0.1, 1.0, 10.0)
REPEATS = 16
Pair = tuple[Tensor, Tensor]
TASK = ImageClassificationModelOutput()


def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    mlp = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    cnn = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    return {"mlp": mlp, "cnn": cnn}


def fitted(
    model: nn.Module, images: Tensor, labels: Tensor, fisher: str, strategy: str
) -> KroneckerCurvature:
    def batches():
        for rows in np.array_split(np.arange(len(images)), len(images) // BATCH):
            yield rows, (images[rows], labels[rows])

    method = EKFAC(fisher=fisher, correct_eigenvalues=strategy == "ekfac")
    return fit_curvature(model, TASK, batches, method=method)


def features(
    model: nn.Module, images: Tensor, labels: Tensor, projector: AbstractProjector
) -> tuple[Tensor, Tensor]:
    computer = HookGradientComputer(model, TASK)
    rows, weights = [], []
    for part in torch.arange(len(images)).split(BATCH):
        accumulator = projector.accumulator(len(part), model_id=0, parameters=computer.parameters)
        terms = computer.stream_gradients((images[part], labels[part]), accumulator.add)
        rows.append(accumulator.features())
        weights.append(terms.out_to_loss_grad)
    return torch.cat(rows), torch.cat(weights)


def our_scores(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    targets: tuple[Tensor, Tensor],
    curvature: KroneckerCurvature,
    projector: AbstractProjector,
    damping: float,
) -> Tensor:
    """Return the scores ``(N, M)``: stored train rows times targets multiplied by the inverse curvature."""
    rows, q = features(model, *data, projector)
    preconditioned = PreconditionedProjector(
        projector, Preconditioner(curvature, damping=damping).accumulator
    )
    return q[:, None] * (rows @ features(model, *targets, preconditioned)[0].T)


def their_scores(
    model: nn.Module, data: Pair, targets: Pair, fisher: str, strategy: str, seed: int = 1
) -> Tensor:
    """Return kronfluence's scores in the units of trak_lite, at its damping of 0.1 mean eigenvalues."""
    torch.manual_seed(seed)
    factors = {"strategy": strategy, "use_empirical_fisher": fisher == "empirical"}
    sets = TensorDataset(*data), TensorDataset(*targets)
    return kronfluence_scores(model, TASK, *sets, BATCH, None, **factors) / len(data[0])


def pearson(ours: Tensor, theirs: Tensor) -> float:
    return float(np.corrcoef(ours.flatten().numpy(), theirs.flatten().numpy())[0, 1])


def plain_pass(model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    for images, labels in DataLoader(TensorDataset(*data), batch_size=BATCH):
        model.zero_grad()
        functional.cross_entropy(model(images), labels, reduction="sum").backward()


def parity(model: nn.Module, data: Pair, targets: Pair, fisher: str, strategy: str) -> dict[str, Any]:
    ours = our_scores(model, data, targets, fitted(model, *data, fisher, strategy), NoOpProjector(), 0.1)
    theirs = their_scores(model, data, targets, fisher, strategy)
    row = {
        "fisher": fisher,
        "strategy": strategy,
        "pearson": pearson(ours, theirs),
        "error": float((ours - theirs).abs().max() / theirs.abs().max()),
    }
    if fisher == "sampled":
        row["redrawn"] = pearson(their_scores(model, data, targets, fisher, strategy, seed=2), theirs)
    return row


def projected(model: nn.Module, data: Pair, targets: Pair) -> list[dict[str, Any]]:
    curvature = fitted(model, *data, "sampled", "ekfac")
    found = []
    for damping in DAMPINGS:
        exact = our_scores(model, data, targets, curvature, NoOpProjector(), damping)
        row: dict[str, Any] = {"damping": damping}
        for size in PROJ_DIMS:
            sketched = our_scores(model, data, targets, curvature, CountSketchProjector(size), damping)
            row[f"K={size}"] = pearson(sketched, exact)
        found.append(row)
    return found


def fit_cost(model: nn.Module, data: Pair) -> dict[str, float]:
    many = tuple(part.repeat(REPEATS, *[1] * (part.dim() - 1)) for part in data)
    plain = min(measuring.cpu_seconds(lambda: plain_pass(model, many)) for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        factors = {"strategy": "ekfac", "use_empirical_fisher": True}
        rows = TensorDataset(*many)
        theirs = measuring.cpu_seconds(lambda: kronfluence_fit(model, TASK, rows, BATCH, folder, **factors))
    ours = measuring.cpu_seconds(lambda: fitted(model, *many, "empirical", "ekfac"))
    drawn = measuring.cpu_seconds(lambda: fitted(model, *many, "sampled", "ekfac"))
    return {"ours": ours / plain, "ours, labels drawn": drawn / plain, "kronfluence": theirs / plain}


def measured(model: nn.Module) -> dict[str, Any]:
    images, labels = digits()
    data = images[:NUM_TRAIN], labels[:NUM_TRAIN]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train(model, *data, optimizer, epochs=10, batch_size=BATCH)
    model = model.eval()
    targets = images[NUM_TRAIN:][:NUM_TARGETS], labels[NUM_TRAIN:][:NUM_TARGETS]
    kinds = [(fisher, strategy) for fisher in ("empirical", "sampled") for strategy in ("ekfac", "kfac")]
    return {
        "parity": [parity(model, data, targets, *kind) for kind in kinds],
        "projected": projected(model, data, targets),
        "fit": fit_cost(model, data),
    }


def main() -> None:
    parser = measuring.parser_of(__doc__, "ekfac_parity.json")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore", FutureWarning)  # kronfluence's, of torch.cuda.amp
    torch.set_num_threads(1)
    parts = {name: measured(model) for name, model in models().items()}
    measuring.save_parts(arguments.out, measuring.surroundings(), parts)


if __name__ == "__main__":
    main()
