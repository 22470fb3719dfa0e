"""The ranks of one run, launched by torchrun or joined by ``torch.distributed``: what they tell each other.

Rows are shared through the store, with nobody knowing of anybody (:mod:`trak_lite.parallel.sharing`). Where processes
do know of each other, they do more: an error of one of them ends the others, sums over train rows are added up, what
one has factorised is sent to all. Everything that is said here goes through the key-value store of the launcher or of
the process group; a process group is used, and made if there is none, for tensors and top rows alone.

Every rank makes the same calls in the same order.
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
_PATIENCE = 30.0  # seconds, until a rank that waits for others says so
_LOOK_EVERY = 0.2  # seconds
_calls = 0
"""Calls that this process has made together with others: the same number on every rank."""
_ended_calls: set[int] = set()
"""Those of them whose failure this process has met, its own or that of another rank."""


class AbstractRanks(ABC):
    """The processes that make a call together, as one of them sees them."""

    rank: int
    """Number of this one."""
    size: int
    """How many there are."""

    @abstractmethod
    def watch(self) -> None:
        """Look whether another rank failed.

        Raises:
            RankError: If so; says which one and why.
        """

    @abstractmethod
    def broadcast(self, what: str, value: Callable[[], str], *, takes_long: bool = False) -> str:
        """Return what rank 0 says.

        Args:
            what: What it is, for messages.
            value: Called on rank 0.
            takes_long: Waiting for it is no sign that something is wrong.
        """

    def once(self, what: str, job: Callable[[], None]) -> None:
        """Do something on rank 0 when all ranks have come, and go on when it is done.

        Args:
            what: What is done, for messages.
            job: Called on rank 0.
        """
        self.merged(0, max)

        def done() -> str:
            job()
            return "done"

        self.broadcast(what, done)

    @abstractmethod
    def value_of_rank_0(self, what: str, value: str) -> str:
        """Return what rank 0 says, which waits for nobody."""

    @abstractmethod
    def first_value(self, what: str, value: str) -> str:
        """Return what the first rank says that comes here; nobody is waited for."""

    def comes_first(self, what: str) -> bool:
        """Whether this is the first rank that comes to something which one of them does for all."""
        return self.first_value(f"first at {what}", str(self.rank)) == str(self.rank)

    def agree(self, what: str, value: str, *, with_rank_0: bool = False) -> None:
        """Compare a value with that of the first rank that comes here.

        Args:
            what: What it is, for messages.
            value: That of this rank.
            with_rank_0: Wait for rank 0, and compare with its own.

        Raises:
            RankError: If it is another one.
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
        """Replace tensors on rank 0 by their sums over ranks; on other ranks they are undefined then."""

    @abstractmethod
    def send_to_all(self, tensor: Tensor) -> None:
        """Replace a tensor by that of rank 0."""

    @abstractmethod
    def merged(self, value: Value, merge: Callable[[Value, Value], Value]) -> Value:
        """Return what merging the values of all ranks gives, two neighbours at a time, in the order of ranks.

        Args:
            value: That of this rank; it can be pickled.
            merge: Associative; gets the value of the lower ranks first.
        """


@final
class OneRank(AbstractRanks):
    """A process by itself.

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
        """Do nothing: the sums are what they are."""

    def send_to_all(self, tensor: Tensor) -> None:
        """Do nothing."""

    def merged(self, value: Value, merge: Callable[[Value, Value], Value]) -> Value:
        """Return the value."""
        return value


@contextmanager
def joined_ranks(call: str, *, distributed: bool | None = None) -> Iterator[AbstractRanks]:
    """Make a call together with the other ranks, inside the block.

    An error that leaves the block ends the others: they raise :class:`~trak_lite.errors.RankError` when they look.

    Args:
        call: What is called, which must be the same on all ranks.
        distributed: ``None`` joins others if the script was launched by torchrun, or has a process group, with more
            than one rank; ``False`` never does.

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
    """Return a key-value store of all ranks, the number of this one and of all; ``None`` if there is but one."""
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
    """Return the keys of a store that begin with a name."""
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # public, but not listed


@cache
def _launcher_store(attempt: str) -> tuple[Any, int, int]:
    """Return the launcher's key-value store. It is kept: rank 0 may be the one that serves it."""
    # An agent serves the store before it starts a rank, so that one which cannot be reached is gone. A rank that serves
    # it itself comes whenever its script gets here.
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    timeout = timedelta(seconds=_PATIENCE) if served else dist.default_pg_timeout
    found = dist.rendezvous("env://", timeout=timeout)  # type: ignore[attr-defined]  # public, but not listed
    store, rank, size = next(found)
    store = _part_of(f"trak_lite/attempt-{attempt}", store)
    atexit.register(_say_goodbye, store, rank)
    return store, rank, size


def _say_goodbye(store: Any, rank: int) -> None:
    """Tell the others that the script of this rank has ended: it will not come to what they may wait for."""
    with contextlib.suppress(dist.DistError):  # they have ended as well
        _part_of("trak_lite", store).append(_GONE, f"{rank} ")


def _on_cpu(tensor: Tensor) -> Tensor:
    """Return a tensor, or its copy, that gloo carries: NCCL refuses ranks that share a GPU."""
    return tensor.cpu().contiguous()


@final
class _Lookout:
    """Looks in a thread of its own whether a rank has failed.

    Where a machine or its network is lost without a word, an answer may take minutes: nothing but this thread waits for
    it, and rows are featurized meanwhile.
    """

    def __init__(self, store: Any, *, number: int) -> None:
        """Begin to look; ``store`` holds the failures, those of this call below its number.

        It is reached by a connection of its own.
        """
        self.failure: tuple[int, str] | None = None
        """The call that a rank failed in and what it says: this call, or another one that has not ended here."""
        self.gone: set[int] = set()
        """Ranks whose script has ended."""
        self.lost: str | None = None
        """Why the store cannot be reached any more."""
        self._store = store
        self._number = number
        self._ended = threading.Event()
        self._asked: float | None = None
        """When the question was put that has no answer yet."""
        threading.Thread(target=self._look, name="trak_lite ranks", daemon=True).start()

    @property
    def is_silent(self) -> bool:
        """Whether a question has had no answer for long."""
        if not self._waits_for_long():
            return False
        time.sleep(_LOOK_EVERY)  # if this process itself stood still, the answer comes now
        return self._waits_for_long()

    def end(self) -> None:
        """Look no more."""
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
        # A rank that has failed in an earlier call may not come to this one, or may: then both keys are of use.
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
        """Tell the others why this rank fails, unless they know that the call has failed."""
        _ended_calls.add(self._number)
        if self._lookout.is_silent or self._lookout.lost is not None:
            return  # there is nobody to tell
        known = self._lookout.failure
        if isinstance(error, RankError) and known is not None and known[0] == self._number:
            return
        with contextlib.suppress(dist.DistError):  # whoever serves the store is gone, and the run with it
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
        self._heard = heard  # rank 0 goes on whether it is heard or not
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
        """Let rank 0 go last where ranks have waited for each other: its process may be what serves the keys."""
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
        """Give back the process group that was made, if one was."""
        self._lookout.end()
        if self._own_group:
            dist.destroy_process_group(self._group)
        self._group = None

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """Wait for all ranks, then let them talk directly."""
        key = self._next_step(what)
        self._heard = True
        if self._ask(lambda: self._store.add(f"{key}/arrived", 1)) == self.size:
            self._ask(lambda: self._store.set(key, "all"))
        self._wait_for(key, what, {*range(self.size)}, most=dist.default_pg_timeout.total_seconds())
        if self._has(_FAILED):  # one has come, and failed while it waited: it will not talk
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
        """Take a process group that carries tensors of the CPU: the script's, or one of our own."""
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
        """Put a question to the store, and give it up when there has been no answer to any for long.

        Raises:
            RankError: If so, or if the store cannot be reached.
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
        """Return the error of a call that ends because a rank has failed, in this one or another one."""
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
        """Return the key of the next thing that is said under a name: ranks that differ miss each other, no more."""
        self._steps[what] += 1
        return f"{what} {self._steps[what]}"

    def _wait_for(
        self, key: str, what: str, needed: set[int], *, most: float = math.inf, takes_long: bool = False
    ) -> None:
        """Wait for a key to be set, and say so if that takes long.

        Args:
            key: What is set.
            what: What it is, for messages.
            needed: Ranks that set it.
            most: Seconds.
            takes_long: Do not say so.

        Raises:
            RankError: If another rank fails meanwhile, has ended, or does not come in time.
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
