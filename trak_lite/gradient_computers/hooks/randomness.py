"""Random numbers that an operation drew, drawn again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["RandomState"]


@dataclass(frozen=True, slots=True)
class RandomState:
    """State of torch's generators on the CPU and on CUDA devices."""

    states: Mapping[torch.device, Tensor]

    @classmethod
    def of(cls, values: Iterable[Any]) -> RandomState:
        """Return the state that an operation on these values draws from."""
        devices = {value.device for value in values if isinstance(value, Tensor)}
        return cls({device: _state(device) for device in devices if device.type in ("cpu", "cuda")})

    def has_moved(self) -> bool:
        """Whether numbers were drawn since."""
        return any(not torch.equal(state, _state(device)) for device, state in self.states.items())

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw the same numbers again inside the block."""
        now = RandomState({device: _state(device) for device in self.states})
        try:
            self._set()
            yield
        finally:
            now._set()

    def _set(self) -> None:
        for device, state in self.states.items():
            if device.type == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)


def _state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
