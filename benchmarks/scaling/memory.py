"""memory: growth of the memory of a rank during featurizing and scoring, for three numbers of rows and three of ranks.

The growth is counted after libraries, model and data are loaded and a small store was featurized and scored.
``peak_mib`` is the largest growth of the resident set. It includes pages of mapped files (rows of the store that are
being read or were written last), which the system reclaims if other processes need memory. ``anonymous_mib`` is the
part that no file backs, sampled every 5 ms: the memory that a rank needs. The figures are those of the rank that
needs most.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.scaling.ranks import (
    PROJ_DIM,
    TARGETS,
    anonymous_growth,
    attributor,
    digits,
    keep,
    start,
    wait_for_all,
    warm_up,
)
from trak_lite import Rows

MODULE = "benchmarks.scaling.memory"
FACTORS = (1, 4, 16)
WORLDS = (1, 2, 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rows", type=int, default=4096, help="the smallest number; the others are 4 and 16 times it"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all numbers of rows with one rank and with most ranks, and all numbers of ranks with most rows."""
    cases = [(options.rows * factor, world) for factor in FACTORS for world in (WORLDS[0], WORLDS[1])]
    cases += [(options.rows * FACTORS[-1], world) for world in WORLDS[2:]]
    found = {}
    for rows, world in cases:
        found[f"{rows} rows, {world} ranks"] = measure(rows, world)
        print(rows, world, found[f"{rows} rows, {world} ranks"], flush=True)
    return {
        "goal": "independent of the number of rows and of ranks",
        "case": f"digits CNN, K = {PROJ_DIM}, {TARGETS} targets, the 20 strongest rows of each",
        "cases": found,
    }


def measure(rows: int, world: int) -> dict[str, float]:
    """Featurize and score a new store; return the maximum over ranks."""
    with tempfile.TemporaryDirectory() as folder:
        _, ranks = start(world, MODULE, Path(folder), str(rows))
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def rank(folder: Path, rows: int) -> None:
    """Featurize and score, and store the growth of memory in each."""
    warm_up(folder)
    made, data, targets = attributor(folder / "run.zarr"), digits(rows), digits(TARGETS)
    figures = {}
    wait_for_all(folder, "ready")
    with anonymous_growth() as (whole, anonymous):
        made.featurize(Rows(data, name="train"))
    figures |= {"featurize_peak_mib": whole.mib, "featurize_anonymous_mib": anonymous.mib}
    wait_for_all(folder, "featurized")
    with anonymous_growth() as (whole, anonymous):
        made.score(Rows(targets, name="targets"), dense=False, k=20)
    figures |= {"score_peak_mib": whole.mib, "score_anonymous_mib": anonymous.mib}
    keep(folder, figures)


if __name__ == "__main__":
    rank(Path(sys.argv[1]), int(sys.argv[2]))
