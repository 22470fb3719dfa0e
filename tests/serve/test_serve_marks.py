"""The file of marks: old or new at every moment, shared by processes, read back, exported."""

import csv
import io
import json
import os
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from serve_cases import BLANK, SEAL, Mark, MarksFile, relabelling, seal

from trak_lite.errors import CorruptStoreError, InvalidInputError, ManifestMismatchError, StoreError

DATASET = {"num_rows": 9, "indices": "abc"}
KEEP, DROP = Mark("keep"), Mark("drop")


class Killed(BaseException):
    """Ends the process as far as the file is concerned: nothing of the package catches it."""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.marks.json"


LOCK = ".run.marks.json.lock"


def marks(path: Path, dataset: dict[str, Any] = DATASET) -> MarksFile:
    return MarksFile(path, dataset, 60)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("old", [{}, {1: KEEP}], ids=["first", "changed"])
def test_a_kill_at_any_call_of_the_system_leaves_the_old_or_the_new_marks(old, after, tmp_path, monkeypatch):
    outcomes = []
    for moment in count():
        path, calls = tmp_path / str(moment) / "run.marks.json", count()
        path.parent.mkdir()
        for row, mark in old.items():
            marks(path).put(row, mark)

        def dying(real: Any, calls: Any = calls, moment: int = moment) -> Any:
            def call(*arguments: Any, **named: Any) -> Any:
                dies = next(calls) == moment
                if dies and not after:
                    raise Killed
                try:
                    return real(*arguments, **named)
                finally:
                    if dies:
                        raise Killed

            return call

        with monkeypatch.context() as patched:
            for name in ("open", "close", "write", "pwrite", "fsync", "rename", "unlink"):
                patched.setattr(os, name, dying(getattr(os, name)))
            try:
                marks(path).put(2, DROP)
            except Killed:
                pass
            else:
                break
        outcomes.append(marks(path).read())
        assert outcomes[-1] in (old, {**old, 2: DROP}), moment
        marks(path).put(3, KEEP)  # what the kill left behind is in nobody's way
        assert marks(path).read()[3] == KEEP
        assert sorted(os.listdir(path.parent)) == [LOCK, "run.marks.json"]
    assert len(outcomes) > 8
    assert old in outcomes
    assert {**old, 2: DROP} in outcomes


@pytest.mark.quick
def test_a_write_that_fails_leaves_the_old_marks(path, monkeypatch):
    marks(path).put(1, KEEP)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"run\.marks\.json failed: No space left"):
        marks(path).put(2, DROP)
    assert marks(path).read() == {1: KEEP}


@pytest.mark.quick
def test_several_writers_lose_no_mark(path):
    def put_all(start: int) -> None:
        for row in range(start, 60, 3):
            marks(path).put(row, KEEP)

    threads = [Thread(target=put_all, args=[start]) for start in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(marks(path).read()) == list(range(60))


@pytest.mark.quick
def test_marks_are_read_while_others_are_written(path, monkeypatch):
    marks(path).put(0, KEEP)
    rows, opened = iter(range(1, 60)), os.open

    def replaced_before(name: Any, *arguments: Any, **named: Any) -> int:
        if os.fspath(name).endswith("run.marks.json"):
            with monkeypatch.context() as patched:
                patched.setattr(os, "open", opened)
                marks(path).put(next(rows), KEEP)
        return opened(name, *arguments, **named)

    monkeypatch.setattr(os, "open", replaced_before)
    for _ in range(3):
        assert 0 in marks(path).read()
    assert next(rows) == 4


WRONG_ROWS = ["-1", "60", "1000000000", "9" * 5000, "01", " 1", "1_0", "\u0663", "", "1.0"]
NO_MARKS = ["", "{", "[]", '{"marks": {"x": {}}}', '{"marks": {"1": {"mark": "burn"}}}', "[" * 10_000]


@pytest.mark.quick
def test_marks_of_other_rows_and_files_without_marks_are_refused_and_nothing_is_written(path):
    marks(path).put(59, KEEP)
    sound = path.read_text()
    unsealed = sound.replace(json.loads(sound)[SEAL], BLANK)
    for number, content in enumerate(
        [*NO_MARKS, *(unsealed.replace('"59"', json.dumps(row)) for row in WRONG_ROWS)]
    ):
        path.write_text(content)
        if number >= len(NO_MARKS):
            seal(str(path), "marks")
            content = path.read_text()
        for call in (marks(path).read, lambda: marks(path).put(1, DROP)):
            with pytest.raises(CorruptStoreError, match="does not hold marks of train rows"):
                call()
        assert path.read_text() == content
    path.write_text(sound)
    for row in (-1, 60):
        with pytest.raises(InvalidInputError, match=f"no train row {row}"):
            marks(path).put(row, DROP)
    with pytest.raises(ManifestMismatchError, match="marks of other train data"):
        marks(path, {"num_rows": 8}).put(1, DROP)
    assert path.read_text() == sound


@pytest.mark.quick
def test_the_csv_reads_back_and_holds_no_formula():
    labels = ["cat", "=1+1", "-3", 'a "b", c\nd']
    found = relabelling({1: Mark("flip", "@SUM(A1)"), 2: Mark("flip", "-4"), 3: DROP}, labels)
    assert list(csv.reader(io.StringIO(found, newline=""))) == [
        ["row", "mark", "label", "new_label"],
        ["1", "flip", "'=1+1", "'@SUM(A1)"],
        ["2", "flip", "-3", "-4"],
        ["3", "drop", 'a "b", c\nd', ""],
    ]
    assert relabelling({0: KEEP}, None) == "row,mark,label,new_label\r\n0,keep,,\r\n"
    relabelling({0: Mark("flip", "\ud800")}, None).encode()  # a lone surrogate, which a file may hold


FOREIGN = {
    "link": lambda path, other: path.symlink_to(other),
    "dangling link": lambda path, other: path.symlink_to(other.with_name("missing")),
    "pipe": lambda path, other: os.mkfifo(path),
    "folder": lambda path, other: path.mkdir(),
    "device": lambda path, other: path.symlink_to("/dev/zero"),
    "large": lambda path, other: (path.touch(), os.truncate(path, 1 << 40)),
    "hard link": lambda path, other: path.hardlink_to(other),
}


@pytest.mark.parametrize("kind", list(FOREIGN)[:-1])
def test_what_is_no_plain_file_in_place_of_the_marks_is_refused(kind, path):
    """Nothing is followed, waited for, created or changed."""
    other = path.with_name("other")
    marks(other).put(1, KEEP)
    path.with_name(".other.lock").unlink()
    before = other.read_bytes()
    FOREIGN[kind](path, other)
    for call in (marks(path).read, lambda: marks(path).put(2, DROP)):
        with pytest.raises(StoreError, match=r"run\.marks\.json"):
            call()
    assert (sorted(os.listdir(path.parent)), other.read_bytes()) == (["other", "run.marks.json"], before)


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_what_is_in_place_of_the_unfinished_file_is_removed_and_not_written(kind, path):
    other = path.with_name("other")
    other.write_text("mine")
    FOREIGN[kind](path.with_name(".run.marks.json.new"), other)
    marks(path).put(2, DROP)
    assert marks(path).read() == {2: DROP}
    assert (sorted(os.listdir(path.parent)), other.read_text()) == ([LOCK, "other", "run.marks.json"], "mine")
