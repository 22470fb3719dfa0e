"""A disk that is full or broken for a while: calls of ``os`` that raise."""

import contextlib
import errno
import os
from unittest import mock

from fault_cases import Violated

from trak_lite.errors import ReadOnlyStoreError, StoreFullError

_WRITING = ("open", "pwrite", "posix_fallocate", "fsync", "rename", "unlink", "mkdir", "ftruncate")


class Failing:
    """Lets some calls that change the disk fail, from the one after ``after`` on, ``times`` in a row.

    A full disk refuses new files and room for bytes, not the removal of anything.
    """

    def __init__(self, calls, after, times, code, short=False):
        self._calls = calls
        self._left = after
        self._times = times
        self._code = code
        self._short = short
        self._patches = contextlib.ExitStack()

    @staticmethod
    def plan(pick):
        """Draw the arguments of one."""
        full = pick.random() < 0.6
        calls = ("open", "pwrite", "posix_fallocate", "fsync", "mkdir", "rename") if full else _WRITING
        return {
            "calls": [pick.choice(calls)] if pick.random() < 0.6 else list(calls),
            "after": int(pick.expovariate(1 / 40)),
            "times": pick.choice([1, 1, 2, 3, 9, 30]),
            "code": pick.choice(
                [errno.ENOSPC, errno.EDQUOT] if full else [errno.EIO, errno.EROFS, errno.EACCES]
            ),
            "short": pick.random() < 0.3,
        }

    def __enter__(self):
        self._patches = contextlib.ExitStack()
        for name in self._calls:
            self._patches.enter_context(mock.patch.object(os, name, self._failing(getattr(os, name))))
        return self

    def __exit__(self, *_):
        self._patches.close()

    def check_name_of(self, error):
        """Raise unless an error is named after its cause."""
        if self._code in (errno.ENOSPC, errno.EDQUOT):
            fits = isinstance(error, StoreFullError)
        else:
            fits = isinstance(error, ReadOnlyStoreError) == (self._code in (errno.EROFS, errno.EACCES))
        if not fits:
            raise Violated(f"{errno.errorcode[self._code]} became {type(error).__name__}: {error}") from error

    def _failing(self, call):
        def failing(*arguments, **keywords):
            if call.__name__ == "open" and not arguments[1] & os.O_CREAT:
                return call(*arguments, **keywords)
            self._left -= 1
            if self._left >= 0 or self._left < -self._times:
                return call(*arguments, **keywords)
            if self._short and call.__name__ == "pwrite" and len(arguments[1]) > 1:
                self._short = False
                return call(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2], arguments[2])
            raise OSError(self._code, os.strerror(self._code))

        return failing
