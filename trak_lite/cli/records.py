"""Records of runs: the config of every run with all values written out, its recipe's digest and the versions.

They are kept in the store that the run fills, so that the run can be repeated from there. A store may come from
elsewhere, so a record chooses neither code nor a place to write: the recipe that it names is never run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, final

import numpy as np

from trak_lite._validate import parse_json
from trak_lite.errors import CorruptStoreError
from trak_lite.store import AbstractFeatureStore, RemotePlace, open_store
from trak_lite.store.manifest import differing_keys

__all__ = ["RunRecord", "last_record", "store_record_of_run", "stored_records"]

_NAME, _KEY = "runs", "run records, format 1"
_MOST = 100
"""Records that are kept; the oldest go first."""
_UNREADABLE = (ValueError, TypeError, KeyError)


@final
@dataclass(frozen=True, slots=True)
class RunRecord:
    """What one command was told to do."""

    command: str
    """``run``, ``featurize``, ``score`` or ``verify``."""
    time: str
    """When it began, UTC."""
    config: Mapping[str, Any]
    """The config with every value written out."""
    recipe_digest: str
    """SHA-256 of the recipe."""
    versions: Mapping[str, Any]
    """Of this package and those that compute."""
    where: str = ""
    """The store that it was read from."""

    @classmethod
    def now(
        cls, command: str, config: Mapping[str, Any], recipe_digest: str, versions: Mapping[str, Any]
    ) -> RunRecord:
        """Return the record of a command that begins now."""
        time = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(command, time, config, recipe_digest, versions)

    def other_recipe(self, path: str, digest: str) -> str:
        """Return a line on the recipe that is run, if it is not the recorded one byte for byte; else nothing.

        Args:
            path: Of the recipe that the user named.
            digest: SHA-256 of its bytes.
        """
        if digest == self.recipe_digest:
            return ""
        return (
            f"The recipe {path} is not the one of the run kept in {self.where}: its SHA-256 is {digest[:12]}, was "
            f"{self.recipe_digest[:12]}.\n"
        )

    def other_versions(self, here: Mapping[str, Any]) -> str:
        """Return a line on the versions that are not those of the record, nothing if all are the same."""
        other = [
            f"{name} is {there!r} there, {now!r} here"
            for name, there, now in differing_keys(self.versions, here)
        ]
        return f"The run kept in {self.where} was made with others: {'; '.join(other)}.\n" if other else ""

    def replayed(self) -> RunRecord:
        """Return the record with the store where it is now, which may have been moved."""
        return RunRecord(
            self.command,
            self.time,
            {**self.config, "path": self.where},
            self.recipe_digest,
            self.versions,
            self.where,
        )

    def same_run(self, other: RunRecord) -> bool:
        """Whether two records say the same but for the time."""
        return {**asdict(self), "time": "", "where": ""} == {**asdict(other), "time": "", "where": ""}


def store_record_of_run(place: str | RemotePlace, record: RunRecord) -> None:
    """Add a record to those of a store, unless the last one says the same."""
    with open_store(place, "r+") as store:
        records = stored_records(store)
        if records and records[-1].same_run(record):
            return
        kept = [asdict(one) for one in (*records, record)][-_MOST:]
        text = json.dumps(kept, allow_nan=False).encode()
        store.put_entry(_NAME, _KEY, np.frombuffer(text, np.uint8).copy())


def stored_records(store: AbstractFeatureStore) -> list[RunRecord]:
    """Return the records of a store, the oldest first.

    Raises:
        CorruptStoreError: If they cannot be read.
    """
    kept = store.entry(_NAME, _KEY)
    if kept is None:
        return []
    try:
        content = parse_json(kept)
        records = [RunRecord(**{**one, "where": str(store.path)}) for one in content]
    except _UNREADABLE as error:
        raise _unreadable(store.path) from error
    if not all(_is_sound(record) for record in records):
        raise _unreadable(store.path)
    return records


def last_record(place: str | RemotePlace) -> RunRecord | None:
    """Return the last record of a store, with the store where it is now; ``None`` if no run was recorded in it.

    Raises:
        MissingStoreError: If there is no store.
        CorruptStoreError: If the records cannot be read.
    """
    with open_store(place) as store:
        records = stored_records(store)
    return records[-1].replayed() if records else None


def _is_sound(record: RunRecord) -> bool:
    """Whether the values of a record are of their types; those of its config are checked as any config's."""
    texts = (record.command, record.time, record.recipe_digest)
    return all(isinstance(value, str) for value in texts) and all(
        isinstance(value, dict) for value in (record.config, record.versions)
    )


def _unreadable(path: str | None) -> CorruptStoreError:
    return CorruptStoreError(
        f"The records of runs in {path} cannot be read. Name the config: trak-lite run CONFIG."
    )
