"""Targets with their most helpful and most harmful train rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Self, final

from trak_lite.report._template import fragment, write_page
from trak_lite.report.content import Renders, ReportedScores
from trak_lite.report.survey import Survey

__all__ = ["Gallery", "cards"]


def cards(survey: Survey, renders: Renders) -> Iterator[dict[str, Any]]:
    """Yield the values of the macro ``card``, one target at a time."""
    ends = (("Most helpful", "high", survey.helpful), ("Most harmful", "low", survey.harmful))
    for place, target in enumerate(survey.targets):
        shown = []
        for title, class_, top in ends:
            pairs = zip(top.indices[place].tolist(), top.scores[place].tolist(), strict=True)
            rows = [
                {"number": row, "score": f"{score:+.3g}", "content": renders.of_row(row, target)}
                for row, score in pairs
            ]
            shown.append((title, class_, rows))
        yield {"target": target, "content": renders.of_target(target), "ends": shown}


@final
@dataclass(frozen=True, slots=True, eq=False)
class Gallery:
    """Targets with their strongest train rows; notebooks display it, :meth:`save` writes it as a page."""

    name: str
    """Name of the target set."""
    survey: Survey
    """The targets and their strongest train rows."""
    renders: Renders
    """Functions that return the content of rows."""

    @classmethod
    def of(cls, scores: ReportedScores, targets: Sequence[int] | None, renders: Renders, *, k: int) -> Self:
        """Find the rows; see :meth:`trak_lite.Scores.gallery`."""
        return cls(scores.name, Survey.of(scores, targets, k=k), renders)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the gallery as one offline HTML file and return its path.

        Raises:
            InvalidInputError: If the path is a folder, or the result of a render cannot be displayed.
            MissingPackageError: If a package of the extra ``report`` is not installed.
        """
        shown = cards(self.survey, self.renders)
        return write_page(
            path, "gallery.html", title=f"Targets {self.name!r}", layout="page.html", cards=shown
        )

    def _repr_html_(self) -> str:
        """Return the HTML for notebooks."""
        return fragment("gallery.html", layout="notebook.html", cards=cards(self.survey, self.renders))
