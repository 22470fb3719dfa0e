"""The content of a store as text: settings, tables, rows done, verdicts, runs. Stores are read without a lock."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from trak_lite.cli.records import stored_records
from trak_lite.errors import StoreError, printable
from trak_lite.evaluation import Verdict
from trak_lite.evaluation.verdict import OneRunVerdict
from trak_lite.run.tables import CAPTURED, all_score_paths, stored_content
from trak_lite.scoring.records import ScoreEntries
from trak_lite.store import AbstractFeatureStore, RemotePlace, open_store

_MOST_LISTED: Final = 8
"""Tables that differ by their checkpoint only, or entries of a folder, that are listed one by one."""


class _Content(NamedTuple):
    """What is shown of a table: rows done and in all, their bytes, and the name of the checkpoint."""

    path: str
    done: int
    total: int
    num_bytes: int
    name: str | None
    is_captured: bool


def inspection(place: str | RemotePlace, *, every: bool = False) -> str:
    """Return the content of the store at a path or address; more than eight alike are summed up, unless ``every``."""
    with open_store(place) as store:
        made_with, fingerprint = dict(store.manifest.made_with), dict(store.manifest.fingerprint)
        settings, parameters = made_with.pop("settings", {}), fingerprint.pop("parameters", None)
        entries, tables = store.entry_names(), _contents(store)
        left = [table.path for table in tables if table.done < table.total]
        scored = [path for path in all_score_paths(store) if path not in left]
        lines = [
            f"{place}: a store of format {store.manifest.format}",
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
            *(f"verdict on {path}: {_tested(store, path)}" for path in scored),
            *_run_lines(store),
        ]
    return "\n".join(lines)


def done_lines(store: AbstractFeatureStore) -> Iterator[str]:
    """Yield a line per table: its path, the number of rows done, and its checkpoint if it has one.

    Of more than eight tables that differ by their checkpoint only, it yields their sum and those that are not finished.
    """
    return _table_lines(_contents(store), every=False)


def _contents(store: AbstractFeatureStore) -> list[_Content]:
    found = []
    for path in store.table_names():
        table = store.open_table(path)
        total = table.spec.num_rows
        done = total if table.complete else int(table.done().sum())
        name = store.attributes(path).get("name")
        is_captured = CAPTURED in table.spec.fingerprint
        found.append(_Content(path, done, total, total * table.spec.row_bytes, name, is_captured))
    return found


def _table_lines(tables: Sequence[_Content], *, every: bool) -> Iterator[str]:
    groups: dict[str, list[_Content]] = {}
    for table in tables:
        alike = table.path if every else re.sub(r"ckpt-\d+(/[0-9a-f]{16}(?=/))?", "ckpt-*", table.path)
        groups.setdefault(alike, []).append(table)
    listed: list[tuple[str, str]] = []
    for alike, group in groups.items():
        shown = group
        if len(group) > _MOST_LISTED:
            shown = [table for table in group if table.done < table.total]
            done, total = sum(table.done for table in group), sum(table.total for table in group)
            what = f"{len(group)} tables ({len(shown) or 'none'} not finished), {_size(group)}"
            listed.append((alike, f"{done:,} of {total:,} rows done, {what}"))
        for table in shown[:_MOST_LISTED]:
            of = "" if table.name is None else f", checkpoint {_json(table.name)}"
            way = ", captured: each row has the weights of its step" if table.is_captured else ""
            listed.append((table.path, f"{table.done} of {table.total} rows done{of}{way}"))
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


def _tested(store: AbstractFeatureStore, path: str) -> str:
    try:
        entries = ScoreEntries(store, path)
        found = [one for one in (entries.verdict(Verdict), entries.verdict(OneRunVerdict)) if one is not None]
    except StoreError as error:
        return str(error)
    return "\n".join(map(str, found)).replace("\n", "\n    ") or "not tested"


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
