"""Tasks of positions on tiny models of transformers, against the losses that transformers computes, row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trak_lite import Attributor
from trak_lite import modelout_functions as tasks
from trak_lite.errors import InvalidInputError
from trak_lite.gradient_computers import FunctionalGradientComputer, HookGradientComputer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

B, V, T, PAD = 3, 30, 7, 0
EAGER = {"vocab_size": V, "attn_implementation": "eager"}
BERT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
GPT2 = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 1, "eos_token_id": 1}
T5 = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": PAD}
BART = {
    "d_model": 8,
    "max_position_embeddings": 16,
    **{
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {"layers": 1, "attention_heads": 2, "ffn_dim": 12}.items()
    },
}
SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [4, 8],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 8,
    "num_labels": 4,
    "semantic_loss_ignore_index": 255,
}


def model_of(kind: str, name: str, **settings: Any) -> nn.Module:
    """A model in float64 that is far from uniform."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = getattr(transformers, f"{kind}{name}")(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def gpt2() -> nn.Module:
    return model_of("GPT2", "LMHeadModel", **EAGER, **GPT2, pad_token_id=PAD)


def drawn(*shape: int, seed: int, low: int = 3, high: int = V) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def texts(seed: int, length: int = T, prompt: int = 2) -> dict[str, Tensor]:
    """Ids padded on the right, mask, and labels without prompt and padding."""
    ids, mask = drawn(B, length, seed=seed), torch.ones(B, length, dtype=torch.long)
    mask[1, length - 2 :] = 0
    ids = ids.masked_fill(mask == 0, PAD)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :prompt] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def prefixed(side: str, columns: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{side}_{name}": column for name, column in columns.items()}


def part_of(row: dict[str, Tensor], side: str) -> dict[str, Tensor]:
    start = f"{side}_"
    return {name.removeprefix(start): column for name, column in row.items() if name.startswith(start)}


def kept_of(row: dict[str, Tensor]) -> Tensor:
    """Positions of a row that are not padding."""
    return row.get("attention_mask", torch.ones_like(row["input_ids"]))[0] == 1


def sft_loss(model: nn.Module, row: dict[str, Tensor]) -> Tensor:
    """Without padding; transformers computes the loss of this model in float32."""
    kept = kept_of(row)
    logits = model(input_ids=row["input_ids"][:, kept]).logits[0, :-1]
    return nn.functional.cross_entropy(logits, row["labels"][0, kept][1:], reduction="sum")


def summed_loss(model: nn.Module, row: dict[str, Tensor]) -> Tensor:
    """The loss of transformers is a mean over labelled positions."""
    ignored = getattr(model.config, "semantic_loss_ignore_index", -100)
    return model(**row).loss * (row["labels"] != ignored).sum()


def contrastive_loss(model: nn.Module, row: dict[str, Tensor]) -> Tensor:
    def embedded(inputs: dict[str, Tensor]) -> Tensor:
        states = model(**inputs).last_hidden_state[0][kept_of(inputs)].mean(0)
        return states / states.norm()

    query, negatives = embedded(part_of(row, "query")), part_of(row, "negative")
    others = [{name: column[:, j] for name, column in negatives.items()} for j in range(2)]
    logits = torch.stack([query @ embedded(part) for part in (part_of(row, "positive"), *others)]) / 0.1
    return -logits.log_softmax(0)[0]


def unlabelled(side: str, columns: dict[str, Tensor]) -> dict[str, Tensor]:
    return prefixed(side, {name: column for name, column in columns.items() if name != "labels"})


def masked() -> dict[str, Tensor]:
    batch = texts(3, prompt=0)
    return {**batch, "labels": batch["labels"].masked_fill(torch.arange(T) % 3 > 0, -100)}


def images() -> dict[str, Tensor]:
    labels = drawn(B, 16, 16, seed=9, low=0, high=4)
    labels[1, :5] = 255
    pixels = torch.randn(B, 3, 16, 16, generator=torch.Generator().manual_seed(8)).double()
    return {"pixel_values": pixels, "labels": labels}


def queries() -> dict[str, Tensor]:
    return {
        **unlabelled("query", texts(10)),
        **unlabelled("positive", texts(11, T - 1)),
        "negative_input_ids": drawn(B, 2, 5, seed=12),
        "negative_attention_mask": torch.ones(B, 2, 5, dtype=torch.long),
    }


SEQ2SEQ = tasks.SequenceToSequenceModelOutput()
CASES: dict[str, tuple[Any, Callable[[], nn.Module], dict[str, Tensor], Any]] = {
    "sft": (tasks.CausalLanguageModelingModelOutput(), gpt2, texts(0), sft_loss),
    "t5": (
        SEQ2SEQ,
        lambda: model_of("T5", "ForConditionalGeneration", **EAGER, **T5),
        texts(5),
        summed_loss,
    ),
    "bart": (
        SEQ2SEQ,
        lambda: model_of("Bart", "ForConditionalGeneration", **EAGER, **BART),
        texts(6),
        summed_loss,
    ),
    "masked": (
        tasks.MaskedLanguageModelingModelOutput(),
        lambda: model_of("Bert", "ForMaskedLM", **EAGER, **BERT),
        masked(),
        summed_loss,
    ),
    "token classes": (
        tasks.DenseClassificationModelOutput(class_axis=-1),
        lambda: model_of("Bert", "ForTokenClassification", **EAGER, **BERT, num_labels=V),
        texts(7),
        summed_loss,
    ),
    "segmentation": (
        tasks.DenseClassificationModelOutput(ignore_index=255, upsample=True),
        lambda: model_of("Segformer", "ForSemanticSegmentation", **SEGFORMER),
        images(),
        summed_loss,
    ),
    "contrastive": (
        tasks.ContrastiveModelOutput(temperature=0.1),
        lambda: model_of("Bert", "Model", **EAGER, **BERT),
        queries(),
        contrastive_loss,
    ),
}


def compare(computer: Any, batch: dict[str, Tensor], value_of: Callable[[dict[str, Tensor]], Tensor]) -> None:
    """Hold q times the gradients of f against those of a value of each row alone."""
    named, found = dict(computer.model.named_parameters()), {}
    terms = computer.stream_gradients(batch, lambda block: found.update({block.name: block.dense()}))
    for i, q in enumerate(terms.out_to_loss_grad):
        value = value_of({key: column[i : i + 1] for key, column in batch.items()})
        plain = torch.autograd.grad(value, named.values(), allow_unused=True, materialize_grads=True)
        for (key, parameter), grad in zip(named.items(), plain, strict=True):
            ours = found[key][i] if key in found else torch.zeros(parameter.numel()).double()
            torch.testing.assert_close(q * ours, grad.flatten(), rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of attention under vmap
@pytest.mark.parametrize("computer", [HookGradientComputer, FunctionalGradientComputer])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_loss_of_transformers(name: str, computer: Any) -> None:
    """Under vmap, transformers cannot read the masks of models that are not causal."""
    task, build, batch, loss = CASES[name]
    masked = computer is HookGradientComputer or build is gpt2
    batch = {key: part for key, part in batch.items() if masked or "attention_mask" not in key}
    model = build()

    compare(computer(model, task), batch, lambda row: -loss(model, row))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # from peft
def test_a_base_model_is_the_reference_of_its_adapter() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = gpt2()
    rows = {**prefixed("chosen", texts(1)), **prefixed("rejected", texts(2, T - 1))}
    expected = tasks.reference_columns(base, [rows])
    adapter = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    adapted = peft.get_peft_model(base, adapter).double()

    changed = tasks.reference_columns(adapted, [rows])
    with adapted.disable_adapter():
        found = tasks.reference_columns(adapted, [rows])

    torch.testing.assert_close(found, expected)
    assert not torch.allclose(changed["ref_chosen_logps"], expected["ref_chosen_logps"])


def test_a_layer_of_a_causal_model_is_asked_along_a_direction() -> None:
    """The last token that is not padding, of a block in the middle."""
    model, direction = gpt2(), torch.randn(8, generator=torch.Generator().manual_seed(14)).double()
    task = tasks.ActivationModelOutput("transformer.h.0", direction, position="last")

    def along(row: dict[str, Tensor]) -> Tensor:
        ids = row["input_ids"][:, kept_of(row)]
        return model(input_ids=ids, output_hidden_states=True).hidden_states[1][0, -1] @ direction

    compare(HookGradientComputer(model, task), texts(13), along)


WORDS = ["<pad>", "<user>", "<assistant>", "<end>", *["hi", "hello", "how", "are", "you", "fine", "thanks"]]
PLAIN = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "{{ ' <end> ' }}{% endfor %}"
)
FORGETFUL = "{% for m in messages[-2:] %}{{ '<' + m['role'] + '> ' + m['content'] + ' <end> ' }}{% endfor %}"
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "fine thanks"},
]


def tokenizer(template: str) -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", chat_template=template
    )


@pytest.mark.parametrize(
    ("template", "labelled"),
    [(PLAIN, "hello <end> fine thanks <end>"), (MARKED, "hello fine thanks")],
    ids=["plain", "marked"],
)
def test_only_the_tokens_of_the_assistant_are_labelled(template: str, labelled: str) -> None:
    sample = tasks.response_labels(tokenizer(template), TALK)

    said = "<user> hi <end> <assistant> hello <end> <user> how are you <end> <assistant> fine thanks <end>"
    assert [WORDS[i] for i in sample["input_ids"].tolist()] == said.split()
    kept = sample["labels"] != -100
    assert torch.equal(sample["labels"][kept], sample["input_ids"][kept])
    assert [WORDS[i] for i in sample["labels"][kept].tolist()] == labelled.split()
    model = gpt2().float()
    attributor = Attributor(model, "causal_language_modeling", None, proj_dim=8, progress=False)
    assert attributor.featurize([sample, sample]).rows_written == 2


def test_conversations_that_cannot_be_labelled_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="no message of the assistant"):
        tasks.response_labels(tokenizer(PLAIN), TALK[:1])
    with pytest.raises(InvalidInputError, match="tokens of message 1 cannot be found"):
        tasks.response_labels(tokenizer(FORGETFUL), TALK)
