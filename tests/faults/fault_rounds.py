"""Rounds of faults: each makes a store, does something to it or to its writers, and checks every promise afterwards."""

import contextlib
import dataclasses
import itertools
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from fault_cases import (
    NAME,
    ROOTS,
    Case,
    Violated,
    check_as_reader,
    check_with_plain_zarr,
    fill,
    final_scores,
    finish,
    open_for_writing,
)
from fault_mounts import command, mounted
from fault_power import EXTREMES, Cut, Recorder, plant, tree
from fault_workers import Acknowledgements, Workers

from trak_lite.errors import ManifestMismatchError, StoreError
from trak_lite.store import Manifest, ZarrFeatureStore

_ENDED = (signal.SIGKILL, signal.SIGTERM)


@dataclass
class Round:
    """What one round works with."""

    workers: Workers
    pick: random.Random
    folder: str
    totals: Counter
    size: int
    """How many power cuts a round has."""
    mounts: bool
    """Whether file systems may be mounted."""
    case: Case = field(init=False)
    path: str = field(init=False)
    acks: str = field(init=False)

    def __post_init__(self):
        self.case = Case.drawn(self.pick)
        self.path = os.path.join(self.folder, self.pick.choice(ROOTS))
        self.acks = os.path.join(self.folder, "acknowledged")
        if self.pick.random() < 0.2:
            os.mkdir(os.path.join(self.folder, "elsewhere"))
            os.symlink(os.path.join(self.folder, "elsewhere", "run.zarr"), self.path)

    @property
    def acknowledged(self):
        """Rows whose ``put`` has returned, in any process."""
        return Acknowledgements.read(self.acks)

    def start(self, action, *arguments, **options):
        """Start a worker on this round's store."""
        return self.workers.start(
            action, self.path, dataclasses.asdict(self.case), self.acks, *arguments, **options
        )

    def start_writer(self, action="write", *arguments, **options):
        """Start a writer with batches and an order of its own."""
        return self.start(action, self.pick.randrange(2**32), *arguments, **options)

    def kill_sometime(self, pid, number=signal.SIGKILL, *, within=0.05):
        """Send a signal at a random moment and wait for the end; return whether it came in time."""
        time.sleep(self.pick.uniform(0, within))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        status, _ = self.workers.wait(pid, may_die_by=_ENDED)
        self.totals["kills"] += status < 0
        return status < 0

    def check_as_reader(self):
        """Check what a new reader finds."""
        check_as_reader(self.path, self.case, self.acknowledged)

    def finish(self):
        """Resume to the end, here or in another process, and check everything."""
        acknowledged = self.acknowledged
        self.totals["rows acknowledged before a fault"] += len(acknowledged)
        finish(self.path, self.case, self.pick, acknowledged)
        self.totals["rows acknowledged"] += self.case.num_rows
        if self.pick.random() < 0.3:
            check_with_plain_zarr(self.path, self.case)
        self.totals["final scores bitwise equal"] += 1


def kill(this):
    """kill -9 at random moments, again and again."""
    for _ in range(this.pick.randint(1, 4)):
        this.kill_sometime(this.start_writer(), within=this.pick.choice([0.01, 0.05]))
        this.check_as_reader()
    this.finish()


def interrupt(this):
    """Ctrl-C and SIGTERM inside a write: the process dies of it, or goes on with the same handle."""
    stubborn = this.pick.random() < 0.7
    pid = this.start_writer("write_stubbornly" if stubborn else "write")
    if not stubborn:
        this.kill_sometime(pid, signal.SIGTERM)
    else:
        time.sleep(this.pick.uniform(0.01, 0.04))  # until its handlers stand
        for _ in range(this.pick.randint(1, 12)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, this.pick.choice([signal.SIGINT, signal.SIGTERM]))
            time.sleep(this.pick.uniform(0, 0.005))
        this.totals["interrupts survived"] += this.workers.wait(pid, may_die_by=_ENDED)[1] or 0
    this.totals["interrupts"] += 1
    this.check_as_reader()
    this.finish()


def power_cut(this):
    """Cut at any change of any file: what was not synced is lost, torn or kept."""
    root = os.path.join(this.folder, "disk")
    os.mkdir(root)
    disk = _recorded_run(this, root)
    cuts = [(this.pick.choice(disk.moments), Cut.drawn(this.pick)) for _ in range(this.size)]
    for stop, cut in cuts:
        _check_cut(this, disk, stop, cut, again=this.pick.random() < 0.1)


def every_power_cut(this):
    """Cut before each and every change, in each of the four extreme ways."""
    this.case = Case(5, 2, 3, "float16")
    root = os.path.join(this.folder, "disk")
    os.mkdir(root)
    disk = _recorded_run(this, root)
    for stop, cut in itertools.product(disk.moments, EXTREMES):
        _check_cut(this, disk, stop, cut, again=False)


def _recorded_run(this, root):
    """Make, or take up, a store under a recorder, and fill it, reopening it now and then."""
    path, recorder = os.path.join(root, "run.zarr"), Recorder(root)
    with recorder:
        while True:
            store, table = open_for_writing(path, this.case)
            recorder.note(())
            recorder.note(np.flatnonzero(table.done()).tolist())
            with store, contextlib.suppress(_Reopen):
                fill(table, this.case, this.pick, lambda rows: _note(recorder, rows, this.pick))
                final_scores(store, table)
                return recorder.disk()


class _Reopen(Exception):
    """The writer is to close the store and open it again."""


def _note(recorder, rows, pick):
    recorder.note(rows)
    if pick.random() < 0.1:
        raise _Reopen


def _check_cut(this, disk, stop, cut, *, again):
    """Build what a cut leaves, check what had been promised by then, and finish the run."""
    root = os.path.join(this.folder, "after")
    plant(disk.after(stop, cut, this.pick), root)
    this.totals["power cuts"] += 1
    told = disk.noted(stop)
    rows = set(itertools.chain.from_iterable(told))
    committed = this.case.complete_chunks(rows)
    path = os.path.join(root, "run.zarr")
    try:
        check_as_reader(path, this.case, committed, made=bool(told))
        if again:
            second = _recorded_run(this, root)
            shutil.rmtree(root)
            _check_cut(this, second, this.pick.choice(second.moments), Cut.drawn(this.pick), again=False)
            return
        finish(path, this.case, this.pick, committed)
    except (Violated, StoreError) as error:
        error.add_note(f"{this.case}, cut before step {stop}: {cut}")
        raise
    shutil.rmtree(root)
    this.totals["rows acknowledged"] += len(rows)
    this.totals["final scores bitwise equal"] += 1


def power_cut_image(this):
    """Copy the image of a mounted ext4 in the middle of a run, mount the copy, and see."""
    image, place = os.path.join(this.folder, "image"), os.path.join(this.folder, "mounted")
    with open(image, "wb") as file:
        file.truncate(8 << 20)
    command("mkfs.ext4", "-q", "-b", "1024", "-E", "lazy_itable_init=0,lazy_journal_init=0", image)
    with mounted(place, "-o", "loop", image):
        this.path = os.path.join(place, "run.zarr")
        pid = this.start_writer("write", True, synced=True)
        try:
            for _ in range(this.pick.randint(1, 4)):
                time.sleep(this.pick.uniform(0, 0.3))
                _check_copy(this, image, pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            this.workers.wait(pid, may_die_by=_ENDED)
        this.finish()


def _check_copy(this, image, pid):
    rows, before, copy = this.acknowledged, None, os.path.join(this.folder, "copy")
    with contextlib.suppress(ProcessLookupError), _stopped(pid):
        for _ in range(50):  # equal to itself a moment later: nothing was written while it was copied
            with open(image, "rb") as file:
                content = file.read()
            if content == before:
                break
            before = content
    with open(copy, "wb") as file:
        file.write(before)
    with mounted(os.path.join(this.folder, "after"), "-o", "loop", copy) as place:
        path, committed = os.path.join(place, "run.zarr"), this.case.complete_chunks(rows)
        check_as_reader(path, this.case, committed)
        finish(path, this.case, this.pick, committed)
    this.totals["power cuts of an ext4 image"] += 1
    this.totals["final scores bitwise equal"] += 1


@contextlib.contextmanager
def _stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def full_disk(this):
    """A real full disk (a small tmpfs) or a limit on the size of files; room comes back piece by piece."""
    if not this.mounts or this.pick.random() < 0.3:
        limit = this.pick.choice([512, 700, 1024, 4096, 20_000])
        _, full = this.workers.wait(this.start_writer("write_on_full_disk", limit, None))
        this.totals["full disks"] += full
        this.check_as_reader()
        return this.finish()
    with mounted(os.path.join(this.folder, "small"), "-t", "tmpfs", "-o", "size=4m", "tmpfs") as small:
        this.path, ballast = os.path.join(small, "run.zarr"), os.path.join(small, "ballast")
        with open(ballast, "wb") as file:
            room = this.pick.choice([0, 4, 16, 60, 200]) << 10
            os.posix_fallocate(file.fileno(), 0, (4 << 20) - (64 << 10) - room)
        _, full = this.workers.wait(this.start_writer("write_on_full_disk", None, ballast))
        this.totals["full disks"] += full
        this.check_as_reader()
        os.truncate(ballast, 0)
        return this.finish()


def race(this):
    """Two or three writers on one store, a polling reader, kills; another number of writers each time."""
    reader = this.start("poll")
    for _ in range(this.pick.randint(1, 3)):
        writers = [this.start_writer() for _ in range(this.pick.choice([2, 3]))]
        doomed = this.pick.sample(writers, this.pick.randint(0, len(writers)))
        for pid in doomed:
            this.kill_sometime(pid, within=0.02)
        for pid in set(writers) - set(doomed):
            this.totals["busy chunks"] += this.workers.wait(pid)[1]
        this.totals["races"] += 1
    this.finish()
    this.totals["polls of a reader"] += this.workers.wait(reader)[1]


def fork(this):
    """A child that outlives its killed parent holds no chunk; one that writes beside it is one more writer."""
    dies = this.pick.random() < 0.5
    status, child = this.workers.wait(this.start_writer("write_and_fork", dies), may_die_by=_ENDED)
    this.totals["forks"] += 1
    this.check_as_reader()
    if dies:
        this.totals["kills"] += 1
        busy = this.workers.wait(this.start_writer())[1]
        if busy:
            raise Violated("a child of a killed writer still holds its chunk")
    elif status or child:
        raise Violated(f"parent and child ended with {status} and {child}")
    this.finish()


def creation(this):
    """Racing creators with two fingerprints, some killed, some by clocks that are off: one of them wins."""
    creators = []
    for _ in range(this.pick.randint(2, 4)):
        step = this.pick.choice([None, "folder_built", "folder_published"])
        jump = this.pick.choice([0, 0, 0, 10**6, -(10**6)])
        pid = this.workers.start(
            "create",
            this.path,
            dataclasses.asdict(this.case),
            this.pick.choice([0, 1]),
            jump,
            failpoint=step and f"{step}:{this.pick.randint(1, 4)}",
        )
        creators.append(pid)
        this.totals["clock jumps"] += bool(jump)
    ends = [this.workers.wait(pid, may_die_by=_ENDED) for pid in creators]
    this.totals["kills"] += sum(status < 0 for status, _ in ends)
    this.totals["racing creators"] += len(creators)
    won = {answer for status, answer in ends if status == 0 and answer is not None}
    if len(won) > 1:
        raise Violated(f"creators with the seeds {won} both think that they have won")
    if won:
        ZarrFeatureStore.create(this.path, Manifest({"seed": won.pop()})).open_table(NAME)
    else:
        _refuse_all_but_one(this)


def _refuse_all_but_one(this):
    """Nobody has returned: whoever comes next makes the store, or finds the one of a creator that was killed."""
    made = set()
    for seed in (0, 1):
        with contextlib.suppress(ManifestMismatchError):
            ZarrFeatureStore.create(this.path, Manifest({"seed": seed})).create_table(NAME, this.case.spec)
            made.add(seed)
    if len(made) != 1:
        raise Violated(f"creating again succeeds with the seeds {made}")


def read_only(this):
    """A mount or a user that may only read: reading works, writing is refused; what may not be read is named."""
    fill_partly = this.start_writer()
    this.kill_sometime(fill_partly)
    store, _ = open_for_writing(this.path, this.case)
    store.close()
    this.totals["read-only stores"] += 1
    real, case = os.path.realpath(this.path), dataclasses.asdict(this.case)
    before = tree(real)
    for parent, folders, files in os.walk(real):
        for name in (".", *folders, *files):
            os.chmod(os.path.join(parent, name), 0o755)
    if os.geteuid() == 0:
        this.workers.run("refuse_nobody", this.path, case)
        _check_unreadable(this, real, case)
    if this.mounts:
        with mounted(real, "--bind", real):
            command("mount", "-o", "remount,bind,ro", real)
            this.workers.run("check_read_only", this.path, case)
    if tree(real) != before:
        raise Violated("reading has changed the store")
    this.finish()


def _check_unreadable(this, real, case):
    """One file that may not be read: an error names it, and the rest can be read."""
    with ZarrFeatureStore.open(real) as store:
        done = store.open_table(NAME).done()
    files = [
        name
        for name, content in tree(real).items()
        if content is not None and ".new-" not in name and not _is_never_read(name, this.case, done)
    ]
    name = this.pick.choice(sorted(files))
    os.chmod(os.path.join(real, name), 0)
    refusals = this.workers.run("look_as_nobody", this.path, case)
    os.chmod(os.path.join(real, name), 0o755)
    if not any(name in message or f"{os.path.dirname(name)} failed" in message for message in refusals):
        raise Violated(f"{name} cannot be read, and no error says so: {refusals}")


def _is_never_read(name, case, done):
    """Whether a file is there for zarr's tools only, or belongs to an unfinished chunk of which no row is done."""
    if name == ".tables/zarr.json":
        return True
    size = case.spec.chunk_rows
    chunk = re.search(r"\.stage/(\d+)", name)
    return chunk is not None and not done[int(chunk[1]) * size :][:size].any()


KINDS = {
    kind.__name__: kind
    for kind in (
        *(kill, interrupt, power_cut, every_power_cut, power_cut_image),
        *(full_disk, race, fork, creation, read_only),
    )
}
