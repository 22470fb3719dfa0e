"""Every gradient rule at drawn shapes and options, against one backward pass per sample in float64."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from models import Build, Conv1D, Model, assert_exact, assert_same, by_loop, cast, rows, wavy
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers import HookGradientComputer, collect_gradients
from trak_lite.gradient_computers.hooks.rules.recurrent import run_recurrent
from trak_lite.modelout_functions import resolve_task
from trak_lite.types import DenseBlock, FactoredBlock, LookupBlock

# The first of a sequence that is the same in every run; TRAK_LITE_DRAWN_EXAMPLES=1000 draws on.
drawn = partial(settings, deadline=None, derandomize=True, database=None)
MANY = int(os.environ.get("TRAK_LITE_DRAWN_EXAMPLES", "30"))

BY_RULE = frozenset({"rule", "zero"})
BY_ANY = BY_RULE | {"fallback"}
COUNTS = st.sampled_from([0, 1, 2, 3, 4, 5])
WIDTHS = st.integers(1, 4)


@dataclass(frozen=True)
class Drawn:
    """A model and a batch for it, both still to be made."""

    model: Build
    inputs: tuple[Callable[[], Tensor], ...]
    """Tensors with the samples on axis 0."""
    ways: frozenset[str] = BY_RULE
    """How the coverage report may say that a gradient comes about."""


def normal(*shape):
    return partial(torch.randn, shape, dtype=torch.float64)


def whole(size, *shape):
    return partial(torch.randint, size, shape)


def check(case, only=None):
    """Compare the gradients of every sample with the loop; of all parameters, or of one."""
    torch.manual_seed(0)
    model = case.model().double().eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.7)
    batch = tuple(make() for make in case.inputs)
    names = [name for name, _ in model.named_parameters()]
    names = names if only is None or not names else [names[only % len(names)]]
    computer = HookGradientComputer(model, resolve_task(wavy), grad_wrt=names)

    found = collect_gradients(computer, batch)

    if len(batch[0]) == 0:
        shapes = {name: (0, *model.get_parameter(name).shape) for name in names}
        assert {name: tuple(value.shape) for name, value in found.items()} == shapes
        return
    expected = by_loop(model, wavy, batch, names)
    largest = max(float(value.abs().max()) for value in expected.values())
    assert_same(found, expected, atol=1e-12 * largest)
    coverage = computer.explain(batch)
    assert {line.how for line in coverage} <= case.ways, str(coverage)


def above(width, layer, *args, **options):
    """Return the layer above a parameter as wide as the last axis of its input, whose gradient comes through it."""
    scale = nn.Parameter(torch.empty(width))
    return Model(lambda s, x: s.layer(x * s.scale), scale=scale, layer=layer(*args, **options))


# ---- Layers: matrix products, convolutions, look-ups
LAYOUTS = {
    "samples first": (lambda x: x, lambda y, count: y),
    "samples second": (lambda x: x.transpose(0, 1).contiguous(), lambda y, count: y.transpose(0, 1)),
    "rows of samples": (lambda x: x.flatten(0, 1), lambda y, count: y.unflatten(0, (count, -1))),
    "rows of positions": (
        lambda x: x.transpose(0, 1).flatten(0, 1),
        lambda y, count: y.unflatten(0, (-1, count)).transpose(0, 1),
    ),
}


def laid_out(build, layout):
    """Return a layer that is called with the samples somewhere else than on axis 0."""
    there, back = LAYOUTS[layout]
    return Model(lambda s, x: back(s.layer(there(x)), len(x)), layer=build())


@st.composite
def linear_layers(draw):
    """``nn.Linear`` and Hugging Face's Conv1D on inputs with two to four axes."""
    width, out, flat = draw(WIDTHS), draw(WIDTHS), draw(st.booleans())
    middle = draw(st.lists(st.integers(1, 3), max_size=2))
    kind = partial(Conv1D, out, width) if flat else partial(nn.Linear, width, out, bias=draw(st.booleans()))
    layouts = [["samples first"], [*LAYOUTS], ["samples first", "rows of samples"] if flat else [*LAYOUTS]]
    layout = draw(st.sampled_from(layouts[len(middle)]))
    model = partial(laid_out, partial(above, width, kind), layout)
    return Drawn(model, (normal(draw(COUNTS), *middle, width),))


CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def with_frames(draw, layer, *shape):
    """Give the layer one array of this shape per sample, or several whose axis is flattened into the batch."""
    layout = draw(st.sampled_from(["samples first", "rows of samples", "rows of positions"]))
    frames = () if layout == "samples first" else (draw(st.integers(1, 2)),)
    return Drawn(partial(laid_out, layer, layout), (normal(draw(COUNTS), *frames, *shape),))


def per_axis(draw, dims, low, high):
    return tuple(draw(st.integers(low, high)) for _ in range(dims))


@st.composite
def convolutions(draw, transposed):
    """Every option of a convolution, each spatial axis on its own."""
    dims, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    channels, out = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    kernel, dilation, stride = (per_axis(draw, dims, 1, most) for most in (3, 2, 3))
    padding = per_axis(draw, dims, 0, 2)
    options = {"dilation": dilation, "groups": groups, "bias": draw(st.booleans())}
    if transposed:
        larger = map(max, stride, dilation)
        options["output_padding"] = tuple(draw(st.integers(0, most - 1)) for most in larger)
        # The padding is cut off the result, of which something has to be left.
        least = [1 + math.ceil(2 * p / s) for p, s in zip(padding, stride, strict=True)]
    else:
        padding = draw(st.sampled_from(["same", "valid", padding]))
        stride = (1,) * dims if padding == "same" else stride
        options["padding_mode"] = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
        # Reflection takes less than the whole axis: at most 2 entries on a side.
        least = [max(d * (k - 1) + 1, 3) for k, d in zip(kernel, dilation, strict=True)]
    sizes = [need + draw(st.integers(0, 2)) for need in least]
    layer = (TRANSPOSED if transposed else CONVOLUTIONS)[dims]
    options |= {"stride": stride, "padding": padding}
    built = partial(above, sizes[-1], layer, channels, out, kernel, **options)
    return with_frames(draw, built, channels, *sizes)


@st.composite
def embeddings(draw):
    size = draw(st.integers(1, 5))
    padding = draw(st.none() | st.integers(-size, size - 1))
    model = partial(nn.Embedding, size, draw(WIDTHS), padding_idx=padding)
    return Drawn(model, (whole(size, draw(COUNTS), *draw(st.lists(st.integers(1, 3), max_size=3))),))


class Bags(nn.Module):
    """Bags of ids ``(B, n)``: one per sample, or by offsets several, whose ends ``(B, m)`` differ between samples."""

    def __init__(self, size, width, *, by_offsets, learned, **options):
        super().__init__()
        self.bag = nn.EmbeddingBag(size, width, **options)
        self.by_offsets = by_offsets
        self.share = nn.Linear(1, 1) if learned else None

    def forward(self, ids, ends, shares=None):
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


def cuts(count, length, number):
    """Return places ``(B, number)`` at which to cut each sample, rising; repeats and ends make empty bags."""
    return torch.randint(length + 1, (count, number)).sort(1).values


@st.composite
def embedding_bags(draw):
    """Few ids, so that they repeat; bags may be empty."""
    size, length, count = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(COUNTS)
    mode, by_offsets = draw(st.sampled_from(["sum", "mean", "max"])), draw(st.booleans())
    weighted = draw(st.sampled_from(["no", "given", "learned"])) if mode == "sum" else "no"
    options = {
        "by_offsets": by_offsets,
        "learned": weighted == "learned",
        "mode": mode,
        "padding_idx": draw(st.none() | st.integers(-size, size - 1)),
        "include_last_offset": by_offsets and draw(st.booleans()),
    }
    ends = partial(cuts, count, length, draw(st.integers(1, 3)))
    shares = () if weighted == "no" else (normal(count, length),)
    model = partial(Bags, size, draw(WIDTHS), **options)
    return Drawn(model, (whole(size, count, length), ends, *shares))


# ---- Attention
class Attention(nn.Module):
    """MultiheadAttention of ``(B, T, d)`` to itself, or to keys and values of their own lengths and widths."""

    def __init__(self, *, mask, need_weights, average, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(**options)
        self.scale = nn.Parameter(torch.empty(self.attention.embed_dim))
        self.mask, self.need_weights, self.average = mask, need_weights, average

    def forward(self, query, hidden, *others):
        query = query * self.scale
        given = (query, *(others or (query, query)))
        if not self.attention.batch_first:
            # One tensor in three roles stays one tensor, as torch looks at that.
            moved = {id(t): t.transpose(0, 1) for t in given}
            given = tuple(moved[id(t)] for t in given)
        out, weights = self.attention(
            *given, need_weights=self.need_weights, average_attn_weights=self.average, **self.masks(hidden)
        )
        out = out if self.attention.batch_first else out.transpose(0, 1)
        return out.flatten(1) if weights is None else torch.cat([out.flatten(1), weights.flatten(1)], 1)

    def masks(self, hidden):
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
def attentions(draw):
    heads, count = draw(st.integers(1, 3)), draw(COUNTS)
    width, length = heads * draw(st.integers(1, 2)), draw(st.integers(1, 3))
    cross, extra_key = draw(st.booleans()), draw(st.booleans())
    widths = [draw(st.none() | WIDTHS) if cross else None for _ in range(2)]
    keys = draw(st.integers(1, 4)) if cross else length
    mask = draw(st.sampled_from(["none", "keys", "later keys", "both", "numbers", "pairs"]))
    flags = ("need_weights", "average", "bias", "add_zero_attn", "batch_first")
    options = {"mask": mask, "add_bias_kv": extra_key, **{name: draw(st.booleans()) for name in flags}}
    options |= {"embed_dim": width, "num_heads": heads, "kdim": widths[0], "vdim": widths[1]}
    others = [normal(count, keys, own or width) for own in widths] if cross else []
    inputs = (normal(count, length, width), whole(2, count, length, keys), *others)
    return Drawn(partial(Attention, **options), inputs, BY_ANY if extra_key else BY_RULE)


# ---- Shared and tied weights
def shared(width, uses):
    """One square weight, used again and again, in drawn ways."""

    def forward(s, x):
        for use in uses:
            x = torch.tanh(USES[use](s, x, s.first.weight))
        return x

    model = Model(forward, first=nn.Linear(width, width), second=nn.Linear(width, width, bias=False))
    model.second.weight = model.first.weight
    return model


USES = {
    "layer": lambda s, x, w: s.first(x),
    "tied layer": lambda s, x, w: s.second(x),
    "transposed": lambda s, x, w: F.linear(x, w.t()),
    "product": lambda s, x, w: x @ w,
    "table": lambda s, x, w: x + F.embedding((x > 0).long().sum(-1) % len(w), w),
    "diagonal": lambda s, x, w: x * w.diagonal(),
}


@st.composite
def shared_weights(draw):
    width, middle = draw(st.integers(1, 4)), draw(st.lists(st.integers(1, 3), max_size=2))
    uses = draw(st.lists(st.sampled_from([*USES]), min_size=1, max_size=4))
    return Drawn(partial(shared, width, tuple(uses)), (normal(draw(COUNTS), *middle, width),), BY_ANY)


# ---- Recurrent layers
KINDS = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN with tanh": partial(nn.RNN, nonlinearity="tanh"),
    "RNN with ReLU": partial(nn.RNN, nonlinearity="relu"),
}


class Recurrent(nn.Module):
    """A recurrent layer over ``(B, T, d)``, all or some of whose results count."""

    def __init__(self, kind, packing="no", start="zero", reads="everything", **options):
        super().__init__()
        self.rnn = kind(**{"input_size": 4, "hidden_size": 3, "batch_first": True, **options})
        self.scale = nn.Parameter(torch.ones(self.rnn.input_size))
        self.packing, self.start, self.reads = packing, start, reads
        states = self.rnn.num_layers * (2 if self.rnn.bidirectional else 1)
        self.first = nn.Parameter(torch.ones(states, 1, self.rnn.hidden_size)) if start == "learned" else None

    def forward(self, x, lengths=None, state=None):
        axis, first = self.rnn.batch_first, self.first_state(x, state)
        x, total = x * self.scale, x.shape[1]
        x = x if axis else x.transpose(0, 1)
        if self.packing != "no":
            ends = torch.full_like(lengths, total) if self.packing == "sorted" else lengths.clamp(max=total)
            x = pack_padded_sequence(x, ends, axis, enforce_sorted=self.packing == "sorted")
        out, last = self.call(x, first)
        if self.packing != "no":
            out = pad_packed_sequence(out, axis, total_length=total)[0]
        states = [value.transpose(0, 1) for value in (last if isinstance(last, tuple) else (last,))]
        out = out if axis else out.transpose(0, 1)
        found = {"everything": [out, *states], "outputs": [out], "last": states[-1:]}[self.reads]
        return torch.cat([value.flatten(1) for value in found], 1)

    def call(self, x, first):
        return self.rnn(x, first)

    def first_state(self, x, state):
        if self.start == "zero":
            return None
        first = state.transpose(0, 1) if self.first is None else self.first.expand(-1, len(x), -1)
        first = (first * self.scale[0]).contiguous()  # depends on a parameter, and if given on the sample
        return (first, first.sin()) if isinstance(self.rnn, nn.LSTM) else first


@st.composite
def recurrent_layers(draw, kind):
    start = draw(st.sampled_from(["zero", "given", "learned"]))
    options = {name: draw(st.booleans()) for name in ("bidirectional", "bias", "batch_first")}
    options["packing"] = draw(st.sampled_from(["no", "sorted", "unsorted"]))
    options["reads"] = draw(st.sampled_from(["everything", "everything", "outputs", "last"]))
    layers, hidden, width = (draw(st.integers(1, 3)) for _ in range(3))
    count, length = draw(COUNTS), draw(st.integers(1, 4))
    options |= {"input_size": width, "hidden_size": hidden, "num_layers": layers}
    model = partial(Recurrent, KINDS[kind], start=start, **options)
    lengths = partial(torch.randint, 1, length + 1, (count,))
    state = (normal(count, layers * (1 + options["bidirectional"]), hidden),) if start == "given" else ()
    return Drawn(model, (normal(count, length, width), lengths, *state))


LAYERS = {
    "linear": linear_layers(),
    "convolution": convolutions(transposed=False),
    "transposed convolution": convolutions(transposed=True),
    "embedding": embeddings(),
    "embedding bag": embedding_bags(),
    "multi-head attention": attentions(),
    "one weight in several uses": shared_weights(),
    **{kind: recurrent_layers(kind) for kind in KINDS},
}
every_layer = pytest.mark.parametrize("layer", LAYERS)
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def check_drawn(layer, data):
    case = data.draw(LAYERS[layer])
    check(case, only=data.draw(st.none() | st.integers(0, 5)))


@every_layer
@drawn(max_examples=4)
@given(data=st.data())
def test_a_layer_at_any_options_equals_the_loop(layer, data):
    check_drawn(layer, data)


@every_layer
@drawn(max_examples=2 * MANY)
@given(data=st.data())
def test_a_layer_at_many_options_equals_the_loop(layer, data):
    check_drawn(layer, data)


# ---- What is not left to chance
FIXED = {
    "convolution, unevenly padded": (lambda: nn.Conv2d(2, 3, (2, 4), padding="same"), (2, 5, 6)),
    "convolution, evenly padded": (lambda: nn.Conv2d(2, 3, (3, 5), padding="same"), (2, 5, 6)),
    "convolution, not padded": (lambda: nn.Conv2d(2, 3, 3, padding="valid"), (2, 5, 5)),
    "convolution, reflected": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 5, 5)),
    "convolution, in a circle": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 5, 5)),
    "kernels of one entry": (lambda: nn.Conv2d(4, 6, 1), (4, 7, 7)),
    "kernels of one entry, strided": (lambda: nn.Conv2d(4, 6, 1, 2), (4, 7, 7)),
    "kernels of one entry, in groups": (lambda: nn.Conv2d(4, 6, 1, groups=2), (4, 7, 7)),
    "kernels of one entry, strided, in groups": (lambda: nn.Conv2d(4, 6, 1, 2, groups=2), (4, 7, 7)),
    "layer norm": (lambda: nn.LayerNorm(6), (4, 6)),
    "layer norm, two axes": (lambda: nn.LayerNorm((4, 6), eps=1e-2), (2, 4, 6)),
    "layer norm without bias": (lambda: nn.LayerNorm(6, bias=False), (6,)),
    "layer norm without parameters": (lambda: nn.LayerNorm(6, elementwise_affine=False), (4, 6)),
    "RMS norm": (lambda: nn.RMSNorm(6), (4, 6)),
    "RMS norm, two axes": (lambda: nn.RMSNorm((4, 6), eps=1e-3), (4, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 6)),
    "group norm, one entry per channel": (lambda: nn.GroupNorm(2, 6), (6,)),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True), (4, 6)),
    "instance norm with statistics": (lambda: nn.InstanceNorm2d(4, 1e-5, 0.1, True, True), (4, 3, 6)),
    "batch norm": (lambda: nn.BatchNorm1d(6), (6,)),
    "batch norm, one axis": (lambda: nn.BatchNorm1d(4), (4, 6)),
    "batch norm, three axes": (lambda: nn.BatchNorm3d(4), (4, 2, 3, 6)),
    "batch norm without parameters": (lambda: nn.BatchNorm2d(4, affine=False), (4, 3, 6)),
}


def trained(build):
    """Return a layer; running statistics are not those of a new one."""
    layer = build()
    if getattr(layer, "running_mean", None) is not None:
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
    return layer


@pytest.mark.parametrize(("layer", "shape"), FIXED.values(), ids=FIXED)
def test_layers_at_given_options_equal_the_loop(layer, shape):
    model = partial(above, shape[-1], trained, layer)
    for count, only in ((0, None), (3, None), (2, 2)):  # the last one for the bias alone
        check(Drawn(model, (normal(count, *shape),)), only)
    check(Drawn(partial(laid_out, model, "rows of positions"), (normal(3, 2, *shape),)))


@pytest.mark.parametrize("name", [name for name in FIXED if name.startswith("kernels of one entry")])
def test_autocast_casts_no_convolution_in_float64(name):
    layer, shape = FIXED[name]
    with torch.autocast("cpu", torch.bfloat16):
        check(Drawn(layer, (normal(3, *shape),)))


class InPlace(Recurrent):
    """Changes what the layer read, or what it returned, in place; or returns a slope of it."""

    changed = "output"

    def call(self, x, first):
        if self.changed == "differentiated":
            x = x.detach().requires_grad_()
        outputs, state = self.rnn(x)
        if self.changed == "differentiated":
            (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
            return slope, state
        (x if self.changed == "input" else outputs).mul_(2)
        return outputs, state


def with_shared_weights():
    model = Recurrent(nn.GRU, hidden_size=4, num_layers=2)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(model.rnn, f"{name}_l1", getattr(model.rnn, f"{name}_l0"))
    return model


TWO_WAYS = {"num_layers": 2, "bidirectional": True}
RECURRENT = {
    **{
        f"{kind}, the last state of two layers and directions, {packing} packed": (
            partial(Recurrent, layer, packing, reads="last", **TWO_WAYS),
            BY_RULE,
        )
        for kind, layer in KINDS.items()
        for packing in ("unsorted", "no")
    },
    **{
        f"{kind}, outputs are changed in place": (partial(InPlace, layer, reads="outputs"), BY_RULE)
        for kind, layer in KINDS.items()
    },
    "LSTM with projections": (partial(Recurrent, nn.LSTM, proj_size=2, **TWO_WAYS), BY_ANY),
    "GRU of layers that share their weights": (with_shared_weights, BY_RULE),
}


@pytest.mark.parametrize(("build", "ways"), RECURRENT.values(), ids=RECURRENT)
def test_recurrent_layers_of_given_options_equal_the_loop(build, ways):
    check(Drawn(build, (normal(4, 5, 4), partial(torch.tensor, [3, 5, 1, 4])), ways))


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize(
    ("changed", "message"),
    [("input", "changed in place after the layer read it"), ("differentiated", "create_graph=True")],
)
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_recurrent_layers_are_not_changed_nor_derived_twice(kind, changed, message, self_check):
    model = InPlace(KINDS[kind], reads="outputs").double()
    model.changed = changed
    computer = HookGradientComputer(model, resolve_task(wavy), self_check=self_check)
    with pytest.raises(UnsupportedModelError, match=message):
        collect_gradients(computer, (rows(3, 4),))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_changes_recurrent_gradients_little(kind, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # oneDNN's LSTM in bfloat16 needs AVX-512
    torch.manual_seed(0)
    model, batch = Recurrent(KINDS[kind]), (rows(3, 5).float(),)
    computer = HookGradientComputer(model, resolve_task(wavy), autocast_dtype=torch.bfloat16)
    half = collect_gradients(computer, batch)
    for name, value in by_loop(model, wavy, batch).items():
        assert half[name].dtype == torch.float32
        assert (half[name] - value).norm() < 0.05 * value.norm(), name


def scaled(operation, shape):
    return Model(lambda s, x: operation(x, s.p), p=nn.Parameter(torch.empty(shape)))


OPERATIONS = {
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
    "gate": lambda x, p: x * torch.sigmoid(x * p) + p,
    "addcmul": lambda x, p: torch.addcmul(x, x, p),
}


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 4, 1), (4, 5), (3, 1, 5), (1, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_bare_parameters_that_broadcast(operation, shape):
    check(Drawn(partial(scaled, operation, shape), (normal(2, 3, 4, 5),), BY_ANY))


PRODUCTS = {
    "x @ W": (lambda x, p: x @ p, (5, 3)),
    "W @ x": (lambda x, p: p @ x, (3, 4)),
    "x @ W.t()": (lambda x, p: x @ p.t(), (3, 5)),
    "x @ W.T": (lambda x, p: x @ p.T, (3, 5)),
    "x @ W.T twice": (lambda x, p: (lambda turned: x @ turned + x.sin() @ turned)(p.T), (3, 5)),
    "x @ W.mT": (lambda x, p: x @ p.mT, (3, 5)),
    "x @ W.transpose": (lambda x, p: x @ p.transpose(0, 1), (3, 5)),
    "x @ v": (lambda x, p: x @ p, (5,)),
    "v @ x": (lambda x, p: p @ x, (4,)),
    "linear": (F.linear, (3, 5)),
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
    "positions": (lambda x, p: x + F.embedding(torch.arange(x.shape[1]), p), (6, 5)),
    "slice": (lambda x, p: x + p[: x.shape[1]], (6, 5)),
    "norm": (lambda x, p: F.layer_norm(x, p.shape, p, p), (5,)),
    "repeat": (lambda x, p: p.repeat(len(x), 1) * x[:, 0, :3], (1, 3)),
    "repeat_interleave": (lambda x, p: p.repeat_interleave(len(x), 0) * x[:, 0, :3], (1, 3)),
    "new rows": (lambda x, p: torch.cat([p.expand(len(x), -1, -1), x], 1), (1, 2, 5)),
    "sum of squares": (lambda x, p: x * p.square().sum(), (3, 2)),
}


@pytest.mark.parametrize(("operation", "shape"), PRODUCTS.values(), ids=PRODUCTS)
def test_bare_parameters_in_products_and_look_ups(operation, shape):
    check(Drawn(partial(scaled, operation, shape), (normal(3, 4, 5),), BY_ANY))


FORMS = {
    "convolutions of many and few positions": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8, 3)),
        torch.linspace(-1, 1, 150).view(3, 2, 5, 5),
        {"0.weight": DenseBlock, "0.bias": DenseBlock, "1.weight": FactoredBlock, "3.weight": FactoredBlock},
    ),
    "a transposed weight": (lambda: scaled(lambda x, p: x @ p.t(), (3, 5)), torch.linspace(-1, 1, 40).view(2, 4, 5),
                            {"p": FactoredBlock}),
    "a bag": (lambda: nn.EmbeddingBag(50, 3, mode="mean", padding_idx=7),
              torch.tensor([[1, 2, 7], [3, 3, 1], [4, 9, 9]]), {"weight": LookupBlock}),
}  # fmt: skip


@pytest.mark.parametrize(("build", "x", "kinds"), FORMS.values(), ids=FORMS)
def test_gradients_keep_a_form_smaller_than_dense(build, x, kinds):
    torch.manual_seed(0)
    model, batch = build().double(), cast((x,), torch.float64)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    blocks = {}
    computer = HookGradientComputer(model, resolve_task(wavy))
    computer.stream_gradients(batch, lambda block: blocks.update({block.name: block}))
    assert {name: type(blocks[name]) for name in kinds} == kinds
    for name, value in by_loop(model, wavy, batch).items():
        torch.testing.assert_close(blocks[name].dense(), value.flatten(1), rtol=1e-10, atol=1e-12)
    if "p" in blocks:
        assert (blocks["p"].inputs.shape, blocks["p"].output_grads.shape) == ((2, 4, 5), (2, 4, 3))


# ---- Complex operands: the gradient of a product has the conjugate of the other factor
COMPLEX = {
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
    "real parameter": ((3, 5), (5,), lambda x, w: w.real * x + torch.complex(x.real, w.imag.expand_as(x.real))),
}  # fmt: skip


def spectral(shape, operation, plain):
    """An operation of complex samples and of a complex value that is made of real parameters, as in GFNet."""

    def forward(s, x):
        x = torch.view_as_complex(x)
        result = operation(x if plain else x * s.scale, torch.view_as_complex(s.weight))
        real = torch.view_as_real(result) if result.is_complex() else result
        return real.flatten(1).sin() + s.scale

    return Model(forward, weight=nn.Parameter(torch.randn(*shape, 2)), scale=nn.Parameter(torch.ones(())))


@pytest.mark.parametrize("plain", [False, True], ids=["samples that need a gradient", "plain data"])
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_operands(name, plain):
    samples, shape, operation = COMPLEX[name]
    torch.manual_seed(0)
    model = spectral(shape, operation, plain).double()
    batch = (torch.randn(3, *samples, 2, dtype=torch.float64),)
    computer = assert_exact(model, batch)
    assert_exact(model, batch, computer=computer)  # a later pass may take another way


OPERATIONS_OF_TORCH = {
    "LSTM": ("lstm", torch.lstm),
    "GRU": ("gru", torch.gru),
    "RNN with tanh": ("tanh", torch.rnn_tanh),
    "RNN with ReLU": ("relu", torch.rnn_relu),
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_a_recurrence_that_autograd_is_to_differentiate_get_their_summed_gradient(kind):
    torch.manual_seed(0)
    weights = list(KINDS[kind](3, 2, **TWO_WAYS).double().parameters())
    state = [torch.randn(4, 4, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    state = state if kind == "LSTM" else state[:1]
    x = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    args = [x, tuple(state) if kind == "LSTM" else state[0], weights, True, 2, 0.0, False, True, True]
    name, operation = OPERATIONS_OF_TORCH[kind]
    results = run_recurrent(name, args, order=None, tap=lambda value, *_: value), operation(*args)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    sums = [sum((i + value * value.cos()).sin().sum() for i, value in enumerate(one)) for one in results]
    grads = [torch.autograd.grad(value, [x, *state, *weights]) for value in sums]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)
