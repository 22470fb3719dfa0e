"""More mixtures of experts and hybrids of transformers than the zoo's table has, for ``benchmarks.zoo --gradients``.

One set of sizes serves all; a configuration does not read what it does not know. Widths are multiples of 8, so that
the grouped products of bfloat16 take them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from zoo_cases import Architecture
from zoo_hub import OMITTED, causal

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 4,
    # experts
    "moe_intermediate_size": 16,
    "mlp_hidden_size": 16,
    "shared_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    # attention through low ranks
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    # states
    "mamba_d_state": 4,
    "mamba_d_conv": 3,
    "mamba_expand": 2,
    "mamba_dt_rank": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
    "use_mamba_kernels": False,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
LOW_RANK = {"head_dim": OMITTED, "num_key_value_heads": 4}
FOUR_LAYERS = {"num_hidden_layers": 4}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "axk1": LOW_RANK,
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": LOW_RANK,
    "falcon_h1": {"mamba_d_ssm": 64},
    "glm4_moe_lite": LOW_RANK,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "olmoe": {"head_dim": OMITTED},
    "qwen3_5_moe_text": FOUR_LAYERS,
    "qwen3_5_text": FOUR_LAYERS,
    "qwen3_next": FOUR_LAYERS,
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 4},
}
KINDS = [
    "afmoe", "aria_text", "axk1", "bamba", "cohere2_moe", "deepseek_v2", "deepseek_v3", "doge", "dots1",
    "ernie4_5_moe", "exaone_moe", "falcon_h1", "flex_olmo", "glm4_moe", "glm4_moe_lite", "gpt_oss",
    "granitemoe", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "jamba", "jetmoe",
    "laguna", "lfm2", "lfm2_moe", "llama4_text", "mellum", "mimo_v2_flash", "minimax", "minimax_m2",
    "mixtral", "olmo_hybrid", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe",
    "qwen3_next", "recurrent_gemma", "solar_open",
]  # fmt: skip


def mixtures() -> list[Architecture]:
    """Return one language model of each kind, under a name that is not in the table."""
    found = [causal(kind, "mixtures and hybrids", **{**SIZES, **OWN_SIZES.get(kind, {})}) for kind in KINDS]
    return [dataclasses.replace(entry, name=f"{entry.name} (aligned)") for entry in found]
