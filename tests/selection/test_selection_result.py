"""What a selection becomes: text, HTML, frames, files, a column of a dataset."""

from __future__ import annotations

import datetime
import json
import os
from pkgutil import resolve_name

import numpy as np
import pytest

from trak_lite.errors import InvalidInputError, StoreError
from trak_lite.selection import Selection, select

pytestmark = pytest.mark.quick

SCORES = np.random.default_rng(0).normal(size=(20, 3))
LABELS = np.array(["web", "<b>"] * 10)


def chosen(method: str = "balanced", k: int = 7) -> Selection:
    more = {"balanced": {"groups": LABELS}, "greedy": {"features": SCORES}}
    return select(SCORES, k, method, **more.get(method, {}))


def columns(selection: Selection) -> dict[str, np.ndarray]:
    names = {"row": "indices", "score": "scores", "best_target": "best_targets", "best_score": "best_scores"}
    names |= {"group": "groups", "redundancy": "redundancy"}
    found = {name: getattr(selection, attribute) for name, attribute in names.items()}
    return {name: values for name, values in found.items() if values is not None}


@pytest.mark.parametrize("method", ["top", "less", "balanced", "greedy"])
def test_a_selection_survives_json(method, tmp_path):
    before = chosen(method)
    after = Selection.load(before.save(tmp_path / "chosen.json"))
    assert columns(after).keys() == columns(before).keys()
    for name, values in columns(before).items():
        np.testing.assert_array_equal(columns(after)[name], values)
    assert (after.num_rows, after.settings) == (20, before.settings)
    assert repr(after) == repr(before)


DAYS = [datetime.date(2024, 1, 1), datetime.date(2025, 1, 2)]
ISO = [str(day) for day in DAYS]
LABEL_PAIRS = {
    "missing numbers": ([1.5, None], [1.5, np.nan]),
    "infinite numbers": ([np.inf, -np.inf], [np.inf, -np.inf]),
    "float32": (np.array([0.1, 0.2], np.float32), np.array([0.1, 0.2], np.float32).astype(float)),
    "large integers": ([2**63, 2**63 + 1], np.array([2**63, 2**63 + 1], np.uint64)),
    "larger integers": ([2**70, 2**70 + 1], [str(2**70), str(2**70 + 1)]),
    "objects that are integers": (np.array([1, 2], object), [1, 2]),
    "booleans": ([True, False], [True, False]),
    "NULs": (["a\0", "a"], ["a\0", "a"]),
    "surrogates": (["\udcff", "b"], ["\udcff", "b"]),
    "texts of numbers": (["1", "nan"], ["1", "nan"]),
    "bytes": ([b"a", b"b"], ["b'a'", "b'b'"]),
    "days": (DAYS, ISO),
    "years": (np.array(["2024", "2025"], "datetime64[Y]"), ["2024", "2025"]),
    "durations": (np.array([1, 2], "timedelta64[s]"), ["1 seconds", "2 seconds"]),
    **{unit: (np.array(ISO, f"datetime64[{unit}]"), ISO) for unit in ("D", "s", "us", "ns")},
}
"""Labels of two kinds of rows, and what is read again."""


@pytest.mark.parametrize(("labels", "expected"), LABEL_PAIRS.values(), ids=LABEL_PAIRS)
@pytest.mark.parametrize("kinds", [[0, 1], [0], [1]])
def test_labels_of_every_type_survive_json(labels, expected, kinds, tmp_path):
    order = np.arange(20) % 2
    among = {"where": np.isin(order, kinds)}
    groups = [labels[place] for place in order] if isinstance(labels, list) else labels[order]
    before = select(SCORES, 8, "balanced", groups=groups, target_groups=[*groups[:3]], **among)
    after = Selection.load(before.save(tmp_path / "chosen.json"))
    kept = [repr(value.item() if isinstance(value, np.generic) else value) for value in expected]
    assert list(map(repr, after.groups.tolist())) == [kept[row % 2] for row in before.indices]
    assert {*map(repr, after.best_targets.tolist())} <= {*kept}
    assert repr(after) == repr(before)


def test_a_selection_that_could_not_be_read_again_is_not_written(tmp_path):
    labels = [",[" * 60_000 + str(row) for row in range(20)]
    with pytest.raises(InvalidInputError, match=r"labels of 20 rows are too long for JSON .* to_parquet"):
        select(SCORES, 20, "balanced", groups=labels).save(tmp_path / "chosen.json")
    assert not list(tmp_path.iterdir())


seal, BLANK = (resolve_name(f"trak_lite.core.sealed:{name}") for name in ("seal", "BLANK"))
CHANGES = [
    lambda content: content.update(
        kinds={"group": "V"}, columns={**content["columns"], "group": [[1, 2]] * 7}
    ),
    lambda content: content.update(kinds=[]),
    lambda content: content.update(version=3),
    lambda content: content.pop("columns"),
    lambda content: content["columns"]["row"].pop(),
    lambda content: content["columns"]["row"].__setitem__(0, 20),
    lambda content: content["columns"]["row"].__setitem__(0, content["columns"]["row"][1]),
    lambda content: content["columns"].update(score="text"),
    lambda content: content.update(num_rows=None),
]


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_contradict_themselves_are_refused(change, tmp_path):
    path = chosen().save(tmp_path / "chosen.json")
    content = json.loads(path.read_text())
    content["crc32c"] = BLANK
    path.write_text(json.dumps(content))
    seal(str(path), "selection")
    assert len(Selection.load(path)) == len(chosen())
    change(content)
    for text in (json.dumps(content), json.dumps({"crc32c": BLANK})):
        path.write_text(text)
        seal(str(path), "selection")
        with pytest.raises(InvalidInputError, match="not the file of a selection"):
            Selection.load(path)


def test_a_flipped_bit_of_any_byte_of_a_file_is_noticed(tmp_path):
    path = chosen(k=2).save(tmp_path / "chosen.json")
    whole = path.read_bytes()
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        with pytest.raises(InvalidInputError, match="not the file of a selection"):
            Selection.load(path)


def test_a_disk_that_is_full_leaves_the_file_of_before(tmp_path, monkeypatch):
    path = chosen(k=2).save(tmp_path / "chosen.json")
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", lambda fd: os.close(-1))  # an OSError
        with pytest.raises(StoreError, match=r"chosen\.json \(Bad file descriptor\)\. Free some space"):
            chosen(k=3).save(path)
    with pytest.raises(StoreError, match=r"missing.* \(No such file or directory\)\. .* another path"):
        chosen(k=3).save(tmp_path / "missing" / "chosen.json")
    assert len(Selection.load(path)) == 2
    assert os.listdir(tmp_path) == ["chosen.json"]


def test_a_link_that_lies_where_a_file_is_written_first_is_not_followed(tmp_path):
    (tmp_path / "other.txt").write_text("kept")
    (tmp_path / ".chosen.json.new").symlink_to(tmp_path / "other.txt")
    assert len(Selection.load(chosen(k=2).save(tmp_path / "chosen.json"))) == 2
    assert (tmp_path / "other.txt").read_text() == "kept"


def test_text_and_html_show_sizes_settings_and_first_rows():
    text = repr(chosen())
    for part in ("7 of 20 train rows", "method=balanced", f"row {chosen().indices[0]}, score", "... 2 more"):
        assert part in text
    assert "more" not in repr(chosen(k=5))
    html = chosen()._repr_html_()
    for part in ("Selection: 7 of 20 train rows", "&lt;b&gt;", "2 more rows"):
        assert part in html
    assert "<b>" not in html


@pytest.mark.parametrize("number", [0, 10_000])
def test_the_html_of_an_empty_or_large_selection_with_long_labels_is_short(number):
    values = np.linspace(1, 0, number)
    labels = np.full(number, "<script>" + "x" * 1000)
    settings = {"<i>" * 1000: "</table>" * 1000, "method": "top"}
    found = Selection(np.arange(number), values, labels, values, number + 20, settings=settings)
    html = found._repr_html_()
    assert f"{number} of {number + 20} train rows" in repr(found)
    assert "<td>top</td>" in html
    assert ("more rows" in html) == (number > 0)
    for raw in ("<script>", "<i>", "</table>" * 2):
        assert raw not in html
    assert html.count("<tr>") <= 8
    assert len(html) < 25_000


def test_frames_and_parquet_files_hold_the_columns_by_rank(tmp_path):
    pytest.importorskip("pandas")
    selection = chosen()
    frame = selection.to_pandas()
    assert frame.index.name == "rank"
    assert list(frame.columns) == ["row", "score", "best_target", "best_score", "group"]
    for name, values in columns(selection).items():
        np.testing.assert_array_equal(frame[name].to_numpy(), values)
    assert "redundancy" in chosen("greedy").to_pandas().columns
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow (extra: tables)")
    table = parquet.read_table(selection.to_parquet(tmp_path / "chosen.parquet"))
    for name, values in columns(selection).items():
        assert table.column(name).to_pylist() == values.tolist()
    with pytest.raises(InvalidInputError, match="is a folder"):
        selection.to_parquet(tmp_path)


def test_a_dataset_gets_a_column():
    datasets = pytest.importorskip("datasets", reason="needs datasets (extra: hf)")
    table = datasets.table.InMemoryTable.from_pydict({"row": list(range(20)), "source": LABELS.tolist()})
    data = datasets.Dataset(
        table, fingerprint="rows"
    )  # with some versions from_dict fails to pickle the table
    selection = select(SCORES, 7, "balanced", groups="source", data=data)
    marked = selection.add_to(data)
    np.testing.assert_array_equal(selection.indices, chosen().indices)
    assert marked["selected"][:] == selection.mask.tolist()
    assert data.select(selection.indices)["row"][:] == selection.indices.tolist()
    with pytest.raises(InvalidInputError, match="has a column 'selected'"):
        selection.add_to(marked)
    with pytest.raises(InvalidInputError, match="the dataset has 19"):
        selection.add_to(data.select(range(19)))
    assert "used" in selection.add_to(data, column="used").column_names
    with pytest.raises(InvalidInputError, match=r"selection\.mask"):
        selection.add_to([1, 2])
