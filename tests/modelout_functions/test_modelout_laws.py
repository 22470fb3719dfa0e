"""Every registered model output function obeys the laws of the public kit."""

import pytest
from modelout_cases import BUILDERS, CASES
from post_training_cases import POST_TRAINING

from trak_lite.modelout_functions import MODEL_OUTPUTS
from trak_lite.testing.modelout import ModelOutputCase, ModelOutputTests

ALL = {**CASES, **POST_TRAINING}
BY_NAME = {
    f"{name}-{variant}": build for name, some in ALL.items() for variant, build in some.items()
} | BUILDERS


class TestBuiltInModelOutputs(ModelOutputTests):
    @pytest.fixture(params=sorted(BY_NAME))
    def case(self, request: pytest.FixtureRequest) -> ModelOutputCase:
        return BY_NAME[request.param]()


def test_every_registered_task_has_a_case():
    assert set(ALL) == set(MODEL_OUTPUTS)
    for name, builders in ALL.items():
        for build in builders.values():
            assert type(build().task) is MODEL_OUTPUTS[name]


def test_the_kit_asks_for_a_case():
    with pytest.raises(NotImplementedError, match="must define make_case"):
        ModelOutputTests().make_case()
