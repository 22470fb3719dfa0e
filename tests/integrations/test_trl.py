"""TRL: f, q and gradients of every row against the trainer's own loss, and against plain loops in float64."""

import copy
import itertools
import types
import warnings

import hub_models as hub
import numpy as np
import pytest
import torch
from hub_models import EXACT, IGNORED, PRECISE, ROUNDED, datasets, gradients_of, peft, spread, transformers
from torch import nn

from trak_lite import Documents
from trak_lite.errors import InvalidInputError
from trak_lite.gradient_computers import HookGradientComputer

WHY = "TRL's trainers are tested where it is installed: pip install trak-lite[trl]"
trl = pytest.importorskip("trl", reason=WHY)
from trak_lite.integrations import huggingface  # noqa: E402 - imports transformers, which takes seconds
from trak_lite.integrations import trl as helpers  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # TRL uses deprecated settings of transformers
    pytest.mark.filterwarnings("ignore::UserWarning:(trl|torch|accelerate|peft)"),
]
TRLS = {"rtol": 3e-4, "atol": 3e-6}
"""TRL computes log-probabilities in float32 from hidden states of any dtype."""
PAIRS = [
    {"prompt": "w5 w6", "chosen": " w7 w8 w9", "rejected": " w10"},
    {"prompt": "w5 w6 w10 w3", "chosen": " w7 w8", "rejected": " w12 w13 w14"},
    {"prompt": "w3", "chosen": " w4", "rejected": " w9 w9"},
]
TALK = [
    {"role": "user", "content": "w5 w6"},
    {"role": "assistant", "content": "w7 w8"},
    {"role": "user", "content": "w9"},
    {"role": "assistant", "content": "w10 w11 w12"},
]
TEMPLATE = (
    "{% for m in messages %}{{ 'w30 ' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + ' w2' }}"
    "{% endgeneration %}{{ ' ' }}{% else %}{{ m['content'] + ' w31 ' }}{% endif %}{% endfor %}"
)


def given_to(name, folder, rows, **settings):
    config = getattr(trl, f"{name}Config")
    args = hub.arguments(folder, config, **{"save_strategy": "no", "bf16": False, **settings})
    tokenizer = hub.tokenizer(eos_token="w2", chat_template=TEMPLATE)
    return {"args": args, "train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer}


def trainer_of(name, model, rows, folder, **settings):
    names = settings.keys() & {"ref_model", "reward_funcs", "peft_config"}
    more = {name: settings.pop(name) for name in names}
    return getattr(trl, f"{name}Trainer")(model=model, **given_to(name, folder, rows, **settings), **more)


def precise(model):
    return PRECISE if model.config.model_type == "gpt2" else ROUNDED


class Recording(HookGradientComputer):
    """Keeps the last batch, its gradients of f by parameter ``(B, P)``, and f, q and w, in the model's dtype."""

    def stream_gradients(self, batch, consume):
        found = {}

        def keep(block):
            found[block.name] = block.dense()
            consume(block)

        terms = super().stream_gradients(batch, keep)
        Recording.last = batch, found, terms
        return terms


def compare_with_loss(trainer, rows, loss_of, rtol=3e-4):
    """Hold minus q times the gradients of f against those of a loss of each row; return the batch, and f.

    TRL computes log-probabilities in float32; that tasks are exact is held where they are tested.
    """
    settings = {"gradient_computer": Recording, "batch_size": len(rows), **EXACT}
    attributor = huggingface.attributor_from_trainer(trainer, None, rows=rows, **settings)
    attributor.featurize(rows)
    batch, found, terms = Recording.last
    for model in (attributor.model, trainer.model):
        model.eval()
    for row, q in enumerate(terms.out_to_loss_grad):
        expected = gradients_of(loss_of(row), attributor.model)
        assert set(found) <= set(expected)
        ours = [-q * found[name][row] if name in found else 0 * g for name, g in expected.items()]
        theirs = torch.cat(list(expected.values()))
        atol = rtol * float(theirs.abs().max())
        torch.testing.assert_close(torch.cat(ours), theirs, rtol=rtol, atol=atol)
    return batch, terms.output


def log_probs_of(model, prompt, answer):
    """log p of each token of an answer, in a plain loop without padding."""
    logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0]
    start = len(prompt) - 1
    return torch.stack([logits[start + t].log_softmax(-1)[token] for t, token in enumerate(answer)])


# Supervised fine-tuning
PROMPTS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
WHOLE = [{"text": row["prompt"] + row["chosen"]} for row in PAIRS]
TALKS = [{"messages": TALK}, {"messages": TALK[:2]}, {"messages": TALK[2:]}]
SFT = {
    "completion": (PROMPTS, {}, [7, 8, 9, 2]),
    "prompt and completion": (PROMPTS, {"completion_only_loss": False}, [5, 6, 7, 8, 9, 2]),
    "text": (WHOLE, {}, [5, 6, 7, 8, 9, 2]),
    "assistant": (TALKS, {"assistant_only_loss": True}, [7, 8, 2, 10, 11, 12, 2]),
    "conversation": (TALKS, {}, [30, 5, 6, 31, 30, 7, 8, 2, 30, 9, 31, 30, 10, 11, 12, 2]),
}


@pytest.mark.parametrize(
    ("name", "build"),
    [
        *((name, build) for name in ("completion", "assistant") for build in (hub.llama, hub.lora, hub.gpt2)),
        ("completion", hub.dora),
        ("completion", hub.ia3),
        ("prompt and completion", hub.gpt2),
        ("text", hub.gpt2),
        ("conversation", hub.llama),
    ],
)
def test_sft_rows_are_the_trainers_loss_on_the_tokens_that_it_trains(name, build, tmp_path):
    rows, settings, labelled = SFT[name]
    trainer = trainer_of("SFT", spread(build), rows, tmp_path, **settings)
    kept = trainer.train_dataset
    counts = (trainer.data_collator([*kept])["labels"][:, 1:] != IGNORED).sum(1)

    def loss_of(row):
        """Of TRL: the mean over the tokens of a batch."""
        return trainer.compute_loss(trainer.model, trainer.data_collator([kept[row]])) * counts[row]

    compare_with_loss(trainer, kept, loss_of)
    batch, f = compare_with_loss(trainer, kept, lambda row: -hub.output_of(trainer.model, kept[row]), 1e-9)
    assert batch["labels"][0][batch["labels"][0] != IGNORED].tolist() == labelled
    plain = torch.stack([hub.output_of(trainer.model, row) for row in kept])
    torch.testing.assert_close(f, plain, **precise(trainer.model))
    whole = trainer.compute_loss(trainer.model, dict(batch))
    torch.testing.assert_close(-f.sum() / counts.sum(), whole.double(), **TRLS, check_dtype=False)


class KeepRow:
    """A collator that keeps the column ``row``, as the docs show it."""

    def __init__(self, collator):
        self.collator = collator

    def __call__(self, samples):
        rows = [sample.pop("row") for sample in samples if "row" in sample]
        batch = self.collator(samples)
        return {**batch, "row": torch.tensor(rows)} if rows else batch


class Capturing(trl.SFTTrainer):
    def training_step(self, model, inputs, *args, **kwargs):
        rows = inputs.pop("row")
        self.capture(inputs, rows)
        return super().training_step(model, inputs, *args, **kwargs)


@pytest.mark.parametrize("build", [hub.lora, hub.gpt2])
def test_sft_rows_are_captured_in_the_training(build, tmp_path):
    expected = {}

    def trained():
        torch.manual_seed(0)
        settings = {"num_train_epochs": 1, "remove_unused_columns": False, "per_device_train_batch_size": 2}
        trainer = trainer_of("SFT", hub.made(build), PROMPTS, tmp_path, **settings)
        texts = trainer.train_dataset
        trainer.train_dataset = texts.add_column("row", list(range(len(texts))))
        trainer.data_collator, trainer.__class__ = KeepRow(trainer.data_collator), Capturing
        return trainer, texts

    trainer, texts = trained()
    attributor = huggingface.attributor_from_trainer(trainer, tmp_path / "a.zarr", rows=texts, **EXACT)
    with attributor.capture(texts, "run") as capture:

        def compared(inputs, rows):
            for row in rows.tolist():
                expected[row] = hub.expected_rows(trainer.model, texts.select([row]))[0]
            trainer.model.train()
            capture(inputs, rows)

        trainer.capture = compared
        trainer.train()
    plain, _ = trained()
    plain.capture = lambda *_: None
    plain.train()

    assert all(map(torch.equal, trainer.model.parameters(), plain.model.parameters()))
    rows = np.stack([expected[row] for row in range(len(texts))])
    assert hub.relative_error(hub.stored_rows(tmp_path / "a.zarr", 0), rows) < 1e-5


@pytest.mark.parametrize("build", [hub.llama, hub.lora, hub.gpt2])
@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", None])
def test_texts_of_packed_rows_and_of_padding_free_batches_are_rows(build, strategy, tmp_path):
    """Each has the gradient of the text alone, and all texts of a packed row together that of the trainer's loss."""
    settings = {"max_length": None, "padding_free": True}
    if strategy is not None:
        settings = {
            "max_length": 8 if strategy == "bfd" else 5, "packing": True, "packing_strategy": strategy,
        }  # fmt: skip
    trainer = trainer_of("SFT", spread(build), PROMPTS, tmp_path, **settings)
    packed = trainer.train_dataset
    documents = Documents(packed) if strategy else packed
    ids = [documents[i]["input_ids"] for i in range(len(documents))]
    if strategy == "bfd":
        assert sorted(ids) == sorted([[5, 6, 7, 8, 9, 2], [5, 6, 10, 3, 7, 8, 2], [3, 4, 2]])
    elif strategy == "bfd_split":  # the rest of a text that is longer than a packed row is a text of its own
        assert sorted(ids) == sorted([[5, 6, 7, 8, 9], [5, 6, 10, 3, 7], [8, 2], [3, 4, 2]])

    model = trainer.model
    _, f = compare_with_loss(trainer, documents, lambda row: -hub.output_of(model, documents[row]), 1e-9)

    for row in range(len(packed) if strategy else 1):
        inputs = trainer.data_collator([packed[row]] if strategy else [*packed])
        count = (inputs["labels"][:, 1:] != IGNORED).sum()
        within = documents.row == row if strategy else slice(None)
        if count == 0:  # the end token of a text that was cut, alone in its row
            assert f[within].numel() == 0
            continue
        loss = trainer.compute_loss(trainer.model, inputs)
        torch.testing.assert_close(-f[within].sum() / count, loss.double(), **TRLS, check_dtype=False)


def test_packed_rows_and_models_that_mix_texts_are_refused(tmp_path):
    class Mixing(transformers.GPT2LMHeadModel):
        def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
            return super().forward(input_ids, attention_mask=attention_mask, labels=labels)

    packing = {"packing": True, "max_length": 12}
    trainer = trainer_of("SFT", spread(hub.gpt2), PROMPTS, tmp_path, **packing)
    with pytest.raises(InvalidInputError, match=r"The rows are packed.*rows=documents"):
        huggingface.attributor_from_trainer(trainer, None)
    attributor = huggingface.attributor_from_trainer(trainer, None, rows=Documents(trainer.train_dataset))
    with pytest.raises(InvalidInputError, match="The rows are packed"):
        attributor.featurize(trainer.train_dataset)

    model = Mixing(spread(hub.gpt2).config).double()
    for settings in (packing, {"padding_free": True, "max_length": None}):
        trainer = trainer_of("SFT", model, PROMPTS, tmp_path, **settings)
        documents = Documents(trainer.train_dataset) if "packing" in settings else None
        with pytest.raises(InvalidInputError, match="Document 1 of packed row 0 has other logits"):
            huggingface.attributor_from_trainer(trainer, None, rows=documents)

    trainer.data_collator = transformers.DataCollatorWithFlattening()
    said = "joins all texts of a batch to one row with its DataCollatorWith"
    with pytest.raises(InvalidInputError, match=said):
        huggingface.attributor_from_trainer(trainer, None)


def test_every_checkpoint_of_an_sft_trainer_is_featurized(tmp_path):
    """TRL changes forward of the model, trains in 16 bit and checkpoints gradients; rows are those of saved weights."""
    model = hub.made(hub.lora)
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "bf16": True}
    trainer = trainer_of("SFT", model, PROMPTS, tmp_path, **saving)
    assert trainer.args.gradient_checkpointing
    attributor = huggingface.attributor_from_trainer(trainer, tmp_path / "a.zarr", **EXACT)
    trainer.add_callback(huggingface.FeaturizeCallback(attributor, trainer.train_dataset))
    trainer.train()
    for number, step in enumerate((2, 4)):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        saved = peft.PeftModel.from_pretrained(hub.made(hub.llama), folder, is_trainable=True)
        expected = hub.expected_rows(saved, trainer.train_dataset)
        assert hub.relative_error(hub.stored_rows(tmp_path / "a.zarr", number), expected) < 1e-5


# Preferences
def reference_of(model, rows):
    with torch.no_grad():
        return {
            f"ref_{side}_logps": torch.stack(
                [log_probs_of(model, row["prompt_ids"], row[f"{side}_ids"]).sum() for row in rows]
            )
            for side in ("chosen", "rejected")
        }


@pytest.mark.parametrize("precomputed", [True, False])
@pytest.mark.parametrize("build", [hub.gpt2, hub.llama, hub.lora])
def test_dpo_rows_are_the_trainers_loss_with_its_reference(build, precomputed, tmp_path):
    settings = {"beta": 0.3, "precompute_ref_log_probs": precomputed}
    if build is hub.lora:  # the reference is the model without the new adapter
        other = None
        adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False)
        trainer = trainer_of("DPO", spread(hub.llama), PAIRS, tmp_path, peft_config=adapter, **settings)
    else:
        other = spread(build, seed=1)
        trainer = trainer_of("DPO", spread(build), PAIRS, tmp_path, ref_model=other, **settings)
    model = trainer.model
    flags = [p.requires_grad for p in model.parameters()]
    rows = helpers.preference_rows(trainer)
    assert [p.requires_grad for p in model.parameters()] == flags

    if other is None:
        with model.disable_adapter():
            reference = reference_of(model, rows)
    else:
        reference = reference_of(other, rows)
    for name, column in reference.items():
        found = torch.tensor(rows[name][:], dtype=torch.float64)
        torch.testing.assert_close(found, column, **(TRLS if precomputed else precise(model)))

    collator, compute = trainer.data_collator, trainer.compute_loss
    _, f = compare_with_loss(trainer, rows, lambda row: compute(model, collator([rows[row]])))
    whole = trainer.compute_loss(trainer.model, trainer.data_collator(list(rows)))
    ours = -nn.functional.logsigmoid(0.3 * f).mean()
    torch.testing.assert_close(ours, whole.double(), **TRLS, check_dtype=False)


@pytest.mark.parametrize(
    ("build", "precomputed"),
    [*itertools.product([hub.llama, hub.lora, "prompt tuning"], [True, False]), ("environment", True)],
)
def test_f_of_a_policy_that_is_its_reference_is_0_in_mixed_precision(
    build, precomputed, tmp_path, monkeypatch
):
    """Accelerate puts bfloat16 into the forward method of the trainer's models; TRL's default is bf16=True."""
    if build == "environment":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    model = spread(hub.llama, by=0.5).float()
    if build in (hub.llama, "environment"):
        more = {"ref_model": copy.deepcopy(model)}
    elif build is hub.lora:
        more = {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM", r=2)}  # its product is 0 at first
    else:
        more = {"peft_config": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)}
    plain = copy.deepcopy(model)
    settings = {"max_steps": 1, "learning_rate": 0.0, "precompute_ref_log_probs": precomputed}
    settings["bf16"] = build != "environment"
    trainer = trainer_of("DPO", model, PAIRS, tmp_path, **settings, **more)
    for _ in range(2):
        rows = helpers.preference_rows(trainer)
        for name, column in reference_of(plain, rows).items():
            torch.testing.assert_close(torch.tensor(rows[name][:]), column, rtol=1e-5, atol=1e-4)
        if build == "prompt tuning":  # whose logits the task refuses
            continue
        recording = {"gradient_computer": Recording, "batch_size": len(rows), **EXACT}
        huggingface.attributor_from_trainer(trainer, None, rows=rows, **recording).featurize(rows)
        _, _, terms = Recording.last
        torch.testing.assert_close(terms.output, torch.zeros(len(rows)), rtol=0, atol=1e-4)
        trainer.train()
    if precomputed and build != "prompt tuning":
        with pytest.warns(UserWarning, match=r"in half precision.*rows = preference_rows\(trainer\)"):
            huggingface.attributor_from_trainer(trainer, None, **EXACT)


@pytest.mark.filterwarnings("ignore:Careful, disabling adapter layers with bias")
@pytest.mark.parametrize("build", ["policy", "biases"])
def test_the_trainers_columns_are_used_once_training_has_changed_the_reference(build, tmp_path):
    """PEFT without its adapter keeps the biases that were trained with it."""
    model = spread(hub.gpt2, by=0.5).float()
    plain, more = copy.deepcopy(model), {}
    if build == "biases":
        more = {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM", r=2, bias="all")}
    settings = {"bf16": True, "max_steps": 1, "learning_rate": 0.5, "precompute_ref_log_probs": True}
    trainer = trainer_of("DPO", model, PAIRS, tmp_path, **settings, **more)
    rows = helpers.preference_rows(trainer)
    for name, column in reference_of(plain, rows).items():
        torch.testing.assert_close(torch.tensor(rows[name][:]), column, rtol=1e-5, atol=1e-4)
    if build == "policy":  # which may have been trained in another process
        with pytest.raises(InvalidInputError, match="no reference model"):
            helpers.preference_rows(trainer, trainer.train_dataset.remove_columns(list(helpers.REFERENCES)))
    trainer.train()
    with pytest.warns(UserWarning, match="in half precision.*cannot be computed again"):
        after = helpers.preference_rows(trainer)
    for name in helpers.REFERENCES:
        assert after[name][:] == trainer.train_dataset[name][:] != rows[name][:]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The trainer computed")
        huggingface.attributor_from_trainer(trainer, None, rows=after, **EXACT).featurize(after)
        if build == "policy":  # preference_rows has no other columns, so there is no advice to call it
            huggingface.attributor_from_trainer(trainer, None, **EXACT)


def test_a_dpo_trainer_is_scored_from_end_to_end_and_its_targets_have_references_too(tmp_path):
    trainer = trainer_of("DPO", spread(hub.lora), PAIRS, tmp_path, max_steps=2)
    with pytest.raises(InvalidInputError, match=r"lack the reference.*rows = preference_rows\(trainer\)"):
        huggingface.attributor_from_trainer(trainer, None)
    rows = helpers.preference_rows(trainer)
    trainer.train()
    attributor = huggingface.attributor_from_trainer(trainer, None, rows=rows, proj_dim=32, progress=False)
    attributor.featurize(rows)
    targets = helpers.preference_rows(trainer, trainer.train_dataset.select([1, 2]))
    assert attributor.method.name == "GaussNewton"
    assert attributor.score(targets).shape == (3, 2)
    assert all("lora" in name for name in attributor.parameters)


def test_the_reference_of_a_retrained_adapter_is_its_copy(tmp_path):
    """TRL keeps the first weights of an adapter that is trained further as the adapter "ref"."""
    model = spread(hub.lora)
    trainer = trainer_of("DPO", model, PAIRS, tmp_path)
    assert "ref" in model.peft_config
    rows = helpers.preference_rows(trainer)
    expected = reference_of(model, rows)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".default." in name:
                p.mul_(1.5)
    again = helpers.preference_rows(trainer)
    assert model.active_adapter == "default"
    for name, column in expected.items():
        found = torch.tensor(again[name][:], dtype=torch.float64)
        torch.testing.assert_close(found, column, **precise(model))


def test_reward_rows_are_the_trainers_loss(tmp_path):
    def scorer():
        config = hub.llama().config
        config.num_labels, config.pad_token_id = 1, hub.PAD
        return transformers.LlamaForSequenceClassification(config)

    rows = [{"chosen": p["prompt"] + p["chosen"], "rejected": p["prompt"] + p["rejected"]} for p in PAIRS]
    model = spread(scorer)
    trainer = trainer_of("Reward", model, [{**row, "margin": 0.5} for row in rows], tmp_path)
    kept = list(trainer.train_dataset)

    def loss_of(row):
        sides = (torch.tensor([kept[row][f"{side}_ids"]]) for side in ("chosen", "rejected"))
        scores = [model(input_ids=ids).logits[0, 0] for ids in sides]
        margin = 0.5 if "margin" in kept[row] else 0.0
        return -nn.functional.logsigmoid(scores[0] - scores[1] - margin)

    compare_with_loss(trainer, trainer.train_dataset, loss_of, 1e-6)
    whole = trainer.compute_loss(model, trainer.data_collator(kept))
    losses = torch.stack([loss_of(row) for row in range(3)])
    torch.testing.assert_close(losses.mean(), whole, **TRLS, check_dtype=False)


# Policy gradients
QUESTIONS = [{"prompt": text} for text in ("w5 w6", "w5 w6 w10", "w3", "w9 w3")]
GRPO = {
    "dapo": {},
    "grpo": {"loss_type": "grpo"},
    "old policy": {"loss_type": "grpo", "num_iterations": 2, "epsilon_high": 0.3},
    "old policy, dapo": {"num_iterations": 2},
    "divergence": {"beta": 0.2, "num_iterations": 2, "loss_type": "grpo"},
    "divergence, on policy": {"beta": 0.2},
    "divergence, plain": {"beta": 0.2, "num_iterations": 2, "use_bias_correction_kl": False},
    "temperature": {"temperature": 0.7, "num_iterations": 2, "loss_type": "bnpo"},
    "constant": {"loss_type": "dr_grpo", "num_iterations": 2},
}


def rewarded(completions, **columns):
    return [float(sum(map(ord, text)) % 7) for text in completions]


def policy_trainer(build, folder, **settings):
    given = {
        "per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 5, "max_steps": 2,
    }  # fmt: skip
    model = spread(build)
    return trainer_of("GRPO", model, QUESTIONS, folder, reward_funcs=rewarded, **{**given, **settings})


def cut(inputs, row):
    return {name: value[row : row + 1] if value.dim() else value for name, value in inputs.items()}


def tokens_of(inputs, trainer, rows):
    """What TRL divides the sum over a row's tokens by, times the rows of the batch."""
    if trainer.args.loss_type == "grpo":
        return torch.tensor(1.0)
    if trainer.args.loss_type == "dr_grpo":
        return torch.tensor(float(rows * trainer.args.max_completion_length))
    if trainer.args.loss_type == "bnpo":
        return inputs["completion_mask"].sum()
    return inputs["num_items_in_batch"]


@pytest.mark.parametrize(
    ("name", "build"),
    [
        *((name, build) for name in ("dapo", "old policy") for build in (hub.llama, hub.gpt2, hub.lora)),
        *((name, hub.lora) for name in GRPO if "divergence" in name),
        *((name, hub.gpt2) for name in ("grpo", "old policy, dapo", "temperature", "constant")),
    ],
)
def test_grpo_rows_are_the_trainers_loss_on_recorded_answers(name, build, tmp_path):
    trainer = policy_trainer(build, tmp_path, **GRPO[name])
    batches = []
    compute = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, **more: (
        batches.append(dict(inputs)) or compute(model, inputs, **more)
    )
    with helpers.recorded_rollouts(trainer) as rows:
        trainer.train()
    del trainer.compute_loss
    assert len(rows) == sum(len(inputs["prompt_ids"]) for inputs in batches)
    inputs = max(batches, key=lambda one: float(one["advantages"].abs().sum()))
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(0.05 * torch.randn_like(p) * p.requires_grad)  # so that ratios are not 1
    rows = helpers.rollout_rows(inputs)
    assert bool((inputs["prompt_mask"] == 0).any())
    assert len(rows) == 4

    def loss_of(row):
        alone = cut(inputs, row)
        return compute(trainer.model, alone) * tokens_of(alone, trainer, 1)

    batch, f = compare_with_loss(trainer, rows, loss_of)
    if (
        "old_logps" in batch
    ):  # without, the loss has the right gradient, and the value of minus the advantages
        whole = compute(trainer.model, dict(inputs)) * tokens_of(inputs, trainer, 4)
        ours = -(f.mean() if trainer.args.loss_type == "grpo" else f.sum())
        torch.testing.assert_close(ours, whole.double(), **TRLS, check_dtype=False)


def test_recording_changes_nothing_and_rows_are_scored_from_end_to_end(tmp_path):
    weights = []
    for name in ("alone", "recorded"):
        trainer = policy_trainer(hub.lora, tmp_path / name)
        own = trainer.compute_loss
        if name == "alone":
            trainer.train()
        else:
            with helpers.recorded_rollouts(trainer) as rows:
                trainer.train()
        assert trainer.compute_loss == own
        weights.append([p.tolist() for p in trainer.model.parameters()])
    assert weights[0] == weights[1]
    attributor = huggingface.attributor_from_trainer(trainer, None, rows=rows, proj_dim=32, progress=False)
    attributor.featurize(rows)
    assert len(rows) == 8
    assert attributor.score(rows[:2]).shape == (8, 2)


def test_masks_and_ratios_of_rollouts_are_kept():
    inputs = {
        "prompt_ids": torch.tensor([[0, 5], [6, 7], [8, 9]]),
        "prompt_mask": torch.tensor([[0, 1], [1, 1], [1, 1]]),
        "completion_ids": torch.tensor([[10, 11, 12], [13, 2, 0], [14, 15, 16]]),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
        "tool_mask": torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 1]]),
        "advantages": torch.tensor([2.0, -1.0, 1.0]),
        "importance_sampling_ratio": torch.tensor([[1.0, 0.5, 2.0], [3.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),
        "old_per_token_logps": -torch.arange(9.0).reshape(3, 3),
    }
    first, second = helpers.rollout_rows(inputs)  # the third has no token in the loss
    assert first["input_ids"].tolist() == [0, 5, 10, 11, 12]
    assert first["attention_mask"].tolist() == [0, 1, 1, 1, 1]
    assert first["labels"].tolist() == [IGNORED, IGNORED, 10, IGNORED, 12]
    assert first["advantages"].tolist() == [0, 0, 2, 1, 4]
    assert first["old_logps"].tolist() == [0, 0, 0, -1, -2]
    assert second["input_ids"].tolist() == [6, 7, 13, 2]
    assert second["advantages"].tolist() == [0, 0, -3, -1]
    with pytest.raises(InvalidInputError, match=r"missing: \['completion_mask'\]"):
        helpers.rollout_rows({name: value for name, value in inputs.items() if name != "completion_mask"})


# Refusals
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("SFT", {"loss_type": "dft"}, r"SFTTrainer has \{'loss_type': 'dft'\}"),
        ("SFT", {"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ("DPO", {"loss_type": ["hinge"]}, "'hinge'"),
        ("DPO", {"ld_alpha": 0.5}, "ld_alpha"),
        ("DPO", {"f_divergence_type": "js_divergence"}, "f_divergence_type"),
        ("GRPO", {"loss_type": "cispo"}, "'cispo'"),
        ("GRPO", {"importance_sampling_level": "sequence"}, "importance_sampling_level"),
        ("GRPO", {}, "prompts only, without answers"),
    ],
)
def test_losses_that_are_no_task_are_refused(name, settings, message, tmp_path):
    if name == "GRPO":
        trainer = policy_trainer(hub.llama, tmp_path, **settings)
    else:
        rows = PROMPTS if name == "SFT" else PAIRS
        trainer = trainer_of(name, spread(hub.lora), rows, tmp_path, **settings)
    with pytest.raises(InvalidInputError, match=message):
        huggingface.attributor_from_trainer(trainer, None)


@pytest.mark.parametrize("method", ["compute_loss", "_compute_loss"])
@pytest.mark.parametrize("place", ["subclass", "class", "trainer"])
def test_a_trainer_with_a_loss_of_the_users_needs_a_task(place, method, tmp_path, monkeypatch):
    original = getattr(trl.DPOTrainer, method)

    def doubled(self, *args, **kwargs):
        return 2 * original(self, *args, **kwargs)

    class Own(trl.DPOTrainer):
        pass

    models = {"model": spread(hub.llama), "ref_model": spread(hub.llama, seed=1)}
    trainer = Own(**models, **given_to("DPO", tmp_path, PAIRS))
    held = {"subclass": Own, "class": trl.DPOTrainer, "trainer": trainer}[place]
    monkeypatch.setattr(held, method, types.MethodType(doubled, trainer) if place == "trainer" else doubled)
    rows = helpers.preference_rows(trainer)
    with pytest.raises(InvalidInputError, match=rf"DPOTrainer has \{{'{method}': 'one of {__name__}'\}}"):
        huggingface.attributor_from_trainer(trainer, None, rows=rows)
    assert huggingface.attributor_from_trainer(trainer, None, "dpo", rows=rows).task.name == "dpo"


def test_helpers_refuse_other_trainers_and_moving_references(tmp_path):
    trainer = trainer_of("SFT", spread(hub.llama), PROMPTS, tmp_path)
    with pytest.raises(InvalidInputError, match=r"SFTTrainer\. Expected a trl\.DPOTrainer"):
        helpers.preference_rows(trainer)
    with (
        pytest.raises(InvalidInputError, match=r"Expected a trl\.GRPOTrainer"),
        helpers.recorded_rollouts(trainer),
    ):
        pass
    models = spread(hub.llama), spread(hub.llama)
    dpo = trainer_of("DPO", models[0], PAIRS, tmp_path, ref_model=models[1], sync_ref_model=True)
    with pytest.raises(InvalidInputError, match="sync_ref_model=True"):
        helpers.preference_rows(dpo)


def test_an_unknown_trainer_of_trl_needs_a_task_and_a_subclass_of_ones_own_does_not(tmp_path):
    class Own(trl.SFTTrainer):
        pass

    trainer = Own(model=spread(hub.llama), **given_to("SFT", tmp_path, PROMPTS))
    assert huggingface.attributor_from_trainer(trainer, None).task.name == "causal_language_modeling"

    Own.__module__ = "trl.experimental.own"
    with pytest.raises(InvalidInputError, match=r"task of trl\.Own is unknown"):
        huggingface.attributor_from_trainer(trainer, None)
    assert huggingface.attributor_from_trainer(trainer, None, "causal_language_modeling").task.name


def test_the_load_balancing_loss_of_experts_is_left_out_with_a_warning(tmp_path):
    model = spread(hub.mixtral)
    model.set_experts_implementation("eager")  # the grouped product takes no float64
    trainer = trainer_of("SFT", model, PROMPTS, tmp_path)
    rows = trainer.train_dataset
    with pytest.warns(UserWarning, match=r"includes 0\.001 times the load-balancing loss"):
        huggingface.attributor_from_trainer(trainer, None, **EXACT)
    with warnings.catch_warnings(action="ignore"):
        compare_with_loss(trainer, rows, lambda row: -hub.output_of(model, rows[row]), 1e-9)
