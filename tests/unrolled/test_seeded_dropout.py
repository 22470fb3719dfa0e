"""Dropout masks are those of a key: right in distribution, the same in every repetition, refused where impossible."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from unrolled_cases import CLASSES, WIDTH, N, loss, margin, recipe, targets, vectors

from trak_lite.errors import UnsupportedModelError
from trak_lite.unrolled import unrolled
from trak_lite.unrolled.dropout import SeededDropout, step_key
from trak_lite.unrolled.states import flat

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")


def dropped(function, shape, p=0.3, key=None, **settings):
    with SeededDropout(step_key(0, 0, 0, CPU) if key is None else key):
        return function(torch.ones(shape, dtype=torch.float64), p, **settings)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate_and_scale(p):
    found = dropped(F.dropout, (200, 500), p)

    zero = found == 0
    assert abs(zero.double().mean() - p) < 5 * (p * (1 - p) / 1e5) ** 0.5
    torch.testing.assert_close(found[~zero], torch.full_like(found[~zero], 1 / (1 - p)))
    # Neighbours are independent: along both axes and with other strides.
    for one, other in [(zero[1:], zero[:-1]), (zero[:, 1:], zero[:, :-1]), (zero[:, 64:], zero[:, :-64])]:
        both = (one & other).double().mean()
        assert abs(both - p * p) < 6 * (p * p / 1e5) ** 0.5


def test_extreme_rates():
    assert (dropped(F.dropout, (50,), 0.0) == 1).all()
    assert (dropped(F.dropout, (50,), 1.0) == 0).all()
    assert (dropped(F.dropout, (50,), 0.5, training=False) == 1).all()


def test_masks_differ_by_seed_step_part_and_call_and_are_repeatable():
    keys = [
        step_key(*place, CPU) for place in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1)]
    ]
    masks = [dropped(F.dropout, (4000,), 0.5, key) == 0 for key in keys]
    with SeededDropout(keys[0]):
        masks += [F.dropout(torch.ones(4000), 0.5) == 0 for _ in range(3)][1:]

    for place, mask in enumerate(masks):
        for other in masks[:place]:
            assert abs((mask == other).double().mean() - 0.5) < 0.05
    assert torch.equal(dropped(F.dropout, (4000,), 0.5, keys[0]) == 0, masks[0])


def test_negative_and_large_seeds_have_masks_of_their_own():
    masks = [dropped(F.dropout, (1000,), 0.5, step_key(seed, 0, 0, CPU)) for seed in (-1, 0, 1, 2**62)]

    assert len({mask.numpy().tobytes() for mask in masks}) == 4


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Dropout1d, (64, 32, 5)),
        (nn.Dropout1d, (512, 5)),
        (nn.Dropout2d, (64, 32, 3, 4)),
        (nn.Dropout3d, (64, 32, 2, 3, 2)),
        (nn.Dropout3d, (512, 2, 3, 2)),
    ],
)
def test_channels_are_dropped_whole(layer, shape):
    with SeededDropout(step_key(0, 0, 0, CPU)):
        found = layer(0.4)(torch.ones(shape))

    axes = {nn.Dropout1d: 3, nn.Dropout2d: 4, nn.Dropout3d: 5}[layer]
    channels = found.reshape(*shape[: len(shape) - axes + 2], -1)
    assert (channels == channels[..., :1]).all()
    assert abs((channels[..., 0] == 0).double().mean() - 0.4) < 0.1
    if channels.dim() == 3:  # samples of a batch have masks of their own
        assert (channels[0] != channels[1]).any()


def test_dropout2d_drops_the_channels_that_torch_drops_of_three_axes():
    """``F.dropout2d`` reads (N, C, L): not one channel mask for all, as of an image without a batch axis."""
    pattern = "dropout2d: Received a 3D input"
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=pattern):
        theirs = nn.Dropout2d(0.5)(torch.ones(40, 30, 5))
    with SeededDropout(step_key(0, 0, 0, CPU)):
        found = nn.Dropout2d(0.5)(torch.ones(40, 30, 5))

    for dropped_of in (theirs, found):
        assert (dropped_of == dropped_of[..., :1]).all()
        assert 0.3 < (dropped_of[..., 0] == 0).double().mean() < 0.7
        assert 0 < (dropped_of[0, :, 0] == 0).double().mean() < 1


def test_in_place_dropout_changes_its_argument():
    values = torch.ones(100)
    with SeededDropout(step_key(0, 0, 0, CPU)):
        found = F.dropout(values, 0.5, inplace=True)

    assert found is values
    assert (values == 0).any()


def test_masks_of_models_side_by_side_equal_those_alone():
    seeds = torch.arange(5)

    def mask(seed):
        with SeededDropout(step_key(seed, 3, 1, CPU)):
            return F.dropout(torch.ones(7, 4), 0.5), F.dropout2d(torch.ones(2, 9, 2, 2), 0.5)

    together = torch.func.vmap(mask)(seeds)

    for place in range(5):
        for one, many in zip(mask(place), together, strict=True):
            assert torch.equal(one, many[place])


def dropping(seed):
    return nn.Sequential(
        nn.Linear(WIDTH, 9), nn.Dropout(0.4), nn.Linear(9, CLASSES), nn.Dropout(0.1)
    ).double()


def test_training_and_replay_leave_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)

    run = recipe(dropping).train()
    unrolled(run, targets(), margin)

    assert torch.equal(torch.rand(3), expected)


def test_a_step_of_a_replay_has_the_masks_of_the_training():
    run = recipe(dropping).train(checkpoints="all")

    again = run.states.get(3)
    for number in (3, 4):
        again = run.step(again, number)

    for name, value in flat(run.states.get(5)).items():
        assert torch.equal(flat(again)[name], value)
    other = recipe(dropping, seed=1).train()
    assert not torch.equal(other.final.parameters["0.weight"], run.final.parameters["0.weight"])


@pytest.mark.parametrize("keep", [True, False])
def test_trainings_side_by_side_have_the_masks_of_one_alone(keep):
    run = recipe(dropping).train()
    function = run.leave_out_fn if keep else run.recipe.train_fn
    subsets, seeds = [np.arange(1, N), np.arange(N - 1)], [0, 3]

    together = function.train_many(subsets, seeds)

    for rows, seed, many in zip(subsets, seeds, together, strict=True):
        for one, other in zip(function(rows, seed).parameters(), many.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


class Attention(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.layer, self.p = nn.Linear(WIDTH, CLASSES), p

    def forward(self, inputs):
        hidden = inputs.reshape(-1, 1, 2, 3)
        attended = F.scaled_dot_product_attention(hidden, hidden, hidden, dropout_p=self.p)
        return self.layer(attended.reshape(-1, WIDTH))


class MultiHead(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.attention = nn.MultiheadAttention(3, 1, dropout=p, batch_first=True)
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs):
        hidden = inputs.reshape(-1, 2, 3)
        return self.layer(self.attention(hidden, hidden, hidden)[0].reshape(-1, WIDTH))


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, CLASSES), function

    def forward(self, inputs):
        return self.layer(self.function(inputs))


REFUSED = {
    "alpha_dropout": nn.AlphaDropout(0.2),
    "feature_alpha_dropout": nn.FeatureAlphaDropout(0.2),
    "rrelu": nn.RReLU(),
    "bernoulli": lambda inputs: torch.bernoulli(inputs.sigmoid()),
    "gumbel_softmax": F.gumbel_softmax,
    "random numbers": lambda inputs: inputs + torch.randn(WIDTH, dtype=torch.float64),
    "random numbers ": lambda inputs: torch.dropout(inputs, 0.5, True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_random_operations_are_refused(name):
    with pytest.raises(UnsupportedModelError, match=name.strip()):
        recipe(lambda seed: Function(REFUSED[name]).double()).train()


@pytest.mark.parametrize(
    ("build", "name"), [(Attention, "scaled_dot_product"), (MultiHead, "multi_head_attention")]
)
def test_dropout_of_attention_is_refused_by_name(build, name):
    with pytest.raises(UnsupportedModelError, match=f"{name}.*dropout"):
        recipe(lambda seed: build(0.1).double()).train()
    assert recipe(lambda seed: build(0.0).double()).train().num_steps == 6


def test_losses_of_a_dropout_training_are_those_of_the_module():
    """One full step against plain torch with the masks of the key."""
    made = recipe(dropping, epochs=None, steps=1)
    inputs, labels = vectors(N, 0)
    rows = made.order(0, num_rows=N, seed=0)
    torch.manual_seed(0)
    model = dropping(0)
    with SeededDropout(step_key(0, 0, 0, CPU)):
        losses = loss(model, (inputs[rows], labels[rows]))
    losses.mean().backward()
    expected = [p.detach() - 0.2 * p.grad for p in model.parameters()]

    found = made.train().model()

    for one, other in zip(found.parameters(), expected, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=1e-12, atol=1e-14)
