"""The campaign: rounds of faults, drawn from ``(seed, kind, number)`` and the size of rounds alone, and counted."""

import contextlib
import os
import random
import shutil
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from fault_rounds import KINDS, Round
from forking import Forks

VICTIMS = Path(__file__).parents[1] / "store" / "store_victims.py"


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
    """

    def __init__(self, seed, *, size):
        self.seed, self.rounds, self.totals, self.broken, self.folder = seed, Counter(), Counter(), [], ""
        self._size, self._open = size, contextlib.ExitStack()

    def __enter__(self):
        fast = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.folder = self._open.enter_context(tempfile.TemporaryDirectory(dir=fast))
        self._forks = self._open.enter_context(contextlib.closing(Forks(str(VICTIMS), patience=90)))
        # a power cut is replayed: nobody here needs to wait for a disk
        self._open.enter_context(mock.patch.object(os, "fsync", return_value=None))
        return self

    def __exit__(self, *_):
        self._open.close()

    def run(self, kind, number, **options):
        """Run one round; return what it found broken, or ``None``."""
        folder = os.path.join(self.folder, f"{kind}-{number}")
        os.mkdir(folder)
        broken, pick = None, random.Random(f"{self.seed}/{kind}/{number}")
        try:
            KINDS[kind](Round(self._forks, pick, folder, self.totals, self._size), **options)
        except Exception as error:  # whatever a round does not expect is a finding
            broken = Broken(kind, number, f"{type(error).__name__}: {error}", traceback.format_exc())
            self.broken.append(broken)
            self.totals["promises broken"] += 1
        self.rounds[kind] += 1
        shutil.rmtree(folder, ignore_errors=True)
        return broken
