"""kills: ranks, agents or all processes are killed at random moments, and another number of ranks resumes.

Every round has a separate store and two kills. Some kills happen while processes start, some during featurizing,
some during scoring. The exit status is 1 if a guarantee was broken; the round is printed and kept.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.scaling import killed_ranks
from benchmarks.scaling.killed_ranks import Job, alone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--strikes", type=int, default=2, help="kills in a round")
    parser.add_argument("--rows", type=int, default=6000, help="train rows, for each of two checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument("--first", type=int, default=0, help="number of the first round")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds; return counts and the broken rounds."""
    job = Job(rows=options.rows, chunk_rows=256, batch=32, width=32, proj_dim=1024, targets=256)
    counts: Counter[str] = Counter()
    broken, worst, begun = [], 0.0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        expected = alone(Path(folder), job)
        for number in range(options.first, options.first + options.rounds):
            round_ = killed_ranks.Round(Path(folder, f"round-{number}"), job, expected)
            error = play(round_, options.seed, number, options.strikes)
            if error is not None:
                broken.append({"round": number, "error": error})
            counts.update(round_.counts)
            worst = max(worst, round_.worst_score)
            print(f"round {number}: {error or 'sound'} {dict(round_.counts)}", flush=True)
            shutil.rmtree(round_.folder, ignore_errors=True)
    return {
        "goal": "nothing lost, nothing computed twice beyond what killed ranks had in flight",
        "job": asdict(job),
        "seed": options.seed,
        "rounds": options.rounds,
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "seconds until featurizing": expected.until_featurizing,
        "seconds of scoring": expected.scoring,
        "counts": dict(sorted(counts.items())),
        "rows lost": 0 if not broken else None,
        "scores differ by at most, of the largest": worst,
        "broken": broken,
    }


def play(round_: killed_ranks.Round, seed: int, number: int, strikes: int) -> str | None:
    """Run one round; return its errors."""
    round_.folder.mkdir()
    try:
        round_.run(*killed_ranks.drawn_strikes(random.Random(f"{seed}/{number}"), strikes))
    except Exception as error:  # whatever a round does not expect is a finding
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return None
