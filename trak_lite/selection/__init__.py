"""Selection of train rows by their scores: training data to keep, or harmful rows to remove."""

from trak_lite.selection.choice import select as select
from trak_lite.selection.result import Selection as Selection

__all__ = ["Selection", "select"]
