"""The zoo: published architectures through all public calls with default settings.

Each architecture is featurized, scored, interrupted and resumed, ranked and reported. Its per-sample gradients are
compared with a loop over samples in float64, its rows with the projected gradients of that loop, its scores with
dense NumPy (tests/zoo/zoo_path.py). The exit status is 1 unless each is right or refused by a named error. Requires
transformers and peft (extra zoo); timm's models run if timm is installed. Each runs in a separate process.

Gradients in float32 are compared too, of text at an even and at an odd length. With --mixtures the mixtures of experts
and hybrids of transformers run instead, at an even and at an odd length, in float32 and in bfloat16.

Run:  python -m benchmarks.zoo [--only NAME ...] [--jobs 2]      (writes benchmarks/results/zoo.json; about 20 minutes)
      python -m benchmarks.zoo --mixtures [--only KIND ...]      (writes benchmarks/results/zoo_mixtures.json)
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import RESULTS, surroundings
from trak_lite.errors import TrakLiteError

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "zoo")]

from zoo_cases import Architecture, shortened  # noqa: E402  (found through the line above)
from zoo_path import (  # noqa: E402
    Samples,
    Wrong,
    check_float32_gradients,
    cost_against_plain,
    run_whole_path,
)
from zoo_published import PUBLISHED  # noqa: E402
from zoo_timm import let_torchvision_import, timm_models  # noqa: E402

TRAIN_ROWS, TARGETS = 4, 2
NO_RULE_FOR_VMAP = "There is a performance drop because we have not yet implemented the batching rule"
"""torch's own warning where the functional engine goes through an operation that vmap runs sample by sample."""
DIGITS = 2


def architectures() -> dict[str, Architecture]:
    """Return every entry by name; timm's only if it is installed."""
    let_torchvision_import()
    from zoo_hub import HUB

    timm = timm_models() if importlib.util.find_spec("timm") else []
    found = [*HUB, *PUBLISHED, *timm]
    by_name = {entry.name: entry for entry in found}
    if len(by_name) != len(found):
        raise ValueError("Two entries of the zoo have the same name.")
    return by_name


def measured(name: str) -> dict[str, Any]:
    """Run one architecture; return the result."""
    torch.set_num_threads(1)
    entry = architectures()[name]
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", NO_RULE_FOR_VMAP)
        train, targets = entry.samples(TRAIN_ROWS, 1), entry.samples(TARGETS, 2)
        try:
            found = run_whole_path(
                entry.make,
                entry.task,
                entry.output,
                train,
                targets,
                Path(folder),
                tokens=entry.tokens,
                draws=entry.draws,
            )
            odd = Samples([shortened(sample) for sample in train.samples])
            for key, samples in (("float32 error", train), ("float32 error at an odd length", odd)):
                if "odd" not in key or odd.samples[0] is not train.samples[0]:
                    found[key] = check_float32_gradients(entry.make(), entry.task, entry.output, samples)[1]
            found["cost"] = cost_against_plain(entry.make(), entry.task, train)
            outcome = {"outcome": "right", **found}
        except TrakLiteError as error:
            outcome = {"outcome": "refused", "error": type(error).__name__, "message": str(error)}
        except Wrong as error:
            outcome = {"outcome": "WRONG", "message": str(error)}
        except Exception as error:
            outcome = {"outcome": "FAILED", "error": type(error).__name__, "message": str(error)[:300]}
    figures = {
        key: float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
        for key, value in outcome.items()
    }
    return {"domain": entry.domain, **figures, "seconds": round(time.process_time() - start, 1)}


def measured_mixture(kind: str) -> dict[str, Any]:
    """Run one mixture or hybrid in each dtype and at each length; return the engines and errors."""
    torch.set_num_threads(1)
    let_torchvision_import()
    from zoo_mixtures import built, compared, every_run, next_tokens

    outcome: dict[str, Any] = {"outcome": "right"}
    try:
        next_tokens(built(kind, torch.float32), {"input_ids": torch.ones(2, 8, dtype=torch.long)})
    except Exception as error:
        return {"outcome": "does not run by itself", "message": f"{type(error).__name__}: {error}"[:200]}
    for dtype, length in every_run():
        key = f"{str(dtype).removeprefix('torch.')}, {length} tokens"
        try:
            next_tokens(built(kind, dtype), {"input_ids": torch.ones(2, length, dtype=torch.long)})
        except Exception as error:  # as inkling2_text in bfloat16
            outcome[key] = f"the model does not run by itself: {type(error).__name__}: {error}"[:200]
            continue
        try:
            engine, error = compared(kind, dtype, length)
            outcome[key] = f"{engine}, {error:.2g}"
        except Wrong as wrong:
            outcome |= {"outcome": "WRONG", key: str(wrong)}
        except TrakLiteError as refusal:
            outcome[key] = f"{type(refusal).__name__}: {refusal}"[:300]
            outcome["outcome"] = "WRONG" if outcome["outcome"] == "WRONG" else "refused"
        except Exception as failure:
            outcome |= {"outcome": "FAILED", key: f"{type(failure).__name__}: {failure}"[:300]}
    return outcome


def mixtures_measured(only: list[str] | None, jobs: int, path: Path) -> int:
    """Run the mixtures and hybrids, and write their summary; return the exit status."""
    let_torchvision_import()
    from zoo_mixtures import mixtures

    rows: dict[str, dict[str, Any]] = {}
    for kind, row in all_measured(only or mixtures(), jobs, measured_mixture):
        rows[kind] = row
        print(kind, row, flush=True)
    found = [row["outcome"] for row in rows.values()]
    versions = {"transformers": importlib.metadata.version("transformers")}
    summary = {outcome: found.count(outcome) for outcome in sorted(set(found))}
    table = {**surroundings(), "versions": versions, "summary": summary, "models": dict(sorted(rows.items()))}
    path.write_text(json.dumps(table, indent=1) + "\n")
    print(summary)
    return int(any(outcome in ("WRONG", "FAILED") for outcome in found))


def all_measured(
    names: list[str], jobs: int, measure: Callable[[str], dict[str, Any]] = measured
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the results as they finish, from reused processes."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(measure, name): name for name in names}
        for future in as_completed(futures):
            yield futures[future], future.result()


def save(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Write the table, sorted by domain and name; keep rows of architectures that were not run."""
    before = json.loads(path.read_text())["models"] if path.exists() else {}
    models = {**before, **rows}
    versions = {
        name: importlib.metadata.version(name)
        for name in ("transformers", "peft", "timm")
        if importlib.util.find_spec(name)
    }
    table = {
        **surroundings(),
        "versions": versions,
        "train rows": TRAIN_ROWS,
        "models": dict(sorted(models.items(), key=lambda item: (item[1]["domain"], item[0]))),
    }
    path.write_text(json.dumps(table, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="names of architectures")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--mixtures", action="store_true", help="mixtures of experts and hybrids alone")
    parser.add_argument("--out", type=Path, help="where the table goes")
    options = parser.parse_args()
    out = options.out or RESULTS / ("zoo_mixtures.json" if options.mixtures else "zoo.json")
    if options.mixtures:
        return mixtures_measured(options.only, options.jobs, out)
    rows, broken = {}, 0
    for name, row in all_measured(options.only or list(architectures()), options.jobs):
        rows[name] = row
        broken += row["outcome"] not in ("right", "refused")
        print(name, row, flush=True)
        save(out, rows)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
