"""The program ``trak-lite``: commands, options and what is said when something is wrong.

Exit status: 0 where all is well, 1 where something is damaged, 2 for wrong use or a path that holds no store, 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, NoReturn, final

from trak_lite._version import __version__
from trak_lite.cli.inspection import done_lines, inspection
from trak_lite.errors import InvalidInputError, MissingStoreError, TrakLiteError
from trak_lite.store import RemotePlace, open_store, resolve_place, verify_store

if TYPE_CHECKING:
    from trak_lite.cli.records import RunRecord

__all__ = ["main"]

_PROGRAM = "trak-lite"
_WRONG_USE, _INTERRUPTED = 2, 130
_EXTRA = ("jsonargparse", "docstring_parser", "yaml", "typeshed_client")
_WITH_CONFIG = {
    "run": "train if there are no checkpoints, featurize, score",
    "featurize": "compute the features of the train rows",
    "score": "score every train row for every target",
    "evaluate": "retrain on random subsets and say how well the scores predict the outcome",
    "report": "write the scores of a store as one page of HTML",
}
_SOURCES = {"report": "STORE"}
"""What stands behind a command, where it is not ``CONFIG``."""
_OPTIONS = {"report": " [--out PATH]"}
"""Options of one command only."""


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
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given and given[0] in _WITH_CONFIG:
            return _with_config(given[0], given[1:])
        return _on_store(_parser().parse_args(given))
    except TrakLiteError as error:
        sys.stderr.write(f"{_PROGRAM}: {' '.join(str(error).splitlines())}\n")
        return _WRONG_USE
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{_PROGRAM}: interrupted before anything was begun.\n")
        return _INTERRUPTED


def _on_store(parsed: argparse.Namespace) -> int:
    """Run a command that looks at a store and needs no config."""
    if parsed.command == "inspect":
        sys.stdout.write(f"{inspection(resolve_place(parsed.path))}\n")
        return 0
    report = verify_store(parsed.path, repair=parsed.repair)
    sys.stdout.write(f"{report}\n")
    return 0 if report.ok else 1


def _with_config(command: str, arguments: list[str]) -> int:
    """Run a command that a config describes."""
    try:
        from trak_lite.attributor_settings import versions
        from trak_lite.cli.commands import COMMANDS, Job
        from trak_lite.cli.configs import config_parser, read_config
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        raise InvalidInputError(
            f"{command} needs {error.name}, which is not installed. Install it with pip install 'trak-lite[cli]'."
        ) from error
    source = _SOURCES.get(command, "CONFIG")
    usage = f"{_PROGRAM} {command} ({source} | --from STORE){_OPTIONS.get(command, '')} [--key value ...]"
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(config_parser(command, f"{_WITH_CONFIG[command].capitalize()}.", usage).help())
        return 0
    rest = list(arguments)
    out = _taken(rest, "--out") if command == "report" else None
    place = _source(command, rest, usage)
    config = read_config(command, place, rest)
    try:
        job = Job(config)
        if not isinstance(place, str):
            sys.stderr.write(place.other_versions(versions(job.attributor.device)))
        with nullcontext() if command == "report" else job.recorded(command):
            for line in COMMANDS[command](job, out):
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write(_interrupted(config.path, [command, *arguments]))
        return _INTERRUPTED
    return 0


def _source(command: str, arguments: list[str], usage: str) -> str | RunRecord:
    """Remove the config or the store from the arguments; return the config's path or the record of the store's run.

    Raises:
        InvalidInputError: If there is neither or both.
    """
    from trak_lite.cli.records import last_record

    store = _taken(arguments, "--from")
    named = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    if command == "report" and store is None:
        store, named = named, None
    if (store is None) == (named is None):
        raise InvalidInputError(
            f"{command} takes one of a config and a store, the config first. Usage: {usage}."
        )
    if named is not None:
        return named
    assert store is not None  # one of the two is given
    return last_record(resolve_place(store))


def _taken(arguments: list[str], option: str) -> str | None:
    """Remove an option from the arguments and return its value; ``None`` if it is not there.

    Raises:
        InvalidInputError: If it has no value.
    """
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name != option:
            continue
        del arguments[place]
        if equals:
            return value
        if place == len(arguments):
            raise InvalidInputError(f"{option} has no value. Expected {option} PATH.")
        return arguments.pop(place)
    return None


def _interrupted(place: str | RemotePlace, arguments: Sequence[str]) -> str:
    """Return what is safe on disk, and how to continue."""
    try:
        with open_store(place) as store:
            safe = [f"Safe in {place}:", *(f"  {line}" for line in done_lines(store))]
    except MissingStoreError:
        safe = [f"Nothing was written to {place} yet."]
    again = f"To continue: {shlex.join([_PROGRAM, *arguments])}"
    return "\n".join(
        [f"\n{_PROGRAM}: interrupted. The same command goes on at the first missing row.", *safe, again, ""]
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=_PROGRAM, description="Which training examples made the model say this?")
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for name, text in _WITH_CONFIG.items():
        commands.add_parser(name, help=text)  # these are parsed by their config's keys
    verify = commands.add_parser(
        "verify",
        help="compare every byte of a store with its own records",
        description="Compare every byte of a store with its own records. Takes no lock and writes nothing, unless it "
        "repairs; exits with 0 where nothing is damaged, else with 1.",
    )
    verify.add_argument(
        "--repair",
        action="store_true",
        help="rename damaged chunks into .set-aside/ (nothing is deleted), so that their rows are pending and the "
        "next featurize computes exactly those",
    )
    inspect = commands.add_parser(
        "inspect",
        help="show what a store holds",
        description="Show a store's settings, tables, rows done, verdicts and runs. Takes no lock and writes nothing.",
    )
    for command in (verify, inspect):
        command.add_argument("path", metavar="PATH", help="folder of the store, or its address (s3://...)")
    return parser
