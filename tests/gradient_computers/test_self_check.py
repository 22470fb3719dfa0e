"""The self-check of every gradient computer, against gradients that are known from elsewhere."""

import copy
import functools
import itertools
import logging
import os
import random
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import Model, assert_exact, by_loop, hooked, rows, wavy
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows, TRAKer
from trak_lite.errors import InvalidInputError, UnsupportedModelError
from trak_lite.gradient_computers import (
    GRADIENT_COMPUTERS,
    FunctionalGradientComputer,
    HookGradientComputer,
    IterativeGradientComputer,
    choose_gradient_computer,
    collect_gradients,
)
from trak_lite.modelout_functions import resolve_task
from trak_lite.types import DenseBlock

refused = functools.partial(pytest.raises, UnsupportedModelError, match="self-check failed")
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def squares(call, batch):
    return call(batch[0]).flatten(1).square().sum(1)


SQUARES, TASK = resolve_task(squares), resolve_task("image_classification")


def attributor(model, computer, path=None, **settings):
    settings = {"proj_dim": 8, "device": "cpu", **settings}
    return Attributor(model, "image_classification", path, gradient_computer=computer, **settings)


def close(computer, batch, expected, rtol):
    found = collect_gradients(computer, batch)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).norm()) <= rtol * float(value.norm()), name


def places_alone(model):
    """Return the list to which every run of one sample alone adds its first entry, which is its place."""
    alone = []

    def note(_, args):
        if len(args[0]) == 1:
            alone.append(round(float(args[0][0, 0])))

    model.register_forward_pre_hook(note)
    return alone


def numbered(count):
    """Rows whose first entries are their places."""
    batch = rows(count)
    batch[:, 0] = torch.arange(float(count))
    return batch


def labelled(x):
    return TensorDataset(x, torch.arange(len(x)) % 3)


# ---- A parameter that is read by a Python reference
def tied(kind, *, loop):
    """The weight of the embedding is the head's as well, by a reference that no module knows of."""

    def forward(s, ids):
        h = s.emb(ids).mean(1)
        h = torch.stack([s.fc(row) for row in h]) if loop else s.fc(h)  # which hooks refuse
        return s.head(h.tanh())

    emb = nn.Embedding(10, 4)
    weight = emb.weight
    head = {
        "list": (lambda held: lambda h: h @ held[0].T)([weight]),
        "closure": lambda h: h @ weight.T,
        "partial": functools.partial(nn.functional.linear, weight=weight),
    }[kind]
    return Model(forward, emb=emb, fc=nn.Linear(4, 4), head=head)


def fourth(call, batch):
    return call(batch[0]).log_softmax(1)[:, 3]


@dtypes
@pytest.mark.parametrize("kind", ["list", "closure", "partial"])
@pytest.mark.parametrize("loop", [False, True])
def test_a_parameter_behind_a_python_reference_is_right_or_refused(kind, loop, dtype):
    torch.manual_seed(0)
    model, ids = tied(kind, loop=loop).to(dtype), torch.randint(10, (4, 5))
    expected, task = by_loop(model, fourth, (ids,)), resolve_task(fourth)
    with pytest.raises(UnsupportedModelError, match=r"gradient of 'emb.weight'.*Python reference"):
        collect_gradients(FunctionalGradientComputer(model, task), (ids,))
    close(IterativeGradientComputer(model, task), (ids,), expected, 1e-5)
    name, reason, computer = choose_gradient_computer(model, task, (ids,))
    assert name == ("iterative" if loop else "hook")
    assert ("functional: The self-check failed" in reason) == loop
    close(computer, (ids,), expected, 1e-5)


def test_parameters_that_are_all_behind_a_closure_are_refused_for_that():
    """As those of the coupling flows of zuko."""
    weight = nn.Parameter(torch.eye(4))
    model = Model(lambda s, x: s.closure(x), closure=lambda x: x @ weight)
    model.weight = weight
    with pytest.raises(UnsupportedModelError, match=r"does by autograd.*Python reference"):
        collect_gradients(FunctionalGradientComputer(model, resolve_task(fourth)), (torch.randn(3, 4),))


@pytest.mark.parametrize("kind", [HookGradientComputer, FunctionalGradientComputer])
def test_a_parameter_with_tensor_hooks_is_named_and_its_rows_are_what_the_hooks_return(kind):
    torch.manual_seed(0)
    model, x, mask = (
        nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)),
        torch.randn(3, 4),
        torch.rand(5, 4) > 0.5,
    )
    expected, task = by_loop(model, fourth, (x,)), resolve_task(fourth)
    earlier = kind(model, task)
    for _ in range(6):
        close(earlier, (x,), expected, 1e-5)
    expected["0.weight"] *= mask
    model[0].weight.register_hook(lambda grad: grad * mask)
    close(IterativeGradientComputer(model, task), (x,), expected, 1e-5)
    for computer in (kind(model, task), earlier):
        with pytest.raises(
            UnsupportedModelError, match=r"'0\.weight' has tensor hooks .*gradient_computer='iterative'"
        ):
            collect_gradients(computer, (x,))
    name, reason, computer = choose_gradient_computer(model, task, (x,))
    assert name == "iterative"
    assert "hook: The self-check failed: the gradient of '0.weight'" in reason
    close(computer, (x,), expected, 1e-5)


# ---- Backward passes that depend on strides or alignment
def channels_last():
    """Batch normalisation, in eval mode, of a tensor of one sample whose strides may belong to two layouts."""
    bn = nn.BatchNorm2d(4)
    for value in (bn.weight, bn.bias, bn.running_mean):
        nn.init.normal_(value)
    nn.init.uniform_(bn.running_var, 0.5, 1.5)
    return Model(lambda s, x: s.bn(x.transpose(1, 2).unsqueeze(-1)), bn=bn)  # (B, T, 4) -> (B, 4, T, 1)


@dtypes
def test_no_computer_gives_what_the_backward_pass_of_one_sample_gets_wrong(dtype):
    torch.manual_seed(0)
    model, x = channels_last().to(dtype).eval(), torch.randn(4, 3, 4, dtype=dtype)
    z = (x - model.bn.running_mean) / (model.bn.running_var + model.bn.eps).sqrt()
    y = (z * model.bn.weight + model.bn.bias).detach()
    expected = {"bn.weight": (2 * y * z).sum(1), "bn.bias": (2 * y).sum(1)}  # by hand
    close(HookGradientComputer(model, SQUARES), (x,), expected, 1e-5)
    close(FunctionalGradientComputer(model, SQUARES), (x,), expected, 1e-5)
    assert choose_gradient_computer(model, SQUARES, (x,)).name == "hook"
    plain = collect_gradients(IterativeGradientComputer(model, SQUARES, self_check=False), (x,))["bn.weight"]
    if torch.allclose(plain, expected["bn.weight"], rtol=1e-4):
        close(IterativeGradientComputer(model, SQUARES), (x,), expected, 1e-5)  # a torch that has this mended
        return
    with pytest.raises(UnsupportedModelError, match="memory layout"):
        collect_gradients(IterativeGradientComputer(model, SQUARES), (x,))


def attends_to_pixels(s, x):
    tokens = s.bn(s.conv(x)).flatten(2).permute(0, 2, 1)  # (B, pixels, channels), as in CvT
    tokens = torch.cat([s.token.expand(len(x), -1, -1), tokens], 1)
    return (torch.softmax(tokens @ tokens.transpose(1, 2), -1) @ tokens)[:, 0]


def test_a_batch_of_one_that_torch_gets_wrong_is_not_called_mixed():
    """Rows of larger batches are right, and a last batch of one is refused with what helps."""
    torch.manual_seed(0)
    conv, token = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Parameter(torch.randn(1, 1, 8))
    model = Model(attends_to_pixels, conv=conv, bn=nn.BatchNorm2d(8), token=token).eval()
    x = torch.randn(4, 8, 2, 2)
    twice = torch.cat([x, x])  # no sample is alone
    expected = {
        name: rows[:4]
        for name, rows in collect_gradients(FunctionalGradientComputer(model, SQUARES), (twice,)).items()
    }
    close(HookGradientComputer(model, SQUARES), (x,), expected, 1e-4)
    close(
        FunctionalGradientComputer(model, SQUARES),
        (x[:1],),
        {name: rows[:1] for name, rows in expected.items()},
        1e-4,
    )
    plain = collect_gradients(HookGradientComputer(model, SQUARES, self_check=False), (x[:1],))
    if all(torch.allclose(plain[name], rows[:1], rtol=1e-4, atol=1e-5) for name, rows in expected.items()):
        return  # a torch that has this mended
    with pytest.raises(UnsupportedModelError, match=r"pass over one sample is wrong here.*other batch sizes"):
        collect_gradients(HookGradientComputer(model, SQUARES), (x[:1],))


@torch.library.custom_op("trak_lite_tests::by_columns", mutates_args=())
def by_columns(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product whose kernel takes a right factor that lies column by column, as scaled products do."""
    if right.stride(0) != 1:
        raise ValueError("the right factor must be column-major")
    return left @ right


class ByColumns(torch.autograd.Function):
    """``x W``, with a backward pass that keeps to the strides it arranged."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return by_columns(grad, weight.t()), by_columns(x.t(), grad.t().contiguous().t())


class Blindly(torch.autograd.Function):
    """``x.T`` doubled; the backward pass writes into memory as a compiled kernel does, given one set of strides."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.mT)
        return x.mT * 2

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        result = torch.empty_like(saved)
        result.as_strided(saved.shape, saved.stride()).copy_(grad * 2)
        return result.mT


def grouped(s, x):
    """Half of the positions goes to each of two experts, by torch's grouped product."""
    x = s.first(x)
    flat = x.flatten(0, 1)
    ends = torch.tensor([len(flat) // 2, len(flat)], dtype=torch.int32)
    return torch._grouped_mm(flat, s.experts, ends).view(*x.shape[:2], -1)


def by_strides(s, x):
    x = s.first(x)
    return Blindly.apply(x) @ x


KERNELS = {
    "grouped": grouped,
    "columns": lambda s, x: torch.stack([ByColumns.apply(rows, s.experts[0]) for rows in s.first(x)]),
    "strides of an argument": by_strides,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [5, 6])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_that_demand_strides_or_an_alignment_are_compared(kernel, length, dtype):
    torch.manual_seed(0)
    experts = nn.Parameter(torch.randn(2, 8, 16) / 4)
    model = Model(KERNELS[kernel], first=nn.Linear(8, 8), experts=experts).to(dtype)
    x = torch.randn(2, length, 8, dtype=dtype)
    if kernel == "grouped":
        x = torch.cat([x, x.flip(1)])[:1]  # of a batch the experts' rows would belong to other samples
    expected = by_loop(model, squares, (x,))
    chosen = choose_gradient_computer(model, SQUARES, (x,))
    for computer in (chosen.computer, IterativeGradientComputer(model, SQUARES)):
        close(computer, (x,), expected, 1e-5 if dtype == torch.float32 else 2e-2)


# ---- Samples that are mixed, and models that only look as if
def quantised(s, x):
    """Rounds activations to a grid whose spacing is the largest one of the batch; the gradient passes straight."""
    h = s.a(x)
    step = h.detach().abs().amax() / 127
    return s.b(h + ((h / step).round() * step - h).detach())


@pytest.fixture(params=[True, False], ids=["a copy in float64", "too large for a copy in float64"])
def has_float64(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr("trak_lite.gradient_computers.comparison.fits_in_float64", lambda model: False)


@pytest.mark.usefixtures("has_float64")
@dtypes
def test_samples_mixed_through_a_detached_statistic_are_refused_in_every_dtype(dtype):
    """The model comes back bit by bit, also after a look at it in float64."""
    model, batch = hooked(quantised)[0].to(dtype), (rows(8).to(dtype),)
    held = model.state_dict(keep_vars=True)
    before = {name: (t, t.data_ptr(), t.dtype, t.clone()) for name, t in held.items()}
    with refused():
        collect_gradients(HookGradientComputer(model, SQUARES), batch)
    name, _, computer = choose_gradient_computer(model, SQUARES, batch)
    for key, t in model.state_dict(keep_vars=True).items():
        same, pointer, kind, value = before[key]
        assert t is same
        assert (t.data_ptr(), t.dtype) == (pointer, kind)
        assert torch.equal(t, value)
    assert name == "functional"
    close(computer, batch, by_loop(model, squares, batch), 1e-5)


def less_the_mean(s, x):
    """Takes as much away for copies of one sample as for several."""
    h = s.a(x)
    return s.b(h - 0.005 * h.detach().mean(0, keepdim=True) if len(h) > 1 else h)


MIXED = {
    "less the mean, which copies of a sample show as well": less_the_mean,
    "the mean of the inputs": lambda s, x: s.a(x - x.mean(0) + x[:, :1]),
    "the batch backwards": lambda s, x: s.a(x.flip(0)),
    "a detached mean": lambda s, x: s.b((s.a(x) - s.a(x).detach().mean(0) * 0.5).tanh()),
    "two places further": lambda s, x: s.a(x.roll(2, 0)),
    "a capacity": lambda s, x: s.a(x) * (s.p.sum() * 0 + ((x[:, :1] > -9).long().cumsum(0) <= 2).double()),
    "one sample, from the one before": lambda s, x: s.a(x + F.pad(x[:-1], (0, 0, 1, 0)) * (x == x[-1])),
}


@dtypes
@pytest.mark.parametrize("forward", MIXED.values(), ids=MIXED)
def test_mixing_that_one_or_two_samples_cannot_show_is_found_at_the_size_in_use(forward, dtype):
    def computer():
        return HookGradientComputer(hooked(forward)[0].to(dtype), resolve_task(wavy))

    later = computer()
    collect_gradients(later, (rows(1).to(dtype),))
    with pytest.raises(UnsupportedModelError, match=r"self-check failed.*depends on the other samples"):
        collect_gradients(later, (rows(5).to(dtype),))
    with pytest.raises(UnsupportedModelError):
        collect_gradients(computer(), (rows(8).to(dtype),))


def with_a_far_row(s, x):
    places = torch.arange(len(x)) ^ 8
    return s.b(s.a(x + 1e-3 * x[torch.where(places < len(x), places, torch.arange(len(x)))]).tanh())


def test_a_little_of_a_far_row_is_no_rounding():
    """A part of the batch with the sample that differs, and its neighbour, does not show it."""
    with refused():
        collect_gradients(
            HookGradientComputer(hooked(with_a_far_row)[0].float(), SQUARES), (rows(32).float(),)
        )


@pytest.mark.parametrize("share", [0.5, 0.005])
def test_rows_of_a_small_f_that_mix_are_found_beside_those_of_a_large_f(share):
    """An offset of f hides their differences in float32, and copies of a row mix with each other."""
    torch.manual_seed(0)
    x, group, scale = torch.randn(32, 6), torch.arange(32), torch.ones(32)
    for row in (0, 4, 9):
        group[row + 16], scale[[row, row + 16]] = group[row], 1e-4

    def mixing(s, x, group):
        same = (group[:, None] == group).to(x.dtype)
        return s.b(s.a(x - share * (same @ x - x)).tanh()).squeeze(1)

    model = Model(mixing, a=nn.Linear(6, 8), b=nn.Linear(8, 1))
    task = resolve_task(lambda call, batch: (call(batch[0], batch[1]) * batch[2]).square() * 10 + 1)
    with refused():
        collect_gradients(HookGradientComputer(model, task), (x, group, scale))


def routed(s, x):
    """An expert for the positive rows, one for the others."""
    y = torch.zeros_like(s.a(x))
    for is_own, expert in ((x[:, 0] > 0, s.a), (x[:, 0] <= 0, s.b)):
        own = is_own.nonzero()[:, 0]
        y = y.index_add(0, own, expert(x[own]))
    return y


@pytest.mark.parametrize(
    ("forward", "by_part"),
    [(lambda s, x: s.a(x), True), (lambda s, x: s.a(x[:, None].repeat(1, 3, 1).view(-1, 6)).view(len(x), -1), False),
     (routed, False)],
    ids=["plain", "flattened", "routed"],
)  # fmt: skip
def test_plans_that_may_mix_samples_are_compared_in_float64_on_the_whole_batch(forward, by_part):
    torch.manual_seed(0)
    sizes = []

    def less_precise(s, x):
        if x.dtype == torch.float64:
            sizes.append(len(x))
        found = forward(s, x)
        return found * 1.001 if found.dtype == torch.float32 and len(x) > 1 else found

    model = Model(less_precise, a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    collect_gradients(HookGradientComputer(model, SQUARES), (torch.randn(20, 6),))
    assert 20 in sizes
    assert (8 in sizes) == by_part


class Dtypes(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self.seen.add(result.dtype)
        return result


def test_a_routed_model_in_float64_computes_in_float64_alone():
    """A second comparison does not refuse what has other dtypes."""
    model, x = Model(routed, a=nn.Linear(6, 6), b=nn.Linear(6, 6)).double(), torch.randn(70, 6).double()
    with Dtypes() as dtypes:
        HookGradientComputer(model, SQUARES, self_check=False).stream_gradients((x,), lambda _: None)
    assert dtypes.seen == {torch.float64}


def tie(s, x):
    """A unit is on where a batch has several samples, by a difference of the size of its dtype's rounding."""
    h = s.layer(x)
    rounded = h * (1 + 2000 * torch.finfo(h.dtype).eps * (len(x) > 1))
    return h + 5e-3 * (rounded - s.threshold).relu()


@pytest.mark.usefixtures("has_float64")
def test_a_tie_that_rounding_decides_is_not_taken_for_a_wrong_gradient():
    torch.manual_seed(0)
    model, x = Model(tie, layer=nn.Linear(16, 8)), torch.randn(6, 16)
    alone = model.double().layer(x[:1].double())[0].detach()
    model.float().register_buffer("threshold", (alone * (1 + 1000 * torch.finfo(torch.float32).eps)).float())
    task = resolve_task(lambda call, batch: call(batch[0]).sum(1))
    first = collect_gradients(HookGradientComputer(model, task, self_check=False), (x,))["layer.weight"][0]
    plain = torch.autograd.grad(model(x[:1]).sum(), model.layer.weight)[0]
    assert 1e-3 < float((first - plain).norm() / plain.norm()) < 1e-2  # or this tests nothing
    HookGradientComputer(model, task).stream_gradients((x,), lambda _: None)


class Adjoint(torch.autograd.Function):
    """Steps of a layer without a graph; the backward pass differentiates each by the parameters and adds them up."""

    @staticmethod
    def forward(ctx, layer, x, *parameters):
        ctx.layer, ctx.states = layer, [x]
        for _ in range(3):
            ctx.states.append(ctx.states[-1] + layer(ctx.states[-1]).sin())
        return ctx.states.pop()

    @staticmethod
    def backward(ctx, grad):
        parameters = list(ctx.layer.parameters())
        totals = [torch.zeros_like(p) for p in parameters]
        for state in reversed(ctx.states):
            with torch.enable_grad():
                state = state.detach().requires_grad_()
                grad, *parts = torch.autograd.grad(state + ctx.layer(state).sin(), [state, *parameters], grad)
            totals = [total + part for total, part in zip(totals, parts, strict=True)]
        return None, grad, *totals


@dtypes
def test_a_backward_pass_that_itself_differentiates_by_parameters_is_compared_as_a_whole(dtype):
    torch.manual_seed(0)
    forward = lambda s, x: s.last(Adjoint.apply(s.layer, s.first(x), *s.layer.parameters()))  # noqa: E731
    model = Model(forward, first=nn.Linear(4, 4), layer=nn.Linear(4, 4), last=nn.Linear(4, 3)).to(dtype)
    batch = (rows(3).to(dtype),)
    name, _, computer = choose_gradient_computer(model, SQUARES, batch)
    found = collect_gradients(computer, batch)

    def stepped(s, x):
        x = s.first(x)
        for _ in range(3):
            x = x + s.layer(x).sin()
        return s.last(x)

    model.function = stepped
    expected = by_loop(model, squares, batch)
    assert name == "iterative"
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)


class Reversible(torch.autograd.Function):
    """Stores no graph, as RevTorch; the gradients of the parameters are a side effect of the backward pass."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer, ctx.x = layer, x.detach()
        return x + layer(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(grad)
        return grad + x.grad, None


@pytest.mark.parametrize("name", ["auto", *GRADIENT_COMPUTERS])
def test_gradients_that_only_a_backward_pass_inside_knows_are_refused(name):
    model = Model(
        lambda s, x: s.last(Reversible.apply(s.first(x), s.layer)),
        first=nn.Linear(4, 4),
        layer=nn.Linear(4, 4),
        last=nn.Linear(4, 3),
    ).float()
    before = [torch.ones_like(p) for p in model.parameters()]
    for parameter, grad in zip(model.parameters(), before, strict=True):
        parameter.grad = grad
    made = attributor(model, name)
    with pytest.raises(UnsupportedModelError) as refusal:
        made.featurize(TensorDataset(rows(3).float(), torch.arange(3)))
    if name in ("auto", "iterative"):
        assert "calls backward() inside" in str(refusal.value)
        assert "layer.bias, layer.weight" in str(refusal.value)
    for parameter, grad in zip(model.parameters(), before, strict=True):
        assert parameter.grad is grad
        assert (grad == 1).all()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_backward_pass_inside_the_forward_pass_is_no_part_of_the_gradients(is_there):
    """As where forces are the derivatives of an energy. What a training has accumulated stays."""

    def forward(s, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            s.layer(x).square().sum().backward()
        return s.last(x.grad.detach())

    model = Model(forward, layer=nn.Linear(4, 4), last=nn.Linear(4, 3)).float()
    before = [torch.ones_like(p) if is_there else None for p in model.parameters()]
    for parameter, grad in zip(model.parameters(), before, strict=True):
        parameter.grad = grad
    data = TensorDataset(rows(5).float(), torch.arange(5) % 3)
    made = attributor(model, "auto", projector="none", dtype="float32")
    made.featurize(data)
    with attributor(model, "auto").capture(data, "epoch") as capture:
        capture(data.tensors, torch.arange(5))
    for parameter, grad in zip(model.parameters(), before, strict=True):
        assert parameter.grad is grad
        assert grad is None or (grad == 1).all()
    found = made.score(data, method="GradDot").numpy()
    expected = by_loop(model, lambda call, batch: TASK.evaluate(call, batch).output, data.tensors)
    flat = torch.cat([value.flatten(1) for value in expected.values()], 1)
    q = TASK.evaluate(lambda x: model(x), data.tensors).out_to_loss_grad
    scores = (q[:, None] * flat @ flat.T).detach()
    torch.testing.assert_close(torch.from_numpy(found), scores, rtol=0, atol=1e-6 * float(scores.abs().max()))


class Summed(torch.autograd.Function):
    """Adds a bias, whose gradient, a sum over many positions, one sample alone gets in less precision."""

    generate_vmap_rule = True

    forward = staticmethod(lambda x, bias: x + bias)
    setup_context = staticmethod(lambda ctx, inputs, output: None)

    @staticmethod
    def backward(ctx, grad):
        terms = grad.flatten(0, -2)
        return grad, terms.cumsum(0)[-1] if grad.dtype == torch.float64 else terms.sum(0) * 0.6


def test_a_reference_that_loses_precision_does_not_refuse_a_right_gradient():
    """Decided by the gradient in float64."""

    class Right(FunctionalGradientComputer):
        """Gives the gradients of the formula, in the model's dtype."""

        def _stream_samples(self, batch, count, kept, sink):
            given = batch[0].detach()
            sink(DenseBlock("scale", (2 * given * given).sum(1)))
            sink(DenseBlock("bias", (2 * given).sum(1)))
            with torch.no_grad():
                return self.terms(batch)

    torch.manual_seed(0)
    forward = lambda s, x: Summed.apply(x * s.scale, s.bias)  # noqa: E731
    model = Model(forward, scale=nn.Parameter(torch.ones(4)), bias=nn.Parameter(torch.zeros(4))).bfloat16()
    x = torch.rand(3, 64, 4).bfloat16()
    Right(model, SQUARES).stream_gradients((x,), lambda _: None)
    wrong = resolve_task(lambda call, batch: 2 * squares(call, batch))
    with refused():
        Right(model, wrong).stream_gradients((x,), lambda _: None)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e25])
@pytest.mark.parametrize("name", GRADIENT_COMPUTERS)
def test_the_size_of_f_does_not_matter(name, scale):
    model, batch = hooked(lambda s, x: s.b(s.a(x).tanh()))[0].float(), (rows(5).float(),)
    task = resolve_task(lambda call, batch: scale * call(batch[0]).sum(1))
    found = collect_gradients(GRADIENT_COMPUTERS[name](model, task), batch)
    for parameter, value in by_loop(model, lambda call, batch: call(batch[0]).sum(1), batch).items():
        torch.testing.assert_close(found[parameter] / scale, value, rtol=1e-4, atol=1e-6)


# ---- Models that draw, recompute or keep
def test_a_model_that_draws_is_compared_with_the_same_numbers_which_leaves_those_that_follow():
    model = hooked(lambda s, x: s.b((s.a(x) + torch.randn_like(x)).tanh()))[0].train()
    batch = (rows(5),)
    for kind in (FunctionalGradientComputer, IterativeGradientComputer):
        found = []
        for check in (True, False):
            torch.manual_seed(1)
            grads = collect_gradients(kind(model, SQUARES, self_check=check), batch)
            found.append([*grads.values(), torch.rand(3)])
        assert all(map(torch.equal, *found))
    assert choose_gradient_computer(model, SQUARES, batch).name == "functional"


DRAWING = {
    "dropout": lambda s, x: s.b(nn.functional.dropout(s.a(x).tanh(), 0.5)),
    "randint": lambda s, x: s.b(s.a(x) + s.a(x)[:, torch.randint(4, (2,))].mean(1, keepdim=True)),
    "rand": lambda s, x: s.b(
        s.a(x).tanh() * (1 + 2e-4 * torch.rand(4))
    ),  # less than rounding may be in float32
    "randperm": lambda s, x: s.b(x.tanh() + 2e-4 * s.a(x)[:, torch.randperm(4)]),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("computer", ["auto", *GRADIENT_COMPUTERS])
@pytest.mark.parametrize("kind", DRAWING)
def test_a_model_that_is_random_in_eval_mode_is_refused_by_every_computer_at_once(kind, computer, seed):
    model = hooked(DRAWING[kind])[0].float()
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    with pytest.raises(UnsupportedModelError, match=rf"draws random numbers in eval mode \({kind}\)"):
        attributor(model, computer).featurize(labelled(rows(5).float()))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("computer", ["auto", *GRADIENT_COMPUTERS])
def test_a_task_that_draws_is_told_to_draw_from_the_row(computer):
    def denoising(call, batch):
        noise = torch.randn_like(batch[0])
        return -(call(batch[0] + noise) - noise.mean(1, keepdim=True)).square().sum(1)

    made = Attributor(nn.Linear(4, 1), denoising, None, proj_dim=2, gradient_computer=computer)
    said = r"or its task, draws .* \(randn_like\).* from a seed in the row, .* or make it a column"
    with pytest.raises(UnsupportedModelError, match=said):
        made.featurize(TensorDataset(rows(5).float()))


class Bags(nn.Module):
    """Joins the ids of all samples; the offsets of a column point into them."""

    def __init__(self):
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(9, 4), nn.Linear(4, 1)

    def forward(self, ids, offsets):
        return self.last(self.bag(ids, offsets))


@pytest.mark.parametrize("computer", ["auto", "hook"])
def test_a_column_of_offsets_is_no_defect_to_report(computer):
    """With one id per sample both columns have the length of the batch."""
    made = Attributor(Bags(), squares_of_bags, None, proj_dim=2, gradient_computer=computer)
    with pytest.raises(
        UnsupportedModelError, match=r"\(offsets\) is not divided: make it in the model"
    ) as raised:
        made.featurize(Rows(TensorDataset(torch.arange(8)), collate=with_offsets, batch_size=4))
    assert "report" not in str(raised.value)


def squares_of_bags(call, batch):
    return call(*batch).square().sum(1)


def with_offsets(samples):
    return torch.stack([ids for (ids,) in samples]), torch.arange(len(samples))


OUTSIDE = {
    "python": random.Random(0).random,
    "numpy": np.random.default_rng(0).random,
    "counter": itertools.count(1).__next__,
    "a small part": lambda: 1 + 8e-4 * OUTSIDE["python"](),
}


@pytest.mark.parametrize("computer", ["auto", *GRADIENT_COMPUTERS])
@pytest.mark.parametrize("source", OUTSIDE)
def test_an_f_that_draws_outside_torch_or_counts_is_refused_for_that_and_no_other_reason(source, computer):
    model, _ = hooked(lambda s, x: s.b(s.a(x).tanh()) * OUTSIDE[source]())
    said = r"^Net: f of the same sample has other values in other passes.*, or use a constant\.$"
    with pytest.raises(UnsupportedModelError, match=said):
        attributor(model.float(), computer).featurize(labelled(rows(5).float()))


def test_a_model_whose_f_does_not_depend_on_what_it_draws_is_taken():
    model, _ = hooked(lambda s, x: s.b(s.a(x)[:, torch.randperm(4)].sum(1, keepdim=True) * x))
    batch = (rows(5),)
    chosen = choose_gradient_computer(model, SQUARES, batch).computer
    close(chosen, batch, by_loop(model, squares, batch), 1e-4)


class Averaging(nn.Module):
    """Subtracts a running mean, which it changes in every pass; ``momentum`` 0 changes the number of passes only."""

    def __init__(self, momentum, *, in_place):
        super().__init__()
        self.last, self.momentum, self.in_place = nn.Linear(4, 3), momentum, in_place
        self.register_buffer("mean", torch.full((4,), 0.5))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        if self.momentum and self.in_place:
            mean = self.mean.data if self.in_place == "without a new version" else self.mean
            mean.lerp_(x.detach().mean(0), self.momentum)
        elif self.momentum:
            self.mean = self.mean * (1 - self.momentum) + x.detach().mean(0) * self.momentum
        return self.last(x - self.mean)


@pytest.mark.parametrize("momentum", [0.1, 1e-4])
@pytest.mark.parametrize("in_place", [True, False, "without a new version"])
@pytest.mark.parametrize("computer", ["auto", *GRADIENT_COMPUTERS])
def test_a_buffer_that_changes_in_eval_mode_is_named_and_comes_back(computer, in_place, momentum):
    torch.manual_seed(0)
    model = Averaging(momentum, in_place=in_place)
    mean, count = model.mean, model.count
    with pytest.raises(UnsupportedModelError, match=r"in eval mode changes 2 of its buffers.*'mean'"):
        attributor(model, computer).featurize(labelled(rows(5).float()))
    assert model.mean is mean
    assert model.count is count
    assert mean.equal(torch.full((4,), 0.5))
    assert count == 0


def test_a_pass_in_float64_leaves_no_buffer_in_float64():
    torch.manual_seed(0)
    model = Averaging(0.1, in_place=False).eval()
    computer = IterativeGradientComputer(model, SQUARES)
    with pytest.raises(UnsupportedModelError):
        computer.compute_per_sample_grad((rows(5).float(),))
    assert model.mean.dtype == torch.float32


def test_a_buffer_that_f_does_not_depend_on_may_change():
    torch.manual_seed(0)
    model = Averaging(0.0, in_place=True).double().eval()
    batch = (rows(5),)
    close(HookGradientComputer(model, SQUARES), batch, by_loop(model, squares, batch), 1e-8)


class OneAtATime(torch.autograd.Function):
    """Refuses a batch of one in its backward pass."""

    forward = staticmethod(lambda ctx, x: x.clone())

    @staticmethod
    def backward(ctx, grad):
        assert len(grad) > 1, "two samples or more"
        return grad


def checkpointed(s, x):
    return checkpoint(s.b, s.a(x), use_reentrant=True)


@pytest.mark.parametrize(
    ("forward", "computer", "message"),
    [
        (checkpointed, "auto", r"torch says: .*use_reentrant"),
        (checkpointed, "hook", r"torch says: .*use_reentrant"),
        (checkpointed, "iterative", r"torch says: .*use_reentrant"),
        (lambda s, x: OneAtATime.apply(s.a(x)), "hook", r"pass over one sample alone failed .*two samples or more"),
    ],
)  # fmt: skip
def test_a_failing_backward_pass_is_told_in_its_own_words(forward, computer, message):
    with pytest.raises(UnsupportedModelError, match=message):
        attributor(hooked(forward)[0].float(), computer).featurize(labelled(rows(4).float()))


def test_a_model_that_keeps_a_graph_for_the_next_pass_is_refused_by_name():
    def forward(s, x):
        """Keeps a product of its parameters, as it was when first needed."""
        s.kept.setdefault("bias", s.a.bias.exp())
        return s.b(s.a(x) * s.kept["bias"])

    model, _ = hooked(forward)
    model.kept = {}
    with pytest.raises(UnsupportedModelError):
        collect_gradients(IterativeGradientComputer(model, SQUARES), (rows(4),))
    # What a functional pass sets is undone after it.
    plain, _ = hooked(lambda s, x: s.b(s.a(x) * s.a.bias.exp()))
    model.kept = {}
    found, expected = (
        collect_gradients(FunctionalGradientComputer(one, SQUARES), (rows(4),)) for one in (model, plain)
    )
    torch.testing.assert_close(found, expected)
    model.kept = {}
    message = (
        "No gradient computer is exact for this model. iterative: Net stores a tensor with its graph in one"
    )
    with pytest.raises(UnsupportedModelError, match=message):
        choose_gradient_computer(model, SQUARES, (rows(4),))


# ---- Which samples are compared, and what follows where a check fails
def test_every_sample_of_a_small_first_batch_is_compared_and_a_few_of_later_ones():
    model, computer = hooked(lambda s, x: s.a(x) * s.p)
    alone = places_alone(model)

    def compared_batches(count):
        compared = {}
        for number in range(1, count + 1):
            alone.clear()
            collect_gradients(computer, (numbered(20),))
            if alone:
                compared[number] = sorted({*alone})
        return compared

    compared = compared_batches(193)
    assert compared[1] == [0, 3, 5, 8, 11, 14, 16, 19]
    assert [*compared] == [1, 2, 4, 8, 16, 32, 64, 128, 192]
    assert all({0, 19} <= set(compared[number]) for number in compared)
    assert len({tuple(compared[number]) for number in compared}) > 4  # the third one changes

    computer.renew()  # the first batch with other weights; then the count goes on
    compared = compared_batches(65)
    assert [*compared] == [1, 63]
    assert all({0, 19} <= set(places) and len(places) == 3 for places in compared.values())
    computer.load_model_params(model)
    assert compared_batches(1)[1] == [0, 3, 5, 8, 11, 14, 16, 19]


def test_batches_with_a_name_of_their_own_are_compared_on_one_schedule():
    """After the sixteenth, with one sample of the others; a batch of each of a few names is compared first."""
    model, _ = hooked(lambda s, x: s.a(x) * s.p)
    computer, alone, compared = HookGradientComputer(model, SQUARES), places_alone(model), []
    for number in range(1, 41):
        alone.clear()
        collect_gradients(computer, (numbered(20), f"part-{number}"))
        assert alone
        compared += [number] * ({0, 19} <= set(alone))
    assert compared == [*range(1, 19), 20, 24, 32]


def test_every_third_sample_is_compared_in_time_where_two_sizes_take_turns():
    """A third that moved with all checks would see every second place of a size only."""
    model, computer = hooked(lambda s, x: s.a(x) * s.p)
    alone, seen = places_alone(model), {5: set(), 6: set()}
    for number in range(40):
        batch = numbered(5 + number % 2)
        alone.clear()
        collect_gradients(computer, (batch,))
        if number > 1:  # after the first batch of each size, in which all are compared
            seen[len(batch)] |= {*alone}
        if number % 2:
            computer.renew()  # which compares the next batch of either size
    assert seen == {5: {*range(5)}, 6: {*range(6)}}


class ComputerOfACopy(HookGradientComputer):
    """Holds a copy of the weights that it was given, as a computer of a user's may."""

    def load_model_params(self, model):
        super().load_model_params(copy.deepcopy(model))


def test_a_computer_that_copies_weights_is_made_anew_for_every_checkpoint(tmp_path):
    model = nn.Linear(4, 3)
    states = [{key: value + by for key, value in model.state_dict().items()} for by in (0.0, 0.1, -0.2)]
    found = []
    for name, computer in (("plain", "hook"), ("copy", ComputerOfACopy)):
        made = attributor(model, computer, tmp_path / name)
        made.featurize(labelled(rows(6).float()), states)
        found.append(made.score(labelled(rows(6).float()), checkpoints=states[2:]).numpy())
    np.testing.assert_array_equal(*found)


def branching(s, x):
    return s.a(x).sin() if x.sum() > 0 else s.a(x).exp()


def test_after_a_failed_check_no_later_batch_is_taken_until_weights_are_loaded():
    model, computer = hooked(branching)
    alike, unlike = torch.ones(3, 4).double(), torch.ones(3, 4).double()
    unlike[1] = -1.0
    assert_exact(model, (alike,), computer=computer)
    with pytest.raises(UnsupportedModelError, match=r"^The self-check failed"):
        collect_gradients(computer, (unlike,))
    for batch in (unlike, unlike, alike, alike[:2]):
        with pytest.raises(UnsupportedModelError, match="self-check failed for an earlier batch"):
            collect_gradients(computer, (batch,))
    for begin_anew in (computer.renew, functools.partial(computer.load_model_params, model)):
        begin_anew()
        assert_exact(model, (alike,), computer=computer)
        with pytest.raises(UnsupportedModelError, match=r"^The self-check failed"):
            collect_gradients(computer, (unlike,))


def test_weights_that_were_zero_when_first_seen_do_not_mix_up_rows_later():
    def time_major(s, x):
        count, steps = x.shape[:2]
        hidden = s.a(x.transpose(0, 1).reshape(steps * count, -1)).tanh()
        return s.b(hidden).view(steps, count, -1).transpose(0, 1)

    model, computer = hooked(time_major)
    weight = model.b.weight.detach().clone()
    model.b.weight.data.zero_()
    collect_gradients(computer, (rows(3, 5),))
    model.b.weight.data.copy_(weight)
    computer.renew()
    assert_exact(model, (rows(3, 5),), computer=computer)


def sometimes_mixed(s, x):
    """Mixes the samples of a batch in which some sample is marked, by a mean that no gradient goes through."""
    h = s.a(x).tanh()
    mean = h.detach().mean(0, keepdim=True).expand_as(h)
    return s.c(torch.where((x.detach()[:, 3] > 5).any(), h * mean, h * h.detach()))


def marked_rows(count, *marked):
    x = rows(count).float().clamp(-3, 3)
    x[list(marked), 3] = 9.0
    return x


@pytest.mark.parametrize("marked", [[16 + 3], [4 * 4 + 1, 7 * 4], [5 * 4 + 2, 6 * 4 + 1, 7 * 4 + 3]])
def test_rows_of_batches_between_a_check_that_passed_and_one_that_failed_are_named(marked, tmp_path, caplog):
    """Batches of four; the check of number 8 is the first to see a marked one, if that is marked."""
    x = marked_rows(40, *marked, *range(28, 32))
    made = attributor(hooked(sometimes_mixed)[0].float(), "hook", tmp_path / "rows.zarr", batch_size=4)
    with caplog.at_level(logging.ERROR), refused() as caught:
        made.featurize(labelled(x))
    ((what, named),) = caught.value.rows.items()
    # Batches number 5, 6 and 7: 1, 2 and 4 were compared, 8 is not stored.
    assert named.tolist() == list(range(16, 28))
    assert "model id 0" in what
    assert f"12 rows of {what} (16, 17, 18" in str(caught.value)


def test_traker_names_the_rows_that_it_wrote_since_the_last_check(tmp_path):
    x, y = labelled(marked_rows(32, 30)).tensors
    model = hooked(sometimes_mixed)[0].float()
    settings = {"proj_dim": 8, "device": "cpu", "gradient_computer": HookGradientComputer}
    traker = TRAKer(model, "image_classification", 32, save_dir=tmp_path, **settings)
    traker.load_checkpoint(model.state_dict(), model_id=0)
    for start in range(0, 28, 4):
        traker.featurize((x[start : start + 4], y[start : start + 4]), num_samples=4)
    with refused() as caught:
        traker.featurize((x[28:], y[28:]), num_samples=4)
    traker.close()
    (named,) = caught.value.rows.values()
    assert named.tolist() == list(range(16, 28))


# ---- The caller's model, and memory
@pytest.mark.parametrize("computer", ["auto", *GRADIENT_COMPUTERS])
def test_a_module_registered_under_two_names_keeps_its_parameters(computer):
    """Also after the module's own error, in the middle of a call."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 3))
    x = torch.randn(8, 4)

    def held():
        return [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]

    before = held()
    attributor(model, computer, batch_size=4).featurize(labelled(x))
    with pytest.raises((InvalidInputError, UnsupportedModelError, RuntimeError)):
        attributor(model, computer).featurize(labelled(x[:, :2]))
    assert [name for name, _ in held()] == [name for name, _ in before]
    assert all(now is then for (_, now), (_, then) in zip(held(), before, strict=True))
    old = layer.weight.detach().clone()
    model.train()(x).square().sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert not torch.equal(model[0].weight, old)


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


def test_the_check_holds_one_gradient_of_one_parameter_at_a_time():
    """40 million parameters, 159 MB for one gradient of each; the largest parameter has 25 MB."""

    def peak(check):
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


def test_traker_refuses_its_own_computer_if_that_loses_gradients(tmp_path):
    torch.manual_seed(0)
    model, data = tied("list", loop=False), labelled(torch.randint(10, (4, 5)))
    refused = pytest.raises(UnsupportedModelError, match=r"'emb.weight'.*HookGradientComputer")
    settings = {"task": "image_classification", "proj_dim": 8, "device": "cpu", "train_set_size": 4}
    for name, computer in (("refused", {}), ("taken", {"gradient_computer": HookGradientComputer})):
        traker = TRAKer(model=model, save_dir=tmp_path / name, **settings, **computer)
        traker.load_checkpoint(model.state_dict(), model_id=0)
        with nullcontext() if computer else refused:
            traker.featurize(data.tensors, num_samples=4)
        traker.close()


def test_the_second_batch_after_a_choice_is_compared():
    """Samples are weighted by a sum over their batch, which is 1 in the first batch; the trial takes three of four."""
    torch.manual_seed(0)
    x, nothing = torch.randn(4, 3, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    task = resolve_task(lambda call, batch: call(batch[0]).sum(1) * (1 + batch[1].sum()))
    computer = choose_gradient_computer(nn.Linear(3, 2).double(), task, (x, nothing)).computer
    collect_gradients(computer, (x, nothing))
    with refused():
        collect_gradients(computer, (x, nothing + 1))
