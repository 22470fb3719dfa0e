"""The content of a store as text: settings, tables, rows done, verdicts, runs. Stores are read without a lock."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from trak_lite.cli.records import stored_records
from trak_lite.errors import StoreError, printable
from trak_lite.evaluation import Verdict
from trak_lite.evaluation.verdict import OneRunVerdict
from trak_lite.run.tables import CAPTURED, all_score_paths, stored_content
from trak_lite.scoring.records import ScoreEntries
from trak_lite.store import AbstractFeatureStore, RemotePlace, open_store

__all__ = ["done_lines", "inspection"]


def inspection(place: str | RemotePlace) -> str:
    """Return the content of the store at a path or address.

    Raises:
        MissingStoreError: If there is no store.
        StoreError: If it cannot be read.
    """
    with open_store(place) as store:
        made_with, fingerprint = dict(store.manifest.made_with), dict(store.manifest.fingerprint)
        settings, parameters = made_with.pop("settings", {}), fingerprint.pop("parameters", None)
        entries = [f"  {_line(name)}" for name in store.entry_names()]
        scored = [path for path in all_score_paths(store) if store.open_table(path).complete]
        names = store.table_names()
        left = sum(not store.open_table(name).complete for name in names)
        lines = [
            f"{place}: a store of format {store.manifest.format}",
            f"  {_line(stored_content(store))}",
            f"  {len(names)} tables ({left or 'none'} not finished), {len(entries)} entries",
            *_block("made with", made_with),
            *_block("settings", settings),
            *_block("rows are determined by", fingerprint),
            *([f"  parameters: {len(parameters)} tensors"] if isinstance(parameters, Mapping) else []),
            "tables:",
            *(f"  {line}" for line in done_lines(store)),
            *(["entries (verdicts, fits, runs):", *entries] if entries else []),
            *(f"verdict on {path}: {_tested(store, path)}" for path in scored),
            *_run_lines(store),
        ]
    return "\n".join(lines)


def done_lines(store: AbstractFeatureStore) -> Iterator[str]:
    """Yield a line per table: its path, the number of rows done, and its checkpoint if it has one."""
    paths = store.table_names()
    width = max(map(len, paths), default=0)
    for path in paths:
        table = store.open_table(path)
        done, total = int(table.done().sum()), table.spec.num_rows
        name = store.attributes(path).get("name")
        of = "" if name is None else f", checkpoint {_json(name)}"
        way = ", captured: each row has the weights of its step" if CAPTURED in table.spec.fingerprint else ""
        yield f"{path:<{width}}  {done} of {total} rows done{of}{way}"
    if not paths:
        yield "none yet"


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
