"""Columns of the train data against plain loops: labels, filters, weights."""

import datetime
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trak_lite.data.columns import Column, column_of, columns_of, wanted_rows, weights_of
from trak_lite.errors import InvalidInputError, UnknownNameError

pytestmark = pytest.mark.quick
SOURCES = ["web", "book", "web", "code", "book"]
YEARS = [2021, 2022, 2022, 2021, 2022]
COLUMNS = columns_of({"source": SOURCES, "year": torch.tensor(YEARS)}, 5, "columns")


@settings(deadline=None)
@given(st.lists(st.text(st.sampled_from("a\0b"), max_size=3), min_size=1))
@pytest.mark.parametrize("kind", [str, str.encode])
def test_labels_that_differ_in_nuls_stay_apart(kind, texts):
    values = [kind(text) for text in texts]
    for data in (values, column_of({"name": values}, "name"), np.array(values, object)):
        column = Column.of(data, len(values), "labels")
        assert column.labels.tolist() == sorted(set(values))
        assert column.values.tolist() == values
        for value in values:
            assert column.matches(value).tolist() == [one == value for one in values]


@pytest.mark.parametrize(("where", "rows"), [
    ({"source": "web"}, [0, 2]),
    ({"source": ["web", "code"]}, [0, 2, 3]),
    ({"source": ("web", "nowhere")}, [0, 2]),
    ({"source": "web", "year": 2022}, [2]),
    ({"year": "2021"}, [0, 3]),
    ({"year": {2021, 2022}}, [0, 1, 2, 3, 4]),
    ({"year": np.array([2022])}, [1, 2, 4]),
    ({"year": torch.tensor([2022])}, [1, 2, 4]),
    ({"year": range(2022, 2030)}, [1, 2, 4]),
    ({"source": ["book", 2021]}, [1, 4]),
    ({"year": ["web", "2021"]}, [0, 3]),
    ({}, [0, 1, 2, 3, 4]),
    (np.array([True, False, False, False, True]), [0, 4]),
    (torch.tensor([False, True, False, False, False]), [1]),
], ids=str)  # fmt: skip
def test_a_filter_takes_rows_with_a_value_in_every_named_column(where, rows):
    assert np.flatnonzero(wanted_rows(where, COLUMNS, 5)).tolist() == rows


@pytest.mark.parametrize(("message", "where", "error"), [
    (r"Unknown columns: \['sorce'\]\. Nearest known: \['source'\]", {"sorce": "web"}, UnknownNameError),
    (r"\{'source': 'wbe'\}\. Values .* \{'source': \[.*'web'", {"source": "wbe"}, InvalidInputError),
    ("No train row satisfies", {"source": []}, InvalidInputError),
    ("a mask without True", np.zeros(5, bool), InvalidInputError),
    (r"mask of 5 booleans .* bool of shape \(4,\)", np.ones(4, bool), InvalidInputError),
    ("mask of 5 booleans .* int64", [0, 1, 0, 0, 1], InvalidInputError),
], ids=str)  # fmt: skip
def test_a_filter_of_nothing_is_refused(where, error, message):
    with pytest.raises(error, match=message):
        wanted_rows(where, COLUMNS, 5)


@pytest.mark.parametrize("weights", ["source", [1.0] * 4, [1.0, 2.0, np.nan, 0.0, 1.0], [[1.0] * 5]], ids=str)
def test_weights_are_finite_numbers_one_per_row(weights):
    assert weights_of("year", COLUMNS, 5).tolist() == YEARS
    assert weights_of(torch.tensor([1, 0, 1, 0, 1]), COLUMNS, 5).tolist() == [1, 0, 1, 0, 1]
    with pytest.raises(InvalidInputError, match="5 finite numbers, one per train row"):
        weights_of(weights, COLUMNS, 5)


def test_texts_of_numbers_are_found_in_columns_of_floats():
    """The command line has texts only, and a column with a missing value has floats only."""
    column = Column.of([1.0, 2.5, np.nan, 1.0], 4, "numbers")
    assert column.matches("1").tolist() == [True, False, False, True]
    assert column.matches("2.50", "web").tolist() == [False, True, False, False]
    assert column.matches(1, 2.5).tolist() == [True, True, False, True]
    for missing in ("nan", float("nan"), np.float32("nan")):
        assert column.matches(missing).tolist() == [False, False, True, False]
    assert not column.matches("web", None, 10**30).any()
    assert Column.of([True, False], 2, "flags").matches("True").tolist() == [True, False]


@pytest.mark.parametrize(
    ("values", "labels", "value", "found"),
    [
        (["web", None, "book", None], ["None", "book", "web"], None, [1, 3]),
        (["web", float("nan"), "book", "web"], ["None", "book", "web"], "None", [1]),  # as in a pandas frame
        ([True, None, False, True], ["False", "None", "True"], True, [0, 3]),
        ([3, None, 1, 3], ["1.0", "3.0", "nan"], "nan", [1]),
        ([np.int64(3), None, np.float32(1), 3], ["1.0", "3.0", "nan"], "nan", [1]),
        ([np.str_("web"), None, "book", np.float32("nan")], ["None", "book", "web"], None, [1, 3]),
        ([np.True_, None, np.False_, True], ["False", "None", "True"], True, [0, 3]),
        ([None, None, None, None], ["None"], None, [0, 1, 2, 3]),
    ],
)
def test_a_missing_value_is_a_label(values, labels, value, found):
    for labels_given in (values, np.array(values, object)):
        column = Column.of(labels_given, 4, "values")
        assert column.texts == labels
        assert np.flatnonzero(column.matches(value)).tolist() == found


@pytest.mark.parametrize(("kind", "values", "labels"), [
    ("string", ["web", None, "book"], ["None", "book", "web"]),
    ("boolean", [True, None, False], ["False", "None", "True"]),
    ("Int64", [3, None, 1], ["1.0", "3.0", "nan"]),
    ("object", ["web", "NA", "book"], ["None", "book", "web"]),
    ("object", [3, "NA", 1], ["1.0", "3.0", "nan"]),
])  # fmt: skip
def test_what_pandas_has_for_a_missing_value_is_missing(kind, values, labels):
    pandas = pytest.importorskip("pandas")
    given = pandas.Series([pandas.NA if value == "NA" else value for value in values], dtype=kind)
    assert Column.of(given, 3, "values").texts == labels


BIG = 2**60


def masked(values):
    return pytest.importorskip("pandas").Series(values, dtype="Int64")


@pytest.mark.parametrize(
    "form", [list, lambda values: np.array(values, object), masked], ids=["list", "objects", "masked"]
)
def test_integers_that_a_missing_value_would_change_are_refused(form):
    with pytest.raises(InvalidInputError, match=rf"ids cannot hold the integer {BIG + 1}: .* as texts"):
        Column.of(form([BIG, BIG + 1, None]), 3, "ids")
    kept = Column.of(form([BIG, BIG + 256, None]), 3, "ids")
    assert kept.labels[:2].tolist() == [BIG, BIG + 256]
    assert Column.of(form([BIG, BIG + 1]), 2, "ids").labels.tolist() == [BIG, BIG + 1]


@pytest.mark.parametrize(
    "values", [[2**63 + 1, 5], [np.uint64(2**63 + 1), np.int64(5)], [2**53 + 1, 0.5], [10**400, None]]
)
def test_integers_that_other_numbers_would_change_are_refused(values):
    with pytest.raises(InvalidInputError, match=f"ids cannot hold the integer {values[0]}: "):
        Column.of(values, 2, "ids")


def test_filters_compare_integers_and_floats_exactly():
    integers, floats = (
        Column.of([BIG - 1, BIG, BIG + 1], 3, "ids"),
        Column.of([2.0**60, 0.5, np.nan], 3, "ids"),
    )
    for value in (BIG, float(BIG), np.float64(BIG), np.int64(BIG), torch.tensor(BIG), str(BIG)):
        assert integers.matches(value).tolist() == [False, True, False]
        assert floats.matches(value).tolist() == [True, False, False]
    for value in (BIG + 1, np.int64(BIG + 1)):
        assert integers.matches(value).tolist() == [False, False, True]
        assert not floats.matches(value).any()
    assert not integers.matches(0.5, float("nan"), float("inf"), None, "0.5", [BIG], 10**400).any()
    assert not floats.matches(10**400, [0.5], None).any()


def test_filters_round_fractions_to_the_dtype_of_the_labels_and_no_integer():
    narrow = Column.of(np.array([16777216, 0.1], np.float32), 2, "values")
    assert np.flatnonzero(narrow.matches(0.1, 16777217, 1e300)).tolist() == [1]
    assert narrow.matches(16777216).tolist() == [True, False]
    days = Column.of([18262 * 86400 * 10**9, 1], 2, "numbers")
    assert not days.matches(np.datetime64("2020-01-01", "ns")).any()


def test_missing_values_and_large_integers_of_other_libraries():
    pandas, arrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    with pytest.raises(InvalidInputError, match=f"cannot hold the integer {BIG + 1}"):
        Column.of(arrow.array([BIG, BIG + 1, None]), 3, "ids")
    days = Column.of(np.array([pandas.Timestamp("2020-01-01"), pandas.NaT], object), 2, "days")
    assert sorted(days.texts) == ["2020-01-01", "NaT"]
    assert Column.of(["web", None], 2, "source").matches(pandas.NA).tolist() == [False, True]


def peak_of(call):
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_filter_of_many_values_and_long_texts_take_little_memory():
    """A mask of 100,000 rows for each of 3000 values would take 300 MB, an array of texts 4 GB."""
    numbers = np.arange(100_000)
    columns = {"number": Column.of(numbers, len(numbers), "numbers")}
    found, peak = peak_of(lambda: wanted_rows({"number": numbers[:3000]}, columns, len(numbers)))
    assert np.flatnonzero(found).tolist() == list(range(3000))
    assert peak < 16 << 20
    texts = ["x" * 1_000_000, *(str(row) for row in range(1000))]
    column, peak = peak_of(lambda: Column.of(texts, len(texts), "texts"))
    assert column.values.tolist() == texts
    assert column.matches("7").sum() == 1
    assert peak < 16 << 20


class Table:
    """What a ``datasets.Dataset`` has: names, and a column by its name."""

    column_names = ("source", "year")

    def __getitem__(self, name):
        return {"source": SOURCES, "year": YEARS}[name]


def test_columns_are_those_of_frames_datasets_and_mappings():
    plain = {"source": SOURCES, "year": YEARS}
    for data in (plain, pytest.importorskip("pandas").DataFrame(plain), Table()):
        found = columns_of(data, 5, "columns")
        assert {name: column.values.tolist() for name, column in found.items()} == plain
        assert np.asarray(column_of(data, "source")).tolist() == SOURCES


TYPES = "several types, which cannot be sorted"
DAY = datetime.date(2024, 1, 1)


@pytest.mark.parametrize(
    ("message", "data"),
    [
        ("columns must be a mapping of names to one value per row.* got list", SOURCES),
        (
            r"'source' must hold 5 labels, got an array of shape \(4,\)",
            {"source": SOURCES[:4]},
        ),
        (TYPES, {"source": ["web", None, 3, "b", "c"]}),
        (TYPES, {"day": [DAY, None, None, None, None]}),
        (TYPES, {"source": ["web", 2, 3, 4, 5]}),
        ("'ids' must hold one label for each row, got lists", {"ids": [[1], [1, 2], [3], [4], [5]]}),
    ],
)
def test_columns_that_are_not_one_label_per_row_are_refused(message, data):
    with pytest.raises(InvalidInputError, match=message):
        columns_of(data, 5, "columns")
