"""Methods as values: names, fields, defaults, and what is refused."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trak_lite import Attributor, methods, projectors
from trak_lite.errors import InvalidInputError
from trak_lite.projectors import PROJECTORS
from trak_lite.types import FeatureLayout, Segment

pytestmark = pytest.mark.quick

TWO = FeatureLayout((Segment("a", 0, 4), Segment("b", 4, 8)))


@pytest.mark.parametrize("cls", methods.METHODS.values())
def test_a_method_its_name_and_its_json_are_the_same(cls):
    method = cls()
    assert methods.as_method(method) is method
    assert methods.as_method(cls.__name__) == method
    assert methods.as_method(cls.__name__.lower()) == method
    assert methods.as_method(method.to_json()) == method


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("GausNewton", "Did you mean 'GaussNewton'"),
        ({"damping": 1.0}, "a mapping with that name and fields"),
        ({"name": "EKFAC", "dampin": 1.0}, "Nearest known: \\['damping'\\]"),
        (3, "got 3"),
        (None, "got None"),
    ],
)
def test_what_is_no_method_is_refused(given, said):
    with pytest.raises(InvalidInputError, match=said):
        methods.as_method(given)


@pytest.mark.parametrize(
    "make",
    [
        lambda: methods.GaussNewton(damping=-1.0),
        lambda: methods.GaussNewton(q="somewhere"),
        lambda: methods.GaussNewton(layout="rows"),
        lambda: methods.TRAK(damping=float("nan")),
        lambda: methods.Fisher(samples_per_feature=0),
        lambda: methods.Fisher(max_draws=-1),
        lambda: methods.EKFAC(damping=0),
        lambda: methods.EKFAC(fisher="true"),
        lambda: methods.EKFAC(max_rows=0),
        lambda: methods.GradDot(checkpoint_weights=[0.0, 0.0]),
        lambda: methods.GradCos(layout="rows"),
        lambda: methods.TracIn(learning_rates=["a"]),
        lambda: methods.TracIn(learning_rates=[]),
    ],
)
def test_values_that_no_score_can_be_computed_with_are_refused(make):
    with pytest.raises(InvalidInputError):
        make()


@pytest.mark.parametrize("damping", [None, 3.0])
def test_the_damping_depends_on_the_kernel_alone(damping):
    for make in (methods.GaussNewton, methods.Fisher, methods.TRAK):
        method = make(damping=damping)
        assert method.decided(TWO).damping == damping
        assert method.kernel.damping == damping
    assert methods.TRAK().kernel.damping == 0.0


def test_one_segment_has_one_reading():
    one = FeatureLayout.joint(8)
    assert methods.GaussNewton(layout="joint").decided(one) == methods.GaussNewton().decided(one)
    assert methods.GradCos(layout="joint").decided(one) == methods.GradCos().decided(one)


def test_weights_are_one_per_checkpoint():
    assert methods.GradDot().weights(4) == (0.25,) * 4
    assert methods.GradDot(checkpoint_weights=[1, -1]).weights(2) == (1.0, -1.0)
    assert methods.TracIn(learning_rates=np.array([0.5, 0.25])).weights(2) == (0.5, 0.25)
    with pytest.raises(InvalidInputError, match="learning_rates has 1 numbers, but 2 checkpoints"):
        methods.TracIn(learning_rates=[0.1]).weights(2)


def test_tracin_has_no_second_set_of_weights():
    with pytest.raises(TypeError):
        methods.TracIn(checkpoint_weights=[1.0])


def data(count=20):
    torch.manual_seed(0)
    return TensorDataset(torch.randn(count, 4), torch.randint(2, (count,)))


def attributor(task="image_classification", **settings):
    torch.manual_seed(0)
    return Attributor(nn.Linear(4, 2), task, None, proj_dim=8, dtype="float32", **settings)


def test_a_kernel_and_a_transform_do_not_go_together():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Both(methods.GaussNewton):
        def transform(self, rows, layout):
            return 2 * rows

    made = attributor()
    made.featurize(data())
    with pytest.raises(InvalidInputError, match=r"Both has a kernel and overrides transform\(\)"):
        made.score(data(), method=Both())


def test_the_attributors_method_is_the_default_of_its_calls():
    made = attributor(method=methods.GradDot())
    made.featurize(data())
    assert made.method == made.score(data()).method == methods.GradDot()
    assert made.score(data(), "other", method="GradCos").method == methods.GradCos()


def test_a_mapping_chooses_fields():
    made = attributor(method={"name": "GaussNewton", "damping": 0.5})
    assert made.method == methods.GaussNewton(damping=0.5)


def test_a_task_without_curvature_refuses_gauss_newton():
    def f(call, batch):
        return call(batch[0]).sum(1)

    with pytest.raises(InvalidInputError, match="GaussNewton needs a loss that is curved in f"):
        attributor(f, method="GaussNewton")
    assert isinstance(attributor(f).method, methods.TRAK)


def test_tracin_is_the_sum_of_products_with_loss_gradients(tmp_path):
    made, train = attributor(projector="none"), data()
    states = [{name: p + number for name, p in nn.Linear(4, 2).state_dict().items()} for number in (0.0, 0.1)]
    made.featurize(train, states)
    found = made.score(data(5), method=methods.TracIn(learning_rates=[0.3, 0.1])).numpy()

    expected = np.zeros((20, 5))
    for rate, state in zip((0.3, 0.1), states, strict=True):
        model = nn.Linear(4, 2).double()
        model.load_state_dict(state)
        own, loss = [], []
        for sample in range(20):
            x, y = train[sample]
            logits = model(x.double())
            loss.append(grad(nn.functional.cross_entropy(logits[None], y[None]), model))
        for sample in range(5):
            x, y = data(5)[sample]
            probability = model(x.double()).softmax(0)[y]
            own.append(grad(torch.log(probability / (1 - probability)), model))
        expected -= rate * np.array(loss) @ np.array(own).T
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def grad(value, model):
    return torch.cat(
        [part.reshape(-1) for part in torch.autograd.grad(value, list(model.parameters()))]
    ).numpy()


def test_names_of_tables_are_exported():
    assert set(methods.METHODS) <= set(methods.__all__)
    classes = [getattr(factory, "func", factory) for factory in PROJECTORS.values()]
    assert {cls.__name__ for cls in classes if isinstance(cls, type)} <= set(projectors.__all__)


def test_a_class_in_place_of_an_object_is_named():
    with pytest.raises(InvalidInputError, match=r"Write GradDot\(\)"):
        methods.as_method(methods.GradDot)


def test_the_version_of_a_method_belongs_to_its_identity():
    """Scores of changed code are not found again."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Scaled(methods.GradDot):
        def transform_targets(self, rows, layout):
            return rows if self.version == 1 else 2 * rows

    made = attributor()
    made.featurize(data())
    first = made.score(data(5), method=Scaled()).numpy()
    Scaled.version = 2
    assert Scaled().to_json()["version"] == 2
    np.testing.assert_array_equal(made.score(data(5), method=Scaled()).numpy(), 2 * first)


def test_a_transform_that_changes_the_shape_is_refused():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Half(methods.GradDot):
        def transform(self, rows, layout):
            return rows[:, ::2]

    made = attributor()
    made.featurize(data())
    with pytest.raises(InvalidInputError, match="Half"):
        made.score(data(5), method=Half())


def test_a_class_with_the_name_of_a_method_of_the_package_is_refused():
    """Its scores would be stored as, and taken for, those of the other one."""
    own = dataclasses.dataclass(frozen=True, kw_only=True)(type("GradDot", (methods.GradDot,), {}))
    with pytest.raises(InvalidInputError, match="rename the class"):
        attributor(method=own())
