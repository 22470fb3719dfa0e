"""Shared by all tests: one thread, so that results are bitwise repeatable, the tiers, and the marker cuda."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from _pytest.doctest import DoctestModule
from tiers import TOGETHER, is_without_tests_of, mark_campaign, of_other_days

gc.disable()  # until all is collected: nothing that is imported or collected is freed

USE_ROWS = {"cli", "methods", "report", "retraining", "run", "scoring", "selection", "serve", "unrolled"}
USE_ROWS |= {
    "test_ekfac",
    "test_fisher",
    "test_growing_data",
    "test_iterative_solvers",
    "test_normalized_features",
}
"""Rooms and files that only use rows: gradients are compared in those that compute them, and by the attributor's."""
PACKAGE = Path(__file__).parents[1] / "trak_lite"
MEMORY = Path("/dev/shm")
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
    # Files in memory: a run makes some 50,000, which cost a third of the time there, and no wait for a disk.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def _unsynced(fd: int) -> None:
    """Stand for ``os.fsync``."""


@pytest.fixture(autouse=True, scope="session")
def _cheap() -> Iterator[None]:
    """Verdicts have intervals of 100 resamples, since 1,000 take a second; nobody waits for the disk.

    A sync matters to a power cut alone; ``test_store_disk`` records the syncs. Those that do nothing need no threads.
    For each kind of device that is not there, ``torch.manual_seed`` would format the stack, which is deep in tests.
    """
    at_once = resolve_name("trak_lite.core.files:_at_once")

    def in_turn(calls: Sequence[Callable[[], None]]) -> None:
        for some in [[call] for call in calls] if os.fsync is _unsynced else [calls]:
            at_once(some)

    with pytest.MonkeyPatch.context() as patched:
        defaults = resolve_name("trak_lite.evaluation.datamodeling:compared_scores").__kwdefaults__
        patched.setitem(defaults, "num_resamples", 100)
        patched.setattr("trak_lite.core.files._at_once", in_turn)
        patched.setattr(os, "fsync", _unsynced)
        if not resolve_name("torch").accelerator.is_available():
            for kind in ("cuda", "xpu", "mtia"):
                patched.setattr(f"torch.{kind}.manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(autouse=True, scope="module")
def _few_comparisons(request: pytest.FixtureRequest) -> Iterator[None]:
    """The self-check compares one sample of a first batch in place of eight, and few later batches.

    Where it is not the check that is tested: each sample costs a backward pass, and those of batches 2, 4 and 8 would
    be as many passes as those of the batches of a test that featurizes a few rows. It compares nothing in rooms that
    only use rows, whose tests hold what is made of them against dense arrays.
    """
    place = {request.path.stem, request.path.relative_to(Path(__file__).parent).parts[0]}
    with pytest.MonkeyPatch.context() as patched:
        if place & USE_ROWS:
            for module in ("streaming", "hooks.computer"):
                patched.setattr(f"trak_lite.gradient_computers.{module}.compare", lambda *_, **__: None)
        if not place & {"device", "test_replays", "test_self_check", "zoo"}:
            patched.setattr("trak_lite.gradient_computers.self_check._SAMPLES_AT_FIRST", 1)
            patched.setattr(
                "trak_lite.gradient_computers.self_check.is_scheduled", lambda number: number % 64 == 0
            )
        yield


def pytest_sessionstart(session: pytest.Session) -> None:
    """Leave torch to those who run tests: xdist's first process starts them, and would import it before that."""
    if not session.config.pluginmanager.hasplugin("dsession"):
        resolve_name("torch").set_num_threads(1)


class Examples:
    """Modules of the package without an example are not imported to look for one."""

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        inside = collection_path.suffix == ".py" and collection_path.is_relative_to(PACKAGE)
        return (inside and ">>>" not in collection_path.read_text(encoding="utf-8")) or None


def pytest_configure(config: pytest.Config) -> None:
    """Register what is asked outside this folder as well."""
    config.pluginmanager.register(Examples())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which the markers that were asked for leave nothing."""
    return is_without_tests_of(config.option.markexpr, collection_path) or None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Any:
    """Look for no examples in tests: there are none, and looking takes a tenth of collecting."""
    return [one for one in (yield) if not isinstance(one, DoctestModule)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process neighbouring tests, or all would make the fixtures of a file and import what it needs."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_collection_finish() -> None:
    """Leave modules and tests out of later collections, each of which would visit some millions of objects."""
    gc.freeze()
    gc.set_threshold(5_000, 20, 20)  # a tenth of the time goes to collections otherwise
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the campaign; skip what needs a GPU, with the reason, where there is none."""
    mark_campaign(items)
    others = of_other_days(items)
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]
    if config.option.markexpr == "not campaign":
        items.sort(key=lambda item: not item.nodeid.partition("::")[0].endswith(TOGETHER))
    # Last: the hook with which they watch Python cannot be removed, and every later event would call it.
    items.sort(key=lambda item: item.path.name == "test_cli_security.py")
    if resolve_name("torch").cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and torch sees none here")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)
