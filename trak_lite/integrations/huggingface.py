"""Hugging Face: attributors from a ``transformers.Trainer``, and features at each checkpoint that it saves.

Example::

    attributor = attributor_from_trainer(trainer, "runs/reviews.zarr")
    trainer.add_callback(FeaturizeCallback(attributor, trainer.train_dataset))
    trainer.train()
    scores = attributor.score(trainer.eval_dataset, name="eval")
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from os import PathLike
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trak_lite.attributor import Attributor
from trak_lite.core.devices import undisturbed
from trak_lite.core.validate import require_packages
from trak_lite.data.batches import batch_size, flatten_batch, move_batch
from trak_lite.data.datasets import Rows
from trak_lite.data.packed import Documents
from trak_lite.errors import InvalidInputError
from trak_lite.integrations._training import SavedFeatures, refuse_other_model
from trak_lite.integrations.trl import DocumentCollator, trl_class, trl_collate, trl_task, warn_of_balance
from trak_lite.modelout_functions import (
    CausalLanguageModelingModelOutput,
    DenseClassificationModelOutput,
    ModelCall,
    RegressionModelOutput,
    require_separate_documents,
    resolve_task,
)
from trak_lite.modelout_functions._base import AbstractModelOutput, Task, evaluating
from trak_lite.modelout_functions._inputs import split_labels
from trak_lite.models.borrowing import borrow_model, model_device
from trak_lite.models.checkpoints import Checkpoint, weights_inside
from trak_lite.store import RemotePlace

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.models.auto import modeling_auto
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
    from transformers.utils import is_peft_available
except ModuleNotFoundError:
    require_packages("transformers", extra="hf")
    raise

__all__ = ["FeaturizeCallback", "attributor_from_trainer", "task_of"]

_NUM_PROBES = 32
"""Number of first rows of a dataset, of which the shortest and the longest are tried together and alone."""
_NUM_LOSSES = 8
"""Number of evenly spaced rows whose losses are compared with those of the task of the model's class."""


@final
class FeaturizeCallback(SavedFeatures, TrainerCallback):
    """Featurizes the train rows at each checkpoint that a ``transformers.Trainer`` saves.

    It runs on the trainer's model in place, after each checkpoint is saved. It restores weights, mode and all random
    states, so training is bitwise the same as without it. A resumed run finds the stored rows; if it saves a step
    again with other weights, it warns, and the store has the rows of both. Scoring new targets later needs the saved
    weights, so keep the checkpoints (``save_total_limit``).
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that the trained model is the attributor's.

        Raises:
            InvalidInputError: If it is another model, sharded, or on another device.
        """
        refuse_other_model(self._attributor, kwargs["model"])
        self._is_resumed = state.global_step > 0

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Featurize the checkpoint that was just saved."""
        folder = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"

        def saved() -> str | None:
            weights = weights_inside(folder)
            return None if weights is None else str(weights.absolute())

        # The trainer saves on rank 0, and the others do not wait for it.
        with self._attributor._run.joined(f"on_save of {folder.name}") as ranks:
            source = ranks.broadcast("where the weights are", saved)
        checkpoint = Checkpoint(folder.name, source, None)
        # Pass an iterator, so that the attributor does not search the model's changing weights for this checkpoint.
        self._featurize(iter([checkpoint]))


def attributor_from_trainer(
    trainer: Trainer,
    path: str | PathLike[str] | RemotePlace | None,
    task: Task | None = None,
    *,
    rows: Any = None,
    **settings: Any,
) -> Attributor:
    """Return an attributor for the model of a trainer of Transformers or TRL, before, during or after training.

    Model, collator and batch size are the trainer's. Rows are those of its train dataset in dataset order, regardless
    of the training order: ``attributor.featurize(trainer.train_dataset, checkpoints=...)``. Only trainable parameters
    are used; with a PEFT adapter these are the adapter's.

    ``SFTTrainer``, ``DPOTrainer``, ``GRPOTrainer`` and ``RewardTrainer`` of TRL are recognised. Task and batches are
    then those of the trainer's loss: its masks, its reference and its settings (beta, clipping, reduction,
    temperature). The loss that balances the experts of a mixture is not part of f; this is a warning.

    Args:
        trainer: A ``transformers.Trainer`` with a train dataset.
        path: As for :class:`~trak_lite.Attributor`.
        task: ``None`` uses the task of a TRL trainer, or that of the model's class (:func:`task_of`), if the losses of
            up to eight rows are those that the model computes.
        rows: The train rows; ``None`` uses ``trainer.train_dataset``. DPO without precomputed reference needs
            :func:`~trak_lite.integrations.trl.preference_rows`, GRPO
            :func:`~trak_lite.integrations.trl.recorded_rollouts`, and SFT with packing
            ``Documents(trainer.train_dataset)``. Featurize the same rows.
        **settings: Further arguments of the attributor. They override the trainer's.

    Raises:
        InvalidInputError: If the model is sharded, its class or the trainer's loss has no known task, there is no train
            dataset, the rows lack columns, a row is random or depends on the other rows of its batch, or the trainer
            joins texts that the model does not keep apart.
    """
    if not isinstance(trainer, Trainer):
        raise InvalidInputError(
            f"The trainer is a {type(trainer).__name__}. Expected a transformers.Trainer; for any other one build the "
            "Attributor from the model, the task and collate=...."
        )
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise InvalidInputError(
            "The trainer shards its model (FSDP or DeepSpeed), so no process has all weights. Featurize the "
            "saved checkpoints afterwards: Attributor(model, task, path).featurize(data, checkpoints=...)."
        )
    # Use the trainer's private method, because subclasses override which columns to remove.
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator)
    data = trainer.train_dataset if rows is None else rows
    kind = trl_class(trainer)
    if kind is not None and "collate" not in settings:
        collate = trl_collate(trainer, kind, collate)
    arguments = {"collate": collate, "batch_size": trainer.args.per_device_train_batch_size, **settings}
    probed = Rows(data, collate=arguments["collate"], what="the trainer's train dataset")
    if task is None and kind is not None:
        task = trl_task(trainer, kind, data)
    elif task is None:
        _refuse_other_loss(trainer)
    with undisturbed():
        pair, batches = _two_rows(probed)
    if task is None:
        task = _task_of_loss(trainer.model, probed)
    attributor = Attributor(trainer.model, task, path, **arguments)
    with undisturbed(), borrow_model(attributor.model, attributor.device):
        if arguments["batch_size"] != 1:
            _refuse_dependent(attributor, probed, pair, batches)
        if isinstance(arguments["collate"], DocumentCollator):
            some = range(min(len(probed), max(2, trainer.args.per_device_train_batch_size)))
            joined = trainer.data_collator([probed.dataset[row] for row in some])
            require_separate_documents(attributor.model, Documents([joined]), attributor.device)
    return attributor


def _refuse_other_loss(trainer: Trainer) -> None:
    """Raise if a trainer's loss is not that of its model, and warn if the loss of a mixture balances its experts."""
    other = {
        "label_smoothing_factor": trainer.args.label_smoothing_factor,
        "compute_loss_func": trainer.compute_loss_func,
        "compute_loss": getattr(trainer.compute_loss, "__func__", None) is not Trainer.compute_loss,
    }
    if any(other.values()):
        raise InvalidInputError(
            f"The {type(trainer).__name__} has a {' and a '.join(name for name in other if other[name])} of its own, "
            "so its loss is not that of its model, whose task would be taken. Pass task=..., a name or a function "
            "f(model_call, batch) -> (B,)."
        )
    config: Any = getattr(trainer.model, "config", None)
    if getattr(config, "output_router_logits", False) and (
        weight := getattr(config, "router_aux_loss_coef", 0)
    ):
        warn_of_balance(type(trainer).__name__, weight)


def task_of(model: nn.Module, labels: Tensor | None = None) -> str | AbstractModelOutput:
    """Return the task for the class and the configuration of a Hugging Face model.

    These are single- or multi-label classification and regression (of texts, images, audio and video), multiple choice,
    token classification, semantic segmentation, and language modeling: causal, masked or of an encoder-decoder.

    Args:
        model: A ``transformers.PreTrainedModel``, alone or in a ``peft.PeftModel``.
        labels: Those of a batch. Without a ``problem_type``, transformers takes floats for several labels at once.

    Raises:
        InvalidInputError: If there is no task for the class.
    """
    base: Any = model
    if is_peft_available():
        from peft import PeftModel

        base = model.get_base_model() if isinstance(model, PeftModel) else model
    names = {cls.__name__ for cls in type(base).__mro__}

    def is_for(*kinds: str) -> bool:
        mappings = (getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES") for kind in kinds)
        return any(not names.isdisjoint(mapping.values()) for mapping in mappings)

    if is_for(*(f"{kind}_CLASSIFICATION" for kind in ("SEQUENCE", "IMAGE", "AUDIO", "VIDEO"))):
        kind, single = base.config.problem_type, base.config.num_labels == 1
        is_real = labels is not None and labels.is_floating_point()
        if kind == "multi_label_classification" or (kind is None and is_real and not single):
            return "multilabel_classification"
        # Without a problem_type, transformers also treats a single label as regression.
        if kind == "regression" or (kind is None and single):
            return "regression" if single else RegressionModelOutput(output="neg_squared_error")
        return "text_classification"
    if is_for("MULTIPLE_CHOICE"):
        return "text_classification"
    if is_for("TOKEN_CLASSIFICATION"):
        return DenseClassificationModelOutput(class_axis=-1)
    if is_for("SEMANTIC_SEGMENTATION"):
        ignored = base.config.semantic_loss_ignore_index
        return DenseClassificationModelOutput(ignore_index=ignored, upsample=True)
    if is_for("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT"):
        of_two_parts = getattr(base.config, "is_encoder_decoder", False)
        return "sequence_to_sequence" if of_two_parts else "causal_language_modeling"
    if is_for("MASKED_LM"):
        return "masked_language_modeling"
    raise InvalidInputError(
        f"The task of the class {type(base).__name__} is unknown. Expected a model for classification, multiple "
        "choice, semantic segmentation or language modelling. Pass task=..., a name or a function "
        "f(model_call, batch) -> (B,)."
    )


def _task_of_loss(model: nn.Module, rows: Rows) -> AbstractModelOutput:
    """Return the task of a model's class whose loss is that of the model for each of some rows, alone.

    Raises:
        InvalidInputError: If there is none.
    """
    some = np.unique(np.linspace(0, len(rows) - 1, _NUM_LOSSES).astype(np.int64))
    task: AbstractModelOutput | None = None
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "problem_type", None)
    with undisturbed(), evaluating(model):
        for (row,), batch in rows.batches(some[:, None]):
            batch = move_batch(batch, model_device(model))
            if task is None:
                task = resolve_task(task_of(model, batch.get("labels")))
                labels = split_labels(batch).labels  # a model without labels returns no loss
                if task.name == "causal_language_modeling":
                    # The decoders of encoder-decoders (BartForCausalLM), XLM and XLNet predict labels[t] at t. Then
                    # the first label has a loss; others shift it away, and the mean over no labels is NaN.
                    first = torch.full_like(labels, -100)
                    first[:, 0] = 0
                    loss = _loss_of(model(**{**batch, "labels": first}))
                    task = CausalLanguageModelingModelOutput(shift=math.isnan(loss))
            try:
                answer = model(**batch)
            finally:
                config.problem_type = kind  # transformers sets it
            loss = _loss_of(answer)
            if math.isnan(loss):  # a row without labels
                continue
            if isinstance(answer, Mapping) and answer.get("aux_loss") is not None:
                loss -= float(getattr(config, "router_aux_loss_coef", 0) * answer["aux_loss"])
            expected = _mean_loss(task, model, batch)
            # Both are of the same logits; transformers computes losses in float32 or in the dtype of the model.
            tolerance = max(1e-4, 4 * _epsilon(model)) * (1 + abs(loss))
            if not abs(expected - loss) <= tolerance:  # also if it is NaN
                raise InvalidInputError(
                    f"Row {row} of {rows.what} has the loss {loss:.6g} of the {type(model).__name__}, and "
                    f"{expected:.6g} of the task {task.name!r} of its class: the model was not trained on the "
                    "loss of this task. Pass task=..., a name or a function f(model_call, batch) -> (B,)."
                )
    assert task is not None, "no rows"
    return task


def _loss_of(answer: Any) -> float:
    """Return the loss in what a model of transformers returns for a batch with labels."""
    return float(answer["loss"] if isinstance(answer, Mapping) else answer[0])


def _mean_loss(task: AbstractModelOutput, model: nn.Module, batch: Any) -> float:
    """Return the loss of a task for a batch of one row as transformers computes it: the mean over its labels."""
    exact = task.log_likelihood() or task
    if task.name == "regression":
        exact = RegressionModelOutput(output="neg_squared_error")  # half of the squared error
    f = exact.evaluate(ModelCall(model), batch).output
    labels = split_labels(batch).labels.flatten()[int(getattr(task, "shift", False)) :]
    count = (labels != getattr(task, "ignore_index", math.nan)).sum()
    total = F.logsigmoid(f) if exact.has_curvature else f * (2 if task.name == "regression" else 1)
    return -float(total / count)


def _epsilon(model: nn.Module) -> float:
    """Return the largest rounding error of the dtypes of a model's parameters."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} or {torch.float32}
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def _two_rows(rows: Rows) -> tuple[list[int], list[Any]]:
    """Return a short and a long row, and the batches of both and of each alone; raise if these are random."""
    by_length = sorted(range(min(_NUM_PROBES, len(rows))), key=lambda row: _length(rows.dataset[row]))
    pair = list(dict.fromkeys([by_length[0], by_length[-1]]))  # one row if both are the same
    plan = (np.asarray(part, dtype=np.int64) for part in (pair, pair, *([row] for row in pair)))
    batch, again, *single = (batch for _, batch in rows.batches(plan))
    first, second = (flatten_batch(part)[0] for part in (batch, again))
    if len(first) != len(second) or not all(map(torch.equal, first, second)):
        raise InvalidInputError(
            f"Loading and collating rows {pair} of {rows.what} twice gave different batches. Expected rows that are "
            "not random. Pass collate=... without random masking or augmentation, or mask once beforehand."
        )
    if batch_size(batch) != len(pair):
        raise InvalidInputError(
            f"Collating {len(pair)} samples of {rows.what} gave a batch of {batch_size(batch)}. Expected one "
            "entry per sample, in order: use a collator that pads, such as collate=trak_lite.pad_documents, not one "
            "that packs or flattens."
        )
    return pair, [batch, *single]


def _refuse_dependent(attributor: Attributor, rows: Rows, pair: list[int], batches: list[Any]) -> None:
    """Raise if f of one of two rows (:func:`_two_rows`) depends on the other."""
    attributor.task.prepare(attributor.model)
    call = ModelCall(attributor.model)
    with torch.no_grad():
        together, *apart = (
            attributor.task.evaluate(call, move_batch(part, attributor.device)).output for part in batches
        )
    tolerance = math.sqrt(_epsilon(attributor.model))
    for row, beside, separate in zip(pair, together.tolist(), torch.cat(apart).tolist(), strict=True):
        if abs(beside - separate) > tolerance * (1 + abs(separate)):
            raise InvalidInputError(
                f"Row {row} of {rows.what} gives f = {separate:.6g} alone and {beside:.6g} in a batch with rows "
                f"{pair}, so its gradient would depend on the other rows. Expected padding that the model ignores: pad "
                "on the right (tokenizer.padding_side = 'right'), give an attention_mask, or pass batch_size=1."
            )


def _length(sample: Any) -> int:
    """Return the number of tokens of a sample, of all its texts; 0 for a sample without tokens."""
    if not isinstance(sample, Mapping):
        return 0
    return sum(len(ids) for name, ids in sample.items() if name.endswith("_ids") and isinstance(ids, Sized))
