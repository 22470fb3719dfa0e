"""The manifest: the settings that a store was created with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray

from trak_lite.core.json_text import canonical_json, digest_of, parse_json
from trak_lite.errors import CorruptStoreError, ManifestMismatchError

FORMAT = 3
"""Version of the layout on disk; stores of other versions are rejected."""
_SHOWN = 100
"""Characters of a value in a message."""
_TYPES: dict[str, tuple[type, ...]] = {
    "dataset": (dict,),
    "dataset.num_rows": (int,),
    "gradients": (dict,),
    "task": (dict,),
    "parameters": (dict,),
    "settings": (dict,),
    "checkpoints": (list,),
    "targets": (dict, list),
    "weights": (str,),
    "model_id": (int,),
}
"""Types of settings that are read from manifests and records of tables, where they are."""
_NEVER_NONE = frozenset({"dataset", "task", "gradients"})
_MOST_NAMED = 50
"""Maximum number of differing keys in a message, because another model differs in every parameter."""


def stored_json(array: NDArray[Any], *, what: str) -> dict[str, Any]:
    """Return the JSON object in an array of bytes; raise CorruptStoreError, which names ``what``, if it holds none."""
    try:
        value = parse_json(array, finite=False)
    except ValueError as error:
        raise CorruptStoreError(f"{what} cannot be read ({error}). Create it again.") from error
    if not isinstance(value, dict):
        raise CorruptStoreError(
            f"{what} holds {type(value).__name__}, expected a JSON object. Create it again."
        )
    return value


class StoredValues(dict[str, Any]):
    """Settings read from a store, which may be from elsewhere: a wrong or missing value is an error of the store.

    Types are checked when a value is read, because tables of others may use the same keys for something else.
    """

    def __init__(
        self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), *, where: str = "The store"
    ) -> None:
        super().__init__(values)
        self._where = where

    def __getitem__(self, key: str) -> Any:
        """Return a value of the type that trak_lite writes."""
        return self._checked(key, super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the type that trak_lite writes, or the default if there is none."""
        return self._checked(key, super().__getitem__(key)) if key in self else default

    def __missing__(self, key: str) -> Any:
        raise CorruptStoreError(
            f"{self._where} has no {key!r} among its settings: another program wrote or changed it. Restore the file "
            "from a backup, or use another path."
        )

    def _checked(self, key: str, value: Any) -> Any:
        for path, types in _TYPES.items():
            name, _, inner = path.partition(".")
            if name != key:
                continue
            if inner and not (isinstance(value, dict) and inner in value):
                continue
            setting = value[inner] if inner else value
            if type(setting) not in types and not (setting is None and name not in _NEVER_NONE):
                raise CorruptStoreError(
                    f"{self._where} has values of other types than trak_lite writes: {path} is {setting!r:.100}. "
                    "Restore the file from a backup, or use another path."
                )
        return value


@dataclass(frozen=True, slots=True)
class Manifest:
    """Settings that determine the rows, and the versions that produced them."""

    fingerprint: Mapping[str, Any]
    """JSON values that determine every number in the store."""
    made_with: Mapping[str, Any] = field(default_factory=dict)
    """Versions and device: recorded, never compared."""
    format: int = FORMAT

    def digest(self) -> str:
        """Return the SHA-256 of the canonical fingerprint, in hex."""
        return digest_of(self.fingerprint)

    def check_same(self, given: Manifest, *, where: str) -> None:
        """Raise ManifestMismatchError if the fingerprint of ``given`` differs; see :func:`compare_fingerprints`."""
        compare_fingerprints(self.fingerprint, given.fingerprint, where=where)


def compare_fingerprints(
    stored: Mapping[str, Any],
    requested: Mapping[str, Any],
    *,
    where: str,
    remedy: str = "Use the stored settings (Attributor.open), or another path.",
) -> None:
    """Raise ManifestMismatchError if two fingerprints differ; it names up to fifty differing keys with both values."""
    differing = differing_keys(stored, requested)
    if differing:
        changes = [_change(*one) for one in differing]
        more = [f"and {len(changes) - _MOST_NAMED} more"] if len(changes) > _MOST_NAMED else []
        text = "; ".join(changes[:_MOST_NAMED] + more)
        raise ManifestMismatchError(f"{where} was made with other settings: {text}. {remedy}")


def replaced_fingerprint(
    manifest: Manifest, expected: Mapping[str, Any], new: Mapping[str, Any], *, where: str
) -> Manifest:
    """Return the manifest with the fingerprint ``new``; raise unless its current one equals ``expected`` or ``new``."""
    if differing_keys(manifest.fingerprint, new):
        compare_fingerprints(manifest.fingerprint, expected, where=where)
    return replace(manifest, fingerprint=dict(new))


def differing_keys(stored: Mapping[str, Any], requested: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return ``(key, stored, requested)`` for each differing key; a missing value is ``"absent"``.

    Example:
        >>> differing_keys({"projector": {"seed": 0, "kind": "mask"}}, {"projector": {"seed": 1, "kind": "mask"}})
        [('projector.seed', 0, 1)]
    """
    texts = [canonical_json(dict(values)) for values in (stored, requested)]
    if texts[0] == texts[1]:
        return []
    left, right = (_flatten(json.loads(text)) for text in texts)
    keys = sorted(left.keys() | right.keys())
    values = ((key, left.get(key, "absent"), right.get(key, "absent")) for key in keys)
    return [one for one in values if one[1] != one[2]]


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one with dotted keys, ``{"projector.seed": 0, ...}``."""
    if isinstance(value, dict) and value:
        flat: dict[str, Any] = {}
        for key, item in value.items():
            flat.update(_flatten(item, f"{prefix}.{key}" if prefix else key))
        return flat
    return {prefix: value}


def _change(key: str, there: Any, here: Any) -> str:
    """Return the text for a differing key; of two long lists only the entries from the first difference on.

    Example:
        >>> _change("checkpoints", ["a" * 64, "b"], ["a" * 64, "b", "c" * 64])[:79]
        'checkpoints has 2 entries there, 3 here; the first 2 are equal, then nothing th'
    """
    if not (isinstance(there, list) and isinstance(here, list)) or len(repr(there) + repr(here)) <= _SHOWN:
        return f"{key} is {_short(there)} there, {_short(here)} here"
    pairs = zip(there, here, strict=False)
    equal = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(there), len(here)))
    left, right = (_short(rest) if (rest := part[equal:]) else "nothing" for part in (there, here))
    counts = f"has {len(there)} entries there, {len(here)} here"
    return f"{key} {counts}; the first {equal} are equal, then {left} there, {right} here"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
