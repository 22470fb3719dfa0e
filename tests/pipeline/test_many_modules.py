"""Models of as many modules as published ones have: names and keys in the store do not grow with their number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_model_of_more_modules_than_a_cache_key_has_room_for_is_scored(place: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(120)], nn.Linear(4, 3))
    data = TensorDataset(torch.randn(12, 4), torch.randint(3, (12,)))
    attributor = Attributor(
        model, "image_classification", None if place == "memory" else tmp_path / "run.zarr", proj_dim=4
    )
    attributor.featurize(data)
    assert attributor.score(data, name="same").shape == (12, 12)
