"""Models of as many modules as published ones have: names and keys in the store do not grow with their number."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor
from trak_lite.cli import main
from trak_lite.errors import InvalidInputError, ManifestMismatchError, StateError
from trak_lite.report import write_report


class Deep(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = x + 0.001 * layer(x)
        return x


def small_data(rows):
    generator = torch.Generator().manual_seed(rows)
    return TensorDataset(torch.randn(rows, 2, generator=generator), torch.arange(rows) % 2)


DEPTH = 200
"""Three times what a cache key of 1,024 characters has room for; a run of 2,000 takes 90 seconds and shows the same."""


def test_hundreds_of_modules_are_featurized_scored_reported_and_told_apart(tmp_path, capsys):
    torch.manual_seed(0)
    store, model, data = str(tmp_path / "run.zarr"), Deep(DEPTH), small_data(4)
    attributor = Attributor(model, "image_classification", store, proj_dim=2)
    attributor.featurize(data)
    scores = attributor.score(small_data(3), name="t")
    plain = attributor.score(small_data(3), name="t", method="GradDot")
    assert attributor.layout.width == 2 * DEPTH
    stored = attributor.scores("t", dense=False, method="GradDot")
    np.testing.assert_allclose(stored.top(4, target=0).scores, np.sort(plain.numpy()[:, 0])[::-1], rtol=1e-4)
    np.testing.assert_array_equal(Attributor.open(store, model).scores("t").numpy(), scores.numpy())
    assert write_report(scores, tmp_path / "page.html", figures=()).stat().st_size < 16_000
    # The figures do not grow with the model.
    assert write_report(scores, tmp_path / "page.html").stat().st_size < 26_000
    capsys.readouterr()
    main(["inspect", store])
    assert 100 < len(capsys.readouterr().out) < 2_000
    assert max(len(name) for _, _, names in os.walk(store) for name in names) < 100
    others = nn.Sequential(*Deep(DEPTH).layers)
    with pytest.raises(ManifestMismatchError, match=r"parameters\.0\.bias.*and \d{3} more") as caught:
        Attributor(others, "image_classification", store, proj_dim=2).featurize(data)
    assert len(str(caught.value)) < 4_000


MANY_CHECKPOINTS = """
import resource, sys
import torch
from torch.utils.data import TensorDataset
from trak_lite import Attributor

torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
states = [{name: value + 0.01 * i for name, value in model.state_dict().items()} for i in range(12)]
data = TensorDataset(torch.randn(4, 2), torch.arange(4) % 2)
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
attributor = Attributor(model, "image_classification", sys.argv[1], proj_dim=2, progress=False)
attributor.featurize(data, states)
scores = attributor.score(data)
one = scores.self_influence(), scores.standard_error(), scores.reliability().expected, scores.top(2)
attributor.scores("targets").damping_path([0.1, 1.0])
again = Attributor.open(sys.argv[1], model, progress=False).scores()
assert (again.self_influence() == one[0]).all()
"""


def test_file_descriptors_do_not_grow_with_checkpoints(tmp_path):
    """Twelve checkpoints with 24 descriptors: each table had one for its commit log, and one for every file it maps."""
    command = [sys.executable, "-c", MANY_CHECKPOINTS, str(tmp_path / "run.zarr")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_messages_about_checkpoints_do_not_grow_with_their_number(tmp_path):
    model = nn.Linear(2, 2)
    states = [{name: value + 0.01 * i for name, value in model.state_dict().items()} for i in range(30)]
    made = Attributor(model, "image_classification", tmp_path / "run.zarr", proj_dim=2)
    made.featurize(small_data(4), states)
    opened = Attributor.open(tmp_path / "run.zarr", nn.Linear(2, 2))
    with pytest.raises(StateError, match=r"\) and 20 more are needed"):
        opened.score(small_data(3))
    with pytest.raises(InvalidInputError, match=r"ckpt-9 \(9\) and 20 more"):
        opened.drop_checkpoint("thirty")
