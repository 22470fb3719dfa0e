"""The page: what is on it, that hostile text stays text, and that it asks for nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_cases import VERDICT, Parsed, drawn_scores, parsed_content

from trak_lite.errors import InvalidInputError, MissingPackageError, NonFiniteError
from trak_lite.evaluation.verdict import Predictions
from trak_lite.methods import GaussNewton, GradDot
from trak_lite.report import write_report

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "</style><img src=x onerror=alert(1)>",
    "\"' onmouseover='alert(1)",
    "<!-- ", "]]>", "&lt;b&gt; &amp;amp;",
    "javascript:alert(1)",
    "<a href=//evil.example>https://evil.example</a>",
    "a\x00b\x07c\x1b[31m\x7f\x9b",
    "\ud800 lone \udfff",
    "שלום \u202e evil \u2067 κόσμος 🦆 e\u0301",
    "{query} ${query} {{query}}",
]  # fmt: skip


def shown(text: str) -> str:
    """Return what a reader is to see of a text: controls and surrogates have a picture."""
    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(_picture(ord(letter)) for letter in plain)


def _picture(code: int) -> str:
    if code < 0x20 and code not in (9, 10):
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    return "\ufffd" if 0x80 <= code < 0xA0 or 0xD800 <= code < 0xE000 else chr(code)


def test_top_rows_of_every_target_are_on_the_page(tmp_path: Path) -> None:
    scores = drawn_scores()

    page = Parsed(write_report(scores, tmp_path / "r.html", k=3))

    order = np.argsort(-scores.numpy(), axis=0, kind="stable")
    rows = [int(found["data-row"] or "") for found in page.all("li")]
    expected = [[*order[:3, target], *order[::-1][:3, target]] for target in range(4)]
    assert np.array(rows).reshape(4, 6).tolist() == np.array(expected).tolist()
    assert f"row {order[0, 0]} {scores.numpy()[order[0, 0], 0]:+.3g}" in page.text
    assert page.is_closed


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text_wherever_it_comes_in(tmp_path: Path, text: str) -> None:
    scores = drawn_scores(num_rows=8, num_targets=1, num_checkpoints=1, verdict=VERDICT)
    scores.name = scores.settings["note"] = text
    renders = [
        lambda row: text,
        lambda row: {text: text, "n": 1.5},
        lambda row: [(text, 1.0), ("b", -1.0)],
    ]
    plain = write_report(scores, tmp_path / "plain.html", title="t", figures=())
    elements = Parsed(plain).names | {"table", "tr", "th", "td", "p", "span", "div", "tbody"}

    for number, render in enumerate(renders):
        out = tmp_path / f"{number}.html"
        page = Parsed(
            write_report(scores, out, train_render=render, target_render=render, title=text, figures=())
        )

        assert page.names <= elements
        assert page.inside["title"] == shown(text)
        count = page.text.count(shown(text))
        assert count >= 12  # 5 rows at either end, the target, the heading
        handlers = [
            key for _, found in page.elements for key in found if key.startswith("on") or key == "style"
        ]
        assert not handlers
        assert page.is_closed


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(), max_size=40))
def test_any_text_is_shown_as_it_is(text: str) -> None:
    for content in (text, {"k": text}, [(text, 0.5)]):
        page = parsed_content(content)
        assert shown(text) in page.text
        assert page.names <= {"p", "span", "table", "tbody", "tr", "th", "td"}


def test_the_page_names_no_other_place_and_its_policy_forbids_every_request(tmp_path: Path) -> None:
    scores = drawn_scores(verdict=VERDICT)
    image = np.zeros((4, 4))
    out = write_report(
        scores, tmp_path / "r.html", train_render=lambda row: image, target_render=lambda t: image
    )

    text, page = out.read_text(encoding="utf-8"), Parsed(out)

    assert not re.search(
        r"(?i)https?:|//[a-z]|@import|url\(|file:|\bwss?:", re.sub(r'src="data:[^"]*"', "", text)
    )
    for _, found in page.elements:
        assert (found.get("src") or "data:image/png;").startswith("data:image/png;")
        assert (found.get("href") or "#").startswith("#")
    assert not page.names & {"link", "iframe", "object", "embed", "base", "form", "video", "audio", "source"}
    (policy,) = page.all("meta", http_equiv="Content-Security-Policy")
    rules = dict(rule.split(" ", 1) for rule in str(policy["content"]).split("; "))
    assert rules == {
        "default-src": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "img-src": "data:",
        "style-src": digest(page.inside["style"]),
        "script-src": digest(page.inside["script"]),
    }


def test_a_page_with_every_figure_has_no_identifier_twice_and_is_the_same_every_time(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    predictions = Predictions(generator.normal(size=(6, 4)), generator.normal(size=(6, 4)))
    scores = drawn_scores(verdict=VERDICT, predictions=predictions)

    one, other = (write_report(scores, tmp_path / name) for name in ("a.html", "b.html"))

    page = Parsed(one)
    assert len(page.all("svg", role="img")) == 4
    identifiers = [found["id"] for _, found in page.elements if "id" in found]
    assert len(set(identifiers)) == len(identifiers)
    assert {str(found["href"]) for found in page.all("use")} <= {f"#{name}" for name in identifiers}
    assert one.read_bytes() == other.read_bytes()


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which checks the syntax of the script")
def test_the_script_is_valid(tmp_path: Path) -> None:
    page = Parsed(write_report(drawn_scores(), tmp_path / "r.html", figures=()))
    (tmp_path / "script.js").write_text(page.inside["script"])

    subprocess.run(["node", "--check", str(tmp_path / "script.js")], check=True)


def test_huge_text_is_cut_and_says_so(tmp_path: Path) -> None:
    scores = drawn_scores(num_rows=8, num_targets=1)
    huge = "x" * 1_000_000
    contents = [huge, {huge: huge}, dict.fromkeys(range(5000), 1), [(huge, 1.0)] * 3, [("t", 1.0)] * 5000]

    for content in contents:
        out = write_report(scores, tmp_path / "r.html", train_render=lambda row, c=content: c, figures=())
        assert out.stat().st_size < 600_000
        assert "in all)" in out.read_text(encoding="utf-8")


def test_at_most_a_hundred_targets_are_shown_and_the_page_says_so(tmp_path: Path) -> None:
    scores = drawn_scores(num_targets=130, num_rows=5)

    page = Parsed(write_report(scores, tmp_path / "r.html", k=1))

    assert len(page.all("article")) == 100
    assert "100 of 130 targets" in page.text


def test_targets_that_are_named_are_shown_in_that_order(tmp_path: Path) -> None:
    page = Parsed(write_report(drawn_scores(), tmp_path / "r.html", targets=[-1, 0], figures=()))

    assert [found["data-target"] for found in page.all("article")] == ["3", "0"]


def test_a_filter_leaves_only_its_rows_on_the_page(tmp_path: Path) -> None:
    scores = drawn_scores()
    mask = np.arange(40) % 3 == 1
    page = Parsed(write_report(scores, tmp_path / "r.html", targets=[2], k=3, figures=(), where=mask))

    rows = np.flatnonzero(mask)
    column = scores.numpy()[rows, 2]
    best, worst = (rows[np.argsort(sign * column, kind="stable")[:3]] for sign in (-1, 1))
    shown = [int(item["data-row"]) for item in page.all("li") if "data-row" in item]
    assert shown == [*best.tolist(), *worst.tolist()]
    assert "Only the train rows of a mask." in page.text


def test_scores_are_read_once_and_only_shown_rows_are_rendered(tmp_path: Path, monkeypatch) -> None:
    scores = drawn_scores()
    passes, rendered = [], []
    tiles = type(scores).tiles
    monkeypatch.setattr(type(scores), "tiles", lambda self, wanted: passes.append(1) or tiles(self))
    monkeypatch.setattr(type(scores), "numpy", lambda self: pytest.fail("all scores were held at once"))

    write_report(
        scores, tmp_path / "r.html", k=2, targets=[1], train_render=lambda r: rendered.append(r) or "x"
    )

    assert len(passes) == 1
    assert sorted(rendered) == sorted(
        [*scores.top(2, target=1).indices, *scores.top(2, target=1, sign="harmful").indices]
    )


def test_the_verdict_is_on_the_page_with_its_interval_and_baselines(tmp_path: Path) -> None:
    tested = Parsed(write_report(drawn_scores(verdict=VERDICT), tmp_path / "a.html", figures=())).text
    untested = Parsed(write_report(drawn_scores(), tmp_path / "b.html", figures=())).text

    assert str(VERDICT).split("\n")[0] in tested
    assert "gradient dot product, no kernel0.300 [0.200, 0.400]0.200 [0.100, 0.300]" in tested
    assert "Not tested yet" in untested
    assert "Not tested yet" not in tested


def test_settings_of_scores_and_rows_are_on_the_page(tmp_path: Path) -> None:
    text = Parsed(
        write_report(drawn_scores(method=GaussNewton(damping=0.25)), tmp_path / "r.html", figures=())
    ).text

    assert "scores: methodGaussNewton" in text
    assert "scores: damping0.25" in text
    assert 'rows: task{"name": "drawn"}' in text
    assert "made with: trak_lite0" in text


def test_a_render_that_fails_leaves_the_older_page_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "r.html"
    before = write_report(drawn_scores(), out, figures=()).read_text(encoding="utf-8")

    with pytest.raises(ZeroDivisionError):
        write_report(drawn_scores(), out, train_render=lambda row: 1 // 0, figures=())

    assert out.read_text(encoding="utf-8") == before
    assert list(out.parent.iterdir()) == [out]


def test_a_pair_is_rendered_for_its_own_target(tmp_path: Path) -> None:
    scores = drawn_scores(num_targets=2)

    page = write_report(
        scores, tmp_path / "r.html", k=1, pair_render=lambda r, t: f"pair {r} {t};", figures=()
    )

    helpful = scores.top(1).indices[:, 0]
    assert all(f"pair {row} {target};" in Parsed(page).text for target, row in enumerate(helpful))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"targets": [4]}, "no target 4"),
        ({"targets": []}, "one or more different numbers from 0 to 3"),
        ({"targets": [1, -3]}, "different numbers"),
        ({"k": 0}, "k must be an integer of at least 1"),
        ({"figures": ["histgram"]}, "histogram"),
        ({"train_render": lambda row: 3.5}, "gave a float. Expected an image"),
        ({"train_render": lambda row: np.zeros((2, 3, 5))}, r"shape \(2, 3, 5\). Expected \(H, W\)"),
        ({"train_render": lambda row: np.zeros((0, 3))}, r"shape \(0, 3\)"),
        ({"train_render": lambda row: np.zeros((2, 2), complex)}, "complex128. Expected real"),
        ({"train_render": lambda row: [("a", 1), "bc"]}, r"\(token, weight\) pairs"),
    ],
)
def test_what_cannot_be_shown_is_refused_by_name(tmp_path: Path, arguments, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        write_report(drawn_scores(), tmp_path / "r.html", **{"figures": (), **arguments})

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [np.full((2, 2), np.nan), [("a", float("inf"))]])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, content) -> None:
    with pytest.raises(NonFiniteError, match="train row"):
        write_report(drawn_scores(), tmp_path / "r.html", train_render=lambda row: content)


def test_scores_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    scores = drawn_scores(features=np.full((3, 6), 3e38), method=GradDot())

    with pytest.raises(NonFiniteError, match="score is NaN"):
        write_report(scores, tmp_path / "r.html")


def test_a_folder_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"is a folder. Name a file in it"):
        write_report(drawn_scores(), tmp_path)


@pytest.mark.parametrize("module", ["jinja2", "PIL", "matplotlib"])
def test_a_missing_package_is_named_with_the_extra_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    scores = drawn_scores()
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(
        MissingPackageError, match=rf"needs {module}.*pip install 'trak-lite\[report\]'"
    ) as caught:
        write_report(scores, tmp_path / "r.html", train_render=lambda row: np.zeros((2, 2)))

    assert isinstance(caught.value, ImportError)
    assert caught.value.name == module
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_found_before_the_scores_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = drawn_scores()
    monkeypatch.setattr(type(scores), "tiles", lambda self, *_: pytest.fail("the scores were read"))
    for module in ("matplotlib", "jinja2"):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingPackageError, match=module):
            write_report(scores, tmp_path / "r.html")


def test_without_figures_and_images_jinja2_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("matplotlib", "PIL"):
        monkeypatch.setitem(sys.modules, module, None)

    page = write_report(drawn_scores(), tmp_path / "r.html", train_render=lambda row: {"n": row}, figures=())

    assert Parsed(page).is_closed


def test_without_the_extra_the_package_is_imported_and_a_notebook_names_what_is_missing() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['jinja2', 'markupsafe', 'PIL', 'matplotlib']))\n"
        "import trak_lite.report\n"
        "from report_cases import drawn_scores\n"
        "for shown in (drawn_scores(), drawn_scores().gallery()):\n"
        "    try: shown._repr_html_()\n"
        "    except trak_lite.errors.MissingPackageError as error: print(error)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ
    )

    message = "This needs jinja2, which is not installed. Install it with pip install 'trak-lite[report]'."
    assert ended.stdout.splitlines() == [message, message]
