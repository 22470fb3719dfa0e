"""Every registered model output function obeys the laws of the public kit, and the hook computer takes all of them."""

from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from modelout_cases import BUILDERS, Answer, D, check_gradients, identity_of, prepared
from post_training_cases import POST_TRAINING, Denoiser, seen_by

from trak_lite.gradient_computers import HookGradientComputer
from trak_lite.modelout_functions import MODEL_OUTPUTS, DiffusionModelOutput, ModelCall
from trak_lite.testing import ModelOutputCase, ModelOutputTests

BY_NAME = {**BUILDERS, **POST_TRAINING}


class TestBuiltInModelOutputs(ModelOutputTests):
    @pytest.fixture(params=sorted(BY_NAME))
    def case(self, request: pytest.FixtureRequest) -> ModelOutputCase:
        return BY_NAME[request.param]()

    def test_output_gradient_passes_gradcheck(self, case: ModelOutputCase) -> None:
        """Stands here because the standard tier takes some of the cases only."""
        super().test_output_gradient_passes_gradcheck(case)

    def test_the_hook_computer_gives_the_gradients_of_the_plain_loss(self, case: ModelOutputCase) -> None:
        """Row by row, times minus q."""
        computer = HookGradientComputer(case.model, case.task)
        check_gradients(computer, case.batch, -case.loss(case.model, case.batch), rtol=1e-9, atol=1e-12)

    def test_a_task_made_again_from_its_settings_is_the_same(self, case: ModelOutputCase) -> None:
        """As a store makes its task again."""
        task = case.task
        if task.name in ("", "callable", "clip"):
            pytest.skip("a function has no settings, and CLIP's negatives are no setting")

        again = type(task)(**task.settings())

        assert identity_of(again) == identity_of(task)
        for one, other in zip(
            again.evaluate(ModelCall(case.model), case.batch),
            task.evaluate(ModelCall(case.model), case.batch),
            strict=True,
        ):
            assert torch.equal(one, other)


def test_every_registered_task_has_a_case() -> None:
    assert {name.split("-")[0] for name in BY_NAME} == {*MODEL_OUTPUTS, "callable"}
    for name, build in BY_NAME.items():
        assert name == "callable" or type(build().task) is MODEL_OUTPUTS[name.split("-")[0]]


def test_the_kit_asks_for_a_case() -> None:
    with pytest.raises(NotImplementedError, match="must define make_case"):
        ModelOutputTests().make_case()


# The noise of denoisers


def splitmix(number: int) -> int:
    """The mix of SplitMix64 in whole numbers of Python."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % 2**64
    return number ^ (number >> 31)


def uniforms(seed: int, stream: int, count: int) -> list[float]:
    step = 0x9E3779B97F4A7C15
    start = splitmix((splitmix((seed + step) % 2**64) + (stream + 1) * step) % 2**64)
    return [((splitmix((start + i * step) % 2**64) >> 41) + 0.5) / 2**23 for i in range(1, count + 1)]


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, -1, -(2**63)])
def test_timesteps_and_noise_of_a_seed_are_those_of_splitmix64(seed: int) -> None:
    """Draw d takes its timestep from stream 2 d and its noise from the next one."""
    clean = torch.zeros(2, D, dtype=torch.float64)
    task = DiffusionModelOutput(schedule=[0.0] * 10, draws=3)
    seen = seen_by(prepared(Denoiser()), task, {"sample": clean, "seed": torch.tensor([5, seed])})
    for draw, (noise, steps) in enumerate(seen):
        assert int(steps[1]) == int(uniforms(seed, 2 * draw, 1)[0] * 10)
        expected = [NormalDist().inv_cdf(value) for value in uniforms(seed, 2 * draw + 1, D)]
        np.testing.assert_allclose(noise[1], expected, rtol=1e-4, atol=1e-5)


def levels_of(schedule: Any, count: int) -> np.ndarray:
    """What a task multiplies clean samples by, squared, at every timestep."""
    task = DiffusionModelOutput(schedule=schedule, num_steps=count)
    sides = [
        seen_by(
            Answer(torch.zeros(count, 1)),
            task,
            {
                "sample": torch.full((count, 1), value).double(),
                "seed": torch.zeros(count).long(),
                "timestep": torch.arange(count),
            },
        )[0][0]
        for value in (0.0, 1.0)
    ]
    return (sides[1] - sides[0])[:, 0].square().numpy()


def test_schedules_are_those_of_the_papers() -> None:
    betas = np.linspace(1e-4, 0.02, 1000)
    np.testing.assert_allclose(levels_of("linear", 1000), np.cumprod(1 - betas), rtol=1e-9)
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    np.testing.assert_allclose(levels_of("scaled_linear", 1000), np.cumprod(1 - betas), rtol=1e-9)
    bars = np.cos((np.arange(51) / 50 + 0.008) / 1.008 * np.pi / 2) ** 2
    betas = np.minimum(1 - bars[1:] / bars[:-1], 0.999)
    np.testing.assert_allclose(levels_of("cosine", 50), np.cumprod(1 - betas), rtol=1e-6)
    np.testing.assert_allclose(levels_of([0.9, 0.5], 2), [0.9, 0.5], rtol=1e-12)
    given = DiffusionModelOutput(schedule=[0.9, 0.5])
    assert (given.num_steps, given.settings()["schedule"]) == (2, [0.9, 0.5])
