"""Hugging Face: rows of a trainer against a plain loop, and training that does not notice it is watched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import hub_models as hub
import numpy as np
import pytest
import torch
from hub_models import peft, transformers
from torch import Tensor, nn
from watching import Restless, random_states

from trak_lite import Attributor, Rows
from trak_lite.errors import CheckpointError, InvalidInputError, UnsupportedModelError
from trak_lite.gradient_computers import FunctionalGradientComputer, choose_gradient_computer
from trak_lite.integrations.huggingface import FeaturizeCallback, attributor_from_trainer, task_of
from trak_lite.methods import TRAK
from trak_lite.modelout_functions import resolve_task
from trak_lite.models.borrowing import borrow_model

MODELS = {
    "bert": hub.bert,
    "gpt2": hub.gpt2,
    "llama": hub.llama,
    "lora-llama": hub.lora,
    "dora-bert": hub.lora_bert,
    "dora-llama": hub.dora,
    "ia3-llama": hub.ia3,
}
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"  # peft asks transformers for it
)
EXACT: dict[str, Any] = {
    "projector": "none",
    "method": TRAK(damping=None, layout="stored"),
    "dtype": "float32",
    "progress": False,
}


@pytest.fixture(params=MODELS, name="build")
def builds(request: pytest.FixtureRequest) -> Callable[[], nn.Module]:
    return MODELS[request.param]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_of_a_trainer_are_the_gradients_of_each_row_alone(
    build: Callable[[], nn.Module], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Padding, masked labels, columns that the model does not take and batches of the trainer's size change nothing."""
    model = hub.made(build).to(dtype)
    trainer = hub.trainer_of(model, tmp_path)

    attributor = attributor_from_trainer(trainer, tmp_path / "a.zarr", **EXACT)
    attributor.featurize(trainer.train_dataset)

    error = hub.relative_error(
        hub.stored_rows(tmp_path / "a.zarr"), hub.expected_rows(model, trainer.train_dataset)
    )
    assert error < (1e-7 if dtype is torch.float64 else 1e-5)


def test_the_parameters_are_those_of_the_adapter(tmp_path: Path) -> None:
    attributor = attributor_from_trainer(hub.trainer_of(hub.made(hub.lora_bert), tmp_path), None, **EXACT)

    kinds = {name.rsplit(".default", 1)[0].rsplit(".", 1)[-1] for name in attributor.parameters}
    assert kinds == {"lora_A", "lora_B", "lora_magnitude_vector", "modules_to_save"}


@pytest.mark.parametrize(
    ("build", "kinds"),
    [
        (hub.lora, {"lora_A", "lora_B"}),
        (hub.dora, {"lora_A", "lora_B", "lora_magnitude_vector"}),
        (hub.ia3, {"ia3_l"}),
    ],
)
def test_an_adapter_that_was_loaded_for_inference_is_attributed_like_the_trained_one(
    build: Callable[[], nn.Module], kinds: set[str], tmp_path: Path
) -> None:
    trained_one = hub.made(build)
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

    assert {name.rsplit(".default", 1)[0].rsplit(".", 1)[-1] for name in attributor.parameters} == kinds
    assert list(attributor.parameters) == [n for n, p in trained_one.named_parameters() if p.requires_grad]
    expected = hub.expected_rows(trained_one, rows)
    assert hub.relative_error(hub.stored_rows(tmp_path / "a.zarr"), expected) < 1e-5
    assert not any(p.requires_grad for p in frozen.parameters())


def test_the_hook_computer_is_exact_for_every_model_and_vmap_says_where_it_is_not(
    build: Callable[[], nn.Module],
) -> None:
    model = hub.made(build).double().eval()
    collator = hub.trainer_of(model, Path("unused")).data_collator
    rows = [{k: v for k, v in row.items() if k != "text"} for row in hub.texts(model)]
    batch = collator(rows)

    assert choose_gradient_computer(model, resolve_task(task_of(model)), batch).name == "hook"
    with pytest.raises(UnsupportedModelError, match=r"torch.func.vmap cannot transform .* Use Iterative"):
        FunctionalGradientComputer(model, resolve_task(task_of(model))).compute_per_sample_grad(batch)


@pytest.mark.parametrize(
    ("build", "task"),
    [
        (hub.bert, "text_classification"),
        (lambda: hub.bert(1), "regression"),
        (lambda: hub.bert(2, problem_type="regression"), "regression"),
        (lambda: hub.bert(problem_type="multi_label_classification"), "multilabel_classification"),
        (hub.gpt2, "causal_language_modeling"),
        (hub.lora, "causal_language_modeling"),
        (hub.lora_bert, "text_classification"),
        (type("Own", (transformers.GPT2LMHeadModel,), {}), "causal_language_modeling"),
    ],
)
def test_the_task_is_that_of_the_models_class(build: Callable[..., nn.Module], task: str) -> None:
    model = build(hub.gpt2().config) if isinstance(build, type) else build()

    assert task_of(model) == task


def test_a_class_without_a_task_needs_one(tmp_path: Path) -> None:
    model = transformers.BertForTokenClassification(hub.bert().config)
    rows = hub.texts(hub.gpt2()).map(lambda row: {"labels": [max(label, 0) % 3 for label in row["labels"]]})
    trainer = hub.trainer_of(model, tmp_path, rows=rows)

    with pytest.raises(InvalidInputError, match="task of the class BertForTokenClassification is unknown"):
        attributor_from_trainer(trainer, None)

    def first_logit(call: Any, batch: Any) -> Tensor:
        return call(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0, 0]

    attributor = attributor_from_trainer(trainer, None, task=first_logit, proj_dim=8)
    assert attributor.featurize(rows).rows_written == len(rows)


def padded_on_the_left() -> Any:
    return transformers.DataCollatorForSeq2Seq(hub.tokenizer("left"))


def test_left_padding_is_refused_where_positions_are_absolute(tmp_path: Path) -> None:
    trainer = hub.trainer_of(hub.made(hub.gpt2), tmp_path, collator=padded_on_the_left())

    with pytest.raises(
        InvalidInputError, match=r"Row 6 .* in a batch with rows \[6, 4\].*padding_side = 'right'"
    ):
        attributor_from_trainer(trainer, None)


@pytest.mark.parametrize(("build", "settings"), [(hub.gpt2, {"batch_size": 1}), (hub.llama, {})])
def test_left_padding_is_exact_where_it_changes_nothing(
    build: Callable[[], nn.Module], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Alone in its batch a row is not padded, and rotary positions are relative."""
    model = hub.made(build).double()
    trainer = hub.trainer_of(model, tmp_path, collator=padded_on_the_left())

    attributor = attributor_from_trainer(trainer, tmp_path / "a.zarr", **EXACT, **settings)
    attributor.featurize(trainer.train_dataset)

    found, expected = (
        hub.stored_rows(tmp_path / "a.zarr"),
        hub.expected_rows(model, trainer.train_dataset),
    )
    assert hub.relative_error(found, expected) < 1e-7


class Blinking(transformers.DataCollatorForSeq2Seq):
    """Replaces tokens by chance, as masking does."""

    def __call__(self, features: Any, return_tensors: Any = None) -> Any:
        batch = super().__call__(features, return_tensors)
        batch["input_ids"] = torch.where(torch.rand(batch["input_ids"].shape) < 0.5, 1, batch["input_ids"])
        return batch


def test_rows_that_depend_on_chance_are_refused(tmp_path: Path) -> None:
    trainer = hub.trainer_of(hub.made(hub.gpt2), tmp_path, collator=Blinking(hub.tokenizer()))

    with pytest.raises(
        InvalidInputError, match=r"Loading and collating rows \[6, 4\] .* twice gave different"
    ):
        attributor_from_trainer(trainer, None)


def test_a_collator_that_packs_rows_is_refused(tmp_path: Path) -> None:
    trainer = hub.trainer_of(
        hub.made(hub.llama), tmp_path, collator=transformers.DataCollatorWithFlattening()
    )

    with pytest.raises(InvalidInputError, match=r"Collating 2 samples .* gave a batch of 1"):
        attributor_from_trainer(trainer, None)


def test_batches_are_of_the_trainers_size_unless_told_otherwise(tmp_path: Path) -> None:
    trainer = hub.trainer_of(hub.made(hub.gpt2), tmp_path)
    sizes: list[int] = []
    padding = trainer.data_collator

    def counted(samples: Any) -> Any:
        sizes.append(len(samples))
        return padding(samples)

    trainer.data_collator = counted
    for settings, expected in (({}, [3, 3, 2]), ({"batch_size": 5}, [5, 3])):
        attributor = attributor_from_trainer(
            trainer, None, proj_dim=8, method=TRAK(damping=None, layout="stored"), **settings
        )
        sizes.clear()
        attributor.featurize(Rows(trainer.train_dataset, name="texts"))
        assert sizes == expected


def test_other_peoples_trainers_are_refused() -> None:
    with pytest.raises(
        InvalidInputError, match=r"The trainer is a Linear\. Expected a transformers\.Trainer"
    ):
        attributor_from_trainer(nn.Linear(2, 2), None)


def test_sharded_models_and_missing_train_data_are_refused(tmp_path: Path) -> None:
    trainer = hub.trainer_of(hub.made(hub.gpt2), tmp_path)
    trainer.is_fsdp_enabled = True
    with pytest.raises(InvalidInputError, match="shards its model"):
        attributor_from_trainer(trainer, None)

    trainer.is_fsdp_enabled, trainer.train_dataset = False, None
    with pytest.raises(InvalidInputError, match="train dataset is a NoneType"):
        attributor_from_trainer(trainer, None)


def trained(
    build: Callable[[], nn.Module], folder: Path, *, watched: bool, **settings: Any
) -> tuple[transformers.Trainer, Attributor | None]:
    """Train for six steps with dropout and save twice."""
    model = hub.made(build)
    rows = Restless(hub.texts(model).remove_columns("text"))
    trainer = hub.trainer_of(model, folder, rows=rows, max_steps=6, save_steps=3, **settings)
    attributor = None
    if watched:
        attributor = attributor_from_trainer(trainer, folder / "a.zarr", **EXACT)
        trainer.add_callback(FeaturizeCallback(attributor, rows))
    trainer.train()
    return trainer, attributor


def test_training_is_bitwise_the_same_with_and_without_the_callback(tmp_path: Path) -> None:
    alone, _ = trained(hub.gpt2, tmp_path / "alone", watched=False)
    states = random_states()
    watched, _ = trained(hub.gpt2, tmp_path / "watched", watched=True)

    assert random_states() == states
    assert watched.model.training == alone.model.training
    modes = [[module.training for module in trainer.model.modules()] for trainer in (alone, watched)]
    assert modes[0] == modes[1]
    for name, value in alone.model.state_dict().items():
        assert torch.equal(watched.model.state_dict()[name], value), name


@pytest.mark.parametrize("build", [hub.gpt2, hub.lora_bert])
def test_every_saved_checkpoint_is_featurized_and_its_file_is_known_again(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """Rows are those of the saved weights, later calls find them, and new targets find the weights on the disk."""
    trainer, attributor = trained(build, tmp_path, watched=True)
    folders = [tmp_path / "out" / f"checkpoint-{step}" for step in (3, 6)]

    again = attributor.featurize(trainer.train_dataset, tmp_path / "out")
    scores = attributor.score(trainer.train_dataset, name="itself", method="GradDot")

    assert again.checkpoints == ("checkpoint-3", "checkpoint-6")
    assert (again.rows_written, again.rows_found) == (0, 2 * len(hub.LENGTHS))
    assert scores.shape == (len(hub.LENGTHS),) * 2
    for number, folder in enumerate(folders):
        model = reloaded(build, folder)
        expected = hub.expected_rows(model, hub.texts(model))
        assert hub.relative_error(hub.stored_rows(tmp_path / "a.zarr", number), expected) < 1e-5


def reloaded(build: Callable[[], nn.Module], folder: Path) -> nn.Module:
    """Load a saved checkpoint as its own library does."""
    if build is hub.gpt2:
        return transformers.GPT2LMHeadModel.from_pretrained(folder)
    return peft.PeftModel.from_pretrained(hub.made(hub.bert), folder, is_trainable=True)


def test_a_new_session_finds_the_saved_weights_of_an_adapter(tmp_path: Path) -> None:
    trainer, attributor = trained(hub.lora_bert, tmp_path, watched=True)
    expected = np.asarray(attributor.score(trainer.train_dataset, name="first", method="GradDot"))

    model = hub.made(hub.lora_bert)
    opened = Attributor.open(
        tmp_path / "a.zarr", model, collate=trainer.data_collator, projector="none", progress=False
    )

    found = opened.score(trainer.train_dataset, name="second", method="GradDot")
    np.testing.assert_allclose(found, expected, rtol=1e-6)  # in batches of another size


def test_gradient_checkpointing_changes_no_row(tmp_path: Path) -> None:
    """With an adapter it also puts a hook on the embeddings."""
    trainer, attributor = trained(hub.lora, tmp_path, watched=True, activation_checkpointing=True)
    hooks = {id(module): dict(module._forward_hooks) for module in trainer.model.modules()}
    batch = trainer.data_collator(list(hub.texts(trainer.model).remove_columns("text")))
    with borrow_model(attributor.model, attributor.device):
        assert choose_gradient_computer(attributor.model, attributor.task, batch).name == "hook"
    assert {id(module): dict(module._forward_hooks) for module in trainer.model.modules()} == hooks
    assert any(hooks.values())

    adapter = tmp_path / "out" / "checkpoint-6"
    model = peft.PeftModel.from_pretrained(hub.made(hub.llama), adapter, is_trainable=True)
    expected = hub.expected_rows(model, hub.texts(model))
    assert hub.relative_error(hub.stored_rows(tmp_path / "a.zarr", 1), expected) < 1e-5


@pytest.mark.parametrize("order", ["before", "after"])
def test_rows_are_those_of_the_weights_where_training_ran_in_mixed_precision(
    order: str, tmp_path: Path
) -> None:
    """The trainer leaves its 16 bit forward in the model when training begins."""
    trainer, attributor = trained(hub.gpt2, tmp_path, watched=order == "before", bf16=True)
    if attributor is None:
        attributor = attributor_from_trainer(trainer, tmp_path / "a.zarr", **EXACT)
        attributor.featurize(trainer.train_dataset, tmp_path / "out" / "checkpoint-3")

    assert "_original_forward" in vars(trainer.model)
    model = reloaded(hub.gpt2, tmp_path / "out" / "checkpoint-3")
    expected = hub.expected_rows(model, hub.texts(model))
    assert hub.relative_error(hub.stored_rows(tmp_path / "a.zarr"), expected) < 1e-5


def test_a_fused_forward_below_mixed_precision_is_kept(tmp_path: Path) -> None:
    trainer = hub.trainer_of(hub.made(hub.gpt2), tmp_path)
    model = trainer.model
    model._original_forward = partial(type(model).forward, model)
    model.forward = wraps(model.forward)(lambda **inputs: pytest.fail("the 16 bit forward ran"))

    attributor = attributor_from_trainer(trainer, None, **EXACT)

    assert vars(attributor.model)["forward"] is model._original_forward


def test_checkpoints_in_shards_are_read_whole(tmp_path: Path) -> None:
    model = hub.made(hub.llama)
    trainer = hub.trainer_of(model, tmp_path)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 1
    attributor = attributor_from_trainer(trainer, None, **EXACT)
    attributor.featurize(trainer.train_dataset)

    summary = attributor.featurize(trainer.train_dataset, tmp_path / "sharded")

    assert (summary.checkpoints, summary.rows_written) == (("sharded",), 0)


def test_the_callback_refuses_another_model_and_rows_without_an_order(tmp_path: Path) -> None:
    trainer = hub.trainer_of(hub.made(hub.gpt2), tmp_path, max_steps=1)
    other = Attributor(hub.made(hub.gpt2, seed=1), "causal_language_modeling", None)

    with pytest.raises(InvalidInputError, match="the train data is an IterableDataset"):
        FeaturizeCallback(other, trainer.train_dataset.to_iterable_dataset())
    trainer.add_callback(FeaturizeCallback(other, trainer.train_dataset))
    with pytest.raises(InvalidInputError, match="parameters of the attributor's GPT2LMHeadModel"):
        trainer.train()


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("name", ["bert", "gpt2", "lora-llama"])
def test_rows_are_scaled_by_the_moments_in_the_folder_that_the_trainer_saved(
    name: str, watched: bool, tmp_path: Path
) -> None:
    """``optimizer.pt`` has two groups of numbered parameters, with and without weight decay."""
    model = hub.made(MODELS[name])
    trainer = hub.trainer_of(
        model, tmp_path, max_steps=3, save_strategy="steps", save_steps=3, weight_decay=0.1
    )
    settings = {**EXACT, "method": "GradDot", "normalize": "adam"}
    attributor = attributor_from_trainer(trainer, tmp_path / "a.zarr", **settings)
    if watched:
        trainer.add_callback(FeaturizeCallback(attributor, trainer.train_dataset))
    trainer.train()
    folder = tmp_path / "out" / "checkpoint-3"
    assert attributor.featurize(trainer.train_dataset, folder).rows_found == (
        len(trainer.train_dataset) if watched else 0
    )

    optimizer = (
        trainer.optimizer.optimizer
    )  # of accelerate's wrapper; states are held by parameter, without names
    assert len(optimizer.param_groups) == 2
    parts = []
    for p in (p for p in model.parameters() if p.requires_grad):
        state = optimizer.state[p]
        root = (state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))).sqrt() + 1e-8
        parts.append(torch.where(state["exp_avg_sq"] > 0, root.rsqrt(), 0).flatten().double())
    expected = hub.expected_rows(model, trainer.train_dataset) * torch.cat(parts).numpy()
    assert hub.relative_error(hub.stored_rows(tmp_path / "a.zarr"), expected) < 1e-4

    (folder / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match=r"has no optimizer state.*checkpoint-3.optimizer\.pt"):
        attributor.featurize(trainer.train_dataset, folder)
