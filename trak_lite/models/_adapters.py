"""Mapping from the weights in PEFT adapter files to the weights of a model.

PEFT omits the adapter's name from saved names (``q_proj.lora_A.weight`` is the model's
``q_proj.lora_A.default.weight``) and does not save the frozen base model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from trak_lite.errors import CheckpointError

_WRAPPER = "modules_to_save"
_VECTOR = "lora_magnitude_vector"


def adapter_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters of a ``peft.PeftModel``'s active adapters; none for other models."""
    active: Any = getattr(model, "active_adapter", None) if hasattr(model, "peft_config") else None
    adapters = [active] if isinstance(active, str) else active if isinstance(active, list) else []
    names = [name for name, _ in model.named_parameters()]
    return {name for adapter in adapters for name in names if _saved_name(name, adapter) != name}


def parameter_versions(model: nn.Module) -> dict[str, int]:
    """Return the versions by name of the parameters that no pass may change."""
    modules: Iterator[Any] = model.modules()
    # LoRA on target_parameters sets each of them to itself in every pass, which counts as a change.
    wrapper = "<class 'peft.tuners.lora.layer.ParamWrapper'>"
    same = {id(module.get_param()) for module in modules if str(type(module)) == wrapper}
    named = [(name, p) for name, p in model.named_parameters() if id(p) not in same]
    return {name: 0 if p.is_inference() else p._version for name, p in named}


def completed_adapter(
    model: nn.Module, saved: Mapping[str, Any], held: Mapping[str, Any], base: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a complete state dict under the model's names: the saved adapter and the base weights.

    ``held`` is the model's state dict, and ``base`` has the weights of the base model. Adapter weights are never taken
    from it, so that weights missing in the file are detected. A model without one active adapter raises
    CheckpointError.
    """
    adapter: Any = getattr(model, "active_adapter", None)
    if isinstance(adapter, list) and len(adapter) == 1:
        (adapter,) = adapter
    if not isinstance(adapter, str):
        seen = f"the active adapters {adapter}" if isinstance(adapter, list) else "no adapter"
        raise CheckpointError(
            f"The checkpoint is a PEFT adapter, but {type(model).__name__} has {seen}. Expected a model with one "
            "active adapter: peft.get_peft_model(base, config), or PeftModel.from_pretrained(base, folder)."
        )
    saved_names = {name: _saved_name(name, adapter) for name in held}
    held_names = {saved_name: name for name, saved_name in saved_names.items()}
    given = {held_names.get(name, name): value for name, value in saved.items()}
    frozen = {
        name: base[name]
        for name, saved_name in saved_names.items()
        if name == saved_name and name in base and name not in given
    }
    return {**frozen, **given}


def _saved_name(name: str, adapter: str) -> str:
    """Return the name under which PEFT saves a weight.

    Example:
        >>> _saved_name("head.modules_to_save.default.weight", "default")
        'head.weight'
    """
    parts = name.split(".")
    if adapter not in parts[1:]:
        return name
    place = len(parts) - 1 - parts[::-1].index(adapter)
    before, after = parts[:place], parts[place + 1 :]
    if before[-1] == _WRAPPER:
        before.pop()
    if before[-1] == _VECTOR:  # DoRA: PEFT saves the vector without its wrapping module
        after = []
    return ".".join([*before, *after])
