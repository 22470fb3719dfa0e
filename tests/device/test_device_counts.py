"""How many kernels a batch launches, and how often the host waits: counted, not timed."""

import counts
import numpy as np
import pytest
import torch
from device_runs import PLAIN, attributor
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.models import GPT
from trak_lite import Attributor
from trak_lite.featurizing.passes import compute_features
from trak_lite.gradient_computers import HookGradientComputer
from trak_lite.modelout_functions import resolve_task
from trak_lite.projectors import CountSketchProjector

LAUNCHES = 2.0
"""Kernels and launches of a batch, at most, in units of those of a plain forward and backward pass."""
WAITS = 1
"""Waits for the device per batch of featurize, at most."""
TILE_WAITS = 1
"""Waits for the device per tile of scores, at most: that for the result."""
ROWS, BATCH, VOCABULARY = 14, 2, 96


class Language(nn.Module):
    """GPT-2's layers in a narrow model, called by a keyword."""

    def __init__(self, width, tokens):
        super().__init__()
        self.tokens, self.body = tokens, GPT(VOCABULARY, tokens, width, 12, 4)

    def forward(self, input_ids):
        return self.body(input_ids)


def language(device, width=96, tokens=64):
    torch.manual_seed(0)
    return Language(width, tokens).to(device).eval()


def plain_kernels(model, device):
    ids = torch.randint(VOCABULARY, (BATCH, model.tokens), device=device)
    with counts.counted(device) as counting:
        logits = model(ids)[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        torch.autograd.grad(loss, list(model.parameters()))
    return counting.tally.total


def steady_batch(model, device, *, triton, **settings):
    """Return what a batch without a self-check costs; the batches before it have made the plan and the sketches."""

    def run(loaded):
        def collate(rows):
            loaded()
            ids = torch.stack([row[0] for row in rows])
            return {"input_ids": ids, "labels": ids.clone()}

        given = {"device": device, "collate": collate, "batch_size": BATCH, "method": PLAIN, **settings}
        made = Attributor(model, "causal_language_modeling", None, progress=False, **given)
        made.featurize(TensorDataset(torch.randint(VOCABULARY, (ROWS, model.tokens))))

    return counts.per_batch(run, device, triton=triton)[-3]


@pytest.mark.parametrize(
    ("width", "tokens", "settings"),
    [(96, 64, {"proj_dim": 64}), (384, 32, {"proj_dim": 2048, "layout": "joint"})],
    ids=["several blocks per matrix", "transforms of a large batch would be faster"],
)
def test_a_batch_launches_at_most_twice_the_kernels_of_a_plain_pass(width, tokens, settings, device):
    model = language(device, width, tokens)
    tally = steady_batch(model, device, triton=True, **settings)
    assert tally.launches.total() > 12 * 6
    assert tally.total <= LAUNCHES * plain_kernels(model, device), tally.sites.most_common(20)
    assert max(tally.waits.total(), tally.device_waits) <= WAITS, tally.waits


@pytest.mark.parametrize(
    "settings", [{"store_norms": True}, {"store_norms": True, "normalize": "unit"}], ids=["stored", "unit"]
)
def test_norms_of_a_batch_are_waited_for_once(settings, device):
    tally = steady_batch(language(device, tokens=16), device, triton=True, proj_dim=64, **settings)
    norms = sum(count for site, count in tally.sites.items() if "gradient_norms.py" in site)
    assert norms > 48 * 6  # of linear layers, without their gradients
    assert max(tally.waits.total(), tally.device_waits) <= WAITS + 1, tally.waits


def test_without_triton_the_launches_do_not_grow_with_the_blocks_of_a_matrix(device):
    tally = steady_batch(language(device), device, triton=False, proj_dim=64)
    matrices = [site for site in tally.sites if "sketch/matrix.py" in site]
    assert not matrices, tally.sites.most_common(20)
    assert sum(n for site, n in tally.sites.items() if "sketch/blocks.py" in site) <= 51 * 11


def test_a_replay_launches_no_more_than_its_pass_and_waits_for_nothing(device):
    model, task = language(device), resolve_task("causal_language_modeling")
    computer, projector = HookGradientComputer(model, task), CountSketchProjector(64)
    ids = torch.randint(VOCABULARY, (BATCH, model.tokens), device=device)
    batch = {"input_ids": ids, "labels": ids.clone()}
    settings = {"model_id": 0, "rows": np.arange(BATCH), "what": "train"}
    for _ in range(8):
        compute_features(computer, projector, batch, **settings, to_come=1000)
    (kind,) = computer._replays._kinds.values()
    with counts.counted(device, triton=False) as counting:
        kind.recording(*batch.values())
    with counts.counted(device, triton=False) as of_pass:
        compute_features(computer, projector, batch, **settings)
    assert counting.tally.total <= of_pass.tally.total
    assert max(counting.tally.waits.total(), counting.tally.device_waits) == 0, counting.tally.waits


# ---- scoring
@pytest.mark.parametrize("read", [
    lambda made, case, scores: scores.numpy(),
    lambda made, case, scores: scores.top(3),
    lambda made, case, scores: scores.damping_path([0.1, 1.0]).numpy(),
    lambda made, case, scores: scores.damping_path([0.1, 1.0]).top(2),
    lambda made, case, scores: made.score(case.targets, name="u", method="GradDot"),
    lambda made, case, scores: made.score(case.targets, name="u", dense=False, k=2, method="GradCos"),
], ids=["streamed", "top rows", "damping path", "top rows of a damping path", "stored", "best rows"])  # fmt: skip
def test_scoring_waits_once_per_tile(read, device, monkeypatch):
    """Twice the tiles of half the rows: what is waited for more often is waited for in every tile."""
    found = []
    for rows in (2, 1):
        made, case = attributor("mlp", device)
        made.featurize(case.train)
        scores = made.score(case.targets, name="t", dense=False)
        monkeypatch.setattr("trak_lite.scoring.tiles._TILE_ROWS", rows)
        with counts.counted(device, triton=False) as counting:
            read(made, case, scores)
        found.append(counting.tally)
    more = found[1].since(found[0])
    assert max(more.waits.total(), more.device_waits) <= 7 * TILE_WAITS, more.waits
