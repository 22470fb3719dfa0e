"""CPU time and memory of whole featurize runs of trak_lite and of the original TRAK 0.3.2, on one thread.

Each run is a separate process: model, data, gradients, projection and store, one checkpoint. CPU seconds include
construction and the featurize call; peak memory is that of the process. Both tools use the same model, data, K and
batch size, and store float16. ``bench_featurize`` compares more models and tools, per sample and without loading
libraries.

With ``--whole`` it measures the default run from featurizing to scores instead: a residual perceptron with layer norms
on 18 principal components of the noisy digits of ``benchmarks/lds`` (1,200 train rows, 300 targets), checkpoints of one
run with AdamW, beside the sum of kronfluence's EK-FAC over them, and beside another version of trak_lite. With
``--problem text`` it is a part of ``python_lm`` of ``benchmarks/lds`` at its weights before fine-tuning: the byte-level
GPT, 96 train rows of 128 bytes, 24 targets, one checkpoint (``--checkpoints 1``). Other problems are those of
``benchmarks/lds``, at the last checkpoints of one run.

Run:  python -m benchmarks.bench_attributor [--rounds 3] [--cases digits-512 ...]
      python -m benchmarks.bench_attributor --whole [--problem text] [--checkpoints 10] [--before OTHER_TRAK_LITE]
"""

from __future__ import annotations

import copy
import json
import os
import platform
import resource
import statistics
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks import models
from benchmarks.bench_featurize import TOOLS as RUNS
from benchmarks.bench_featurize import Job, dataset, digit_batches
from benchmarks.bench_gradients import margin
from benchmarks.lds.data import digits
from benchmarks.lds.language import pretrained_gpt, python_chunks
from benchmarks.lds.peers import kronfluence_scores
from benchmarks.lds.settings import SETTINGS
from benchmarks.lds.truth import full_runs
from benchmarks.measuring import ROOT, cpu_seconds, parser_of, run_worker
from trak_lite import Attributor
from trak_lite.modelout_functions import resolve_task

CASES = {
    "digits-512": {"model": "digits_cnn", "proj_dim": 512, "rows": 512},
    "digits-2048": {"model": "digits_cnn", "proj_dim": 2048, "rows": 256},
    "resnet9-512": {"model": "resnet9", "proj_dim": 512, "rows": 64},
}
TOOLS = ("trak_lite", "original")
BATCH = 32


def load(case: dict[str, Any]) -> tuple[nn.Module, TensorDataset]:
    """Return a seeded model and a dataset of the case's rows."""
    torch.manual_seed(0)
    model = getattr(models, case["model"])().eval()
    if case["model"] == "digits_cnn":
        return model, dataset(digit_batches(case["rows"] // BATCH))
    return model, TensorDataset(torch.randn(case["rows"], 3, 32, 32), torch.randint(10, (case["rows"],)))


def worker(tool: str, name: str) -> dict[str, float]:
    """Run one tool on one case and return its figures."""
    warnings.simplefilter("ignore")
    model, data = load(CASES[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        job = Job(model, margin, data, BATCH, CASES[name]["proj_dim"], folder)
        seconds = cpu_seconds(lambda: RUNS[tool](job)())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"cpu_s": seconds, "peak_mib": peak / 1024, "before_mib": before / 1024}


def measure(tool: str, name: str) -> dict[str, float]:
    """Run a worker in a separate process."""
    figures = run_worker(worker, tool, name)
    if "fails" in figures:
        raise RuntimeError(f"{tool} failed on {name}: {figures['fails']}")
    return figures


def compare(name: str, rounds: int) -> dict[str, Any]:
    """Run both tools alternately; return medians and pairwise ratios."""
    found: dict[str, list[dict[str, float]]] = {tool: [] for tool in TOOLS}
    for _ in range(rounds):
        for tool in TOOLS:
            found[tool].append(measure(tool, name))
    ratios = [b["cpu_s"] / a["cpu_s"] for a, b in zip(*found.values(), strict=True)]
    summary: dict[str, Any] = {
        "case": name,
        **CASES[name],
        "batch": BATCH,
        "ratio": statistics.median(ratios),
    }
    summary["ratio_range"] = [min(ratios), max(ratios)]
    for tool, runs in found.items():
        seconds = statistics.median(run["cpu_s"] for run in runs)
        summary[tool] = {
            "cpu_s": seconds,
            "samples_per_cpu_s": CASES[name]["rows"] / seconds,
            "peak_mib": statistics.median(run["peak_mib"] for run in runs),
        }
    return summary


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def trained(count: int) -> tuple[nn.Module, list[dict[str, Tensor]], TensorDataset, TensorDataset]:
    """Return the perceptron, the weights after each of its ``count`` epochs, the train rows and the targets."""
    train, labels, targets, theirs = digits()
    flat = train.flatten(1) - train.flatten(1).mean(0)
    axes = torch.linalg.svd(flat, full_matrices=False).Vh[:18].T
    x, aims = flat @ axes, (targets.flatten(1) - train.flatten(1).mean(0)) @ axes
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(18, 48), _Block(48), _Block(48), nn.LayerNorm(48), nn.Linear(48, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    states = models.train(model, x, labels, optimizer, epochs=count, batch_size=64)
    return model.eval(), states, TensorDataset(x, labels), TensorDataset(aims, theirs)


def texts(count: int) -> tuple[nn.Module, list[dict[str, Tensor]], TensorDataset, TensorDataset]:
    """Return the byte-level GPT of ``python_lm``, its weights ``count`` times smaller each, train rows and targets."""
    model, (train, _, targets, _) = pretrained_gpt("python").eval(), python_chunks()
    rows, aims = train[:96], targets[:24]
    states = [{name: value * 0.99**k for name, value in model.state_dict().items()} for k in range(count)]
    return model, states, TensorDataset(rows, rows), TensorDataset(aims, aims)


def of_lds(name: str, count: int) -> tuple[nn.Module, list[dict[str, Tensor]], TensorDataset, TensorDataset]:
    """Return the model of a problem of ``benchmarks/lds``, its last ``count`` checkpoints, train rows and targets."""
    setting = SETTINGS[name]
    states, data = full_runs(setting, 1)[0][-count:], setting.data()
    return setting.make_model().eval(), states, TensorDataset(*data[:2]), TensorDataset(*data[2:])


OF_LDS = ("digits_mlp", "digits_cnn", "topics_lm")
PROBLEMS = {
    "digits": (trained, "image_classification", "whole_run"),
    "text": (texts, "causal_language_modeling", "whole_run_text"),
    **{name: (partial(of_lds, name), SETTINGS[name].task, f"whole_run_{name}") for name in OF_LDS},
}
"""The problem of ``--whole``, its task, and its name in the results."""


def whole_run(tool: str, problem: str, count: int) -> dict[str, Any]:
    """Return the CPU seconds of a run from featurizing to scores, and the norm of the scores if they are ours."""
    warnings.simplefilter("ignore")
    make, name, _ = PROBLEMS[problem]
    model, states, train, targets = make(count)
    with tempfile.TemporaryDirectory() as folder:
        if tool == "kronfluence":
            return {"cpu_s": cpu_seconds(lambda: _kronfluence(model, states, train, targets, name))}
        made = Attributor(model, name, f"{folder}/store", progress=False)
        unfitted = Attributor(model, name, f"{folder}/store", progress=False, method="GradDot")
        parts = {"rows_cpu_s": cpu_seconds(lambda: unfitted.featurize(train, checkpoints=states))}
        parts["fit_cpu_s"] = cpu_seconds(lambda: made.featurize(train, checkpoints=states))
        parts["score_cpu_s"] = cpu_seconds(lambda: made.score(targets))
        norm = float(torch.from_numpy(made.scores().numpy()).double().norm())
    return {"cpu_s": sum(parts.values()), **parts, "norm": norm}


def _kronfluence(
    model: nn.Module,
    states: list[dict[str, Tensor]],
    train: TensorDataset,
    targets: TensorDataset,
    task: str,
) -> None:
    """Compute EK-FAC scores at every checkpoint, of images in batches of 256, which are faster than smaller ones."""
    size = 256 if train.tensors[1].dim() == 1 else 50
    for state in states:
        own = copy.deepcopy(model)
        own.load_state_dict(state)
        kronfluence_scores(own, resolve_task(task), train, targets, size, 1e-8, strategy="ekfac")


def compare_whole(problem: str, count: int, rounds: int, before: Path | None) -> dict[str, Any]:
    """Run all tools alternately on the whole run; return the figures of every round."""
    known = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    environments = {"trak_lite": known, "kronfluence": known}
    if before is not None:
        path = os.pathsep.join((str(before.resolve()), str(ROOT), known["PYTHONPATH"]))
        environments["trak_lite before"] = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    found: dict[str, list[dict[str, Any]]] = {tool: [] for tool in environments}
    for _ in range(rounds):
        for tool, environment in environments.items():
            figures = run_worker(whole_run, tool, problem, count, environment=environment)
            print(tool, figures, flush=True)
            found[tool].append(figures)
    return {"checkpoints": count, "rounds": found}


def main() -> None:
    """Compare on every case, print a table, write JSON."""
    parser = parser_of(__doc__, "attributor.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--whole", action="store_true", help="measure the run from featurizing to scores")
    parser.add_argument("--checkpoints", type=int, default=10)
    parser.add_argument(
        "--before", type=Path, help="folder that contains trak_lite of another version, and no benchmarks"
    )
    parser.add_argument("--problem", default="digits", choices=list(PROBLEMS), help="of --whole")
    args = parser.parse_args()
    if args.whole:
        results = json.loads(args.out.read_text()) if args.out.exists() else {}
        compared = compare_whole(args.problem, args.checkpoints, args.rounds, args.before)
        results[PROBLEMS[args.problem][2]] = compared
        args.out.write_text(json.dumps(results, indent=1) + "\n")
        return
    summaries = []
    print("| case | samples per CPU second, ours | original 0.3.2 | ratio | peak MiB, ours | original |")
    print("|---|--:|--:|--:|--:|--:|")
    for name in args.cases:
        summary = compare(name, args.rounds)
        summaries.append(summary)
        ours, theirs = summary["trak_lite"], summary["original"]
        print(
            f"| {name} | {ours['samples_per_cpu_s']:.1f} | {theirs['samples_per_cpu_s']:.1f} "
            f"| {summary['ratio']:.1f} | {ours['peak_mib']:.0f} | {theirs['peak_mib']:.0f} |",
            flush=True,
        )
    machine = {"machine": platform.machine(), "torch": torch.__version__, "threads": 1, "rounds": args.rounds}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(args.out.read_text()) if args.out.exists() else {}
    args.out.write_text(json.dumps({**kept, **machine, "cases": summaries}, indent=1) + "\n")


if __name__ == "__main__":
    main()
