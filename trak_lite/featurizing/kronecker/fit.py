"""Fits a curvature: a first pass for the factors, a second pass for the eigenvalues in their eigenbasis.

Source: George et al., "Fast Approximate Natural Gradient Descent in a Kronecker-factored Eigenbasis"
(arXiv:1806.03884); Grosse et al., "Studying Large Language Model Generalization with Influence Functions"
(arXiv:2308.03296).

Memory: the first pass has ``rows^2 + width^2`` float64 numbers for every unit, the second pass the eigenvectors and
eigenvalues. Units are decomposed one at a time between the passes.

The arrays of the checkpoints of a store are entries of it. Their key is made of the weights, the train rows and the
settings of the fit. One fit is stored per checkpoint. An interrupted fit continues at the interrupted pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, final

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trak_lite.core.devices import full_float32, wide_dtype
from trak_lite.core.eval_caches import passes_undone
from trak_lite.core.json_text import digest_of
from trak_lite.core.progress import progress_bar
from trak_lite.core.random import row_noise
from trak_lite.core.validate import some_of
from trak_lite.data.batches import with_own_containers
from trak_lite.data.datasets import RowNumbers, Rows, spread_rows
from trak_lite.errors import InvalidInputError, UnsupportedModelError
from trak_lite.featurizing.fisher import require_writable
from trak_lite.featurizing.kronecker.curvature import ArrayKeeper, KroneckerCurvature, UnitArrays, decomposed
from trak_lite.featurizing.kronecker.units import GradientJoiner, UnitSums, find_units, position_masks
from trak_lite.featurizing.row_checks import compared_terms
from trak_lite.gradient_computers import HookGradientComputer, select_parameters
from trak_lite.gradient_computers._base import refusal
from trak_lite.gradient_computers.self_check import SelfCheckError
from trak_lite.methods import EKFAC
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall
from trak_lite.run.tables import curvature_path
from trak_lite.store import AbstractFeatureStore
from trak_lite.types import Batch, BlockSink, ParameterChoice

__all__ = ["NumberedBatches", "fit_curvature", "unit_arrays"]

logger = logging.getLogger(__name__)

_VERSION = 2
_NOTED = "rows"
"""Beside the arrays of a fit: f, q and w of a few train rows."""

NumberedBatches: TypeAlias = Callable[[], Iterable[tuple[RowNumbers, Batch]]]
"""Returns a new iterator over pairs of row numbers ``(B,)`` and their batch on the model's device."""


def unit_arrays(model: nn.Module, grad_wrt: ParameterChoice | None, keeper: ArrayKeeper) -> list[UnitArrays]:
    """Return the arrays of all units of the parameters that gradients are computed for."""
    parameters = select_parameters(model, grad_wrt)
    units = find_units(model, {name: tuple(p.shape) for name, p in parameters.items()})
    return [UnitArrays(keeper, number, unit) for number, unit in enumerate(units)]


def fit_curvature(
    model: nn.Module,
    task: AbstractModelOutput,
    batches: NumberedBatches,
    *,
    method: EKFAC,
    grad_wrt: ParameterChoice | None = None,
    keeper: ArrayKeeper | None = None,
    num_rows: int | None = None,
) -> KroneckerCurvature:
    """Fit the curvature of the training loss at the model's weights.

    Arrays that the keeper already has are not computed again, so a fit that was interrupted between its passes
    continues there.

    Args:
        model: In the mode that its gradients are taken in.
        task: Defines the loss whose curvature is fitted.
        batches: The rows to fit on; read once per pass.
        method: Sets which curvature is fitted, and how.
        grad_wrt: As for a gradient computer.
        keeper: Stores the arrays; ``None`` keeps them in memory.
        num_rows: Number of rows that the sums are scaled to; ``None`` uses the number of rows in ``batches``.

    Raises:
        InvalidInputError: If the task does not support the settings of the method, or there is no batch.
        UnsupportedModelError: If hooks cannot differentiate the model sample by sample.
        NonFiniteError: If a sum is NaN or infinite.
    """
    arrays = unit_arrays(model, grad_wrt, {} if keeper is None else keeper)
    rows = _LossGradients(model, task, batches, method.fitted_to(task), grad_wrt, num_rows)
    if not all(unit_fit.has_basis() for unit_fit in arrays):
        _fit_bases(arrays, rows)
    if not all(unit_fit.is_complete() for unit_fit in arrays):
        _fit_values(arrays, rows)
    curvature = KroneckerCurvature.of(arrays, rows.device)
    _report(curvature)
    return curvature


@final
@dataclass(slots=True, eq=False)
class _LossGradients:
    """Gradients of all rows to fit on; their second moments are the curvature."""

    model: nn.Module
    task: AbstractModelOutput
    batches: NumberedBatches
    method: EKFAC
    grad_wrt: ParameterChoice | None
    num_rows: int | None
    masks: Sequence[Tensor] = ()
    """Of the present batch; see :func:`position_masks`."""
    _seen: int = 0

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def scale(self) -> float:
        """Factor of the sums of the last pass: number of rows that they represent / number of drawn gradients."""
        if not self._seen:
            raise InvalidInputError("There are no rows to fit a curvature on. Pass at least one batch.")
        return (self.num_rows or self._seen) / (self._seen * self.method.draws)

    def stream(
        self, sink: BlockSink, *, after_batch: Callable[[], None], keep_factors: bool, first_draw: int
    ) -> None:
        """Pass the blocks of all rows to the sink, with labels drawn anew for each draw."""
        computer = HookGradientComputer(
            self.model, self.method.loss_of(self.task), grad_wrt=self.grad_wrt, keep_factors=keep_factors
        )
        self._seen = 0
        for rows, batch in self.batches():
            self._seen += len(rows)
            self.masks = position_masks(batch)
            with full_float32(self.device):
                for draw in range(first_draw, first_draw + self.method.draws):
                    labelled = batch
                    if self.method.fisher == "sampled":
                        noise = row_noise(rows, seed=self.method.seed, draw=draw)
                        call, own = ModelCall(self.model), with_own_containers(batch)
                        with torch.no_grad(), passes_undone(self.model):
                            labelled = self.task.sample_labels(call, own, noise)
                    try:
                        computer.stream_gradients(labelled, sink)
                    except UnsupportedModelError as error:
                        if isinstance(error, SelfCheckError):
                            raise
                        raise UnsupportedModelError(
                            "EKFAC, by which CG and LiSSA are preconditioned, needs gradients of modules from hooks, "
                            "whatever gradient_computer is, and hooks do not cover this model: "
                            f"{refusal(error)} Use a method without this fit: GaussNewton or Fisher on stored rows, "
                            "GradDot, TracIn."
                        ) from error
                    after_batch()


def _fit_bases(arrays: Sequence[UnitArrays], rows: _LossGradients) -> None:
    """Sum the factors of all units, then decompose them unit by unit."""
    sums = [UnitSums(unit_fit.unit, rows.method.max_side) for unit_fit in arrays]
    sums_of = {name: unit_sums for unit_sums in sums for name in unit_sums.unit.names}
    rows.stream(
        lambda block: sums_of[block.name].add(block, rows.masks),
        after_batch=lambda: None,
        keep_factors=True,
        first_draw=0,
    )
    sums_of.clear()
    for unit_fit in arrays:
        _keep_basis(unit_fit, sums.pop(0), rows)  # which frees the sums of one unit after the other


def _keep_basis(unit_fit: UnitArrays, sums: UnitSums, rows: _LossGradients) -> None:
    """Store what the first pass tells of a unit; the eigenvalues of gradients with factors only for K-FAC."""
    unit, scale, joint = sums.unit, rows.scale, sums.is_joint
    zeros = partial(torch.zeros, dtype=torch.float32, device="cpu")
    outputs, inputs, values, bias = None, None, None, None
    if sums.is_factored and sums.inputs is not None and sums.outputs is not None:
        factor = sums.inputs
        if not joint and unit.bias is not None:  # without the column of ones
            factor = factor[:-1] if factor.dim() == 1 else factor[:-1, :-1]
        in_values, inputs = decomposed(factor, what=f"the inputs of {unit.weight!r}")
        out_values, outputs = decomposed(sums.outputs, what=f"the output gradients of {unit.weight!r}")
        if not rows.method.correct_eigenvalues:
            # Both factors are sums over the same rows, draws and positions, so one is divided by their number
            # (arXiv:1602.01407).
            values = scale * torch.outer(out_values, in_values) / sums.num_positions
    else:
        values = scale * (zeros(unit.rows, unit.columns) if sums.squares is None else sums.squares)
    if unit.bias is not None and not joint:
        bias = scale * (zeros(1, unit.rows) if sums.bias_squares is None else sums.bias_squares)
    # Eigenvalues that are there belong to the eigenvectors of before.
    unit_fit.put(values=None if values is None else values.to(sums.dtype))
    sides = {"bias": bias, "outputs": outputs, "inputs": inputs}
    unit_fit.put(
        joint=torch.tensor(float(joint), dtype=torch.float32, device="cpu"),
        **{name: None if side is None else side.to(sums.dtype) for name, side in sides.items()},
    )


def _fit_values(arrays: Sequence[UnitArrays], rows: _LossGradients) -> None:
    """Sum the squares of the gradients in the eigenbases."""
    waiting = [unit_fit for unit_fit in arrays if not unit_fit.is_complete()]
    bases = [unit_fit.basis(rows.device) for unit_fit in waiting]
    zero = torch.zeros((), dtype=wide_dtype(rows.device), device=rows.device)
    sums = {basis.unit: zero.new_zeros(basis.unit.rows, basis.unit.width) for basis in bases}
    basis_of = {basis.unit: basis for basis in bases}
    joiner = GradientJoiner(
        list(sums), lambda gradient: basis_of[gradient.unit].add_squares(gradient, sums[gradient.unit])
    )
    # New labels: with the labels that the basis was fitted to, large eigenvalues would be overestimated.
    rows.stream(joiner.add, after_batch=joiner.finish, keep_factors=False, first_draw=rows.method.draws)
    for unit_fit, basis in zip(waiting, bases, strict=True):
        dtype = next(side.dtype for side in (basis.outputs, basis.inputs) if side is not None)
        unit_fit.put(values=(rows.scale * sums[basis.unit]).to(dtype))


def _report(curvature: KroneckerCurvature) -> None:
    """Log the parameters that contribute nothing, and those that are not approximated by two Kronecker factors."""
    lost = [name for unit in curvature.units if not unit.mean for name in unit.basis.unit.names]
    if lost:
        logger.warning(
            "The curvature of %s is zero or beneath the smallest normal number: these parameters contribute nothing.",
            some_of(lost),
        )
    for how in ("one side", "diagonal"):
        names = [name for name, treatment in curvature.treatments().items() if treatment == how]
        if names:
            logger.info(
                "The curvature of %d parameters has the treatment '%s': %s.", len(names), how, names[:10]
            )


@final
@dataclass(frozen=True, slots=True, eq=False)
class KroneckerFits:
    """Curvatures of the checkpoints of a store, fitted with the settings of a method; one fit per checkpoint."""

    store: AbstractFeatureStore
    model: nn.Module
    names: list[str]
    """The kept parameters."""
    method: EKFAC
    """Resolved for the task."""
    task: AbstractModelOutput
    device: torch.device

    def record(self) -> dict[str, Any]:
        """Return what determines the fits, as JSON values: the settings and the present train rows."""
        dataset = digest_of(self.store.manifest.fingerprint.get("dataset", {}))
        return {"version": _VERSION, "settings": self.method.fit_json(), "dataset": dataset}

    def has(self, digest: str) -> bool:
        """Whether the fit of the checkpoint with these weights is complete."""
        return all(unit_fit.is_complete() for unit_fit in self._arrays(digest))

    def curvature(self, digest: str) -> KroneckerCurvature:
        """Return the curvature of the checkpoint with these weights; raises if it is not fitted."""
        return KroneckerCurvature.of(self._arrays(digest), self.device)

    def fit(self, digest: str, rows: Rows, *, label: str, progress: bool | None) -> None:
        """Fit the checkpoint that is loaded in the model, or the missing part of the fit."""
        require_writable(self.store)
        self.check(digest, rows, label=label)
        wanted = spread_rows(len(rows), self.method.max_rows)

        def batches() -> Iterator[tuple[RowNumbers, Batch]]:
            with progress_bar(len(wanted), label=label, progress=progress) as bar:
                for numbers, batch in rows.moved(wanted, self.device):
                    yield numbers, batch
                    bar.update(len(numbers))

        fit_curvature(
            self.model,
            self.task,
            batches,
            method=self.method,
            grad_wrt=self.names,
            keeper=self._keeper(digest),
            num_rows=len(rows),
        )

    def check(self, digest: str, rows: Rows, *, label: str) -> None:
        """Compare what a few train rows give with what they gave when the fit began; note it if the fit begins now.

        Neither digests of weights nor settings cover the code of the model and of the task.
        """
        keeper = self._keeper(digest)
        begins = not all(unit_fit.has_basis() for unit_fit in self._arrays(digest))
        noted = None if begins else keeper.get(_NOTED)
        seed = self.method.seed if self.method.fisher == "sampled" else None
        terms = compared_terms(noted, self.model, self.task, rows, self.device, seed=seed, label=label)
        if begins:
            keeper[_NOTED] = terms

    def _arrays(self, digest: str) -> list[UnitArrays]:
        return unit_arrays(self.model, self.names, self._keeper(digest))

    def _keeper(self, digest: str) -> _StoredArrays:
        key = digest_of({**self.record(), "weights": digest, "parameters": self.names})
        return _StoredArrays(self.store, curvature_path(digest), key)


@final
@dataclass(frozen=True, slots=True)
class _StoredArrays:
    """An :class:`ArrayKeeper` whose arrays are entries of a store under one key."""

    store: AbstractFeatureStore
    folder: str
    key: str

    def get(self, name: str, /) -> NDArray[Any] | None:
        return self.store.entry(f"{self.folder}/{name}", self.key)

    def __setitem__(self, name: str, array: NDArray[Any], /) -> None:
        self.store.put_entry(f"{self.folder}/{name}", self.key, array)
