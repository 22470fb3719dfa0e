"""The command line: ``trak-lite run CONFIG``, or ``python -m trak_lite run CONFIG``.

A config is a YAML file. Its keys are the arguments of :class:`~trak_lite.Attributor`. It names a recipe: a Python file
of the user that returns model and data. No other value of a config can name code. The commands ``check`` and
``inspect`` read a store and need no config. The other commands need the extra ``cli``.
"""

from trak_lite.cli.program import main as main

__all__ = ["main"]
