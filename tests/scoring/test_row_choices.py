"""Filters, weights and groups of train rows against NumPy on the whole matrix; what is read; stored columns."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save
from tiny_runs import labelled, perceptron, random_states
from view_cases import drawn

from trak_lite import Attributor, Scores
from trak_lite.data.columns import Column
from trak_lite.errors import CorruptStoreError, InvalidInputError, NonFiniteError, UnknownNameError
from trak_lite.methods import GradDot
from trak_lite.run.columns import store_columns, stored_columns
from trak_lite.run.tables import COLUMNS, SCORES, column_path
from trak_lite.scoring.matrix import (
    AbstractScoreMatrix,
    HeldMatrix,
    RowChoice,
    StoredMatrix,
    StreamedMatrix,
    chosen_top,
    group_sums,
)
from trak_lite.selection import select
from trak_lite.store import Column as StoredColumn
from trak_lite.store import Manifest, MemoryFeatureStore, TableSpec, open_store

N, M = 30, 4
TRAIN, TARGETS = labelled(N, 0), labelled(M, 1)
SOURCE = np.array(["web", "book", "code"])[np.arange(N) * 7 % 3]
YEAR = 2020 + np.arange(N) // 12
WEIGHT = np.linspace(-1.0, 2.0, N)
QUICK = settings(max_examples=20, deadline=None)


def featurized(path: Path | None = None, **changes: Any) -> Attributor:
    given = {"proj_dim": 16, "dtype": "float32", "progress": False, **changes}
    made = Attributor(perceptron(5), "image_classification", path, **given)
    columns = {
        "source": SOURCE,
        "year": torch.from_numpy(YEAR),
        "weight": WEIGHT,
        "short": WEIGHT.astype(np.float32),
    }
    made.featurize(TRAIN, random_states(lambda: perceptron(5), 2), columns=columns)
    return made


def expected_top(dense: np.ndarray, mask: np.ndarray, weights: np.ndarray, k: int, sign: str) -> Any:
    """Rows and weighted scores of every target by a stable sort in float64."""
    rows = np.flatnonzero(mask)
    values = dense.astype(np.float64)[rows] * weights[rows, None]
    order = np.argsort(-values if sign == "helpful" else values, axis=0, kind="stable")[:k].T
    return rows[order], np.take_along_axis(values.T, order, 1)


def tables_of(matrix: np.ndarray, chunk: int) -> Iterator[AbstractScoreMatrix]:
    """The same scores in memory, and in a table of chunks of some rows."""
    yield HeldMatrix(matrix)
    column = StoredColumn(SCORES, matrix.shape[1], "float32")
    table = MemoryFeatureStore(Manifest({})).create_table(
        "scores/t", TableSpec(len(matrix), (column,), chunk, {})
    )
    for start in range(0, len(matrix), chunk):
        rows = np.arange(start, min(start + chunk, len(matrix)))
        table.put(rows, {SCORES: matrix[rows]})
    yield StoredMatrix(table)


# ------------------------------------------------------------------------ against the whole matrix


@QUICK
@given(
    seed=st.integers(0, 2**16),
    chunk=st.integers(1, 25),
    k=st.integers(1, 25),
    sign=st.sampled_from(("helpful", "harmful")),
    weighted=st.booleans(),
    target=st.sampled_from((None, 0, 2)),
)
def test_the_best_rows_among_some_are_those_of_the_matrix(
    seed: int, chunk: int, k: int, sign: Any, weighted: bool, target: int | None
) -> None:
    generator = np.random.default_rng(seed)
    dense = generator.integers(-3, 4, (20, 3)).astype(np.float32)  # with ties
    mask = generator.random(20) < 0.4
    mask[generator.integers(20)] = True
    weights = generator.integers(-2, 3, 20) / 2 if weighted else np.ones(20)
    choice = RowChoice(mask, weights if weighted else None)

    rows, values = expected_top(dense, mask, weights, k, sign)

    for matrix in tables_of(dense, chunk):
        found = chosen_top(matrix, k, choice, target=target, sign=sign)
        picked = slice(None) if target is None else slice(target, target + 1)
        np.testing.assert_array_equal(found.indices, rows[picked])
        np.testing.assert_array_equal(found.scores, values[picked])


@QUICK
@given(
    seed=st.integers(0, 2**16),
    chunk=st.integers(1, 25),
    grouped=st.tuples(st.booleans(), st.booleans()),
    filtered=st.booleans(),
    weighted=st.booleans(),
)
def test_sums_and_means_of_groups_are_those_of_the_matrix(
    seed: int, chunk: int, grouped: tuple[bool, bool], filtered: bool, weighted: bool
) -> None:
    generator = np.random.default_rng(seed)
    dense = generator.normal(size=(20, 3)).astype(np.float32)
    labels, columns = generator.choice(list("abcd"), 20), generator.choice([7, 9], 3)
    mask = generator.random(20) < 0.4 if filtered else np.ones(20, bool)
    mask[generator.integers(20)] = True
    weights = generator.normal(size=20) if weighted else np.ones(20)
    choice = RowChoice(mask if filtered else None, weights if weighted else None)
    of_rows = labels if grouped[0] else np.arange(20)
    of_targets = columns if grouped[1] else np.arange(3)

    for matrix in tables_of(dense, chunk):
        found = group_sums(
            matrix,
            Column.of(labels, 20, "rows") if grouped[0] else None,
            Column.of(columns, 3, "targets") if grouped[1] else None,
            choice,
        )

        assert found.train_groups.tolist() == sorted(set(of_rows[mask].tolist()))
        assert found.target_groups.tolist() == sorted(set(of_targets.tolist()))
        weighed = dense.astype(np.float64) * weights[:, None]
        for i, name in enumerate(found.train_groups):
            for j, number in enumerate(found.target_groups):
                part = weighed[mask & (of_rows == name)][:, of_targets == number]
                assert found.counts[i, j] == part.size
                np.testing.assert_allclose(found.sums[i, j], part.sum(), rtol=1e-12, atol=1e-12)
                np.testing.assert_allclose(found.means[i, j], part.mean(), rtol=1e-12, atol=1e-12)


def test_sums_keep_small_scores_beside_large_ones() -> None:
    """In float32 the sum of 1e8, 1 and -1e8 is 0."""
    dense = np.array([[1e8], [1.0], [-1e8]], np.float32)

    assert group_sums(HeldMatrix(dense), Column.of([0, 0, 0], 3, "rows"), None).sums.tolist() == [[1.0]]


@pytest.mark.parametrize("dense", [True, False])
def test_scores_are_filtered_weighted_and_grouped_by_stored_columns(dense: bool) -> None:
    scores = featurized().score(TARGETS, dense=dense)
    matrix = scores.numpy()
    mask = (SOURCE == "web") & (YEAR != 2021)

    for sign in ("helpful", "harmful"):
        where = {"source": "web", "year": [2020, 2022]}
        top = scores.top(3, where=where, weights="weight", sign=sign)  # type: ignore[arg-type]
        rows, values = expected_top(matrix, mask, WEIGHT, 3, sign)
        np.testing.assert_array_equal(top.indices, rows)
        np.testing.assert_array_equal(top.scores, values.astype(np.float32))
        one = scores.top(50, target=-1, where=mask, sign=sign)  # type: ignore[arg-type]
        rows, values = expected_top(matrix, mask, np.ones(N), 50, sign)
        np.testing.assert_array_equal(one.indices, rows[-1])
        np.testing.assert_array_equal(one.scores, values[-1].astype(np.float32))

    sums = scores.group("source", weights=WEIGHT, where={"year": 2020})
    assert sums.train_groups.tolist() == ["book", "code", "web"]
    for name, found in zip(sums.train_groups, sums.sums, strict=True):
        part = (matrix.astype(np.float64) * WEIGHT[:, None])[(name == SOURCE) & (YEAR == 2020)]
        np.testing.assert_allclose(found, part.sum(0), rtol=1e-12)
    years = scores.group("year").means
    expected = [matrix[year == YEAR].astype(np.float64).mean(0) for year in (2020, 2021, 2022)]
    np.testing.assert_allclose(years, expected, rtol=1e-12)


def test_cached_ends_are_not_those_of_a_filter() -> None:
    made = featurized()
    scores = made.score(TARGETS, dense=False, k=2)
    matrix, mask = scores.numpy(), SOURCE == "code"

    top = scores.top(2, where={"source": "code"})

    np.testing.assert_array_equal(top.indices, expected_top(matrix, mask, np.ones(N), 2, "helpful")[0])


# ------------------------------------------------------------------------ what is read


def test_tiles_without_a_wanted_row_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trak_lite.scoring.tiles._TILE_ROWS", 4)
    source = drawn().source(GradDot())
    whole = StreamedMatrix(source).numpy()
    mask = np.zeros(20, bool)
    mask[[5, 6, 17]] = True
    computed: list[range] = []
    real = type(source).scores_of
    monkeypatch.setattr(
        type(source),
        "scores_of",
        lambda self, rows, terms=None: computed.append(rows) or real(self, rows, terms),
    )
    read: list[tuple[int, int]] = []
    table = type(source.train[0])
    blocks = table.blocks
    monkeypatch.setattr(
        table,
        "blocks",
        lambda self, name, start=0, stop=None: read.append((start, stop)) or blocks(self, name, start, stop),
    )

    top = chosen_top(StreamedMatrix(source), 3, RowChoice(mask), sign="helpful")

    assert computed == [range(4, 8), range(16, 20)]
    assert {(start, stop) for start, stop in read if stop is not None} == {(4, 8), (16, 20)}
    rows, values = expected_top(whole, mask, np.ones(20), 3, "helpful")
    np.testing.assert_array_equal(top.indices, rows)
    np.testing.assert_array_equal(top.scores, values.astype(np.float32))


def test_chunks_without_a_wanted_row_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    _, matrix = tables_of(dense, 6)
    mask = np.zeros(20, bool)
    mask[[7, 19]] = True
    chunks: list[int] = []
    table = type(matrix._table)  # type: ignore[attr-defined]
    real = table.read_chunk
    monkeypatch.setattr(
        table, "read_chunk", lambda self, chunk, name: chunks.append(chunk) or real(self, chunk, name)
    )

    chosen_top(matrix, 1, RowChoice(mask), sign="helpful")
    group_sums(matrix, None, None, RowChoice(mask))

    assert chunks == [1, 3, 1, 3]


class Made(AbstractScoreMatrix):
    """A million rows that are drawn when they are read, 4096 at a time."""

    shape, stored = (1_000_000, 8), False  # type: ignore[assignment]

    def tiles(self, wanted: NDArray[np.bool_] | None = None) -> Iterator[tuple[int, NDArray[np.float32]]]:
        for start in range(0, self.shape[0], 4096):
            rows = np.arange(start, min(start + 4096, self.shape[0]))
            yield start, self.rows(rows)

    def rows(self, indices: Any) -> NDArray[np.float32]:
        return np.sin(np.asarray(indices)[:, None] * np.arange(1, 9)).astype(np.float32)

    def kept_top(self, k: int, sign: Any) -> None:
        return None


def test_sums_of_a_million_rows_hold_one_tile() -> None:
    labels = Column(np.array(["a", "b", "c"]), np.arange(1_000_000) % 3)
    matrix = Made()
    tracemalloc.start()
    try:
        found = group_sums(matrix, labels, None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 16 << 20  # the matrix takes 32 MB in float32, 64 MB in float64
    angles = np.arange(1, 9)
    for label in range(3):
        expected = sum(
            np.sin(
                np.arange(first + (label - first) % 3, min(first + 100_000, 1_000_000), 3)[:, None] * angles
            )
            .astype(np.float32)
            .astype(np.float64)
            .sum(0)
            for first in range(0, 1_000_000, 100_000)
        )
        np.testing.assert_allclose(found.sums[label], expected, rtol=1e-9, atol=1e-9)
    assert found.counts[:, 0].tolist() == [333_334, 333_333, 333_333]


# ------------------------------------------------------------------------ refusals


def test_scores_of_some_rows_have_no_sums_and_no_filter() -> None:
    made = featurized()
    for scores in (
        made.stream_scores(TRAIN, TARGETS, method=GradDot(), k=2),
        made.stream_scores(TRAIN, TARGETS, method=GradDot(), k=14),
    ):
        for call in (
            lambda s: s.group(SOURCE),
            lambda s: s.top(1, where=SOURCE == "web"),
            lambda s: s.top(1, weights=WEIGHT),
        ):
            with pytest.raises(InvalidInputError, match="need those of all rows"):
                call(scores)
    assert made.stream_scores(TRAIN, TARGETS, method=GradDot(), k=15).group(SOURCE).sums.shape == (3, M)


def test_a_score_that_is_not_finite_is_named_by_its_own_row() -> None:
    dense = np.zeros((9, 2), np.float32)
    dense[6, 1] = np.nan
    mask = np.arange(9) % 2 == 0

    for target in (None, 1):
        with pytest.raises(NonFiniteError, match="train row 6 for target 1 is nan"):
            chosen_top(HeldMatrix(dense), 1, RowChoice(mask), target=target, sign="helpful")
    assert chosen_top(HeldMatrix(dense), 1, RowChoice(~mask), sign="helpful").indices.tolist() == [[1], [1]]


def test_columns_that_are_not_stored_are_named() -> None:
    made = featurized()
    scores = made.score(TARGETS)

    for call in (
        lambda s: s.top(1, where={"sources": "web"}),
        lambda s: s.top(1, weights="wieght"),
        lambda s: s.group("licence"),
    ):
        with pytest.raises(UnknownNameError, match="Unknown columns"):
            call(scores)
    streamed = made.stream_scores(TRAIN, TARGETS, method=GradDot())
    assert streamed.columns == {}
    with pytest.raises(UnknownNameError, match="no columns of these train rows are stored"):
        streamed.group("source")


# ------------------------------------------------------------------------ where they are stored


def test_columns_are_stored_beside_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.zarr"
    first = featurized(path).score(TARGETS)
    expected = first.group("source").sums
    opened = Attributor.open(path, perceptron(5))

    scores = opened.scores()

    assert scores.columns["source"].values.tolist() == SOURCE.tolist()
    assert scores.columns["year"].values.tolist() == YEAR.tolist()
    np.testing.assert_array_equal(scores.columns["weight"].values, WEIGHT)
    np.testing.assert_array_equal(scores.group("source").sums, expected)
    states = random_states(lambda: perceptron(5), 2)
    done = opened.featurize(TRAIN, states, columns={"licence": ["MIT", "GPL"] * 15, "year": YEAR + 1})
    assert (done.rows_written, done.rows_found) == (0, 2 * N)
    again = opened.scores().columns
    assert sorted(again) == ["licence", "short", "source", "weight", "year"]
    assert again["year"].values.tolist() == (YEAR + 1).tolist()
    with open_store(path) as store:
        assert store.entry_names(COLUMNS) == sorted(column_path(name) for name in again)


def test_columns_of_another_length_are_refused_before_anything_is_computed(tmp_path: Path) -> None:
    made = Attributor(perceptron(5), "image_classification", tmp_path / "rows.zarr", proj_dim=16)

    with pytest.raises(InvalidInputError, match="'source' must hold one label for each of 30"):
        made.featurize(TRAIN, columns={"source": SOURCE[1:]})

    assert not (tmp_path / "rows.zarr").exists()


def test_appended_rows_need_columns_of_all_rows(tmp_path: Path) -> None:
    longer = labelled(N + 5, 0)
    first = torch.utils.data.TensorDataset(*(tensor[:N] for tensor in longer.tensors))
    made = Attributor(perceptron(5), "image_classification", tmp_path / "rows.zarr", proj_dim=16)
    made.featurize(first, columns={"source": SOURCE})

    made.featurize(longer, append=True)

    assert made.score(TARGETS).columns == {}
    made.featurize(longer, columns={"source": [*SOURCE, *"abcde"]})
    assert made.scores().group("source").train_groups.tolist() == [
        "a",
        "b",
        "book",
        "c",
        "code",
        "d",
        "e",
        "web",
    ]


def test_the_same_columns_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    featurized(tmp_path / "rows.zarr")
    written: list[str] = []
    monkeypatch.setattr(
        "trak_lite.store.disk.zarr_store.ZarrFeatureStore.put_entry",
        lambda _, path, *__: written.append(path),
    )

    featurized(tmp_path / "rows.zarr")

    assert written == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ", "KeyError"),
        (b"\xff" * 64, "cannot be read"),
    ],
    ids=["empty", "nothing", "noise"],
)
def test_columns_that_are_damaged_are_refused_until_they_are_stored_again(
    content: bytes, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryFeatureStore(Manifest({"dataset": {"num_rows": 3}}))
    store_columns(store, {"a": Column.of(["x", "y", "x"], 3, "a")})
    assert stored_columns(store)["a"].values.tolist() == ["x", "y", "x"]
    key = next(iter(store._contents.entries.values()))[0]

    store.put_entry(column_path("a"), key, np.frombuffer(content or b"\x00", np.uint8).copy())

    with pytest.raises(CorruptStoreError, match=message):
        stored_columns(store)
    with caplog.at_level("WARNING"):
        store_columns(store, {"b": Column.of([0.5, 1.5, 0.5], 3, "b")})
    assert "A column is removed" in caplog.text
    assert {name: column.values.tolist() for name, column in stored_columns(store).items()} == {
        "b": [0.5, 1.5, 0.5]
    }


TEXTS = np.frombuffer(b'["x", "y"]', np.uint8)
PLACES = np.array([0, 1, 1], np.uint32)


@pytest.mark.parametrize(
    "changed",
    [
        {"places": np.array([0, -1, 1])},
        {"places": np.array([0.0, np.nan, 1.0])},
        {"places": np.array([0, 2, 1], np.uint32)},
        {"places": PLACES[:2]},
        {"labels": np.array([1.0, 2.0], np.complex64)},
        {"labels": np.array([[1.0, 2.0]])},
        {"labels": np.frombuffer(b'"xy"', np.uint8)},
        {"labels": np.frombuffer(json.dumps(["x" * 10**6, *["y"] * 1000]).encode(), np.uint8)},
        {"name": np.frombuffer(b'"b"', np.uint8)},
        {"name": np.frombuffer(b'["a"]', np.uint8)},
    ],
    ids=["negative", "nan", "beyond", "short", "complex", "matrix", "text", "4 GB", "another", "list"],
)
def test_columns_of_somebody_else_are_refused_before_they_are_used(changed: dict[str, Any]) -> None:
    """None of these contents comes from ``store_columns``; the texts would take 4 GB as an array."""
    store = MemoryFeatureStore(Manifest({"dataset": {"num_rows": 3}}))
    store_columns(store, {"a": Column.of([1, 2, 1], 3, "a")})
    key = store._contents.entries[column_path("a")][0]
    arrays = {"name": np.frombuffer(b'"a"', np.uint8), "labels": TEXTS, "places": PLACES, **changed}

    store.put_entry(column_path("a"), key, np.frombuffer(save(arrays), np.uint8).copy())

    with pytest.raises(CorruptStoreError, match="cannot be read"):
        stored_columns(store)


def test_processes_that_store_other_columns_at_once_lose_none(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryFeatureStore(Manifest({"dataset": {"num_rows": 3}}))
    put = store.put_entry
    others = [{"b": Column.of([4, 5, 6], 3, "b")}]

    def put_after_another(*given: Any) -> None:
        if others:  # another process stores its column between this one's reading and writing
            store_columns(store, others.pop())
        put(*given)

    monkeypatch.setattr(store, "put_entry", put_after_another)
    store_columns(store, {"a": Column.of([1, 2, 3], 3, "a")})

    assert sorted(stored_columns(store)) == ["a", "b"]


def test_stored_labels_that_differ_in_nuls_stay_apart() -> None:
    values = ["a\0", "a", "a\0\0"]
    store = MemoryFeatureStore(Manifest({"dataset": {"num_rows": 3}}))
    store_columns(store, {"a": Column.of(values, 3, "a")})
    found = stored_columns(store)["a"]
    assert found.values.tolist() == values
    assert [found.matches(value).tolist() for value in values] == np.eye(3, dtype=bool).tolist()


def test_dates_of_stored_columns_are_found_by_their_value(tmp_path: Path) -> None:
    days = [date(2024, 1, 1 + row % 3) for row in range(N)]
    columns = {"day": days, "time": np.array(days, "datetime64[ns]"), "object": np.array(days, object)}
    made = Attributor(perceptron(5), "image_classification", tmp_path / "rows.zarr", proj_dim=16)
    made.featurize(TRAIN, columns=columns)
    scores = made.score(TARGETS)

    for name in columns:
        for value in ("2024-01-02", date(2024, 1, 2), datetime(2024, 1, 2), np.datetime64("2024-01-02")):
            found = scores.top(N, target=0, where={name: value}).indices
            assert sorted(found.tolist()) == list(range(1, N, 3))


def test_masks_and_arrays_need_no_stored_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = featurized().score(TARGETS)
    read: list[Scores] = []
    monkeypatch.setattr(Scores, "columns", property(lambda self: read.append(self) or {}))

    scores.top(2, where=SOURCE == "web", weights=WEIGHT)
    scores.group(SOURCE, where=SOURCE == "web")
    scores.gallery(where=SOURCE == "web")

    assert read == []


# ------------------------------------------------------------------------ selection


@QUICK
@given(seed=st.integers(0, 2**16), k=st.integers(1, 6), method=st.sampled_from(("top", "less", "greedy")))
def test_a_selection_among_some_rows_is_that_of_these_rows_alone(seed: int, k: int, method: Any) -> None:
    generator = np.random.default_rng(seed)
    scores, features = generator.normal(size=(20, 3)), generator.normal(size=(20, 4))
    rows = np.sort(generator.choice(20, 8, replace=False))
    mask = np.isin(np.arange(20), rows)
    more = {"features": features} if method == "greedy" else {}
    alone = {"features": features[rows]} if method == "greedy" else {}

    found = select(scores, k, method, where=mask, **more)

    expected = select(scores[rows], k, method, **alone)
    assert found.indices.tolist() == rows[expected.indices].tolist()
    assert (found.num_rows, found.settings["chosen_from"]) == (20, 8)


def test_a_selection_reads_the_columns_of_the_store() -> None:
    scores = featurized().score(TARGETS)
    old = YEAR < 2022

    found = select(scores, 9, "balanced", groups="source", where={"year": [2020, 2021]})

    expected = select(scores.numpy()[old], 9, "balanced", groups=SOURCE[old])
    assert found.indices.tolist() == np.flatnonzero(old)[expected.indices].tolist()
    given_data = select(scores, 2, where={"kind": "x"}, data={"kind": ["x"] * 15 + ["y"] * 15})
    assert max(given_data.indices) < 15
    assert set(select(scores, 9, where={"year": 2022}).indices) == set(np.flatnonzero(YEAR == 2022))
    with pytest.raises(
        InvalidInputError, match=r"columns of the store are \['short', 'source', 'weight', 'year'\]"
    ):
        select(scores, 9, "balanced", groups="licence")


def test_galleries_show_the_rows_of_a_filter() -> None:
    scores: Scores = featurized().score(TARGETS)
    matrix, mask = scores.numpy(), SOURCE == "book"

    survey = scores.gallery(where={"source": "book"}, k=3).survey

    for sign, found in (("helpful", survey.helpful), ("harmful", survey.harmful)):
        rows, values = expected_top(matrix, mask, np.ones(N), 3, sign)
        np.testing.assert_array_equal(found.indices, rows)
        np.testing.assert_array_equal(found.scores, values.astype(np.float32))
    assert survey.histogram.bars(1024)[0].sum() == mask.sum() * M
