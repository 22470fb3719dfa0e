"""Mutants of the library, and which of them the tests notice.

A mutant is the library with one small change: ``<`` for ``<=``, ``+`` for ``-``, a condition negated, a constant one
larger, a call left out. Each is tested in a copy of the checkout: first the tests of its room, then, if these pass, all
tests that ``pytest`` runs by default. A mutant that no test notices survives: a test is missing, or the change makes no
difference (a larger cache, a bound of an estimate).

Mutants are drawn by a hash of their text: the same file has the same mutants in every run. ``--against RESULTS`` tests
the mutants of an earlier run whose text the library still contains, which compares two versions of the tests.

    python -m benchmarks.mutation --num 150 --workers 2 --keep mutants.json
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from benchmarks.measuring import surroundings

ROOT = Path(__file__).parents[1]
ROOMS = ("gradient_computers", "store", "scoring", "featurizing", "linalg")
SECONDS = 1800  # after which the tests of a mutant hang

_COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.MatMult: ast.Add,
}


@dataclass(frozen=True)
class Mutant:
    """One change of one file, and what the tests said of it."""

    path: str
    line: int
    before: str
    after: str
    start: int = 0  # offsets in the file, in bytes
    stop: int = 0
    result: str = ""  # "caught", "survived" or "hangs"
    by: str = ""  # the test that failed first
    seconds: float = 0.0


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    text = path.read_bytes()
    tree = ast.parse(text)
    offsets = [0]
    for line in text.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    for node in _code(tree):
        for changed in _changes(node):
            start = offsets[node.lineno - 1] + node.col_offset
            stop = offsets[node.end_lineno - 1] + node.end_col_offset
            # In parentheses: the text around it may bind more tightly. Statements have none.
            after = ast.unparse(changed)
            after = after if isinstance(node, ast.stmt) else f"({after})"
            yield Mutant(
                str(path.relative_to(ROOT)), node.lineno, text[start:stop].decode(), after, start, stop
            )


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that compute: no annotations, messages, imports or decorators."""
    if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr):
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(
        ("logger.", "warnings.", "cast", "TypeVar")
    ):
        return
    yield node
    skipped = {
        "annotation",
        "returns",
        "decorator_list",
        "bases",
        "keywords" if isinstance(node, ast.ClassDef) else "",
    }
    for name, value in ast.iter_fields(node):
        if name in skipped:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code(child)


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that a node is replaced by, one for each mutant."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            yield ast.Compare(node.left, [_COMPARISONS[type(op)]()], node.comparators)
        case ast.BinOp(op=op) if type(op) in _ARITHMETIC and not isinstance(
            node.left, ast.Constant | ast.List
        ):
            yield ast.BinOp(node.left, _ARITHMETIC[type(op)](), node.right)
        case ast.BoolOp(op=op):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value + 1)
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.AugAssign():
            yield ast.Pass()
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))


def drawn(num: int, rooms: tuple[str, ...]) -> list[Mutant]:
    """Return ``num`` mutants, as many of each room, at random by a hash of their text."""
    files = [path for room in rooms for path in sorted((ROOT / "trak_lite" / room).rglob("*.py"))]
    ranked = sorted((mutant for path in files for mutant in mutants_of(path)), key=_rank)
    chosen: list[Mutant] = []
    for room in rooms:
        of_room = [mutant for mutant in ranked if mutant.path.startswith(f"trak_lite/{room}/")]
        chosen += of_room[: num // len(rooms)]
    return chosen


def _rank(mutant: Mutant) -> str:
    return hashlib.sha256(f"{mutant.path} {mutant.before} {mutant.after}".encode()).hexdigest()


def found_again(earlier: Mutant) -> Mutant | None:
    """Return a mutant of an earlier run in the library as it is now, or ``None`` if its text is gone."""
    path = ROOT / earlier.path
    same = [
        mutant
        for mutant in (mutants_of(path) if path.exists() else ())
        if (mutant.before, mutant.after) == (earlier.before, earlier.after)
    ]
    return min(same, key=lambda mutant: abs(mutant.line - earlier.line), default=None)


def tested(mutant: Mutant, copy: Path) -> Mutant:
    """Return the mutant with the result of the tests in a copy of the checkout."""
    path = copy / mutant.path
    text = path.read_bytes()
    path.write_bytes(text[: mutant.start] + mutant.after.encode() + text[mutant.stop :])
    room = mutant.path.split("/")[1]
    began = time.monotonic()
    try:
        for folders in ([f"tests/{room}"], []):
            failed = _first_failure(copy, folders)
            if failed is not None:
                break
        result = ("survived", "") if failed is None else ("caught", failed)
    except subprocess.TimeoutExpired:
        result = ("hangs", "")
    finally:
        path.write_bytes(text)
    return replace(mutant, result=result[0], by=result[1], seconds=round(time.monotonic() - began, 1))


def _first_failure(copy: Path, folders: list[str]) -> str | None:
    """Run tests until one fails; return its name, or ``None`` if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--tb=no", *folders]
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode == 0:
        return None
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failures[0].split(" - ")[0] if failures else f"exit status {done.returncode}"


def main() -> None:
    """Test mutants and print how many were noticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=150)
    parser.add_argument("--rooms", nargs="*", default=ROOMS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--keep", type=Path, required=True, help="JSON of results; a run adds what is missing"
    )
    parser.add_argument(
        "--against", type=Path, help="results of an earlier run, whose mutants are tested again"
    )
    arguments = parser.parse_args()
    if arguments.against:
        earlier = [Mutant(**entry) for entry in json.loads(arguments.against.read_text())["mutants"]]
        chosen = [mutant for mutant in map(found_again, earlier) if mutant is not None]
    else:
        chosen = drawn(arguments.num, tuple(arguments.rooms))
    stored = json.loads(arguments.keep.read_text())["mutants"] if arguments.keep.exists() else []
    done = [Mutant(**entry) for entry in stored]
    known = {(mutant.path, mutant.before, mutant.after, mutant.line) for mutant in done}
    chosen = [
        mutant for mutant in chosen if (mutant.path, mutant.before, mutant.after, mutant.line) not in known
    ]
    copies: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.workers):
            copies.put(_copy(Path(folder) / str(number)))

        def run(mutant: Mutant) -> None:
            copy = copies.get()
            try:
                done.append(tested(mutant, copy))
            finally:
                copies.put(copy)
            report = {"machine": surroundings(), "mutants": [asdict(entry) for entry in done]}
            arguments.keep.write_text(json.dumps(report, indent=1) + "\n")
            print(
                f"{done[-1].result:9} {mutant.path}:{mutant.line} {mutant.before!r} -> {mutant.after!r}",
                flush=True,
            )

        with ThreadPoolExecutor(arguments.workers) as pool:
            list(pool.map(run, chosen))
    for room in arguments.rooms:
        of_room = [mutant for mutant in done if mutant.path.startswith(f"trak_lite/{room}/")]
        print(f"{room}: {sum(mutant.result != 'survived' for mutant in of_room)} of {len(of_room)} noticed")


def _copy(folder: Path) -> Path:
    """Copy what git tracks into a folder."""
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


if __name__ == "__main__":
    main()
