"""Models that several benchmarks share."""

from __future__ import annotations

from torch import Tensor, nn


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
