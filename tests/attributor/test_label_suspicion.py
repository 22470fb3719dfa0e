"""How suspect labels are, beside the mean error over checkpoints computed by plain PyTorch."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor
from trak_lite.errors import StateError
from trak_lite.evaluation import mislabel_detection


def trained(wrong, epochs=12):
    torch.manual_seed(0)
    inputs = torch.randn(120, 6)
    labels = (inputs[:, 0] > 0).long()
    labels[wrong] = 1 - labels[wrong]
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer, states = torch.optim.Adam(model.parameters(), 0.01), []
    for _ in range(epochs):
        for _ in range(10):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    return model, states, TensorDataset(inputs, labels)


@pytest.mark.parametrize("path", [None, "run.zarr"])
def test_label_suspicion_is_the_mean_error_over_checkpoints_and_finds_wrong_labels(tmp_path, path):
    wrong = np.zeros(120, bool)
    wrong[::12] = True
    model, states, data = trained(wrong)
    attributor = Attributor(model, "image_classification", path and tmp_path / path, proj_dim=8)
    attributor.featurize(data, checkpoints=states)
    errors = []
    for state in states:
        model.load_state_dict(state)
        errors.append(1 - model(data.tensors[0]).softmax(1)[range(120), data.tensors[1]].detach().double())
    suspicion = attributor.label_suspicion()
    assert (suspicion.shape, suspicion.dtype) == ((120,), np.float32)
    np.testing.assert_allclose(suspicion, torch.stack(errors).mean(0), atol=1e-6)
    assert mislabel_detection(suspicion, wrong).precision >= 0.8


def test_a_task_whose_output_is_its_loss_says_nothing_of_labels():
    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1], reduction="none").sum(1)

    data = TensorDataset(torch.randn(10, 3), torch.randn(10, 1))
    attributor = Attributor(nn.Linear(3, 1), loss, None, proj_dim=4)
    attributor.featurize(data)
    with pytest.raises(StateError, match=r"the same q, because .*self_influence"):
        attributor.label_suspicion()


def test_pending_rows_are_refused():
    attributor = Attributor(nn.Linear(3, 2), "image_classification", None, proj_dim=4)
    with pytest.raises(StateError):
        attributor.label_suspicion()
