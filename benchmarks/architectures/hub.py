"""Architectures of transformers and peft, in tiny configurations built from the table hub.yaml. No network."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the packages are imported

import peft
import torch
import transformers
import yaml
from torch import Tensor, nn
from transformers import CONFIG_MAPPING as CONFIGS

from benchmarks.architectures import (
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

TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
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
SEQ2SEQ: dict[str, Any] = {
    **{f"{part}_layers": 3 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 24 for part in ("encoder", "decoder")},
    "d_model": 16,
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
PATCHES: dict[str, Any] = {
    "num_input_channels": 2,
    "num_targets": CLASSES,
    "context_length": 16,
    "patch_length": 4,
    "patch_stride": 4,
    "d_model": 16,
    "num_attention_heads": 2,
}
LIKE = {"sizes": SIZES, "seq2seq": SEQ2SEQ, "pixels": PIXELS, "patches": PATCHES}


def settings_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an entry with those of the groups that it names; null leaves one out."""
    shared = {key: value for name in given.get("like", ()) for key, value in LIKE[name].items()}
    merged = {**shared, **given}
    found = {key: value for key, value in merged.items() if value is not None and key not in ("like", "of")}
    return {key: config_of(value) if isinstance(value, dict) else value for key, value in found.items()}


def config_of(given: dict[str, Any]) -> Any:
    """Return a part of a configuration: settings, or what the model type that they name makes of them."""
    settings = settings_of(given)
    return CONFIGS[settings.pop("model_type")](**settings) if "model_type" in settings else settings


def built(auto: str, kind: str, *groups: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return what makes the model of this ``model_type``; sizes that it does not know stay unread."""

    def build() -> nn.Module:
        config = CONFIGS[kind](**settings_of({"like": ["sizes", *groups], **settings}))
        return getattr(transformers, f"AutoModelFor{auto}").from_config(config)

    return build


def causal(
    kind: str, domain: str = "text", *, sample: MakeSample = continued_text, **settings: Any
) -> Architecture:
    return language_model(kind, domain, built("CausalLM", kind, **settings), sample)


def seq2seq(kind: str, domain: str = "encoder-decoder", **settings: Any) -> Architecture:
    name = "bart-lm" if kind == "bart" else kind  # its encoder classifies under the other name
    return with_own_f(
        name, domain, built("Seq2SeqLM", kind, "seq2seq", **settings), translation, token_log_prob
    )


def of_class(name: str) -> tuple[str, str, Callable[[], nn.Module]]:
    """Return name, domain and what makes the model of an entry that names its class."""
    given = TABLE["models"][name]
    domain, model, kind = given["of"]
    return name, domain, lambda: getattr(transformers, model)(CONFIGS[kind](**settings_of(given)))


# --- Text ------------------------------------------------------------------------------------------------


def ended_text(generator: torch.Generator, number: int) -> dict[str, Tensor]:
    """Text without padding that ends with the token whose state bart classifies."""
    first = text(generator, 0)
    return {**first, "input_ids": torch.cat([text(generator, 0)["input_ids"][:-1], torch.tensor([2])])}


ENCODERS = {
    kind: classifier(
        kind,
        "text",
        built("SequenceClassification", kind, **settings),
        unmasked(text) if kind == "fnet" else text,
        "text_classification",
    )
    for kind, settings in TABLE["encoders"].items()
}
ENCODERS["bart"] = classifier(
    "bart",
    "encoder-decoder",
    built("SequenceClassification", "bart", "seq2seq"),
    ended_text,
    "text_classification",
)
LANGUAGE_MODELS = {
    kind: causal(kind, domain, sample=unmasked(continued_text) if kind == "rwkv" else continued_text, **sizes)
    for group, domain in (
        ("language models", "text"),
        ("mixtures", "mixture-of-experts"),
        ("state spaces", "state-space"),
    )
    for kind, sizes in TABLE[group].items()
}
TRANSLATORS = {
    kind: seq2seq(kind, domain, **settings)
    for group, domain in (("translators", "encoder-decoder"), ("sparse translators", "mixture-of-experts"))
    for kind, settings in TABLE[group].items()
}

# --- Vision, audio, video, series ------------------------------------------------------------------------


def vision(kind: str, **settings: Any) -> Architecture:
    size = settings.get("image_size", 32)
    sample = image(size if isinstance(size, int) else size[0])
    return classifier(kind, "vision", built("ImageClassification", kind, "pixels", **settings), sample)


def audio(kind: str, **settings: Any) -> Architecture:
    shape = SPECTRA.get(kind, (160,))
    model = built("AudioClassification", kind, **{**AUDIO, **settings})
    return classifier(kind, "audio", model, tensors(*shape))


SPECTRA = {"wav2vec2-bert": (12, 16), "audio-spectrogram-transformer": (32, 16), "whisper": (8, 16)}
IMAGES = {kind: vision(kind, **settings) for kind, settings in TABLE["images"].items()}
SOUNDS = [audio(kind, **settings) for kind, settings in TABLE["sounds"].items()]
VIDEOS = [
    classifier(
        kind,
        "video",
        built("VideoClassification", kind, "pixels", **settings),
        tensors(2, 3, 32, 32),
    )
    for kind, settings in TABLE["videos"].items()
]


def spoken(name: str, *shape: int) -> MakeSample:
    """Numbers under a name, and the tokens that they stand for."""

    def made(generator: torch.Generator, number: int) -> dict[str, Tensor]:
        values = torch.randn(*shape, generator=generator)
        row = torch.randint(4, VOCABULARY, (6,), generator=generator)
        return {name: values, "decoder_input_ids": row, "labels": row.roll(-1)}

    return made


def past_values(generator: torch.Generator, number: int) -> dict[str, Tensor]:
    return {"past_values": torch.randn(16, 2, generator=generator), "labels": label(generator)}


def played(generator: torch.Generator, number: int) -> dict[str, Tensor]:
    widths = {"states": 5, "actions": 2, "rewards": 1, "returns_to_go": 1}
    drawn = {name: torch.randn(6, width, generator=generator) for name, width in widths.items()}
    return {
        **drawn,
        "timesteps": torch.arange(6),
        "attention_mask": torch.ones(6, dtype=torch.long),
    }


def forecast_log_prob(answer: str) -> Callable[[Any, Any], Tensor]:
    """F of a classifier of series: log p of the label."""

    def f(call: Any, batch: Any) -> Tensor:
        logits = getattr(call(past_values=batch["past_values"]), answer)
        return logits.log_softmax(-1).gather(-1, batch["labels"].unsqueeze(-1)).squeeze(-1)

    return f


# --- Multimodal, detection, segmentation -----------------------------------------------------------------

VISUAL = {"pixel_values": (3, 32, 32)}
WORDS = {"input_ids": (TOKENS,), "attention_mask": (TOKENS,)}


def two_towers(kind: str, model: str, **text_sizes: Any) -> Architecture:
    """An image-text model whose f is the similarity of a pair, for which no other pair is needed."""
    parts = {
        "text_config": {"like": ["sizes"], **text_sizes},
        "vision_config": {"like": ["sizes", "pixels"]},
    }

    def build() -> nn.Module:
        return getattr(transformers, model)(CONFIGS[kind](projection_dim=8, **settings_of(parts)))

    return with_own_f(kind, "multimodal", build, named(**WORDS, **VISUAL), pair_similarity)


def answer_of(call: Any, batch: Any) -> Any:
    return call(**{key: value for key, value in batch.items() if key != "labels"})


def pair_similarity(call: Any, batch: Any) -> Tensor:
    answer = answer_of(call, batch)
    return 10 * (answer.image_embeds * answer.text_embeds).sum(-1)


def pooled_squares(call: Any, batch: Any) -> Tensor:
    """F of a model that puts its patches into an order that it draws: of what does not depend on that order."""
    return answer_of(call, batch).pooler_output.square().sum(1)


def image_squares(answer: str) -> Callable[[Any, Any], Tensor]:
    """F of a model whose answer is an image."""
    return lambda call, batch: getattr(call(batch[0]), answer).square().flatten(1).sum(1)


def with_image_tokens(image_token: int, count: int) -> MakeSample:
    """Text of which the first ``count`` tokens stand for the image."""
    plain = named(**WORDS, **VISUAL)

    def made(generator: torch.Generator, number: int) -> dict[str, Tensor]:
        sample = plain(generator, number)
        row = torch.cat([torch.full((count,), image_token), sample["input_ids"]])
        return {
            "input_ids": row,
            "attention_mask": torch.ones_like(row),
            "pixel_values": sample["pixel_values"],
            "labels": torch.where(row == image_token, -100, row),
        }

    return made


def image_with_words() -> nn.Module:
    encoder = CONFIGS["vit"](**settings_of({"like": ["sizes", "pixels"]}))
    decoder = CONFIGS["bert"](
        **settings_of({"like": ["sizes"], "is_decoder": True, "add_cross_attention": True})
    )
    kind = CONFIGS["vision-encoder-decoder"]
    return transformers.VisionEncoderDecoderModel(config=kind.from_encoder_decoder_configs(encoder, decoder))


SAMPLES_AND_F: dict[str, tuple[MakeSample, Callable[[Any, Any], Tensor]]] = {
    "whisper-speech-to-text": (spoken("input_features", 8, 16), token_log_prob),
    "speech_to_text": (spoken("input_features", 16, 8), token_log_prob),
    "patchtst": (past_values, forecast_log_prob("prediction_logits")),
    "patchtsmixer": (past_values, forecast_log_prob("prediction_outputs")),
    "decision_transformer": (played, squares),
    "vilt": (named(**WORDS, **VISUAL, pixel_mask=(32, 32)), pooled_squares),
    "visual_bert": (named(**WORDS, visual_embeds=(4, 12), visual_attention_mask=(4,)), squares),
    "lxmert": (named(**WORDS, visual_feats=(4, 12), visual_pos=(4, 4)), squares),
    "git": (with_image_tokens(4, 0), last_tokens_log_prob),
    "clap": (named(**WORDS), squares),
    "yolos": (image(), squares),
    "segformer-segmentation": (image(), squares),
    "detr": (image(), squares),
    "dpt": (image(), image_squares("predicted_depth")),
    "swin2sr": (image(16), image_squares("reconstruction")),
}
TALKER = spoken("pixel_values", 3, 32, 32)
OTHERS = [
    *(with_own_f(*of_class(name), *of, draws=name == "vilt") for name, of in SAMPLES_AND_F.items()),
    *(language_model(*of_class(name), with_image_tokens(3, 16)) for name in ("llava", "paligemma")),
    *(two_towers(kind, **settings) for kind, settings in TABLE["towers"].items()),
    with_own_f("vision-encoder-decoder", "multimodal", image_with_words, TALKER, token_log_prob),
]

# --- Adapters --------------------------------------------------------------------------------------------

BASES = {**LANGUAGE_MODELS, **ENCODERS, **TRANSLATORS, **IMAGES}


def adapter(name: str, *, config: str, base: str = "llama", **settings: Any) -> Architecture:
    """A frozen base model and a trained adapter."""
    on = BASES[base]
    named_task = {"task_type": "CAUSAL_LM", **settings}

    def build() -> nn.Module:
        return peft.get_peft_model(on.build(), getattr(peft, config)(**named_task))

    if config == "PromptTuningConfig":  # its tokens stand in front of those that it is given
        return with_own_f(name, "adapters", build, on.sample, last_tokens_log_prob)
    return Architecture(name, "adapters", build, on.sample, on.task, on.output, tokens=on.tokens)


ADAPTERS = [adapter(name, **settings) for name, settings in TABLE["adapters"].items()]
TEXTS = [*ENCODERS.values(), *LANGUAGE_MODELS.values(), *TRANSLATORS.values()]
HUB = [*TEXTS, *IMAGES.values(), *SOUNDS, *VIDEOS, *OTHERS, *ADAPTERS]
