"""The kill loop of ``tests/parallel`` for a benchmark: one undisturbed run, and the import of the rounds."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "parallel"))

import killed_ranks
from recorded_run import LOGS, STORE, Job

__all__ = ["LOGS", "SCRIPT", "STORE", "Job", "alone", "killed_ranks"]

SCRIPT = killed_ranks.SCRIPT


def alone(folder: Path, job: Job) -> killed_ranks.Undisturbed:
    """Return the results of one undisturbed rank."""
    (folder / "alone").mkdir()
    return killed_ranks.undisturbed(folder / "alone", job)
