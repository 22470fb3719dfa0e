"""Filters, weights and groups of train rows against NumPy on the whole matrix; what is read; stored columns."""

import json
from datetime import date, datetime

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from tiny_runs import labelled, perceptron, random_states
from torch.utils.data import TensorDataset
from view_cases import Drawn, scores_of

from trak_lite import Attributor
from trak_lite.errors import CorruptStoreError, InvalidInputError, NonFiniteError, UnknownNameError
from trak_lite.methods import GradDot
from trak_lite.selection import select
from trak_lite.store import MemoryFeatureStore, ZarrFeatureStore, open_store

N, M = 30, 4
TRAIN, TARGETS = labelled(N, 0), labelled(M, 1)
SOURCE = np.array(["web", "book", "code"])[np.arange(N) * 7 % 3]
YEAR = 2020 + np.arange(N) // 12
WEIGHT = np.linspace(-1.0, 2.0, N)
COLUMNS = {
    "source": SOURCE, "year": torch.from_numpy(YEAR), "weight": WEIGHT, "short": WEIGHT.astype(np.float32),
}  # fmt: skip
PLAIN = GradDot(q="off")


def attributor(path=None):
    settings = {"proj_dim": 16, "dtype": "float32", "progress": False}
    return Attributor(perceptron(5), "image_classification", path, **settings)


def featurized(path=None, columns=COLUMNS):
    made = attributor(path)
    made.featurize(TRAIN, random_states(lambda: perceptron(5), 2), columns=columns)
    return made


@pytest.fixture(scope="module")
def made():
    """No test changes its rows and columns."""
    return featurized()


@pytest.fixture(scope="module")
def tied():
    """Small whole numbers, of which many are equal, in several tiles: stored, and computed when they are read."""
    generator = np.random.default_rng(0)
    train, targets = generator.integers(-1, 2, (1, 2500, 3)), generator.integers(-1, 2, (1, 3, 3))
    ones = np.ones((1, 2500))
    many = Drawn(train.astype(np.float32), targets.astype(np.float32), ones, ones, (3,)).attributor()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trak_lite.store._grid.CHEAP_CHUNK_BYTES", 0)
        targets = targets.astype(np.float32)
        return [scores_of(many, targets, method=PLAIN, dense=dense) for dense in (True, False)]


def expected_top(dense, mask, weights, k, sign):
    """Rows and weighted scores of every target by a stable sort in float64."""
    rows = np.flatnonzero(mask)
    values = dense.astype(np.float64)[rows] * weights[rows, None]
    order = np.argsort(-values if sign == "helpful" else values, axis=0, kind="stable")[:k].T
    return rows[order], np.take_along_axis(values.T, order, 1).astype(np.float32)


def check_top(found, expected, target=slice(None)):
    np.testing.assert_array_equal(found.indices, expected[0][target])
    np.testing.assert_array_equal(found.scores, expected[1][target])


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    k=st.sampled_from((1, 7, 1500)),
    sign=st.sampled_from(("helpful", "harmful")),
    weighted=st.booleans(),
    target=st.sampled_from((None, 0, 2)),
    by_rows=st.booleans(),
    by_targets=st.booleans(),
)
def test_the_best_rows_among_some_and_their_sums_are_those_of_the_matrix(
    tied, seed, k, sign, weighted, target, by_rows, by_targets
):
    generator = np.random.default_rng(seed)
    mask = generator.random(2500) < generator.choice([0.001, 0.4, 1.0])
    mask[generator.integers(2500)] = True
    weights = generator.integers(-2, 3, 2500) / 2 if weighted else np.ones(2500)
    labels = generator.choice(list("abcd"), 2500) if by_rows or not by_targets else np.arange(2500)
    columns = generator.choice([7, 9], 3) if by_targets else np.arange(3)
    dense = tied[0].numpy()
    names, row_groups = np.unique(labels[mask], return_inverse=True)
    numbers, target_groups = np.unique(columns, return_inverse=True)
    sums, counts = np.zeros((2, len(names), len(numbers)))
    np.add.at(sums, (row_groups[:, None], target_groups), (dense.astype(np.float64) * weights[:, None])[mask])
    np.add.at(counts, (row_groups[:, None], target_groups), 1)
    choice = {"where": None if mask.all() else mask, "weights": weights if weighted else None}
    for scores in tied:
        best = scores.top(k, target=target, sign=sign, **choice)
        expected = expected_top(dense, mask, weights, k, sign)
        check_top(best, expected, slice(None) if target is None else target)

        each = len(labels) == len(np.unique(labels))
        found = scores.group(None if each else labels, columns if by_targets else None, **choice)

        assert found.train_groups.tolist() == names.tolist()
        assert found.target_groups.tolist() == numbers.tolist()
        np.testing.assert_array_equal(found.counts, counts)
        np.testing.assert_array_equal(found.sums, sums)
        np.testing.assert_allclose(found.means, sums / counts, rtol=1e-12)


@pytest.mark.quick
@pytest.mark.parametrize("dense", [True, False])
def test_scores_are_filtered_weighted_and_grouped_by_stored_columns(made, dense):
    scores = made.score(TARGETS, dense=dense)
    matrix = scores.numpy()
    mask = (SOURCE == "web") & (YEAR != 2021)
    for sign in ("helpful", "harmful"):
        where = {"source": "web", "year": [2020, 2022]}
        top = scores.top(3, where=where, weights="weight", sign=sign)
        check_top(top, expected_top(matrix, mask, WEIGHT, 3, sign))
        one = scores.top(50, target=-1, where=mask, sign=sign)
        check_top(one, expected_top(matrix, mask, np.ones(N), 50, sign), -1)
    sums = scores.group("source", weights=WEIGHT, where={"year": 2020})
    assert sums.train_groups.tolist() == ["book", "code", "web"]
    for name, found in zip(sums.train_groups, sums.sums, strict=True):
        part = (matrix.astype(np.float64) * WEIGHT[:, None])[(name == SOURCE) & (YEAR == 2020)]
        np.testing.assert_allclose(found, part.sum(0), rtol=1e-12)
    expected = [matrix[year == YEAR].astype(np.float64).mean(0) for year in (2020, 2021, 2022)]
    np.testing.assert_allclose(scores.group("year").means, expected, rtol=1e-12)


def test_tiles_without_a_wanted_row_are_neither_read_nor_computed(tied, monkeypatch):
    mask, read = np.zeros(2500, bool), list[int]()
    mask[[1030, 2040]] = True
    table = type(tied[1].source.train[0])
    blocks, chunk = table.blocks, table.read_chunk

    def noted_blocks(self, name, start=0, stop=None):
        read.extend([] if stop is None else [start])  # all targets are read as well
        return blocks(self, name, start, stop)

    def noted_chunk(self, number, name):
        read.extend([self.chunk_range(number)[0]] if name == "scores" else [])
        return chunk(self, number, name)

    monkeypatch.setattr(table, "blocks", noted_blocks)
    monkeypatch.setattr(table, "read_chunk", noted_chunk)
    for scores in tied:
        tiles = [*scores.tiles()]
        wanted = [start for start, tile in tiles if mask[start : start + len(tile)].any()]
        assert len(wanted) < len(tiles)
        assert [start for start, _ in scores.tiles(mask)] == wanted
        del read[:]
        scores.top(2, where=mask)
        scores.group(np.arange(2500) % 2, where=mask)
        assert set(read) == set(wanted)


@pytest.mark.filterwarnings("ignore:The scores are of the present weights")
def test_what_cannot_be_filtered_or_grouped_is_refused(made, tmp_path):
    scores, whole = made.score(TARGETS), made.stream_scores(TRAIN, TARGETS, method=GradDot(), k=15)
    some = [made.stream_scores(TRAIN, TARGETS, method=GradDot(), k=k) for k in (2, 14)]
    rows = np.zeros((9, 2), np.float32)
    rows[6, 1] = 1e30
    ones, targets = np.ones((1, 9)), np.array([[[1, 0], [0, 1e30]]], np.float32)
    large = Drawn(rows[None], targets, ones, ones, (2,)).scores(PLAIN, dense=False)
    even = np.arange(9) % 2 == 0
    for error, said, call in (
        *((InvalidInputError, "need those of all rows", lambda s=s: s.group(SOURCE)) for s in some),
        *((InvalidInputError, "need those of all rows", lambda s=s: s.top(1, where=SOURCE == "web")) for s in some),
        *((InvalidInputError, "need those of all rows", lambda s=s: s.top(1, weights=WEIGHT)) for s in some),
        (UnknownNameError, "no columns of these train rows are stored", lambda: whole.group("source")),
        (UnknownNameError, "Unknown columns", lambda: scores.top(1, where={"sources": "web"})),
        (UnknownNameError, "Unknown columns", lambda: scores.top(1, weights="wieght")),
        (UnknownNameError, "Unknown columns", lambda: scores.group("licence")),
        (NonFiniteError, "train row 6 for target 1 is inf", lambda: large.top(1, where=even)),
        (NonFiniteError, "train row 6 for target 1 is inf", lambda: large.top(1, where=even, target=1)),
        (InvalidInputError, "'source' must hold 30 labels",
         lambda: featurized(tmp_path / "rows.zarr", {"source": SOURCE[1:]})),
    ):  # fmt: skip
        with pytest.raises(error, match=said):
            call()
    assert not (tmp_path / "rows.zarr").exists()
    assert whole.group(SOURCE).sums.shape == (3, M)
    assert whole.columns == {}
    assert large.top(1, where=~even).indices.tolist() == [[1], [1]]


def test_columns_are_stored_beside_the_rows_and_not_written_again(tmp_path, monkeypatch):
    path = tmp_path / "rows.zarr"
    expected = featurized(path).score(TARGETS).group("source").sums
    opened = Attributor.open(path, perceptron(5))
    scores = opened.scores()
    for name, values in COLUMNS.items():
        np.testing.assert_array_equal(scores.columns[name].values, np.asarray(values))
    np.testing.assert_array_equal(scores.group("source").sums, expected)
    with monkeypatch.context() as patched:
        patched.setattr(ZarrFeatureStore, "put_entry", None)
        featurized(path)
    states = random_states(lambda: perceptron(5), 2)
    done = opened.featurize(TRAIN, states, columns={"licence": ["MIT", "GPL"] * 15, "year": YEAR + 1})
    assert (done.rows_written, done.rows_found) == (0, 2 * N)
    again = opened.scores().columns
    assert sorted(again) == ["licence", "short", "source", "weight", "year"]
    assert again["year"].values.tolist() == (YEAR + 1).tolist()
    with open_store(path) as store:
        assert len(store.entry_names("columns")) == 5


def test_appended_rows_need_columns_of_all_rows():
    longer = labelled(N + 5, 0)
    made = attributor()
    made.featurize(TensorDataset(*(tensor[:N] for tensor in longer.tensors)), columns={"source": SOURCE})
    made.featurize(longer, append=True)
    assert made.score(TARGETS).columns == {}
    made.featurize(longer, columns={"source": [*SOURCE, *"abcde"]})
    assert made.scores().group("source").train_groups.tolist() == [*"ab", "book", "c", "code", *"de", "web"]


class Entries:
    """The scores of three rows with a column ``a``, and the entry that holds it."""

    def __init__(self, monkeypatch):
        put, calls = MemoryFeatureStore.put_entry, []
        with monkeypatch.context() as patched:
            patched.setattr(
                MemoryFeatureStore, "put_entry", lambda *call: calls.append(call[1:]) or put(*call)
            )
            self.made = attributor()
            self.featurize({"a": ["x", "y", "y"]})
        (self.place,) = ((path, key) for path, key, _ in calls if path.startswith("columns"))
        self.scores = self.made.score(TARGETS)

    def featurize(self, columns):
        self.made.featurize(labelled(3, 0), columns=columns)

    def put(self, content):
        self.scores.source.store.put_entry(*self.place, np.frombuffer(content, np.uint8).copy())


PLACES = np.array([0, 1, 1], np.uint32)


def as_bytes(text):
    return np.frombuffer(text.encode(), np.uint8)


FOREIGN = {
    "empty": b"\0",
    "nothing": b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ",
    "noise": b"\xff" * 64,
    "negative": {"places": np.array([0, -1, 1])},
    "nan": {"places": np.array([0.0, np.nan, 1.0])},
    "beyond": {"places": np.array([0, 2, 1], np.uint32)},
    "short": {"places": PLACES[:2]},
    "complex": {"labels": np.array([1.0, 2.0], np.complex64)},
    "matrix": {"labels": np.array([[1.0, 2.0]])},
    "text": {"labels": as_bytes('"xy"')},
    "4 GB as an array": {"labels": as_bytes(json.dumps(["x" * 10**6, *["y"] * 1000]))},
    "another name": {"name": as_bytes('"b"')},
    "a list": {"name": as_bytes('["a"]')},
}


def test_columns_that_are_damaged_or_of_somebody_else_are_refused_until_they_are_stored_again(
    monkeypatch, caplog
):
    entries = Entries(monkeypatch)
    arrays = {"name": as_bytes('"a"'), "labels": as_bytes('["x", "y"]'), "places": PLACES}
    entries.put(save(arrays))
    assert entries.scores.columns["a"].values.tolist() == ["x", "y", "y"]
    for name, content in FOREIGN.items():
        entries.put(content if isinstance(content, bytes) else save({**arrays, **content}))
        with pytest.raises(CorruptStoreError, match="cannot be read"):
            pytest.fail(f"{name}: {entries.scores.columns}")
    with caplog.at_level("WARNING"):
        entries.featurize({"b": [0.5, 1.5, 0.5]})
    assert "A column is removed" in caplog.text
    found = {name: column.values.tolist() for name, column in entries.scores.columns.items()}
    assert found == {"b": [0.5, 1.5, 0.5]}
    texts = ["a\0", "a", "a\0\0"]  # an array of texts would drop what they end in
    entries.featurize({"a": texts})
    assert entries.scores.columns["a"].values.tolist() == texts
    found = [entries.scores.top(3, target=0, where={"a": text}).indices.tolist() for text in texts]
    assert found == [[0], [1], [2]]


def test_processes_that_store_other_columns_at_once_lose_none(tmp_path, monkeypatch):
    put, others = ZarrFeatureStore.put_entry, [{"b": np.arange(N)}]
    featurized(tmp_path / "rows.zarr", None).score(TARGETS)

    def put_after_another(*call):
        if others:  # another process stores its column between this one's reading and writing
            featurized(tmp_path / "rows.zarr", others.pop())
        put(*call)

    monkeypatch.setattr(ZarrFeatureStore, "put_entry", put_after_another)
    made = featurized(tmp_path / "rows.zarr", {"a": np.arange(N)})
    assert sorted(made.scores().columns) == ["a", "b"]


def test_dates_of_stored_columns_are_found_by_their_value():
    days = [date(2024, 1, 1 + row % 3) for row in range(N)]
    columns = {"day": days, "time": np.array(days, "datetime64[ns]"), "object": np.array(days, object)}
    scores = featurized(columns=columns).score(TARGETS)
    for name in columns:
        for value in ("2024-01-02", date(2024, 1, 2), datetime(2024, 1, 2), np.datetime64("2024-01-02")):
            found = scores.top(N, target=0, where={name: value}).indices
            assert sorted(found.tolist()) == list(range(1, N, 3))


def test_a_selection_reads_the_columns_of_the_store(made):
    scores = made.score(TARGETS)
    old = YEAR < 2022
    found = select(scores, 9, "balanced", groups="source", where={"year": [2020, 2021]})
    expected = select(scores.numpy()[old], 9, "balanced", groups=SOURCE[old])
    assert found.indices.tolist() == np.flatnonzero(old)[expected.indices].tolist()
    given_data = select(scores, 2, where={"kind": "x"}, data={"kind": ["x"] * 15 + ["y"] * 15})
    assert max(given_data.indices) < 15
    assert set(select(scores, 9, where={"year": 2022}).indices) == set(np.flatnonzero(YEAR == 2022))
    with pytest.raises(InvalidInputError, match=r"of the store are \['short', 'source', 'weight', 'year'\]"):
        select(scores, 9, "balanced", groups="licence")
