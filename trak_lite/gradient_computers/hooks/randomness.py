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
    """State of torch's generators on the CPU and on accelerators."""

    states: Mapping[torch.device, Tensor]

    @classmethod
    def of(cls, values: Iterable[Any]) -> RandomState:
        """Return the state that an operation on these values draws from."""
        devices = {value.device for value in values if isinstance(value, Tensor)}
        return cls({device: _state(device) for device in devices if device.type != "meta"})

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
            module, arguments = _generator(device)
            module.set_rng_state(state, *arguments)


def _state(device: torch.device) -> Tensor:
    module, arguments = _generator(device)
    state: Tensor = module.get_rng_state(*arguments)
    return state


def _generator(device: torch.device) -> tuple[Any, tuple[torch.device, ...]]:
    """Return the module that has the state of a device's generator, and how it is told the device."""
    if device.type == "cpu":
        return torch, ()
    module = torch.get_device_module(device)
    return module, () if device.type == "mps" else (device,)
