"""Measures and draws the architecture: ``python docs/architecture.py [FOLDER] [--draw | --trace]``.

FOLDER is a checkout, by default this one. A *room* of a package is a module or a subpackage directly in it, including
its ``__init__``. An *arrow* leads from a room to another room that any of its files imports, anywhere in the file.
The *floor* of a room is the number of rooms on the longest chain of arrows down from it. A *circle* is a set of rooms
that import each other; they have the same floor. An arrow is *upward* if its end is not below its start in the list
``FLOORS`` of tests/test_architecture.py.

``--draw`` writes docs/images/architecture.svg: the rooms on the floors of that list, without arrows that a chain of
other arrows implies. ``--trace`` runs ``featurize`` on one batch, ``score`` on five targets and ``featurize`` on many
batches, and counts the files of the package that the first two and one of the many batches execute, the calls from one
file to another, and the depth of these calls.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import NamedTuple

PACKAGE = "trak_lite"
_WIDTH, _STEP = 1100, 78


class Drawing(NamedTuple):
    """The rooms of one package and their imports of each other."""

    arrows: dict[str, set[str]]
    """Rooms that each room imports."""

    @property
    def circles(self) -> list[set[str]]:
        """Sets of rooms that import each other, directly or through others."""
        below = {room: self._reached(room) for room in self.arrows}
        found = {frozenset(r for r in below[room] if room in below[r]) for room in self.arrows}
        return [set(circle) for circle in sorted(found, key=sorted) if circle]

    @property
    def floors(self) -> dict[str, int]:
        """Floor of every room, from 1."""
        circle_of = {room: circle for circle in self.circles for room in circle}
        known: dict[str, int] = {}

        def floor(room: str) -> int:
            if room not in known:
                circle = circle_of.get(room, {room})
                below = set().union(*(self.arrows[one] for one in circle)) - circle
                known.update(dict.fromkeys(circle, 1 + max(map(floor, below), default=0)))
            return known[room]

        return {room: floor(room) for room in self.arrows}

    def _reached(self, start: str) -> set[str]:
        reached: set[str] = set()
        waiting = list(self.arrows[start])
        while waiting:
            room = waiting.pop()
            if room not in reached:
                reached.add(room)
                waiting += self.arrows[room]
        return reached


def modules(root: Path) -> dict[str, Path]:
    """Return every module of the package by its dotted name."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return the syntax of a file."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of the package that a file imports, anywhere in the file."""
    for node in nodes(path):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in inner]
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module"
        ):
            names = [given.value for given in node.args if isinstance(given, ast.Constant)]
        yield from (name for name in names if name in known)


def drawn(package: str, known: dict[str, Path], imports: dict[str, set[str]]) -> Drawing:
    """Return the drawing of one package."""

    def room(module: str) -> str:
        return module.removeprefix(package).strip(".").partition(".")[0] or "__init__"

    inside = [module for module in known if module == package or module.startswith(f"{package}.")]
    arrows: dict[str, set[str]] = {room(module): set() for module in inside}
    for module in inside:
        arrows[room(module)] |= {room(other) for other in imports[module] if other in inside}
    return Drawing({start: ends - {start} for start, ends in arrows.items()})


def constant(path: Path, name: str) -> list[set[str]]:
    """Return a literal that a file assigns to a name at its top level."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    return []


def methods(path: Path, name: str) -> dict[str, int]:
    """Return the number of arguments of every public method of a class and of its constructor."""
    classes = (
        node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)
    )
    (body,) = (node.body for node in classes if node.name == name)
    found = {}
    for node in body:
        public = isinstance(node, ast.FunctionDef) and (node.name == "__init__" or node.name[0] != "_")
        if public and not any(
            ast.unparse(mark).endswith(("property", "setter")) for mark in node.decorator_list
        ):
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            found[node.name] = sum(one is not None for one in every) - 1
    return found


def floors_of(root: Path) -> list[set[str]]:
    """Return the rooms by floor, from the ground up."""
    return constant(root / "tests" / "test_architecture.py", "FLOORS")


def reduced(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the arrows without those that a chain of others implies."""
    whole = Drawing(arrows)
    below = {room: whole._reached(room) for room in arrows}
    return {
        room: {end for end in ends if not any(end in below[other] for other in ends - {end})}
        for room, ends in arrows.items()
    }


def svg(root: Path) -> str:
    """Return the drawing of the whole package."""
    known = modules(root)
    imports = {module: set(imported(path, known)) for module, path in known.items()}
    arrows = drawn(PACKAGE, known, imports).arrows
    floors = [sorted(rooms) for rooms in floors_of(root)]
    height = _STEP * len(floors) + 20
    place = {
        room: (_WIDTH * (number + 0.5) / len(rooms), height - _STEP * (floor + 0.6))
        for floor, rooms in enumerate(floors)
        for number, room in enumerate(rooms)
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="13" text-anchor="middle">',
        "<title>Rooms of trak_lite: each imports only from rooms below it</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for room, ends in sorted(reduced(arrows).items()):
        for end in sorted(ends):
            (x1, y1), (x2, y2) = place[room], place[end]
            curve = f"{x1:.0f} {y1 + 45:.0f} {x2:.0f} {y2 - 45:.0f} {x2:.0f} {y2 - 13:.0f}"
            parts.append(f'<path d="M{x1:.0f} {y1 + 13:.0f}C{curve}" fill="none" stroke="#8aa0b4"/>')
    for room, (x, y) in place.items():
        wide = 9 * len(room) + 14
        parts.append(
            f'<rect x="{x - wide / 2:.0f}" y="{y - 13:.0f}" width="{wide}" height="26" rx="4" fill="#eef3f7" '
            'stroke="#44617b"/>'
        )
        parts.append(f'<text x="{x:.0f}" y="{y + 5:.0f}" fill="#12212e">{room}</text>')
    return "\n".join([*parts, "</svg>", ""])


_REPLAYED = 300  # number of a batch that is neither recorded nor compared


class Journey(NamedTuple):
    """Files and calls of the package that a call executes."""

    files: int
    calls: int
    """Calls from one file of the package to another."""
    depth: int
    """Number of files in the deepest chain of calls."""


class Trace:
    """Counts the files and calls in a package's folder, in this thread, inside the block."""

    def __init__(self, folder: Path) -> None:
        self._inside = str(folder) + os.sep
        self._files: set[str] = set()
        self._chain: list[str] = []
        self._calls = self._depth = 0

    def __enter__(self) -> Trace:
        """Start to count."""
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        sys.setprofile(None)

    @property
    def journey(self) -> Journey:
        """What was counted."""
        return Journey(len(self._files), self._calls, self._depth)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        name, chain = frame.f_code.co_filename, self._chain
        if event not in ("call", "return") or not name.startswith(self._inside):
            return
        if event == "return":
            if chain:
                chain.pop()
            return
        self._files.add(name)
        self._calls += bool(chain) and chain[-1] != name
        chain.append(name)
        self._depth = max(self._depth, 1 + sum(one != other for one, other in pairwise(chain)))


def journeys(root: Path) -> dict[str, Journey]:
    """Trace ``featurize`` of one batch, ``score`` of five targets, and one of many batches, which is a replay.

    With default settings and a store on disk.
    """
    sys.path.insert(0, str(root))
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset, default_collate

    from trak_lite import Attributor

    def data(count: int) -> TensorDataset:
        return TensorDataset(torch.randn(count, 4), torch.randint(3, (count,)))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    with tempfile.TemporaryDirectory() as path:
        for turn in ("warm", "traced"):  # the first turn imports modules
            attributor = Attributor(
                model, "image_classification", f"{path}/{turn}.zarr", proj_dim=8, progress=False
            )
            with Trace(root / PACKAGE) as featurize:
                attributor.featurize(data(8))
            with Trace(root / PACKAGE) as score:
                attributor.score(data(5))
        replay, num_batches = Trace(root / PACKAGE), 0

        def collate(rows: list[object]) -> object:
            nonlocal num_batches
            num_batches += 1
            if num_batches == _REPLAYED:
                replay.__enter__()
            elif num_batches == _REPLAYED + 1:
                replay.__exit__()
            return default_collate(rows)

        attributor = Attributor(
            model,
            "image_classification",
            f"{path}/many.zarr",
            proj_dim=8,
            progress=False,
            batch_size=8,
            collate=collate,
        )
        attributor.featurize(data(8 * 2 * _REPLAYED))
    traces = {"featurize, one batch": featurize, "score, five targets": score, "a replayed batch": replay}
    return {name: trace.journey for name, trace in traces.items()}


def lines(folder: Path) -> int:
    """Return the lines of all Python files in a folder."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def main(root: Path) -> None:
    """Print the figures."""
    known = modules(root)
    imports = {module: set(imported(path, known)) for module, path in known.items()}
    packages = [module for module, path in known.items() if path.name == "__init__.py"]
    print(f"{'package':<42}{'rooms':>6}{'floors':>8}{'arrows':>8}  circles")
    for package in packages:
        drawing = drawn(package, known, imports)
        arrows = sum(map(len, drawing.arrows.values()))
        circles = "; ".join(", ".join(sorted(circle)) for circle in drawing.circles) or "none"
        print(f"{package:<42}{len(drawing.arrows):>6}{max(drawing.floors.values()):>8}{arrows:>8}  {circles}")

    floor_of = {room: number for number, rooms in enumerate(floors_of(root)) for room in rooms}
    house = drawn(PACKAGE, known, imports).arrows
    upward = [f"{a} -> {b}" for a in house for b in sorted(house[a]) if floor_of[a] <= floor_of[b]]
    print(f"\narrows upward: {len(upward)} {', '.join(upward)}")
    print(f"lines of the library: {lines(root / PACKAGE)}")
    print(f"lines of tests: {lines(root / 'tests')}")
    public = {package: len(constant(known[package], "__all__")) for package in packages}
    print(f"public names of packages: {sum(public.values())}")
    arguments = methods(known[f"{PACKAGE}.attributor"], "Attributor")
    print(f"public methods of Attributor: {len(arguments) - 1}, arguments with its constructor's: ", end="")
    print(sum(arguments.values()))


if __name__ == "__main__":
    options = [argument for argument in sys.argv[1:] if argument.startswith("--")]
    folders = [Path(argument).resolve() for argument in sys.argv[1:] if not argument.startswith("--")]
    here = folders[0] if folders else Path(__file__).resolve().parents[1]
    if "--draw" in options:
        (here / "docs" / "images" / "architecture.svg").write_text(svg(here), encoding="utf-8")
    elif "--trace" in options:
        for name, journey in journeys(here).items():
            print(f"{name}: {journey.files} files, {journey.calls} calls between files, {journey.depth} deep")
    else:
        main(here)
