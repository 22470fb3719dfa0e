"""Mixtures of experts and hybrids of transformers, in tiny configurations, in the dtypes that users run them in.

Kernels of experts and of recurrences demand alignments that depend on the number of tokens and on the dtype, so each
model runs at an even and at an odd length, in float32 and in bfloat16, and a sample's rows are compared with autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import reference
import torch
import transformers
from transformers import CONFIG_MAPPING as CONFIGS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from zoo_path import Wrong, computed_gradients, in_float64, relative_errors

from trak_lite.gradient_computers import choose_gradient_computer
from trak_lite.modelout_functions import resolve_task

VOCABULARY, SAMPLES = 40, 3
LENGTHS = (8, 9)
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Of a sample's whole gradient. float32 is compared with a loop in float64 (in float32 if the model takes no float64),
bfloat16 with a loop in bfloat16, in which the products of a batch may round in another order than those of a sample."""
_TRAITS = ("expert", "moe", "mamba", "linear_conv", "linear_key", "conv_kernel", "linear_attn", "ssm")

_TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "attention_hidden_size", "hidden_size_per_layer_input"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "moe_layer_end_index"), 2),
    **dict.fromkeys(("num_attention_heads", "linear_num_heads", "num_swa_attention_heads"), 4),
    **dict.fromkeys(
        ("num_key_value_heads", "n_mamba_heads", "mamba_ngroups", "mamba_n_groups", "n_groups"), 2
    ),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2
    ),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "topk_groups", "first_k_dense_replace"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("shared_experts_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size"), 24),
    **dict.fromkeys(("head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank", "linear_head_dim"), 8),
    **dict.fromkeys(
        ("kv_channels", "mamba_d_head", "mamba_head_dim", "mamba_headdim", "attention_head_dim"), 8
    ),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(
        ("qk_rope_head_dim", "qk_nope_head_dim", "mamba_d_state", "ssm_state_size", "state_size"), 4
    ),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads"), 8),
    **dict.fromkeys(("linear_num_key_heads", "mamba_d_conv", "mamba_chunk_size", "chunk_size"), 4),
    **dict.fromkeys(("index_n_heads", "index_head_dim", "index_topk", "sliding_window"), 4),
    **{
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "mamba_d_ssm": 64,
        "use_mamba_kernels": False,
    },
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def mixtures() -> list[str]:
    """Return the kinds of causal language models with experts or recurrences."""
    found = []
    for kind in sorted(CAUSAL):
        try:
            names = CONFIGS[kind]().to_dict()
        except Exception:  # a configuration that needs arguments
            continue
        if any(trait in name for name in names for trait in _TRAITS):
            found.append(kind)
    return found


def built(kind: str, dtype: torch.dtype) -> Any:
    """Return a tiny model, with one layer of each type that its configuration knows, and two at least."""
    default = CONFIGS[kind]().to_dict()
    settings = {name: value for name, value in _TINY.items() if name in default}
    if (
        "kv_lora_rank" in default
    ):  # latent attention: rotary parts alone have the head's size, and no head is shared
        settings |= {"num_key_value_heads": 4, "head_dim": 4}
    types = list(dict.fromkeys(default.get("layer_types") or ()))
    if types:
        settings["layer_types"] = types * (1 if len(types) > 1 else 2)
        settings["num_hidden_layers"] = len(settings["layer_types"])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](**settings))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.02)
    return model.to(dtype).eval()


def next_tokens(call: Any, batch: Any) -> torch.Tensor:
    logits = call(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].float()
    chosen = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])
    return chosen.flatten(1).sum(1)


def compared(kind: str, dtype: torch.dtype, length: int) -> tuple[str, float]:
    """Return the engine that ``"auto"`` takes, and its largest error; raise :class:`Wrong` beyond the tolerance."""
    model = built(kind, dtype)
    generator = torch.Generator().manual_seed(1)
    batch = {"input_ids": torch.randint(3, VOCABULARY, (SAMPLES, length), generator=generator)}
    chosen = choose_gradient_computer(model, resolve_task(next_tokens), batch)
    found = computed_gradients(chosen.computer, batch)
    alone = [{"input_ids": row[None]} for row in batch["input_ids"]]
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    try:
        precise = in_float64(model) if dtype == torch.float32 else model
        grads = reference.per_sample_gradients(precise, next_tokens, alone, names)
    except RuntimeError:  # a part of the model is always computed in float32, so it takes no float64
        grads = reference.per_sample_gradients(model, next_tokens, alone, names)
    error = float(relative_errors(found, reference.flatten(grads)).max())
    if not error < TOLERANCES[dtype]:
        raise Wrong(
            f"{kind}: rows of the {chosen.name} engine are off by {error:.2g} in {dtype} at {length} tokens"
        )
    return chosen.name, error


def every_run() -> Iterator[tuple[torch.dtype, int]]:
    for dtype in TOLERANCES:
        for length in LENGTHS:
            yield dtype, length
