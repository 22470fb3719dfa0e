"""Layers that the fuzzer combines. Each keeps the shape of its input, so any layer can be omitted.

Vectors are ``(B, 6)``, sequences ``(B, 4, 6)``, images ``(B, 4, 5, 5)``. The layers in ``MIXING`` make the samples
of a batch depend on each other: the gradient is defined for a sample alone, and an engine that runs whole batches
must refuse it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, rnn
from torch.utils.checkpoint import checkpoint

WIDTH, LENGTH, SIDE, CHANNELS, VOCABULARY, CLASSES = 6, 4, 5, 4, 11, 3


class Call(nn.Module):
    """A layer that applies a function to its parts."""

    def __init__(self, function: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def parameter(*shape: int, scale: float = 0.4) -> nn.Parameter:
    return nn.Parameter(scale * torch.randn(*shape))


class Square(torch.autograd.Function):
    """A custom autograd function without parameters."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x / 4

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0] / 2


class OwnLinear(torch.autograd.Function):
    """A custom autograd function that reads a parameter, which no torch operation shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.flatten(0, -2).T @ grad.flatten(0, -2)


class TiedByReference(nn.Module):
    """A module with a list that holds another module's parameter, without a name for it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.held = [self.first.weight]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) @ self.held[0]


class TiedByClosure(nn.Module):
    """A module with a partial that holds the parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.second = functools.partial(F.linear, weight=self.first.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class TwoNames(nn.Module):
    """One module under two names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.one = self.other = module

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.one(x)))


class TiedWeights(nn.Module):
    """One parameter under two names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, width)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.one(x)))


class Experts(nn.Module):
    """Routes each row to the expert with the largest gate; the order of rows in an expert is that of the batch."""

    def __init__(self, width: int, count: int = 3) -> None:
        super().__init__()
        self.gate, self.experts = (
            nn.Linear(width, count),
            nn.ModuleList(nn.Linear(width, width) for _ in range(count)),
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(rows).softmax(1).max(1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            (found,) = torch.where(chosen == number)
            out.index_add_(0, found, expert(rows[found]) * weights[found, None])
        return out.view_as(x)


class Attention(nn.Module):
    """Scaled dot-product attention in plain operations."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(width, 3 * width), nn.Linear(width, width), causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class TimeFirst(nn.Module):
    """A module with the samples on axis 1."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        found = self.module(x, x, x) if isinstance(self.module, nn.MultiheadAttention) else self.module(x)
        return found[0].transpose(0, 1)


class Recurrent(nn.Module):
    """A recurrent module, of padded or of packed sequences."""

    def __init__(self, module: nn.Module, packed: bool = False) -> None:
        super().__init__()
        self.module, self.packed = module, packed

    def forward(self, x: Tensor) -> Tensor:
        if not self.packed:
            return self.module(x)[0]
        lengths = 1 + (x.detach()[:, 0, 0].abs() * 10).long().remainder(x.shape[1]).cpu()
        found = self.module(rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0]
        return rnn.pad_packed_sequence(found, batch_first=True, total_length=x.shape[1])[0]


class Cell(nn.Module):
    """A cell, step by step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        state, found = torch.zeros_like(x[:, 0]), []
        for step in x.unbind(1):
            state = self.cell(step, state)
            found.append(state)
        return torch.stack(found, dim=1)


def in_place(layer: Call, x: Tensor) -> Tensor:
    hidden = layer.linear(x)
    hidden.mul_(layer.scale).add_(0.1)
    return hidden.relu_()


def by_row(layer: Call, x: Tensor) -> Tensor:
    """Apply a layer sample by sample in Python."""
    return torch.stack([torch.tanh(layer.linear(row)) for row in x])


def flattened(layer: Call, x: Tensor) -> Tensor:
    """Merge several rows per sample into the batch axis."""
    return layer.linear(x.reshape(-1, 3)).view_as(x)


def branch(layer: Call, x: Tensor) -> Tensor:
    """Apply one of two layers, depending on each sample's value."""
    chosen = x.flatten(1).sum(1) > 0
    return torch.where(chosen.view(-1, *(1,) * (x.dim() - 1)), layer.one(x), layer.other(x))


def statistics_of_batch(x: Tensor) -> Tensor:
    return x.mean(0, keepdim=True) if len(x) > 1 else torch.zeros_like(x)


ANY: dict[str, Callable[[int], nn.Module]] = {
    "linear tanh": lambda d: nn.Sequential(nn.Linear(d, d), nn.Tanh()),
    "linear gelu": lambda d: nn.Sequential(nn.Linear(d, d, bias=False), nn.GELU()),
    "residual": lambda d: Call(
        lambda m, x: x + m.two(F.silu(m.one(x))), one=nn.Linear(d, 4), two=nn.Linear(4, d)
    ),
    "layer norm": nn.LayerNorm,
    "rms norm": nn.RMSNorm,
    "scale and shift": lambda d: Call(
        lambda m, x: x * m.scale + m.shift, scale=parameter(d), shift=parameter(d)
    ),
    "matmul": lambda d: Call(lambda m, x: torch.tanh(x @ m.weight), weight=parameter(d, d)),
    "einsum": lambda d: Call(lambda m, x: torch.einsum("...i,ji->...j", x, m.weight), weight=parameter(d, d)),
    "low rank": lambda d: Call(lambda m, x: x + x @ (m.a @ m.b), a=parameter(d, 2), b=parameter(2, d)),
    "weights joined": lambda d: Call(
        lambda m, x: F.linear(x, torch.cat([m.a, m.b])).tanh(), a=parameter(2, d), b=parameter(d - 2, d)
    ),
    "weight norm": lambda d: parametrizations.weight_norm(nn.Linear(d, d)),
    "spectral norm": lambda d: parametrizations.spectral_norm(nn.Linear(d, d)),
    "two names": lambda d: TwoNames(nn.Linear(d, d)),
    "tied weights": TiedWeights,
    "tied by reference": TiedByReference,
    "tied by closure": TiedByClosure,
    "in place": lambda d: Call(in_place, linear=nn.Linear(d, d), scale=parameter(d)),
    "buffer": lambda d: Call(lambda m, x: m.linear(x * m.mask), linear=nn.Linear(d, d), mask=torch.rand(d)),
    "own function": lambda d: Call(lambda m, x: Square.apply(m.linear(x)), linear=nn.Linear(d, d)),
    "own function of a parameter": lambda d: Call(
        lambda m, x: OwnLinear.apply(x, m.weight), weight=parameter(d, d)
    ),
    "checkpointed": lambda d: Call(
        lambda m, x: checkpoint(m.body, x, use_reentrant=False),
        body=nn.Sequential(nn.Linear(d, d), nn.Tanh()),
    ),
    "dropout": lambda d: nn.Sequential(nn.Linear(d, d), nn.Dropout(0.5)),
    "by row": lambda d: Call(by_row, linear=nn.Linear(d, d)),
    "flattened rows": lambda d: Call(flattened, linear=nn.Linear(3, 3)),
    "branch": lambda d: Call(branch, one=nn.Linear(d, d), other=nn.Linear(d, d)),
    "unread parameter": lambda d: Call(lambda m, x: x * 1, unread=parameter(d)),
    "partly without gradient": lambda d: Call(
        lambda m, x: m.linear(x) + m.linear(x).detach(), linear=nn.Linear(d, d)
    ),
    "frozen": lambda d: nn.Linear(d, d).requires_grad_(False),
    "own statistic, detached": lambda d: Call(
        lambda m, x: m.linear(x / (1 + x.detach().flatten(1).norm(dim=1).view(-1, *(1,) * (x.dim() - 1)))),
        linear=nn.Linear(d, d),
    ),
    "experts": Experts,
    "prelu": lambda d: nn.Sequential(nn.Linear(d, d), nn.PReLU()),
    "lookup": lambda d: Call(
        lambda m, x: x + m.table(torch.bucketize(x.detach(), m.edges)).sum(-2),
        table=nn.Embedding(4, d),
        edges=torch.tensor([-0.5, 0.0, 0.5]),
    ),
}
VECTORS: dict[str, Callable[[int], nn.Module]] = {
    **ANY,
    "batch norm": nn.BatchNorm1d,
    "bilinear": lambda d: Call(lambda m, x: m.bilinear(x, x), bilinear=nn.Bilinear(d, d, d)),
    "group norm": lambda d: nn.GroupNorm(2, d),
    "sorted": lambda d: Call(lambda m, x: m.linear(x.sort(dim=1).values), linear=nn.Linear(d, d)),
}
SEQUENCES: dict[str, Callable[[int], nn.Module]] = {
    **ANY,
    "attention": lambda d: Attention(d, False),
    "causal attention": lambda d: Attention(d, True),
    "multihead": lambda d: Call(
        lambda m, x: m.inner(x, x, x)[0], inner=nn.MultiheadAttention(d, 2, batch_first=True)
    ),
    "multihead, time first": lambda d: TimeFirst(nn.MultiheadAttention(d, 2)),
    "encoder layer": lambda d: nn.TransformerEncoderLayer(d, 2, 8, batch_first=True),
    "lstm": lambda d: Recurrent(nn.LSTM(d, d, batch_first=True)),
    "gru of two layers": lambda d: Recurrent(nn.GRU(d, d, 2, batch_first=True)),
    "bidirectional rnn": lambda d: Recurrent(nn.RNN(d, d // 2, batch_first=True, bidirectional=True)),
    "lstm, time first": lambda d: TimeFirst(nn.LSTM(d, d)),
    "packed gru": lambda d: Recurrent(nn.GRU(d, d, batch_first=True), packed=True),
    "cell": Cell,
    "conv1d": lambda d: Call(lambda m, x: m.conv(x.mT).mT, conv=nn.Conv1d(d, d, 3, padding=1)),
    "positions": lambda d: Call(
        lambda m, x: x + m.table(torch.arange(x.shape[1])), table=nn.Embedding(LENGTH, d)
    ),
    "bare positions": lambda d: Call(lambda m, x: x + m.table, table=parameter(LENGTH, d)),
    "batch norm": lambda d: Call(lambda m, x: m.norm(x.mT).mT, norm=nn.BatchNorm1d(d)),
    "batch norm 2d, channels last": lambda d: Call(
        lambda m, x: m.norm(x.mT.unsqueeze(-1).contiguous(memory_format=torch.channels_last)).squeeze(-1).mT,
        norm=nn.BatchNorm2d(d),
    ),
}


def per_pixel(layer: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    return lambda c: Call(lambda m, x: m.inner(x.movedim(1, -1)).movedim(-1, 1), inner=layer(c))


IMAGES: dict[str, Callable[[int], nn.Module]] = {
    **{
        f"{name} per pixel": per_pixel(ANY[name])
        for name in ("linear tanh", "layer norm", "in place", "two names")
    },
    "conv": lambda c: nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.ReLU()),
    "conv, in-place relu": lambda c: nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.ReLU(inplace=True)),
    "grouped conv": lambda c: nn.Conv2d(c, c, 3, padding=1, groups=2, bias=False),
    "depthwise conv": lambda c: nn.Conv2d(c, c, 3, padding="same", groups=c),
    "dilated conv": lambda c: nn.Conv2d(c, c, 3, padding=2, dilation=2),
    "circular conv": lambda c: nn.Conv2d(c, c, 3, padding=1, padding_mode="circular"),
    "pointwise conv": lambda c: nn.Conv2d(c, c, 1),
    "transposed conv": lambda c: nn.ConvTranspose2d(c, c, 3, padding=1),
    "batch norm": nn.BatchNorm2d,
    "group norm": lambda c: nn.GroupNorm(2, c),
    "instance norm": lambda c: nn.InstanceNorm2d(c, affine=True),
    "instance norm, tracking": lambda c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True),
    "prelu": nn.PReLU,
    "channels last": lambda c: Call(
        lambda m, x: m.conv(x.contiguous(memory_format=torch.channels_last)),
        conv=nn.Conv2d(c, c, 3, padding=1),
    ),
    "channels last batch norm": lambda c: Call(
        lambda m, x: m.norm(x.contiguous(memory_format=torch.channels_last)), norm=nn.BatchNorm2d(c)
    ),
    "one row, channels last batch norm": lambda c: Call(
        lambda m, x: x + m.norm(x[:, :, :1].contiguous(memory_format=torch.channels_last)),
        norm=nn.BatchNorm2d(c),
    ),
    "standardised weight": lambda c: Call(
        lambda m, x: F.conv2d(
            x,
            (m.weight - m.weight.mean((1, 2, 3), True)) / (m.weight.std((1, 2, 3), keepdim=True) + 0.1),
            padding=1,
        ),
        weight=parameter(c, c, 3, 3),
    ),
    "weight norm": lambda c: parametrizations.weight_norm(nn.Conv2d(c, c, 3, padding=1)),
    "squeeze and excite": lambda c: Call(
        lambda m, x: x * torch.sigmoid(m.two(F.relu(m.one(x.mean((2, 3)))))).view(len(x), -1, 1, 1),
        one=nn.Linear(c, 2),
        two=nn.Linear(2, c),
    ),
    "two names": lambda c: TwoNames(nn.Conv2d(c, c, 3, padding=1)),
    "response norm": lambda c: nn.Sequential(nn.Conv2d(c, c, 1), nn.LocalResponseNorm(2)),
    "resized": lambda c: Call(
        lambda m, x: F.interpolate(m.conv(F.avg_pool2d(x, 2)), (SIDE, SIDE), mode="bilinear"),
        conv=nn.Conv2d(c, c, 1),
    ),
    "unfolded": lambda c: Call(
        lambda m, x: (m.weight @ F.unfold(x, 3, padding=1)).unflatten(2, x.shape[2:]),
        weight=parameter(c, 9 * c),
    ),
    "stochastic depth": lambda c: Call(
        lambda m, x: x + F.dropout(m.conv(x), 0.3, m.training), conv=nn.Conv2d(c, c, 3, padding=1)
    ),
    "scale": lambda c: Call(lambda m, x: x * m.scale, scale=parameter(c, 1, 1)),
}
MIXING: dict[str, Callable[[int], nn.Module]] = {
    "mean of the batch": lambda d: Call(
        lambda m, x: x - statistics_of_batch(x) * m.scale.abs().mean(), scale=parameter(d)
    ),
    "detached mean of the batch": lambda d: Call(
        lambda m, x: (x - 0.02 * statistics_of_batch(x).detach()) * m.scale.mean(), scale=parameter(d)
    ),
    "softmax over the batch": lambda d: Call(
        lambda m, x: x * m.scale.mean() + x.softmax(0), scale=parameter(d)
    ),
    "neighbour in the batch": lambda d: Call(
        lambda m, x: x + m.scale.mean() * x.roll(1, 0), scale=parameter(d)
    ),
}
KINDS = {
    "vector": VECTORS,
    "sequence": SEQUENCES,
    "tokens": SEQUENCES,
    "language": SEQUENCES,
    "image": IMAGES,
}
NOT_DIFFERENTIABLE = {"own statistic, detached", "partly without gradient", "packed gru"}
"""Layers whose gradient is not the derivative of their value, so that no finite difference can be asked."""
NOT_IN_BFLOAT16 = {"response norm"}
"""Layers for which torch has no kernel in bfloat16 on CPU, so that the model itself does not run."""
WRONG_IN_TORCH = {
    "batch norm 2d, channels last",
    "channels last batch norm",
    "one row, channels last batch norm",
}
"""Layers whose backward pass of one sample is wrong in torch, so that a loop over samples is no reference."""
READS_AHEAD = {
    "attention",
    "multihead",
    "multihead, time first",
    "encoder layer",
    "bidirectional rnn",
    "conv1d",
}


class Graph(nn.Module):
    """Random layers between an optional table and a head."""

    def __init__(self, modality: str, layers: Sequence[str]) -> None:
        super().__init__()
        width = CHANNELS if modality == "image" else WIDTH
        self.modality = modality
        made = {**KINDS[modality], **MIXING}
        self.table = nn.Embedding(VOCABULARY, width) if modality in ("tokens", "language") else None
        self.layers = nn.ModuleList(made[name](width) for name in layers)
        self.head = nn.Linear(width, VOCABULARY if modality == "language" else CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.table is None else self.table(x)
        for layer in self.layers:
            x = layer(x)
        if self.modality == "image":
            x = x.mean((2, 3)) + x.amax((2, 3))
        if self.modality in ("sequence", "tokens"):
            x = x.mean(1) + x[:, -1]
        return self.head(x)


def drawn_model(modality: str, layers: Sequence[str], seed: int) -> Graph:
    """Return the model of this seed in eval mode; running statistics and gains are random too."""
    torch.manual_seed(seed)
    model = Graph(modality, layers)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
                module.running_mean.normal_(std=0.3)
                module.running_var.uniform_(0.5, 1.5)
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model.eval()


def drawn_sample(modality: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return one input and its label."""
    label = torch.randint(CLASSES, (), generator=generator)
    if modality in ("tokens", "language"):
        row = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        return row, row.clone() if modality == "language" else label
    shapes = {"vector": (WIDTH,), "sequence": (LENGTH, WIDTH), "image": (CHANNELS, SIDE, SIDE)}
    return torch.randn(shapes[modality], generator=generator), label
