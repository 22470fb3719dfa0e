"""Dropout masks are those of a key: right in distribution, the same in every repetition, refused where impossible."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from unrolled_cases import CLASSES, WIDTH, N, dropping, loss, recipe, replayed

from trak_lite.errors import UnsupportedModelError

pytestmark = pytest.mark.quick


def drawn(*functions, **settings):
    """What functions return in a loss: at every step of a training, and in every part of its batch."""
    seen = []

    def noting(model, batch):
        seen.append([function() for function in functions])
        return loss(model, batch)

    recipe(loss_fn=noting, **{"epochs": None, "steps": 1, **settings}).train()
    return seen[4:]  # the first four calls only try the loss


def dropped(function, shape, p):
    ((found,),) = drawn(lambda: function(torch.ones(shape, dtype=torch.float64), p))
    return found


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


def test_extreme_rates_and_in_place():
    values = torch.ones(100)
    ((kept, lost, evaluated, changed),) = drawn(
        lambda: F.dropout(torch.ones(50), 0.0),
        lambda: F.dropout(torch.ones(50), 1.0),
        lambda: F.dropout(torch.ones(50), 0.5, training=False),
        lambda: F.dropout(values, 0.5, inplace=True),
    )
    assert (kept == 1).all()
    assert (lost == 0).all()
    assert (evaluated == 1).all()
    assert changed is values
    assert (values == 0).any()


def test_masks_differ_by_seed_step_part_and_call_and_are_repeatable():
    def mask():
        return (F.dropout(torch.ones(4000), 0.5) == 0).numpy()

    def masks(seed):
        return [one for both in drawn(mask, mask, seed=seed, steps=2, accumulate=2) for one in both]

    found = [one for seed in (0, 1, -1, 2**62) for one in masks(seed)]
    assert len(found) == 4 * 8
    for place, one in enumerate(found):
        for other in found[:place]:
            assert abs((one == other).mean() - 0.5) < 0.05
    np.testing.assert_array_equal(masks(0), found[:8])


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
    ((found,),) = drawn(lambda: layer(0.4)(torch.ones(shape)))
    axes = {nn.Dropout1d: 3, nn.Dropout2d: 4, nn.Dropout3d: 5}[layer]
    channels = found.reshape(*shape[: len(shape) - axes + 2], -1)
    assert (channels == channels[..., :1]).all()
    assert abs((channels[..., 0] == 0).double().mean() - 0.4) < 0.1
    if channels.dim() == 3:  # samples of a batch have masks of their own
        assert (channels[0] != channels[1]).any()


def test_dropout2d_drops_the_channels_that_torch_drops_of_three_axes():
    """``F.dropout2d`` reads (N, C, L): not one channel mask for all, as of an image without a batch axis."""
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="dropout2d: Received a 3D input"):
        theirs = nn.Dropout2d(0.5)(torch.ones(40, 30, 5))
    for found in (theirs, dropped(F.dropout2d, (40, 30, 5), 0.5)):
        assert (found == found[..., :1]).all()
        assert 0.3 < (found[..., 0] == 0).double().mean() < 0.7
        assert 0 < (found[0, :, 0] == 0).double().mean() < 1


def test_training_and_replay_leave_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    replayed(recipe(dropping).train())
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("keep", [True, False])
def test_trainings_side_by_side_have_the_masks_of_one_alone(keep):
    run = recipe(dropping).train()
    function = run.leave_out_fn if keep else run.recipe.train_fn
    subsets, seeds = [np.arange(1, N), np.arange(N - 1)], [0, 3]
    together = function.train_many(subsets, seeds)
    for rows, seed, many in zip(subsets, seeds, together, strict=True):
        alone = function(rows, seed).state_dict()
        torch.testing.assert_close(alone, many.state_dict(), rtol=1e-9, atol=1e-12)


def attention(p):
    def attend(inputs):
        hidden = inputs.reshape(-1, 1, 2, 3)
        return F.scaled_dot_product_attention(hidden, hidden, hidden, dropout_p=p).reshape(-1, WIDTH)

    return attend


class MultiHead(nn.MultiheadAttention):
    def __init__(self, p):
        super().__init__(3, 1, dropout=p, batch_first=True)

    def forward(self, inputs):
        hidden = inputs.reshape(-1, 2, 3)
        return super().forward(hidden, hidden, hidden)[0].reshape(-1, WIDTH)


class After(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, CLASSES), function

    def forward(self, inputs):
        return self.layer(self.function(inputs))


REFUSED = [
    ("alpha_dropout", nn.AlphaDropout(0.2)),
    ("feature_alpha_dropout", nn.FeatureAlphaDropout(0.2)),
    ("rrelu", nn.RReLU()),
    ("bernoulli", lambda inputs: torch.bernoulli(inputs.sigmoid())),
    ("gumbel_softmax", F.gumbel_softmax),
    ("random numbers", lambda inputs: inputs + torch.randn(WIDTH, dtype=torch.float64)),
    ("random numbers", lambda inputs: torch.dropout(inputs, 0.5, True)),
    ("scaled_dot_product.*dropout", attention(0.1)),
    ("multi_head_attention.*dropout", MultiHead(0.1)),
]


@pytest.mark.parametrize(("name", "function"), REFUSED)
def test_other_random_operations_are_refused_by_name(name, function):
    with pytest.raises(UnsupportedModelError, match=name):
        recipe(lambda seed: After(function).double()).train()


@pytest.mark.parametrize("function", [attention(0.0), MultiHead(0.0), nn.AlphaDropout(0.2).eval()])
def test_what_draws_nothing_is_trained(function):
    assert recipe(lambda seed: After(function).double()).train().num_steps == 6
