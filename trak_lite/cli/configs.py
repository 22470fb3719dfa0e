"""Configs: YAML from a file or from a store, with what the command line says in its place, checked and made whole.

The keys are the arguments of :class:`~trak_lite.Attributor`, those of its methods and of :func:`~trak_lite.verify` in
a section of that name (``score.method``), those of :class:`~trak_lite.Rows` in ``train_data`` and ``target_data``, and
those of the recipe's functions in ``recipe_arguments``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, final

import yaml

from trak_lite._validate import check_depth
from trak_lite.attributor import Attributor
from trak_lite.cli.keys import REQUIRED, Key, keys_of
from trak_lite.cli.parsing import ConfigParser, overrides, refuse_unknown
from trak_lite.cli.recipes import SECTION, Recipe, load_recipe
from trak_lite.cli.records import RunRecord
from trak_lite.data.datasets import Rows
from trak_lite.errors import InvalidInputError
from trak_lite.methods import as_method
from trak_lite.retraining.verify import verify
from trak_lite.store import RemotePlace
from trak_lite.store.remote.place import resolve_place

__all__ = ["RunConfig", "config_parser", "read_config"]

_OWN_KEYS = (
    Key(
        "recipe",
        str,
        REQUIRED,
        "Python file that gives model and data; beside a config, relative to its folder.",
    ),
    Key("path", str, REQUIRED, "Folder of the store (runs/digits.zarr), or its address in an object store."),
    Key(
        "checkpoints",
        str | list[str] | None,
        None,
        "File or folder of checkpoints, or several; null takes the model as build_model() gives it.",
    ),
    Key(
        "train_seed",
        int,
        0,
        "Passed to the recipe's train(indices, seed), which run calls if there is no checkpoint.",
    ),
)


@final
@dataclass(frozen=True, slots=True)
class RunConfig:
    """A config with every value decided, and its recipe."""

    values: Mapping[str, Any]
    """By dotted name; JSON values."""
    recipe: Recipe | None
    """``None`` for a command that can do without, if the command line names none."""
    recorded: frozenset[str] = frozenset()
    """Names of the values that a store has recorded, and neither a file nor the command line of the user's says."""

    @property
    def path(self) -> str | RemotePlace:
        """Where the store is."""
        return resolve_place(self.values["path"])

    @property
    def recipe_arguments(self) -> dict[str, Any]:
        """What the recipe's functions take."""
        return self.section(SECTION)

    def attributor_arguments(self) -> dict[str, Any]:
        """Return the keywords of an attributor, all but the model."""
        chosen = {key.name: _built(key, self.values[key.name]) for key in _attributor_keys()}
        return {**chosen, "path": self.values["path"]}

    def section(self, name: str) -> dict[str, Any]:
        """Return the values of a section, by the name of the argument."""
        prefix = f"{name}."
        return {
            key.removeprefix(prefix): value for key, value in self.values.items() if key.startswith(prefix)
        }

    def to_json(self) -> dict[str, Any]:
        """Return the config as a YAML file would say it, every value written out and every path absolute."""
        nested: dict[str, Any] = {}
        for name, value in self.values.items():
            section, _, key = name.rpartition(".")
            (nested.setdefault(section, {}) if section else nested)[key] = value
        return nested


def config_parser(command: str, text: str, usage: str) -> ConfigParser:
    """Return what reads a config's keys, all but those of the recipe's functions."""
    return ConfigParser(command, _keys(), usage=usage, text=text)


def read_config(
    command: str, source: str | RunRecord, arguments: Sequence[str], *, runs: bool = True
) -> RunConfig:
    """Return a config, from a file or a run that a store has kept, with some values overridden.

    Everything but the recipe's own arguments is checked before a line of the recipe is run. The recipe that a record
    names is never run: a store may be of somebody else's, and a digest that it records says nothing of its code.

    Args:
        command: Name of the command, for messages.
        source: Path of the YAML file, or the record of a run.
        arguments: Overrides, as the command line gives them.
        runs: Whether the command needs model and data; one that only looks may have no recipe.

    Raises:
        InvalidInputError: If the file cannot be read, a key is unknown, a value is of the wrong type or missing, the
            recipe cannot be run, or none is named on the command line where the source is a record.
    """
    given, where, folder = _given(source)
    is_record = isinstance(source, RunRecord)
    parser = ConfigParser(command, _keys())
    of_recipe = given.pop(SECTION, None) or {}
    if not isinstance(of_recipe, Mapping):
        raise InvalidInputError(f"{where}: {SECTION} must be a mapping, got {of_recipe!r}.")
    texts = list(overrides(arguments))
    values = {key.name: key.default for key in parser.keys.values()}
    for name, value in _flat(given, parser.keys, where=where, command=command):
        values[name] = parser.value(name, value, where=where)
    recorded = frozenset(values if is_record else ()) - {name for name, _ in texts}
    recipe_there, values["recipe"] = values["recipe"], REQUIRED
    if not is_record and recipe_there is not REQUIRED:
        values["recipe"] = str(folder / recipe_there)
    for name, text in texts:
        if not name.startswith(f"{SECTION}."):
            values[name] = parser.text(name, text)
    if is_record and runs and values["recipe"] is REQUIRED:
        raise _unnamed_recipe(where, recipe_there)
    _refuse_missing({name: value for name, value in values.items() if runs or name == "path"}, where)
    recipe = None if values["recipe"] is REQUIRED else load_recipe(Path(values["recipe"]))
    if recipe is None:
        values |= _recipe_values(ConfigParser(command, ()), {}, texts, where)
    else:
        values |= _recipe_values(ConfigParser(command, recipe.keys()), of_recipe, texts, where)
    return RunConfig(_absolute(values, recipe), recipe, recorded)


def _unnamed_recipe(where: str, recipe_there: Any) -> InvalidInputError:
    """Return the error of a recorded run that is to be repeated without naming its code."""
    there = "" if recipe_there is REQUIRED else f" It was made with {recipe_there!r}."
    return InvalidInputError(
        f"{where} is repeated with a recipe that you name: a store chooses no code.{there} Pass --recipe FILE with a "
        "file that you trust."
    )


def _recipe_values(
    parser: ConfigParser, given: Mapping[str, Any], texts: Sequence[tuple[str, str]], where: str
) -> dict[str, Any]:
    """Return the values of the recipe's arguments: what is given, else the defaults of its functions."""
    values = {key.name: key.default for key in parser.keys.values()}
    values |= {
        name: parser.value(name, value, where=where)
        for name, value in ((f"{SECTION}.{key}", value) for key, value in given.items())
    }
    values |= {name: parser.text(name, text) for name, text in texts if name.startswith(f"{SECTION}.")}
    _refuse_missing(values, where)
    # A default may be a tuple, which JSON has not.
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


@cache
def _keys() -> tuple[Key, ...]:
    """Return the keys of every config, from the signatures of the attributor."""
    rows = partial(keys_of, Rows.__init__, without=("data", "what"))
    return (
        *_OWN_KEYS,
        *_attributor_keys(),
        *rows(section="train_data"),
        *rows(section="target_data"),
        *keys_of(Attributor.featurize, section="featurize"),
        *_with_method(keys_of(Attributor.score, section="score")),
        *keys_of(verify, section="verify", without=("strata", "texts")),
    )


@cache
def _attributor_keys() -> tuple[Key, ...]:
    return tuple(_with_method(keys_of(Attributor.__init__, without=("path",))))


def _with_method(keys: Iterable[Key]) -> Iterator[Key]:
    """Yield keys, the one of a method with the check that its name and fields are known."""
    for key in keys:
        yield replace(key, check=_check_method) if key.argument == "method" else key


def _check_method(value: Any) -> None:
    if value != "auto":
        as_method(value)


def _given(source: str | RunRecord) -> tuple[dict[str, Any], str, Path]:
    """Return what a source says, its name in messages, and the folder that its recipe is relative to."""
    if isinstance(source, RunRecord):
        return dict(source.config), f"The run kept in {source.where}", Path()
    return _read_yaml(source), source, Path(source).parent


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(
            f"There is no config at {path} ({error.strerror}). Name a YAML file, such as configs/digits.yaml."
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} is no YAML: it is not text in UTF-8. Name a YAML file.") from error
    try:
        content = yaml.load(text, Loader=_Loader)  # a SafeLoader
        check_depth(content)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        what = " ".join(str(error).split()) or "nested too deeply"
        raise InvalidInputError(f"{path} is no YAML that can be read: {what}. Correct it.") from error
    if not isinstance(content, dict):
        raise InvalidInputError(
            f"{path} holds {type(content).__name__}, expected keys with values (key: value)."
        )
    return content


@final
class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Plain YAML: a key twice is an error and not silently the last one, and nothing refers to another part."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse aliases, which may be endless."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases are not allowed", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that was there before."""
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is there twice", key.start_mark
                )
            seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _flat(
    given: Mapping[Any, Any], known: Collection[str], *, where: str, command: str, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values; what is below a section is taken apart, everything else left as it is."""
    sections = {name.rpartition(".")[0] for name in known} - {""}
    for key, value in given.items():
        name = f"{prefix}{key}"
        if name not in sections:
            refuse_unknown(name, known, where=where, command=command)
            yield name, value
        elif isinstance(value, Mapping):
            yield from _flat(value, known, where=where, command=command, prefix=f"{name}.")
        elif value is not None:
            raise InvalidInputError(f"{where}: {name} must be a mapping of keys, got {value!r}.")


def _refuse_missing(values: Mapping[str, Any], where: str) -> None:
    missing = [name for name, value in values.items() if value is REQUIRED]
    if missing:
        raise InvalidInputError(
            f"{where}: {', '.join(missing)} must be given. Add it, or pass --{missing[0]} VALUE."
        )


def _absolute(values: Mapping[str, Any], recipe: Recipe | None) -> dict[str, Any]:
    """Return the values with the paths of files as they are from everywhere."""
    checkpoints, place = values["checkpoints"], resolve_place(values["path"])
    if isinstance(checkpoints, str):
        checkpoints = os.path.abspath(checkpoints)
    elif checkpoints is not None:
        checkpoints = [os.path.abspath(path) for path in checkpoints]
    path = values["path"] if isinstance(place, RemotePlace) else os.path.abspath(place)
    named = None if recipe is None else str(recipe.path)
    return {**values, "recipe": named, "checkpoints": checkpoints, "path": path}


def _built(key: Key, value: Any) -> Any:
    """Return the argument that a value stands for."""
    return key.build(value) if key.build is not None and isinstance(value, Mapping) else value
