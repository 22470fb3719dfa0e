"""A report on scores of a real store: what verify kept comes onto the page, also after opening the store again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from report_cases import Parsed
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, verify
from trak_lite.evaluation import subset_masks
from trak_lite.report import write_report

N, M = 30, 5


def dataset(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


TRAIN, TARGETS = dataset(N, 0), dataset(M, 1)


def train(rows: np.ndarray, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    inputs, labels = TRAIN[rows]
    for _ in range(5):
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
    return model


def outputs_of(model: nn.Module) -> np.ndarray:
    with torch.no_grad():
        p = model(TARGETS.tensors[0]).double().softmax(1).gather(1, TARGETS.tensors[1][:, None])[:, 0]
    return torch.log(p / (1 - p)).numpy()


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Attributor:
    path = tmp_path_factory.mktemp("verified") / "run.zarr"
    made = Attributor(train(np.arange(N), 0), "image_classification", path, proj_dim=8)
    made.featurize(TRAIN)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("trak_lite.retraining.calibrated._NUM_RESAMPLES", 50)
        patched.setattr("trak_lite.retraining.verify._KEPT_TARGETS", 3)
        verify(made.score(TARGETS, "test"), train, TARGETS, budget=4, seeds=(0, 1))
    return made


def test_predictions_are_summed_scores_beside_mean_retrained_outputs(
    verified: Attributor,
) -> None:
    opened = Attributor.open(verified.path, nn.Linear(4, 3)).scores("test")

    kept = opened.predictions

    masks = subset_masks(N, 4, alpha=0.5, seed=0)
    retrained = [np.mean([outputs_of(train(np.flatnonzero(m), s)) for s in (0, 1)], axis=0) for m in masks]
    np.testing.assert_allclose(kept.summed, (masks @ opened.numpy().astype(float))[:, ::2], rtol=1e-5)
    np.testing.assert_allclose(kept.retrained, np.array(retrained)[:, ::2], rtol=1e-4, atol=1e-5)
    assert verified.scores("test", dense=False).predictions is None


def test_a_report_of_an_opened_store_shows_verdict_and_manifest(verified: Attributor, tmp_path: Path) -> None:
    opened = Attributor.open(verified.path, nn.Linear(4, 3)).scores("test")

    page = Parsed(write_report(opened, tmp_path / "r.html"))

    assert f"LDS {opened.verdict.lds}" in page.text
    assert len(page.all("use", fill="var(--high)", fill_opacity="0.45")) == 4 * 3
    assert f"stored in{opened.location}" in page.text
    assert "rows: projector" in page.text
    assert "Not drawn. Uncertainty needs at least 2 checkpoints" in page.text


def test_scores_that_are_not_kept_have_the_same_page(verified: Attributor, tmp_path: Path) -> None:
    def rows(dense: bool) -> list[str | None]:
        page = Parsed(write_report(verified.scores("test", dense=dense), tmp_path / f"{dense}.html"))
        return [found["data-row"] for found in page.all("li")]

    assert rows(dense=True) == rows(dense=False)
