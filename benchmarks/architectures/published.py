"""Published architectures written with torch alone, after their papers, in tiny configurations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from benchmarks.architectures import (
    CLASSES,
    VOCABULARY,
    Architecture,
    MakeSample,
    classifier,
    ids,
    image,
    label,
    language_model,
    tensors,
    token_log_prob,
    with_own_f,
)


class Apply(nn.Module):
    """A function without parameters as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Joined(nn.Module):
    """What a function makes of the input of some layers and their output."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.join, self.body = join, nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, self.body(x))


def residual(*layers: nn.Module) -> Joined:
    return Joined(torch.add, *layers)


def pooled(channels: int, *features: nn.Module, norm: nn.Module | None = None) -> nn.Sequential:
    """Features of an image, their mean over places, and a linear layer."""
    mean = Apply(lambda x: x.mean((2, 3)))
    return nn.Sequential(*features, mean, *([norm] if norm else []), nn.Linear(channels, CLASSES))


def conv_norm(channels: int, out: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    padding = kernel // 2
    return nn.Sequential(
        nn.Conv2d(channels, out, kernel, stride, padding, groups=groups, bias=False), nn.BatchNorm2d(out)
    )


def resnet(depths: tuple[int, ...], width: int, expansion: int) -> nn.Module:
    """He et al., 2015 (arXiv:1512.03385), narrow: basic blocks, or bottlenecks with an ``expansion``."""

    def block(channels: int, inner: int, stride: int) -> nn.Module:
        out = expansion * inner
        if expansion == 1:
            body = [conv_norm(channels, out, 3, stride), nn.ReLU(inplace=True), conv_norm(out, out)]
        else:
            body = [conv_norm(channels, inner, 1), nn.ReLU(), conv_norm(inner, inner, 3, stride), nn.ReLU()]
            body.append(conv_norm(inner, out, 1))
        same = stride == 1 and channels == out
        shortcut = nn.Identity() if same else conv_norm(channels, out, 1, stride)
        return Shortcut(nn.Sequential(*body), shortcut)

    layers = [conv_norm(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage, depth in enumerate(depths):
        for number in range(depth):
            layers.append(block(channels, width * 2**stage, 2 if stage and not number else 1))
            channels = expansion * width * 2**stage
    return pooled(channels, *layers)


class Shortcut(nn.Module):
    """The sum of two paths, rectified in place."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.shortcut(x)).relu_()


def vgg11() -> nn.Module:
    """Simonyan and Zisserman, 2014 (arXiv:1409.1556), with batch normalisation and in-place ReLU."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (4, 0, 8, 0, 16, 16, 0, 16, 16, 0):
        if not width:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        channels = width
    head = [nn.Flatten(), nn.Linear(64, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, CLASSES)]
    return nn.Sequential(*layers, *head)


def densenet(growth: int = 4, depths: tuple[int, ...] = (3, 3)) -> nn.Module:
    """Huang et al., 2016 (arXiv:1608.06993): every layer reads all before it."""

    def normed(channels: int, *conv: Any) -> list[nn.Module]:
        return [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, *conv)]

    layers, channels = [nn.Conv2d(3, 8, 3, padding=1)], 8
    for depth in depths:
        for _ in range(depth):
            own = [*normed(channels, 4 * growth, 1), *normed(4 * growth, growth, 3, 1, 1)]
            layers.append(Joined(lambda x, y: torch.cat([x, y], dim=1), *own))
            channels += growth
        layers += [*normed(channels, channels // 2, 1), nn.AvgPool2d(2)]
        channels //= 2
    return pooled(channels, *layers)


class InvertedResidual(nn.Module):
    """Of MobileNetV2 (Sandler et al., 2018), with the squeeze-and-excitation of EfficientNet (Tan and Le, 2019)."""

    def __init__(
        self, channels: int, out: int, stride: int, expansion: int, kernel: int, squeeze: bool
    ) -> None:
        super().__init__()
        inner = channels * expansion
        act: nn.Module = nn.SiLU() if squeeze else nn.ReLU6()
        self.widen = nn.Sequential(conv_norm(channels, inner, 1), act)
        self.depthwise = nn.Sequential(conv_norm(inner, inner, kernel, stride, groups=inner), act)
        narrow, wide = nn.Conv2d(inner, 4, 1), nn.Conv2d(4, inner, 1)
        scale = nn.AdaptiveAvgPool2d(1), narrow, nn.SiLU(), wide, nn.Sigmoid()
        self.squeeze = nn.Sequential(*scale) if squeeze else None
        self.project = conv_norm(inner, out, 1)
        self.residual = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.depthwise(self.widen(x))
        if self.squeeze is not None:
            hidden = hidden * self.squeeze(hidden)
        hidden = self.project(hidden)
        return x + hidden if self.residual else hidden


def mobilenet(squeeze: bool, depth: int = 3) -> nn.Module:
    """MobileNetV2, or EfficientNet with ``squeeze``."""
    blocks, channels = [], 8
    for out, stride, kernel in ((8, 1, 3), (12, 2, 3), (16, 2, 5), (24, 1, 5)):
        for number in range(depth):
            size = kernel if squeeze else 3
            blocks.append(InvertedResidual(channels, out, 1 if number else stride, 3, size, squeeze))
            channels = out
    return pooled(32, conv_norm(3, 8, 3, 2), *blocks, conv_norm(channels, 32, 1), nn.SiLU())


class MNASNet(nn.Module):
    """Tan et al., 2018 (arXiv:1807.11626); refuses state dicts without a version, as torchvision's does."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        blocks = [InvertedResidual(8, 8, 1, 3, 3, False), InvertedResidual(8, 16, 2, 3, 5, False)]
        self.layers = pooled(16, conv_norm(3, 8, 3, 2), *blocks)
        self.register_load_state_dict_pre_hook(self.refuse_other_versions)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    @staticmethod
    def refuse_other_versions(
        module: nn.Module, state: dict, prefix: str, metadata: dict, *_: object
    ) -> None:
        if metadata.get("version") not in (1, 2):
            raise ValueError(f"Expected version 1 or 2, got {metadata.get('version')}.")


class Scaled(nn.Module):
    """A learned factor of every channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def convnext() -> nn.Module:
    """Liu et al., 2022 (arXiv:2201.03545), in channels-last memory."""

    def block(channels: int) -> nn.Module:
        depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        widen, narrow = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        last, first = Apply(lambda x: x.permute(0, 2, 3, 1)), Apply(lambda x: x.permute(0, 3, 1, 2))
        mixed = nn.LayerNorm(channels), widen, nn.GELU(), narrow, Scaled(channels)
        return residual(depthwise, last, *mixed, first)

    in_memory = Apply(lambda x: x.contiguous(memory_format=torch.channels_last))
    body = nn.Conv2d(3, 8, 4, 4), block(8), block(8), nn.Conv2d(8, 16, 2, 2), block(16)
    return pooled(16, in_memory, *body, norm=nn.LayerNorm(16))


class UNet(nn.Module):
    """Ronneberger et al., 2015 (arXiv:1505.04597), with the group norms and time embedding of diffusion models."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, width))
        self.down1, self.down2 = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle = nn.Sequential(
            nn.GroupNorm(2, 2 * width), nn.SiLU(), nn.Conv2d(2 * width, 2 * width, 3, 1, 1)
        )
        self.attention = nn.MultiheadAttention(2 * width, 2, batch_first=True)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.out = nn.Sequential(nn.GroupNorm(2, 2 * width), nn.SiLU(), nn.Conv2d(2 * width, 3, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        first = self.down1(x) + self.time(t)[:, :, None, None]
        hidden = self.middle(self.down2(F.silu(first)))
        sequence = hidden.flatten(2).transpose(1, 2)
        mixed = self.attention(sequence, sequence, sequence, need_weights=False)[0]
        hidden = hidden + mixed.transpose(1, 2).reshape(hidden.shape)
        return self.out(torch.cat([self.up(hidden), first], dim=1))


def mixer(patches: int = 16, channels: int = 12) -> nn.Module:
    """MLP-Mixer (Tolstikhin et al., 2021, arXiv:2105.01601)."""
    transposed = Apply(lambda x: x.transpose(1, 2))

    def block() -> list[nn.Module]:
        tokens = nn.Linear(patches, 12), nn.GELU(), nn.Linear(12, patches)
        wide = nn.Linear(channels, 24), nn.GELU(), nn.Linear(24, channels)
        over_patches = residual(nn.LayerNorm(channels), transposed, *tokens, transposed)
        return [over_patches, residual(nn.LayerNorm(channels), *wide)]

    stem = nn.Conv2d(3, channels, 8, 8), nn.Flatten(2), transposed
    return nn.Sequential(*stem, *block(), *block(), Apply(lambda x: x.mean(1)), nn.Linear(channels, CLASSES))


class TextCNN(nn.Module):
    """Kim, 2014 (arXiv:1408.5882)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(8, 6, width) for width in (2, 3, 4))
        self.head = nn.Linear(18, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(1, 2)
        return self.head(torch.cat([F.relu(conv(x)).amax(2) for conv in self.convs], dim=1))


class AWDLSTM(nn.Module):
    """The language model of Merity et al., 2017 (arXiv:1708.02182): LSTM layers, decoder tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.rnn = nn.LSTM(12, 12, 2, batch_first=True, dropout=0.2)
        self.decoder = nn.Linear(12, VOCABULARY)
        self.decoder.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.decoder(self.rnn(self.embedding(input_ids))[0])


class BiGRU(nn.Module):
    """A bidirectional encoder with additive attention (Yang et al., 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.rnn = nn.GRU(8, 6, bidirectional=True, batch_first=True)
        self.project, self.query = nn.Linear(12, 12), nn.Parameter(torch.randn(12))
        self.head = nn.Linear(12, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.rnn(self.embedding(tokens))[0]
        weights = (torch.tanh(self.project(hidden)) @ self.query).softmax(1)
        return self.head((weights.unsqueeze(2) * hidden).sum(1))


class Seq2Seq(nn.Module):
    """Sutskever et al., 2014, with the attention of Bahdanau et al., 2014: one step of a cell per token."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.encoder, self.cell = nn.GRU(width, width, batch_first=True), nn.GRUCell(2 * width, width)
        self.attention, self.out = nn.Linear(2 * width, 1), nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, last = self.encoder(self.embedding(source))
        state, steps = last[0], []
        for token in self.embedding(target).unbind(1):
            pairs = torch.cat([memory, state.unsqueeze(1).expand_as(memory)], dim=2)
            context = (self.attention(pairs).softmax(1) * memory).sum(1)
            state = self.cell(torch.cat([token, context], dim=1), state)
            steps.append(self.out(state))
        return torch.stack(steps, dim=1)


class TransformerModel(nn.Module):
    """Vaswani et al., 2017 (arXiv:1706.03762), as ``torch.nn.Transformer``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.transformer = nn.Transformer(16, 2, 1, 1, 24, batch_first=True)
        self.out = nn.Linear(16, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.out.weight.dtype)
        hidden = self.transformer(
            self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True
        )
        return self.out(hidden)


class WaveNet(nn.Module):
    """van den Oord et al., 2016 (arXiv:1609.03499): gated dilated causal convolutions with weight normalisation."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        normed = parametrizations.weight_norm
        self.stem = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(normed(nn.Conv1d(width, 2 * width, 2, dilation=2**i)) for i in range(3))
        self.mix = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(3))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.stem(x), 0.0
        for i, (gate, mix) in enumerate(zip(self.gates, self.mix, strict=True)):
            values, opened = gate(F.pad(x, (2**i, 0))).chunk(2, dim=1)
            hidden = mix(values.tanh() * opened.sigmoid())
            x, skips = x + hidden, skips + hidden
        return self.head(F.relu(skips).mean(2))


class PointNet(nn.Module):
    """Qi et al., 2016 (arXiv:1612.00593): a shared network per point, with a learned 3 x 3 transformation."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 9, 1))
        self.points = nn.Sequential(nn.Conv1d(3, 12, 1), nn.BatchNorm1d(12), nn.ReLU(), nn.Conv1d(12, 16, 1))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, cloud: Tensor) -> Tensor:
        x = cloud.transpose(1, 2)
        matrix = self.transform(x).amax(2).view(-1, 3, 3) + torch.eye(3, dtype=x.dtype)
        return self.head(self.points(torch.bmm(matrix, x)).amax(2))


class GCN(nn.Module):
    """Kipf and Welling, 2016 (arXiv:1609.02907), on small dense graphs, one per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        adjacency = edges + edges.transpose(1, 2) + torch.eye(edges.shape[1], dtype=edges.dtype)
        degrees = adjacency.sum(2, keepdim=True)
        for layer in self.layers:
            nodes = F.relu(adjacency @ layer(nodes) / degrees)
        return self.head(nodes.mean(1))


class DLRM(nn.Module):
    """Naumov et al., 2019 (arXiv:1906.00091): embedding bags, a dense network, pairwise products."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, width, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, width))
        self.top = nn.Sequential(nn.Linear(6 + width, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        parts = torch.stack([bottom, *(bag(sparse[:, i]) for i, bag in enumerate(self.bags))], dim=1)
        first, second = torch.triu_indices(4, 4, 1)
        products = (parts @ parts.transpose(1, 2))[:, first, second]
        return self.top(torch.cat([bottom, products], dim=1))


class SetTransformer(nn.Module):
    """Lee et al., 2018 (arXiv:1810.00825): induced attention and pooling by a learned seed."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(3, width)
        self.points, self.seed = nn.Parameter(torch.randn(4, width)), nn.Parameter(torch.randn(1, width))
        self.induce, self.spread, self.pool = (
            nn.MultiheadAttention(width, 2, batch_first=True) for _ in range(3)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        induced = self._attend(self.induce, self.points.expand(len(x), -1, -1), x)
        x = self.norm(x + self._attend(self.spread, x, induced))
        return self.head(self._attend(self.pool, self.seed.expand(len(x), -1, -1), x)[:, 0])

    @staticmethod
    def _attend(attention: nn.Module, query: Tensor, keys: Tensor) -> Tensor:
        return attention(query, keys, keys, need_weights=False)[0]


def discriminator() -> nn.Module:
    """Of SNGAN (Miyato et al., 2018, arXiv:1802.05957): spectral normalisation."""
    normed = parametrizations.spectral_norm
    layers: list[nn.Module] = []
    for channels, out in ((3, 8), (8, 16)):
        layers += [normed(nn.Conv2d(channels, out, 4, 2, 1)), nn.LeakyReLU(0.1, inplace=True)]
    return nn.Sequential(*layers, nn.Flatten(), normed(nn.Linear(1024, CLASSES)))


def siren() -> nn.Module:
    """Sitzmann et al., 2020 (arXiv:2006.09661)."""
    sine = Apply(lambda x: torch.sin(3 * x))
    return nn.Sequential(nn.Linear(2, 16), sine, nn.Linear(16, 16), sine, nn.Linear(16, 3))


class VAE(nn.Module):
    """Kingma and Welling, 2013 (arXiv:1312.6114); f is minus the bound at noise that belongs to the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 16))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


class S4D(nn.Module):
    """Gu et al., 2022 (arXiv:2206.11893): a diagonal state space as a convolution by Fourier transforms."""

    def __init__(self, width: int = 6, states: int = 4) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(1, width), nn.Linear(width, CLASSES)
        self.log_decay = nn.Parameter(torch.rand(width, states))
        self.frequency = nn.Parameter(math.pi * torch.arange(states).repeat(width, 1).float())
        self.gain, self.skip = nn.Parameter(torch.randn(width, states)), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        u = self.stem(x.transpose(1, 2)).transpose(1, 2)
        length = u.shape[2]
        steps = 0.1 * torch.arange(length, dtype=u.dtype)
        decay = torch.exp(-torch.exp(self.log_decay).unsqueeze(2) * steps)
        kernel = (self.gain.unsqueeze(2) * decay * torch.cos(self.frequency.unsqueeze(2) * steps)).sum(1)
        spectrum = torch.fft.rfft(kernel, 2 * length) * torch.fft.rfft(u, 2 * length)
        y = torch.fft.irfft(spectrum, 2 * length)[..., :length] + u * self.skip.unsqueeze(1)
        return self.head(F.gelu(y).mean(2))


class HighwayMLP(nn.Module):
    """Highway network (Srivastava et al., 2015): one gate module that every layer shares."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = nn.Linear(6, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for layer in self.layers:
            opened = torch.sigmoid(self.gate(x))
            x = opened * torch.tanh(layer(x)) + (1 - opened) * x
        return self.head(x)


# --- f of those without a task ---------------------------------------------------------------------------


def noise_error(call, batch) -> Tensor:
    images, steps, noise = batch
    return -(call(images, steps) - noise).square().flatten(1).sum(1)


def colour_error(call, batch) -> Tensor:
    return noise_error(lambda places, _: call(places), (batch[0], None, batch[1]))


def evidence_bound(call, batch) -> Tensor:
    x, noise = batch
    decoded, mean, log_variance = call(x, noise)
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
    return -(decoded - x).square().sum(1) - divergence


def normal(*shapes: tuple[int, ...], drawn: Callable[..., Tensor] = torch.randn) -> MakeSample:
    """Tensors of these shapes, without a class."""
    return lambda g, n: tuple(drawn(*shape, generator=g) for shape in shapes)


def one_noised(generator, number):
    images, noise = (torch.randn(3, 16, 16, generator=generator) for _ in range(2))
    return images, torch.rand(1, generator=generator), noise


def one_graph(generator, number):
    edges = (torch.rand(6, 6, generator=generator) < 0.3).float()
    return torch.randn(6, 5, generator=generator), edges, label(generator)


def one_visit(generator, number):
    sparse = torch.randint(20, (3, 2), generator=generator)
    return torch.randn(4, generator=generator), sparse, label(generator)


def one_digit(generator, number):
    return torch.rand(16, generator=generator), torch.randn(4, generator=generator)


def pairs(generator, number):
    return ids(generator), (row := ids(generator, 5)), row.roll(-1)


def one_text(generator, number):
    return ids(generator), label(generator)


def one_continued(generator, number):
    return (row := ids(generator)), row.clone()


PUBLISHED: list[Architecture] = [
    classifier("resnet18", "vision", partial(resnet, (2, 2, 2, 2), 8, 1), image()),
    classifier("resnet50", "vision", partial(resnet, (3, 4, 6, 3), 4, 4), image()),  # 107 modules
    classifier("vgg11-bn", "vision", vgg11, image()),
    classifier("densenet", "vision", densenet, image(16)),
    classifier("mobilenetv2", "vision", partial(mobilenet, False), image()),
    classifier("efficientnet-se", "vision", partial(mobilenet, True), image()),
    classifier("mnasnet", "vision", MNASNet, image()),
    classifier("convnext-channels-last", "vision", convnext, image()),
    classifier("mlp-mixer", "vision", mixer, image()),
    classifier("sngan-discriminator", "vision", discriminator, image()),
    with_own_f("unet-diffusion", "vision", UNet, one_noised, noise_error),
    classifier("textcnn", "text", TextCNN, one_text),
    classifier("bigru-attention", "text", BiGRU, one_text),
    language_model("awd-lstm", "text", AWDLSTM, one_continued),
    with_own_f("seq2seq-attention", "encoder-decoder", Seq2Seq, pairs, token_log_prob),
    with_own_f("transformer", "encoder-decoder", TransformerModel, pairs, token_log_prob),
    classifier("wavenet", "audio", WaveNet, tensors(1, 24)),
    classifier("s4d", "state-space", S4D, tensors(1, 24)),
    classifier("pointnet", "sets", PointNet, tensors(10, 3)),
    classifier("set-transformer", "sets", SetTransformer, tensors(10, 3)),
    classifier("gcn", "graphs", GCN, one_graph),
    classifier("dlrm", "recommendation", DLRM, one_visit),
    with_own_f("siren", "fields", siren, normal((5, 2), (5, 3), drawn=torch.rand), colour_error),
    with_own_f("vae", "generative", VAE, one_digit, evidence_bound),
    classifier("highway", "tables", HighwayMLP, tensors(6)),
]
