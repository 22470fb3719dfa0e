"""Replay of the random numbers that an operation drew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trak_lite._devices import rng_state, set_rng_state

__all__ = ["RandomState"]


@dataclass(frozen=True, slots=True)
class RandomState:
    """State of torch's generators on the CPU and on accelerators."""

    states: Mapping[torch.device, Tensor]

    @classmethod
    def of(cls, values: Iterable[Any]) -> RandomState:
        """Return the generator states of these values' devices."""
        devices = {value.device for value in values if isinstance(value, Tensor)}
        return cls({device: rng_state(device) for device in devices if device.type != "meta"})

    def has_moved(self) -> bool:
        """Whether random numbers were drawn since the state was saved."""
        return any(not torch.equal(state, rng_state(device)) for device, state in self.states.items())

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Restore the saved states inside the block, so that the same numbers are drawn."""
        now = RandomState({device: rng_state(device) for device in self.states})
        try:
            self._set()
            yield
        finally:
            now._set()

    def _set(self) -> None:
        for device, state in self.states.items():
            set_rng_state(device, state)
