"""The program ``trak-lite``: commands, options and error messages.

Exit status: 0 for success, 1 if ``check`` finds damage, 2 for wrong use or any other error of the package, 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn, TextIO, final

from trak_lite.cli.records import RunRecord, done_lines, inspection, last_record
from trak_lite.core.validate import installing
from trak_lite.core.version import __version__
from trak_lite.errors import InvalidInputError, MissingStoreError, TrakLiteError, printable
from trak_lite.store import RemotePlace, check_store, open_store
from trak_lite.store.remote.place import resolve_place

_PROGRAM = "trak-lite"
_WRONG_USE, _INTERRUPTED, _PIPE_CLOSED = 2, 130, 141
_EXTRA = ("jsonargparse", "docstring_parser", "yaml", "typeshed_client")
_WITH_CONFIG: dict[str, tuple[str, tuple[str, ...]]] = {
    "plan": ("measure on a few batches how long run takes, how much memory and disk", ()),
    "run": ("train if there are no checkpoints, featurize, score", ("where", "by")),
    "featurize": ("compute the features of the train rows", ()),
    "score": ("score every train row for every target", ("where", "by")),
    "verify": ("test the scores against models that are retrained on random subsets", ()),
    "trials": ("measure by retraining what sets of train rows change, for the intervals of effects", ()),
    "effects": (
        "predict what changes if a set of train rows goes, or find a set that changes a target",
        ("remove", "where", "target", "goal", "out"),
    ),
    "unroll": ("train, and score by exact derivatives through the training", ()),
    "report": ("write the scores of a store as one page of HTML", ("out", "where")),
    "serve": ("answer questions about the scores of a store in a browser", ("port",)),
}
"""What each command does, and the options that it has beside the keys of a config."""
_OF_STORE = ("effects", "report", "serve")
"""Commands that take a store instead of a config."""
_VALUES = {
    "where": "NAME=VALUE ...",
    "by": "NAME",
    "out": "PATH",
    "port": "PORT",
    "remove": "ROWS",
    "target": "NUMBER",
    "goal": "CHANGE",
}


@final
class _Parser(argparse.ArgumentParser):
    """A parser with error messages of one line."""

    def error(self, message: str) -> NoReturn:
        _warn(f"{self.prog}: {message}. Try '{self.prog} --help'.\n")
        self.exit(_WRONG_USE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in some arguments, by default those of the process, and return its exit status."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if argv and argv[0] in _WITH_CONFIG:
            return _with_config(argv[0], argv[1:])
        return _on_store(_parser().parse_args(argv))
    except TrakLiteError as error:
        _warn(f"{_PROGRAM}: {' '.join(str(error).splitlines())}\n")
        return _WRONG_USE
    except _PipeClosedError:
        with contextlib.suppress(OSError):  # a standard output without a file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at the end
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        _warn(f"\n{_PROGRAM}: interrupted before the command started.\n")
        return _INTERRUPTED


def _on_store(parsed: argparse.Namespace) -> int:
    """Run a command that reads a store and needs no config."""
    if parsed.command == "inspect":
        _say(inspection(resolve_place(parsed.path), every=parsed.every))
        return 0
    report = check_store(parsed.path, repair=parsed.repair)
    _say(str(report))
    return 0 if report.ok else 1


def _with_config(command: str, arguments: list[str]) -> int:
    """Run a command that needs a config, or one of a store that takes the keys of a config."""
    try:
        from trak_lite.cli.commands import COMMANDS, Job, conditions
        from trak_lite.cli.configs import help_text, read_config
        from trak_lite.cli.serve.command import serve
        from trak_lite.cli.stored import effects, report
        from trak_lite.featurizing.settings import versions
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        raise InvalidInputError(
            f"{command} needs {error.name}, which is not installed. {installing('cli')}"
        ) from error
    text, flags = _WITH_CONFIG[command]
    source = "STORE" if command in _OF_STORE else "CONFIG"
    shown = "".join(f" [--{name} {_VALUES[name]}]" for name in flags)
    usage = f"{_PROGRAM} {command} ({source} | --from STORE){shown} [--key value ...]"
    if "--help" in arguments or "-h" in arguments:
        _say(help_text(usage, f"{text.capitalize()}.").rstrip("\n"))
        return 0
    named = arguments[0] if arguments and not arguments[0].startswith("-") else None
    options = list(_options(arguments if named is None else arguments[1:]))
    flag_values = {name: [text for option, text in options if option == name] for name in (*flags, "from")}
    options = [option for option in options if option[0] not in flag_values]
    last = {name: texts[-1] if texts else None for name, texts in flag_values.items()}
    where = conditions(flag_values.get("where", ()))
    origin = _source(command, named, last["from"], usage)
    config = read_config(origin, options, runs=command in COMMANDS)
    recorded = None if isinstance(origin, str) else origin
    try:
        if config.recipe is not None and recorded is not None:
            _warn(recorded.other_recipe(str(config.recipe.path), config.recipe.digest))
        if command not in COMMANDS:
            answers = {
                "effects": lambda: effects(config, last, where),
                "report": lambda: report(config, last["out"], where),
                "serve": lambda: serve(config, last["port"]),
            }
            for line in answers[command]():
                _say(line)
            return 0
        assert config.recipe is not None  # read_config requires it
        job = Job(config, config.recipe, where, last.get("by"))
        if recorded is not None:
            _warn(recorded.other_versions(versions(job.attributor.device)))
        with job.recorded(command):
            job.check_columns()
            for line in COMMANDS[command](job):
                _say(line)
    except KeyboardInterrupt:
        _warn(_interrupted(config.path, [command, *arguments]))
        return _INTERRUPTED
    return 0


def _source(command: str, named: str | None, store: str | None, usage: str) -> str | RunRecord:
    """Return the path of the config, or the record of the last run in the store; raise unless one of them is given."""
    if command in _OF_STORE and store is None:
        store, named = named, None
        if store is None:
            raise InvalidInputError(f"{command} needs the path of a store. Usage: {usage}.")
    if (store is None) == (named is None):
        raise InvalidInputError(
            f"{command} takes either a config or --from STORE; the config comes first. Usage: {usage}."
        )
    if named is not None:
        return named
    assert store is not None  # one of the two is given
    record = last_record(resolve_place(store))
    if record is None and command in _OF_STORE:
        return RunRecord(command, "", {"path": store}, "", {}, store)
    if record is None:
        raise InvalidInputError(
            f"{store} has no record of a run: it was created in Python, or the run was killed. Name the config: "
            "trak-lite run CONFIG."
        )
    return record


class _PipeClosedError(Exception):
    """Nobody reads the output any more, as behind ``| head``."""


def _say(text: str) -> None:
    try:
        sys.stdout.write(_shown(f"{text}\n", sys.stdout))
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise _PipeClosedError from error


def _warn(text: str) -> None:
    sys.stderr.write(_shown(text, sys.stderr))


def _shown(text: str, stream: TextIO) -> str:
    """Escape control characters, so that text from a store or a config cannot control the terminal.

    All output of the program goes through this function.
    """
    encoding = stream.encoding or "utf-8"
    return printable(text).encode(encoding, "backslashreplace").decode(encoding)


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield name and text of every ``--name text`` or ``--name=text``; raise for all else."""
    rest = iter(arguments)
    for argument in rest:
        name, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not name:
            raise InvalidInputError(
                f"Command line: unexpected {argument!r}. Expected --key value, after the config."
            )
        value = text if equals else next(rest, None)
        if value is None:
            raise InvalidInputError(f"Command line: --{name} has no value. Expected --{name} VALUE.")
        yield name, value


def _interrupted(path: str | RemotePlace, arguments: Sequence[str]) -> str:
    """Return the message after Ctrl-C: the rows on disk, and the command that continues."""
    try:
        with open_store(path) as store:
            safe = [f"Stored in {path}:", *(f"  {line}" for line in done_lines(store))]
    except MissingStoreError:
        safe = [f"Nothing was written to {path} yet."]
    again = f"To continue: {shlex.join([_PROGRAM, *arguments])}"
    return "\n".join(
        [f"\n{_PROGRAM}: interrupted. The same command continues at the first missing row.", *safe, again, ""]
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=_PROGRAM, description="Which training examples made the model say this?")
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for name, (text, _) in _WITH_CONFIG.items():
        commands.add_parser(name, help=text)  # for the help only; _with_config parses their options
    check = commands.add_parser(
        "check",
        help="compare a store, or the folder of a run, with its checksums",
        description="Compare rows, entries, records and metadata with their checksums. Without --repair, takes no "
        "lock and writes nothing. Exits with 0 if nothing is damaged, else with 1.",
    )
    check.add_argument(
        "--repair",
        action="store_true",
        help="move damaged chunks to .set-aside/ (nothing is deleted); their rows become pending, and the call "
        "that computes them (featurize, score) computes only these",
    )
    inspect = commands.add_parser(
        "inspect",
        help="show the content of a store",
        description="Show a store's settings, tables, rows done, verdicts and runs. Takes no lock and writes nothing.",
    )
    inspect.add_argument(
        "--every",
        action="store_true",
        help="list every table and entry; by default, more than eight of one kind are summed up",
    )
    for command in (check, inspect):
        command.add_argument("path", metavar="PATH", help="folder of the store, or its address (s3://...)")
    return parser
