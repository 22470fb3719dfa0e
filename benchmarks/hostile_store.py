"""The hostile store: a store from a stranger, changed at every place, and every command on it.

Each case changes a copy of a store and runs ``check``, ``check --repair``, ``inspect``, ``report``, ``score`` and the
start of ``serve`` in a process of its own. The kinds of cases:

- ``links``: every file and folder is replaced by a symbolic link to a copy of it outside of the store, by a hard link
  (files), by a pipe, by a socket, and by a folder (files) or a file (folders);
- ``values``: every value in every ``zarr.json``, and in every JSON entry, is replaced by values of other types, as it
  is and with its checksums made anew, as a stranger can;
- ``flips``: every bit of every file of metadata is flipped, one at a time;
- ``entries``: every hidden folder, and every file in one, is exchanged with that of another store of the same shape.

Counted are writes outside of the store, code that a store made run, results that differ without an error, exceptions
that are not trak_lite's, and commands that do not end. Each must be 0; the exit status is 1 otherwise. Where checksums
are made anew, a result may differ, because the store is then another one.

Run:  python -m benchmarks.hostile_store [--kinds links values flips entries] [--every N] [--minutes M] [--out FILE]
"""

from __future__ import annotations

import ast
import contextlib
import copy
import io
import json
import os
import random
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from benchmarks.measuring import parser_of
from trak_lite import Attributor
from trak_lite.cli import main as command_line
from trak_lite.cli.configs import read_config
from trak_lite.cli.records import RunRecord, last_record
from trak_lite.cli.serve.command import pages_of
from trak_lite.errors import TrakLiteError
from trak_lite.store import Column, TableSpec, check_store, open_store
from trak_lite.store.disk.documents import sealed

MUST_BE_ZERO = ("written outside", "code", "silent", "tracebacks", "hangs")
HANGS_AFTER = 60  # seconds of one case
RECORDS = ("runs", "run records, format 1")
SPEC = TableSpec(8, (Column("w", None, "float32"),), 4)
OTHERS: tuple[Any, ...] = ("x", 7, -1, 1.5, 10**30, True, None, [], [[1], "x"], {}, {"a": {"b": [None]}})
CODE = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "ctypes.dlopen"}
Case = tuple[str, Callable[[str, str], None], bool]
"""Name, the change of a store (its path, a folder outside of it), and whether checksums were made anew."""


torch.set_num_threads(1)  # of a forked process, more threads would wait for ever


def make(path: str, seed: int) -> None:
    """Make a store with rows, scores, columns, a derived array and a record of a run."""
    data = training_data(seed)
    made = attributor(path)
    made.featurize(data, columns={"label": [f"l{int(y)}" for y in data.tensors[1]]})
    made.score(data)
    with open_store(path, "r+") as store:
        store.create_table("extra", SPEC).put(range(6), {"w": np.arange(6.0)})  # of two chunks, one is staged
        store.cache("gram", "key", np.eye(2))
        record = {
            "command": "run",
            "time": "t",
            "config": {"path": path, "checkpoints": None},
            "recipe_digest": "0",
            "versions": {"torch": "2"},
        }
        put_records(store, [record])


def put_records(store: Any, records: Any) -> None:
    store.put_entry(*RECORDS, np.frombuffer(json.dumps(records).encode(), np.uint8).copy())


def training_data(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator)
    )


def attributor(path: str) -> Attributor:
    torch.manual_seed(0)
    return Attributor(
        torch.nn.Linear(6, 3), "image_classification", path, proj_dim=8, progress=False, device="cpu"
    )


# The commands. Each returns what it found, to be compared with that of the store before the change.


def run_cli(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            status = command_line(list(arguments))
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
    return int(status or 0), out.getvalue()


def scored(path: str) -> list[bytes]:
    found = attributor(path).score(training_data(0))
    return [np.asarray(tile).tobytes() for _, tile in found.tiles()]


def reported(path: str) -> tuple[int, bytes]:
    out = Path(f"{path}.html")
    status, said = run_cli("report", path, "--out", str(out))
    if status:
        raise TrakLiteError(said)
    return status, out.read_bytes()


def served(path: str) -> tuple[list[str], str]:
    record = last_record(path) or RunRecord("serve", "", {"path": path}, "", {}, path)
    pages = pages_of(read_config(record, [], runs=False))
    return pages.sets.names(), pages.start({}).replace(pages.token, "")


def written(path: str) -> bytes:
    """Finish the staged chunk, and write, replace and drop what a store holds besides."""
    with open_store(path, "r+") as store:
        table = store.open_table("extra")
        pending = table.pending()
        table.put(pending, {"w": pending.astype(np.float32)})
        found = np.asarray(table.read("w")).tobytes()
        for act in (
            lambda: store.cache("gram", "other", np.eye(3)),
            lambda: store.put_entry("more/x", "v1", np.eye(3)),
            lambda: store.drop_entry("more/x"),
            lambda: store.grow_table("extra", 10),
            lambda: store.create_table("a/b", SPEC),
            lambda: store.drop_table("a/b"),
            lambda: store.drop_table("extra"),
        ):
            with contextlib.suppress(TrakLiteError):
                act()
        return found


COMMANDS: dict[str, Callable[[str], Any]] = {
    "check": lambda path: run_cli("check", path)[0],
    "inspect": lambda path: run_cli("inspect", path) and None,
    "report": reported,
    "serve": served,
    "score": scored,
    "write": written,
    "repair": lambda path: run_cli("check", path, "--repair") and None,
}


def outcomes(path: str) -> dict[str, Any]:
    """Run all commands; return for each what it found, the text of a trak_lite error, or a ``traceback``."""
    ran: list[str] = []
    sys.addaudithook(lambda event, _: ran.append(event) if event in CODE else None)
    found: dict[str, Any] = {}
    for name, command in COMMANDS.items():
        try:
            found[name] = ("found", command(path))
        except TrakLiteError as error:
            found[name] = ("named", str(error)[:300])
        except BaseException as error:
            found[name] = ("traceback", f"{type(error).__name__}: {error}"[:300])
    found["code"] = ran
    return found


def in_child(work: Callable[[], Any], seconds: float) -> Any:
    """Return the result of a function in a forked process; ``None`` if it does not end in time."""
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if not child:
            status = 1
            try:
                signal.alarm(int(seconds) + 1)  # its default action ends the process
                file.write(repr(work()).encode())
                file.flush()
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        file.seek(0)
        if status == signal.SIGALRM:
            return None
        if status:
            return {"child": ("traceback", f"exit status {status}")}
        return ast.literal_eval(file.read().decode())


def snapshot(folder: str) -> list[tuple[Any, ...]]:
    """Return every file and folder with its content, mode and time of change."""
    found = []
    for path in sorted(Path(folder).rglob("*")):
        about = path.lstat()
        plain = stat.S_ISREG(about.st_mode)
        content = path.read_bytes() if plain else None
        found.append((str(path), content, about.st_mode, about.st_mtime_ns if plain else 0))
    return found


# The cases.


def places(root: str) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in Path(root).rglob("*"))


def linked(place: str, how: str) -> Callable[[str, str], None]:
    def change(path: str, outside: str) -> None:
        full, held = f"{path}/{place}", f"{outside}/held"
        shutil.move(full, held)
        if how == "link":
            os.symlink(held, full)
        elif how == "hard link":
            os.link(held, full)
        elif how == "pipe":
            os.mkfifo(full)
        elif how == "socket":
            with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(os.path.dirname(full)):
                made.bind(os.path.basename(full))
        elif how == "folder":
            os.mkdir(full)
        else:
            Path(full).write_bytes(b"other")

    return change


def links(root: str, other: str) -> Iterator[Case]:
    for place in places(root):
        is_folder = os.path.isdir(f"{root}/{place}")
        for how in (
            "link",
            "pipe",
            "socket",
            "file" if is_folder else "folder",
            *["hard link"] * (not is_folder),
        ):
            yield f"{place} -> {how}", linked(place, how), False


def nodes(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value in a JSON value."""
    if above:
        yield above
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from nodes(value[key], (*above, key))


def replaced(document: Any, node: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(document)
    inner = changed
    for key in node[:-1]:
        inner = inner[key]
    inner[node[-1]] = value
    return changed


def values(root: str, other: str) -> Iterator[Case]:
    for place in (place for place in places(root) if place.endswith("zarr.json")):
        document = json.loads(Path(root, place).read_bytes())
        for node in nodes(document):
            for value in OTHERS:
                changed = replaced(document, node, value)
                own = (
                    changed["attributes"].get("trak_lite")
                    if isinstance(changed.get("attributes"), dict)
                    else None
                )
                for anew in (False, True) if isinstance(own, dict) and "checksum" in own else (False,):
                    if anew:
                        changed = copy.deepcopy(changed)
                        changed["attributes"]["trak_lite"] = sealed(own)

                    def change(
                        path: str, _: str, place: str = place, text: str = json.dumps(changed)
                    ) -> None:
                        Path(path, place).write_text(text)

                    yield f"{place} {'/'.join(map(str, node))} = {value!r}{', sealed' * anew}", change, anew
    yield from entry_values(root)


def entry_values(root: str) -> Iterator[Case]:
    with open_store(root) as store:
        record = json.loads(np.asarray(store.entry(*RECORDS)).tobytes())
    for node in nodes(record):
        for value in OTHERS:
            changed = replaced(record, node, value)

            def change(path: str, _: str, changed: Any = changed) -> None:
                with open_store(path, "r+") as store:
                    put_records(store, changed)

            yield f"the record of a run, {'/'.join(map(str, node))} = {value!r}", change, True


def flips(root: str, other: str) -> Iterator[Case]:
    for place in places(root):
        if os.path.isfile(f"{root}/{place}") and (place.endswith((".json", ".log")) or place.startswith(".")):
            for bit in range(8 * os.path.getsize(f"{root}/{place}")):

                def change(path: str, _: str, place: str = place, bit: int = bit) -> None:
                    content = bytearray(Path(path, place).read_bytes())
                    content[bit // 8] ^= 1 << bit % 8
                    Path(path, place).write_bytes(content)

                yield f"{place}, bit {bit}", change, False


def entries(root: str, other: str) -> Iterator[Case]:
    for place in (place for place in places(root) if place.startswith(".")):
        if os.path.exists(f"{other}/{place}"):

            def change(path: str, _: str, place: str = place) -> None:
                if os.path.isdir(f"{path}/{place}"):
                    shutil.rmtree(f"{path}/{place}")
                    shutil.copytree(f"{other}/{place}", f"{path}/{place}")
                else:
                    shutil.copyfile(f"{other}/{place}", f"{path}/{place}")

            yield f"{place} of another store", change, False


KINDS = {"links": links, "values": values, "flips": flips, "entries": entries}


class Campaign:
    """Runs cases on copies of one store."""

    def __init__(self, folder: str) -> None:
        """Make two stores and note what every command finds in the first."""
        self.folder, self.root, self.other = folder, f"{folder}/whole.zarr", f"{folder}/other.zarr"
        make(self.root, 0)
        make(self.other, 1)
        self.path, self.outside = f"{folder}/run/store.zarr", f"{folder}/outside"
        self.counts: Counter[str] = Counter({name: 0 for name in MUST_BE_ZERO})
        self.broken: list[str] = []
        self._fresh()
        self.expected = outcomes(
            self.path
        )  # in this process, which then has imported all that the others need

    def _fresh(self) -> None:
        for folder in (os.path.dirname(self.path), self.outside):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.root, self.path)
        os.mkdir(self.outside)
        Path(self.outside, "zarr.json").write_text("notes of the user")

    def run(self, kind: str, case: Case) -> None:
        name, change, anew = case
        self._fresh()
        change(self.path, self.outside)
        if kind == "flips" and in_child(lambda: ("found", check_store(self.path).ok), HANGS_AFTER) == (
            "found",
            False,
        ):
            self.counts["flips: named"] += 1
            return
        before = snapshot(self.outside)
        found = in_child(lambda: outcomes(self.path), HANGS_AFTER)
        self.counts[f"{kind}: cases"] += 1
        if snapshot(self.outside) != before:
            self._break("written outside", kind, name)
        if found is None:
            self._break("hangs", kind, name)
            return
        for ran in found.pop("code", []):
            self._break("code", kind, f"{name}: {ran}")
        for command, (what, result) in found.items():
            self.counts[f"{kind}: {what}"] += 1
            if what == "traceback":
                self._break("tracebacks", kind, f"{name}: {command}: {result}")
            elif what == "found" and command != "check" and not anew and result != self.expected[command][1]:
                self._break("silent", kind, f"{name}: {command}")
        if kind != "links" and not anew and found.get("check") == ("found", 0):
            self.counts[f"{kind}: called sound, and harmless"] += 1

    def _break(self, what: str, kind: str, text: str) -> None:
        self.counts[what] += 1
        self.broken.append(f"{what}: {kind}: {text}")
        print(self.broken[-1], flush=True)


def main() -> int:
    parser = parser_of(__doc__, "hostile_store.json")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--every", type=int, default=1, help="run every N-th case of a kind")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of each kind, at most")
    options = parser.parse_args()
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(os.path.realpath(folder))
        for kind in options.kinds:
            started, cases = time.monotonic(), list(KINDS[kind](campaign.root, campaign.other))
            for case in random.Random(0).sample(cases, len(cases) // options.every):
                if time.monotonic() - started < 60 * options.minutes:
                    campaign.run(kind, case)
            counted = {
                name.partition(": ")[2]: count
                for name, count in sorted(campaign.counts.items())
                if name.startswith(kind)
            }
            broken = [line for line in campaign.broken if f": {kind}: " in line]
            zero = {name: sum(line.startswith(name) for line in broken) for name in MUST_BE_ZERO}
            known[kind] = {"of": len(cases), **counted, **zero, "broken": broken[:20]}
            options.out.write_text(json.dumps(known, indent=1) + "\n")
    print(json.dumps(known, indent=1))
    return 1 if campaign.broken else 0


if __name__ == "__main__":
    sys.exit(main())
