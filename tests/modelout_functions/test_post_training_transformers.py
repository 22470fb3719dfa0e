"""Tasks of post-training on tiny models of transformers, against the losses that transformers computes, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trak_lite import Attributor
from trak_lite.errors import InvalidInputError
from trak_lite.gradient_computers import (
    AbstractGradientComputer,
    FunctionalGradientComputer,
    HookGradientComputer,
)
from trak_lite.modelout_functions import (
    AbstractModelOutput,
    ActivationModelOutput,
    CausalLanguageModelingModelOutput,
    ContrastiveModelOutput,
    DenseClassificationModelOutput,
    DPOModelOutput,
    MaskedLanguageModelingModelOutput,
    PolicyGradientModelOutput,
    RewardModelOutput,
    SequenceToSequenceModelOutput,
    reference_columns,
    response_labels,
)

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

B, V, T, PAD = 3, 30, 7, 0
BERT = {
    "vocab_size": V,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
    "attn_implementation": "eager",
}
GPT2 = {
    "vocab_size": V,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": PAD,
    "attn_implementation": "eager",
}


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


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = build().double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def log_prob_of(model: nn.Module, row: dict[str, Tensor]) -> Tensor:
    """Sum of log p of one row without padding; transformers computes the loss of this model in float32."""
    kept = kept_of(row)
    logits = model(input_ids=row["input_ids"][:, kept]).logits[0, :-1]
    return -nn.functional.cross_entropy(logits, row["labels"][0, kept][1:], reduction="sum")


def kept_of(row: dict[str, Tensor]) -> Tensor:
    """Positions of a row that are not padding."""
    return row.get("attention_mask", torch.ones_like(row["input_ids"]))[0] == 1


def prefixed(side: str, columns: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{side}_{name}": column for name, column in columns.items()}


def part_of(row: dict[str, Tensor], side: str) -> dict[str, Tensor]:
    start = f"{side}_"
    return {name.removeprefix(start): column for name, column in row.items() if name.startswith(start)}


@dataclass
class Case:
    task: AbstractModelOutput
    build: Callable[[], nn.Module]
    batch: dict[str, Tensor]
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    """L of a batch of one row."""


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))


def reward_model() -> nn.Module:
    return transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**GPT2, num_labels=1))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=V,
        d_model=8,
        d_kv=4,
        d_ff=12,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=PAD,
        attn_implementation="eager",
    )
    return transformers.T5ForConditionalGeneration(config)


def bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=V,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=12,
        decoder_ffn_dim=12,
        max_position_embeddings=16,
        attn_implementation="eager",
    )
    return transformers.BartForConditionalGeneration(config)


def bert(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, name)(transformers.BertConfig(**BERT, **options))


def segformer() -> nn.Module:
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[4, 8],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
        num_labels=4,
        semantic_loss_ignore_index=255,
    )
    return transformers.SegformerForSemanticSegmentation(config)


def summed_loss(ignored: int = -100) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
    """The loss of transformers is a mean over labelled positions."""
    return lambda model, row: model(**row).loss * (row["labels"] != ignored).sum()


def dpo_loss(model: nn.Module, row: dict[str, Tensor]) -> Tensor:
    gains = [
        log_prob_of(model, part_of(row, side)) - row[f"ref_{side}_logps"][0]
        for side in ("chosen", "rejected")
    ]
    return -nn.functional.logsigmoid(0.2 * (gains[0] - gains[1]))


def reward_loss(model: nn.Module, row: dict[str, Tensor]) -> Tensor:
    scores = []
    for side in ("chosen", "rejected"):
        inputs = part_of(row, side)
        scores.append(model(input_ids=inputs["input_ids"][:, kept_of(inputs)]).logits[0, 0])
    return -nn.functional.logsigmoid(scores[0] - scores[1])


def policy_loss(model: nn.Module, row: dict[str, Tensor]) -> Tensor:
    return -row["advantages"][0] * log_prob_of(model, row)


def contrastive_loss(model: nn.Module, row: dict[str, Tensor]) -> Tensor:
    def embedded(inputs: dict[str, Tensor]) -> Tensor:
        states = model(**inputs).last_hidden_state[0][kept_of(inputs)].mean(0)
        return states / states.norm()

    query = embedded(part_of(row, "query"))
    negatives = part_of(row, "negative")
    others = [{name: column[:, j] for name, column in negatives.items()} for j in range(2)]
    logits = torch.stack([query @ embedded(part) for part in (part_of(row, "positive"), *others)]) / 0.1
    return -logits.log_softmax(0)[0]


def without_labels(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: column for name, column in columns.items() if name != "labels"}


def pixels() -> Tensor:
    labels = drawn(B, 16, 16, seed=9, low=0, high=4)
    labels[1, :5] = 255
    return labels


def preference_rows() -> dict[str, Tensor]:
    return {**prefixed("chosen", texts(1)), **prefixed("rejected", texts(2, T - 1))}


MASKED = texts(3, prompt=0)
MASKED["labels"] = MASKED["labels"].masked_fill(torch.arange(T) % 3 > 0, -100)

CASES = {
    "sft": Case(
        CausalLanguageModelingModelOutput(),
        gpt2,
        texts(0),
        lambda model, row: -log_prob_of(model, row),
    ),
    "dpo": Case(
        DPOModelOutput(beta=0.2),
        gpt2,
        {
            **preference_rows(),
            "ref_chosen_logps": torch.tensor([-20.0, -12.5, -18.0]).double(),
            "ref_rejected_logps": torch.tensor([-15.0, -9.0, -17.0]).double(),
        },
        dpo_loss,
    ),
    "reward_modeling": Case(
        RewardModelOutput(),
        reward_model,
        {
            name: column
            for name, column in preference_rows().items()
            if name not in ("chosen_labels", "rejected_labels")
        },
        reward_loss,
    ),
    "policy_gradient": Case(
        PolicyGradientModelOutput(),
        gpt2,
        {**texts(4), "advantages": torch.tensor([1.0, -0.5, 0.7]).double()},
        policy_loss,
    ),
    "t5": Case(SequenceToSequenceModelOutput(), t5, texts(5), summed_loss()),
    "bart": Case(SequenceToSequenceModelOutput(), bart, texts(6), summed_loss()),
    "masked": Case(MaskedLanguageModelingModelOutput(), bert("BertForMaskedLM"), MASKED, summed_loss()),
    "token classes": Case(
        DenseClassificationModelOutput(class_axis=-1),
        bert("BertForTokenClassification", num_labels=V),
        texts(7),
        summed_loss(),
    ),
    "segmentation": Case(
        DenseClassificationModelOutput(ignore_index=255, upsample=True),
        segformer,
        {
            "pixel_values": torch.randn(B, 3, 16, 16, generator=torch.Generator().manual_seed(8)).double(),
            "labels": pixels(),
        },
        summed_loss(255),
    ),
    "contrastive": Case(
        ContrastiveModelOutput(temperature=0.1),
        bert("BertModel"),
        {
            **prefixed("query", without_labels(texts(10))),
            **prefixed("positive", without_labels(texts(11, T - 1))),
            "negative_input_ids": drawn(B, 2, 5, seed=12),
            "negative_attention_mask": torch.ones(B, 2, 5, dtype=torch.long),
        },
        contrastive_loss,
    ),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of attention under vmap
@pytest.mark.parametrize("computer", [HookGradientComputer, FunctionalGradientComputer])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_loss_of_transformers(
    name: str, computer: type[AbstractGradientComputer]
) -> None:
    """Under vmap, transformers cannot read the masks of models that are not causal."""
    case = CASES[name]
    masked = computer is HookGradientComputer or case.build in (gpt2, reward_model)
    batch = {key: part for key, part in case.batch.items() if masked or "attention_mask" not in key}
    model = seeded(case.build)
    named = dict(model.named_parameters())

    found: dict[str, Tensor] = {}
    terms = computer(model, case.task).stream_gradients(
        batch, lambda block: found.update({block.name: block.dense()})
    )

    for i in range(B):
        loss = case.loss(model, {key: column[i : i + 1] for key, column in batch.items()})
        plain = torch.autograd.grad(loss, named.values(), allow_unused=True, materialize_grads=True)
        for (key, parameter), grad in zip(named.items(), plain, strict=True):
            ours = found[key][i] if key in found else torch.zeros(parameter.numel()).double()
            torch.testing.assert_close(
                -terms.out_to_loss_grad[i] * ours, grad.flatten(), rtol=1e-8, atol=1e-10
            )


class Rows(torch.utils.data.Dataset):
    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: column[row] for name, column in self.columns.items()}


@pytest.mark.parametrize(
    ("name", "method"),
    [*((name, "auto") for name in CASES), ("dpo", "EKFAC"), ("policy_gradient", "EKFAC"), ("t5", "EKFAC")],
)
def test_rows_are_scored_from_end_to_end(name: str, method: str) -> None:
    """A row helps itself, and twice the same row has the same scores."""
    case = CASES[name]
    rows = Rows({key: torch.cat([column, column[:1]]) for key, column in case.batch.items()})
    attributor = Attributor(seeded(case.build), case.task, None, proj_dim=64, method=method, progress=False)

    attributor.featurize(rows)
    scores = attributor.score(rows).numpy()

    assert (scores.diagonal() > 0).all()
    assert scores[0] == pytest.approx(scores[3], rel=1e-2, abs=1e-3 * float(abs(scores).max()))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # from peft
def test_a_base_model_is_the_reference_of_its_adapter() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = seeded(gpt2)
    rows = preference_rows()
    expected = reference_columns(base, [rows])
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(base, config).double()

    changed = reference_columns(adapted, [rows])
    with adapted.disable_adapter():
        found = reference_columns(adapted, [rows])

    torch.testing.assert_close(found, expected)
    assert not torch.allclose(changed["ref_chosen_logps"], expected["ref_chosen_logps"])
    attributor = Attributor(
        adapted, DPOModelOutput(), None, proj_dim=16, method="GaussNewton", progress=False
    )
    attributor.featurize(Rows({**rows, **found}))
    assert all("lora" in name for name in attributor.parameters)


def test_a_layer_of_a_causal_model_is_asked_along_a_direction() -> None:
    """The last token that is not padding, of a block in the middle."""
    model, batch = seeded(gpt2), texts(13)
    direction = torch.randn(8, generator=torch.Generator().manual_seed(14)).double()
    named = dict(model.named_parameters())

    found: dict[str, Tensor] = {}
    task = ActivationModelOutput("transformer.h.0", direction, position="last")
    HookGradientComputer(model, task).stream_gradients(
        batch, lambda block: found.update({block.name: block.dense()})
    )

    for i in range(B):
        kept = batch["attention_mask"][i] == 1
        states = model(input_ids=batch["input_ids"][i : i + 1, kept], output_hidden_states=True).hidden_states
        plain = torch.autograd.grad(
            states[1][0, -1] @ direction, named.values(), allow_unused=True, materialize_grads=True
        )
        for (key, parameter), grad in zip(named.items(), plain, strict=True):
            ours = found[key][i] if key in found else torch.zeros(parameter.numel()).double()
            torch.testing.assert_close(ours, grad.flatten(), rtol=1e-8, atol=1e-10)


WORDS = [
    "<pad>",
    "<user>",
    "<assistant>",
    "<end>",
    "\n",
    "hi",
    "hello",
    "how",
    "are",
    "you",
    "fine",
    "thanks",
]
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
    sample = response_labels(tokenizer(template), TALK)

    said = "<user> hi <end> <assistant> hello <end> <user> how are you <end> <assistant> fine thanks <end>"
    assert [WORDS[i] for i in sample["input_ids"].tolist()] == said.split()
    kept = sample["labels"] != -100
    assert torch.equal(sample["labels"][kept], sample["input_ids"][kept])
    assert [WORDS[i] for i in sample["labels"][kept].tolist()] == labelled.split()
    model = gpt2().eval()
    attributor = Attributor(model, "causal_language_modeling", None, proj_dim=8, progress=False)
    assert attributor.featurize([sample, sample]).rows_written == 2


def test_conversations_that_cannot_be_labelled_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="no message of the assistant"):
        response_labels(tokenizer(PLAIN), TALK[:1])
    with pytest.raises(InvalidInputError, match="tokens of message 1 cannot be found"):
        response_labels(tokenizer(FORGETFUL), TALK)
