"""Device differences: float64, precision of float32 products, deterministic sums, cuDNN's recurrent layers, copies."""

from __future__ import annotations

import contextlib
import functools
import random
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import get_worker_info

Float32Products: TypeAlias = Literal["ieee", "tf32"]
"""How float32 products are computed: in full precision, or with factors rounded to 10 bits of mantissa (TF32)."""
SCRATCH: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
"""Memory that passes write to and nobody reads later: it holds no values from one batch to the next."""


def is_scratch(tensor: Tensor) -> bool:
    """Whether a tensor is in scratch memory, to which replays may write too."""
    return tensor.untyped_storage() in SCRATCH


@functools.cache
def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating dtype of a device: float64, or float32 if it does not support float64."""
    if device.type in ("cpu", "cuda", "meta"):
        return torch.float64
    try:
        torch.ones(1, dtype=torch.float64, device=device).add_(1)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError):  # TypeError: mps; RuntimeError: other GPUs without float64 units
        return torch.float32
    return torch.float64


def float64_device(device: torch.device) -> torch.device:
    """Return the device if it supports float64, else the CPU."""
    return device if wide_dtype(device) == torch.float64 else torch.device("cpu")


def in_float64(values: Tensor) -> Tensor:
    """Return values in float64 on their device, or on the CPU if their device does not support float64."""
    # Move first, then cast: a device without float64 cannot perform the cast.
    return values.to(float64_device(values.device)).double()


def precise(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 or better."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values to a device; from the host to an accelerator without waiting, through pinned memory.

    The pinned memory belongs to torch's allocator, which does not reuse it before the copy is done.
    """
    is_dense = values.layout == torch.strided and not values.is_nested
    if values.device.type != "cpu" or not is_dense or not _pins_memory(device):
        return values.to(device)
    by_channel = values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last)
    dense = values if by_channel else values.contiguous()
    return dense.pin_memory().to(device, non_blocking=True)


def _pins_memory(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type and device.type != "mps"


class _Begun(Protocol):
    is_done: bool
    """Whether nothing has to be waited for."""


_Key = TypeVar("_Key")
_Copy = TypeVar("_Copy", bound=_Begun)


@final
class HostCopy:
    """A copy of tensors to the host. From an accelerator it goes on while the host and the device do other work."""

    def __init__(self, *values: Tensor) -> None:
        device = values[0].device
        self.is_done = not _pins_memory(device)
        """Whether nothing has to be waited for: the tensors were on the CPU."""
        if self.is_done:
            self._host = [tensor.cpu() for tensor in values]
            return
        self._host = [
            torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True) for tensor in values
        ]
        for host, tensor in zip(self._host, values, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._event = torch.Event(device)
        self._event.record(torch.accelerator.current_stream(device))

    def arrays(self) -> list[NDArray[Any]]:
        """Wait until the copy is done, and return one array per tensor; from a CPU they share the tensors' memory."""
        if not self.is_done:
            self._event.synchronize()
        return [tensor.numpy() for tensor in self._host]


def copied_ahead(tiles: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield the tensors of ``(key, *tensors)`` as arrays, in order.

    From an accelerator, the next tensors are computed while the last ones are copied.
    """
    for key, copy in one_behind((key, HostCopy(*tensors)) for key, *tensors in tiles):
        yield key, *copy.arrays()


def one_behind(copies: Iterable[tuple[_Key, _Copy]]) -> Iterator[tuple[_Key, _Copy]]:
    """Yield keys and copies in order, each when the next one was begun, or at once if nothing has to be waited for.

    A copy that was begun before a failure is yielded before the error is raised.
    """
    waiting: list[tuple[_Key, _Copy]] = []
    try:
        for begun in copies:
            yield from waiting
            waiting = [begun]
            if begun[1].is_done:
                waiting = []
                yield begun
    except Exception:
        yield from waiting
        raise
    yield from waiting


def add_at_(total: Tensor, dim: int, index: Tensor, values: Tensor) -> Tensor:
    """Add ``values`` to the slices ``index`` of ``total`` along ``dim`` in deterministic order; return ``total``.

    On the CPU this is :meth:`torch.Tensor.index_add_`. On CUDA ``index_add_`` uses atomic adds in any order, so the
    last bits differ between runs; ``index_put_`` with ``accumulate=True`` sorts the indices there.
    """
    if total.device.type == "cpu":  # on the CPU it is index_put_ that adds atomically, in several threads
        return total.index_add_(dim, index, values)
    total.transpose(0, dim).index_put_((index,), values.transpose(0, dim), accumulate=True)
    return total


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Compute float32 products in full inside the block: without TF32, bfloat16 and the caller's autocast."""
    with without_autocast(device), float32_products(device, "ieee"):
        yield


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Switch off autocast of the caller on a device and on the host inside the block."""
    with contextlib.ExitStack() as stack:
        for kind in {"cpu", device.type} - {"meta"}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def float32_products(device: torch.device, products: Float32Products) -> Iterator[None]:
    """Compute float32 products of a device in this way inside the block, whatever torch's settings are.

    TF32 has 10 mantissa bits and is torch's default for convolutions on CUDA. Products on the host are float32 in both
    ways, so the setting has no effect on models on the CPU. torch's settings are process-wide; they are restored on
    exit.
    """
    backends: Any = torch.backends
    host = [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]
    accelerator = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    on_host = device.type == "cpu"
    allowed = ("tf32",) if products == "tf32" else ("ieee", "none")
    if all(setting.fp32_precision in ("ieee", "none") for setting in host) and (
        on_host or all(setting.fp32_precision in allowed for setting in accelerator)
    ):
        yield
        return
    way: Float32Products = "ieee" if on_host else products
    # general settings first: the others inherit them
    settings = [backends, backends.cudnn, *accelerator, *host]
    wanted = [way] * (2 + len(accelerator)) + ["ieee"] * len(host)
    before = [setting.fp32_precision for setting in settings]
    # Models may read torch's older flags (torch.backends.cudnn.flags does), and torch raises if these disagree with
    # the newer ones. Set both, the older ones first: setting them overwrites the newer ones.
    cudnn, matmul = _readable(_cudnn_allows_tf32), _readable(torch.get_float32_matmul_precision)
    try:
        _set_older(
            None if cudnn is None else way == "tf32",
            None if matmul is None else "high" if way == "tf32" else "highest",
        )
        _set(settings, wanted)
        yield
    finally:
        _set_older(cudnn, matmul)
        _set(settings, before)


def _set_older(cudnn: bool | None, matmul: str | None) -> None:
    """Assign torch's older flags the values that are not ``None``, unless they already have them."""
    if cudnn is not None and _readable(_cudnn_allows_tf32) != cudnn:
        torch.backends.cudnn.allow_tf32 = cudnn
    if matmul is not None and _readable(torch.get_float32_matmul_precision) != matmul:
        torch.set_float32_matmul_precision(matmul)


def _set(settings: list[Any], values: Sequence[str]) -> None:
    """Assign each setting its value unless it already has it, possibly by inheritance."""
    for setting, value in zip(settings, values, strict=True):
        if setting.fp32_precision != value:
            setting.fp32_precision = value


def _cudnn_allows_tf32() -> bool:
    return bool(torch.backends.cudnn.allow_tf32)


def _readable(read: Any) -> Any:
    """Return an older flag of torch, or ``None`` if it cannot represent the state of the newer flags."""
    try:
        return read()
    except RuntimeError:
        return None


@contextmanager
def model_pass(model: nn.Module, products: Float32Products = "ieee") -> Iterator[None]:
    """Run a model inside the block with these float32 products and such that a backward pass is possible.

    Recurrent layers in eval mode run without cuDNN, which supports their backward pass in train mode only. Transformer
    layers with modules that are not torch's run without the fast path of eval mode, which reads the weights of
    submodules and does not call them: it leaves out adapters.
    """
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    recurrent = device.type != "cpu" and any(
        isinstance(m, nn.RNNBase) and not m.training for m in model.modules()
    )
    is_fast = torch.backends.mha.get_fastpath_enabled() and any(map(_is_adapted, model.modules()))
    with float32_products(device, products), switched_off(torch.backends.cudnn, recurrent):
        if is_fast:
            torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            if is_fast:
                torch.backends.mha.set_fastpath_enabled(True)


def _is_adapted(module: nn.Module) -> bool:
    inner = module.modules() if isinstance(module, nn.TransformerEncoderLayer) else ()
    return any(part is not module and not type(part).__module__.startswith("torch.") for part in inner)


@contextmanager
def switched_off(backend: Any, is_needed: bool) -> Iterator[None]:
    """Switch a backend of torch off in the block if needed; not through its flags(), which also sets its others."""
    if not (is_needed and backend.enabled):
        yield
        return
    backend.enabled = False
    try:
        yield
    finally:
        backend.enabled = True


def rng_state(device: torch.device) -> Tensor:
    """Return the random state of a device's default generator."""
    module, arguments = _generator(device)
    # Lifted as torch.tensor does, from which a recording knows that this thread has made it.
    state: Tensor = torch.ops.aten.lift_fresh(module.get_rng_state(*arguments))
    return state


def set_rng_state(device: torch.device, state: Tensor) -> None:
    """Set the random state of a device's default generator."""
    module, arguments = _generator(device)
    module.set_rng_state(state, *arguments)


def seed_rng(device: torch.device, seed: int) -> None:
    """Seed the default generator of one device only."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
        return
    module, arguments = _generator(device)
    with module.device(device) if arguments else contextlib.nullcontext():
        module.manual_seed(seed)


def _generator(device: torch.device) -> tuple[Any, tuple[torch.device, ...]]:
    """Return the module that accesses a device's generator, and the device arguments of its functions."""
    if device.type == "cpu":
        return torch, ()
    return torch.get_device_module(device), () if device.type == "mps" else (device,)  # mps has one device


def forked_rng() -> contextlib.AbstractContextManager[None]:
    """Return a context that restores the random states of the CPU and of all devices of the accelerator.

    In a worker of a loader, which cannot use an accelerator, only that of the CPU.
    """
    device = _accelerator()
    if device is None:
        return torch.random.fork_rng(devices=[])
    # torch warns about several devices unless they are named.
    devices = range(torch.accelerator.device_count())
    return torch.random.fork_rng(devices=devices, device_type=device.type)


def _accelerator() -> torch.device | None:
    available = get_worker_info() is None and torch.accelerator.is_available()
    return torch.accelerator.current_accelerator() if available else None


@contextmanager
def undisturbed(seed: int | None = None) -> Iterator[None]:
    """Restore all random states after the block, also after an error.

    These are the states of Python, NumPy and torch, the latter on the CPU and every device of the accelerator. The
    block begins with those of a seed, if one is given.
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global state, which training uses
    with forked_rng():
        try:
            if seed is not None:
                # torch.manual_seed formats the stack for every kind of device that is not there: a millisecond.
                seed_torch = (
                    torch.default_generator.manual_seed if _accelerator() is None else torch.manual_seed
                )
                for seeded in (random.seed, np.random.seed, seed_torch):
                    seeded(seed)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def eigh_of_positive(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues ``(k,)``, ascending, and eigenvectors ``(k, k)`` of a positive semi-definite matrix.

    LAPACK's divide-and-conquer solver, which torch calls, does not converge for some low-rank matrices. These are
    decomposed by SVD, whose singular values equal the eigenvalues.
    """
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        vectors, values, _ = torch.linalg.svd(matrix)
        values, vectors = values.flip(0), vectors.flip(1)
    return values, vectors
