"""The file of marks: old or new at every moment, shared by processes, read back, exported."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from threading import Thread

import pytest

from trak_lite.errors import (
    CorruptStoreError,
    InvalidInputError,
    ManifestMismatchError,
    StoreError,
    UnknownNameError,
)
from trak_lite.serve import marks as module
from trak_lite.serve.marks import Mark, MarksFile, relabelling

pytestmark = pytest.mark.quick

DATASET = {"num_rows": 9, "indices": "abc"}


class Killed(BaseException):
    """Ends the process as far as the file is concerned: nothing of the package catches it."""


def test_marks_are_read_back_in_the_order_of_rows_and_can_be_removed(tmp_path: Path) -> None:
    file = MarksFile(tmp_path / "run.marks.json", DATASET, 60)
    assert file.read() == {}
    file.put(7, Mark("drop"))
    file.put(2, Mark("flip", "é\n<b>"))
    file.put(7, Mark("keep"))
    file.put(5, Mark("keep"))
    file.put(5, None)

    again = MarksFile(tmp_path / "run.marks.json", DATASET, 60)
    assert list(again.read().items()) == [(2, Mark("flip", "é\n<b>")), (7, Mark("keep"))]
    assert os.listdir(tmp_path) == ["run.marks.json"]


STEPS = [
    "os.open",
    "os.close",
    "locked_file",
    "write_all",
    "os.fsync",
    "os.replace",
    "json.dumps",
    "sync_folder",
]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("first", [False, True], ids=["changed", "first"])
def test_a_kill_at_any_step_leaves_the_old_or_the_new_marks(
    step: str, after: bool, first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.marks.json"
    old = {} if first else {1: Mark("keep")}
    if not first:
        MarksFile(path, DATASET, 60).put(1, Mark("keep"))
    place = {"os": os, "json": json}.get(step.partition(".")[0], module)
    name = step.rpartition(".")[2]
    real = getattr(place, name)

    def dies(*arguments: object, **named: object) -> object:
        if after:
            real(*arguments, **named)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(place, name, dies)
        with pytest.raises(Killed):
            MarksFile(path, DATASET, 60).put(2, Mark("drop"))

    file = MarksFile(path, DATASET, 60)
    assert file.read() in (old, {**old, 2: Mark("drop")})
    file.put(3, Mark("keep"))  # what the kill left behind is in nobody's way
    assert file.read()[3] == Mark("keep")
    assert os.listdir(tmp_path) == ["run.marks.json"]


def test_a_write_that_fails_leaves_the_old_marks_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = MarksFile(tmp_path / "run.marks.json", DATASET, 60)
    file.put(1, Mark("keep"))

    def full(fd: int, data: bytes, offset: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_all", full)
    with pytest.raises(StoreError, match=r"run\.marks\.json failed: No space left"):
        file.put(2, Mark("drop"))
    assert file.read() == {1: Mark("keep")}


def test_several_writers_lose_no_mark(tmp_path: Path) -> None:
    def put_all(start: int) -> None:
        file = MarksFile(tmp_path / "run.marks.json", DATASET, 60)
        for row in range(start, 60, 3):
            file.put(row, Mark("keep"))

    threads = [Thread(target=put_all, args=[start]) for start in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(MarksFile(tmp_path / "run.marks.json", DATASET, 60).read()) == list(range(60))


def test_marks_of_other_data_and_other_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.marks.json"
    MarksFile(path, {"num_rows": 8}, 60).put(1, Mark("keep"))
    before = path.read_bytes()
    with pytest.raises(ManifestMismatchError, match="marks of other train data"):
        MarksFile(path, DATASET, 60).put(1, Mark("drop"))
    assert path.read_bytes() == before

    for content in ("{", "[]", '{"marks": {"x": {}}}', '{"marks": {"1": {"mark": "burn"}}}', "[" * 10_000):
        path.write_text(content)
        with pytest.raises(CorruptStoreError, match="does not hold marks"):
            MarksFile(path, DATASET, 60).put(1, Mark("drop"))
        assert path.read_text() == content


def test_unknown_marks_and_long_labels_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="mark must be one of"):
        Mark("burn")
    with pytest.raises(InvalidInputError, match="at most 200"):
        Mark("flip", "x" * 201)


def test_the_csv_reads_back_and_holds_no_formula() -> None:
    labels = ["cat", "=1+1", "-3", 'a "b", c\nd']
    marks = {1: Mark("flip", "@SUM(A1)"), 2: Mark("flip", "-4"), 3: Mark("drop")}

    text = relabelling(marks, labels)

    assert list(csv.reader(io.StringIO(text, newline=""))) == [
        ["row", "mark", "label", "new_label"],
        ["1", "flip", "'=1+1", "'@SUM(A1)"],
        ["2", "flip", "-3", "-4"],
        ["3", "drop", 'a "b", c\nd', ""],
    ]
    assert relabelling({0: Mark("keep")}, None) == "row,mark,label,new_label\r\n0,keep,,\r\n"
    relabelling({0: Mark("flip", "\ud800")}, None).encode()  # a lone surrogate, which a file may hold


@pytest.mark.parametrize(
    "row", ["-1", "60", "1000000000", "9" * 5000, "01", " 1", "1_0", "\u0663", "", "1.0"]
)
def test_marks_of_rows_that_do_not_exist_are_refused(row: str, tmp_path: Path) -> None:
    path = tmp_path / "run.marks.json"
    MarksFile(path, DATASET, 60).put(59, Mark("keep"))
    path.write_text(path.read_text().replace('"59"', json.dumps(row)))
    with pytest.raises(CorruptStoreError, match="does not hold marks of train rows"):
        MarksFile(path, DATASET, 60).read()


def test_a_row_that_does_not_exist_gets_no_mark(tmp_path: Path) -> None:
    for row in (-1, 60):
        with pytest.raises(InvalidInputError, match="no train row"):
            MarksFile(tmp_path / "run.marks.json", DATASET, 60).put(row, Mark("keep"))
    assert os.listdir(tmp_path) == []


FOREIGN = {
    "link": lambda path, other: path.symlink_to(other),
    "dangling link": lambda path, other: path.symlink_to(other.with_name("missing")),
    "pipe": lambda path, other: os.mkfifo(path),
    "folder": lambda path, other: path.mkdir(),
    "device": lambda path, other: path.symlink_to("/dev/zero"),
    "large": lambda path, other: (path.touch(), os.truncate(path, 1 << 40)),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_links_pipes_and_folders_in_place_of_the_marks_are_refused(kind: str, tmp_path: Path) -> None:
    """Nothing is followed, waited for, created or changed."""
    path, other = tmp_path / "run.marks.json", tmp_path / "other"
    MarksFile(other, DATASET, 60).put(1, Mark("keep"))
    before = other.read_bytes()
    FOREIGN[kind](path, other)
    for call in (
        MarksFile(path, DATASET, 60).read,
        lambda: MarksFile(path, DATASET, 60).put(2, Mark("drop")),
    ):
        with pytest.raises(StoreError, match=r"run\.marks\.json"):
            call()
    assert (sorted(os.listdir(tmp_path)), other.read_bytes()) == (["other", "run.marks.json"], before)


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_what_is_in_place_of_the_unfinished_file_is_removed_and_not_written(
    kind: str, tmp_path: Path
) -> None:
    unfinished, other = tmp_path / ".run.marks.json.new", tmp_path / "other"
    other.write_text("mine")
    {"hard link": lambda path, other: os.link(other, path), **FOREIGN}[kind](unfinished, other)
    file = MarksFile(tmp_path / "run.marks.json", DATASET, 60)
    file.put(2, Mark("drop"))
    assert file.read() == {2: Mark("drop")}
    assert (sorted(os.listdir(tmp_path)), other.read_text()) == (["other", "run.marks.json"], "mine")
