"""Counts what a device is given to do: kernels of torch, launches of Triton, and waits of the host."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

PACKAGE = str(Path(__file__).parents[2] / "trak_lite")
_SIZED_BY_VALUES = (
    "aten.nonzero", "aten.masked_select", "aten._unique2", "aten.unique_", "aten.repeat_interleave.Tensor",
    "aten.equal", "aten.bincount", "aten._local_scalar_dense",
)  # fmt: skip
_COPIES = ("aten._to_copy", "aten.copy_", "aten.copy.")
_MEMORY = (
    "aten.empty", "aten.new_empty", "aten.detach", "aten.lift", "aten.set_", "aten.is_pinned", "aten._pin",
    "trak_lite.launch",  # is counted as the launch that it makes
)  # fmt: skip


@dataclass
class Tally:
    """What was counted, by name; the names of waits end with the line of the package that waits."""

    kernels: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    sites: Counter[str] = field(default_factory=Counter)
    """Kernels and launches by the line of the package that runs them."""
    device_waits: int = 0
    """Waits that the stand-in counted itself, in all threads; 0 on other devices."""

    @property
    def total(self):
        return self.kernels.total() + self.launches.total()

    def since(self, before):
        return Tally(*(getattr(self, part.name) - getattr(before, part.name) for part in fields(self)))


class Counting(TorchDispatchMode):
    """Counts the operators on tensors of a device, in this thread and in the backward passes that it starts.

    An operator of torch counts as one kernel, whatever its parts; views and new memory count nothing.
    """

    def __init__(self, device):
        super().__init__()
        self.device = device
        self._tally = Tally()
        self._before = _device_waits(device)

    @property
    def tally(self):
        return replace(self._tally.since(Tally()), device_waits=_device_waits(self.device) - self._before)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        given = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        found = [leaf for leaf in tree_iter(made) if isinstance(leaf, Tensor)]
        if any(tensor.device.type == self.device.type for tensor in given + found):
            name = str(func)
            if not _is_free(func, name):
                self._tally.kernels[name] += 1
                self._tally.sites[_site()] += 1
            if _waits(name, args, kwargs, given, found):
                self._tally.waits[f"{name} {_site()}"] += 1
        return made

    def launched(self, name):
        self._tally.launches[name] += 1
        self._tally.sites[_site()] += 1


def _device_waits(device):
    return torch.ops.stand_in.waits() if device.type == "stand_in" else 0


def _is_free(func, name):
    if name.startswith(_MEMORY):
        return True
    aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)  # a view


def _waits(name, args, kwargs, given, found):
    if name.startswith(_SIZED_BY_VALUES):
        return True
    if name.startswith(("aten.index.Tensor", "aten.index_put", "aten._index_put")):
        return any(part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1])
    if not name.startswith(_COPIES) or not given or not found:
        return False
    source, target = (args[1], args[0]) if name.startswith("aten.copy") else (args[0], found[0])
    if source.device.type == target.device.type:
        return False
    asked = kwargs.get("non_blocking", args[2] if name.startswith("aten.copy") and len(args) > 2 else False)
    # As on CUDA: an asynchronous copy needs pinned memory at the host's end; from pageable memory the host waits.
    host = source if source.device.type == "cpu" else target
    return not asked or not (host.is_pinned() or (name.startswith("aten._to_copy") and host is target))


def _site():
    """Return the innermost line of the package on the stack, or an empty string in a thread of autograd's."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class _Launcher:
    """Stands in the place of a Triton kernel: counts its launches, and runs it or clears its sums."""

    def __init__(self, name, kernel, counting, runs):
        self.name, self.kernel, self.counting, self.runs = name, kernel, counting, runs

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.counting.launched(self.name)
            if self.runs:
                self.kernel[grid](*args, **options)
            else:
                with _disable_current_modes():
                    args[1].zero_()

        return launch


@contextmanager
def counted(device, *, triton=True):
    """Count in the block; on the stand-in, Triton's kernels are launched in name only: their sums are zeros.

    Without ``triton``, the torch operations that replace its kernels run.
    """
    counting, projectors = Counting(device), "trak_lite.projectors"
    with pytest.MonkeyPatch.context() as patch:
        kinds = frozenset({device.type}) if triton else frozenset()
        patch.setattr(f"{projectors}._kernels._DEVICES", kinds)
        patch.setattr(f"{projectors}.dense.matrices.usable_kernels", lambda *_: None)
        if triton:
            from trak_lite.projectors.sketch import triton as sketches
            from trak_lite.projectors.sketch import triton_matrix as matrices
            from trak_lite.projectors.sketch import triton_vector as vectors

            kernels = {"_ring_sums": vectors, "_tile_sums": vectors, "_matrix_sums": matrices}
            for name, module in kernels.items():
                kernel = getattr(module, name)
                patch.setattr(module, name, _Launcher(name, kernel, counting, device.type == "cuda"))
            if device.type != "cuda":
                patch.setattr(f"{projectors}.sketch.base.usable_kernels", lambda *_: sketches)
        with counting:
            yield counting


def per_batch(run, device, *, triton=True):
    """Return one tally from each load of a batch to the next one; the last is up to the end of the run.

    ``run`` is called with a function to call whenever a batch is loaded (in the collate function).
    """
    states = []
    with counted(device, triton=triton) as counting:
        run(lambda: states.append(counting.tally))
        states.append(counting.tally)
    return [later.since(earlier) for earlier, later in itertools.pairwise(states)]
