"""Communication between the ranks of one run, launched by torchrun or joined by ``torch.distributed``.

Processes share rows through the store without communication (:mod:`trak_lite.store.sharing`). Ranks do more: an
error of one rank ends the others, sums over train rows are reduced, and rank 0 sends preconditioned targets to all.
Each call has a gloo group of its own, which leaves the process groups of the script alone and lets ranks share a GPU.
A failed rank sets a key in the key-value store of the group, which the others check while they compute.

Every rank must make the same calls in the same order.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from trak_lite.core.meeting import ended_ranks, meeting_place, part_of
from trak_lite.errors import RankError

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

_FAILED = "failed"
_PATIENCE = 30.0  # seconds until a waiting rank warns, and until a store that does not reply is given up
_LOOK_EVERY = 0.2  # seconds
_LONGEST_WAIT = timedelta(days=7)  # another rank may retrain models; one that is killed is noticed at once
_LONGEST_EXIT = 10.0  # seconds that the end of the process waits for a reply of the store
_LONGEST_CONNECTING = timedelta(minutes=5)
_ADVICE = (
    "Every rank must make the same calls; those for one rank alone (in an 'if rank == 0:') need "
    "Attributor(distributed=False)."
)
_calls = 0
"""Number of collective calls of this process. It is the same on every rank."""


@final
@dataclass(eq=False)
class Lockstep:
    """Collective operations among the ranks that share one sharded model; no-ops for an unsharded model."""

    _group: Any = None
    """The process group; without one there is one rank."""
    _device: torch.device | None = None

    @property
    def is_alone(self) -> bool:
        """Whether there is only one rank, without a process group."""
        return self._group is None

    def sums(self, *mine: bool) -> list[int]:
        """Return for each flag the number of ranks that set it; all ranks must call this."""
        if self._group is None:
            return [int(flag) for flag in mine]
        counts = torch.tensor(mine, dtype=torch.int64, device=self._device)
        dist.all_reduce(counts, group=self._group)
        return counts.tolist()

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank; all ranks must call this."""
        return self.sums(flag)[0] > 0


class Ranks:
    """The processes that make a call together, from the point of view of one of them; this class is one alone."""

    rank: int = 0
    """Number of this process."""
    size: int = 1
    """Number of processes."""
    lockstep: Lockstep = Lockstep()
    """The ranks that hold parts of the same model and fill the same table. The code that borrows the model sets it."""
    _check: Callable[[], None] | None = None

    def watch(self) -> None:
        """Raise :class:`RankError` with the rank and the reason if another rank failed."""
        if self._check is not None:
            self._check()

    @contextmanager
    def checking(self, check: Callable[[], None]) -> Iterator[None]:
        """Let :meth:`watch` also call a function, inside the block. Its exceptions end the work."""
        self._check = check
        try:
            yield
        finally:
            self._check = None

    def agree(self, what: str, value: str, *, wait: bool = True) -> None:
        """Raise :class:`RankError` on all ranks if they have different values.

        ``wait=False`` compares with the first rank that calls this, without waiting.
        """

    def comes_first(self, what: str) -> bool:
        """Return whether this is the first rank to arrive at a job that one rank does for all. Never waits."""
        return True

    def broadcast(self, what: str, value: Callable[[], Value]) -> Value:
        """Return the value of rank 0, a JSON value or an array, on every rank; only rank 0 calls ``value``."""
        return value()

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors on rank 0 by their sums over ranks, in place. On other ranks they become undefined."""

    def send_to_all(self, tensor: Tensor) -> None:
        """Replace a tensor by that of rank 0, in place."""

    def merged(self, value: Value, merge: Callable[[Value, Value], Value]) -> Value:
        """Return the merged values of all ranks, JSON values or arrays, on every rank.

        They are merged in the order of ranks: the first argument of ``merge`` is that of the lower ranks. Memory: two
        values, for any number of ranks.
        """
        return value


@contextmanager
def joined_ranks(call: str, *, distributed: bool | None = None) -> Iterator[Ranks]:
    """Context manager of a call that all ranks make together. It begins and ends when all of them are there.

    An error that leaves the block ends the other ranks: they raise :class:`~trak_lite.errors.RankError` at their next
    check, as they do if another rank makes another call, or none. The description of the call is the same on all ranks.
    ``distributed=None`` joins the other ranks if the script was launched by torchrun, or has a process group, with more
    than one rank; ``False`` never does.
    """
    meeting = None if distributed is False else meeting_place()
    if meeting is None:
        yield Ranks()
        return
    global _calls
    _calls += 1
    ranks = _TorchRanks(*meeting, number=_calls, call=call)
    try:
        ranks.enter()
        yield ranks
        ranks.leave()
    except BaseException as error:
        ranks.report(error)
        raise
    finally:
        ranks.close()


@final
class _TorchRanks(Ranks):
    def __init__(self, store: Any, rank: int, size: int, *, number: int, call: str = "a call") -> None:
        """Watch the call with this number; ``store`` is that of all calls."""
        self.rank, self.size = rank, size
        self._call = call
        self._store = part_of(str(number), store)
        self._group: Any = None
        self._work: Any = None
        """The pending operation of the group."""
        self._steps: Counter[str] = Counter()
        self._failure: str | None = None
        """The reason of the first rank that failed."""
        self._lost: str | None = None
        """The reason why the store cannot be reached."""
        self._silence = 0.0
        """Seconds that the main thread has waited since the last look for a failure."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="trak_lite ranks", daemon=True)
        self._thread.start()

    def enter(self) -> None:
        """Wait for all ranks, connect to them, and compare the call."""
        self._ask(lambda: self._store.set(f"arrived {self.rank}", ""))
        self._ask(lambda: self._store.add("arrived", 1))
        self._wait(lambda: self._ask(lambda: self._store.add("arrived", 0)) == self.size, self._miss)
        self._failure = self._ask(self._read_failure)
        self.watch()  # a rank that has arrived and failed does not connect
        store = part_of("group", self._store)
        self._group = self._ask(lambda: self._connected(store))
        if isinstance(self._group, RuntimeError):
            raise self._stopped(
                f"Rank {self.rank} cannot connect to the other ranks ({self._group}). On several machines, set "
                "GLOO_SOCKET_IFNAME to the network interface that connects them."
            )
        self.agree("call", self._call)

    def _connected(self, store: Any) -> Any:
        """Return a group of all ranks, or the error. It blocks if a rank has ended since it arrived."""
        try:
            group = dist.ProcessGroupGloo(store, self.rank, self.size, _LONGEST_CONNECTING)
        except RuntimeError as error:
            return error
        group.set_timeout(_LONGEST_WAIT)
        return group

    def leave(self) -> None:
        """Wait for all ranks, because one may still fail, and rank 0 may serve the store."""
        self._together("the end of the call", self._group.barrier)

    def report(self, error: BaseException) -> None:
        """Record this rank's error for the other ranks, unless the call has failed already."""
        if self._failure is None and self._lost is None:
            failure = f"Rank {self.rank} failed in {self._call} ({type(error).__name__}: {error})."
            reason = str(error) if isinstance(error, RankError) else failure
            with contextlib.suppress(RankError):  # the store cannot be reached
                self._ask(lambda: self._store.compare_set(_FAILED, "", reason))

    def close(self) -> None:
        self._closed.set()
        self._thread.join(_LOOK_EVERY)  # the store may not reply
        if self._thread.is_alive():
            # The process aborts if a thread returns from torch's C++ code while the interpreter exits.
            atexit.register(self._thread.join, _LONGEST_EXIT)
        is_pending = self._work is not None
        group, self._group, self._work = [self._group], None, None
        if is_pending:
            # The destructor waits for the operation, and so for ranks that still compute: no reference may stay here.
            threading.Thread(target=group.clear, name="trak_lite close", daemon=True).start()

    def watch(self) -> None:
        super().watch()
        if self._failure is not None or self._lost is not None:
            raise self._stopped(self._failure or str(self._lost))

    def agree(self, what: str, value: str, *, wait: bool = True) -> None:
        other = self._sent(what, value, 0) if wait else self._first_value(what, value)
        differing = torch.from_numpy(np.array([self.size if value == other else self.rank]))
        if wait:
            self._together(what, self._group.allreduce, [differing], dist.ReduceOp.MIN)
        rank = int(differing)
        if rank < self.size:
            value = self._sent(what, value, rank) if wait else value
            raise RankError(
                f"Rank {rank} has the {what} {value[:200]!r}, but another rank has {other[:200]!r}. All ranks "
                f"need the same model, data and settings (set a seed before the model is built). {_ADVICE}"
            )

    def comes_first(self, what: str) -> bool:
        return self._first_value(f"first at {what}", str(self.rank)) == str(self.rank)

    def broadcast(self, what: str, value: Callable[[], Value]) -> Value:
        received: Value = self._sent(what, value() if self.rank == 0 else None, 0)
        return received

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            moved = tensor.cpu().contiguous()
            self._together("a sum over train rows", self._group.reduce, moved, 0)
            if self.rank == 0:
                tensor.copy_(moved)

    def send_to_all(self, tensor: Tensor) -> None:
        moved = tensor.cpu().contiguous()
        self._together("a tensor of rank 0", self._group.broadcast, moved, 0)
        tensor.copy_(moved)

    def merged(self, value: Value, merge: Callable[[Value, Value], Value]) -> Value:
        merged: Value = self._sent("merging", value, 0)
        for rank in range(1, self.size):
            merged = merge(merged, self._sent("merging", value, rank))
        return merged

    def _sent(self, what: str, value: Any, source: int) -> Any:
        data = np.frombuffer(bytearray(_encoded(value) if self.rank == source else b""), np.uint8)
        length = torch.from_numpy(np.array([len(data)]))
        self._together(what, self._group.broadcast, length, source)
        if self.rank != source:
            data = np.empty(int(length), np.uint8)
        self._together(what, self._group.broadcast, torch.from_numpy(data), source)
        return value if self.rank == source else _decoded(data.tobytes())

    def _together(self, what: str, operation: Callable[..., Any], *arguments: Any) -> None:
        """Run an operation of all ranks; raise :class:`RankError` if another rank fails or is lost."""
        try:
            self._work = operation(*arguments)
            self._wait(self._work.is_completed)
            self._work.wait()
            self._work = None
        except RankError:
            raise
        except RuntimeError as error:  # a rank that failed has recorded that before it disconnected
            self._work = None
            lost = (
                f"Rank {self.rank} lost the others during {what} ({error}). One of them may have been killed."
            )
            raise self._stopped(self._ask(self._read_failure) or lost) from error
        finally:
            del operation  # it would keep the connections open as long as a traceback exists

    def _first_value(self, what: str, value: str) -> str:
        """Return the value of the first rank that calls this, without waiting for other ranks."""
        self._steps[what] += 1
        key = f"{what} {self._steps[what]}"
        try:
            stored: bytes = self._ask(lambda: self._store.compare_set(key, "", value))
        except RankError:
            self.watch()
            logger.warning(
                "The ranks' key-value store did not reply for %d s; rank %d continues without it.",
                _PATIENCE,
                self.rank,
            )
            return value
        return stored.decode()

    def _wait(
        self, is_done: Callable[[], bool], check: Callable[[float], None] = lambda waited: None
    ) -> None:
        """Wait until a function returns true; call ``check`` with the seconds waited.

        Raises :class:`RankError` if another rank failed, or the store does not reply for ``_PATIENCE`` seconds.
        """
        waited, pause = 0.0, 0.001
        while True:
            failure = self._failure  # read before is_done(): what was done before a failure counts
            if is_done():
                return
            if self._silence > _PATIENCE:  # not at once: rank 0 may serve the store, and leave first
                failure = self._lost or f"The ranks' key-value store does not reply for {_PATIENCE:.0f} s."
            if failure is not None:
                raise self._stopped(failure)
            check(waited)
            time.sleep(pause)
            waited += pause  # not by a clock: this process may have been suspended
            self._silence += pause
            pause = min(2 * pause, _LOOK_EVERY)

    def _ask(self, request: Callable[[], Value]) -> Value:
        """Return the result of a request to the store, which may take minutes if its machine is lost."""
        answer: Future[Value] = Future()

        def ask() -> None:
            try:
                answer.set_result(request())
            except RuntimeError as error:
                answer.set_exception(error)

        threading.Thread(target=ask, name="trak_lite request", daemon=True).start()
        self._wait(answer.done)
        try:
            return answer.result()
        except RuntimeError as error:
            self._lost = _unreachable(error)
            raise self._stopped(self._lost) from error

    def _look(self) -> None:
        """Look for a failure again and again, in the background."""
        try:
            # A connection of its own, if torch supports it: a request of another thread may hold the shared one.
            store = self._store.clone() if hasattr(self._store, "clone") else self._store
            while not self._closed.wait(_LOOK_EVERY):
                self._failure = self._read_failure(store)
                self._silence = 0.0  # if the main thread counts on at this moment, the next look does it
        except RuntimeError as error:
            self._lost = _unreachable(error)

    def _read_failure(self, store: Any = None) -> str | None:
        store = self._store if store is None else store
        return store.get(_FAILED).decode() if store.check([_FAILED]) else None

    def _miss(self, waited: float) -> None:
        """Warn of a long wait for ranks that have not made this call; raise if they will not."""
        gone = self._ask(ended_ranks)
        must_end = bool(gone) or waited > _LONGEST_WAIT.total_seconds()
        if not (must_end or _PATIENCE < waited <= _PATIENCE + _LOOK_EVERY):  # once
            return
        missing = self._ask(self._missing)
        ended = f", and the scripts of ranks {_listed(gone)} have ended" if gone else ""
        text = (
            f"Rank {self.rank} of {self.size} waits for ranks {_listed(missing)} to make the call "
            f"{self._call}{ended}. {_ADVICE}"
        )
        if must_end:
            failure = self._ask(self._read_failure)  # of a rank that failed in this call before it ended
            raise self._stopped(failure) if failure else RankError(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.size) if not self._store.check([f"arrived {rank}"])]

    def _stopped(self, reason: str) -> RankError:
        return RankError(
            f"{reason} Rank {self.rank} therefore stops. Finished rows are stored. Remove the cause and make the call "
            "again to continue, with any number of ranks."
        )


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _encoded(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(torch.from_numpy(value) if isinstance(value, np.ndarray) else value, stream)
    return stream.getvalue()


def _decoded(data: bytes) -> Any:
    value = torch.load(io.BytesIO(data), weights_only=True)
    return value.numpy() if isinstance(value, Tensor) else value


def _unreachable(error: RuntimeError) -> str:
    return f"The process that serves the ranks' key-value store cannot be reached ({error})."
