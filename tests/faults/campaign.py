"""The campaign: rounds of faults, drawn and counted.

A round is drawn from ``(seed, kind, number)`` and the size of rounds alone. What depends on timing (a signal at a
random moment, a race) is drawn the same way again but need not hit the same step.
"""

import contextlib
import os
import random
import shutil
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass
from unittest import mock

from fault_cases import Violated
from fault_rounds import KINDS, Round
from fault_workers import Workers

__all__ = ["KINDS", "NEED_MOUNTS", "Broken", "Campaign"]

NEED_MOUNTS = ("power_cut_image",)


@dataclass(frozen=True)
class Broken:
    """A round that found a promise broken."""

    kind: str
    number: int
    error: str
    trace: str


class Campaign:
    """Draws and runs rounds, and counts.

    Args:
        seed: Of everything that is drawn.
        size: How many power cuts a round has.
        mounts: Whether rounds may mount file systems.
    """

    def __init__(self, seed, *, size, mounts=False):
        self.seed = seed
        self.rounds = Counter()
        self.totals = Counter()
        self.broken = []
        self.folder = ""
        self._size = size
        self._mounts = mounts
        self._open = contextlib.ExitStack()

    def __enter__(self):
        fast = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.folder = self._open.enter_context(tempfile.TemporaryDirectory(dir=fast))
        os.chmod(self.folder, 0o755)
        self._workers = self._open.enter_context(contextlib.closing(Workers()))
        # a kill leaves the page cache alone, and a power cut is replayed: nobody here needs to wait for a disk
        self._open.enter_context(mock.patch.object(os, "fsync", return_value=None))
        return self

    def __exit__(self, *_):
        self._open.close()

    def run(self, kind, number):
        """Run one round; return what it found broken, or ``None``."""
        folder = os.path.join(self.folder, f"{kind}-{number}")
        os.mkdir(folder)
        totals, broken = Counter(), None
        pick = random.Random(f"{self.seed}/{kind}/{number}")
        try:
            KINDS[kind](Round(self._workers, pick, folder, totals, self._size, self._mounts))
        except Exception as error:  # whatever a round does not expect is a finding
            broken = Broken(kind, number, f"{type(error).__name__}: {error}", traceback.format_exc())
            self.broken.append(broken)
            counts = error.counts if isinstance(error, Violated) else {}
            totals["rows lost"] += counts.get("lost", 0)
            totals["rows wrong"] += counts.get("wrong", 0)
            totals["final scores not equal"] += counts.get("unequal", 0)
        self.rounds[kind] += 1
        self.totals.update(totals)
        shutil.rmtree(folder, ignore_errors=True)
        return broken
