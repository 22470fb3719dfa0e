"""Targets side by side with the train rows that helped and harmed them most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Self, final

from trak_lite.linalg.topk import TopRows
from trak_lite.report._html import Html, tag
from trak_lite.report._look import STYLE
from trak_lite.report.content import Renders, ReportedScores
from trak_lite.report.document import written
from trak_lite.report.survey import Survey

__all__ = ["Gallery", "cards"]


def cards(survey: Survey, renders: Renders) -> Iterator[Html]:
    """Yield one element per target: the target, its most helpful and its most harmful train rows."""
    for place, target in enumerate(survey.targets):
        shown = renders.of_target(target)
        yield tag(
            "article",
            tag("h3", f"Target {target}"),
            None if shown is None else tag("div", shown, class_="target content"),
            tag(
                "div",
                _end("Most helpful", "high", survey.helpful, place, target, renders),
                _end("Most harmful", "low", survey.harmful, place, target, renders),
                class_="ends",
            ),
            class_="card",
            data_target=target,
        )


@final
@dataclass(frozen=True, slots=True, eq=False)
class Gallery:
    """What :meth:`trak_lite.Scores.gallery` returns: shown by notebooks, saved as a page."""

    name: str
    """Name of the target set."""
    survey: Survey
    """The targets and their strongest train rows."""
    renders: Renders
    """What shows them."""

    @classmethod
    def of(cls, scores: ReportedScores, targets: Sequence[int] | None, renders: Renders, *, k: int) -> Self:
        """Find the rows to show; see :meth:`trak_lite.Scores.gallery`."""
        return cls(scores.name, Survey.of(scores, targets, k=k), renders)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the gallery as one page that needs nothing else, and return its path.

        Raises:
            InvalidInputError: If the path is a folder, or what a render returned cannot be shown.
        """
        return written(path, f"Targets {self.name!r}", cards(self.survey, self.renders))

    def _repr_html_(self) -> str:
        """Return the markup for notebooks."""
        return tag("div", tag("style", STYLE), cards(self.survey, self.renders), class_="trak-lite")


def _end(title: str, class_: str, top: TopRows, place: int, target: int, renders: Renders) -> Html:
    """Return one end of a target's scores."""
    pairs = zip(top.indices[place].tolist(), top.scores[place].tolist(), strict=True)
    rows = [_row(row, score, renders.of_row(row, target)) for row, score in pairs]
    return tag("section", tag("h4", title, class_=class_), tag("ol", rows))


def _row(row: int, score: float, shown: Html | None) -> Html:
    return tag(
        "li",
        None if shown is None else tag("div", shown, class_="content"),
        tag("span", f"row {row} ", class_="number"),
        tag("span", f"{score:+.3g}", class_="score"),
        data_row=row,
    )
