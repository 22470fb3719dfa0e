"""Metasmoothness, 1 where weights follow row weights linearly and low in chaos; scores of a replay as scores."""

import warnings

import numpy as np
import pytest
import torch
from report_cases import in_a_notebook
from torch import nn
from unrolled_cases import CLASSES, TARGETS, WIDTH, N, changed, margin, mlp, recipe, replayed, targets

from trak_lite.errors import InvalidInputError, StateError
from trak_lite.methods import Unrolled
from trak_lite.unrolled import SGD, Adam, unrolled


def linear(seed):
    return nn.Linear(WIDTH, CLASSES).double()


def relu(seed):
    layers = [nn.Linear(WIDTH, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, CLASSES)]
    return nn.Sequential(*layers).double()


def pooled(seed):
    layers = [nn.Unflatten(1, (1, WIDTH)), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(WIDTH // 2, CLASSES)]
    return nn.Sequential(*layers).double()


def looked_up(seed):
    class Net(nn.Embedding):
        def forward(self, inputs):
            return super().forward((inputs > 0).long()).sum(1)

    return Net(2, CLASSES, sparse=True).double()


def test_a_chaotic_training_is_not_smooth_and_a_smooth_one_warns_of_nothing():
    run = recipe(relu, optimizer=SGD(lr=0.9, momentum=0.9), epochs=20).train()
    assert run.metasmoothness() < 0.7
    with pytest.warns(RuntimeWarning, match="metasmoothness 0.*GELU in place of ReLU"):
        unrolled(run, targets(), margin)
    run = recipe().train()
    assert run.metasmoothness() > 0.95
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replayed(run)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (recipe(relu), "GELU in place of ReLU, a smaller learning rate, larger batches"),
        (recipe(pooled), "average in place of max pooling, a smaller learning rate, larger batches"),
        (recipe(mlp, batch_size=N), "a smaller learning rate"),
        (recipe(looked_up), "a smaller learning rate, larger batches"),
        (recipe(linear, optimizer=Adam(0.1)), "a smaller learning rate, larger batches, a larger eps_root"),
    ],
)
def test_the_advice_names_what_the_training_has(made, expected):
    assert made.train().advice() == f"Smoother are: {expected}."


@pytest.mark.parametrize("h", [0.1, 0.02])
def test_the_value_is_that_of_three_trainings(h):
    made = recipe(mlp, optimizer=Adam(lr=0.05), epochs=4)
    weights = np.linspace(0.5, 1.5, N)
    direction = torch.randn(N, generator=torch.Generator().manual_seed(3)).double().numpy()

    def final(k):
        run = made.train(weights=weights + k * h * direction)
        return torch.cat([p.flatten() for p in run.final.parameters.values()])

    finals = [final(k) for k in range(3)]
    total = (finals[2] - finals[0]).abs()
    signs = (finals[1] - finals[0]).sign() * (finals[2] - finals[1]).sign()
    found = made.train(weights=weights).metasmoothness(h, seed=3)
    assert found == pytest.approx(float((signs * total / total.sum()).sum()), abs=1e-6)


@pytest.mark.quick
def test_the_usual_value_is_stored(tmp_path):
    """A stored value is returned although it cannot be computed any more; another one would fail."""
    built = []

    def build(seed):
        if len(built) == 40:
            raise ValueError("a training")
        built.append(seed)
        return mlp(seed)

    runs = [recipe(build).train(tmp_path), recipe(build).train()]
    first = runs[0].metasmoothness()
    assert runs[1].metasmoothness() == first
    assert recipe(build).train(tmp_path).metasmoothness(5.0, seed=1) != first
    again = recipe(build).train(tmp_path)
    built.extend([0] * (40 - len(built)))
    for run in (again, *runs):
        assert run.metasmoothness() == first
        with pytest.raises(ValueError, match="a training"):
            run.metasmoothness(seed=1)


def test_models_that_cannot_be_stacked_are_trained_one_after_the_other():
    class Branching(nn.Linear):
        def forward(self, inputs):
            found = super().forward(inputs)
            return found if float(found.sum().detach()) > 1e9 else 2 * found

    class Plain(nn.Linear):
        def forward(self, inputs):
            return 2 * super().forward(inputs)

    made = recipe(lambda seed: Branching(WIDTH, CLASSES).double())
    expected = changed(made, model_fn=lambda seed: Plain(WIDTH, CLASSES).double()).train().metasmoothness()
    assert made.train().metasmoothness() == pytest.approx(expected, abs=1e-9)


# --- Scores of a replay are ordinary scores ------------------------------------------------------------------
@pytest.fixture(scope="module", params=["disk", "memory"])
def scores(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") if request.param == "disk" else None
    return unrolled(recipe().train(path), targets(), margin, name="few")


@pytest.mark.quick
def test_values_and_order(scores):
    values = scores.numpy()
    assert scores.shape == (N, TARGETS) == values.shape
    assert values.dtype == np.float32
    np.testing.assert_array_equal(scores.top(3).indices, np.argsort(-values, axis=0)[:3].T)
    assert isinstance(scores.method, Unrolled)
    assert (scores.name, scores.settings["steps"], scores.verdict) == ("few", 6, None)
    assert scores.settings["metasmoothness"] == pytest.approx(recipe().train().metasmoothness(), abs=1e-4)
    for expected in ("'few'", f"{N} train rows x {TARGETS} targets", "metasmoothness=", "steps=6"):
        assert expected in repr(scores)
    assert in_a_notebook(scores.gallery([0], lambda row: f"row {row}", k=2)).elements
    with pytest.raises(InvalidInputError, match="few"):
        scores.top(1, target=99)


@pytest.mark.quick
def test_what_needs_stored_rows_says_so(scores):
    said = r"few.*(not computed from stored rows.*Attributor.featurize|verify_run.*methods.Unrolled)"
    asked = (scores.self_influence, lambda: scores.damping_path([0.1]), scores.standard_error)
    for call in (*asked, scores.reliability, scores.checkpoint_agreement, lambda: scores.run):
        with pytest.raises(StateError, match=said) as caught:
            call()
        assert "refine" not in str(caught.value)
