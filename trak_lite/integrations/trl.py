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

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from trak_lite.data.loading import Collate
from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions import DPOModelOutput, PolicyGradientModelOutput, reference_columns
from trak_lite.modelout_functions._base import Task
from trak_lite.modelout_functions.language_modeling import IGNORED

__all__ = ["preference_rows", "recorded_rollouts", "rollout_rows"]

logger = logging.getLogger(__name__)


_ROUNDING = 2**-5
"""Largest relative difference of the trainer's columns from exact ones: 8 times the rounding of one bfloat16 number,
2^-8, because the errors of many layers add up. Training that moves a reference by less is not seen."""
_OF_TOKENS = {"old_per_token_logps": "old_logps", "ref_per_token_logps": "ref_logps"}


def preference_rows(trainer: Any, data: Any = None) -> Any:
    """Return the rows of a ``DPOTrainer`` with the reference's log-probabilities as columns.

    Columns that the trainer has computed (``precompute_ref_log_probs``) are used, unless it computed them in half
    precision for weights in float32 (``bf16`` and ``fp16``), unlike f. Otherwise one pass without gradients computes
    them, in the dtype of the weights: of the trainer's ``ref_model``, of the PEFT model without its adapter (with the
    adapter ``"ref"`` if TRL keeps a copy under this name), or of the model before its training. Dropout is off.
    Weights, modes and ``requires_grad`` are restored. The trainer's columns are used, with a warning, if the reference
    has been trained: no other is left, or its columns differ from them by more than their rounding.

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
    computed = [name for name in REFERENCES if name in data.column_names]
    are_computed = len(computed) == len(REFERENCES)
    if are_computed and not _rounds_references(trainer):
        return data
    if are_computed and not _has_reference(trainer):
        return _rounded(data)
    if getattr(trainer.args, "sync_ref_model", False):
        raise InvalidInputError(
            "The trainer moves its reference towards the policy during training (sync_ref_model=True), so no fixed "
            "column holds the reference's log-probabilities. Add the columns of the step that you attribute: "
            f"data.add_column for {list(REFERENCES)}, from trak_lite.modelout_functions.reference_columns."
        )
    collate, size = PairCollator(trainer.data_collator), trainer.args.per_device_train_batch_size
    starts = range(0, len(data), size)
    batches = (collate([data[row] for row in range(start, min(start + size, len(data)))]) for start in starts)
    with _reference_of(trainer, are_computed=are_computed) as reference:
        columns = reference_columns(reference, batches)
    if are_computed:
        before, after = (
            torch.cat(
                [torch.as_tensor(some[name][:], dtype=torch.float64, device="cpu") for name in REFERENCES]
            )
            for some in (data, columns)
        )
        if not torch.linalg.vector_norm(after - before) <= _ROUNDING * torch.linalg.vector_norm(before):
            return _rounded(data)
    data = data.remove_columns(computed)
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
        sample = {name: column[row, :stop] for name, column in columns.items()}
        sample["advantages"] = advantages[row] if advantages.dim() == 1 else advantages[row, :stop]
        rows.append({name: value.detach().cpu().clone() for name, value in sample.items()})
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

    override = vars(trainer).get("compute_loss")
    trainer.compute_loss = recording
    try:
        yield rows
    finally:
        del trainer.compute_loss
        if override is not None:
            trainer.compute_loss = override


def _after(prompt: Tensor, values: Tensor) -> Tensor:
    """Return ``(B, P + C)``: 0 at the prompt's positions, then values ``(B, C)``."""
    return torch.cat([values.new_zeros(prompt.shape), values], 1)


def _rounds_references(trainer: Any) -> bool:
    """Whether a ``DPOTrainer`` has computed the reference's columns in half precision, for weights in float32."""
    is_half = trainer.accelerator.mixed_precision != "no"  # which an environment variable sets, too
    weight = next(trainer.model.parameters())
    return bool(trainer.args.precompute_ref_log_probs and is_half and weight.dtype == torch.float32)


def _has_reference(trainer: Any, *, are_computed: bool = True) -> bool:
    """Whether a ``DPOTrainer`` still has its reference: a model, one below an adapter, or the untrained policy."""
    has_model = trainer.ref_model is not None or hasattr(trainer.model, "disable_adapter")
    # A policy that another process trained is at step 0 as well: the computed columns tell.
    return has_model or (
        are_computed and trainer.args.precompute_ref_log_probs and trainer.state.global_step == 0
    )


def _rounded(data: Any) -> Any:
    """Return a copy of a dataset with the trainer's own columns of the reference, with a warning."""
    warnings.warn(
        "The trainer computed the reference's log-probabilities in half precision (bf16 or fp16), and f is computed in "
        "float32. They cannot be computed again, because training has changed the reference, so f is that of rounded "
        "columns. Call preference_rows before the training, or train with a ref_model.",
        UserWarning,
        stacklevel=3,
    )
    return copy.copy(data)  # another object than the train dataset: trl_task warns of that


@contextmanager
def _reference_of(trainer: Any, *, are_computed: bool) -> Iterator[nn.Module]:
    """Yield the frozen reference of a ``DPOTrainer``; restore adapters and flags of its model."""
    if trainer.ref_model is not None:
        yield trainer.ref_model
        return
    model: Any = trainer.model
    if not _has_reference(trainer, are_computed=are_computed):
        raise InvalidInputError(
            f"The DPOTrainer has no reference model any more: its {type(model).__name__} is the trained policy. Use "
            "data whose columns the trainer has computed (precompute_ref_log_probs), or pass it a ref_model."
        )
    if not hasattr(model, "disable_adapter"):
        yield model
        return
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


# The task and the batches of a trainer

SFT, DPO, GRPO, REWARD = "SFTTrainer", "DPOTrainer", "GRPOTrainer", "RewardTrainer"
REFERENCES = ("ref_chosen_logps", "ref_rejected_logps")
_PAIRED = ("input_ids", "attention_mask", "labels")
"""Columns of TRL's batches of pairs, ``(2 B, T)``: all chosen texts, then all rejected ones."""
_REDUCTIONS = {"grpo": "mean", "bnpo": "sum", "dapo": "sum", "dr_grpo": "sum", "luspo": "sum"}
"""Reduction over the tokens of a row by ``loss_type``; ``"sum"`` up to a factor that all rows of a batch share."""

_SUPPORTED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    SFT: {"loss_type": ("nll", "chunked_nll"), "label_smoothing_factor": (0.0,)},
    DPO: {
        "loss_type": (["sigmoid"], "sigmoid"),
        "loss_weights": (None, [1.0]),
        "f_divergence_type": ("reverse_kl",),
        "label_smoothing": (0.0,),
        "ld_alpha": (None,),
        "use_weighting": (False,),
    },
    GRPO: {
        "loss_type": tuple(_REDUCTIONS),
        "importance_sampling_level": ("token",),
        "delta": (None,),
        "top_entropy_quantile": (1.0,),
        "entropy_coef": (0.0,),
        "use_adaptive_entropy": (False,),
        "off_policy_mask_threshold": (None,),
    },
    REWARD: {"center_rewards_coefficient": (None,)},
}
"""Training arguments that change the loss, with the values for which a task of this package is the loss."""


def trl_class(trainer: Any) -> str | None:
    """Return the name of the class of TRL that a trainer has or inherits from; ``None`` for other trainers."""
    names = (cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.partition(".")[0] == "trl")
    return next(names, None)


def trl_task(trainer: Any, kind: str, rows: Any) -> Task:
    """Return the task whose loss is that of a trainer of TRL; raise if there is none, or rows lack what it needs."""
    if kind not in _SUPPORTED:
        raise InvalidInputError(
            f"The task of trl.{kind} is unknown. Expected one of {list(_SUPPORTED)}. Pass task=..., a name or a "
            "function f(model_call, batch) -> (B,), and collate=... for the batches that it takes."
        )
    args = trainer.args
    settings = {name: getattr(args, name, values[0]) for name, values in _SUPPORTED[kind].items()}
    other = {name: value for name, value in settings.items() if value not in _SUPPORTED[kind][name]}
    if getattr(trainer, "compute_loss_func", None) is not None:
        other["compute_loss_func"] = trainer.compute_loss_func
    for name in ("compute_loss", "_compute_loss"):  # a subclass may have its own, or another was set
        module = getattr(getattr(trainer, name, None), "__module__", "trl")
        if module.partition(".")[0] not in {"trl", "transformers", "trak_lite"}:
            other[name] = f"one of {module}"
    if other:
        supported = {name: _SUPPORTED[kind].get(name, (None,))[0] for name in other}
        raise InvalidInputError(
            f"The {kind} has {other}, so no task of this package is its loss. Supported: {supported}. Pass task=..., a "
            "name or a function f(model_call, batch) -> (B,)."
        )
    if getattr(trainer, "aux_loss_enabled", False):
        warn_of_balance(kind, trainer.router_aux_loss_coef)
    if kind == DPO:
        if any(name not in rows[0] for name in REFERENCES):
            raise InvalidInputError(
                f"The rows lack the reference's log-probabilities {list(REFERENCES)}. Compute them once: rows = "
                "preference_rows(trainer); pass rows=rows here and to featurize."
            )
        if rows is trainer.train_dataset and _rounds_references(trainer) and _has_reference(trainer):
            warnings.warn(
                "The trainer computed the reference's log-probabilities in half precision (bf16 or fp16), and f is "
                "computed in float32. Compute them in float32, too: rows = preference_rows(trainer); pass rows=rows "
                "here and to featurize.",
                UserWarning,
                stacklevel=3,
            )
        return DPOModelOutput(beta=args.beta)
    if kind == GRPO:
        return _grpo_task(trainer, rows)
    return "reward_modeling" if kind == REWARD else "causal_language_modeling"


def warn_of_balance(kind: str, coefficient: float) -> None:
    """Warn that the loss that balances the experts of a mixture is not part of f."""
    warnings.warn(
        f"The loss of the {kind} includes {coefficient} times the load-balancing loss of its mixture of experts. That "
        "is a function of whole batches, in which rows have no share, so it is not part of f. Set "
        "router_aux_loss_coef=0 to train without it.",
        UserWarning,
        stacklevel=4,
    )


def trl_collate(trainer: Any, kind: str, collate: Collate) -> Collate:
    """Return the function that makes batches of the task from samples, with the trainer's own collator."""
    if getattr(trainer, "padding_free", False):
        collator = trainer.data_collator
        if kind == SFT and hasattr(collator, "padding_free"):
            padding = copy.copy(collator)
            padding.padding_free = False
            return DocumentCollator(padding)
        raise InvalidInputError(
            f"The {kind} joins all texts of a batch to one row with its {type(collator).__name__} (padding_free). "
            "Expected one row per text: train with padding_free=False, or pass collate=..., a collator that pads, such "
            "as trak_lite.pad_documents."
        )
    if kind in (DPO, REWARD):
        return PairCollator(collate)
    if kind == GRPO:
        token = getattr(trainer.processing_class, "pad_token_id", None)
        return RolloutCollator(0 if token is None else token)
    return collate


def _grpo_task(trainer: Any, rows: Any) -> Task:
    args, first = trainer.args, rows[0]
    if "advantages" not in first:
        raise InvalidInputError(
            "The train dataset of a GRPOTrainer has prompts only, without answers and advantages. Record them: with "
            "recorded_rollouts(trainer) as rows: trainer.train(); pass rows=rows here and to featurize."
        )
    high = getattr(args, "epsilon_high", None)
    return PolicyGradientModelOutput(
        # Without old log-probabilities the ratio is 1, so nothing is clipped.
        clip=(args.epsilon, args.epsilon if high is None else high) if "old_logps" in first else None,
        kl_weight=args.beta,
        reduction="mean" if _REDUCTIONS[args.loss_type] == "mean" else "sum",
        temperature=args.temperature,
        kl_correction=bool(args.beta and getattr(args, "use_bias_correction_kl", False)),
    )


@dataclass(frozen=True)
class DocumentCollator:
    """Pads the texts that a trainer joins; refuses rows that hold several."""

    collate: Collate

    def __call__(self, samples: list[Any]) -> Any:
        if "seq_lengths" in samples[0]:
            raise InvalidInputError(
                "The rows are packed: each holds several texts (the column seq_lengths). Expected a row per text: "
                "documents = Documents(trainer.train_dataset); pass rows=documents here and documents to featurize."
            )
        return self.collate(samples)


@dataclass(frozen=True)
class PairCollator:
    """Turns batches of TRL, whose first half is chosen and second half rejected, into one row per pair."""

    collate: Collate

    def __call__(self, samples: list[Any]) -> dict[str, Tensor]:
        batch = dict(self.collate(samples))
        answers = batch.pop("completion_mask", None)
        if answers is not None:
            batch["labels"] = batch["input_ids"].masked_fill(answers == 0, IGNORED)
        shared = {name: batch.pop(name) for name in (*REFERENCES, "margin") if name in batch}
        unknown = [name for name in batch if name not in _PAIRED]
        if unknown:
            raise InvalidInputError(
                f"The trainer's collator gave the columns {unknown}, which cannot be divided into pairs. Expected "
                "pairs of texts. Pass collate=... with columns chosen_... and rejected_...."
            )
        halves = {name: value.chunk(2) for name, value in batch.items()}
        sides = {
            f"{side}_{name}": pair[index]
            for index, side in enumerate(("chosen", "rejected"))
            for name, pair in halves.items()
        }
        return sides | shared


@dataclass(frozen=True)
class RolloutCollator:
    """Pads rows of :func:`rollout_rows` on the right."""

    pad_token: int

    def __call__(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        fill = {"input_ids": self.pad_token, "labels": IGNORED}
        columns = {name: [sample[name] for sample in samples] for name in samples[0]}
        return {
            name: pad_sequence(values, batch_first=True, padding_value=fill.get(name, 0))
            if values[0].dim()
            else torch.stack(values)
            for name, values in columns.items()
        }
