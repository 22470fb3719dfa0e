"""mkdocs hooks: copy files that pages link to, show notebooks as pages, and convert formulas to MathML."""

from __future__ import annotations

import base64
import html
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
FOLDER = "docs/pages"
PLAN = "docs/scale.md"  # a page outside the folder of pages, where people look for it
NOTEBOOKS = "examples"
_LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def _target(source: str, link: str) -> str:
    """Return the path in the repository that a page's relative link leads to."""
    return posixpath.normpath(posixpath.join(FOLDER, posixpath.dirname(source), link))


def _place(target: str) -> str:
    """Return the path of the copy in the site: a page, a plain text file, or a picture, so that browsers show it."""
    if target.endswith(".ipynb"):
        return f"notebooks/{Path(target).stem}.md"
    return f"source/{target}" if target.endswith((".png", ".svg")) else f"source/{target}.txt"


def _moved_plan() -> str:
    """Return the plan with its links relative to the folder of pages."""
    text = (ROOT / PLAN).read_text(encoding="utf-8")
    return re.sub(r"(?<=\]\()pages/", "", re.sub(r"(?<=\]\()\.\./", "../../", text))


def _notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook with its outputs as Markdown, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace(f"](../{FOLDER}/", "](../"))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![Output of the cell above]({name})")
            else:
                parts.append(f"```text\n{''.join(output.get('text', data.get('text/plain', '')))}\n```")
    return "\n\n".join(parts) + "\n", pictures


def on_files(files: Any, config: Any) -> Any:
    """Add the plan and the notebooks to the site, and other linked files outside the pages under ``source/``."""
    files.append(File.generated(config, posixpath.basename(PLAN), content=_moved_plan()))
    for path in sorted((ROOT / NOTEBOOKS).glob("*.ipynb")):
        text, pictures = _notebook(path)
        files.append(File.generated(config, _place(path.name), content=text))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    for page in list(files.documentation_pages()):
        for link in _LINK.findall(page.content_string):
            target = _target(page.src_uri, link)
            is_page = target == PLAN or target.startswith(f"{FOLDER}/")
            if not is_page and files.get_file_from_path(_place(target)) is None:
                files.append(File.generated(config, _place(target), content=(ROOT / target).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change links to files outside the pages into links to their copies."""

    def moved(match: re.Match[str]) -> str:
        target = _target(page.file.src_uri, match[1])
        if target.startswith(f"{FOLDER}/"):
            return match[1]
        place = posixpath.basename(PLAN) if target == PLAN else _place(target)
        return posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".")

    return _LINK.sub(moved, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Convert formulas to MathML, which browsers display without a script."""

    def drawn(match: re.Match[str]) -> str:
        return convert(html.unescape(match[3]), display="block" if match[2] == "[" else "inline")

    return _FORMULA.sub(drawn, content)
