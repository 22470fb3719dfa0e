"""Replay of the pass over a batch, from the samples to their features, for batches that run the same operations.

A recorded pass costs its torch operations; the pass that is recorded also costs hooks, autograd's graph and rules in
Python. A recording belongs to the shapes of a batch and to the state of the model, the task and the projector. It is
made if enough batches follow. It is used after a second pass, over another batch, had the same bits, and compared again
on the schedule of the self-check and after the last batch. On CUDA, short operations are started together, as a graph.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Protocol, cast, final

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module

from trak_lite.core.devices import in_float64
from trak_lite.data.batches import attributes_beside, is_equal
from trak_lite.errors import MODEL_FAILURES, refuse_machine_failure, refuse_signal
from trak_lite.gradient_computers.comparison import rounding_of
from trak_lite.gradient_computers.cuda_graphs import captured
from trak_lite.gradient_computers.pass_state import Outside, identities, python_state
from trak_lite.gradient_computers.recording import OtherPathError, Recording, UnrecordableError, version_of
from trak_lite.gradient_computers.reference import CheckedComputer
from trak_lite.gradient_computers.self_check import NamedRows, SelfCheck, SelfCheckError, is_scheduled
from trak_lite.gradient_computers.tape import Tape
from trak_lite.modelout_functions import AbstractModelOutput
from trak_lite.types import Batch

logger = logging.getLogger(__name__)

_SECONDS, _PASSES = 0.05, 6.0
"""What a recording and the comparisons of its replays cost: some seconds, and some passes."""
_SAVED, _SAVED_ON_CPU = 0.9, 0.125
"""Part of a pass that a replay saves: most of a small one's on an accelerator, which waits for Python."""
_MOST_KINDS: Final = 1024
_MOST_ENTRIES: Final = 1 << 14
"""Of a list in a batch that is replayed: all are compared in every batch."""
_MOST_RECORDINGS, _MOST_BYTES = 64, 1 << 28
"""Recordings that are kept, if what they hold fits into so many bytes: texts of varying length have many shapes."""
_MOST_GRAPHS: Final = 8
_MOST_CHANGES: Final = 8
"""Of the model, the task or the projector before a batch is replayed, until the log tells."""
_MOST_OTHER_PATHS: Final = 4
_CAPTURED_AFTER, _CAPTURED_FOR = 3, 16
"""Replays before one is captured as a CUDA graph, and batches that have to follow."""


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


class _Pass(NamedTuple):
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

    def is_due(self, kind: _Kind) -> bool:
        """Whether samples of it are compared on the schedule of the self-check."""
        computer = self.computer
        return computer.self_check and computer.checks.is_due(kind.structure, len(self.leaves[0]))


@dataclasses.dataclass(slots=True, eq=False)
class _Kind:
    """What is known of the batches of one layout."""

    count: int = 0
    first: int = 0
    """Number of its first batch among those of all kinds."""
    last: int = 0
    seconds: float = float("inf")
    """Shortest pass after the first, whose plan has to be made."""
    recording: Recording | None = None
    constants: Sequence[tuple[Tensor, int | None, int]] = ()
    """Tensors that the recording takes to be unchanged, their versions and places; a training may change them."""
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
    uncompared: _Pass | None = None
    """Its last replayed batch, if none was compared since."""
    rows: list[NamedRows] = dataclasses.field(default_factory=list)
    """Those of the replayed batches since a comparison."""
    num_replayed: int = 0
    num_other_paths: int = 0
    refusal: str | None = None

    def forget_replays(self) -> None:
        self.uncompared = None
        self.rows.clear()

    def has_other_constants(self) -> bool:
        return any(
            version_of(tensor) != version or tensor.data_ptr() != address
            for tensor, version, address in self.constants
        )


@final
class Replays:
    """Runs passes, and replays those that are known to run the same operations. Not thread-safe."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Any, _Kind] = OrderedDict()
        self._projector: Callable[[], Any] = lambda: None
        """A weak reference to the projector of the kinds, whose tensors are freed with it."""
        self._state: tuple[int, ...] = ()
        """What the model, the task, the computer and the projector held in the last batch."""
        self._alive: list[Any] = []
        """What the state names by ``id``, as long as there are recordings."""
        self._outside: Outside | None = None
        """What the code of the model and the task reads elsewhere; known from the first recording on."""
        self._num_batches, self._num_changes = 0, 0
        self._told: set[str] = set()
        self._pool: Any = None
        """Memory of the CUDA graphs, one of which runs at a time."""
        self._can_capture = True
        self._keeping: Recording | None = None
        """The recording of the last replay."""

    def __reduce__(self) -> Any:
        """Leave recordings out of copies and pickles: they belong to the tensors of one model."""
        return Replays, ()

    def run(
        self,
        computer: ReplayedComputer,
        batch: Batch,
        projector: object,
        setting: Sequence[Hashable],
        work: Callable[[], Sequence[Tensor]],
        is_scratch: Callable[[Tensor], bool],
        to_come: float | None = None,
    ) -> Sequence[Tensor]:
        """Return what ``work`` returns for a batch, possibly by a replay; see :meth:`AbstractGradientComputer.run`.

        Recordings end with the projector. Without ``to_come``, as many batches are expected as there were.

        Raises:
            SelfCheckError: If a replay that was in use differs from the pass; names the rows since the last comparison.
        """
        leaves, flags = _leaves_of(batch)
        alive: list[Any] = []
        state = None
        if leaves is None:
            self._tell(computer, "batches hold more than plain tensors, numbers and texts")
        elif _is_watched(leaves[0].device):
            self._tell(computer, "a mode of torch, autocast or hooks of all modules are on")
        elif type(projector).__weakrefoffset__:
            state = self._present(computer, projector, alive)
        if leaves is None or state is None:
            self._keep_for(None)
            return work()
        is_same = state == self._state and self._projector() is projector
        if not is_same:
            # The model, the task or the projector is another one.
            self._num_changes += 1
            if self._num_changes == _MOST_CHANGES:
                self._tell(computer, f"it or the task changed {_MOST_CHANGES} times before a replay")
            self._forget()
            self._state, self._projector = state, weakref.ref(projector, self._forget)
        outside = self._outside.values() if self._outside is not None else ()
        if outside is None:
            self._keep_for(None)
            return work()
        pass_ = _Pass(computer, leaves, work)
        layout = tuple((leaf.shape, leaf.dtype, leaf.stride(), leaf.device) for leaf in leaves)
        kind = self._kind((layout, flags, _surroundings(leaves[0]), tuple(setting), outside))
        kind.count += 1
        self._num_batches += 1
        self._keep_for(None if kind.graph else kind.recording)
        kind.first, kind.last = kind.first or self._num_batches, self._num_batches
        if kind.refusal is not None or (
            kind.recording is None and not self._pays(kind, leaves[0].is_cpu, to_come)
        ):
            return _timed(kind, work)
        if kind.recording is None:
            self._alive = alive
            kind.structure, kind.gap = computer.structure(batch)
            return self._recorded(kind, pass_, is_scratch)
        computer.checks.refuse_failed(kind.structure)
        if kind.has_other_constants():
            kind.forget_replays()  # with other values, their pass would show nothing
            self._refuse(kind, computer, "a tensor that is no parameter, buffer or input has changed")
            return work()
        due = pass_.is_due(kind) or kind.count - kind.compared >= kind.gap
        if not kind.confirmed or due or (not computer.self_check and is_scheduled(kind.count)):
            return self._compared(kind, pass_, work)
        if kind.uncompared is None and not self._has_room(pass_):
            return work()
        results = self._replayed(kind, pass_)
        if results is None:
            return work()
        self._num_changes = 0
        kind.rows += computer.checks.named
        with computer.checks.batch(kind.structure, len(leaves[0]), ()):
            kind.num_replayed += 1
        if kind.may_be_captured and kind.num_replayed >= _CAPTURED_AFTER:
            self._capture(kind, leaves, to_come)
        kind.uncompared = pass_
        return results

    def _has_room(self, pass_: _Pass) -> bool:
        """Whether the batch can be kept for a comparison beside those of other kinds."""
        waiting = sum(kind.uncompared.num_bytes for kind in self._kinds.values() if kind.uncompared)
        return not waiting or waiting + pass_.num_bytes <= _MOST_BYTES

    def _present(
        self, computer: ReplayedComputer, projector: object, alive: list[Any]
    ) -> tuple[int, ...] | None:
        """Return what a pass reads now; ``None`` if that cannot be told."""
        try:
            state = identities(computer.model, computer.modelout_fn, (computer, projector), alive)
        except Exception as error:
            refuse_signal(error)
            self._tell(computer, f"its attributes raise errors ({type(error).__name__})")
            return None
        if state is None:
            self._tell(computer, "it holds tensors without memory of their own, or too much to compare")
        return state

    def _tell(self, computer: ReplayedComputer, reason: str) -> None:
        """Log why passes are not replayed, once for each reason."""
        if reason not in self._told:
            self._told.add(reason)
            logger.info("Passes of %s are not replayed: %s.", type(computer.model).__name__, reason)

    def confirm(self, complete: bool) -> None:
        """Compare the last replayed batch of every kind with its pass, if none was since.

        Equal bits show that nothing had changed until then. Where something has changed since that is compared before
        replays, a pass would show nothing. If not ``complete``, only forget the batches, which hold the projector.
        """
        waiting = [kind for kind in self._kinds.values() if kind.uncompared is not None]
        if waiting and complete:
            computer = cast("_Pass", waiting[-1].uncompared).computer
            if self._present(computer, self._projector(), []) == self._state:
                for kind in waiting:
                    self._settle(kind)
        for kind in waiting:
            kind.forget_replays()
            if kind.refusal is not None:
                kind.recording = kind.graph = None
        self._keep_for(None)

    def _settle(self, kind: _Kind) -> None:
        """Compare the last replayed batch of a kind, if that was not done and a pass would be the same."""
        pass_, kind.uncompared = kind.uncompared, None
        if pass_ is None or kind.has_other_constants() or _is_watched(pass_.leaves[0].device):
            return
        if _surroundings(pass_.leaves[0]) != kind.surroundings:
            return
        if self._outside is None or self._outside.values() == kind.outside:
            self._keep_for(None)
            self._compared(kind, pass_, pass_.apart)

    def _keep_for(self, recording: Recording | None) -> None:
        """Let this recording alone hold values from replay to replay: batches of many shapes would hold too much."""
        if self._keeping is not None and self._keeping is not recording:
            self._keeping.forget()
        self._keeping = recording

    def _pays(self, kind: _Kind, on_cpu: bool, to_come: float | None) -> bool:
        """Whether replays of the batches of a kind that may follow save more time than a recording costs."""
        saved = self._expected(kind, to_come) * (_SAVED_ON_CPU if on_cpu else _SAVED) * kind.seconds
        if kind.count < 3 or saved <= _SECONDS + _PASSES * kind.seconds:
            return False
        recorded = [other for other in self._kinds.values() if other.recording is not None]
        held = sum(other.recording.num_bytes for other in recorded if other.recording is not None)
        if len(recorded) < _MOST_RECORDINGS and held < _MOST_BYTES:
            return True
        # Batches of many shapes in turn would otherwise replace each other's recordings before these are used.
        for other in recorded:
            if self._num_batches - other.last > 8 + 2 * (other.last - other.first) / other.count:
                self._settle(other)
                other.recording, other.graph, other.confirmed = None, None, False
                return True
        return False

    def _expected(self, kind: _Kind, to_come: float | None) -> float:
        return kind.count if to_come is None else to_come * kind.count / self._num_batches

    def _capture(self, kind: _Kind, leaves: Sequence[Tensor], to_come: float | None) -> None:
        """Make a CUDA graph of a recording, if that saves time. It is used after it had the bits of a pass."""
        assert kind.recording is not None
        graphs = sum(other.graph is not None for other in self._kinds.values())
        if self._expected(kind, to_come) < _CAPTURED_FOR or graphs == _MOST_GRAPHS:
            return
        kind.may_be_captured = False
        on_cuda = all(leaf.is_cuda and leaf.device == leaves[0].device for leaf in leaves)
        if kind.recording.may_wait or not (on_cuda and self._can_capture):
            return
        if not graphs:
            self._pool = torch.cuda.graph_pool_handle()  # a pool ends with its last graph
        try:
            kind.graph = captured(kind.recording.whole, leaves, kind.recording.constants, self._pool)
        except Exception as error:
            # Of CUDA or a compiler, or a shortage of memory: the recording needs none of it.
            refuse_signal(error)
            logger.info("A replay is not captured as a CUDA graph, and no other will be: %s", error)
            self._can_capture = False
        if kind.graph is None:
            logger.debug(
                "A replay over %d samples is not captured: its kernels take as long.", len(leaves[0])
            )
        else:
            kind.confirmed = False
            logger.debug("A replay over %d samples is captured as a CUDA graph.", len(leaves[0]))

    def _forget(self, _: Any = None) -> None:
        self._kinds.clear()
        self._alive.clear()
        self._state, self._num_batches, self._keeping = (), 0, None
        self._outside = None

    def _kind(self, key: tuple[Any, ...]) -> _Kind:
        """Return what is known of a kind, as the newest; forget the oldest if there are too many."""
        kind = self._kinds.pop(key, None) or _Kind(surroundings=key[2], outside=key[-1])
        self._kinds[key] = kind
        if len(self._kinds) > _MOST_KINDS:
            self._settle(next(iter(self._kinds.values())))
            self._kinds.popitem(last=False)
        return kind

    def _recorded(self, kind: _Kind, pass_: _Pass, is_scratch: Callable[[Tensor], bool]) -> Sequence[Tensor]:
        """Run a pass and record it, if its plan says that every batch runs like it."""
        computer, leaves, work = pass_
        if not (kind.gap and computer.differentiates_the_model):
            self._refuse(kind, computer, "the model moves rows by their values")
            return work()
        if pass_.is_due(kind):
            return work()
        model, task = computer.model, computer.modelout_fn
        outside = Outside() if self._outside is None else None
        try:
            before = python_state(model, task, leaves[0].device, outside)
        except Exception as error:  # of an object that code names, such as a proxy outside of its context
            refuse_signal(error)
            self._refuse(kind, computer, f"an object that its code names raises {type(error).__name__}")
            return work()
        if before is not None and outside is not None:
            self._compare(outside)
        tape = Tape(leaves, [*model.parameters(), *model.buffers()], is_scratch)
        try:
            with tape:
                results = pass_.without_checks()
        except MODEL_FAILURES as error:
            # Of the batch, which fails again, or of something that bears no modes.
            refuse_machine_failure(error)
            self._refuse(kind, computer, f"the recorded pass failed ({type(error).__name__})")
            return work()
        after = python_state(model, task, leaves[0].device)
        if before is None or before != after:
            tape.refuse(
                "a pass runs hooks, draws random numbers, changes what the model or the task holds, or reads values by "
                "tolist in TorchScript or by DLPack"
            )
        try:
            kind.recording = tape.finish(results)
            kind.constants = [(one, version_of(one), one.data_ptr()) for one in tape.constants()]
        except UnrecordableError as error:
            self._refuse(kind, computer, str(error))
        else:
            logger.debug("A pass of %s over %d samples is recorded.", type(model).__name__, len(leaves[0]))
        return results

    def _compare(self, outside: Outside) -> None:
        """Divide kinds by values outside the model; those known so far are of the present ones."""
        values = outside.values()
        if values is not None:
            self._outside = outside
            self._kinds = OrderedDict(((*key[:-1], values), kind) for key, kind in self._kinds.items())
            for kind in self._kinds.values():
                kind.outside = values

    def _replayed(self, kind: _Kind, pass_: _Pass) -> list[Tensor] | None:
        """Return the results of a replay, ``None`` if the pass has to run."""
        assert kind.recording is not None
        self._keep_for(None if kind.graph else kind.recording)
        try:
            return (kind.graph or kind.recording)(*pass_.leaves)
        except OtherPathError:
            kind.num_other_paths += 1
            if kind.num_other_paths > _MOST_OTHER_PATHS:
                recording = kind.recording
                self._refuse(kind, pass_.computer, "Python reads other values in other batches")
                if kind.uncompared is not None:
                    kind.recording = recording  # its last replay is still to be compared
        except MODEL_FAILURES as error:  # the pass names the cause, or succeeds
            refuse_signal(error)
        self._keep_for(None)
        return None

    def _compared(self, kind: _Kind, pass_: _Pass, work: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        computer, kind.compared = pass_.computer, kind.count
        replayed = self._replayed(kind, pass_)
        suspected = computer.checks.suspected(row for kind in self._kinds.values() for row in kind.rows)
        results = work()
        if replayed is None:
            return results
        kind.forget_replays()
        dtypes = {p.dtype for p in computer.model.parameters()} | {computer.autocast_dtype or torch.float64}
        are_close = functools.partial(_close, rounding=rounding_of(dtypes))
        same = all(map(_same_bits, results, replayed))
        close = same or all(map(are_close, results, replayed))
        if same or (close and self._is_unsteady(kind, pass_, results)):
            kind.confirmed = True
            return results
        if kind.graph is not None:
            logger.info("A CUDA graph has other bits than the pass.")
            kind.graph, kind.confirmed = None, False
            replayed = self._replayed(kind, pass_)  # earlier rows may be those of the recording
            if replayed is None or all(map(_same_bits, results, replayed)):
                kind.confirmed = replayed is not None
                return results
            close = all(map(are_close, results, replayed))
        self._refuse(kind, computer, "a replay has other bits")
        if kind.num_replayed and not close:
            error = SelfCheckError(
                f"{type(computer.model).__name__} or its task gave other rows than the operations that it ran in an "
                "earlier batch: something outside the batch and outside the model's tensors has changed (a counter, a "
                "cache, a global value), or Python read a value of the batch unseen. Expected rows that depend on the "
                "sample and the weights only."
            )
            for other in self._kinds.values():
                other.forget_replays()
            computer.checks.fail(error, kind.structure, suspected)
            raise error
        return results

    @staticmethod
    def _is_unsteady(kind: _Kind, pass_: _Pass, results: Sequence[Tensor]) -> bool:
        """Whether another pass over the same batch has other bits than the first; on a CPU it has the same."""
        if not kind.is_unsteady and results[0].device.type != "cpu":
            kind.is_unsteady = not all(map(_same_bits, results, pass_.apart()))
        return kind.is_unsteady

    def _refuse(self, kind: _Kind, computer: ReplayedComputer, reason: str) -> None:
        kind.refusal, kind.recording, kind.graph = reason, None, None
        self._tell(computer, reason)


def _timed(kind: _Kind, work: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    start = time.process_time()
    results = work()
    if kind.count > 1:
        kind.seconds = min(kind.seconds, time.process_time() - start)
    return results


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and is_equal(one, other)


def _close(one: Tensor, other: Tensor, rounding: float) -> bool:
    """Whether all rows, or numbers such as f, are equal up to rounding; small ones up to that of the largest."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = (in_float64(part).reshape(len(part), -1) for part in (one, other))
    same = (one == other) | (one.isnan() & other.isnan())
    error = torch.linalg.vector_norm((one - other).masked_fill(same, 0.0), dim=1)
    size = torch.linalg.vector_norm(one, dim=1).nan_to_num(0.0, 0.0, 0.0)
    return bool((error <= rounding * size.clamp(min=1e-2 * float(size.max()))).all())


def _is_watched(device: torch.device) -> bool:
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


def _surroundings(leaf: Tensor) -> tuple[Any, ...]:
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


def _leaves_of(batch: Batch) -> tuple[list[Tensor] | None, Hashable]:
    """Return the tensors of a batch, and what else it holds; no tensors if that may differ from sample to sample."""
    leaves: list[Tensor] = []
    flags: list[Hashable] = []

    def walk(value: Any) -> bool:
        if isinstance(value, Tensor):
            leaves.append(value)
            flags.append("tensor")
            return type(value) is Tensor and value.layout == torch.strided and not value.requires_grad
        parts: Sequence[Any] | None = None
        if isinstance(value, Mapping):
            parts, names = [*value.values()], [*value]
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            parts = [getattr(value, name) for name in names]
        elif isinstance(value, tuple | list):
            if len(value) > _MOST_ENTRIES:
                return False
            parts, names = value, [len(value)]
        if parts is not None:
            beside = attributes_beside(value)
            flags.append((type(value), *names, *beside))
            return all(map(walk, parts)) and all(map(walk_beside, beside.values()))
        flags.append((type(value), repr(value)))  # 1, 1.0 and True are equal, but lead to other dtypes
        has_more = hasattr(value, "__dict__") and not isinstance(value, enum.Enum)  # attributes
        return value is None or (isinstance(value, bool | int | float | str) and not has_more)

    def walk_beside(value: Any) -> bool:
        index = next((i for i, leaf in enumerate(leaves) if leaf is value), None)
        flags.append(index)
        return index is not None or walk(value)

    usable = walk(batch) and bool(leaves) and all(leaf.dim() for leaf in leaves)
    usable = usable and len(set(map(id, leaves))) == len(leaves)
    return (leaves if usable else None), tuple(flags)
