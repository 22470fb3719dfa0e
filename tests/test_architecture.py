"""The map of the package: which room stands on which floor, and what may be imported where.

A room is a module or a folder directly in ``trak_lite/``; ``python docs/architecture.py`` measures all of them.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from late import script

import trak_lite

FLOORS = [
    {"errors", "types"},
    {"core"},
    {"data", "models", "projectors", "linalg", "store", "evaluation"},
    {"modelout_functions", "report"},
    {"gradient_computers", "methods", "run"},
    {"featurizing"},
    {"scoring"},
    {"selection", "unrolled", "traker"},
    {"retraining", "attributor", "utils"},
    {"cli", "integrations", "testing", "__init__"},
    {"__main__"},
]
"""From the ground up: a module imports only from lower floors or from its own room."""
FILE_OF = {
    "docstring_parser": "cli/keys.py",
    "jsonargparse": "cli/configs.py",
    "yaml": "cli/configs.py",
    "datasets": "integrations/huggingface.py",
    "peft": "integrations/huggingface.py",
    "transformers": "integrations/huggingface.py",
    "lightning": "integrations/lightning.py",
    "fast_jl": "projectors/dense/fast_jl.py",
    "triton": "projectors/*/triton*.py",
    "pandas": "scoring/frames.py",
    "xarray": "scoring/frames.py",
    "google_crc32c": "core/checksums.py",
    "fsspec": "store/remote/objects_fsspec.py",
    "jinja2": "report/page.py",
    "markupsafe": "report/page.py",
    "matplotlib": "report/figures.py",
    "PIL": "report/content.py",
    "obstore": "store/remote/objects_obstore.py",
    "pytest": "testing/*.py",
    "starlette": "cli/serve/app.py",
    "uvicorn": "cli/serve/server.py",
    "tqdm": "core/progress.py",
}
"""The only place of every package that is not imported everywhere."""
EVERYWHERE = {"torch", "numpy", "safetensors", "trak_lite"}

PACKAGE = Path(trak_lite.__file__).parent
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

architecture = script(PACKAGE.parent / "docs" / "architecture.py")
MODULES = architecture.modules(PACKAGE.parent)


@functools.cache
def files() -> dict[Path, list[ast.AST]]:
    """The nodes of every file; read by the first test, for all processes that collect would wait for it."""
    return {path.relative_to(PACKAGE): architecture.nodes(path) for path in MODULES.values()}


@functools.cache
def imports() -> dict[str, set[str]]:
    """The modules that each module imports."""
    return {module: set(architecture.imported(path, MODULES)) for module, path in MODULES.items()}


@pytest.fixture(autouse=True, scope="module")
def _forgotten() -> Iterator[None]:
    """Some million nodes would be visited by every later collection of garbage."""
    yield
    files.cache_clear()
    architecture.nodes.cache_clear()


def imported_names(path: Path) -> set[str]:
    """The modules that a file imports, anywhere in it."""
    nodes = files()[path]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {"." * one.level + (one.module or "") for one in nodes if isinstance(one, ast.ImportFrom)}


def test_a_room_imports_only_from_lower_floors() -> None:
    house = architecture.drawn("trak_lite", MODULES, imports()).arrows
    assert set(house) == set(FLOOR_OF)
    assert [(a, b) for a in house for b in house[a] if FLOOR_OF[b] >= FLOOR_OF[a]] == []


def test_no_package_has_a_circle() -> None:
    packages = [module for module, path in MODULES.items() if path.name == "__init__.py"]
    circles = {package: architecture.drawn(package, MODULES, imports()).circles for package in packages}
    assert {package: found for package, found in circles.items() if found} == {}


def test_every_import_is_a_statement_and_names_its_module_in_full() -> None:
    for path, nodes in files().items():
        assert not any(name.startswith(".") for name in imported_names(path)), path
        words = {getattr(node, "id", getattr(node, "attr", "")) for node in nodes}
        assert not words & {"import_module", "__import__"}, path


def test_other_packages_are_imported_in_their_one_place() -> None:
    for path in files():
        for name in {name.partition(".")[0] for name in imported_names(path)} - EVERYWHERE:
            if name not in sys.stdlib_module_names:
                assert fnmatch(path.as_posix(), FILE_OF[name]), f"{path} imports {name}"


def test_the_library_prints_nothing_and_configures_no_logging() -> None:
    for path, nodes in files().items():
        called = [node.func for node in nodes if isinstance(node, ast.Call)]
        calls = {getattr(function, "id", getattr(function, "attr", "")) for function in called}
        assert not calls & {"print", "basicConfig"}, path


def test_the_store_works_without_torch() -> None:
    for path in files():
        if path.parts[0] == "store":
            assert not any(name.partition(".")[0] == "torch" for name in imported_names(path)), path


FACTORY = re.compile(
    "arange|as_tensor|asarray|empty|empty_strided|eye|full|linspace|logspace|normal|ones|rand|randint|randn|randperm|"
    "range|scalar_tensor|tensor|tril_indices|triu_indices|zeros"
)


def test_every_tensor_names_its_device() -> None:
    # Where torch.set_default_device is a GPU, a tensor that does not would not meet the others.
    calls = [(path, node) for path, nodes in files().items() for node in nodes if isinstance(node, ast.Call)]
    for path, node in calls:
        named = {keyword.arg for keyword in node.keywords} & {"device", None}
        of_torch = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "torch"
        assert named or not of_torch or not FACTORY.fullmatch(node.func.attr) or path.parts[0] == "testing", (
            f"{path}:{node.lineno} makes a tensor on whatever device is the default"
        )


def test_the_drawing_is_that_of_the_imports() -> None:
    drawing = PACKAGE.parent / "docs" / "images" / "architecture.svg"
    assert drawing.read_text(encoding="utf-8") == architecture.svg(PACKAGE.parent), (
        "Draw it again: python docs/architecture.py --draw"
    )


def test_every_room_has_quick_tests() -> None:
    """``pytest -m quick`` looks into every room that has tests."""
    tests = PACKAGE.parent / "tests"
    quick = {
        path.relative_to(tests).parts[0]
        for path in tests.rglob("test_*.py")
        if "pytest.mark.quick" in path.read_text(encoding="utf-8")
    }
    rooms = {path.name for path in tests.iterdir() if path.is_dir() and any(path.rglob("test_*.py"))}
    assert rooms == quick & rooms


INSIDE, PRIVATE = 25, 36
"""Bounds, to be lowered and never raised: test files that import modules below a room, uses of private attributes."""
OTHERS = ("_exit", "_forward_hooks", "_forward_pre_hooks", "_repr_html_", "_replace", "_getframe", "_C")
"""Attributes that are public in spite of their names, or torch's."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OTHERS


def test_tests_use_public_names() -> None:
    # Only files with such a word are parsed: all of them take two seconds.
    likely = re.compile(
        r"from trak_lite\.\w+\.|from trak_lite.*import (\([^)]*|.*)\b_|(?<!\bself)(?<!\bcls)\._(?!_)"
    )
    inside, private = set(), []
    for path in (PACKAGE.parent / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if likely.search(text) else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trak_lite"):
                names = [*node.module.split("."), *(alias.name for alias in node.names)]
                if node.module.count(".") > 1 or any(map(is_private, names)):
                    inside.add(path)
            elif isinstance(node, ast.Attribute) and node.attr[0] == "_" and is_private(node.attr):
                own = getattr(node.value, "id", "") in ("self", "cls")
                private += [] if own else [f"{path}:{node.lineno} {node.attr}"]
    assert len(inside) <= INSIDE, sorted(map(str, inside))
    assert len(private) <= PRIVATE, private
