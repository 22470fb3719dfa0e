"""The device of the measurements: time between two synchronisations, peak memory, and the reason to skip a case."""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import ROOT

STAND_IN = "stand_in"
LIBRARY = "TRAK_LITE_STAND_IN"
_TURN_SECONDS = 0.05  # short calls are repeated until one measurement takes about this long
Call = Callable[[], Any]


class NotHere(Exception):
    """A case cannot run on this device or machine; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A device, and whether sizes are those of a rehearsal."""

    device: torch.device
    small: bool

    @classmethod
    def open(cls, device: str, *, small: bool) -> Bench:
        """Return the bench of a device; ``"stand_in"`` loads the simulated accelerator of tests/device first."""
        if device.startswith(STAND_IN):
            _load_stand_in()
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device here. Rehearse with --device stand_in --small.")
        made = torch.device(device)
        return cls(
            made if made.index is not None or made.type == "cpu" else torch.device(made.type, 0), small
        )

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def rounds(self) -> int:
        """Measurements of which the median counts."""
        return 1 if self.small else 5

    def name(self) -> str:
        """Return the name of the device, by which results are found again."""
        return torch.cuda.get_device_name(self.device) if self.is_cuda else self.device.type

    def needs_cuda(self, what: str) -> None:
        """Raise NotHere on any other device."""
        if not self.is_cuda:
            raise NotHere(f"{what} needs CUDA, the device is {self.device.type}")

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()

    def seconds(self, call: Call, repeats: int = 1) -> float:
        """Return the mean wall time of a call; the device is idle before the first and after the last."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        self.synchronize()
        return (time.perf_counter() - start) / repeats

    def interleaved(self, calls: Mapping[str, Call]) -> dict[str, list[float]]:
        """Return the seconds of every call in every round; all calls run once before."""
        repeats = {}
        for name, call in calls.items():
            call()
            once = self.seconds(call)
            repeats[name] = 1 if self.small else max(1, min(50, round(_TURN_SECONDS / max(1e-6, once))))
        found: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.rounds):
            for name, call in calls.items():
                found[name].append(self.seconds(call, repeats[name]))
        return found

    def peak_mib(self, call: Call) -> float | None:
        """Return the growth of the device's allocated memory during a call, in MiB; ``None`` if it is not CUDA."""
        if not self.is_cuda:
            call()
            return None
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        self.synchronize()
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20


def milliseconds(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the median of every list of seconds, in ms."""
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def ratio(times: Mapping[str, list[float]], name: str, to: str) -> float:
    """Return the median over rounds of the ratio of two calls."""
    return statistics.median(a / b for a, b in zip(times[name], times[to], strict=True))


def _load_stand_in() -> None:
    """Load the simulated accelerator, compiled to ``TRAK_LITE_STAND_IN`` or, if that is not set, to runs/."""
    spec = importlib.util.spec_from_file_location(STAND_IN, ROOT / "tests" / "device" / "stand_in.py")
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    library = os.environ.get(LIBRARY)
    module.load(Path(library) if library else module.built(ROOT / "runs" / STAND_IN))
