"""Cost of the store compared with plain NumPy: writing rows, reading them for scoring, opening a large table, memory.

Every figure is a ratio to another measurement of the same run, or a time beside its goal, on one thread. Files are
in the temporary folder (``TMPDIR``, whose file system is recorded) and in the page cache: the disk is not measured.

- write: CPU time per batch of 32 rows of 8 KiB, put and committed, divided by that of assignments to slices of a
  ``numpy.memmap``. The chunks have 64 MiB, as in a large table. Small chunks cost more per row, because each has a
  commit.
- read: CPU time of scoring a table against 1, 32 and 512 targets, divided by that of the same rows in memory: after
  it was read (``ratio``); through new maps without checksums, as in every pass over more than 256 MiB
  (``ratio_mapped_anew``); and at the first read, which compares every checksum. Also divided by that of a float32
  matrix product.
- open: time until every chunk of a finished table of 100,000 chunks is known, and the time of the next look.
- memory: growth of the resident set while a table is written and read, for two numbers of rows.

Run:  python -m benchmarks.bench_store [--rounds 5] [--parts write read ...]
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measuring import (
    cpu_seconds,
    file_system,
    memory_growth,
    parser_of,
    run_worker,
    save_parts,
    surroundings,
    wall_seconds,
)
from trak_lite.core.checksums import crc32c
from trak_lite.linalg.products import score_block
from trak_lite.run.tables import FEATURES, as_tensor, feature_table_spec
from trak_lite.store import AbstractRowTable, Manifest, TableSpec, ZarrFeatureStore
from trak_lite.store.disk.chunk_files import TableFiles
from trak_lite.store.disk.documents import identity_of, table_documents
from trak_lite.store.disk.records import CommitRecord

BATCH = 32
WRITE_WIDTH, WRITE_ROWS = 4096, 16384  # float16: rows of 8 KiB, 128 MiB
LARGE_CHUNK, SMALL_CHUNK = (
    8192,
    256,
)  # rows: of tables of half a million rows and more, and of 16,000 and fewer
READ_WIDTH, READ_ROWS = 2048, 32768  # float16: rows of 4 KiB, 128 MiB
TARGETS = (1, 32, 512)
CHUNKS = 100_000
TURNS = 5  # that count, after one that does not
MEMORY_ROWS = (49152, 98304)  # of 8 KiB in chunks of 1 MiB: 384 and 768 MiB
GOALS = {
    "write": "ratio at most 1.5",
    "read": "ratio at most 1.3 at 1 and 32 targets; 512 at the rate of a matrix product",
    "open": "seconds below 3",
    "memory": "the same at both numbers of rows",
}


def make_table(folder: str, spec: TableSpec) -> AbstractRowTable:
    """Return a new table, open for writing."""
    return ZarrFeatureStore.create(f"{folder}/run.zarr", Manifest({})).create_table("ckpt-0", spec)


def batch_of(spec: TableSpec) -> dict[str, np.ndarray]:
    """Return one batch of seeded rows, as the pipeline provides them."""
    draw = np.random.default_rng(0).standard_normal
    return {
        column.name: draw((BATCH,) if column.width is None else (BATCH, column.width)).astype(column.dtype)
        for column in spec.columns
    }


def fill(table: AbstractRowTable) -> None:
    """Write every row."""
    values = batch_of(table.spec)
    for start in range(0, table.spec.num_rows, BATCH):
        table.put(start, values)


def fill_memmap(path: str, rows: np.ndarray, count: int) -> None:
    """Write the same number of rows to a plain file."""
    mapped = np.memmap(path, rows.dtype, "w+", shape=(count, rows.shape[1]))
    for start in range(0, count, BATCH):
        mapped[start : start + BATCH] = rows


def write_round() -> dict[str, Any]:
    """Return microseconds of CPU per batch, of a memmap and of the store."""
    spec = replace(feature_table_spec(WRITE_ROWS, WRITE_WIDTH, "float16", {}), chunk_rows=LARGE_CHUNK)
    rows = batch_of(spec)[FEATURES]

    def bare(folder: str) -> Callable[[], None]:
        return lambda: fill_memmap(f"{folder}/bare", rows, WRITE_ROWS)

    def store(spec: TableSpec, folder: str) -> Callable[[], None]:
        table = make_table(folder, spec)
        return lambda: fill(table)

    kinds = (bare, partial(store, spec), partial(store, replace(spec, chunk_rows=SMALL_CHUNK)))
    turns = [[seconds_in_new_folder(kind) for kind in kinds] for _ in range(TURNS + 1)][1:]
    memmap, large, small = (statistics.median(each) for each in zip(*turns, strict=True))
    batches = WRITE_ROWS / BATCH * 1e-6
    return {
        "memmap_us": memmap / batches,
        "store_us": large / batches,
        "ratio": statistics.median(turn[1] / turn[0] for turn in turns),
        "store_us_chunks_of_256_rows": small / batches,
    }


def seconds_in_new_folder(prepare: Callable[[str], Callable[[], None]]) -> float:
    """Return the CPU seconds of a call that writes into a new folder, and remove the folder, which frees its pages."""
    with tempfile.TemporaryDirectory() as folder:
        return cpu_seconds(prepare(folder))


def score_all(blocks: list[Tensor] | AbstractRowTable, targets: Tensor) -> None:
    """Score every row against the targets, block by block, as ``Attributor.score`` does."""
    if isinstance(blocks, list):
        for block in blocks:
            score_block(block, targets)
    else:
        for _, rows in blocks.chunks(FEATURES):
            score_block(as_tensor(rows, torch.device("cpu")), targets)


def read_round() -> dict[str, Any]:
    """Return CPU seconds of scoring from memory and from the store, for each number of targets."""
    spec = feature_table_spec(READ_ROWS, READ_WIDTH, "float16", {})
    with tempfile.TemporaryDirectory() as folder:
        fill(make_table(folder, spec))
        return {str(count): read_figures(f"{folder}/run.zarr", count) for count in TARGETS}


def read_figures(path: str, count: int) -> dict[str, float]:
    """Return the figures of one number of targets."""
    targets = torch.randn(count, READ_WIDTH, generator=torch.Generator().manual_seed(0))
    reader = ZarrFeatureStore.open(path).open_table("ckpt-0")
    first = cpu_seconds(lambda: score_all(reader, targets))
    in_memory = [torch.from_numpy(rows.copy()) for _, rows in reader.chunks(FEATURES)]
    wide = [block.float() for block in in_memory]
    memory, store, anew, product = in_turn(
        lambda: score_all(in_memory, targets),
        lambda: score_all(reader, targets),
        lambda: score_all(ZarrFeatureStore.open(path, check="never").open_table("ckpt-0"), targets),
        lambda: [block @ targets.T for block in wide],
    )
    return {
        "memory_s": memory,
        "store_s": store,
        "float32_product_s": product,
        "ratio": store / memory,
        "ratio_mapped_anew": anew / memory,
        "ratio_first_time": first / memory,
        "ratio_to_float32_product": store / product,
    }


def in_turn(*calls: Callable[[], Any]) -> list[float]:
    """Return the median CPU seconds of each call, measured alternately after one warm-up turn."""
    seconds = [[cpu_seconds(call) for call in calls] for _ in range(TURNS + 1)]
    return [statistics.median(each) for each in zip(*seconds[1:], strict=True)]


def forge(folder: str, spec: TableSpec) -> None:
    """Write every chunk of a table directly, committed by one log, as many writers would have left it."""
    make_table(folder, spec)
    documents = table_documents("ckpt-0", Manifest({}).digest(), spec, {})
    identity = identity_of(documents[""]["attributes"]["trak_lite"])
    files = TableFiles(f"{folder}/run.zarr/ckpt-0", spec, root=folder, identity=identity)
    contents = {column.name: bytes(column.chunk_bytes) for column in files.columns}
    sums = {name: (len(content), crc32c(content)) for name, content in contents.items()}
    for column in files.columns:
        for chunk in range(CHUNKS):
            Path(column.visible(chunk)).write_bytes(contents[column.name])
    records = (CommitRecord(chunk, 1, spec.chunk_rows, sums, identity) for chunk in range(CHUNKS))
    Path(files.commits, f"{0:032x}.log").write_bytes(b"".join(record.encode() for record in records))


def open_round() -> dict[str, float]:
    """Return the seconds until 100,000 chunks are known, and until they are checked once more."""
    spec = replace(feature_table_spec(4 * CHUNKS, 4, "float16", {}), chunk_rows=4)
    with tempfile.TemporaryDirectory() as folder:
        forge(folder, spec)
        opened: list[AbstractRowTable] = []
        path = f"{folder}/run.zarr"
        seconds = wall_seconds(lambda: opened.append(ZarrFeatureStore.open(path).open_table("ckpt-0")))
        cpu = cpu_seconds(lambda: ZarrFeatureStore.open(path).open_table("ckpt-0"))
        writing = cpu_seconds(lambda: ZarrFeatureStore.open(path, "r+").open_table("ckpt-0"))
        assert opened[0].complete
        again = cpu_seconds(opened[0].committed_chunks)
    return {"seconds": seconds, "cpu_s": cpu, "cpu_s_for_writing": writing, "cpu_s_again": again}


def memory_round(num_rows: int) -> dict[str, float | None]:
    """Return the growth of the resident set in MiB while a table is written, and while it is read."""
    columns = feature_table_spec(num_rows, WRITE_WIDTH, "float16", {}).columns
    spec = TableSpec(num_rows, columns, 128)
    with tempfile.TemporaryDirectory() as folder:
        with memory_growth() as writing:
            fill(make_table(folder, spec))
        with memory_growth() as reading:
            score_all(
                ZarrFeatureStore.open(f"{folder}/run.zarr").open_table("ckpt-0"), torch.ones(1, WRITE_WIDTH)
            )
    return {"writing_mib": writing.mib, "reading_mib": reading.mib}


ROUNDS: dict[str, Callable[..., dict[str, Any]]] = {
    "write": write_round,
    "read": read_round,
    "open": open_round,
    "memory": memory_round,
}


def median_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of figures at the same position, with the range of each ratio."""
    found: dict[str, Any] = {}
    for key, first in rounds[0].items():
        values = [figures[key] for figures in rounds]
        found[key] = median_of(values) if isinstance(first, dict) else statistics.median(values)
        if key.startswith("ratio") and len(values) > 1:
            found[f"{key}_range"] = [min(values), max(values)]
    return found


def measure(part: str, rounds: int) -> dict[str, Any]:
    """Run the rounds of a part, each in a separate process."""
    if part == "memory":
        figures = {str(rows): [run(part, rows) for _ in range(rounds)] for rows in MEMORY_ROWS}
        return {rows: median_of(found) for rows, found in figures.items()}
    return median_of([run(part) for _ in range(rounds)])


def run(part: str, *arguments: int) -> dict[str, Any]:
    """Run one round in a separate process."""
    figures = run_worker(ROUNDS[part], *arguments)
    if "fails" in figures:
        raise RuntimeError(f"{part} failed: {figures['fails']}")
    return figures


def main() -> None:
    """Measure the parts, print the results, write JSON."""
    parser = parser_of(__doc__, "store.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="*", default=list(ROUNDS), choices=list(ROUNDS))
    args = parser.parse_args()
    here = {**surroundings(), "rounds": args.rounds}
    for part in args.parts:
        found = {
            "goal": GOALS[part],
            "file_system": file_system(tempfile.gettempdir()),
            **measure(part, args.rounds),
        }
        save_parts(args.out, here, {part: found})


if __name__ == "__main__":
    main()
