"""The commands ``effects`` and ``report``, and the scores of a store that is read without model and data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from trak_lite.cli.configs import RunConfig
from trak_lite.core.validate import writing
from trak_lite.data.columns import wanted_rows
from trak_lite.errors import InvalidInputError, StateError
from trak_lite.featurizing.stored_settings import StoredSettings
from trak_lite.methods import METHODS, AbstractMethod
from trak_lite.models.borrowing import resolve_device
from trak_lite.report.content import Render
from trak_lite.retraining.repair import Repair, repair
from trak_lite.retraining.what_if import Effects, what_if
from trak_lite.run.tables import first_score_path, score_path, score_paths, scored_names
from trak_lite.run.workspace import Workspace
from trak_lite.scoring.scores import Scores
from trak_lite.scoring.stored import stored_scores
from trak_lite.store import Manifest, RemotePlace, open_store
from trak_lite.store._names import check_name

_DEFAULT_NAME = "targets"
"""Default of ``score.name``; a report without a name shows the only scores of a store."""
_MOST_NAMED = 10_000_000
_ROWS = "numbers and ranges, such as 3,8-11"
_Number = TypeVar("_Number", int, float)


def stored_settings(config: RunConfig, manifest: Manifest) -> StoredSettings:
    """Return the settings of the store that a config names."""
    device = resolve_device(config.values["device"])
    return StoredSettings.of(manifest, device=device, where=str(config.path))


def opener(config: RunConfig, manifest: Manifest) -> Callable[..., Scores]:
    """Return a function that opens the scores of a name, of a store that is read without model and data."""
    settings, method_of = stored_settings(config, manifest), methods_of(config, manifest)

    def opened(name: str, *, dense: bool = True) -> Scores:
        # Only a stored matrix tells a method; other scores are computed by any.
        method = method_of(name) if dense else settings.scored_by(config.values["score"]["method"])
        return stored_scores(Workspace(config.path), settings, name, method, dense=dense)

    return opened


def methods_of(config: RunConfig, manifest: Manifest) -> Callable[[str], AbstractMethod]:
    """Return a function that returns the method by which the stored scores of a name are read.

    The method of a record is that of its last command: scores of a name that has none of it are read by the
    attributor's method, or else by the only one that there are scores of.
    """
    settings, method = stored_settings(config, manifest), config.values["score"]["method"]
    asked = settings.scored_by(method)

    def method_of(name: str) -> AbstractMethod:
        if method is not None and "score.method" not in config.recorded:
            return asked
        with open_store(config.path) as store:
            paths = score_paths(store, name)
            if score_path(store, name, asked, settings.method) in paths:
                return asked
            if first_score_path(name) in paths:
                return settings.scored_by(settings.method)
            stored = store.open_table(paths[0]).spec.fingerprint.get("method", {}) if len(paths) == 1 else {}
        return settings.scored_by(stored if stored.get("name") in METHODS else asked)

    return method_of


def scores_of(config: RunConfig) -> Scores:
    """Return the scores that a config names, of a store that is read without model and data."""
    with open_store(config.path) as store:
        opened = opener(config, store.manifest)
        method_names, names = scored_names(store, own=True), scored_names(store)
    chosen = config.values["score"]
    name = check_name(chosen["name"], what="target set")
    if chosen["dense"] and names and name not in names:
        if name != _DEFAULT_NAME or len(method_names or names) > 1:
            raise StateError(f"{config.path} has no scores {name!r}. Pass --score.name with one of {names}.")
        name = (method_names or names)[0]
    return opened(name, dense=chosen["dense"])


def report(config: RunConfig, out: str | None, where: Mapping[str, list[str]] | None) -> Iterator[str]:
    """Write the scores of a store as one page of HTML, ``None`` beside the store. Yield the lines to print.

    The store is read without model and data. The page shows a row by the recipe's ``render``, or else by its number.
    """
    from trak_lite.report import write_report  # imported late: no other command needs it

    scores = scores_of(config)
    render, render_target = renders(config)
    path = beside(config, ".html", "report.html") if out is None else out
    # Damaged verdicts raise before the note.
    if config.recipe is None and (scores.verdict, scores.one_run_verdict):
        yield "Rows are shown by number. With --recipe FILE they are shown by its render(index)."
    page = write_report(scores, path, train_render=render, target_render=render_target, where=where)
    yield f"report: {page}"


def effects(
    config: RunConfig, options: Mapping[str, str | None], where: Mapping[str, list[str]] | None
) -> Iterator[str]:
    """Predict what changes if a set of train rows goes, or find one that changes a target. Yield the lines to print.

    ``options`` are ``remove`` (row numbers and ranges, such as ``3,8-11``), ``target`` and ``goal`` (which find the set
    instead), and ``out``, a file for the result as JSON. The rows that go may be given by ``where``, too.
    """
    removed, target, goal, out = (options[name] for name in ("remove", "target", "goal", "out"))
    if (target is None) != (goal is None) or [removed, where, target].count(None) != 2:
        raise InvalidInputError(
            "effects takes one question: --remove ROWS, such as 3,8-11; --where NAME=VALUE; or --target NUMBER with "
            "--goal CHANGE."
        )
    scores = scores_of(config)
    result: Effects | Repair
    if target is not None and goal is not None:
        result = repair(scores, _number(int, "target", target), _number(float, "goal", goal))
        yield f"rows to remove: {','.join(map(str, sorted(result.rows.tolist())))}"
    elif removed is not None:
        result = what_if(scores, _row_numbers(removed))
    else:
        assert where is not None  # one of the three is given
        result = what_if(scores, wanted_rows(where, scores.columns, len(scores)))
    yield str(result)
    if out is not None:
        with writing(Path(out)):
            Path(out).write_text(json.dumps(result.to_json()) + "\n", encoding="utf-8")
        yield f"written: {out}"


def _row_numbers(text: str) -> list[int]:
    """Return the numbers in a list of numbers and ranges.

    Example:
        >>> _row_numbers("3,8-11")
        [3, 8, 9, 10, 11]
    """
    rows: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first or "-" in last or (dash and not last):
            raise InvalidInputError(f"--remove must be {_ROWS}, got {part!r:.40}.")
        start, stop = _number(int, "remove", first), _number(int, "remove", last or first)
        if stop < start:
            raise InvalidInputError(f"--remove: {part!r:.40} ends before it begins. Use {stop}-{start}.")
        if stop >= start + _MOST_NAMED:
            raise InvalidInputError(f"--remove: {part!r:.40} is no range of at most {_MOST_NAMED:,} rows.")
        rows += range(start, stop + 1)
    return rows


def _number(kind: type[_Number], name: str, text: str) -> _Number:
    try:
        return kind(text)
    except ValueError as error:
        raise InvalidInputError(
            f"--{name} must be {_ROWS if name == 'remove' else 'a number'}, got {text!r:.40}."
        ) from error


def renders(config: RunConfig) -> tuple[Render | None, Render | None]:
    """Return the recipe's ``render`` and ``render_target``, of the rows that the config selects."""

    def of_rows(function: str, indices: Sequence[int] | None) -> Render | None:
        render = None if config.recipe is None else config.recipe.bound(function)
        return render if render is None or indices is None else lambda row: render(indices[row])

    train, target = (config.values[section]["indices"] for section in ("train_data", "target_data"))
    return of_rows("render", train), of_rows("render_target", target)


def beside(config: RunConfig, suffix: str, remote: str = "training.run") -> Path:
    """Return the store's path with a suffix in place of ``.zarr``; for an object store the path ``remote``."""
    path = config.path
    return Path(remote if isinstance(path, RemotePlace) else path.removesuffix(".zarr") + suffix)
