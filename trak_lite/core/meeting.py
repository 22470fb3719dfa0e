"""Where the ranks of one run meet: the key-value store of torchrun, or that of a process group of the script."""

from __future__ import annotations

import atexit
import contextlib
import os
from datetime import timedelta
from functools import cache
from typing import Any, Final

from torch import distributed as dist

_GONE: Final = "gone"
_OWNER: Final = "TRAK_LITE_RANK_PROCESS"
"""Environment variable with the id of the process that torchrun started. Processes that it starts inherit its rank."""
_LONGEST_CONNECTING: Final = timedelta(seconds=30)


def num_ranks() -> int:
    """Return the number of ranks of the distributed run that this process belongs to, without contacting them."""
    if not dist.is_available():
        return 1
    return dist.get_world_size() if dist.is_initialized() else _launched_ranks()


def meeting_place() -> tuple[Any, int, int] | None:
    """Return ``(key-value store of all ranks, rank, number of ranks)``, or ``None`` if there is only one rank."""
    if num_ranks() == 1:
        return None
    if not dist.is_initialized():
        return _launcher_store()
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]  # it is initialised
    return part_of("trak_lite", store), dist.get_rank(), dist.get_world_size()


def part_of(name: str, store: Any) -> Any:
    """Return a view of a key-value store whose keys are prefixed with a name."""
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # public, but not listed


def ended_ranks() -> list[int]:
    """Return the ranks whose scripts have ended, as far as they could record it in the launcher's store."""
    # A process group of the script may have other ranks than the launcher.
    launched = _launched_ranks()
    if launched == 1 or num_ranks() != launched or (dist.is_initialized() and not _is_served()):
        return []
    store, _, _ = _launcher_store()
    return sorted({*map(int, store.get(_GONE).split())}) if store.check([_GONE]) else []


def _launched_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1")) if dist.is_torchelastic_launched() else 1


def _is_served() -> bool:
    """Return whether an agent of torchrun serves the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@cache
def _launcher_store() -> tuple[Any, int, int]:
    """Return ``(store, rank, number of ranks)`` of the launcher. Cached, because rank 0 may serve the store."""
    # A torchrun agent serves the store before it starts the ranks: if it cannot be reached, it has ended. If rank 0
    # serves the store, it does so only when its script reaches this line, so wait longer.
    timeout = _LONGEST_CONNECTING if _is_served() else dist.default_pg_timeout
    rendezvous = dist.rendezvous("env://", timeout=timeout)  # type: ignore[attr-defined]  # public, but not listed
    store, rank, size = next(rendezvous)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return part_of(f"trak_lite/attempt-{attempt}", store), rank, size


def _record_end() -> None:
    """Record that the script of this rank has ended, so that others do not wait for it, also if it made no call."""
    is_rank = _launched_ranks() > 1 and os.environ.get(_OWNER) == str(os.getpid())
    if is_rank and (_is_served() or _launcher_store.cache_info().currsize):
        with contextlib.suppress(dist.DistError):  # the process that serves the store has ended as well
            store, rank, _ = _launcher_store()
            store.append(_GONE, f"{rank} ")


if dist.is_available() and _launched_ranks() > 1:
    os.environ.setdefault(_OWNER, str(os.getpid()))
    atexit.register(_record_end)
