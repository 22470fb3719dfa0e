"""The page in headless Chromium: what a reader sees, clicks, types, on a wide and on a narrow screen."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, NO_CHROMIUM, Page, browser, check_colours, check_layout
from report_cases import VERDICT, drawn_scores, predictions

from trak_lite.report import write_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)

IDS = "[...document.querySelectorAll('article')].filter(e => e.checkVisibility()).map(e => e.dataset.target)"
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = np.random.default_rng(0)
    words = ["Ada", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "ibis", "jay", "kiwi", "long " * 400]
    return write_report(
        drawn_scores(num_targets=12, verdict=VERDICT, predictions=predictions()),
        tmp_path_factory.mktemp("report") / "r.html",
        train_render=lambda row: {"image": generator.random((8, 8)), "note": HOSTILE},
        target_render=lambda target: words[target],
        title=HOSTILE,
    )


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with tokens of weights from -1 to 1."""
    out = tmp_path_factory.mktemp("tokens") / "r.html"
    words = [("word ", weight) for weight in np.linspace(-1, 1, 41).tolist()]
    return write_report(drawn_scores(num_targets=1), out, pair_render=lambda *pair: words, figures=())


def test_a_reader_searches_by_number_and_by_text(page: Page, report: Path) -> None:
    page.open(report)
    assert page.run(IDS) == [str(target) for target in range(12)]
    page.click("#query")
    for typed, visible in (("target 1", ["1"]), ("ADA", ["0"]), ("nowhere", [])):
        page.run("document.getElementById('query').select()")
        page.type(typed)
        assert page.run(IDS) == visible
        assert page.run("document.getElementById('found').innerText") == f"{len(visible)} of 12 targets"
    page.click("a[href='#settings']")
    assert page.run("location.hash") == "#settings"
    assert page.run("document.getElementById('settings').getBoundingClientRect().top < innerHeight")


def test_nothing_is_asked_for_no_text_becomes_code_and_the_policy_stops_both(page: Page, report: Path):
    page.open(report)
    asked = [url for url in page.requests if not url.startswith("data:image/png;")]
    assert asked == [report.resolve().as_uri()]
    assert page.complaints == []
    assert page.run("document.querySelector('h1').innerText") == HOSTILE
    assert page.run("[...document.images].every(i => i.complete && i.naturalWidth === 8)")
    for tag, wanted in (("img", "src: 'https://x.invalid/x'"), ("script", "textContent: 'document.title=1'")):
        page.run(f"document.body.append(Object.assign(document.createElement('{tag}'), {{{wanted}}}))")
    page.run("new Promise(done => setTimeout(done, 50))")
    assert page.run("document.title") == HOSTILE
    assert len(page.complaints) == 2
    assert all("Content Security Policy" in text for text in page.complaints)


def test_tokens_are_coloured_by_weight_with_a_legend(page: Page, report: Path, tokens: Path) -> None:
    legend = "document.querySelector('.legend').checkVisibility()"
    page.open(tokens)
    grounds = page.run(
        "[...document.querySelectorAll('li:first-child .tokens span')]"
        ".map(e => getComputedStyle(e).backgroundColor.match(/[\\d.]+/g).map(Number))"
    )
    up, little, none, down = (grounds[place] for place in (40, 26, 20, 0))
    assert up[:3] == little[:3]
    assert up[3] > little[3] > none[3] == 0
    assert up[2] > up[0]
    assert down[0] > down[2]
    assert page.run(legend)
    page.open(report)
    assert not page.run(legend)


@pytest.mark.parametrize("dark", [False, True])
def test_everything_is_there_without_scripts_and_can_be_read(page: Page, report, tokens, dark):
    page.open(report, scripts=False, dark=dark)
    assert page.run(IDS) == [str(target) for target in range(12)]
    assert not page.run("document.querySelector('.search').checkVisibility()")
    assert "LDS 0.500" in page.run("document.body.innerText")
    heights = page.run("[...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect().height)")
    assert (len(heights), min(heights) > 100) == (4, True)
    check_colours(page, dark=dark)
    style = "getComputedStyle(document.querySelector('{}')).{}"
    bar = page.run(style.format('svg path[fill="var(--high)"]', "fill"))
    assert bar == page.run(style.format("h4.high", "color"))
    page.open(tokens, dark=dark)
    assert check_colours(page, dark=dark) > 6


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_reaches_beyond_the_screen(page: Page, report: Path, width: int) -> None:
    page.open(report, width=width)
    check_layout(page, width)
