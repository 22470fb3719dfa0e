"""Every gradient rule at drawn shapes and options, against one backward pass per sample in float64."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from models import Conv1D
from torch import Tensor, nn

from trak_lite.gradient_computers import HookGradientComputer, collect_gradients
from trak_lite.modelout_functions import resolve_task

# The first of a sequence that is the same in every run; TRAK_LITE_DRAWN_EXAMPLES=1000 draws on.
EXAMPLES = int(os.environ.get("TRAK_LITE_DRAWN_EXAMPLES", "30"))
quick = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)

BY_RULE = frozenset({"rule", "zero"})
BY_ANY = BY_RULE | {"fallback"}
COUNTS = st.sampled_from([0, 1, 2, 3, 4, 5])
WIDTHS = st.integers(1, 4)


@dataclass(frozen=True)
class Drawn:
    """A model and a batch for it, both still to be made."""

    model: Callable[[], nn.Module]
    inputs: tuple[Callable[[], Tensor], ...]
    """Tensors with the samples on axis 0."""
    ways: frozenset[str] = BY_RULE
    """How the coverage report may say that a gradient comes about."""


def normal(*shape: int) -> Callable[[], Tensor]:
    return partial(torch.randn, shape, dtype=torch.float64)


def whole(size: int, *shape: int) -> Callable[[], Tensor]:
    """Return whole numbers below ``size``."""
    return partial(torch.randint, size, shape)


def total(model: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> Tensor:
    """Return a number per sample in which every entry of the result counts differently: ``(B,)``."""
    out = model(*batch).flatten(1)
    return (out * torch.cos(3 * out + torch.arange(out.shape[1]))).sum(1)


def check(drawn: Drawn) -> None:
    """Compare the gradients of every sample and parameter with the loop."""
    torch.manual_seed(0)
    model = drawn.model().double().eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.7)
    batch = tuple(make() for make in drawn.inputs)
    names = [name for name, _ in model.named_parameters()]
    computer = HookGradientComputer(model, resolve_task(total))

    found = collect_gradients(computer, batch)

    assert list(found) == names
    if len(batch[0]) == 0:
        assert [g.shape for g in found.values()] == [(0, *p.shape) for p in model.parameters()]
        return
    expected = reference.per_sample_gradients(model, total, reference.samples_of(batch), names)
    largest = max(np.abs(value).max() for value in expected.values())
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name].numpy(), value, rtol=1e-10, atol=1e-12 * largest, err_msg=name, strict=True
        )
    coverage = computer.explain(batch)
    assert {line.how for line in coverage} <= drawn.ways, str(coverage)


class Above(nn.Module):
    """A layer above a bare parameter, whose gradient has to come through the layer."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale)


def above(width: int, layer: Callable[..., nn.Module], *args: Any, **options: Any) -> nn.Module:
    """Return the layer above a parameter as wide as the last axis of its input."""
    return Above(layer(*args, **options), width)


# --- Matrix products --------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, int], Tensor]]] = {
    "samples first": (lambda x: x, lambda y, count: y),
    "samples second": (lambda x: x.transpose(0, 1).contiguous(), lambda y, count: y.transpose(0, 1)),
    "rows of samples": (lambda x: x.flatten(0, 1), lambda y, count: y.unflatten(0, (count, -1))),
    "rows of positions": (
        lambda x: x.transpose(0, 1).flatten(0, 1),
        lambda y, count: y.unflatten(0, (-1, count)).transpose(0, 1),
    ),
}


class LaidOut(nn.Module):
    """A layer that is called with the samples somewhere else than on axis 0."""

    def __init__(self, make: Callable[[], nn.Module], layout: str) -> None:
        super().__init__()
        self.layer, self.layout = make(), layout

    def forward(self, x: Tensor) -> Tensor:
        there, back = LAYOUTS[self.layout]
        return back(self.layer(there(x)), len(x))


@st.composite
def linear_layers(draw: st.DrawFn) -> Drawn:
    """``nn.Linear`` and Hugging Face's Conv1D on inputs with two to four axes."""
    width, out, bias = draw(WIDTHS), draw(WIDTHS), draw(st.booleans())
    middle = draw(st.lists(st.integers(1, 3), max_size=2))
    kind, is_flat = draw(
        st.sampled_from(
            [(partial(nn.Linear, width, out, bias=bias), False), (partial(Conv1D, out, width), True)]
        )
    )
    layouts = [["samples first"], [*LAYOUTS], ["samples first", "rows of samples"] if is_flat else [*LAYOUTS]]
    layout = draw(st.sampled_from(layouts[len(middle)]))
    model = partial(LaidOut, partial(above, width, kind), layout)
    return Drawn(model, (normal(draw(COUNTS), *middle, width),))


@quick
@given(drawn=linear_layers())
def test_linear_layers(drawn: Drawn) -> None:
    check(drawn)


# --- Convolutions -----------------------------------------------------------------------------------------

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def with_frames(draw: st.DrawFn, layer: Callable[[], nn.Module], *shape: int) -> Drawn:
    """Give the layer one array of this shape per sample, or several whose axis is flattened into the batch."""
    layout = draw(st.sampled_from(["samples first", "rows of samples", "rows of positions"]))
    frames = () if layout == "samples first" else (draw(st.integers(1, 2)),)
    return Drawn(partial(LaidOut, layer, layout), (normal(draw(COUNTS), *frames, *shape),))


def per_axis(draw: st.DrawFn, dims: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(draw(st.integers(low, high)) for _ in range(dims))


@st.composite
def convolutions(draw: st.DrawFn) -> Drawn:
    """Every option of a convolution, each spatial axis on its own."""
    dims, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    channels, out = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    kernel, dilation = per_axis(draw, dims, 1, 3), per_axis(draw, dims, 1, 2)
    padding = draw(st.sampled_from(["same", "valid", per_axis(draw, dims, 0, 2)]))
    stride = (1,) * dims if padding == "same" else per_axis(draw, dims, 1, 3)
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    # Reflection takes less than the whole axis: at most 2 entries on a side.
    sizes = [max(need, 3) + draw(st.integers(0, 2)) for need in reach]
    model = partial(
        above,
        sizes[-1],
        CONVOLUTIONS[dims],
        *(channels, out, kernel),
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"])),
    )
    return with_frames(draw, model, channels, *sizes)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@quick
@given(drawn=convolutions())
def test_convolutions(drawn: Drawn) -> None:
    check(drawn)


@st.composite
def transposed_convolutions(draw: st.DrawFn) -> Drawn:
    dims, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    channels, out = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    kernel, dilation = per_axis(draw, dims, 1, 3), per_axis(draw, dims, 1, 2)
    stride, padding = per_axis(draw, dims, 1, 3), per_axis(draw, dims, 0, 2)
    extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    # The padding is cut off the result, of which something has to be left.
    sizes = [1 + math.ceil(2 * p / s) + draw(st.integers(0, 2)) for p, s in zip(padding, stride, strict=True)]
    model = partial(
        above,
        sizes[-1],
        TRANSPOSED[dims],
        *(channels, out, kernel),
        stride=stride,
        padding=padding,
        output_padding=extra,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
    )
    return with_frames(draw, model, channels, *sizes)


@quick
@given(drawn=transposed_convolutions())
def test_transposed_convolutions(drawn: Drawn) -> None:
    check(drawn)


# --- Look-ups ---------------------------------------------------------------------------------------------


@st.composite
def embeddings(draw: st.DrawFn) -> Drawn:
    size = draw(st.integers(1, 5))
    padding = draw(st.none() | st.integers(-size, size - 1))
    model = partial(nn.Embedding, size, draw(WIDTHS), padding_idx=padding)
    return Drawn(model, (whole(size, draw(COUNTS), *draw(st.lists(st.integers(1, 3), max_size=3))),))


@quick
@given(drawn=embeddings())
def test_embeddings(drawn: Drawn) -> None:
    check(drawn)


class Bags(nn.Module):
    """Bags of ids ``(B, n)``: one per sample, or by offsets several, whose ends ``(B, m)`` differ between samples."""

    def __init__(self, size: int, width: int, *, by_offsets: bool, learned: bool, **options: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(size, width, **options)
        self.by_offsets = by_offsets
        self.share = nn.Linear(1, 1) if learned else None

    def forward(self, ids: Tensor, ends: Tensor, shares: Tensor | None = None) -> Tensor:
        if shares is not None and self.share is not None:
            shares = self.share(shares.unsqueeze(-1)).squeeze(-1)
        if not self.by_offsets:
            return self.bag(ids, per_sample_weights=shares)
        starts = torch.arange(len(ids)).unsqueeze(1) * ids.shape[1]
        offsets = torch.cat([starts, starts + ends], 1).flatten()
        if self.bag.include_last_offset:
            offsets = torch.cat([offsets, torch.tensor([ids.numel()])])
        flat = None if shares is None else shares.flatten()
        return self.bag(ids.flatten(), offsets, flat).view(len(ids), -1)


def cuts(count: int, length: int, number: int) -> Tensor:
    """Return places ``(B, number)`` at which to cut each sample, rising; repeats and ends make empty bags."""
    return torch.randint(length + 1, (count, number)).sort(1).values


@st.composite
def embedding_bags(draw: st.DrawFn) -> Drawn:
    """Few ids, so that they repeat; bags may be empty."""
    size, length, count = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(COUNTS)
    mode, by_offsets = draw(st.sampled_from(["sum", "mean", "max"])), draw(st.booleans())
    weighted = draw(st.sampled_from(["no", "given", "learned"])) if mode == "sum" else "no"
    model = partial(
        Bags,
        size,
        draw(WIDTHS),
        by_offsets=by_offsets,
        learned=weighted == "learned",
        mode=mode,
        padding_idx=draw(st.none() | st.integers(-size, size - 1)),
        include_last_offset=by_offsets and draw(st.booleans()),
    )
    ends = partial(cuts, count, length, draw(st.integers(1, 3)))
    shares = () if weighted == "no" else (normal(count, length),)
    return Drawn(model, (whole(size, count, length), ends, *shares))


@quick
@given(drawn=embedding_bags())
def test_embedding_bags(drawn: Drawn) -> None:
    check(drawn)


# --- Normalisation ----------------------------------------------------------------------------------------


@st.composite
def layer_norms(draw: st.DrawFn) -> Drawn:
    """LayerNorm and RMSNorm over the last one to three axes, and more than one entry."""
    shape = (*draw(st.lists(WIDTHS, max_size=2)), draw(st.integers(2, 4)))
    outer = draw(st.lists(st.integers(1, 3), max_size=2))
    affine, eps = draw(st.booleans()), draw(st.sampled_from([1e-5, 1e-2]))
    kind = draw(
        st.sampled_from(
            [
                partial(nn.LayerNorm, shape, eps, affine, draw(st.booleans())),
                partial(nn.RMSNorm, shape, draw(st.sampled_from([None, eps])), affine),
            ]
        )
    )
    return Drawn(partial(above, shape[-1], kind), (normal(draw(COUNTS), *outer, *shape),))


@quick
@given(drawn=layer_norms())
def test_layer_and_rms_norms(drawn: Drawn) -> None:
    check(drawn)


@st.composite
def group_norms(draw: st.DrawFn) -> Drawn:
    """Torch refuses a batch of one sample with one entry per group."""
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(2, 3), min_size=int(per_group == 1), max_size=3))
    channels = groups * per_group
    model = partial(above, [channels, *sizes][-1], nn.GroupNorm, groups, channels, affine=draw(st.booleans()))
    return with_frames(draw, model, channels, *sizes)


@quick
@given(drawn=group_norms())
def test_group_norms(drawn: Drawn) -> None:
    check(drawn)


def trained(width: int, norm: type[nn.Module], channels: int, **options: Any) -> nn.Module:
    """Return the norm above a parameter, with running statistics that are not those of a new layer."""
    layer = norm(channels, **options)
    if layer.running_mean is not None:
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
    return Above(layer, width)


INSTANCE_NORMS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
BATCH_NORMS = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


@st.composite
def channel_norms(draw: st.DrawFn) -> Drawn:
    """InstanceNorm, with and without running statistics, and BatchNorm in eval mode."""
    channels, instance = draw(WIDTHS), draw(st.booleans())
    sizes = draw(st.lists(st.integers(2, 3), min_size=int(instance), max_size=3))
    model = partial(
        trained,
        [channels, *sizes][-1],
        (INSTANCE_NORMS if instance else BATCH_NORMS)[len(sizes)],
        channels,
        affine=draw(st.booleans()),
        track_running_stats=not instance or draw(st.booleans()),
    )
    return with_frames(draw, model, channels, *sizes)


@quick
@given(drawn=channel_norms())
def test_instance_and_batch_norms(drawn: Drawn) -> None:
    check(drawn)


# --- Recurrent layers -------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A recurrent layer over ``(B, T, d)``, all of whose results count."""

    def __init__(self, kind: Callable[..., nn.RNNBase], *, packing: str, start: str, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(**options)
        self.scale = nn.Parameter(torch.empty(self.rnn.input_size))
        self.packing, self.start = packing, start
        rows = self.rnn.num_layers * (2 if self.rnn.bidirectional else 1)
        self.first = nn.Parameter(torch.empty(rows, 1, self.rnn.hidden_size)) if start == "learned" else None

    def forward(self, x: Tensor, lengths: Tensor, state: Tensor | None = None) -> Tensor:
        count, length = x.shape[:2]
        first = self._first(count, state)
        x = x * self.scale
        if self.packing == "no":
            out, last = self.rnn(x if self.rnn.batch_first else x.transpose(0, 1), first)
        else:
            ends = lengths.clamp(max=length)
            ends = torch.full_like(ends, length) if self.packing == "sorted" else ends
            packed = nn.utils.rnn.pack_padded_sequence(
                x if self.rnn.batch_first else x.transpose(0, 1),
                ends,
                batch_first=self.rnn.batch_first,
                enforce_sorted=self.packing == "sorted",
            )
            out, last = self.rnn(packed, first)
            out, _ = nn.utils.rnn.pad_packed_sequence(
                out, batch_first=self.rnn.batch_first, total_length=length
            )
        out = out if self.rnn.batch_first else out.transpose(0, 1)
        states = last if isinstance(last, tuple) else (last,)
        return torch.cat([value.flatten(1) for value in (out, *(s.transpose(0, 1) for s in states))], 1)

    def _first(self, count: int, state: Tensor | None) -> Any:
        if self.start == "zero":
            return None
        first = (
            state.transpose(0, 1).contiguous()
            if self.first is None
            else self.first.expand(-1, count, -1).contiguous()
        )
        return (first, first.sin()) if isinstance(self.rnn, nn.LSTM) else first


@st.composite
def recurrent_layers(draw: st.DrawFn) -> Drawn:
    kind = draw(
        st.sampled_from(
            [nn.LSTM, nn.GRU, partial(nn.RNN, nonlinearity="tanh"), partial(nn.RNN, nonlinearity="relu")]
        )
    )
    width, hidden, layers = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    bidirectional, start = draw(st.booleans()), draw(st.sampled_from(["zero", "given", "learned"]))
    count, length = draw(COUNTS), draw(st.integers(1, 4))
    model = partial(
        Recurrent,
        kind,
        packing=draw(st.sampled_from(["no", "sorted", "unsorted"])),
        start=start,
        input_size=width,
        hidden_size=hidden,
        num_layers=layers,
        bias=draw(st.booleans()),
        batch_first=draw(st.booleans()),
        bidirectional=bidirectional,
    )
    lengths = partial(torch.randint, 1, length + 1, (count,))
    state = (normal(count, layers * (2 if bidirectional else 1), hidden),) if start == "given" else ()
    return Drawn(model, (normal(count, length, width), lengths, *state))


@quick
@given(drawn=recurrent_layers())
def test_recurrent_layers(drawn: Drawn) -> None:
    check(drawn)


# --- Attention --------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """MultiheadAttention of ``(B, T, d)`` to itself, or to keys and values of their own lengths and widths."""

    def __init__(self, *, mask: str, need_weights: bool, average: bool, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(**options)
        self.scale = nn.Parameter(torch.empty(self.attention.embed_dim))
        self.mask, self.need_weights, self.average = mask, need_weights, average

    def forward(self, query: Tensor, hidden: Tensor, *others: Tensor) -> Tensor:
        query = query * self.scale
        given = (query, *(others or (query, query)))
        if not self.attention.batch_first:
            # One tensor in three roles stays one tensor, as torch looks at that.
            moved = {id(t): t.transpose(0, 1) for t in given}
            given = tuple(moved[id(t)] for t in given)
        out, weights = self.attention(
            *given, need_weights=self.need_weights, average_attn_weights=self.average, **self._masks(hidden)
        )
        out = out if self.attention.batch_first else out.transpose(0, 1)
        return out.flatten(1) if weights is None else torch.cat([out.flatten(1), weights.flatten(1)], 1)

    def _masks(self, hidden: Tensor) -> dict[str, Tensor]:
        """Return masks, some of them made of ``hidden`` ``(B, T, S)``; the first key is never hidden."""
        hidden = torch.cat([torch.zeros_like(hidden[..., :1]), hidden[..., 1:]], -1).bool()
        later = torch.ones(hidden.shape[1:]).triu(1).bool()
        return {
            "none": {},
            "keys": {"key_padding_mask": hidden[:, 0]},
            "later keys": {"attn_mask": later},
            "both": {"key_padding_mask": hidden[:, 0], "attn_mask": later},
            "numbers": {"attn_mask": later.double().cumsum(0)},
            "pairs": {"attn_mask": hidden.repeat_interleave(self.attention.num_heads, 0)},
        }[self.mask]


@st.composite
def attentions(draw: st.DrawFn) -> Drawn:
    heads, count = draw(st.integers(1, 3)), draw(COUNTS)
    width, length = heads * draw(st.integers(1, 2)), draw(st.integers(1, 3))
    cross = draw(st.booleans())
    widths = [draw(st.none() | WIDTHS) if cross else None for _ in range(2)]
    keys = draw(st.integers(1, 4)) if cross else length
    extra_key = draw(st.booleans())
    model = partial(
        Attention,
        mask=draw(st.sampled_from(["none", "keys", "later keys", "both", "numbers", "pairs"])),
        need_weights=draw(st.booleans()),
        average=draw(st.booleans()),
        embed_dim=width,
        num_heads=heads,
        bias=draw(st.booleans()),
        add_bias_kv=extra_key,
        add_zero_attn=draw(st.booleans()),
        kdim=widths[0],
        vdim=widths[1],
        batch_first=draw(st.booleans()),
    )
    others = [normal(count, keys, own or width) for own in widths] if cross else []
    return Drawn(
        model,
        (normal(count, length, width), whole(2, count, length, keys), *others),
        BY_ANY if extra_key else BY_RULE,
    )


@quick
@given(drawn=attentions())
def test_multi_head_attention(drawn: Drawn) -> None:
    check(drawn)


# --- Parameters used directly -----------------------------------------------------------------------------


class Bare(nn.Module):
    """A parameter and one expression that reads it."""

    def __init__(self, read: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.empty(shape))
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x, self.p)


BROADCAST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, p: x + p,
    "scaled sum": lambda x, p: torch.add(x, p, alpha=-1.5),
    "difference": lambda x, p: p - x,
    "product": lambda x, p: p * x,
    "quotient": lambda x, p: x / (2 + p.square()),
    "reciprocal": lambda x, p: p / (2 + x.square()),
    "power": lambda x, p: (1 + x.abs()) ** p,
    "in place": lambda x, p: x.sin().mul_(p).add_(p),
    "choice": lambda x, p: torch.where(x > 0, x, p),
    "maximum": lambda x, p: torch.maximum(x, p),
    "twice": lambda x, p: p * (x + p) * p.exp(),
    "gate": lambda x, p: x * torch.sigmoid(x * p) + p,
}


@st.composite
def broadcast_parameters(draw: st.DrawFn) -> Drawn:
    """A shape that broadcasts to that of a batch without making it larger."""
    sample = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    shape = [draw(st.sampled_from([1, size])) for size in sample]
    shape = draw(st.sampled_from([[1, *shape], shape[draw(st.integers(0, len(shape))) :]]))
    name = draw(st.sampled_from(sorted(BROADCAST)))
    return Drawn(partial(Bare, BROADCAST[name], tuple(shape)), (normal(draw(COUNTS), *sample),), BY_ANY)


@quick
@given(drawn=broadcast_parameters())
def test_parameters_that_broadcast(drawn: Drawn) -> None:
    check(drawn)


READS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[int, int, int], tuple[int, ...]]]] = {
    "x W": (lambda x, p: x @ p, lambda t, d, o: (d, o)),
    "W x": (lambda x, p: p @ x, lambda t, d, o: (o, t)),
    "x W^T": (lambda x, p: x @ p.T, lambda t, d, o: (o, d)),
    "x v": (lambda x, p: x @ p, lambda t, d, o: (d,)),
    "v x": (lambda x, p: p @ x, lambda t, d, o: (t,)),
    "linear": (F.linear, lambda t, d, o: (o, d)),
    "rows": (lambda x, p: (x.flatten(0, 1) @ p).unflatten(0, (len(x), -1)), lambda t, d, o: (d, o)),
    "einsum": (lambda x, p: torch.einsum("btd,hde->bthe", x, p), lambda t, d, o: (2, d, o)),
    "positions": (lambda x, p: x + F.embedding(torch.arange(x.shape[1]), p), lambda t, d, o: (t + o, d)),
    "slice": (lambda x, p: x + p[: x.shape[1]], lambda t, d, o: (t + o, d)),
    "new token": (lambda x, p: torch.cat([p.expand(len(x), -1, -1), x], 1), lambda t, d, o: (1, o, d)),
    "look-up": (lambda x, p: p[(x > 0).long()], lambda t, d, o: (2, o)),
    "layer scale": (lambda x, p: x + p * x.sin(), lambda t, d, o: (d,)),
    "norm": (lambda x, p: F.layer_norm(x, p.shape, p, p), lambda t, d, o: (d,)),
}


@st.composite
def parameters_read(draw: st.DrawFn) -> Drawn:
    length, width, out = draw(st.integers(1, 3)), draw(st.integers(2, 3)), draw(st.integers(1, 3))
    read, shape = READS[draw(st.sampled_from(sorted(READS)))]
    return Drawn(
        partial(Bare, read, shape(length, width, out)), (normal(draw(COUNTS), length, width),), BY_ANY
    )


@quick
@given(drawn=parameters_read())
def test_parameters_in_products_and_look_ups(drawn: Drawn) -> None:
    check(drawn)


# --- Shared and tied --------------------------------------------------------------------------------------


class Shared(nn.Module):
    """One square weight, used again and again, in drawn ways."""

    def __init__(self, width: int, uses: tuple[str, ...]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        for use in self.uses:
            if use == "layer":
                x = self.first(x)
            elif use == "tied layer":
                x = self.second(x)
            elif use == "transposed":
                x = F.linear(x, weight.t())
            elif use == "product":
                x = x @ weight
            elif use == "table":
                x = x + F.embedding((x > 0).long().sum(-1) % len(weight), weight)
            else:
                x = x * weight.diagonal()
            x = torch.tanh(x)
        return x


@st.composite
def shared_weights(draw: st.DrawFn) -> Drawn:
    uses = ["layer", "tied layer", "transposed", "product", "table", "diagonal"]
    width, middle = draw(st.integers(1, 4)), draw(st.lists(st.integers(1, 3), max_size=2))
    model = partial(Shared, width, tuple(draw(st.lists(st.sampled_from(uses), min_size=1, max_size=4))))
    return Drawn(model, (normal(draw(COUNTS), *middle, width),), BY_ANY)


@quick
@given(drawn=shared_weights())
def test_a_weight_that_several_uses_share(drawn: Drawn) -> None:
    check(drawn)


class TiedHead(nn.Module):
    """A token model whose head is its table; a layer in between may be called more than once."""

    def __init__(self, size: int, width: int, padding: int | None, calls: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, width, padding_idx=padding)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, size)
        self.head.weight = self.table.weight
        self.calls = calls

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for _ in range(self.calls):
            x = torch.tanh(self.middle(x))
        return self.head(x)


@st.composite
def tied_heads(draw: st.DrawFn) -> Drawn:
    size = draw(st.integers(1, 5))
    padding = draw(st.none() | st.integers(-size, size - 1))
    model = partial(TiedHead, size, draw(WIDTHS), padding, draw(st.integers(0, 3)))
    return Drawn(model, (whole(size, draw(COUNTS), *draw(st.lists(st.integers(1, 3), max_size=2))),))


@quick
@given(drawn=tied_heads())
def test_a_head_tied_to_its_table(drawn: Drawn) -> None:
    check(drawn)


class Autoencoder(nn.Module):
    """Convolutions and transposed convolutions with one weight, called several times."""

    def __init__(self, dims: int, channels: int, kernel: tuple[int, ...], calls: int) -> None:
        super().__init__()
        self.encode = CONVOLUTIONS[dims](channels, channels, kernel)
        self.decode = TRANSPOSED[dims](channels, channels, kernel)
        self.decode.weight = self.encode.weight
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = self.decode(torch.tanh(self.encode(x)))
        return x


@st.composite
def autoencoders(draw: st.DrawFn) -> Drawn:
    dims, channels = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    kernel = per_axis(draw, dims, 1, 3)
    sizes = [k + draw(st.integers(0, 2)) for k in kernel]
    model = partial(Autoencoder, dims, channels, kernel, draw(st.integers(1, 3)))
    return Drawn(model, (normal(draw(COUNTS), channels, *sizes),))


@quick
@given(drawn=autoencoders())
def test_convolutions_tied_to_transposed_ones(drawn: Drawn) -> None:
    check(drawn)
