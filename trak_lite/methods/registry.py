"""Methods by name, for configs, the command line and a store's manifest."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Final, TypeAlias

from trak_lite.core.validate import known_names
from trak_lite.errors import InvalidInputError
from trak_lite.methods.base import AbstractMethod
from trak_lite.methods.inverse import CG, EKFAC, LiSSA
from trak_lite.methods.stored import LESS, TRAK, Fisher, GaussNewton, GradCos, GradDot, TracIn

Method: TypeAlias = Mapping[str, bool | int | float | str | Sequence[float] | None] | str | AbstractMethod
"""A method, its name, or its name and fields: ``{"name": "TracIn", "learning_rates": [0.1, 0.05]}``."""
METHODS: Final[Mapping[str, type[AbstractMethod]]] = MappingProxyType(
    {
        cls.__name__: cls
        for cls in (GaussNewton, Fisher, TRAK, EKFAC, CG, LiSSA, TracIn, LESS, GradDot, GradCos)
    }
)
"""The methods of this package by name. A config cannot name others; pass them as objects."""
_BY_LOWER_CASE = {name.lower(): cls for name, cls in METHODS.items()}


def as_method(method: Method) -> AbstractMethod:
    """Return the method instance for a name (case-insensitive), or for a name with fields.

    Raises:
        InvalidInputError: If the name or a field is unknown, or a value is invalid.

    Example:
        >>> as_method({"name": "EKFAC", "damping": 0.1}).damping
        0.1
    """
    if isinstance(method, AbstractMethod):
        if METHODS.get(method.name, type(method)) is not type(method):
            raise InvalidInputError(
                f"{type(method).__module__}.{method.name} has the name of a method of trak_lite. Scores are stored by "
                "this name, so rename the class."
            )
        return method
    values = {"name": method} if isinstance(method, str) else method
    method_name = values.get("name") if isinstance(values, Mapping) else None
    cls = _BY_LOWER_CASE.get(str(method_name).lower())
    if cls is None:
        if isinstance(method, type) and issubclass(method, AbstractMethod):
            raise InvalidInputError(f"method must be an instance, got the class. Write {method.__name__}().")
        near = difflib.get_close_matches(str(method_name).lower(), _BY_LOWER_CASE, n=1, cutoff=0.5)
        hint = f" Did you mean {_BY_LOWER_CASE[near[0]].__name__!r}?" if near else ""
        raise InvalidInputError(
            f"method must be a name of {', '.join(map(repr, METHODS))}, a mapping with that name and fields, or an "
            f"instance of AbstractMethod, got {method!r}.{hint}"
        )
    chosen = {name: value for name, value in values.items() if name not in ("name", "version")}
    known_names(chosen, [field.name for field in fields(cls) if field.init], what=f"fields of {cls.__name__}")
    if values.get("version", 1) != cls.version:
        raise InvalidInputError(
            f"{cls.__name__} has version {cls.version}, and {values.get('version', 1)!r} was requested. The method has "
            "changed since: score again with the present version."
        )
    return cls(**chosen)  # type: ignore[arg-type]  # every class checks its own fields
