"""EK-FAC and K-FAC influence: agreement with kronfluence 1.0.1, and what fitting costs.

Digits, an MLP and a CNN (linear and convolution layers with biases, nothing else), trained briefly. Both sides take the
same gradients: TRAK's margin of the targets, cross-entropy of the train rows, no projection. With the empirical Fisher
both are deterministic; with labels drawn from the model each side draws its own. ``error`` is the largest difference
over the largest score, ``pearson`` the correlation over all pairs. kronfluence's scores are means over rows, and of the
loss: they are multiplied by -1/N.

``fit`` is the time of both passes in plain passes (forward and summed backward) over the same rows. ``projected`` is the
correlation of the scores with those of rows projected to K numbers, as the Attributor stores them.

Run:  python -m benchmarks.ekfac_parity [--dtype float64]
"""

from __future__ import annotations

import argparse
import copy
import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import measuring
from benchmarks.projection_quality import digits
from trak_lite.gradient_computers import HookGradientComputer
from trak_lite.kronecker import (
    KroneckerCurvature,
    KroneckerSettings,
    PreconditionedProjector,
    Preconditioner,
    fit_curvature,
)
from trak_lite.modelout_functions import ImageClassificationModelOutput
from trak_lite.modelout_functions._margins import class_margins
from trak_lite.projectors import AbstractProjector, CountSketchProjector, NoOpProjector

RESULTS = measuring.RESULTS / "ekfac_parity.json"
NUM_TRAIN, NUM_TARGETS, BATCH = 512, 64, 64
PROJ_DIMS = (512, 2048)
DAMPING = 0.1
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


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int = 10) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()


def fitted(
    model: nn.Module, images: Tensor, labels: Tensor, fisher: str, strategy: str
) -> KroneckerCurvature:
    def batches():
        for rows in np.array_split(np.arange(len(images)), len(images) // BATCH):
            yield rows, (images[rows], labels[rows])

    settings = KroneckerSettings(fisher=fisher, correct_eigenvalues=strategy == "ekfac")
    return fit_curvature(model, TASK, batches, settings=settings)


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
) -> Tensor:
    """Return the scores ``(N, M)``: train rows as they are stored, targets behind the curvature."""
    rows, q = features(model, *data, projector)
    preconditioned = PreconditionedProjector(projector, Preconditioner(curvature, damping=DAMPING))
    return q[:, None] * (rows @ features(model, *targets, preconditioned)[0].T)


def their_scores(
    model: nn.Module, data: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor], fisher: str, strategy: str
) -> Tensor:
    """Return kronfluence's scores, in our units and order."""
    from kronfluence import Analyzer, FactorArguments, ScoreArguments, Task, prepare_model

    class Margin(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            logits = model(batch[0])
            labels = torch.multinomial(logits.detach().softmax(-1), 1).squeeze(1) if sample else batch[1]
            return functional.cross_entropy(logits, labels, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return class_margins(model(batch[0]), batch[1]).sum()

    dtype = data[0].dtype
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_model(copy.deepcopy(model), Margin())
        analyzer = Analyzer("parity", prepared, Margin(), cpu=True, disable_tqdm=True, output_dir=folder)
        factors = FactorArguments(
            strategy=strategy,
            use_empirical_fisher=fisher == "empirical",
            activation_covariance_dtype=dtype,
            gradient_covariance_dtype=dtype,
            per_sample_gradient_dtype=dtype,
            lambda_dtype=dtype,
        )
        analyzer.fit_all_factors(
            "factors",
            TensorDataset(*data),
            factor_args=factors,
            per_device_batch_size=BATCH,
            overwrite_output_dir=True,
        )
        analyzer.compute_pairwise_scores(
            "scores",
            "factors",
            TensorDataset(*targets),
            TensorDataset(*data),
            per_device_query_batch_size=len(targets[0]),
            per_device_train_batch_size=BATCH,
            score_args=ScoreArguments(
                damping_factor=None,
                per_sample_gradient_dtype=dtype,
                precondition_dtype=dtype,
                score_dtype=dtype,
            ),
            overwrite_output_dir=True,
        )
        scores = analyzer.load_pairwise_scores("scores")
    return -scores["all_modules"].T / len(data[0])


def pearson(ours: Tensor, theirs: Tensor) -> float:
    return float(np.corrcoef(ours.flatten().numpy(), theirs.flatten().numpy())[0, 1])


def plain_pass(model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    for images, labels in DataLoader(TensorDataset(*data), batch_size=BATCH):
        model.zero_grad()
        functional.cross_entropy(model(images), labels, reduction="sum").backward()


def compared(name: str, model: nn.Module, dtype: torch.dtype) -> list[dict[str, Any]]:
    images, labels = digits()
    train(model, images[:NUM_TRAIN], labels[:NUM_TRAIN])
    model, images = model.to(dtype).eval(), images.to(dtype)
    data = images[:NUM_TRAIN], labels[:NUM_TRAIN]
    targets = tuple(part[NUM_TRAIN : NUM_TRAIN + NUM_TARGETS] for part in (images, labels))
    plain = min(measuring.cpu_seconds(lambda: plain_pass(model, data)) for _ in range(5))
    found = []
    for fisher in ("empirical", "sampled"):
        for strategy in ("ekfac", "kfac"):
            seconds = min(
                measuring.cpu_seconds(lambda f=fisher, s=strategy: fitted(model, *data, f, s))
                for _ in range(3)
            )
            curvature = fitted(model, *data, fisher, strategy)
            ours = our_scores(model, data, targets, curvature, NoOpProjector())
            row = {"model": name, "fisher": fisher, "strategy": strategy, "fit": round(seconds / plain, 2)}
            for size in PROJ_DIMS:
                sketch = CountSketchProjector(size)
                row[f"projected_{size}"] = pearson(our_scores(model, data, targets, curvature, sketch), ours)
            theirs = their_scores(model, data, targets, fisher, strategy).to(ours.dtype)
            row["pearson"] = pearson(ours, theirs)
            row["scale"] = float((ours * theirs).sum() / theirs.square().sum())
            row["error"] = float((ours - theirs).abs().max() / theirs.abs().max())
            found.append(row)
            print(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    dtype = getattr(torch, arguments.dtype)
    rows = [row for name, model in models().items() for row in compared(name, model, dtype)]
    print(rows)


if __name__ == "__main__":
    main()
