"""Failpoints: named places at which tests kill the process, to check recovery from a kill at any step.

If the environment variable ``TRAK_LITE_FAILPOINT`` is ``name:count``, the process sends itself SIGKILL when it reaches
the failpoint for the count-th time. If it is unset, a failpoint costs one look-up of the environment.
"""

from __future__ import annotations

import os
import signal

_VARIABLE = "TRAK_LITE_FAILPOINT"


def failpoint(name: str) -> None:
    """Kill the process with SIGKILL if this failpoint is armed in the environment."""
    wanted, _, count = os.environ.get(_VARIABLE, "").partition(":")
    if wanted != name:
        return
    left = int(count or 1) - 1
    os.environ[_VARIABLE] = f"{wanted}:{left}"
    if left <= 0:
        os.kill(os.getpid(), signal.SIGKILL)
