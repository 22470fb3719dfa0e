"""The report on scores, the gallery, and the summary for notebooks; Jinja2 escapes every value of their templates."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from trak_lite.core.validate import known_names, require_packages, writing
from trak_lite.core.version import __version__
from trak_lite.data.columns import Where
from trak_lite.errors import InvalidInputError
from trak_lite.linalg.topk import TopRows
from trak_lite.report.content import LEVELS, PairRender, Render, Renders, ReportedScores, cut
from trak_lite.report.figures import FIGURES, drawn_figures
from trak_lite.report.survey import Survey

if TYPE_CHECKING:
    from jinja2 import Environment

_SETTING_LENGTH: Final = 600
_NOTEBOOK_LENGTH: Final = 200
"""Largest number of characters of a value in a notebook."""
_NOTEBOOK_SETTINGS: Final = 20
_SUMMARY_TARGETS: Final = 5
_SUMMARY_ROWS: Final = 3
_SUMMARY_SCORES: Final = 1 << 24
"""Largest number of scores that the summary reads."""
_FILES: Final = {
    "style": "style.css",
    "script": "script.js",
    "serve_style": "serve.css",
    "serve_script": "serve.js",
}
"""Files of inline styles and scripts by their names in templates."""
_SYMBOLS: Final = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: 0x2421,
    **dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], 0xFFFD),
}
"""Visible characters for control characters, and for lone surrogates, which UTF-8 cannot encode."""


def write_report(
    scores: ReportedScores,
    out: str | PathLike[str],
    *,
    train_render: Render | None = None,
    target_render: Render | None = None,
    pair_render: PairRender | None = None,
    title: str | None = None,
    targets: Sequence[int] | None = None,
    k: int = 5,
    figures: Sequence[str] = FIGURES,
    where: Where | None = None,
) -> Path:
    """Write a report on scores as one HTML file that makes no requests, and return its path.

    The scores are read once, tile by tile, for the top rows and the histogram. The damping path takes one
    factorisation per damping, checkpoint and segment, of the order of K^3.

    Args:
        scores: Scores of a target set.
        out: Path of the file; an existing file is replaced when the new one is complete.
        train_render: ``train_render(row)`` returns the content of a train row: an image (array or tensor ``(H, W)``,
            ``(H, W, C)`` or ``(C, H, W)``, or a Pillow image), text, a mapping of names to values, or
            ``(token, weight)`` pairs. If it fails, or gives something else, the page shows the error in its place.
        target_render: The same for targets.
        pair_render: ``pair_render(row, target)``, used instead of ``train_render`` if the content of a row depends on
            the target, such as tokens with their scores (:func:`~trak_lite.token_scores`).
        title: Heading; ``None`` names the target set.
        targets: Targets on the page; ``None`` takes the first 100. The search finds no others.
        k: Number of helpful and of harmful rows per target.
        figures: Some of ``"histogram"``, ``"damping"``, ``"retrained"``, ``"checkpoints"``.
        where: Show some train rows only, as in :meth:`trak_lite.Scores.top`; the histogram is that of these rows.

    Raises:
        InvalidInputError: If the path is a folder or cannot be written, a target or figure does not exist, or no row
            satisfies ``where``.
        NonFiniteError: If a score is NaN or infinite.
        MissingPackageError: If a package of the extra ``report`` is not installed: Jinja2, matplotlib (for figures) or
            Pillow (for images).
    """
    names = known_names(figures, FIGURES, what="figures")
    # before the scores are read
    require_packages("jinja2", *(["matplotlib"] if names else []), extra="report")
    survey = Survey.of(scores, targets, k=k, where=where)
    return _write_page(
        out,
        "report.html",
        title=f"Attribution of {scores.name!r}" if title is None else title,
        searchable=True,
        scores=scores,
        figures=drawn_figures(scores, survey.histogram, names),
        which=_which(len(survey.targets), scores.shape[1], where),
        cards=_cards(survey, Renders(train_render, target_render, pair_render)),
        settings=_settings(scores),
    )


@final
@dataclass(frozen=True, slots=True, eq=False)
class Gallery:
    """Targets with their most helpful and most harmful train rows; notebooks display it."""

    name: str
    """Name of the target set."""
    survey: Survey
    """The targets and their strongest train rows."""
    renders: Renders
    """Functions that return the content of rows."""

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the gallery as one offline HTML file and return its path.

        Raises:
            InvalidInputError: If the path is a folder, or cannot be written.
            MissingPackageError: If a package of the extra ``report`` is not installed.
        """
        values = {"title": f"Targets {self.name!r}", "searchable": False, "layout": "page.html"}
        return _write_page(path, "gallery.html", cards=_cards(self.survey, self.renders), **values)

    def _repr_html_(self) -> str:
        return fragment("gallery.html", layout="notebook.html", cards=_cards(self.survey, self.renders))


def notebook_summary(scores: ReportedScores) -> str:
    """Return sizes, settings, verdict and the top rows of the first targets as HTML.

    Scores that are many, or not in the store, are not read: their summary has no top rows.
    """
    where, top = scores.location or "memory", None
    if scores.stored and scores.shape[0] * scores.shape[1] <= _SUMMARY_SCORES:
        # Scores of some rows of every target hold no others.
        held = [int(scores.settings[name]) for name in ("k", "candidates") if name in scores.settings]
        k = min([_SUMMARY_ROWS, *held])
        helpful, harmful = scores.top(k, sign="helpful"), scores.top(k, sign="harmful")
        shown = range(min(scores.shape[1], _SUMMARY_TARGETS))
        top = [(target, _listed(helpful, target), _listed(harmful, target)) for target in shown]
    settings = [pair for pair in scores.settings.items() if pair[1] is not None][:_NOTEBOOK_SETTINGS]
    return fragment(
        "summary.html",
        scores=scores,
        settings=[[cut(str(text), _NOTEBOOK_LENGTH) for text in pair] for pair in settings],
        top=top,
        place=f"stored in {where}" if scores.stored else f"not stored, computed from the rows in {where}",
    )


def _cards(survey: Survey, renders: Renders) -> Iterator[dict[str, Any]]:
    """Yield the values of the macro ``card`` in ``parts.html``, one target at a time."""
    ends = (("Most helpful", "high", survey.helpful), ("Most harmful", "low", survey.harmful))
    for index, target in enumerate(survey.targets):
        shown = []
        for title, side, top in ends:
            rows = [(row, f"{score:+.3g}", renders.of_row(row, target)) for row, score in _pairs(top, index)]
            shown.append((title, side, rows))
        yield {"target": target, "content": renders.of_target(target), "ends": shown}


def _pairs(top: TopRows, index: int) -> Iterator[tuple[int, float]]:
    return zip(top.indices[index].tolist(), top.scores[index].tolist(), strict=True)


def _listed(top: TopRows, target: int) -> str:
    return ", ".join(f"{row} ({score:+.2g})" for row, score in _pairs(top, target))


def _settings(scores: ReportedScores) -> list[tuple[str, str]]:
    """Return names and values of the settings of the scores and of the features, and the location of the scores."""
    groups = (
        ("scores", {**scores.settings, "stored in": scores.location or "memory"}),
        ("rows", scores.manifest.fingerprint),
        ("made with", scores.manifest.made_with),
    )
    return [(f"{group}: {key}", _value(value)) for group, values in groups for key, value in values.items()]


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return cut(text, _SETTING_LENGTH)


def _which(shown: int, num_targets: int, where: Where | None) -> str:
    """Return sentences that name the targets on the page, and the train rows if they are not all."""
    said = f"All {num_targets:,} targets."
    if shown < num_targets:
        said = f"{shown:,} of {num_targets:,} targets. write_report(..., targets=[...]) selects others."
    if where is None:
        return said
    return f"{said} Only the train rows of {_value(dict(where)) if isinstance(where, Mapping) else 'a mask'}."


@functools.cache
def environment() -> Environment:
    """Return the Jinja2 environment of the templates."""
    require_packages("jinja2", extra="report")
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=PackageLoader("trak_lite.report"),
        autoescape=True,
        finalize=visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name, file in _FILES.items():
        made.globals[name] = Markup(made.get_template(file).render(levels=LEVELS))
    made.globals.update(digest=_digest, version=__version__)
    return made


def fragment(template: str, **values: Any) -> str:
    """Return a filled template."""
    return environment().get_template(template).render(values)


def _write_page(path: str | PathLike[str], template: str, **values: Any) -> Path:
    """Write a page piece by piece and return its path; an existing file is replaced when the new one is complete.

    Iterators among the values of the template are consumed while the page is written.
    """
    out = Path(path)
    if out.is_dir():
        raise InvalidInputError(f"{out} is a folder. Name a file in it, such as {out / 'report.html'}.")
    pieces = environment().get_template(template).generate(values)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = out.with_name(f".{out.name}-{secrets.token_hex(4)}")
        try:
            with unfinished.open("x", encoding="utf-8", newline="\n") as file:
                file.writelines(pieces)
            unfinished.replace(out)
        finally:
            unfinished.unlink(missing_ok=True)
    return out


def visible(value: Any) -> Any:
    """Return a value of a template; in text, line ends become newlines and control characters visible."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return value.replace("\r\n", "\n").replace("\r", "\n").translate(_SYMBOLS)


def _digest(text: str) -> str:
    """Return the source expression of an inline style or script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
