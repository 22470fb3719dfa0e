"""Every gradient computer against a plain loop over autograd, one sample at a time, in float64."""

from collections import UserDict, namedtuple
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import reference
import torch
from models import Model, assert_same, by_loop, ruled
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal
from torch.utils.data import TensorDataset

from trak_lite import Attributor, Rows
from trak_lite.errors import InvalidInputError, UnsupportedModelError
from trak_lite.gradient_computers import (
    GRADIENT_COMPUTERS,
    AbstractGradientComputer,
    FunctionalGradientComputer,
    HookGradientComputer,
    choose_gradient_computer,
    collect_gradients,
    select_parameters,
)
from trak_lite.methods import GradDot
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall, resolve_task
from trak_lite.store import ZarrFeatureStore
from trak_lite.testing import GradientComputerTests, GradientRuleTests
from trak_lite.types import OutputTerms

MARGIN = resolve_task("image_classification")


def tied():
    forward = lambda s, x: s.decode(torch.tanh(s.encode(x)))  # noqa: E731
    model = Model(forward, encode=nn.Linear(5, 5), decode=nn.Linear(5, 5))
    model.decode.weight = model.encode.weight
    return model


def scaled():
    """A parameter without dimensions, one that f ignores, and a buffer."""
    held = {"scale": nn.Parameter(torch.tensor(1.5)), "ignored": nn.Parameter(torch.ones(3))}
    model = Model(lambda s, x: s.scale * s.linear(x + s.shift), **held, linear=nn.Linear(5, 5))
    model.register_buffer("shift", torch.arange(5.0))
    return model


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 5), nn.Dropout(0.5)
    )


MODELS = {
    "cnn with eval batch norm and dropout": (cnn, (1, 5, 5)),
    "tied weights": (tied, (5,)),
    "scalar parameter, unused parameter, buffer": (scaled, (5,)),
}
COMPUTERS = {
    **GRADIENT_COMPUTERS,
    **{f"{name} by chunks": partial(cls, chunk_size=2) for name, cls in GRADIENT_COMPUTERS.items()},
}
every_computer = pytest.mark.parametrize("computer", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS)


def make(name="tied weights", dtype=torch.float64):
    """A model in eval mode and five labelled samples, of seed 0."""
    torch.manual_seed(0)
    build, shape = MODELS[name]
    return build().to(dtype).eval(), (torch.randn(5, *shape, dtype=dtype), torch.randint(5, (5,)))


def margin_of(call, batch):
    return reference.margin(call(batch[0]), batch[1])


@pytest.mark.parametrize("computer", COMPUTERS.values(), ids=COMPUTERS)
@pytest.mark.parametrize("name", MODELS)
def test_row_i_is_the_gradient_of_sample_i_alone_beside_f_q_and_w(name, computer):
    """That rows do not depend on their batch is a law of the kit below."""
    model, batch = make(name)
    made, blocks = computer(model, MARGIN), list[Tensor]()
    grads = collect_gradients(made, batch)
    assert_same(grads, by_loop(model, margin_of, batch))
    assert not any(grad.requires_grad for grad in grads.values())
    terms = made.stream_gradients((batch[0][:0], batch[1][:0]), lambda block: blocks.append(block.dense()))
    assert terms.output.shape == (0,)
    assert [block.shape for block in blocks] == [(0, p.numel()) for p in model.parameters()]
    terms, logits = made.stream_gradients(batch, lambda _: None), model(batch[0])
    np.testing.assert_allclose(terms.output, margin_of(model, batch).detach(), rtol=1e-12)
    q, w = reference.out_to_loss_grad(logits, batch[1]), reference.loss_curvature(logits, batch[1])
    np.testing.assert_allclose(terms.out_to_loss_grad, q, rtol=1e-10)
    np.testing.assert_allclose(terms.loss_curvature, w, rtol=1e-10)


@every_computer
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [
        *((torch.float32, autocast) for autocast in (None, torch.bfloat16, torch.float16)),
        *((dtype, None) for dtype in (torch.float64, torch.bfloat16)),
    ],
)
def test_gradients_keep_the_dtype_of_the_model(computer, dtype, autocast):
    """The original's iterative computer returns float32 for a float64 model; autocast changes the forward pass."""
    model, batch = make(dtype=dtype)
    exact = collect_gradients(computer(model, MARGIN), batch)
    found = collect_gradients(computer(model, MARGIN, autocast_dtype=autocast), batch)
    for name, grad in found.items():
        assert grad.dtype == exact[name].dtype == dtype
        assert torch.equal(grad, exact[name]) == (autocast is None)
        torch.testing.assert_close(grad, exact[name], rtol=0.1, atol=0.05)


@pytest.mark.parametrize(("dtype", "least", "most"), [(torch.bfloat16, 0, 0.02), (torch.float16, 0.1, 1)])
def test_small_gradients_keep_their_digits_in_bfloat16_and_not_in_float16(dtype, least, most):
    """A backward pass in float16 has multiples of 6e-8."""
    torch.manual_seed(0)
    model = Model(lambda s, x: x + 1e-7 * s.inner(x), inner=nn.Linear(5, 5)).to(dtype)
    batch = torch.randn(5, 5).to(dtype), torch.randint(5, (5,))
    found = collect_gradients(HookGradientComputer(model, MARGIN), batch)
    exact = by_loop(model.double(), margin_of, (batch[0].double(), batch[1]))["inner.weight"]
    assert least <= (found["inner.weight"] - exact).norm() / exact.norm() < most


# ---- Which parameters
CNN = "cnn with eval batch norm and dropout"


class OneByOne(AbstractGradientComputer):
    """A computer of a user's own, in the three methods of the original."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)

    def load_model_params(self, model):
        self.model = model

    def compute_per_sample_grad(self, batch):
        kept = [self.model.get_parameter(name) for name in self.parameters]
        outputs = self.modelout_fn.evaluate(ModelCall(self.model), batch).output
        rows = [torch.autograd.grad(one, kept, retain_graph=True, materialize_grads=True) for one in outputs]
        return dict(zip(self.parameters, map(torch.stack, zip(*rows, strict=True)), strict=True))

    def compute_loss_grad(self, batch):
        return self.modelout_fn.evaluate(ModelCall(self.model), batch).out_to_loss_grad


@pytest.mark.parametrize("computer", [*GRADIENT_COMPUTERS.values(), OneByOne])
@pytest.mark.parametrize(
    ("name", "frozen", "choice", "expected"),
    [
        (CNN, ["0.weight"], None, ["0.bias", "1.weight", "1.bias", "4.weight", "4.bias"]),
        (CNN, ["*"], ["4.bias", "0.weight"], ["0.weight", "4.bias"]),
        (CNN, [], [nn.BatchNorm2d], ["1.weight", "1.bias"]),
        ("tied weights", [], ["decode.weight"], ["encode.weight"]),
    ],
    ids=["those that require grad", "frozen ones", "by the class of a module", "by the other name"],
)
def test_the_parameters_that_are_asked_for_are_kept(computer, name, frozen, choice, expected):
    """The original's iterative computer fails on grad_wrt and on frozen parameters. One's own need not know of them."""
    model, batch = make(name)
    for one in select_parameters(model, frozen).values() if frozen else ():
        one.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    grads = collect_gradients(computer(model, MARGIN, grad_wrt=choice), batch)
    assert [p.requires_grad for p in model.parameters()] == flags
    assert_same(grads, by_loop(model, margin_of, batch, expected))


def popping(call, batch):
    weight = batch["labels"].pop("y") + 1.0
    return call(batch.pop("x")).sin().sum(1) * weight


class Popping(AbstractModelOutput):
    def evaluate(self, model_call, batch):
        output = popping(model_call, batch)
        return OutputTerms(output, torch.ones_like(output).detach(), torch.zeros_like(output).detach())


@pytest.mark.parametrize(
    ("task", "computer"),
    [(make, one) for make in (lambda: resolve_task(popping), Popping) for one in GRADIENT_COMPUTERS.values()]
    + [(lambda: resolve_task(popping), OneByOne)],
)
def test_f_may_take_entries_out_of_its_batch(task, computer):
    """Every pass over a batch, and every check of it, gets all of them, and the user's own batch keeps them."""
    model, (x, y) = make()
    batch = {"x": x, "labels": {"y": y}}
    expected = by_loop(model, lambda call, part: call(part[0]).sin().sum(1) * (part[1] + 1.0), (x, y))
    for _ in range(2):
        assert_same(collect_gradients(computer(model, task()), batch), expected)
    assert list(batch) == ["x", "labels"]
    assert list(batch["labels"]) == ["y"]


def network():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (nn.Linear, ["0.weight", "0.bias", "2.1.weight", "2.1.bias"]),
        ([nn.LayerNorm], ["1.weight", "1.bias"]),
        ([nn.LayerNorm, "*.1.weight"], ["1.weight", "1.bias", "2.1.weight"]),
        ("2.1.bias", ["2.1.bias"]),
        (["?.bias"], ["0.bias", "1.bias", "3.bias"]),
        ([nn.Conv1d], ["3.bias", "3.parametrizations.weight.original"]),
    ],
)
def test_a_class_stands_for_what_its_modules_own_patterns_for_names(choice, expected):
    """A parametrized weight is its module's own."""
    model = network().append(orthogonal(nn.Conv1d(2, 2, 1)))
    assert list(select_parameters(model, choice)) == expected


@pytest.mark.quick
def test_a_name_with_the_characters_of_a_pattern_is_a_name():
    """As a pattern, ``w[0]`` stands for ``w0``."""
    named = {name: nn.Parameter(torch.ones(1)) for name in ("w0", "w[0]", "w[1]", "v*", "vw")}
    model = nn.ModuleDict({"named": nn.ParameterDict(named), "last": nn.Linear(1, 1)})
    chosen = select_parameters(model, ["named.w[0]", "last.*", "named.v*"])
    assert set(chosen) == {"named.w[0]", "named.v*", "last.weight", "last.bias"}
    assert set(select_parameters(model, ["last.bias", "named.w[01]"])) == {"last.bias", "named.w0"}


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
def test_a_choice_of_parameters_that_the_model_has_not_is_refused(choice, message):
    with pytest.raises(InvalidInputError, match=message):
        select_parameters(network(), choice)
    for computer in GRADIENT_COMPUTERS.values():
        with pytest.raises(InvalidInputError, match=message):
            collect_gradients(computer(network(), MARGIN, grad_wrt=choice), (torch.ones(2, 4),) * 2)


@every_computer
def test_gradients_have_no_graph_where_a_parameter_that_is_not_kept_is_read(computer):
    torch.manual_seed(0)
    linear = nn.Linear(3, 3)
    held = [linear.weight]
    below = Model(lambda s, x: torch.tanh(s.linear(x)) @ s.held[0], linear=linear, held=held)
    model, batch = nn.Sequential(below, nn.Linear(3, 1)), (torch.randn(3, 3), torch.randn(3))
    grads = collect_gradients(computer(model, resolve_task("regression"), grad_wrt="1.*"), batch)
    assert not any(grad.requires_grad for grad in grads.values())
    torch.testing.assert_close(grads["1.weight"][:, 0], model[0](batch[0]).detach())


# ---- The model is the caller's
@every_computer
def test_errors_of_model_and_sink_come_through_and_leave_the_model_untouched(computer):
    model, (images, labels) = make(CNN)
    model[0].weight.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    made, error = computer(model, MARGIN, grad_wrt=["0.weight"]), ValueError("no room")

    def full(_):
        raise error

    with pytest.raises(ValueError, match="no room") as caught:
        made.stream_gradients((images, labels), full)
    assert caught.value is error
    with pytest.raises(RuntimeError) as of_model:
        collect_gradients(made, (images[:, :, :2], labels))
    assert not isinstance(of_model.value, UnsupportedModelError)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    expected = by_loop(model, margin_of, (images, labels), ["0.weight"])
    assert_same(collect_gradients(made, (images, labels)), expected)
    assert [p.requires_grad for p in model.parameters()] == flags


@every_computer
def test_weights_loaded_after_construction_are_the_ones_differentiated(computer):
    model, batch = make()
    made = computer(model, MARGIN)
    collect_gradients(made, batch)
    model.encode.weight = model.decode.weight = nn.Parameter(model.encode.weight * 2)
    made.load_model_params(model)
    assert_same(collect_gradients(made, batch), by_loop(model, margin_of, batch))


@pytest.mark.parametrize("name", ["hook", "iterative"])
def test_running_statistics_do_not_move(name):
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
def test_dropout_in_train_mode_draws_another_mask_for_every_sample(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 50), nn.Dropout(0.5), nn.Linear(50, 3)).double().train()
    batch = (torch.randn(1, 5, dtype=torch.float64).repeat(2, 1), torch.tensor([1, 1]))
    grads = collect_gradients(GRADIENT_COMPUTERS[name](model, MARGIN), batch)
    assert not torch.equal(grads["2.weight"][0], grads["2.weight"][1])


@pytest.mark.parametrize("name", ["hook", "iterative"])
def test_sparse_gradients_come_dense(name):
    """Of words, and of positions without a batch."""
    torch.manual_seed(0)
    words, positions = nn.Embedding(5, 3, sparse=True), nn.Embedding(4, 3, sparse=True)
    forward = lambda s, ids: (s.words(ids) * s.positions(torch.arange(4))).tanh()  # noqa: E731
    model, ids = Model(forward, words=words, positions=positions).double(), torch.randint(5, (3, 4))
    task = resolve_task(lambda call, batch: call(batch[0]).flatten(1).sum(1))
    found = collect_gradients(GRADIENT_COMPUTERS[name](model, task), (ids,))
    for i in range(3):
        grads = torch.autograd.grad(model(ids[i]).sum(), list(model.parameters()))
        for grad, values in zip(grads, found.values(), strict=True):
            torch.testing.assert_close(values[i], grad.to_dense(), rtol=1e-10, atol=1e-12)


# ---- Computers of users
class OneTensor(FunctionalGradientComputer):
    """Returns one (B, P) tensor, as the original's documentation has it, without its first column."""

    def compute_per_sample_grad(self, batch):
        return torch.cat([g.flatten(1) for g in super().compute_per_sample_grad(batch).values()], 1)[:, 1:]


def test_the_width_of_one_tensor_of_an_original_method_is_checked():
    model, batch = make()
    with pytest.raises(InvalidInputError, match=r"returned shape \(5, 34\), expected \(B, 35\)"):
        OneTensor(model, MARGIN).stream_gradients(batch, lambda _: None)


def test_a_functional_computer_that_assigns_its_weights_as_the_originals_does_uses_them():
    class Doubled(FunctionalGradientComputer):
        def load_model_params(self, model):
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


# ---- What a model or a batch does not allow
IMAGES = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


class Layer(Model):
    """A linear layer and what is done with its result."""

    def __init__(self, after):
        torch.manual_seed(0)
        super().__init__(lambda s, x, *others: after(s.linear(x), *others), linear=nn.Linear(4, 4))
        self.double()


SQUARES = resolve_task(lambda call, batch: call(*batch).square().sum(1))


def of_cnn(change):
    model, batch = make(CNN)
    return change(model), batch, MARGIN


def after(function, *others):
    """Return what makes a :class:`Layer` and a batch of images, or of images and others."""
    return lambda: (Layer(function), (IMAGES, *(other() for other in others)), SQUARES)


def nested():
    return torch.nested.nested_tensor([torch.ones(n) for n in (1, 2, 3)], layout=torch.jagged)


EVERY = tuple(GRADIENT_COMPUTERS)
REDUCING = resolve_task(lambda call, batch: call(batch[0]).sum())
NOT_ONE = "Layer runs on a batch, but not on one .*"
INVALID = [
    (EVERY, lambda: (*make(), REDUCING), "one number per sample"),
    (EVERY, lambda: (make()[0], (torch.ones(5, 5), torch.ones(3)), MARGIN), "disagree on the number of samples"),
    (EVERY, lambda: of_cnn(lambda model: model.requires_grad_(False)), "No parameter of Sequential requires grad"),
    (["iterative"], after(lambda y, _: y, lambda: torch.eye(3).to_sparse()), "Sample 0 cannot be taken .*to_dense"),
    (["iterative"], after(lambda y, _: y, nested), "Sample 0 cannot be taken out of its batch .*to_dense"),
]  # fmt: skip
UNSUPPORTED = [
    (EVERY, lambda: of_cnn(nn.Module.train), r"\['1'\] normalise over the batch.*eval\(\)"),
    (["functional"], after(lambda y: y * 2 if y.sum().item() > 0 else y),
     r"\.item\(\).*y\.sum\(\)\.item\(\).*IterativeGradientComputer"),
    (["iterative"], after(lambda y: y / y.squeeze().norm(dim=1, keepdim=True)),
     NOT_ONE + "IndexError: Dimension out of range"),
    (["iterative"], after(lambda y: nn.functional.group_norm(y, 4)),
     NOT_ONE + "ValueError: Expected more than 1 value per channel"),
]  # fmt: skip
REFUSED = [(InvalidInputError, *case) for case in INVALID] + [
    (UnsupportedModelError, *case) for case in UNSUPPORTED
]


@pytest.mark.parametrize(
    ("error", "name", "build", "message"),
    [(error, name, *rest) for error, names, *rest in REFUSED for name in names],
)
def test_what_is_refused_is_named(error, name, build, message):
    model, batch, task = build()
    with pytest.raises(error, match=message):
        collect_gradients(GRADIENT_COMPUTERS[name](model, task), batch)


# ---- What a batch holds beside tensors, and models that mix the samples of a batch
FACTORS = {"gold": 4.0, "web": 1.0, "spam": 0.25}


class Named(dict[str, Any]):
    """A batch whose columns are attributes, and which nobody may change."""

    def __getattr__(self, name):
        return self[name]

    def __setitem__(self, *_):
        raise TypeError("no changes")


class Attributed(dict[str, Any]):
    pass


class UserBatch(UserDict[str, Any]):
    pass


class Attributes(dict[str, Any]):
    """The same, by the attributes of its own."""

    def __init__(self, columns):
        super().__init__(columns)
        self.__dict__ = self


class Encoded(UserDict[str, Any]):
    """The same, as that of Hugging Face's tokenizers."""

    def __getattr__(self, name):
        return self.__dict__["data"][name]


@dataclass
class Later:
    """Two fields are set after construction."""

    x: Tensor
    scale: float = field(default=1.0, init=False)
    weight: Tensor | None = field(default=None, init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    scale: float = field(default=1.0, init=False)


class Slotted:
    __slots__ = ("note",)


@dataclass(frozen=True)
class ByHand(Slotted):
    """A frozen class with a slot beside its fields, whose constructor wants what it does not keep."""

    x: Tensor
    scale: InitVar[float]

    def __post_init__(self, scale):
        object.__setattr__(self, "note", scale)


@dataclass
class Normalised:
    """Its constructor changes what it is given, and computes one attribute from it."""

    x: Tensor
    scale: float

    def __post_init__(self):
        self.x, self.scale = self.x / 2, self.scale / 2
        self.count, self._cache = len(self.x), None

    @property
    def weight(self):
        if self._cache is None:
            self._cache = torch.ones(self.count, dtype=torch.float64)
        return self._cache

    @cached_property
    def positive(self):
        return (self.x > 0).sum(1)


class Options:
    scale = 1.0


@dataclass
class Optioned:
    """Its constructor makes an object that is changed later, and another one of an object that holds a tensor."""

    x: Tensor
    options: Options = field(default_factory=Options, init=False)

    def __post_init__(self):
        self.nested = having(Options(), inner=having(Options(), weight=self.x[:, 0] + len(self.x)))

    @property
    def scale(self):
        return self.options.scale

    @property
    def weight(self):
        return self.nested.inner.weight - len(self.x) + 5


@dataclass
class Functional:
    x: Tensor

    def __post_init__(self):
        self.to_scale, self.half, self.turn = lambda: 1.0, partial(float, 0.5), turning(1.0)

    @property
    def scale(self):
        return self.to_scale() * self.half() * self.turn(2)


def turning(by):
    return lambda x: x * by


@dataclass
class Lazy:
    """A declared field is its cache, which collate has filled for the whole batch."""

    x: Tensor
    _weight: Tensor | None = field(default=None, init=False)

    @property
    def weight(self):
        if self._weight is None:
            self._weight = self.x[:, 0] + 5
        return self._weight


def lazy(x):
    batch = Lazy(x)
    assert batch.weight is batch.weight
    return batch


@dataclass
class Hidden:
    x: Tensor
    _scale: float | None = field(default=None, init=False)

    @property
    def scale(self):
        return self._scale


@dataclass
class Clipped:
    """Its constructor changes a tensor in place, but never to other values than before."""

    x: Tensor
    counts: Tensor

    def __post_init__(self):
        self.counts.masked_fill_(self.counts > 3, 3)

    @property
    def weight(self):
        return self.counts.double()


@dataclass
class Divided:
    x: Tensor

    def __post_init__(self):
        self.x /= 2


class Listed(list[Any]):
    pass


class Paired(tuple[Any, ...]):
    pass


class Columns(NamedTuple):
    x: Tensor


class Changing(namedtuple("Changing", "x scale")):
    def __new__(cls, x, scale):
        return super().__new__(cls, x, scale * 1.0)


class Annotated(Columns):
    pass


class Strict(dict[str, Any]):
    def __init__(self, *, x):
        super().__init__(x=x)


def later(x):
    return having(Later(x), scale=3.0, weight=x[:, 0] + 5)


def having(batch, **attributes):
    for name, value in attributes.items():
        object.__setattr__(batch, name, value)
    return batch


def optioned(x):
    batch = Optioned(x)
    batch.options.scale = 3.0
    return batch


def holding_itself(x):
    batch = Attributed(x=x)
    batch.parts = [{"whole": batch}]
    return batch


OWN = {
    "fields set later": later,
    "frozen slots": lambda x: having(Frozen(x), scale=3.0),
    "a slot and a variable of the constructor": lambda x: ByHand(x, 3.0),
    "a constructor that changes values": lambda x: Normalised(2 * x, 6.0),
    "an object of the constructor": optioned,
    "functions of the constructor": lambda x: having(
        Functional(x), to_scale=lambda: 3.0, half=partial(float, 1.5), turn=turning(3.0)
    ),
    "a field that is a cache": lazy,
    "a field with an underscore": lambda x: having(Hidden(x), _scale=3.0),
    "a constructor that clips in place": lambda x: Clipped(x, (10 * x[:, 0]).long()),
    "dict": lambda x: having(Attributed(x=x), scale=3.0, weight=x[:, 0] + 5),
    "a dict with arguments of its own": lambda x: having(Strict(x=x), scale=3.0),
    "UserDict": lambda x: having(UserBatch(x=x), scale=3.0),
    "list": lambda x: having(Listed([x]), scale=3.0),
    "tuple": lambda x: having(Paired((x,)), scale=3.0),
    "named tuple": lambda x: having(Annotated(x), scale=3.0),
    "a named tuple that changes a field": lambda x: Changing(x, 3),
}


def scaled_by_attributes(call, batch):
    x = batch["x"] if isinstance(batch, Mapping) else batch[0] if isinstance(batch, tuple | list) else batch.x
    scale = getattr(batch, "scale", None) or getattr(batch, "note", 1.0)  # the defaults hide what is lost
    weight = getattr(batch, "weight", None)
    factor = getattr(batch, "positive", 0.0) + scale * (1.0 if weight is None else weight)
    return call(x).sin().sum(1) * factor


@pytest.mark.parametrize("kind", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS)
@pytest.mark.parametrize("build", OWN.values(), ids=OWN)
def test_a_batch_keeps_what_is_its_own_beside_its_tensors(build, kind):
    """Every row against that of a batch that holds it alone, as the collate function makes it."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    found = collect_gradients(kind(model, resolve_task(scaled_by_attributes), chunk_size=3), build(x))
    for row in range(5):
        f = scaled_by_attributes(model, build(x[row : row + 1])).sum()
        for name, grad in zip(found, torch.autograd.grad(f, list(model.parameters())), strict=True):
            torch.testing.assert_close(found[name][row], grad)


@pytest.mark.parametrize(("build", "message"), [
    (lambda x: (Divided(x),), r"constructor of .* changes a tensor of shape \(5, 4\) in place"),
    (holding_itself, "Attributed, .* holds itself: .* attribute of its own, of class list"),
], ids=["in place", "itself"])  # fmt: skip
def test_a_batch_that_cannot_be_divided_is_refused(build, message):
    with pytest.raises(InvalidInputError, match=message):
        collect_gradients(HookGradientComputer(nn.Linear(4, 3), SQUARES), build(torch.randn(5, 4)))


BATCHES = {2: Named, 3: Encoded, 8: Attributes}
"""Number of shared numbers to the class of the batches."""


def by_columns(call, batch):
    """The product of the sums of a sample's outputs with numbers from its columns, and with all shared numbers."""
    x = batch["x"] if type(batch) is dict else batch.x
    columns = (batch[name] for name in ("source", "place", "share", "ids"))
    values = [
        value * FACTORS[source] * FACTORS[place] * float(share) * sum(ids) * sum(batch["shared"])
        for value, source, place, share, ids in zip(call(x).sum(1), *columns, strict=True)
    ]
    return torch.stack(values)


@pytest.mark.parametrize("num_shared", [1, 2, 3, 8])
@pytest.mark.parametrize("name", [*GRADIENT_COMPUTERS, "auto"])
def test_columns_that_are_no_tensors_are_those_of_their_sample(name, num_shared):
    """10 rows in batches of 8 and 2; a list that samples share has as many entries as some batch has samples."""
    torch.manual_seed(0)
    names = list(FACTORS)
    x = torch.randn(10, 3)
    rows = [(x[i], names[i % 3], names[i % 2], 0.5 + i, list(range(i % 4))) for i in range(10)]
    shared = [1.0 + k for k in range(num_shared)]

    def collate(samples):
        x, source, place, share, ids = zip(*samples, strict=True)
        columns = {"source": list(source), "place": place, "share": np.array(share), "ids": list(ids)}
        return BATCHES.get(num_shared, dict)({"x": torch.stack(x), "shared": shared, **columns})

    settings = {"proj_dim": 20, "dtype": "float32", "batch_size": 8, "progress": False}
    made = Attributor(nn.Linear(3, 2), by_columns, None, collate=collate, gradient_computer=name, **settings)
    made.featurize(rows)
    found = made.score(Rows(rows, name="targets"), method=GradDot(q="off")).numpy()

    each = [FACTORS[one] * FACTORS[other] * share * sum(ids) for _, one, other, share, ids in rows]
    factors = torch.tensor(each).double()[:, None] * sum(shared)
    gradients = factors * torch.cat([x, torch.ones(10, 1)], 1).double()
    expected = 2 * gradients @ gradients.T  # both outputs have the same gradient
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * float(expected.max()))


def total(call, batch):
    return call(batch[0]).sum(1)


def contrast(call, batch):
    """The negative loss of telling a sample from the others of its batch."""
    x = call(batch[0])
    return (x @ x.T).log_softmax(1).diagonal()


def pairs(call, batch):
    """Compares samples that begin with a negative number, of which the first three are one."""
    x, negative = call(batch[0]), batch[0][:, 0] < 0
    return x.sum(1) + ((x @ x.T) * (negative[:, None] & negative).tril(-1)).sum(1)


def mirrored(call, batch):
    """Adds the last sample of a batch of more than three to the first one, and so on."""
    x = call(batch[0]).sum(1)
    return x + x.flip(0).square() * (len(x) > 3)


class SeededNoise(nn.Linear):
    """Adds noise from a generator that every pass seeds anew."""

    def forward(self, x):
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return super().forward(x + noise).square()


class Experts(nn.Module):
    """The sign of a sample's first number chooses its expert, which takes three quarters of a batch at most."""

    def __init__(self, width, out):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, out) for _ in range(2))

    def forward(self, x):
        out = x.new_zeros(len(x), 2)
        for expert, chosen in zip(self.experts, (x[:, 0] < 0, x[:, 0] >= 0), strict=True):
            rows = chosen.nonzero()[:, 0][: max(1, len(x) * 3 // 4)]
            out = out.index_add(0, rows, expert(x[rows]))
        return out


SEVERAL = [
    (layer, output, FunctionalGradientComputer)
    for layer, output in (
        (nn.Linear, contrast),
        (SeededNoise, total),
        (nn.Linear, pairs),
        (nn.Linear, mirrored),
    )
]


ON_HOOKS = [(layer, output, HookGradientComputer) for layer, output, _ in SEVERAL] + [
    (Experts, total, HookGradientComputer)
]


@pytest.mark.parametrize(("layer", "output", "kind"), [*SEVERAL, *ON_HOOKS])
def test_samples_that_depend_on_their_batch_are_computed_alone_with_a_warning(layer, output, kind):
    """The first three samples and all eight fit an expert; of the last four, which choose one, one does not."""
    torch.manual_seed(0)
    model, task = layer(3, 2).double().eval(), resolve_task(output)
    signs = torch.tensor([1, -1, 1, 1, -1, -1, -1, -1])[:, None]
    batch = (torch.rand(8, 3, dtype=torch.float64) * signs,)
    with pytest.raises(UnsupportedModelError, match=r"depends on the other samples .*'iterative'") as raised:
        collect_gradients(kind(model, task), batch)
    assert "'functional'" not in str(raised.value)
    with pytest.warns(
        UserWarning, match=r"alone, with the padding of its batch\..*'contrastive', put the other"
    ):
        name, reason, computer = choose_gradient_computer(model, task, batch)
    assert name == "iterative"
    assert layer is not Experts or "hook: Experts: f of a sample depends on" in reason
    assert_same(collect_gradients(computer, batch), by_loop(model, output, batch))


@pytest.mark.parametrize("output", [pairs, mirrored])
def test_samples_that_depend_on_a_larger_batch_than_the_first_are_refused(output):
    torch.manual_seed(0)
    computer = FunctionalGradientComputer(nn.Linear(3, 2).double().eval(), resolve_task(output))
    x = torch.rand(8, 3, dtype=torch.float64) * torch.tensor([1, -1, 1, 1, -1, -1, -1, -1])[:, None]
    collect_gradients(computer, (x[:3],))
    with pytest.raises(UnsupportedModelError, match="depends on the other samples"):
        collect_gradients(computer, (x,))


def test_a_batch_of_one_tensor_of_integers_is_compared_in_float64():
    task = resolve_task(lambda model_call, ids: model_call(ids).sum(1) + (torch.arange(len(ids)) > 9))
    computer = HookGradientComputer(nn.Embedding(9, 2).eval(), task)
    with pytest.raises(UnsupportedModelError, match="depends on the other samples"):
        collect_gradients(computer, torch.arange(16) % 9)


def passes_of(model):
    """Return a list that gets the size of every batch that the model runs on."""
    sizes = []
    model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    return sizes


@pytest.mark.parametrize("kind", ["functional", "iterative", "hook"])
def test_no_comparison_takes_more_samples_than_a_chunk(kind):
    model = nn.Linear(3, 2).eval()

    def mapped(model_call, batch):  # hooks do not see what vmap reads
        return total(model_call, batch) + torch.vmap(lambda row: (model.weight @ row).sum())(batch[0])

    sizes, task = passes_of(model), resolve_task(mapped if kind == "hook" else total)
    with suppress(*[UnsupportedModelError] * (kind == "hook")):
        collect_gradients(GRADIENT_COMPUTERS[kind](model, task, chunk_size=9), (torch.randn(32, 3),))
    assert max(sizes) == 9


def test_auto_compares_the_first_batch_once():
    model, batch = nn.Linear(3, 2).eval(), (torch.randn(32, 3),)
    sizes = passes_of(model)
    collect_gradients(choose_gradient_computer(model, resolve_task(total), batch).computer, batch)
    assert (sizes.count(32), sizes.count(16)) == (2, 2)


def test_a_list_of_the_tensors_of_each_sample_is_named_where_no_sample_alone_shows_it():
    """It is known which entries are a sample's only if there is a collate function to take one alone."""
    boxes = [torch.rand(4, 2) for _ in range(4)]
    task = resolve_task(
        lambda call, batch: torch.stack(
            [(o - b).sum() for o, b in zip(call(batch[0]), batch[1], strict=False)]
        )
    )
    with pytest.warns(UserWarning, match="a list with an entry per sample .* pad and stack its entries"):
        choose_gradient_computer(nn.Linear(3, 2).eval(), task, (torch.rand(4, 3), boxes))


@pytest.mark.parametrize("name", GRADIENT_COMPUTERS)
def test_parameters_of_no_entries_have_no_features(name):
    torch.manual_seed(0)
    held = {"linear": nn.Linear(3, 2), "extra": nn.Parameter(torch.empty(0, 3))}
    model = Model(lambda s, x: s.linear(x) + (x @ s.extra.T).sum(1, keepdim=True), **held)
    rows = [(row,) for row in torch.randn(5, 3)]
    settings = {"projector": "none", "dtype": "float32", "progress": False, "gradient_computer": name}
    made = Attributor(model, total, None, **settings)
    made.featurize(rows)
    x = torch.cat([torch.stack([row for (row,) in rows]), torch.ones(5, 1)], 1)
    expected = (2 * x @ x.T).numpy()  # both outputs have the same gradient
    np.testing.assert_allclose(made.score(rows, method=GradDot(q="off")).numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["functional", "iterative"])
def test_a_small_difference_of_large_numbers_is_not_taken_for_a_mixture_of_samples(name):
    torch.manual_seed(0)
    model, x = nn.Linear(64, 1).eval(), torch.randn(8, 64)
    values = (model(x) + 1e-6 * torch.randn(8, 1)).detach()  # almost fitted: f is rounding to a tenth
    task = resolve_task(lambda call, batch: (call(batch[0]) - batch[1]).squeeze(1))
    found = collect_gradients(GRADIENT_COMPUTERS[name](model, task), (x, values))
    torch.testing.assert_close(found["weight"].squeeze(1), x)


# ---- The automatic choice, and its reason in the log and in the manifest
@pytest.mark.quick
def test_the_functional_computer_is_next_and_the_iterative_one_last():
    torch.manual_seed(0)
    model, batch = nn.Linear(3, 2).double(), (torch.randn(4, 3, dtype=torch.float64),)

    def loop(call, batch):
        return torch.stack([call(x).sum() for x in batch[0]])

    def branch(call, batch):
        return torch.stack([call(x).sum() * (2 if x.sum() > 0 else 1) for x in batch[0]])

    name, reason, _ = choose_gradient_computer(model, resolve_task(loop), batch, "weight")
    assert name == "functional"
    assert reason.startswith("hook: The model runs")
    assert "without a loop over samples" in reason
    name, reason, computer = choose_gradient_computer(model, resolve_task(branch), batch)
    assert name == "iterative"
    assert "functional: torch.func.vmap cannot transform" in reason
    assert "gradient_computer=" not in reason  # the others are refused or slower
    assert_same(collect_gradients(computer, batch), by_loop(model, branch, batch))


def test_the_last_resort_is_tried_under_autocast_and_on_one_sample_at_a_time():
    seen = []

    def forward(s, x):
        row = x.reshape(1, 4)
        return s.linear(row) * row.sum().item()  # which vmap cannot read

    def output(call, batch):
        out = call(batch[0])
        seen.append(out.dtype)
        return out.float().sum(1)

    model, settings = Model(forward, linear=nn.Linear(4, 4)), {"autocast_dtype": torch.bfloat16}
    name, reason, _ = choose_gradient_computer(model, resolve_task(output), (torch.ones(3, 4),), **settings)
    assert name == "iterative"
    assert "hook: RuntimeError: shape '[1, 4]' is invalid" in reason
    assert {*seen} == {torch.bfloat16}
    images = make(CNN)
    assert choose_gradient_computer(images[0], MARGIN, images[1], nn.BatchNorm2d)[0] == "hook"


@pytest.mark.parametrize("name", ["auto", "functional", "iterative"])
def test_an_f_of_one_sample_takes_batches_of_one(name):
    """The loss of a model of transformers is a mean, which is that of the sample in a batch of one."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    settings = {"projector": "none", "dtype": "float32", "progress": False}
    mean = lambda call, batch: call(batch[0]).square().mean().reshape(1)  # noqa: E731
    made = Attributor(model, mean, None, **settings, gradient_computer=name, batch_size=1)
    made.featurize([(row,) for row in x])
    grads = torch.cat([model(x)[:, :, None] * x[:, None], model(x)[:, :, None]], 2).flatten(1).detach()
    found = made.score([(row,) for row in x], method=GradDot(q="off")).numpy()
    np.testing.assert_allclose(found, (grads @ grads.T).numpy(), rtol=1e-5)
    with pytest.raises(InvalidInputError, match=r"shape \(1,\)"):
        Attributor(model, mean, None, **settings, batch_size=4).featurize([(row,) for row in x])


def test_the_manifest_holds_the_reason_of_a_choice(tmp_path):
    data = TensorDataset(torch.randn(6, 4), torch.randint(3, (6,)))
    for choice, reason in (("auto", "every kept parameter is covered"), ("hook", None)):
        settings = {"proj_dim": 4, "gradient_computer": choice, "device": "cpu"}
        Attributor(nn.Linear(4, 3), "image_classification", tmp_path / choice, **settings).featurize(data)
        with ZarrFeatureStore.open(tmp_path / choice) as store:
            assert store.manifest.made_with.get("gradient_computer_reason") == reason


UNKNOWN = type("Unknown", (Exception,), {})


@pytest.mark.parametrize("error", [AssertionError, ZeroDivisionError, UNKNOWN, NameError, OSError])
def test_any_failure_leads_to_the_next_computer_and_that_of_all_is_told(error):
    def forward(s, x):
        s.calls += 1
        if s.calls in s.failing:
            raise error
        return s.linear(x)

    torch.manual_seed(0)
    batch, task = (torch.randn(3, 4),), resolve_task(total)
    once = Model(forward, linear=nn.Linear(4, 3), calls=0, failing=[1])  # where the hooks' tensors read it
    name, reason, _ = choose_gradient_computer(once, task, batch)
    assert (name, error.__name__ in reason) == ("functional", True)
    always = Model(forward, linear=nn.Linear(4, 3), calls=0, failing=range(1, 1000))
    with pytest.raises(error):
        choose_gradient_computer(always, task, batch)


# ---- The public conformance kits, on what the package itself offers
class TestEveryComputer(GradientComputerTests):
    @pytest.fixture(autouse=True, params=COMPUTERS.values(), ids=COMPUTERS)
    def _kind(self, request):
        self.kind = request.param

    def make_computer(self, model, task):
        return self.kind(model, task)


Q_CHANGES = {
    "wrong sign": torch.neg,
    "mean of the batch": lambda q: q.mean().expand_as(q),
    "size alone": torch.abs,
}


@pytest.mark.parametrize("change", Q_CHANGES.values(), ids=Q_CHANGES)
@pytest.mark.parametrize("in_the_pass", [True, False])
def test_the_kit_fails_for_another_q(change, in_the_pass):
    class Wrong(FunctionalGradientComputer):
        def stream_gradients(self, batch, sink):
            terms = super().stream_gradients(batch, sink)
            return terms._replace(out_to_loss_grad=change(terms.out_to_loss_grad)) if in_the_pass else terms

        def compute_loss_grad(self, batch):
            q = super().compute_loss_grad(batch)
            return q if in_the_pass else change(q)

    class Kit(GradientComputerTests):
        def make_computer(self, model, task):
            return Wrong(model, task)

    with pytest.raises(AssertionError):
        Kit().test_one_pass_gives_f_q_and_w_as_well()


def test_the_kit_fails_for_a_computer_that_keeps_its_first_model():
    class Stale(FunctionalGradientComputer):
        def load_model_params(self, model):
            """Ignore other models."""

    class Kit(GradientComputerTests):
        def make_computer(self, model, task):
            return Stale(model, task)

    with pytest.raises(AssertionError, match="differ by"):
        Kit().test_later_calls_use_the_model_and_the_weights_that_were_loaded_last()


class TestAUsersRule(GradientRuleTests):
    """A layer that torch cannot see into, with the rule that its author wrote."""

    def make_layer(self):
        return ruled(lambda x, grad: {"weight": (2 * grad * x).sum(1)})()

    def make_input(self, count):
        return (torch.randn(count, 5, 4),)


@every_computer
def test_overriding_a_method_of_the_originals_is_honoured_by_the_stream(computer):
    class Tripled(computer):
        def compute_per_sample_grad(self, batch):
            return {name: 3 * grad for name, grad in super().compute_per_sample_grad(batch).items()}

        def compute_loss_grad(self, batch):
            return 5 * super().compute_loss_grad(batch)

    model, batch = nn.Linear(3, 1), (torch.randn(2, 3), torch.randn(2))
    blocks = {}

    def keep(block):
        blocks[block.name] = block.dense()

    plain = computer(model, resolve_task("regression")).stream_gradients(batch, keep)
    once = dict(blocks)
    terms = Tripled(model, resolve_task("regression")).stream_gradients(batch, keep)
    torch.testing.assert_close(blocks["weight"], 3 * once["weight"])
    torch.testing.assert_close(terms.out_to_loss_grad, 5 * plain.out_to_loss_grad)


class Adapted(nn.Module):
    """A frozen layer and an adapter, with the weights of the layer in its attributes, as PEFT has them."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.adapter = nn.Linear(layer.in_features, layer.out_features)

    weight = property(lambda self: self.layer.weight)
    bias = property(lambda self: self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.adapter(x)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", GRADIENT_COMPUTERS)
def test_adapters_in_a_transformer_layer_of_torch_have_the_gradients_of_training(name):
    """In eval mode torch's fast path reads ``linear1.weight`` and calls no module."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True).requires_grad_(False)
    encoder.linear1 = Adapted(encoder.linear1)
    model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(20, 1))
    batch, kept = (torch.randn(3, 5, 4),), [p for p in model.parameters() if p.requires_grad]
    assert model.training
    outputs = model(batch[0])[:, 0]
    rows = [torch.autograd.grad(f, kept, retain_graph=True) for f in outputs]
    model.eval()

    computer = GRADIENT_COMPUTERS[name](model, resolve_task(total))
    for found, *expected in zip(collect_gradients(computer, batch).values(), *rows, strict=True):
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(computer.terms(batch).output, outputs)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_frozen_transformer_layers_without_adapters_give_f_of_the_users_own_pass():
    """torch's fast path has zeros at padded positions, which this sum reads."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1).requires_grad_(
        False
    )
    forward = lambda s, x, pad: s.head(s.encoder(x, src_key_padding_mask=pad).sum(1))  # noqa: E731
    model = Model(forward, encoder=encoder, head=nn.Linear(4, 1)).eval()
    batch = torch.randn(3, 5, 4), torch.arange(5) >= torch.tensor([[5], [3], [2]])
    with torch.no_grad():
        expected = model(*batch)[:, 0]
    computer = GRADIENT_COMPUTERS["iterative"](model, resolve_task(lambda call, batch: call(*batch)[:, 0]))
    torch.testing.assert_close(computer.terms(batch).output, expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("name", [*GRADIENT_COMPUTERS, "auto"])
def test_an_f_that_depends_on_which_parameters_require_grad_is_refused(name, reads):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).requires_grad_(False)
    forward = lambda s, x: s.encoder(x) * (2.0 if reads and s.encoder.linear1.weight.requires_grad else 1.0)  # noqa: E731
    model, batch = Model(forward, encoder=encoder).eval(), (torch.randn(3, 5, 4),)
    task = resolve_task(lambda call, batch: call(*batch).square().sum((1, 2)))
    run = partial(choose_gradient_computer, model, task, batch, ["encoder.linear1.weight"])
    if name != "auto":
        kind = GRADIENT_COMPUTERS[name]
        run = partial(collect_gradients, kind(model, task, grad_wrt=["encoder.linear1.weight"]), batch)
    if not reads:
        run()
        return
    with pytest.raises(
        UnsupportedModelError, match="f of Model is another one if only the 1 chosen parameters"
    ):
        run()
