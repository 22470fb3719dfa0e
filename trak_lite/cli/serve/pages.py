"""The pages: from the parameters of a request to HTML. Everything that a page shows is in its URL."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from heapq import heappop, heappush
from http import HTTPStatus
from itertools import count
from threading import Condition, Event
from time import monotonic
from typing import Any, Final, Literal, final

import numpy as np
from numpy.typing import NDArray

from trak_lite.cli.serve import urls
from trak_lite.cli.serve.live import LiveModel
from trak_lite.cli.serve.marks import MARKS, Mark, MarksFile, relabelling
from trak_lite.cli.serve.sets import Sets, scatter_of
from trak_lite.cli.serve.urls import WHERE, Params
from trak_lite.core.validate import one_of, some_of
from trak_lite.errors import InvalidInputError, StateError, TrakLiteError, UnknownNameError
from trak_lite.modelout_functions import AbstractModelOutput
from trak_lite.report.content import Content, Renders, cut, rendered
from trak_lite.report.page import environment, fragment
from trak_lite.retraining.what_if import Effects, what_if
from trak_lite.scoring.choices import strongest

logger = logging.getLogger(__name__)

_TARGETS, _REVIEWED = 24, 25
"""Targets and rows on one page."""
_LISTED_VALUES: Final = 100
"""Columns with more values are filtered by a text field."""
_SHOWN: Final = ("all", "unmarked", *MARKS)
_QUIET, _PAUSE = 0.5, 0.02
"""Seconds without a request before a step of the preparation, and between two looks."""
_OVERTAKING: Final = 16
"""Calls that may go before one with a long computation that waits longer."""
_SIGNS: Final[tuple[Literal["helpful", "harmful"], ...]] = ("helpful", "harmful")
_VALUE_LENGTH: Final = 60
_COMPARED_VALUES: Final = 10_000
_LOG_ODDS, _LOG_P = "the log-odds of the right label", "the sum over its tokens of log p, or of the log-odds"
_MEANINGS: Final = {
    **dict.fromkeys(("image_classification", "text_classification", "binary_classification"), _LOG_ODDS),
    **dict.fromkeys(("causal_language_modeling", "masked_language_modeling", "sequence_to_sequence"), _LOG_P),
}
"""f in words, by task."""


@final
@dataclass(slots=True, eq=False)
class Pages:
    """What the server answers. One call runs at a time: recipes, models and stores need not be thread-safe."""

    title: str
    """Name of the store."""
    sets: Sets
    marks: MarksFile
    renders: Renders
    live: LiveModel | None = None
    """``None`` without a recipe: no code of the user is executed."""
    task_of: Callable[[str], AbstractModelOutput | None] = lambda name: None
    """Returns the task of a set whose targets are those of the recipe, ``None`` for other sets."""
    task: str = ""
    """Name of the task of the train rows."""
    token: str = field(init=False, default_factory=lambda: secrets.token_urlsafe(32))
    """Every form carries it, so that no other site can send one."""
    _free: Condition = field(init=False, default_factory=Condition)
    _waiting: list[int] = field(init=False, default_factory=list)
    """Places of the calls in the queue, a heap."""
    _busy: bool = field(init=False, default=False)
    _count: Iterator[int] = field(init=False, default_factory=count)
    _answered: float = field(init=False, default=-math.inf)
    """Time of the end of the last request."""

    def warm(self, stopped: Event) -> None:
        """Compute what the first questions would wait for, in steps, each while no request has come for a moment.

        A step that fails ends it: the page that needs its result shows why. ``stopped`` ends it after the step under
        way.
        """
        steps = self._steps()
        try:
            while not stopped.wait(_PAUSE):
                if monotonic() - self._answered >= _QUIET:
                    with self._turn(long=True, answers=False):
                        next(steps)
        except StopIteration:
            return
        except TrakLiteError as error:
            logger.warning("The server is slower than it could be: %s", error)

    def _steps(self) -> Iterator[None]:
        name = self.sets.chosen("")
        self.sets.column(name, 0)
        yield
        scores = self.sets.scores(name)
        yield from scores.source.factorise()
        live = self.live
        if live is not None and (live.can_ask or live.has_tokens):
            yield from live.warm(scores)
        self.sets.by_self_influence(name)
        yield
        if live is not None and live.has_tokens:
            live.coloured(scores, [0], 0)
            yield

    def start(self, params: Params) -> str:
        """Return the page of a target with its strongest train rows, or of a choice of targets."""
        with self._turn(long=bool(params.get("tokens"))):
            if params.get("text"):
                return self._text_page(params)
            name = self.sets.chosen(params.get("set", ""))
            if not params.get("target"):
                return self._choice(name, params)
            target = urls.number(params, "target", 0, 0, urls.END)
            self.sets.column(name, target)  # the target exists
            content, task, live = self._target_content(name, target), self.task_of(name), self.live
            output = None if live is None or task is None else live.output(live.target(target), task)
            return self._answer(name, target, params, content, output, "")

    def ask(self, params: Params) -> str:
        """Score a text, store its features, and return the address of its page."""
        text = urls.text(params)
        with self._turn(long=True):
            live = self._live()
            self.sets.hold(live.name(text), live.ask(text))
            for name in live.drop_oldest():
                self.sets.forget(name)
        return urls.address("/", {"text": text, "k": str(urls.rows(params))})

    def review(self, params: Params) -> str:
        """Return a page of the train rows by self-influence, with their marks."""
        with self._turn():
            marks, listed, state, said = self._listed(params)
            values, order = self.sets.by_self_influence(state["set"])
            order = order[listed[order]]
            first, labels = urls.first(params, len(order), _REVIEWED), self.sets.columns.get("label")
            page = [int(row) for row in order[first : first + _REVIEWED]]
            if params.get("done"):
                done = urls.number(params, "done", None, 0, self.sets.num_rows - 1)
                mark = marks.get(done)
                said += f"Row {done}: {mark.mark if mark else 'no mark'}. "
                if mark and mark.label and labels and mark.label not in labels.texts:
                    said += f"No train row has the label {mark.label!r}. "
            return self._page(
                "serve_review.html",
                f"Review of {self.title}",
                name=state["set"],
                said=f"{said}{len(order):,} of {self.sets.num_rows:,} train rows, {len(marks):,} marked.",
                shown=state["show"],
                choices=_SHOWN,
                filters=self._filter_fields(urls.filters(params)),
                rows=[self._reviewed(row, float(values[row]), marks.get(row)) for row in page],
                has_labels=labels is not None,
                state={**state, "from": str(first)},
                pages=urls.pages("/review", state, first, _REVIEWED, len(order)),
                labels=labels.texts[:_LISTED_VALUES] if labels else [],
                effects=urls.address("/effects", state) if 0 < len(order) < self.sets.num_rows else "",
            )

    def effects(self, params: Params) -> str:
        """Return a page of the predicted change of every target if the rows that a review lists are left out."""
        with self._turn():
            _, listed, state, said = self._listed(params)
            name, rows = state["set"], np.flatnonzero(listed)
            effects = None
            if 0 < len(rows) < self.sets.num_rows:
                effects = what_if(self.sets.scores(name), rows)
                said = f"{effects.name}, {effects.change}."
                order = np.argsort(-np.abs(effects.predicted), kind="stable")
            else:
                said += "All rows are listed. " if len(rows) else "No row is listed. "
                said += "Mark rows in the review, or choose some by a filter, and follow the link there."
                order = np.arange(0)
            first = urls.first(params, len(order), _TARGETS)
            shown = [int(target) for target in order[first : first + _TARGETS]]
            return self._page(
                "serve_effects.html",
                "What if these rows go?",
                said=said,
                effects=effects,
                changes=[] if effects is None else [(target, *_change(effects, target)) for target in shown],
                target_of={target: self._target_content(name, target) for target in shown},
                address_of={
                    target: urls.address("/", {"set": name, "target": str(target)}) for target in shown
                },
                review=urls.address("/review", state),
                pages=urls.pages("/effects", state, first, _TARGETS, len(order)),
            )

    def _listed(self, params: Params) -> tuple[dict[int, Mark], NDArray[np.bool_], dict[str, str], str]:
        """Return all marks, the mask of the rows that a review lists, its parameters, and why there are none."""
        show, filters = one_of(_SHOWN, show=params.get("show") or "all"), urls.filters(params)
        marks, passing = self.marks.read(), self.sets.passing(filters)
        state = {"set": self.sets.chosen(params.get("set", "")), "show": show, **urls.where(filters)}
        said = "" if passing.any() else f"{self._unmatched(filters)} "
        return marks, passing & self._shown(show, marks), state, said

    def mark(self, params: Params) -> str:
        """Store the mark of a row; return the address of the review page that the form was on."""
        row = urls.number(params, "row", None, 0, self.sets.num_rows - 1)
        chosen = one_of((*MARKS, "clear"), mark=params.get("mark", ""))
        if chosen == "flip" and "label" not in self.sets.columns:
            raise InvalidInputError(
                "These train rows have no column label, so no label is wrong. Mark keep or drop."
            )
        label = params.get("label", "").strip() if chosen == "flip" else ""
        if chosen == "flip" and not label:
            raise InvalidInputError("A row to flip needs its new label. Enter it, or mark keep or drop.")
        with self._turn():
            self.marks.put(row, None if chosen == "clear" else Mark(chosen, label))
        kept = {key: value for key, value in params.items() if key in ("set", "show", "from")}
        review = urls.address("/review", {**kept, **urls.where(urls.filters(params)), "done": str(row)})
        return f"{review}#row-{row}"

    def table(self) -> str:
        """Return all marks as CSV."""
        with self._turn():
            column = self.sets.columns.get("label")
            labels = None if column is None else [str(label) for label in column.values]
            return relabelling(self.marks.read(), labels)

    def problem(self, error: Exception) -> tuple[int, str]:
        """Return the status and the page of an error."""
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        if isinstance(error, UnknownNameError):
            status = HTTPStatus.NOT_FOUND
        elif isinstance(error, InvalidInputError):
            status = HTTPStatus.BAD_REQUEST
        elif isinstance(error, StateError):
            status = HTTPStatus.CONFLICT
        said = str(error) if isinstance(error, TrakLiteError) else f"{type(error).__name__}: {error}"
        return status, self.message(f"{status.value} {status.phrase}", said)

    def message(self, title: str, said: str) -> str:
        """Return a page with a message."""
        return self._page("serve_message.html", title, said=said)

    @contextmanager
    def _turn(self, *, long: bool = False, answers: bool = True) -> Iterator[None]:
        """Exclude other calls from the block.

        Calls with long computations let a limited number of later calls go first: a page beside clients that score
        texts waits for one text, not for all that were sent before.
        """
        with self._free:
            ticket = 2 * (next(self._count) + _OVERTAKING * long) + long  # no two calls have the same
            heappush(self._waiting, ticket)
            self._free.wait_for(lambda: not self._busy and self._waiting[0] == ticket)
            heappop(self._waiting)
            self._busy = True
        try:
            self.sets.refuse_changes()
            yield
        finally:
            with self._free:
                self._busy = False
                self._free.notify_all()
            if answers:
                self._answered = monotonic()

    def _live(self) -> LiveModel:
        if self.live is None:
            raise InvalidInputError(
                "No text can be scored without a recipe: trak-lite serve STORE --recipe FILE."
            )
        return self.live

    def _choice(self, name: str, params: Params) -> str:
        count = self.sets.scores(name).shape[1]
        first = urls.first(params, count, _TARGETS)
        shown = range(first, min(first + _TARGETS, count))

        def address(target: int) -> str:
            return urls.address("/", {"set": name, "target": str(target)})

        return self._page(
            "serve_targets.html",
            f"Targets of {self.title}",
            **self._form(name, "", params),
            said=f"{count:,} targets in {name}. Choose one.",
            targets=[(target, self._target_content(name, target), address(target)) for target in shown],
            pages=urls.pages("/", {"set": name}, first, _TARGETS, count),
        )

    def _text_page(self, params: Params) -> str:
        """Return the page of a text; the text must have been scored by a POST, because this writes to the store."""
        text, live = urls.text(params), self._live()
        name = live.name(text)
        if self.sets.held(name) is not None and name not in live.stored_names():
            self.sets.forget(name)  # another process has removed it
        scores = self.sets.held(name)
        if scores is None:
            scores = live.asked(text)
        if scores is None:
            form = self._form(self.sets.chosen(""), text, params)
            said = "This text was not scored yet. Score it to see its train rows."
            return self._page("serve_targets.html", "A text", **form, said=said, targets=[], pages=[])
        self.sets.hold(name, scores)
        live.use(name)
        output = live.output(live.sample(text), live.attributor.task)
        return self._answer(name, 0, params, rendered(text, "the text"), output, text)

    def _answer(
        self,
        name: str,
        target: int,
        params: Params,
        content: Content | None,
        output: tuple[float, Content | None] | None,
        text: str,
    ) -> str:
        """Return the page of a target with its strongest train rows."""
        k, filters = urls.rows(params), urls.filters(params)
        column, mask = self.sets.column(name, target), self.sets.passing(filters)
        tops = [strongest(column, mask, k, sign) for sign in _SIGNS]
        rows = sorted({int(row) for top in tops for row in top.indices})
        live, coloured = self.live, bool(params.get("tokens"))
        tokens: Mapping[int, Any] = {}
        if coloured and live is not None:
            tokens = live.coloured(self.sets.scores(name), rows, target)
        scatter = scatter_of(column)
        largest = max(float(abs(top.scores).max(initial=0)) for top in tops)
        ends = []
        for top, sign, shade in zip(tops, _SIGNS, ("high", "low"), strict=True):
            pairs = zip(top.indices.tolist(), top.scores.tolist(), strict=True)
            shown = [self._scored(row, score, tokens, scatter, largest) for row, score in pairs]
            ends.append((f"Most {sign}", shade, shown))
        state = {"text": text} if text else {"set": name, "target": str(target)}
        state |= {"k": str(k), **urls.where(filters)}
        what = "the text" if text else f"target {target} of {name}"
        count = f"{len(tops[0].indices)} most helpful and {len(tops[1].indices)} most harmful of {int(mask.sum()):,}"
        task = self.sets.scores(name).settings.get("task", self.task)
        colours = urls.address("/", {**state, "tokens": "1"})
        return self._page(
            "serve_answer.html",
            "A text" if text else f"Target {target} of {name}",
            **self._form("" if text else name, text, params, target),
            said=f"{count} train rows for {what}." if rows else self._unmatched(filters),
            content_of=content,
            output=output,
            checkpoint="" if live is None else live.checkpoint,
            has_recipe=live is not None,
            task=task,
            meaning=_MEANINGS.get(task, ""),
            scatter=[f"{end:+.3g}" for end in scatter],
            ends=ends if rows else [],
            permalink=colours if coloured else urls.address("/", state),
            colour=colours if live and live.has_tokens and not coloured else "",
        )

    def _scored(
        self, row: int, score: float, tokens: Mapping[int, Any], scatter: tuple[float, float], largest: float
    ) -> dict[str, Any]:
        what = f"train row {row}"
        return {
            "row": row,
            "score": f"{score:+.3g}",
            "content": rendered(tokens[row], what) if row in tokens else self.renders.of_row(row, 0),
            "columns": self.sets.columns_of(row),
            "stands_out": not scatter[0] <= score <= scatter[1],
            "share": f"{100 * abs(score) / largest:.1f}" if largest else "0",
        }

    def _unmatched(self, filters: Mapping[str, str]) -> str:
        """Return why no train row passes some filters, and which values exist."""
        said = ["No train row passes the filters."]
        for name, value in filters.items():
            column = self.sets.columns[name]
            count, shown = int(self.sets.having(name, value).sum()), cut(value, _VALUE_LENGTH)
            if count:
                said.append(f"{count:,} rows have {name} {shown!r}.")
                continue
            texts = column.texts
            near = get_close_matches(value, texts[:_COMPARED_VALUES], n=3)
            listed = some_of(cut(text, _VALUE_LENGTH) for text in dict.fromkeys([*near, *texts]))
            said.append(f"No row has {name} {shown!r}. Values of {name}: {listed}.")
        return " ".join(said)

    def _form(self, name: str, text: str, params: Params, target: int | None = None) -> dict[str, Any]:
        """Return the values of the form that chooses target, number of rows and filters."""
        return {
            "names": self.sets.names(),
            "name": name,
            "text": text,
            "target": "" if target is None else str(target),
            "k": urls.rows(params),
            "most": urls.MOST_ROWS,
            "filters": self._filter_fields(urls.filters(params)),
            "can_ask": self.live is not None and self.live.can_ask,
        }

    def _filter_fields(self, filters: Mapping[str, str]) -> list[tuple[str, str, str, list[str] | None]]:
        """Return name, parameter, chosen value and values of every column; ``None`` for too many values to list."""
        fields = []
        for name, column in self.sets.columns.items():
            values = column.texts if len(column.labels) <= _LISTED_VALUES else None
            fields.append((name, f"{WHERE}{name}", filters.get(name, ""), values))
        return fields

    def _target_content(self, name: str, target: int) -> Content | None:
        return None if self.task_of(name) is None else self.renders.of_target(target)

    def _reviewed(self, row: int, value: float, mark: Mark | None) -> dict[str, Any]:
        return {
            "row": row,
            "score": f"{value:.3g}",
            "content": self.renders.of_row(row, 0),
            "columns": self.sets.columns_of(row),
            "mark": "" if mark is None else mark.mark,
            "label": "" if mark is None else mark.label,
        }

    def _shown(self, show: str, marks: Mapping[int, Mark]) -> NDArray[np.bool_]:
        """Return a mask of the rows with a mark, or without one."""
        if show == "all":
            return np.ones(self.sets.num_rows, bool)
        mask = np.zeros(self.sets.num_rows, bool)
        mask[[row for row, mark in marks.items() if show in (mark.mark, "unmarked")]] = True
        return ~mask if show == "unmarked" else mask

    def _page(self, template: str, title: str, **values: Any) -> str:
        return fragment(template, title=title, store=self.title, token=self.token, searchable=False, **values)


def policy() -> str:
    """Return the content security policy of the pages: nothing is loaded but the pages, from this server."""
    made = environment().globals
    digest: Any = made["digest"]
    styles = " ".join(digest(made[name]) for name in ("style", "serve_style"))
    return (
        f"default-src 'none'; style-src {styles}; script-src {digest(made['serve_script'])}; img-src data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )


def _change(effects: Effects, target: int) -> tuple[str, str]:
    """Return the predicted change of a target, and its interval if it has one."""
    change, lower, upper = f"{effects.predicted[target]:+.3g}", effects.lower, effects.upper
    if lower is None or upper is None or np.isinf(lower[target]):
        return change, ""
    return change, f"{lower[target]:+.3g} to {upper[target]:+.3g}"
