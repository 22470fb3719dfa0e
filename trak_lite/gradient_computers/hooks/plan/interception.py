"""Interception of every torch operation that reads given tensors.

A module hook only covers calls of its module, but another module or the output function may also use the parameter. A
``TorchFunctionMode`` intercepts all of these uses, and is asked about every other operation too.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trak_lite.gradient_computers.hooks.registry import GradientRule, rule_for
from trak_lite.models.sharded import is_sharded, refuse_sharded_parts, watch_borders
from trak_lite.models.tree import ModelTree

Function = Callable[..., Any]


class AbstractInterceptor(TorchFunctionMode, ABC):
    """Passes every operation with a watched tensor among its arguments to :meth:`operation`.

    Functions of ``torch.nn.functional`` written in Python are entered, so that :meth:`operation` receives the primitive
    operations inside them. A module with a registered gradient rule counts as one operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.watched: dict[int, Tensor] = {}
        """Tensors by ``id``; the references prevent Python from reusing an ``id``."""
        self.inside: list[nn.Module] = []
        """Stack of the running modules that have a registered rule."""
        self.packed_order: Tensor | None = None
        """``sorted_indices`` of the packed sequence that a recurrent module reads."""
        self.looks_away = False
        """Whether to ignore operations, because FSDP2 runs them around a module."""
        self.depth = 0
        """Running calls of the model, one in the other."""

    @abstractmethod
    def operation(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation that reads a watched tensor, and return its result."""

    @abstractmethod
    def ruled_module(
        self, module: nn.Module, rule: GradientRule, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        """Handle the finished call of a module with a rule; return its result."""

    def model_runs(self, by: int, *_: Any) -> None:
        """Count a call of the model that starts (1) or ends (-1)."""
        self.depth += by

    def hide(self, module: nn.Module, hidden: bool) -> None:
        """Prepare the parameters of a module with a rule for its forward pass, or undo that."""

    def renamed(self, old: Tensor, new: Tensor) -> None:
        """Track ``new`` in place of ``old``, an input of a sharded module."""

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        reads = self.touches(args) or (kwargs and self.touches(kwargs.values()))
        if not reads or self.looks_away or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        body = undispatched(func)
        if body is not None and not self.inside:
            with self:
                return body(*args, **kwargs)
        return self.operation(func, args, kwargs)

    def touches(self, values: Iterable[Any]) -> bool:
        """Whether a watched tensor is among the arguments."""
        watched = self.watched
        for value in values:  # noqa: SIM110 (a generator costs more, and every operation comes here)
            if id(value) in watched or (isinstance(value, (tuple, list)) and self.touches(value)):
                return True
        return False

    @contextmanager
    def installed(self, tree: ModelTree) -> Iterator[None]:
        """Hook the model, and modules with rules, recurrent and sharded ones, inside the block."""
        handles = watch_borders(tree, self)
        try:
            handles.append(tree.model.register_forward_pre_hook(partial(self.model_runs, 1)))
            handles.append(tree.model.register_forward_hook(partial(self.model_runs, -1), always_call=True))
            for module in tree.modules:
                rule = rule_for(module)
                if rule is not None:
                    refuse_sharded_parts(module)
                    handles.append(module.register_forward_pre_hook(self._enter))
                    leave = partial(self._leave, rule)  # prepended: runs before FSDP2 frees the parameters
                    handles.append(
                        module.register_forward_hook(leave, with_kwargs=True, prepend=is_sharded(module))
                    )
                elif isinstance(module, nn.RNNBase):
                    handles.append(module.register_forward_pre_hook(self._note_order, with_kwargs=True))
            yield
        finally:
            if self.depth:  # torch calls no hook after KeyboardInterrupt
                self.model_runs(-self.depth)
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.inside.append(module)
        if torch.is_grad_enabled():
            with torch._C.DisableTorchFunction():
                self.hide(module, True)

    def _leave(
        self, rule: GradientRule, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Any:
        self.inside.pop()
        with torch._C.DisableTorchFunction():
            self.hide(module, bool(self.inside))
            if self.inside or not torch.is_grad_enabled():
                return out
            return self.ruled_module(module, rule, args, kwargs, out)

    def _note_order(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("input")
        self.packed_order = getattr(given, "sorted_indices", None)


@cache
def undispatched(function: Function) -> Function | None:
    """Return a copy of a ``torch.nn.functional`` function without dispatch, so that a mode sees its operations."""
    if not isinstance(function, types.FunctionType) or function.__module__ not in (
        "torch.nn.functional",
        "torch.functional",
        "torch.autograd",
    ):
        return None
    if not any(name.startswith("has_torch_function") for name in function.__code__.co_names):
        return None  # it calls a function that dispatches itself
    # The body would pass the call back to an active mode; these replacements report that none is active.
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**function.__globals__, **dict.fromkeys(names, lambda *_: False)}
    body = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body
