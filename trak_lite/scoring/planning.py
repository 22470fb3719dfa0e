"""What a run will take, measured on a few batches before it: time, memory and disk, and the settings that would help.

Shapes: N train rows, M targets, K feature width, C checkpoints.
"""

from __future__ import annotations

import ctypes
import gc
import math
import shutil
import statistics
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.devices import wide_dtype
from trak_lite.data.datasets import Rows
from trak_lite.errors import StateError, StoreError
from trak_lite.featurizing.fisher import drawn_batch_size, drawn_spec, gram_spec
from trak_lite.featurizing.session import Run
from trak_lite.featurizing.settings import AttributorSettings
from trak_lite.featurizing.train_work import TrainWork
from trak_lite.linalg.gram import GramAccumulator, keeps_rows, lower_product
from trak_lite.linalg.kernel import KernelSettings, factorise
from trak_lite.linalg.products import product_dtype
from trak_lite.methods import AbstractMethod, Fisher
from trak_lite.models.checkpoints import Checkpoint
from trak_lite.run.tables import FEATURES, as_tensor, score_table_spec
from trak_lite.run.workspace import Workspace
from trak_lite.scoring.grams import CACHED_ROWS
from trak_lite.scoring.plan import Plan, Span, size_text
from trak_lite.scoring.tiles import ScoreTerm, score_tile
from trak_lite.store._grid import stored_bytes
from trak_lite.store.sharing import plan_batches
from trak_lite.types import FeatureLayout

_WARM: Final = 3
"""Batches that choose, check and record the gradient computer, and are counted once per checkpoint."""
_LONGEST: Final = 3.0  # seconds of one trial after these batches
_FEWEST, _MOST = 4, 40
"""Further batches of a trial."""
_TRIED: Final = (32, 128, 512)
"""Sizes of batches that are compared."""
_LARGEST_SHARE: Final = 0.1
"""A trial of another size ends at this share of the time of the run, counted with its first batches."""
_CLEARLY: Final = 0.8
"""Another batch size is proposed if it takes at most this share of the time."""
_PRODUCT_ROWS: Final = 1024
_BUFFERED_ROWS: Final = 256  # that products upcast at a time on a CPU
_MOST_STORED: Final = 1 << 26
"""Bytes of kernels that a trial stores at most; the time of more is that of these, in proportion."""


Times: TypeAlias = NDArray[np.float64]
"""``(n, 2)`` durations: seconds that have passed, and of the processor."""


@dataclass(frozen=True, slots=True)
class _Trial:
    setup: Span
    """Time that a checkpoint takes once: the choice, checks and recordings."""
    checks: Span
    """The part of it that short data take too, which are not recorded."""
    batch: Span
    growth: int | None
    """Peak bytes beyond those in use before all trials."""


def planned(run: Run, rows: Rows, targets: Rows | None, checkpoint: Checkpoint, count: int) -> Plan:
    """Return the plan of featurizing rows and scoring targets with ``count`` checkpoints like ``checkpoint``.

    Nothing is written but a folder beside the store, which is removed.
    """
    settings, num_rows, growing = run.settings, len(rows), _Memory(run.settings.device)
    num_targets = 0 if targets is None else len(targets)
    chosen = run.settings.trial()
    with suppress(StateError, StoreError), run.workspace.reading() as store:
        chosen.recall_computer(store.manifest)
    trial = _tried(run, chosen, rows, checkpoint, rows.batch_size, growing)
    chunk_rows = settings.train_table(num_rows, {}).chunk_rows
    whole = min(rows.batch_size, chunk_rows)  # a batch ends with its chunk
    per_batch = {whole: trial}
    passes = len(plan_batches(np.arange(num_rows), chunk_rows, rows.batch_size))
    seconds = {"rows": trial.setup.plus(trial.batch.times(passes)).times(count)}
    draws, growths = settings.num_fit_rows(num_rows), [trial.growth]
    if draws:
        fit = _tried(run, chosen, rows, checkpoint, rows.batch_size, growing, draws=draws)
        _, size = _fit_grid(settings, num_rows, rows.batch_size)
        per_checkpoint = fit.setup.plus(fit.batch.times(-(-draws // size)), _gram_time(settings, draws))
        seconds["fit"] = per_checkpoint.times(count)
        growths.append(fit.growth)
    if num_targets:
        seconds["targets"] = trial.checks.plus(trial.batch.times(num_targets / whole)).times(count)
    disk = _disk(settings, num_rows, num_targets, count, draws)
    scoring, peak = _scoring(run, num_rows, num_targets, count, 0 if draws else disk["kernels"] // count)
    seconds["scores"] = scoring.times(count)
    for step, purpose in (("fit" if draws else "scores", "kernels"), ("scores", "scores")):
        if disk[purpose]:
            seconds[step] = seconds[step].plus(_storing_time(run, disk[purpose]))
    memory = {"featurizing": max((one for one in growths if one is not None), default=None), "scoring": peak}
    memory["scoring"] = num_targets and max(peak, trial.growth or 0)  # the gradients of targets come first
    for size in _TRIED:
        if size != whole and size <= chunk_rows and size * (_WARM + _FEWEST) <= num_rows:
            most = max(0.5, _LARGEST_SHARE * seconds["rows"].mean)
            try:
                other = _tried(run, chosen, rows, checkpoint, size, growing, longest=0.5, most=most)
            except (torch.OutOfMemoryError, MemoryError):
                break  # larger ones do not fit either
            per_batch[size] = other
            if other.batch.mean / size > per_batch[min(per_batch)].batch.mean / min(per_batch):
                break  # larger ones will not be faster
    advice = _advice(settings, run.workspace, whole, per_batch, disk, memory, growing.free)
    return Plan(
        num_rows,
        num_targets,
        count,
        rows.batch_size,
        {**settings.shown(), "gradients": chosen.computer_choice},
        disk,
        memory,
        seconds,
        tuple(advice),
    )


def _tried(
    run: Run,
    settings: AttributorSettings,
    rows: Rows,
    checkpoint: Checkpoint,
    batch_size: int,
    memory: _Memory,
    *,
    draws: int = 0,
    longest: float = _LONGEST,
    most: float = math.inf,
) -> _Trial:
    """Compute some batches of rows, or of a fit, as ``featurize`` does, and write them to a store of their own.

    The trial ends ``longest`` seconds after its first batches, ``most`` seconds after it began, or, if it is slow, with
    half of the batches of the run.
    """
    num_rows = draws or len(rows)
    chunk_rows, per_batch = settings.train_table(num_rows, {}).chunk_rows, batch_size
    if draws:
        chunk_rows, per_batch = _fit_grid(settings, len(rows), batch_size)
    first = np.arange(min(num_rows, (_WARM + _MOST) * per_batch))
    batches = plan_batches(first, chunk_rows, per_batch)
    half = max(_WARM + 1, num_rows // per_batch // 2)
    memory.begin()
    with _scratch(run.workspace) as workspace:
        trial = replace(run, settings=settings, workspace=workspace, progress=False, computers=None)
        size, rows.batch_size = rows.batch_size, batch_size
        try:
            with trial.session(rows.identity()) as session:
                marks = [_now()]
                work = TrainWork(session)
                for _ in work.trial(checkpoint, rows, batches[: _WARM + _MOST], of_fit=bool(draws)):
                    marks.append(_now())
                    passed = marks[-1][0] - marks[0][0]
                    if (len(marks) > half and passed > longest) or passed > most:
                        break
                    if len(marks) > _WARM + _FEWEST and marks[-1][0] - marks[_WARM][0] > longest:
                        break
                growth = memory.growth()
        finally:
            rows.batch_size = size
    gaps = np.diff(marks, axis=0)
    batch = _usual(gaps, -(-chunk_rows // per_batch))
    return _Trial(_beyond(gaps, batch), _beyond(gaps[: _WARM - 1], batch), batch, growth)


def _fit_grid(settings: AttributorSettings, num_rows: int, batch_size: int) -> tuple[int, int]:
    """Return the number of drawn rows in a chunk of a fit of Fisher, and in a batch."""
    method: Fisher | None = settings.method.fisher_fit
    assert method is not None
    chosen, draws = method.num_draws(num_rows, settings.layout, settings.projector.proj_dim)
    spec, at_once = drawn_spec(chosen, draws, settings.layout.width, {})
    return spec.chunk_rows, drawn_batch_size(batch_size, draws, at_once)


def _usual(gaps: Times, per_chunk: int) -> Span:
    """Return the time of one batch, with its share of the time that the last batch of a chunk takes more."""
    numbers = np.arange(len(gaps))[min(_WARM, len(gaps) - 1) :]
    ends_chunk = (numbers + 1) % per_chunk == 0
    last, inner = gaps[numbers[ends_chunk]], gaps[numbers[~ends_chunk]]
    if not len(last) or not len(inner):
        return _span(inner if len(inner) else last)
    batch, more = _span(inner), _beyond(last, _span(inner))
    return batch.plus(more.times(1 / (len(last) * per_chunk)))


def _beyond(gaps: Times, usual: Span) -> Span:
    """Return what some batches took more than as many usual ones."""
    wall, cpu = np.maximum(gaps.sum(axis=0) - len(gaps) * np.array([usual.mean, usual.cpu]), 0.0).tolist()
    return Span(wall, wall, wall, cpu)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _span(gaps: Times) -> Span:
    """Return the mean of the middle half of some durations, and the spread of all but the extreme tenths."""
    walls, cpus = np.sort(gaps, axis=0).T.tolist()
    tenth, middle = len(gaps) // 10, slice(len(gaps) // 4, len(gaps) - len(gaps) // 4)
    return Span(
        statistics.fmean(walls[middle]), walls[tenth], walls[-1 - tenth], statistics.fmean(cpus[middle])
    )


@final
class _Memory:
    """Memory of the GPU, or the resident set on Linux: what is free, and the growth of all trials, from one moment on.

    A trial that begins with what the one before has left behind would seem to need less than a run of its own.
    """

    def __init__(self, device: torch.device) -> None:
        _give_back_memory()  # or trials would seem to need less by what is given back when they begin
        self.free = _free_memory(device)
        self._device, self._is_known = device, True
        is_gpu = device.type == "cuda"
        self._before = torch.cuda.memory_allocated(device) if is_gpu else _proc_bytes("self/status", "VmRSS")

    def begin(self) -> None:
        """Begin a trial: the peak starts again from what is in use, without what the trial before has freed."""
        _give_back_memory()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:  # another system, or a container that forbids it
            self._is_known = False

    def growth(self) -> int | None:
        """Return the growth up to the peak of the trial, in bytes; ``None`` where the system does not tell."""
        is_gpu = self._device.type == "cuda"
        peak = (
            torch.cuda.max_memory_allocated(self._device) if is_gpu else _proc_bytes("self/status", "VmHWM")
        )
        if peak is None or self._before is None or not self._is_known:
            return None
        return max(0, peak - self._before)


def _give_back_memory() -> None:
    """Free what only cycles hold, and let the allocator give freed memory back to the system."""
    gc.collect()
    with suppress(AttributeError, OSError, TypeError):  # only glibc keeps freed memory, and gives it back
        ctypes.CDLL(None).malloc_trim(0)


def _proc_bytes(file: str, field: str) -> int | None:
    """Return a field of a file of /proc that is given in KiB; ``None`` where there is none."""
    try:
        text = Path("/proc", file).read_text()
    except OSError:
        return None
    lines = (line.split() for line in text.splitlines())
    return next((int(line[1]) << 10 for line in lines if line[:1] == [f"{field}:"]), None)


@contextmanager
def _scratch(like: Workspace) -> Iterator[Workspace]:
    """Yield a workspace that is removed at the end: beside the store, or in memory if the store is there."""
    if like.place is None:
        yield Workspace(None)
        return
    parent = Path(like.place).parent if isinstance(like.place, str) else None
    here = parent if parent is not None and parent.is_dir() else None
    with tempfile.TemporaryDirectory(prefix=".plan-", dir=here) as folder:
        yield Workspace(f"{folder}/trial.zarr")


def _timed(call: Callable[..., Any], *arguments: Any) -> Span:
    """Return the time of a call with these arguments up to its result, after one that warms up."""
    for _ in range(2):
        begun = _now()
        result = call(*arguments)
        if isinstance(result, Tensor) and result.device.type != "cpu":
            result.flatten()[0].item()  # waits for it
    wall, cpu = np.subtract(_now(), begun).tolist()
    return Span(wall, wall, wall, cpu)


def _gram_time(settings: AttributorSettings, draws: int) -> Span:
    total = Span()
    for width, count in Counter(segment.width for segment in settings.layout.segments).items():
        rows = torch.ones(min(_PRODUCT_ROWS, draws), width, dtype=torch.float32, device=settings.device)
        total = total.plus(_timed(lower_product, rows.T).times(count * draws / len(rows)))
    return total


def _storing_time(run: Run, num_bytes: int) -> Span:
    """Return the time to store so many bytes."""
    size = min(num_bytes, _MOST_STORED)
    array = np.ones(size // 8)
    with _scratch(run.workspace) as workspace, workspace.opened(run.settings.manifest({})):
        return _timed(workspace.created().cache, "trial", "trial", array).times(num_bytes / size)


def _scoring(run: Run, num_rows: int, num_targets: int, checkpoints: int, stored: int) -> tuple[Span, int]:
    """Return the time of scoring, without gradients, for each checkpoint, which stores such kernels, and peak bytes."""
    settings, method = run.settings, run.settings.method
    if not num_targets or method.inverse is not None or not method.multiplies_rows:
        return Span(), 0
    layout, device, wide = method.layout_of(settings.layout), settings.device, wide_dtype(settings.device)
    kernel, widest = method.kernel, max(segment.width for segment in layout.segments)
    dtype = torch.float32 if kernel is None else wide
    if kernel is not None and kernel.lambda_reg is None:
        dtype = product_dtype([kernel.damping], widest, rank=min(num_rows, widest), device=device)
    # no drawn numbers: the caller's generator stays
    targets = torch.ones(num_targets, layout.width, dtype=dtype, device=device)
    spec = settings.train_table(num_rows, {})
    spec = replace(spec, num_rows=min(_PRODUCT_ROWS, num_rows, spec.chunk_rows))
    at_once, share = spec.num_rows, num_rows / spec.num_rows
    transform = partial(method.transform, layout=layout) if method.transforms_rows else None
    with _scratch(run.workspace) as workspace, workspace.opened(settings.manifest({})):
        table = workspace.created().create_table("trial", spec)
        shapes = {one.name: (at_once,) if one.width is None else (at_once, one.width) for one in spec.columns}
        table.put(np.arange(at_once), {name: np.ones(shape, np.float32) for name, shape in shapes.items()})
        rows = as_tensor(table.read(FEATURES)[:, :widest], device)
        tile = partial(score_tile, [ScoreTerm(table, targets, transform)], range(at_once), q=method.q)
        total = _timed(tile).times(share)
        if kernel is not None and kernel.weighting != "fisher":
            total = total.plus(_timed(lambda: deque(table.blocks(FEATURES), 0)).times(share))
    upcast, held = min(_BUFFERED_ROWS, num_rows) * layout.width, checkpoints * targets.nbytes
    tiles = upcast * dtype.itemsize + 2 * at_once * num_targets * 4
    if kernel is None:
        return total, held + tiles

    def solved(matrix: Tensor, right: Tensor) -> Tensor:
        layout, damped = FeatureLayout.joint(matrix.shape[1]), KernelSettings(damping=1.0)
        return factorise([matrix], damped, num_rows=num_rows, layout=layout)[0].solve(right)

    sums = kept = factors = largest = 0  # numbers that summing, solving and factorising hold
    for width, count in Counter(segment.width for segment in layout.segments).items():
        few = kernel.weighting != "fisher" and keeps_rows(width, num_rows)
        matrix = torch.eye(num_rows if few else width, width, dtype=wide, device=device)
        total = total.plus(_timed(solved, matrix, targets[:, :width].to(wide)).times(count))
        if kernel.weighting != "fisher" and not few:
            gram = GramAccumulator(FeatureLayout.joint(width), device)
            total = total.plus(_timed(gram.add, rows[:, :width].contiguous()).times(count * share))
        sums, kept = sums + count * matrix.numel(), kept + few * count * matrix.numel()
        factors, largest = factors + count * len(matrix) ** 2, max(largest, matrix.numel())
    solving = kept + factors + num_targets * (layout.width + 3 * widest)
    peak = max(sums + upcast, sums + factors + largest, solving) * wide.itemsize
    return total, held + max(tiles, peak, 4 * stored)  # three copies on their way to the file


def _disk(
    settings: AttributorSettings, num_rows: int, num_targets: int, count: int, draws: int
) -> dict[str, int]:
    layout, kernel, kernels = settings.method.layout_of(settings.layout), settings.method.kernel, 0
    widths = [segment.width for segment in layout.segments]
    if kernel is not None and kernel.weighting == "fisher":
        kernels = stored_bytes(gram_spec(layout, {}))
    elif kernel is not None and num_targets and num_rows >= CACHED_ROWS:
        numbers = 0 if keeps_rows(max(widths), num_rows) else sum(width**2 for width in widths)
        kernels = numbers * wide_dtype(settings.device).itemsize
    targets = settings.target_table(num_targets or 1, {}, preconditioned=settings.method.inverse is not None)
    return {
        "rows": count * stored_bytes(settings.train_table(num_rows, {})),
        "targets": num_targets and count * stored_bytes(targets),
        "kernels": count * kernels,
        "scores": num_targets and stored_bytes(score_table_spec(num_rows, num_targets, {})),
        "fit, while it runs": draws * layout.width * 4,
    }


def _advice(
    settings: AttributorSettings,
    workspace: Workspace,
    batch_size: int,
    tried: Mapping[int, _Trial],
    disk: Mapping[str, int],
    memory: Mapping[str, int | None],
    free: int | None,
) -> Iterator[str]:
    """Yield what is not measured, what does not fit with a setting that would, and what would be faster."""
    method: AbstractMethod = settings.method
    if method.inverse is not None or not method.multiplies_rows:
        yield f"Not measured: the fit of {method.name}, and its scores."
    fitting = {
        size: trial
        for size, trial in tried.items()
        if free is None or trial.growth is None or trial.growth < free
    }
    need = memory["featurizing"]
    if free is not None and need is not None and need >= free:
        smaller = max(
            (size for size in fitting if size < batch_size), default=max(batch_size * free // need, 1)
        )
        yield (
            f"Does not fit: featurizing takes {size_text(need)} and {size_text(free)} are free. Use "
            f"batch_size={smaller}, or grad_wrt for fewer parameters."
        )
    scoring = memory["scoring"] or 0
    if free is not None and scoring >= free:
        yield (
            f"Does not fit: scoring takes {size_text(scoring)} and {size_text(free)} are free. Use proj_dim="
            f"{_halved(settings)}{', or layout=' + repr('module') if len(settings.layout.segments) == 1 else ''}."
        )
    if workspace.place is None:
        room = free
    else:
        folder = Path(workspace.place) if isinstance(workspace.place, str) else None
        while folder is not None and not folder.exists():
            folder = folder.parent
        room = None if folder is None else shutil.disk_usage(folder).free
    total = sum(disk.values())
    if room is not None and total >= room:
        smaller_dtype = {"float32": "float16", "float16": "int8", "int8": "int4"}.get(settings.dtype)
        first = "" if smaller_dtype is None else f"dtype={smaller_dtype!r} or "
        dense = ", or score(dense=False, k=...)" if disk["scores"] > total / 2 else ""
        yield (
            f"Does not fit: {size_text(total)} on disk and {size_text(room)} are free. Use {first}proj_dim="
            f"{_halved(settings)}{dense}."
        )
    now = tried[batch_size].batch.mean / batch_size
    best = min(fitting or tried, key=lambda size: tried[size].batch.mean / size)
    share = tried[best].batch.mean / best / now
    if share <= _CLEARLY and best in fitting:
        yield f"Faster: batch_size={best} takes {share:.0%} of the time per row (and {size_text(tried[best].growth)})."


def _halved(settings: AttributorSettings) -> int:
    return max(1, (settings.projector.proj_dim or settings.layout.width) // 2)


def _free_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return _proc_bytes("meminfo", "MemAvailable") if device.type == "cpu" else None
