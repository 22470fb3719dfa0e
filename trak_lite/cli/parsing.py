"""Values of a config: each one read against its key's type by jsonargparse, wrong ones refused in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, final, get_args

from jsonargparse import SUPPRESS, ArgumentError, ArgumentParser

from trak_lite.cli.keys import REQUIRED, Key, is_plain, type_text
from trak_lite.errors import InvalidInputError

__all__ = ["ConfigParser", "overrides", "refuse_unknown"]

COMMAND_LINE = "Command line"


@final
class ConfigParser:
    """Reads the values of some keys."""

    def __init__(
        self, command: str, keys: Sequence[Key], *, usage: str | None = None, text: str = ""
    ) -> None:
        """Declare every key as an option of a parser.

        Args:
            command: Name of the command, for messages.
            keys: What may be set.
            usage: First line of the help.
            text: What the help says of the command.
        """
        self.keys = {key.name: key for key in keys}
        self._command = command
        self._parser = ArgumentParser(
            prog=f"trak-lite {command}",
            usage=usage,
            description=text,
            exit_on_error=False,
            default_env=False,
            allow_abbrev=False,
            add_help=False,
        )
        for key in keys:
            default = SUPPRESS if key.default is REQUIRED else key.default
            self._parser.add_argument(f"--{key.name}", type=key.type, default=default, help=_escaped(key))

    def help(self) -> str:
        """Return the help page."""
        return _APPENDING.sub("", self._parser.format_help())

    def value(self, name: str, value: Any, *, where: str) -> Any:
        """Return a value that a file gives to a key.

        Raises:
            InvalidInputError: If there is no such key, or the value is not of its type.
        """
        refuse_unknown(name, self.keys, where=where, command=self._command)
        nested = value
        for part in reversed(name.split(".")):
            nested = {part: nested}
        return self._checked(name, value, lambda: self._parser.parse_object(nested, defaults=False), where)

    def text(self, name: str, text: str) -> Any:
        """Return a value that the command line gives to a key.

        Raises:
            InvalidInputError: If there is no such key, or the text does not say a value of its type.
        """
        refuse_unknown(name, self.keys, where=COMMAND_LINE, command=self._command)
        option = f"--{name}={text}"
        return self._checked(
            name, text, lambda: self._parser.parse_args([option], defaults=False), COMMAND_LINE
        )

    def _checked(self, name: str, given: Any, parse: Any, where: str) -> Any:
        key = self.keys[name]
        try:
            value = _plain(parse()[name]) if is_plain(given) else _WRONG
        except ArgumentError:
            value = _WRONG
        if not is_plain(value) or (value is None and not key.nullable):
            names = [part for member in (key.type, *get_args(key.type)) for part in get_args(member)]
            raise InvalidInputError(
                f"{where}: {name} must be {type_text(key.type)}, got {_short(given)}.{_nearest(given, names)}"
            )
        try:
            if key.check is not None and value is not None:
                key.check(value)
            if key.build is not None and isinstance(value, Mapping):
                key.build(value)
        except InvalidInputError as error:
            raise InvalidInputError(f"{where}: {name}: {error}") from error
        return value


_WRONG = object()
_APPENDING = re.compile(r", --\S+\+ \S+")
"""Options of jsonargparse that add to a list of a config; here a value is given as a whole."""


def overrides(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every ``--name value`` or ``--name=value``.

    Raises:
        InvalidInputError: If an argument is no option, or an option has no value.
    """
    rest = iter(arguments)
    for argument in rest:
        name, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not name:
            raise InvalidInputError(
                f"{COMMAND_LINE}: unexpected {argument!r}. Expected --key value, after the config."
            )
        value = text if equals else next(rest, None)
        if value is None:
            raise InvalidInputError(f"{COMMAND_LINE}: --{name} has no value. Expected --{name} value.")
        yield name, value


def refuse_unknown(name: str, known: Collection[str], *, where: str, command: str) -> None:
    """Raise if a key is not known; the message names the nearest one.

    Raises:
        InvalidInputError: If it is not.
    """
    if name not in known:
        hint = _nearest(name, list(known)) or f" 'trak-lite {command} --help' lists the keys."
        raise InvalidInputError(f"{where}: unknown key {name!r}.{hint}")


def _nearest(given: Any, known: Sequence[Any]) -> str:
    """Return a sentence with the nearest name: those of another section first, then by their letters."""
    names = [name for name in known if isinstance(name, str)]
    elsewhere = [name for name in names if name.rpartition(".")[2] == str(given).rpartition(".")[2]]
    near = elsewhere or difflib.get_close_matches(str(given), names, n=1)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def _plain(value: Any) -> Any:
    return value.as_dict() if hasattr(value, "as_dict") else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _escaped(key: Key) -> str:
    """Return the help of a key for argparse, which takes % for a format."""
    return (key.help or type_text(key.type)).replace("%", "%%")
