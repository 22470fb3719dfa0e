"""Kinds of batches whose passes may be replayed: what tells them apart, and what is known of each."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module

from trak_lite.data.batches import attributes_beside
from trak_lite.gradient_computers.recording import Recording
from trak_lite.gradient_computers.reference import CheckedComputer
from trak_lite.gradient_computers.self_check import NamedRows, SelfCheck
from trak_lite.modelout_functions import AbstractModelOutput
from trak_lite.types import Batch

_MOST_ENTRIES: Final = 1 << 14
"""Of a list in a batch that is replayed: all are compared in every batch."""
_PLAIN: Final = frozenset({bool, int, float, str, type(None)})


class ReplayedComputer(CheckedComputer, Protocol):
    """Interface of a gradient computer whose passes can be replayed."""

    modelout_fn: AbstractModelOutput
    self_check: bool
    checks: SelfCheck

    @property
    def differentiates_the_model(self) -> bool:
        """Whether the gradients are those of the model with its own weights."""

    def unchecked(self) -> AbstractContextManager[None]:
        """Leave the self-check out in the block, off its schedule."""

    def structure(self, batch: Batch, /) -> tuple[Any, int]:
        """Return the key of the checks of such a batch, and the most batches from one compared to the next, or 0."""


class Pass(NamedTuple):
    """A pass over a batch, for which a replay may stand."""

    computer: ReplayedComputer
    leaves: Sequence[Tensor]
    """The tensors of the batch."""
    work: Callable[[], Sequence[Tensor]]

    def without_checks(self) -> Sequence[Tensor]:
        """Run it without self-checks, whose operations are no part of it."""
        checks, self.computer.self_check = self.computer.self_check, False
        try:
            return self.work()
        finally:
            self.computer.self_check = checks

    def apart(self) -> Sequence[Tensor]:
        """Run it once more, as no batch of the schedule of the self-check."""
        with self.computer.unchecked():
            return self.work()

    @property
    def num_bytes(self) -> int:
        """Memory of the batch."""
        return sum(leaf.nbytes for leaf in self.leaves)


@dataclasses.dataclass(slots=True, eq=False)
class Kind:
    """What is known of the batches of one layout."""

    count: int = 0
    first: int = 0
    """Number of its first batch among those of all kinds."""
    last: int = 0
    seconds: float = float("inf")
    """Shortest pass after the first, whose plan has to be made."""
    recording: Recording | None = None
    graph: Callable[..., list[Tensor]] | None = None
    """Runs in place of the recording."""
    may_be_captured: bool = True
    is_unsteady: bool = False
    """Whether the pass itself has other bits from time to time, as with atomic additions on a GPU."""
    surroundings: tuple[Any, ...] = ()
    outside: tuple[Any, ...] = ()
    """Values outside the model in its batches."""
    structure: Any = None
    gap: int = 0
    """Largest number of batches from one comparison to the next."""
    compared: int = 0
    """Number of its last batch that was compared."""
    confirmed: bool = False
    uncompared: Pass | None = None
    """Its last replayed batch, if none was compared since."""
    rows: list[NamedRows] = dataclasses.field(default_factory=list)
    """Those of the replayed batches since a comparison."""
    num_replayed: int = 0
    num_other_paths: int = 0
    refusal: str | None = None

    def forget_replays(self) -> None:
        """Compare no batch that was replayed so far."""
        self.uncompared = None
        self.rows.clear()


def is_watched(device: torch.device) -> bool:
    """Whether a mode of torch sees or changes operations, or hooks of all modules or autocast of the caller do."""
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
        or torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch.is_inference_mode_enabled()
        or any(torch.is_autocast_enabled(kind) for kind in {"cpu", device.type} - {"meta"})
    )


def surroundings(leaf: Tensor) -> tuple[Any, ...]:
    """Return settings of the process that choose kernels; a CUDA graph keeps its kernels."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    of_cuda: tuple[Any, ...] = ()
    if leaf.is_cuda:
        reduced = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
        of_cuda = cudnn.deterministic, cudnn.benchmark, *reduced
    return (
        leaf.device,
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        *of_cuda,
    )


def leaves_of(batch: Batch) -> tuple[list[Tensor] | None, Hashable]:
    """Return the tensors of a batch, and what else it holds; no tensors if that may differ from sample to sample."""
    leaves: list[Tensor] = []
    flags: list[Hashable] = []

    def walk(value: Any) -> bool:
        if isinstance(value, Tensor):
            leaves.append(value)
            flags.append("tensor")
            is_plain = type(value) is Tensor and value.layout == torch.strided and not value.requires_grad
            return is_plain and not vars(value)  # attributes of a user
        parts: Sequence[Any] | None = None
        if isinstance(value, Mapping):
            parts, names = [*value, *value.values()], [str(len(value))]
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            parts = [getattr(value, name) for name in names]
        elif isinstance(value, tuple | list):
            if len(value) > _MOST_ENTRIES:
                return False
            parts, names = value, [str(len(value))]
        if parts is not None:
            beside = attributes_beside(value)
            flags.append((type(value), *names, *beside))
            return all(map(walk, parts)) and all(map(walk_beside, beside.values()))
        if type(value) in _PLAIN:
            flags.append((type(value), repr(value)))  # 1, 1.0 and True are equal, but lead to other dtypes
            return True
        base = next((kind for kind in (int, float, str) if isinstance(value, kind)), object)
        flags.append((type(value), base.__repr__(value)))  # that of other classes may leave digits out
        return isinstance(value, enum.Enum) or (base is not object and not attributes_beside(value))

    def walk_beside(value: Any) -> bool:
        index = next((i for i, leaf in enumerate(leaves) if leaf is value), None)
        flags.append(index)
        return index is not None or walk(value)

    usable = walk(batch) and bool(leaves) and all(leaf.dim() for leaf in leaves)
    usable = usable and len(set(map(id, leaves))) == len(leaves)
    return (leaves if usable else None), tuple(flags)
