"""Small whole models, each with the trait of a family that per-sample gradients have to get right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trak_lite.gradient_computers import HookGradientComputer, collect_gradients
from trak_lite.modelout_functions import ModelCall, resolve_task

Output = Callable[[ModelCall, Any], Tensor]


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    output: Output


def log_prob(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of the label, ``(B,)``; over positions, their sum."""
    picked = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return picked.flatten(1).sum(1) if picked.dim() > 1 else picked


def classify(call: ModelCall, batch: Any) -> Tensor:
    return log_prob(call(batch[0]), batch[1])


def squares(call: ModelCall, batch: Any) -> Tensor:
    """A scalar of everything that the model puts out."""
    out = call(batch[0])
    return (out * out.cos()).flatten(1).sum(1)


def images(channels: int, size: int, classes: int = 3) -> Callable[[int], Any]:
    return lambda count: (torch.randn(count, channels, size, size), torch.randint(classes, (count,)))


def tokens(length: int, vocabulary: int = 11, classes: int | None = None) -> Callable[[int], Any]:
    def batch(count: int) -> Any:
        ids = torch.randint(vocabulary, (count, length))
        labels = ids.roll(-1, 1) if classes is None else torch.randint(classes, (count,))
        return ids, labels

    return batch


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, stride=2, bias=False),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


class ResidualBlock(nn.Module):
    """Convolutions around a skip connection that is added in place."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm1, self.norm2 = norm(4), norm(4)
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.conv2(F.relu(self.norm1(self.conv1(x)), inplace=True))
        y = self.norm2(y)
        y += x
        return self.head(F.relu(y).mean((2, 3)))


def trained_batch_norm(channels: int) -> nn.Module:
    norm = nn.BatchNorm2d(channels)
    norm.running_mean = torch.randn(channels)
    norm.running_var = torch.rand(channels) + 0.5
    nn.init.normal_(norm.weight)
    return norm


class VisionTransformer(nn.Module):
    """Class token, positional embedding and layer scale are bare parameters; blocks are torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 8))
        self.scale = nn.Parameter(torch.rand(8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        x = x + self.scale * self.encoder(x)
        return self.head(self.norm(x)[:, 0])


class Conv1D(nn.Module):
    """Hugging Face's linear layer with a transposed weight."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.2)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.size()[:-1], self.nf)


class GPT(nn.Module):
    """Positions embedded without a batch, Conv1D projections, scaled-dot-product attention, tied head."""

    def __init__(self, tied_call: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 8)
        self.wpe = nn.Embedding(6, 8)
        self.ln, self.ln_f = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention, self.out = Conv1D(24, 8), Conv1D(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.tied_call, self.recompute = tied_call, recompute
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.wte.weight

    def block(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.attention(self.ln(x)).split(8, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln(x))))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        x = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        x = self.ln_f(x)
        return F.linear(x, self.wte.weight) if self.tied_call else self.head(x)


class HandWrittenRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Llama(nn.Module):
    """RMS norms, rotary positions, grouped queries and a gated feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm1, self.norm2 = HandWrittenRMSNorm(8), nn.RMSNorm(8)
        self.q, self.o = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.k, self.v = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
        self.gate, self.up = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)
        self.lm_head = nn.Linear(8, 11, bias=False)

    def rotate(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[2]).unsqueeze(1) / torch.tensor([1.0, 10.0])
        cos, sin = (t.repeat(1, 2).to(x.dtype) for t in (angle.cos(), angle.sin()))
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        h = self.norm1(x)
        q, k, v = (m(h).unflatten(-1, (-1, 4)).transpose(1, 2) for m in (self.q, self.k, self.v))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return self.lm_head(x + self.down(F.silu(self.gate(h)) * self.up(h)))


class Bert(nn.Module):
    """Called with keywords; the attention mask reaches scaled-dot-product attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8, padding_idx=0)
        self.positions, self.types = nn.Embedding(6, 8), nn.Embedding(2, 8)
        self.norm = nn.LayerNorm(8)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("position_ids", torch.arange(6).unsqueeze(0), persistent=False)
        self.pooler, self.classifier = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = self.position_ids[:, : input_ids.shape[1]]
        kinds = torch.zeros_like(input_ids)
        x = self.norm(self.words(input_ids) + self.positions(places) + self.types(kinds))
        q, k, v = (m(x).unflatten(-1, (2, 4)).transpose(1, 2) for m in (self.query, self.key, self.value))
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * -1e9
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + y.transpose(1, 2).flatten(2)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


def masked_text(count: int) -> Any:
    ids = torch.randint(1, 11, (count, 6))
    lengths = torch.randint(2, 7, (count, 1))
    mask = (torch.arange(6) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.randint(3, (count,))}


def classify_mapping(call: ModelCall, batch: Any) -> Tensor:
    return log_prob(
        call(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]), batch["labels"]
    )


class T5(nn.Module):
    """A relative position bias that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.bias = nn.Embedding(11, 2)
        self.qkv, self.head = nn.Linear(8, 24, bias=False), nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        length = ids.shape[1]
        distance = torch.arange(length)[None] - torch.arange(length)[:, None] + length - 1
        bias = self.bias(distance).permute(2, 0, 1).unsqueeze(0)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) + bias).softmax(-1)
        return self.head((weights @ v).transpose(1, 2).flatten(2))


class DenseMixture(nn.Module):
    """Experts that see every token of a flattened batch, weighted by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(11, 6), nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        flat = x.reshape(-1, 6)
        share = self.router(flat).softmax(-1)
        mixed = sum(share[:, i : i + 1] * expert(flat) for i, expert in enumerate(self.experts))
        return self.head(x + mixed.view_as(x))


class RoutedMixture(DenseMixture):
    """Experts that see only the tokens that were routed to them."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        flat = x.reshape(-1, 6)
        best, chosen = self.router(flat).softmax(-1).max(-1)
        mixed = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == i).squeeze(1)
            mixed = mixed.index_add(0, rows, best[rows, None] * expert(flat[rows]))
        return self.head(x + mixed.view_as(x))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5, padding_idx=0)
        self.lstm = nn.LSTM(5, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


class CheckpointedTagger(Tagger):
    """The recurrent layer runs a second time in the backward pass."""

    def forward(self, ids: Tensor) -> Tensor:
        run = lambda x: self.head(self.lstm(x)[0])  # noqa: E731
        return checkpoint(run, self.embed(ids), use_reentrant=False)


class TimeMajor(nn.Module):
    """Everything has the batch on axis 1, and positions are flattened time-major."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.gru = nn.GRU(8, 8)
        self.norm, self.mix, self.head = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids.t())
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.norm(x + self.gru(x)[0])
        x = self.mix(x.reshape(-1, 8)).view_as(x)
        return self.head(x).transpose(0, 1)


class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 3)
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias)


class Recommender(nn.Module):
    """DLRM: bags of categories, dense features and their dot products."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(7, 4, mode=mode) for mode in ("sum", "mean", "max"))
        self.bottom, self.top = nn.Linear(5, 4), nn.Linear(10, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        parts = [self.bottom(batch["dense"]), *(bag(batch["ids"]) for bag in self.bags)]
        z = torch.stack(parts, 1)
        dots = (z @ z.transpose(1, 2))[:, *torch.tril_indices(4, 4, -1)]
        return self.top(torch.cat([parts[0], dots], 1)).squeeze(1)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(1, 3, 3, padding=1, padding_mode="reflect")
        self.down2 = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(4, 3, 2, stride=2)
        self.norm = nn.InstanceNorm2d(3, affine=True)
        self.out = nn.Conv2d(6, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.down1(x))
        b = self.norm(self.up(F.relu(self.down2(a))))
        return self.out(torch.cat([a, b], 1))


class LowRank(nn.Module):
    """LoRA: a frozen matrix, and an update that is merged into it in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(5, 2))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(F.linear(x, self.weight + math.sqrt(2) * self.b @ self.a))


class OddUses(nn.Module):
    """Parameters where no layer rule would look for them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)
        self.table = nn.Parameter(torch.randn(2, 3, 4))
        self.start = nn.Parameter(torch.randn(4))
        self.slope = nn.Parameter(torch.tensor([0.3]))
        self.power = nn.Parameter(torch.tensor(1.5))
        self.bilinear = nn.Bilinear(5, 5, 3)
        self.prelu = nn.PReLU(5)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.zeros(len(x), 3, 4, dtype=x.dtype)
        steps[:, 0] = self.start
        steps[:, 1:] = x.unsqueeze(1)
        steps = torch.einsum("btd,hte->bhd", steps, self.table).sum(1)
        h = F.linear(x + steps, weight=self.layer.weight, bias=self.layer.bias)
        h = self.prelu(h) / (1 + self.slope**2)
        h = h.mul_(self.power) - self.start.sum()
        return self.bilinear(h, torch.sigmoid(h)) * self.table.mean((0, 1))[:3]


class SparseEmbeddings(nn.Module):
    """Embeddings whose gradients torch gives as sparse tensors; the positions' has no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(5, 3, sparse=True), nn.Embedding(4, 3, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.tokens(ids) * self.positions(torch.arange(4))).tanh()


CASES: dict[str, Case] = {
    "small CNN": Case(small_cnn, images(1, 8), classify),
    "ResNet block with GroupNorm": Case(
        lambda: ResidualBlock(lambda c: nn.GroupNorm(2, c)), images(3, 6), classify
    ),
    "ResNet block with eval BatchNorm": Case(
        lambda: ResidualBlock(trained_batch_norm), images(3, 6), classify
    ),
    "ViT": Case(VisionTransformer, images(3, 8), classify),
    "GPT-2": Case(GPT, tokens(6), classify),
    "GPT-2 with a functional head": Case(lambda: GPT(tied_call=True), tokens(6), classify),
    "GPT-2 with checkpointing": Case(lambda: GPT(recompute=True), tokens(6), classify),
    "Llama": Case(Llama, tokens(5), classify),
    "BERT with attention_mask, called by keyword": Case(Bert, masked_text, classify_mapping),
    "T5": Case(T5, tokens(5), classify),
    "mixture of experts, dense": Case(DenseMixture, tokens(4), classify),
    "LSTM tagger": Case(Tagger, tokens(5), classify),
    "LSTM tagger with checkpointing": Case(CheckpointedTagger, tokens(5), classify),
    "batch on axis 1": Case(TimeMajor, tokens(5), classify),
    "tied autoencoder": Case(TiedAutoencoder, lambda n: (torch.randn(n, 6),), squares),
    "DLRM": Case(
        Recommender,
        lambda n: {"dense": torch.randn(n, 5), "ids": torch.randint(7, (n, 4))},
        lambda call, batch: torch.sin(call(batch)),
    ),
    "U-Net": Case(UNet, images(1, 6), squares),
    "LoRA and weight norm": Case(LowRank, lambda n: (torch.randn(n, 3, 6),), squares),
    "parameters in odd places": Case(OddUses, lambda n: (torch.randn(n, 4),), squares),
}


def make(case: Case, count: int = 4, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any]:
    """Return the model in eval mode and a batch, both drawn from seed 0."""
    torch.manual_seed(0)
    model = case.build().to(dtype).eval()
    return model, cast(case.batch(count), dtype)


def cast(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, dict):
        return {name: cast(value, dtype) for name, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(cast(value, dtype) for value in batch)
    return batch.to(dtype) if batch.is_floating_point() else batch


def by_loop(
    model: nn.Module, output: Output, batch: Any, names: list[str] | None = None
) -> dict[str, Tensor]:
    """Per-sample gradients by one forward and one backward pass per sample, by parameter name."""
    kept = {n: p for n, p in model.named_parameters() if (p.requires_grad if names is None else n in names)}
    flags = {p: p.requires_grad for p in model.parameters()}
    for p in flags:
        p.requires_grad_(any(p is q for q in kept.values()))
    first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    rows = []
    for i in range(len(first)):
        one = (
            {name: value[i : i + 1] for name, value in batch.items()}
            if isinstance(batch, dict)
            else tuple(value[i : i + 1] for value in batch)
        )
        value = output(ModelCall(model), one).sum()
        value = value if value.requires_grad else value + torch.zeros((), requires_grad=True)
        rows.append(torch.autograd.grad(value, list(kept.values()), allow_unused=True))
    for p, flag in flags.items():
        p.requires_grad_(flag)
    return {
        name: torch.stack([torch.zeros_like(p) if row[k] is None else row[k] for row in rows])
        for k, (name, p) in enumerate(kept.items())
    }


def wavy(call: Callable[..., Any], batch: Any) -> Tensor:
    """A number per sample, ``(B,)``, to which every entry of the (first) result contributes differently."""
    out = call(*batch)
    out = (out[0] if isinstance(out, tuple) else out).flatten(1)
    return (out * torch.cos(3 * out + torch.arange(out.shape[1]))).sum(1)


class Net(nn.Module):
    """Layers and bare parameters, and whatever a case does with them."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.norm, self.embed = nn.LayerNorm(4), nn.Embedding(9, 4)
        self.p, self.row = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(1, 4))
        self.experts, self.slope = nn.Parameter(torch.randn(3, 4, 4)), nn.Parameter(torch.tensor(0.3))
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def hooked(
    forward: Callable[..., Any], *, output: Output = wavy, **settings: Any
) -> tuple[Any, HookGradientComputer]:
    """A :class:`Net` with this forward pass, drawn from seed 0, in float64 and eval mode, and its hook computer."""
    torch.manual_seed(0)
    model = Net(forward).double().eval()
    return model, HookGradientComputer(model, resolve_task(output), **settings)


def rows(count: int, *shape: int, seed: int = 1) -> Tensor:
    """Inputs ``(count, *shape, 4)`` of a :class:`Net`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *shape, 4, generator=generator, dtype=torch.float64)


def assert_same(
    found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-10, atol: float = 1e-11
) -> None:
    """Compare names, order and rows of gradients."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_exact(
    model: nn.Module,
    batch: Any,
    output: Output = wavy,
    *,
    computer: HookGradientComputer | None = None,
    names: list[str] | None = None,
    **settings: Any,
) -> HookGradientComputer:
    """Compare the rows of a hook computer with one backward pass per sample; return the computer."""
    computer = computer or HookGradientComputer(model, resolve_task(output), **settings)
    assert_same(collect_gradients(computer, batch), by_loop(model, output, batch, names))
    return computer
