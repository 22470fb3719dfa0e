"""What other engines get wrong in silence is right here, or is refused by name."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import CASES, GPT, Case, RoutedMixture, Tagger, by_loop, classify, make, squares, tokens
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from trak_lite.errors import InvalidInputError, UnsupportedModelError
from trak_lite.gradient_computers import (
    GRADIENT_COMPUTERS,
    FunctionalGradientComputer,
    HookGradientComputer,
    choose_gradient_computer,
    collect_gradients,
    register_gradient_rule,
)
from trak_lite.gradient_computers.hooks.registry import unregister_gradient_rule
from trak_lite.modelout_functions import ModelCall, resolve_task
from trak_lite.types import DenseBlock, FactoredBlock


def exact(model: nn.Module, batch: Any, output: Any = squares, **settings: Any) -> None:
    found = collect_gradients(HookGradientComputer(model, resolve_task(output), **settings), batch)
    expected = by_loop(model, output, batch)
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-11)


def double(model: nn.Module, *shape: int) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return model.double().eval(), (torch.randn(*shape, dtype=torch.float64),)


# What Opacus' GradSampleModule gets wrong, raises on or leaves None


@pytest.mark.parametrize("mode", ["reflect", "circular", "replicate"])
def test_padding_modes_are_part_of_the_convolution(mode: str) -> None:
    exact(*double(nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode), 3, 2, 5, 5))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.embed(torch.arange(4))


def test_positions_without_a_batch_get_one_gradient_per_sample_also_when_as_many() -> None:
    """With B = T = 4 nothing in the shapes tells a batch from positions."""
    exact(*double(Positions(), 4, 4, 3))


def test_a_layer_with_two_inputs_is_covered() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = nn.Bilinear(3, 3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.pair(x, x.sin())

    exact(*double(Two(), 3, 3))


def test_a_subclass_with_another_forward_is_differentiated_as_it_is() -> None:
    class Normed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight / self.weight.norm(dim=1, keepdim=True), self.bias)

    exact(*double(Normed(3, 2), 4, 3))


def test_a_module_called_by_keyword_is_covered() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(input=x)

    exact(*double(Keyword(), 4, 3))


def test_a_layer_called_several_times_gives_one_block() -> None:
    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = torch.tanh(self.cell(x))
            return x

    model, batch = double(Unrolled(), 4, 3)
    blocks: list[Any] = []
    HookGradientComputer(model, resolve_task(squares)).stream_gradients(batch, blocks.append)

    assert sorted(block.name for block in blocks) == ["cell.bias", "cell.weight"]
    exact(model, batch)


def test_an_in_place_operation_after_a_layer_is_fine() -> None:
    model, batch = double(nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2)), 4, 3)
    exact(model, batch)


@pytest.mark.parametrize("product", ["layer", "transposed", "einsum", "tensordot"])
def test_what_is_added_in_place_to_a_result_that_is_a_view_is_fine(product: str) -> None:
    """Such as a residual: writing into a view replaces its history, and the hooks with it."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            y = {
                "layer": lambda: self.layer(x),
                "transposed": lambda: self.layer(x).mT,
                "einsum": lambda: torch.einsum("btd,de->bet", x, self.layer.weight),
                "tensordot": lambda: torch.tensordot(x, self.layer.weight, 1),
            }[product]()
            y += x
            return torch.tanh(y)

    exact(*double(Residual(), 3, 4, 4), self_check=False)


def test_an_input_changed_in_place_is_refused() -> None:
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            y = self.layer(x)
            x.add_(1.0)
            return y

    with pytest.raises(UnsupportedModelError, match="input of linear was changed in place"):
        exact(*double(Changed(), 4, 3))


def test_a_forward_pass_without_a_backward_leaves_nothing_behind() -> None:
    """A pass that fails in the sink; the next one is exact."""
    model, batch = double(nn.Linear(3, 2), 4, 3)
    computer = HookGradientComputer(model, resolve_task(squares))

    class Full(Exception):
        pass

    def sink(block: Any) -> None:
        raise Full

    with pytest.raises(Full):
        computer.stream_gradients(batch, sink)

    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    found = collect_gradients(computer, batch)
    torch.testing.assert_close(found["weight"], by_loop(model, squares, batch)["weight"])


def test_hooks_of_ruled_and_recurrent_modules_are_removed_after_an_error() -> None:
    model, (ids, labels) = make(CASES["LSTM tagger"])
    computer = HookGradientComputer(model, resolve_task(classify))

    with pytest.raises(InvalidInputError, match="one number per sample"):
        collect_gradients(
            HookGradientComputer(model, resolve_task(lambda c, b: c(b[0]).sum())), (ids, labels)
        )
    collect_gradients(computer, (ids, labels))

    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_scale_by_frequency_is_refused() -> None:
    model = nn.Embedding(4, 3, scale_grad_by_freq=True).double()

    with pytest.raises(UnsupportedModelError, match="scale_grad_by_freq"):
        exact(model, (torch.randint(4, (3, 2)),))


class Doubled(torch.autograd.Function):
    """torch's operations inside are hidden from everything but autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * grad * weight, (2 * grad * x).sum(0)


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x, self.weight)


def test_a_parameter_read_by_an_autograd_function_is_refused_by_name() -> None:
    model, batch = double(nn.Sequential(nn.Linear(3, 3), Opaque()), 4, 3)

    with pytest.raises(UnsupportedModelError, match=r"\['1.weight'\].*hooks cannot see"):
        exact(model, batch)


def test_without_strict_it_is_zero_and_listed() -> None:
    model, batch = double(nn.Sequential(nn.Linear(3, 3), Opaque()), 4, 3)
    computer = HookGradientComputer(model, resolve_task(squares), strict=False, self_check=False)

    found = collect_gradients(computer, batch)

    assert not found["1.weight"].any()
    coverage = computer.explain(batch)
    assert not coverage.complete
    assert coverage["1.weight"].how == "refused"
    assert coverage["0.weight"].how == "rule"


def test_a_registered_rule_covers_it_also_in_subclasses_that_keep_forward() -> None:
    class Sub(Opaque):
        pass

    class Other(Opaque):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    @register_gradient_rule(Opaque)
    def rule(module: Any, args: Any, kwargs: Any, grad: Tensor) -> dict[str, Tensor]:
        return {"weight": 2 * grad * args[0]}

    try:
        for layer in (Opaque(), Sub()):
            model, batch = double(nn.Sequential(nn.Linear(3, 3), layer), 4, 3)
            exact(model, batch)
            why = HookGradientComputer(model, resolve_task(squares)).explain(batch)["1.weight"].why
            assert why == f"rule of {type(layer).__name__}"
        with pytest.raises(UnsupportedModelError, match="hooks cannot see"):
            exact(*double(nn.Sequential(nn.Linear(3, 3), Other()), 4, 3))
    finally:
        unregister_gradient_rule(Opaque)


def test_a_rule_that_leaves_a_parameter_out_is_refused() -> None:
    @register_gradient_rule(Opaque)
    def rule(module: Any, args: Any, kwargs: Any, grad: Tensor) -> dict[str, Tensor]:
        return {}

    try:
        with pytest.raises(UnsupportedModelError, match=r"no gradient for \['weight'\]"):
            exact(*double(Opaque(), 4, 3))
    finally:
        unregister_gradient_rule(Opaque)


def test_a_wrong_rule_is_found_by_the_self_check() -> None:
    @register_gradient_rule(Opaque)
    def rule(module: Any, args: Any, kwargs: Any, grad: Tensor) -> dict[str, Tensor]:
        return {"weight": grad * args[0]}

    try:
        with pytest.raises(UnsupportedModelError, match="self-check failed: the gradient of 'weight'"):
            exact(*double(Opaque(), 4, 3))
    finally:
        unregister_gradient_rule(Opaque)


def test_a_rule_is_registered_for_a_class() -> None:
    with pytest.raises(InvalidInputError, match="class of modules"):
        register_gradient_rule(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_samples_that_reach_each_other_are_refused() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y - y.mean(0)

    with pytest.raises(UnsupportedModelError, match="f of one sample depends on values of another sample"):
        exact(*double(Centred(), 4, 3))


def test_statistics_of_the_batch_by_function_are_refused() -> None:
    class Statistics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, None, None, self.weight, training=True)

    with pytest.raises(UnsupportedModelError, match=r"training mode|self-check"):
        exact(*double(Statistics(), 4, 3))


def test_a_parameter_mixed_into_a_batch_statistic_is_refused() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y + self.weight * y.mean(0)

    with pytest.raises(UnsupportedModelError, match="no batch axis although it reads the samples"):
        exact(*double(Pooled(), 4, 3))


def test_a_loop_over_samples_is_refused() -> None:
    model, batch = double(nn.Linear(3, 2), 4, 3)

    def output(call: ModelCall, batch: Any) -> Tensor:
        return torch.stack([call(x).sum() for x in batch[0]])

    with pytest.raises(UnsupportedModelError, match="without a loop over samples"):
        exact(model, batch, output)


def test_a_parameter_on_all_pairs_of_samples_is_refused() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.slope * (x @ x.t())

    with pytest.raises(UnsupportedModelError, match=r"more than one axis of its shape \(2, 2\) grows"):
        exact(*double(Pairs(), 4, 3))


def test_rows_that_are_appended_to_the_batch_are_refused() -> None:
    class Appended(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.row = nn.Parameter(torch.ones(1, 3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, self.row]).cumsum(0)[1:]

    with pytest.raises(UnsupportedModelError, match="axis 0 has 3 entries for 2 samples and 4 for 3"):
        exact(*double(Appended(), 4, 3))


def test_a_ruled_layer_needs_its_samples_on_the_first_axis() -> None:
    @register_gradient_rule(Opaque)
    def rule(module: Any, args: Any, kwargs: Any, grad: Tensor) -> dict[str, Tensor]:
        raise AssertionError("not reached")

    class Sideways(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Opaque()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.transpose(0, 1)).transpose(0, 1)

    try:
        with pytest.raises(UnsupportedModelError, match="needs one result with the samples on axis 0"):
            exact(*double(Sideways(), 4, 5, 3))
    finally:
        unregister_gradient_rule(Opaque)


def test_a_ruled_layer_on_another_path_is_refused() -> None:
    @register_gradient_rule(Opaque)
    def rule(module: Any, args: Any, kwargs: Any, grad: Tensor) -> dict[str, Tensor]:
        return {"weight": 2 * grad * args[0]}

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(3, 3), Opaque()

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) if x.sum() > 0 else self.layer(x)

    try:
        model, _ = double(Branching(), 1, 3)
        computer = HookGradientComputer(model, resolve_task(squares))
        collect_gradients(computer, (torch.ones(4, 3).double(),))
        with pytest.raises(
            UnsupportedModelError,
            match=r"operations of the model differ from those of the first batch.*Opaque",
        ):
            collect_gradients(computer, (-torch.ones(4, 3).double(),))
    finally:
        unregister_gradient_rule(Opaque)


def test_a_reentrant_checkpoint_is_refused_with_the_way_out() -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.b, self.a(x), use_reentrant=True)

    with pytest.raises(UnsupportedModelError, match="use_reentrant=False"):
        exact(*double(Recomputed(), 4, 3))


def test_another_path_than_the_examined_one_is_refused() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum() > 0 else self.a(x) * self.b.weight.sum()

    model, _ = double(Branching(), 1, 3)
    computer = HookGradientComputer(model, resolve_task(squares))
    collect_gradients(computer, (torch.ones(4, 3).double(),))

    with pytest.raises(
        UnsupportedModelError, match="operations of the model differ from those of the first batch"
    ):
        collect_gradients(computer, (-torch.ones(4, 3).double(),))


def test_a_shorter_path_than_the_examined_one_is_refused() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) if x.sum() > 0 else self.a(x)

    model, _ = double(Branching(), 1, 3)
    computer = HookGradientComputer(model, resolve_task(squares))
    collect_gradients(computer, (torch.ones(4, 3).double(),))

    with pytest.raises(
        UnsupportedModelError, match="ran 1 operations on its parameters, but 2 for the first batch"
    ):
        collect_gradients(computer, (-torch.ones(4, 3).double(),))


def test_dropout_inside_a_recurrent_layer_is_refused() -> None:
    model = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True).double().train()

    with pytest.raises(UnsupportedModelError, match="dropout masks"):
        exact(model, (torch.randn(3, 5, 3).double(),), lambda call, batch: call(batch[0])[0].sum((1, 2)))


def test_packed_projections_are_refused() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 4, proj_size=2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.full((len(x),), 4)
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]

    with pytest.raises(UnsupportedModelError, match="proj_size"):
        exact(*double(Packed(), 3, 4, 3))


# What holds besides the numbers


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return self.used(x)


def test_unused_layers_are_zero_and_said_to_be() -> None:
    model, batch = double(Unused(), 4, 3)
    exact(model, batch)
    coverage = HookGradientComputer(model, resolve_task(squares)).explain(batch)
    assert {line.name: line.how for line in coverage} == {
        "used.weight": "rule",
        "used.bias": "rule",
        "unused.weight": "zero",
        "unused.bias": "zero",
    }


def test_an_unused_layer_is_refused_by_name_where_every_gradient_is_asked_for() -> None:
    class Idle(Unused):
        """One layer runs for nothing, the others do not run at all."""

        def __init__(self) -> None:
            super().__init__()
            self.never, self.recurrent = nn.Parameter(torch.ones(2)), nn.GRU(3, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            self.recurrent(x.unsqueeze(1))
            return super().forward(x)

    model, batch = double(Idle(), 4, 3)
    for names, idle in [
        (["used.*", "never"], ["never"]),
        (["used.*", "unused.bias"], ["unused.bias"]),
        (["used.*", "recurrent.weight_*"], ["recurrent.weight_ih_l0", "recurrent.weight_hh_l0"]),
    ]:
        for strict in (None, False):
            computer = HookGradientComputer(model, resolve_task(squares), grad_wrt=names, strict=strict)
            assert not any(bool(collect_gradients(computer, batch)[name].any()) for name in idle)
        with pytest.raises(UnsupportedModelError) as caught:
            exact(model, batch, grad_wrt=names, strict=True)
        assert f"no operation that reads {idle}" in str(caught.value)

    used = HookGradientComputer(model, resolve_task(squares), grad_wrt="used.*", strict=True)
    assert all(bool(grad.any()) for grad in collect_gradients(used, batch).values())


@pytest.mark.parametrize("strict", [None, True])
def test_a_hidden_use_is_refused_unless_zeros_are_asked_for(strict: bool | None) -> None:
    model, batch = double(nn.Sequential(nn.Linear(3, 3), Opaque()), 4, 3)

    with pytest.raises(UnsupportedModelError, match=r"\['1.weight'\].*hooks cannot see"):
        exact(model, batch, strict=strict)


def test_a_value_of_parameters_alone_is_exact_inside_a_checkpoint() -> None:
    """The checkpointed part runs again in the backward pass, and keeps nothing to carry a gradient back with."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
            self.gain, self.places = nn.Parameter(torch.randn(3)), nn.Embedding(4, 3)
            self.a, self.b = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.gain.exp() + self.places(torch.arange(4)).cos()
            return self.normed(x @ (self.a.tanh() @ self.b)).tanh()

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(
                checkpoint(
                    lambda v: checkpoint(self.blocks[0], v, use_reentrant=False), x, use_reentrant=False
                )
            )

    model, batch = double(Recomputed(), 5, 4, 3)
    exact(model, batch)
    assert choose_gradient_computer(model, resolve_task(squares), batch)[0] == "hook"


def test_the_coverage_prints_as_a_table() -> None:
    model, batch = double(nn.Sequential(nn.Linear(3, 2), nn.PReLU()), 4, 3)

    table = str(HookGradientComputer(model, resolve_task(squares)).explain(batch)).splitlines()

    assert table[0].split() == ["parameter", "how", "why"]
    assert table[1] == "0.weight   rule      linear"
    assert table[3].startswith("1.weight   fallback  vmap of the operation (prelu)")


def test_what_is_refused_is_explained() -> None:
    model = nn.BatchNorm1d(3).double().train()

    coverage = HookGradientComputer(model, resolve_task(squares)).explain((torch.randn(4, 3).double(),))

    assert {line.how for line in coverage} == {"refused"}
    assert "normalise over the batch" in coverage["weight"].why


def test_blocks_come_during_the_backward_pass_last_layer_first() -> None:
    model, batch = double(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), 4, 3)
    names: list[str] = []

    HookGradientComputer(model, resolve_task(squares)).stream_gradients(
        batch, lambda block: names.append(block.name)
    )

    assert names == ["2.weight", "2.bias", "0.weight", "0.bias"]


def test_linear_weights_and_those_of_convolutions_with_few_positions_stay_factored() -> None:
    layers = [nn.Conv2d(2, 4, 3), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8, 3)]
    model, batch = double(nn.Sequential(*layers), 3, 2, 5, 5)
    kinds: dict[str, type] = {}

    HookGradientComputer(model, resolve_task(squares)).stream_gradients(
        batch, lambda block: kinds.__setitem__(block.name, type(block))
    )

    assert {name: kind for name, kind in kinds.items() if name.endswith("weight")} == {
        "0.weight": DenseBlock,
        "1.weight": FactoredBlock,
        "3.weight": FactoredBlock,
    }
    assert kinds["0.bias"] is DenseBlock
    exact(model, batch)


class Frames(nn.Module):
    """Frames of a clip go through the convolutions as if they were samples."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(2, 3, 3, groups=1), nn.ConvTranspose2d(3, 2, 2)
        self.depth = nn.Conv2d(2, 4, 2, groups=2)

    def forward(self, clips: Tensor) -> Tensor:
        frames = clips.flatten(0, 1)
        return self.depth(self.up(self.conv(frames))).unflatten(0, clips.shape[:2])


def test_frames_flattened_into_the_batch_are_summed_per_sample() -> None:
    exact(*double(Frames(), 3, 4, 2, 5, 5))


def test_a_frozen_parameter_can_be_kept_and_the_others_left() -> None:
    model, batch = make(CASES["GPT-2"])
    model.wte.weight.requires_grad_(False)
    names = ["wte.weight", "ln.bias"]

    found = collect_gradients(HookGradientComputer(model, resolve_task(classify), grad_wrt=names), batch)

    expected = by_loop(model, classify, batch, names)
    assert list(found) == names
    for name in names:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-12)
    assert not model.wte.weight.requires_grad


def test_patterns_select_parameters() -> None:
    model, batch = make(CASES["ViT"])

    found = collect_gradients(
        HookGradientComputer(model, resolve_task(classify), grad_wrt=["*.linear?.weight", "head.bias"]), batch
    )

    assert list(found) == [f"encoder.layers.{layer}.linear{i}.weight" for layer in (0, 1) for i in (1, 2)] + [
        "head.bias"
    ]
    with pytest.raises(InvalidInputError, match=r"\['absent\.\*'\]"):
        HookGradientComputer(model, resolve_task(classify), grad_wrt="absent.*").stream_gradients(
            batch, print
        )


def test_another_look_at_a_parameter_is_no_other_path() -> None:
    """Recurrent layers ask for their weights' device again after ``functional_call``."""
    model, batch = make(CASES["LSTM tagger"])
    computer = HookGradientComputer(model, resolve_task(classify))
    before = collect_gradients(computer, batch)
    collect_gradients(GRADIENT_COMPUTERS["iterative"](model, resolve_task(classify)), batch)
    torch.func.functional_call(model, dict(model.named_parameters()), batch[0])

    for name, grad in collect_gradients(computer, batch).items():
        torch.testing.assert_close(grad, before[name], rtol=1e-12, atol=1e-13)


def test_a_batch_that_requires_grad_gets_none() -> None:
    model, (x,) = double(nn.Linear(3, 2), 4, 3)
    x.requires_grad_()

    exact(model, (x,))

    assert x.grad is None


def test_chunks_give_the_same_rows() -> None:
    model, batch = make(CASES["ViT"], 5)
    exact(model, batch, classify, chunk_size=2)


def test_sequences_of_another_length_are_examined_anew() -> None:
    model, _ = make(CASES["GPT-2"])
    computer = HookGradientComputer(model, resolve_task(classify))
    for length in (6, 4):
        batch = tokens(length)(3)
        found = collect_gradients(computer, batch)
        expected = by_loop(model, classify, batch)
        torch.testing.assert_close(found["wpe.weight"], expected["wpe.weight"], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", ["GPT-2", "ViT", "small CNN", "LSTM tagger"])
def test_autocast_changes_the_forward_pass_and_little_else(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # oneDNN's LSTM in bfloat16 needs AVX-512
    model, batch = make(CASES[case], dtype=torch.float32)
    task = resolve_task(classify)

    found = collect_gradients(HookGradientComputer(model, task, autocast_dtype=torch.bfloat16), batch)

    expected = by_loop(model, classify, batch)
    for name, value in expected.items():
        assert found[name].dtype == torch.float32
        assert float((found[name] - value).norm()) <= 0.1 * float(value.norm()) + 0.02


def test_dropout_in_train_mode_draws_another_mask_for_every_sample() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 3)).double().train()
    x = torch.randn(1, 6, dtype=torch.float64).repeat(2, 1)

    found = collect_gradients(HookGradientComputer(model, resolve_task(squares)), (x,))

    assert not torch.equal(found["2.weight"][0], found["2.weight"][1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_part_runs_as_it_was_written() -> None:
    model, batch = make(CASES["GPT-2"])
    expected = by_loop(model, classify, batch)
    model.up = torch.compile(model.up, backend="eager")

    found = collect_gradients(HookGradientComputer(model, resolve_task(classify)), batch)

    for grad, value in zip(found.values(), expected.values(), strict=True):
        torch.testing.assert_close(grad, value, rtol=1e-10, atol=1e-12)


# The choice


def test_hooks_are_chosen_where_they_cover_the_model(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = make(CASES["ViT"])

    with caplog.at_level(logging.INFO, "trak_lite"):
        name, reason, _ = choose_gradient_computer(model, resolve_task(classify), batch)

    assert (name, reason) == ("hook", "every kept parameter is covered")
    assert "'hook'" in caplog.text


def test_the_functional_computer_is_next_and_the_iterative_one_last() -> None:
    model, batch = double(nn.Linear(3, 2), 4, 3)

    def loop(call: ModelCall, batch: Any) -> Tensor:
        return torch.stack([call(x).sum() for x in batch[0]])

    def branch(call: ModelCall, batch: Any) -> Tensor:
        return torch.stack([call(x).sum() * (2 if x.sum() > 0 else 1) for x in batch[0]])

    name, reason, _ = choose_gradient_computer(model, resolve_task(loop), batch, "weight")
    assert name == "functional"
    assert reason.startswith("hook: The model runs")
    name, reason, _ = choose_gradient_computer(model, resolve_task(branch), batch)
    assert name == "iterative"
    assert "functional: torch.func.vmap cannot transform" in reason


@pytest.mark.parametrize(
    "case",
    [
        Case(Tagger, tokens(5), classify),
        CASES["BERT with attention_mask, called by keyword"],
        CASES["GPT-2 with checkpointing"],
        CASES["DLRM"],
        Case(RoutedMixture, tokens(4), classify),
    ],
    ids=["LSTM", "masked BERT", "checkpoint", "EmbeddingBag", "routed experts"],
)
def test_the_choice_is_exact_where_vmap_fails_or_is_slow(case: Case) -> None:
    model, batch = make(case)
    task = resolve_task(case.output)

    name, *_ = choose_gradient_computer(model, task, batch)

    assert name != "functional"
    found = collect_gradients(GRADIENT_COMPUTERS[name](model, task), batch)
    for parameter, value in by_loop(model, case.output, batch).items():
        torch.testing.assert_close(found[parameter], value, rtol=1e-10, atol=1e-11)


def test_a_checkpointed_model_is_one_that_vmap_refuses() -> None:
    """The reason why hooks come first."""
    model, batch = make(Case(lambda: GPT(recompute=True), tokens(4), classify))

    with pytest.raises(UnsupportedModelError):
        collect_gradients(FunctionalGradientComputer(model, resolve_task(classify)), batch)


class Sorted(nn.Module):
    """Sorts its samples by length, runs a layer, and puts them back."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        lengths, order = lengths.sort(descending=True)
        x = x[order]
        if isinstance(self.layer, nn.LSTM):
            packed = pack_padded_sequence(x, lengths, batch_first=True)
            y, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=5)
        else:
            y = self.layer(x).tanh()
        return y[order.argsort()]


@pytest.mark.parametrize("layer", [nn.Linear(3, 3), nn.LSTM(3, 3, batch_first=True)], ids=["linear", "lstm"])
def test_samples_in_an_order_of_their_values_are_exact_however_the_first_ones_lie(layer: nn.Module) -> None:
    """The first samples are in order already, so that neither the probe nor the self-check can see it."""
    model, (x,) = double(Sorted(layer), 4, 5, 3)
    batch = (x, torch.tensor([5, 4, 2, 3]))

    def output(call: ModelCall, batch: Any) -> Tensor:
        return call(*batch).flatten(1).square().sum(1)

    exact(model, batch, output)
    assert choose_gradient_computer(model, resolve_task(output), batch)[0] == "hook"


def test_an_order_within_each_sample_is_no_order_of_samples() -> None:
    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.topk(3, dim=1).values.sort(1)[0])

    exact(*double(Largest(), 4, 6))
