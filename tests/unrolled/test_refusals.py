"""What cannot be repeated or differentiated is refused with its name."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from unrolled_cases import CLASSES, WIDTH, N, changed, differences, loss, margin, recipe, targets, vectors

from trak_lite.errors import InvalidInputError, NonFiniteError, UnsupportedModelError
from trak_lite.unrolled import SGD, Adam, unrolled

pytestmark = pytest.mark.filterwarnings("ignore:The training has metasmoothness")


def with_norm(norm):
    return lambda seed: nn.Sequential(nn.Linear(WIDTH, 6), norm, nn.Linear(6, CLASSES)).double()


@pytest.mark.quick
@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(6), nn.BatchNorm1d(6, track_running_stats=False), nn.SyncBatchNorm(6)]
)
def test_batch_norm_in_training_mode_is_refused(norm):
    with pytest.raises(UnsupportedModelError, match=r"1 \(.*BatchNorm.*group or layer"):
        recipe(with_norm(norm)).train()


def test_batch_norm_in_eval_mode_is_exact():
    def build(seed):
        model = with_norm(nn.BatchNorm1d(6))(seed)
        model[1].running_var.fill_(2.0)
        model[1].eval()
        return model

    made = recipe(build)

    found = unrolled(made.train(), targets(), margin).numpy()[[1]]
    np.testing.assert_allclose(found, differences(made, [1], targets(), margin), rtol=1e-5, atol=1e-7)


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self, in_place):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.in_place = in_place

    def forward(self, inputs):
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return inputs


@pytest.mark.quick
@pytest.mark.parametrize("norm", [Counter(True), Counter(False)])
def test_buffers_that_a_pass_changes_are_refused(norm):
    with pytest.raises(UnsupportedModelError, match=r"changes \['1.calls'\].*eval mode"):
        recipe(with_norm(norm)).train()


def test_running_statistics_of_instances_are_refused():
    def build(seed):
        layers = [nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)).double()

    with pytest.raises(UnsupportedModelError, match="running_mean"):
        recipe(build).train()


@pytest.mark.quick
@pytest.mark.parametrize(
    "wrong",
    [
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        lambda model, batch: model(batch[0]),
        lambda model, batch: loss(model, batch)[:-1],
        lambda model, batch: 1.0,
    ],
)
def test_a_loss_without_one_number_per_row_is_refused(wrong):
    with pytest.raises(InvalidInputError, match=r'for 4 rows.*reduction="none"'):
        recipe(loss_fn=wrong).train()


@pytest.mark.quick
def test_an_optimizer_of_torch_is_refused():
    with pytest.raises(InvalidInputError, match=r"got Adam.*cannot be differentiated"):
        recipe(optimizer=torch.optim.Adam(nn.Linear(1, 1).parameters()))


@pytest.mark.quick
@pytest.mark.parametrize("spacing", [{"checkpoints": "sqrt"}, {"checkpoints": "all"}, {"interval": 99}])
def test_a_training_that_becomes_nan_names_the_first_step(tmp_path, spacing):
    made = recipe(schedule=lambda step: float("inf") if step == 4 else 1.0, epochs=5)

    for path in (None, tmp_path):
        with pytest.raises(NonFiniteError, match="after step 4, counted from 0"):
            made.train(path, **spacing)


@pytest.mark.quick
def test_derivatives_that_are_infinite_name_the_targets():
    """Adam's root has an infinite derivative at zero; ReLU units that no row uses have no gradient."""

    def build(seed):
        model = nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, CLASSES)).double()
        nn.init.constant_(model[0].bias, -100.0)
        return model

    run = recipe(build, optimizer=Adam(lr=0.01, eps_root=0.0)).train()

    with pytest.raises(NonFiniteError, match=r"targets \[0, 1, 2, 3\].*eps_root"):
        unrolled(run, targets(), margin)
    assert unrolled(recipe(build, optimizer=Adam(lr=0.01)).train(), targets(), margin).shape == (N, 4)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.head = kind(3, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, inputs):
        return self.head(self.layer(inputs.reshape(-1, 2, 3))[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_exact(kind):
    """In float32 too, where the fused LSTM of a CPU has no second derivative."""
    made = recipe(lambda seed: Recurrent(kind).double())
    found = unrolled(made.train(), targets(), margin).numpy()
    expected = differences(made, [2], targets(), margin)
    np.testing.assert_allclose(found[[2]], expected, rtol=1e-5, atol=1e-7)

    halved = [TensorDataset(data.tensors[0].float(), data.tensors[1]) for data in (made.data, targets())]
    single = changed(made, model_fn=lambda seed: Recurrent(kind), data=halved[0]).train()

    np.testing.assert_allclose(unrolled(single, halved[1], margin).numpy(), found, rtol=1e-2, atol=1e-4)


class Once(torch.autograd.Function):
    """The identity with a derivative that has none."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inputs):
        return inputs.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient


class OnceLayer(nn.Linear):
    def forward(self, inputs):
        return Once.apply(super().forward(inputs)) ** 2


@pytest.mark.quick
def test_an_operation_without_second_derivative_is_refused():
    run = recipe(lambda seed: OnceLayer(WIDTH, CLASSES).double()).train()

    with pytest.raises(UnsupportedModelError, match=r"OnceLayer.*once_differentiable"):
        unrolled(run, targets(), margin)


@pytest.mark.quick
def test_unknown_spacings_are_refused():
    made = recipe(data=TensorDataset(*vectors(N, 0)), optimizer=SGD(lr=0.1))
    with pytest.raises(InvalidInputError, match="checkpoints"):
        made.train(checkpoints="some")
    with pytest.raises(InvalidInputError, match="interval"):
        made.train(interval=0)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3))

    def forward(self, inputs):
        return torch.utils.checkpoint.checkpoint(self.body, inputs, use_reentrant=False)


def test_gradient_checkpointing_is_refused():
    with pytest.raises(UnsupportedModelError, match="switch it off"):
        recipe(lambda seed: Checkpointed().double()).train()


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 3, max_norm=0.1)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs):
        return self.head(inputs) + self.table(inputs[:, 0].long().clamp(0, 3))


def test_parameters_that_a_pass_changes_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"changes \['table.weight'\]"):
        recipe(lambda seed: Renormed().double()).train()


def test_a_run_twice_is_no_mean_over_runs():
    run = recipe().train()
    with pytest.raises(InvalidInputError, match="different runs"):
        unrolled([run, run], TensorDataset(*vectors(2, 1)), margin)
    with pytest.raises(InvalidInputError, match="finished runs"):
        unrolled(run.recipe, TensorDataset(*vectors(2, 1)), margin)
