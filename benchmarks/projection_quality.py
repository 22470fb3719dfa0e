"""Accuracy of projections: agreement of scores from features with exact scores from unprojected gradients.

Real per-sample gradients of the digits CNN: TRAK's margin, the 600 rows it was trained on, 150 held-out targets. For
every projector and K: the mean over targets of Spearman's rank correlation with the exact scores; its mean and
standard deviation over seeds of the projection. Scores: ``grad-dot``, the inner product of gradients, and ``ridge``,
TRAK's kernel with lambda = 0.1 times the mean squared norm, solved in its N x N form. ``rms`` is the root mean square
error of inner products over |x||y|, times sqrt(K); for a dense matrix of signs it is sqrt(1 + cos^2), averaged over
pairs.

``two_sided`` stores about K numbers of every matrix, so its rows are wider; see ``width``.

Run:  python -m benchmarks.projection_quality [--projectors countsketch ...] [--proj-dims 512 2048] [--seeds 3]
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import measuring, models
from trak_lite.evaluation import spearman
from trak_lite.gradient_computers import HookGradientComputer, collect_gradients
from trak_lite.modelout_functions import ImageClassificationModelOutput
from trak_lite.projectors import PROJECTORS

NUM_TRAIN, NUM_TARGETS = 600, 150
EPOCHS = 10
DAMPING = 0.1


def digits() -> tuple[Tensor, Tensor]:
    """Return images ``(N, 1, 8, 8)`` and labels in a fixed random order."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = torch.from_numpy(found.images[order] / 16).float().unsqueeze(1)
    return images, torch.from_numpy(found.target[order]).long()


def trained(images: Tensor, labels: Tensor) -> nn.Module:
    """Return the digits CNN after a few epochs of SGD, as in the digits example."""
    torch.manual_seed(0)
    model = models.digits_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    models.train(model, images[:NUM_TRAIN], labels[:NUM_TRAIN], optimizer, epochs=EPOCHS, batch_size=50)
    return model.eval()


def gradients() -> tuple[dict[str, Tensor], float]:
    """Return gradients of train rows, then of targets, by parameter, and the held-out accuracy."""
    images, labels = digits()
    model = trained(images, labels)
    with torch.no_grad():
        accuracy = (model(images[NUM_TRAIN:]).argmax(1) == labels[NUM_TRAIN:]).float().mean().item()
    rows = torch.arange(NUM_TRAIN + NUM_TARGETS)
    computer = HookGradientComputer(model, ImageClassificationModelOutput())
    batches = [collect_gradients(computer, (images[some], labels[some])) for some in rows.split(75)]
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}, accuracy


def inner_products(features: Tensor) -> np.ndarray:
    """Return all inner products of feature rows, in float64."""
    total = torch.zeros(len(features), len(features), dtype=torch.float64)
    for columns in features.split(1 << 14, dim=1):
        wide = columns.double()
        total += wide @ wide.T
    return total.numpy()


def scores(products: np.ndarray) -> dict[str, np.ndarray]:
    """Return scores ``(train rows, targets)`` by name."""
    gram, dots = products[:NUM_TRAIN, :NUM_TRAIN], products[:NUM_TRAIN, NUM_TRAIN:]
    damped = gram + DAMPING * np.trace(gram) / NUM_TRAIN * np.eye(NUM_TRAIN)
    return {"ridge": np.linalg.solve(damped, dots), "grad_dot": dots}


def agreement(found: np.ndarray, exact: np.ndarray) -> float:
    """Return the mean over targets of Spearman's correlation."""
    return float(np.mean([spearman(a, b) for a, b in zip(found.T, exact.T, strict=True)]))


def quality(
    name: str, proj_dim: int, seeds: int, grads: dict[str, Tensor], exact: np.ndarray
) -> dict[str, Any]:
    """Project with every seed and compare."""
    truth, runs = scores(exact), []
    norms = np.sqrt(np.diag(exact))
    for seed in range(seeds):
        features = PROJECTORS[name](proj_dim, seed=seed, device=None).project(grads, 0)
        products = inner_products(features)
        error = np.triu((products - exact) / np.outer(norms, norms), 1)
        pairs = len(norms) * (len(norms) - 1) / 2
        runs.append(
            {key: agreement(value, truth[key]) for key, value in scores(products).items()}
            | {"rms": math.sqrt(float(np.sum(error**2)) / pairs * proj_dim)}
        )
    summary: dict[str, Any] = {"projector": name, "proj_dim": proj_dim, "width": features.shape[1]}
    for key in ("ridge", "grad_dot", "rms"):
        values = np.array([run[key] for run in runs])
        summary[key] = {"mean": float(values.mean()), "std": float(values.std(ddof=1)) if seeds > 1 else None}
    return summary


def main() -> None:
    """Compare every projector, write JSON."""
    names = [
        name for name in PROJECTORS if name not in ("none", "fast_jl")
    ]  # exact; where it runs, dense signs
    parser = measuring.parser_of(__doc__, "projection_quality.json")
    parser.add_argument("--projectors", nargs="*", default=names, choices=names)
    parser.add_argument("--proj-dims", nargs="*", type=int, default=[512, 2048])
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()

    grads, accuracy = gradients()
    exact = inner_products(torch.cat([grad.flatten(1) for grad in grads.values()], 1))
    entries = sum(grad[0].numel() for grad in grads.values())
    parts: dict[str, Any] = {}
    for proj_dim in args.proj_dims:
        for name in args.projectors:
            parts[f"{name}-{proj_dim}"] = quality(name, proj_dim, args.seeds, grads, exact)
    here = {"machine": measuring.surroundings()["machine"], "torch": torch.__version__}
    facts = {"accuracy": accuracy, "entries": entries, "train": NUM_TRAIN, "targets": NUM_TARGETS}
    measuring.save_parts(args.out, {**here, **facts, "damping": DAMPING, "seeds": args.seeds}, parts)


if __name__ == "__main__":
    main()
