"""The failpoints of the library, by what they interrupt."""

from __future__ import annotations

FAILPOINTS = (
    "folder_built",  # a store, group or table is complete under its scratch name
    "folder_published",  # the folder has its final name; the parent folder is not synced yet
    "stage_reserved",  # a row log has room for the rows of a put
    "column_written",  # one column of the rows is in the log
    "rows_written",  # all columns are in the log, and no frame says so
    "rows_recorded",  # the frame is whole: the rows are done
    "column_removed",  # one column that an interrupted commit left, or an outgrown one, is removed
    "columns_synced",  # the files of a complete chunk are written and synced; no commit record yet
    "commit_written",  # its commit record is written but not synced
    "commit_synced",  # the commit record is synced; no column is visible
    "column_published",  # one more column is visible
    "chunk_published",  # every column is visible and synced; the row log still exists
    "chunk_settled",  # the row log is deleted
)
"""Failpoints of writing and committing rows, in order of execution."""

LIST_FAILPOINTS = (
    "entry_written",  # the entry of a table in the store's list is complete under its scratch name
    "table_listed",  # the entry has its final name
)

ENTRY_FAILPOINTS = (
    "entry_announced",  # the mark of an entry allows its next version, which is not written
    "entry_replaced",  # the entry is written, and its mark allows the one before too
    "entry_removed",  # a dropped entry is deleted, and its mark is not
)

REPAIR_FAILPOINTS = (
    "file_set_aside",  # one more file of a damaged chunk is moved to its set-aside folder
    "log_copied",  # the row log of a chunk with sound rows is copied and the new log is written
    "log_replaced",  # the new log has replaced the old one
)

DROP_FAILPOINTS = (
    "table_renamed",  # a dropped table is renamed but not deleted
    "group_renamed",  # so is the group that held no other table
)

GROWTH_FAILPOINTS = (
    "last_rows_logged",  # the rows of the last chunk, which is committed, are in its row log too
    "growth_announced",  # the table records the size it grows to, and still has the old size
    "array_grown",  # one more of its arrays has the new size
    "table_grown",  # the table has the new size
)

REMOTE_FAILPOINTS = (
    "table_put",  # the documents of a table are in the object store; its list entry is not
    "object_put",  # one more column of a complete chunk is in the object store, or another object was
    "commit_put",  # its commit record is in the object store
    "leftover_replaced",  # one more object left by a killed writer is replaced by the bytes of the record
)
"""Failpoints of creating a table in an object store and committing a chunk there."""
