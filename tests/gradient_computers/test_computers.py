"""Every gradient computer against a plain loop over autograd, one sample at a time, in float64."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import reference
import torch
from torch import Tensor, nn

from trak_lite.errors import InvalidInputError, UnsupportedModelError
from trak_lite.gradient_computers import (
    GRADIENT_COMPUTERS,
    AbstractGradientComputer,
    FunctionalGradientComputer,
    IterativeGradientComputer,
    collect_gradients,
)
from trak_lite.modelout_functions import ModelCall, resolve_task
from trak_lite.types import DenseBlock


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
        self.linear = nn.Linear(5, 4)
        self.register_buffer("shift", torch.arange(5.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.linear(x + self.shift)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4), nn.Dropout(0.5)
    )


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    num_classes: int = 4


CASES = {
    "cnn with eval batch norm and dropout": Case(cnn, (1, 5, 5)),
    "tied weights": Case(TiedAutoencoder, (5,), 5),
    "scalar parameter, unused parameter, buffer": Case(WithScale, (5,)),
}
COMPUTERS: dict[str, Callable[..., AbstractGradientComputer]] = {
    **GRADIENT_COMPUTERS,
    **{f"{name} by chunks": partial(cls, chunk_size=2) for name, cls in GRADIENT_COMPUTERS.items()},
}


def make(
    case: Case, count: int = 5, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = case.build().to(dtype).eval()
    batch = (torch.randn(count, *case.input_shape, dtype=dtype), torch.randint(case.num_classes, (count,)))
    return model, batch


def margin_of(model: nn.Module, batch: Any) -> Tensor:
    return reference.margin(model(batch[0]), batch[1])


@pytest.mark.parametrize("computer", COMPUTERS.values(), ids=COMPUTERS.keys())
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_row_i_is_the_gradient_of_sample_i_alone(
    case: Case, computer: Callable[..., AbstractGradientComputer]
) -> None:
    model, batch = make(case)
    names = [name for name, _ in model.named_parameters()]

    grads = collect_gradients(computer(model, resolve_task("image_classification")), batch)

    expected = reference.per_sample_gradients(model, margin_of, reference.samples_of(batch), names)
    assert list(grads) == names
    for name in names:
        np.testing.assert_allclose(grads[name].numpy(), expected[name], rtol=1e-10, atol=1e-13)
        assert not grads[name].requires_grad


@pytest.mark.parametrize("computer", COMPUTERS.values(), ids=COMPUTERS.keys())
def test_one_pass_gives_f_q_and_w_too(computer: Callable[..., AbstractGradientComputer]) -> None:
    model, batch = make(CASES["tied weights"])

    terms = computer(model, resolve_task("image_classification")).stream_gradients(batch, lambda _: None)

    logits = model(batch[0])
    np.testing.assert_allclose(terms.output.numpy(), margin_of(model, batch).detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(
        terms.out_to_loss_grad, reference.out_to_loss_grad(logits, batch[1]), rtol=1e-10
    )
    np.testing.assert_allclose(terms.loss_curvature, reference.loss_curvature(logits, batch[1]), rtol=1e-10)


@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
def test_grad_wrt_selects_also_frozen_parameters_in_model_order(
    computer: type[AbstractGradientComputer],
) -> None:
    """The original's iterative computer fails on grad_wrt and on frozen parameters."""
    model, batch = make(CASES["cnn with eval batch norm and dropout"])
    for p in model.parameters():
        p.requires_grad_(False)

    grads = collect_gradients(
        computer(model, resolve_task("image_classification"), grad_wrt=["4.bias", "0.weight"]), batch
    )

    assert list(grads) == ["0.weight", "4.bias"]
    assert not any(p.requires_grad for p in model.parameters())
    for p in model.parameters():
        p.requires_grad_(True)
    expected = reference.per_sample_gradients(
        model, margin_of, reference.samples_of(batch), ["0.weight", "4.bias"]
    )
    for name, value in expected.items():
        np.testing.assert_allclose(grads[name].numpy(), value, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
def test_only_parameters_that_require_grad_are_kept_by_default(
    computer: type[AbstractGradientComputer],
) -> None:
    model, batch = make(CASES["cnn with eval batch norm and dropout"])
    model[0].weight.requires_grad_(False)

    grads = collect_gradients(computer(model, resolve_task("image_classification")), batch)

    assert "0.weight" not in grads
    assert "0.bias" in grads


@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_keep_the_dtype_of_the_model(
    computer: type[AbstractGradientComputer], dtype: torch.dtype
) -> None:
    """The original's iterative computer returns float32 for a float64 model."""
    model, batch = make(CASES["tied weights"], dtype=dtype)

    grads = collect_gradients(computer(model, resolve_task("image_classification")), batch)

    assert {grad.dtype for grad in grads.values()} == {dtype}


@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_changes_the_forward_pass_and_not_the_gradients_dtype(
    computer: type[AbstractGradientComputer], autocast: torch.dtype
) -> None:
    model, batch = make(CASES["tied weights"], dtype=torch.float32)
    task = resolve_task("image_classification")

    exact = collect_gradients(computer(model, task), batch)
    half = collect_gradients(computer(model, task, autocast_dtype=autocast), batch)

    for name, grad in half.items():
        assert grad.dtype == torch.float32
        assert not torch.equal(grad, exact[name])
        torch.testing.assert_close(grad, exact[name], rtol=0.1, atol=0.05)


@pytest.mark.parametrize("computer", COMPUTERS.values(), ids=COMPUTERS.keys())
def test_a_sample_does_not_depend_on_the_others_of_its_batch(
    computer: Callable[..., AbstractGradientComputer],
) -> None:
    model, (images, labels) = make(CASES["cnn with eval batch norm and dropout"])
    made = computer(model, resolve_task("image_classification"))

    whole = collect_gradients(made, (images, labels))
    order = torch.tensor([3, 0, 4])
    part = collect_gradients(made, (images[order], labels[order]))

    for name, grad in part.items():
        torch.testing.assert_close(grad, whole[name][order], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
def test_an_empty_batch_gives_empty_blocks(computer: type[AbstractGradientComputer]) -> None:
    model, (images, labels) = make(CASES["tied weights"])
    blocks: list[Any] = []

    terms = computer(model, resolve_task("image_classification")).stream_gradients(
        (images[:0], labels[:0]), blocks.append
    )

    assert terms.output.shape == (0,)
    assert {block.name: tuple(block.grad.shape) for block in blocks} == {
        name: (0, *p.shape) for name, p in model.named_parameters()
    }


@dataclass
class Pair:
    images: Tensor
    labels: Tensor


@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
@pytest.mark.parametrize(
    "wrap",
    [
        lambda x, y: [x, y],
        lambda x, y: {"images": x, "labels": y},
        lambda x, y: UserDict(images=x, labels=y),
        lambda x, y: Pair(x, y),
    ],
    ids=["list", "dict", "mapping that is no dict", "dataclass"],
)
def test_batches_of_any_container_give_the_same_gradients(
    computer: type[AbstractGradientComputer], wrap: Callable[[Tensor, Tensor], Any]
) -> None:
    """The original refuses dict batches."""
    model, (images, labels) = make(CASES["tied weights"])

    def output(call: ModelCall, batch: Any) -> Tensor:
        if isinstance(batch, Pair):
            return reference_margin(call(batch.images), batch.labels)
        x, y = batch.values() if isinstance(batch, Mapping) else batch
        return reference_margin(call(x), y)

    task = resolve_task(output)
    expected = collect_gradients(computer(model, task), (images, labels))
    grads = collect_gradients(computer(model, task), wrap(images, labels))

    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=0)


def reference_margin(logits: Tensor, labels: Tensor) -> Tensor:
    """The margin without loops, so that it can be traced."""
    own = nn.functional.one_hot(torch.arange(logits.shape[1]), logits.shape[1]).to(logits.dtype)[labels]
    others = logits.masked_fill(own.bool(), float("-inf"))
    return (logits * own).sum(1) - others.logsumexp(1)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * 2 if y.sum().item() > 0 else y


def test_a_model_that_vmap_cannot_transform_is_named_with_the_computer_to_use() -> None:
    torch.manual_seed(0)
    model = Branches().double()
    batch = (torch.randn(3, 5).double(), torch.randint(4, (3,)))
    task = resolve_task("image_classification")

    with pytest.raises(
        UnsupportedModelError, match=r"\.item\(\).*y\.sum\(\)\.item\(\).*IterativeGradientComputer"
    ):
        collect_gradients(FunctionalGradientComputer(model, task), batch)

    assert collect_gradients(IterativeGradientComputer(model, task), batch)["linear.weight"].shape == (
        3,
        4,
        5,
    )


@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
def test_an_error_of_the_model_itself_is_not_blamed_on_the_computer(
    computer: type[AbstractGradientComputer],
) -> None:
    model, (_, labels) = make(CASES["tied weights"])

    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        collect_gradients(
            computer(model, resolve_task("image_classification")), (torch.randn(5, 7).double(), labels)
        )

    assert not isinstance(caught.value, UnsupportedModelError)


@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
def test_batch_norm_in_train_mode_is_refused_because_it_mixes_samples(
    computer: type[AbstractGradientComputer],
) -> None:
    model, batch = make(CASES["cnn with eval batch norm and dropout"])
    model.train()

    with pytest.raises(UnsupportedModelError, match=r"\['1'\] normalise over the batch.*eval\(\)"):
        collect_gradients(computer(model, resolve_task("image_classification")), batch)


def test_dropout_in_train_mode_draws_another_mask_for_every_sample() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 3)).double().train()
    image = torch.randn(1, 6, dtype=torch.float64)
    batch = (image.repeat(2, 1), torch.tensor([1, 1]))

    grads = collect_gradients(FunctionalGradientComputer(model, resolve_task("image_classification")), batch)

    assert not torch.equal(grads["2.weight"][0], grads["2.weight"][1])


@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
def test_flags_and_gradients_of_the_model_are_untouched_also_after_an_error(
    computer: type[AbstractGradientComputer],
) -> None:
    model, (images, labels) = make(CASES["cnn with eval batch norm and dropout"])
    model[0].weight.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    made = computer(model, resolve_task("image_classification"), grad_wrt=["0.weight"])

    collect_gradients(made, (images, labels))
    with pytest.raises(RuntimeError):
        collect_gradients(made, (images[:, :, :2], labels))

    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
def test_weights_loaded_after_construction_are_the_ones_differentiated(
    computer: type[AbstractGradientComputer],
) -> None:
    model, batch = make(CASES["tied weights"])
    made = computer(model, resolve_task("image_classification"))
    before = collect_gradients(made, batch)["encode.weight"]
    model.encode.weight = nn.Parameter(model.encode.weight * 2)

    made.load_model_params(model)
    after = collect_gradients(made, batch)["encode.weight"]

    assert not torch.allclose(before, after)


@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
def test_unknown_names_in_grad_wrt_are_refused_with_the_nearest_known(
    computer: type[AbstractGradientComputer],
) -> None:
    model, batch = make(CASES["tied weights"])

    with pytest.raises(InvalidInputError, match=r"\['encode.wieght'\].*'encode.weight'"):
        collect_gradients(
            computer(model, resolve_task("image_classification"), grad_wrt=["encode.wieght"]), batch
        )
    with pytest.raises(InvalidInputError, match="grad_wrt is empty"):
        collect_gradients(computer(model, resolve_task("image_classification"), grad_wrt=[]), batch)


@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
def test_a_tied_weight_may_be_named_by_either_name(computer: type[AbstractGradientComputer]) -> None:
    model, batch = make(CASES["tied weights"])

    grads = collect_gradients(
        computer(model, resolve_task("image_classification"), grad_wrt=["decode.weight"]), batch
    )

    assert list(grads) == ["encode.weight"]


@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
def test_a_model_without_trainable_parameters_is_refused(computer: type[AbstractGradientComputer]) -> None:
    model, batch = make(CASES["tied weights"])
    model.requires_grad_(False)

    with pytest.raises(InvalidInputError, match="No parameter of TiedAutoencoder requires grad"):
        collect_gradients(computer(model, resolve_task("image_classification")), batch)


@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
def test_an_output_function_that_reduces_over_the_batch_is_refused(
    computer: type[AbstractGradientComputer],
) -> None:
    model, batch = make(CASES["tied weights"])
    task = resolve_task(lambda call, batch: call(batch[0]).sum())

    with pytest.raises(InvalidInputError, match=r"shape \(\).*one number per sample|one number per sample"):
        collect_gradients(computer(model, task), batch)


@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
def test_tensors_that_disagree_on_the_number_of_samples_are_refused(
    computer: type[AbstractGradientComputer],
) -> None:
    model, (images, labels) = make(CASES["tied weights"])

    with pytest.raises(InvalidInputError, match="disagree on the number of samples"):
        collect_gradients(computer(model, resolve_task("image_classification")), (images, labels[:3]))


class OriginalStyleComputer(AbstractGradientComputer):
    """What a user of the original TRAK writes: three methods, one (B, P) tensor."""

    def __init__(self, model, task, grad_dim=None, dtype=torch.float16, device="cpu", grad_wrt=None) -> None:
        super().__init__(model, task, grad_dim, dtype, device)
        self.load_model_params(model)

    def load_model_params(self, model) -> None:
        self.model = model

    def compute_per_sample_grad(self, batch):
        rows = []
        for x, y in zip(*batch, strict=True):
            f = self.modelout_fn.get_output(self.model, None, None, x, y)
            grads = torch.autograd.grad(f, list(self.model.parameters()))
            rows.append(torch.cat([g.reshape(-1) for g in grads]))
        return torch.stack(rows)

    def compute_loss_grad(self, batch):
        return self.modelout_fn.get_out_to_loss_grad(self.model, None, None, batch)


def test_a_computer_written_for_the_original_streams_the_same_blocks() -> None:
    model, batch = make(CASES["tied weights"])
    task = resolve_task("image_classification")
    blocks: list[DenseBlock] = []

    terms = OriginalStyleComputer(model, task).stream_gradients(batch, blocks.append)

    expected = collect_gradients(IterativeGradientComputer(model, task), batch)
    assert [block.name for block in blocks] == list(expected)
    for block in blocks:
        torch.testing.assert_close(block.grad, expected[block.name], rtol=1e-12, atol=1e-14)
    assert terms.out_to_loss_grad.shape == (5,)


def test_a_flat_gradient_of_the_wrong_width_is_refused() -> None:
    class Short(OriginalStyleComputer):
        def compute_per_sample_grad(self, batch):
            return super().compute_per_sample_grad(batch)[:, 1:]

    model, batch = make(CASES["tied weights"])

    with pytest.raises(InvalidInputError, match=r"returned shape \(5, 34\), expected \(B, 35\)"):
        Short(model, resolve_task("image_classification")).stream_gradients(batch, lambda _: None)


def test_a_functional_computer_that_assigns_its_weights_as_the_originals_does_uses_them() -> None:
    class Doubled(FunctionalGradientComputer):
        def load_model_params(self, model) -> None:
            self.func_weights = {name: 2 * p for name, p in model.named_parameters()}
            self.func_buffers = dict(model.named_buffers())

    model, batch = make(CASES["scalar parameter, unused parameter, buffer"])
    task = resolve_task("image_classification")
    doubled = Doubled(model, task)
    doubled.load_model_params(model)

    grads = collect_gradients(doubled, batch)

    with torch.no_grad():
        for p in model.parameters():
            p *= 2
    for name, value in collect_gradients(IterativeGradientComputer(model, task), batch).items():
        torch.testing.assert_close(grads[name], value, rtol=1e-12, atol=1e-14)


class SparseEmbeddings(nn.Module):
    """Embeddings whose gradients torch gives as sparse tensors; the positions' has no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(5, 3, sparse=True), nn.Embedding(4, 3, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.tokens(ids) * self.positions(torch.arange(4))).tanh()


@pytest.mark.parametrize("name", ["hook", "iterative"])
def test_sparse_gradients_come_dense(name: str) -> None:
    torch.manual_seed(0)
    model, ids = SparseEmbeddings().double(), torch.randint(5, (3, 4))
    task = resolve_task(lambda call, batch: call(batch[0]).flatten(1).sum(1))

    computer = GRADIENT_COMPUTERS[name](model, task)
    found = collect_gradients(computer, (ids,))

    for i in range(3):
        grads = torch.autograd.grad(model(ids[i]).sum(), list(model.parameters()))
        for grad, rows in zip(grads, found.values(), strict=True):
            torch.testing.assert_close(rows[i], grad.to_dense(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["hook", "iterative"])
def test_running_statistics_do_not_move(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.InstanceNorm2d(2, affine=True, track_running_stats=True))
    before = {key: value.clone() for key, value in model.train().state_dict().items()}
    task = resolve_task(lambda call, batch: call(batch[0]).square().flatten(1).sum(1))

    computer = GRADIENT_COMPUTERS[name](model, task)
    computer.stream_gradients((torch.randn(3, 1, 5, 5),), lambda _: None)
    computer.compute_loss_grad((torch.randn(3, 1, 5, 5),))

    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
def test_overriding_a_method_of_the_originals_is_honoured_by_the_stream(computer: Any) -> None:
    class Tripled(computer):
        def compute_per_sample_grad(self, batch: Any) -> Any:
            return {name: 3 * grad for name, grad in super().compute_per_sample_grad(batch).items()}

        def compute_loss_grad(self, batch: Any) -> Tensor:
            return 5 * super().compute_loss_grad(batch)

    model, batch = nn.Linear(3, 1), (torch.randn(2, 3), torch.randn(2))
    task = resolve_task("regression")
    blocks: dict[str, Tensor] = {}

    def keep(block: Any) -> None:
        blocks[block.name] = block.dense()

    plain = computer(model, task).stream_gradients(batch, keep)
    once = dict(blocks)
    terms = Tripled(model, task).stream_gradients(batch, keep)

    torch.testing.assert_close(blocks["weight"], 3 * once["weight"])
    torch.testing.assert_close(terms.out_to_loss_grad, 5 * plain.out_to_loss_grad)


@pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS.keys())
def test_gradients_have_no_graph_where_a_reference_reads_a_parameter_that_is_not_kept(
    computer: type[AbstractGradientComputer],
) -> None:
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
