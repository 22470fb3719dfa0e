"""Models that keep values computed from parameters while they are in eval mode, as LeViT does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows
from trak_lite._eval_caches import drop_eval_caches
from trak_lite.store import ZarrFeatureStore


class Biased(nn.Module):
    """Adds a table of biases, looked up once in eval mode and dropped when it is put into train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.biases = nn.Linear(4, 3), nn.Parameter(torch.randn(5))
        self.kept: Tensor | None = None

    def train(self, mode: bool = True) -> nn.Module:
        if mode:
            self.kept = None
        return super().train(mode)

    def looked_up(self) -> Tensor:
        if self.training:
            return self.biases[[0, 2, 2]]
        if self.kept is None:
            self.kept = self.biases[[0, 2, 2]]
        return self.kept

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + self.looked_up())


class Plain(Biased):
    """The same function without anything kept."""

    def looked_up(self) -> Tensor:
        return self.biases[[0, 2, 2]]


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(kind(), nn.Linear(3, 3))


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator))


def rows(model: nn.Module, path: Path, engine: str) -> list[np.ndarray]:
    """Features of two checkpoints."""
    states = [{k: v * factor for k, v in made(Plain).state_dict().items()} for factor in (1.0, -2.0)]
    attributor = Attributor(
        model,
        "image_classification",
        path,
        gradient_computer=engine,
        projector="none",
        layout="joint",
        dtype="float32",
    )
    attributor.featurize(Rows(dataset(), batch_size=3), checkpoints=states)
    with ZarrFeatureStore.open(path) as store:
        return [store.open_table(f"ckpt-{number}").read("features").copy() for number in range(2)]


@pytest.mark.parametrize("engine", ["auto", "hook", "functional", "iterative"])
def test_what_a_model_keeps_in_eval_mode_stands_for_no_parameter_and_no_other_checkpoint(
    engine: str, tmp_path: Path
) -> None:
    model = made(Biased).eval()
    with torch.no_grad():
        before = model(dataset().tensors[0])  # leaves constants in the place of parameters

    found = rows(model, tmp_path / "kept.zarr", engine)

    expected = rows(made(Plain).eval(), tmp_path / "plain.zarr", engine)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert model(dataset().tensors[0]).equal(before)


def test_every_module_keeps_its_mode() -> None:
    model = nn.Sequential(Biased(), Biased())
    model.eval()
    model[0].linear.training = True
    model[1].training = True
    modes = [module.training for module in model.modules()]

    drop_eval_caches(model.modules())

    assert [module.training for module in model.modules()] == modes
