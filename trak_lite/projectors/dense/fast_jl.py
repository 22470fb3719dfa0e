"""Projections by ``fast_jl``, the CUDA extension of the original TRAK (extra ``fast``).

The extension generates its matrix inside the kernel and casts gradients to float16. It is optional and used on CUDA
after a self-test. This module adds what it lacks: any K (the first K columns of the next multiple of 512), any number
of rows (8, 16 or 32 at a time), parameters with more than 2**32 entries in a batch (chunks with different seeds),
gradients beyond float16's range (a power of two per row), and streams other than the default one.

Its matrix differs from this package's and depends on the number of multiprocessors of the GPU: a store made with
one number cannot be continued with another.

Numerics: gradients have 11 significant bits, products are summed in float32.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from trak_lite.errors import InvalidInputError, refuse_signal
from trak_lite.projectors._base import ProjectionType
from trak_lite.projectors.random.hash import Stream, key32, parameter_key

logger = logging.getLogger(__name__)

_COLUMNS = 512  # the extension makes multiples of this many features
_ROWS = (8, 16, 32)  # and has one function for each of these numbers of rows
MOST_ROWS = _ROWS[-1]
_TILE = 256  # entries that one of its blocks reads in a step
_MOST_ENTRIES = 1 << 24  # of a row in one call: part of the definition of the matrix; the extension counts
# rows * entries in 32 bits, and 32 rows of this length take 3 GiB while they are converted
_TOP = 15  # rows are scaled so that their largest entry is below 2**15, half of float16's largest number
_MOST_SHIFT = 126  # 2**126 and 2**-126 are normal float32 numbers
_TEST_SEED = 0x80000001  # above the largest int32

_STREAMS = {ProjectionType.rademacher: Stream.RADEMACHER, ProjectionType.normal: Stream.GAUSSIAN}


@final
@dataclass(frozen=True, slots=True)
class FastJLMatrices:
    """The extension's matrices on one device, with seeds from this package's hash for each parameter."""

    has_float64: ClassVar[bool] = False

    _module: ModuleType
    """``fast_jl``, or what has its functions."""
    _proj_type: ProjectionType
    device: torch.device
    multiprocessors: int
    """Of the device; the extension cuts gradients in as many tiles."""
    most_rows: int = MOST_ROWS
    """Rows per call of the extension."""

    def fingerprint(self) -> dict[str, Any]:
        """Return the kind and the number of multiprocessors, which the matrices depend on."""
        return {"kind": f"fast_jl_{self._proj_type.value}", "multiprocessors": self.multiprocessors}

    def clear(self) -> None:
        """Do nothing: no matrix is kept."""

    def add_product_(self, total: Tensor, rows: Tensor, *, seed: int, model_id: int, name: str) -> None:
        """Add ``rows @ matrix``, as :class:`~trak_lite.projectors.dense.matrices.HashedMatrices` does."""
        key = parameter_key(seed, model_id, name, _STREAMS[self._proj_type])
        for number, start in enumerate(range(0, rows.shape[1], _MOST_ENTRIES)):
            for first in range(0, rows.shape[0], self.most_rows):
                few = slice(first, first + self.most_rows)
                part = rows[few, start : start + _MOST_ENTRIES].to(self.device)
                total[few] += self.project(part, total.shape[1], key32(key, number))

    def project(self, rows: Tensor, proj_dim: int, seed: int) -> Tensor:
        """Return the unscaled float32 features ``(b, K)`` of rows ``(b, n)`` of any floating-point dtype and range.

        Entries keep the 11 bits of float16 down to 2**-29 times the largest of their row. There are 1 to 32 rows of at
        most 2**24 entries, on this device, and the seed is in ``[0, 2**32)``.
        """
        largest = torch.linalg.vector_norm(rows, math.inf, dim=1).float()
        shift = (_TOP - torch.frexp(largest).exponent).clamp(-_MOST_SHIFT, _MOST_SHIFT)
        shift = torch.where(largest.isfinite(), shift, 0)  # a row that is not finite stays so
        scaled = rows * _power_of_two(shift)[:, None]  # in float32, or float64 for float64 rows: exact
        halves = scaled.to(torch.float16).contiguous()
        num_rows = next(size for size in _ROWS if size >= halves.shape[0])
        function = getattr(self._module, f"project_{self._proj_type.value}_{num_rows}")
        columns = -(-proj_dim // _COLUMNS) * _COLUMNS
        tiles = min(self.multiprocessors, -(-halves.shape[1] // _TILE))  # none without work
        with _default_stream(self.device) as caller:
            features: Tensor = function(halves, columns, seed, tiles)
            if caller is not None:
                features.record_stream(caller)
        return features[:, :proj_dim] * _power_of_two(-shift)[:, None]


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return ``2**exponent`` as float32, exactly, for int32 exponents from -126 to 127."""
    return ((exponent + 127) << 23).view(torch.float32)


@contextlib.contextmanager
def _default_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """Make the device's default stream current, where the extension launches; yields the caller's stream."""
    if device.type != "cuda":
        yield None
        return
    caller, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    default.wait_stream(caller)
    with torch.cuda.device(device), torch.cuda.stream(default):
        yield caller
    caller.wait_stream(default)


def multiprocessors(device: torch.device) -> int | None:
    """Return the number of multiprocessors of an NVIDIA GPU, and ``None`` for any other device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def fast_jl_matrices(
    device: torch.device | None, proj_type: ProjectionType, *, most_rows: int
) -> FastJLMatrices | None:
    """Return the tested extension on a device, or ``None`` where it cannot be used.

    The device is ``None`` for the current GPU where there is one, else the CPU. The extension is called with
    ``most_rows`` rows at a time, one of the numbers for which it has a function.
    """
    if most_rows not in _ROWS:
        raise InvalidInputError(
            f"fast_jl projects {list(_ROWS)} rows at a time, got {most_rows}. Choose one of these numbers."
        )
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu") if device is None else device
    if str(device) == "cuda" and has_gpu:
        device = torch.device("cuda", torch.cuda.current_device())
    matrices = _tested(device, proj_type)
    return None if matrices is None else replace(matrices, most_rows=most_rows)


@functools.cache
def _tested(device: torch.device, proj_type: ProjectionType) -> FastJLMatrices | None:
    """Test the extension, once per process, device and distribution; log one warning where it cannot be used."""
    count = multiprocessors(device)
    try:
        if count is None:
            reason = "it needs an NVIDIA GPU"
        else:
            import fast_jl

            matrices = FastJLMatrices(fast_jl, proj_type, device, count)
            fault = _self_test(matrices)
            if fault is None:
                return matrices
            reason = f"in its self-test {fault}"
    except ImportError as error:
        reason = f"it cannot be imported ({error}). Install it with pip install --no-build-isolation fast-jl"
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # what a compiled extension raises
        refuse_signal(error)
        reason = f"its self-test raised {type(error).__name__}: {error}"
    logger.warning(
        "fast_jl is not used on %s: %s. The dense projection of trak_lite is used instead, which has another matrix; "
        "the manifest of the store records which one was used.",
        device,
        reason,
    )
    return None


def _self_test(engine: FastJLMatrices) -> str | None:
    """Return what is wrong with the extension on its device, or ``None``.

    Vectors of small integers are exact in float16, so tolerances are for float32 sums alone. They are long enough for
    one tile per multiprocessor, the last of them not full. Bounds of norms are 8 standard deviations.
    """
    num_entries = _TILE * (engine.multiprocessors - 1) + 3
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(-4, 5, (2, num_entries), generator=generator, device="cpu").float()
    first, last = torch.zeros(2, num_entries, dtype=torch.float32, device="cpu")
    first[0] = last[-1] = 1.0
    rows = torch.stack([x, y, x - 2 * y, first, last, torch.zeros_like(x)]).to(engine.device)
    features = engine.project(rows, _COLUMNS, _TEST_SEED)
    gains = features[:-1].square().sum(1) / rows[:-1].square().sum(1) / _COLUMNS
    if not bool(((gains > 0.5) & (gains < 1.5)).all()):
        return (
            f"squared norms of features were off by factors of {[round(gain, 3) for gain in gains.tolist()]}"
        )
    if bool(features[-1].any()):
        return "a row of zeros had features other than zero"
    slack = 1e-4 * float(features.abs().max())
    if float((features[2] - features[0] + 2 * features[1]).abs().max()) > slack:
        return "the features of x - 2 y were not those of x minus twice those of y"
    for repeats in (1, 2, 4):  # 6, 12 and 24 rows: the functions for 8, 16 and 32
        again = engine.project(rows.repeat(repeats, 1), _COLUMNS, _TEST_SEED)
        if not bool(((again - features.repeat(repeats, 1)).abs() <= slack).all()):
            return f"{len(again)} rows had other features than the same {len(rows)} rows before"
    for value in (math.inf, math.nan):
        bad = rows.clone()
        bad[1, 2] = value
        finite = engine.project(bad, _COLUMNS, _TEST_SEED).isfinite().all(1).tolist()
        if finite.pop(1):
            return f"a gradient of {value} gave finite features"
        if not all(finite):
            return f"a gradient of {value} spoiled the features of other rows"
    return None
