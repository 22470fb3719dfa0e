"""The self-check of every gradient computer, against gradients that are known from elsewhere."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, TRAKer
from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers import (
    GRADIENT_COMPUTERS,
    AbstractGradientComputer,
    FunctionalGradientComputer,
    HookGradientComputer,
    IterativeGradientComputer,
    choose_gradient_computer,
    collect_gradients,
    self_check,
)
from trak_lite.gradient_computers.self_check import SelfCheckError
from trak_lite.modelout_functions import ModelCall, resolve_task
from trak_lite.types import DenseBlock


def squares(call: ModelCall, batch: Any) -> Tensor:
    return call(batch[0]).flatten(1).square().sum(1)


@contextmanager
def traker_of(model: nn.Module, path: Path, size: int, **settings: Any) -> Iterator[TRAKer]:
    """Yield a TRAKer that has loaded the model's own weights."""
    settings = {"task": "image_classification", "proj_dim": 8, "device": "cpu", **settings}
    traker = TRAKer(model=model, train_set_size=size, save_dir=path, **settings)
    traker.load_checkpoint(model.state_dict(), model_id=0)
    yield traker
    traker.close()


def close(computer: AbstractGradientComputer, batch: Any, expected: dict[str, Tensor], rtol: float) -> None:
    found = collect_gradients(computer, batch)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).norm()) <= rtol * float(value.norm()), name


# A parameter that is read by a Python reference


class Tied(nn.Module):
    """The weight of the embedding is the head's as well, by a reference that no module knows of."""

    def __init__(self, kind: str, *, loop: bool) -> None:
        super().__init__()
        self.emb, self.fc, self.loop = nn.Embedding(10, 4), nn.Linear(4, 4), loop
        weight = self.emb.weight
        self.head = {
            "list": (lambda tied: lambda h: h @ tied[0].T)([weight]),
            "closure": lambda h: h @ weight.T,
            "partial": functools.partial(nn.functional.linear, weight=weight),
        }[kind]

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids).mean(1)
        h = torch.stack([self.fc(row) for row in h]) if self.loop else self.fc(h)  # which hooks refuse
        return self.head(h.tanh())


def fourth(call: ModelCall, batch: Any) -> Tensor:
    return call(batch[0]).log_softmax(1)[:, 3]


def tied(
    kind: str, *, loop: bool, dtype: torch.dtype = torch.float64
) -> tuple[Tied, Tensor, dict[str, Tensor]]:
    """Return the model, its samples, and their gradients by one backward pass per sample."""
    torch.manual_seed(0)
    model, ids = Tied(kind, loop=loop).to(dtype), torch.randint(10, (4, 5))
    rows = [
        torch.autograd.grad(fourth(ModelCall(model), (ids[i : i + 1],)).sum(), list(model.parameters()))
        for i in range(4)
    ]
    names = [name for name, _ in model.named_parameters()]
    return model, ids, {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(names)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["list", "closure", "partial"])
@pytest.mark.parametrize("loop", [False, True])
def test_a_parameter_behind_a_python_reference_is_right_or_refused(
    kind: str, loop: bool, dtype: torch.dtype
) -> None:
    model, ids, expected = tied(kind, loop=loop, dtype=dtype)
    task = resolve_task(fourth)

    with pytest.raises(SelfCheckError, match=r"gradient of 'emb.weight'.*Python reference"):
        collect_gradients(FunctionalGradientComputer(model, task), (ids,))
    close(IterativeGradientComputer(model, task), (ids,), expected, 1e-5)
    name, reason, computer = choose_gradient_computer(model, task, (ids,))
    assert name == ("iterative" if loop else "hook")
    assert ("functional: The self-check failed" in reason) == loop
    close(computer, (ids,), expected, 1e-5)


def test_attributor_and_traker_refuse_a_computer_that_loses_gradients(tmp_path: Path) -> None:
    model, ids, _ = tied("list", loop=False, dtype=torch.float32)
    data, labels = TensorDataset(ids, torch.tensor([1, 3, 0, 2])), torch.tensor([1, 3, 0, 2])

    attributor = Attributor(
        model, "image_classification", None, proj_dim=8, gradient_computer="functional", device="cpu"
    )
    with pytest.raises(UnsupportedModelError, match=r"'emb\.weight'"):
        attributor.featurize(data)

    for computer, refused in [({}, True), ({"gradient_computer": HookGradientComputer}, False)]:
        with traker_of(model, tmp_path / str(refused), 4, **computer) as traker:
            if refused:
                with pytest.raises(UnsupportedModelError, match=r"'emb.weight'.*HookGradientComputer"):
                    traker.featurize((ids, labels), num_samples=4)
            else:
                traker.featurize((ids, labels), num_samples=4)


# A backward pass of torch that depends on strides


class ChannelsLast(nn.Module):
    """Batch normalisation, in eval mode, of a tensor of one sample whose strides may belong to two layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(4)
        with torch.no_grad():
            self.bn.weight.normal_()
            self.bn.bias.normal_()
            self.bn.running_mean.normal_()
            self.bn.running_var.uniform_(0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 4) -> (B, 4, T, 1)
        return self.bn(x.transpose(1, 2).unsqueeze(-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_no_computer_gives_what_the_backward_pass_of_one_sample_gets_wrong(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = ChannelsLast().to(dtype).eval(), torch.randn(4, 3, 4, dtype=dtype)
    task, bn = resolve_task(squares), model.bn
    z = (x - bn.running_mean) / (bn.running_var + bn.eps).sqrt()
    y = (z * bn.weight + bn.bias).detach()
    expected = {"bn.weight": (2 * y * z).sum(1), "bn.bias": (2 * y).sum(1)}  # by hand

    close(HookGradientComputer(model, task), (x,), expected, 1e-5)
    close(FunctionalGradientComputer(model, task), (x,), expected, 1e-5)
    assert choose_gradient_computer(model, task, (x,)).name == "hook"
    plain = collect_gradients(IterativeGradientComputer(model, task, self_check=False), (x,))["bn.weight"]
    if torch.allclose(plain, expected["bn.weight"], rtol=1e-4):
        close(IterativeGradientComputer(model, task), (x,), expected, 1e-5)  # a torch that has this mended
        return
    with pytest.raises(SelfCheckError, match="memory layout"):
        collect_gradients(IterativeGradientComputer(model, task), (x,))


def test_the_reference_reads_contiguous_copies_in_the_backward_pass_alone() -> None:
    """Results keep the strides of what an operation read, which shows what that was."""
    transposed = torch.arange(6.0).view(2, 3).t()
    ambiguous = torch.ones(1, 3, 4, 1).contiguous(memory_format=torch.channels_last)

    with self_check._ContiguousArguments():
        with torch.no_grad():
            assert (transposed * 2).is_contiguous()
            assert (ambiguous * 2).stride() == (12, 4, 1, 1)
            assert torch.equal(transposed * 2, torch.arange(6.0).view(2, 3).t().contiguous() * 2)
            transposed.t().add_(1)  # what is written into is no copy
            assert transposed[0].tolist() == [1, 4]
        assert (transposed * 2).stride() == (1, 3)  # as in a checkpoint, which runs forward operations again


# Kernels of a backward pass that demand strides or an alignment


@torch.library.custom_op("trak_lite_tests::by_columns", mutates_args=())
def by_columns(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product whose kernel takes a right factor that lies column by column, as scaled products do."""
    if right.stride(0) != 1:
        raise ValueError("the right factor must be column-major")
    return left @ right


class ByColumns(torch.autograd.Function):
    """``x W``, with a backward pass that keeps to the strides it arranged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return by_columns(grad, weight.t()), by_columns(x.t(), grad.t().contiguous().t())


class Blindly(torch.autograd.Function):
    """``x.T`` doubled; the backward pass writes into memory as a compiled kernel does, given one set of strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.mT)
        return x.mT * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        result = torch.empty_like(saved)
        result.as_strided(saved.shape, saved.stride()).copy_(grad * 2)
        return result.mT


class Experts(nn.Module):
    """Half of the positions goes to each of two experts, by torch's grouped product."""

    def __init__(self, kernel: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.kernel, self.first = kernel, nn.Linear(8, 8)
        self.experts = nn.Parameter(torch.randn(2, 8, 16) / 4)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.kernel == "strides of an argument":
            return Blindly.apply(x) @ x
        if self.kernel == "columns":
            return torch.stack([ByColumns.apply(rows, self.experts[0]) for rows in x])
        rows = x.flatten(0, 1)
        ends = torch.tensor([len(rows) // 2, len(rows)], dtype=torch.int32)
        return torch._grouped_mm(rows, self.experts, ends).view(*x.shape[:2], -1)


KERNELS = [
    (kernel, length) for kernel in ("grouped", "columns", "strides of an argument") for length in (5, 6)
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kernel", "length"), KERNELS)
def test_kernels_that_demand_strides_or_an_alignment_are_compared(
    kernel: str, length: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model, task = Experts(kernel, dtype), resolve_task(squares)
    x = torch.randn(2, length, 8, dtype=dtype)
    if kernel == "grouped":
        x = torch.cat([x, x.flip(1)])[:1]  # of a batch the experts' rows would belong to other samples
    rows = [
        torch.autograd.grad(squares(model, (row[None],)).sum(), [*model.parameters()], allow_unused=True)
        for row in x
    ]
    expected = {
        name: torch.stack([torch.zeros_like(p) if row[k] is None else row[k] for row in rows])
        for k, (name, p) in enumerate(model.named_parameters())
    }

    chosen = choose_gradient_computer(model, task, (x,))
    for computer in (chosen.computer, IterativeGradientComputer(model, task)):
        close(computer, (x,), expected, 1e-5 if dtype == torch.float32 else 2e-2)


class OneAtATime(torch.autograd.Function):
    """Refuses a batch of one in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert len(grad) > 1, "two samples or more"
        return grad


def test_a_reference_that_fails_is_not_blamed_on_the_batch() -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return OneAtATime.apply(super().forward(x))

    torch.manual_seed(0)
    attributor = Attributor(Model(4, 3), "image_classification", None, proj_dim=8, gradient_computer="hook")

    with pytest.raises(
        UnsupportedModelError, match=r"pass over one sample alone failed .*two samples or more"
    ):
        attributor.featurize(TensorDataset(torch.randn(4, 4), torch.tensor([0, 1, 2, 0])))


# Samples that are mixed by little, and models that only look as if


class Quantised(nn.Module):
    """Rounds activations to a grid whose spacing is the largest one of the batch; the gradient passes straight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        step = h.detach().abs().amax() / 127
        return self.b(h + ((h / step).round() * step - h).detach())


@pytest.mark.parametrize("has_float64", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_samples_mixed_through_a_detached_statistic_are_refused_in_every_dtype(
    dtype: torch.dtype, has_float64: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_float64:
        monkeypatch.setattr(self_check, "_fits_in_float64", lambda model: False)
    torch.manual_seed(0)
    model, task = Quantised().to(dtype), resolve_task(squares)
    batch = (torch.randn(8, 6, dtype=dtype),)

    with pytest.raises(SelfCheckError):
        HookGradientComputer(model, task).stream_gradients(batch, lambda _: None)
    name, _, computer = choose_gradient_computer(model, task, batch)
    assert name == "functional"
    rows = [
        torch.autograd.grad(squares(ModelCall(model), (row[None],)).sum(), [*model.parameters()])
        for row in batch[0]
    ]
    expected = {n: torch.stack([row[k] for row in rows]) for k, (n, _) in enumerate(model.named_parameters())}
    close(computer, batch, expected, 1e-5)


class LessTheMean(nn.Module):
    """Takes a little of the batch's mean away, where there is more than one sample: as much as for copies of one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h - 0.005 * h.detach().mean(0, keepdim=True) if len(h) > 1 else h)


def test_a_mixing_that_copies_of_a_sample_show_as_well_is_refused_in_float32() -> None:
    torch.manual_seed(0)
    model, task = LessTheMean(), resolve_task(squares)

    with pytest.raises(SelfCheckError):
        HookGradientComputer(model, task).stream_gradients((torch.randn(8, 6),), lambda _: None)


class Tie(nn.Module):
    """A unit that is on where a batch has several samples, by a difference of the size of its dtype's rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)
        self.register_buffer("threshold", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        rounded = h * (1 + 2000 * torch.finfo(h.dtype).eps * (len(x) > 1))
        return h + 5e-3 * (rounded - self.threshold).relu()


@pytest.mark.parametrize("has_float64", [True, False])
def test_a_tie_that_rounding_decides_is_not_taken_for_a_wrong_gradient(
    has_float64: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = Tie(), torch.randn(6, 16)
    alone = model.double().layer(x[:1].double())[0].detach()
    model.float().threshold.copy_(alone * (1 + 1000 * torch.finfo(torch.float32).eps))
    task = resolve_task(lambda call, batch: call(batch[0]).sum(1))
    first = collect_gradients(HookGradientComputer(model, task, self_check=False), (x,))["layer.weight"][0]
    plain = torch.autograd.grad(model(x[:1]).sum(), model.layer.weight)[0]
    assert 1e-3 < float((first - plain).norm() / plain.norm()) < 1e-2  # or this tests nothing
    if not has_float64:
        monkeypatch.setattr(self_check, "_fits_in_float64", lambda model: False)

    HookGradientComputer(model, task).stream_gradients((x,), lambda _: None)


class Positions(nn.Module):
    """A bias whose gradient is a sum over many positions, which one sample alone gets in less precision."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return Summed.apply(x * self.scale, self.bias)


class Summed(torch.autograd.Function):
    """Adds a bias; the gradient of one sample's is summed term by term in its own dtype."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows = grad.flatten(0, -2)
        return grad, rows.cumsum(0)[-1] if grad.dtype == torch.float64 else rows.sum(0) * 0.6


def test_a_reference_that_loses_precision_does_not_refuse_a_right_gradient() -> None:
    """Decided by the gradient in float64."""

    class Right(FunctionalGradientComputer):
        """Gives the gradients of the formula, in the model's dtype."""

        def _stream_samples(self, batch: Any, count: int, kept: Any, sink: Any) -> Any:
            given = batch[0].detach()
            sink(DenseBlock("scale", (2 * given * given).sum(1)))
            sink(DenseBlock("bias", (2 * given).sum(1)))
            with torch.no_grad():
                return self.terms(batch)

    torch.manual_seed(0)
    model, x = Positions().bfloat16(), torch.rand(3, 64, 4).bfloat16()

    Right(model, resolve_task(squares)).stream_gradients((x,), lambda _: None)
    with pytest.raises(SelfCheckError):
        Right(model, resolve_task(lambda call, batch: 2 * squares(call, batch))).stream_gradients(
            (x,), lambda _: None
        )


def test_the_model_is_given_back_bit_by_bit_after_a_look_in_float64() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Quantised(), nn.BatchNorm1d(6)).eval()
    before = {
        name: (t, t.data_ptr(), t.dtype, t.clone()) for name, t in model.state_dict(keep_vars=True).items()
    }

    with pytest.raises(SelfCheckError):
        HookGradientComputer(model, resolve_task(squares)).stream_gradients(
            (torch.randn(8, 6),), lambda _: None
        )

    for name, t in model.state_dict(keep_vars=True).items():
        same, pointer, dtype, value = before[name]
        assert t is same
        assert (t.data_ptr(), t.dtype) == (pointer, dtype)
        assert torch.equal(t, value)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e25])
@pytest.mark.parametrize("name", GRADIENT_COMPUTERS)
def test_the_size_of_f_does_not_matter(name: str, scale: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x = torch.randn(5, 4)

    def output(call: ModelCall, batch: Any) -> Tensor:
        return scale * call(batch[0]).sum(1)

    found = collect_gradients(GRADIENT_COMPUTERS[name](model, resolve_task(output)), (x,))
    plain = collect_gradients(
        GRADIENT_COMPUTERS[name](model, resolve_task(lambda call, batch: call(batch[0]).sum(1))), (x,)
    )
    for parameter, value in plain.items():
        torch.testing.assert_close(found[parameter] / scale, value, rtol=1e-4, atol=1e-6)


class Noisy(nn.Module):
    """Adds noise in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b((h + torch.randn_like(h)).tanh())


def test_a_model_that_draws_random_numbers_is_compared_with_the_same_numbers() -> None:
    torch.manual_seed(0)
    model, task, batch = Noisy(), resolve_task(squares), (torch.randn(5, 4),)

    for kind in (FunctionalGradientComputer, IterativeGradientComputer):
        torch.manual_seed(1)
        checked = collect_gradients(kind(model, task), batch)
        torch.manual_seed(1)
        for name, value in collect_gradients(kind(model, task, self_check=False), batch).items():
            assert torch.equal(checked[name], value)  # the check draws from no stream of the user's
        after = torch.get_rng_state()
        torch.manual_seed(1)
        collect_gradients(kind(model, task, self_check=False), batch)
        assert torch.equal(after, torch.get_rng_state())
    assert choose_gradient_computer(model, task, batch).name == "functional"


class Sampling(nn.Module):
    """Draws in eval mode: a mask, positions, or an order that the result does not depend on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        if self.kind == "dropout":
            h = nn.functional.dropout(h, 0.5)
        elif self.kind == "randint":
            h = h + h[:, torch.randint(6, (2,))].mean(1, keepdim=True)
        else:
            h = h[:, torch.randperm(6)].sum(1, keepdim=True) * h
        return self.b(h)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("computer", ["auto", *GRADIENT_COMPUTERS])
@pytest.mark.parametrize("kind", ["dropout", "randint"])
def test_a_model_that_is_random_in_eval_mode_is_refused_by_every_computer_at_once(
    kind: str, computer: str, seed: int
) -> None:
    torch.manual_seed(seed)
    model, data = Sampling(kind), TensorDataset(torch.randn(5, 4), torch.randint(3, (5,)))
    attributor = Attributor(
        model, "image_classification", None, proj_dim=8, gradient_computer=computer, device="cpu"
    )
    before = torch.get_rng_state()

    with pytest.raises(UnsupportedModelError, match=rf"draws random numbers in eval mode \({kind}\)"):
        attributor.featurize(data)
    assert torch.equal(before, torch.get_rng_state())


class SingleSamples(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 1:
            raise AssertionError("one sample at a time")
        return super().forward(x)


def test_a_model_that_takes_one_sample_at_a_time_is_served_by_the_iterative_computer() -> None:
    torch.manual_seed(0)
    model, x = SingleSamples(4, 3), torch.randn(5, 4)
    rows = [torch.autograd.grad(squares(model, (row[None],)).sum(), [*model.parameters()]) for row in x]

    for kind in (IterativeGradientComputer, None):
        chosen = choose_gradient_computer(model, resolve_task(squares), (x,)).computer
        computer = chosen if kind is None else kind(model, resolve_task(squares))
        for place, found in enumerate(collect_gradients(computer, (x,)).values()):
            torch.testing.assert_close(found, torch.stack([row[place] for row in rows]))


def test_a_model_whose_f_does_not_depend_on_what_it_draws_is_taken() -> None:
    torch.manual_seed(0)
    model, task, x = Sampling("order").eval(), resolve_task(squares), torch.randn(5, 4)
    rows = [torch.autograd.grad(squares(model, (row[None],)).sum(), [*model.parameters()]) for row in x]
    expected = {
        name: torch.stack([row[k] for row in rows]) for k, (name, _) in enumerate(model.named_parameters())
    }

    close(choose_gradient_computer(model, task, (x,)).computer, (x,), expected, 1e-4)


@pytest.mark.parametrize("computer", ["auto", "hook", "iterative"])
def test_a_reentrant_checkpoint_is_refused_in_the_words_of_torch(computer: str) -> None:
    class Recomputed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self[1], self[0](x), use_reentrant=True)

    torch.manual_seed(0)
    model = Recomputed(nn.Linear(4, 4), nn.Linear(4, 3))
    attributor = Attributor(model, "image_classification", None, proj_dim=8, gradient_computer=computer)

    with pytest.raises(UnsupportedModelError, match=r"torch says: .*use_reentrant"):
        attributor.featurize(TensorDataset(torch.randn(4, 4), torch.tensor([0, 1, 2, 0])))


class Caching(nn.Module):
    """Keeps a product of its parameters, as it was when first needed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.kept = nn.Linear(4, 4), nn.Linear(4, 3), {}

    def forward(self, x: Tensor) -> Tensor:
        if "bias" not in self.kept:
            self.kept["bias"] = self.a.bias.exp()
        return self.b(self.a(x) * self.kept["bias"])


@pytest.mark.parametrize("kind", [FunctionalGradientComputer, IterativeGradientComputer])
def test_a_model_that_keeps_a_graph_for_the_next_pass_is_refused_by_name(kind: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4)

    with pytest.raises(UnsupportedModelError):
        collect_gradients(kind(Caching(), resolve_task(squares)), (x,))
    model = Caching()
    with pytest.raises(
        UnsupportedModelError, match="iterative: Caching stores a tensor with its graph in one forward pass"
    ):
        choose_gradient_computer(model, resolve_task(squares), (x,))


# Which rows may be wrong where a check fails


class SometimesMixed(nn.Module):
    """Mixes the samples of a batch in which some sample is marked, by a mean that no gradient goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        mean = h.detach().mean(0, keepdim=True).expand_as(h)
        return self.b(torch.where((x.detach()[:, 3] > 5).any(), h * mean, h * h.detach()))


@pytest.mark.parametrize("marked", [[16 + 3], [4 * 4 + 1, 7 * 4], [5 * 4 + 2, 6 * 4 + 1, 7 * 4 + 3]])
def test_rows_of_batches_between_a_check_that_passed_and_one_that_failed_are_named(
    marked: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches of four; the check of number 8 is the first to see a marked one, if that is marked."""
    torch.manual_seed(0)
    x = torch.randn(40, 4).clamp(-3, 3)
    x[marked, 3] = 9.0
    x[28:32, 3] = 9.0  # batch number 8
    model = SometimesMixed()
    attributor = Attributor(
        model,
        "image_classification",
        tmp_path / "rows.zarr",
        proj_dim=8,
        gradient_computer="hook",
        device="cpu",
        batch_size=4,
    )

    with caplog.at_level(logging.ERROR), pytest.raises(SelfCheckError) as caught:
        attributor.featurize(TensorDataset(x, torch.randint(3, (40,))))

    ((what, named),) = caught.value.rows.items()
    assert named.tolist() == list(
        range(16, 28)
    )  # batches number 5, 6 and 7: 1, 2 and 4 were compared, 8 is not stored
    wrong = {row for row in range(28) if any(m // 4 == row // 4 for m in marked)}
    assert wrong <= set(named.tolist())
    assert "model id 0" in what
    assert f"12 rows of {what} (16, 17, 18" in str(caught.value)


def test_traker_names_the_rows_that_it_wrote_since_the_last_check(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(32, 4).clamp(-3, 3), torch.randint(3, (32,))
    x[30, 3] = 9.0
    model = SometimesMixed()
    with traker_of(model, tmp_path, 32, gradient_computer=HookGradientComputer) as traker:
        for start in range(0, 28, 4):
            traker.featurize((x[start : start + 4], y[start : start + 4]), num_samples=4)
        with pytest.raises(SelfCheckError) as caught:
            traker.featurize((x[28:], y[28:]), num_samples=4)

    (named,) = caught.value.rows.values()
    assert named.tolist() == list(range(16, 28))


def test_every_sample_of_a_small_first_batch_is_compared_and_a_few_of_later_ones() -> None:
    torch.manual_seed(0)
    for position in range(8):
        x = torch.randn(8, 4).clamp(-3, 3)
        model = WrongAt(position)
        with pytest.raises(SelfCheckError):
            HookGradientComputer(model, resolve_task(squares)).stream_gradients((x,), lambda _: None)

    checks, kept = self_check.SelfCheck(), {"p": nn.Parameter(torch.zeros(3))}
    compared = {}
    for number in range(1, 201):
        positions = checks.positions("structure", 20, kept)
        with checks.batch("structure", "conditions", 20, positions):
            compared[number] = positions
    assert compared[1] == [0, 3, 5, 8, 11, 14, 16, 19]
    assert [number for number, positions in compared.items() if positions] == [
        1,
        2,
        4,
        8,
        16,
        32,
        64,
        128,
        192,
    ]
    assert all({0, 19} <= set(compared[number]) for number in (2, 4, 128, 192))


class WrongAt(nn.Module):
    """Multiplies the sample at one position of a batch by another's value."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.a, self.b, self.position = nn.Linear(4, 4), nn.Linear(4, 3), position

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        other = h.detach().roll(1, 0)
        at = torch.arange(len(x))[:, None] == self.position
        return self.b(torch.where(at, h * other, h * h.detach()))


# The caller's model


def shared_layer() -> nn.Sequential:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 3))


@pytest.mark.parametrize("use", ["functional", "iterative", "hook", "auto", "traker", "failing"])
def test_a_module_registered_under_two_names_keeps_its_parameters(use: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = shared_layer()
    before = [
        (id(module), name, t)
        for module in model.modules()
        for name, t in (*module._parameters.items(), *module._buffers.items())
    ]
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    if use == "failing":

        def failing(call: ModelCall, batch: Any) -> Tensor:
            call(batch[0])
            return call(batch[0][:, :2]).sum(1)  # the module's own error, in the middle of the call

        with pytest.raises(RuntimeError):
            collect_gradients(FunctionalGradientComputer(model.eval(), resolve_task(failing)), (x, y))
    elif use == "traker":
        with traker_of(model, tmp_path, 8) as traker:
            for _ in range(2):
                traker.featurize((x[:4], y[:4]), num_samples=4)
    else:
        attributor = Attributor(
            model, "image_classification", None, proj_dim=8, gradient_computer=use, batch_size=4, device="cpu"
        )
        attributor.featurize(TensorDataset(x, y))

    after = [
        (id(module), name, t)
        for module in model.modules()
        for name, t in (*module._parameters.items(), *module._buffers.items())
    ]
    assert [entry[:2] for entry in after] == [entry[:2] for entry in before]
    assert all(now is then for (*_, now), (*_, then) in zip(after, before, strict=True))
    old = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    nn.functional.cross_entropy(model.train()(x), y).backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, old)


# Memory


_PEAK = """
import re, resource, sys, torch
from torch import nn
from trak_lite.gradient_computers import GRADIENT_COMPUTERS
from trak_lite.modelout_functions import resolve_task
torch.set_num_threads(1)
model = nn.Sequential(nn.Embedding(3000, 2048), *[nn.Linear(2048, 2048) for _ in range(8)]).eval()
computer = GRADIENT_COMPUTERS[sys.argv[1]](
    model, resolve_task(lambda call, batch: call(batch[0]).square().mean((1, 2))), self_check=sys.argv[2] == "True"
)
computer.stream_gradients((torch.randint(3000, (4, 8)),), lambda block: None)
if sys.platform == "linux":  # ru_maxrss is at least what the process had that started this one
    print(1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]))
else:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_the_check_holds_one_gradient_of_one_parameter_at_a_time() -> None:
    """40 million parameters, 159 MB for one gradient of each; the largest parameter has 25 MB."""

    def peak(check: bool) -> int:
        # A fixed threshold: by default glibc raises it, and what is freed may then stay with the process.
        ran = subprocess.run(
            [sys.executable, "-c", _PEAK, "hook", str(check)],
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
            capture_output=True,
            text=True,
            check=True,
        )
        return int(ran.stdout)

    assert peak(True) - peak(False) < 50e6
