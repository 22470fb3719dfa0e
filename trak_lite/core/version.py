"""The version, where both the package and its set-up can read it."""

__version__ = "0.1.0"
