"""Damaged bytes: any file of a store, changed in any way; and a reader, who is told right rows or an error by name.

The layout on disk is known here and nowhere else in this folder.
"""

import json
import os
import re
import resource
import shutil
import stat
import struct

import numpy as np
from fault_cases import NAME, Violated, check_rows, fill, final_scores, open_for_writing, undisturbed
from fault_power import tree

from trak_lite.errors import IncompleteStoreError, StoreError
from trak_lite.store import ZarrFeatureStore
from trak_lite.store import _failpoints as failpoints
from trak_lite.store._checksums import crc32c
from trak_lite.store.disk.documents import sealed
from trak_lite.store.disk.listing import entry_name

__all__ = ["failpoints", "sealed"]

SECONDS = 20  # that one example may take, on a busy machine too
ROOM = 512 << 20  # bytes that one example may allocate
HALF_DONE = failpoints.FAILPOINTS[failpoints.FAILPOINTS.index("column_written") :]


def kind_of(path):
    """Return what a file of a store is."""
    name, folder = os.path.basename(path), os.path.basename(os.path.dirname(path))
    if name == "zarr.json":
        return "metadata"
    if folder == ".stage":
        return "row log" if name.endswith(".log") else "staged rows"
    return {".commits": "commit log", ".cache": "derived array", ".tables": "list of tables"}.get(
        folder, "chunk"
    )


def build(case, state, pick, path):
    """Make a store in a state: ``complete``, ``half`` (chunks staged in part), ``killed`` (at any step) or ``new``."""
    if state == "killed":
        pid = os.fork()
        if pid == 0:
            os.environ["TRAK_LITE_FAILPOINT"] = f"{pick.choice(HALF_DONE)}:{pick.randint(1, case.num_chunks)}"
            fill(open_for_writing(path, case)[1], case, pick, lambda rows: None)
            os._exit(0)
        os.waitpid(pid, 0)
        return
    store, table = open_for_writing(path, case)
    with store:
        if state == "complete":
            fill(table, case, pick, lambda rows: None)
            final_scores(store, table)
        elif state == "half":
            for chunk in range(case.num_chunks):
                rows = list(case.rows_of(chunk))
                for row in pick.sample(rows, pick.randint(0, len(rows))):
                    table.put(row, case.values([row]))


HOWS = ["flip"] * 5 + ["cut"] * 3 + ["set", "empty", "extend", "remove", "insert", "zero", "foreign", "gone"]


def drawn_bytes(content, pick, others):
    """Return a name of what was done to the bytes, and the bytes; ``None`` where the file is gone."""
    size = len(content)
    at = pick.randrange(size + 1)
    piece = content[at : at + pick.choice([1, 4, 24, 512])]
    how = pick.choice(HOWS)
    if how == "flip" and size:
        changed = bytearray(content)
        for _ in range(pick.choice([1, 1, 1, 2, 8])):
            changed[pick.randrange(size)] ^= 1 << pick.randrange(8)
        return how, bytes(changed)
    changed = {
        "cut": content[:at],
        "set": content[:at] + pick.randbytes(len(piece)) + content[at + len(piece) :],
        "empty": b"",
        "extend": content + pick.choice([b"\n", bytes(512), pick.randbytes(24), content]),
        "remove": content[:at] + content[at + len(piece) :],
        "insert": content[:at] + pick.randbytes(pick.randint(1, 24)) + content[at:],
        "zero": content[:at] + bytes(len(piece)) + content[at + len(piece) :],
        "foreign": pick.choice(others),
        "gone": None,
    }
    return how, changed.get(how, b"")


def edited_json(content, pick, strange):
    """Return JSON with one value, somewhere inside, replaced or removed."""
    document = json.loads(content)
    places = []

    def visit(value):
        keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in list(keys):
            places.append((value, key))
            visit(value[key])

    visit(document)
    if not places:
        return json.dumps(pick.choice(strange)).encode()
    parent, key = pick.choice(places)
    if pick.random() < 0.2:
        del parent[key]
    else:
        parent[key] = pick.choice(strange)
    return json.dumps(document).encode()


STRANGE = (None, True, -1, 0, 1, 2, 3, 10**18, 10**30, 1.5, "", "x", "../x", "\ud800", "c" * 300)
STRANGE += ([], [[]], [1], {}, {"a": 1})
NOT_FINITE = (float("nan"), float("inf"))


def files_in(root):
    """Return the paths of the plain files of a store, sorted."""
    found = []
    for parent, _, names in os.walk(root):
        full = (os.path.join(parent, name) for name in names)
        found += [os.path.relpath(path, root) for path in full if stat.S_ISREG(os.lstat(path).st_mode)]
    return sorted(found)


def choose(pick, items):
    """Choose one of some things; of none there is no choice, and nothing is drawn."""
    if not items:
        raise LookupError("nothing is left to choose from")
    return pick.choice(items)


def _drawn_file(root, pick):
    """Return the kind and the path of a file, each kind being as likely as any other."""
    files = files_in(root)
    kind = choose(pick, sorted({kind_of(path) for path in files}))
    return kind, choose(pick, [path for path in files if kind_of(path) == kind])


def content_of(root, path):
    """Return what is in a file of a store; of one that was made giant before, only the beginning."""
    with open(os.path.join(root, path), "rb") as file:
        return file.read(1 << 20)


def damage(root, pick):
    """Do one thing to one file, as decay or a foreign hand might; return (kind of file, what, path)."""
    kind, path = _drawn_file(root, pick)
    files = {name: content_of(root, name) for name in files_in(root)}
    if kind == "metadata" and pick.random() < 0.5:
        how, changed = "edit", edited_json(files[path], pick, STRANGE)
    elif kind == "chunk" and pick.random() < 0.1:
        path = re.sub(r"c\.\d+", f"c.{pick.choice([0, 1, 7, 10**6, 10**17])}", path)
        how, changed = "foreign", pick.choice(list(files.values()))
    else:
        how, changed = drawn_bytes(files[path], pick, list(files.values()))
    replace(os.path.join(root, path), changed)
    return kind, how, path


def replace(path, content):
    """Give a file other bytes, or remove whatever is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)
    if content is not None:
        with open(path, "wb") as file:
            file.write(content)


def craft(root, pick):
    """Do what no decay does and a hostile hand might: valid checksums over nonsense, giant files, no files."""
    kind, path = _drawn_file(root, pick)
    full = os.path.join(root, path)
    hows = ["giant", "folder", "link", "pipe"]
    if kind in CRAFTED:
        hows += ["nonsense"] * 8
    how = pick.choice(hows)
    if how == "nonsense":
        replace(full, CRAFTED[kind](content_of(root, path), pick, root))
    elif how == "giant":
        os.truncate(full, 1 << 40)
    else:
        replace(full, None)
        {"folder": os.mkdir, "link": lambda name: os.symlink("/dev/zero", name), "pipe": os.mkfifo}[how](full)
    return kind, how, path


def _nonsense_metadata(content, pick, _root):
    if pick.random() < 0.3:
        return (
            b"[" * 100_000 if pick.random() < 0.5 else content.replace(b"null", b"[" * 9999 + b"]" * 9999, 1)
        )
    return edited_json(content, pick, NOT_FINITE)


def _nonsense_commits(content, pick, _root):
    lines = []
    for line in content.splitlines():
        body = line.rpartition(b"\t")[0]
        try:
            body = pick.choice(
                [edited_json(body, pick, STRANGE + NOT_FINITE), b"[" * 100_000, b"7", b"{}", body]
            )
        except ValueError:
            body = b"null"
        lines.append(body + b"\t%08x\n" % crc32c(body))
    return b"".join(lines)


def _row_seed(root):
    """Return what the checksums of the table's row records start with: that of its identity in the list of tables."""
    try:
        entry = json.loads(content_of(root, f".tables/{entry_name(NAME)}").rpartition(b"\t")[0])
        return crc32c(entry["identity"].encode())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return 1  # damaged before


def _nonsense_rows(content, pick, root):
    log = bytearray(content.ljust(64, b"\0")[:64])
    for _ in range(5):
        body = struct.pack("<QIII", *(pick.choice([0, 1, 2**31, 2**32 - 1]) for _ in range(4)))
        log += body + struct.pack("<I", crc32c(body, start=pick.choice([0, _row_seed(root)])))
    return bytes(log)


def _nonsense_array(content, pick, _root):
    size = 8 + int.from_bytes(content[:8], "little")
    header, rest = content[8:size], content[size:]
    dtype = pick.choice([b'"O"', b'"F99"', b'"F32"', b'"I64"', b"__import__('os')", b"(" * 90])
    header = pick.choice(
        [
            header.replace(b'"F64"', dtype, 1),
            re.sub(rb"\[\d+,\d+\]", b"[-1,%d]" % 2**70, header, count=1),
            re.sub(rb"\[0,\d+\]", b"[0,%d]" % 2**40, header),
            b"[" * 100_000,
            header[:20],
        ]
    )
    return len(header).to_bytes(8, "little") + header + rest


CRAFTED = {
    "metadata": _nonsense_metadata,
    "commit log": _nonsense_commits,
    "row log": _nonsense_rows,
    "derived array": _nonsense_array,
}


def look(root, case, before):
    """Read all there is, as a reader; return the errors that refused something."""
    refusals = []

    def probe(read):
        try:
            return read()
        except IncompleteStoreError:
            return None  # pending rows are no damage
        except StoreError as error:
            check_names_place(error, root)
            refusals.append(error)
            return None

    store = probe(lambda: ZarrFeatureStore.open(root))
    if store is None:
        return refusals
    with store:
        probe(store.table_names)
        probe(lambda: store.attributes(NAME))
        table = probe(lambda: store.open_table(NAME))
        if table is None:
            return refusals
        found, spec = table.spec, case.spec
        same = (found.num_rows, found.chunk_rows) == (spec.num_rows, spec.chunk_rows)
        if not same or not set(found.columns) <= set(
            spec.columns
        ):  # a column that is lost is missed on resuming
            raise Violated(f"the table opens with another shape: {found}", wrong=case.num_rows)
        done = probe(table.done)
        if done is not None and (done & ~before).any():
            raise Violated("rows are done that were never put", wrong=int((done & ~before).sum()))
        for chunk in probe(table.committed_chunks) or ():
            probe(lambda chunk=chunk: check_rows(table, case, [chunk]))
        rows = np.flatnonzero(done).tolist() if done is not None and done.any() else [0, case.num_rows - 1]
        for column in found.columns:
            probe(lambda column=column: check_some_rows(table, case, column.name, rows))
        if done is not None and done.all() and not refusals:
            scores = probe(lambda: final_scores(store, table))
            if scores is not None and scores.tobytes() != undisturbed(case)[0].tobytes():
                raise Violated("a reader's scores differ from those of an undisturbed run", unequal=1)
    return refusals


def check_some_rows(table, case, column, rows):
    """Raise if rows read one by one, also those of unfinished chunks, are not those that were put."""
    if table.read_rows(column, rows).tobytes() != case.values(rows)[column].tobytes():
        raise Violated(f"rows read alone are wrong in {column}", wrong=len(rows))


def check_names_place(error, root):
    """Raise unless an error names a path in the store."""
    if os.path.basename(root) not in str(error):
        raise Violated(f"an error does not name its place: {error}")


def built_states(folder, case, pick):
    """Return stores to damage, as (tree, mask of done rows)."""
    states = []
    for number, state in enumerate(["complete", "half", "killed", "killed", "new"]):
        root = os.path.join(folder, f"{number}.zarr")
        build(case, state, pick, root)
        with ZarrFeatureStore.open(root) as store:
            states.append((tree(root), store.open_table(NAME).done()))
        replace(root, None)
    return states


def limit_memory():
    """Let this process have no more memory than it has, and ``ROOM``."""
    with open("/proc/self/statm") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + ROOM, resource.RLIM_INFINITY))
