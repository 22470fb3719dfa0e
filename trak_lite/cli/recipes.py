"""Recipes: Python files of the user that define model, data and training. They are the only code that a config names.

A recipe is executed if a config file or the command line names it. The recipe in a record of a store is never executed.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import decode_source, module_from_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite.cli.keys import REQUIRED, Key, is_plain, keys_of
from trak_lite.core.fingerprint import describe_source
from trak_lite.data.columns import Column, columns_of
from trak_lite.data.datasets import Rows
from trak_lite.errors import InvalidInputError
from trak_lite.models.checkpoints import module_versions, with_versions

SECTION = "recipe_arguments"
"""Section of a config for the arguments of the recipe's functions."""
_NEEDED = ("build_model", "train_data", "target_data")
_GIVEN = {
    "train": ("indices", "seed"),
    "training": (),
    "render": ("index",),
    "render_target": ("index",),
    "columns": (),
    "sample": ("text",),
    "predict": ("model", "sample"),
    "tokens": ("index",),
}
"""Optional functions of a recipe, and the arguments that the program passes to them."""
_SERVED = ("columns", "sample", "predict", "tokens")
"""Those whose names older recipes may use for variables."""


@final
@dataclass(frozen=True, slots=True)
class Recipe:
    """The functions of a recipe."""

    path: Path
    """Absolute path of the file."""
    digest: str
    """SHA-256 of its bytes."""
    functions: Mapping[str, Callable[..., Any]]
    """The functions that the recipe defines, by name."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the functions, by name, that a config sets."""

    def keys(self) -> list[Key]:
        """Return a key for every argument of the functions that a config can set.

        Raises:
            InvalidInputError: If two functions have an argument of the same name with different types or defaults.
        """
        keys: dict[str, Key] = {}
        for name, function in self.functions.items():
            for key in _keys(name, function):
                first = keys.setdefault(key.name, key)
                if (first.type, first.default) != (key.type, key.default):
                    raise InvalidInputError(
                        f"{self.path}: {key.argument!r} of {name}() has another type or default than in another "
                        "function. Arguments with the same name are one key. Give them the same type and default, "
                        "or rename one."
                    )
        return list(keys.values())

    def bound(self, name: str) -> partial[Any] | None:
        """Return a function with the arguments that it accepts; ``None`` if the recipe does not define it."""
        function = self.functions.get(name)
        if function is None:
            return None
        taken = [key.argument for key in _keys(name, function)]
        # Lists become tuples: verify identifies a training by its arguments, and of a list only by its class.
        values = {key: _tuple(self.arguments[key]) for key in taken if key in self.arguments}
        return partial(function, **values)

    def training(self) -> dict[str, Any] | None:
        """Return JSON values that differ for another ``train``, as of retrained models; ``None`` without ``train``.

        They include the global variables that ``train`` itself names.
        """
        train = self.bound("train")
        if train is None:
            return None
        function: Any = inspect.unwrap(train.func)
        names = function.__code__.co_names if isinstance(function, FunctionType) else ()
        scope = function.__globals__ if names else {}
        variables = {name: scope[name] for name in names if name in scope and not name.startswith("__")}
        described = {SECTION: train.keywords, "global variables": variables}
        of_values = {
            part: {name: describe_source(value) for name, value in values.items()}
            for part, values in described.items()
        }
        return {"train()": describe_source(train.func), **of_values}

    def call(self, name: str) -> Any:
        """Call one of the required functions.

        Raises:
            InvalidInputError: If a package that the function imports is not installed.
        """
        function = self.bound(name)
        assert function is not None  # load_recipe has checked it
        try:
            return function()
        except ImportError as error:
            raise InvalidInputError(
                f"{name}() of the recipe {self.path} failed: {error}. Install what it imports."
            ) from error


def load_recipe(path: Path) -> Recipe:
    """Execute the Python file of a recipe and return its functions. It can import modules from its folder."""
    path = Path(os.path.abspath(path))
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInputError(
            f"There is no recipe at {path} ({error.strerror}). Name a Python file that defines {_listed(_NEEDED)}."
        ) from error
    digest = hashlib.sha256(content).hexdigest()
    # Identities hold the end of this name alone (modelout_functions/_describe.py); a dot would name a package.
    module = _run(path, content, f"trak_lite_recipe_{digest[:16]}_{path.stem.replace('.', '_')}")
    functions = {name: getattr(module, name) for name in (*_NEEDED, *_GIVEN) if hasattr(module, name)}
    functions = {name: value for name, value in functions.items() if callable(value) or name not in _SERVED}
    missing = [name for name in _NEEDED if name not in functions]
    wrong = [name for name, function in functions.items() if not callable(function)]
    if missing or wrong:
        raise InvalidInputError(
            f"The recipe {path} defines no function {_listed(missing or wrong)}. Expected {_listed(_NEEDED)}, and "
            "optionally train(indices, seed), training(), columns(), render(index) and render_target(index), and for "
            "serve sample(text), predict(model, sample) and tokens(index)."
        )
    return Recipe(path, digest, functions)


def recipe_columns(recipe: Recipe, train: Rows) -> dict[str, Column]:
    """Return the columns of the train data that a recipe returns, of the rows that the config selects."""
    columns = recipe.bound("columns")
    values = {} if columns is None else columns()
    if not isinstance(values, dict):
        raise InvalidInputError(
            f"columns() of the recipe returned {type(values).__name__}. Expected a dict of values per name."
        )
    whole = columns_of(values, len(train.dataset), "columns() of the recipe")
    return {name: column.take(train.indices) for name, column in whole.items()}


def trained_states(trained: Any) -> Iterator[dict[str, Tensor]]:
    """Yield copies of the weights in a module, its state dict, or an iterable of these: the checkpoints of a run."""
    state = trained.state_dict() if isinstance(trained, nn.Module) else trained
    if isinstance(state, Mapping):
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        copies = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        yield with_versions(copies, module_versions(state))
    elif isinstance(state, Iterable) and not isinstance(state, str | bytes | Tensor):
        for one in state:
            yield from trained_states(one)
    else:
        raise InvalidInputError(
            f"The recipe's train() returned {type(trained).__name__}. Expected a module, its state dict, or an "
            "iterable of these with one item per checkpoint."
        )


def last_trained(train: Callable[..., Any], indices: NDArray[np.int64], seed: int) -> dict[str, Tensor]:
    """Train on the given rows and return the final weights."""
    last: dict[str, Tensor] = {}
    for last in trained_states(train(indices, seed)):  # noqa: B007  # only the last one is used
        pass
    if not last:
        raise InvalidInputError("The recipe's train() returned no weights. Return or yield a state dict.")
    return last


def _keys(name: str, function: Callable[..., Any]) -> list[Key]:
    """Return the keys of a function's arguments. Arguments that JSON cannot represent keep their defaults."""
    keys = keys_of(function, section=SECTION, without=_GIVEN.get(name, ()))
    return [key for key in keys if key.default is REQUIRED or is_plain(key.default)]


def _run(path: Path, content: bytes, name: str) -> ModuleType:
    module = module_from_spec(ModuleSpec(name, None, origin=str(path)))
    module.__file__ = str(path)
    if str(path.parent) not in sys.path:  # at the end: no module beside the recipe hides an installed package
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        code = compile(content, str(path), "exec", dont_inherit=True)  # the same code as of an import
        # Identities hold the source of functions: that which is executed, whatever the file becomes meanwhile.
        lines = io.StringIO(decode_source(content) + "\n").readlines()
        linecache.cache[str(path)] = (len(content), None, lines, str(path))
        exec(code, module.__dict__)
    except (SyntaxError, ImportError) as error:
        del sys.modules[name]
        line = f" line {error.lineno}:" if isinstance(error, SyntaxError) else ""
        what = error.msg or str(error)
        raise InvalidInputError(
            f"The recipe {path} cannot be executed:{line} {what}. Correct it, or install what it imports."
        ) from error
    return module


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"{name}()" for name in names)


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
