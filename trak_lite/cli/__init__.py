"""The command line: ``trak-lite run CONFIG`` and its like, or ``python -m trak_lite run CONFIG``.

A config is YAML whose keys mirror the arguments of :class:`~trak_lite.Attributor`, and names a recipe: a Python file of
the user's that gives model and data. Nothing else in a config can name code. ``verify`` and ``inspect`` look at a store
and need no config; the other commands need the extra ``cli``.
"""

from trak_lite.cli.program import main as main

__all__ = ["main"]
