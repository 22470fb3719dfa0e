"""Mutants of the library, and which of them the tests notice.

A mutant is the library with one small change inside a function: ``<`` for ``<=``, ``+`` for ``-``, a condition negated,
a constant one larger, a call left out, ``None`` returned. All mutants stand in one copy of the checkout, each behind a
switch that an environment variable turns on. The suite runs once with every switch off and records which tests reach
which switch (also in processes that tests start). Then each mutant is tested with the tests that reach it, the shortest
first, until one fails. What survives is an expression that no test needs, or a change that makes no difference (a
larger cache, a bound of an estimate).

Mutants are drawn by a hash of their text: a file has the same mutants in every run. ``--against RESULTS`` tests the
mutants of an earlier run whose text the library still contains, which compares two versions of the tests.

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
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.measuring import parser_of, surroundings

ROOT = Path(__file__).parents[1]
ROOMS = ("gradient_computers", "store", "scoring", "featurizing", "linalg")
FIRST = 12  # tests that are tried before all others
SECONDS = 1200  # after which the tests of a mutant hang

SWITCH = '''"""Switches of mutants: which is on, and which tests reached which."""
import os

_on = int(os.environ.get("MUTANT", "-1"))
_log = os.environ.get("MUTANTS_LOG")
_seen = set()


def reached(number):
    if _log:
        entry = (number, os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0])
        if entry not in _seen:
            _seen.add(entry)
            with open(f"{_log}.{os.getpid()}", "a", encoding="utf-8") as file:
                file.write(f"{entry[0]}\\t{entry[1]}\\n")
    return number == _on
'''

TIMES = '''"""Writes the seconds and the outcome of every test."""
import os


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome == "failed":
        with open(os.environ["MUTANTS_TIMES"], "a", encoding="utf-8") as file:
            file.write(f"{report.duration:.3f}\\t{report.outcome}\\t{report.nodeid}\\n")
'''

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
    switched: str = ""  # the text that holds both behind a switch; ``{}`` is the condition
    result: str = ""  # "caught", "survived", "hangs" or "not reached"
    by: str = ""  # the test that failed first
    tests: int = 0  # that reach it
    seconds: float = 0.0


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    text = path.read_bytes()
    offsets = [0]
    for line in text.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))

    def span(node: ast.AST) -> tuple[int, int]:
        return (
            offsets[node.lineno - 1] + node.col_offset,
            offsets[node.end_lineno - 1] + node.end_col_offset,
        )

    for node in _code(ast.parse(text), inside=False):
        start, stop = span(node)
        before = text[start:stop].decode()
        for changed in _changes(node):
            after = ast.unparse(changed)
            if isinstance(node, ast.Return):
                first, last = span(node.value)
                switched = f"return (None if {{}} else ({text[first:last].decode()}))"
            elif isinstance(node, ast.stmt):
                if text[offsets[node.lineno - 1] : start].strip():
                    continue  # behind a colon or a semicolon
                switched = f"if not {{}}: {before}"
            else:
                switched = f"(({after}) if {{}} else ({before}))"
            yield Mutant(str(path.relative_to(ROOT)), node.lineno, before, after, start, stop, switched)


def _code(node: ast.AST, inside: bool) -> Iterator[ast.AST]:
    """Yield the nodes that compute in functions: no annotations, defaults, messages, imports or patterns."""
    if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr | ast.pattern):
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(
        ("logger.", "warnings.", "cast", "TypeVar")
    ):
        return
    if inside and isinstance(node, ast.expr | ast.stmt):
        yield node
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    skipped = {"annotation", "returns", "decorator_list", "bases", "args" if is_function else ""}
    for name, value in ast.iter_fields(node):
        if name in skipped or (name == "keywords" and isinstance(node, ast.ClassDef)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code(child, is_function or (inside and not isinstance(node, ast.ClassDef)))


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
    """Return ``num`` mutants, as many of each room, at random by a hash of their text.

    No two overlap, and no two of a file have the same text.
    """
    chosen: list[Mutant] = []
    for room in rooms:
        files = sorted((ROOT / "trak_lite" / room).rglob("*.py"))
        of_room: list[Mutant] = []
        for mutant in sorted((mutant for path in files for mutant in mutants_of(path)), key=_rank):
            known = any(_overlap(mutant, other) or _text(mutant) == _text(other) for other in of_room)
            if len(of_room) < num // len(rooms) and not known:
                of_room.append(mutant)
        chosen += of_room
    return chosen


def _text(mutant: Mutant) -> tuple[str, str, str]:
    return mutant.path, mutant.before, mutant.after


def _rank(mutant: Mutant) -> str:
    return hashlib.sha256(f"{mutant.path} {mutant.before} {mutant.after}".encode()).hexdigest()


def _overlap(one: Mutant, other: Mutant) -> bool:
    return one.path == other.path and one.start < other.stop and other.start < one.stop


def found_again(earlier: Mutant) -> Mutant | None:
    """Return a mutant of an earlier run in the library as it is now, or ``None`` if its text is gone."""
    path = ROOT / earlier.path
    same = [
        mutant
        for mutant in (mutants_of(path) if path.exists() else ())
        if (mutant.before, mutant.after) == (earlier.before, earlier.after)
    ]
    return min(same, key=lambda mutant: abs(mutant.line - earlier.line), default=None)


def switched_copy(mutants: list[Mutant], folder: Path) -> None:
    """Copy what git tracks into a folder, with every mutant behind its switch."""
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "trak_lite" / "_mutants.py").write_text(SWITCH)
    (folder / "mutant_times.py").write_text(TIMES)
    for name in {mutant.path for mutant in mutants}:
        text = (folder / name).read_bytes()
        numbered = [(mutant, number) for number, mutant in enumerate(mutants) if mutant.path == name]
        for mutant, number in sorted(numbered, key=lambda entry: -entry[0].start):
            condition = f"_mutant_reached({number})"
            switched = mutant.switched.replace("{}", condition, 1)
            text = text[: mutant.start] + switched.encode() + text[mutant.stop :]
        future = b"from __future__ import annotations\n"
        imported = b"from trak_lite._mutants import reached as _mutant_reached\n"
        if future not in text:
            raise ValueError(f"{name} has no {future.decode()!r}, behind which the switches are imported.")
        (folder / name).write_bytes(text.replace(future, future + imported, 1))


class Suite:
    """The tests of a copy: which of them reach a mutant, and what they say of it."""

    def __init__(self, copy: Path, folder: Path) -> None:
        self.copy = copy
        self.folder = folder
        self.seconds: dict[str, float] = {}
        self.reaching: dict[int, set[str]] = defaultdict(set)

    def record(self, options: list[str]) -> None:
        """Run the tests with every switch off."""
        times, log = self.folder / "times", self.folder / "log"
        command = ["-p", "mutant_times", *options]
        self._pytest(command, None, MUTANTS_TIMES=str(times), MUTANTS_LOG=str(log))
        self.read()

    def read(self) -> None:
        """Read what was recorded."""
        failed, skipped = set(), set()
        for line in (self.folder / "times").read_text(encoding="utf-8").splitlines():
            seconds, outcome, name = line.split("\t", 2)
            self.seconds[name] = max(float(seconds), self.seconds.get(name, 0.0))
            failed |= {name} if outcome == "failed" else set()
            skipped |= {name} if outcome == "skipped" else set()
        for path in self.folder.glob("log.*"):
            for line in path.read_text(encoding="utf-8").splitlines():
                number, name = line.split("\t", 1)
                if not name:  # reached when a module is imported: any test reaches it
                    self.reaching[int(number)].update(self.seconds)
                elif name in self.seconds:
                    self.reaching[int(number)].add(name)
        print(
            f"{len(self.seconds)} tests; left out: {len(skipped)} skipped, and failed {sorted(failed)}",
            flush=True,
        )
        for names in self.reaching.values():
            names -= failed | skipped

    def test(self, number: int, mutant: Mutant, at_most: float) -> Mutant:
        """Return a mutant with the result of the tests that reach it, as many as last ``at_most`` seconds."""
        names = sorted(self.reaching[number], key=lambda name: self.seconds[name])
        began = time.monotonic()
        found, spent, tried = "", 0.0, []
        for name in names:
            spent += self.seconds[name]
            tried += [name] if spent <= at_most or len(tried) < FIRST else []
        result = "survived" if names else "not reached"
        try:
            for part in (tried[:FIRST], tried[FIRST:]):
                found = found or (self._first_failure(number, part) if part else "")
        except subprocess.TimeoutExpired:
            result = "hangs"
        if found:
            result = "caught"
        seconds = round(time.monotonic() - began, 1)
        return replace(mutant, result=result, by=found, tests=len(tried), seconds=seconds, switched="")

    def _first_failure(self, number: int, names: list[str]) -> str:
        chosen = self.folder / f"tests{number}"
        chosen.write_text("".join(f"{name}\n" for name in sorted(names)), encoding="utf-8")
        done = self._pytest(["-x", "--tb=no", "-m", "", f"@{chosen}"], SECONDS, MUTANT=str(number))
        if done.returncode == 0:
            return ""
        failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failures[0].split(" - ")[0] if failures else f"exit status {done.returncode}"

    def _pytest(
        self, options: list[str], timeout: float | None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.copy), "OMP_NUM_THREADS": "1", **variables}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--no-header", *options],
            cwd=self.copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


def _stored(path: Path | None) -> list[Mutant]:
    """Return the mutants of an earlier run."""
    if path is None or not path.exists():
        return []
    return [Mutant(**entry) for entry in json.loads(path.read_text())["mutants"]]


def _prepared(arguments: argparse.Namespace, folder: Path) -> tuple[list[Mutant], Suite]:
    """Draw the mutants and record which tests reach them, or read both from the folder of an earlier run."""
    suite, drawn_before = Suite(folder / "copy", folder), folder / "mutants.json"
    if drawn_before.exists():
        mutants = _stored(drawn_before)
        suite.read()
        return mutants, suite
    earlier = _stored(arguments.against)
    found = [mutant for mutant in map(found_again, earlier) if mutant is not None]
    mutants = found or drawn(arguments.num, tuple(arguments.rooms))
    switched_copy(mutants, suite.copy)
    suite.record(["-n", str(arguments.workers), "-m", arguments.markers, *arguments.tests])
    drawn_before.write_text(json.dumps({"mutants": [asdict(mutant) for mutant in mutants]}))
    return mutants, suite


def main() -> None:
    """Test mutants and print how many were noticed."""
    parser = parser_of(__doc__)
    parser.add_argument("--num", type=int, default=150)
    parser.add_argument("--rooms", nargs="*", default=ROOMS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--at-most", type=float, default=240, help="seconds of tests for one mutant")
    parser.add_argument("--tests", nargs="*", default=[], help="what pytest records; the standard tier")
    parser.add_argument("--markers", default="not campaign", help="the tiers that pytest records")
    parser.add_argument(
        "--keep", type=Path, required=True, help="JSON of results; a run adds what is missing"
    )
    parser.add_argument("--against", type=Path, help="an earlier run, whose mutants are tested again")
    parser.add_argument("--folder", type=Path, help="keeps the copy and what was recorded, for a next run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        mutants, suite = _prepared(arguments, folder)
        done = _stored(arguments.keep)
        known = {(mutant.path, mutant.line, mutant.before, mutant.after) for mutant in done}

        def run(entry: tuple[int, Mutant]) -> None:
            done.append(suite.test(*entry, arguments.at_most))
            report = {"machine": surroundings(), "mutants": [asdict(mutant) for mutant in done]}
            arguments.keep.write_text(json.dumps(report, indent=1) + "\n")
            print(
                f"{done[-1].result:11} {done[-1].path}:{done[-1].line} {done[-1].before!r} -> {done[-1].after!r}",
                flush=True,
            )

        with ThreadPoolExecutor(arguments.workers) as pool:
            missing = [
                (number, mutant)
                for number, mutant in enumerate(mutants)
                if (mutant.path, mutant.line, mutant.before, mutant.after) not in known
            ]
            list(pool.map(run, missing))
    for room in arguments.rooms:
        of_room = [mutant for mutant in done if mutant.path.startswith(f"trak_lite/{room}/")]
        noticed = sum(mutant.result in ("caught", "hangs") for mutant in of_room)
        print(f"{room}: {noticed} of {len(of_room)} noticed")


if __name__ == "__main__":
    main()
