"""Normalised and clipped gradients, against the gradients of a plain loop divided by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from models import CASES, by_loop, make
from torch import Tensor, nn

from trak_lite.data.batches import batch_size
from trak_lite.errors import InvalidInputError
from trak_lite.gradient_computers import (
    GRADIENT_COMPUTERS,
    FunctionalGradientComputer,
    HookGradientComputer,
    collect_gradients,
)
from trak_lite.gradient_computers.normalization import (
    Normalization,
    as_normalization,
    clip,
    clipping_threshold,
)
from trak_lite.gradient_computers.normalized import RowNormalizer
from trak_lite.modelout_functions import resolve_task
from trak_lite.types import DenseBlock, FactoredBlock, GradientBlock, SummedBlock

UNIT, BY_MODULE = Normalization("unit"), Normalization("unit", scope="module")


def case_of(name: str, computer: Any = HookGradientComputer, **settings: Any):
    """A computer, its batch, and the gradients of a plain loop."""
    case = CASES[name]
    model, batch = make(case)
    return computer(model, resolve_task(case.output), **settings), batch, by_loop(model, case.output, batch)


def normalised(computer: Any, batch: Any, normalization: Normalization) -> dict[str, Tensor]:
    """The gradients ``(B, p)`` of each parameter, as they reach a feature row."""
    count = batch_size(batch)
    normalizer, found = RowNormalizer(normalization, count), dict[str, Tensor]()

    def take(block: GradientBlock) -> None:
        part = block.dense()
        whole = found.setdefault(block.name, part.new_zeros(count, part.shape[1]))
        whole[block.start : block.start + len(part)] = part

    normalizer.stream(computer, batch, take)
    ordered = {name: found[name] for name in computer.parameters}
    scaled = normalizer.scale(torch.cat(list(ordered.values()), 1))
    widths = [grad.shape[1] for grad in ordered.values()]
    return dict(zip(ordered, scaled.split(widths, 1), strict=True))


def rows(grads: dict[str, Tensor], module: str | None = None) -> Tensor:
    return torch.cat(
        [g.flatten(1) for name, g in grads.items() if module in (None, name.rpartition(".")[0])], 1
    )


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
def test_unit_rows_are_the_gradients_over_their_norm(computer: Any, chunk_size: int | None) -> None:
    inner, batch, plain = case_of("small CNN", computer, chunk_size=chunk_size)

    found = rows(normalised(inner, batch, UNIT))

    expected = rows(plain) / rows(plain).norm(dim=1, keepdim=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(4, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("name", ["GPT-2", "U-Net"])
def test_module_by_module_every_modules_part_has_norm_one(name: str, chunk_size: int | None) -> None:
    inner, batch, plain = case_of(name, chunk_size=chunk_size)

    found = normalised(inner, batch, BY_MODULE)

    for module in {name.rpartition(".")[0] for name in plain}:
        part = rows(plain, module)
        expected = part / part.norm(dim=1, keepdim=True)
        torch.testing.assert_close(rows(found, module), expected, rtol=1e-9, atol=1e-12)


def test_clipping_shortens_the_long_rows_and_keeps_the_bits_of_the_short() -> None:
    inner, batch, _ = case_of("small CNN")
    plain = rows(collect_gradients(inner, batch))
    norms = plain.norm(dim=1)
    threshold = clipping_threshold(norms, quantile=0.5)

    found = rows(normalised(inner, batch, clip(threshold)))

    short = norms <= threshold
    assert 0 < int(short.sum()) < 4
    assert torch.equal(found[short], plain[short])
    torch.testing.assert_close(found[~short], plain[~short] / norms[~short, None] * threshold)


@pytest.mark.parametrize("normalization", [UNIT, BY_MODULE, Normalization("clip", 0.1)])
def test_a_gradient_of_zero_stays_zero(normalization: Normalization) -> None:
    model = nn.Linear(3, 2).double()
    batch = (torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], dtype=torch.float64),)
    task = resolve_task(lambda call, batch: call(batch[0]).sum(1) * batch[0].abs().sum(1))

    found = rows(normalised(HookGradientComputer(model, task), batch, normalization))

    assert found[0].any()
    assert torch.equal(found[1], torch.zeros(8, dtype=torch.float64))


@pytest.mark.parametrize("normalization", [UNIT, BY_MODULE], ids=["global", "module"])
def test_blocks_keep_their_form(normalization: Normalization) -> None:
    plain, passed = list[GradientBlock](), list[GradientBlock]()
    inner, batch, _ = case_of("GPT-2")

    inner.stream_gradients(batch, plain.append)
    RowNormalizer(normalization, 4).stream(inner, batch, passed.append)

    kinds = {block.name: type(block) for block in plain}
    assert {DenseBlock, FactoredBlock, SummedBlock} == set(kinds.values())
    assert {block.name: type(block) for block in passed} == kinds


def test_a_norm_out_of_reach_gives_nan_and_not_a_short_row() -> None:
    factors = UNIT.factors(torch.tensor([float("inf"), float("nan"), 4.0]))

    assert factors.isnan().tolist() == [True, True, False]
    assert factors[2] == 0.5


@pytest.mark.parametrize("normalization", [UNIT, BY_MODULE], ids=["global", "module"])
def test_f_q_and_w_are_not_scaled(normalization: Normalization) -> None:
    inner, batch, _ = case_of("small CNN")

    found = RowNormalizer(normalization, 4).stream(inner, batch, lambda _: None)

    for ours, theirs in zip(found, inner.stream_gradients(batch, lambda _: None), strict=True):
        assert torch.equal(ours, theirs)


def test_rows_of_a_model_that_draws_masks_are_divided_by_the_norms_of_the_same_masks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 1)).train()
    inner = HookGradientComputer(model, resolve_task(lambda call, batch: call(batch[0])[:, 0]))
    batch = (torch.randn(3, 4),)

    torch.testing.assert_close(rows(normalised(inner, batch, UNIT)).norm(dim=1), torch.ones(3))
    torch.testing.assert_close(rows(normalised(inner, batch, BY_MODULE), "2").norm(dim=1), torch.ones(3))


def test_an_empty_batch_gives_no_rows() -> None:
    for normalization in (UNIT, BY_MODULE):
        inner, (images, labels), _ = case_of("small CNN")
        assert rows(normalised(inner, (images[:0], labels[:0]), normalization)).shape[0] == 0


def test_a_manifest_is_told_of_the_normalisation() -> None:
    assert Normalization("none").fingerprint() == {}
    assert Normalization("clip", 2, scope="module").fingerprint() == {
        "normalization": {"kind": "clip", "scope": "module", "threshold": 2.0}
    }


def test_a_subclass_that_overrides_an_originals_method_is_normalised_as_overridden() -> None:
    class FirstParameterOnly(FunctionalGradientComputer):
        def compute_per_sample_grad(self, batch):
            grads = super().compute_per_sample_grad(batch)
            return {name: grad * (name == "0.weight") for name, grad in grads.items()}

    inner, batch, plain = case_of("small CNN", FirstParameterOnly)

    found = normalised(inner, batch, UNIT)

    first = plain["0.weight"].flatten(1)
    expected = first / first.norm(dim=1, keepdim=True)
    torch.testing.assert_close(found["0.weight"], expected, rtol=1e-9, atol=1e-12)
    assert not found["6.weight"].any()


def test_a_threshold_is_a_quantile_of_the_norms() -> None:
    norms = torch.arange(1.0, 12.0)

    assert clipping_threshold(norms) == pytest.approx(10.0)
    assert clipping_threshold(norms, quantile=1) == 11.0


def test_a_threshold_of_an_array_that_cannot_be_written_is_that_of_a_tensor() -> None:
    norms = np.arange(12, dtype=np.float32).reshape(3, 4)
    norms.flags.writeable = False

    assert clipping_threshold(norms) == clipping_threshold(torch.arange(12.0)) == pytest.approx(9.9)


def test_settings_come_back_from_json() -> None:
    for normalization in (Normalization("none"), BY_MODULE, clip(2, scope="module"), clip(0.5)):
        assert Normalization(**json.loads(json.dumps(normalization.to_json()))) == normalization


def test_a_name_or_a_setting_stands_for_itself() -> None:
    assert as_normalization("none") == Normalization("none")
    assert as_normalization("unit") == UNIT
    assert as_normalization(clip(2.0)) == Normalization("clip", 2.0)


@pytest.mark.parametrize("choice", ["clip", "unti", 1.0, None, clip, np.ones(2)])
def test_what_stands_for_no_setting_is_refused(choice: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"'none', 'unit', clip\(C\).*; got"):
        as_normalization(choice)


def test_module_by_module_the_rest_of_a_module_goes_on_where_a_parameter_never_comes() -> None:
    class WithoutBias(FunctionalGradientComputer):
        def compute_per_sample_grad(self, batch):
            return {"6.weight": super().compute_per_sample_grad(batch)["6.weight"]}

    inner, batch, plain = case_of("small CNN", WithoutBias)
    found: list[GradientBlock] = []

    RowNormalizer(BY_MODULE, 4).stream(inner, batch, found.append)

    part = plain["6.weight"].flatten(1)
    assert [block.name for block in found] == ["6.weight"]
    torch.testing.assert_close(found[0].dense(), part / part.norm(dim=1, keepdim=True), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "normalization", [Normalization("none"), UNIT, BY_MODULE], ids=["none", "unit", "by module"]
)
def test_gradients_are_measured_in_the_pass_that_normalises_them(normalization: Normalization) -> None:
    inner, batch, plain = case_of("GPT-2", chunk_size=3)
    inner.stream_gradients(batch, lambda _: None)  # makes the plan
    inner.self_check = False
    passes: list[int] = []
    inner.model.register_forward_hook(lambda *_: passes.append(1))
    normalizer = RowNormalizer(normalization, 4)

    normalizer.stream(inner, batch, lambda _: None)

    torch.testing.assert_close(normalizer.norms(), rows(plain).norm(dim=1), rtol=1e-10, atol=0)
    assert len(passes) == 2  # one for each chunk


def test_rows_that_are_not_to_be_normalised_are_the_plain_gradients() -> None:
    inner, batch, plain = case_of("GPT-2", chunk_size=3)

    found = rows(normalised(inner, batch, Normalization("none")))

    torch.testing.assert_close(found, rows(plain), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("norms", "quantile", "message"),
    [
        ([1.0], 0.0, "quantile must be above 0"),
        ([1.0], 1.5, "at most 1, got 1.5"),
        ([], 0.9, "norms has 0 entries"),
        ([1.0, float("nan")], 0.9, "2 entries, of which 1 are finite"),
        ([0.0, 0.0], 0.9, "Most gradients are zero"),
    ],
)
def test_norms_without_a_threshold_are_refused(norms: list[float], quantile: float, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        clipping_threshold(torch.tensor(norms), quantile=quantile)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "unti"}, "unti"),
        ({"kind": "unit", "scope": "layer"}, "layer"),
        ({"kind": "unit", "threshold": 1.0}, "threshold=1.0 was given with kind='unit'"),
        ({"kind": "clip"}, r"needs a threshold, got None\. Expected a positive number"),
        ({"kind": "clip", "threshold": 0.0}, "above 0, got 0.0"),
        ({"kind": "clip", "threshold": float("inf")}, "finite number above 0, got inf"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Normalization(**settings)


def test_the_norm_is_that_of_the_kept_parameters() -> None:
    inner, batch, plain = case_of("small CNN", grad_wrt=["6.bias"])

    found = normalised(inner, batch, UNIT)

    assert list(found) == ["6.bias"]
    torch.testing.assert_close(
        found["6.bias"], plain["6.bias"] / plain["6.bias"].norm(dim=1, keepdim=True), rtol=1e-9, atol=1e-12
    )
