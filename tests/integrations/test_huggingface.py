"""Hugging Face: rows of a trainer against a plain loop, and training that does not notice it is watched."""

import copy
from contextlib import nullcontext
from functools import cache, partial, wraps

import hub_models as hub
import numpy as np
import pytest
import torch
from hub_models import EXACT, accelerate, peft, transformers
from late import Late
from tiny_runs import adam_scale
from torch import nn
from torch.utils.data import TensorDataset
from watching import Restless, random_states

from trak_lite import Attributor, Rows, TRAKer
from trak_lite.errors import (
    CheckpointError,
    InvalidInputError,
    ManifestMismatchError,
    ShortageError,
    UnsupportedModelError,
)
from trak_lite.gradient_computers import FunctionalGradientComputer, HookGradientComputer
from trak_lite.modelout_functions import resolve_task

huggingface = Late("trak_lite.integrations.huggingface")
safetensors = Late("safetensors.torch")
MODELS = {
    "bert": hub.bert,
    "gpt2": hub.gpt2,
    "llama": hub.llama,
    "lora-llama": hub.lora,
    "dora-bert": hub.lora_bert,
    "dora-llama": hub.dora,
    "ia3-llama": hub.ia3,
    "lora-mixtral": hub.lora_mixtral,  # of parameters that hold all experts
    "mixtral": partial(hub.mixtral, experts_implementation="eager"),  # saved in another form than it is held
}
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"  # peft asks transformers for it
)


def check_rows(path, model, rows, tolerance=1e-5, checkpoint=0):
    found = hub.stored_rows(path, checkpoint)
    assert hub.relative_error(found, hub.expected_rows(model, rows)) < tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_trainer_are_the_gradients_of_each_row_alone(name, dtype, tmp_path):
    """Padding, masked labels, columns that the model does not take and batches of the trainer's size change nothing."""
    model = hub.made(MODELS[name]).to(dtype)
    trainer = hub.trainer_of(model, tmp_path)
    attributor = huggingface.attributor_from_trainer(trainer, tmp_path / "a.zarr", **EXACT)
    attributor.featurize(trainer.train_dataset)
    exact = 1e-7 if dtype is torch.float64 else 1e-5
    check_rows(tmp_path / "a.zarr", model, trainer.train_dataset, exact)
    assert list(attributor.parameters) == [n for n, p in model.named_parameters() if p.requires_grad]
    batch = trainer.data_collator([*hub.texts(model).remove_columns("text")])
    task = resolve_task(huggingface.task_of(model))
    with pytest.raises(UnsupportedModelError, match=r"torch.func.vmap cannot transform .* Use Iterative"):
        FunctionalGradientComputer(model.eval(), task).compute_per_sample_grad(batch)


def test_traker_goes_on_after_a_pass_in_which_parameters_are_set_to_themselves(tmp_path):
    model, ids = hub.made(hub.lora_mixtral).double().eval(), torch.arange(3, 35).reshape(4, 8)

    def scores(size):
        settings = {
            "save_dir": tmp_path / str(size), "proj_dim": 16, "lambda_reg": 1.0,
            "gradient_computer": HookGradientComputer,
        }  # fmt: skip
        traker = TRAKer(model, "causal_language_modeling", train_set_size=4, **settings)
        traker.load_checkpoint(model.state_dict(), 0)
        for some in ids.split(size):
            traker.featurize({"input_ids": some, "labels": some}, num_samples=size)
        traker.finalize_features()
        traker.start_scoring_checkpoint("targets", model.state_dict(), 0, num_targets=4)
        traker.score({"input_ids": ids, "labels": ids}, num_samples=4)
        return traker.finalize_scores("targets")

    np.testing.assert_allclose(scores(2), scores(4), rtol=1e-4, atol=1e-4)  # rows in float16


@pytest.mark.parametrize("name", ["lora-llama", "dora-llama", "ia3-llama"])
def test_an_adapter_that_was_loaded_for_inference_is_attributed_like_the_trained_one(name, tmp_path):
    trained_one = hub.made(MODELS[name])
    with torch.no_grad():
        for p in trained_one.parameters():
            p.add_(0.1 * torch.randn_like(p) * p.requires_grad)
    trained_one.save_pretrained(tmp_path / "adapter")
    frozen = peft.PeftModel.from_pretrained(hub.made(hub.llama), tmp_path / "adapter")
    assert not any(p.requires_grad for p in frozen.parameters())
    rows = hub.texts(trained_one).remove_columns("text")
    collate = transformers.DataCollatorForSeq2Seq(hub.tokenizer())
    attributor = Attributor(frozen, "causal_language_modeling", tmp_path / "a.zarr", collate=collate, **EXACT)
    attributor.featurize(rows)
    assert list(attributor.parameters) == [n for n, p in trained_one.named_parameters() if p.requires_grad]
    check_rows(tmp_path / "a.zarr", trained_one, rows)
    assert not any(p.requires_grad for p in frozen.parameters())


TASKS = [
    (hub.bert, "text_classification"),
    (lambda: hub.bert(1), "regression"),
    (lambda: hub.bert(problem_type="multi_label_classification"), "multilabel_classification"),
    (hub.gpt2, "causal_language_modeling"),
    (hub.lora, "causal_language_modeling"),
    (hub.lora_bert, "text_classification"),
    (lambda: type("Own", (transformers.GPT2LMHeadModel,), {})(hub.gpt2().config), "causal_language_modeling"),
]


def test_the_task_is_that_of_the_models_class_and_others_need_one(tmp_path):
    assert [huggingface.task_of(build()) for build, _ in TASKS] == [task for _, task in TASKS]
    model = transformers.BertForNextSentencePrediction(hub.bert().config)
    rows = hub.texts(hub.bert())
    trainer = hub.trainer_of(
        model, tmp_path, rows=rows, collator=transformers.DataCollatorWithPadding(hub.tokenizer())
    )
    with pytest.raises(InvalidInputError, match="task of the class BertForNextSentencePrediction is unknown"):
        huggingface.attributor_from_trainer(trainer, None)

    def first_logit(call, batch):
        return call(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]

    attributor = huggingface.attributor_from_trainer(trainer, None, task=first_logit, proj_dim=8)
    assert attributor.featurize(rows).rows_written == len(rows)


def encoder_decoder(kind, **settings):
    names = (
        "vocab_size",
        "d_model",
        "encoder_layers",
        "decoder_layers",
        "encoder_attention_heads",
        "decoder_attention_heads",
    )
    sizes = dict(zip(names, (hub.VOCABULARY, 16, 1, 1, 2, 2), strict=True)) | {
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    return getattr(transformers, kind)(transformers.BartConfig(**sizes, **tokens, **settings))


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(
        vocab_size=hub.VOCABULARY, **sizes, decoder_start_token_id=0, pad_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def bert_for(kind):
    return getattr(transformers, f"BertFor{kind}")(hub.bert().config)


def vit():
    sizes = {name: hub.SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = transformers.ViTConfig(**sizes, intermediate_size=24, image_size=8, patch_size=4, num_labels=3)
    return transformers.ViTForImageClassification(config)


def answers(ids, number):
    return ids[::-1][: 3 + number % 2]


def some_masked(ids, number):
    return [token if place % 2 else -100 for place, token in enumerate(ids)]


def tags(ids, number):
    return [token % 3 for token in ids]


def its_ids(ids, number):
    return ids


def pixels(labels):
    drawn = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return [{"pixel_values": image, "labels": labels(number)} for number, image in enumerate(drawn)]


@pytest.mark.parametrize(
    ("build", "rows", "task"),
    [
        pytest.param(t5, answers, "sequence_to_sequence", id="t5"),
        pytest.param(
            lambda: encoder_decoder("BartForConditionalGeneration"),
            answers,
            "sequence_to_sequence",
            id="bart",
        ),
        pytest.param(
            lambda: encoder_decoder("BartForCausalLM"), its_ids, "causal_language_modeling", id="no-shift"
        ),
        pytest.param(lambda: bert_for("MaskedLM"), some_masked, "masked_language_modeling", id="masked"),
        pytest.param(lambda: bert_for("TokenClassification"), tags, "dense_classification", id="tokens"),
        pytest.param(
            lambda: hub.bert(2, problem_type="regression"),
            lambda ids, number: [number, 1.0],
            "regression",
            id="vector",
        ),
        pytest.param(
            vit, pixels(lambda number: torch.tensor(number % 3)), "text_classification", id="images"
        ),
    ],
)
def test_rows_have_the_gradient_of_the_loss_of_the_models_class(build, rows, task, tmp_path):
    """Up to a positive factor: the number of labels, by which transformers divides, and q."""
    model = hub.made(build).double()
    collator = transformers.default_data_collator
    if callable(rows):
        kind = "WithPadding" if task == "regression" else "ForTokenClassification"
        collator = getattr(transformers, f"DataCollator{kind}")(hub.tokenizer())
        rows = [
            {"input_ids": row["input_ids"], "labels": rows(row["input_ids"], number)}
            for number, row in enumerate(hub.texts(model))
        ]
    trainer = hub.trainer_of(model, tmp_path, rows=rows, collator=collator)
    settings = {**vars(model.config)}
    attributor = huggingface.attributor_from_trainer(trainer, tmp_path / "a.zarr", **EXACT)
    assert (attributor.task.name, vars(model.config)) == (task, settings)
    attributor.featurize(rows)
    model.eval()
    expected = [hub.gradients_of(-model(**collator([dict(row)])).loss, model) for row in rows]
    expected = np.stack([torch.cat(list(gradients.values())).numpy() for gradients in expected])
    found = hub.stored_rows(tmp_path / "a.zarr")
    found, expected = (all_of / np.linalg.norm(all_of, axis=1, keepdims=True) for all_of in (found, expected))
    assert hub.relative_error(found, expected) < 1e-6


def test_labels_are_not_shifted_for_a_model_that_predicts_nothing_yet(tmp_path):
    """In bfloat16, its losses with and without a shift of the labels are the same up to rounding."""
    model = hub.made(lambda: encoder_decoder("BartForCausalLM"))
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) / 50)
    trainer = hub.trainer_of(model.bfloat16(), tmp_path, collator=transformers.default_data_collator)
    trainer.train_dataset = [{"input_ids": ids, "labels": ids} for ids in torch.arange(3, 33).split(10)]
    assert not huggingface.attributor_from_trainer(trainer, None).task.shift


@pytest.mark.parametrize("build", [hub.gpt2, hub.bert])
def test_rows_without_labels_are_named(build, tmp_path):
    rows = [{"input_ids": row["input_ids"]} for row in hub.texts(hub.made(build))]
    collator = transformers.DataCollatorWithPadding(hub.tokenizer())
    trainer = hub.trainer_of(hub.made(build), tmp_path, rows=rows, collator=collator)
    with pytest.raises(InvalidInputError, match=r"exactly one of \['labels', 'label'\]"):
        huggingface.attributor_from_trainer(trainer, None)


def test_floats_are_several_labels_and_random_masks_are_named(tmp_path):
    rows = [{"input_ids": row["input_ids"], "labels": [1.0, 0.0, 1.0]} for row in hub.texts(hub.bert())]
    collator = transformers.DataCollatorWithPadding(hub.tokenizer())
    trainer = hub.trainer_of(hub.made(hub.bert), tmp_path, rows=rows, collator=collator)
    attributor = huggingface.attributor_from_trainer(trainer, None, proj_dim=8)
    assert (attributor.task.name, trainer.model.config.problem_type) == ("multilabel_classification", None)
    collator = transformers.DataCollatorForLanguageModeling(hub.tokenizer(mask_token="w1"))
    rows = [{"input_ids": row["input_ids"]} for row in rows]
    trainer = hub.trainer_of(bert_for("MaskedLM"), tmp_path, rows=rows, collator=collator)
    with pytest.raises(InvalidInputError, match=r"twice gave different batches.* mask once beforehand"):
        huggingface.attributor_from_trainer(trainer, None)


@pytest.mark.parametrize("build", [hub.gpt2, hub.bert])
def test_a_loss_that_a_models_class_adds_to_is_noticed(build, tmp_path):
    """A z-loss, or weights of the classes: of the third row only, whose class is the last."""
    model = hub.made(build)
    plain = model.forward

    @wraps(plain)
    def forward(*args, **kwargs):
        answer = plain(*args, **kwargs)
        if "labels" in kwargs:
            answer.loss = answer.loss * (1 + (kwargs["labels"].max() >= 2))
        return answer

    model.forward = forward
    trainer = hub.trainer_of(model, tmp_path)
    with pytest.raises(InvalidInputError, match=r"Row \d of .* has the loss .* of the task '(text|causal)_"):
        huggingface.attributor_from_trainer(trainer, None)
    huggingface.attributor_from_trainer(trainer, None, huggingface.task_of(model))


def left():
    return transformers.DataCollatorForSeq2Seq(hub.tokenizer("left"))


@pytest.mark.parametrize(("name", "settings"), [("gpt2", {"batch_size": 1}), ("llama", {})])
def test_left_padding_is_exact_where_it_changes_nothing(name, settings, tmp_path):
    """Alone in its batch a row is not padded, and rotary positions are relative."""
    model = hub.made(MODELS[name]).double()
    trainer = hub.trainer_of(model, tmp_path, collator=left())
    attributor = huggingface.attributor_from_trainer(trainer, tmp_path / "a.zarr", **EXACT, **settings)
    attributor.featurize(trainer.train_dataset)
    check_rows(tmp_path / "a.zarr", model, trainer.train_dataset, 1e-7)


def blinking():
    pad = transformers.DataCollatorForSeq2Seq(hub.tokenizer())

    def collate(features, return_tensors=None):
        batch = pad(features, return_tensors)
        batch["input_ids"] = torch.where(torch.rand(batch["input_ids"].shape) < 0.5, 1, batch["input_ids"])
        return batch

    return collate


@pytest.mark.parametrize(
    ("build", "collator", "attributes", "message"),
    [
        (hub.gpt2, left, {}, r"Row 5 .* in a batch with rows \[5, 4\].*padding_side = 'right'"),
        (hub.gpt2, blinking, {}, r"Loading and collating rows \[5, 4\] .* twice gave"),
        (hub.gpt2, lambda: None, {"is_fsdp_enabled": True}, "shards its model"),
        (hub.gpt2, lambda: None, {"is_deepspeed_enabled": True}, "shards its model"),
        (hub.gpt2, lambda: None, {"train_dataset": None}, "train dataset is a NoneType"),
    ],
)
def test_trainers_whose_rows_are_no_function_of_the_row_alone_are_refused(
    build, collator, attributes, message, tmp_path
):
    trainer = hub.trainer_of(hub.made(build), tmp_path, collator=collator())
    for name, value in attributes.items():
        setattr(trainer, name, value)
    with pytest.raises(InvalidInputError, match=message):
        huggingface.attributor_from_trainer(trainer, None)
    with pytest.raises(InvalidInputError, match=r"is a Linear\. Expected a transformers\.Trainer"):
        huggingface.attributor_from_trainer(nn.Linear(2, 2), None)


@pytest.mark.parametrize("where", ["label_smoothing_factor", "compute_loss_func", "compute_loss"])
def test_a_trainer_with_another_loss_than_its_models_needs_a_task(where, tmp_path):
    settings = {"label_smoothing_factor": 0.1} if where == "label_smoothing_factor" else {}
    trainer = hub.trainer_of(hub.made(hub.gpt2), tmp_path, **settings)
    if where != "label_smoothing_factor":
        setattr(trainer, where, lambda *args, **kwargs: torch.zeros((), requires_grad=True))
    with pytest.raises(InvalidInputError, match=f"has a {where} of its own"):
        huggingface.attributor_from_trainer(trainer, None, **EXACT)
    huggingface.attributor_from_trainer(trainer, None, "causal_language_modeling", **EXACT)


def test_the_mean_loss_of_a_model_is_a_task_where_a_batch_has_one_row(tmp_path):
    def loss(model_call, batch):
        return -model_call(**batch).loss.reshape(1)

    trainer = hub.trainer_of(hub.spread(hub.bert), tmp_path, per_device_train_batch_size=1)
    rows, path = trainer.train_dataset, tmp_path / "a.zarr"
    huggingface.attributor_from_trainer(trainer, path, loss, **EXACT).featurize(rows)
    losses = [
        -trainer.model(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["label"]])).loss
        for row in rows
    ]
    expected = [torch.cat(list(hub.gradients_of(one, trainer.model).values())) for one in losses]
    assert hub.relative_error(hub.stored_rows(path), torch.stack(expected).numpy()) < 1e-6


def test_batches_are_of_the_trainers_size_unless_told_otherwise(tmp_path):
    trainer = hub.trainer_of(hub.made(hub.gpt2), tmp_path)
    sizes = []
    padding = trainer.data_collator

    def counted(samples):
        sizes.extend([len(samples)] * (len(samples) > 1))  # some are collated again, to compare
        return padding(samples)

    trainer.data_collator = counted
    for settings, expected in (({}, {3}), ({"batch_size": 4}, {4, 2})):
        attributor = huggingface.attributor_from_trainer(trainer, None, **EXACT, **settings)
        sizes.clear()
        attributor.featurize(Rows(trainer.train_dataset, name="texts"))
        assert set(sizes) == expected


def trained(name, folder, *, watched=True, **settings):
    """Train for six steps with dropout and save twice."""
    model = hub.made(MODELS[name])
    rows = Restless(hub.texts(model).remove_columns("text"))
    trainer = hub.trainer_of(model, folder, rows=rows, max_steps=6, save_steps=3, **settings)
    attributor = None
    if watched:
        attributor = huggingface.attributor_from_trainer(trainer, folder / "a.zarr", **EXACT)
        trainer.add_callback(huggingface.FeaturizeCallback(attributor, rows))
    trainer.train()
    return trainer, attributor


def reloaded(name, folder):
    """Load a saved checkpoint as its own library does."""
    if name in ("gpt2", "mixtral"):
        return transformers.AutoModelForCausalLM.from_pretrained(folder)
    base = hub.bert if name == "dora-bert" else hub.llama
    return peft.PeftModel.from_pretrained(hub.made(base), folder, is_trainable=True)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """Return what trains a watched model once: its trainer, attributor and folder, and the random states after it."""

    @cache
    def of(name):
        folder = tmp_path_factory.mktemp(name)
        return (*trained(name, folder), folder, random_states())

    return of


def test_training_is_bitwise_the_same_with_and_without_the_callback(tmp_path, watched):
    trainer, _, _, states = watched("gpt2")
    alone, _ = trained("gpt2", tmp_path, watched=False)
    assert random_states() == states
    modes = [[module.training for module in one.model.modules()] for one in (trainer, alone)]
    assert modes[0] == modes[1]
    for name, value in alone.model.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], value), name


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "dora-bert"])
def test_every_saved_checkpoint_is_featurized_and_its_file_is_known_again(name, watched):
    """Rows are those of the saved weights; later calls, new targets and new sessions find the weights on the disk."""
    trainer, attributor, folder, _ = watched(name)
    rows = trainer.train_dataset
    again = attributor.featurize(rows, folder / "out")
    scores = np.asarray(attributor.score(rows, name="itself", method="GradDot"))
    assert again.checkpoints == ("checkpoint-3", "checkpoint-6")
    assert (again.rows_written, again.rows_found) == (0, 2 * len(hub.LENGTHS))
    for number, step in enumerate((3, 6)):
        model = reloaded(name, folder / "out" / f"checkpoint-{step}")
        check_rows(folder / "a.zarr", model, hub.texts(model), checkpoint=number)
    settings = {"collate": trainer.data_collator, "projector": "none", "progress": False}
    opened = Attributor.open(folder / "a.zarr", hub.made(MODELS[name]), **settings)
    found = np.asarray(opened.score(rows, name="second", method="GradDot"))
    np.testing.assert_allclose(found, scores, rtol=1e-6)  # in batches of another size


def vit(kind=None):
    sizes = {**hub.SIZES, "image_size": 8, "patch_size": 4}
    return (kind or transformers.ViTForImageClassification)(transformers.ViTConfig(**sizes))


def featurized(model, checkpoints):
    torch.manual_seed(0)
    attributor = Attributor(model, "image_classification", None, **EXACT)
    images = TensorDataset(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 0, 1]))
    return [attributor.featurize(images, one).rows_written for one in checkpoints]


@pytest.mark.parametrize("given", ["state dict", "bin", "compiled"])
def test_weights_in_the_form_of_a_file_are_converted_wherever_they_come_from(given, tmp_path):
    saved, model = hub.made(vit, 1), hub.made(vit, 2)
    saved.save_pretrained(tmp_path)
    source = safetensors.load_file(tmp_path / "model.safetensors")
    if given == "bin":  # beside settings that were logged
        source, state = tmp_path / "saved.bin", {**source, "logged.rates": {"a": torch.ones(2)}}
        torch.save(state, source)
    model = torch.compile(model) if given == "compiled" else model
    assert featurized(model, [source, saved.state_dict()]) == [4, 0]


def test_weights_that_transformers_would_draw_are_missing(tmp_path):
    kind = transformers.ViTForImageClassification
    kind = type("Lax", (kind,), {"_keys_to_ignore_on_load_missing": ["classifier"]})
    model = vit(kind)
    model.save_pretrained(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    del state["classifier.weight"]
    with pytest.raises(CheckpointError, match="does not fit Lax: missing"):
        featurized(model, [state])


def test_a_shortage_of_memory_in_a_conversion_is_none_of_the_checkpoint(tmp_path, monkeypatch):
    def failing(*args, **settings):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    model = vit()
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.ViTForImageClassification, "from_pretrained", failing)
    with pytest.raises(ShortageError, match="not enough memory"):
        featurized(model, [tmp_path])


def test_a_rank_that_comes_before_the_file_is_there_records_where_it_will_be(tmp_path, monkeypatch):
    trainer = hub.trainer_of(hub.made(hub.gpt2), tmp_path)
    attributor = huggingface.attributor_from_trainer(trainer, tmp_path / "a.zarr", **EXACT)
    folder = tmp_path / "out" / "checkpoint-3"

    def answered(rank, what, value):
        """What rank 0 answers when it has saved."""
        trainer.model.save_pretrained(folder)
        return value()

    monkeypatch.setattr("trak_lite.core.ranks.Ranks.broadcast", answered)
    rows = trainer.train_dataset.remove_columns("text")
    callback = huggingface.FeaturizeCallback(attributor, rows)
    callback.on_save(trainer.args, transformers.TrainerState(global_step=3), None)
    found = Attributor.open(tmp_path / "a.zarr", hub.made(hub.gpt2, seed=1), collate=trainer.data_collator)
    assert found.score(rows, name="itself", method="GradDot").shape == (len(hub.LENGTHS),) * 2


@pytest.mark.parametrize("order", ["before", "after"])
def test_rows_are_those_of_the_weights_where_training_ran_in_mixed_precision(order, tmp_path):
    """The trainer leaves its 16 bit forward in the model when training begins."""
    trainer, attributor = trained("gpt2", tmp_path, watched=order == "before", bf16=True)
    if attributor is None:
        attributor = huggingface.attributor_from_trainer(trainer, tmp_path / "a.zarr", **EXACT)
        attributor.featurize(trainer.train_dataset, tmp_path / "out" / "checkpoint-3")
    assert "_original_forward" in vars(trainer.model)
    model = reloaded("gpt2", tmp_path / "out" / "checkpoint-3")
    check_rows(tmp_path / "a.zarr", model, hub.texts(model))


def test_a_fused_forward_below_mixed_precision_is_kept(tmp_path):
    trainer = hub.trainer_of(hub.made(hub.gpt2), tmp_path)
    model, calls = trainer.model, []

    def fused(*args, **inputs):
        calls.append(inputs)
        return transformers.GPT2LMHeadModel.forward(model, *args, **inputs)

    vars(model)["_original_forward"] = fused
    failing = wraps(model.forward)(lambda **inputs: pytest.fail("the 16 bit forward ran"))
    prepared = accelerate.utils.convert_outputs_to_fp32(failing)
    model.forward = prepared
    attributor = huggingface.attributor_from_trainer(trainer, None, **EXACT)
    attributor.featurize(trainer.train_dataset)
    assert calls
    assert vars(model)["forward"] is prepared


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_model_that_accelerate_has_prepared_has_the_rows_of_its_weights(order, tmp_path):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    data = TensorDataset(torch.randn(24, 8), torch.randint(4, (24,)))
    expected = Attributor(plain, "image_classification", None, **EXACT)
    expected.featurize(data)
    model = copy.deepcopy(plain)
    early = Attributor(model, "image_classification", None, **EXACT)
    model = hub.trainer_of(hub.made(hub.gpt2), tmp_path, bf16=True).accelerator.prepare(model)
    prepared, scores = vars(model)["forward"], expected.score(data, name="itself").numpy()
    attributor = early if order == "before" else Attributor(model, "image_classification", None, **EXACT)
    attributor.featurize(data)
    np.testing.assert_array_equal(attributor.score(data, name="itself").numpy(), scores)
    captured = Attributor(model, "image_classification", tmp_path / "c.zarr", **EXACT)
    with captured.capture(data, "epoch") as capture:
        for rows in torch.arange(24).split(8):
            capture(data[rows], rows)
    assert vars(model)["forward"] is prepared
    assert model(data[:2][0]).dtype == torch.float32
    np.testing.assert_allclose(captured.score(data, "itself").numpy(), scores, atol=1e-6)  # of other batches


def test_the_callback_refuses_another_model_and_rows_without_an_order(tmp_path):
    trainer = hub.trainer_of(hub.made(hub.gpt2), tmp_path, max_steps=1)
    other = Attributor(hub.made(hub.gpt2, seed=1), "causal_language_modeling", None)
    with pytest.raises(InvalidInputError, match="the train data is an IterableDataset"):
        huggingface.FeaturizeCallback(other, trainer.train_dataset.to_iterable_dataset())
    trainer.add_callback(huggingface.FeaturizeCallback(other, trainer.train_dataset))
    with pytest.raises(InvalidInputError, match="parameters of the attributor's GPT2LMHeadModel"):
        trainer.train()


def test_a_resumed_training_may_save_a_step_again_and_a_new_one_may_not(tmp_path):
    """With more steps the learning rate falls more slowly, so that step 4 has other weights."""

    def trained_again(start, steps):
        trainer = hub.trainer_of(hub.made(hub.gpt2), tmp_path, max_steps=steps, save_steps=2)
        attributor = huggingface.attributor_from_trainer(trainer, tmp_path / "a.zarr", **EXACT)
        trainer.add_callback(huggingface.FeaturizeCallback(attributor, trainer.train_dataset))
        trainer.train(resume_from_checkpoint=start)
        return attributor

    trained_again(None, 4)
    said = r"other weights of .*checkpoint-4.* already \(ckpt-1, featurized as"
    with pytest.warns(UserWarning, match=said):
        attributor = trained_again(str(tmp_path / "out" / "checkpoint-2"), 6)
    rows = hub.texts(attributor.model)
    for number, step in ((0, 2), (2, 4), (3, 6)):
        saved = reloaded("gpt2", tmp_path / "out" / f"checkpoint-{step}")
        check_rows(tmp_path / "a.zarr", saved, rows, 1e-5, number)
    with pytest.raises(ManifestMismatchError, match=r"other weights of .*checkpoint-2"):
        trained_again(None, 6)


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("name", ["bert", "gpt2", "lora-llama"])
def test_rows_are_scaled_by_the_moments_in_the_folder_that_the_trainer_saved(name, watched, tmp_path):
    """``optimizer.pt`` has two groups of numbered parameters, with and without weight decay."""
    model = hub.made(MODELS[name])
    saving = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3, "weight_decay": 0.1}
    trainer = hub.trainer_of(model, tmp_path, **saving)
    settings = {**EXACT, "method": "GradDot", "normalize": "adam"}
    attributor = huggingface.attributor_from_trainer(trainer, tmp_path / "a.zarr", **settings)
    if watched:
        trainer.add_callback(huggingface.FeaturizeCallback(attributor, trainer.train_dataset))
    trainer.train()
    folder = tmp_path / "out" / "checkpoint-3"
    summary = attributor.featurize(trainer.train_dataset, folder)
    assert summary.rows_found == (len(trainer.train_dataset) if watched else 0)
    optimizer = trainer.optimizer.optimizer  # of accelerate's wrapper; its states have no names
    assert len(optimizer.param_groups) == 2
    scales = [adam_scale(optimizer.state[p]) for p in model.parameters() if p.requires_grad]
    expected = hub.expected_rows(model, trainer.train_dataset) * torch.cat(scales).numpy()
    assert hub.relative_error(hub.stored_rows(tmp_path / "a.zarr"), expected) < 1e-4
    (folder / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match=r"has no optimizer state.*checkpoint-3.optimizer\.pt"):
        attributor.featurize(trainer.train_dataset, folder)


@pytest.mark.parametrize("name", ["bert", "lora-llama"])
def test_rows_are_captured_in_the_training_of_a_trainer(name, tmp_path):
    """The method that the docs show; the trainer prefetches, shuffles and accumulates."""

    class Capturing(transformers.Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            rows = inputs.pop("row")
            for row in rows.tolist():
                expected[row] = hub.expected_rows(model, texts.select([row]))[0]
            model.train()
            self.capture(inputs, rows)
            return super().training_step(model, inputs, *args, **kwargs)

    expected, models = {}, [hub.made(MODELS[name]) for _ in range(2)]
    texts = hub.texts(models[0]).remove_columns("text")
    numbered = texts.add_column("row", list(range(len(texts))))
    settings = {"num_train_epochs": 1, "gradient_accumulation_steps": 2, "remove_unused_columns": False}
    for model in models:  # the second one is not captured
        trainer = hub.trainer_of(model, tmp_path, rows=numbered, save_strategy="no", **settings)
        trainer.__class__ = Capturing
        made = huggingface.attributor_from_trainer(trainer, tmp_path / "a.zarr", rows=texts, **EXACT)
        capture = made.capture(texts, "run") if model is models[0] else nullcontext(lambda *_: None)
        torch.manual_seed(0)
        with capture as trainer.capture:
            trainer.train()
            assert model is models[1] or trainer.capture.num_missing == 0
    found = hub.stored_rows(tmp_path / "a.zarr", 0)
    assert hub.relative_error(found, np.stack([expected[row] for row in range(len(texts))])) < 1e-5
    assert all(map(torch.equal, *(model.parameters() for model in models)))
