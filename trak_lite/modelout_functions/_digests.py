"""Bytes and digests of the parts of a task (code, tensors, arrays), identical in every process."""

from __future__ import annotations

import hashlib
import inspect
from types import CodeType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["array_json", "code_bytes", "number_json", "sha256", "source_bytes", "tensor_json"]


def sha256(raw: bytes) -> str:
    """Return the digest in hex."""
    return hashlib.sha256(raw).hexdigest()


def tensor_json(tensor: Tensor) -> dict[str, Any] | None:
    """Return dtype, shape and digest of the values; ``None`` for a tensor without plain values (sparse, meta)."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return None
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    raw = plain.view(torch.uint8).numpy().tobytes()
    return {"tensor": str(tensor.dtype), "shape": list(tensor.shape), "sha256": sha256(raw)}


def array_json(array: NDArray[Any]) -> dict[str, Any]:
    """Return dtype, shape and digest of the values of an array that holds no Python objects."""
    return {"array": _dtype(array.dtype), "shape": list(array.shape), "sha256": sha256(array.tobytes())}


def number_json(number: np.generic) -> dict[str, Any]:
    """Return dtype and value of a NumPy scalar."""
    return {"scalar": _dtype(number.dtype), "value": str(number)}


def _dtype(dtype: np.dtype[Any]) -> str:
    return dtype.str if dtype.names is None else repr(dtype.descr)


def source_bytes(thing: type | CodeType) -> bytes:
    """Return the source text of a class or a function's code; empty if it has none (interactive prompt, exec)."""
    try:
        return inspect.getsource(thing).encode()
    except (OSError, TypeError):
        return b""


def code_bytes(code: CodeType) -> bytes:
    """Return a function's bytecode and constants, without line numbers and file names."""
    form = (
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_flags,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
    )
    constants = [_constant(value) for value in code.co_consts]
    parts = [code.co_code, code.co_exceptiontable, repr(form).encode(), *constants]
    # Prefix each part with its length: with a separator, different parts could give the same bytes.
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def _constant(value: Any) -> bytes:
    """Return the bytes of a constant; sets are sorted because their order differs between processes."""
    if isinstance(value, CodeType):
        return code_bytes(value)
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(repr, value))}".encode()
    return repr(value).encode()
