"""Every gradient computer against a plain loop over autograd, one sample at a time, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import reference
import torch
from models import Build, Forward, SparseEmbeddings, assert_same, by_loop
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from trak_lite.errors import InvalidInputError, UnsupportedModelError
from trak_lite.gradient_computers import (
    GRADIENT_COMPUTERS,
    AbstractGradientComputer,
    FunctionalGradientComputer,
    IterativeGradientComputer,
    choose_gradient_computer,
    collect_gradients,
    select_parameters,
)
from trak_lite.modelout_functions import resolve_task
from trak_lite.types import DenseBlock, GradientBlock

Computer = Callable[..., AbstractGradientComputer]
MARGIN = resolve_task("image_classification")


class TiedAutoencoder(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(5, 5)
        self.decode = nn.Linear(5, 5)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.encode(x)))


class WithScale(nn.Module):
    """A parameter without dimensions, one that f ignores, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.ignored = nn.Parameter(torch.ones(3))
        self.linear = nn.Linear(5, 5)
        self.register_buffer("shift", torch.arange(5.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.linear(x + self.shift)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 5), nn.Dropout(0.5)
    )


MODELS: dict[str, tuple[Build, tuple[int, ...]]] = {
    "cnn with eval batch norm and dropout": (cnn, (1, 5, 5)),
    "tied weights": (TiedAutoencoder, (5,)),
    "scalar parameter, unused parameter, buffer": (WithScale, (5,)),
}
COMPUTERS: dict[str, Computer] = {
    **GRADIENT_COMPUTERS,
    **{f"{name} by chunks": partial(cls, chunk_size=2) for name, cls in GRADIENT_COMPUTERS.items()},
}
every_computer = pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS)


def make(name: str = "tied weights", dtype: torch.dtype = torch.float64) -> tuple[Any, tuple[Tensor, Tensor]]:
    """A model in eval mode and five labelled samples, of seed 0."""
    torch.manual_seed(0)
    build, shape = MODELS[name]
    return build().to(dtype).eval(), (torch.randn(5, *shape, dtype=dtype), torch.randint(5, (5,)))


def margin_of(call: Callable[..., Tensor], batch: Any) -> Tensor:
    return reference.margin(call(batch[0]), batch[1])


@pytest.mark.parametrize("computer", COMPUTERS.values(), ids=COMPUTERS)
@pytest.mark.parametrize("name", MODELS)
def test_row_i_is_the_gradient_of_sample_i_alone_beside_f_q_and_w(name: str, computer: Computer) -> None:
    model, batch = make(name)
    expected = by_loop(model, margin_of, batch)
    made = computer(model, MARGIN)

    grads = collect_gradients(made, batch)
    assert_same(grads, expected)
    assert not any(grad.requires_grad for grad in grads.values())

    order = torch.tensor([3, 0, 4])
    part = collect_gradients(made, (batch[0][order], batch[1][order]))
    assert_same(part, {name: value[order] for name, value in expected.items()})

    terms, logits = made.stream_gradients(batch, lambda _: None), model(batch[0])
    np.testing.assert_allclose(terms.output, margin_of(model, batch).detach(), rtol=1e-12)
    np.testing.assert_allclose(
        terms.out_to_loss_grad, reference.out_to_loss_grad(logits, batch[1]), rtol=1e-10
    )
    np.testing.assert_allclose(terms.loss_curvature, reference.loss_curvature(logits, batch[1]), rtol=1e-10)


@every_computer
def test_an_empty_batch_gives_empty_blocks(computer: Computer) -> None:
    model, (images, labels) = make()
    blocks: list[Any] = []

    terms = computer(model, MARGIN).stream_gradients((images[:0], labels[:0]), blocks.append)

    assert terms.output.shape == (0,)
    assert {block.name: tuple(block.grad.shape) for block in blocks} == {
        name: (0, *p.shape) for name, p in model.named_parameters()
    }


@every_computer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_keep_the_dtype_of_the_model(computer: Computer, dtype: torch.dtype) -> None:
    """The original's iterative computer returns float32 for a float64 model."""
    model, batch = make(dtype=dtype)

    assert {grad.dtype for grad in collect_gradients(computer(model, MARGIN), batch).values()} == {dtype}


@every_computer
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_changes_the_forward_pass_and_not_the_dtype(
    computer: Computer, autocast: torch.dtype
) -> None:
    model, batch = make(dtype=torch.float32)

    exact = collect_gradients(computer(model, MARGIN), batch)
    half = collect_gradients(computer(model, MARGIN, autocast_dtype=autocast), batch)

    for name, grad in half.items():
        assert grad.dtype == torch.float32
        assert not torch.equal(grad, exact[name])
        torch.testing.assert_close(grad, exact[name], rtol=0.1, atol=0.05)


# Which parameters


@every_computer
def test_parameters_that_require_grad_are_kept_and_frozen_ones_if_asked_for(computer: Computer) -> None:
    """The original's iterative computer fails on grad_wrt and on frozen parameters."""
    model, batch = make("cnn with eval batch norm and dropout")
    expected = by_loop(model, margin_of, batch, ["0.weight", "4.bias"])
    model[0].weight.requires_grad_(False)
    assert list(collect_gradients(computer(model, MARGIN), batch)) == [
        name for name, _ in model.named_parameters() if name != "0.weight"
    ]

    model.requires_grad_(False)
    grads = collect_gradients(computer(model, MARGIN, grad_wrt=["4.bias", "0.weight"]), batch)

    assert_same(grads, expected)
    assert not any(p.requires_grad for p in model.parameters())
    with pytest.raises(InvalidInputError, match="No parameter of Sequential requires grad"):
        collect_gradients(computer(model, MARGIN), batch)


@every_computer
def test_parameters_are_chosen_by_either_name_or_the_class_of_their_module(computer: Computer) -> None:
    model, batch = make()
    by_name = collect_gradients(computer(model, MARGIN, grad_wrt=["decode.weight"]), batch)
    assert_same(by_name, by_loop(model, margin_of, batch, ["encode.weight"]))

    model, batch = make("cnn with eval batch norm and dropout")
    by_class = collect_gradients(computer(model, MARGIN, grad_wrt=[nn.BatchNorm2d]), batch)
    assert_same(by_class, by_loop(model, margin_of, batch, ["1.weight", "1.bias"]))
    assert choose_gradient_computer(model, MARGIN, batch, nn.BatchNorm2d)[0] == "hook"


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (nn.Linear, ["0.weight", "0.bias", "2.1.weight", "2.1.bias"]),
        ([nn.LayerNorm], ["1.weight", "1.bias"]),
        ([nn.LayerNorm, "*.1.weight"], ["1.weight", "1.bias", "2.1.weight"]),
        ("2.1.bias", ["2.1.bias"]),
        (["?.bias"], ["0.bias", "1.bias"]),
    ],
)
def test_a_class_stands_for_what_its_modules_own_patterns_for_names(choice: Any, expected: list[str]) -> None:
    assert list(select_parameters(network(), choice)) == expected


def test_a_parametrized_weight_counts_as_its_modules_own() -> None:
    model = nn.Sequential(orthogonal(nn.Linear(3, 3)), nn.LayerNorm(3))

    assert list(select_parameters(model, nn.Linear)) == ["0.bias", "0.parametrizations.weight.original"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (["1.wieght"], r"\['1.wieght'\].*'1.weight'"),
        ([], "grad_wrt is empty"),
        ("absent.*", r"\['absent\.\*'\]"),
        (["0.bias", nn.Sequential], r"the class Sequential.*Classes that do: \['LayerNorm', 'Linear'\]"),
        ([nn.Conv2d], "no module of that class in Sequential owns a parameter"),
        ([int], r"Unknown parameter names in grad_wrt: \[<class 'int'>\]"),
    ],
)
def test_a_choice_of_parameters_that_the_model_has_not_is_refused(choice: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        select_parameters(network(), choice)
    for computer in GRADIENT_COMPUTERS.values():
        with pytest.raises(InvalidInputError, match=message):
            collect_gradients(computer(network(), MARGIN, grad_wrt=choice), (torch.ones(2, 4),) * 2)


@every_computer
def test_gradients_have_no_graph_where_a_parameter_that_is_not_kept_is_read(computer: Computer) -> None:
    class Below(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.held = [self.linear.weight]

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x)) @ self.held[0]

    torch.manual_seed(0)
    model, batch = nn.Sequential(Below(), nn.Linear(3, 1)), (torch.randn(3, 3), torch.randn(3))

    grads = collect_gradients(computer(model, resolve_task("regression"), grad_wrt="1.*"), batch)

    assert not any(grad.requires_grad for grad in grads.values())
    torch.testing.assert_close(grads["1.weight"][:, 0], model[0](batch[0]).detach())


# The model is the caller's


@every_computer
def test_flags_and_gradients_of_the_model_are_untouched_also_after_an_error(computer: Computer) -> None:
    model, (images, labels) = make("cnn with eval batch norm and dropout")
    model[0].weight.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    made = computer(model, MARGIN, grad_wrt=["0.weight"])

    collect_gradients(made, (images, labels))
    with pytest.raises(RuntimeError) as caught:
        collect_gradients(made, (images[:, :, :2], labels))

    assert not isinstance(caught.value, UnsupportedModelError)  # the model's own error
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())


@every_computer
def test_an_error_of_the_sink_comes_through_as_it_is(computer: Computer) -> None:
    model, batch = make()
    error = ValueError("no room")

    def full(_: GradientBlock) -> None:
        raise error

    with pytest.raises(ValueError, match="no room") as caught:
        computer(model, MARGIN).stream_gradients(batch, full)
    assert caught.value is error


@every_computer
def test_weights_loaded_after_construction_are_the_ones_differentiated(computer: Computer) -> None:
    model, batch = make()
    made = computer(model, MARGIN)
    collect_gradients(made, batch)
    model.encode.weight = model.decode.weight = nn.Parameter(model.encode.weight * 2)

    made.load_model_params(model)

    assert_same(collect_gradients(made, batch), by_loop(model, margin_of, batch))


@pytest.mark.parametrize("name", ["hook", "iterative"])
def test_running_statistics_do_not_move(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.InstanceNorm2d(2, affine=True, track_running_stats=True))
    before = {key: value.clone() for key, value in model.train().state_dict().items()}
    task = resolve_task(lambda call, batch: call(batch[0]).square().flatten(1).sum(1))

    computer = GRADIENT_COMPUTERS[name](model, task)
    computer.stream_gradients((torch.randn(3, 1, 5, 5),), lambda _: None)
    computer.compute_loss_grad((torch.randn(3, 1, 5, 5),))

    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("name", ["hook", "functional"])
def test_dropout_in_train_mode_draws_another_mask_for_every_sample(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 50), nn.Dropout(0.5), nn.Linear(50, 3)).double().train()
    batch = (torch.randn(1, 5, dtype=torch.float64).repeat(2, 1), torch.tensor([1, 1]))

    grads = collect_gradients(GRADIENT_COMPUTERS[name](model, MARGIN), batch)

    assert not torch.equal(grads["2.weight"][0], grads["2.weight"][1])


@pytest.mark.parametrize("name", ["hook", "iterative"])
def test_sparse_gradients_come_dense(name: str) -> None:
    torch.manual_seed(0)
    model, ids = SparseEmbeddings().double(), torch.randint(5, (3, 4))
    task = resolve_task(lambda call, batch: call(batch[0]).flatten(1).sum(1))

    found = collect_gradients(GRADIENT_COMPUTERS[name](model, task), (ids,))

    for i in range(3):
        grads = torch.autograd.grad(model(ids[i]).sum(), list(model.parameters()))
        for grad, values in zip(grads, found.values(), strict=True):
            torch.testing.assert_close(values[i], grad.to_dense(), rtol=1e-10, atol=1e-12)


# Batches


@every_computer
@pytest.mark.parametrize(
    ("output", "labels", "message"),
    [
        (lambda call, batch: call(batch[0]).sum(), 5, "one number per sample"),
        (None, 3, "disagree on the number of samples"),
    ],
    ids=["an f that reduces over the batch", "samples of unequal number"],
)
def test_an_f_that_is_no_row_is_refused(computer: Computer, output: Any, labels: int, message: str) -> None:
    model, batch = make()
    task = MARGIN if output is None else resolve_task(output)

    with pytest.raises(InvalidInputError, match=message):
        collect_gradients(computer(model, task), (batch[0], batch[1][:labels]))


@every_computer
def test_batch_norm_in_train_mode_is_refused_because_it_mixes_samples(computer: Computer) -> None:
    model, batch = make("cnn with eval batch norm and dropout")

    with pytest.raises(UnsupportedModelError, match=r"\['1'\] normalise over the batch.*eval\(\)"):
        collect_gradients(computer(model.train(), MARGIN), batch)


# Computers of users


class OriginalStyleComputer(AbstractGradientComputer):
    """What a user of the original TRAK writes: three methods, one (B, P) tensor."""

    def __init__(self, model, task, grad_dim=None, dtype=torch.float16, device="cpu", grad_wrt=None) -> None:
        super().__init__(model, task, grad_dim, dtype, device)
        self.load_model_params(model)

    def load_model_params(self, model) -> None:
        self.model = model

    def compute_per_sample_grad(self, batch):
        found = []
        for x, y in zip(*batch, strict=True):
            f = self.modelout_fn.get_output(self.model, None, None, x, y)
            grads = torch.autograd.grad(f, list(self.model.parameters()))
            found.append(torch.cat([g.reshape(-1) for g in grads]))
        return torch.stack(found)

    def compute_loss_grad(self, batch):
        return self.modelout_fn.get_out_to_loss_grad(self.model, None, None, batch)


def test_a_computer_written_for_the_original_streams_the_same_blocks() -> None:
    class Short(OriginalStyleComputer):
        def compute_per_sample_grad(self, batch):
            return super().compute_per_sample_grad(batch)[:, 1:]

    model, batch = make()
    blocks: list[DenseBlock] = []

    terms = OriginalStyleComputer(model, MARGIN).stream_gradients(batch, blocks.append)

    expected = by_loop(model, margin_of, batch)
    assert_same({block.name: block.grad for block in blocks}, expected)
    logits = model(batch[0])
    np.testing.assert_allclose(
        terms.out_to_loss_grad, reference.out_to_loss_grad(logits, batch[1]), rtol=1e-10
    )
    with pytest.raises(InvalidInputError, match=r"returned shape \(5, 34\), expected \(B, 35\)"):
        Short(model, MARGIN).stream_gradients(batch, lambda _: None)


def test_a_functional_computer_that_assigns_its_weights_as_the_originals_does_uses_them() -> None:
    class Doubled(FunctionalGradientComputer):
        def load_model_params(self, model) -> None:
            self.func_weights = {name: 2 * p for name, p in model.named_parameters()}
            self.func_buffers = dict(model.named_buffers())

    model, batch = make("scalar parameter, unused parameter, buffer")
    doubled = Doubled(model, MARGIN)
    doubled.load_model_params(model)

    grads = collect_gradients(doubled, batch)

    with torch.no_grad():
        for p in model.parameters():
            p *= 2
    assert_same(grads, by_loop(model, margin_of, batch))


@every_computer
def test_overriding_a_method_of_the_originals_is_honoured_by_the_stream(computer: Any) -> None:
    class Tripled(computer):
        def compute_per_sample_grad(self, batch: Any) -> Any:
            return {name: 3 * grad for name, grad in super().compute_per_sample_grad(batch).items()}

        def compute_loss_grad(self, batch: Any) -> Tensor:
            return 5 * super().compute_loss_grad(batch)

    model, batch = nn.Linear(3, 1), (torch.randn(2, 3), torch.randn(2))
    blocks: dict[str, Tensor] = {}

    def keep(block: GradientBlock) -> None:
        blocks[block.name] = block.dense()

    plain = computer(model, resolve_task("regression")).stream_gradients(batch, keep)
    once = dict(blocks)
    terms = Tripled(model, resolve_task("regression")).stream_gradients(batch, keep)

    torch.testing.assert_close(blocks["weight"], 3 * once["weight"])
    torch.testing.assert_close(terms.out_to_loss_grad, 5 * plain.out_to_loss_grad)


# The functional and the iterative computer where a model or a batch does not allow what they do

IMAGES = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


class Layer(nn.Module):
    """A linear layer and what is done with its result."""

    def __init__(self, after: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.after = after
        self.double()

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return self.after(self.linear(x), *others)


def squares(call: Forward, batch: Any) -> Tensor:
    return call(*batch).square().sum(1)


SQUARES = resolve_task(squares)


def test_a_model_that_vmap_cannot_transform_is_named_with_the_computer_to_use() -> None:
    model = Layer(lambda y: y * 2 if y.sum().item() > 0 else y)
    message = r"\.item\(\).*y\.sum\(\)\.item\(\).*IterativeGradientComputer"

    with pytest.raises(UnsupportedModelError, match=message):
        collect_gradients(FunctionalGradientComputer(model, SQUARES), (IMAGES,))


@pytest.mark.quick
@pytest.mark.parametrize(
    "after",
    [lambda y: y.sin() if y.sum() > 0 else y.exp(), lambda y: y.view(1, 4)],
    ids=["a branch on the batch", "one sample at a time"],
)
def test_the_iterative_computer_runs_each_sample_alone(after: Forward) -> None:
    """One forward pass over the batch would take one branch for all samples."""
    model = Layer(after)
    assert {bool(model.linear(row).sum() > 0) for row in IMAGES} == {True, False}

    found = collect_gradients(IterativeGradientComputer(model, SQUARES), (IMAGES,))

    assert_same(found, by_loop(model, squares, (IMAGES,)))


@pytest.mark.parametrize(
    ("after", "cause"),
    [
        (lambda y: y / y.squeeze().norm(dim=1, keepdim=True), "IndexError: Dimension out of range"),
        (lambda y: nn.functional.group_norm(y, 4), "ValueError: Expected more than 1 value per channel"),
    ],
    ids=["squeezed", "group of one entry"],
)
def test_a_model_that_cannot_run_on_one_sample_is_named(after: Forward, cause: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"Layer runs on a batch, but not on one .*{cause}"):
        collect_gradients(IterativeGradientComputer(Layer(after), SQUARES), (IMAGES,))


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(n) for n in (1, 2, 3)], layout=torch.jagged),
    ],
    ids=["sparse", "nested"],
)
def test_a_batch_that_cannot_be_sliced_is_named(other: Callable[[], Tensor]) -> None:
    with pytest.raises(InvalidInputError, match=r"Sample 0 cannot be taken out of its batch .*to_dense"):
        collect_gradients(IterativeGradientComputer(Layer(lambda y, _: y), SQUARES), (IMAGES, other()))
