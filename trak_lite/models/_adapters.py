"""Files of PEFT adapters, and the mapping from their weights to those of a model.

PEFT omits the adapter's name from saved names (``q_proj.lora_A.weight`` is the model's
``q_proj.lora_A.default.weight``) and does not save the frozen base model. ``save_pretrained`` puts the adapter
``default`` into the folder, and each other adapter into a folder of its name in it.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trak_lite.core.json_text import parse_json
from trak_lite.errors import CheckpointError

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_CONFIG = "adapter_config.json"
_FLAT = "default"
_WRAPPER = "modules_to_save"
_VECTOR = "lora_magnitude_vector"
_RANKS = "ranknum"
"""A number of AdaLoRA beside its weights that is not trained and not saved: its setting ``init_r``."""
_PROMPTS = "prompt_embeddings"
OUTER = "base_model.model."
"""What names of a PeftModel begin with."""
_CHECKPOINTED = "_checkpoint_wrapped_module."
"""Part of names, which activation checkpointing leaves out of state dicts."""
_PROJECTIONS = ("projection_prng_key", "projection_seed", "proj_seed", "regularization_alpha")
"""Settings that make fixed weights, which are in the file if one of ``_SAVES`` is set."""
_SAVES = ("save_projection", "save_indices")
_PLAIN_INITS = (
    *(True, False, "gaussian", "orthogonal", "eva", "mica", "lycoris", "uniform", "zero"),
    *("kaiming_uniform", "xavier_uniform"),
)
"""First weights of an adapter that change neither the base model nor what is computed from them later."""
# Settings that do not change what saved weights compute, or that names and shapes of weights show. PEFT itself changes
# some (LoRA its fan_in_fan_out), so that equal adapters differ in them.
_HARMLESS = {
    *_SAVES,
    *("task_type", "inference_mode", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("revision", "target_modules", "target_parameters", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "feedforward_modules", "modules_to_save", "bias", "megatron_core"),
    *("fan_in_fan_out", "save_only_topk_weights", "init_logits_std", "init_theta_d_bound"),
    *("init_v_bound", "init_vector_bank_bound", "init_scale", "d_initial", "eva_config"),
    *("prompt_tuning_init", "prompt_tuning_init_text", "prompt_tuning_init_task"),
    *("prompt_tuning_init_state_dict_path", "tokenizer_name_or_path", "tokenizer_kwargs", "target_r"),
    *("tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step", "init_warmup"),
    *("final_warmup", "mask_interval", "asa_importance_beta", "asa_uncertainty_beta"),
    *("asa_schedule_exponent", "asa_target_subspaces", "opt_weighted_loss_type"),
    *("opt_loss_decay_factor", "auxiliary_loss_weight", "progressbar", "runtime_offload_base_weight"),
    "generator_seed",
}


def frozen_adapter(model: nn.Module, trained: Iterable[str]) -> set[str]:
    """Return the names of the parameters of a ``peft.PeftModel``'s active adapters if they were loaded for inference.

    ``trained`` are the names of the parameters that require grad. PEFT leaves only biases that were trained with the
    adapters (``bias="all"`` or ``"lora_only"``) among them; if there are others, the result is empty.
    """
    configs: Mapping[str, Any] = getattr(model, "peft_config", {})
    adapters = [adapter for adapter in _active_adapters(model) if adapter in configs]
    biases = any(
        getattr(configs[adapter], "bias", "none") != "none" and configs[adapter].inference_mode
        for adapter in adapters
    )
    if not all(biases and name.endswith("bias") for name in trained):
        return set()
    names = [name for name, _ in model.named_parameters()]
    return {name for adapter in adapters for name in _saved_names(model, names, adapter).values()}


def parameter_versions(model: nn.Module) -> dict[str, int | None]:
    """Return the versions by name of the parameters, ``None`` for those that passes write to without a change."""
    modules: list[Any] = list(model.modules())
    # Written in every pass without a change: LoRA on target_parameters sets each of them to itself, and an embedding
    # scales the rows whose norm is above its limit.
    wrapper = "<class 'peft.tuners.lora.layer.ParamWrapper'>"
    same = {id(module.get_param()) for module in modules if str(type(module)) == wrapper}
    same |= {
        id(m.weight) for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag) and _is_limited(m)
    }
    return {name: None if id(p) in same else _version(p) for name, p in model.named_parameters()}


def changed_parameters(model: nn.Module, versions: Mapping[str, int | None]) -> set[str]:
    """Return the names of parameters that are there still and were written to since :func:`parameter_versions`."""
    return {
        name
        for name, p in model.named_parameters()
        if versions.get(name) is not None and versions[name] != _version(p)
    }


def _version(parameter: Tensor) -> int:
    return 0 if parameter.is_inference() else parameter._version


def _is_limited(table: nn.Embedding | nn.EmbeddingBag) -> bool:
    """Whether a limit is set that the norms of all rows keep, also those of rows that no sample reads."""
    if table.max_norm is None:
        return False
    norms = table.weight.detach().norm(table.norm_type, dim=1)
    # Rows that were scaled to the limit are above it by rounding.
    return bool((norms <= table.max_norm * (1 + 64 * torch.finfo(norms.dtype).eps)).all())


def named_adapters(folder: Path) -> list[Path]:
    """Return the weights of adapters in folders of their names."""
    return sorted(path for name in ADAPTER_FILES for path in folder.glob(f"*/{name}"))


def adapter_files(model: nn.Module, source: Path) -> dict[str, Path]:
    """Return the file of each active adapter of a model; raise without one, or if a file is missing or settings differ.

    ``source`` is the file of one adapter, or the place of that of ``default`` if the folder has none. If the model has
    one adapter, the file may be that of an adapter of any name.
    """
    active = _active_adapters(model)
    if not active:
        raise CheckpointError(
            f"The checkpoint is a PEFT adapter, but {type(model).__name__} has no adapter. Expected a model with an "
            "active adapter: peft.get_peft_model(base, config), or PeftModel.from_pretrained(base, folder)."
        )
    adapters, folder = _adapters(model), source.parent
    # The folder "b" may also be the one in which default and b were saved.
    is_named = folder.name != _FLAT and folder.name in adapters and not (folder / folder.name).is_dir()
    owner, root = (folder.name, folder.parent) if is_named else (_FLAT, folder)
    named, files = named_adapters(root), {}
    for adapter in active:
        inside = root if adapter == _FLAT else root / adapter
        candidates = [source] if adapter == owner else [inside / name for name in ADAPTER_FILES]
        if len(adapters) == 1:
            candidates += [source, *(named if len(named) == 1 else [])]
        if path := next((candidate for candidate in candidates if candidate.is_file()), None):
            files[adapter] = path
    if len(files) < len(active) or (is_named and owner not in active):
        paths = [str(path) for path in dict.fromkeys([source, *named]) if path.is_file()]
        raise CheckpointError(
            f"{type(model).__name__} has the adapters {adapters}, and {active} active. Found {paths}. "
            f"Expected the active ones as save_pretrained writes them: {_FLAT!r} in the folder, others in a folder of "
            "their name. Activate the adapters that were saved, or pass the folder with these."
        )
    for adapter, file in files.items():
        _refuse_other_settings(model, adapter, file.parent / _CONFIG)
    return files


def _refuse_other_settings(model: nn.Module, adapter: str, path: Path) -> None:
    config: Any = getattr(model, "peft_config", {}).get(adapter)
    if config is None or not path.is_file():
        return
    try:
        # As PEFT reads it: a setting that the file lacks has its default.
        saved = type(config).from_peft_type(**parse_json(path.read_bytes(), finite=False))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"Cannot read the settings of an adapter {path} ({type(error).__name__}: {error}). Expected a JSON object, "
            "as save_pretrained writes it."
        ) from error
    there, here = _settings(saved), _settings(config)
    differences = [
        f"{name} is {reprlib.repr(there[name])} there, {reprlib.repr(value)} here"
        for name, value in here.items()
        if name in there and _used(name, there[name]) != _used(name, value)
    ]
    if differences:
        raise CheckpointError(
            f"{path} has other settings than the adapter {adapter!r} of the model: {'; '.join(differences)}. With them "
            "the saved weights compute something else. Build the model with PeftModel.from_pretrained(base, folder)."
        )


def _settings(config: Any) -> dict[str, Any]:
    """Return the settings that may change what saved weights compute, as JSON has them."""
    unused: tuple[str, ...] = _PROJECTIONS if any(getattr(config, name, False) for name in _SAVES) else ()
    if config.peft_type == "ADALORA":  # which changes it in training
        unused = ("rank_pattern",)
    values = {
        name: value
        for name, value in config.to_dict().items()
        if name not in _HARMLESS and name not in unused and not name.endswith("dropout")
    }
    text = json.dumps(values, default=lambda one: sorted(one, key=str) if isinstance(one, set) else str(one))
    return dict(parse_json(text.encode(), finite=False))


def _used(name: str, value: Any) -> Any:
    """Return a setting; ``None`` if it is unused. Versions of PEFT differ in None, False or {} for an unused one."""
    is_plain = name.startswith("init_") and name.endswith("weights") and value in _PLAIN_INITS
    return None if is_plain or not (value or type(value) in (int, float)) else value


def unnamed_adapter(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return a state dict of ``peft.get_peft_model_state_dict`` under the name of its adapter; empty for other ones."""
    active = _active_adapters(model)
    held = model.state_dict() if active else {}
    names = {name for adapter in active for name in _saved_names(model, held, adapter)}.union(held)
    indices = {name for name in state if name.endswith(".shira_indices")}
    if not names.issuperset(state.keys() - indices) or held.keys() >= state.keys():
        return {}
    adapters = _adapters(model)
    if len(adapters) != 1:  # the state dict does not show which one it is of
        raise CheckpointError(
            f"A state dict has the weights of one PEFT adapter without its name, and {type(model).__name__} has the "
            f"adapters {adapters}, {active} active. Pass model.state_dict(), or a folder of save_pretrained."
        )
    return {active[0]: state}


def completed_adapters(
    model: nn.Module,
    adapters: Mapping[str, Mapping[str, Any]],
    held: Mapping[str, Any],
    base: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a complete state dict under the model's names: the saved adapters and the base weights.

    ``held`` is the model's state dict, and ``base`` has the weights of the base model. Weights of the saved adapters
    are never taken from it, so that weights missing in a file are detected.
    """
    state: dict[str, Any] = {}
    frozen = {name: base[name] for name in held if name in base}
    # A model of Transformers with add_adapter saves its adapter under the names of a PeftModel.
    prefix = "" if any(name.startswith(OUTER) for name in held) else OUTER
    for adapter, saved in adapters.items():
        names = _saved_names(model, held, adapter)
        weights = {name.removeprefix(prefix): value for name, value in saved.items()}
        _refuse_computed(weights, names, adapter)
        _take_indices(model, weights, adapter)
        state.update({names.get(name, name): value for name, value in weights.items()})
        for name in names.values():
            frozen.pop(name, None)
    return {**frozen, **state}


def _refuse_computed(saved: Mapping[str, Any], names: Mapping[str, str], adapter: str) -> None:
    """Raise if a file has what PEFT computes from weights (P-tuning, VB-LoRA's top k) in place of these."""
    computed = [name for name in saved if name == _PROMPTS or name.endswith("_topk_weights")]
    lacking = [model_name for name, model_name in names.items() if name not in saved]
    if computed and lacking:
        raise CheckpointError(
            f"The file of the adapter {adapter!r} has {computed[:3]}. PEFT saves only what it computes from the "
            f"weights {lacking[:3]}, not the weights. Save model.state_dict(), and pass that."
        )


def _take_indices(model: nn.Module, saved: dict[str, Any], adapter: str) -> None:
    """Remove the positions of SHiRA's weights from a file after comparing them with those of the model."""
    for name, module in model.named_modules():
        indices: Any = getattr(module, "shira_indices", {})
        there = saved.pop(f"{name}.shira_indices", None) if adapter in indices else None
        if there is not None and not torch.equal(there.to(indices[adapter]), indices[adapter]):
            raise CheckpointError(
                f"The weights of the adapter {adapter!r} stand for other entries of {name} there than here "
                "(shira_indices). Build the model with PeftModel.from_pretrained(base, folder)."
            )


def _adapters(model: nn.Module) -> list[str]:
    return list(getattr(model, "peft_config", None) or _active_adapters(model))


def _active_adapters(model: nn.Module) -> list[str]:
    # base_model.set_adapter([...]) changes only the first. Models of Transformers have methods of these names.
    for name in ("active_adapters", "active_adapter"):
        active: Any = getattr(model, name, None)
        if callable(active) and getattr(model, "_hf_peft_config_loaded", False):  # set by its add_adapter
            active = active()
        if isinstance(active, str | list):
            return [active] if isinstance(active, str) else active
    return []


def _saved_names(model: nn.Module, names: Iterable[str], adapter: str) -> dict[str, str]:
    """Return those of the names that are of an adapter's weights, by the names under which PEFT saves these."""
    # Modules of the base model may have the adapter's name, too: PEFT's own modules hold the dicts of adapters.
    holders = {
        f"{name}.{child}".replace(_CHECKPOINTED, "").lstrip(".")
        for name, module in model.named_modules(remove_duplicate=False)
        if any(base.__module__.startswith("peft.") for base in type(module).__mro__)
        for child, held in module._modules.items()
        if isinstance(held, nn.ModuleDict | nn.ParameterDict) or type(held).__name__ == "BufferDict"
    }
    saved_names = {}
    for name in names:
        parts = name.replace(_CHECKPOINTED, "").split(".")
        indices = [n for n in range(1, len(parts)) if parts[n] == adapter and ".".join(parts[:n]) in holders]
        if indices and _RANKS not in parts:
            saved_names[_saved_name(parts[: indices[-1]], parts[indices[-1] + 1 :])] = name
    return saved_names


def _saved_name(before: list[str], after: list[str]) -> str:
    """Return the name under which PEFT saves a weight, of the parts before and after the adapter's name."""
    if (before, after) == (["prompt_encoder"], ["embedding", "weight"]):
        return _PROMPTS
    if before[-1] == _WRAPPER:
        before = before[:-1]
    if before[-1] == _VECTOR:  # DoRA: PEFT saves the vector without its wrapping module
        after = []
    return ".".join([*before, *after])
