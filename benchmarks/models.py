"""Models that several benchmarks share, and their training."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def train(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int,
    batch_size: int,
) -> list[dict[str, Tensor]]:
    """Train a classifier on batches in random order; return its weights after every epoch."""
    states = []
    for _ in range(epochs):
        for rows in torch.randperm(len(labels)).split(batch_size):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimizer.step()
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    return states


def digits_cnn() -> nn.Module:
    """Return the CNN of projection measurements: 8x8 digits, 151,072 parameters without biases' share."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class _Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def _conv(c_in: int, c_out: int, kernel: int = 3, stride: int = 1, padding: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, kernel, stride, padding, bias=False), nn.GroupNorm(8, c_out), nn.ReLU()
    )


def resnet9() -> nn.Module:
    """Return the ResNet-9 of the original's quickstart with group normalisation, 2.27 million parameters."""
    return nn.Sequential(
        _conv(3, 64),
        _conv(64, 128, 5, 2, 2),
        _Residual(_conv(128, 128), _conv(128, 128)),
        _conv(128, 256),
        nn.MaxPool2d(2),
        _Residual(_conv(256, 256), _conv(256, 256)),
        _conv(256, 128, padding=0),
        nn.AdaptiveMaxPool2d((1, 1)),
        nn.Flatten(),
        nn.Linear(128, 10, bias=False),
    )


class SimpleCNN(nn.Module):
    """The network of the functorch notebook on per-sample gradients: 28x28 images, 1.20 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return log-probabilities ``(B, 10)`` of images ``(B, 1, 28, 28)``."""
        x = functional.relu(self.conv2(functional.relu(self.conv1(images))))
        x = functional.max_pool2d(x, 2).flatten(1)
        return functional.log_softmax(self.fc2(functional.relu(self.fc1(x))), dim=1)


class _Attention(nn.Module):
    """Attention in plain matrix products; ``torch.func`` runs the fused kernel sample by sample."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).movedim(2, 0).transpose(2, 3)
        weights = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if self.causal:
            later = torch.ones(weights.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            weights = weights.masked_fill(later, -torch.inf)
        return self.out((weights.softmax(-1) @ v).transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class _Positions(nn.Module):
    """Learned positions, looked up per sample, which all gradient engines support."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]))


class ViT(nn.Module):
    """A vision transformer: 32x32 images in 64 patches, width 192, 6 layers, 2.69 million parameters."""

    def __init__(self, width: int = 192, layers: int = 6, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.positions = _Positions(64, width)
        self.blocks = nn.Sequential(*(_Block(width, heads, False) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``(B, 10)`` of images ``(B, 3, 32, 32)``."""
        x = self.positions(self.patches(images).flatten(2).transpose(1, 2))
        return self.head(self.norm(self.blocks(x)).mean(1))


class GPT(nn.Module):
    """A causal language model whose head is tied to its token embedding."""

    def __init__(self, vocabulary: int, tokens: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = _Positions(tokens, width)
        self.blocks = nn.Sequential(*(_Block(width, heads, True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``(B, T, vocabulary)`` of token ids ``(B, T)``."""
        return self.head(self.norm(self.blocks(self.positions(self.tokens(ids)))))


class _LlamaAttention(nn.Module):
    """Causal attention with rotary positions, and several heads for one head of keys and values."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v = nn.Linear(width, kv_heads * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        q, k = _rotated(q), _rotated(k)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def _rotated(x: Tensor, base: float = 500_000.0) -> Tensor:
    """Return queries or keys ``(B, heads, T, size)`` rotated by their positions."""
    half = x.shape[-1] // 2
    rates = base ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class _LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attention = _LlamaAttention(width, heads, kv_heads)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """The architecture of Llama 3 with a tied head; the defaults are Llama 3.2 1B, 1.24 billion parameters."""

    def __init__(
        self,
        vocabulary: int = 128_256,
        width: int = 2048,
        layers: int = 16,
        heads: int = 32,
        kv_heads: int = 8,
        hidden: int = 8192,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(_LlamaBlock(width, heads, kv_heads, hidden) for _ in range(layers)))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``(B, T, vocabulary)`` of token ids ``(B, T)``."""
        return self.head(self.norm(self.blocks(self.tokens(ids))))


class LSTMClassifier(nn.Module):
    """``nn.LSTM`` 64 -> 128 and a linear layer on its last step, 0.10 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(B, 10)`` of sequences ``(B, T, 64)``."""
        return self.head(self.lstm(x)[0][:, -1])


def mlp() -> nn.Module:
    """Return the 784-1024-1024-10 perceptron, 1.86 million parameters."""
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
