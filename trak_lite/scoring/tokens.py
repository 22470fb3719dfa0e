"""Scores of train rows split over their tokens, for causal language models.

f of a row is a sum over its predicted tokens, and every step from f to the score is linear: gradient, projection, the
product with (H + lambda I)^-1 times a target, the row's q. With the projection R and the preconditioned target p, the
contribution of a token is therefore the derivative of its term of f along R^T p. One forward-mode pass returns those of
all tokens of a batch of rows (a Jacobian-vector product; Pearlmutter, "Fast exact multiplication by the Hessian", 1994,
section 2). If R^T or forward mode is not defined, or gradients are not the derivatives (a hook on gradients,
``nn.Embedding(scale_grad_by_freq=True)``), the gradient of every token is computed: that of the row with all other
labels ignored.

Shapes: T positions of a row, n predicted tokens, K feature width, m targets.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from trak_lite.core.devices import full_float32, in_float64, precise
from trak_lite.core.eval_caches import passes_undone
from trak_lite.core.validate import some_of, target_number
from trak_lite.data.batches import join_batches, move_batch, rows_in_batches, take_rows
from trak_lite.data.datasets import Rows
from trak_lite.errors import InvalidInputError, refuse_machine_failure
from trak_lite.featurizing.gauss_newton import forward_mode
from trak_lite.featurizing.session import FeaturizingSession
from trak_lite.featurizing.settings import AttributorSettings
from trak_lite.gradient_computers import select_parameters
from trak_lite.gradient_computers.parameters import differentiating_only
from trak_lite.gradient_computers.self_check import structure_of
from trak_lite.modelout_functions import CausalLanguageModelingModelOutput, ModelCall
from trak_lite.modelout_functions._inputs import split_labels
from trak_lite.modelout_functions._margins import with_labels
from trak_lite.modelout_functions.language_modeling import IGNORED
from trak_lite.models.sharded import is_sharded
from trak_lite.run.tables import model_id_of
from trak_lite.scoring.matrix import checked_rows
from trak_lite.scoring.scores import Scores
from trak_lite.types import Batch

logger = logging.getLogger(__name__)

_OF_SUMS = {torch.float16: 5e-3, torch.bfloat16: 5e-3}
"""Differences that rounding leaves in sums of derivatives, relative to their sizes, by the dtype of parameters."""
_OF_FEATURES = {torch.float16: 0.03, torch.bfloat16: 0.03}
"""Differences that rounding leaves in sums of features, relative to their norms, by the dtype of parameters."""


def token_scores(
    scores: Scores, data: Any, rows: Sequence[int], *, targets: Sequence[int] | None = None
) -> dict[int, NDArray[np.float32]]:
    """Return the contribution of every token of some train rows to their scores, for causal language models.

    f of a train row is a sum over its predicted tokens, so its gradient, features and scores are sums too, whatever the
    task of the targets is (:meth:`Attributor.score(task=...) <trak_lite.Attributor.score>`, questions). The
    contributions of a row sum to its score, up to the rounding of stored features, which a small damping amplifies. A
    row costs about three forward passes per target and checkpoint, and three more to compare with its gradient, with
    the default projector and a model that supports forward-mode differentiation and leaves gradients as they are.
    Otherwise, or for more targets than tokens, a row of T predicted tokens costs as much as featurizing T + 1 rows, and
    a warning names rows whose tokens do not add up to them (a hook that clips gradients). Nothing is stored.

    Args:
        scores: Scores of an attributor.
        data: The train data, as passed to :meth:`~trak_lite.Attributor.featurize`.
        rows: Train rows.
        targets: Targets; ``None`` uses all of them.

    Returns:
        Contributions by row, each ``(T, targets)``. Position t is that of ``labels[t]``, and 0 if ``labels[t]`` is
        not predicted.

    Raises:
        InvalidInputError: If the task of the train rows is not causal language modeling, train rows are normalised, or
            a row or target does not exist.
        StateError: If the weights of a checkpoint cannot be found, or the scores were opened without a model.
        ManifestMismatchError: If ``data`` are not the train data.
    """
    run = scores.run
    train = run.rows(data, "the train data")
    with run.session(train.identity(), train=train) as session:
        return split_scores(session, scores, train, rows=rows, targets=targets)


def split_scores(
    session: FeaturizingSession,
    scores: Scores,
    train: Rows,
    *,
    rows: Sequence[int],
    targets: Sequence[int] | None,
) -> dict[int, NDArray[np.float32]]:
    """Return the contributions of every token, by row; see :func:`token_scores`.

    A session that was opened with the train data first computes a few stored rows of every checkpoint again, and
    compares them.
    """
    settings = session.settings
    shift = _shift_of_linear_rows(settings, scores)
    chosen = range(scores.shape[1]) if targets is None else targets
    wanted = [target_number(target, scores.shape[1], scores.name) for target in chosen]
    numbers = np.unique(checked_rows(rows, scores.shape))
    factors = scores.source.row_factors(numbers)
    terms = scores.source.terms(np.array(wanted, dtype=np.int64))
    digests, tables = scores.source.digests, scores.source.train
    batches = train.batches(rows_in_batches(numbers, 1))
    token_rows = [_TokenRow.of(batch, int(number), len(wanted), shift=shift) for (number,), batch in batches]
    together = _groups([row for row in token_rows if len(wanted) <= len(row.positions)], train.batch_size)
    directions = _Directions(settings)
    apart: dict[int, float] = {}

    def visit(digest: str, _: str) -> None:
        index = digests.index(digest)
        model_id = model_id_of(terms[index].train)
        own_targets = terms[index].targets
        factor_of = dict(zip((row.number for row in token_rows), factors[index].tolist(), strict=True))
        left = {row.number: row for row in token_rows}
        derivatives = directions.derivatives(
            session.model, [batch for _, batch in together], own_targets, model_id
        )
        for (rows, _), of_rows in zip(together, derivatives or (), strict=derivatives is not None):
            for row, values in zip(rows, of_rows, strict=True):
                row.scores[int(shift) :] += values * factor_of[row.number]
                del left[row.number]
        preconditioned = in_float64(own_targets)
        for row in left.values():
            number = np.full(1, row.number)
            rest = in_float64(session.features(row.batch, number, model_id=model_id, what=train.what))[0]
            norms = rest.norm()
            for positions, batch in row.batches(train.batch_size):
                repeats = np.full(len(positions), row.number)
                features = in_float64(session.features(batch, repeats, model_id=model_id, what=train.what))
                products = (features @ preconditioned.T).cpu().numpy()
                row.scores[positions] += products * factor_of[row.number]
                rest, norms = rest - features.sum(0), norms + features.norm()
            kept = select_parameters(session.model, list(settings.parameters))
            rounding = max(_OF_FEATURES.get(parameter.dtype, 1e-3) for parameter in kept.values())
            if rest.norm() > rounding * norms:
                apart[row.number] = float(rest.norm() / norms)

    session.visit(dict(zip(digests, tables, strict=True)), visit, purpose="to score tokens")
    if apart:
        row, distance = max(apart.items(), key=lambda item: item[1])
        warnings.warn(
            f"The gradients of single tokens do not add up to those of rows {some_of(map(str, sorted(apart)))} of "
            f"{train.what} (row {row}: {distance:.2g} of their norm is left), so contributions of tokens do not add up "
            "to scores. The model changes gradients in a way that is not linear, as a hook that clips them does: "
            "remove it and featurize again.",
            RuntimeWarning,
            stacklevel=3,
        )
    return {row.number: row.scores.astype(np.float32) for row in token_rows}


@final
@dataclass(slots=True, eq=False)
class _Directions:
    """Derivatives of the terms of f along preconditioned targets, in forward mode."""

    _settings: AttributorSettings
    _is_supported: bool = True
    """Whether the model supports forward-mode differentiation, as far as its passes have shown."""

    def derivatives(
        self, model: nn.Module, batches: Sequence[Batch], targets: Tensor, model_id: int
    ) -> list[NDArray[np.float64]] | None:
        """Return the derivatives of the terms of batches of B samples along targets ``(m, K)``, ``(B, T', m)`` each.

        ``None`` if the projector or the model, which has the weights of a checkpoint, does not support it.
        """
        if not (self._is_supported and batches and len(targets)) or is_sharded(model):
            return None
        columns: list[list[NDArray[np.float64]]] = [[] for _ in batches]
        for target in range(len(targets)):  # one at a time: a direction is as large as the model
            direction = self._settings.projector.adjoint(
                targets[target : target + 1], model_id=model_id, parameters=self._settings.parameters
            )
            if direction is None:
                return None
            for column, batch in zip(columns, batches, strict=True):
                one = {name: part[0] for name, part in direction.items()}
                values = self._along(model, batch, one)
                if values is None or (target == 0 and not self._is_derivative(values, model, batch, one)):
                    return None
                column.append(values)
        return [np.stack(column, 2) for column in columns]

    def _is_derivative(
        self, values: NDArray[np.float64], model: nn.Module, batch: Batch, direction: Mapping[str, Tensor]
    ) -> bool:
        """Return whether derivatives ``(B, T')`` along a direction agree with the gradient of the batch.

        Rows have different weights, so that errors of two of them do not cancel.
        """
        kept = select_parameters(model, list(self._settings.parameters))
        moved = move_batch(batch, self._settings.device)
        weights = 1 + np.arange(len(values)) / len(values)
        with (
            torch.enable_grad(),
            differentiating_only(model.parameters(), kept),
            passes_undone(model, always=True),
            full_float32(self._settings.device),
        ):
            terms = self._task.position_outputs(ModelCall(model), moved)
            total = (terms.sum(1) * torch.as_tensor(weights, dtype=terms.dtype, device=terms.device)).sum()
            gradients = torch.autograd.grad(total, list(kept.values()), allow_unused=True)
        products = [
            precise(part) * precise(direction[name])
            for name, part in zip(kept, gradients, strict=True)
            if part is not None
        ]
        difference = abs(float(weights @ values.sum(1)) - sum(float(part.sum()) for part in products))
        rounding = max(_OF_SUMS.get(parameter.dtype, 2e-5) for parameter in kept.values())
        noise = math.hypot(
            *(float(part.norm()) for part in products)
        )  # of entries that are rounded one by one
        self._is_supported = difference <= rounding * (float(weights @ np.abs(values).sum(1)) + noise)
        if not self._is_supported:
            logger.info(
                "Gradients of %s are not the derivatives of its forward pass (a hook on gradients, scale_grad_by_freq, "
                "an overflow of float16): the gradient of every token is computed.",
                type(model).__name__,
            )
        return self._is_supported

    @property
    def _task(self) -> CausalLanguageModelingModelOutput:
        task = self._settings.task.train_task()
        assert isinstance(task, CausalLanguageModelingModelOutput)  # _shift_of_linear_rows
        return task

    def _along(
        self, model: nn.Module, batch: Batch, direction: Mapping[str, Tensor]
    ) -> NDArray[np.float64] | None:
        device = self._settings.device
        kept = select_parameters(model, list(self._settings.parameters))
        values = {name: parameter.detach() for name, parameter in kept.items()}
        constants = {name: parameter.detach() for name, parameter in model.named_parameters()}
        moved = move_batch(batch, device)

        def terms(changed: dict[str, Tensor]) -> Tensor:
            return self._task.position_outputs(ModelCall(model, {**constants, **changed}), moved)

        # In units of the weights: preconditioned targets may be too small for float16.
        unit = _unit(values, direction)
        vector = {name: (direction[name] / unit).to(value) for name, value in values.items()}
        try:
            # The other kernels of attention have no forward mode.
            with (
                torch.no_grad(),
                passes_undone(model, always=True),
                full_float32(device),
                sdpa_kernel(SDPBackend.MATH),
                forward_mode(),
            ):
                derivatives: Tensor = jvp(terms, (values,), (vector,))[1]
        except RuntimeError as error:
            refuse_machine_failure(error)
            self._is_supported = False
            logger.info(
                "%s has an operation without forward-mode differentiation (%.200s): the gradient of every token is "
                "computed.",
                type(model).__name__,
                error,
            )
            return None
        return in_float64(derivatives).cpu().numpy() * unit


def _unit(weights: Mapping[str, Tensor], direction: Mapping[str, Tensor]) -> float:
    """Return the length of a direction relative to that of the weights, as a power of 2, so that no bits change."""
    of_weights, length = (
        float(torch.stack([part.float().norm() for part in parts]).norm())
        for parts in (weights.values(), direction.values())
    )
    return 2.0 ** math.frexp(length / (of_weights or 1.0))[1] if 0 < length < math.inf else 1.0


@final
@dataclass(frozen=True, slots=True, eq=False)
class _TokenRow:
    """One train row, and the contributions of its tokens to its scores."""

    number: int
    batch: Batch
    """A batch of this row only."""
    positions: NDArray[np.int64]
    """``(n,)`` positions of the predicted labels."""
    scores: NDArray[np.float64]
    """``(T, m)``."""

    @classmethod
    def of(cls, batch: Batch, number: int, num_targets: int, *, shift: bool) -> _TokenRow:
        labels = split_labels(batch).labels[0]
        predicted = (labels != IGNORED).cpu().numpy()
        predicted[: int(shift)] = False
        return cls(number, batch, np.flatnonzero(predicted), np.zeros((len(labels), num_targets)))

    def batches(self, size: int) -> Iterator[tuple[NDArray[np.int64], Batch]]:
        """Yield up to ``size`` positions, and a batch with one copy of the row per position, with only its label."""
        for start in range(0, len(self.positions), size):
            positions = self.positions[start : start + size]
            copies = take_rows(self.batch, [0] * len(positions))
            labels = split_labels(copies).labels
            here = torch.from_numpy(positions).to(labels.device)[:, None]
            alone = torch.full_like(labels, IGNORED).scatter(1, here, labels.gather(1, here))
            yield positions, with_labels(copies, alone)


def _groups(rows: Sequence[_TokenRow], size: int) -> list[tuple[list[_TokenRow], Batch]]:
    """Return rows of the same shape together, at most ``size`` of them, each with a batch of these rows."""
    alike: dict[Any, list[_TokenRow]] = {}
    for row in rows:
        alike.setdefault(structure_of(row.batch), []).append(row)
    parts = [same[start : start + size] for same in alike.values() for start in range(0, len(same), size)]
    return [(part, join_batches([row.batch for row in part])) for part in parts]


def _shift_of_linear_rows(settings: AttributorSettings, scores: Scores) -> bool:
    """Return whether labels are shifted; raise if scores are no sums over the tokens of train rows."""
    task = settings.task.train_task()
    if not isinstance(task, CausalLanguageModelingModelOutput):
        raise InvalidInputError(
            f"The task of the train rows is {task.name!r}, whose output is not a sum over tokens. Token scores need "
            "'causal_language_modeling'."
        )
    divided = "normalization" in scores.manifest.fingerprint.get("gradients", {})
    if divided or not scores.method.linear:
        raise InvalidInputError(
            "These scores divide train rows by their norms or change them by the state of Adam, so token scores do not "
            "add up to them. Use a method other "
            f"than {'GradCos' if scores.method.linear else scores.method.name}, and an attributor with "
            "normalize='none'."
        )
    return task.shift
