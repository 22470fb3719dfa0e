"""Trainers of TRL: the task that is their loss, and the batches that it takes. TRL itself is not imported."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions import DPOModelOutput, PolicyGradientModelOutput
from trak_lite.modelout_functions.language_modeling import IGNORED
from trak_lite.run.settings import Task
from trak_lite.types import Batch

__all__ = ["DPO", "GRPO", "REFERENCES", "PairCollator", "trl_class", "trl_collate", "trl_task"]


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
    """Return the task whose loss is that of a trainer.

    Args:
        trainer: A trainer of TRL.
        kind: Its class; see :func:`trl_class`.
        rows: The train rows.

    Raises:
        InvalidInputError: If no task is the trainer's loss, or the rows lack what it needs.
    """
    if kind not in _SUPPORTED:
        raise InvalidInputError(
            f"The task of trl.{kind} is unknown. Expected one of {list(_SUPPORTED)}. Pass task=..., a name or a "
            "function f(model_call, batch) -> (B,), and collate=... for the batches that it takes."
        )
    args = trainer.args
    found = {name: getattr(args, name, values[0]) for name, values in _SUPPORTED[kind].items()}
    other = {name: value for name, value in found.items() if value not in _SUPPORTED[kind][name]}
    if getattr(trainer, "compute_loss_func", None) is not None:
        other["compute_loss_func"] = trainer.compute_loss_func
    if other:
        supported = {name: _SUPPORTED[kind].get(name, (None,))[0] for name in other}
        raise InvalidInputError(
            f"The {kind} has {other}, so no task of this package is its loss. Supported: {supported}. Pass task=..., a "
            "name or a function f(model_call, batch) -> (B,)."
        )
    if getattr(trainer, "aux_loss_enabled", False):
        warnings.warn(
            f"The loss of the {kind} includes {trainer.router_aux_loss_coef} times the load-balancing loss of its "
            "mixture of experts. That is a function of whole batches, in which rows have no share, so it is not part "
            "of f. Set router_aux_loss_coef=0 to train without it.",
            UserWarning,
            stacklevel=3,
        )
    if kind == DPO:
        if any(name not in rows[0] for name in REFERENCES):
            raise InvalidInputError(
                f"The rows lack the reference's log-probabilities {list(REFERENCES)}. Compute them once: rows = "
                "preference_rows(trainer); pass rows=rows here and to featurize."
            )
        return DPOModelOutput(beta=args.beta)
    if kind == GRPO:
        return _grpo_task(trainer, rows)
    return "reward_modeling" if kind == REWARD else "causal_language_modeling"


def trl_collate(
    trainer: Any, kind: str, collate: Callable[[list[Any]], Batch]
) -> Callable[[list[Any]], Batch]:
    """Return the function that makes batches of the task from samples, with the trainer's own collator.

    Args:
        trainer: A trainer of TRL.
        kind: Its class; see :func:`trl_class`.
        collate: The trainer's collator.

    Raises:
        InvalidInputError: If the collator joins texts to one row.
    """
    if getattr(trainer, "padding_free", False):
        raise InvalidInputError(
            f"The {kind} joins all texts of a batch to one row (padding_free, or packing). Expected one row per text: "
            "train with packing=False and padding_free=False, or pass collate=..., a collator that pads."
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
class PairCollator:
    """Turns batches of TRL, whose first half is chosen and second half rejected, into one row per pair."""

    collate: Callable[[list[Any]], Batch]

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
            f"{side}_{name}": pair[place]
            for place, side in enumerate(("chosen", "rejected"))
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
