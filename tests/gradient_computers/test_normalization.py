"""Normalised and clipped gradients, against the gradients of a plain loop divided by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from models import CASES, by_loop, make
from torch import Tensor, nn

from trak_lite.errors import InvalidInputError, UnsupportedModelError
from trak_lite.gradient_computers import (
    GRADIENT_COMPUTERS,
    FunctionalGradientComputer,
    HookGradientComputer,
    IterativeGradientComputer,
    NormalizedGradientComputer,
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


def wrapped(name: str, normalization: Normalization, computer: Any = HookGradientComputer, **settings: Any):
    case = CASES[name]
    model, batch = make(case)
    inner = computer(model, resolve_task(case.output), **settings)
    return NormalizedGradientComputer(inner, normalization), batch, by_loop(model, case.output, batch)


def rows(grads: dict[str, Tensor], module: str | None = None) -> Tensor:
    return torch.cat(
        [g.flatten(1) for name, g in grads.items() if module in (None, name.rpartition(".")[0])], 1
    )


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
def test_unit_rows_are_the_gradients_over_their_norm(computer: Any, chunk_size: int | None) -> None:
    normalized, batch, plain = wrapped("small CNN", UNIT, computer, chunk_size=chunk_size)

    found = rows(collect_gradients(normalized, batch))

    expected = rows(plain) / rows(plain).norm(dim=1, keepdim=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(4, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("name", ["GPT-2", "U-Net"])
def test_module_by_module_every_modules_part_has_norm_one(name: str, chunk_size: int | None) -> None:
    normalized, batch, plain = wrapped(name, BY_MODULE, chunk_size=chunk_size)

    found = collect_gradients(normalized, batch)

    for module in {name.rpartition(".")[0] for name in plain}:
        part = rows(plain, module)
        expected = part / part.norm(dim=1, keepdim=True)
        torch.testing.assert_close(rows(found, module), expected, rtol=1e-9, atol=1e-12)


def test_module_by_module_takes_one_pass_and_globally_two() -> None:
    passes = []
    for normalization in (BY_MODULE, UNIT, Normalization("none")):
        normalized, batch, _ = wrapped("small CNN", normalization)
        normalized.computer.self_check = False
        normalized.stream_gradients(batch, lambda _: None)
        calls = []
        normalized.model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        normalized.stream_gradients(batch, lambda _: None)
        passes.append(len(calls))

    assert passes == [1, 2, 1]


def test_clipping_shortens_the_long_rows_and_keeps_the_bits_of_the_short() -> None:
    normalized, batch, _ = wrapped("small CNN", Normalization("none"))
    plain = rows(collect_gradients(normalized.computer, batch))
    norms = plain.norm(dim=1)
    threshold = clipping_threshold(norms, quantile=0.5)
    clipped = NormalizedGradientComputer(normalized.computer, Normalization("clip", threshold))

    found = rows(collect_gradients(clipped, batch))

    short = norms <= threshold
    assert 0 < int(short.sum()) < 4
    assert torch.equal(found[short], plain[short])
    torch.testing.assert_close(found[~short], plain[~short] / norms[~short, None] * threshold)


@pytest.mark.parametrize("normalization", [UNIT, BY_MODULE, Normalization("clip", 0.1)])
def test_a_gradient_of_zero_stays_zero(normalization: Normalization) -> None:
    model = nn.Linear(3, 2).double()
    batch = (torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], dtype=torch.float64),)
    task = resolve_task(lambda call, batch: call(batch[0]).sum(1) * batch[0].abs().sum(1))

    found = rows(
        collect_gradients(NormalizedGradientComputer(HookGradientComputer(model, task), normalization), batch)
    )

    assert found[0].any()
    assert torch.equal(found[1], torch.zeros(8, dtype=torch.float64))


def test_blocks_keep_their_form() -> None:
    plain, scaled = list[GradientBlock](), list[GradientBlock]()
    normalized, batch, _ = wrapped("GPT-2", UNIT)

    normalized.computer.stream_gradients(batch, plain.append)
    normalized.stream_gradients(batch, scaled.append)

    kinds = [type(block) for block in plain]
    assert {DenseBlock, FactoredBlock, SummedBlock} == set(kinds)
    assert [type(block) for block in scaled] == kinds


def test_a_norm_out_of_reach_gives_nan_and_not_a_short_row() -> None:
    factors = UNIT.factors(torch.tensor([float("inf"), float("nan"), 4.0]))

    assert factors.isnan().tolist() == [True, True, False]
    assert factors[2] == 0.5


def test_f_q_and_w_are_not_scaled() -> None:
    normalized, batch, _ = wrapped("small CNN", UNIT)

    found = normalized.stream_gradients(batch, lambda _: None)

    for ours, theirs in zip(found, normalized.computer.stream_gradients(batch, lambda _: None), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(normalized.compute_loss_grad(batch)[:, 0], found.out_to_loss_grad)
    assert normalized.compute_per_sample_grad(batch).keys() == normalized.parameters.keys()


def test_a_model_that_draws_masks_is_refused_globally_and_right_by_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 1)).train()
    inner = HookGradientComputer(model, resolve_task(lambda call, batch: call(batch[0])[:, 0]))
    batch = (torch.randn(3, 4),)

    with pytest.raises(UnsupportedModelError, match=r"draws random numbers: call model\.eval\(\)"):
        collect_gradients(NormalizedGradientComputer(inner, UNIT), batch)
    found = collect_gradients(NormalizedGradientComputer(inner, BY_MODULE), batch)
    torch.testing.assert_close(rows(found, "2").norm(dim=1), torch.ones(3))


def test_weights_loaded_later_are_the_ones_differentiated() -> None:
    normalized, batch, _ = wrapped("small CNN", Normalization("clip", 1e9))
    other, _ = make(CASES["small CNN"])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)

    normalized.load_model_params(other)

    expected = rows(by_loop(other, CASES["small CNN"].output, batch))
    torch.testing.assert_close(rows(collect_gradients(normalized, batch)), expected, rtol=1e-9, atol=1e-12)


def test_an_empty_batch_gives_empty_blocks() -> None:
    for normalization in (UNIT, BY_MODULE):
        normalized, (images, labels), _ = wrapped("small CNN", normalization)
        assert rows(collect_gradients(normalized, (images[:0], labels[:0]))).shape[0] == 0


def test_a_manifest_is_told_of_the_normalisation() -> None:
    def settings_of(normalization: Normalization) -> Any:
        inner = IterativeGradientComputer(
            nn.Linear(1, 1), resolve_task("regression"), autocast_dtype=torch.bfloat16
        )
        return NormalizedGradientComputer(inner, normalization).fingerprint()

    assert settings_of(Normalization("none")) == {"autocast_dtype": "bfloat16"}
    assert settings_of(Normalization("clip", 2, scope="module")) == {
        "autocast_dtype": "bfloat16",
        "normalization": {"kind": "clip", "scope": "module", "threshold": 2.0},
    }


def test_a_subclass_that_overrides_an_originals_method_is_normalised_as_overridden() -> None:
    class FirstParameterOnly(FunctionalGradientComputer):
        def compute_per_sample_grad(self, batch):
            grads = super().compute_per_sample_grad(batch)
            return {name: grad * (name == "0.weight") for name, grad in grads.items()}

    normalized, batch, plain = wrapped("small CNN", UNIT, FirstParameterOnly)

    found = collect_gradients(normalized, batch)

    first = plain["0.weight"].flatten(1)
    torch.testing.assert_close(
        found["0.weight"].flatten(1), first / first.norm(dim=1, keepdim=True), rtol=1e-9, atol=1e-12
    )
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

    inner, batch, plain = wrapped("small CNN", Normalization("none"), WithoutBias)
    found: list[GradientBlock] = []

    NormalizedGradientComputer(inner.computer, BY_MODULE).stream_gradients(batch, found.append)

    part = plain["6.weight"].flatten(1)
    assert [block.name for block in found] == ["6.weight"]
    torch.testing.assert_close(found[0].dense(), part / part.norm(dim=1, keepdim=True), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "normalization", [Normalization("none"), UNIT, BY_MODULE], ids=["none", "unit", "by module"]
)
def test_rows_are_normalised_and_gradients_measured_in_one_pass(normalization: Normalization) -> None:
    normalized, batch, plain = wrapped("GPT-2", normalization, chunk_size=3)
    expected = rows(collect_gradients(normalized, batch))
    normalized.computer.self_check = False
    passes: list[int] = []
    normalized.model.register_forward_hook(lambda *_: passes.append(1))
    normalizer, blocks = RowNormalizer(normalization, 4), dict[tuple[str, int], Tensor]()

    def take(block: GradientBlock) -> None:
        blocks[block.name, block.start] = block.dense()

    normalizer.stream(normalized.computer, batch, take)

    whole = torch.cat([torch.cat([blocks[name, start] for name in plain], 1) for start in (0, 3)])
    torch.testing.assert_close(normalizer.scale(whole), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(normalizer.norms(), rows(plain).norm(dim=1), rtol=1e-10, atol=0)
    assert len(passes) == 2  # one for each chunk


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


def test_parameters_chosen_on_the_wrapper_are_those_of_the_wrapped_computer() -> None:
    normalized, batch, plain = wrapped("small CNN", UNIT)
    normalized.grad_wrt = ["6.bias"]

    found = collect_gradients(normalized, batch)

    assert list(found) == ["6.bias"]
    bias = plain["6.bias"]
    torch.testing.assert_close(found["6.bias"], bias / bias.norm(dim=1, keepdim=True))
