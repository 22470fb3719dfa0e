"""Temporary use of the caller's model; its state is restored on exit, also after an error."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trak_lite.core.devices import undisturbed, without_autocast
from trak_lite.core.eval_caches import (
    attributes_kept,
    buffers_kept,
    drop_eval_caches,
    has_own_train,
    own_forwards,
    own_modes,
    set_modes,
)
from trak_lite.errors import InvalidInputError, UnsupportedModelError
from trak_lite.models.checkpoints import Checkpoint, more_entries
from trak_lite.models.loading import load_into, put_values
from trak_lite.models.sharded import class_of, is_sharded, refuse_unsupported_sharding, reset_passes, reshard

_INPUT_HOOKS = {"make_inputs_require_grads", "make_inputs_require_grad"}
"""Names of the hooks of Transformers and of PEFT that let embedded tokens require grad."""
_TURNS: dict[int, threading.RLock] = {}
"""Locks by the ``id`` of the model: a module may define ``==``."""
os.register_at_fork(after_in_child=_TURNS.clear)  # held by threads that the child does not have


def model_device(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter or buffer; the CPU if it has neither."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def resolve_device(device: str | torch.device, model: nn.Module | None = None) -> torch.device:
    """Return the device to run on; ``"auto"`` is the model's device (the CPU without a model), or this rank's GPU.

    If torchrun started several ranks and the script left every rank's model on the first GPU, ``"auto"`` is the GPU
    with this process's local rank. An unknown device, or one that is not there, raises InvalidInputError.
    """
    if device == "auto":
        return torch.device("cpu") if model is None else _of_this_rank(model_device(model))
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInputError(
            f"Unknown device {device!r}. Use 'auto', 'cpu', 'cuda' or 'cuda:N'."
        ) from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError(
            f"device={str(device)!r} was given, but torch finds no CUDA GPU. Use 'cpu' or 'auto'."
        )
    if resolved.type == "meta":
        raise InvalidInputError(
            "device='meta' was given, which computes no values. Use 'auto', 'cpu' or 'cuda'."
        )
    return resolved


def refuse_without_values(model: Any) -> None:
    """Raise InvalidInputError if a model is none, has no values, or cannot be differentiated."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        is_exported = isinstance(model, torch.export.ExportedProgram)
        hint = " Pass the module that was exported." if is_exported else ""
        raise InvalidInputError(
            f"model is {what}, expected a trained torch.nn.Module: scores are made from its gradients.{hint}"
        )
    empty = [name for name, tensor in _tensors(model).items() if is_lazy(tensor) or tensor.is_meta]
    if empty:
        raise InvalidInputError(
            f"{len(empty)} parameters and buffers of the model have no values (meta device, or a lazy module before "
            f"its first pass), the first of them {empty[0]!r}. Load them first: model.to_empty(device='cpu'), then "
            "model.load_state_dict(...)."
        )
    if any(tensor.is_inference() for tensor in _tensors(model).values()):
        raise InvalidInputError(
            "The model was made or loaded inside torch.inference_mode(), so that its parameters cannot be "
            "differentiated. Make and load it outside."
        )


def _of_this_rank(device: torch.device) -> torch.device:
    """Return the GPU with index ``LOCAL_RANK`` if the device is the default first GPU, else the device."""
    local = os.environ.get("LOCAL_RANK", "")
    if device != torch.device("cuda", 0) or not local.isdecimal() or torch.cuda.current_device() != 0:
        return device
    return torch.device("cuda", int(local)) if int(local) < torch.cuda.device_count() else device


@final
@dataclass(frozen=True, eq=False, repr=False)
class BorrowedModel:
    """A model in eval mode, and what the caller's has."""

    model: nn.Module
    own: Mapping[str, Any]
    """The caller's parameters, buffers and other entries of the state dict, by name."""
    modes: Mapping[str, bool]
    """The caller's modes, in which ``own`` was read, of the modules that override ``train``."""
    put_back: Callable[[], None]
    """Undoes what passes set in attributes of the modules."""
    replaced: list[tuple[dict[str, Any], dict[str, Any]]]
    """Submodules and parameters of modules that replaced one when a checkpoint was loaded, now and before."""

    def load(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint; what passes over another one have set in modules, and not in the state dict, is undone."""
        reshard(self.model)
        self.put_modules_back()
        self._put_in_eval_mode()  # before attributes, which may say in which mode the weights are
        self.put_back()
        state = self.model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name not in state and name in self.own:
                    buffer.copy_(self.own[name])
        places = [live for m in self.model.modules() for live in (m._modules, m._parameters)]
        before = [(live, live.copy()) for live in places if isinstance(live, dict)]  # scripted: none
        try:
            load_into(self.model, checkpoint, self.own, self.modes)
        finally:
            # By identity: == of parameters compares their entries, and a module may define its own.
            self.replaced.extend((live, was) for live, was in before if _ids(live) != _ids(was))
        self._put_in_eval_mode()

    def _put_in_eval_mode(self) -> None:
        """Call ``eval`` if a generator or a loader has trained the model."""
        if any(getattr(module, "training", False) for module in self.model.modules()):
            self.model.eval()

    def put_modules_back(self) -> None:
        """Put back submodules and parameters that the loading of a checkpoint replaced (the quantisers of brevitas)."""
        for live, was in self.replaced:
            live.clear()
            live.update(was)
        self.replaced.clear()


@contextmanager
def borrow_model(model: nn.Module, device: torch.device) -> Iterator[BorrowedModel]:
    """Put a model in eval mode on ``device``; on exit, restore its state.

    Restored are device, parameters, buffers, other entries of the state dict, ``requires_grad`` flags and plain
    attributes (modes, numbers, strings) of all modules, the hooks by which Transformers lets embedded tokens require
    grad for gradient checkpointing, and the forward method by which Accelerate computes in mixed precision: inside the
    block, the model has its own. Attributes that a pass set or replaced are the objects that they were.
    The original values are copied to the CPU: one copy of the model, or of this rank's part of a sharded model.
    Threads that borrow the same model take turns.

    Raises:
        UnsupportedModelError: If the model is sharded by anything other than FSDP2, or has no eval mode.
        InvalidInputError: If the model is sharded and on another device.
    """
    with turn_of_thread(model), _borrowed(model, device) as borrowed:
        yield borrowed


def turn_of_thread(model: nn.Module) -> threading.RLock:
    """Return the lock that a thread holds while it uses a model, whose weights and hooks others would see."""
    if id(model) not in _TURNS:
        weakref.finalize(model, _TURNS.pop, id(model), None)
    return _TURNS.setdefault(id(model), threading.RLock())


def refuse_expanded(model: nn.Module) -> None:
    """Raise :class:`InvalidInputError` if a parameter or buffer is expanded, so that no values can be put back."""
    expanded = [
        name
        for name, tensor in _tensors(model).items()
        if tensor.layout == torch.strided
        and any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    ]
    if expanded:
        raise InvalidInputError(
            f"Entries of {expanded[0]!r} share memory, because it is expanded: its values cannot be put back. Make it "
            "a copy: tensor.contiguous()."
        )


@contextmanager
def _borrowed(model: nn.Module, device: torch.device) -> Iterator[BorrowedModel]:
    refuse_unsupported_sharding(model)
    home = model_device(model)
    sharded = is_sharded(model)
    if sharded and (device.type != home.type or device.index not in (None, home.index)):
        raise InvalidInputError(
            f"device={str(device)!r} was given, but the shards of {class_of(model).__name__} on this rank are on "
            f"{str(home)!r}. Use device='auto'. Every rank needs its own GPU: call torch.cuda.set_device before the "
            "model is sharded."
        )
    reshard(model)
    tensors = {name: tensor.detach() for name, tensor in _tensors(model).items()}
    saved = {name: one.clone() if one.is_cpu else one.cpu() for name, one in tensors.items()}
    own = {**saved, **more_entries(model)}
    modes = own_modes(model)
    put_back_buffers = buffers_kept(model.modules())
    wrapped = [one for one in model.modules() if isinstance(one, nn.parallel.DistributedDataParallel)]
    restore = _modules_kept(model)
    try:
        if not sharded:
            model.to(device)
        try:
            model.eval()
        except (NotImplementedError, TypeError) as error:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be switched to eval mode ({error}). Give a method train() that takes "
                "other arguments than torch's another name. Pass the module that was exported in place of one of "
                "torch.export, whose mode is fixed."
            ) from error
        for module in wrapped:
            # Passes would broadcast buffers, and wait for ranks that compute other rows. A generator may train.
            vars(module)["will_sync_module_buffers"] = functools.partial(_syncs_buffers, module)
        # After to() and eval(), which set attributes of their own.
        put_back = attributes_kept(model.modules())
        borrowed = BorrowedModel(model, own, modes, put_back, [])
        try:
            yield borrowed
        finally:
            reshard(model)
            borrowed.put_modules_back()
            put_back()
    except BaseException:
        reset_passes(model)
        raise
    finally:
        reshard(model)
        if home != device and not sharded:
            model.to(home)
        set_modes(model, modes)  # before buffers and values, which it may change (e2cnn, loralib)
        put_back_buffers()
        put_values(model, own)
        drop_eval_caches(model.modules())  # computed from a checkpoint's weights
        for module in wrapped:
            vars(module).pop("will_sync_module_buffers", None)
        if not all(modes.values()):
            put_values(model, own)  # a change of the mode and back may round them
        restore()


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode inside the block, in place: for a pass between the steps of a training.

    Weights and device stay. Restored are buffers, random states, and what :func:`borrow_model` restores of modules.
    Autocast is off in the block. Weights are copied only if a module may change them in a pass or with its mode.
    """
    modules = list(model.modules())
    may_change = any(has_own_train(m) or getattr(m, "max_norm", None) is not None for m in modules)
    tensors = _tensors(model).values() if may_change else model.buffers()
    put_back_buffers = buffers_kept(modules)
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    restore = _modules_kept(model)
    with undisturbed(), without_autocast(model_device(model)):
        try:
            model.eval()
            put_back = attributes_kept(modules)
            try:
                yield
            finally:
                put_back()
        finally:
            drop_eval_caches(modules)
            put_back_buffers()
            for tensor, value in values:
                tensor.data.copy_(value)  # a graph of the training may hold it: no new version
            restore()


def _syncs_buffers(module: nn.parallel.DistributedDataParallel) -> bool:
    return module.training and bool(type(module).will_sync_module_buffers(module))  # type: ignore[no-untyped-call]


def _modules_kept(model: nn.Module) -> Callable[[], None]:
    """Remove hooks of ``enable_input_require_grads``, forward methods of mixed precision, and ``.grad``.

    Return what restores these, flags and plain attributes.
    """
    flags = [(p, p.requires_grad) for p in model.parameters()]
    # Of other gradients, ``.data`` of the parameter has been replaced since: autograd would not add to them.
    grads = [
        (p, g)
        for p in model.parameters()
        if (g := p.grad) is None or (g.dtype, g.shape) == (p.dtype, p.shape)
    ]
    for p, _ in grads:
        p.grad = None  # a model may call backward() itself, in its forward pass too
    plain = (bool, int, float, str, type(None))
    attributes = [
        (module, {name: value for name, value in vars(module).items() if isinstance(value, plain)})
        for module in model.modules()
    ]
    # A scripted module keeps its mode outside of its __dict__, and a frozen one has none.
    modes = [(module, module.training) for module in model.modules() if hasattr(module, "training")]
    # The hooks make the embedded tokens a leaf of autograd, for gradient checkpointing of a frozen model in train mode.
    # The hook computer follows activations from the kept parameters only, and would fail its self-check. They are found
    # by name: the model holds the handles of the last call only, and a trainer calls it again.
    input_hooks = [
        (module._forward_hooks, key)
        for module in model.modules()
        for key, hook in module._forward_hooks.items()
        if getattr(hook, "__name__", "") in _INPUT_HOOKS
    ]
    hooks: list[tuple[Any, int, Any]] = [(registry, key, registry.pop(key)) for registry, key in input_hooks]
    put_forwards_back = own_forwards(model)

    def restore() -> None:
        put_forwards_back()
        for registry, key, hook in hooks:
            registry[key] = hook
        for p, flag in flags:
            p.requires_grad_(flag)
        for p, grad in grads:
            p.grad = grad
        for module, values in attributes:
            # Flags that describe the state of the weights (RWKV's layers_are_rescaled).
            vars(module).update(values)
        for module, mode in modes:
            module.training = mode

    return restore


def _ids(values: Mapping[str, Any]) -> dict[str, int]:
    return {name: id(value) for name, value in values.items()}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
