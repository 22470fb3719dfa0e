"""Whole featurize runs of trak_lite's Attributor and of the original TRAK 0.3.2, in turn, on one thread.

Each run is a process of its own: model, data, gradients, projection and store, one checkpoint. CPU seconds are those of
the featurize call; peak memory is the process's. Both use the same model, data, K and batch size and store float16.

Run:  python -m benchmarks.bench_attributor [--rounds 3] [--cases digits-512 ...]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

CASES = {
    "digits-512": {"model": "digits_cnn", "proj_dim": 512, "rows": 512},
    "digits-2048": {"model": "digits_cnn", "proj_dim": 2048, "rows": 256},
    "resnet9-512": {"model": "resnet9", "proj_dim": 512, "rows": 64},
}
TOOLS = ("trak_lite", "original")
BATCH = 32
RESULTS = Path(__file__).parent / "results" / "attributor.json"


def load(case: dict[str, Any]) -> tuple[Any, Any]:
    """Return a seeded model and a dataset of the case's rows."""
    import torch
    from torch.utils.data import TensorDataset

    from benchmarks import models

    torch.manual_seed(0)
    model = getattr(models, case["model"])().eval()
    if case["model"] == "digits_cnn":
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.from_numpy(digits.images[: case["rows"]] / 16).float().unsqueeze(1)
        labels = torch.from_numpy(digits.target[: case["rows"]])
    else:
        images = torch.randn(case["rows"], 3, 32, 32)
        labels = torch.randint(10, (case["rows"],))
    return model, TensorDataset(images, labels)


def run_trak_lite(case: dict[str, Any], model: Any, data: Any, folder: str) -> None:
    """Featurize with the native facade and its defaults."""
    from trak_lite import Attributor

    attributor = Attributor(model, "image_classification", f"{folder}/run.zarr", proj_dim=case["proj_dim"])
    attributor.featurize(data, batch_size=BATCH)


def run_original(case: dict[str, Any], model: Any, data: Any, folder: str) -> None:
    """Featurize with the original and its defaults on a CPU."""
    from torch.utils.data import DataLoader
    from trak import TRAKer

    traker = TRAKer(
        model,
        "image_classification",
        train_set_size=len(data),
        save_dir=folder,
        device="cpu",
        proj_dim=case["proj_dim"],
        logging_level=100,
    )
    traker.load_checkpoint(model.state_dict(), model_id=0)
    for batch in DataLoader(data, batch_size=BATCH):
        traker.featurize(batch, num_samples=len(batch[0]))


def worker(tool: str, name: str) -> None:
    """Run one tool on one case and print its figures as JSON."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model, data = load(CASES[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = {"trak_lite": run_trak_lite, "original": run_original}[tool]
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        run(CASES[name], model, data, folder)
        seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"cpu_s": seconds, "peak_mib": peak / 1024, "before_mib": before / 1024}))


def measure(tool: str, name: str) -> dict[str, float]:
    """Run a worker in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_attributor", "--worker", tool, name],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str, rounds: int) -> dict[str, Any]:
    """Run both tools in turn and return medians and pairwise ratios."""
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
    import torch

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
