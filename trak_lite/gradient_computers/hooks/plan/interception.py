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
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OperatorBase
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from trak_lite.errors import MODEL_FAILURES, UnsupportedModelError, refuse_machine_failure
from trak_lite.gradient_computers.hooks.registry import GradientRule, rule_for
from trak_lite.gradient_computers.recording import tensors_of
from trak_lite.models.sharded import is_sharded, refuse_sharded_parts, watch_borders
from trak_lite.models.tree import ModelTree

Function = Callable[..., Any]
_FUNCTIONS = (types.FunctionType, types.MethodType, partial, nn.Module)
_CASTS = (Tensor.to, Tensor.type_as)


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
        self.runs_functions = False
        """Whether an operation ran functions that it was given, such as the branches of ``torch.cond``."""

    tries_branches: ClassVar[bool] = False
    """Whether both branches of ``torch.cond`` run."""

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
        # Of the other tensor only the dtype and the device are read.
        if func in _CASTS and len(args) > 1 and isinstance(args[1], Tensor):
            func, args = Tensor.to, (args[0], args[1].device, args[1].dtype, *args[2:])
        if isinstance(func, OperatorBase) and isinstance(func, HigherOrderOperator):  # the first costs less
            self.runs_functions = True
            if torch.is_grad_enabled():
                args = self._watching_captures(func, args, kwargs)
        reads = self.touches(args) or (kwargs and self.touches(kwargs.values()))
        if not reads or self.looks_away or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        body = undispatched(func)
        if body is not None and not self.inside:
            with self:
                return body(*args, **kwargs)
        return self.operation(func, args, kwargs)

    def _watching_captures(
        self, operator: HigherOrderOperator, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Return the arguments with functions that refuse captured watched tensors, which would have no gradient."""
        mode = _RefusingCaptures(operator, self.watched, tensors_of((args, dict(kwargs))))
        # A graph has parameters as arguments.
        args = tuple(
            mode.wrapped(arg) if isinstance(arg, _FUNCTIONS) and not isinstance(arg, GraphModule) else arg
            for arg in args
        )
        if self.tries_branches and str(operator) == "cond":
            for branch in args[1:3]:  # the samples of this pass take one of them
                try:
                    with torch.no_grad():
                        branch(*args[3])
                except UnsupportedModelError:
                    raise
                except MODEL_FAILURES as error:
                    refuse_machine_failure(error)
        return args

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
        sequence = args[0] if args else kwargs.get("input")
        self.packed_order = getattr(sequence, "sorted_indices", None)


class _RefusingCaptures(TorchFunctionMode):
    """Refuses to read watched tensors that are no arguments of an operator, inside the functions that it runs."""

    def __init__(
        self, operator: HigherOrderOperator, watched: dict[int, Tensor], arguments: list[Tensor]
    ) -> None:
        super().__init__()
        self._operator, self._watched, self._given = operator, watched, arguments

    def wrapped(self, function: Function) -> Function:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return run

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        captured = any(
            id(leaf) in self._watched and all(leaf is not argument for argument in self._given)
            for leaf in tensors_of((args, kwargs))
        )
        if captured and tensors_of(result):  # not a shape
            raise UnsupportedModelError(
                f"A function that the operator {self._operator} runs reads a parameter, or a tensor that depends on "
                "one, that is not among the operator's arguments. Hooks run the model without torch.compile, where "
                "torch computes no gradient of it. Use gradient_computer='iterative'."
            )
        return result


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
