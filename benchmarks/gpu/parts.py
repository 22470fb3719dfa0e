"""The parts of the benchmark, most valuable first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu import checks, language, ranks, speed
from benchmarks.gpu.bench import Bench

Case = Callable[[Bench], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Part:
    """Cases that are measured in one process, which is started again after one that fails."""

    cases: Callable[[bool], dict[str, Case]]
    """Given whether sizes are small, returns the cases by name, most valuable first."""
    seconds: int
    """Limit of the part."""
    case_seconds: int
    """Limit of one case."""


PARTS = {
    "tests": Part(checks.test_cases, 150, 85),
    "features": Part(checks.feature_cases, 50, 25),
    "replays": Part(speed.replay_cases, 80, 20),
    "gradients": Part(speed.gradient_cases, 110, 25),
    "simple_cnn": Part(speed.simple_cnn_cases, 25, 25),
    "projection": Part(speed.projection_cases, 75, 25),
    "language": Part(language.language_cases, 190, 110),
    "scoring": Part(speed.scoring_cases, 50, 30),
    "ranks": Part(ranks.rank_cases, 75, 75),
}
