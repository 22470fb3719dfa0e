"""What cannot be repeated or differentiated is refused with its name; settings are checked."""

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import unrolled_cases as cases
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import TensorDataset

from trak_lite.errors import InvalidInputError, NonFiniteError, UnsupportedModelError
from trak_lite.unrolled import SGD, Adam, unrolled

pytestmark = pytest.mark.filterwarnings("ignore:The training has metasmoothness")


def around(*layers):
    """Return a model function with layers between two linear ones."""
    return lambda seed: nn.Sequential(
        nn.Linear(cases.WIDTH, 6), *layers, nn.Linear(6, cases.CLASSES)
    ).double()


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


class Renormed(nn.Embedding):
    """Looks rows up in a table, and scales them down in place."""

    def forward(self, inputs):
        return inputs + super().forward(inputs[:, 0].long().clamp(0, 3))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))

    def forward(self, inputs):
        return torch.utils.checkpoint.checkpoint(self.body, inputs, use_reentrant=False)


INSTANCES = (nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten())


class Masked(nn.Linear):
    """Half of its weights stay as they are, by a hook."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight.register_hook(lambda gradient: gradient * (torch.arange(6) % 2))


UNREPEATABLE = [
    ((nn.BatchNorm1d(6),), r"1 \(.*BatchNorm.*group or layer"),
    ((nn.BatchNorm1d(6, track_running_stats=False),), r"1 \(.*BatchNorm.*group or layer"),
    ((nn.SyncBatchNorm(6),), r"1 \(.*BatchNorm.*group or layer"),
    ((Counter(True),), r"changes \['1.calls'\].*eval mode"),
    ((Counter(False),), r"changes \['1.calls'\].*eval mode"),
    (INSTANCES, "running_mean"),
    ((Renormed(4, 6, max_norm=0.1),), r"changes \['1.weight'\]"),
    ((Checkpointed(),), "switch it off"),
    ((Masked(6, 6),), "hook of the parameter '1.weight'"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("layers", "message"), UNREPEATABLE)
def test_a_model_that_cannot_be_repeated_is_refused(layers, message):
    with pytest.raises(UnsupportedModelError, match=message):
        cases.recipe(around(*layers)).train()


def among_labels(model, batch):
    """Adds the distances of a row to the others of its label."""
    logits, same = model(batch[0]), batch[1][:, None] == batch[1]
    return cases.loss(model, batch) + (torch.cdist(logits, logits) ** 2 * same).sum(1)


def test_a_loss_of_a_row_that_depends_on_its_batch_is_named_and_no_other():
    labels = torch.arange(cases.N) % 2
    data = TensorDataset(cases.vectors(cases.N, 0)[0], labels)
    with pytest.warns(UserWarning, match="depends on the other rows of its batch"):
        cases.recipe(loss_fn=among_labels, data=data).train()
    for model_fn in (cases.mlp, cases.dropping):
        for batch_size in (1, 4):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                cases.recipe(model_fn, data=data, batch_size=batch_size).train()


class Once(torch.autograd.Function):
    """The identity with a derivative that has none."""

    generate_vmap_rule = True
    forward = staticmethod(lambda inputs: inputs.clone())
    setup_context = staticmethod(lambda ctx, inputs, output: None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient


class OnceLayer(nn.Linear):
    def forward(self, inputs):
        return Once.apply(super().forward(inputs)) ** 2


@pytest.mark.quick
def test_an_operation_without_second_derivative_is_refused():
    run = cases.recipe(lambda seed: OnceLayer(cases.WIDTH, cases.CLASSES).double()).train()
    with pytest.raises(UnsupportedModelError, match=r"OnceLayer.*once_differentiable"):
        cases.replayed(run)


class Hooked(nn.Linear):
    """Its gradient arrives scaled by a hook."""

    def forward(self, inputs):
        found = super().forward(inputs)
        found.register_hook(lambda gradient: 0.3 * gradient)  # raises where nothing requires grad
        return found.tanh()


def focal(model, batch):
    losses = cases.loss(model, batch)
    return (1.0 - torch.exp(-losses)).detach() ** 2 * losses


STEP, TARGET = "second derivatives of a training step", "derivatives of a target's f"
INEXACT = [
    (cases.mlp, focal, STEP),
    (lambda seed: around(nn.Tanh(), weight_norm(nn.Linear(6, 6)))(seed), cases.loss, STEP),
    (lambda seed: around(Hooked(6, 6))(seed), cases.loss, TARGET),
]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("model_fn", "loss", "what"), INEXACT, ids=["detach", "weight_norm", "hook"])
def test_a_training_whose_derivatives_torch_gets_wrong_is_refused(model_fn, loss, what):
    run = cases.recipe(model_fn, loss).train()
    with pytest.raises(UnsupportedModelError, match=f"The {what} that torch forms are off by"):
        cases.replayed(run)


class Listed(nn.Module):
    """Reads a parameter through a list, in which a call does not replace it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(cases.WIDTH, cases.CLASSES)
        self.kept = [self.layer.weight]

    def forward(self, inputs):
        return F.linear(inputs, self.kept[0], self.layer.bias)


OUTSIDE = cases.mlp(0)
ITSELF, NOTHING = "reads trained parameters of", "depends on no trained parameter"


def squares(tensors):
    return sum(tensor.square().sum() for tensor in tensors)


def through(module, function):
    """Return a function of a model call that passes a module of it instead."""
    return lambda m, batch: function(module(m), batch)


def penalised(part):
    """Return a loss with the squares of a function of a parameter and of the module's own, which is stale."""
    return lambda m, batch: (
        cases.loss(m, batch) + squares([part(m.parameters["0.weight"], m.model[0].weight.detach())])
    )


def frozen_first(seed):
    model = cases.mlp(seed)
    model[0].requires_grad_(False)
    return model


STALE = [
    (cases.mlp, lambda m, batch: cases.loss(m, batch) + squares(m.model.parameters()), ITSELF),
    (cases.mlp, through(lambda m: m.model, cases.loss), ITSELF),
    (cases.mlp, lambda m, batch: cases.loss(m, batch) + squares([m.model[0].bias.detach()]), ITSELF),
    (cases.mlp, penalised(lambda w, own: w * (own.abs() > 0.2)), ITSELF),
    (cases.mlp, penalised(lambda w, own: w * (own.abs() > 2.0)), ITSELF),
    (cases.mlp, penalised(lambda w, own: w - own.nan_to_num()), ITSELF),
    (cases.mlp, lambda m, batch: cases.loss(m, batch) + m.model[0].weight.svd().S.sum(), ITSELF),
    (lambda seed: OUTSIDE, lambda m, batch: cases.loss(m, batch) + squares(OUTSIDE.parameters()), ITSELF),
    (lambda seed: Listed().double(), cases.loss, ITSELF),
    (lambda seed: copy.deepcopy(OUTSIDE), through(lambda m: OUTSIDE, cases.loss), NOTHING),
]


@pytest.mark.quick
@pytest.mark.parametrize(("model_fn", "loss", "message"), STALE)
def test_a_loss_that_does_not_read_the_trained_tensors_is_refused(model_fn, loss, message):
    before = {name: value.clone() for name, value in OUTSIDE.state_dict().items()}
    with pytest.raises(UnsupportedModelError, match=f"The loss {message}"):
        cases.recipe(model_fn, loss).train()
    assert all(torch.equal(value, before[name]) for name, value in OUTSIDE.state_dict().items())


@pytest.mark.quick
@pytest.mark.parametrize(
    ("f", "message"),
    [
        (through(lambda m: m.model, cases.margin), ITSELF),
        (lambda m, batch: cases.margin(m, batch) - cases.loss(m.model, batch), ITSELF),
        (through(lambda m: OUTSIDE, cases.margin), NOTHING),
    ],
)
def test_a_target_that_does_not_read_the_trained_tensors_is_refused(f, message):
    with pytest.raises(UnsupportedModelError, match=f"The f of a target {message}"):
        cases.replayed(cases.recipe().train(), task=f)


@pytest.mark.parametrize(
    ("model_fn", "penalty"),
    [
        (cases.mlp, lambda m: 0.01 * squares(m.parameters.values())),
        (cases.mlp, lambda m: 0.01 * next(m.model.parameters()).numel()),
        (frozen_first, lambda m: 0.01 * (m.model[0].bias.sum() * m.parameters["2.bias"]).sum()),
        (cases.mlp, lambda m: 0.01 * squares(m.parameters[name] - p for name, p in OUTSIDE.named_parameters())),
    ],
    ids=["call", "shape", "frozen", "anchor"],
)  # fmt: skip
def test_a_loss_may_read_what_the_training_does_not_change(model_fn, penalty):
    made = cases.recipe(model_fn, lambda m, batch: cases.loss(m, batch) + penalty(m), epochs=1)
    cases.assert_close(cases.replayed(made.train())[[2]], cases.differences(made, [2]))


class Routed(nn.Module):
    """Uses the heads of the domains of a batch only."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(cases.WIDTH, cases.CLASSES) for _ in range(2))

    def forward(self, inputs):
        domains = (inputs[:, 0] > 0).long().tolist()
        found = {domain: self.heads[domain](inputs) for domain in set(domains)}
        return torch.stack([found[domain][place] for place, domain in enumerate(domains)])


@pytest.mark.quick
def test_batches_and_targets_may_use_no_trained_parameter():
    """The first batch and the first target do not."""
    made = cases.recipe(lambda seed: Routed().double(), grad_wrt="heads.1.*", batch_size=1)
    inputs, labels = cases.vectors(cases.N, 0)
    inputs[:, 0] *= -inputs[made.order(0, num_rows=cases.N, seed=made.seed)[0], 0].sign()
    made, asked = cases.changed(made, data=TensorDataset(inputs, labels)), cases.targets().tensors
    asked[0][:, 0] = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    used, targets = (inputs[:, 0] > 0).nonzero()[:1, 0].tolist(), TensorDataset(*asked)
    expected = cases.differences(made, used, targets)
    assert np.abs(expected[:, 1::2]).min() > 0
    cases.assert_close(cases.replayed(made.train(), targets)[used], expected)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.head = kind(3, 4, batch_first=True), nn.Linear(4, cases.CLASSES)

    def forward(self, inputs):
        return self.head(self.layer(inputs.reshape(-1, 2, 3))[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_exact(kind):
    """In float32 too, where the fused LSTM of a CPU has no second derivative."""
    made = cases.recipe(lambda seed: Recurrent(kind).double(), epochs=1)
    found = cases.replayed(made.train())
    cases.assert_close(found[[2]], cases.differences(made, [2]), rtol=1e-5)
    pairs = made.data.tensors, cases.targets().tensors
    halved = [TensorDataset(inputs.float(), labels) for inputs, labels in pairs]
    single = cases.changed(made, model_fn=lambda seed: Recurrent(kind), data=halved[0]).train()
    np.testing.assert_allclose(cases.replayed(single, halved[1]), found, rtol=1e-2, atol=1e-4)


@pytest.mark.quick
@pytest.mark.parametrize("spacing", [{"checkpoints": "sqrt"}, {"checkpoints": "all"}, {"interval": 99}])
def test_a_training_that_becomes_nan_names_the_first_step(tmp_path, spacing):
    made = cases.recipe(schedule=lambda step: float("inf") if step == 4 else 1.0, epochs=5)
    for path in (None, tmp_path):
        with pytest.raises(NonFiniteError, match="after step 4, counted from 0"):
            made.train(path, **spacing)


@pytest.mark.quick
def test_derivatives_that_are_infinite_name_the_targets():
    """Adam's root has an infinite derivative at zero; ReLU units that no row uses have no gradient."""

    def build(seed):
        model = around(nn.ReLU())(seed)
        nn.init.constant_(model[0].bias, -100.0)
        return model

    run = cases.recipe(build, optimizer=Adam(lr=0.01, eps_root=0.0)).train()
    with pytest.raises(NonFiniteError, match=r"targets \[0, 1, 2, 3\].*eps_root"):
        cases.replayed(run)
    assert np.isfinite(cases.replayed(cases.recipe(build, optimizer=Adam(lr=0.01)).train())).all()


@pytest.mark.quick
@pytest.mark.parametrize("factor", [None, "fast", [1.0, 2.0]])
def test_a_schedule_that_returns_no_number_is_refused(factor):
    made = cases.recipe(schedule=lambda step: factor)
    with pytest.raises(InvalidInputError, match=r"schedule\(0\) returned .* Return a number"):
        made.train()


@pytest.mark.quick
def test_a_loss_that_calls_parameters_is_told_what_they_are():
    def penalised(model, batch, parameters):
        return cases.loss(model, batch) + sum(p.square().sum() for p in parameters(model))

    made = cases.recipe(loss_fn=lambda model, batch: penalised(model, batch, lambda m: m.parameters()))
    with pytest.raises(
        UnsupportedModelError, match=r"a dict of tensors by name: model\.parameters\.values\(\)"
    ):
        made.train()
    cases.recipe(
        loss_fn=lambda model, batch: penalised(model, batch, lambda m: m.parameters.values())
    ).train()


@pytest.mark.quick
def test_integers_of_numpy_and_torch_are_those_of_python(tmp_path):
    counts = {"batch_size": 4, "accumulate": 2, "epochs": 1, "seed": 3}
    run = cases.recipe(**counts).train(tmp_path)
    for kind in (np.int64, np.uint8, torch.tensor):
        again = cases.recipe(**{name: kind(value) for name, value in counts.items()}).train(tmp_path)
        assert again.digest == run.digest


WITHOUT_ROWS = [
    lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    lambda model, batch: model(batch[0]),
    lambda model, batch: cases.loss(model, batch)[:-1],
    lambda model, batch: 1.0,
]


def of_torch():
    return torch.optim.Adam(nn.Linear(1, 1).parameters())  # imports a compiler: not while tests are collected


RECIPES = [
    ({"batch_size": 0}, "batch_size must be an integer"),
    ({"accumulate": 0}, "accumulate must be an integer"),
    ({"epochs": None}, "Give either epochs or steps"),
    ({"steps": 3}, "Give either epochs or steps"),
    ({"epochs": 0}, "epochs must be an integer"),
    ({"epochs": None, "steps": 0}, "steps must be an integer"),
    ({"seed": 0.5}, "seed must be an integer"),
    (
        {"schedule": [1.0] * 6},
        r"schedule must be a function of the step, from 0, got list\. .* factors\[step\]",
    ),
    ({"clip_norm": 0.0}, "clip_norm must be above 0"),
    ({"clip_norm": -1.0}, "clip_norm"),
    ({"optimizer": torch.optim.SGD}, "optimizer must be an SGD, Adam or AdamW"),
]
TRAININGS = [
    ({"weights": np.ones(cases.N - 1)}, "one finite number per train row"),
    ({"weights": np.ones((cases.N, 1))}, "one finite number per train row"),
    ({"weights": np.full(cases.N, np.nan)}, "one finite number per train row"),
    ({"checkpoints": "some"}, "checkpoints"),
    ({"interval": 0}, "interval"),
]
OPTIMIZERS = [
    (SGD, {"lr": -1.0}, "lr"),
    (SGD, {"lr": float("nan")}, "lr"),
    (SGD, {"momentum": -0.1}, "momentum"),
    (SGD, {"nesterov": True}, "needs momentum"),
    (SGD, {"weight_decay": -1.0}, "weight_decay"),
    (Adam, {"betas": (0.9, 1.0)}, "betas"),
    (Adam, {"betas": (0.9,)}, "betas"),
    (Adam, {"eps": -1.0}, "eps"),
    (Adam, {"eps_root": -1.0}, "eps_root"),
]
REPLAYS = [
    ({"block": 0}, "block"),
    ({"block": 1.5}, "block"),
    ({"max_bytes": 0}, "max_bytes"),
    ({"runs": lambda run: run.recipe}, "finished runs"),
    ({"runs": lambda run: [run, run]}, "different runs"),
    ({"runs": lambda run: []}, "one run"),
]


def of_a_replay(runs=lambda run: run, **settings):
    unrolled(runs(cases.recipe().train()), TensorDataset(*cases.vectors(2, 1)), cases.margin, **settings)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((lambda s=s: cases.recipe(loss_fn=s).train(), r'for 4 rows.*reduction="none"') for s in WITHOUT_ROWS),
        *((lambda s=s: cases.recipe(**s), message) for s, message in RECIPES),
        (lambda: cases.recipe(optimizer=of_torch()), "got Adam.*cannot be differentiated"),
        *((lambda s=s: cases.recipe().train(**s), message) for s, message in TRAININGS),
        *((lambda cls=cls, s=s: cls(**{"lr": 0.1, **s}), message) for cls, s, message in OPTIMIZERS),
        *((lambda s=s: of_a_replay(**s), message) for s, message in REPLAYS),
    ],
)  # fmt: skip
def test_arguments_are_checked(call, message):
    with pytest.raises(InvalidInputError, match=message):
        call()
