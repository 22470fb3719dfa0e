"""Methods as values: names, fields, defaults, and what is refused."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from tiny_runs import labelled
from torch import nn
from torch.utils.data import Subset

from trak_lite import Attributor, methods, what_if
from trak_lite.errors import InvalidInputError
from trak_lite.methods import (
    CG,
    EKFAC,
    TRAK,
    Fisher,
    GaussNewton,
    GradCos,
    GradDot,
    LiSSA,
    Mean,
    TracIn,
    Unrolled,
    as_method,
)
from trak_lite.modelout_functions import CallableModelOutput
from trak_lite.types import FeatureLayout, Segment

pytestmark = pytest.mark.quick

TWO = FeatureLayout((Segment("a", 0, 4), Segment("b", 4, 8)))
own = dataclasses.dataclass(frozen=True, kw_only=True)


@pytest.mark.parametrize("cls", methods.METHODS.values())
def test_a_method_its_name_and_its_json_are_the_same(cls):
    method = cls()
    assert as_method(method) is method
    assert as_method(cls.__name__) == method
    assert as_method(cls.__name__.lower()) == method
    assert as_method(method.to_json()) == method


class Curved(CallableModelOutput):
    has_curvature = True


class Drawing(CallableModelOutput):
    def sample_labels(self, model_call, batch, noise):
        return batch


@pytest.mark.parametrize(
    ("method", "task", "advised"),
    [
        (GaussNewton(), CallableModelOutput, ["TRAK"]),
        (GaussNewton(), Drawing, ["Fisher", "TRAK"]),
        (Fisher(), CallableModelOutput, ["TRAK"]),
        (Fisher(), Curved, ["GaussNewton", "TRAK"]),
    ],
)
def test_a_task_that_a_method_refuses_is_told_those_that_take_it(method, task, advised):
    made = task(lambda model_call, batch: model_call(batch[0]).sum(1))
    with pytest.raises(InvalidInputError, match="Use method=") as refused:
        method.check(made)
    assert re.findall(r"'(\w+)'", str(refused.value).rpartition("Use method=")[2]) == advised
    for name in advised:
        as_method(name).check(made)


@pytest.mark.parametrize(
    ("said", "call"),
    [
        ("Did you mean 'GaussNewton'", lambda: as_method("GausNewton")),
        ("a mapping with that name and fields", lambda: as_method({"damping": 1.0})),
        (r"Nearest known: \['damping'\]", lambda: as_method({"name": "EKFAC", "dampin": 1.0})),
        (r"Known: \['q', .*, 'scale'\]\.$", lambda: as_method({"name": "LiSSA", "zzzz": 1})),
        (r"Unknown fields of TracIn: \['q'\]", lambda: as_method({"name": "TracIn", "q": "off"})),
        ("got 3", lambda: as_method(3)),
        ("got None", lambda: as_method(None)),
        (r"Write GradDot\(\)", lambda: as_method(GradDot)),
        ("damping must be a finite number of at least 0", lambda: GaussNewton(damping=-1.0)),
        ("q must be one of", lambda: GaussNewton(q="somewhere")),
        ("layout must be one of", lambda: GaussNewton(layout="rows")),
        ("damping", lambda: TRAK(damping=float("nan"))),
        ("samples_per_feature", lambda: Fisher(samples_per_feature=0)),
        ("max_draws", lambda: Fisher(max_draws=-1)),
        ("would divide by zero", lambda: EKFAC(damping=0)),
        ("fisher must be one of", lambda: EKFAC(fisher="true")),
        ("draws", lambda: EKFAC(draws=0)),
        ("max_side", lambda: EKFAC(max_side=0)),
        ("max_rows", lambda: EKFAC(max_rows=0)),
        ("samples", lambda: EKFAC(samples=0)),
        ("damping must be above 0", lambda: CG(damping=0)),
        ("tolerance", lambda: CG(tolerance=0)),
        ("max_iterations", lambda: CG(max_iterations=0)),
        ("scale", lambda: LiSSA(scale=-1)),
        ("depth", lambda: LiSSA(depth=0)),
        ("checkpoint_weights", lambda: GradDot(checkpoint_weights=[0.0, 0.0])),
        ("finite numbers that are not all zero", lambda: GradDot(checkpoint_weights=())),
        ("finite", lambda: GradDot(checkpoint_weights=(1.0, float("nan")))),
        ("finite", lambda: GradDot(checkpoint_weights=3)),
        ("layout must be one of", lambda: GradCos(layout="rows")),
        ("learning_rates", lambda: TracIn(learning_rates=["a"])),
        ("learning_rates", lambda: TracIn(learning_rates=[])),
        ("learning_rates has 1 numbers, but 2 checkpoints", lambda: TracIn(learning_rates=[0.1]).weights(2)),
        ("two or more methods", lambda: Mean(GradDot())),
        ("must be a name", lambda: Mean(GradDot(), "GausNewton")),
        *(
            ("one per method", lambda weights=weights: Mean(GradDot(), GaussNewton(), method_weights=weights))
            for weights in ((1,), 1, np.array(1.0), torch.tensor(1.0), iter([1]))
        ),
        ("not all zero", lambda: Mean(GradDot(), GaussNewton(), method_weights=(0, 0))),
        ("takes finished runs", lambda: Unrolled()),
        ("takes finished runs", lambda: Unrolled("a run")),
    ],
)
def test_what_is_no_method_and_what_no_score_can_be_computed_with_are_refused(call, said):
    with pytest.raises(InvalidInputError, match=said):
        call()


def test_decided_settings_follow_the_layout_and_weights_are_one_per_checkpoint():
    one = FeatureLayout.joint(8)
    for method in (GaussNewton, GradCos):
        assert method(layout="joint").decided(one) == method().decided(one)
        assert method(layout="joint").decided(TWO) != method().decided(TWO)
    for make in (GaussNewton, Fisher, TRAK):
        method = make(damping=3.0)
        assert method.decided(TWO).damping == method.kernel.damping == 3.0
        assert make(damping=None).kernel.damping is None
    assert TRAK().kernel.damping == 0.0
    assert GradDot().weights(4) == (0.25,) * 4
    assert GradDot(checkpoint_weights=[1, -1]).weights(2) == (1.0, -1.0)
    assert TracIn(learning_rates=np.array([0.5, 0.25])).weights(2) == (0.5, 0.25)
    with pytest.raises(TypeError):
        TracIn(checkpoint_weights=[1.0])  # it has no second set of weights


def attributor(task="image_classification", **settings):
    torch.manual_seed(0)
    return Attributor(nn.Linear(4, 3), task, None, proj_dim=8, dtype="float32", **settings)


def linear(call, batch):
    return call(batch[0]).sum(1)


def test_the_attributors_method_is_the_default_of_its_calls():
    made = attributor(method=GradDot())
    made.featurize(labelled(20))
    assert made.method == made.score(labelled(20)).method == GradDot()
    assert made.score(labelled(20), "other", method="GradCos").method == GradCos()
    assert attributor(method={"name": "GaussNewton", "damping": 0.5}).method == GaussNewton(damping=0.5)
    assert isinstance(attributor(linear).method, TRAK)


def test_tracin_is_the_sum_of_products_with_loss_gradients():
    made, train, targets = attributor(projector="none"), labelled(20), labelled(5)
    states = [{name: p + number for name, p in nn.Linear(4, 3).state_dict().items()} for number in (0.0, 0.1)]
    made.featurize(train, states)
    found = made.score(targets, method=TracIn(learning_rates=[0.3, 0.1])).numpy()

    expected = np.zeros((20, 5))
    for rate, state in zip((0.3, 0.1), states, strict=True):
        model = nn.Linear(4, 3).double()
        model.load_state_dict(state)
        loss = [grad(nn.functional.cross_entropy(model(x.double())[None], y[None]), model) for x, y in train]
        p = [model(x.double()).softmax(0)[y] for x, y in targets]
        expected -= rate * np.array(loss) @ np.array([grad(torch.log(one / (1 - one)), model) for one in p]).T
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def grad(value, model):
    parts = torch.autograd.grad(value, list(model.parameters()))
    return torch.cat([part.reshape(-1) for part in parts]).numpy()


def test_the_version_of_a_method_belongs_to_its_identity():
    """Scores of changed code are not found again."""

    @own
    class Scaled(GradDot):
        def transform_targets(self, rows, layout):
            return rows if self.version == 1 else 2 * rows

    made = attributor()
    made.featurize(labelled(20))
    first = made.score(labelled(5), method=Scaled()).numpy()
    Scaled.version = 2
    assert Scaled().to_json()["version"] == 2
    np.testing.assert_array_equal(made.score(labelled(5), method=Scaled()).numpy(), 2 * first)


def test_a_method_that_writes_into_its_rows_changes_no_stored_row():
    """The rows of a store in memory are the tensors of the products, and self-influence transforms them twice."""

    @own
    class Doubled(GradDot):
        def transform(self, rows, layout):
            return rows.mul_(2)

    made, data = attributor(), labelled(20)
    made.featurize(data)
    plain = made.score(data, method=GradDot(), dense=False)
    before = plain.numpy()
    doubled = made.score(data, method=Doubled(), dense=False)
    for _ in range(2):
        np.testing.assert_array_equal(doubled.numpy(), 4 * before)
    np.testing.assert_array_equal(doubled.self_influence(), 4 * plain.self_influence())
    np.testing.assert_allclose(plain.self_influence(), before.diagonal(), rtol=1e-5)
    relabelled = what_if(doubled, relabel=([3, 5], Subset(data, [3, 5]))).predicted
    np.testing.assert_allclose(relabelled, 0, atol=1e-5 * abs(before).max())
    np.testing.assert_array_equal(plain.numpy(), before)


@pytest.mark.parametrize("name", ["transform", "transform_targets"])
def test_a_method_that_returns_rows_of_another_shape_is_named(name):
    kind = own(type("Halved", (GradDot,), {name: lambda self, rows, layout: rows[:, ::2]}))
    made, data = attributor(), labelled(20)
    made.featurize(data)
    with pytest.raises(InvalidInputError, match=rf"Halved\.{name} returned the shape"):
        made.score(data, method=kind(), dense=False).self_influence()


def test_the_identity_of_ekfac_without_samples_is_that_of_stores_from_before_the_field():
    fields = {
        "q": "inside",
        "checkpoint_weights": None,
        "damping": 1.0,
        "fisher": "auto",
        "draws": 1,
        "seed": 0,
    }
    fields |= {"name": "EKFAC", "correct_eigenvalues": True, "max_rows": None, "max_side": 16384}
    assert EKFAC().to_json() == fields
    sampled = EKFAC(samples=5)
    assert sampled.to_json() == {**fields, "samples": 5}
    assert as_method(sampled.to_json()) == sampled


def test_classes_of_a_users_own_that_cannot_be_computed_or_told_apart_are_refused():
    """Scores of a class with the name of another would be stored as, and taken for, those of the other one."""

    @own
    class Half(GradDot):
        def transform(self, rows, layout):
            return rows[:, ::2]

    @own
    class Both(GaussNewton):
        def transform(self, rows, layout):
            return 2 * rows

    made = attributor()
    made.featurize(labelled(20))
    namesake = own(type("GradDot", (GradDot,), {}))
    for method, said in (
        (Half(), "Half"),
        (Both(), r"Both has a kernel and overrides transform\(\)"),
        (namesake(), "rename the class"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            made.score(labelled(5), method=method)
    with pytest.raises(InvalidInputError, match="rename the class"):
        attributor(method=namesake())


@pytest.mark.parametrize("make", [tuple, iter, np.array, lambda weights: map(float, weights)])
def test_weights_of_methods_are_any_iterable(make):
    assert Mean(GradDot(), GaussNewton(), method_weights=make([1.0, 3.0])).method_weights == (0.25, 0.75)
