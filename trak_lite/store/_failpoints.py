"""Named places where a test makes the process kill itself, to show that no moment is a bad one.

With ``TRAK_LITE_FAILPOINT=name:count`` in the environment, the process sends itself SIGKILL when it comes to the
place for the count-th time. Unset, a place costs one look-up of the environment.
"""

from __future__ import annotations

import os
import signal

__all__ = ["FAILPOINTS", "failpoint"]

_VARIABLE = "TRAK_LITE_FAILPOINT"

FAILPOINTS = (
    "folder_built",  # a store, group or table is complete under its scratch name
    "folder_published",  # it has its name; the parent folder is not synced yet
    "stage_reserved",  # the staged files of a chunk exist and have their size
    "column_written",  # one column of a run is in its staged file
    "rows_written",  # all of them are, unrecorded
    "rows_recorded",  # the row record stands: the rows are done
    "columns_synced",  # a complete chunk is on the disk, unrecorded
    "commit_written",  # its commit record is written, not synced
    "commit_synced",  # the record is on the disk, no column is visible
    "column_published",  # one more column is visible
    "column_taken_back",  # recovery moved a column of a half visible chunk back to the stage
    "chunk_published",  # every column is visible and synced, the row log is still there
    "chunk_settled",  # the row log is gone
)
"""Every place, in the order in which a store comes to them."""


def failpoint(name: str) -> None:
    """Die here by SIGKILL if the environment says so."""
    armed = os.environ.get(_VARIABLE)
    if armed is None:
        return
    wanted, _, count = armed.partition(":")
    if wanted != name:
        return
    left = int(count or 1) - 1
    os.environ[_VARIABLE] = f"{wanted}:{left}"
    if left <= 0:
        os.kill(os.getpid(), signal.SIGKILL)
