"""What has Kronecker factors, what has its diagonal, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from kronecker_reference import batches_of, fitted, gradients, preconditioned
from torch import Tensor, nn
from torch.nn import functional

from trak_lite.errors import InvalidInputError, NonFiniteError, StateError
from trak_lite.featurizing.kronecker.covariances import CurvatureSums
from trak_lite.featurizing.kronecker.curvature import loaded
from trak_lite.featurizing.kronecker.fit import fit_curvature, kept_units
from trak_lite.featurizing.kronecker.precondition import PreconditionedProjector, Preconditioner
from trak_lite.featurizing.kronecker.units import find_units
from trak_lite.gradient_computers import HookGradientComputer, collect_gradients
from trak_lite.methods import EKFAC
from trak_lite.modelout_functions import CallableModelOutput, CLIPModelOutput, resolve_task
from trak_lite.projectors import NoOpProjector
from trak_lite.types import DenseBlock, FactoredBlock

LABELS = "image_classification"
DOUBLE = torch.float64


def data(count: int = 8, width: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, width, generator=generator, dtype=DOUBLE)
    return x, torch.randint(3, (count,), generator=generator)


class Mixed(nn.Module):
    """Every kind of parameter: covered, in part, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6)
        self.conv = nn.Conv1d(2, 4, 2)
        self.grouped = nn.Conv1d(4, 4, 1, groups=2)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).mean(1).reshape(-1, 2, 3)
        return self.head(self.norm(self.grouped(torch.tanh(self.conv(x))).flatten(1)) * self.scale)


def mixed() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = Mixed().to(DOUBLE).eval()
    return model, (torch.randint(5, (9, 4)), torch.randint(3, (9,)))


def margins(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return -torch.log(torch.expm1(functional.cross_entropy(model(batch[0]), batch[1], reduction="none")))


def test_every_parameter_has_a_treatment() -> None:
    model, batch = mixed()

    curvature = fitted(model, LABELS, batches_of(*batch))

    assert {line.name: line.how for line in curvature.treatments()} == {
        "scale": "diagonal",
        "table.weight": "diagonal",
        "conv.weight": "kronecker",
        "conv.bias": "kronecker",
        "grouped.weight": "diagonal",
        "grouped.bias": "diagonal",
        "norm.weight": "diagonal",
        "norm.bias": "diagonal",
        "head.weight": "kronecker",
        "head.bias": "kronecker",
    }
    assert {line.name: line.unit for line in curvature.treatments()}["head.bias"] == "head.weight"


@pytest.mark.parametrize("name", ["table.weight", "grouped.weight", "grouped.bias", "norm.weight", "scale"])
def test_a_diagonal_is_the_sum_of_squared_gradients(name: str) -> None:
    """A row of a table that was looked up twice counts as the square of the sum."""
    model, batch = mixed()
    sizes = [p.numel() for p in model.parameters()]
    names = [known for known, _ in model.named_parameters()]
    place = names.index(name)
    losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    columns = slice(sum(sizes[:place]), sum(sizes[: place + 1]))
    squares = (gradients(model, losses)[:, columns] ** 2).sum(0)
    target = gradients(model, margins(model, batch))[:, columns]

    curvature = fitted(model, LABELS, batches_of(*batch, size=4), fisher="empirical")
    found = preconditioned(model, LABELS, batch, curvature, 0.5)[:, columns]

    np.testing.assert_allclose(found, target / (squares + 0.5 * squares.mean()), rtol=1e-7, atol=1e-12)


def test_a_side_that_is_too_long_keeps_its_coordinates() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3, dtype=DOUBLE)
    x, y = data()

    one, none = (fitted(model, LABELS, batches_of(x, y), max_side=side) for side in (4, 2))

    assert {line.how for line in one.treatments()} == {"one side"}
    assert {line.how for line in none.treatments()} == {"diagonal"}
    assert one.units[0].values.shape == (3, 7)


def test_k_fac_with_one_long_side_takes_its_diagonal() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3, dtype=DOUBLE)
    x, y = data()

    curvature = fitted(model, LABELS, batches_of(x, y), max_side=4, correct_eigenvalues=False)

    values = curvature.units[0].values
    shares = torch.cat([x.square().sum(0), torch.tensor([8.0], dtype=DOUBLE)])
    # Not divided by the sums of rows: the gradients of three logits sum to zero, so that one row is rounded zeros.
    torch.testing.assert_close(values, values.sum(1, keepdim=True) * (shares / shares.sum()))
    assert int((values.sum(1) > 1e-9 * values.sum()).sum()) == 2


class Tied(nn.Module):
    """One matrix that is table and head, and a layer whose bias does more than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.table(ids).mean(1)) * (1 + self.layer.bias))


def test_a_bias_that_is_used_elsewhere_and_a_tied_weight_stand_for_themselves() -> None:
    torch.manual_seed(0)
    model = Tied().to(DOUBLE).eval()
    batch = (torch.randint(3, (9, 2)), torch.randint(3, (9,)))

    curvature = fitted(model, LABELS, batches_of(*batch))
    found = preconditioned(model, LABELS, batch, curvature, 0.1)

    assert {line.name: line.how for line in curvature.treatments()} == {
        "table.weight": "diagonal",
        "layer.weight": "kronecker",
        "layer.bias": "diagonal",
        "head.bias": "diagonal",
    }
    assert found.shape == (9, sum(p.numel() for p in model.parameters()))
    assert bool(found.isfinite().all())
    assert bool(found.any(0).all()), "a parameter was dropped"


def test_units_cover_each_kept_parameter_once() -> None:
    model, _ = mixed()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name != "conv.bias"}

    names = [name for unit in find_units(model, shapes) for name in unit.names]

    assert sorted(names) == sorted(shapes)


def test_a_parameter_without_any_gradient_gets_zero_and_no_nan() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Unused().to(DOUBLE)
    x, y = data()

    found = preconditioned(model, LABELS, (x, y), fitted(model, LABELS, batches_of(x, y)), 0.1)

    assert bool(found[:, :21].any())
    assert not bool(found[:, 21:].any())


def test_factors_of_a_convolution_are_kept_on_request() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(72, 3)).to(DOUBLE)
    batch = (torch.randn(4, 1, 6, 6, dtype=DOUBLE), torch.randint(3, (4,)))
    found: dict[bool, Any] = {}

    for keep in (False, True):
        computer = HookGradientComputer(model, resolve_task(LABELS), keep_factors=keep)
        blocks: list[Any] = []
        computer.stream_gradients(batch, blocks.append)
        found[keep] = {block.name: type(block) for block in blocks}, collect_gradients(computer, batch)

    assert found[False][0]["0.weight"] is DenseBlock
    assert found[True][0]["0.weight"] is FactoredBlock
    torch.testing.assert_close(found[True][1], found[False][1])


@pytest.mark.parametrize("order", [("bias", "weight"), ("weight", "bias"), ("weight",), ("bias",)])
@pytest.mark.parametrize("factored", [True, False])
def test_blocks_come_in_any_order_and_may_be_missing(order: tuple[str, ...], factored: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3, dtype=DOUBLE)
    x, y = data()
    inverse = Preconditioner(fitted(model, LABELS, batches_of(x, y)), damping=0.1)
    projector = PreconditionedProjector(NoOpProjector(), inverse)
    g = torch.randn(8, 3, dtype=DOUBLE)
    dense = {"weight": torch.einsum("no,ni->noi", g, x), "bias": g}
    expected = projector.project(
        {name: grad if name in order or (factored and "weight" in order) else torch.zeros_like(grad)
         for name, grad in dense.items()}, 0,
    )  # fmt: skip

    accumulator = projector.accumulator(8, model_id=0, parameters={"weight": (3, 6), "bias": (3,)})
    for name in order:
        is_factored = factored and name == "weight"
        accumulator.add(
            FactoredBlock(name, x[:, None], g[:, None]) if is_factored else DenseBlock(name, dense[name])
        )

    torch.testing.assert_close(accumulator.features(), expected)


# What is refused


@dataclass
class Refusal:
    settings: dict[str, Any]
    message: str


@pytest.mark.parametrize(
    "case",
    [
        Refusal({"fisher": "true"}, "fisher must be one of"),
        Refusal({"draws": 0}, "draws"),
        Refusal({"max_side": 0}, "max_side"),
        Refusal({"max_rows": 0}, "max_rows"),
    ],
    ids=lambda case: case.message,
)
def test_settings_out_of_range_are_refused(case: Refusal) -> None:
    with pytest.raises(InvalidInputError, match=case.message):
        EKFAC(**case.settings)


def test_a_fisher_that_the_task_does_not_have_is_refused_and_auto_avoids_it() -> None:
    linear = CallableModelOutput(lambda call, batch: call(batch[0]).sum(1))

    assert EKFAC().fitted_to(resolve_task(LABELS)).fisher == "sampled"
    assert EKFAC(draws=3).fitted_to(linear).draws == 1
    assert EKFAC().fitted_to(linear).fisher == "empirical"
    assert EKFAC().fitted_to(CLIPModelOutput()).fisher in ("curvature", "empirical")
    with pytest.raises(InvalidInputError, match="fisher='sampled' draws labels"):
        EKFAC(fisher="sampled").fitted_to(linear)
    with pytest.raises(InvalidInputError, match="fisher='curvature' needs a loss that is curved"):
        EKFAC(fisher="curvature").fitted_to(linear)


def test_no_rows_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="There are no rows to fit a curvature on"):
        fitted(nn.Linear(6, 3), LABELS, lambda: [])


def test_a_damping_of_zero_and_unknown_parameters_are_refused() -> None:
    model = nn.Linear(6, 3, dtype=DOUBLE)
    curvature = fitted(model, LABELS, batches_of(*data()))

    with pytest.raises(InvalidInputError, match="Expected a number above 0"):
        Preconditioner(curvature, damping=0.0)
    with pytest.raises(InvalidInputError, match="fitted without the parameters \\['other'\\]"):
        Preconditioner(curvature, damping=0.1).stream({"other": (2,)}, lambda _: None)
    with pytest.raises(
        InvalidInputError, match=r"one tensor of shape \(2, 21\), which does not name the parameters"
    ):
        PreconditionedProjector(NoOpProjector(), Preconditioner(curvature, damping=0.1)).project(
            torch.zeros(2, 21), 0
        )


def test_gradients_in_two_forms_are_refused() -> None:
    model = nn.Linear(6, 3, bias=False)
    (unit,) = find_units(model, {"weight": (3, 6)})
    sums = CurvatureSums([unit], max_side=100)
    sums.add(FactoredBlock("weight", torch.ones(2, 1, 6), torch.ones(2, 1, 3)))
    sums.add(DenseBlock("weight", torch.zeros(2, 3, 6)))
    assert sums.units[unit].is_factored, "an expert without rows counts for nothing"

    sums.add(DenseBlock("weight", torch.ones(2, 3, 6)))

    with pytest.raises(InvalidInputError, match="factored in some blocks and dense in others"):
        assert sums.units[unit].is_factored


def test_sums_that_overflow_are_refused() -> None:
    model = nn.Linear(6, 3, bias=False)
    x, y = data()
    x = x.float()
    x[0, 0] = 1e30

    with pytest.raises(NonFiniteError, match="inputs of 'weight'"):
        fitted(model, LABELS, batches_of(x, y))


def test_a_fit_goes_on_where_it_was_cut_off_and_says_what_is_missing() -> None:
    model = nn.Linear(6, 3, dtype=DOUBLE)
    x, y = data()
    keeper: dict[str, Any] = {}
    arguments = (model, resolve_task(LABELS))
    passes: list[int] = []

    def batches() -> Any:
        passes.append(1)
        if len(passes) == 2:
            raise KeyboardInterrupt
        return batches_of(x, y)()

    with pytest.raises(KeyboardInterrupt):
        fit_curvature(*arguments, batches, method=EKFAC(), keeper=keeper)
    units = kept_units(model, None)
    message = "'values' of the curvature of 'weight' is missing: the fit was not made, or was interrupted"
    with pytest.raises(StateError, match=message):
        loaded(units, keeper, torch.device("cpu"))
    found = fit_curvature(*arguments, batches, method=EKFAC(), keeper=keeper)

    assert len(passes) == 3, "the first pass was taken again"
    whole = fitted(model, LABELS, batches_of(x, y))
    torch.testing.assert_close(found.units[0].values, whole.units[0].values)
