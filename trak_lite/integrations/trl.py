r"""TRL: tasks, collators and rows of ``SFTTrainer``, ``DPOTrainer``, ``GRPOTrainer`` and ``RewardTrainer``.

:func:`~trak_lite.integrations.huggingface.attributor_from_trainer` takes these trainers, too. The train dataset of SFT
and of reward models holds all that the loss needs. DPO needs the log-probabilities of a frozen reference, and GRPO the
answers that were sampled during training::

    rows = preference_rows(trainer)                     # DPOTrainer
    with recorded_rollouts(trainer) as rows:            # GRPOTrainer
        trainer.train()
    attributor = attributor_from_trainer(trainer, "runs/preferences.zarr", rows=rows)
    attributor.featurize(rows)

This module does not import TRL: trainers are recognised by the names of their classes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trak_lite.errors import InvalidInputError
from trak_lite.integrations._trl import DPO, GRPO, REFERENCES, PairCollator, trl_class
from trak_lite.modelout_functions import reference_columns
from trak_lite.modelout_functions.language_modeling import IGNORED

__all__ = ["preference_rows", "recorded_rollouts", "rollout_rows"]

logger = logging.getLogger(__name__)


_OF_TOKENS = {"old_per_token_logps": "old_logps", "ref_per_token_logps": "ref_logps"}


def preference_rows(trainer: Any, data: Any = None) -> Any:
    """Return the rows of a ``DPOTrainer`` with the reference's log-probabilities as columns.

    Columns that the trainer has computed (``precompute_ref_log_probs``) are used. Otherwise one pass without gradients
    computes them: of the trainer's ``ref_model``, or of the PEFT model without its adapter (with the adapter ``"ref"``
    if TRL keeps a copy under this name). Dropout is off. Weights, modes and ``requires_grad`` are restored.

    Args:
        trainer: A ``trl.DPOTrainer``.
        data: A dataset that the trainer has tokenized, for example ``trainer.eval_dataset``; ``None`` uses
            ``trainer.train_dataset``.

    Returns:
        The dataset with the columns ``ref_chosen_logps`` and ``ref_rejected_logps``.

    Raises:
        InvalidInputError: If the trainer is of another class, has no reference, or changes it during training.
    """
    if trl_class(trainer) != DPO:
        raise InvalidInputError(f"The trainer is a {type(trainer).__name__}. Expected a trl.DPOTrainer.")
    data = trainer.train_dataset if data is None else data
    if all(name in data.column_names for name in REFERENCES):
        return data
    if getattr(trainer.args, "sync_ref_model", False):
        raise InvalidInputError(
            "The trainer moves its reference towards the policy during training (sync_ref_model=True), so no fixed "
            "column holds the reference's log-probabilities. Add the columns of the step that you attribute: "
            f"data.add_column for {list(REFERENCES)}, from trak_lite.modelout_functions.reference_columns."
        )
    collate, size = PairCollator(trainer.data_collator), trainer.args.per_device_train_batch_size
    starts = range(0, len(data), size)
    batches = (collate([data[row] for row in range(start, min(start + size, len(data)))]) for start in starts)
    with _reference_of(trainer) as reference:
        columns = reference_columns(reference, batches)
    for name, column in columns.items():
        data = data.add_column(name, column.tolist())
    return data


def rollout_rows(inputs: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Return the rows of a batch of a ``GRPOTrainer``, as its loss takes them, for ``task="policy_gradient"``.

    A row without tokens in the loss has no gradient and is left out. TRL masks answers that were cut off in this way
    (``mask_truncated_completions``).

    Args:
        inputs: What ``GRPOTrainer.compute_loss`` takes: ``prompt_ids``, ``prompt_mask`` ``(B, P)``,
            ``completion_ids``, ``completion_mask`` ``(B, C)`` and ``advantages`` ``(B,)`` or ``(B, C)``; optionally
            ``tool_mask``, ``old_per_token_logps``, ``ref_per_token_logps`` and ``importance_sampling_ratio``
            ``(B, C)``. The ratio is multiplied into the advantages.

    Returns:
        Per row ``input_ids``, ``attention_mask`` and ``labels`` ``(T,)``, -100 outside the answer; ``advantages``, a
        number or ``(T,)``; ``old_logps`` and ``ref_logps`` ``(T,)`` if they are given. The prompt keeps the padding
        on its left, on which models with absolute positions depend; padding on the right is removed.

    Raises:
        InvalidInputError: If a column is missing, or the batch has images.
    """
    needed = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    missing = [name for name in needed if name not in inputs]
    if missing or "pixel_values" in inputs:
        raise InvalidInputError(
            f"The batch has the columns {list(inputs)}. Expected text, and the columns that GRPOTrainer.compute_loss "
            f"takes; missing: {missing}. Record them: with recorded_rollouts(trainer) as rows: trainer.train()."
        )
    prompt, completion = inputs["prompt_mask"], inputs["completion_mask"]
    in_loss = completion if inputs.get("tool_mask") is None else completion * inputs["tool_mask"]
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([prompt, completion], 1)
    labels = ids.masked_fill(_after(prompt, in_loss) == 0, IGNORED)
    columns = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    for theirs, ours in _OF_TOKENS.items():
        if inputs.get(theirs) is not None:
            columns[ours] = _after(prompt, inputs[theirs])
    advantages, ratio = inputs["advantages"], inputs.get("importance_sampling_ratio")
    if ratio is not None:
        advantages = (advantages if advantages.dim() == 2 else advantages.unsqueeze(1)) * ratio
    if advantages.dim() == 2:
        advantages = _after(prompt, advantages.expand_as(completion))
    rows = []
    for row in (in_loss.sum(1) > 0).nonzero().flatten().tolist():
        stop = int(mask[row].nonzero().max()) + 1
        found = {name: column[row, :stop] for name, column in columns.items()}
        found["advantages"] = advantages[row] if advantages.dim() == 1 else advantages[row, :stop]
        rows.append({name: value.detach().cpu().clone() for name, value in found.items()})
    if len(rows) < len(ids):
        logger.info("Left out %d of %d rows without tokens in the loss.", len(ids) - len(rows), len(ids))
    return rows


@contextmanager
def recorded_rollouts(trainer: Any) -> Iterator[list[dict[str, Tensor]]]:
    """Record the rows of every batch whose loss a ``GRPOTrainer`` computes for training inside the block.

    The train dataset of GRPO has prompts only: answers and advantages exist when they are sampled. With
    ``num_iterations`` above 1 the loss is computed several times for the same answers, and all are recorded. Rows are
    held in memory; ``torch.save`` stores them.

    Args:
        trainer: A ``trl.GRPOTrainer``.

    Yields:
        The list that is filled, with the rows of :func:`rollout_rows`.

    Raises:
        InvalidInputError: If the trainer is of another class.
    """
    if trl_class(trainer) != GRPO:
        raise InvalidInputError(f"The trainer is a {type(trainer).__name__}. Expected a trl.GRPOTrainer.")
    rows: list[dict[str, Tensor]] = []
    compute = trainer.compute_loss

    def recording(model: nn.Module, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if model.training:  # the trainer's evaluation computes losses, too
            rows.extend(rollout_rows(inputs))
        return compute(model, inputs, *args, **kwargs)

    own = vars(trainer).get("compute_loss")
    trainer.compute_loss = recording
    try:
        yield rows
    finally:
        del trainer.compute_loss
        if own is not None:
            trainer.compute_loss = own


def _after(prompt: Tensor, values: Tensor) -> Tensor:
    """Return ``(B, P + C)``: 0 at the prompt's positions, then values ``(B, C)``."""
    return torch.cat([values.new_zeros(prompt.shape), values], 1)


@contextmanager
def _reference_of(trainer: Any) -> Iterator[nn.Module]:
    """Yield the frozen reference of a ``DPOTrainer``; restore adapters and flags of its model."""
    model: Any = trainer.model
    if trainer.ref_model is not None:
        yield trainer.ref_model
        return
    if not hasattr(model, "disable_adapter"):
        raise InvalidInputError(
            f"The DPOTrainer has no reference model any more: its {type(model).__name__} is the trained policy. Use "
            "data whose columns the trainer has computed (precompute_ref_log_probs), or pass it a ref_model."
        )
    flags = {p: p.requires_grad for p in model.parameters()}
    with ExitStack() as stack:
        # Registered first, so that it runs last: switching adapters changes the flags.
        stack.callback(lambda: [p.requires_grad_(flag) for p, flag in flags.items()])
        if "ref" in model.peft_config:
            stack.callback(model.set_adapter, model.active_adapter)
            model.set_adapter("ref")
        else:
            stack.enter_context(model.disable_adapter())
        yield model
