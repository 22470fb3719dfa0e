"""Records of runs, and the content of a store as text; stores are read without a lock.

A record is the complete config of a run, the digest of its recipe and the versions of the packages. It is stored in the
store of the run, so that the run can be repeated from there. A store may come from someone else. A record therefore
chooses neither code nor a place to write: the recipe that it names is never executed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple, final

import numpy as np

from trak_lite.core.json_text import parse_json
from trak_lite.errors import CorruptStoreError, StoreError, printable
from trak_lite.run.tables import CAPTURED, all_score_paths, stored_content
from trak_lite.scoring.records import ScoreEntries
from trak_lite.store import AbstractFeatureStore, RemotePlace, open_store
from trak_lite.store.manifest import differing_keys

_NAME, _KEY = "runs", "run records, format 1"
_MOST = 100
"""Number of records that a store holds; the oldest are dropped first."""
_MOST_LISTED: Final = 8
"""Tables that differ by their checkpoint or target set only, or entries of a folder, that are listed one by one."""
_NOT_TESTED: Final = "not tested"


@final
@dataclass(frozen=True, slots=True)
class RunRecord:
    """The record of one command."""

    command: str
    """``run``, ``featurize``, ``score`` or ``verify``."""
    time: str
    """Start of the command, UTC."""
    config: Mapping[str, Any]
    """The config with a value for every key."""
    recipe_digest: str
    """SHA-256 of the recipe."""
    versions: Mapping[str, Any]
    """Versions of this package and of the packages that compute."""
    where: str = ""
    """The store from which the record was read."""

    def __post_init__(self) -> None:
        # Stores hold arbitrary JSON. The config is checked when it is used.
        texts = (self.command, self.time, self.recipe_digest)
        mappings = (self.config, self.versions)
        if {type(value) for value in texts} != {str} or {type(value) for value in mappings} != {dict}:
            raise TypeError("a value of a record has the wrong type")

    def other_recipe(self, path: str, digest: str) -> str:
        """Return a line if the recipe at a path differs from a recorded one in any byte, else an empty text."""
        if self.recipe_digest in (digest, ""):
            return ""
        return (
            f"The recipe {path} is not the one of the run stored in {self.where}: its SHA-256 is {digest[:12]}, was "
            f"{self.recipe_digest[:12]}.\n"
        )

    def other_versions(self, here: Mapping[str, Any]) -> str:
        """Return a line with the versions that differ from the recorded ones, or an empty text."""
        other = [
            f"{name} is {there!r} there, {now!r} here"
            for name, there, now in differing_keys(self.versions, here)
        ]
        return f"The run stored in {self.where} used other versions: {'; '.join(other)}.\n" if other else ""


def store_record_of_run(path: str | RemotePlace, record: RunRecord) -> None:
    """Append a record to those of a store, unless the last one differs only in its time."""
    with open_store(path, "r+") as store:
        records = stored_records(store)
        if records and replace(records[-1], time="", where="") == replace(record, time="", where=""):
            return
        content = [asdict(one) for one in (*records, record)][-_MOST:]
        text = json.dumps(content, allow_nan=False).encode()
        store.put_entry(_NAME, _KEY, np.frombuffer(text, np.uint8).copy())


def stored_records(store: AbstractFeatureStore) -> list[RunRecord]:
    """Return the records of a store, the oldest first."""
    stored = store.entry(_NAME, _KEY)
    if stored is None:
        return []
    try:
        return [RunRecord(**{**one, "where": str(store.path)}) for one in parse_json(stored)]
    except (ValueError, TypeError) as error:
        raise CorruptStoreError(
            f"The records of runs in {store.path} cannot be read. Name the config: trak-lite run CONFIG."
        ) from error


def last_record(path: str | RemotePlace) -> RunRecord | None:
    """Return the last record of a store, with the present path of the store; ``None`` if there is no record."""
    with open_store(path) as store:
        records = stored_records(store)
    # A store may have been moved since the run.
    return replace(records[-1], config={**records[-1].config, "path": records[-1].where}) if records else None


class _Content(NamedTuple):
    """What is shown of a table: rows done and in all, their bytes, and the name of the checkpoint."""

    path: str
    is_complete: bool
    done: int
    total: int
    num_bytes: int
    name: str | None
    is_captured: bool


def inspection(path: str | RemotePlace, *, every: bool = False) -> str:
    """Return the content of the store at a path or address; more than eight alike are summed up, unless ``every``."""
    with open_store(path) as store:
        made_with, fingerprint = dict(store.manifest.made_with), dict(store.manifest.fingerprint)
        settings, parameters = made_with.pop("settings", {}), fingerprint.pop("parameters", None)
        entries, tables = store.entry_names(), _contents(store)
        left = [table.path for table in tables if not table.is_complete]
        scored = [path for path in all_score_paths(store) if path not in left]
        lines = [
            f"{path}: a store of format {store.manifest.format}",
            f"  {_line(stored_content(store))}",
            f"  {len(tables)} tables ({len(left) or 'none'} not finished), {len(entries)} entries",
            f"  rows: {_size(tables)}",
            *_block("made with", made_with),
            *_block("settings", settings),
            *_block("rows are determined by", fingerprint),
            *([f"  parameters: {len(parameters)} tensors"] if isinstance(parameters, Mapping) else []),
            "tables:",
            *(f"  {line}" for line in _table_lines(tables, every=every)),
            *(["entries (verdicts, fits, runs):"] if entries else []),
            *(f"  {_line(line)}" for line in _entry_lines(entries, every=every)),
            *_verdict_lines(store, scored, every=every),
            *_run_lines(store),
        ]
    return "\n".join(lines)


def done_lines(store: AbstractFeatureStore) -> Iterator[str]:
    """Yield a line per table: its path, the number of rows done, and its checkpoint if it has one.

    Of more than eight tables that differ by their checkpoint only, it yields their sum and those that are not finished.
    """
    return _table_lines(_contents(store), every=False)


def _contents(store: AbstractFeatureStore) -> list[_Content]:
    contents = []
    for path in store.table_names():
        table = store.open_table(path)
        total = table.spec.num_rows
        is_complete = table.complete
        done = total if is_complete else int(table.done().sum())
        name = store.attributes(path).get("name")
        is_captured = CAPTURED in table.spec.fingerprint
        num_bytes = total * table.spec.row_bytes
        contents.append(_Content(path, is_complete, done, total, num_bytes, name, is_captured))
    return contents


def _table_lines(tables: Sequence[_Content], *, every: bool) -> Iterator[str]:
    groups: dict[str, list[_Content]] = {}
    for table in tables:
        alike = table.path if every else re.sub(r"ckpt-\d+(/[0-9a-f]{16}(?=/))?", "ckpt-*", table.path)
        groups.setdefault(alike, []).append(table)
    if not every:
        folders = Counter(alike.partition("/")[0] for alike in groups)
        for alike in [alike for alike in groups if folders[alike.partition("/")[0]] > _MOST_LISTED]:
            groups.setdefault(re.sub("^([^/]+/)[^/]+", r"\1*", alike), []).extend(groups.pop(alike))
    listed: list[tuple[str, str]] = []
    for alike, group in groups.items():
        shown = group
        if len(group) > _MOST_LISTED:
            shown = [table for table in group if not table.is_complete]
            done, total = sum(table.done for table in group), sum(table.total for table in group)
            what = f"{len(group)} tables ({len(shown) or 'none'} not finished), {_size(group)}"
            listed.append((alike, f"{done:,} of {total:,} rows done, {what}"))
        for table in shown[:_MOST_LISTED]:
            of = "" if table.name is None else f", checkpoint {_json(table.name)}"
            left = "" if table.is_complete or table.done < table.total else ", not committed yet"
            way = ", captured: each row has the weights of its step" if table.is_captured else ""
            listed.append((table.path, f"{table.done} of {table.total} rows done{left}{of}{way}"))
    width = max((len(path) for path, _ in listed), default=0)
    yield from (f"{path:<{width}}  {text}" for path, text in listed)
    if not listed:
        yield "none yet"


def _entry_lines(names: Sequence[str], *, every: bool) -> Iterator[str]:
    folders: dict[str, list[str]] = {}
    for name in names:
        folders.setdefault(name if every else name.partition("/")[0], []).append(name)
    for folder, group in folders.items():
        if len(group) > _MOST_LISTED:
            yield f"{folder}/*  {len(group)} entries"
        else:
            yield from group


def _size(tables: Sequence[_Content]) -> str:
    return f"{sum(table.num_bytes for table in tables) / 1e6:,.1f} MB"


def _verdict_lines(store: AbstractFeatureStore, paths: Sequence[str], *, every: bool) -> Iterator[str]:
    tested = {path: _tested(store, path) for path in paths}
    if len(paths) > _MOST_LISTED and not every:
        tested = {path: text for path, text in tested.items() if text != _NOT_TESTED}
        yield f"verdicts: {len(paths) - len(tested)} of {len(paths)} scores are not tested"
    yield from (f"verdict on {path}: {text}" for path, text in tested.items())


def _tested(store: AbstractFeatureStore, path: str) -> str:
    try:
        tests = ScoreEntries(store, path).verdicts()
    except StoreError as error:
        return str(error)
    return "\n".join(map(str, tests)).replace("\n", "\n    ") or _NOT_TESTED


def _run_lines(store: AbstractFeatureStore) -> Iterator[str]:
    try:
        records = stored_records(store)
    except StoreError as error:
        yield f"runs: {error}"
        return
    for record in records:
        yield (
            f"run: {_json(record.command)} at {_json(record.time)}, recipe {_json(record.config.get('recipe'))} "
            f"(SHA-256 {_json(record.recipe_digest[:12])})"
        )


def _block(title: str, values: Any) -> Iterator[str]:
    yield f"{title}:"
    if isinstance(values, Mapping):
        yield from (f"  {_line(key)}: {_json(value)}" for key, value in sorted(values.items()))


def _json(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _line(text: str) -> str:
    """Return a text of a store with its newlines escaped, so that it stays on one line."""
    return printable(text).replace("\n", "\\n")
