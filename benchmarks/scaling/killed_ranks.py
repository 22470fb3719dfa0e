"""The kill loop: ranks are killed at random moments, another number of ranks goes on, nothing is lost or done twice.

A round starts ``recorded_run`` under torchrun, kills something at a drawn moment, starts it again on the same store
with another world size, and so on; its last start is left alone. Then every feature must have the bits of one
undisturbed process, the scores must be equal to rounding, the store must be sound, and the logs of loaded rows must
show that no row that was on disk when a start began was computed again, and of the others no more than the batches
that killed ranks had in flight. ``tests/parallel/test_killed_ranks.py`` plays a few rounds, and
``benchmarks.scale_out kills`` as many as one likes.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.scaling.recorded_run import ENDED, LOGS, SCORING, STORE, Job, last_row, read_log
from trak_lite.errors import MissingStoreError
from trak_lite.store import ZarrFeatureStore, check_store

SCRIPT = Path(__file__).with_name("recorded_run.py")
WORLDS = (1, 2, 3, 4)
MODES = ("rank", "agent", "host")
"""Killed is one rank, whose agent ends the others; the agent, whose ranks are left to themselves; or all at once."""
PHASES = ("start", "featurize", "score")
LONGEST = 900.0  # seconds until a start has to end by itself
_POLL = 0.002


class Violated(AssertionError):
    """A promise does not hold."""


class Started(Protocol):
    """A torchrun agent in a process of its own."""

    pid: int

    def wait(self, seconds: float) -> int | None:
        """Wait for the end; return the exit status, ``None`` if it did not come in time."""


Launcher = Callable[[int, Path, Job, str], Started]
"""Starts so many ranks on a folder; the last argument names the start in the logs."""


class Torchrun:
    """``torchrun`` as from a shell; what it prints goes into a file beside the store."""

    def __init__(self, world: int, folder: Path, job: Job, name: str) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={name}"]
        with (folder / f"{name}.txt").open("wb") as file:
            self._process = subprocess.Popen(
                [*command, str(SCRIPT), str(folder), job.to_json()],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.pid = self._process.pid

    def wait(self, seconds: float) -> int | None:
        """Wait for the end; return the exit status, ``None`` if it did not come in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """What one process computes, and how long its parts take in seconds."""

    contents: dict[str, np.ndarray]
    until_featurizing: float
    scoring: float


@dataclass(frozen=True, slots=True)
class Strike:
    """What is killed, and when."""

    world: int
    mode: str
    phase: str
    share: float
    """Of the phase, in 0 to 1, at which it is killed."""


@dataclass(slots=True)
class Round:
    """One store, and what happened to it."""

    folder: Path
    job: Job
    undisturbed: Undisturbed
    launch: Launcher = Torchrun
    starts: dict[str, np.ndarray] = field(default_factory=dict)
    """For each start which rows were on disk when it began, ``(checkpoints, rows)``."""
    ended_ranks: int = 0
    """Of starts that were struck: each may have had a batch in flight."""
    left_behind: set[int] = field(default_factory=set)
    """Ranks whose agent was killed."""
    patience: float = 20.0
    """Seconds that they are given to end by themselves, once everything is done."""
    counts: Counter[str] = field(default_factory=Counter)
    worst_score: float = 0.0
    """Largest difference of a score from that of one process, relative to the largest score."""

    def run(self, strikes: list[Strike], last_world: int) -> None:
        """Strike in turn, finish with a start that is left alone, and look at what there is."""
        for strike in strikes:
            self._strike(strike)
        self._finish(last_world)
        self.compare()
        self.count_rows()

    def start(self, world: int) -> tuple[str, Started]:
        name = f"s{len(self.starts)}"
        self.starts[name] = on_disk(self.folder, self.job)
        self.counts["starts"] += 1
        self.counts[f"starts with {world} ranks"] += 1
        return name, self.launch(world, self.folder, self.job, name)

    def _strike(self, strike: Strike) -> None:
        name, started = self.start(strike.world)
        if not self._comes(strike, name, started):
            self.counts["starts that ended before their kill"] += 1
            return self._expect_success(name, started.wait(LONGEST))
        ranks = children(started.pid)
        mode = strike.mode if ranks else "agent"  # before there is a rank
        if mode != "rank":
            stop(started.pid)  # it starts no further rank that nobody would know of
            ranks = children(started.pid)
        victims = {
            "rank": [ranks[int(strike.share * 997) % max(len(ranks), 1)]] if ranks else [],
            "agent": [started.pid],
            "host": [started.pid, *ranks],
        }[mode]
        for pid in victims:
            kill(pid)
        status = started.wait(LONGEST)
        if status is None:
            raise Violated(f"The agent of {name} still runs {LONGEST:.0f} s after the kill ({mode}).")
        self.left_behind.update(ranks if mode == "agent" else ())
        self.ended_ranks += strike.world
        reached = phase_of(self.folder, name, victims[0] if mode == "rank" else None)
        self.counts.update(
            ["kills", f"kills of a whole {mode}" if mode == "host" else f"kills of one {mode}"]
        )
        self.counts[f"kills while in {reached}"] += 1
        return None

    def _comes(self, strike: Strike, name: str, started: Started) -> bool:
        """Wait for the moment of a strike; return false if the start ends before."""
        have = int(self.starts[name].sum())
        loads = num_records(self.folder, name)
        wanted = loads + strike.share * (self.job.rows_of_all - have)
        begun, scoring_since = time.monotonic(), None
        while started.wait(_POLL) is None:
            elapsed = time.monotonic() - begun
            if strike.phase == "start":
                come = elapsed >= strike.share * self.undisturbed.until_featurizing
            elif strike.phase == "featurize":
                come = num_records(self.folder, name) > wanted
            else:
                if scoring_since is None and phase_of(self.folder, name) == "score":
                    scoring_since = elapsed
                wait = strike.share * self.undisturbed.scoring
                come = scoring_since is not None and elapsed >= scoring_since + wait
            if come:
                return True
            if elapsed > LONGEST:
                raise Violated(f"{name} still runs after {LONGEST:.0f} s, and nothing was killed yet.")
        return False

    def _finish(self, world: int) -> None:
        name, started = self.start(world)
        self._expect_success(name, started.wait(LONGEST))
        end = time.monotonic() + self.patience
        while any(is_alive(pid) for pid in self.left_behind) and time.monotonic() < end:
            time.sleep(0.05)
        waiting = [pid for pid in self.left_behind if is_alive(pid)]
        for pid in waiting:  # for an agent that died before they had reached it; they hold nothing
            kill(pid)
        self.counts["ranks that outlived their agent"] += len(self.left_behind)
        self.counts["ranks that still waited for their dead agent at the end"] += len(waiting)

    def _expect_success(self, name: str, status: int | None) -> None:
        if status != 0:
            said = self.folder / f"{name}.txt"
            tail = said.read_text(errors="replace")[-3000:] if said.exists() else ""
            raise Violated(f"{name} ended with {status}, and nothing was killed.\n{tail}")

    def compare(self) -> None:
        """Every number is that of an undisturbed process: features bitwise, scores to rounding."""
        found, expected = contents(self.folder / STORE), self.undisturbed.contents
        if found.keys() != expected.keys():
            raise Violated(f"Tables differ: {sorted(found.keys() ^ expected.keys())}.")
        for name, values in expected.items():
            if name.startswith("scores/"):
                difference = np.abs(found[name] - values).max() / np.abs(values).max()
                self.worst_score = max(self.worst_score, float(difference))
            elif found[name].tobytes() != values.tobytes():
                rows = np.flatnonzero((found[name] != values).reshape(len(values), -1).any(axis=1))
                raise Violated(
                    f"{len(rows)} rows of {name} are wrong, the first is {rows[:1]}. {self._makers(rows)}"
                )
        if self.worst_score > 1e-5:
            raise Violated(f"Scores are off by {self.worst_score:.1e} of the largest.")
        if findings := check_store(self.folder / STORE).findings:
            raise Violated(f"check_store found {findings}.")

    def _makers(self, rows: np.ndarray) -> str:
        """Return which processes loaded rows, of any checkpoint, and what their starts logged."""
        loads = [(log.name, read_log(log)[:, 1]) for name in self.starts for log in logs(self.folder, name)]
        counts = {name: int(np.isin(rows, loaded).sum()) for name, loaded in loads}
        said = [self.folder / f"{name}.txt" for name in self.starts]
        texts = [path.read_text(errors="replace")[-2000:] for path in said if path.exists()]
        return "\n".join([f"They were loaded by {counts}.", *texts])

    def count_rows(self) -> None:
        """No row was computed that was on disk before, and of the others few more than once."""
        times = np.zeros((self.job.checkpoints, self.job.rows), np.int64)
        for name, before in self.starts.items():
            for log in logs(self.folder, name):
                loads = read_log(log)
                np.add.at(times, tuple(loads[loads[:, 1] >= 0].T), 1)
                again = [tuple(pair) for pair in loads if pair[1] >= 0 and before[tuple(pair)]]
                if again:
                    raise Violated(f"{name} computed rows that were on disk: {again[:5]} (checkpoint, row).")
        if times.min() < 1:
            raise Violated("The logs do not name every row: what was counted is not what was computed.")
        in_vain, allowed = int((times - 1).sum()), self.job.batch * self.ended_ranks
        if in_vain > allowed:
            raise Violated(
                f"{in_vain} rows were computed twice; killed ranks had {allowed} in flight at most."
            )
        self.counts["rows computed"] += int(times.sum())
        self.counts["rows computed twice: in flight in a killed rank"] += in_vain
        self.counts["rows that killed ranks may have had in flight"] += allowed


def undisturbed(folder: Path, job: Job, launch: Launcher = Torchrun) -> Undisturbed:
    """Run one rank alone, and take its times."""
    begun, at = time.monotonic(), {}
    started = launch(1, folder, job, "alone")
    while (status := started.wait(_POLL)) is None:
        at.setdefault(phase_of(folder, "alone"), time.monotonic() - begun)
    if status != 0:
        raise Violated(f"One undisturbed rank ended with {status}.")
    end = at.get("end", time.monotonic() - begun)
    return Undisturbed(contents(folder / STORE), at.get("featurize", end), end - at.get("score", end))


def alone(folder: Path, job: Job) -> Undisturbed:
    """Return the results of one undisturbed rank, in a folder of its own."""
    (folder / "alone").mkdir()
    return undisturbed(folder / "alone", job)


def contents(path: Path) -> dict[str, np.ndarray]:
    """Return every column of a finished store."""
    with ZarrFeatureStore.open(path) as store:
        tables = [(name, store.open_table(name)) for name in store.table_names()]
        return {f"{name}/{c.name}": table.read(c.name) for name, table in tables for c in table.spec.columns}


def drawn_strikes(pick: random.Random, count: int) -> tuple[list[Strike], int]:
    """Return strikes of a round, each with another world size than the one before, and the last world size."""
    worlds = [pick.choice(WORLDS)]
    while len(worlds) <= count:
        worlds.append(pick.choice([world for world in WORLDS if world != worlds[-1]]))
    phases = sorted(pick.choices(PHASES, weights=(1, 3, 2), k=count), key=PHASES.index)
    modes = pick.choices(MODES, weights=(4, 1, 1), k=count)
    drawn = zip(worlds, modes, phases, strict=False)
    return [Strike(world, mode, phase, pick.random()) for world, mode, phase in drawn], worlds[-1]


def on_disk(folder: Path, job: Job) -> np.ndarray:
    """Return which rows are done, ``(checkpoints, rows)``."""
    done = np.zeros((job.checkpoints, job.rows), bool)
    with contextlib.suppress(MissingStoreError), ZarrFeatureStore.open(folder / STORE) as store:
        names = set(store.table_names())
        for number in range(job.checkpoints):
            if f"ckpt-{number}" in names:
                done[number] = store.open_table(f"ckpt-{number}").done()
    return done


def logs(folder: Path, name: str, pid: int | None = None) -> list[Path]:
    """Return the logs of the ranks of a start, or of one of them."""
    return sorted((folder / LOGS).glob(f"{name}.{pid or '*'}"))


def num_records(folder: Path, name: str) -> int:
    """Return how many rows the ranks of a start have begun to compute; other records are few."""
    return sum(path.stat().st_size for path in logs(folder, name)) // 8


def phase_of(folder: Path, name: str, pid: int | None = None) -> str:
    """Return how far the ranks of a start have come, or one of them."""
    last = [last_row(path) for path in logs(folder, name, pid) if path.stat().st_size]
    if not last:
        return "start"
    return {SCORING: "score", ENDED: "end"}.get(min(last), "featurize")


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def stop(pid: int) -> None:
    """Stop a process, and wait until it stands still."""
    kill(pid, signal.SIGSTOP)
    while any(pid == other and state not in "TZX" for other, _, state in _processes()):
        time.sleep(0.001)


def children(parent: int) -> list[int]:
    """Return the living children of a process, ascending."""
    return sorted(pid for pid, ppid, state in _processes() if ppid == parent and state != "Z")


def is_alive(pid: int) -> bool:
    """Return whether a process runs."""
    return any(pid == other and state != "Z" for other, _, state in _processes())


def _processes() -> Iterator[tuple[int, int, str]]:
    """Yield number, parent and state of every process."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, ppid = path.read_text().rpartition(")")[2].split()[:2]
            yield int(path.parent.name), int(ppid), state
