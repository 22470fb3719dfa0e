"""Recall and speed of ``score(..., k=, recall=)`` on a million train rows, against all rows and against faiss.

Two stores with 1024 float16 features per row (committed: ``digits`` at 1e6 rows, ``spectrum`` at 1e5):

- ``digits``: gradients of an MLP for a million shifted and noisy digits; the targets are digits that were not shifted.
- ``spectrum``: normal rows with the covariance and the norms of the gradients of a byte-level GPT for Python code. They
  have no clusters, and targets have no near neighbours: harder than gradients.

Scores are those of GaussNewton. The recall is measured on 600 targets, and compared with that of 100 others. faiss gets
the rows in the metric of the kernel, multiplied by q, so that its inner products are the scores, and its candidates are
scored again as those of the index are. ``seconds`` are CPU seconds on one thread for 100 targets (``one``: for one
target); an index searches both ends, faiss only the helpful one. ``read`` is the number of bytes of rows that are read.
``mib`` is the growth of the resident set at its highest; pages of mapped files count until the system needs the memory.

Run:  python -m benchmarks.bench_index [--folder FOLDER] [--rows 1000000]   (faiss-cpu is in the extra "benchmark")
"""

from __future__ import annotations

import sysconfig
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.lds.language import CHUNK, pretrained_gpt
from benchmarks.measuring import cpu_seconds, memory_growth, parser_of, run_worker, save_parts, surroundings
from trak_lite import Attributor, Rows
from trak_lite.featurizing.stored_settings import StoredSettings
from trak_lite.linalg.products import score_block
from trak_lite.methods import GaussNewton
from trak_lite.run.tables import FEATURES, LOSS_CURVATURE, OUT_TO_LOSS, feature_table_spec, target_path
from trak_lite.scoring import index
from trak_lite.scoring.matrix import top_and_bottom
from trak_lite.scoring.source import ScoreSource
from trak_lite.store import ZarrFeatureStore

WIDTH, MEASURED, TARGETS, BATCH = 1024, 600, 100, 8192
FACTORS = (4, 16, 64)
FAISS = ("SQfp16", "PQ128x4fs", "IVF1024,SQ8")
"""Factory strings of faiss: exact, product codes with fast scan, inverted lists."""
PROBES = 64
CPU = torch.device("cpu")


def digits(folder: str, num_rows: int) -> None:
    """Featurize a million digits and the targets."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16).float().view(-1, 1, 8, 8), torch.tensor(labels)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 10))
    chosen = torch.arange(num_rows) % 1000
    padded = nn.functional.pad(images, (1, 1, 1, 1))
    inputs = torch.empty(num_rows, 64)
    shifts = torch.randint(9, (num_rows,), generator=generator)
    for shift in range(9):
        here = shifts == shift
        top, left = divmod(shift, 3)
        inputs[here] = padded[chosen[here], :, top : top + 8, left : left + 8].flatten(1)
    inputs += 0.1 * torch.randn(inputs.shape, generator=generator)
    wanted = labels[chosen]
    wrong = torch.rand(num_rows, generator=generator) < 0.05
    wanted[wrong] = torch.randint(10, (int(wrong.sum()),), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for batch in torch.randperm(num_rows, generator=generator)[:400_000].split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[batch]), wanted[batch]).backward()
        optimizer.step()
    attributor = Attributor(
        model,
        "image_classification",
        f"{folder}/run.zarr",
        proj_dim=WIDTH,
        layout="joint",
        method="GaussNewton",
    )
    attributor.featurize(Rows(TensorDataset(inputs, wanted), name="digits", batch_size=256))
    held_out = TensorDataset(images[1000:1700].flatten(1), labels[1000:1700])
    for name, part in (("measured", range(MEASURED)), ("test", range(MEASURED, MEASURED + TARGETS))):
        attributor.score(Rows(held_out, indices=part, batch_size=100), name, dense=False)


def spectrum(folder: str, num_rows: int) -> None:
    """Draw rows with the covariance and the norms of the gradients of a language model."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    ids = (
        torch.frombuffer(bytearray(text[: len(text) // CHUNK * CHUNK]), dtype=torch.uint8)
        .long()
        .view(-1, CHUNK)
    )
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))[:4096]]
    attributor = Attributor(
        pretrained_gpt("python"),
        "causal_language_modeling",
        f"{folder}/real.zarr",
        proj_dim=WIDTH // 16,
        method="TRAK",
        layout="module",
    )
    attributor.featurize(Rows(TensorDataset(ids, ids), batch_size=64, name="real"))
    with ZarrFeatureStore.open(f"{folder}/real.zarr") as real:
        rows = real.open_table("ckpt-0").read(FEATURES).astype(np.float64)
        manifest, width = real.manifest, rows.shape[1]
        spec = real.open_table("ckpt-0").spec
    norms = np.linalg.norm(rows, axis=1)
    values, vectors = np.linalg.eigh(np.cov((rows / norms[:, None]).T))
    root = (vectors * np.sqrt(values.clip(min=0))).T.astype(np.float32)
    store = ZarrFeatureStore.create(f"{folder}/run.zarr", manifest)
    rng = np.random.default_rng(0)
    for path, count in (
        ("ckpt-0", num_rows),
        (target_path("measured", 0), MEASURED),
        (target_path("test", 0), TARGETS),
    ):
        made = feature_table_spec(count, width, "float16", dict(spec.fingerprint))
        table = store.create_table(path, replace(made, chunk_rows=min(made.chunk_rows, BATCH)))
        for start in range(0, count, BATCH):
            numbers = np.arange(start, min(start + BATCH, count))
            values = rng.standard_normal((len(numbers), width), dtype=np.float32) @ root
            values *= rng.choice(norms, (len(numbers), 1)).astype(np.float32)
            ones = np.ones(len(numbers), np.float32)
            table.put(numbers, {FEATURES: values, OUT_TO_LOSS: ones, LOSS_CURVATURE: ones})
    store.close()


STORES = {"digits": digits, "spectrum": spectrum}


def source_of(folder: str, name: str) -> ScoreSource:
    """Return the scores of a target set."""
    store = ZarrFeatureStore.open(f"{folder}/run.zarr", "r+")
    settings = StoredSettings.of(store.manifest, device=CPU, where=folder)
    train, method = [store.open_table("ckpt-0")], GaussNewton()
    targets = store.open_table(target_path(name, 0)).spec.fingerprint.get("targets", {})
    return ScoreSource(
        store, train, name, method, layout=settings.layout, target_identity=targets, device=CPU
    )


def identity(source: ScoreSource) -> dict[str, Any]:
    """Return what the index is computed from."""
    rows = [table.content_key() for table in source.train]
    return {"method": source.method.to_json(), "checkpoints": ["0"], "train_rows": rows}


def recalls(folder: str, found: np.ndarray, k: int) -> float:
    """Return the share of the exact k most helpful rows among the found ones ``(M, k)``."""
    exact = np.load(f"{folder}/exact.npy")[:, :k]
    return float(np.mean([np.isin(one, other).mean() for one, other in zip(exact, found, strict=True)]))


def exact(folder: str) -> dict[str, Any]:
    """Score all rows."""
    source = source_of(folder, "test")
    terms = source.terms()
    ends = top_and_bottom(source, 100, terms)
    np.save(f"{folder}/exact.npy", ends[0, 0].astype(np.int64))
    one = [replace(terms[0], targets=terms[0].targets[:1])]
    with memory_growth() as growth:
        seconds = cpu_seconds(lambda: top_and_bottom(source, 10, terms))
    read = source.num_rows * source.train[0].column(FEATURES).row_bytes
    return {
        "seconds": seconds,
        "one": cpu_seconds(lambda: top_and_bottom(source, 10, one)),
        "bytes_per_row": read // source.num_rows,
        "read": read,
        "mib": growth.mib,
    }


def indexed(folder: str) -> dict[str, Any]:
    """Build the index, measure it, and search it with a stated recall and with given numbers of candidates."""
    first = source_of(folder, "measured")
    with memory_growth() as growth:
        build = cpu_seconds(lambda: index._built(first, identity(first)))
    figures: dict[str, Any] = {"build": build, "build_mib": growth.mib}
    figures["measuring"] = cpu_seconds(lambda: index.indexed_top(first, identity(first), 100, 0.99))
    source = source_of(folder, "test")
    terms = source.terms()
    found = index._built(source, identity(source))
    of_first = index._built(first, identity(first))
    assert found is not None
    assert of_first is not None
    row_bytes = found.rows.column(FEATURES).row_bytes
    wide = source.train[0].column(FEATURES).row_bytes
    figures["bytes_per_row"] = row_bytes
    one = [replace(terms[0], targets=terms[0].targets[:1])]
    pool = of_first.pool(100)
    for k in (10, 100):
        for recall in (0.9, 0.95, 0.99):
            chosen = pool.candidates(k, recall)
            if chosen is not None:
                mean, bound = pool.stated(k, chosen)
                ends = found.top(terms, chosen, k)
                figures[f"recall={recall} @{k}"] = {
                    "candidates": chosen,
                    "measured": mean,
                    "at_least": bound,
                    "recall": recalls(folder, ends[0, 0].astype(np.int64), k),
                }
        for factor in FACTORS:
            best: list[np.ndarray] = []
            with memory_growth() as growth:
                seconds = cpu_seconds(
                    lambda k=k, f=factor, best=best: best.append(found.top(terms, f * k, k))
                )
            figures[f"{factor} k @{k}"] = {
                "recall": recalls(folder, best[0][0, 0].astype(np.int64), k),
                "seconds": seconds,
                "one": cpu_seconds(lambda k=k, f=factor: found.top(one, f * k, k)),
                "read": source.num_rows * row_bytes + 2 * factor * k * TARGETS * wide,
                "mib": growth.mib,
            }
    return figures


def whitened(folder: str) -> dict[str, Any]:
    """Write rows and targets whose inner products are the scores."""
    source = source_of(folder, "test")
    terms = source.terms()
    assert source._grams is not None
    kernels = source._kernels(source.train[0], source._grams)
    out = np.lib.format.open_memmap(
        f"{folder}/rows.npy", "w+", np.float16, (source.num_rows, source.layout.width)
    )
    targets = torch.empty_like(terms[0].targets)
    for segment, kernel in zip(source.layout.segments, kernels, strict=True):
        targets[:, segment.start : segment.stop] = (
            terms[0].targets[:, segment.start : segment.stop].double() @ kernel.factor
        )
    inverses = [torch.linalg.inv(kernel.factor).float() for kernel in kernels]
    q = source.train[0].read(OUT_TO_LOSS)
    scale = 0.0
    for start in range(0, source.num_rows, BATCH):
        rows = source.train[0].read_rows(FEATURES, np.arange(start, min(start + BATCH, source.num_rows)))
        wide = torch.from_numpy(rows).float() * torch.from_numpy(q[start : start + len(rows)])[:, None]
        parts = zip(source.layout.segments, inverses, strict=True)
        made = torch.cat([wide[:, s.start : s.stop] @ inverse.T for s, inverse in parts], 1)
        scale = scale or 1 / float(made.square().mean().sqrt())
        out[start : start + len(rows)] = (made * scale).numpy()
    out.flush()
    np.save(f"{folder}/targets.npy", targets.numpy())
    return {"scale": scale}


def faiss_part(folder: str, factory: str) -> dict[str, Any]:
    """Build an index of faiss, search it, and score its candidates again."""
    import faiss

    faiss.omp_set_num_threads(1)
    rows, targets = np.load(f"{folder}/rows.npy", mmap_mode="r"), np.load(f"{folder}/targets.npy")
    made = faiss.index_factory(rows.shape[1], factory, faiss.METRIC_INNER_PRODUCT)

    def build() -> None:
        sample = np.sort(np.random.default_rng(0).choice(len(rows), 65536, replace=False))
        made.train(rows[sample].astype(np.float32))
        for start in range(0, len(rows), BATCH):
            made.add(rows[start : start + BATCH].astype(np.float32))

    with memory_growth() as growth:
        seconds = cpu_seconds(build)
    figures: dict[str, Any] = {"build": seconds, "mib": growth.mib, "version": faiss.__version__}
    faiss.write_index(made, f"{folder}/faiss.index")
    figures["bytes_per_row"] = Path(f"{folder}/faiss.index").stat().st_size // len(rows)
    Path(f"{folder}/faiss.index").unlink()
    if factory.startswith("IVF"):
        faiss.extract_index_ivf(made).nprobe = PROBES
        figures["probes"] = PROBES
    source = source_of(folder, "test")
    terms = source.terms()

    def search(k: int, count: int, number: int) -> np.ndarray:
        _, found = made.search(targets[:number], count)
        best = np.empty((number, k), np.int64)
        for target in range(number):
            own = np.sort(found[target][found[target] >= 0])
            features = torch.from_numpy(source.train[0].read_rows(FEATURES, own))
            scores = score_block(features, terms[0].targets[target : target + 1])[:, 0].numpy()
            scores = scores * source.train[0].read_rows(OUT_TO_LOSS, own)
            best[target] = own[np.argsort(-scores, kind="stable")[:k]]
        return best

    for k, factor in ((10, 16), (10, 64), (100, 16)):
        best: list[np.ndarray] = []
        figures[f"{factor} k @{k}"] = {
            "seconds": cpu_seconds(lambda k=k, f=factor, best=best: best.append(search(k, f * k, TARGETS))),
            "one": cpu_seconds(lambda k=k, f=factor: search(k, f * k, 1)),
            "recall": recalls(folder, best[0], k),
        }
    return figures


def main() -> None:
    """Measure every part on both stores, write JSON."""
    parser = parser_of(__doc__, "index.json")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--stores", nargs="*", default=list(STORES))
    parser.add_argument(
        "--folder", type=Path, help="where the stores are kept; a temporary folder by default"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        for name in args.stores:
            folder = Path(args.folder or temporary) / name
            if not folder.exists():
                folder.mkdir(parents=True)
                STORES[name](str(folder), args.rows)
            parts = {"exact": (exact,), "index": (indexed,), "whitened": (whitened,)}
            parts |= {f"faiss {factory}": (faiss_part, factory) for factory in FAISS}
            for part, (work, *more) in parts.items():
                figures = run_worker(work, str(folder), *more)
                if part != "whitened":
                    save_parts(args.out, surroundings(), {f"{name} / {args.rows} / {part}": figures})


if __name__ == "__main__":
    main()
