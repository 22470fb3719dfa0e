"""CPU time and memory of whole featurize runs of trak_lite and of the original TRAK 0.3.2, on one thread.

Each run is a separate process: model, data, gradients, projection and store, one checkpoint. CPU seconds include
construction and the featurize call; peak memory is that of the process. Both tools use the same model, data, K and
batch size, and store float16. ``bench_featurize`` compares more models and tools, per sample and without loading
libraries.

Run:  python -m benchmarks.bench_attributor [--rounds 3] [--cases digits-512 ...]
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks import models
from benchmarks.bench_featurize import TOOLS as RUNS
from benchmarks.bench_featurize import Job, dataset, digit_batches
from benchmarks.bench_gradients import margin
from benchmarks.measuring import RESULTS as FOLDER
from benchmarks.measuring import cpu_seconds, run_worker

CASES = {
    "digits-512": {"model": "digits_cnn", "proj_dim": 512, "rows": 512},
    "digits-2048": {"model": "digits_cnn", "proj_dim": 2048, "rows": 256},
    "resnet9-512": {"model": "resnet9", "proj_dim": 512, "rows": 64},
}
TOOLS = ("trak_lite", "original")
BATCH = 32
RESULTS = FOLDER / "attributor.json"


def load(case: dict[str, Any]) -> tuple[nn.Module, TensorDataset]:
    """Return a seeded model and a dataset of the case's rows."""
    torch.manual_seed(0)
    model = getattr(models, case["model"])().eval()
    if case["model"] == "digits_cnn":
        return model, dataset(digit_batches(case["rows"] // BATCH))
    return model, TensorDataset(torch.randn(case["rows"], 3, 32, 32), torch.randint(10, (case["rows"],)))


def worker(tool: str, name: str) -> None:
    """Run one tool on one case and print its figures as JSON."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model, data = load(CASES[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        job = Job(model, margin, data, BATCH, CASES[name]["proj_dim"], folder)
        seconds = cpu_seconds(lambda: RUNS[tool](job)())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"cpu_s": seconds, "peak_mib": peak / 1024, "before_mib": before / 1024}))


def measure(tool: str, name: str) -> dict[str, float]:
    """Run a worker in a separate process."""
    figures = run_worker("benchmarks.bench_attributor", "--worker", tool, name)
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


def main() -> None:
    """Compare on every case, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--worker", nargs=2, metavar=("TOOL", "CASE"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker)
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
    args.out.write_text(json.dumps({**machine, "cases": summaries}, indent=1) + "\n")


if __name__ == "__main__":
    main()
