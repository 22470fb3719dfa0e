"""Power cuts: a record of every change below a folder, from which any state that a cut may leave can be built.

The model. What a file held at its last sync is kept. Of what was written to it since, any set of 512-byte sectors may
be kept, and its length may or may not have grown (zeros where nothing arrived). A name that was made, moved or removed
is kept once its folder (for a move: the one that it went to) was synced; of the others any set may be kept in which no
change of a name comes without the earlier changes of the same name. A move is kept whole or not at all. A journal
(ext4's, say) narrows that: any sync keeps all earlier changes of names, and what is kept of the later ones is the first
of them.
"""

import contextlib
import functools
import os
import random
from dataclasses import dataclass
from unittest import mock

from store_cases import overwrite, snapshot

SECTOR = 512


@dataclass(frozen=True)
class Written:
    """Bytes at an offset of a file."""

    node: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Resized:
    """A file cut, or extended without touching what is there."""

    node: int
    size: int
    may_cut: bool


@dataclass(frozen=True)
class Renamed:
    """Names that now mean another node, or none: all of them or none of them."""

    changes: tuple
    """``((folder, name), node or None)``."""
    folder: int
    """The one whose sync makes it last."""


@dataclass(frozen=True)
class Synced:
    """A file's bytes, or a folder's names, are on the disk."""

    node: int


@dataclass(frozen=True)
class Noted:
    """What the program has been told: from here on it must be true."""

    what: object


def tree(root):
    """Every file below a folder with its bytes, every folder with ``None``, by path from there."""
    return {os.path.relpath(path, root): found for path, found in snapshot(root).items()}


def plant(found, root):
    """Make what :func:`tree` returned."""
    os.mkdir(root)
    for path in sorted(found):
        if found[path] is None:
            os.mkdir(os.path.join(root, path))
        else:
            overwrite(os.path.join(root, path), found[path])


class Recorder:
    """Records what happens below a folder while it is entered; syncs are recorded instead of waited for.

    What is in the folder at the start counts as synced. What is not written through ``os`` is an error at the end.
    """

    def __init__(self, root):
        self.root = os.path.realpath(root)
        self.steps = []
        self._names = {0: {}}
        self._count = 1
        self._fds = {}
        self._patches = contextlib.ExitStack()
        self._find_below(0, self.root)
        self.steps.extend(Synced(node) for node in range(self._count))
        self._first = len(self.steps)

    def __enter__(self):
        names = ("open", "pwrite", "ftruncate", "posix_fallocate", "fsync", "mkdir", "rename", "unlink")
        calls = {name: getattr(self, f"_on_{name}") for name in names}
        calls |= {"replace": self._on_rename, "remove": self._on_unlink, "rmdir": self._on_unlink}
        for name, record in calls.items():
            patched = mock.patch.object(os, name, functools.partial(record, getattr(os, name)))
            self._patches.enter_context(patched)
        return self

    def __exit__(self, kind, *_):
        self._patches.close()
        if kind is None and self.disk().everything() != tree(self.root):
            raise AssertionError("A change of the folder was not recorded: teach Recorder that call of os.")

    def note(self, what):
        """Remember what the program has been told by now."""
        self.steps.append(Noted(what))

    def disk(self):
        """Return what was recorded so far, as a disk sees it."""
        return Disk(tuple(self.steps), self._first, frozenset(self._names))

    def _on_open(self, real, path, flags, *mode, **keywords):
        path = self._full(path, keywords.pop("dir_fd", None))
        new = flags & os.O_CREAT and not os.path.lexists(path)
        fd = real(path, flags, *mode, **keywords)
        place = self._place(path) if new else None
        self._fds[fd] = self._make(*place) if place else self._node(path)
        return fd

    def _on_pwrite(self, real, fd, data, offset):
        written = real(fd, data, offset)
        if self._fds.get(fd) is not None:
            self.steps.append(Written(self._fds[fd], offset, bytes(data)[:written]))
        return written

    def _on_ftruncate(self, real, fd, size):
        real(fd, size)
        self._resized(fd, size, may_cut=True)

    def _on_posix_fallocate(self, real, fd, offset, size):
        real(fd, offset, size)
        self._resized(fd, offset + size, may_cut=False)

    def _resized(self, fd, size, *, may_cut):
        if self._fds.get(fd) is not None:
            self.steps.append(Resized(self._fds[fd], size, may_cut))

    def _on_fsync(self, real, fd):
        if self._fds.get(fd) is not None:
            self.steps.append(Synced(self._fds[fd]))

    def _on_mkdir(self, real, path, *mode, dir_fd=None, **keywords):
        path = self._full(path, dir_fd)
        real(path, *mode, **keywords)
        if place := self._place(path):
            self._names[self._make(*place)] = {}

    def _on_rename(self, real, source, target, *, src_dir_fd=None, dst_dir_fd=None):
        source, target = self._full(source, src_dir_fd), self._full(target, dst_dir_fd)
        node = self._node(source)
        real(source, target)
        if node is not None:
            old, new = self._place(source), self._place(target)
            self._change(((old, None), (new, node)), new[0])

    def _on_unlink(self, real, path, *, dir_fd=None):
        real(path, dir_fd=dir_fd)
        if place := self._place(path, dir_fd):
            self._change(((place, None),), place[0])

    def _place(self, path, dir_fd=None):
        """Return (folder node, name) of a path below the root, ``None`` of any other."""
        path = self._full(path, dir_fd)
        if not path.startswith(self.root + os.sep):
            return None
        node = 0
        *above, name = path[len(self.root) + 1 :].split(os.sep)
        for part in above:
            node = self._names[node][part]
        return node, name

    def _node(self, path, dir_fd=None):
        """Return the node of a path, ``None`` if it is elsewhere or nothing is there."""
        full = self._full(path, dir_fd)
        if full == self.root:
            return 0
        place = self._place(full)
        return self._names[place[0]].get(place[1]) if place else None

    @staticmethod
    def _full(path, dir_fd):
        base = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        return os.path.abspath(os.path.join(base, os.fsdecode(path)))

    def _find_below(self, folder, path):
        for name in sorted(os.listdir(path)):
            node, inside = self._make(folder, name), os.path.join(path, name)
            if os.path.isdir(inside):
                self._names[node] = {}
                self._find_below(node, inside)
            else:
                with open(inside, "rb") as file:
                    self.steps.append(Written(node, 0, file.read()))

    def _make(self, folder, name):
        node = self._count
        self._count += 1
        self._change((((folder, name), node),), folder)
        return node

    def _change(self, changes, folder):
        self.steps.append(Renamed(tuple(changes), folder))
        for (parent, name), node in changes:
            self._names[parent].pop(name, None)
            if node is not None:
                self._names[parent][name] = node


@dataclass(frozen=True)
class Cut:
    """How much of what is not synced survives a power cut: the chance of each change of a name and of each sector."""

    names: float
    sectors: float
    journal: bool

    @classmethod
    def drawn(cls, pick):
        """All, nothing, one without the other, or anything."""
        chances = [0.0, 1.0, pick.random()]
        return cls(pick.choice(chances), pick.choice(chances), pick.random() < 0.5)


EXTREMES = tuple(Cut(names, sectors, journal=False) for names in (0.0, 1.0) for sectors in (0.0, 1.0))
KEPT = EXTREMES[-1]
"""Nothing is lost: what a kill leaves."""


class Disk:
    """What was recorded, as a disk sees it."""

    def __init__(self, steps, first, folders):
        self.moments = range(first, len(steps) + 1)
        """Before which steps there may be a cut; the ones before the first make what was there at the start."""
        self.steps = steps
        self._folders = folders

    def everything(self):
        """Return the tree if nothing is lost."""
        return self.after(self.moments[-1], KEPT, random.Random(0))

    def noted(self, stop):
        """Return what the program had been told before a step."""
        return [step.what for step in self.steps[:stop] if isinstance(step, Noted)]

    def after(self, stop, cut, pick):
        """Return a tree that a power cut just before a step may leave."""
        steps = self.steps[:stop]
        last = {step.node: place for place, step in enumerate(steps) if isinstance(step, Synced)}
        names, contents = {}, {}
        for step in _kept_names(steps, last, cut, pick):
            for (folder, name), node in step.changes:
                names.setdefault(folder, {}).pop(name, None)
                if node is not None:
                    names[folder][name] = node
        for place, step in enumerate(steps):
            if isinstance(step, Written | Resized):
                kept = 1.0 if place < last.get(step.node, -1) else cut.sectors
                content = contents.setdefault(step.node, bytearray())
                _apply(content, step, lambda kept=kept: pick.random() < kept)
        return dict(self._walk(0, "", names, contents))

    def _walk(self, folder, path, names, contents):
        for name, node in names.get(folder, {}).items():
            here = os.path.join(path, name)
            if node in self._folders:
                yield here, None
                yield from self._walk(node, here, names, contents)
            else:
                yield here, bytes(contents.get(node, b""))


def _kept_names(steps, last, cut, pick):
    """Return the changes of names that survive."""
    places = [place for place, step in enumerate(steps) if isinstance(step, Renamed)]
    if cut.journal:
        synced = max(last.values(), default=-1)
        later = [place for place in places if place > synced]
        first = next((n for n in range(len(later)) if pick.random() >= cut.names), len(later))
        return [steps[place] for place in places if place <= synced or place in later[:first]]
    kept, needed = [], set()
    for place in reversed(places):  # a change needs the earlier ones of the same names
        keys = {key for key, _ in steps[place].changes}
        if place < last.get(steps[place].folder, -1) or keys & needed or pick.random() < cut.names:
            kept.append(steps[place])
            needed |= keys
    return kept[::-1]


def _apply(content, step, survives):
    """Do to a file's bytes what survives of a step."""
    if isinstance(step, Resized):
        if survives() and (step.may_cut or step.size > len(content)):
            _resize(content, step.size)
        return
    end = step.offset + len(step.data)
    if end > len(content) and survives():
        _resize(content, end)
    start = step.offset
    while start < end:
        stop = min((start // SECTOR + 1) * SECTOR, end)
        if survives():
            _resize(content, max(len(content), stop))
            content[start:stop] = step.data[start - step.offset : stop - step.offset]
        start = stop


def _resize(content, size):
    del content[size:]
    content.extend(bytes(size - len(content)))
