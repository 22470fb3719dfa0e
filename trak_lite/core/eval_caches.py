"""Modules that compute, change or cache values when their mode changes or in a pass; undoing that."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.utils.hooks import RemovableHandle

_CACHES_NOTHING = frozenset({("transformers.modeling_utils", "PreTrainedModel.train")})
"""Module and name of methods that are not called: that of transformers only chooses kernels."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Mode, parameters, buffers, submodules and hooks."""
_MOST_PASSES = 256
_HOOKS = sorted(name for name in _OF_EVERY_MODULE if re.match("_(forward|backward)_.*hooks", name))
"""Dicts of the hooks that a pass runs, and of what is noted of some of them."""


def has_own_train(module: nn.Module) -> bool:
    """Return whether a change of the mode runs code of the module's class, which may compute or change values."""
    train = type(module).train
    return train is not nn.Module.train and (train.__module__, train.__qualname__) not in _CACHES_NOTHING


def drop_eval_caches(modules: Iterable[nn.Module]) -> None:
    """Make modules that override ``train`` drop the values they cache in eval mode.

    LeViT and similar models compute position biases once and drop them when ``train(True)`` is called. Biases cached
    by a pass without a graph are constants, so the parameters' gradients are zero; those cached with a graph cannot
    be differentiated twice; and cached biases are stale after other weights are loaded. Modules in eval mode are
    switched to train mode and back.
    """
    for module in tuple(modules):
        if module.training or not has_own_train(module):
            continue
        modes = [(inner, inner.training) for inner in module.modules()]
        try:
            module.train()
            module.train(False)
        finally:
            for inner, training in modes:
                inner.training = training


def own_modes(model: nn.Module) -> dict[str, bool]:
    """Return ``training`` of the modules that override ``train``, by name, outermost first."""
    return {name: module.training for name, module in model.named_modules() if has_own_train(module)}


def set_modes(model: nn.Module, modes: Mapping[str, bool]) -> None:
    """Call ``train`` of the modules that override it and have another mode than that in ``modes``, by name.

    Modules that are not in ``modes`` are put in train mode. Submodules follow, as in ``train``.
    """
    for name, module in model.named_modules():
        if has_own_train(module) and module.training != modes.get(name, True):
            module.train(modes.get(name, True))


@contextmanager
def in_modes(model: nn.Module, modes: Mapping[str, bool]) -> Iterator[None]:
    """Run the block in other modes, see :func:`set_modes`; afterwards all modules have theirs again.

    Layers of loralib hold other weights in eval mode than in train mode: values have to be read and written in the same
    mode.
    """
    before = own_modes(model)
    flags = [(module, module.training) for module in model.modules()] if before else []
    try:
        set_modes(model, modes)
        yield
    finally:
        set_modes(model, before)
        for module, training in flags:
            module.training = training


def buffers_kept(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Return a function that makes the buffers of modules the objects that they are now; values are not copied."""
    kept = [(module, dict(module._buffers)) for module in modules]

    def put_back() -> None:
        for module, buffers in kept:
            _put_back(module._buffers, buffers)

    return put_back


def attributes_kept(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Return a function that undoes what passes set: values that modules computed from parameters and keep.

    Attributes, buffers and the values in dicts that are attributes become the objects that they are now, and so do
    submodules whose parameters are the same. If one was set, the hooks are removed that passes of this thread added.
    Parameters, modes, other hooks, and what is deeper in an attribute are left as they are.
    """
    modules = tuple(modules)
    put_back_buffers = buffers_kept(modules)
    kept = [(vars(module), vars(module).copy()) for module in modules]
    dicts = [
        (value, value.copy())
        for _, attributes in kept
        for name, value in attributes.items()
        if type(value) is dict and name not in _OF_EVERY_MODULE
    ]
    inner = [(module._modules, module._modules.copy()) for module in modules if _holds(module._modules)]
    added = _AddedHooks(modules)
    _THREAD.watching.add(added)

    def put_back() -> None:
        put_back_buffers()
        changed = [_put_back(live, copy, besides=_OF_EVERY_MODULE) for live, copy in kept]
        changed += [_put_back(live, copy) for live, copy in dicts]
        for live, copy in inner:
            if live != copy and _parameters(live) == _parameters(copy):
                changed.append(_put_back(live, copy))
        # The attribute may say that the hooks are there: Transformers adds some in the first pass, and would again.
        if any(changed):
            added.remove()

    return put_back


class StateBeforePass:
    """What a model is before a pass; :meth:`restore` undoes what a pass set, if it replaced a buffer or a submodule.

    Such a model remembers its inputs (Transformers' dynamic rotary embeddings follow the longest text, BigBird takes
    another attention from the first short text on), and rows would depend on those before. Buffers and submodules that
    are new, such as a mask that is made in the first pass, stay.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # Layers of torch set nothing in eval mode, and are most of the modules.
        candidates = [m for m in modules if m._modules or not type(m).__module__.startswith("torch.nn.")]
        self._put_back = attributes_kept(candidates)
        self._places = [
            live for module in candidates for live in (module._buffers, module._modules) if _holds(live)
        ]
        self._before: list[dict[str, Any]] = [live.copy() for live in self._places]

    def restore(self, always: bool = False) -> None:
        """Undo passes, after their backward pass, which may read what they set.

        ``always`` is for ``functional_call``, which puts buffers back by itself, but no attribute that describes them.
        """
        if not _THREAD.remembers and (
            always
            or any(
                now.get(name) is not value
                for now, was in zip(self._places, self._before, strict=True)
                for name, value in was.items()
                if value is not None
            )
        ):
            self._put_back()


@contextmanager
def passes_undone(model: nn.Module, always: bool = False) -> Iterator[StateBeforePass]:
    """Undo the passes of the block, whose backward passes end in it; see :class:`StateBeforePass`."""
    state = StateBeforePass(model.modules())
    try:
        yield state
    finally:
        state.restore(always)


@contextmanager
def remembering() -> Iterator[None]:
    """Let models remember their inputs in the block, in spite of :class:`StateBeforePass`."""
    before, _THREAD.remembers = _THREAD.remembers, True
    try:
        yield
    finally:
        _THREAD.remembers = before


def _holds(live: Any) -> bool:
    """Return whether buffers or submodules can be put back. Those of a scripted module are a copy in each access."""
    return bool(live) and isinstance(live, dict)


def _parameters(modules: Mapping[str, nn.Module | None]) -> set[int]:
    return {id(p) for module in modules.values() if module is not None for p in module.parameters()}


class _AddedHooks:
    """Numbers of the hooks that passes added, to tensors too, by pass."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._of_passes: list[range] = []

    def note(self, numbers: range) -> None:
        """Note the numbers that were given in a pass. Most are of tensors, or of hooks that are removed by now."""
        self._of_passes.append(numbers)
        if len(self._of_passes) > _MOST_PASSES:
            there = {number for hooks in self._places() for number in hooks}
            self._of_passes = [one for one in self._of_passes if any(number in one for number in there)]

    def remove(self) -> None:
        """Remove those that are there."""
        if self._of_passes:
            for hooks in self._places():
                for number in [one for one in hooks if any(one in numbers for numbers in self._of_passes)]:
                    del hooks[number]
        self._of_passes.clear()

    def _places(self) -> Iterator[dict[int, Any]]:
        return (vars(module)[name] for module in self._modules for name in _HOOKS)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.watching: WeakSet[_AddedHooks] = WeakSet()
        self.remembers = False


_THREAD = _OfThread()


@contextmanager
def hooks_noted() -> Iterator[None]:
    """Note for :func:`attributes_kept` which hooks the block adds: a pass, not the task that calls the model."""
    first = RemovableHandle.next_id
    try:
        yield
    finally:
        if RemovableHandle.next_id > first:
            for added in _THREAD.watching:
                added.note(range(first, RemovableHandle.next_id))


def _put_back(live: Any, copy: Mapping[Any, Any], besides: Collection[Any] = ()) -> bool:
    """Make a live dict the copy, apart from the entries ``besides``; return whether it was another one."""
    now = dict(live)
    new = now.keys() - copy.keys()
    replaced = [
        name for name in copy if name not in besides and (name not in now or now[name] is not copy[name])
    ]
    for name in new:
        del live[name]
    for name in replaced:
        live[name] = copy[name]
    return bool(new or replaced)


def own_forwards(model: nn.Module) -> Callable[[], None]:
    """Undo forward methods of mixed precision that Accelerate has set; return what sets them again.

    They stay in a prepared model after its training. Rows are those of the model in the dtype of its weights.
    """
    undone: list[tuple[nn.Module, Any]] = []
    for module in model.modules():
        own, prepared = (vars(module).get(name) for name in ("_original_forward", "forward"))
        # By the class: others keep a former method by this name, and functools.wraps copies the name of a module.
        if own is None or type(getattr(prepared, "__wrapped__", None)).__name__ != "ConvertOutputsToFp32":
            continue
        del vars(module)["forward"]
        # Keep a forward method of another library, for example of fused kernels.
        if getattr(own, "__func__", None) is not type(module).forward:
            vars(module)["forward"] = own
        undone.append((module, prepared))

    def put_back() -> None:
        for module, prepared in undone:
            vars(module)["forward"] = prepared

    return put_back
