"""Tiny randomly initialised Hugging Face models, their rows, and what plain loops make of them. No network."""

import importlib.util
import os
from functools import partial

import numpy as np
import pytest
import torch
from late import Late
from modelout_cases import gradients_of
from watching import EXACT, stored_rows

__all__ = ["EXACT", "gradients_of", "stored_rows"]  # from here, too
os.environ["HF_HUB_OFFLINE"] = "1"  # read when the packages are imported
WHY = "the Hugging Face integration is tested where its packages are installed: pip install trak-lite[hf]"
for _needed in ("transformers", "tokenizers", "datasets", "peft", "accelerate"):
    if importlib.util.find_spec(_needed) is None:
        pytest.skip(WHY, allow_module_level=True)
transformers, peft, accelerate = Late("transformers"), Late("peft"), Late("accelerate")
tokenizers, datasets = Late("tokenizers"), Late("datasets")
VOCABULARY, PAD, IGNORED = 40, 0, -100
PRECISE, ROUNDED = {"rtol": 1e-9, "atol": 1e-11}, {"rtol": 1e-6, "atol": 1e-6}
"""Llama computes norms and rotary positions in float32 in models of any dtype."""
LENGTHS = (9, 4, 7, 4, 11, 3)
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 16,
}  # fmt: skip


def bert(num_labels=3, **settings):
    config = transformers.BertConfig(**SIZES, num_labels=num_labels, **settings)
    return transformers.BertForSequenceClassification(config)


def gpt2():
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, **sizes)
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=1))


def lora(base=llama, **settings):
    names = {"target_modules": ["q_proj", "v_proj"]} if base is llama else {}
    kind = "SEQ_CLS" if base is bert else "CAUSAL_LM"
    config = peft.LoraConfig(task_type=kind, r=2, init_lora_weights=False, **names, **settings)
    return peft.get_peft_model(base(), config)


lora_bert, dora = partial(lora, bert, use_dora=True), partial(lora, use_dora=True)


def ia3():
    names = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    return peft.get_peft_model(llama(), peft.IA3Config(task_type="CAUSAL_LM", **names))


def mixtral(**settings):
    experts = {"num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **experts, **settings))


def lora_mixtral():
    base = partial(mixtral, experts_implementation="eager")  # the others have no float64
    names = ["experts.gate_up_proj", "experts.down_proj"]
    return lora(base, target_modules=["q_proj"], target_parameters=names)


def made(build, seed=0):
    torch.manual_seed(seed)
    return build()


def spread(build, seed=0, by=0.1):
    """A model in float64 and eval mode that is far from uniform."""
    model = made(build, seed).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(by * torch.randn_like(p))
    return model


def is_classifier(model):
    return any(isinstance(module, transformers.BertForSequenceClassification) for module in model.modules())


def tokenizer(side="right", **settings):
    words = {"[PAD]": PAD, **{f"w{i}": i for i in range(1, VOCABULARY)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w1"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]", **settings)
    found.padding_side = side
    return found


def texts(model, num_labels=3):
    """Rows of several lengths; a language model's begin with a prompt of two tokens that is not predicted."""
    generator = np.random.default_rng(0)
    rows = []
    for number, length in enumerate(LENGTHS):
        ids = generator.integers(3, VOCABULARY, length).tolist()
        labels = number % num_labels if is_classifier(model) else [-100, -100, *ids[2:]]
        name = "label" if is_classifier(model) else "labels"
        rows.append({"text": f"row {number}", "input_ids": ids, "attention_mask": [1] * length, name: labels})
    return datasets.Dataset.from_list(rows)


def arguments(folder, config=None, **settings):
    quiet = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "learning_rate": 0.01,
    }
    given = {"output_dir": str(folder / "out"), "per_device_train_batch_size": 3, **quiet, **settings}
    return (config or transformers.TrainingArguments)(**given)


def trainer_of(model, folder, *, rows=None, collator=None, **settings):
    if collator is None:
        kind = "DataCollatorWithPadding" if is_classifier(model) else "DataCollatorForSeq2Seq"
        collator = getattr(transformers, kind)(tokenizer())
    rows = texts(model) if rows is None else rows
    given = {"train_dataset": rows, "data_collator": collator}
    return transformers.Trainer(model=model, args=arguments(folder, **settings), **given)


def output_of(model, row):
    """f of one row alone, without padding: the margin of its label, or the log p of its predicted tokens."""
    logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
    if "label" in row:
        logits, labels = logits[None], [row["label"]]
    else:
        logits, labels = logits[:-1], row["labels"][1:]
    total = logits.new_zeros(())
    for scores, label in zip(logits, labels, strict=True):
        if label != -100:
            others = torch.cat([scores[:label], scores[label + 1 :]]) if "label" in row else scores
            total = total + scores[label] - others.logsumexp(0)
    return total


def expected_rows(model, rows):
    """Gradients of f with respect to what is trained, row by row: ``(N, P)``."""
    model.eval()
    found = [torch.cat(list(gradients_of(output_of(model, row), model).values())) for row in rows]
    return torch.stack(found).double().numpy()


def relative_error(found, expected):
    """Largest error of a row, relative to that row's norm."""
    norms = np.linalg.norm(expected, axis=1)
    assert norms.min() > 0
    return float((np.linalg.norm(found - expected, axis=1) / norms).max())
