"""The pages in headless Chromium: what fits, what can be read, keys without a mouse, names for a screen reader."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, NO_CHROMIUM, Page, browser, check_colours, check_layout
from serve_cases import HOSTILE, TEXT, Client, marks_in, pages_in, served

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)

PATHS = ["/", "/?target=1&k=3", f"/?text={TEXT.replace(' ', '+')}", "/review", "/?target=99", "/nowhere"]
PATHS += ["/effects?where-label=1"]
NEEDS_NAME = {
    "button", "checkbox", "combobox", "form", "image", "link", "navigation", "region", "searchbox", "spinbutton",
    "table", "textbox",
}  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def url(client: Client) -> str:
    assert client.post("/ask", {"token": client.token(), "text": TEXT}).status == 303
    return client.url


SAID = "document.getElementById('status').textContent"
"""The status, which a screen reader reads aloud."""
FOCUSED = "document.activeElement.id || document.activeElement.textContent.trim()"
FOCUSED_ROW = "document.activeElement.closest('tr').dataset.row"
REVIEWED = "[...document.querySelectorAll('tr[data-row]')].map(e => e.dataset.row)"
HEADING = "document.querySelector('h1').textContent"


def wait_for(page: Page, text: str) -> None:
    page.wait(f"{SAID}.includes({text!r})")


def focus(page: Page, name: str) -> None:
    page.run(f"document.getElementById({name!r}).focus()")


@pytest.mark.parametrize("path", PATHS)
def test_a_page_fits_can_be_read_loads_nothing_else_and_runs_no_text(page: Page, url: str, path: str) -> None:
    for width in (400, 1280):
        page.open(url + path, width=width)
        check_layout(page, width)
    for dark in (False, True):
        page.open(url + path, dark=dark)
        check_colours(page, dark=dark)
    assert [asked for asked in page.requests if not asked.startswith("data:")] == [url + path]
    assert [text for text in page.complaints if "Failed to load resource" not in text] == []
    assert page.run("document.title") != "owned"
    if path.startswith("/?target=1&"):
        assert page.run("document.querySelector('.target .text').textContent") == HOSTILE


@pytest.mark.parametrize(("path", "name"), [("/review", "Row"), ("/effects?where-label=1", "Change")])
def test_numbers_and_words_of_a_row_are_named_and_not_torn_and_long_texts_fit(
    page: Page, copy: Path, path: str, name: str
) -> None:
    fields = {
        "flipped": -0.88,
        "mean smoothness": "malignant",
        "note": 9 * "a sentence of usual words ",
        "id": 200 * "x",
    }
    recipe = copy / "recipe.py"
    recipe.write_text(f"{recipe.read_text()}\n\ndef render(index):\n    return {fields | {60 * 'w': 1.5}}\n")
    recipe.write_text(f"{recipe.read_text()}\n\ndef render_target(index):\n    return render(index)\n")
    lines = """(texts => texts.map(text => { const range = document.createRange(); range.selectNodeContents(text);
        return new Set([...range.getClientRects()].map(line => line.top)).size; }))
        ([...document.querySelector('.fields').querySelectorAll('th, td')])"""
    # Without the heads of the columns, on small screens, a number is named in its cell.
    names = """[...new Set([...document.querySelectorAll('[data-name]')].map(
        e => getComputedStyle(e, '::before').content.replace(/^attr.*/, e.dataset.name)))]"""
    with served(pages_in(copy)) as client:
        for width in (320, 400, 701, 1280):
            page.open(client.url + path, width=width)
            check_layout(page, width)
            assert page.run(names) == (["none"] if width > 700 else [f'"{name} "'])
            counts = np.reshape(page.run(lines), (5, 2)).tolist()
            assert counts[0] == [1, 1]
            assert counts[1][0] <= 2  # between its words
            assert counts[1][1] == counts[2][0] == counts[3][0] == counts[4][1] == 1
            assert min(counts[3][1], counts[4][0]) > 1


@pytest.mark.parametrize("path", PATHS)
def test_a_screen_reader_finds_names_and_landmarks(page: Page, url: str, path: str) -> None:
    """What the browser hands to a screen reader: its own computation of roles and names."""
    page.open(url + path)
    page.wait(f"location.href === {url + path!r}")  # the page before may be there still
    page.call("Accessibility.enable")
    found: dict[str, list[str]] = {}
    for node in page.call("Accessibility.getFullAXTree")["nodes"]:
        if not node["ignored"]:
            role, name = node["role"]["value"], node.get("name", {}).get("value", "")
            found.setdefault(role, []).append(name.strip())
    page.call("Accessibility.disable")
    assert [role for role in NEEDS_NAME & found.keys() if not all(found[role])] == []
    assert len(found["main"]) == len(found["status"]) == 1
    assert "Pages" in found["navigation"]
    ids = page.run("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(set(ids)) == len(ids)
    assert page.run("document.documentElement.lang") == "en"
    viewport = page.run("document.querySelector('meta[name=viewport]').content")
    assert viewport == "width=device-width, initial-scale=1"
    levels = page.run("[...document.querySelectorAll('h1, h2, h3, h4')].map(e => Number(e.tagName[1]))")
    assert levels[0] == 1
    assert max(np.diff(levels), default=0) <= 1  # no level is left out
    if path == "/review":
        assert found["columnheader"] == ["Row", "Content", "Mark"]
        assert len(found["rowheader"]) == 25
        assert all("self-influence" in name for name in found["rowheader"])
        assert len(set(found["button"])) == len(found["button"])  # each names its row
        assert len({name for name in found["combobox"] if name.startswith("New label of row")}) == 25
    if path.startswith("/?target=1&"):
        assert {"Most helpful train rows", "Most harmful train rows"} <= set(found["region"])


@pytest.mark.parametrize("path", PATHS)
def test_tab_reaches_everything_in_order_and_shows_where_it_is(page: Page, url: str, path: str) -> None:
    page.open(url + path)
    selector = 'a[href], button, select, textarea, input:not([type=hidden]), [tabindex="0"]'
    everything = f"[...document.querySelectorAll({selector!r})]"
    page.run(f"{everything}.forEach((e, i) => e.dataset.place = i)")
    count = page.run(f"{everything}.length")
    assert count >= 3
    outline = "(s => [s.outlineStyle, parseFloat(s.outlineWidth)])(getComputedStyle(document.activeElement))"
    for place in range(count):
        page.press("Tab")
        assert page.run("document.activeElement.dataset.place") == str(place)
        assert page.run(outline) == ["solid", 3], page.run("document.activeElement.outerHTML")
    page.press("Tab", shift=True)
    assert page.run("document.activeElement.dataset.place") == str(count - 2)


@pytest.mark.parametrize("scripts", [True, False])
def test_a_target_is_chosen_without_a_mouse_and_the_back_button_leads_back(page: Page, url: str, scripts):
    page.open(f"{url}/?target=1", scripts=scripts)
    while page.run(FOCUSED) != "target":
        page.press("Tab")
    page.run("document.getElementById('target').select()")
    page.type("2")
    page.press("Enter")
    if scripts:
        wait_for(page, "for target 2 of held-out")
        assert page.run(FOCUSED) == "target"  # results are replaced, the focus stays
    else:
        page.loaded()
    assert page.run("document.querySelectorAll('li[data-row]').length") == 10
    assert page.run(HEADING) == "Target 2 of held-out"
    address = page.run("location.href")
    assert "target=2" in address
    if scripts:
        page.run("history.back()")
        page.loaded()
        assert page.run(HEADING) == "Target 1 of held-out"

    page.open(address)  # what the address bar shows leads to the same page
    assert page.run(HEADING) == "Target 2 of held-out"
    focus(page, "permalink")
    page.press("Enter")
    page.loaded()
    assert page.run(HEADING) == "Target 2 of held-out"


def test_a_text_is_scored_without_a_mouse(page: Page, url: str) -> None:
    page.open(f"{url}/")
    focus(page, "text")
    page.type("1 2 3 4 0")
    page.press("Tab")
    assert page.run(FOCUSED) == "ask"
    page.press("Enter")
    wait_for(page, "for the text")
    assert page.run("document.getElementById('text').value") == "1 2 3 4 0"
    assert "logits" in page.run("document.querySelector('article').innerText")
    page.run("document.getElementById('text').value = 'not numbers'")
    focus(page, "ask")
    page.press("Enter")
    page.wait("document.querySelector('h1').textContent.startsWith('400')")
    assert "made no sample" in page.run(SAID)


def test_letters_in_the_field_of_a_label_are_no_keys_and_enter_flips(page: Page, url: str, ran: Path) -> None:
    page.open(f"{url}/review")
    row = page.run(REVIEWED)[0]
    focus(page, f"keep-{row}")
    page.press("f")
    assert page.run(FOCUSED) == f"label-{row}"  # a flip needs a label
    page.type("kdu")
    assert page.run(f"document.getElementById('label-{row}').value") == "kdu"
    page.press("Enter")  # the first button of the form: a label is for a flip
    wait_for(page, f"Row {row}: flip.")
    assert marks_in(ran) == {row: {"mark": "flip", "label": "kdu"}}
    focus(page, f"keep-{row}")
    page.press("u")
    wait_for(page, f"Row {row}: no mark.")
    assert marks_in(ran) == {}


@pytest.mark.parametrize("show", ["all", "unmarked"])
def test_keys_go_on_after_a_mark_wherever_the_focus_is_in_the_row(page: Page, copy: Path, show: str) -> None:
    """The focus is on the row's text, as Tab reaches it; rows with a mark leave the list of unmarked ones."""
    with (copy / "recipe.py").open("a") as recipe:
        recipe.write("\n\ndef render(index):\n    return f'text {index}'\n")
    marks = ("keep", "drop")
    with served(pages_in(copy)) as client:
        page.open(f"{client.url}/review?show={show}")
        page.press("n")  # no row has the focus: the first one
        rows = page.run(REVIEWED)
        assert page.run(FOCUSED_ROW) == rows[0]
        page.run("document.querySelector('tr[data-row] .text').focus()")
        for row, following, mark in zip(rows, rows[1:], marks, strict=False):
            page.press(mark[0])
            wait_for(page, f"Row {row}: {mark}.")
            assert page.run("document.activeElement.textContent").startswith("text ")
            assert page.run(FOCUSED_ROW) == (row if show == "all" else following)
            if show == "all":
                page.press("n")
                page.run("document.activeElement.closest('tr').querySelector('.text').focus()")
    assert [(row, one["mark"]) for row, one in marks_in(copy).items()] == sorted(
        zip(rows, marks, strict=False), key=lambda pair: int(pair[0])
    )


def test_keys_that_are_faster_than_the_server_lose_no_mark(page: Page, url: str, ran: Path) -> None:
    page.open(f"{url}/review")
    rows = page.run(REVIEWED)
    for key in "nkndnk":
        page.press(key)
    wait_for(page, f"Row {rows[2]}: keep.")
    assert page.run(FOCUSED_ROW) == rows[2]
    pressed = page.run("[...document.querySelectorAll('[aria-pressed=true]')].map(e => e.id)")
    assert pressed == [f"keep-{rows[0]}", f"drop-{rows[1]}", f"keep-{rows[2]}"]
    found = marks_in(ran)
    assert [found[row]["mark"] for row in rows[:3]] == ["keep", "drop", "keep"]
    for key in "upupu":
        page.press(key)
    wait_for(page, f"Row {rows[0]}: no mark.")
    assert marks_in(ran) == {}


def test_a_server_that_is_gone_is_announced(page: Page, ran: Path) -> None:
    with served(pages_in(ran)) as client:
        page.open(f"{client.url}/?target=1")
    focus(page, "show")
    page.press("Enter")
    wait_for(page, "No page came back.")
    assert page.run("document.querySelectorAll('li[data-row]').length") == 10
