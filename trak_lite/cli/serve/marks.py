"""Marks of a reviewer on train rows, in one JSON file beside the store."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from trak_lite.core import files
from trak_lite.core.json_text import parse_json
from trak_lite.core.sealed import BLANK, SEAL, check_seal, seal
from trak_lite.core.validate import one_of
from trak_lite.errors import CorruptStoreError, InvalidInputError
from trak_lite.store.manifest import compare_fingerprints

MARKS: Final = ("keep", "flip", "drop")
_FORMAT: Final = 2
_SEALED_AS: Final = "marks"
_LABEL_LENGTH: Final = 200
_MOST_BYTES: Final = 1 << 26
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""First characters of a cell that a spreadsheet would execute."""


@final
@dataclass(frozen=True, slots=True)
class Mark:
    """The decision on one train row."""

    mark: str
    """``"keep"``, ``"flip"`` (the label is wrong) or ``"drop"``."""
    label: str = ""
    """The right label of a row to flip; empty if it is not known."""

    def __post_init__(self) -> None:
        one_of(MARKS, mark=self.mark)
        if not isinstance(self.label, str) or len(self.label) > _LABEL_LENGTH:
            raise InvalidInputError(f"A label must be a text of at most {_LABEL_LENGTH} characters.")


@final
class MarksFile:
    """Marks by train row, in a file that always holds either the old or the new marks.

    A change is written to a second file, synced, and renamed. It is on disk when the method returns. Several processes
    may change the file: each waits for the lock of a file beside it and reads it again.
    """

    def __init__(self, path: str | os.PathLike[str], dataset: Mapping[str, Any], num_rows: int) -> None:
        """Take a file, which is created with the first mark, the identity of the train data and their number of rows.

        Nothing is read. A link, a pipe or a folder in place of the file is refused.
        """
        path = Path(os.path.abspath(path))
        self.path = path.parent.resolve() / path.name  # the links of the folder are the user's
        self._dataset = dict(dataset)
        self._num_rows = num_rows

    def read(self) -> dict[int, Mark]:
        """Return the marks by row, in the order of rows."""
        content = None
        with files.named_errors("Reading", str(self.path)), contextlib.suppress(FileNotFoundError):
            content = files.read_file(str(self.path), most=_MOST_BYTES, remedy="Move it away, or restore it.")
        if content is None:
            return {}
        try:
            check_seal(np.frombuffer(content, np.uint8), str(self.path), _SEALED_AS)
            parsed = parse_json(content)
            marks = {_row(row, self._num_rows): Mark(**values) for row, values in parsed["marks"].items()}
            one_of([str(_FORMAT)], format=str(parsed["format"]))
            dataset = dict(parsed["dataset"])
        except (CorruptStoreError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptStoreError(
                f"{self.path} does not hold marks of train rows ({error!r:.200}). Move it away, or restore it."
            ) from error
        compare_fingerprints(
            dataset,
            self._dataset,
            where=str(self.path),
            remedy="These are marks of other train data. Move the file away.",
        )
        return dict(sorted(marks.items()))

    def put(self, row: int, mark: Mark | None) -> None:
        """Store the mark of a row, or remove it with ``None``."""
        if not 0 <= row < self._num_rows:
            raise InvalidInputError(f"There is no train row {row}. Expected 0 to {self._num_rows - 1}.")
        lock = str(self.path.with_name(f".{self.path.name}.lock"))  # the file itself is never empty
        self.read()  # before anything is created
        with files.named_errors("Writing", str(self.path)):
            os.close(files.open_file(lock, os.O_RDWR | os.O_CREAT))
            with files.locked_file(lock):
                marks = self.read()
                marks.pop(row, None)
                if mark is not None:
                    marks[row] = mark
                self._replace(marks)

    def _replace(self, marks: Mapping[int, Mark]) -> None:
        """Replace the file; the caller holds its lock."""
        content = {
            SEAL: BLANK,
            "format": _FORMAT,
            "dataset": self._dataset,
            "marks": {str(row): asdict(mark) for row, mark in sorted(marks.items())},
        }
        path = str(self.path)
        unfinished = str(self.path.with_name(f".{self.path.name}.new"))
        # Of a killed process; a link is removed, what it names is not changed.
        files.remove_file(unfinished, missing_ok=True)
        files.write_file(unfinished, json.dumps(content, indent=1).encode())
        seal(unfinished, _SEALED_AS)  # and sync it
        files.rename(unfinished, path)
        files.sync_folder(os.path.dirname(path))


def relabelling(marks: Mapping[int, Mark], labels: Sequence[str] | None) -> str:
    """Return marks as CSV with the columns ``row``, ``mark``, ``label`` (if they are given) and ``new_label``.

    A cell that a spreadsheet would execute as a formula begins with an apostrophe.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(["row", "mark", "label", "new_label"])
    for row, mark in marks.items():
        label = "" if labels is None else labels[row]
        writer.writerow([row, mark.mark, _cell(label), _cell(mark.label)])
    return out.getvalue().encode(errors="replace").decode()  # lone surrogates cannot be sent


def _row(text: str, count: int) -> int:
    """Return the number of a train row as :meth:`MarksFile.put` writes it; raise ``ValueError`` for other texts."""
    if text.isascii() and text.isdigit() and len(text) < 20 and int(text) < count and str(int(text)) == text:
        return int(text)
    raise ValueError(f"a mark of row {text:.40}, expected 0 to {count - 1}")


def _cell(text: str) -> str:
    """Return a text as a cell that is not a formula; numbers stay as they are."""
    if not text.startswith(_FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text
