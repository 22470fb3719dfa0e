"""Configs: YAML from a file or the config in the record of a run, combined with the options of the command line.

The keys are the arguments of :class:`~trak_lite.Attributor`. The arguments of its methods and of
:func:`~trak_lite.verify` are in sections of these names (``score.method``), those of :class:`~trak_lite.Rows` in
``train_data`` and ``target_data``, and those of the recipe's functions in ``recipe_arguments``.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Any, TypeAlias, Union, final, get_args, get_origin

import yaml
from jsonargparse import SUPPRESS, ArgumentError, ArgumentParser, Namespace

from trak_lite.attributor import Attributor
from trak_lite.cli.keys import REQUIRED, Key, is_plain, keys_of, shown_type
from trak_lite.cli.recipes import SECTION, Recipe, load_recipe
from trak_lite.cli.records import RunRecord
from trak_lite.core.json_text import check_depth
from trak_lite.core.normalization import Normalization
from trak_lite.core.validate import known_names, positive_int
from trak_lite.data.datasets import Rows
from trak_lite.errors import InvalidInputError
from trak_lite.methods import as_method
from trak_lite.retraining.trials import try_removals
from trak_lite.retraining.verify import verify
from trak_lite.store import RemotePlace
from trak_lite.store._names import check_name
from trak_lite.store.remote.place import resolve_place
from trak_lite.unrolled import unrolled

Option: TypeAlias = tuple[str, str]
"""Name and text of an option of the command line."""
_OWN_KEYS = (
    Key("recipe", str, REQUIRED, "Python file of the recipe. In a config: relative to the config's folder."),
    Key("path", str, REQUIRED, "Folder of the store (runs/digits.zarr), or its address in an object store."),
    Key(
        "checkpoints",
        str | list[str] | None,
        None,
        "File or folder of checkpoints, or a list of them. null uses the model as build_model() returns it.",
    ),
    Key("train_seed", int, 0, "Seed for the recipe's train(indices, seed), if run calls it."),
)


@final
@dataclass(frozen=True, slots=True)
class RunConfig:
    """A config with a value for every key, and its recipe."""

    values: Mapping[str, Any]
    """JSON values by key, as a YAML file nests them, with every key and absolute paths."""
    recipe: Recipe | None
    """``None`` if the command needs no recipe and none is given."""
    recorded: frozenset[str]
    """Keys whose values come from the record of a store, not from the user."""

    @property
    def path(self) -> str | RemotePlace:
        """Path or address of the store."""
        return resolve_place(self.values["path"])

    def attributor_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of an :class:`~trak_lite.Attributor`, except the model."""
        chosen = {key.name: self.values[key.name] for key in keys_of(Attributor.__init__)}
        return {**chosen, "normalize": _normalization(chosen["normalize"])}


def help_text(usage: str, text: str) -> str:
    """Return the help page of a command, with all keys except those of a recipe's functions."""
    return _parser(run_keys(), usage=usage, description=text).format_help()


def read_config(source: str | RunRecord, options: Sequence[Option], *, runs: bool = True) -> RunConfig:
    """Return a config from a file or from the record of a run, with the values of the command line.

    All other keys are checked before the recipe is executed. The recipe named in a record is never executed: a store
    may come from someone else, and the recorded digest says nothing about what the code does. It is optional unless
    the command ``runs``, which needs model and data.
    """
    typed = dict(options)
    if isinstance(source, RunRecord):
        settings, where, folder = dict(source.config), f"The run stored in {source.where}", Path()
        there = settings.pop("recipe", None)
        if runs and "recipe" not in typed:
            raise InvalidInputError(
                f"{where} can only be repeated with a recipe that you name: a recipe that a store names is never "
                f"executed. It was made with {there!r}. Pass --recipe FILE with a file that you trust."
            )
    else:
        settings, where, folder = _read_yaml(source), source, Path(source).parent
    arguments = settings.pop(SECTION, None) or {}
    if not isinstance(arguments, Mapping):
        raise InvalidInputError(f"{where}: {SECTION} must be a mapping, got {arguments!r}.")
    of_recipe = [option for option in options if option[0].startswith(f"{SECTION}.")]
    needed = [
        key if runs or key.name == "path" or key.default is not REQUIRED else key._replace(default=None)
        for key in run_keys()
    ]
    values = _parsed(needed, settings, [option for option in options if option not in of_recipe], where)
    recipe, keys, named = None, [], {}
    if values["recipe"] is not None:
        recipe = load_recipe((Path() if "recipe" in typed else folder) / values["recipe"])
        keys, named = recipe.keys(), {f"{SECTION}.{name}": value for name, value in arguments.items()}
    values |= _parsed(keys, named, of_recipe, where)
    values["recipe"] = None
    if recipe is not None:
        recipe = replace(recipe, arguments=values.get(SECTION, {}))
        values["recipe"] = str(recipe.path)
    changed = {name.removesuffix("+") for name in typed}
    recorded = {key.name for key in needed} - changed if isinstance(source, RunRecord) else ()
    checkpoints, path = values["checkpoints"], resolve_place(values["path"])
    if isinstance(checkpoints, str):
        values["checkpoints"] = os.path.abspath(os.path.expanduser(checkpoints))
    elif checkpoints is not None:
        values["checkpoints"] = [os.path.abspath(os.path.expanduser(path)) for path in checkpoints]
    if not isinstance(path, RemotePlace):
        values["path"] = os.path.abspath(path)
    return RunConfig(values, recipe, frozenset(recorded))


@cache
def run_keys() -> tuple[Key, ...]:
    """Return the keys of every config, except those of a recipe's functions."""
    rows = partial(keys_of, Rows.__init__, without=("data", "what"))
    return (
        *_OWN_KEYS,
        *(
            key._replace(type=key.type | dict[str, float | str | None]) if key.name == "normalize" else key
            for key in keys_of(Attributor.__init__, without=("path",))
        ),
        *rows(section="train_data"),
        *rows(section="target_data"),
        *keys_of(Attributor.featurize, section="featurize"),
        *keys_of(Attributor.score, section="score"),
        *keys_of(verify, section="verify", without=("strata", "texts")),
        *keys_of(try_removals, section="trials", without=("groups",)),
        Key(
            "trials.groups",
            str | None,
            None,
            "Name of a stored column: sets of rows of one group are tried, too.",
        ),
        Key(
            "unroll.path", str | None, None, "Folder of the run that unroll trains; null is beside the store."
        ),
        *keys_of(unrolled, section="unroll", without=("runs", "targets", "task", "name", "progress")),
    )


def _parser(keys: Sequence[Key], **texts: Any) -> ArgumentParser:
    parser = ArgumentParser(
        exit_on_error=False, default_env=False, allow_abbrev=False, add_help=False, **texts
    )
    for key in keys:
        default = SUPPRESS if key.default is REQUIRED else key.default
        parser.add_argument(f"--{key.name}", type=key.type, default=default, help=key.help)
    return parser


def _parsed(
    keys: Sequence[Key], settings: Mapping[Any, Any], options: Sequence[Option], where: str
) -> dict[str, Any]:
    """Return the values of keys, nested by section. Options replace values of a file, which replace defaults."""
    by_name = {key.name: key for key in keys}
    namespace = _parser(keys).get_defaults()
    for name, value in _flat(settings, by_name, where):
        namespace[name] = _value(by_name, name, value, namespace, where)
    for option, text in options:
        name = option.removesuffix("+")  # "--grad_wrt+ x" appends to the list grad_wrt
        namespace[name] = _value(by_name, name, text, namespace, "Command line", option)
    missing = [name for name in by_name if name not in namespace]
    if missing:
        raise InvalidInputError(
            f"{where}: {', '.join(missing)} must be given. Add it, or pass --{missing[0]} VALUE."
        )
    return namespace.as_dict()


def _value(
    by_name: Mapping[str, Key], name: str, raw: Any, namespace: Namespace, where: str, option: str = ""
) -> Any:
    """Return the checked value of one key: of a file, or the text of an option of the command line."""
    key = by_name.get(name)
    if key is None:
        same = [other for other in by_name if other.rpartition(".")[2] == name.rpartition(".")[2]]
        names = dict.fromkeys(part for other in by_name for part in (other.partition(".")[0], other))
        near = " or ".join(map(repr, same or difflib.get_close_matches(name, names, n=1)))
        hint = f"Did you mean {near}?" if near else "The option --help lists the keys."
        raise InvalidInputError(f"{where}: unknown key {name!r}. {hint}")
    parser = _parser([key])  # alone, because jsonargparse would check all others again
    before = Namespace({name: namespace[name]} if name in namespace else {})  # type: ignore[no-untyped-call]
    try:
        if option:
            value = parser.parse_args([f"--{option}={raw}"], before)[name]
        else:
            value = parser.parse_object({name: deepcopy(raw)}, before)[name]  # which changes lists in place
        # jsonargparse accepts null for every type, NaN as a number, a set as a list, and "60" as 60.
        fits = is_plain([raw, value]) and (value is not None or type(None) in get_args(key.type))
        may_be_text = get_origin(key.type) in (Union, UnionType) and str in get_args(key.type)
        value = raw if isinstance(raw, str) and may_be_text and not option else value
        fits = fits and (bool(option) or value == raw)
    except (ArgumentError, OverflowError):
        fits = False
    if not fits:
        raise InvalidInputError(f"{where}: {name} must be {shown_type(key.type)}, got {raw!r:.100}.")
    try:
        if name in ("method", "score.method") and value not in ("auto", None):
            as_method(value)
        if name == "normalize":
            _normalization(value)
        if name == "score.name":
            check_name(value, what="target set")
        is_ours = not name.startswith(f"{SECTION}.")
        if is_ours and name.rpartition(".")[2] == "batch_size" and value is not None:
            positive_int(batch_size=value)
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}: {name}: {error}") from error
    if name in ("train_data.indices", "target_data.indices") and value == []:
        raise InvalidInputError(f"{where}: {name} must have at least one row. Leave it out for all rows.")
    return value


def _flat(settings: Mapping[Any, Any], names: Collection[str], where: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values. A section is split into its keys; other mappings are values."""
    sections = {name.rpartition(".")[0] for name in names} - {""}
    for name, value in settings.items():
        if name not in sections:
            yield str(name), value
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        elif value is not None:
            raise InvalidInputError(f"{where}: {name} must be a mapping of keys, got {value!r}.")


def _normalization(value: Any) -> Any:
    """Return ``normalize=...`` of the attributor; a mapping becomes a :class:`Normalization`."""
    if not isinstance(value, Mapping):
        return value
    known_names(value, [field.name for field in fields(Normalization)], what="fields of normalize")
    return Normalization(**value)


def _read_yaml(path: str) -> dict[Any, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = yaml.load(text, Loader=_Loader)  # a SafeLoader
        check_depth(content)
    except OSError as error:
        raise InvalidInputError(
            f"There is no config at {path} ({error.strerror}). Name a YAML file, such as configs/digits.yaml; for the "
            "run that a store recorded, --from STORE."
        ) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        what = " ".join(str(error).split()) or "nested too deeply"
        raise InvalidInputError(f"{path} cannot be read as YAML: {what}. Correct it.") from error
    if not isinstance(content, dict):
        raise InvalidInputError(
            f"{path} holds {'nothing' if content is None else type(content).__name__}, expected keys with values "
            "(key: value)."
        )
    return content


@final
class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Loader that refuses aliases, and a repeated key, of which PyYAML uses the last value without a warning."""

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        """Refuse aliases: one inside its own value makes an endless structure."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="aliases are not allowed", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(names)) < len(names):
            problem = f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


# For PyYAML 1e-3 and 1.5e3 are texts: it asks for a dot and a sign.
_REAL = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _REAL, "-+.0123456789")
