"""Every registered model output function obeys the laws of the public kit, and the hook computer takes all of them.

tests/goldens holds the terms of every case.
"""

import contextlib
import dataclasses

import pytest
import torch
from modelout_cases import check_gradients, identity_of
from post_training_cases import BY_NAME
from torch import nn

from trak_lite.gradient_computers import HookGradientComputer
from trak_lite.modelout_functions import (
    MODEL_OUTPUTS,
    BinaryClassificationModelOutput,
    CallableModelOutput,
    DiffusionModelOutput,
    ModelCall,
    QuestionsModelOutput,
)
from trak_lite.testing import ModelOutputCase, ModelOutputTests


def skip_unless_labels_are_named(case):
    if isinstance(case.task, DiffusionModelOutput) and isinstance(case.batch, tuple):
        pytest.skip("targets are drawn for batches with named columns only")


class TestBuiltInModelOutputs(ModelOutputTests):
    @pytest.fixture(params=sorted(BY_NAME))
    def case(self, request):
        return BY_NAME[request.param]()

    def test_output_gradient_passes_gradcheck(self, case):
        """Stands here because the standard tier takes some of the cases only."""
        super().test_output_gradient_passes_gradcheck(case)

    def test_the_mean_gradient_over_drawn_labels_is_zero(self, case):
        skip_unless_labels_are_named(case)
        super().test_the_mean_gradient_over_drawn_labels_is_zero(case)

    def test_drawn_labels_of_a_sample_are_a_function_of_its_noise(self, case):
        skip_unless_labels_are_named(case)
        super().test_drawn_labels_of_a_sample_are_a_function_of_its_noise(case)

    def test_the_hook_computer_gives_the_gradients_of_the_plain_loss(self, case):
        """Row by row, times minus q."""
        computer = HookGradientComputer(case.model, case.task)
        check_gradients(computer, case.batch, -case.loss(case.model, case.batch), rtol=1e-9, atol=1e-12)

    def test_a_task_made_again_from_its_settings_is_the_same(self, case):
        """As a store makes its task again."""
        task = case.task
        if task.name in ("", "callable", "clip"):
            pytest.skip("a function has no settings, and CLIP's negatives are no setting")
        again = type(task)(**task.settings())
        assert identity_of(again) == identity_of(task)
        terms = (one.evaluate(ModelCall(case.model), case.batch) for one in (again, task))
        assert all(map(torch.equal, *terms))


def test_every_registered_task_has_a_case():
    assert {name.split("-")[0] for name in BY_NAME} == {*MODEL_OUTPUTS, "callable"} - {"classification"}
    for name, build in BY_NAME.items():
        assert name == "callable" or type(build().task) is MODEL_OUTPUTS[name.split("-")[0]]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_kit_notices_labels_of_another_distribution(is_wrong):
    class Binary(BinaryClassificationModelOutput):
        def sample_labels(self, model_call, batch, noise):
            return super().sample_labels(
                model_call, batch, lambda shape: noise(shape).pow(2) if is_wrong else noise(shape)
            )

    built = BY_NAME["binary_classification-flat"]()
    with pytest.raises(pytest.fail.Exception) if is_wrong else contextlib.nullcontext():
        ModelOutputTests().test_the_mean_gradient_over_drawn_labels_is_zero(
            dataclasses.replace(built, task=Binary())
        )


@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_kit_notices_that_a_focal_loss_is_no_likelihood(gamma, seed):
    def loss(model, batch):
        margins = (2 * batch[1] - 1) * model(batch[0])
        return -((-margins).sigmoid() ** gamma * nn.functional.logsigmoid(margins)).sum(1)

    class Focal(CallableModelOutput):
        def sample_labels(self, model_call, batch, noise):
            return batch[0], (noise((3,)) < model_call(batch[0]).sigmoid()).double()

    torch.manual_seed(seed)
    batch = (torch.randn(5, 4).double(), torch.randint(2, (5, 3)).double())
    task = Focal(lambda model_call, batch: -loss(model_call, batch))
    case = ModelOutputCase(task, nn.Linear(4, 3).double(), batch, loss, torch.neg)
    with pytest.raises(pytest.fail.Exception, match="no negative log") if gamma else contextlib.nullcontext():
        ModelOutputTests().test_the_mean_gradient_over_drawn_labels_is_zero(case)


class Binary(BinaryClassificationModelOutput):
    pass


class Thrice(Binary):
    def evaluate(self, model_call, batch):
        terms = super().evaluate(model_call, batch)
        return terms._replace(output=3 * terms.output)


class Likely(Binary):
    def log_likelihood(self):
        return Binary()


class ThriceLikely(Binary):
    def log_likelihood(self):
        return Thrice()


class TrainedThrice(Binary):
    def train_task(self):
        return Thrice()


class Asked(QuestionsModelOutput):
    def __init__(self):
        super().__init__(Binary(), {"thrice": Thrice()})


class DrawnByTorch(Binary):
    """From the generator of torch, whatever the noise."""

    def sample_labels(self, model_call, batch, noise):
        return super().sample_labels(model_call, batch, lambda shape: torch.rand(len(batch[1]), *shape))


class OfAnotherRow(Binary):
    def sample_labels(self, model_call, batch, noise):
        return super().sample_labels(model_call, batch, lambda shape: noise(shape).flip(0))


@pytest.mark.parametrize(
    ("law", "wrong", "right"),
    [
        ("test_the_log_likelihood_has_the_gradient_of_log_p", ThriceLikely, Likely),
        ("test_the_train_task_has_the_terms_of_the_task", TrainedThrice, Asked),
        ("test_drawn_labels_of_a_sample_are_a_function_of_its_noise", DrawnByTorch, Binary),
        ("test_drawn_labels_of_a_sample_are_a_function_of_its_noise", OfAnotherRow, Binary),
    ],
)
def test_the_kit_notices_another_log_likelihood_train_task_and_labels_of_other_noise(law, wrong, right):
    built = dataclasses.replace(BY_NAME["binary_classification-flat"](), log_likelihood=None)
    getattr(ModelOutputTests(), law)(dataclasses.replace(built, task=right()))
    with pytest.raises(AssertionError):
        getattr(ModelOutputTests(), law)(dataclasses.replace(built, task=wrong()))


def test_a_confident_model_draws_no_rare_label():
    built = BY_NAME["binary_classification-flat"]()
    with torch.no_grad():
        list(built.model.parameters())[-1].add_(9.0)
    ModelOutputTests().test_the_mean_gradient_over_drawn_labels_is_zero(built)


def test_the_kit_asks_for_a_case():
    with pytest.raises(NotImplementedError, match="must define make_case"):
        ModelOutputTests().make_case()
