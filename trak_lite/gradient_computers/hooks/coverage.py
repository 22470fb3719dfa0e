"""Report of how a hook computer gets each parameter's gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = ["Coverage", "ParameterCoverage"]


@dataclass(frozen=True, slots=True)
class ParameterCoverage:
    """How the gradient of one parameter is computed."""

    name: str
    """Canonical parameter name."""
    how: Literal["rule", "fallback", "zero", "refused"]
    """``rule``: exact formulas; ``fallback``: an operation is run again per sample; ``zero``: f does not depend on it;
    ``refused``: no per-sample gradient."""
    why: str
    """The rules used, or the reason."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """One line per kept parameter, in model order; ``print`` shows the table."""

    parameters: tuple[ParameterCoverage, ...]

    @property
    def complete(self) -> bool:
        """Whether no kept parameter is refused."""
        return all(line.how != "refused" for line in self.parameters)

    def __iter__(self) -> Iterator[ParameterCoverage]:
        """Iterate over the lines."""
        return iter(self.parameters)

    def __getitem__(self, name: str) -> ParameterCoverage:
        """Return the line of one parameter."""
        return {line.name: line for line in self.parameters}[name]

    def __str__(self) -> str:
        """Return the table."""
        rows = [("parameter", "how", "why"), *((line.name, line.how, line.why) for line in self.parameters)]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)
