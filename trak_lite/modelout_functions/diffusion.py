r"""Model output function of denoising diffusion models. Shapes: B samples, S steps of the schedule, D draws per row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Any, ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor

from trak_lite.core.random import seeded_normals, seeded_uniforms
from trak_lite.core.validate import one_of, positive_int
from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions._base import AbstractModelOutput, ModelCall
from trak_lite.modelout_functions._inputs import (
    columns_of,
    fields_of,
    nan_unless,
    precise,
    refuse_invalid,
    shape_texts,
    tensor_of,
)
from trak_lite.modelout_functions._margins import UniformNoise, linear_terms, sampled_values
from trak_lite.types import Batch, OutputTerms

_SAMPLE, _SEED, _TIMESTEP, _TARGET = "sample", "seed", "timestep", "target"


class _Rows(NamedTuple):
    """Parts of a batch."""

    sample: Tensor  # clean ones, (B, ...)
    seeds: Tensor  # (B,) int64
    timesteps: Tensor  # (B, D) int64, in range
    valid: Tensor  # (B,), whether all timesteps were in range
    target: Tensor | None  # (B, D, ...) in place of the true targets
    conditions: Sequence[Any]  # further positional arguments of the model
    named: dict[str, Any]  # keyword arguments of the model


@final
@dataclass(eq=False, kw_only=True)
class DiffusionModelOutput(AbstractModelOutput):
    r"""Minus half the squared error of a denoiser, for noise and timesteps that belong to the row.

    With a clean sample x, a timestep t, noise :math:`\epsilon` and :math:`\bar\alpha_t` of the schedule, the model sees
    :math:`x_t = \sqrt{\bar\alpha_t}\,x + \sqrt{1 - \bar\alpha_t}\,\epsilon` and predicts y: the noise (``"epsilon"``),
    x (``"sample"``), or :math:`\sqrt{\bar\alpha_t}\,\epsilon - \sqrt{1 - \bar\alpha_t}\,x` (``"v_prediction"``).
    :math:`f = -\frac12 \sum_d \|\hat y_d - y_d\|^2` over D draws of (t, noise). L = -f, so q = 1 and w = 0. The usual
    loss is the mean over entries and draws, which differs by a constant factor.

    The noise is a pure function of the row's seed and the number of the draw: SplitMix64 and the inverse normal
    distribution function. The timesteps are too, unless the batch has them. A row therefore has the same f in every
    batch. Different rows need different seeds, for example their number in the dataset.

    Batches: a mapping or dataclass with ``sample`` ``(B, ...)`` and ``seed`` ``(B,)`` integers; ``timestep``, ``(B,)``
    or ``(B, D)`` integers from 0 to S - 1, is optional. All other columns are keyword arguments (a text embedding,
    class labels). Or a tuple ``(sample, *conditions, seed)``. The model is called as ``model(x_t, t, ...)``, t being
    ``(B,)``; it returns a tensor, a tuple with it, or an object or mapping with ``sample`` (diffusers).

    ``sample_labels`` draws targets y from unit Gaussians around the predictions (a batch with the column ``target``),
    so the Fisher information is the Gauss-Newton matrix of L.

    Source: Ho et al. (arXiv:2006.11239), equation 14; Salimans and Ho (arXiv:2202.00512), section 4.
    """

    name: ClassVar[str] = "diffusion"
    has_curvature = False

    prediction: Literal["epsilon", "sample", "v_prediction"] = "epsilon"
    """What the model predicts."""
    schedule: str | Sequence[float] = "linear"
    r""":math:`\bar\alpha_t` for every timestep, or the name of a schedule: ``"linear"`` (betas from 1e-4 to 0.02 as in
    DDPM), ``"scaled_linear"`` (squares of evenly spaced numbers from 0.00085 to 0.012, as in Stable Diffusion),
    ``"cosine"`` (Nichol and Dhariwal, arXiv:2102.09672, equation 17)."""
    num_steps: int = 1000
    """S of a named schedule; a sequence has its own length."""
    draws: int = 1
    """D, draws of (timestep, noise) per row. Each costs one call of the model."""
    _checks: ClassVar = {
        "prediction": partial(one_of, ("epsilon", "sample", "v_prediction")),
        "schedule": None,
        "num_steps": positive_int,
        "draws": positive_int,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.schedule, str):
            named = _SCHEDULES[one_of(sorted(_SCHEDULES), schedule=self.schedule)]
            self._levels = list(accumulate((1 - beta for beta in named(self.num_steps)), mul))
        else:
            self.schedule = self._levels = [float(level) for level in self.schedule]
            if not self._levels or not all(0.0 <= level <= 1.0 for level in self._levels):
                raise InvalidInputError(
                    "schedule must be the name of a schedule, or the cumulative products of 1 - beta for every "
                    "timestep, each from 0 to 1."
                )
            self.num_steps = len(self._levels)

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        """Return f, q and w; see :meth:`AbstractModelOutput.evaluate`."""
        rows = self._rows(batch)
        output = torch.zeros_like(rows.sample.flatten(1)[:, 0])
        for draw in range(self.draws):
            predicted, target = self._denoised(model_call, rows, draw)
            if rows.target is not None:
                target = rows.target[:, draw].to(target.dtype)
            output = output - 0.5 * (predicted - target).flatten(1).square().sum(1)
        return linear_terms(output * nan_unless(rows.valid, output))

    def sample_labels(self, model_call: ModelCall, batch: Batch, noise: UniformNoise) -> Batch:
        """Draw targets from unit Gaussians; see :meth:`AbstractModelOutput.sample_labels`."""
        rows = self._rows(batch)
        predicted = torch.stack(
            [self._denoised(model_call, rows, draw)[0] for draw in range(self.draws)], dim=1
        )
        fields = fields_of(batch)
        if fields is None:
            raise InvalidInputError(
                "Targets can only be drawn for batches with named columns. Use a dict batch with 'sample' and 'seed'."
            )
        return {**fields, _TARGET: sampled_values(predicted, noise)}

    def _denoised(self, model_call: ModelCall, rows: _Rows, draw: int) -> tuple[Tensor, Tensor]:
        """Return the prediction and the target of one draw."""
        sample, timesteps = rows.sample, rows.timesteps[:, draw]
        levels = torch.tensor(self._levels, dtype=torch.float64, device="cpu").to(sample.dtype)
        level = levels.to(sample.device)[timesteps].reshape(-1, *[1] * (sample.dim() - 1))
        signal, spread = level.sqrt(), (1 - level).sqrt()
        noise = seeded_normals(rows.seeds, sample.shape[1:], stream=2 * draw + 1).to(sample.dtype)
        noisy = signal * sample + spread * noise
        predicted = tensor_of(model_call(noisy, timesteps, *rows.conditions, **rows.named), "sample")
        if predicted.shape != sample.shape:
            shapes = shape_texts(predicted.shape, sample.shape)
            raise InvalidInputError(
                f"The model predicted shape {shapes[0]} for samples of shape {shapes[1]}. Expected the same shape (of "
                "a model that also predicts variances, wrap it and return the mean)."
            )
        if self.prediction == "sample":
            return predicted, sample
        return predicted, noise if self.prediction == "epsilon" else signal * noise - spread * sample

    def _rows(self, batch: Batch) -> _Rows:
        conditions: Sequence[Any] = ()
        if isinstance(batch, tuple | list) and len(batch) >= 2:
            sample, *conditions, seeds = batch
            fields = {}
        else:
            fields = columns_of(batch, [_SAMPLE, _SEED])
            sample, seeds = fields.pop(_SAMPLE), fields.pop(_SEED)
        if not isinstance(sample, Tensor) or sample.dim() < 2:
            raise InvalidInputError(
                f"The samples are a {type(sample).__name__}. Expected a tensor (B, ...) with at least 2 axes."
            )
        if not isinstance(seeds, Tensor) or seeds.dim() != 1 or _not_whole(seeds):
            raise InvalidInputError(
                "The seeds are not a tensor of integers (B,). Expected one integer per row, such as its number."
            )
        timesteps, valid = self._timesteps(fields.pop(_TIMESTEP, None), seeds.long())
        target = fields.pop(_TARGET, None)
        sample = precise(sample, what="The samples")
        return _Rows(sample, seeds.long(), timesteps, valid, target, conditions, fields)

    def _timesteps(self, column: Any, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Return timesteps ``(B, D)``, and whether those of a row are in range ``(B,)``."""
        if column is None:
            uniform = [seeded_uniforms(seeds, (), stream=2 * draw) for draw in range(self.draws)]
            drawn = (torch.stack(uniform, dim=1) * self.num_steps).long()
            return drawn.clamp(max=self.num_steps - 1), torch.ones_like(seeds, dtype=torch.bool)
        wanted = (seeds.shape[0], self.draws)
        if (
            not isinstance(column, Tensor)
            or _not_whole(column)
            or column.reshape(len(seeds), -1).shape != wanted
        ):
            raise InvalidInputError(
                f"The column 'timestep' does not fit {self.draws} draw(s) per row. Expected integers of shape (B,) or "
                f"(B, {self.draws})."
            )
        timesteps = column.reshape(wanted).long()
        valid = (timesteps >= 0) & (timesteps < self.num_steps)
        refuse_invalid(
            valid, timesteps, expected=f"an integer from 0 to {self.num_steps - 1}", what=_TIMESTEP
        )
        return timesteps.clamp(0, self.num_steps - 1), valid.all(1)


def _not_whole(numbers: Tensor) -> bool:
    return numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool


def _cosine(steps: int) -> list[float]:
    def level(step: int) -> float:
        return math.cos((step / steps + 0.008) / 1.008 * math.pi / 2) ** 2

    return [min(1 - level(step + 1) / level(step), 0.999) for step in range(steps)]


def _spaced(first: float, last: float, steps: int) -> list[float]:
    return [first + (last - first) * step / max(steps - 1, 1) for step in range(steps)]


_SCHEDULES: dict[str, Callable[[int], list[float]]] = {
    "linear": lambda steps: _spaced(1e-4, 0.02, steps),
    "scaled_linear": lambda steps: [root**2 for root in _spaced(0.00085**0.5, 0.012**0.5, steps)],
    "cosine": _cosine,
}
"""Betas by the name of their schedule."""
