"""Small whole models, each with the trait of a family that per-sample gradients have to get right."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import reference
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trak_lite.gradient_computers import HookGradientComputer, collect_gradients, register_gradient_rule
from trak_lite.modelout_functions import ModelCall, resolve_task
from trak_lite.types import GradientBlock

Output = Callable[[ModelCall, Any], Tensor]
Build = Callable[[], nn.Module]


class Model(nn.Module):
    """Modules, parameters and what else is held, and the forward pass that uses them."""

    def __init__(self, function, **held):
        super().__init__()
        for name, value in held.items():
            setattr(self, name, value)
        self.function = function

    def forward(self, *inputs, **named):
        return self.function(self, *inputs, **named)


@dataclass(frozen=True)
class Case:
    build: Build
    batch: Callable[[int], Any]
    output: Output


def log_prob(logits, labels):
    """Log-probability of the label, ``(B,)``; over positions, their sum."""
    picked = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return picked.flatten(1).sum(1) if picked.dim() > 1 else picked


def classify(call, batch):
    return log_prob(call(batch[0]), batch[1])


def wavy(call, batch):
    """A number per sample, ``(B,)``, to which every entry of the (first) result contributes differently."""
    out = call(*batch)
    out = (out[0] if isinstance(out, tuple) else out).flatten(1)
    return (out * torch.cos(3 * out + torch.arange(out.shape[1]))).sum(1)


def images(channels, size):
    return lambda count: (torch.randn(count, channels, size, size), torch.randint(3, (count,)))


def tokens(length):
    """Return what draws ids of words, whose labels are the next ones."""

    def batch(count):
        ids = torch.randint(11, (count, length))
        return ids, ids.roll(-1, 1)

    return batch


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, stride=2, bias=False),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


class VisionTransformer(nn.Module):
    """Class token, positional embedding and layer scale are bare parameters; blocks are torch's own."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 8))
        self.scale = nn.Parameter(torch.rand(8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        x = x + self.scale * self.encoder(x)
        return self.head(self.norm(x)[:, 0])


class Conv1D(nn.Module):
    """Hugging Face's linear layer with a transposed weight."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.2)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x):
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.size()[:-1], self.nf)


class GPT(nn.Module):
    """Positions embedded without a batch, Conv1D projections, scaled-dot-product attention, tied head."""

    def __init__(self, tied_call=False, recompute=False):
        super().__init__()
        self.wte = nn.Embedding(11, 8)
        self.wpe = nn.Embedding(6, 8)
        self.ln, self.ln_f = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention, self.out = Conv1D(24, 8), Conv1D(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.tied_call, self.recompute = tied_call, recompute
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.wte.weight

    def block(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.attention(self.ln(x)).split(8, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln(x))))

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        x = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        x = self.ln_f(x)
        return F.linear(x, self.wte.weight) if self.tied_call else self.head(x)


class DenseMixture(nn.Module):
    """Experts that see every token of a flattened batch, weighted by a router."""

    def __init__(self):
        super().__init__()
        self.embed, self.router = nn.Embedding(11, 6), nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 11)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.mixed(x.reshape(-1, 6)).view_as(x))

    def mixed(self, flat):
        share = self.router(flat).softmax(-1)
        return sum(share[:, i : i + 1] * expert(flat) for i, expert in enumerate(self.experts))


class RoutedMixture(DenseMixture):
    """Experts that see only the tokens that were routed to them."""

    def mixed(self, flat):
        best, chosen = self.router(flat).softmax(-1).max(-1)
        mixed = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == i).squeeze(1)
            mixed = mixed.index_add(0, rows, best[rows, None] * expert(flat[rows]))
        return mixed


def tagger(forward):
    lstm = nn.LSTM(5, 4, num_layers=2, bidirectional=True, batch_first=True)
    return Model(forward, embed=nn.Embedding(11, 5, padding_idx=0), lstm=lstm, head=nn.Linear(8, 11))


def recomputed_tags(s, ids):
    """The recurrent layer runs a second time in the backward pass."""
    return checkpoint(lambda x: s.head(s.lstm(x)[0]), s.embed(ids), use_reentrant=False)


class Recommender(nn.Module):
    """DLRM: bags of categories, dense features and their dot products."""

    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(7, 4, mode=mode) for mode in ("sum", "mean", "max"))
        self.bottom, self.top = nn.Linear(5, 4), nn.Linear(10, 1)

    def forward(self, batch):
        parts = [self.bottom(batch["dense"]), *(bag(batch["ids"]) for bag in self.bags)]
        z = torch.stack(parts, 1)
        dots = (z @ z.transpose(1, 2))[:, *torch.tril_indices(4, 4, -1)]
        return self.top(torch.cat([parts[0], dots], 1)).squeeze(1)


def low_rank():
    """LoRA: a frozen matrix, and an update that is merged into it in every forward pass."""
    return Model(
        lambda s, x: s.normed(F.linear(x, s.weight + math.sqrt(2) * s.b @ s.a)),
        weight=nn.Parameter(torch.randn(5, 6), requires_grad=False),
        a=nn.Parameter(torch.randn(2, 6)),
        b=nn.Parameter(torch.randn(5, 2)),
        normed=nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)),
    )


class OddUses(nn.Module):
    """Parameters where no layer rule would look for them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 5)
        self.table = nn.Parameter(torch.randn(2, 3, 4))
        self.start = nn.Parameter(torch.randn(4))
        self.slope = nn.Parameter(torch.tensor([0.3]))
        self.power = nn.Parameter(torch.tensor(1.5))
        self.bilinear = nn.Bilinear(5, 5, 3)
        self.prelu = nn.PReLU(5)

    def forward(self, x):
        steps = torch.zeros(len(x), 3, 4, dtype=x.dtype)
        steps[:, 0] = self.start
        steps[:, 1:] = x.unsqueeze(1)
        steps = torch.einsum("btd,hte->bhd", steps, self.table).sum(1)
        h = F.linear(x + steps, weight=self.layer.weight, bias=self.layer.bias)
        h = self.prelu(h) / (1 + self.slope**2)
        h = h.mul_(self.power) - self.start.sum()
        return self.bilinear(h, torch.sigmoid(h)) * self.table.mean((0, 1))[:3]


class Hidden(torch.autograd.Function):
    """``2 x w``, hidden from everything but autograd."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return 2 * x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return 2 * grad * weight, (2 * grad * x).flatten(0, -2).sum(0)


class Opaque(nn.Module):
    """A layer that hooks cannot see into; see :func:`ruled`."""

    def __init__(self, width=4):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return Hidden.apply(x, self.weight)


def ruled(rule, base=Opaque):
    """Return a new class of layers with a rule of the input and the gradient of the result."""

    class Ruled(base):  # type: ignore[misc, valid-type]
        def forward(self, x):
            return super().forward(x)

    register_gradient_rule(Ruled)(lambda module, args, kwargs, grad: rule(args[0], grad))
    return Ruled


CASES = {
    "small CNN": Case(small_cnn, images(1, 8), classify),
    "ViT": Case(VisionTransformer, images(3, 8), classify),
    "GPT-2": Case(GPT, tokens(6), classify),
    "GPT-2 with a functional head": Case(lambda: GPT(tied_call=True), tokens(6), classify),
    "GPT-2 with checkpointing": Case(lambda: GPT(recompute=True), tokens(6), classify),
    "mixture of experts, dense": Case(DenseMixture, tokens(4), classify),
    "LSTM tagger": Case(lambda: tagger(lambda s, ids: s.head(s.lstm(s.embed(ids))[0])), tokens(5), classify),
    "LSTM tagger with checkpointing": Case(lambda: tagger(recomputed_tags), tokens(5), classify),
    "DLRM": Case(Recommender, lambda n: {"dense": torch.randn(n, 5), "ids": torch.randint(7, (n, 4))},
                 lambda call, batch: torch.sin(call(batch))),
    "LoRA and weight norm": Case(low_rank, lambda n: (torch.randn(n, 3, 6),), wavy),
    "parameters in odd places": Case(OddUses, lambda n: (torch.randn(n, 4),), wavy),
}  # fmt: skip


def make(case, count=4, dtype=torch.float64):
    """Return the model in eval mode and a batch, both drawn from seed 0."""
    torch.manual_seed(0)
    model = case.build().to(dtype).eval()
    return model, cast(case.batch(count), dtype)


def cast(batch, dtype):
    if isinstance(batch, dict):
        return {name: cast(value, dtype) for name, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(cast(value, dtype) for value in batch)
    return batch.to(dtype) if batch.is_floating_point() else batch


def by_loop(model, output, batch, names=None):
    """Per-sample gradients by one forward and one backward pass per sample, by parameter name."""
    kept = {n: p for n, p in model.named_parameters() if (p.requires_grad if names is None else n in names)}
    flags = {p: p.requires_grad for p in model.parameters()}
    for p in flags:
        p.requires_grad_(any(p is q for q in kept.values()))
    rows = []
    for one in reference.samples_of(batch):
        value = output(ModelCall(model), one).sum()
        value = value if value.requires_grad else value + torch.zeros((), requires_grad=True)
        rows.append(torch.autograd.grad(value, list(kept.values()), materialize_grads=True))
    for p, flag in flags.items():
        p.requires_grad_(flag)
    return {name: torch.stack(column) for name, *column in zip(kept, *rows, strict=True)}


class Tagged(Tensor):
    """A tensor subclass of somebody else."""


class Net(Model):
    """Layers and bare parameters, and whatever a case does with them."""

    def __init__(self, function):
        super().__init__(function, a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 3))
        self.norm, self.embed = nn.LayerNorm(4), nn.Embedding(9, 4)
        self.p, self.row = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(1, 4))
        self.experts, self.slope = nn.Parameter(torch.randn(3, 4, 4)), nn.Parameter(torch.tensor(0.3))


def hooked(forward, *, output=wavy, **settings):
    """A :class:`Net` with this forward pass, drawn from seed 0, in float64 and eval mode, and its hook computer."""
    torch.manual_seed(0)
    model = Net(forward).double().eval()
    return model, HookGradientComputer(model, resolve_task(output), **settings)


def rows(count, *shape, seed=1):
    """Inputs ``(count, *shape, 4)`` of a :class:`Net`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *shape, 4, generator=generator, dtype=torch.float64)


def assert_same(found, expected, rtol=1e-10, atol=1e-11):
    """Compare names, order and rows of gradients."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        said = lambda message, name=name: f"{name}: {message}"  # noqa: E731
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=said)


def assert_exact(model, batch, output=wavy, *, computer=None, names=None, **settings):
    """Compare the rows of a hook computer with one backward pass per sample; return the computer."""
    computer = computer or HookGradientComputer(model, resolve_task(output), **settings)
    assert_same(collect_gradients(computer, batch), by_loop(model, output, batch, names))
    return computer


@dataclass(frozen=True)
class Exact:
    """A model, and the batches that one computer of it gets one after the other; a single one twice."""

    build: Build
    batches: Sequence[Any]
    output: Output = wavy
    why: Mapping[str, str] = field(default_factory=dict)
    """How the reason in the coverage of some parameters begins."""
    settings: Mapping[str, Any] = field(default_factory=dict)


def net(forward, *batches, why=None, output=wavy, unchecked=False, **held):
    """A :class:`Net` with this forward pass, and what ``held`` makes."""

    def build():
        model = Net(forward)
        for name, one in held.items():
            setattr(model, name, one())
        return model

    inputs = [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
    settings = {"self_check": False} if unchecked else {}
    return Exact(build, inputs, output, why or {}, settings)


def assert_exact_in_every_batch(case):
    """In the first pass, in which the model is examined, and in later ones."""
    torch.manual_seed(0)
    model = case.build().double().eval()
    computer = HookGradientComputer(model, resolve_task(case.output), **case.settings)
    *batches, last = [cast(batch() if callable(batch) else batch, torch.float64) for batch in case.batches]
    for batch in batches:
        assert_exact(model, copy.deepcopy(batch), case.output, computer=computer)
    assert_steady(computer, last, by_loop(model, case.output, copy.deepcopy(last)))
    for name, why in case.why.items():
        new = HookGradientComputer(model, resolve_task(case.output))
        assert new.explain(last)[name].why.startswith(why)


def assert_steady(computer, batch, expected):
    """A pass gives each row of each parameter once, and the next one the same bits in the same order."""
    first, later = list[GradientBlock](), list[GradientBlock]()
    for found in (first, later):
        computer.stream_gradients(copy.deepcopy(batch), found.append)
    assert [(block.name, block.start) for block in later] == [(block.name, block.start) for block in first]
    for block, other in zip(later, first, strict=True):
        assert torch.equal(block.dense(), other.dense()), block.name
    first.sort(key=lambda block: block.start)
    for name, rows in expected.items():
        found = torch.cat([block.dense() for block in first if block.name == name])
        assert_same({name: found.view_as(rows)}, {name: rows})
