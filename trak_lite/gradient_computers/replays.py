"""Replay of the pass over a batch, from the samples to their features, for batches that run the same operations.

A recorded pass costs its torch operations; the pass that is recorded also costs hooks, autograd's graph and rules in
Python. A recording belongs to the shapes of a batch and to the state of the model, the task and the projector. It is
made if enough batches follow. It is used after a second pass, over another batch, had the same bits, and compared again
on the schedule of the self-check and after the last batch. On CUDA, short operations are started together, as a graph.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, cast, final

import torch
from torch import Tensor

from trak_lite.core.devices import in_float64
from trak_lite.data.batches import is_equal
from trak_lite.errors import MODEL_FAILURES, refuse_machine_failure, refuse_signal
from trak_lite.gradient_computers.batch_kinds import (
    Kind,
    Pass,
    ReplayedComputer,
    is_watched,
    leaves_of,
    surroundings,
)
from trak_lite.gradient_computers.comparison import rounding_of
from trak_lite.gradient_computers.cuda_graphs import captured
from trak_lite.gradient_computers.outside import Outside
from trak_lite.gradient_computers.pass_state import identities, python_state
from trak_lite.gradient_computers.randomness import ChangedParametersError
from trak_lite.gradient_computers.recording import OtherPathError, Recording, UnrecordableError
from trak_lite.gradient_computers.self_check import SelfCheckError, is_scheduled
from trak_lite.gradient_computers.tape import Tape
from trak_lite.types import Batch

logger = logging.getLogger(__name__)

_SECONDS, _PASSES = 0.05, 6.0
"""What a recording and the comparisons of its replays cost: some seconds, and some passes."""
_SAVED, _SAVED_ON_CPU = 0.9, 0.125
"""Part of a pass that a replay saves: most of a small one's on an accelerator, which waits for Python."""
_MOST_KINDS: Final = 1024
_MOST_RECORDINGS, _MOST_BYTES = 64, 1 << 28
"""Recordings that are kept, if what they hold fits into so many bytes: texts of varying length have many shapes."""
_MOST_GRAPHS: Final = 8
_MOST_CHANGES: Final = 8
"""Of the model, the task or the projector before a batch is replayed, until the log tells."""
_MOST_OTHER_PATHS: Final = 4
_CAPTURED_AFTER, _CAPTURED_FOR = 3, 16
"""Replays before one is captured as a CUDA graph, and batches that have to follow."""


@final
class Replays:
    """Runs passes, and replays those that are known to run the same operations. Not thread-safe."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Any, Kind] = OrderedDict()
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
        to_come: float | None = None,
    ) -> Sequence[Tensor]:
        """Return what ``work`` returns for a batch, possibly by a replay; see :meth:`AbstractGradientComputer.run`.

        Recordings end with the projector. Without ``to_come``, as many batches are expected as there were.

        Raises:
            SelfCheckError: If a replay that was in use differs from the pass; names the rows since the last comparison.
        """
        leaves, flags = leaves_of(batch)
        alive: list[Any] = []
        state = None
        if leaves is None:
            self._tell(computer, "batches hold more than plain tensors, numbers and texts")
        elif is_watched(leaves[0].device):
            self._tell(computer, "a mode of torch, autocast or hooks of all modules are on")
        elif type(projector).__weakrefoffset__:
            state = self._present(computer, projector, alive)
        if leaves is None or state is None:
            self._keep_for(None)
            return work()
        if state != self._state or self._projector() is not projector:
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
        pass_ = Pass(computer, leaves, work)
        layout = tuple((leaf.shape, leaf.dtype, leaf.stride(), leaf.device) for leaf in leaves)
        kind = self._kind((layout, flags, surroundings(leaves[0]), tuple(setting), outside))
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
            return self._recorded(kind, pass_)
        computer.checks.refuse_failed(kind.structure)
        if kind.recording.is_outdated():
            kind.forget_replays()  # with other values, their pass would show nothing
            self._refuse(kind, computer, "a tensor that is no parameter, buffer or input has changed")
            return work()
        size, checks = len(leaves[0]), computer.checks
        due = checks.is_due(kind.structure, size) if computer.self_check else is_scheduled(kind.count)
        if not kind.confirmed or due or kind.count - kind.compared >= kind.gap:
            return self._compared(kind, pass_, work)
        if kind.uncompared is None and not self._has_room(pass_):
            return work()
        results = self._replayed(kind, pass_)
        if results is None:
            return work()
        self._num_changes = 0
        kind.rows += checks.replayed(kind.structure, size)
        kind.num_replayed += 1
        if kind.may_be_captured and kind.num_replayed >= _CAPTURED_AFTER:
            self._capture(kind, leaves, to_come)
        kind.uncompared = pass_
        return results

    def _has_room(self, pass_: Pass) -> bool:
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
            computer = cast("Pass", waiting[-1].uncompared).computer
            if self._present(computer, self._projector(), []) == self._state:
                for kind in waiting:
                    self._settle(kind)
        for kind in waiting:
            kind.forget_replays()
            if kind.refusal is not None:
                kind.recording = kind.graph = None
        self._keep_for(None)

    def _settle(self, kind: Kind) -> None:
        """Compare the last replayed batch of a kind, if that was not done and a pass would be the same."""
        pass_, kind.uncompared = kind.uncompared, None
        if pass_ is None or kind.recording is None or kind.recording.is_outdated():
            return
        if is_watched(pass_.leaves[0].device):
            return
        if surroundings(pass_.leaves[0]) != kind.surroundings:
            return
        if self._outside is None or self._outside.values() == kind.outside:
            self._keep_for(None)
            self._compared(kind, pass_, pass_.apart)

    def _keep_for(self, recording: Recording | None) -> None:
        """Let this recording alone hold values from replay to replay: batches of many shapes would hold too much."""
        if self._keeping is not None and self._keeping is not recording:
            self._keeping.forget()
        self._keeping = recording

    def _pays(self, kind: Kind, on_cpu: bool, to_come: float | None) -> bool:
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

    def _expected(self, kind: Kind, to_come: float | None) -> float:
        return kind.count if to_come is None else to_come * kind.count / self._num_batches

    def _capture(self, kind: Kind, leaves: Sequence[Tensor], to_come: float | None) -> None:
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

    def _kind(self, key: tuple[Any, ...]) -> Kind:
        """Return what is known of a kind, as the newest; forget the oldest if there are too many."""
        kind = self._kinds.pop(key, None) or Kind(surroundings=key[2], outside=key[-1])
        self._kinds[key] = kind
        if len(self._kinds) > _MOST_KINDS:
            self._settle(next(iter(self._kinds.values())))
            self._kinds.popitem(last=False)
        return kind

    def _recorded(self, kind: Kind, pass_: Pass) -> Sequence[Tensor]:
        """Run a pass and record it, if its plan says that every batch runs like it."""
        computer, leaves, work = pass_
        if not (kind.gap and computer.differentiates_the_model):
            self._refuse(kind, computer, "the model moves rows by their values")
            return work()
        if computer.self_check and computer.checks.is_due(kind.structure, len(leaves[0])):
            return work()
        model, task = computer.model, computer.modelout_fn
        outside = Outside() if self._outside is None else None
        try:
            before = python_state(model, task, outside)
        except Exception as error:  # of an object that code names, such as a proxy outside of its context
            refuse_signal(error)
            self._refuse(kind, computer, f"an object that its code names raises {type(error).__name__}")
            return work()
        if before is not None and outside is not None:
            self._compare(outside)
        tape = Tape(leaves, [*model.parameters(), *model.buffers()])
        try:
            with tape:
                results = pass_.without_checks()
        except ChangedParametersError:
            raise
        except MODEL_FAILURES as error:
            # Of the batch, which fails again, or of something that bears no modes.
            refuse_machine_failure(error)
            self._refuse(kind, computer, f"the recorded pass failed ({type(error).__name__})")
            return work()
        after = python_state(model, task)
        if before is None or before != after:
            tape.refuse(
                "a pass runs hooks, draws random numbers, changes what the model or the task holds, or reads values by "
                "tolist in TorchScript or by DLPack"
            )
        try:
            kind.recording = tape.finish(results)
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

    def _replayed(self, kind: Kind, pass_: Pass) -> list[Tensor] | None:
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

    def _compared(self, kind: Kind, pass_: Pass, work: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
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
    def _is_unsteady(kind: Kind, pass_: Pass, results: Sequence[Tensor]) -> bool:
        """Whether another pass over the same batch has other bits than the first; on a CPU it has the same."""
        if not kind.is_unsteady and results[0].device.type != "cpu":
            kind.is_unsteady = not all(map(_same_bits, results, pass_.apart()))
        return kind.is_unsteady

    def _refuse(self, kind: Kind, computer: ReplayedComputer, reason: str) -> None:
        kind.refusal, kind.recording, kind.graph = reason, None, None
        self._tell(computer, reason)


def _timed(kind: Kind, work: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
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
