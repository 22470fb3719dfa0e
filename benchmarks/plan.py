"""Plans beside truth: what ``attributor.plan`` predicts for eight models, and what the run takes.

Plan and run of each model are measured in processes of their own, on one thread. Time is that of the processor: other
work on the machine changes the wall clock, and the time of the processor too, but less. Memory is the peak of the
resident set in ``featurize`` beyond that before it, disk the files of the store. Ratios are predicted over true.

Run:  python -m benchmarks.plan [MODEL ...]     (some minutes)
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks import models
from benchmarks.measuring import (
    RESULTS,
    cpu_seconds,
    memory_growth,
    parser_of,
    run_worker,
    save_parts,
    surroundings,
)
from trak_lite import Attributor

TARGETS = 128


def images(rows: int, *shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, *shape), torch.randint(10, (rows,))


def texts(rows: int, vocabulary: int, length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocabulary, (rows, length))
    return tokens, tokens


def gpt() -> nn.Module:
    from examples.recipes.stdlib_lm import GPT

    return GPT(width=48, layers=2)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], dict[str, Any]]] = {
    "logistic regression": (lambda: nn.Linear(64, 10), lambda: images(15_000, 64), {}),
    "MLP 64-256-256-10": (
        lambda: nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        ),
        lambda: images(4_000, 64),
        {"proj_dim": 1024},
    ),
    "MLP, batches of 256, int8": (
        lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
        lambda: images(20_000, 64),
        {"batch_size": 256, "dtype": "int8", "proj_dim": 512},
    ),
    "CNN, 8x8": (models.digits_cnn, lambda: images(2_000, 1, 8, 8), {"proj_dim": 1024}),
    "CNN, 28x28": (models.SimpleCNN, lambda: images(400, 1, 28, 28), {"proj_dim": 512}),
    "ResNet-9, 32x32": (models.resnet9, lambda: images(64, 3, 32, 32), {"proj_dim": 512, "batch_size": 8}),
    "ResNet-9, one kernel": (
        models.resnet9,
        lambda: images(64, 3, 32, 32),
        {"proj_dim": 2048, "layout": "joint", "batch_size": 8},
    ),
    "GPT, 2 layers": (
        gpt,
        lambda: texts(400, 256, 48),
        {"task": "causal_language_modeling", "proj_dim": 128},
    ),
}


def made_in(folder: str, name: str) -> tuple[Attributor, TensorDataset, TensorDataset]:
    """Return an attributor of a model, its train set and its targets."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    build, data, settings = CASES[name]
    model, train = build().eval(), TensorDataset(*data())
    path = f"{folder}/run.zarr"
    made = Attributor(model, path=path, progress=False, **{"task": "image_classification", **settings})
    return made, train, TensorDataset(*train[:TARGETS])


def prediction(name: str) -> dict[str, Any]:
    """Return the plan of a model."""
    with tempfile.TemporaryDirectory() as folder:
        made, train, targets = made_in(folder, name)
        planning: list[Any] = []
        taken = cpu_seconds(lambda: planning.append(made.plan(train, targets)))
    plan = planning[0]
    expected = {step: span.cpu for step, span in plan.seconds.items()}
    return {
        "rows": plan.num_rows,
        "features": plan.settings["features"].partition(" (")[0],
        "bytes_per_row": plan.disk["rows"] // plan.num_rows,
        "batch_size": plan.batch_size,
        "plan_cpu_s": taken,
        "featurize_cpu_s": expected["rows"] + expected.get("fit", 0.0),
        "score_cpu_s": expected["targets"] + expected["scores"],
        "featurize_mib": (plan.memory["featurizing"] or 0) / 2**20,
        "disk_mib": sum(plan.disk[purpose] for purpose in plan.disk if "while" not in purpose) / 2**20,
    }


def truth(name: str) -> dict[str, Any]:
    """Return what the run of a model takes."""
    with tempfile.TemporaryDirectory() as folder:
        made, train, targets = made_in(folder, name)
        with memory_growth() as featurizing:
            seconds = cpu_seconds(lambda: made.featurize(train))
        scored = cpu_seconds(lambda: made.score(targets))
        disk = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return {
        "featurize_cpu_s": seconds,
        "score_cpu_s": scored,
        "featurize_mib": featurizing.mib,
        "disk_mib": disk / 2**20,
    }


def main() -> None:
    """Measure the models and save the results."""
    parser = parser_of(__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    for name in parser.parse_args().models or CASES:
        found, true = (run_worker(work, name) for work in (prediction, truth))
        failed = [one["fails"] for one in (found, true) if "fails" in one]
        if failed:
            print(f"{name}: {failed[0]}")
            continue
        for side in (found, true):
            side["total_cpu_s"] = side["featurize_cpu_s"] + side["score_cpu_s"]
        ratios = {key: found[key] / true[key] for key in true if true[key]}
        result = {"plan": found, "truth": true, "ratio": ratios}
        save_parts(RESULTS / "plan.json", surroundings(), {name: result})


if __name__ == "__main__":
    main()
