"""Records of runs: the complete config of a run, the digest of its recipe and the versions of the packages.

They are stored in the store of the run, so that the run can be repeated from there. A store may come from someone else.
A record therefore chooses neither code nor a place to write: the recipe that it names is never executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import numpy as np

from trak_lite._validate import parse_json
from trak_lite.errors import CorruptStoreError
from trak_lite.store import AbstractFeatureStore, RemotePlace, open_store
from trak_lite.store.manifest import differing_keys

_NAME, _KEY = "runs", "run records, format 1"
_MOST = 100
"""Number of records that a store holds; the oldest are dropped first."""


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


def store_record_of_run(place: str | RemotePlace, record: RunRecord) -> None:
    """Append a record to those of a store, unless the last one differs only in its time."""
    with open_store(place, "r+") as store:
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


def last_record(place: str | RemotePlace) -> RunRecord | None:
    """Return the last record of a store, with the present path of the store; ``None`` if there is no record."""
    with open_store(place) as store:
        records = stored_records(store)
    # A store may have been moved since the run.
    return replace(records[-1], config={**records[-1].config, "path": records[-1].where}) if records else None
