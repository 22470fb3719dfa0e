"""Self-check of the gradient computers: compares some samples' gradients with autograd's on each sample alone.

The reference is one forward pass over one sample and one backward pass whose operations read contiguous copies. With a
batch of one, torch's own backward pass gives wrong gradients for some channels-last tensors
(see ``docs/pages/limits.md``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trak_lite._devices import Float32Products, rng_state, seed_rng, set_rng_state, wide_dtype
from trak_lite.data.batches import batch_size, flatten_batch, map_tensors, take_rows
from trak_lite.errors import MODEL_FAILURES, TrakLiteError, UnsupportedModelError, refuse_machine_failure
from trak_lite.models.tree import ModelTree
from trak_lite.types import Batch, BlockSink, GradientBlock, OutputTerms, samples_of

__all__ = [
    "Samples",
    "SelfCheck",
    "SelfCheckError",
    "compare",
    "draws_masks",
    "is_scheduled",
    "naming_graph_failures",
    "refuse_random",
    "structure_of",
]

logger = logging.getLogger(__name__)

_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Relative error that counts as rounding without further checks."""
_TIES = {torch.float64: 1e-8, torch.float32: 2e-2, torch.float16: 0.1, torch.bfloat16: 0.3}
"""Relative error that a max or a ReLU may cause if rounding decides a tie differently; leads to further checks."""
_SPREAD = 8.0
"""Allowed error as a multiple of the difference between two references."""
_MOST_FLOAT64_BYTES = 1 << 30
"""Largest size of the temporary float64 copy of parameters and buffers."""

_SAMPLES_AT_FIRST = 8
"""Number of samples compared in the first batch of a size."""
_LONGEST_GAP = 64
"""Largest number of batches of one structure from one check to the next."""
_MAX_STRUCTURES = 64
_MOST_KEPT_BYTES = 1 << 26
"""Memory limit for the gradients held for comparison; two samples are always allowed."""

_WIDTH, _PIECE, _STEP = 1 << 12, 1 << 18, 40503


class SelfCheckError(UnsupportedModelError):
    """The gradient of a sample differs from autograd's."""

    rows: Mapping[str, NDArray[np.int64]]
    """Rows streamed without a check since the last check that passed, by the name of their data."""

    def __init__(self, message: str) -> None:
        """Store the message; :class:`SelfCheck` sets the rows."""
        super().__init__(message)
        self.rows = {}


class CheckedComputer(Protocol):
    """Interface of a gradient computer that can be checked."""

    model: nn.Module
    autocast_dtype: torch.dtype | None
    float32_products: Float32Products
    advice: ClassVar[str]
    """End of the error message: the likely cause, and an alternative."""

    def terms(self, batch: Batch, /) -> OutputTerms:
        """Return f, q and w of a batch under this computer's settings; f keeps its autograd graph."""

    def repeated(self, batch: Batch, positions: Sequence[int], /) -> Iterator[tuple[Any, Batch, list[int]]]:
        """Yield (computer without self-check, batch, positions in it) to stream some samples again."""


@dataclass(slots=True)
class _Progress:
    """State of the checks of one batch structure."""

    num_batches: int = 0
    checked_sizes: set[int] = field(default_factory=set)
    """Batch sizes with a check that passed."""


@final
class SelfCheck:
    """Schedule and results of the self-checks of one computer.

    Up to eight evenly spread samples are compared in the first batch of every size. In batches number 1, 2, 4, ... 64
    of a structure, and every 64th after that, the first sample, the last, and a third whose position changes from check
    to check are compared. If a sample differs, this batch and all later ones are refused, until :meth:`restart`.
    """

    def __init__(self) -> None:
        """Start with nothing checked."""
        self._progress: dict[Any, _Progress] = {}
        self._failed: dict[Any, str] = {}
        self._unconfirmed: dict[Any, list[tuple[str, NDArray[np.int64]]]] = {}
        """By structure, the data's name and rows of each batch after the last check that passed."""
        self._rows: tuple[str, NDArray[np.int64]] | None = None
        self._turn = 0

    def restart(self) -> None:
        """Reset all checks; called when the model is replaced."""
        self._progress.clear()
        self._failed.clear()
        self._unconfirmed.clear()

    def forget(self, structure: Any) -> None:
        """Reset the checks of a batch structure; called when its plan is made anew."""
        self._progress.pop(structure, None)

    def is_due(self, structure: Any, size: int) -> bool:
        """Whether samples of the next batch of this structure are compared on schedule."""
        known = self._progress.get(structure)
        return known is None or size not in known.checked_sizes or is_scheduled(known.num_batches + 1)

    def name_rows(self, what: str, rows: NDArray[np.int64]) -> None:
        """Record the data rows of the next batch."""
        self._rows = (what, rows)

    def refuse_failed(self, conditions: Any) -> None:
        """Raise if an earlier check failed, because gradients that are not checked may be wrong too."""
        known = self._failed.get(conditions)
        if known is not None:
            raise UnsupportedModelError(
                f"The self-check failed for an earlier batch, so this computer cannot be used with the model: {known} "
                "To start again, call load_model_params or change the mode of the model."
            )

    def positions(
        self,
        structure: Any,
        size: int,
        kept: Mapping[str, nn.Parameter],
        *,
        always: bool = False,
        whole: bool = False,
    ) -> list[int]:
        """Return the positions to compare: ``always`` some, and ``whole`` all of the first batch of a size."""
        known = self._progress.get(structure)
        if known is None or size not in known.checked_sizes:
            return list(range(size)) if whole else _spread(size, _most_samples(kept))
        scheduled = is_scheduled(known.num_batches + 1)
        if not (always or scheduled):
            return []
        self._turn += 1
        turn = self._turn % size
        return sorted({0, turn, size - 1}) if scheduled else [turn]

    @contextmanager
    def batch(self, structure: Any, conditions: Any, size: int, positions: Sequence[int]) -> Iterator[None]:
        """Record a batch that is streamed inside the block and compared at these positions."""
        rows, self._rows = self._rows, None
        try:
            yield
        except SelfCheckError as error:
            self.fail(error, conditions, self.suspected())
            raise
        except UnsupportedModelError:
            self._rows = rows  # the batch may run again in another way
            raise
        self._count(structure, size, positions)
        if positions:
            self._unconfirmed.pop(structure, None)
        elif rows is not None:
            self._unconfirmed.setdefault(structure, []).append(rows)

    def _count(self, structure: Any, size: int, positions: Sequence[int]) -> None:
        """Count a batch that ran to its end."""
        known = self._progress.pop(structure, None) or _Progress()
        known.num_batches += 1
        if positions:
            known.checked_sizes.add(size)
        self._progress[structure] = known  # as the newest
        if len(self._progress) > _MAX_STRUCTURES:
            del self._progress[next(iter(self._progress))]

    def fail(
        self, error: SelfCheckError, conditions: Any, suspected: Mapping[str, NDArray[np.int64]]
    ) -> None:
        """Name the suspected rows in an error, and refuse all later batches under these conditions."""
        error.rows = suspected
        found = f"{error}{_named_rows(error.rows)}"
        error.args = (found,)
        self._failed[conditions] = found

    def suspected(self) -> dict[str, NDArray[np.int64]]:
        """Return the rows of all batches since the last check of their structure that passed, by their data's name."""
        found: dict[str, list[NDArray[np.int64]]] = {}
        for batches in self._unconfirmed.values():
            for what, rows in batches:
                found.setdefault(what, []).append(rows)
        return {what: np.unique(np.concatenate(parts)) for what, parts in found.items()}


def is_scheduled(number: int) -> bool:
    """Whether the batch with this number, counted from 1, is scheduled for a check."""
    return number & (number - 1) == 0 if number <= _LONGEST_GAP else number % _LONGEST_GAP == 0


def _spread(size: int, most: int) -> list[int]:
    """Return at most ``most`` evenly spread positions, including the first and the last."""
    count = min(size, most)
    return [round(i * (size - 1) / max(count - 1, 1)) for i in range(count)]


def _most_samples(kept: Mapping[str, nn.Parameter]) -> int:
    """Return the largest number of compared samples per batch, given the memory that each needs."""
    per_sample = 8 * sum(min(p.numel(), _WIDTH) for p in kept.values())
    return max(2, min(_SAMPLES_AT_FIRST, _MOST_KEPT_BYTES // per_sample))


def _named_rows(suspected: Mapping[str, NDArray[np.int64]]) -> str:
    parts = [
        f"{len(rows)} rows of {what} ({', '.join(map(str, rows[:10].tolist()))}{', ...' if len(rows) > 10 else ''})"
        for what, rows in suspected.items()
    ]
    if not parts:
        return ""
    return (
        f" Batches after the last check that passed were not compared, and may be wrong too: {' and '.join(parts)}. "
        "The attribute rows of this error lists them; remove their stored rows before you continue."
    )


# ---------------------------------------------------------------- comparing


class _Difference(NamedTuple):
    """Difference between a parameter's gradient and the reference."""

    error: float
    norm: float
    unit: float
    """Absolute error that is always allowed: underflow in the gradient's dtype."""


_Differences = Mapping[str, _Difference]


class Samples:
    """Collects from the streamed blocks the numbers by which some samples' gradients are compared.

    For a gradient with more than 4096 entries, these are 4096 sums of its entries with random signs. The sums are
    linear in the gradient, and they give the norm of a difference to within 2 %.
    """

    def __init__(self, positions: Sequence[int], kept: Mapping[str, nn.Parameter], start: int = 0) -> None:
        """Prepare for the samples at these positions; ``start`` is the ``start`` of the block of position 0."""
        self.positions = list(positions)
        # One allocation: many small ones would fragment the memory that large gradients reuse.
        device = next(iter(kept.values())).device
        widths = {name: min(p.numel(), _WIDTH) for name, p in kept.items()}
        held = torch.zeros(len(self.positions), sum(widths.values()), dtype=wide_dtype(device), device=device)
        with torch.no_grad():
            parts = [row.split(list(widths.values())) for row in held]
        self.found = [dict(zip(widths, part, strict=True)) for part in parts]
        self._start = start

    def passing(self, sink: BlockSink) -> BlockSink:
        """Return a sink that collects from each block and passes it to ``sink``."""
        if not self.positions:
            return sink

        def take(block: GradientBlock) -> None:
            first = block.start - self._start
            for row, position in enumerate(self.positions):
                if first <= position < first + block.num_samples:
                    self.add(row, block.name, samples_of(block, [position - first]).dense()[0])
            sink(block)

        return take

    def add(self, row: int, name: str, grad: Tensor) -> None:
        """Store a parameter's flat gradient, for the sample at index ``row`` of ``positions``."""
        with torch.no_grad():
            self.found[row][name].copy_(_sums(grad))


def compare(
    computer: CheckedComputer,
    batch: Batch,
    kept: Mapping[str, nn.Parameter],
    samples: Samples,
    dtypes: Sequence[torch.dtype] = (),
) -> None:
    """Raise if the gradient of a sample differs from autograd's by more than rounding.

    The reference's gradients are held one parameter at a time. Samples with an error beyond rounding are compared again
    in float64, with the same random numbers on both sides. An error that remains is then compared with the difference
    of two references, and refused if it is far larger. If the gradients are equal in float64, errors that a tie can
    explain are accepted.

    Args:
        computer: The computer that streamed the batch.
        batch: The batch.
        kept: The parameters to compare.
        samples: The numbers collected from the blocks.
        dtypes: Dtypes of the model's computations, besides those of the parameters.

    Raises:
        SelfCheckError: If a gradient differs; the message names the parameter.
    """
    inner = [*dtypes, *([] if computer.autocast_dtype is None else [computer.autocast_dtype])]
    if computer.float32_products == "tf32" and next(iter(kept.values())).device.type != "cpu":
        inner.append(torch.float16)  # TF32 has the mantissa of float16
    rounding, ties = _allowed(_ROUNDING, kept, inner), _allowed(_TIES, kept, inner)
    doubtful: dict[int, _Differences] = {}
    for found, position in zip(samples.found, samples.positions, strict=True):
        differences = _differences(found, computer, take_rows(batch, [position]), 0, kept)
        if _wrong(differences, rounding) is not None:
            doubtful[position] = differences
    if not doubtful:
        return
    exact = _equal_in_float64(computer, batch, kept, list(doubtful))
    # Use a second pass only if the first one drew other random numbers: a model may cache values between passes.
    if _draws_numbers(computer, take_rows(batch, [0])):
        again = _repeat(computer, batch, kept, list(doubtful))
        doubtful = {position: known for position, (_, known) in zip(doubtful, again, strict=True)}
    elif exact is not None:
        own = dict(zip(samples.positions, samples.found, strict=True))
        doubtful = {
            position: _nearest(known, own[position], right)
            for (position, known), right in zip(doubtful.items(), exact, strict=True)
        }
    _refuse_beyond_spread(computer, batch, kept, doubtful, rounding, ties, equal=exact is not None)


def _nearest(
    known: _Differences, found: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> dict[str, _Difference]:
    """Return the smaller of the differences from the reference and from the gradient in float64.

    In bfloat16 the reference may be less accurate than the compared gradient: torch sums the gradient of a LayerNorm's
    bias over the positions in bfloat16.
    """
    differences = {}
    for name, (error, norm, unit) in known.items():
        other = float(torch.linalg.vector_norm(found[name] - exact[name]))
        differences[name] = _Difference(min(error, other), norm, unit)
    return differences


def _equal_in_float64(
    computer: CheckedComputer, batch: Batch, kept: Mapping[str, nn.Parameter], positions: Sequence[int]
) -> list[Mapping[str, Tensor]] | None:
    """Raise if gradients differ in float64, where no tie is decided by rounding.

    Returns:
        The gradients in float64, in the form of :class:`Samples`, by position; ``None`` if equality was not shown.
    """
    if not _fits_in_float64(computer.model):
        return None
    seen = _DtypesSeen()
    try:
        with _in_float64(computer.model), seen:
            wide = map_tensors(_widened, batch)
            found = list(_repeat(computer, wide, kept, positions))
    except (torch.OutOfMemoryError, *MODEL_FAILURES) as error:
        refuse_machine_failure(error)
        logger.debug("Not compared in float64: %s", error)  # the model or the device does not support float64
        return None
    exact = dict.fromkeys(kept, max(_ROUNDING.get(dtype, 1e-2) for dtype in seen.dtypes))
    wrong = [differences for _, differences in found if _wrong(differences, exact) is not None]
    if wrong and seen.dtypes == {torch.float64}:
        _refuse(computer, wrong[0], exact)
    return None if wrong else [own for own, _ in found]


def _refuse_beyond_spread(
    computer: CheckedComputer,
    batch: Batch,
    kept: Mapping[str, nn.Parameter],
    found: Mapping[int, _Differences],
    rounding: Mapping[str, float],
    ties: Mapping[str, float],
    *,
    equal: bool,
) -> None:
    """Raise if an error is far larger than the difference between two references.

    The two references are the sample alone, and a batch of copies of the sample with the size of the original batch.
    The copies run in the same kernels as the original batch, so that rounding decides their ties in the same way. The
    copies may also lose rows in the same way (a limit on an expert's rows). Unless equality in float64 excludes that,
    the difference between the references allows at most the error of a tie.

    Args:
        computer: The computer that streamed the batch.
        batch: The batch.
        kept: The parameters to compare.
        found: The differences of some samples, by their position in the batch.
        rounding: Relative error that counts as rounding, by parameter.
        ties: Relative error that a tie may cause, by parameter.
        equal: Whether the gradients are equal in float64; if so, errors of ties are allowed.
    """
    for position, differences in found.items():
        if _wrong(differences, ties if equal else rounding) is None:
            continue
        copies = take_rows(batch, [position] * batch_size(batch))
        spread = _spread_of_references(computer, copies, position, kept)
        largest = max((known.norm for known in spread.values()), default=0.0)
        limits = dict(ties)
        for name, known in spread.items():
            seen = _SPREAD * known.error / max(known.norm, 1e-2 * largest, known.unit)
            limits[name] = max(ties[name], seen) if equal else min(max(rounding[name], seen), ties[name])
        _refuse(computer, differences, limits)


def _spread_of_references(
    computer: CheckedComputer, copies: Batch, position: int, kept: Mapping[str, nn.Parameter]
) -> _Differences:
    """Return the differences between the gradient of one copy in a batch of copies and that of the sample alone."""
    device = next(computer.model.parameters()).device
    alone = Samples([0], kept)
    try:
        with _same_draws(device):
            _reference(computer, take_rows(copies, [0]), 0, kept, lambda name, grad: alone.add(0, name, grad))
        with _same_draws(device):
            return _differences(alone.found[0], computer, copies, position, kept)
    except MODEL_FAILURES as error:
        refuse_machine_failure(error)
        logger.debug(
            "Not compared with copies: %s", error
        )  # for example, a model that takes one sample at a time
        return {}


def _repeat(
    computer: CheckedComputer,
    batch: Batch,
    kept: Mapping[str, nn.Parameter],
    positions: Sequence[int],
) -> Iterator[tuple[Mapping[str, Tensor], _Differences]]:
    """Stream some samples again; yield each one's sums and its differences from a reference with the same draws."""
    device = next(computer.model.parameters()).device
    for again, part, places in computer.repeated(batch, positions):
        samples = Samples(places, kept)
        with _same_draws(device):
            again.stream_gradients(part, samples.passing(lambda _: None))
        for found, place in zip(samples.found, places, strict=True):
            with _same_draws(device):
                yield found, _differences(found, again, take_rows(part, [place]), 0, kept)


def _draws_numbers(computer: CheckedComputer, one: Batch) -> bool:
    """Whether the model draws random numbers for a sample."""
    device = next(computer.model.parameters()).device
    with _same_draws(device), torch.enable_grad():
        before = {drawn: rng_state(drawn) for drawn in (torch.device("cpu"), device)}
        computer.terms(one)
        return any(not torch.equal(state, rng_state(drawn)) for drawn, state in before.items())


def _draws_if_it_runs(computer: CheckedComputer, part: Batch) -> bool | None:
    """Return :func:`_draws_numbers` of a part of a batch; ``None`` if the model does not run on it."""
    try:
        return _draws_numbers(computer, part)
    except MODEL_FAILURES as error:
        refuse_machine_failure(error)
        return None


def refuse_random(computer: CheckedComputer, batch: Batch) -> None:
    """Raise if f of some samples changes with the random numbers that the model draws in eval mode.

    Raises:
        UnsupportedModelError: If f changes; the message names the operations that draw.
    """
    device = next(computer.model.parameters()).device
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        # One by one, as some models take samples, or together, as others do. One that takes neither fails in its pass.
        parts = [take_rows(batch, [row]) for row in range(batch_size(batch))]
        if (draws := _draws_if_it_runs(computer, parts[0])) is None:
            parts, draws = [batch], _draws_if_it_runs(computer, batch)
        if not draws:
            return
        stack.enter_context(torch.enable_grad())  # without gradients a checkpoint warns
        drawn = stack.enter_context(_Draws(device))
        values = []
        for seed in range(4):
            with _same_draws(device, seed):
                outputs = [computer.terms(part).output.detach().to(wide_dtype(device)) for part in parts]
            values.append(torch.cat(outputs))
    found = torch.stack(values)
    if float((found - found[0]).abs().max()) > 1e-3 * float(found.abs().max()):  # false if any is NaN
        raise UnsupportedModelError(
            f"{type(computer.model).__name__} draws random numbers in eval mode ({', '.join(drawn.names)}), and f of "
            "the same sample changes with them, so its gradient is not defined. Expected a model without randomness in "
            "eval mode: pass training=self.training to dropout, or replace what is drawn by a constant."
        )


def _differences(
    found: Mapping[str, Tensor],
    computer: CheckedComputer,
    batch: Batch,
    row: int,
    kept: Mapping[str, nn.Parameter],
) -> _Differences:
    """Return the differences between a sample's gradients and the reference's, by parameter name."""
    differences = {}

    def take(name: str, grad: Tensor) -> None:
        expected = _sums(grad)
        unit = 4 * torch.finfo(grad.dtype).smallest_normal * torch.finfo(grad.dtype).eps
        error = float(torch.linalg.vector_norm(found[name] - expected))
        norm = float(torch.linalg.vector_norm(expected))
        differences[name] = _Difference(error, norm, unit * math.sqrt(grad.numel()))

    _reference(computer, batch, row, kept, take)
    return differences


def _reference(
    computer: CheckedComputer,
    batch: Batch,
    row: int,
    kept: Mapping[str, nn.Parameter],
    take: Callable[[str, Tensor], None],
) -> None:
    """Call ``take`` with the gradient of f for each parameter; one gradient is held at a time."""
    missing = dict(kept)

    def catch(name: str, grad: Tensor) -> Tensor:
        missing.pop(name)
        take(name, grad.detach().to_dense().flatten())
        # Replace the gradient by an expanded scalar: autograd holds it until it returns. A sparse one is small.
        empty = torch.zeros((), dtype=grad.dtype, device=grad.device).expand(grad.shape)
        return empty if grad.layout == torch.strided else grad

    flags = [(p, p.requires_grad) for p in computer.model.parameters()]
    handles = []
    try:
        for p, _ in flags:
            p.requires_grad_(any(p is own for own in kept.values()))
        with torch.enable_grad():
            output = computer.terms(batch).output[row]
        if output.requires_grad:
            for name, p in kept.items():
                handles.append(p.register_hook(functools.partial(catch, name)))  # type: ignore[no-untyped-call]
            with naming_graph_failures(type(computer.model).__name__), _ContiguousArguments():  # type: ignore[no-untyped-call]
                torch.autograd.grad(output, list(kept.values()), allow_unused=True)
    except (TrakLiteError, torch.OutOfMemoryError):
        raise
    except MODEL_FAILURES as error:
        refuse_machine_failure(error)
        first = next(iter(str(error).splitlines()), "no message")
        raise UnsupportedModelError(
            f"The gradients of {type(computer.model).__name__} were computed, but the self-check's own pass over one "
            f"sample alone failed ({type(error).__name__}: {first}). Expected a model that runs forward and backward "
            "on a single sample. If yours does, this is a defect of trak_lite: please report it."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
        for p, flag in flags:
            p.requires_grad_(flag)
    for name, p in list(missing.items()):
        take(name, torch.zeros((), dtype=p.dtype, device=p.device).expand(p.numel()))


def _allowed(
    tolerances: Mapping[torch.dtype, float],
    kept: Mapping[str, nn.Parameter],
    inner: Sequence[torch.dtype],
) -> dict[str, float]:
    """Return the relative error allowed for each parameter, given its dtype and the model's inner dtypes."""
    return {name: max(tolerances.get(dtype, 1e-2) for dtype in (p.dtype, *inner)) for name, p in kept.items()}


def _wrong(differences: _Differences, allowed: Mapping[str, float]) -> str | None:
    """Return the first parameter whose gradient differs by more than allowed, or ``None``."""
    largest = max(known.norm for known in differences.values())
    for name, known in differences.items():
        if known.error > allowed[name] * max(known.norm, 1e-2 * largest) + known.unit:
            return name
    return None


def _refuse(computer: CheckedComputer, differences: _Differences, allowed: Mapping[str, float]) -> None:
    name = _wrong(differences, allowed)
    if name is not None:
        known = differences[name]
        raise SelfCheckError(
            f"The self-check failed: the gradient of {name!r} differs from autograd's on one sample alone by "
            f"{known.error:.3g}, where its norm is {known.norm:.3g}. Expected equality up to rounding. "
            f"{computer.advice}"
        )


def _sums(values: Tensor) -> Tensor:
    """Return the entries of a gradient or, if there are more than 4096, 4096 sums of them with random signs."""
    wide = wide_dtype(values.device)
    if values.numel() <= _WIDTH:
        return values.to(wide)
    total = torch.zeros(_WIDTH, dtype=wide, device=values.device)
    signs = _signs(values.device)
    for number, piece in enumerate(torch.split(values, _PIECE)):
        start = number * _STEP % _PIECE
        signed = piece * signs[start : start + len(piece)]
        whole = len(piece) // _WIDTH * _WIDTH
        total += (
            signed[:whole].view(-1, _WIDTH).sum(0)
        )  # of at most 64 numbers: a wider sum takes three times as long
        total[: len(piece) - whole] += signed[whole:]
    return total


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """Return random signs; each piece of a gradient uses another section of them."""
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randint(2, (2 * _PIECE,), generator=generator, dtype=torch.float32, device="cpu")
    return (2 * drawn - 1).to(device)


# ---------------------------------------------------------------- how the reference runs


class _ContiguousArguments(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes the operations of a backward pass read contiguous copies, so that results do not depend on strides.

    Some kernels take no such copy, because they demand strides or an alignment that the model arranges for: grouped and
    scaled products, attention with a bias. These read the original arguments.
    """

    supports_higher_order_operators = (
        True  # they read the original arguments, such as the blocks of flex_attention
    )

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch._dynamo is imported at the first operation: seconds, and 100 MB

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A checkpoint runs forward operations inside the backward pass with gradients enabled; these read the original
        # arguments, because views depend on strides.
        if not torch.is_grad_enabled() and not _keeps_strides(func):
            with contextlib.suppress(*MODEL_FAILURES):
                return func(*[_contiguous_argument(arg) for arg in args], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@functools.lru_cache(maxsize=4096)
def _keeps_strides(func: Any) -> bool:
    """Whether an operation writes into an argument, or gives a view, a copy or an empty tensor with its strides."""
    if not isinstance(func, OpOverload):
        return True
    name = func.overloadpacket.__name__
    copies = name in ("clone", "_to_copy") or name.endswith("_like")
    return copies or any(argument.alias_info for argument in func._schema.arguments)


def _contiguous_argument(argument: Any) -> Any:
    """Return an argument with its tensors contiguous, also those in lists and tuples."""
    if isinstance(argument, Tensor):
        return _contiguous(argument)
    if isinstance(argument, list | tuple):
        return [_contiguous_argument(entry) for entry in argument]
    return argument


def _contiguous(tensor: Tensor) -> Tensor:
    """Return a tensor with the strides of its shape, also on axes of length 1, unlike ``Tensor.contiguous``."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.stride() == _strides(tensor.shape):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * max(length, 1))
    return tuple(strides[::-1][: len(shape)])


class _Draws(TorchFunctionMode):
    """Records the names of the operations that draw random numbers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.devices, self.names = (torch.device("cpu"), device), dict[str, None]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = [rng_state(device) for device in self.devices]
        result = func(*args, **(kwargs or {}))
        after = [rng_state(device) for device in self.devices]
        if not all(map(torch.equal, before, after)):
            self.names[getattr(func, "__name__", "an operation")] = None
        return result


class _DtypesSeen(TorchFunctionMode):
    """Records the floating-point dtypes of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and (result.is_floating_point() or result.is_complex()):
            self.dtypes.add(result.dtype.to_real())
        return result


def _fits_in_float64(model: nn.Module) -> bool:
    """Whether the device supports float64 and the model's float64 copy is below the size limit."""
    tensors = [*model.parameters(), *model.buffers()]
    has = all(wide_dtype(tensor.device) == torch.float64 for tensor in tensors)
    return has and 8 * sum(tensor.numel() for tensor in tensors) <= _MOST_FLOAT64_BYTES


@contextmanager
def _in_float64(model: nn.Module) -> Iterator[None]:
    """Run a model in float64 inside the block, and restore its storages afterwards.

    Only ``.data`` of the parameters is replaced, because a model may hold other references to the parameters.
    """
    before: list[tuple[Tensor, Tensor]] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # recurrent layers warn of weights that are not contiguous
            for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values():
                wide = _widened(tensor.data)
                if wide.dtype != tensor.dtype:
                    before.append((tensor, tensor.data))
                    tensor.data = wide
            yield
    finally:
        for tensor, data in before:
            tensor.data = data


def _widened(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


@contextmanager
def _same_draws(device: torch.device, seed: int = 0) -> Iterator[None]:
    """Seed the generators inside the block, and restore their states afterwards."""
    before = {drawn: rng_state(drawn) for drawn in (torch.device("cpu"), device)}
    try:
        for drawn in before:
            seed_rng(drawn, seed)
        yield
    finally:
        for drawn, state in before.items():
            set_rng_state(drawn, state)


@contextmanager
def naming_graph_failures(model: str = "The model") -> Iterator[None]:
    """Replace torch's errors about the graph of a backward pass by ones that name the cause.

    Args:
        model: Name of the model's class.

    Raises:
        UnsupportedModelError: If the model holds a tensor with an earlier pass's graph, or uses a reentrant checkpoint.
    """
    try:
        yield
    except UnsupportedModelError:
        raise
    except RuntimeError as error:
        if "use_reentrant" in str(error):
            raise UnsupportedModelError(
                f"{model} uses checkpoint(..., use_reentrant=True), which hides its operations until a backward pass "
                f"over all leaves. Use checkpoint(..., use_reentrant=False). torch says: {error}"
            ) from error
        if "through the graph a second time" not in str(error):
            raise
        raise UnsupportedModelError(
            f"{model} stores a tensor with its graph in one forward pass and uses it in the next, such as a bias that "
            "it computes once in eval mode. Expected independent passes. Detach the tensor, or clear it in the output "
            "function."
        ) from error


# ---------------------------------------------------------------- structure of a batch


def structure_of(batch: Batch) -> Any:
    """Return the shapes without the sample axis, the dtypes, and the flags beside the tensors of a batch."""
    leaves, _ = flatten_batch(batch)
    return tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves), _flags(batch)


def _flags(batch: Batch) -> Any:
    """Return a batch's numbers, booleans and strings, which may control the model.

    A list without tensors holds per-sample data.
    """
    if isinstance(batch, Mapping):
        return tuple((key, _flags(value)) for key, value in batch.items())
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return tuple(_flags(getattr(batch, f.name)) for f in dataclasses.fields(batch))
    if isinstance(batch, tuple) or (isinstance(batch, list) and flatten_batch(batch)[0]):
        return tuple(map(_flags, batch))
    return batch if isinstance(batch, bool | int | float | str) else None


def draws_masks(tree: ModelTree) -> bool:
    """Whether dropout is active, so that two passes give different results."""
    dropouts = (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention)
    return any(
        module.training and (getattr(module, "p", 0.0) or getattr(module, "dropout", 0.0))
        for module in tree.modules
        if isinstance(module, dropouts)
    )
