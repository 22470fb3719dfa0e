"""Watches the operations of torch in a context: their names, and the memory that they take."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Watches the operations in its context, also those of functions that are no modules."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self.peak_bytes = 0
        """Largest sum of bytes of the tensors that they made and that existed at the same time."""
        self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.names.add(func.__name__)
        given = {id(storage) for storage in _storages((args, kwargs))}
        found = func(*args, **(kwargs or {}))
        for storage in _storages(found):
            place, size = id(storage), storage.nbytes()
            if place not in given and place not in self._known:
                self._known.add(place)
                self._now += size
                weakref.finalize(storage, self._freed, place, size)
        self.peak_bytes = max(self.peak_bytes, self._now)
        return found

    def _freed(self, place: int, size: int) -> None:
        self._known.discard(place)
        self._now -= size


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """Return the memory of all strided tensors in nested values; sparse ones have none of their own."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return [leaf.untyped_storage() for leaf in leaves if leaf.layout is torch.strided]
