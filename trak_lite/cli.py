"""The command line: ``trak-lite verify PATH``, or ``python -m trak_lite verify PATH``.

Exit status: 0 where all is well, 1 where something is damaged, 2 for wrong use or a path that holds no store.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn, final

from trak_lite._version import __version__
from trak_lite.errors import TrakLiteError
from trak_lite.store import verify_store

__all__ = ["main"]

_PROGRAM = "trak-lite"
_WRONG_USE = 2


@final
class _Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(_WRONG_USE, f"{self.prog}: {message}. Try '{self.prog} --help'.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: Of the command line; ``None`` takes those of the process.
    """
    parsed = _parser().parse_args(arguments)
    try:
        report = verify_store(parsed.path, repair=parsed.repair)
    except TrakLiteError as error:
        sys.stderr.write(f"{_PROGRAM}: {error}\n")
        return _WRONG_USE
    sys.stdout.write(f"{report}\n")
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=_PROGRAM, description="Which training examples made the model say this?")
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    verify = commands.add_parser(
        "verify",
        help="compare every byte of a store with its own records",
        description="Compare every byte of a store with its own records. Takes no lock and writes nothing, unless it "
        "repairs; exits with 0 where nothing is damaged, else with 1.",
    )
    verify.add_argument("path", metavar="PATH", help="folder of the store, or its address (s3://...)")
    verify.add_argument(
        "--repair",
        action="store_true",
        help="rename damaged chunks into .set-aside/ (nothing is deleted), so that their rows are pending and the "
        "next featurize computes exactly those",
    )
    return parser
