"""What the site needs beyond Markdown: files of the repository that pages link to, and formulas without a script."""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
FOLDER = "docs/pages"
PLAN = "docs/scale.md"  # a page that lies above the others, where people look for it
_LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def _target(source: str, link: str) -> str:
    """Return the path in the repository that a page's relative link leads to."""
    return posixpath.normpath(posixpath.join(FOLDER, posixpath.dirname(source), link))


def _place(target: str) -> str:
    """Return where the site has a copy: as plain text, but for pictures, so that a browser shows it."""
    return f"source/{target}" if target.endswith((".png", ".svg")) else f"source/{target}.txt"


def _moved_plan() -> str:
    """Return the plan with links as they would be if it lay among the pages."""
    text = (ROOT / PLAN).read_text(encoding="utf-8")
    return re.sub(r"(?<=\]\()pages/", "", re.sub(r"(?<=\]\()\.\./", "../../", text))


def on_files(files: Any, config: Any) -> Any:
    """Take the plan and every linked file outside the pages into the site, the latter under ``source/``."""
    files.append(File.generated(config, posixpath.basename(PLAN), content=_moved_plan()))
    for page in list(files.documentation_pages()):
        for link in _LINK.findall(page.content_string):
            target = _target(page.src_uri, link)
            is_page = target == PLAN or target.startswith(f"{FOLDER}/")
            if not is_page and files.get_file_from_path(_place(target)) is None:
                files.append(File.generated(config, _place(target), content=(ROOT / target).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that lead out of the pages at those copies."""

    def moved(match: re.Match[str]) -> str:
        target = _target(page.file.src_uri, match[1])
        if target.startswith(f"{FOLDER}/"):
            return match[1]
        place = posixpath.basename(PLAN) if target == PLAN else _place(target)
        return posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".")

    return _LINK.sub(moved, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Turn formulas into MathML, which every browser draws by itself."""

    def drawn(match: re.Match[str]) -> str:
        return convert(html.unescape(match[3]), display="block" if match[2] == "[" else "inline")

    return _FORMULA.sub(drawn, content)
