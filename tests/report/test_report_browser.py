"""The page in headless Chromium: what a reader sees, clicks, types, on a wide and on a narrow screen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, NO_CHROMIUM, Page, browser, contrast, luminance
from report_cases import VERDICT, drawn_scores, predictions

from trak_lite.report import write_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)

VISIBLE = (
    "[...document.querySelectorAll('article')].filter(a => a.checkVisibility()).map(a => a.dataset.target)"
)
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = np.random.default_rng(0)
    scores = drawn_scores(num_targets=12, verdict=VERDICT, predictions=predictions())
    words = ["Ada", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "ibis", "jay", "kiwi", "long " * 400]
    return write_report(
        scores,
        tmp_path_factory.mktemp("report") / "r.html",
        train_render=lambda row: {"image": generator.random((8, 8)), "note": HOSTILE},
        target_render=lambda target: words[target],
        title=HOSTILE,
    )


def test_a_reader_searches_by_number_and_by_text_and_sees_what_fits(page: Page, report: Path) -> None:
    page.open(report)
    assert page.run(VISIBLE) == [str(target) for target in range(12)]

    page.click("#query")
    page.type("target 1")
    assert page.run(VISIBLE) == ["1"]

    page.run("document.getElementById('query').select()")
    page.type("ADA")
    assert page.run(VISIBLE) == ["0"]
    assert page.run("document.getElementById('found').innerText") == "1 of 12 targets"

    page.run("document.getElementById('query').select()")
    page.type("nowhere")
    assert page.run(VISIBLE) == []

    page.click("a[href='#settings']")
    assert page.run("location.hash") == "#settings"
    assert page.run("document.getElementById('settings').getBoundingClientRect().top < innerHeight")


def test_nothing_is_asked_for_and_no_text_becomes_code(page: Page, report: Path) -> None:
    page.complaints.clear()

    page.open(report)

    asked = [url for url in page.requests if not url.startswith("data:image/png;")]
    assert asked == [report.resolve().as_uri()]
    assert page.complaints == []
    assert page.run("document.title") == HOSTILE
    assert page.run("document.querySelector('h1').innerText") == HOSTILE
    assert page.run("[...document.images].every(i => i.complete && i.naturalWidth === 8)")


def test_the_policy_stops_what_would_ask_for_something(page: Page, report: Path) -> None:
    page.open(report)
    page.complaints.clear()

    page.run("document.body.append(Object.assign(new Image(), {src: 'https://example.invalid/x.png'}))")
    page.run(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'document.title=1'}))"
    )
    page.run("new Promise(done => setTimeout(done, 50))")

    assert page.run("document.title") == HOSTILE
    assert all("Content Security Policy" in text for text in page.complaints)
    assert len(page.complaints) == 2


def test_tokens_are_coloured_by_weight_with_a_legend(page: Page, report: Path, tmp_path: Path) -> None:
    scores = drawn_scores(num_targets=1)
    tokens = [("up", 1.0), ("little", 0.3), ("none", 0.0), ("down", -1.0)]
    legend = "document.querySelector('.legend').checkVisibility()"

    page.open(write_report(scores, tmp_path / "r.html", pair_render=lambda row, target: tokens, figures=()))

    grounds = page.run(
        "[...document.querySelectorAll('li:first-child .tokens span')].slice(0, 4)"
        ".map(e => getComputedStyle(e).backgroundColor.match(/[\\d.]+/g).map(Number))"
    )
    up, little, none, down = grounds
    assert up[:3] == little[:3]
    assert up[3] > little[3] > none[3] == 0
    assert up[2] > up[0]
    assert down[0] > down[2]
    assert page.run(legend)
    page.open(report)
    assert not page.run(legend)


@pytest.mark.parametrize("dark", [False, True])
def test_coloured_tokens_can_be_read(page: Page, tmp_path: Path, dark: bool) -> None:
    tokens = [("word ", weight) for weight in np.linspace(-1, 1, 41).tolist()]
    scores = drawn_scores(num_targets=1)
    page.open(
        write_report(scores, tmp_path / "r.html", pair_render=lambda row, target: tokens, figures=()),
        dark=dark,
    )

    colours = page.run(
        "[...document.querySelectorAll('li:first-child .tokens span')].map(e => [getComputedStyle(e).color, "
        "getComputedStyle(e).backgroundColor, getComputedStyle(e.parentElement).backgroundColor])"
    )

    shades = {ground for _, ground, _ in colours}
    assert len(shades) > 6
    for ink, over, ground in colours:
        *colour, share = ([float(part) for part in over[over.index("(") + 1 : -1].split(",")] + [1.0])[:4]
        below = [float(part) for part in ground.removeprefix("rgb(").rstrip(")").split(",")]
        mixed = [share * one + (1 - share) * other for one, other in zip(colour, below, strict=True)]
        assert contrast(luminance(ink), luminance("rgb({}, {}, {})".format(*mixed))) >= 4.5, over


@pytest.mark.parametrize("dark", [False, True])
def test_without_scripts_everything_is_there_but_the_search(page: Page, report: Path, dark: bool) -> None:
    page.open(report, scripts=False, dark=dark)

    assert page.run(VISIBLE) == [str(target) for target in range(12)]
    assert not page.run("document.querySelector('.search').checkVisibility()")
    assert "LDS 0.500" in page.run("document.body.innerText")
    assert page.run("document.querySelectorAll('svg').length") == 4


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_reaches_beyond_the_screen(page: Page, report: Path, width: int) -> None:
    page.open(report, width=width)

    assert page.run("document.documentElement.scrollWidth") == width
    beyond = "[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
    assert page.run(f"{beyond}.map(e => e.tagName)") == []
    sizes = "[...document.querySelectorAll('p, td, li')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    assert min(page.run(sizes)) >= 12


def test_text_can_be_read_in_light_and_in_dark(page: Page, report: Path) -> None:
    """Ratios of 4.5 and above are what WCAG 2.1 asks for (success criterion 1.4.3)."""
    grounds = []
    for dark in (False, True):
        page.open(report, dark=dark)
        style = "getComputedStyle(document.querySelector('{}')).{}"
        ground = luminance(page.run(style.format(".card", "backgroundColor")))
        grounds.append(ground)
        for selector in (".card h3", ".number", ".score", "h4.high", "h4.low", ".note", "figcaption"):
            ink = luminance(page.run(style.format(selector, "color")))
            assert contrast(ink, ground) >= 4.5, (selector, dark)
    assert grounds[0] > 0.8
    assert grounds[1] < 0.1


def test_charts_have_the_colours_of_the_page(page: Page, report: Path) -> None:
    for dark in (False, True):
        page.open(report, dark=dark)
        style = "getComputedStyle(document.querySelector('{}')).{}"
        bar = page.run(style.format('svg path[fill="var(--high)"]', "fill"))
        ground = luminance(page.run(style.format("figure", "backgroundColor")))
        assert bar == page.run(style.format("h4.high", "color"))
        assert contrast(luminance(bar), ground) >= 3.0  # WCAG 2.1, success criterion 1.4.11
        texts = page.run("[...document.querySelectorAll('svg text')].map(e => getComputedStyle(e).fill)")
        assert min(contrast(luminance(text), ground) for text in set(texts)) >= 4.5
    assert page.run(
        "[...document.querySelectorAll('svg')].every(e => e.getBoundingClientRect().height > 100)"
    )
