"""The whole public path for one model, every number of it compared with an independent reference.

The reference is one forward and one backward pass per sample in float64 for gradients, dense NumPy for scores. A
:class:`Wrong` says what differs; an error of trak_lite that has a name of its own is a refusal; any other is a failure.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from trak_lite import Attributor, Rows, token_scores
from trak_lite.errors import TrakLiteError
from trak_lite.gradient_computers import (
    AbstractGradientComputer,
    choose_gradient_computer,
    collect_gradients,
    replays,
    select_parameters,
)
from trak_lite.methods import AbstractKernelMethod, Fisher, GaussNewton, GradDot
from trak_lite.modelout_functions import resolve_task
from trak_lite.report import write_report
from trak_lite.store import ZarrFeatureStore

if TYPE_CHECKING:
    from benchmarks.architectures import Architecture

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import reference

Array = np.ndarray
OutputFunction = Callable[[nn.Module, Any], Tensor]

TRAIN_ROWS, TARGETS, BATCH_SIZE = 4, 2, 2
COLUMNS = ("features", "out_to_loss", "loss_curvature")
GRADIENT_TOLERANCE = 1e-5
"""Of a sample's whole gradient, in float64: published models compute parts (norms, rotations) in float32 whatever
their dtype is, which leaves 1e-7 times a condition."""
ROW_TOLERANCE = {"float32": 1e-3, "float16": 2e-3, "int8": 2e-2, "int4": 0.3}
"""Of a stored row, whose gradients are float32 passes."""


class Wrong(AssertionError):
    """A number, or the model, is not what it has to be."""


class Interrupted(KeyboardInterrupt):
    """What ends the first run of two."""


class Samples(Dataset[Any]):
    """Samples by row; reading one from ``stop`` on interrupts the run as soon as ``armed()`` is true."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = list(samples)
        self.stop: int | None = None
        self.armed: Callable[[], bool] = lambda: False

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if self.stop is not None and index >= self.stop and self.armed():
            raise Interrupted
        return self.samples[index]

    def batch(self, rows: Sequence[int]) -> Any:
        return default_collate([self.samples[row] for row in rows])


def require(truth: bool, what: str) -> None:
    """Raise :class:`Wrong` where something does not hold."""
    if not truth:
        raise Wrong(what)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return a tensor, or a dict, tuple or list of them, with the function applied to each tensor."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    return type(batch)(map_tensors(function, part) for part in batch)


def relative_errors(found: Array, expected: Array) -> Array:
    """Return the distance of each row to what it should be, relative to that row's norm; 0 where both are 0."""
    norms = np.linalg.norm(expected, axis=1)
    distances = np.linalg.norm(found - expected, axis=1)
    return np.divide(distances, norms, out=np.where(distances == 0, 0.0, np.inf), where=norms > 0)


# --- The model comes back as it was ----------------------------------------------------------------------


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return what a caller may look at: values, identities, flags, modes, hooks, attributes, random state."""
    return {
        "values": {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
        "tensors": {
            name: (id(value), type(value), value.requires_grad)
            for name, value in model.named_parameters(remove_duplicate=False)
        },
        "grads": [name for name, p in model.named_parameters() if p.grad is not None],
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: [len(hooks) for key, hooks in vars(module).items() if key.endswith("_hooks")]
            for name, module in model.named_modules()
        },
        "random": torch.get_rng_state(),
    }


@contextmanager
def left_as_it_was(model: nn.Module, *, draws: bool = False) -> Iterator[None]:
    """Raise :class:`Wrong` if the block, or an error in it, leaves a trace in the model, which may draw numbers."""
    before = state_of(model)
    try:
        yield
    finally:
        after = state_of(model)
        for name, value in before["values"].items():
            require(
                after["values"][name].equal(value) or bool(value.isnan().any()),
                f"the value of {name} was changed",
            )
        for key in ("tensors", "grads", "modes", "hooks"):
            require(before[key] == after[key], f"{key} of the model were changed")
        require(
            draws or before["random"].equal(after["random"]), "the state of the random numbers was changed"
        )


@contextmanager
def every_pass_recorded() -> Iterator[list[str]]:
    """Let replays record every pass that they can, however short; yield what they log."""
    told: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger(replays.__name__)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    level, before = logger.level, (replays._SECONDS, replays._PASSES)
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    replays._SECONDS = replays._PASSES = 0.0
    try:
        yield told
    finally:
        replays._SECONDS, replays._PASSES = before
        logger.removeHandler(handler)
        logger.setLevel(level)


# --- Gradients -------------------------------------------------------------------------------------------


def in_float64(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a copy in float64, or another dtype, and in eval mode."""
    precise = copy.deepcopy(model).to(dtype).eval()
    if hasattr(precise, "set_experts_implementation"):  # the grouped product of transformers takes no float64
        precise.set_experts_implementation("eager")
    return precise


def batch_in_float64(batch: Any, dtype: torch.dtype = torch.float64) -> Any:
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)


def precise_dtype(model: nn.Module, output: OutputFunction, samples: Samples) -> torch.dtype:
    """Return float64, or float32 if f is not finite in float64: Canine multiplies a float32 mask by its minimum."""
    with torch.no_grad():
        values = output(in_float64(model), batch_in_float64(samples.batch(range(len(samples)))))
    return torch.float64 if bool(values.isfinite().all()) else torch.float32


def loop_gradients(
    model: nn.Module,
    output: OutputFunction,
    samples: Samples,
    names: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Array]:
    """Return the gradients of f of each sample, alone in its batch: ``(N, *shape)`` by name."""
    precise = in_float64(model, dtype)
    kept = list(select_parameters(model, None)) if names is None else list(names)
    flags = {name: p.requires_grad for name, p in precise.named_parameters()}
    for name, p in precise.named_parameters():
        p.requires_grad_(flags[name] or name in kept)
    singles = [batch_in_float64(samples.batch([row]), dtype) for row in range(len(samples))]

    def afresh(model: nn.Module, sample: Any) -> Tensor:
        """f, after a change of mode: some models (LeViT) keep tensors with a graph while they are in eval mode."""
        return output(model.train().eval(), sample)

    return reference.per_sample_gradients(precise, afresh, singles, kept)


def computed_gradients(computer: AbstractGradientComputer, batch: Any) -> Array:
    grads = collect_gradients(computer, batch)
    return reference.flatten({name: grad.double().numpy() for name, grad in grads.items()})


def slope(
    model: nn.Module, output: OutputFunction, sample: Any, direction: Mapping[str, Tensor], step: float = 1e-5
) -> float:
    """Return the central difference of f along a direction over parameters."""
    named = dict(model.named_parameters())
    values = []
    with torch.no_grad():
        for sign in (1.0, -2.0, 1.0):
            for name, part in direction.items():
                named[name].add_(part, alpha=sign * step)
            values.append(float(output(model.train().eval(), sample).sum()))
    return (values[0] - values[1]) / (2 * step)


def by_name(flat: Array, like: Mapping[str, Array]) -> dict[str, Array]:
    """Return the parts of one sample's flat gradient, by name and in the shapes of gradients ``(N, *shape)``."""
    pieces = np.split(flat, np.cumsum([grad[0].size for grad in like.values()])[:-1])
    return {
        name: piece.reshape(grad.shape[1:]) for (name, grad), piece in zip(like.items(), pieces, strict=True)
    }


def check_float64_gradients(
    model: nn.Module,
    task: Any,
    output: OutputFunction,
    samples: Samples,
    expected: dict[str, Array],
    dtype: torch.dtype = torch.float64,
) -> tuple[str, float, int]:
    """Compare the engine that ``"auto"`` takes with the loop, in the dtype of the loop.

    torch's backward pass over one sample is wrong on some channels-last strides. Where engine and loop differ, the
    difference of f along their difference says which of them is right; wrong rows of ``expected`` are replaced.

    Returns:
        The engine's name, its largest error, and the number of samples for which the loop was wrong.
    """
    precise = in_float64(model, dtype)
    batch = batch_in_float64(samples.batch(range(len(samples))), dtype)
    tolerance = GRADIENT_TOLERANCE if dtype == torch.float64 else ROW_TOLERANCE["float32"]
    chosen = choose_gradient_computer(precise, resolve_task(task), batch)
    found, loop = computed_gradients(chosen.computer, batch), reference.flatten(expected)
    replaced = 0
    is_doubtful = relative_errors(found, loop) > tolerance / 10
    for row in np.flatnonzero(is_doubtful) if dtype == torch.float64 else ():
        direction = found[row] - loop[row]
        direction /= np.linalg.norm(direction)
        parts = {name: torch.from_numpy(part) for name, part in by_name(direction, expected).items()}
        true = slope(precise, output, batch_in_float64(samples.batch([row])), parts)
        if abs(true - found[row] @ direction) < 0.1 * abs(true - loop[row] @ direction):
            replaced += 1
            for name, part in by_name(found[row], expected).items():
                expected[name][row] = part
    error = float(relative_errors(found, reference.flatten(expected)).max())
    require(error < tolerance, f"gradients of the {chosen.name} engine are off by {error:.2g} in {dtype}")
    return chosen.name, error, replaced


def one_token_less(samples: Samples) -> Samples:
    """Return the samples without the last entry of each sequence of integers."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:-1] if tensor.dim() == 1 and not tensor.is_floating_point() else tensor

    return Samples([map_tensors(cut, sample) for sample in samples.samples])


def gradients_by_precision(
    model: nn.Module, task: Any, output: OutputFunction, samples: Samples
) -> dict[str, Any]:
    """Compare the gradients of the engine that ``"auto"`` takes, in three precisions and at two lengths.

    In float64 and float32 they are compared with the loop in float64; in bfloat16 the engine's own check compares
    them, and the distance from float64 is noted. A precision or length that the model itself does not take is left out.

    Returns:
        Engine and error, or the refusal, by precision and, where the samples have tokens, by length.
    """
    found: dict[str, Any] = {}
    lengths = {"as drawn": samples}
    shorter = one_token_less(samples)
    if str(shorter.samples[0]) != str(samples.samples[0]):
        lengths["one token less"] = shorter
    for length, rows in lengths.items():
        if not runs_alone(in_float64(model), output, batch_in_float64(rows.batch([0]))):
            continue
        precise = precise_dtype(model, output, rows)
        expected = loop_gradients(model, output, rows, dtype=precise)
        engine, error, _ = check_float64_gradients(model, task, output, rows, expected, precise)
        found[f"{precise}, {length}".removeprefix("torch.")] = {
            "engine": engine,
            "error": float(f"{error:.2g}"),
        }
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{dtype}, {length}".removeprefix("torch.")
            own = copy.deepcopy(model).to(dtype).eval()
            batch = map_tensors(
                lambda t, dtype=dtype: t.to(dtype) if t.is_floating_point() else t,
                rows.batch(range(len(rows))),
            )
            if not runs_alone(own, output, batch):
                continue
            try:
                chosen = choose_gradient_computer(own, resolve_task(task), batch)
                grads = computed_gradients(chosen.computer, batch)
            except TrakLiteError as refusal:
                found[name] = {"error": type(refusal).__name__, "message": str(refusal)[:600]}
                continue
            require(bool(np.isfinite(grads).all()), f"gradients in {name}, are not finite")
            error = float(relative_errors(grads, reference.flatten(expected)).max())
            require(
                dtype == torch.bfloat16 or error < ROW_TOLERANCE["float32"],
                f"gradients of the {chosen.name} engine are off by {error:.2g} in {name}",
            )
            found[name] = {"engine": chosen.name, "error": float(f"{error:.2g}")}
    return found


def runs_alone(model: nn.Module, output: OutputFunction, batch: Any) -> bool:
    """Whether plain torch takes the model and the batch, forward and backward."""
    try:
        output(model.train().eval(), batch).sum().backward()
    except Exception:
        return False
    model.zero_grad(set_to_none=True)
    return True


# --- Rows and scores -------------------------------------------------------------------------------------


def stored_table(path: Path, table: str, columns: Sequence[str] = COLUMNS) -> dict[str, Array]:
    with ZarrFeatureStore.open(path) as store:
        found = store.open_table(table)
        return {column: np.array(found.read(column)) for column in columns}


def expected_rows(attributor: Attributor, gradients: Mapping[str, Array]) -> Array:
    """Project the loop's gradients, ``(N, K)``."""
    grads = {name: torch.from_numpy(grad) for name, grad in gradients.items()}
    return attributor.projector.project(grads, 0).double().numpy()


def check_rows(attributor: Attributor, path: Path, gradients: Mapping[str, Array], tolerance: float) -> float:
    """Compare the stored rows with the projected gradients of the loop."""
    expected = expected_rows(attributor, gradients)
    found = stored_table(path, "ckpt-0")["features"].astype(np.float64)
    error = float(relative_errors(found, expected).max())
    require(error < tolerance, f"stored rows are off by {error:.2g}")
    return error


def expected_scores(
    attributor: Attributor, path: Path, target_table: str, scored: Array | None = None
) -> Array:
    """Return the scores by dense NumPy from the stored rows of one checkpoint, ``(N, M)``.

    Under a Fisher kernel, rows other than the stored ones may be ``scored``, such as the same rows not rounded.

    Of a kernel that is made of the N rows themselves the system of N equations is solved:
    X (X^T W X + l I)^-1 = (X X^T W + l I)^-1 X.
    """
    train = stored_table(path, "ckpt-0")
    targets = stored_table(path, target_table, ["features"])["features"].astype(np.float64)
    rows = train["features"].astype(np.float64)
    q, w = train["out_to_loss"].astype(np.float64), train["loss_curvature"].astype(np.float64)
    method = attributor.method
    assert isinstance(method, AbstractKernelMethod)
    damping = method.kernel.damping
    weights = w if isinstance(method, GaussNewton) else np.ones(len(rows))
    total = np.zeros((len(rows), len(targets)))
    fitted = fisher_information(path) if isinstance(method, Fisher) else None
    for segment in attributor.layout.segments:
        x, t = rows[:, segment.start : segment.stop], targets[:, segment.start : segment.stop]
        if fitted is not None:
            matrix = np.tril(fitted[segment.start : segment.stop, : segment.width])  # the rest is not stored
            matrix += np.tril(matrix, -1).T
            if matrix.any():
                lam = _lambda(matrix, damping, segment.width, 0.02, segment.width)
                own = x if scored is None else scored[:, segment.start : segment.stop]
                total += own @ np.linalg.solve(matrix + lam * np.eye(segment.width), t.T)
            continue
        inner = (x @ x.T) * weights
        if inner.any():
            lam = _lambda(inner, damping, segment.width, 0.2, min(segment.width, len(x)))
            total += np.linalg.solve(inner + lam * np.eye(len(x)), x @ t.T)
    return total * q[:, None]


def fisher_information(path: Path) -> Array:
    """Return the fitted matrices of all segments, one below the other."""
    with ZarrFeatureStore.open(path) as store:
        (name,) = (name for name in store.table_names("fisher/ckpt-0") if name.endswith("/gram"))
        return store.open_table(name).read("gram").astype(np.float64)


def _lambda(matrix: Array, damping: float | None, width: int, share: float, count: int) -> float:
    """Return lambda, given a matrix that has the eigenvalues of the kernel that are not zero."""
    if damping is None:
        return float(share * np.sqrt(np.sum(matrix * matrix.T) / count))
    return float(damping * np.trace(matrix) / width)


def check_scores(
    scores: Array,
    expected: Array,
    what: str = "scores",
    tolerance: float = 2e-3,
    rounding: Array | float = 0.0,
) -> float:
    """Compare scores with dense NumPy, relative to the largest of their target.

    ``rounding`` is what the product of rows and targets may lose in float32, where most of it cancels.
    """
    require(bool(np.isfinite(scores).all()), f"{what} are not finite")
    require(scores.shape == expected.shape, f"{what} have shape {scores.shape}, not {expected.shape}")
    scale = np.abs(expected).max(0)
    off = np.maximum(np.abs(scores - expected) - rounding, 0.0)
    error = float((off / np.where(scale > 0, scale, 1.0)).max())
    require(error < tolerance, f"{what} are off by {error:.2g}")
    return error


def check_top(scores: Any) -> None:
    matrix = scores.numpy()
    for sign in ("helpful", "harmful"):
        rows, values = reference.top_k(matrix, 3, sign=sign)
        found = scores.top(3, sign=sign)
        require(np.array_equal(found.indices, rows), f"top({sign}) names other rows than sorting does")
        require(np.array_equal(found.scores, values), f"top({sign}) has other scores than the matrix")


def resumed(
    make: Callable[[], Attributor], train: Samples, path: Path, *, batch_size: int, **settings: Any
) -> Attributor:
    """Featurize in two attributors, the first interrupted after a batch; return the second."""
    train.stop, train.armed = batch_size, (path / "ckpt-0").exists
    try:
        make().featurize(Rows(train, batch_size=batch_size), **settings)
    except Interrupted:
        pass
    else:
        raise Wrong("the run was not interrupted")
    finally:
        train.stop = None
    second = make()
    summary = second.featurize(Rows(train, batch_size=batch_size), **settings)
    require(
        summary.rows_found == batch_size and summary.rows_written == len(train) - batch_size,
        f"{summary.rows_found} rows were found after the interruption, {summary.rows_written} written",
    )
    return second


def check_same_bits(first: Path, second: Path, tables: Sequence[str], columns: Sequence[str]) -> None:
    for table in tables:
        one, other = (stored_table(path, table, columns) for path in (first, second))
        for column in columns:
            require(
                one[column].tobytes() == other[column].tobytes(),
                f"{column} of {table} are other bits after a resume",
            )


# --- All of it -------------------------------------------------------------------------------------------


def run_whole_path(entry: Architecture, folder: Path, *, briefly: bool = False) -> dict[str, Any]:
    """Take an entry of the zoo through the public path with default settings; return what was measured.

    A model that draws random numbers in eval mode agrees with itself up to rounding alone. ``briefly`` leaves out the
    figures of the report and the scores of the resumed run, for which a kernel would be fitted once more.
    """
    model, task, output = entry.make(), entry.task, entry.output
    train, targets = entry.samples(TRAIN_ROWS, 1), entry.samples(TARGETS, 2)
    dtype = precise_dtype(model, output, train)
    gradients = loop_gradients(model, output, train, dtype=dtype)
    require(
        all(np.isfinite(grad).all() for grad in gradients.values()), "the loop's gradients are not finite"
    )
    engine, error, replaced = check_float64_gradients(model, task, output, train, gradients, dtype)

    path, again = folder / "run.zarr", folder / "again.zarr"
    with torch.no_grad():  # models of transformers install hooks of their own in their first pass
        output(model.eval(), train.batch([0]))
    model.train()
    with left_as_it_was(model, draws=entry.draws):
        attributor = Attributor(model, task, path)
        attributor.featurize(Rows(train, batch_size=BATCH_SIZE))
        row_error = check_rows(attributor, path, gradients, ROW_TOLERANCE["float16"])
        scores = attributor.score(Rows(targets, batch_size=BATCH_SIZE), name="targets")
        score_error = check_scores(
            scores.numpy(), expected_scores(attributor, path, "targets/targets/ckpt-0")
        )
        check_top(scores)
        own = np.diag(expected_scores(attributor, path, "ckpt-0"))
        check_scores(scores.self_influence()[:, None], own[:, None], "self-influences")
        rows = Rows(train, batch_size=BATCH_SIZE)
        streamed = attributor.stream_scores(rows, rows, method=GradDot(q="off"))
        whole = reference.flatten(gradients)
        check_scores(
            streamed.numpy(), whole @ whole.T, "products of unprojected gradients", ROW_TOLERANCE["float16"]
        )
        page = write_report(
            scores, folder / "report.html", title="zoo", **({"figures": ()} if briefly else {})
        )
        require("</html>" in page.read_text(encoding="utf-8"), "the report is cut off")
        if entry.tokens:
            by_token = token_scores(scores, train, rows=[0])[0]
            scale = np.abs(scores.numpy()).max()
            # A token's features are not rounded as stored rows are, which an inverse of small curvatures enlarges.
            exact = expected_scores(
                attributor, path, "targets/targets/ckpt-0", expected_rows(attributor, gradients)
            )
            apart = float(np.abs(by_token.sum(0) - exact[0]).max() / scale)
            require(apart < 5e-3, f"token scores are {apart:.2g} off the row's score when they are added up")
    method = GradDot() if briefly else "auto"
    second = resumed(
        lambda: Attributor(entry.make(), task, again, method=method), train, again, batch_size=BATCH_SIZE
    )
    if not entry.draws:
        check_same_bits(path, again, ["ckpt-0"], COLUMNS)
    if not briefly:
        repeated = second.score(Rows(targets, batch_size=BATCH_SIZE), name="targets").numpy()
        require(
            entry.draws or scores.numpy().tobytes() == repeated.tobytes(),
            "scores are other bits after a resume",
        )
    return {
        "engine": engine,
        "engine in its own dtype": attributor.scores("targets").manifest.made_with["settings"][
            "gradient_computer"
        ],
        "modules": sum(1 for m in model.modules() if any(True for _ in m.parameters(recurse=False))),
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "method": attributor.method.name,
        "gradient_error": error,
        "samples for which torch's own backward is wrong": replaced,
        "row_error": row_error,
        "score_error": score_error,
    }
