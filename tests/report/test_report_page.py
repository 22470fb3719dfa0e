"""The page: what is on it, that hostile text stays text, and that it asks for nothing from anywhere."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import start_script
from report_cases import VERDICT, Parsed, digest, drawn_scores, predictions

from trak_lite import Scores
from trak_lite.errors import InvalidInputError, MissingPackageError, NonFiniteError
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
    "a\x00b\x07c\x1b[31m\x7f\x9b\rd\r\ne",
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


@pytest.fixture
def out(tmp_path):
    return tmp_path / "r.html"


def page_of(out: Path, scores: Scores, **arguments: Any) -> Parsed:
    """Return the page on some scores, without figures if none are named."""
    return Parsed(write_report(scores, out, **{"figures": (), **arguments}))


@pytest.mark.parametrize("some", [False, True], ids=["all", "filtered"])
def test_top_rows_of_every_target_that_pass_a_filter_are_on_the_page(out, some):
    scores, mask = drawn_scores(), np.arange(40) % 3 == 1
    rows, where = (np.flatnonzero(mask), {"where": mask}) if some else (np.arange(40), {})
    page = page_of(out, scores, k=3, pair_render=lambda row, target: f"pair {row} {target};", **where)
    order = rows[np.argsort(-scores.numpy()[rows], axis=0, kind="stable")]
    assert np.array(page.rows()).reshape(4, 6).tolist() == np.vstack([order[:3], order[:-4:-1]]).T.tolist()
    for target in range(4):
        assert f"pair {order[0, target]} {target};" in page.text
    assert f"row {order[0, 0]} {scores.numpy()[order[0, 0], 0]:+.3g}" in page.text
    assert ("Only the train rows of a mask." in page.text) == some
    assert page.is_closed


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text_wherever_it_comes_in(out, text):
    scores = drawn_scores(num_rows=8, num_targets=1, num_checkpoints=1, verdict=VERDICT)
    elements = page_of(out, scores, title="t").names
    elements |= {"table", "tr", "th", "td", "p", "span", "div", "tbody"}
    scores.name = scores.settings["note"] = text
    for content in (text, {text: text, "n": 1.5}, [(text, 1.0), ("b", -1.0)]):
        page = page_of(out, scores, **rendering(content), target_render=lambda _, c=content: c, title=text)
        assert page.names <= elements
        assert page.inside["title"] == shown(text)
        assert page.text.count(shown(text)) >= 12  # 5 rows at either end, the target, the heading
        keys = {key for _, found in page.elements for key in found}
        assert not [key for key in keys if key.startswith("on") or key == "style"]
        assert page.is_closed


def test_a_page_with_every_figure_asks_for_nothing_and_is_the_same_every_time(out):
    scores, image = drawn_scores(verdict=VERDICT, predictions=predictions()), np.zeros((4, 4))
    renders = {**rendering(image), "target_render": lambda target: image}
    one, other = (write_report(scores, place, **renders) for place in (out, out.with_name("b.html")))
    page = Parsed(one)
    assert one.read_bytes() == other.read_bytes()
    assert len(page.all("svg", role="img")) == len(page.all("figure")) == 4
    identifiers = [found["id"] for _, found in page.elements if "id" in found]
    assert len(set(identifiers)) == len(identifiers)
    assert {str(found["href"]) for found in page.all("use")} <= {f"#{name}" for name in identifiers}
    without_data = re.sub(r'src="data:[^"]*"', "", one.read_text(encoding="utf-8"))
    assert not re.search(r"(?i)https?:|//[a-z]|@import|url\(|file:|\bwss?:", without_data)
    for _, found in page.elements:
        assert (found.get("src") or "data:image/png;").startswith("data:image/png;")
        assert (found.get("href") or "#").startswith("#")
    assert not page.names & {"link", "iframe", "object", "embed", "base", "form", "video", "audio", "source"}
    (policy,) = page.all("meta", http_equiv="Content-Security-Policy")
    rules = dict(rule.split(" ", 1) for rule in str(policy["content"]).split("; "))
    inside = {f"{kind}-src": digest(page.inside[kind]) for kind in ("style", "script")}
    nothing = dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    assert rules == {**nothing, "img-src": "data:", **inside}


def test_huge_text_is_cut_and_says_so(out):
    scores = drawn_scores(num_rows=8, num_targets=1)
    huge = "x" * 1_000_000
    contents = [huge, {huge: huge}, dict.fromkeys(range(5000), 1), [(huge, 1.0)] * 3, [("t", 1.0)] * 5000]
    for content in contents:
        page_of(out, scores, **rendering(content))
        assert out.stat().st_size < 600_000
        assert "in all)" in out.read_text(encoding="utf-8")


def test_named_targets_are_shown_in_their_order_and_at_most_a_hundred_of_all(out):
    named = page_of(out, drawn_scores(), targets=[-1, 0])
    assert [found["data-target"] for found in named.all("article")] == ["3", "0"]
    page = page_of(out, drawn_scores(num_targets=130, num_rows=5), k=1)
    assert len(page.all("article")) == 100
    assert "100 of 130 targets" in page.text


def test_scores_are_read_once_and_shown_rows_rendered(out, monkeypatch):
    scores = drawn_scores()
    passes, rendered = [], []
    tiles = Scores.tiles
    monkeypatch.setattr(Scores, "tiles", lambda self, wanted: passes.append(1) or tiles(self))
    monkeypatch.setattr(Scores, "numpy", lambda self: pytest.fail("all scores were held at once"))
    write_report(scores, out, k=2, targets=[1], train_render=lambda row: rendered.append(row) or "x")
    assert len(passes) == 1
    ends = [scores.top(2, target=1, sign=sign).indices for sign in ("helpful", "harmful")]
    assert sorted(rendered) == sorted(np.concatenate(ends))


def test_verdict_and_settings_of_scores_and_rows_are_on_the_page(out):
    tested = page_of(out, drawn_scores(verdict=VERDICT, method=GaussNewton(damping=0.25))).text
    said = ["scores: methodGaussNewton", "scores: damping0.25", 'rows: task{"name": "drawn"}']
    said += ["made with: trak_lite0", str(VERDICT).split("\n")[0]]
    said.append("gradient dot product, no kernel0.300 [0.200, 0.400]0.200 [0.100, 0.300]")
    assert [text for text in said if text not in tested] == []
    assert "Not tested yet" in page_of(out, drawn_scores()).text
    assert "Not tested yet" not in tested


def test_an_interrupted_report_leaves_the_older_page_and_nothing_else(tmp_path):
    out = tmp_path / "folder" / "r.html"
    page_of(out, drawn_scores())
    before = out.read_bytes()

    def interrupted(row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        page_of(out, drawn_scores(), train_render=interrupted)
    assert out.read_bytes() == before
    assert list(out.parent.iterdir()) == [out]


BEYOND = {"features": np.full((3, 6), 3e38), "method": GradDot()}


def rendering(content: Any) -> dict[str, Any]:
    return {"train_render": lambda row: content}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"targets": [4]}, InvalidInputError, "no target 4"),
        ({"targets": []}, InvalidInputError, "one or more different numbers from 0 to 3"),
        ({"targets": [1, -3]}, InvalidInputError, "different numbers"),
        ({"k": 0}, InvalidInputError, "k must be an integer of at least 1"),
        ({"figures": ["histgram"]}, InvalidInputError, "histogram"),
        ({"out": Path()}, InvalidInputError, r"is a folder. Name a file in it"),
        (
            {"out": Path(__file__, "a.html")},
            InvalidInputError,
            r"a\.html cannot be written: .*Name a file in a folder",
        ),
        ({"out": Path("/proc/a.html")}, InvalidInputError, r"/proc/a\.html cannot be written: "),
        ({"scores": BEYOND}, NonFiniteError, "score is NaN"),
    ],
)
def test_what_cannot_be_shown_is_refused_by_name(out, arguments, error, message):
    scores = drawn_scores(**arguments.pop("scores", {}))
    with pytest.raises(error, match=message):
        page_of(**{"out": out, "scores": scores, **arguments})
    assert not list(out.parent.iterdir())


UNSHOWN = [
    (3.5, "gave a float. Expected an image"),
    (np.zeros((2, 3, 5)), "shape (2, 3, 5). Expected (H, W)"),
    (np.zeros((0, 3)), "shape (0, 3)"),
    (np.zeros((2, 2), complex), "complex128. Expected real"),
    ([("a", 1), "bc"], "gave a sequence with 'bc'. Expected (token, weight) pairs"),
    ([("a", "b")], "gave a sequence with ('a', 'b'). Expected (token, weight) pairs"),
    (np.full((2, 2), np.nan), "NaN or infinite"),
    ([("a", float("inf"))], "NaN or infinite"),
    (OSError("<b>no row</b>"), "OSError: <b>no row</b>"),
]


@pytest.mark.parametrize(("content", "said"), UNSHOWN, ids=[said for _, said in UNSHOWN])
def test_a_row_that_cannot_be_shown_has_the_error_in_its_place(out, caplog, content, said):
    scores = drawn_scores()
    broken = scores.top(1).indices[:, 0].tolist()

    def render(row):
        if row in broken and isinstance(content, Exception):
            raise content
        return content if row in broken else f"this is {row};"

    page = page_of(out, scores, k=2, train_render=render)
    assert set(page.rows()) > set(broken)
    for row in page.rows():
        assert (f"train row {row} cannot be shown: " if row in broken else f"this is {row};") in page.text
    assert said in page.text
    assert [said in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("module", ["jinja2", "PIL", "matplotlib"])
def test_a_missing_package_is_named_with_its_extra_before_scores_are_read(out, monkeypatch, module):
    scores, arguments = drawn_scores(), {"figures": ("histogram",) if module == "matplotlib" else ()}
    monkeypatch.setitem(sys.modules, module, None)
    if module == "PIL":  # whether there are images is known when rows are rendered
        arguments |= rendering(np.zeros((2, 2)))
    else:
        monkeypatch.setattr(Scores, "tiles", lambda *_: pytest.fail("the scores were read"))
    said = rf"needs {module}.*pip install 'trak-lite\[report\]'"
    with pytest.raises(MissingPackageError, match=said) as caught:
        write_report(scores, out, **arguments)
    assert isinstance(caught.value, ImportError)
    assert caught.value.name == module
    assert not list(out.parent.iterdir())


IN_A_NEW_PROCESS = """
import sys, tempfile
from trak_lite.report import write_report
from trak_lite.errors import MissingPackageError
from report_cases import drawn_scores
names, out = ["jinja2", "markupsafe", "PIL", "matplotlib"], tempfile.mkdtemp() + "/r.html"
print(any(name in sys.modules for name in names))
sys.modules.update(dict.fromkeys(names))
for shown in (drawn_scores(), drawn_scores().gallery()):
    try:
        shown._repr_html_()
    except MissingPackageError as error:
        print(error)
del sys.modules["jinja2"], sys.modules["markupsafe"]
write_report(drawn_scores(), out, figures=(), train_render=lambda row: {"n": row})
del sys.modules["PIL"], sys.modules["matplotlib"]
write_report(drawn_scores(), out, figures=["histogram"])
print("matplotlib" in sys.modules, "matplotlib.pyplot" in sys.modules)
"""


def test_a_new_process_imports_packages_when_they_are_needed_and_names_what_is_missing(tmp_path):
    """Without figures and images jinja2 is enough; matplotlib is imported to draw, without its global figures."""
    (tmp_path / "script.py").write_text(IN_A_NEW_PROCESS)
    process = start_script(tmp_path / "script.py", output=tmp_path / "output")
    process.join()
    message = (
        "This needs jinja2, which is not installed. Install it with pip install 'trak-lite[report]' (in a checkout: "
        "pip install -e '.[report]')."
    )
    assert (tmp_path / "output").read_text().splitlines() == ["False", message, message, "True False"]
