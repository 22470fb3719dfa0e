"""Optimizers make the same steps as those of torch, and are functions of their arguments alone."""

import copy

import pytest
import torch
from unrolled_cases import mlp, recipe

from trak_lite.errors import InvalidInputError
from trak_lite.unrolled import SGD, Adam, AdamW
from trak_lite.unrolled.program import Program

pytestmark = pytest.mark.quick

PAIRS = [
    (SGD(lr=0.1), torch.optim.SGD, {"lr": 0.1}),
    (SGD(lr=0.1, weight_decay=0.3), torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.3}),
    (SGD(lr=0.1, momentum=0.9), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (
        SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.3),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.3},
    ),
    (Adam(lr=0.1, eps_root=0), torch.optim.Adam, {"lr": 0.1}),
    (
        Adam(lr=0.1, eps_root=0, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3),
        torch.optim.Adam,
        {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.3},
    ),
    (AdamW(lr=0.1, eps_root=0), torch.optim.AdamW, {"lr": 0.1}),
    (
        AdamW(lr=0.1, eps_root=0, weight_decay=0.3, betas=(0.0, 0.9)),
        torch.optim.AdamW,
        {"lr": 0.1, "weight_decay": 0.3, "betas": (0.0, 0.9)},
    ),
]


@pytest.mark.parametrize("cls", [SGD, Adam, AdamW])
def test_the_learning_rate_is_the_first_argument(cls):
    assert cls(0.1) == cls(lr=0.1)
    assert cls(0.1, weight_decay=0.3).weight_decay == 0.3
    with pytest.raises(TypeError, match="positional"):
        cls(0.1, 0.9)  # the momentum of torch's SGD, the betas of its Adam


def shaped_like(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in parameters.items()}


@pytest.mark.parametrize("clip_norm", [None, 1.0, 7.0, 1e6])
@pytest.mark.parametrize(("ours", "theirs", "settings"), PAIRS)
def test_steps_equal_those_of_torch(ours, theirs, settings, clip_norm):
    """Gradients have norms around 10 for 73 coordinates: one bound always clips, one sometimes, one never."""
    model = mlp(0)
    reference = copy.deepcopy(model)
    optimizer = theirs(reference.parameters(), **settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    program = Program(
        recipe(optimizer=ours, clip_norm=clip_norm, schedule=lambda step: 1 / (1 + step)), model
    )
    state, _ = program.start(model)

    for number in range(7):
        gradients = shaped_like(state.parameters, number)
        state = program.update(state, gradients, number)
        for name, parameter in reference.named_parameters():
            parameter.grad = gradients[name].clone()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), clip_norm)
        optimizer.step()
        schedule.step()

    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(state.parameters[name], parameter.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("optimizer", [pair[0] for pair in PAIRS])
def test_a_step_changes_none_of_its_arguments(optimizer):
    parameters = {"a": torch.randn(3), "b": torch.randn(2, 2)}
    state = optimizer.step(optimizer.start(parameters), shaped_like(parameters, 0), factor=1.0, number=0)
    before = copy.deepcopy(state)
    gradients = shaped_like(parameters, 1)

    one = optimizer.step(state, gradients, factor=0.5, number=1)
    again = optimizer.step(state, gradients, factor=0.5, number=1)

    torch.testing.assert_close(tuple(state), tuple(before), rtol=0, atol=0)
    torch.testing.assert_close(tuple(one), tuple(again), rtol=0, atol=0)
    torch.testing.assert_close(gradients, shaped_like(parameters, 1), rtol=0, atol=0)


def test_eps_root_is_added_under_the_root():
    gradient = torch.tensor([0.0, 1e-4, 3.0], dtype=torch.float64)
    made = Adam(lr=1.0, eps_root=1e-4, eps=0.0)
    start = made.start({"a": torch.zeros(3, dtype=torch.float64)})

    found = made.step(start, {"a": gradient}, factor=1.0, number=0).parameters["a"]

    torch.testing.assert_close(found, -gradient / (gradient**2 + 1e-4).sqrt(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(lr=-1.0), "lr"),
        (lambda: SGD(lr=float("nan")), "lr"),
        (lambda: SGD(lr=0.1, momentum=-0.1), "momentum"),
        (lambda: SGD(lr=0.1, nesterov=True), "needs momentum"),
        (lambda: SGD(lr=0.1, weight_decay=-1.0), "weight_decay"),
        (lambda: Adam(lr=0.1, betas=(0.9, 1.0)), "betas"),
        (lambda: Adam(lr=0.1, betas=(0.9,)), "betas"),
        (lambda: Adam(lr=0.1, eps=-1.0), "eps"),
        (lambda: Adam(lr=0.1, eps_root=-1.0), "eps_root"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(InvalidInputError, match=message):
        make()


def test_settings_are_json_values():
    assert SGD(lr=0.1).to_json() == {
        "name": "SGD", "lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False,
    }  # fmt: skip
    assert AdamW(lr=0.1).to_json()["betas"] == [0.9, 0.999]
    assert Adam(lr=0.1, weight_decay=0.01).to_json() != AdamW(lr=0.1).to_json()
