"""Architectures of transformers and peft, in tiny configurations built from code. No network."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the packages are imported

import peft
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING as CONFIGS
from zoo_cases import (
    CLASSES,
    TOKENS,
    VOCABULARY,
    Architecture,
    MakeSample,
    classifier,
    continued_text,
    image,
    label,
    language_model,
    last_tokens_log_prob,
    named,
    squares,
    tensors,
    text,
    token_log_prob,
    translation,
    unmasked,
    with_own_f,
)

transformers.logging.set_verbosity_error()

OMITTED = object()
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 8,  # many modules share a row, so that kernels are narrow and quick
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_labels": CLASSES,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_key_value_heads": 1}
SEQ2SEQ: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "decoder_start_token_id": 2,
}
AUDIO: dict[str, Any] = {
    "conv_dim": (8, 8),
    "conv_kernel": (6, 4),
    "conv_stride": (4, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
}
PIXELS: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_channels": 3}
AUTO = {
    "text": transformers.AutoModelForSequenceClassification,
    "causal": transformers.AutoModelForCausalLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "vision": transformers.AutoModelForImageClassification,
    "audio": transformers.AutoModelForAudioClassification,
    "video": transformers.AutoModelForVideoClassification,
    "base": transformers.AutoModel,
}


def sizes(**settings: Any) -> dict[str, Any]:
    """Return the common sizes with some changed, and those that are ``OMITTED`` left out."""
    return {key: value for key, value in {**SIZES, **settings}.items() if value is not OMITTED}


def built(auto: str, kind: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return what makes the model of this ``model_type``; sizes that it does not know stay unread."""

    def build() -> nn.Module:
        return AUTO[auto].from_config(CONFIGS[kind](**sizes(**settings)))

    return build


def encoder(kind: str, *, sample: MakeSample = text, domain: str = "text", **settings: Any) -> Architecture:
    return classifier(kind, domain, built("text", kind, **settings), sample, "text_classification")


def causal(
    kind: str, domain: str = "text", *, sample: MakeSample = continued_text, **settings: Any
) -> Architecture:
    return language_model(kind, domain, built("causal", kind, **settings), sample)


def seq2seq(
    kind: str, *, sample: MakeSample = translation, domain: str = "encoder-decoder", **settings: Any
) -> Architecture:
    return with_own_f(kind, domain, built("seq2seq", kind, **{**SEQ2SEQ, **settings}), sample, token_log_prob)


def vision(kind: str, *, size: int = 32, **settings: Any) -> Architecture:
    return classifier(
        kind, "vision", built("vision", kind, **{**PIXELS, "image_size": size, **settings}), image(size)
    )


def audio(kind: str, *, sample: MakeSample | None = None, **settings: Any) -> Architecture:
    return classifier(kind, "audio", built("audio", kind, **{**AUDIO, **settings}), sample or tensors(160))


def adapter(name: str, base: Architecture, config: Callable[[], Any]) -> Architecture:
    """A frozen base model and a trained adapter."""
    return Architecture(
        name,
        "adapters",
        lambda: peft.get_peft_model(base.build(), config()),
        base.sample,
        base.task,
        base.output,
        tokens=base.tokens,
    )


# --- Text ------------------------------------------------------------------------------------------------

ENCODERS = [
    encoder("bert"),
    encoder("albert", embedding_size=8),
    encoder("roberta", max_position_embeddings=40),
    encoder("distilbert", dim=16, n_layers=8, n_heads=2, hidden_dim=24),
    encoder("electra", embedding_size=8),
    encoder(
        "deberta-v2",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=4,
        conv_kernel_size=3,
    ),
    encoder("mpnet"),
    encoder("xlnet", max_position_embeddings=OMITTED, d_model=16, n_layer=8, n_head=2, d_inner=24),
    encoder(
        "funnel",
        num_hidden_layers=OMITTED,
        block_sizes=[4, 4],
        d_model=16,
        n_head=2,
        d_head=8,
        d_inner=24,
        num_decoder_layers=1,
    ),
    encoder("squeezebert", embedding_size=16),
    encoder("modernbert", local_attention=4),
    encoder("nystromformer", num_landmarks=TOKENS, segment_means_seq_len=TOKENS),
    encoder("convbert", embedding_size=8, head_ratio=2, conv_kernel_size=3),
    encoder("fnet", sample=unmasked(text)),
    encoder(
        "mobilebert",
        embedding_size=8,
        intra_bottleneck_size=8,
        num_hidden_layers=6,
        num_feedforward_networks=2,
        true_hidden_size=8,
    ),
    encoder("big_bird", attention_type="original_full"),
    encoder("longformer", attention_window=4),
    encoder(
        "canine", num_hash_functions=2, num_hash_buckets=20, local_transformer_stride=4, downsampling_rate=2
    ),
    encoder("roformer", embedding_size=16),
    encoder("esm", max_position_embeddings=40),
    encoder("xlm", emb_dim=16, n_layers=8, n_heads=2, n_words=VOCABULARY, pad_index=0),
    encoder("rembert", input_embedding_size=8, output_embedding_size=8),
    encoder("ibert"),
    encoder(
        "bart",
        domain="encoder-decoder",
        sample=lambda g, n: {
            **text(g, 0),
            "input_ids": torch.cat([text(g, 0)["input_ids"][:-1], torch.tensor([2])]),
        },
        **SEQ2SEQ,
    ),
    encoder("megatron-bert"),
    encoder("data2vec-text", max_position_embeddings=40),
]
LANGUAGE_MODELS = [
    causal("gpt2", n_embd=16, n_layer=8, n_head=2, n_positions=32),
    causal("gpt_neo", num_layers=8, num_heads=2, attention_types=[[["global", "local"], 4]], window_size=4),
    causal("gpt_neox", rotary_pct=0.5),
    causal("gptj", n_embd=16, n_layer=8, n_head=2, n_positions=32, rotary_dim=4),
    causal("gpt_bigcode", n_embd=16, n_layer=8, n_head=2, n_positions=32),
    causal("opt", ffn_dim=24, word_embed_proj_dim=8),
    causal("bloom", n_layer=8, n_head=2),
    causal("llama", num_key_value_heads=1),
    causal("mistral", num_key_value_heads=1, sliding_window=4),
    causal("qwen2", num_key_value_heads=1),
    causal("qwen3", num_key_value_heads=1, head_dim=8),
    causal("gemma", num_key_value_heads=1, head_dim=8),
    causal("gemma2", num_key_value_heads=1, head_dim=8, sliding_window=4),
    causal("gemma3_text", num_key_value_heads=1, head_dim=8, sliding_window=4),
    causal("phi", num_key_value_heads=2),
    causal("phi3", num_key_value_heads=1),
    causal("falcon", num_kv_heads=1, alibi=True),
    causal("stablelm", num_key_value_heads=1),
    causal("olmo2", num_key_value_heads=1),
    causal("cohere", num_key_value_heads=1),
    causal("starcoder2", num_key_value_heads=1),
    causal("biogpt"),
    causal("ctrl", n_embd=16, n_layer=8, n_head=2, dff=24, n_positions=32),
]
MIXTURES = [
    causal(
        "mixtral", "mixture-of-experts", num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2
    ),
    causal("qwen2_moe", "mixture-of-experts", num_experts=4, shared_expert_intermediate_size=12, **EXPERTS),
    causal("qwen3_moe", "mixture-of-experts", num_experts=4, head_dim=8, **EXPERTS),
    causal("olmoe", "mixture-of-experts", num_experts=4, **EXPERTS),
    causal(
        "deepseek_v3",
        "mixture-of-experts",
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        n_shared_experts=1,
        **{**EXPERTS, "num_key_value_heads": 2},
    ),
    causal(
        "granitemoe", "mixture-of-experts", num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2
    ),
    causal(
        "gpt_oss",
        "mixture-of-experts",
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=4,
    ),
    causal(
        "jetmoe",
        "mixture-of-experts",
        num_key_value_heads=2,
        kv_channels=8,
        num_local_experts=3,
        num_experts_per_tok=2,
    ),
    seq2seq(
        "switch_transformers",
        domain="mixture-of-experts",
        d_kv=8,
        d_ff=24,
        num_layers=3,
        num_decoder_layers=3,
        num_heads=2,
        num_experts=3,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        expert_capacity=32,
    ),
]
STATE_SPACES = [
    causal("mamba", "state-space", state_size=4, conv_kernel=3, expand=2, time_step_rank=4),
    causal(
        "mamba2",
        "state-space",
        state_size=4,
        conv_kernel=3,
        expand=2,
        num_heads=4,
        head_dim=8,
        n_groups=1,
        chunk_size=4,
    ),
    causal("falcon_mamba", "state-space", state_size=4, conv_kernel=3, expand=2, time_step_rank=4),
    causal(
        "rwkv",
        "state-space",
        sample=unmasked(continued_text),
        attention_hidden_size=16,
        context_length=32,
        use_cache=False,
    ),
    causal(
        "recurrent_gemma",
        "state-space",
        num_key_value_heads=1,
        lru_width=16,
        attention_window_size=4,
        head_dim=8,
        num_hidden_layers=6,
    ),
    causal(
        "jamba",
        "state-space",
        num_key_value_heads=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=3,
        num_experts_per_tok=2,
        mamba_d_state=4,
        mamba_d_conv=3,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    causal(
        "bamba",
        "state-space",
        num_key_value_heads=1,
        attn_layer_indices=[1],
        mamba_d_state=4,
        mamba_d_conv=3,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_n_groups=1,
        mamba_chunk_size=4,
    ),
    causal(
        "lfm2",
        "state-space",
        num_key_value_heads=1,
        full_attn_idxs=[1],
        conv_L_cache=3,
        block_multiple_of=8,
        block_ff_dim=24,
    ),
    causal(
        "qwen3_next",
        "state-space",
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=12,
        linear_conv_kernel_dim=3,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        num_hidden_layers=4,
    ),
]
TRANSLATORS = [
    seq2seq("t5", d_kv=8, d_ff=24, num_layers=3, num_heads=2),
    seq2seq("umt5", d_kv=8, d_ff=24, num_layers=3, num_heads=2),
    seq2seq("bart"),
    seq2seq("marian"),
    seq2seq("mbart"),
    seq2seq("pegasus"),
    seq2seq("m2m_100"),
    seq2seq("blenderbot"),
    seq2seq(
        "led", attention_window=4, max_encoder_position_embeddings=32, max_decoder_position_embeddings=32
    ),
    seq2seq("longt5", d_kv=8, d_ff=24, num_layers=3, num_heads=2, local_radius=3),
]
TRANSLATORS = [
    case
    if case.name != "bart"
    else with_own_f("bart-lm", case.domain, case.build, case.sample, token_log_prob)
    for case in TRANSLATORS
]

# --- Vision ----------------------------------------------------------------------------------------------

IMAGES = [
    vision("vit"),
    vision("deit", architectures=["DeiTForImageClassification"]),
    vision("beit", use_relative_position_bias=True),
    vision("dinov2"),
    vision(
        "swin",
        num_attention_heads=OMITTED,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
    ),
    vision(
        "swinv2",
        num_attention_heads=OMITTED,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
    ),
    vision("convnext", num_hidden_layers=OMITTED, num_stages=2, hidden_sizes=[8, 16], depths=[1, 2]),
    vision("convnextv2", num_hidden_layers=OMITTED, num_stages=2, hidden_sizes=[8, 16], depths=[1, 2]),
    vision("resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic"),
    vision(
        "regnet",
        num_hidden_layers=OMITTED,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        groups_width=4,
    ),
    vision(
        "bit", num_hidden_layers=OMITTED, num_groups=2, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]
    ),
    vision("mobilenet_v1", depth_multiplier=0.25, min_depth=4),
    vision("mobilenet_v2", depth_multiplier=0.25, min_depth=4),
    vision(
        "efficientnet",
        width_coefficient=0.25,
        depth_coefficient=0.3,
        hidden_dim=320,
        dropout_rate=0.0,
        drop_connect_rate=0.0,
    ),
    vision(
        "levit",
        architectures=["LevitForImageClassification"],
        size=64,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[4, 4, 4],
        patch_size=16,
    ),
    vision(
        "pvt",
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        patch_sizes=[4, 2, 2, 2],
        strides=[4, 2, 2, 2],
    ),
    vision("pvt_v2", hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2]),
    vision("poolformer", hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1]),
    vision(
        "segformer",
        num_hidden_layers=OMITTED,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
    ),
    vision(
        "focalnet",
        patch_size=4,
        embed_dim=8,
        depths=[1, 1],
        hidden_sizes=[8, 16],
        focal_levels=[1, 1],
        focal_windows=[3, 3],
    ),
    vision(
        "mobilevit",
        size=64,
        hidden_sizes=[16, 16, 16],
        neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 24],
        patch_size=2,
        num_attention_heads=2,
    ),
    vision("swiftformer", size=64, depths=[1, 1, 1, 1], embed_dims=[8, 8, 16, 16]),
    vision(
        "hiera",
        patch_size=(7, 7),
        patch_stride=(4, 4),
        patch_padding=(3, 3),
        image_size=(64, 64),
        size=64,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[1, 2],
        embed_dim_multiplier=2.0,
        num_query_pool=1,
    ),
    vision(
        "hgnet_v2",
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        stem_channels=[3, 8, 8],
        stage_in_channels=[8, 16],
        stage_mid_channels=[4, 4],
        stage_out_channels=[16, 16],
        stage_num_blocks=[1, 1],
        stage_downsample=[False, True],
        stage_light_block=[False, True],
        stage_kernel_size=[3, 3],
        stage_numb_of_layers=[2, 2],
    ),
    vision("ijepa"),
]

# --- Audio, video, series --------------------------------------------------------------------------------

SOUNDS = [
    audio("wav2vec2"),
    audio("hubert"),
    audio("wavlm"),
    audio("unispeech-sat"),
    audio("data2vec-audio"),
    audio("wav2vec2-conformer", conv_depthwise_kernel_size=3),
    audio(
        "wav2vec2-bert", sample=tensors(12, 16), feature_projection_input_dim=16, conv_depthwise_kernel_size=3
    ),
    audio("sew", squeeze_factor=2),
    audio("sew-d", squeeze_factor=2, position_buckets=4, share_att_key=True),
    audio(
        "audio-spectrogram-transformer",
        sample=tensors(32, 16),
        num_mel_bins=16,
        max_length=32,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
    ),
    audio(
        "whisper",
        sample=tensors(8, 16),
        num_mel_bins=8,
        max_source_positions=8,
        max_target_positions=8,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
    ),
    with_own_f(
        "whisper-speech-to-text",
        "audio",
        lambda: transformers.WhisperForConditionalGeneration(
            CONFIGS["whisper"](
                **sizes(**SEQ2SEQ, num_mel_bins=8, max_source_positions=8, max_target_positions=8)
            )
        ),
        lambda g, n: {
            "input_features": torch.randn(8, 16, generator=g),
            "decoder_input_ids": (row := torch.randint(4, VOCABULARY, (6,), generator=g)),
            "labels": row.roll(-1),
        },
        token_log_prob,
    ),
    with_own_f(
        "speech_to_text",
        "audio",
        lambda: transformers.Speech2TextForConditionalGeneration(
            CONFIGS["speech_to_text"](
                **sizes(
                    **SEQ2SEQ,
                    input_feat_per_channel=8,
                    input_channels=1,
                    conv_channels=8,
                    max_source_positions=16,
                    max_target_positions=8,
                )
            )
        ),
        lambda g, n: {
            "input_features": torch.randn(16, 8, generator=g),
            "decoder_input_ids": (row := torch.randint(4, VOCABULARY, (6,), generator=g)),
            "labels": row.roll(-1),
        },
        token_log_prob,
    ),
]
VIDEOS = [
    classifier(
        "videomae",
        "video",
        built("video", "videomae", **PIXELS, num_frames=2, tubelet_size=1),
        tensors(2, 3, 32, 32),
    ),
    classifier(
        "timesformer", "video", built("video", "timesformer", **PIXELS, num_frames=2), tensors(2, 3, 32, 32)
    ),
    classifier(
        "vivit",
        "video",
        built("video", "vivit", **PIXELS, num_frames=2, tubelet_size=[1, 8, 8]),
        tensors(2, 3, 32, 32),
    ),
]
PATCHES: dict[str, Any] = {
    "num_input_channels": 2,
    "num_targets": CLASSES,
    "context_length": 16,
    "patch_length": 4,
    "patch_stride": 4,
    "d_model": 16,
    "num_attention_heads": 2,
}


def past_values(generator: torch.Generator, number: int) -> dict[str, torch.Tensor]:
    return {"past_values": torch.randn(16, 2, generator=generator), "labels": label(generator)}


def label_log_prob(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, batch["labels"].unsqueeze(-1)).squeeze(-1)


SERIES = [
    with_own_f(
        "patchtst",
        "series",
        lambda: transformers.PatchTSTForClassification(
            CONFIGS["patchtst"](**PATCHES, num_hidden_layers=8, ffn_dim=24)
        ),
        past_values,
        lambda call, batch: label_log_prob(call(past_values=batch["past_values"]).prediction_logits, batch),
    ),
    with_own_f(
        "patchtsmixer",
        "series",
        lambda: transformers.PatchTSMixerForTimeSeriesClassification(
            CONFIGS["patchtsmixer"](**PATCHES, num_layers=6)
        ),
        past_values,
        lambda call, batch: label_log_prob(call(past_values=batch["past_values"]).prediction_outputs, batch),
    ),
    with_own_f(
        "decision_transformer",
        "series",
        lambda: transformers.DecisionTransformerModel(
            CONFIGS["decision_transformer"](
                state_dim=5,
                act_dim=2,
                hidden_size=16,
                n_layer=8,
                n_head=2,
                max_ep_len=20,
                n_positions=64,
                vocab_size=1,
            )
        ),
        lambda g, n: {
            "states": torch.randn(6, 5, generator=g),
            "actions": torch.randn(6, 2, generator=g),
            "rewards": torch.randn(6, 1, generator=g),
            "returns_to_go": torch.randn(6, 1, generator=g),
            "timesteps": torch.arange(6),
            "attention_mask": torch.ones(6, dtype=torch.long),
        },
        squares,
    ),
]

# --- Multimodal ------------------------------------------------------------------------------------------

VISUAL = {"pixel_values": (3, 32, 32)}
WORDS = {"input_ids": (TOKENS,), "attention_mask": (TOKENS,)}


def two_towers(kind: str, model: Any, **towers: Any) -> Architecture:
    """An image-text model whose f is the similarity of a pair, for which no other pair is needed."""
    config = CONFIGS[kind]

    def build() -> nn.Module:
        return model(config(projection_dim=8, **{name: given() for name, given in towers.items()}))

    return with_own_f(kind, "multimodal", build, named(**WORDS, **VISUAL), pair_similarity)


def pair_similarity(call: Any, batch: Any) -> torch.Tensor:
    answer = call(**{key: value for key, value in batch.items() if key != "labels"})
    return 10 * (answer.image_embeds * answer.text_embeds).sum(-1)


def pooled_squares(call: Any, batch: Any) -> torch.Tensor:
    """f of a model that puts its patches into an order that it draws: of what does not depend on that order."""
    answer = call(**{key: value for key, value in batch.items() if key != "labels"})
    return answer.pooler_output.square().sum(1)


def with_image_tokens(image_token: int, count: int) -> MakeSample:
    """Text of which the first ``count`` tokens stand for the image."""
    plain = named(**WORDS, **VISUAL)

    def made(generator: torch.Generator, number: int) -> dict[str, torch.Tensor]:
        sample = plain(generator, number)
        row = torch.cat([torch.full((count,), image_token), sample["input_ids"]])
        return {
            "input_ids": row,
            "attention_mask": torch.ones_like(row),
            "pixel_values": sample["pixel_values"],
            "labels": torch.where(row == image_token, -100, row),
        }

    return made


MULTIMODAL = [
    two_towers(
        "clip", transformers.CLIPModel, text_config=lambda: sizes(), vision_config=lambda: sizes(**PIXELS)
    ),
    two_towers(
        "siglip", transformers.SiglipModel, text_config=lambda: sizes(), vision_config=lambda: sizes(**PIXELS)
    ),
    two_towers(
        "chinese_clip",
        transformers.ChineseCLIPModel,
        text_config=lambda: sizes(),
        vision_config=lambda: sizes(**PIXELS),
    ),
    two_towers(
        "altclip",
        transformers.AltCLIPModel,
        text_config=lambda: sizes(max_position_embeddings=40, project_dim=8),
        vision_config=lambda: sizes(**PIXELS),
    ),
    two_towers(
        "blip", transformers.BlipModel, text_config=lambda: sizes(), vision_config=lambda: sizes(**PIXELS)
    ),
    with_own_f(
        "vilt",
        "multimodal",
        lambda: transformers.ViltModel(CONFIGS["vilt"](**sizes(**PIXELS))),
        named(**WORDS, **VISUAL, pixel_mask=(32, 32)),
        pooled_squares,
        draws=True,
    ),
    with_own_f(
        "visual_bert",
        "multimodal",
        lambda: transformers.VisualBertModel(CONFIGS["visual_bert"](**sizes(visual_embedding_dim=12))),
        named(**WORDS, visual_embeds=(4, 12), visual_attention_mask=(4,)),
        squares,
    ),
    with_own_f(
        "lxmert",
        "multimodal",
        lambda: transformers.LxmertModel(
            CONFIGS["lxmert"](
                **sizes(
                    num_hidden_layers=OMITTED,
                    l_layers=1,
                    x_layers=1,
                    r_layers=1,
                    visual_feat_dim=12,
                    visual_pos_dim=4,
                )
            )
        ),
        named(**WORDS, visual_feats=(4, 12), visual_pos=(4, 4)),
        squares,
    ),
    with_own_f(
        "git",
        "multimodal",
        lambda: transformers.GitForCausalLM(CONFIGS["git"](**sizes(), vision_config=sizes(**PIXELS))),
        with_image_tokens(4, 0),
        last_tokens_log_prob,
    ),
    language_model(
        "llava",
        "multimodal",
        lambda: transformers.LlavaForConditionalGeneration(
            CONFIGS["llava"](
                text_config=CONFIGS["llama"](**sizes(num_key_value_heads=1)),
                vision_config=CONFIGS["clip_vision_model"](**sizes(**PIXELS)),
                image_token_index=3,
                vision_feature_layer=-1,
            )
        ),
        with_image_tokens(3, 16),
    ),
    language_model(
        "paligemma",
        "multimodal",
        lambda: transformers.PaliGemmaForConditionalGeneration(
            CONFIGS["paligemma"](
                text_config=CONFIGS["gemma"](**sizes(num_key_value_heads=1, head_dim=8)),
                vision_config=CONFIGS["siglip_vision_model"](**sizes(**PIXELS, projection_dim=16)),
                image_token_index=3,
                projection_dim=16,
                hidden_size=16,
            )
        ),
        with_image_tokens(3, 16),
    ),
    with_own_f(
        "vision-encoder-decoder",
        "multimodal",
        lambda: transformers.VisionEncoderDecoderModel(
            config=CONFIGS["vision-encoder-decoder"].from_encoder_decoder_configs(
                CONFIGS["vit"](**sizes(**PIXELS)),
                CONFIGS["bert"](**sizes(is_decoder=True, add_cross_attention=True)),
            )
        ),
        lambda g, n: {
            "pixel_values": torch.randn(3, 32, 32, generator=g),
            "decoder_input_ids": (row := torch.randint(4, VOCABULARY, (6,), generator=g)),
            "labels": row.roll(-1),
        },
        token_log_prob,
    ),
    with_own_f(
        "clap",
        "multimodal",
        lambda: transformers.ClapTextModelWithProjection(
            CONFIGS["clap_text_model"](**sizes(max_position_embeddings=40, projection_dim=8))
        ),
        named(**WORDS),
        squares,
    ),
]

# --- Detection and segmentation --------------------------------------------------------------------------

DENSE = [
    with_own_f(
        "yolos",
        "detection",
        lambda: transformers.YolosForObjectDetection(
            CONFIGS["yolos"](**sizes(patch_size=8, image_size=[32, 32], num_detection_tokens=4))
        ),
        image(),
        squares,
    ),
    with_own_f(
        "segformer-segmentation",
        "segmentation",
        lambda: transformers.SegformerForSemanticSegmentation(
            CONFIGS["segformer"](
                hidden_sizes=[8, 8, 16, 16],
                depths=[1, 1, 1, 1],
                num_attention_heads=[1, 1, 2, 2],
                decoder_hidden_size=16,
                num_labels=3,
            )
        ),
        image(),
        squares,
    ),
    with_own_f(
        "detr",
        "detection",
        lambda: transformers.DetrForObjectDetection(
            CONFIGS["detr"](
                use_timm_backbone=False,
                use_pretrained_backbone=False,
                backbone=None,
                backbone_config=CONFIGS["resnet"](
                    embedding_size=8,
                    hidden_sizes=[8, 16],
                    depths=[1, 1],
                    layer_type="basic",
                    out_features=["stage2"],
                ),
                d_model=16,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=24,
                decoder_ffn_dim=24,
                num_queries=4,
                num_labels=3,
            )
        ),
        image(),
        squares,
    ),
    with_own_f(
        "dpt",
        "depth",
        lambda: transformers.DPTForDepthEstimation(
            CONFIGS["dpt"](
                **sizes(
                    **PIXELS,
                    num_hidden_layers=4,
                    backbone_out_indices=[0, 1, 2, 3],
                    neck_hidden_sizes=[8, 8, 16, 16],
                    fusion_hidden_size=8,
                    reassemble_factors=[4, 2, 1, 0.5],
                )
            )
        ),
        image(),
        lambda call, batch: call(batch[0]).predicted_depth.square().flatten(1).sum(1),
    ),
    with_own_f(
        "swin2sr",
        "restoration",
        lambda: transformers.Swin2SRForImageSuperResolution(
            CONFIGS["swin2sr"](
                image_size=16,
                patch_size=1,
                num_channels=3,
                embed_dim=8,
                depths=[1],
                num_heads=[2],
                window_size=4,
                upscale=2,
            )
        ),
        image(16),
        lambda call, batch: call(batch[0]).reconstruction.square().flatten(1).sum(1),
    ),
]

# --- Adapters --------------------------------------------------------------------------------------------

LLAMA = next(case for case in LANGUAGE_MODELS if case.name == "llama")
BERT = next(case for case in ENCODERS if case.name == "bert")
OPT = next(case for case in LANGUAGE_MODELS if case.name == "opt")
T5 = next(case for case in TRANSLATORS if case.name == "t5")
VIT = next(case for case in IMAGES if case.name == "vit")
PROJECTIONS = {"target_modules": ["q_proj", "v_proj"]}
CAUSAL_ADAPTER: dict[str, Any] = {"task_type": "CAUSAL_LM", **PROJECTIONS}

ADAPTERS = [
    adapter("lora-llama", LLAMA, lambda: peft.LoraConfig(r=2, init_lora_weights=False, **CAUSAL_ADAPTER)),
    adapter(
        "dora-bert",
        BERT,
        lambda: peft.LoraConfig(r=2, task_type="SEQ_CLS", use_dora=True, init_lora_weights=False),
    ),
    adapter(
        "lora-vit",
        VIT,
        lambda: peft.LoraConfig(
            r=2,
            target_modules=["q_proj", "v_proj", "query", "value"],
            modules_to_save=["classifier"],
            init_lora_weights=False,
        ),
    ),
    adapter(
        "lora-embedding-llama",
        LLAMA,
        lambda: peft.LoraConfig(
            r=2, task_type="CAUSAL_LM", target_modules=["embed_tokens", "q_proj"], init_lora_weights=False
        ),
    ),
    adapter(
        "ia3-llama",
        LLAMA,
        lambda: peft.IA3Config(
            task_type="CAUSAL_LM",
            target_modules=["k_proj", "v_proj", "down_proj"],
            feedforward_modules=["down_proj"],
        ),
    ),
    adapter(
        "adalora-llama",
        LLAMA,
        lambda: peft.AdaLoraConfig(init_r=2, target_r=1, total_step=10, tinit=1, tfinal=1, **CAUSAL_ADAPTER),
    ),
    adapter("loha-llama", LLAMA, lambda: peft.LoHaConfig(r=2, init_weights=False, **CAUSAL_ADAPTER)),
    adapter("lokr-llama", LLAMA, lambda: peft.LoKrConfig(r=2, init_weights=False, **CAUSAL_ADAPTER)),
    adapter(
        "vera-llama",
        LLAMA,
        lambda: peft.VeraConfig(r=2, init_weights=False, task_type="CAUSAL_LM", target_modules=["q_proj"]),
    ),
    adapter(
        "oft-llama",
        LLAMA,
        lambda: peft.OFTConfig(r=0, oft_block_size=4, init_weights=False, **CAUSAL_ADAPTER),
    ),
    adapter(
        "boft-llama", LLAMA, lambda: peft.BOFTConfig(boft_block_size=4, init_weights=False, **CAUSAL_ADAPTER)
    ),
    adapter(
        "fourierft-llama",
        LLAMA,
        lambda: peft.FourierFTConfig(n_frequency=10, task_type="CAUSAL_LM", target_modules=["q_proj"]),
    ),
    adapter(
        "layer-norm-tuning-llama",
        LLAMA,
        lambda: peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm", "norm"]),
    ),
    with_own_f(
        "prompt-tuning-llama",
        "adapters",
        lambda: peft.get_peft_model(
            LLAMA.build(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        ),
        continued_text,
        last_tokens_log_prob,
    ),
    adapter(
        "p-tuning-llama",
        LLAMA,
        lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
    ),
    adapter(
        "prefix-tuning-opt", OPT, lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ),
    adapter(
        "lora-t5",
        T5,
        lambda: peft.LoraConfig(
            r=2, task_type="SEQ_2_SEQ_LM", target_modules=["q", "v"], init_lora_weights=False
        ),
    ),
]

HUB = [
    *ENCODERS,
    *LANGUAGE_MODELS,
    *MIXTURES,
    *STATE_SPACES,
    *TRANSLATORS,
    *IMAGES,
    *SOUNDS,
    *VIDEOS,
    *SERIES,
    *MULTIMODAL,
    *DENSE,
    *ADAPTERS,
]
