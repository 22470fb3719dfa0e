"""The ``Plan`` class: what a run will take, and how it is shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

from trak_lite.core.progress import duration


class Span(NamedTuple):
    """A duration in seconds with its spread, by the fastest and the slowest tenth of the measured batches."""

    mean: float = 0.0
    low: float = 0.0
    high: float = 0.0
    cpu: float = 0.0
    """Processor time of this process."""

    def plus(self, *others: Span) -> Span:
        """Return the sum."""
        return Span(*map(math.fsum, zip(self, *others, strict=True)))

    def times(self, factor: float) -> Span:
        """Return a multiple."""
        return Span(*(value * factor for value in self))

    def __str__(self) -> str:
        if self.high - self.low < 0.1 * self.mean:
            return duration(self.mean)
        return f"{duration(self.mean)} ({duration(self.low)} to {duration(self.high)})"


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will take; see :meth:`trak_lite.Attributor.plan`."""

    num_rows: int
    """N."""
    num_targets: int
    """M."""
    checkpoints: int
    """C."""
    batch_size: int
    """Samples per pass."""
    settings: Mapping[str, str]
    """What the attributor does, as ``print(attributor)`` shows it, with the gradient computer and its reason."""
    disk: Mapping[str, int]
    """Bytes by purpose: rows, targets, kernels, scores; ``"fit, while it runs"`` is freed again."""
    memory: Mapping[str, int | None]
    """Peak bytes of featurizing and of scoring beyond what is in use now (the model, the data); ``None`` where the
    system does not tell. Stored rows that are read as maps of files are not counted: the system takes them back."""
    seconds: Mapping[str, Span]
    """Time by step: ``"rows"``, ``"fit"``, ``"targets"``, ``"scores"``."""
    advice: tuple[str, ...]
    """What does not fit, what would be faster, and what was not measured."""

    @property
    def total(self) -> Span:
        """Time to the end of all steps."""
        return Span().plus(*self.seconds.values())

    def __str__(self) -> str:
        steps = ", ".join(f"{name} {span}" for name, span in self.seconds.items() if span.mean)
        sizes = ", ".join(f"{name} {size_text(count)}" for name, count in self.disk.items() if count)
        peaks = ", ".join(
            f"{name} {'unknown' if count is None else size_text(count)}"
            for name, count in self.memory.items()
            if count != 0
        )
        lines = [
            f"{self.num_rows:,} rows x {self.checkpoints} checkpoints, {self.num_targets:,} targets, batches of "
            f"{self.batch_size}",
            *(f"{name}: {text}" for name, text in self.settings.items()),
            f"time: {self.total}: {steps}",
            f"disk: {sizes}",
            f"memory, beyond model and data: {peaks}",
            *self.advice,
        ]
        return "\n".join(lines)


def size_text(count: int | None) -> str:
    """Return a number of bytes as text."""
    if count is None:
        return "unknown memory"
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:,.3g} TiB"
