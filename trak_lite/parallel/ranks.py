"""Communication between the ranks of one run, launched by torchrun or joined by ``torch.distributed``.

Processes share rows through the store without communication (:mod:`trak_lite.parallel.sharing`). Ranks do more: an
error of one rank ends the others, sums over train rows are reduced, and rank 0 sends preconditioned targets to all.
Messages go through the key-value store of the launcher or of the process group. A process group is used only for
tensors and top rows; it is created if there is none.

Every rank must make the same calls in the same order.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch import distributed as dist

from trak_lite.errors import RankError
from trak_lite.parallel.sharing import pauses

__all__ = ["AbstractRanks", "OneRank", "joined_ranks"]

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

_FAILED, _GONE = "failed", "gone"
_PATIENCE = 30.0  # seconds until a waiting rank warns
_LOOK_EVERY = 0.2  # seconds
_calls = 0
"""Number of collective calls of this process. It is the same on every rank."""
_ended_calls: set[int] = set()
"""Numbers of the collective calls whose failure, on any rank, this process has handled."""


class AbstractRanks(ABC):
    """The processes that make a call together, from the point of view of one of them."""

    rank: int
    """Number of this process."""
    size: int
    """Number of processes."""

    @abstractmethod
    def watch(self) -> None:
        """Raise if another rank failed.

        Raises:
            RankError: If another rank failed; names the rank and the reason.
        """

    @abstractmethod
    def broadcast(self, what: str, value: Callable[[], str], *, takes_long: bool = False) -> str:
        """Return the value of rank 0.

        Args:
            what: Name of the value, for messages.
            value: Computes the value. Called on rank 0 only.
            takes_long: A long wait is expected: do not warn about it.
        """

    def once(self, what: str, job: Callable[[], None]) -> None:
        """Call ``job`` on rank 0 after all ranks have arrived; return on every rank when it is done.

        Args:
            what: Name of the job, for messages.
            job: Called on rank 0 only.
        """
        self.merged(0, max)

        def done() -> str:
            job()
            return "done"

        self.broadcast(what, done)

    @abstractmethod
    def value_of_rank_0(self, what: str, value: str) -> str:
        """Return the value of rank 0. Rank 0 does not wait for the others."""

    @abstractmethod
    def first_value(self, what: str, value: str) -> str:
        """Return the value of the first rank that calls this, without waiting for other ranks."""

    def comes_first(self, what: str) -> bool:
        """Return whether this is the first rank to arrive at a job that one rank does for all."""
        return self.first_value(f"first at {what}", str(self.rank)) == str(self.rank)

    def agree(self, what: str, value: str, *, with_rank_0: bool = False) -> None:
        """Raise if a value differs from that of the first rank that calls this.

        Args:
            what: Name of the value, for messages.
            value: The value of this rank.
            with_rank_0: Wait for rank 0, and compare with its value instead.

        Raises:
            RankError: If the values differ.
        """
        said = self.value_of_rank_0(what, value) if with_rank_0 else self.first_value(what, value)
        if said != value:
            raise RankError(
                f"Rank {self.rank} has another {what} than another rank: {value[:200]!r}, there {said[:200]!r}. All "
                "ranks make the same calls with the same model, data and settings (set a seed before the model is "
                "built). Calls that are meant for one rank alone need Attributor(distributed=False)."
            )

    @abstractmethod
    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors on rank 0 by their sums over ranks, in place. On other ranks they become undefined."""

    @abstractmethod
    def send_to_all(self, tensor: Tensor) -> None:
        """Replace a tensor by that of rank 0, in place."""

    @abstractmethod
    def merged(self, value: Value, merge: Callable[[Value, Value], Value]) -> Value:
        """Return the merged values of all ranks, on every rank. Values are merged in pairs, in the order of ranks.

        Args:
            value: The value of this rank; must be picklable.
            merge: Associative function. Its first argument is the value of the lower ranks.
        """


@final
class OneRank(AbstractRanks):
    """A single process, which does not communicate.

    Example:
        >>> OneRank().merged(3, max)
        3
    """

    rank, size = 0, 1

    def watch(self) -> None:
        """Do nothing."""

    def broadcast(self, what: str, value: Callable[[], str], *, takes_long: bool = False) -> str:
        """Return the value."""
        return value()

    def value_of_rank_0(self, what: str, value: str) -> str:
        """Return the value."""
        return value

    def first_value(self, what: str, value: str) -> str:
        """Return the value."""
        return value

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Do nothing: the tensors already are the sums."""

    def send_to_all(self, tensor: Tensor) -> None:
        """Do nothing."""

    def merged(self, value: Value, merge: Callable[[Value, Value], Value]) -> Value:
        """Return the value."""
        return value


@contextmanager
def joined_ranks(call: str, *, distributed: bool | None = None) -> Iterator[AbstractRanks]:
    """Context manager of a call that all ranks make together.

    An error that leaves the block ends the other ranks: they raise :class:`~trak_lite.errors.RankError` at their next
    check.

    Args:
        call: Description of the call. It must be the same on all ranks.
        distributed: ``None`` joins the other ranks if the script was launched by torchrun, or has a process group, with
            more than one rank. ``False`` never does.

    Raises:
        RankError: If another rank makes another call.
    """
    found = None if distributed is False else _meeting_place()
    if found is None:
        yield OneRank()
        return
    global _calls
    _calls += 1
    ranks = _TorchRanks(_part_of("trak_lite", found[0]), *found[1:], number=_calls, call=call)
    try:
        ranks.agree("call", call)
        yield ranks
        ranks.part()
    except BaseException as error:
        ranks.report(error)
        raise
    finally:
        ranks.close()


def _meeting_place() -> tuple[Any, int, int] | None:
    """Return ``(key-value store of all ranks, rank, number of ranks)``, or ``None`` if there is only one rank."""
    if not dist.is_available():
        return None
    if dist.is_initialized():
        if dist.get_world_size() == 1:
            return None
        return (
            torch.distributed.group.WORLD.get_group_store(),  # type: ignore[union-attr]  # it is initialised
            dist.get_rank(),
            dist.get_world_size(),
        )
    if dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return _launcher_store(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return None


def _part_of(name: str, store: Any) -> Any:
    """Return a view of a key-value store whose keys are prefixed with a name."""
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # public, but not listed


@cache
def _launcher_store(attempt: str) -> tuple[Any, int, int]:
    """Return ``(store, rank, number of ranks)`` of the launcher. Cached, because rank 0 may serve the store."""
    # A torchrun agent serves the store before it starts the ranks: if it cannot be reached, it has ended. If rank 0
    # serves the store, it does so only when its script reaches this line, so wait longer.
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    timeout = timedelta(seconds=_PATIENCE) if served else dist.default_pg_timeout
    found = dist.rendezvous("env://", timeout=timeout)  # type: ignore[attr-defined]  # public, but not listed
    store, rank, size = next(found)
    store = _part_of(f"trak_lite/attempt-{attempt}", store)
    atexit.register(_say_goodbye, store, rank)
    return store, rank, size


def _say_goodbye(store: Any, rank: int) -> None:
    """Record that the script of this rank has ended, so that other ranks do not wait for it."""
    with contextlib.suppress(dist.DistError):  # the process that serves the store has ended as well
        _part_of("trak_lite", store).append(_GONE, f"{rank} ")


def _on_cpu(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU, for gloo: NCCL does not support ranks that share a GPU."""
    return tensor.cpu().contiguous()


@final
class _Lookout:
    """Checks in a background thread whether a rank has failed.

    If a machine or its network goes down, a reply of the key-value store may take minutes. Only this thread waits for
    it, so the main thread continues to featurize rows.
    """

    def __init__(self, store: Any, *, number: int) -> None:
        """Start the thread, which clones the connection to ``store``.

        ``store`` contains the failures of all calls; those of this call are under the prefix ``number``.
        """
        self.failure: tuple[int, str] | None = None
        """``(call number, message)`` of a failure in this call, or in another call not in ``_ended_calls``."""
        self.gone: set[int] = set()
        """Ranks whose script has ended."""
        self.lost: str | None = None
        """The error message if the store can no longer be reached."""
        self._store = store
        self._number = number
        self._ended = threading.Event()
        self._asked: float | None = None
        """Time of the pending request to the store, or ``None``."""
        threading.Thread(target=self._look, name="trak_lite ranks", daemon=True).start()

    @property
    def is_silent(self) -> bool:
        """Whether a request to the store has been pending for more than ``_PATIENCE`` seconds."""
        if not self._waits_for_long():
            return False
        time.sleep(_LOOK_EVERY)  # if this process itself was suspended, the reply arrives now
        return self._waits_for_long()

    def end(self) -> None:
        """Stop the thread."""
        self._ended.set()

    def _waits_for_long(self) -> bool:
        asked = self._asked
        return asked is not None and time.monotonic() - asked > _PATIENCE

    def _look(self) -> None:
        try:
            store = self._store.clone() if hasattr(self._store, "clone") else self._store  # torch 2.13 can
            while not self._ended.wait(_LOOK_EVERY):
                self._asked = time.monotonic()
                self.failure = self._found(store)
                if store.check([_GONE]):
                    self.gone = {int(rank) for rank in store.get(_GONE).decode().split()}
                self._asked = None
        except dist.DistError as error:
            self.lost = str(error)

    def _found(self, store: Any) -> tuple[int, str] | None:
        # A rank that failed in an earlier call may never make this one, so check the failures of all calls as well.
        own = _part_of(str(self._number), store)
        if own.check([_FAILED]):
            return self._number, own.get(_FAILED).decode()
        if not store.check([_FAILED]):
            return None
        number, _, said = store.get(_FAILED).decode().partition(" ")
        return None if int(number) in _ended_calls else (int(number), said)


@final
class _TorchRanks(AbstractRanks):
    """Processes that share a key-value store of ``torch.distributed``."""

    def __init__(self, store: Any, rank: int, size: int, *, number: int, call: str = "a call") -> None:
        self.rank, self.size = rank, size
        self._call = call
        self._failures = store  # of all calls
        self._store = _part_of(str(number), store)
        self._number = number
        self._steps: Counter[str] = Counter()
        self._group: Any = None
        self._own_group = False
        self._heard = False
        self._lookout = _Lookout(store, number=number)

    def watch(self) -> None:
        if self._lookout.lost is not None:
            raise self._unreachable(self._lookout.lost)
        if self._lookout.failure is not None:
            raise self._ended_by(*self._lookout.failure)

    def report(self, error: BaseException) -> None:
        """Report this rank's error to the other ranks, unless the failure of the call is already known."""
        _ended_calls.add(self._number)
        if self._lookout.is_silent or self._lookout.lost is not None:
            return  # the store cannot be reached
        known = self._lookout.failure
        if isinstance(error, RankError) and known is not None and known[0] == self._number:
            return
        with contextlib.suppress(dist.DistError):  # the process that serves the store has ended
            said = (
                str(error)
                if isinstance(error, RankError)
                else f"Rank {self.rank} failed in {self._call} ({type(error).__name__}: {error})."
            )
            self._store.set(_FAILED, said)
            self._failures.set(_FAILED, f"{self._number} {said}")

    def broadcast(self, what: str, value: Callable[[], str], *, takes_long: bool = False) -> str:
        key = self._next_step(what)
        self._heard = True
        if self.rank == 0:
            said = value()
            self._ask(lambda: self._store.set(key, said))
            return said
        self._wait_for(key, what, {0}, takes_long=takes_long)
        found: bytes = self._ask(lambda: self._store.get(key))
        return found.decode()

    def value_of_rank_0(self, what: str, value: str) -> str:
        heard = self._heard
        said = self.broadcast(what, lambda: value)
        self._heard = heard  # rank 0 does not wait here, so this is no reason for it to leave last
        return said

    def first_value(self, what: str, value: str) -> str:
        key = self._next_step(what)
        try:
            found: bytes = self._ask(lambda: self._store.compare_set(key, "", value))
        except RankError:
            if self._lookout.lost is not None:
                raise
            logger.warning(
                "Rank %d has heard nothing of the others for %d s, and goes on.", self.rank, _PATIENCE
            )
            return value
        return found.decode()

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        with self._together("a sum over train rows"):
            for tensor in tensors:
                moved = _on_cpu(tensor)
                dist.reduce(moved, 0, group=self._group)
                if moved is not tensor and self.rank == 0:
                    tensor.copy_(moved)

    def send_to_all(self, tensor: Tensor) -> None:
        with self._together("what rank 0 has made"):
            moved = _on_cpu(tensor)
            dist.broadcast(moved, 0, group=self._group)
            if moved is not tensor:
                tensor.copy_(moved)

    def merged(self, value: Value, merge: Callable[[Value, Value], Value]) -> Value:
        with self._together("merging"):
            group = self._group
            step = 1
            while step < self.size and self.rank % (2 * step) == 0:
                if self.rank + step < self.size:
                    received: list[Any] = [None]
                    dist.recv_object_list(received, self.rank + step, group=group)
                    value = merge(value, received[0])
                step *= 2
            if self.rank:
                dist.send_object_list([value], self.rank - step, group=group)
            result = [value]
            dist.broadcast_object_list(result, 0, group=group)
        return result[0]

    def part(self) -> None:
        """Make rank 0 leave last if ranks have waited for each other, because its process may serve the store."""
        if not self._heard:
            return
        if self.rank:
            self._ask(lambda: self._store.add("gone", 1))
            return
        waits = pauses()
        while self._ask(lambda: self._store.add("gone", 0)) < self.size - 1:
            self.watch()
            time.sleep(next(waits))

    def close(self) -> None:
        """Stop the background thread and destroy the process group if this object created it."""
        self._lookout.end()
        if self._own_group:
            dist.destroy_process_group(self._group)
        self._group = None

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """Wait for all ranks, then open the process group for direct communication."""
        key = self._next_step(what)
        self._heard = True
        if self._ask(lambda: self._store.add(f"{key}/arrived", 1)) == self.size:
            self._ask(lambda: self._store.set(key, "all"))
        self._wait_for(key, what, {*range(self.size)}, most=dist.default_pg_timeout.total_seconds())
        if self._has(_FAILED):  # a rank arrived but failed while it waited: it will not communicate
            raise self._ended_by(self._number, self._ask(lambda: self._store.get(_FAILED)).decode())
        try:
            if self._group is None:
                self._open_group()
            yield
        except RuntimeError as error:
            self.watch()
            raise RankError(
                f"Rank {self.rank} lost the others during {what} ({error}). One of them may have been killed: what was "
                "done is safe, and the same call again continues, with as many ranks as there are then."
            ) from error

    def _open_group(self) -> None:
        """Set a process group that supports CPU tensors: the script's if it does, otherwise a new one."""
        if not dist.is_initialized():
            store = _part_of("group", self._store)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)
            self._group, self._own_group = dist.group.WORLD, True
        elif "cpu:gloo" in dist.get_backend_config():
            self._group = dist.group.WORLD
        else:
            self._group, self._own_group = dist.new_group(backend="gloo"), True

    def _has(self, key: str) -> bool:
        return bool(self._ask(lambda: self._store.check([key])))

    def _ask(self, question: Callable[[], Value]) -> Value:
        """Return the result of a request to the store; stop waiting if the store does not reply.

        Raises:
            RankError: If the store does not reply for ``_PATIENCE`` seconds or cannot be reached.
        """
        answer: Future[Value] = Future()

        def ask() -> None:
            try:
                answer.set_result(question())
            except dist.DistError as error:
                answer.set_exception(error)

        if not self._lookout.is_silent:
            threading.Thread(target=ask, name="trak_lite question", daemon=True).start()
        while True:
            try:
                return answer.result(_LOOK_EVERY)
            except TimeoutError:
                if self._lookout.is_silent:
                    raise self._unreachable(f"no answer for {_PATIENCE:.0f} s") from None
            except dist.DistError as error:
                raise self._unreachable(str(error)) from error

    def _ended_by(self, number: int, said: str) -> RankError:
        """Return the error of a call that ends because a rank failed in this or another call."""
        _ended_calls.add(number)
        return RankError(
            f"{said} Rank {self.rank} stops for that reason. What was done is safe: the same call again continues."
        )

    def _unreachable(self, why: str) -> RankError:
        return RankError(
            f"Rank {self.rank} cannot reach the process any more that serves the ranks' common keys ({why}). "
            "What was done is safe: the same call again continues."
        )

    def _next_step(self, what: str) -> str:
        """Return the next key for a name, with a counter per name."""
        self._steps[what] += 1
        return f"{what} {self._steps[what]}"

    def _wait_for(
        self, key: str, what: str, needed: set[int], *, most: float = math.inf, takes_long: bool = False
    ) -> None:
        """Wait for a key to be set, and warn after ``_PATIENCE`` seconds.

        Args:
            key: The key.
            what: Name of the step, for messages.
            needed: Ranks that must arrive for the key to be set.
            most: Timeout in seconds.
            takes_long: Do not warn.

        Raises:
            RankError: If another rank fails, a needed rank has ended, or the timeout expires.
        """
        began, said = time.monotonic(), False
        for pause in pauses():
            if self._has(key):
                return
            self.watch()
            gone = self._lookout.gone & needed
            if gone:
                raise RankError(
                    f"Rank {self.rank} waits for others to come to {what}, in {self._call}, and the scripts of ranks "
                    f"{sorted(gone)} have ended. Every rank must make the same calls; those for one rank alone (in an "
                    "'if rank == 0:') need Attributor(distributed=False)."
                )
            if time.monotonic() - began > most:
                raise RankError(
                    f"Rank {self.rank} of {self.size} has waited {most:.0f} s for all others to come to {what}. One "
                    "may have been lost, or makes other calls. What was done is safe: the same call again continues."
                )
            if not (said or takes_long) and time.monotonic() - began > _PATIENCE:
                said = True
                warnings.warn(
                    f"Rank {self.rank} of {self.size} has waited {_PATIENCE:.0f} s for others to come to {what}, in "
                    f"{self._call}. Every rank must make the same calls; those for one rank alone (in an 'if rank == "
                    "0:') need Attributor(distributed=False).",
                    RuntimeWarning,
                    stacklevel=2,
                )
            time.sleep(pause)
