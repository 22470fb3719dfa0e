"""What a reader sees: strongest rows, filters, output of the model, texts, review, permalinks; and how to reach it."""

import csv
import io
import re
import shutil
from urllib.parse import parse_qsl, urlencode, urlsplit

import numpy as np
import pytest
import torch
from cli_cases import functions, opened
from safetensors.torch import save_file
from serve_cases import HOSTILE, RECIPE, finished_run, marks_in, pages_in, served
from torch.utils.data import Subset, TensorDataset

from trak_lite import Rows, try_removals, what_if
from trak_lite.errors import CheckpointError, ManifestMismatchError

EVERY = np.arange(40)


@pytest.fixture(scope="module")
def scores(ran):
    return opened(ran).scores("held-out")


def sorted_rows(values: np.ndarray, rows: np.ndarray = EVERY) -> list[int]:
    """Return rows from the largest to the smallest value, of equal ones the lower row first."""
    return rows[np.argsort(-values[rows], kind="stable")].tolist()


@pytest.mark.parametrize("server", ["client", "plain"])
def test_a_target_shows_its_strongest_rows_of_those_that_pass_the_filters(request, scores, ran, server):
    """Against a plain sort. Without a recipe, the columns are those of the store."""
    asked = request.getfixturevalue(server)
    label, source = ("1", HOSTILE) if server == "client" else ("0", "=1+1")
    labels = functions(ran)["train_data"]().tensors[1].numpy()
    passing = np.flatnonzero((labels == int(label)) & ((EVERY % 4 == 0) == (source == HOSTILE)))
    filters = {"where-label": label, "where-source": source}
    for target, rows, where in ((0, EVERY, {}), (5, EVERY, {}), (2, passing, filters)):
        column = scores.numpy()[:, target]
        best, worst = sorted_rows(column, rows), sorted_rows(-column, rows)
        page = asked.page("/", set="held-out", target=target, k=4, **where)
        assert page.rows() == [*best[:4], *worst[:4]]
        assert f"{column[best[0]]:+.3g}" in page.text
        assert f"row {best[0]}" in page.text
        assert f"4 most helpful and 4 most harmful of {len(rows)} train rows" in page.text
        assert "estimates how much" in page.text
    assert asked.get("/", target=2, **{"where-colour": "1"}).status == 404


def test_scores_of_another_method_than_the_stores_are_served_where_the_run_has_only_these(tmp_path):
    folder = finished_run(tmp_path, "--score.method", "GradDot")
    column = opened(folder).scores("held-out", method="GradDot").numpy()[:, 2]
    for recipe in (True, False):
        with served(pages_in(folder, recipe=recipe)) as client:
            assert client.page("/", target=2, k=4).rows() == [
                *sorted_rows(column)[:4],
                *sorted_rows(-column)[:4],
            ]


TWO = {"where-label": "1", "where-source": "x" * 5000}
NO_MATCH = [
    ({"where-label": "7"}, ["No row has label '7'. Values of label: 0, 1."]),
    ({"where-source": "=1+2"}, ["No row has source '=1+2'. Values of source: =1+1, "]),
    (TWO, ["rows have label '1'. No row has source", "(5,000 characters in all)"]),
]


@pytest.mark.parametrize("path", ["/?target=2", "/review?"])
def test_a_filter_without_a_match_shows_the_values(client, path):
    for filters, expected in NO_MATCH:
        page = client.page(f"{path}&{urlencode(filters)}")
        for said in ("No train row passes the filters.", *expected):
            assert said in page.text
        assert "Most helpful" not in page.text
        chosen = {str(one.get("value")) for one in page.all("option") if "selected" in one}
        assert set(filters.values()) <= chosen


def test_the_page_says_what_scores_mean_and_what_stands_out(client, scores):
    column = scores.numpy()[:, 4].astype(np.float64)
    low, median, high = np.percentile(column, [25, 50, 75])
    limit = (high - low) / 1.349 * np.sqrt(2 * np.log(40))
    page = client.page("/", target=4, k=20)
    (text,) = [part for part in page.text.split("\n") if "estimates how much" in part]
    assert "image_classification for the target: the log-odds of the right label" in text
    assert f"from {median - limit:+.3g} to {median + limit:+.3g} are within the scatter" in text
    faint = {int(row["data-row"]) for row in page.all("li", class_="faint")}
    assert faint == set(np.flatnonzero(abs(column - median) <= limit).tolist()) & set(page.rows())
    assert 0 < len(faint) < 40
    assert page.text.count("within the scatter") == 1 + len([row for row in page.rows() if row in faint])
    bars, sizes = [float(bar["width"]) for bar in page.all("rect")], abs(column[page.rows()])
    np.testing.assert_allclose(bars, 100 * sizes / sizes.max(), atol=0.06)


def test_the_output_is_that_of_the_last_checkpoint(client, ran):
    recipe = functions(ran)
    model = recipe["build_model"]()
    *_, last = recipe["train"](EVERY, 0)
    model.load_state_dict(last)
    image, label = recipe["target_data"]()[3]
    logits = model(image[None])[0].detach().double()
    others = torch.logsumexp(logits[[i for i in range(2) if i != label]], 0)
    page = client.page("/", target=3)
    assert " ".join(f"{value:.4f}" for value in logits.tolist()) in page.text
    shown = float(re.search(r"f = ([-+\d.e]+), checkpoint checkpoint-3", page.text)[1])
    assert shown == pytest.approx(float(logits[label] - others), rel=1e-3)


def test_a_text_is_scored_by_a_form_only_and_then_has_a_permalink(client, ran):
    """The text is a stored target, so its scores are those of this target."""
    image, label = functions(ran)["target_data"]()[4]
    text = " ".join(map(repr, image.double().tolist())) + f" {int(label)}"
    assert "not scored yet" in client.page("/", text=text).text
    assert not list(ran.glob("run.zarr/targets/asked-*"))
    moved = client.post("/ask", {"token": client.token(), "text": text, "k": 4})
    assert moved.status == 303
    assert dict(parse_qsl(urlsplit(moved.headers["location"]).query)) == {"text": text, "k": "4"}
    page, same = client.page(moved.headers["location"]), client.page("/", target=4, k=4)
    assert page.rows() == same.rows()
    texts = [re.findall(r"[-+]\d[\d.e+-]*(?= label)", found.text) for found in (page, same)]
    shown, expected = ([*map(float, values)] for values in texts)
    assert len(shown) == 8
    assert shown == pytest.approx(expected, rel=2e-2)
    assert len(list(ran.glob("run.zarr/targets/asked-*"))) == 1
    assert [str(one) for one in page.all("option") if "asked-" in str(one)] == []  # no target set to choose


def test_a_permalink_leads_to_the_same_page_and_a_page_after_the_last_is_the_last(client):
    many = {"target": 2, "k": 3, "where-label": "1"}, {"target": 1, "k": 7, "where-source": HOSTILE}
    for params in (*many, {"set": "held-out", "target": 0}):
        page = client.page("/", **params)
        (link,) = page.all("a", id="permalink")
        again = client.page(str(link["href"]))
        assert (again.text, again.rows()) == (page.text, page.rows()), params
        assert again.all("a", id="permalink") == [link]
    last, beyond = (client.page(f"/review?from={first}").rows("tr") for first in (25, 1000))
    assert last == beyond
    assert "Show target 5" in client.page("/?from=24").text


def test_the_review_lists_rows_by_self_influence_and_marks_are_csv(client, ran, scores):
    order = sorted_rows(scores.self_influence())
    page = client.page("/review")
    rest = next(str(a["href"]) for a in page.all("a") if "from=25" in str(a["href"]))
    assert [*page.rows("tr"), *client.page(rest).rows("tr")] == order
    assert len(page.rows("tr")) == 25

    first, second, third = order[:3]
    for row, mark, label in ((first, "flip", "=2+2"), (second, "drop", "x"), (third, "keep", "")):
        fields = {"row": row, "mark": mark, "label": label, "show": "all", "set": "held-out"}
        moved = client.post("/mark", {"token": client.token(), **fields})
        assert moved.status == 303
        expected = f"/review?set=held-out&show=all&done={row}#row-{row}"
        assert sorted(re.split("[?&]", moved.headers["location"])) == sorted(re.split("[?&]", expected))
        said = client.page(moved.headers["location"]).text
        assert ("No train row has the label '=2+2'." in said) == (row == first)
    assert f"Row {third}: keep." in client.page(moved.headers["location"]).text
    assert marks_in(ran)[str(first)] == {"mark": "flip", "label": "=2+2"}

    kept = client.page("/review", show="keep")
    assert kept.rows("tr") == [third]
    assert kept.all("button", aria_pressed="true", id=f"keep-{third}")
    assert client.page("/review", show="unmarked").rows("tr")[0] == order[3]

    table = client.get("/marks.csv")
    assert table.headers["content-disposition"] == 'attachment; filename="relabelling.csv"'
    labels = functions(ran)["train_data"]().tensors[1].tolist()
    found = list(csv.DictReader(io.StringIO(table.text, newline="")))
    marked = (first, "flip", "'=2+2"), (second, "drop", ""), (third, "keep", "")
    columns = [(int(row["row"]), row["mark"], row["label"], row["new_label"]) for row in found]
    assert columns == sorted((row, mark, str(labels[row]), new) for row, mark, new in marked)

    client.post("/mark", {"token": client.token(), "row": first, "mark": "clear"})
    assert list(marks_in(ran)) == [str(row) for row in sorted((second, third))]


def test_a_marked_set_leads_to_what_changes_if_its_rows_go(copy):
    """Against sums of scores, and with intervals those of ``what_if``, of the marked rows and of those of a source."""
    kept, rows = opened(copy).scores("held-out"), [3, 11, 30]
    (copy / "run.marks.json").unlink(missing_ok=True)  # of other tests
    with served(pages_in(copy)) as client:
        token = client.token()
        assert "What if" not in client.page("/review").text
        assert "No row is listed" in client.page("/effects", show="drop").text
        assert "All rows are listed" in client.page("/effects").text
        for row in rows:
            assert client.post("/mark", {"token": token, "row": row, "mark": "drop"}).status == 303
        review = client.page("/review", show="drop")
        (link,) = (a["href"] for a in review.all("a") if str(a["href"]).startswith("/effects"))
        page = client.page(str(link))
        summed = -kept.numpy()[rows].sum(axis=0, dtype=np.float64)
        order = np.argsort(-np.abs(summed), kind="stable")
        assert [int(row["data-target"]) for row in page.all("tr") if "data-target" in row] == order.tolist()
        shown = re.findall(r"Target \d.*?([+-]\d[\d.e+-]*)", page.text, re.S)
        assert shown == [f"{summed[target]:+.3g}" for target in order]
        assert "without 3 of 40 train rows (7.5%)" in page.text
        assert "No interval: no retraining is stored" in page.text
        assert page.all("a", href="/review?set=held-out&show=drop")

    train, data = (functions(copy)[name] for name in ("train", "target_data"))
    try_removals(kept, lambda *given: list(train(*given))[-1], data(), budget=24, shares=(0.1, 0.3))
    expected = what_if(opened(copy).scores("held-out"), np.flatnonzero(EVERY % 4 == 0))
    assert expected.lower is not None
    with served(pages_in(copy, recipe=False)) as client:
        text = client.page("/effects", **{"where-source": HOSTILE}).text
        for low, high in zip(expected.lower, expected.upper, strict=True):
            assert not np.isfinite(low) or f"90% interval {low:+.3g} to {high:+.3g}" in text
        assert expected.basis in text


def test_without_a_recipe_rows_are_numbers_and_no_text_is_scored(plain):
    page = plain.page("/", target=1, k=3)
    assert "With --recipe FILE it is computed" in page.text
    assert not page.all("textarea")
    assert not page.all("div", class_="content")
    assert len(plain.page("/review").rows("tr")) == 25
    answer = plain.post("/ask", {"token": plain.token(), "text": "1 2 3 4 1"})
    assert answer.status == plain.get("/", text="1 2 3 4 1").status == 400
    assert "No text can be scored without a recipe" in answer.text


def test_a_second_set_of_targets_of_other_data_is_not_shown_by_this_recipe(copy):
    opened(copy).score(functions(copy)["train_data"](24), "other")
    with served(pages_in(copy)) as client:
        found = [client.page("/", set=name).text.count("target 3") for name in ("held-out", "other")]
        assert found == [2, 1]  # what the recipe shows of it, and the link
        other = client.page("/", set="other", target=23)
        assert "These targets are not those of the recipe" in other.text
        assert other.rows()
        last = client.page("/?set=other&from=1000")  # 24 are shown on one page
        assert "Show target 23" in last.text
        assert "Previous" not in last.text


@pytest.mark.parametrize("recipe", [True, False])
def test_a_set_that_is_made_again_is_shown_as_it_is_now(copy, recipe):
    made, targets = opened(copy), functions(copy)["target_data"]()
    paths = ("/?set=other&target=3", "/review?set=other")
    made.score(targets, "other")
    with served(pages_in(copy, recipe=recipe)) as client:
        before = [client.page(path).text for path in paths]
        made.drop_scores("other", features=True)
        assert client.get(paths[0]).status == 404
        made.score(Subset(targets, [5, 4, 3, 2]), "other", method="GradCos")
        found = [client.page(path).text for path in paths]
    with served(pages_in(copy, recipe=recipe)) as client:
        assert [client.page(path).text for path in paths] == found != before


@pytest.mark.parametrize("change", ["grown", "other columns", "other data"])
def test_other_train_data_or_columns_ask_for_a_new_start(change, copy, tmp_path):
    made, data = opened(copy), functions(copy)["train_data"]()
    checkpoints = sorted((copy / "trained").glob("*.safetensors"))
    with served(pages_in(copy, recipe=False)) as client:
        form = {"token": client.token(), "row": 3, "mark": "drop"}
        client.page("/?set=held-out&target=3")
        if change == "grown":
            longer = TensorDataset(*(torch.cat([part, part[:8]]) for part in data.tensors))
            made.featurize(Rows(longer), checkpoints, append=True)
            made.drop_scores("held-out")
            made.score(functions(copy)["target_data"](), "held-out")
        elif change == "other columns":
            made.featurize(Rows(data), checkpoints, columns={"source": ["new"] * 39 + ["other"]})
        else:
            recipe = RECIPE.replace("return data(num_train, 1)", "return data(num_train, 3)")
            (tmp_path / "other").mkdir()
            other = finished_run(tmp_path / "other", recipe=recipe) / "run.zarr"
            shutil.rmtree(copy / "run.zarr")
            other.rename(copy / "run.zarr")
        answers = [client.get(path) for path in ("/?set=held-out&target=3", "/review", "/marks.csv")]
        answers.append(client.post("/mark", form))
    assert [answer.status for answer in answers] == [409] * 4
    assert all("other train data, or other columns of them" in answer.text for answer in answers)
    assert "3" not in marks_in(copy)


def test_a_recipe_of_other_data_or_weights_is_refused(copy):
    save_file(next(functions(copy)["train"](np.arange(9), 5)), copy / "other.safetensors")
    with pytest.raises(CheckpointError, match="not those of a checkpoint"):
        pages_in(copy, checkpoints=str(copy / "other.safetensors"))
    text = (copy / "recipe.py").read_text()
    (copy / "recipe.py").write_text(text.replace("return data(num_train, 1)", "return data(num_train, 3)"))
    with pytest.raises(ManifestMismatchError, match="train data"):
        pages_in(copy)
