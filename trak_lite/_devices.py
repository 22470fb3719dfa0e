"""What devices can and cannot do: float64, full float32 products, sums in a fixed order, cuDNN's recurrent layers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "add_at_",
    "eigh_of_positive",
    "float64_device",
    "full_float32",
    "in_float64",
    "model_pass",
    "rng_state",
    "seed_rng",
    "set_rng_state",
    "wide_dtype",
]


@functools.cache
def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating dtype that a device computes in: float64, or float32 where it has no float64.

    Example:
        >>> wide_dtype(torch.device("cpu")), wide_dtype(torch.device("mps"))
        (torch.float64, torch.float32)
    """
    if device.type in ("cpu", "cuda", "meta"):
        return torch.float64
    try:
        torch.ones(1, dtype=torch.float64, device=device).add_(1)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError):  # TypeError: mps; RuntimeError: GPUs of other makers without the unit
        return torch.float32
    return torch.float64


def float64_device(device: torch.device) -> torch.device:
    """Return the device itself if it computes in float64, and the CPU otherwise."""
    return device if wide_dtype(device) == torch.float64 else torch.device("cpu")


def in_float64(values: Tensor) -> Tensor:
    """Return values in float64: where they are, or on the CPU if there is no float64 where they are."""
    # Moved before it is cast: a device without float64 cannot cast to it on the way.
    return values.to(float64_device(values.device)).double()


def add_at_(total: Tensor, dim: int, index: Tensor, values: Tensor) -> Tensor:
    """Add slices of ``values`` to the slices ``index`` of ``total`` along ``dim``, in a fixed order; return ``total``.

    What :meth:`torch.Tensor.index_add_` does on the CPU. On CUDA that one adds atomically, in any order, so that the
    last bits of a row would differ from run to run; ``index_put_`` with ``accumulate`` sorts the indices there.
    """
    if (
        total.device.type == "cpu"
    ):  # where it is the other way round: index_put_ adds atomically, by several threads
        return total.index_add_(dim, index, values)
    total.transpose(0, dim).index_put_((index,), values.transpose(0, dim), accumulate=True)
    return total


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Multiply float32 numbers in float32 inside the block: no TF32, no bfloat16, whatever torch's settings are.

    TF32 keeps 10 bits of mantissa and is torch's default for convolutions on CUDA. The settings are those of the
    process; they are given back at the end.
    """
    backends: Any = torch.backends
    host = [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]
    accelerator = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    used = host if device.type == "cpu" else accelerator + host
    if all(setting.fp32_precision in ("ieee", "none") for setting in used):
        yield
        return
    settings = [backends, backends.cudnn, *accelerator, *host]  # the general ones first: the others inherit
    before = [setting.fp32_precision for setting in settings]
    # torch refuses to read its older flags where they disagree with the newer ones, and models read them
    # (torch.backends.cudnn.flags does): both are set, the older ones first, as they overwrite the newer.
    cudnn, matmul = _readable(_cudnn_allows_tf32), _readable(torch.get_float32_matmul_precision)
    try:
        if cudnn:
            torch.backends.cudnn.allow_tf32 = False
        if matmul not in (None, "highest"):
            torch.set_float32_matmul_precision("highest")
        _set(settings, ["ieee"] * len(settings))
        yield
    finally:
        if cudnn:
            torch.backends.cudnn.allow_tf32 = True
        if matmul not in (None, "highest"):
            torch.set_float32_matmul_precision(matmul)
        _set(settings, before)


def _set(settings: list[Any], values: list[str]) -> None:
    """Give settings values where they do not have them already, by inheritance perhaps."""
    for setting, value in zip(settings, values, strict=True):
        if setting.fp32_precision != value:
            setting.fp32_precision = value


def _cudnn_allows_tf32() -> bool:
    return bool(torch.backends.cudnn.allow_tf32)


def _readable(read: Any) -> Any:
    """Return an older flag of torch, or ``None`` where the newer ones were set to something that it cannot say."""
    try:
        return read()
    except RuntimeError:
        return None


@contextmanager
def model_pass(model: nn.Module) -> Iterator[None]:
    """Run a model inside the block with full float32 products, and such that a backward pass can follow.

    Recurrent layers in eval mode run without cuDNN, whose backward pass exists in train mode only.
    """
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    with full_float32(device), contextlib.nullcontext() if device.type == "cpu" else _without_cudnn(model):
        yield


@contextmanager
def _without_cudnn(model: nn.Module) -> Iterator[None]:
    recurrent = any(isinstance(m, nn.RNNBase) and not m.training for m in model.modules())
    if not (recurrent and torch.backends.cudnn.enabled):
        yield
        return
    torch.backends.cudnn.enabled = False  # and not by flags(), which sets all of cuDNN's other flags as well
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = True


def rng_state(device: torch.device) -> Tensor:
    """Return the state of a device's own generator."""
    module, arguments = _generator(device)
    state: Tensor = module.get_rng_state(*arguments)
    return state


def set_rng_state(device: torch.device, state: Tensor) -> None:
    """Give a device's own generator a state."""
    module, arguments = _generator(device)
    module.set_rng_state(state, *arguments)


def seed_rng(device: torch.device, seed: int) -> None:
    """Seed a device's own generator, and no other one."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
        return
    module, arguments = _generator(device)
    with module.device(device) if arguments else contextlib.nullcontext():
        module.manual_seed(seed)


def _generator(device: torch.device) -> tuple[Any, tuple[torch.device, ...]]:
    """Return the module that has the state of a device's generator, and how it is told the device."""
    if device.type == "cpu":
        return torch, ()
    return torch.get_device_module(device), () if device.type == "mps" else (device,)  # mps has one device


def eigh_of_positive(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues ``(k,)``, ascending, and eigenvectors ``(k, k)`` as columns of a positive semi-definite matrix.

    LAPACK's divide and conquer, which torch calls, does not converge for some matrices of low rank: these are
    decomposed by their singular values, which are the eigenvalues.
    """
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:
        vectors, values, _ = torch.linalg.svd(matrix)
        values, vectors = values.flip(0), vectors.flip(1)
    return values, vectors
