"""Every gradient rule over its options, against one backward pass per sample in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from models import assert_equals_autograd, by_loop, cast, wavy
from torch import Tensor, nn

from trak_lite.gradient_computers import HookGradientComputer, choose_gradient_computer, collect_gradients
from trak_lite.gradient_computers.hooks.calls import Lookups, OperationCall, dense_of
from trak_lite.gradient_computers.hooks.coverage import Coverage
from trak_lite.gradient_computers.hooks.plan.axes import BatchAxis
from trak_lite.gradient_computers.hooks.rules.embeddings import embedding_bag_rule
from trak_lite.modelout_functions import ModelCall, resolve_task
from trak_lite.types import FactoredBlock, LookupBlock

quick = settings(max_examples=25, deadline=None, derandomize=True, database=None)


def total(call: ModelCall, batch: Any) -> Tensor:
    out = call(*batch)
    out = out[0] if isinstance(out, tuple) else out
    return (out * torch.cos(3 * out)).flatten(1).sum(1)


def check(layer: nn.Module, *batch: Tensor, output: Any = total, how: str | None = "rule") -> Coverage | None:
    """Compare all gradients with the loop; return how they came about."""
    torch.manual_seed(1)
    layer = layer.double().eval()
    for p in layer.parameters():
        nn.init.normal_(p)
    batch = cast(batch, torch.float64)
    computer = HookGradientComputer(layer, resolve_task(output))

    found = collect_gradients(computer, batch)

    if len(batch[0]) == 0:
        assert {name: value.shape for name, value in found.items()} == {
            name: (0, *p.shape) for name, p in layer.named_parameters()
        }
        return None
    expected = by_loop(layer, output, batch)
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )
    coverage = computer.explain(batch)
    assert how is None or {line.how for line in coverage} <= {how, "zero"}, str(coverage)
    return coverage


@quick
@given(count=st.sampled_from([0, 1, 3]), middle=st.lists(st.integers(1, 3), max_size=2), bias=st.booleans())
def test_linear_with_two_to_four_axes(count: int, middle: list[int], bias: bool) -> None:
    check(nn.Linear(4, 3, bias=bias), torch.randn(count, *middle, 4))


CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


@quick
@given(
    count=st.sampled_from([0, 1, 3]),
    dims=st.sampled_from([1, 2, 3]),
    groups=st.sampled_from([1, 2, 4]),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.sampled_from([0, 1, "same", "valid"]),
    mode=st.sampled_from(["zeros", "reflect", "circular", "replicate"]),
    dilation=st.integers(1, 2),
    bias=st.booleans(),
)
def test_convolutions(
    count: int,
    dims: int,
    groups: int,
    kernel: int,
    stride: int,
    padding: int | str,
    mode: str,
    dilation: int,
    bias: bool,
) -> None:
    stride = 1 if padding == "same" else stride
    layer = CONVOLUTIONS[dims](
        4,
        4,
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=bias,
        padding_mode=mode,
    )
    check(layer, torch.randn(count, 4, *(6, 7, 5)[:dims]))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_a_convolution_with_an_even_kernel_pads_unevenly(padding: str) -> None:
    check(nn.Conv2d(2, 3, (2, 4), padding=padding), torch.randn(3, 2, 5, 6))


@quick
@given(
    count=st.sampled_from([1, 3]),
    dims=st.sampled_from([1, 2, 3]),
    groups=st.sampled_from([1, 2]),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 1),
    extra=st.integers(0, 1),
    dilation=st.integers(1, 2),
)
def test_transposed_convolutions(
    count: int, dims: int, groups: int, kernel: int, stride: int, padding: int, extra: int, dilation: int
) -> None:
    extra = extra if extra < max(stride, dilation) else 0
    layer = TRANSPOSED[dims](
        4, 6, kernel, stride=stride, padding=padding, output_padding=extra, groups=groups, dilation=dilation
    )
    check(layer, torch.randn(count, 4, *(4, 5, 4)[:dims]))


@quick
@given(
    count=st.sampled_from([0, 1, 3]),
    middle=st.lists(st.integers(1, 3), max_size=2),
    padding_idx=st.sampled_from([None, 0, 2, -1]),
)
def test_embedding_gives_the_padding_row_no_gradient(
    count: int, middle: list[int], padding_idx: int | None
) -> None:
    layer = nn.Embedding(5, 3, padding_idx=padding_idx)
    check(layer, torch.randint(5, (count, *middle)))


@quick
@given(
    mode=st.sampled_from(["sum", "mean", "max"]),
    padding_idx=st.sampled_from([None, 1]),
    weighted=st.booleans(),
    count=st.sampled_from([1, 4]),
)
def test_embedding_bags_with_repeated_ids(
    mode: str, padding_idx: int | None, weighted: bool, count: int
) -> None:
    weighted = weighted and mode == "sum"
    bag = nn.EmbeddingBag(4, 3, mode=mode, padding_idx=padding_idx)
    ids = torch.randint(4, (count, 6))
    if weighted:
        output = lambda call, batch: call(batch[0], per_sample_weights=batch[1]).sin().sum(1)  # noqa: E731
        check(bag, ids, torch.randn(count, 6), output=output)
    else:
        check(bag, ids)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bags_by_offsets(mode: str, last: bool) -> None:
    """Two bags per sample, of sizes 1 and 3."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(5, 3, mode=mode, include_last_offset=last)

        def forward(self, ids: Tensor) -> Tensor:
            starts = torch.arange(0, ids.numel(), 4)
            offsets = torch.stack([starts, starts + 1], 1).flatten()
            if last:
                offsets = torch.cat([offsets, torch.tensor([ids.numel()])])
            return self.bag(ids.flatten(), offsets).view(len(ids), 2, 3)

    check(Bags(), torch.randint(5, (3, 4)))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(6),
    "LayerNorm over two axes": lambda: nn.LayerNorm((4, 6)),
    "LayerNorm without bias": lambda: nn.LayerNorm(6, bias=False),
    "RMSNorm": lambda: nn.RMSNorm(6),
    "RMSNorm over two axes": lambda: nn.RMSNorm((4, 6), eps=1e-3),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "InstanceNorm": lambda: nn.InstanceNorm1d(4, affine=True),
    "InstanceNorm with running statistics": lambda: nn.InstanceNorm1d(
        4, affine=True, track_running_stats=True
    ),
    "BatchNorm in eval mode": lambda: nn.BatchNorm1d(4),
}


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS.keys())
def test_norms(norm: Callable[[], nn.Module], count: int) -> None:
    check(norm(), torch.randn(count, 4, 6))


@quick
@given(
    kind=st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]),
    layers=st.integers(1, 2),
    bidirectional=st.booleans(),
    batch_first=st.booleans(),
    bias=st.booleans(),
    count=st.sampled_from([1, 3]),
)
def test_recurrent_layers(
    kind: type[nn.RNNBase], layers: int, bidirectional: bool, batch_first: bool, bias: bool, count: int
) -> None:
    layer = kind(3, 4, num_layers=layers, bidirectional=bidirectional, batch_first=batch_first, bias=bias)

    def output(call: ModelCall, batch: Any) -> Tensor:
        x = batch[0] if batch_first else batch[0].transpose(0, 1)
        out, last = call(x)
        last = last[0] if isinstance(last, tuple) else last
        out = out if batch_first else out.transpose(0, 1)
        return out.sin().flatten(1).sum(1) + last.square().sum((0, 2))

    check(layer, torch.randn(count, 5, 3), output=output)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_sequences_in_any_order(kind: type[nn.RNNBase], bidirectional: bool) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 3)
            self.rnn = kind(3, 4, num_layers=2, bidirectional=bidirectional, batch_first=True)

        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            x = nn.utils.rnn.pack_padded_sequence(
                self.embed(ids), lengths, batch_first=True, enforce_sorted=False
            )
            out, _ = self.rnn(x)
            return nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=5)[0]

    check(Packed(), torch.randint(7, (4, 5)), torch.tensor([3, 5, 1, 4]))


@quick
@given(
    batch_first=st.booleans(),
    bias=st.booleans(),
    bias_kv=st.booleans(),
    zero_attn=st.booleans(),
    other_sizes=st.booleans(),
    need_weights=st.booleans(),
    masked=st.booleans(),
)
def test_multi_head_attention(
    batch_first: bool,
    bias: bool,
    bias_kv: bool,
    zero_attn: bool,
    other_sizes: bool,
    need_weights: bool,
    masked: bool,
) -> None:
    layer = nn.MultiheadAttention(
        4,
        2,
        bias=bias,
        add_bias_kv=bias_kv,
        add_zero_attn=zero_attn,
        kdim=3 if other_sizes else None,
        vdim=5 if other_sizes else None,
        batch_first=batch_first,
    )
    q = torch.randn(3, 4, 4)
    k, v = torch.randn(3, 6, 3 if other_sizes else 4), torch.randn(3, 6, 5 if other_sizes else 4)
    mask = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1]]).bool()

    def output(call: ModelCall, batch: Any) -> Tensor:
        q, k, v, mask = batch
        if not batch_first:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        out, _ = call(q, k, v, key_padding_mask=mask.bool() if masked else None, need_weights=need_weights)
        out = out if batch_first else out.transpose(0, 1)
        return out.sin().flatten(1).sum(1)

    check(layer, q, k, v, mask.int(), output=output, how=None)


class Scaled(nn.Module):
    """One parameter of any broadcastable shape, used by one operation."""

    def __init__(self, operation: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(shape))
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(x, self.p)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x + p": lambda x, p: x + p,
    "p + x": lambda x, p: p + x,
    "add alpha": lambda x, p: torch.add(x, p, alpha=2.5),
    "x - p": lambda x, p: x - p,
    "p - x": lambda x, p: p - x,
    "rsub": lambda x, p: x.__rsub__(p),
    "x * p": lambda x, p: x * p,
    "p * x": lambda x, p: p * x,
    "x / p": lambda x, p: x / p,
    "p / x": lambda x, p: p / (x + 3),
    "in-place add": lambda x, p: x.clone().add_(p),
    "in-place product": lambda x, p: x.sin().mul_(p),
    "augmented product": lambda x, p: x.sin().__imul__(p),
    "pow": lambda x, p: (x.abs() + 1) ** p,
    "where": lambda x, p: torch.where(x > 0, x, p),
    "lerp": lambda x, p: torch.lerp(x, p.expand_as(x), 0.3),
    "maximum": lambda x, p: torch.maximum(x, p),
    "p twice": lambda x, p: p * (x + p) * p.exp(),
    "addcmul": lambda x, p: torch.addcmul(x, x, p),
}


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 4, 1), (4, 5), (3, 1, 5)], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_bare_parameters_that_broadcast(
    operation: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    check(Scaled(operation, shape), torch.randn(2, 3, 4, 5), how=None)


PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "x @ W": (lambda x, p: x @ p, (5, 3)),
    "W @ x": (lambda x, p: p @ x, (3, 4)),
    "x @ W.t()": (lambda x, p: x @ p.t(), (3, 5)),
    "x @ W.T": (lambda x, p: x @ p.T, (3, 5)),
    "x @ W.mT": (lambda x, p: x @ p.mT, (3, 5)),
    "x @ W.transpose": (lambda x, p: x @ p.transpose(0, 1), (3, 5)),
    "x @ v": (lambda x, p: x @ p, (5,)),
    "v @ x": (lambda x, p: p @ x, (4,)),
    "batched W": (lambda x, p: x @ p, (1, 5, 3)),
    "einsum": (lambda x, p: torch.einsum("btd,hde->bthe", x, p), (2, 5, 3)),
    "tensordot": (lambda x, p: torch.tensordot(x, p, dims=([2], [0])), (5, 3)),
    "flattened rows": (lambda x, p: (x.reshape(-1, 5) @ p).view(len(x), 4, 3), (5, 3)),
    "rows flattened time-major": (
        lambda x, p: (x.transpose(0, 1).reshape(-1, 5) @ p).view(4, len(x), 3).transpose(0, 1),
        (5, 3),
    ),
    "batch on the last axis": (lambda x, p: (p @ x.flatten(1).t()).t(), (3, 20)),
    "index by ids": (lambda x, p: p[(x[:, :, 0] > 0).long()], (2, 3)),
    "repeat": (lambda x, p: p.repeat(len(x), 1) * x[:, 0, :3], (1, 3)),
    "repeat_interleave": (lambda x, p: p.repeat_interleave(len(x), 0) * x[:, 0, :3], (1, 3)),
    "new rows": (lambda x, p: torch.cat([p.expand(len(x), -1, -1), x], 1), (1, 2, 5)),
    "sum of squares": (lambda x, p: x * p.square().sum(), (3, 2)),
}


@pytest.mark.parametrize(("operation", "shape"), PRODUCTS.values(), ids=PRODUCTS.keys())
def test_bare_parameters_in_products_and_look_ups(
    operation: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    check(Scaled(operation, shape), torch.randn(3, 4, 5), how=None)


def test_a_transposed_weight_stays_factored() -> None:
    model = Scaled(lambda x, p: x @ p.t(), (3, 5)).double()
    blocks: list[Any] = []

    HookGradientComputer(model, resolve_task(total)).stream_gradients(
        (torch.randn(2, 4, 5).double(),), blocks.append
    )

    (block,) = blocks
    assert isinstance(block, FactoredBlock)
    assert (block.inputs.shape, block.output_grads.shape) == ((2, 4, 5), (2, 4, 3))


class Scalars(nn.Module):
    def __init__(self, use: Callable[..., Tensor]) -> None:
        super().__init__()
        self.p, self.w, self.use = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 4)), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


@pytest.mark.filterwarnings("ignore:This overload of:UserWarning")
@pytest.mark.parametrize(
    "use",
    [
        lambda s, x: torch.add(x @ s.w, 2, s.p),
        lambda s, x: (x @ s.w).clone().add_(2, s.p),
        lambda s, x: (x @ s.w).clone().sub_(3, s.p),
    ],
    ids=["add", "add in place", "subtract in place"],
)
def test_a_factor_between_the_operands_belongs_to_the_second(use: Callable[..., Tensor]) -> None:
    check(Scalars(use), torch.randn(3, 4), how=None)


@pytest.mark.parametrize(
    "use",
    [
        lambda s, x: torch.matmul(other=s.w, input=x),
        lambda s, x: torch.mm(mat2=s.w, input=x),
        lambda s, x: x.matmul(other=s.w),
        lambda s, x: torch.matmul(other=x.t(), input=s.w).t(),
    ],
    ids=["matmul", "mm", "a method", "the parameter on the left"],
)
def test_factors_of_a_matrix_product_may_be_named_in_any_order(use: Callable[..., Tensor]) -> None:
    check(Scalars(use), torch.randn(3, 4))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_give_the_rows_that_were_looked_up_and_no_table(mode: str) -> None:
    torch.manual_seed(0)
    model, ids = nn.EmbeddingBag(50, 3, mode=mode, padding_idx=7).double(), torch.randint(50, (3, 4))
    ids[1, 2] = 7
    blocks: list[Any] = []

    HookGradientComputer(model, resolve_task(total)).stream_gradients((ids,), blocks.append)

    (block,) = blocks
    assert isinstance(block, LookupBlock)
    assert block.rows.shape == (3, 4)
    expected = by_loop(model, total, (ids,))["weight"]
    torch.testing.assert_close(block.grad, expected, rtol=1e-10, atol=1e-12)


def test_bags_of_unequal_sizes_are_filled_up_with_rows_of_zero() -> None:
    weight = torch.zeros(5, 2)
    ids, offsets = torch.tensor([4, 1, 1, 3]), torch.tensor([0, 3, 3])
    call = OperationCall(
        torch.embedding_bag,
        (weight, ids, offsets, False, 0, False, None, False, -1),
        {},
        3,
        {id(weight): weight},
        {},
        (BatchAxis(0),),
    )

    parts = embedding_bag_rule(call, torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))

    ((_, part),) = list(parts or ())
    assert isinstance(part, Lookups)
    assert part.values.shape == (3, 3, 2)
    table = dense_of(part)
    expected = torch.zeros(3, 5, 2)
    expected[0, 4], expected[0, 1] = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0])
    expected[2, 3] = torch.tensor([5.0, 6.0])
    assert table.tolist() == expected.tolist()


# Complex operands: the gradient of a product has the conjugate of the other factor

COMPLEX: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "matmul": ((3, 5), (5, 4), lambda x, w: x @ w),
    "matmul on the left": ((5, 3), (4, 5), lambda x, w: w @ x),
    "matrix and vector": ((3, 5), (5,), lambda x, w: x @ w),
    "mm": ((5,), (5, 4), torch.mm),
    "linear": ((3, 5), (4, 5), lambda x, w: F.linear(x, w, w[:, 0])),
    "addmm": ((5,), (5, 4), lambda x, w: torch.addmm(w[0], x, w)),
    "addmm with factors": ((5,), (5, 4), lambda x, w: torch.addmm(w[0], x, w, beta=2j, alpha=1 + 1j)),
    "bmm": ((3, 5), (5, 4), lambda x, w: torch.bmm(x, w.expand(len(x), 5, 4))),
    "baddbmm": ((3, 5), (5, 4), lambda x, w: torch.baddbmm(w[:3, :1], x, w.expand(len(x), 5, 4))),
    "einsum": ((3, 5), (5, 4), lambda x, w: torch.einsum("btd,de->bte", x, w)),
    "einsum on the left": ((3, 5), (5, 4), lambda x, w: torch.einsum("de,btd->bte", w, x)),
    "tensordot": ((3, 5), (5, 4), lambda x, w: torch.tensordot(x, w, 1)),
    "adjoint": ((3, 5), (4, 5), lambda x, w: x.conj() @ w.mH),
    "outer": ((5,), (5,), lambda x, w: torch.outer(x[:, 0], w)),
    "vecdot": ((3, 5), (5,), lambda x, w: torch.linalg.vecdot(w, x)),
    "mul": ((3, 5), (5,), torch.mul),
    "mul_": ((3, 5), (5,), lambda x, w: x.clone().mul_(w)),
    "div": ((3, 5), (5,), torch.div),
    "div by samples": ((3, 5), (5,), lambda x, w: w / x),
    "add": ((3, 5), (5,), lambda x, w: torch.add(x, w, alpha=2 - 1j)),
    "sub": ((3, 5), (5,), lambda x, w: torch.sub(w, x) + torch.sub(x, w, alpha=1j)),
    "where": ((3, 5), (5,), lambda x, w: torch.where(x.real > 0, x, w)),
    "pow": ((3, 5), (5,), torch.pow),
    "addcmul": ((3, 5), (5,), lambda x, w: torch.addcmul(x, x, w, value=2)),
    "conv1d": ((3, 9), (4, 3, 3), lambda x, w: F.conv1d(x, w, w[:, 0, 0], stride=2, padding=1)),
    "conv1d in groups": ((4, 9), (4, 2, 3), lambda x, w: F.conv1d(x, w, groups=2)),
    "conv1d of one entry": ((3, 9), (4, 3, 1), F.conv1d),
    "conv2d": ((3, 9, 9), (4, 3, 3, 3), F.conv2d),
    "conv3d": ((2, 4, 4, 4), (3, 2, 2, 2, 2), F.conv3d),
    "transposed convolution": ((3, 5, 5), (3, 4, 3, 3), lambda x, w: F.conv_transpose2d(x, w, stride=2)),
    "spectrum": ((4, 3, 5), (3, 5), lambda x, w: torch.fft.irfft2(x * w)),
    "einsum with a real parameter": (
        (3, 5),
        (3, 5),
        lambda x, w: torch.einsum("bij,ij->bij", x, w.real) + torch.complex(x.real, w.imag.expand_as(x.real)),
    ),
    "real parameter": (
        (3, 5),
        (5,),
        lambda x, w: w.real * x + torch.complex(x.real, w.imag.expand_as(x.real)),
    ),
}


class Spectral(nn.Module):
    """An operation of complex samples and of a complex value that is made of real parameters, as in GFNet."""

    def __init__(
        self, shape: Sequence[int], operation: Callable[[Tensor, Tensor], Tensor], plain: bool
    ) -> None:
        super().__init__()
        self.operation, self.plain = operation, plain
        self.weight, self.scale = nn.Parameter(torch.randn(*shape, 2)), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.view_as_complex(x)
        result = self.operation(x if self.plain else x * self.scale, torch.view_as_complex(self.weight))
        real = torch.view_as_real(result) if result.is_complex() else result
        return real.flatten(1).sin() + self.scale


@pytest.mark.parametrize("plain", [True, False], ids=["plain data", "samples that need a gradient"])
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_operands(name: str, plain: bool) -> None:
    samples, shape, operation = COMPLEX[name]
    torch.manual_seed(0)
    model = Spectral(shape, operation, plain).double()
    batch = (torch.randn(3, *samples, 2, dtype=torch.float64),)
    computer = HookGradientComputer(model, resolve_task(wavy))

    for _ in range(2):  # the second pass runs bound steps
        assert_equals_autograd(model, collect_gradients(computer, batch), batch)
    assert choose_gradient_computer(model, resolve_task(wavy), batch).name == "hook"
