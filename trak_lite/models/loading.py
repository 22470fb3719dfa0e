"""Copies a checkpoint's weights into the tensors of a model, or refuses those that do not fit it."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from trak_lite.core.devices import undisturbed
from trak_lite.core.eval_caches import in_modes, own_modes, set_modes
from trak_lite.core.validate import some_of
from trak_lite.errors import MODEL_FAILURES, CheckpointError, refuse_machine_failure
from trak_lite.models._adapters import (
    ADAPTER_FILES,
    OUTER,
    adapter_files,
    completed_adapters,
    unnamed_adapter,
)
from trak_lite.models.checkpoints import (
    EXTRA_STATE,
    INDEX,
    LIGHTNING,
    SUFFIXES,
    Checkpoint,
    bare_name,
    entries_digest,
    module_versions,
    more_entries,
    read_weights,
    unwrapped,
    with_versions,
)
from trak_lite.models.memory import is_same, may_overlap
from trak_lite.models.sharded import class_of, is_sharded, of_all_ranks, reshard, shard_like

_COUNT = "n_averaged"
"""Of ``AveragedModel``: the steps in its mean, which no pass reads."""


def load_into(
    model: nn.Module,
    checkpoint: Checkpoint,
    original: Mapping[str, Tensor] | None = None,
    modes: Mapping[str, bool] = MappingProxyType({}),
) -> None:
    """Copy a checkpoint's weights into the tensors of a model; nothing if names, shapes or adapters do not fit.

    Args:
        model: The module.
        checkpoint: The checkpoint; ``module.`` and ``_orig_mod.`` prefixes are ignored if the names do not match.
        original: The model's own weights, used if ``checkpoint.load`` is ``None`` and as base weights of an adapter;
            ``None`` if the model has them now.
        modes: ``training``, when the values were read, of modules that override ``train``, by name; ``True`` for
            others. The model's values, adapters, and any checkpoint if ``original`` is ``None`` are loaded in these.
            Where nothing says otherwise, a checkpoint was saved in train mode, see :func:`_modes_when_saved`.
    """
    reshard(model)
    source = Path(checkpoint.source or "")
    adapters: dict[str, Mapping[str, Any]] = {}
    load = checkpoint.load
    state: Mapping[str, Any] = original or {}
    if load is None:
        if original is None:
            return
    elif source.name in ADAPTER_FILES and not checkpoint.has_loader:
        # Beside it may be those of others: the model's active adapters say which are read.
        state, files = {}, adapter_files(model, source)
        adapters = {adapter: read_weights(file) for adapter, file in files.items()}
    else:
        state, is_original = _given_state(model, checkpoint, original, modes)
        load = None if is_original else load
    adapters = adapters or unnamed_adapter(model, state)
    if not adapters:
        state = _converted(model, state)
    is_known = load is None or adapters or (original is None and not all(modes.values()))
    with in_modes(model, modes if is_known else _modes_when_saved(model, state)):
        if load is None:
            put_values(model, state)
        else:
            _load_state(model, checkpoint, state, adapters, original)


def shares_memory(model: nn.Module, given: Any) -> bool:
    """Return whether a state dict may read the memory of a model's parameters or buffers."""
    state = unwrapped(given)
    tensors = [*model.parameters(), *model.buffers()]
    return isinstance(state, Mapping) and may_overlap(state.values(), tensors)


def put_values(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Copy values that a model had into its parameters and buffers, and load its other entries if they differ.

    ``load_state_dict`` would be wrong for these: a module may save another value than its parameter has, and take what
    is loaded for a saved one (the scales of brevitas).
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in values:  # not in a module that the forward pass created
                tensor.copy_(values[name])
    now = more_entries(model)
    others = with_versions({name: values[name] for name in now if name in values}, module_versions(now))
    if entries_digest(now) != entries_digest(others):
        model.load_state_dict(others, strict=False)


def _converted(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return weights of ``save_pretrained`` as a model of Transformers holds them.

    Transformers 5 saves many models in another form than their state dict (each expert of a mixture, the layers of
    ViT), and converts it when it loads. A state dict that fits, or that Transformers cannot load as a whole, is
    returned as it is.
    """
    pretrained = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    inner: Any = getattr(model, "_orig_mod", getattr(model, "module", model))
    if not isinstance(inner, pretrained) or is_sharded(model) or hasattr(inner.config, "quantization_config"):
        return state
    if inner._keys_to_ignore_on_load_missing:  # drawn at random if they are missing, and not reported
        return state
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    held = {bare_name(name): getattr(value, "shape", None) for name, value in model.state_dict().items()}
    if all(held.get(bare_name(name)) == value.shape for name, value in tensors.items()):
        return state
    dtypes = [value.dtype for value in tensors.values() if value.is_floating_point()]
    try:
        with undisturbed():
            loaded, report = type(inner).from_pretrained(
                None,
                config=inner.config,
                state_dict=tensors,
                dtype=reduce(torch.promote_types, dtypes),  # exact; the model's own is taken later
                ignore_mismatched_sizes=True,  # reported
                output_loading_info=True,
            )
    except MODEL_FAILURES as error:
        refuse_machine_failure(error)
        return state
    return state if any(report.values()) else loaded.state_dict()


def _modes_when_saved(model: nn.Module, state: Mapping[str, Any]) -> dict[str, bool]:
    """Return the modes of the modules that override ``train`` in which a state dict was saved, by name.

    That is train mode, unless there are entries that a module has in its present mode only (the filters that layers of
    e2cnn compute in eval mode and remove in train mode).
    """
    modes, present = own_modes(model), {bare_name(name): name for name in model.state_dict()}
    if all(modes.values()):
        return {}
    with in_modes(model, {}):
        removed = present.keys() - {bare_name(name) for name in model.state_dict()}
    found = [present[name] for name in map(bare_name, state) if name in removed]
    return {
        name: mode or not any(key.startswith(name and f"{name}.") for key in found)
        for name, mode in modes.items()
    }


def _state_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the state dict of a checkpoint as it is given, or refuse what is none."""
    state = unwrapped(None if checkpoint.load is None else checkpoint.load())
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        gave = f"names such as {next(iter(state))!r}" if isinstance(state, Mapping) else type(state).__name__
        raise CheckpointError(
            f"Checkpoint {checkpoint.name!r} gave {gave}, expected a mapping from names to tensors.{_parts_of(state)}"
        )
    return state


def _given_state(
    model: nn.Module, checkpoint: Checkpoint, original: Mapping[str, Any] | None, modes: Mapping[str, bool]
) -> tuple[Mapping[str, Any], bool]:
    """Return the state dict of a checkpoint, apart from the model's memory, and whether it is ``original``.

    Tensors of the model have by now what was loaded last. Those of a state dict that is held, and those that a loader
    reads, are meant with the model's own values, unless the loader itself sets others. A generator may have put other
    values into the model since it was asked last; then these are meant.
    """
    own = original if checkpoint.is_held else None
    if own is not None and _is_of_model(model, _state_of(checkpoint)):
        return own, True
    if checkpoint.has_loader and original is not None:
        with in_modes(model, modes):
            put_values(model, original)
    with in_modes(model, {}):  # in which a state dict is loaded
        state = _state_of(checkpoint)
        if not shares_memory(model, state) or (not modes and _is_of_model(model, state)):
            return state, False
        set_modes(model, {})  # the loader may have left other ones
        if own is not None:
            if not all(modes.values()):
                raise CheckpointError(
                    f"Checkpoint {checkpoint.name!r} has some tensors of the model itself, which are those of eval "
                    "mode, and some others, whose mode is not known. Make it from copies, in train mode: "
                    "model.train(), then copy.deepcopy(model.state_dict())."
                )
            put_values(model, own)
        copies = {
            name: (value.detach().clone() if value.is_cpu else value.detach().cpu())
            if isinstance(value, Tensor)
            else value
            for name, value in state.items()
        }
        return with_versions(copies, module_versions(state)), False


def _is_of_model(model: nn.Module, state: Mapping[str, Any]) -> bool:
    """Return whether a state dict is that of the model, tensor by tensor."""
    held = model.state_dict(keep_vars=True)
    values, _ = _under_own_names(state, held)
    return values.keys() == held.keys() and all(is_same(values[name], held[name]) for name in held)


def _load_state(
    model: nn.Module,
    checkpoint: Checkpoint,
    state: Mapping[str, Any],
    adapters: Mapping[str, Mapping[str, Any]],
    original: Mapping[str, Tensor] | None,
) -> None:
    """Copy a state dict into a model in its present modes; see :func:`load_into`."""
    held = model.state_dict(keep_vars=True)
    base = held if original is None else original
    entries, versions = _under_own_names(state, held)
    if adapters:
        entries = completed_adapters(model, adapters, held, base)
    if (checkpoint.source or "").endswith((".safetensors", f".safetensors{INDEX}")):
        _keep_others(entries, base, held, checkpoint)
    # Files hold more than weights under dotted names, such as settings that were logged.
    entries = {
        name: value
        for name, value in entries.items()
        if (isinstance(value, Tensor) or name.endswith(EXTRA_STATE) or name in held)
        and (name != _COUNT or name in held)
    }
    if isinstance(model, AveragedModel):
        entries.setdefault(_COUNT, base[_COUNT])
    loaded = {id(value) for name, value in held.items() if name in entries and isinstance(value, Tensor)}
    # A file may have a tied tensor under another of its names.
    missing = [name for name, value in held.items() if name not in entries and id(value) not in loaded]
    unexpected = [name for name in entries if name not in held]
    shapes = [
        f"{name} {tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__} "
        f"instead of {tuple(held[name].shape)}"
        for name, value in entries.items()
        if isinstance(held.get(name), Tensor)
        and not name.endswith(EXTRA_STATE)
        and not (isinstance(value, Tensor) and value.shape == held[name].shape)
    ]
    if missing or unexpected or shapes:
        problems = {"missing": missing, "unexpected": unexpected, "wrong shape": shapes}
        text = "; ".join(f"{kind}: {names[:5]}" for kind, names in problems.items() if names)
        advice = _parts_of(state).strip() or "Build the model that the checkpoint was saved from."
        if missing and (prefix := _common_prefix(missing, unexpected)):
            loader = LIGHTNING.format(f"prefix={prefix!r}")
            advice = (
                f"All names have the prefix {prefix!r} there: pass a checkpoint_loader that removes it, or for a file "
                f"of Lightning {loader}."
            )
        elif not any(".base_layer." in name for name in entries) and any(
            name.replace(".base_layer.", ".").removeprefix(OUTER) in entries for name in missing
        ):
            advice = (
                "These are weights of the model without its adapters. Load them before the adapters are added, and "
                "pass the files of adapters (adapter_model.safetensors), or state dicts of the model as it is."
            )
        raise CheckpointError(
            f"Checkpoint {checkpoint.source or checkpoint.name!r} does not fit {class_of(model).__name__}: {text}. "
            f"{advice}"
        )
    by_tensor: dict[int, str] = {}
    for name, value in entries.items():
        if not isinstance(value, Tensor) or name.endswith(EXTRA_STATE):
            continue
        first = by_tensor.setdefault(id(held[name]), name)
        if first != name and not _is_equal(entries[first], value, held[name]):
            raise CheckpointError(
                f"Checkpoint {checkpoint.source or checkpoint.name!r} has different values for {first!r} and {name!r}, "
                f"which are one tied weight of {class_of(model).__name__}. Expected equal values. Build the model "
                "that the checkpoint was saved from, with these weights untied."
            )
    # Modules may reject weights without a version (torchvision's MNASNet). Names and shapes match the model, so
    # where no version is recorded, use the model's.
    versions = {**module_versions(held), **versions}
    try:
        entries = {
            # Modules may keep and change a value that is no tensor.
            name: shard_like(value, held[name]) if isinstance(value, Tensor) else copy.deepcopy(value)
            for name, value in entries.items()
        }
        model.load_state_dict(with_versions(entries, versions), strict=False)  # safetensors omits tied names
    except RuntimeError as error:  # also of sparse and quantised tensors, and of those on the meta device
        refuse_machine_failure(error)
        raise CheckpointError(
            f"Checkpoint {checkpoint.source or checkpoint.name!r} cannot be loaded into {class_of(model).__name__}: "
            f"{' '.join(str(error).split())}. Expected values that load_state_dict of the model takes."
        ) from error


def _parts_of(state: Any) -> str:
    """Return advice for a mapping in which a name leads to weights, or to a file of these; empty for another one."""
    items = state.items() if isinstance(state, Mapping) else ()
    parts = [
        name
        for name, value in items
        if isinstance(value, os.PathLike)
        or (isinstance(value, str) and value.endswith(SUFFIXES))
        or (isinstance(value, Mapping) and any(isinstance(one, Tensor) for one in unwrapped(value).values()))
    ]
    if not parts:
        return ""
    return f" It has weights under {some_of(parts)}: pass those, state[{parts[0]!r}], or a list of several of them."


def _is_equal(value: Tensor, other: Tensor, held: Any) -> bool:
    """Return whether two values are the same as those of a tensor of the model, NaN being equal to NaN."""
    if is_same(value, other):
        return True
    one, two = (of_all_ranks(tensor.detach()) for tensor in (value, other))
    if not all(type(tensor) is Tensor and tensor.layout is torch.strided for tensor in (one, two)):
        return True  # not comparable in general
    two = two.to(one.device)
    if one.dtype != two.dtype:
        one, two = one.to(held.dtype), two.to(held.dtype)
    return torch.equal(one, two) or torch.allclose(one, two, rtol=0, atol=0, equal_nan=True)


def _common_prefix(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Return the prefix with which all missing names are among the unexpected ones; empty if there is none."""
    others = set(unexpected)
    prefixes = (name.removesuffix(missing[0]) for name in unexpected if name.endswith(f".{missing[0]}"))
    return next((prefix for prefix in prefixes if all(prefix + name in others for name in missing)), "")


def _keep_others(
    entries: dict[str, Any], base: Mapping[str, Any], held: Mapping[str, Any], checkpoint: Checkpoint
) -> None:
    """Add the model's entries that are no tensors, which ``.safetensors`` files cannot hold; warn of them."""
    kept = [
        name for name in held if name not in entries and name in base and not isinstance(base[name], Tensor)
    ]
    entries.update({name: base[name] for name in kept})
    if kept:
        warnings.warn(
            f"Checkpoint {checkpoint.source} has no {some_of(kept)}: these entries of the state dict are no tensors, "
            "and .safetensors files hold tensors only. The model's own values are used. If they differ between "
            "checkpoints, save with torch.save.",
            UserWarning,
            stacklevel=2,
        )


def _under_own_names(
    state: Mapping[str, Any], held: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entries and the versions of a state dict under the names of the model and its modules.

    Prefixes are ignored only if the names do not match exactly.
    """
    versions = module_versions(state)
    if all(name in held for name in state):
        return dict(state), versions

    def bare_module(name: str) -> str:
        return bare_name(f"{name}.").removesuffix(".")  # empty for the wrapped model

    names = {bare_name(name): name for name in held}
    modules = {bare_module(name): name for name in module_versions(held)}
    return (
        {names.get(bare_name(name), name): value for name, value in state.items()},
        {modules.get(bare_module(name), name): version for name, version in versions.items()},
    )
