"""Featurize runs (gradients, q, projection, storage) of trak_lite, the original TRAK and dattri, on one thread.

Every run is a separate process, in the order trak_lite, peers, trak_lite. Figures are medians of CPU time. Each tool
first featurizes two samples to 16 numbers, to load libraries. "x plain" is the time of a featurize call divided by
that of a plain forward and backward pass over the same batches, which follows in the same process. For trak_lite it
includes everything a call does: digests of data and weights, choosing and checking the gradient computer, creating
the store, and writing to disk, for 500 to 12,000 samples (a short run). A second figure excludes what happens once
(a call with the first batch only). Peak memory is the growth of the resident set during the first call, including
construction of the tool, beyond model, data and libraries (Linux only).

Times of the peers exclude their construction. They get few batches, because they are slow. Each uses its CPU
defaults. For traker 0.3.2 these are a dense normal projection in float16 and features on disk. On processors without
float16 products this takes 7 to 20 times as long as float32 (``use_half_precision=False``): both are measured for
models with few parameters, only float32 for models with many (``--half`` measures both everywhere), and the goals
refer to the faster one. dattri 0.3.0 (``TRAKAttributor.cache``) projects with a dense normal matrix in float32,
holds features in memory and solves with their kernel, here damped by 1, because there are fewer rows than K. f of
the GPT is the mean log-likelihood, with q = 1; all other models are classifiers with the margin and its q.

Run:  python -m benchmarks.bench_featurize [--rounds 1] [--half] [--cases digits-512 ...] [--tools original ...]
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import measuring, models
from benchmarks.bench_gradients import CASES as GRADIENT_CASES
from benchmarks.bench_gradients import margin, of_one_sample, original_output
from benchmarks.measuring import cpu_seconds, memory_growth, run_worker

OURS, ORIGINAL, ORIGINAL_HALF = "trak_lite", "original, float32", "original"
SMALL = 500_000  # parameters up to which the original's float16 is bearable on any processor
INNER_ROUNDS = 2  # of ours, in one process
ModelOutput = Callable[..., Tensor]
Batches = list[tuple[Tensor, ...]]


def digit_batches(count: int) -> Batches:
    """Return batches of 32 of scikit-learn's 8x8 digits."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images / 16).float().unsqueeze(1)
    labels = torch.from_numpy(digits.target)
    return list(zip(images.split(32), labels.split(32), strict=True))[:count]


def drawn(name: str) -> Callable[[int], Batches]:
    """Return a function that draws batches of a case of the gradient benchmark."""
    return lambda count: [GRADIENT_CASES[name][1]() for _ in range(count)]


def dataset(batches: Batches) -> TensorDataset:
    """Return the samples of all batches in order."""
    return TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


@dataclass(frozen=True, slots=True)
class Case:
    """Model, data and settings that all tools featurize."""

    model: Callable[[], nn.Module]
    batches: Callable[[int], Batches]
    output: ModelOutput
    proj_dim: int
    ours: int
    """Batches of our runs."""
    peers: int
    """Batches of theirs."""
    goals: dict[str, float] = field(default_factory=dict)
    """``faster``: than the original, at least; ``to_plain``: at most; ``memory``: of the original's, at most."""


def _case(name: str, ours: int, peers: int, **goals: float) -> Case:
    model, _, output = GRADIENT_CASES[name]
    return Case(model, drawn(name), output, 512, ours, peers, goals)


CASES = {
    "digits-512": Case(models.digits_cnn, digit_batches, margin, 512, 56, 2, {"faster": 10}),
    "digits-2048": Case(models.digits_cnn, digit_batches, margin, 2048, 56, 1, {"faster": 30}),
    "cnn-512": _case("cnn", 48, 1, faster=60, to_plain=1.25),
    "resnet9-512": _case("resnet9_gn", 16, 1, faster=15, to_plain=1.4, memory=0.25),
    "vit-512": _case("vit", 32, 1, faster=35, to_plain=1.4, memory=0.25),
    "gpt-512": _case("gpt", 48, 1, faster=35, to_plain=1.25, memory=0.25),
    "lstm-512": _case("lstm", 64, 2),
    "mlp-512": _case("mlp", 192, 1, faster=500, to_plain=1.25, memory=0.25),
}


# ---------------------------------------------------------------- the tools


@dataclass(frozen=True, slots=True)
class Job:
    """One featurize run."""

    model: nn.Module
    output: ModelOutput
    data: TensorDataset
    batch: int
    proj_dim: int
    folder: str

    @property
    def is_classifier(self) -> bool:
        """Whether f is the margin of a label, for which all tools define q."""
        return self.output is margin


def trak_lite(job: Job) -> Callable[[], Any]:
    """trak_lite: ``Attributor`` with its defaults."""
    from trak_lite import Attributor

    task = "image_classification" if job.is_classifier else job.output
    attributor = Attributor(
        job.model,
        task,
        f"{job.folder}/run.zarr",
        proj_dim=job.proj_dim,
        layout="joint",
        batch_size=job.batch,
    )
    return lambda: attributor.featurize(job.data)


def original(job: Job, *, half: bool = True) -> Callable[[], Any]:
    """The original TRAK and its defaults on a CPU."""
    from trak import TRAKer

    traker = TRAKer(
        job.model,
        "image_classification" if job.is_classifier else original_output(job.output),
        train_set_size=len(job.data),
        save_dir=job.folder,
        device="cpu",
        proj_dim=job.proj_dim,
        use_half_precision=half,
        logging_level=100,
    )
    traker.load_checkpoint(job.model.state_dict(), model_id=0)

    def run() -> None:
        for batch in DataLoader(job.data, batch_size=job.batch):
            traker.featurize(batch, num_samples=len(batch[0]))

    return run


def dattri(job: Job) -> Callable[[], Any]:
    """The TRAK of dattri with its CPU defaults, with the same f."""
    from dattri.algorithm import TRAKAttributor
    from dattri.task import AttributionTask

    def value(params: Any, sample: Any) -> Tensor:
        return of_one_sample(job.output, job.model, params, sample)

    def probability(params: Any, sample: Any) -> Tensor:
        return value(params, sample).sigmoid() if job.is_classifier else value(params, sample).exp()

    attributor = TRAKAttributor(
        task=AttributionTask(value, job.model, job.model.state_dict()),
        correct_probability_func=probability,
        projector_kwargs={"proj_dim": job.proj_dim},
        regularization=1.0,
    )
    return lambda: attributor.cache(DataLoader(job.data, batch_size=job.batch))


TOOLS: dict[str, Callable[[Job], Callable[[], Any]]] = {
    OURS: trak_lite,
    ORIGINAL_HALF: original,
    ORIGINAL: partial(original, half=False),
    "dattri": dattri,
}


# ---------------------------------------------------------------- measuring


class Runs:
    """Featurize runs of one tool on one case, and plain passes over the same batches."""

    def __init__(self, tool: str, case: Case) -> None:
        torch.manual_seed(0)
        self.tool, self.case = tool, case
        self.model, self.plain_model = case.model().eval(), case.model().eval()
        self.plain_model.load_state_dict(self.model.state_dict())
        self.batches = case.batches(case.ours if tool == OURS else case.peers)

    def prepare(self, batches: Batches, proj_dim: int, folder: str) -> Callable[[], Any]:
        """Construct the tool; return a function that featurizes the batches."""
        job = Job(self.model, self.case.output, dataset(batches), len(batches[0][0]), proj_dim, folder)
        return TOOLS[self.tool](job)

    def plain(self) -> None:
        """Run a forward and backward pass over every batch."""
        params = list(self.plain_model.parameters())
        for batch in self.batches:
            torch.autograd.grad(self.case.output(self.plain_model, batch).sum(), params)

    def warm_up(self, folder: str) -> None:
        """Load libraries."""
        some = [tuple(part[:2] for part in self.batches[0])]
        self.prepare(some, 16, f"{folder}/warm")()
        self.plain()

    def measure(self, folder: str) -> dict[str, float | None]:
        """Return the times of one run and of the plain passes after it, and the growth of memory."""
        with memory_growth() as growth:
            run = self.prepare(self.batches, self.case.proj_dim, f"{folder}/whole")
            whole = cpu_seconds(run)
            del run
        plain = cpu_seconds(self.plain)
        figures = {"cpu_s": whole, "plain_s": plain, "to_plain": whole / plain, "peak_mib": growth.mib}
        further = len(self.batches) - 1
        if self.tool == OURS and further:
            first = cpu_seconds(self.prepare(self.batches[:1], self.case.proj_dim, f"{folder}/first"))
            figures["further_to_plain"] = (whole - first) / further / (plain / len(self.batches))
        return figures


def worker(tool: str, name: str) -> dict[str, Any]:
    """Run one tool on one case and return its figures."""
    warnings.simplefilter("ignore")
    runs = Runs(tool, CASES[name])
    with tempfile.TemporaryDirectory() as folder:
        runs.warm_up(folder)
        found = [runs.measure(f"{folder}/{turn}") for turn in range(INNER_ROUNDS if tool == OURS else 1)]
    rows = sum(len(batch[0]) for batch in runs.batches)
    figures = {
        key: statistics.median(figures[key] for figures in found)
        for key, value in found[0].items()
        if value is not None and key != "peak_mib"
    }
    return {
        "rows": rows,
        "sample_ms": 1e3 * figures["cpu_s"] / rows,
        "plain_sample_ms": 1e3 * figures["plain_s"] / rows,
        **{key: value for key, value in figures.items() if key.endswith("to_plain")},
        "peak_mib": found[0]["peak_mib"],
        "process_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def compare(name: str, peers: list[str], rounds: int) -> dict[str, Any]:
    """Run trak_lite and the peers in turn; return the medians of every tool and their ratios."""
    case = CASES[name]
    found: dict[str, list[dict[str, Any]]] = {}
    for tool in [OURS, *peers] * rounds + [OURS]:
        figures = run_worker(worker, tool, name)
        print(name, tool, figures, file=sys.stderr, flush=True)
        found.setdefault(tool, []).append(figures)
    rows = {tool: _medians(runs) for tool, runs in found.items()}
    ours = rows[OURS]
    for tool in peers:
        if "fails" not in rows[tool] and "fails" not in ours:
            rows[tool]["ours_is_faster"] = rows[tool]["sample_ms"] / ours["sample_ms"]
            if rows[tool]["peak_mib"]:
                rows[tool]["ours_of_its_memory"] = ours["peak_mib"] / rows[tool]["peak_mib"]
    batch = len(case.batches(1)[0][0])
    return {"proj_dim": case.proj_dim, "batch": batch, "rounds": rounds, "goals": case.goals, "tools": rows}


def _medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of every figure, or the reason why a run failed."""
    failed = [run for run in runs if "fails" in run]
    if failed:
        return failed[0]
    return {
        key: statistics.median_low(run[key] for run in runs) if isinstance(value, int) else _median(key, runs)
        for key, value in runs[0].items()
    }


def _median(key: str, runs: list[dict[str, Any]]) -> float | None:
    """Return the median of a figure, ``None`` if the system does not report it."""
    return None if runs[0][key] is None else statistics.median(run[key] for run in runs)


def print_rows(name: str, part: dict[str, Any]) -> None:
    """Print the rows of one case in the Markdown table."""
    for tool, row in part["tools"].items():
        if "fails" in row:
            print(f"| {name} | {tool} | fails: {row['fails']} |")
            continue
        further = f" ({row['further_to_plain']:.2f})" if "further_to_plain" in row else ""
        peak = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
        faster = f"{row['ours_is_faster']:.1f}x" if "ours_is_faster" in row else ""
        print(
            f"| {name} | {tool} | {row['rows']} | {row['sample_ms']:.2f} | {row['to_plain']:.2f}{further} | {faster} "
            f"| {peak} |",
            flush=True,
        )


def _sample_ms(row: dict[str, Any]) -> float:
    return row["sample_ms"]


def print_goals(name: str, part: dict[str, Any]) -> None:
    """Print each goal of a case beside its figure."""
    ours, goals = part["tools"][OURS], part["goals"]
    originals = [part["tools"].get(tool, {}) for tool in (ORIGINAL, ORIGINAL_HALF)]
    theirs = min((row for row in originals if "ours_is_faster" in row), key=_sample_ms, default={})
    if "faster" in goals and theirs:
        print(f"- {name}: at least {goals['faster']}x the original: {theirs['ours_is_faster']:.1f}x")
    if "to_plain" in goals and "to_plain" in ours:
        further = ours.get("further_to_plain", ours["to_plain"])
        print(
            f"- {name}: at most {goals['to_plain']}x plain: {ours['to_plain']:.2f}x, per further batch {further:.2f}x"
        )
    if "memory" in goals and "ours_of_its_memory" in theirs:
        print(
            f"- {name}: at most {goals['memory']} of the original's memory: {theirs['ours_of_its_memory']:.2f}"
        )


def main() -> None:
    """Compare on every case, print a table and the goals, write JSON."""
    parser = measuring.parser_of(__doc__, "featurize.json")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=list(TOOLS), help="beside ours")
    parser.add_argument("--half", action="store_true", help="the original in float16 on large models too")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    parts = {}
    print(
        "| case | tool | rows | CPU ms per sample | x plain (per further batch) | ours is faster | peak MiB |"
    )
    print("|---|---|--:|--:|--:|--:|--:|")
    for name in args.cases:
        size = sum(p.numel() for p in CASES[name].model().parameters())
        skipped = (OURS,) if args.half or size <= SMALL else (OURS, ORIGINAL_HALF)
        parts[name] = compare(name, [tool for tool in args.tools if tool not in skipped], args.rounds)
        print_rows(name, parts[name])
    print("\nGoals, and what was measured:")
    for name, part in parts.items():
        print_goals(name, part)
    measuring.save_parts(args.out, measuring.surroundings(), parts)


if __name__ == "__main__":
    main()
