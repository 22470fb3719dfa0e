"""Named places where a test makes the process kill itself, to show that no moment is a bad one.

With ``TRAK_LITE_FAILPOINT=name:count`` in the environment, the process sends itself SIGKILL when it comes to the
place for the count-th time. Unset, a place costs one look-up of the environment.
"""

from __future__ import annotations

import os
import signal

__all__ = [
    "DROP_FAILPOINTS",
    "FAILPOINTS",
    "GROWTH_FAILPOINTS",
    "REMOTE_FAILPOINTS",
    "REPAIR_FAILPOINTS",
    "failpoint",
]

_VARIABLE = "TRAK_LITE_FAILPOINT"

FAILPOINTS = (
    "folder_built",  # a store, group or table is complete under its scratch name
    "folder_published",  # it has its name; the parent folder is not synced yet
    "entry_written",  # the entry of a table in the store's list is complete under its scratch name
    "table_listed",  # it has its name
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
"""Every place on the way of a row, in the order in which a store comes to them."""

REPAIR_FAILPOINTS = (
    "file_set_aside",  # one more file of a damaged chunk is in its folder aside
    "log_copied",  # the row log of a chunk with sound rows is copied, and the new one written
    "log_replaced",  # the new one has the name
)
"""Every place on the way of a repair."""

DROP_FAILPOINTS = ("table_renamed",)  # a dropped table has lost its name, and is still there
"""Every place on the way of dropping a table."""

GROWTH_FAILPOINTS = (
    "growth_announced",  # the table says to what size it grows, and has the old one
    "array_grown",  # one more of its arrays has the new size
    "table_grown",  # the table has the new size
    "outgrown_rows_noted",  # the rows of its last commit are in the row log, the files have their final names
)
"""Every place on the way of a growing table."""

REMOTE_FAILPOINTS = (
    "table_put",  # the documents of a table are in the object store, its entry in the list is not
    "object_put",  # one more column of a complete chunk is in the object store, or something else was there
    "commit_put",  # its commit record is
    "leftover_replaced",  # one more object that a dead writer had left has the bytes of the record
    "staged_file_removed",  # one more staged file of a chunk that is committed there is gone
)
"""Every place on the way of a complete chunk to an object store."""


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
