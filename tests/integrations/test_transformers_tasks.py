"""Tasks of positions on tiny models of transformers, against the losses that transformers computes, row by row."""

import hub_models as hub
import pytest
import torch
from hub_models import peft, transformers
from modelout_cases import check_gradients
from reference import samples_of
from torch import nn

from trak_lite import Attributor
from trak_lite import modelout_functions as tasks
from trak_lite.errors import InvalidInputError
from trak_lite.gradient_computers import FunctionalGradientComputer, HookGradientComputer

B, V, T, PAD = 3, hub.VOCABULARY, 7, hub.PAD
EAGER = {"attn_implementation": "eager"}
BERT = {**hub.SIZES, **EAGER}
GPT2 = {"vocab_size": V, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, "eos_token_id": 1}
T5 = {"vocab_size": V, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}
SEGFORMER = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [4, 8],
    "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
    "decoder_hidden_size": 8, "num_labels": 4, "semantic_loss_ignore_index": 255,
}  # fmt: skip


def model_of(kind, name, **settings):
    config = getattr(transformers, f"{kind}Config")(**settings)
    return hub.spread(lambda: getattr(transformers, f"{kind}{name}")(config))


def gpt2():
    return model_of("GPT2", "LMHeadModel", **GPT2, **EAGER)


def drawn(*shape, seed, low=3, high=V):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def texts(seed, length=T, prompt=2):
    """Ids padded on the right, mask, and labels without prompt and padding."""
    ids, mask = drawn(B, length, seed=seed), torch.ones(B, length, dtype=torch.long)
    mask[1, length - 2 :] = 0
    ids = ids.masked_fill(mask == 0, PAD)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :prompt] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def prefixed(side, columns):
    return {f"{side}_{name}": column for name, column in columns.items()}


def sft_loss(model, row):
    """Without padding; transformers computes the loss of this model in float32."""
    kept = row.get("attention_mask", torch.ones_like(row["input_ids"]))[0] == 1
    logits = model(input_ids=row["input_ids"][:, kept]).logits[0, :-1]
    return nn.functional.cross_entropy(logits, row["labels"][0, kept][1:], reduction="sum")


def summed_loss(model, row):
    """The loss of transformers is a mean over labelled positions."""
    ignored = getattr(model.config, "semantic_loss_ignore_index", -100)
    return model(**row).loss * (row["labels"] != ignored).sum()


def masked():
    batch = texts(3, prompt=0)
    return {**batch, "labels": batch["labels"].masked_fill(torch.arange(T) % 3 > 0, -100)}


def images():
    labels = drawn(B, 16, 16, seed=9, low=0, high=4)
    labels[1, :5] = 255
    pixels = torch.randn(B, 3, 16, 16, generator=torch.Generator().manual_seed(8)).double()
    return {"pixel_values": pixels, "labels": labels}


CAUSAL, MASKED = tasks.CausalLanguageModelingModelOutput(), tasks.MaskedLanguageModelingModelOutput()
SEQ2SEQ = tasks.SequenceToSequenceModelOutput()
TOKENS = tasks.DenseClassificationModelOutput(class_axis=-1)
PIXELS = tasks.DenseClassificationModelOutput(ignore_index=255, upsample=True)
CASES = {
    "sft": (CAUSAL, ("GPT2", "LMHeadModel", GPT2 | EAGER), texts(0)),
    "t5": (SEQ2SEQ, ("T5", "ForConditionalGeneration", T5 | EAGER | {"decoder_start_token_id": PAD}), texts(5)),
    "masked": (MASKED, ("Bert", "ForMaskedLM", BERT), masked()),
    "token classes": (TOKENS, ("Bert", "ForTokenClassification", {**BERT, "num_labels": V}), texts(7)),
    "segmentation": (PIXELS, ("Segformer", "ForSemanticSegmentation", SEGFORMER), images()),
}  # fmt: skip
EXACT = {"rtol": 1e-8, "atol": 1e-10}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of attention under vmap
@pytest.mark.parametrize("computer", [HookGradientComputer, FunctionalGradientComputer])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_loss_of_transformers(name, computer):
    """Under vmap, transformers cannot read the masks of models that are not causal."""
    task, (kind, cls, settings), batch = CASES[name]
    model = model_of(kind, cls, **settings)
    if computer is FunctionalGradientComputer and name != "sft":
        batch = {key: part for key, part in batch.items() if "attention_mask" not in key}
    loss = sft_loss if name == "sft" else summed_loss
    losses = [-loss(model, row) for row in samples_of(batch)]
    check_gradients(computer(model, task), batch, losses, **EXACT)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # from peft
def test_a_base_model_is_the_reference_of_its_adapter():
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


TURN = "{% for m in messages %}{{ 'w21 ' if m['role'] == 'assistant' else 'w20 ' }}"
PLAIN = TURN + "{{ m['content'] + ' w2 ' }}{% endfor %}{% if add_generation_prompt %}{{ 'w21 ' }}{% endif %}"
MARKED = (
    TURN + "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{{ ' w2 ' }}{% endfor %}"
)
FORGETFUL = PLAIN.replace("in messages", "in messages[-2:]")
TALK = [
    {"role": "user", "content": "w5"},
    {"role": "assistant", "content": "w6"},
    {"role": "user", "content": "w7 w8 w9"},
    {"role": "assistant", "content": "w10 w11"},
]


@pytest.mark.parametrize(
    ("template", "labelled"), [(PLAIN, [6, 2, 10, 11, 2]), (MARKED, [6, 10, 11])], ids=["plain", "marked"]
)
def test_only_the_tokens_of_the_assistant_are_labelled(template, labelled):
    sample = tasks.response_labels(hub.tokenizer(chat_template=template), TALK)
    assert sample["input_ids"].tolist() == [20, 5, 2, 21, 6, 2, 20, 7, 8, 9, 2, 21, 10, 11, 2]
    kept = sample["labels"] != -100
    assert torch.equal(sample["labels"][kept], sample["input_ids"][kept])
    assert sample["labels"][kept].tolist() == labelled
    attributor = Attributor(hub.gpt2(), "causal_language_modeling", None, proj_dim=8, progress=False)
    assert attributor.featurize([sample, sample]).rows_written == 2


def test_conversations_that_cannot_be_labelled_are_refused():
    with pytest.raises(InvalidInputError, match="no message of the assistant"):
        tasks.response_labels(hub.tokenizer(chat_template=PLAIN), TALK[:1])
    with pytest.raises(InvalidInputError, match="tokens of message 1 cannot be found"):
        tasks.response_labels(hub.tokenizer(chat_template=FORGETFUL), TALK)
