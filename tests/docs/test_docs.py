"""The pages say what is so: their code runs, their figures were measured, what they link to is there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked import start_script
from late import script

from trak_lite.methods import METHODS
from trak_lite.modelout_functions import MODEL_OUTPUTS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {page.relative_to(DOCS / "pages").as_posix(): page for page in sorted((DOCS / "pages").rglob("*.md"))}
PAGES["scale.md"] = DOCS / "scale.md"
TEXTS = {name: page.read_text(encoding="utf-8") for name, page in PAGES.items()}
WITH_CODE = [name for name, text in TEXTS.items() if "```python\n" in text]
ROOMS = re.findall(r"^::: ([\w.]+)$", "\n".join(TEXTS.values()), re.M)


def python_of(text: str) -> str:
    """The Python blocks of a page, each line where it stands on the page."""
    inside, lines = False, []
    for line in text.splitlines():
        if line.startswith("```"):
            inside, line = line == "```python", ""
        lines.append(line if inside else "")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: str, tmp_path: Path) -> None:
    """In a process of its own, a warning being an error; classes of tests on the page are run too."""
    script = tmp_path / f"page_{page.replace('/', '_').removesuffix('.md')}.py"
    script.write_text(python_of(TEXTS[page]), encoding="utf-8")
    if "\nclass Test" in TEXTS[page]:
        arguments = ["-q", "-W", "error", "-c", os.devnull, "-p", "no:cacheprovider", str(script)]
        script = tmp_path / "tests_of_a_page.py"
        script.write_text(f"import pytest\n\nraise SystemExit(pytest.main({arguments}))\n", encoding="utf-8")

    process = start_script(script, output=tmp_path / "printed.txt", folder=tmp_path, warnings_are_errors=True)
    process.join()

    assert process.exitcode == 0, (tmp_path / "printed.txt").read_text(encoding="utf-8")[-4000:]


LOADED = re.compile(
    r"<(?:script|img|iframe)\b[^>]*\ssrc=\"?(?:https?:|//)|<link\b[^>]*\bstylesheet[^>]*https?:"
)
SOURCES = {
    path.relative_to(ROOT).as_posix().removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
    for path in (ROOT / "trak_lite").rglob("*.py")
}


def test_the_site_builds_strictly_is_complete_and_asks_nobody_else_for_anything(tmp_path: Path) -> None:
    """Built once: every public name has its place, formulas are drawn, no page loads a thing from elsewhere."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install '.[dev]'")
    command = ["mkdocs", "build", "--strict", "-q", "-f", DOCS / "mkdocs.yml", "-d", tmp_path]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([sys.executable, "-m", *command], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]

    pages = {page: page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")}
    html = "".join(pages.values())
    check_public_names(html)
    check_notebooks({page.name: text for page, text in pages.items() if page.parent.name == "notebooks"})
    assert html.count("<math") >= sum(len(re.findall(r"^\$\$$", text, re.M)) // 2 for text in TEXTS.values())
    assert not re.search(r"class=\"arithmatex\"|:(?:class|meth|func|data|math):`", html)
    assert [str(page) for page, text in pages.items() if LOADED.search(text)] == []


def check_notebooks(pages: dict[str, str]) -> None:
    """Each is a page with its outputs: printed text, and as many pictures as are stored."""
    stored = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.ipynb")}
    assert sorted(pages) == sorted(f"{name}.html" for name in stored)
    for name, text in stored.items():
        page = pages[f"{name}.html"]
        assert len(re.findall(rf'src="{name}-\d+\.png"', page)) == text.count('"image/png"')
        assert ".ipynb.txt" not in page
    assert "Noah lives in Rome.       comes from row 65" in pages["tracing_a_sentence.html"]


def check_public_names(html: str) -> None:
    rooms = {name: source for name in ROOMS if (source := SOURCES.get(name)) is not None}
    assert {"trak_lite", "trak_lite.errors", "trak_lite.projectors", "trak_lite.store"} <= set(rooms)
    for room, source in rooms.items():
        for name in exported(source):
            places = (f'id="{room}.{name}"', f'id="{room}.{name}.{name}"')  # a function named as its module
            assert name == "__version__" or any(place in html for place in places), f"{room}.{name}"


def exported(source: Path) -> list[str]:
    """``__all__`` of a module, which is not imported: it may need an optional package."""
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{source} has no __all__")


def test_tables_of_figures_are_what_was_measured() -> None:
    tables = script(DOCS / "tables.py")
    found = [match[1] for text in TEXTS.values() for match in tables.MARKED.finditer(text)]

    assert sorted(found) == sorted(tables.TABLES)
    for name, text in TEXTS.items():
        assert tables.refreshed(text) == text, f"{name} is out of date. Run: python docs/tables.py"


PEERS = ("traker", "dattri", "kronfluence", "captum", "bergson")


def test_what_the_page_says_of_checkpoints_and_damping_holds_in_the_measured_table() -> None:
    """A run of ten checkpoints beats its final model, and an undamped kernel is behind."""
    parts = json.loads((ROOT / "benchmarks/results/lds.json").read_text())["parts"]
    lds = {
        key: part["lds_all"]["mean"]
        for key, part in parts.items()
        if isinstance(part, dict) and "lds_all" in part and not key.split(" / ")[1].startswith(PEERS)
    }
    pairs = [key for key in lds if key.endswith(", run") and f"{key[:-5]}, final model" in lds]
    undamped = [key for key in lds if key.endswith(" / undamped TRAK, run")]

    assert len(pairs) > 10
    for key in pairs:
        assert lds[key] > lds[f"{key[:-5]}, final model"], key
    assert len(undamped) > 5
    for key in undamped:
        assert lds[key.replace("undamped TRAK", "default")] > lds[key]


LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#[\w-]+)?(?: \"([^\"]*)\")?\)")


@pytest.mark.quick
@pytest.mark.parametrize("page", list(TEXTS))
def test_what_a_page_links_to_is_there(page: str) -> None:
    """Files, and the test that a link is titled with."""
    for link, title in LINK.findall(TEXTS[page]):
        target = (PAGES[page].parent / link).resolve()
        assert target.is_file(), link
        if title:
            defined = rf"^(?:    )?(?:def|class) {re.escape(title)}\b"
            assert re.search(defined, target.read_text(), re.M), title


def test_claims_about_ourselves_in_the_comparison_lead_to_a_test() -> None:
    rows = [line.split("|")[1:-1] for line in TEXTS["comparison.md"].splitlines() if line.startswith("| ")]
    assert len(rows) > 20
    for what, ours, *others in rows:
        if what.strip():
            assert len(others) == 7
            unclaimed = ours.strip() in ("no", "not yet", "digits, Python's library")
            assert unclaimed or "](../../tests/" in ours, what


def test_old_and_new_names_of_the_porting_page_can_be_imported() -> None:
    pytest.importorskip("trak", reason="traker is not installed")
    table = re.findall(r"^\| `(trak\.[\w.]+)` \| `(trak_lite[\w.]+)` \|", TEXTS["porting.md"], re.M)

    assert len(table) > 20
    for pair in table:
        for dotted in pair:
            module, _, name = dotted.rpartition(".")
            assert hasattr(importlib.import_module(module), name), dotted


def test_the_page_of_tasks_names_every_task() -> None:
    assert [name for name in MODEL_OUTPUTS if f"`{name}`" not in TEXTS["tasks.md"]] == []


def test_readme_and_page_name_every_method() -> None:
    names = [*METHODS, "Unrolled", "Mean"]
    assert "**Twelve [methods]" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(names) == 12
    for page in ("README.md", "docs/pages/methods.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert [name for name in names if not re.search(rf"`{name}[`(]", text)] == []
