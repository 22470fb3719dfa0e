"""Conformance kits for gradient computers and for gradient rules: per-sample gradients are those of plain autograd.

Subclass a kit in a test file and return the object under test; pytest runs the laws::

    class TestMyComputer(GradientComputerTests):
        def make_computer(self, model, task):
            return MyComputer(model, task)

    class TestMyLayer(GradientRuleTests):
        def make_layer(self):
            return MyLayer(8)

        def make_input(self, count):
            return (torch.randn(count, 5, 8),)

The reference is one forward and one backward pass per sample, in float64. Every seed is fixed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from trak_lite.data.batches import batch_size, map_tensors, take_rows
from trak_lite.gradient_computers import AbstractGradientComputer, HookGradientComputer, collect_gradients
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall
from trak_lite.types import Batch, OutputTerms


class GradientComputerTests(ABC):
    """Laws of every gradient computer: row i is the gradient of sample i, q is the task's, the model is unchanged."""

    @abstractmethod
    def make_computer(self, model: nn.Module, task: AbstractModelOutput) -> AbstractGradientComputer:
        """Return a new computer for the model."""

    def test_a_row_is_the_gradient_of_its_sample(self) -> None:
        model, batch = _network(), _images(4)

        _assert_same(self._gradients(model, batch), _by_loop(model, batch))

    def test_a_row_does_not_depend_on_its_batch(self) -> None:
        """A subset of the batch in another order gives the same rows."""
        model, batch = _network(), _images(5)
        order = [3, 0, 4]

        whole = self._gradients(model, batch)
        _assert_same(self._gradients(model, take_rows(batch, order)), {n: g[order] for n, g in whole.items()})

    def test_parameters_come_in_model_order_and_tied_weights_once(self) -> None:
        """Names are those of ``model.named_parameters()``."""
        model, batch = _network(), _images(2)

        assert list(self._gradients(model, batch)) == [name for name, _ in model.named_parameters()]

    def test_a_parameter_that_f_ignores_has_gradient_zero(self) -> None:
        """The parameter is not left out, and no error is raised."""
        assert not self._gradients(_network(), _images(3))["ignored"].any()

    def test_one_pass_gives_f_q_and_w_as_well(self) -> None:
        """The terms are those of the task: one number per sample, without a graph. q alone is the same."""
        model, batch = _network(), _images(3)
        computer, f = self.make_computer(model, _TASK), _output(ModelCall(model), batch).detach()

        terms = computer.stream_gradients(batch, lambda _: None)

        for term, expected in zip(terms, (f, -(f**3) / 3, f**2), strict=True):
            torch.testing.assert_close(term, expected)
            assert not term.requires_grad
        torch.testing.assert_close(computer.compute_loss_grad(batch).reshape(-1), terms.out_to_loss_grad)

    def test_later_calls_use_the_model_and_the_weights_that_were_loaded_last(self) -> None:
        """Those of another model, and those that a checkpoint has written into its tensors since."""
        other, batch = _network(), _images(3)
        computer = self.make_computer(_network(), _TASK)
        collect_gradients(computer, batch)

        for _ in range(2):
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.mul_(1.5)
            computer.load_model_params(other)
            _assert_same(collect_gradients(computer, batch), _by_loop(other, batch))

    def test_the_model_comes_back_as_it_was(self) -> None:
        """Weights, flags, mode, hooks and ``.grad`` are untouched."""
        model, batch = _network(), _images(3)
        before = {name: value.clone() for name, value in model.state_dict().items()}

        self._gradients(model, batch)

        assert all(bool(value.equal(before[name])) for name, value in model.state_dict().items())
        assert all(p.requires_grad and p.grad is None for p in model.parameters())
        assert not any(m.training or m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    def _gradients(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return collect_gradients(self.make_computer(model, _TASK), batch)


class GradientRuleTests(ABC):
    """Laws of a layer and its gradient rule: the hook computer uses the rule, and the gradients are exact."""

    @abstractmethod
    def make_layer(self) -> nn.Module:
        """Return a new layer; the kit draws its parameters."""

    @abstractmethod
    def make_input(self, count: int) -> tuple[Any, ...]:
        """Return the arguments of a call with ``count`` samples; axis 0 of every tensor is the sample axis."""

    def test_gradients_of_a_batch_are_those_of_its_samples(self) -> None:
        """Every row equals one backward pass over that sample alone; a single sample is a batch."""
        for count in (4, 1):
            layer, batch = self._layer(), self._input(count)
            _assert_same(self._gradients(layer, batch), _by_loop(layer, batch))

    def test_the_layer_below_gets_its_gradient_too(self) -> None:
        layer, batch = self._layer(), self._input(3)
        if not batch[0].is_floating_point():
            return
        model = _Scaled(layer).double()

        _assert_same(self._gradients(model, batch), _by_loop(model, batch))

    def test_every_parameter_is_covered_by_a_rule(self) -> None:
        """No parameter needs the fallback that runs an operation again."""
        layer, batch = self._layer(), self._input(2)

        coverage = HookGradientComputer(layer, _TASK).explain(batch)

        assert {line.how for line in coverage} <= {"rule", "zero"}, str(coverage)

    def _layer(self) -> nn.Module:
        torch.manual_seed(0)
        layer = self.make_layer().double().eval()
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        return layer

    def _input(self, count: int) -> Any:
        torch.manual_seed(1)
        return map_tensors(lambda t: t.double() if t.is_floating_point() else t, self.make_input(count))

    def _gradients(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return collect_gradients(HookGradientComputer(model, _TASK), batch)


class _Scaled(nn.Module):
    """A layer whose input is multiplied by a parameter."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.layer = layer

    def forward(self, x: Tensor, *others: Any) -> Any:
        return self.layer(self.scale * x, *others)


class _Network(nn.Module):
    """A convolution, a normalisation, a tied weight, a parameter outside any layer and one that f ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2)
        self.encode, self.decode = nn.Linear(18, 18), nn.Linear(18, 18)
        self.decode.weight = self.encode.weight
        self.shift = nn.Parameter(torch.randn(18))
        self.ignored = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.conv(x)).flatten(1)
        out: Tensor = self.decode(torch.tanh(self.encode(hidden) + self.shift))
        return out


def _network() -> nn.Module:
    torch.manual_seed(0)
    return _Network().double().eval()


def _images(count: int) -> tuple[Tensor]:
    torch.manual_seed(1)
    return (torch.randn(count, 1, 5, 5, dtype=torch.float64),)


def _output(call: ModelCall, batch: Any) -> Tensor:
    """Return one number per sample, to which every entry of the first result contributes differently."""
    out = call(*batch)
    out = out[0] if isinstance(out, tuple) else out
    total: Tensor = (out * torch.cos(3 * out)).flatten(1).sum(1)
    return total


class _FourthPower(AbstractModelOutput):
    """L is the fourth power of f, divided by 12; q and w differ by sample, q in its sign as well."""

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        f = _output(model_call, batch)
        value = f.detach()
        return OutputTerms(f, -(value**3) / 3, value**2)


_TASK = _FourthPower()


def _by_loop(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Per-sample gradients by one forward and one backward pass per sample."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    outputs = (_output(ModelCall(model), take_rows(batch, [i])).sum() for i in range(batch_size(batch)))
    rows = [torch.autograd.grad(output, parameters, materialize_grads=True) for output in outputs]
    return {name: torch.stack(column) for name, *column in zip(names, *rows, strict=True)}


def _assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert torch.allclose(actual[name], value, rtol=1e-10, atol=1e-11), (
            f"The gradients of {name} differ by up to {float((actual[name] - value).abs().max()):.3g}."
        )
