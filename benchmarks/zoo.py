"""The zoo: published architectures through all public calls with default settings.

Each architecture is featurized, scored, interrupted and resumed, ranked and reported. Its per-sample gradients are
compared with a loop over samples in float64, its rows with the projected gradients of that loop, its scores with
dense NumPy (benchmarks/whole_path.py). The exit status is 1 unless each is right or refused by a named error. Requires
transformers and peft (extra zoo); timm's models run if timm is installed. Each runs in a separate process.

``--gradients`` compares per-sample gradients alone, but in float64, float32 and bfloat16 and, where samples are tokens,
also with one token less: kernels of mixtures of experts demand an alignment that odd lengths do not have.

``--replays`` records the pass of every architecture, however short it is, and compares the stored rows of all batches
with those of a computer that replays nothing. Passes that are not replayed are listed with the reason.

Run:  python -m benchmarks.zoo [--only NAME ...] [--every N] [--jobs 2]
      (writes benchmarks/results/zoo.json; about 20 minutes)
      python -m benchmarks.zoo --gradients     (writes benchmarks/results/zoo_gradients.json)
      python -m benchmarks.zoo --replays       (writes benchmarks/results/zoo_replays.json)
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.architectures import CLASSES, Architecture, classifier, image
from benchmarks.architectures.published import PUBLISHED
from benchmarks.measuring import RESULTS, cpu_seconds, parser_of, surroundings
from benchmarks.whole_path import (
    TRAIN_ROWS,
    Wrong,
    every_pass_recorded,
    gradients_by_precision,
    run_whole_path,
    stored_table,
)
from trak_lite import Attributor, Rows
from trak_lite.errors import TrakLiteError
from trak_lite.gradient_computers import HookGradientComputer, choose_gradient_computer
from trak_lite.modelout_functions import ModelCall, resolve_task
from trak_lite.store import ZarrFeatureStore

REPLAYED_ROWS = 22
"""In batches of two: three passes, a comparison, replays up to another comparison, and more."""
NO_RULE_FOR_VMAP = "There is a performance drop because we have not yet implemented the batching rule"
"""torch's own warning where the functional engine goes through an operation that vmap runs sample by sample."""
DIGITS = 2


_declared: list[torch.library.Library] = []


def let_torchvision_import() -> None:
    """Declare the operators of torchvision where its compiled part cannot be loaded.

    The wheels of the package index are built for CUDA and load beside no other torch. Their Python part, which is all
    that timm and transformers need here, refuses to be imported without these names; no model of the zoo calls them.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or _declared:
        return
    for compiled in Path(found.origin).parent.glob("_C*"):
        try:
            torch.ops.load_library(str(compiled))
        except OSError:
            break
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)


def timm_models() -> list[Architecture]:
    """Return one entry for each model that timm keeps for tests."""
    let_torchvision_import()
    import timm

    found = []
    for name in timm.list_models("test_*"):
        size = timm.get_pretrained_cfg(name).input_size[-1]
        build = partial(timm.create_model, name, pretrained=False, num_classes=CLASSES)
        found.append(classifier(f"timm {name}", "vision", build, image(size)))
    return found


def cost_against_plain(entry: Architecture) -> float:
    """Return the CPU time of all per-sample gradients, as a multiple of one plain forward and backward pass."""
    model, resolved = entry.make().eval(), resolve_task(entry.task)
    batch = entry.samples(TRAIN_ROWS, 1).batch(range(TRAIN_ROWS))
    resolved.prepare(model)
    computer = choose_gradient_computer(model, resolved, batch).computer
    kept = [p for p in model.parameters() if p.requires_grad]

    def plain() -> None:
        terms = resolved.evaluate(ModelCall(model), batch)
        torch.autograd.grad(terms.output.sum(), kept, allow_unused=True)

    def seconds(function: Callable[[], Any]) -> float:
        function()
        return min(cpu_seconds(function) for _ in range(3))

    return seconds(lambda: computer.stream_gradients(batch, lambda _: None)) / seconds(plain)


def architectures() -> dict[str, Architecture]:
    """Return every entry of the table by name; timm's only if it is installed."""
    let_torchvision_import()
    from benchmarks.architectures.hub import HUB

    timm = timm_models() if importlib.util.find_spec("timm") else []
    found = [*HUB, *PUBLISHED, *timm]
    by_name = {entry.name: entry for entry in found}
    if len(by_name) != len(found):
        raise ValueError("Two entries of the zoo have the same name.")
    return by_name


def all_architectures() -> dict[str, Architecture]:
    """Return the entries of the table and the mixtures whose gradients alone are compared."""
    by_name = architectures()
    from benchmarks.architectures.mixtures import mixtures  # after the declarations that transformers needs

    return {**{entry.name: entry for entry in mixtures()}, **by_name}


def whole_path(entry: Architecture) -> dict[str, Any]:
    """Return the figures of one architecture."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_whole_path(entry, Path(folder))
    return {**found, "cost": cost_against_plain(entry)}


def gradients(entry: Architecture) -> dict[str, Any]:
    """Return engines and errors by precision and length."""
    found = gradients_by_precision(entry.make(), entry.task, entry.output, entry.samples(TRAIN_ROWS, 1))
    return {**found, **({"outcome": "refused"} if any("message" in row for row in found.values()) else {})}


class NeverReplayed(HookGradientComputer):
    """The hook engine without replays, which are for its own class alone."""


def replays(entry: Architecture) -> dict[str, Any]:
    """Return whether batches were replayed, and if not, why; raise :class:`Wrong` if their rows are others."""
    tables, engines = [], []
    with every_pass_recorded() as told:
        for computer in ("auto", NeverReplayed):
            with tempfile.TemporaryDirectory() as folder:
                attributor = Attributor(
                    entry.make(),
                    entry.task,
                    folder,
                    method="GradDot",
                    dtype="float32",
                    gradient_computer=computer,
                )
                attributor.featurize(Rows(entry.samples(REPLAYED_ROWS, 1), batch_size=2))
                with ZarrFeatureStore.open(folder) as store:
                    engines.append(store.manifest.made_with["settings"]["gradient_computer"])
                tables.append(stored_table(Path(folder), "ckpt-0"))
            if engines[0] != "hook":
                break
    for column, expected in tables[-1].items():
        if not (np.array_equal(tables[0][column], expected) or entry.draws):
            raise Wrong(
                f"{column} of replayed batches differ by {np.abs(tables[0][column] - expected).max():.2g}"
            )
    reasons = [text.split("not replayed: ")[1] for text in told if "not replayed: " in text]
    if not reasons and not any("is recorded" in text for text in told):
        reasons = ["it changes its own attributes" if engines[0] == "hook" else "another engine"]
    return {"engine": engines[0], "replayed": not reasons, **({"reason": reasons[0]} if reasons else {})}


def measured(name: str, figures_of: Callable[[Architecture], dict[str, Any]]) -> dict[str, Any]:
    """Run one architecture; return the result."""
    torch.set_num_threads(1)
    entry = all_architectures()[name]
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", NO_RULE_FOR_VMAP)
        warnings.filterwarnings("ignore", ".* computed rows of .* are zero")  # the method refuses them
        try:
            outcome = {"outcome": "right", **figures_of(entry)}
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


def all_measured(
    names: list[str], jobs: int, figures_of: Callable[[Architecture], dict[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the results as they finish, from reused processes."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(measured, name, figures_of): name for name in names}
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
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", help="names of architectures")
    parser.add_argument("--every", type=int, default=1, help="run every N-th only")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--gradients", action="store_true", help="gradients alone, by precision and length")
    parser.add_argument("--replays", action="store_true", help="rows of replayed batches alone")
    parser.add_argument("--out", type=Path, help="where the table goes")
    args = parser.parse_args()
    rows, broken = {}, 0
    figures_of, file, found = whole_path, "zoo.json", architectures()
    if args.gradients:
        figures_of, file, found = gradients, "zoo_gradients.json", all_architectures()
    elif args.replays:
        figures_of, file = replays, "zoo_replays.json"
    out = args.out or RESULTS / file
    names = (args.only or list(found))[:: args.every]
    for name, row in all_measured(names, args.jobs, figures_of):
        rows[name] = row
        broken += row["outcome"] not in ("right", "refused")
        print(name, row, flush=True)
        save(out, rows)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
