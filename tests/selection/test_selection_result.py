"""What a selection becomes: text, HTML, frames, files, a column of a dataset."""

from __future__ import annotations

import json

import numpy as np
import pytest

from trak_lite.errors import InvalidInputError
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


CHANGES = [
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
    del content["crc32c"]
    content["version"] = 1  # files of this version have no checksum
    path.write_text(json.dumps(content))
    assert len(Selection.load(path)) == len(chosen())
    change(content)
    for text in (json.dumps(content), "{"):
        path.write_text(text)
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


def test_text_and_html_show_sizes_settings_and_first_rows():
    text = repr(chosen())
    for part in ("7 of 20 train rows", "method=balanced", f"row {chosen().indices[0]}, score", "... 2 more"):
        assert part in text
    assert "more" not in repr(chosen(k=5))
    pytest.importorskip("jinja2")
    html = chosen()._repr_html_()
    for part in ("Selection: 7 of 20 train rows", "&lt;b&gt;", "2 more rows"):
        assert part in html
    assert "<b>" not in html


@pytest.mark.parametrize("number", [0, 10_000])
def test_the_html_of_an_empty_or_large_selection_with_long_labels_is_short(number):
    pytest.importorskip("jinja2")
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
