"""Derivatives through the training (``trak_lite.unrolled``): accuracy by smoothness, cost, and accuracy over seeds.

``smooth``: trainings of perceptrons and other networks on digits. Metasmoothness of the run (h = 0.1 and h = 0.5), and
the linear datamodeling score on 40 repetitions of the run (same seed and order) without 1, 5, 10 and 50 % of the rows,
with its 95 % bootstrap interval: of the derivatives, and of the default kernel at the final model. 100 targets.

``cost``: CPU time on one thread of ``unrolled`` per target, in trainings: of ``recipe.train``, and of a plain loop with
``torch.optim`` over the same batches. ``mib`` is the growth of the resident set at its highest while it runs; every row
is a process of its own. The metasmoothness is not part of it, and has its own figure (``metasmoothness``, in trainings
by ``recipe.train``). The language model trains for 15 steps, which does not change the ratios.

``expected``: linear datamodeling scores on the ground truth of ``benchmarks.lds``: models retrained with other seeds.
Scores of several runs, or of runs and the default kernel, are averaged after each target's column is divided by its
standard deviation. Recipes train as ``benchmarks.lds`` does, with ``eps_root=1e-8`` for Adam.

``teacher``: the default kernel over the checkpoints of a run, before and after ``calibrate`` with the derivatives of
that run for 20 targets. LDS on the other 80 targets: on repetitions of this run without 5 % of the rows, and on models
retrained with other seeds.

Run:  python -m benchmarks.unrolled [--parts smooth cost expected teacher] [--rows ...] [--missing] [--keep FOLDER]
"""

from __future__ import annotations

import json
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.lds import data
from benchmarks.lds.methods import METHODS, Problem
from benchmarks.lds.settings import SETTINGS, Setting, mlp, perceptron
from benchmarks.lds.table import DEFAULT, kept
from benchmarks.lds.training import losses
from benchmarks.lds.truth import Truth, full_runs, lds, load
from benchmarks.measuring import cpu_seconds, memory_growth, parser_of, run_worker, save_parts, surroundings
from trak_lite import Attributor, Rows, calibrate, calibrated_scores, verify_run
from trak_lite.evaluation import seed_noise_ceiling, subset_masks
from trak_lite.modelout_functions._base import outputs_of_model
from trak_lite.retraining import retrain_many
from trak_lite.unrolled import SGD, AbstractOptimizer, Adam, AdamW, Recipe, unrolled

NUM_TARGETS, BUDGET, NUM_RUNS = 100, 40, 4
TARGETS_AT_ONCE = 300


@dataclass(frozen=True, slots=True)
class Training:
    """A training of the part ``smooth``: classification of digits, with a learning rate that falls to zero."""

    model: Callable[[], nn.Module]
    optimizer: AbstractOptimizer
    data: Callable[[], data.Data] = data.clean_digits
    epochs: int = 20
    batch_size: int = 50


def cosine(num_steps: int) -> Callable[[int], float]:
    """Return the factors of a learning rate that falls to zero, as torch's ``CosineAnnealingLR``."""
    return lambda step: 0.5 * (1 + math.cos(math.pi * step / num_steps))


def row_losses(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of every row; of a text the mean over its tokens."""
    found = losses(model(batch[0]), batch[1])
    return found / (batch[1].shape[1] - 1) if batch[1].dim() == 2 else found


def convolutions(activation: type[nn.Module], pooling: type[nn.Module]) -> nn.Module:
    """Return a network of two convolutions and two linear layers for images of 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        activation(),
        pooling(2),
        nn.Conv2d(16, 32, 3, padding=1),
        activation(),
        pooling(2),
        nn.Flatten(),
        nn.Linear(128, 64),
        activation(),
        nn.Linear(64, 10),
    )


GELU_MLP = partial(perceptron, nn.GELU, 64, 128, 64, 10)
RELU_MLP = partial(perceptron, nn.ReLU, 64, 128, 64, 10)
SMOOTH_CNN = partial(convolutions, nn.GELU, nn.AvgPool2d)
TRAININGS = {
    "GELU, SGD 0.01": Training(GELU_MLP, SGD(lr=0.01, momentum=0.9)),
    "GELU, Adam 1e-3": Training(GELU_MLP, Adam(lr=1e-3)),
    "ReLU, SGD 0.1, wrong labels": Training(mlp, SGD(lr=0.1, momentum=0.9), data.digits, 30),
    "ReLU, SGD 0.02": Training(RELU_MLP, SGD(lr=0.02, momentum=0.9)),
    "GELU, Adam 5e-3": Training(GELU_MLP, Adam(lr=5e-3)),
    "logistic regression, SGD 0.05": Training(
        partial(perceptron, nn.Identity, 64, 10), SGD(lr=0.05, momentum=0.9)
    ),
    "convolutions, GELU, average pooling, Adam 2e-3": Training(SMOOTH_CNN, Adam(lr=2e-3), epochs=10),
    "convolutions, ReLU, max pooling, Adam 2e-3": Training(
        partial(convolutions, nn.ReLU, nn.MaxPool2d), Adam(lr=2e-3), epochs=10
    ),
    "convolutions, GELU, average pooling, SGD 0.1": Training(
        SMOOTH_CNN, SGD(lr=0.1, momentum=0.9), epochs=10
    ),
    "ReLU, Adam 1e-3": Training(RELU_MLP, Adam(lr=1e-3)),
    "GELU, Adam 1e-3, eps_root 1e-6": Training(GELU_MLP, Adam(lr=1e-3, eps_root=1e-6)),
    "GELU, Adam 1e-3, batches of 200": Training(GELU_MLP, Adam(lr=1e-3), batch_size=200),
    "GELU, Adam 5e-3, eps_root 1e-6": Training(GELU_MLP, Adam(lr=5e-3, eps_root=1e-6)),
    "GELU, SGD 0.1, wrong labels": Training(GELU_MLP, SGD(lr=0.1, momentum=0.9), data.digits, 30),
    "GELU, SGD 0.02, wrong labels": Training(GELU_MLP, SGD(lr=0.02, momentum=0.9), data.digits, 30),
    "ReLU, SGD 0.02, wrong labels": Training(mlp, SGD(lr=0.02, momentum=0.9), data.digits, 30),
}
COSTS = {"MLP": "digits_gelu_sgd", "CNN": "digits_cnn", "GPT": "topics_lm"}
"""Problems of ``benchmarks.lds`` whose data and training the part ``cost`` uses."""
STEPS: dict[str, dict[str, Any]] = {
    "MLP": {},
    "CNN": {"model": SMOOTH_CNN, "steps": 120},
    "GPT": {"steps": 15},
}
"""Their changes: fewer steps, and smooth convolutions."""
REPEATS = 3
BLOCKS = (1, 16, 64, 256)
BUDGETS = (128, 512)
"""Memory in MiB of rows that choose the block themselves."""
NUM_BUDGETED = 64
"""Their targets."""
NUM_TAUGHT = 20
"""Targets of a teacher."""
PROBLEMS = (
    "digits_gelu_sgd",
    "digits_gelu_adam",
    "digits_lr",
    "affairs",
    "diamonds",
    "package_words",
    "digits_relu",
    "digits_tailed",
    "digits_mlp",
    "digits_cnn",
    "mnist_mlp",
)
"""Without ``digits_bn``, whose batch norm is refused, and the problems that take longer."""


def smooth(name: str) -> dict[str, Any]:
    """Return metasmoothness and one-run scores of a training."""
    training = TRAININGS[name]
    inputs, labels, target_inputs, target_labels = training.data()
    train = TensorDataset(inputs, labels)
    targets = Rows(
        TensorDataset(target_inputs[:NUM_TARGETS], target_labels[:NUM_TARGETS]), batch_size=NUM_TARGETS
    )
    steps = training.epochs * math.ceil(len(train) / training.batch_size)
    recipe = Recipe(
        lambda seed: training.model(),
        row_losses,
        train,
        training.optimizer,
        batch_size=training.batch_size,
        steps=steps,
        schedule=cosine(steps),
    )
    task = "image_classification"
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of metasmoothness, which is measured here
        run = recipe.train(folder)
        model, wide = run.model(), run.metasmoothness(h=0.5)
        with torch.no_grad():
            right = (model(target_inputs).argmax(1) == target_labels).double().mean()
        attributor = Attributor(model, task, None, batch_size=50, progress=False)
        attributor.featurize(train)
        both = {"unrolled": unrolled(run, targets, task), "default": attributor.score(targets)}
        verdicts = {
            method: verify_run(scores, run, targets, budget=BUDGET, task=task)
            for method, scores in both.items()
        }
    found: dict[str, Any] = {
        "metasmoothness": run.metasmoothness(),
        "metasmoothness, h = 0.5": wide,
        "accuracy": float(right),
        "steps": steps,
    }
    for method, verdict in verdicts.items():
        found[method] = {
            f"{share:g}": {"mean": one.mean, "interval": [one.low, one.high]} for share, one in verdict.lds
        }
    return found


def recipe_of(setting: Setting, seed: int, **changes: Any) -> Recipe:
    """Return the training of a problem of ``benchmarks.lds`` as a recipe."""
    inputs, labels = setting.data()[:2]
    steps = setting.epochs * math.ceil(len(inputs) / setting.batch_size)
    decay = setting.weight_decay
    optimizer: AbstractOptimizer = (
        SGD(lr=setting.learning_rate, momentum=setting.momentum, weight_decay=decay)
        if setting.optimizer == "SGD"
        else AdamW(lr=setting.learning_rate, weight_decay=decay)
    )
    settings = {"batch_size": setting.batch_size, "steps": steps, "schedule": cosine(steps), "seed": seed}
    model = changes.pop("model", setting.make_model)
    return Recipe(
        lambda seed: model(), row_losses, TensorDataset(inputs, labels), optimizer, **{**settings, **changes}
    )


def plain_training(recipe: Recipe, setting: Setting) -> None:
    """Train with ``torch.optim`` on the batches of a recipe, without anything else."""
    inputs, labels = setting.data()[:2]
    model = recipe.model(0)
    settings = {"lr": setting.learning_rate, "weight_decay": setting.weight_decay}
    optimizer = (
        torch.optim.SGD(model.parameters(), momentum=setting.momentum, **settings)
        if setting.optimizer == "SGD"
        else torch.optim.AdamW(model.parameters(), **settings)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.schedule)
    for number in range(recipe.num_steps):
        rows = torch.from_numpy(recipe.order(number, num_rows=len(inputs), seed=0))
        optimizer.zero_grad()
        row_losses(model, (inputs[rows], labels[rows])).mean().backward()
        optimizer.step()
        schedule.step()


def cost(name: str) -> dict[str, Any]:
    """Return the cost of a replay for some targets."""
    model, what = name.split(", ")
    setting = SETTINGS[COSTS[model]]
    changes = STEPS[model]
    recipe = recipe_of(setting, 0, **changes)
    few = recipe_of(setting, 0, **{**changes, "steps": 2})
    few.train()  # imports for seconds when it is first called
    plain_training(few, setting)
    block = int(what.removeprefix("block ")) if what.startswith("block") else None
    settings = {"block": block} if block else {"max_bytes": int(what.removesuffix(" MiB")) << 20}
    count = block or NUM_BUDGETED
    parts = [torch.cat(both) for both in zip(setting.data()[2:], setting.data()[:2], strict=True)]
    targets = TensorDataset(*(part[:count] for part in parts))
    runs: list[Any] = []
    with memory_growth() as trained:
        runs.append(recipe.train())
    run = runs[0]
    smoothness = cpu_seconds(run.metasmoothness)
    with memory_growth() as growth, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        seconds = cpu_seconds(lambda: unrolled(run, targets, setting.measured(), **settings))
    train = cpu_seconds(recipe.train, REPEATS)
    plain = cpu_seconds(lambda: plain_training(recipe, setting), REPEATS)
    return {
        "targets": count,
        "steps": run.num_steps,
        "parameters": sum(p.numel() for p in run.final.parameters.values()),
        "train_seconds": train,
        "plain_seconds": plain,
        "seconds": seconds,
        "per_target": seconds / train / count,
        "per_target_plain": seconds / plain / count,
        "metasmoothness": smoothness / train,
        "mib": growth.mib,
        "train_mib": trained.mib,
    }


def standardized(scores: np.ndarray) -> np.ndarray:
    """Return scores with every target's column divided by its standard deviation."""
    wide = scores.astype(np.float64)
    deviation = wide.std(0)
    return wide / np.where(deviation > 0, deviation, 1.0)


def scores_of_run(name: str, seed: int, keep: Path) -> tuple[np.ndarray, dict[str, float]]:
    """Return the derivatives of one run and its figures; kept files are read."""
    path = kept(keep, name, f"unrolled, run {seed}")
    if not path.exists():
        setting = SETTINGS[name]
        targets = Rows(TensorDataset(*setting.data()[2:]), batch_size=TARGETS_AT_ONCE)
        start = time.process_time()
        run = recipe_of(setting, seed).train()
        trained = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            scores = unrolled(run, targets, setting.measured()).numpy()
        figures = {"metasmoothness": run.metasmoothness(), "train_seconds": trained - start}
        figures["seconds"] = time.process_time() - trained
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps(figures))
        np.save(path, scores)
    return np.load(path), json.loads(path.with_suffix(".json").read_text())


def expected(name: str, keep: str) -> dict[str, Any]:
    """Return scores over seeds of one run, several runs, and several runs with the default kernel."""
    truth = load(SETTINGS[name])
    path = kept(Path(keep), name, DEFAULT)
    kernel = (
        np.load(path)
        if path.exists()
        else METHODS[DEFAULT](Problem(SETTINGS[name], full_runs(SETTINGS[name], 1))).scores
    )
    found = [scores_of_run(name, seed, Path(keep)) for seed in range(NUM_RUNS)]
    runs = [standardized(scores) for scores, _ in found]
    mean = np.mean(runs, axis=0)
    candidates = {
        "default": kernel,
        "one run": runs[0],
        f"{NUM_RUNS} runs": mean,
        "one run and default": runs[0] + standardized(kernel),
        f"{NUM_RUNS} runs and default": standardized(mean) + standardized(kernel),
    }
    results: dict[str, Any] = {
        "ceiling": seed_noise_ceiling(truth.outputs).ceiling,
        "metasmoothness": [figures["metasmoothness"] for _, figures in found],
        "seconds": float(np.mean([figures["seconds"] for _, figures in found])),
        "train_seconds": float(np.mean([figures["train_seconds"] for _, figures in found])),
        "each run": [lds(one, truth)["mean"] for one in runs],
    }
    return results | {method: lds(scores, truth) for method, scores in candidates.items()}


def teacher(name: str) -> dict[str, Any]:
    """Return what a teacher changes, for the run that it knows and for other seeds."""
    setting, truth = SETTINGS[name], load(SETTINGS[name])
    inputs, labels, target_inputs, target_labels = setting.data()
    recipe = recipe_of(setting, 0)
    per_epoch = recipe.num_steps // setting.epochs
    run = recipe.train(interval=per_epoch)
    targets = TensorDataset(target_inputs[:NUM_TARGETS], target_labels[:NUM_TARGETS])
    few = TensorDataset(target_inputs[:NUM_TAUGHT], target_labels[:NUM_TAUGHT])
    model = run.model()
    states = [
        {**model.state_dict(), **run.states.get(per_epoch * e).parameters} for e in setting.checkpoint_epochs
    ]
    attributor = Attributor(model, setting.measured(), None, progress=False)
    attributor.featurize(TensorDataset(inputs, labels), states)
    scores = attributor.score(targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of metasmoothness, which is reported
        found = calibrate(scores, unrolled(run, few, setting.measured()))
    matrices = {"default": scores.numpy()}
    if found.kept:
        matrices["calibrated"] = calibrated_scores(scores, found).numpy()
    left_out = ~subset_masks(len(inputs), BUDGET, alpha=0.05)
    rows = Rows(targets, batch_size=NUM_TARGETS)
    repeated = retrain_many(
        run.leave_out_fn,
        left_out,
        lambda trained: outputs_of_model(trained, setting.measured(), rows, run.device),
        seeds=(0,),
    )
    truths = {
        "this run": Truth(left_out, repeated.outputs[:, :, NUM_TAUGHT:]),
        "other seeds": Truth(truth.masks, truth.outputs[:, :, NUM_TAUGHT:NUM_TARGETS]),
    }
    results: dict[str, Any] = {
        "metasmoothness": run.metasmoothness(),
        "kept": found.kept,
        "gain": [found.gain.mean, found.gain.low, found.gain.high],
    }
    for question, asked in truths.items():
        for method, matrix in matrices.items():
            results[f"{method}, {question}"] = lds(matrix[:, NUM_TAUGHT:], asked)
    return results


PARTS: dict[str, tuple[str, ...]] = {
    "smooth": tuple(TRAININGS),
    "cost": tuple(
        f"{model}, {what}"
        for model in COSTS
        for what in (*(f"block {block}" for block in BLOCKS), *(f"{budget} MiB" for budget in BUDGETS))
    ),
    "expected": PROBLEMS,
    "teacher": ("digits_gelu_adam", "digits_gelu_sgd", "digits_lr", "digits_relu"),
}


def main() -> None:
    """Run every row in a process of its own, write JSON after each."""
    parser = parser_of(__doc__, "unrolled.json")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--rows", nargs="*", help="only these rows of the parts")
    parser.add_argument("--missing", action="store_true", help="skip rows that are in the file")
    parser.add_argument("--keep", type=Path, default=Path("runs/scores"), help="folder of kept scores")
    args = parser.parse_args()
    for part in args.parts:
        for name in PARTS[part]:
            done = json.loads(args.out.read_text())["parts"] if args.out.exists() else {}
            key = f"{part} / {name}"
            if (args.rows and name not in args.rows) or (
                args.missing and "fails" not in done.get(key, {"fails": 1})
            ):
                continue
            work = {"smooth": smooth, "cost": cost, "expected": expected, "teacher": teacher}[part]
            figures = run_worker(work, name, *([str(args.keep)] if part == "expected" else []))
            save_parts(args.out, surroundings(peers=False), {key: figures})


if __name__ == "__main__":
    main()
