"""What other engines get wrong in silence is right here, or is refused by name."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Net, Opaque, assert_exact, assert_same, by_loop, hooked, rows, wavy
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from trak_lite.errors import InvalidInputError, UnsupportedModelError
from trak_lite.gradient_computers import (
    GRADIENT_COMPUTERS,
    HookGradientComputer,
    collect_gradients,
    register_gradient_rule,
)
from trak_lite.modelout_functions import ModelCall, resolve_task

WAVY = resolve_task(wavy)


@pytest.mark.parametrize("inner", [torch.float32, torch.bfloat16])
def test_a_parameter_that_is_also_used_in_a_lower_precision_is_not_refused(inner: torch.dtype) -> None:
    model, computer = hooked(
        lambda s, x: s.a(x) + F.linear(x.to(inner), s.a.weight.to(inner)).double(),
    )

    found = collect_gradients(computer, (rows(5),))["a.weight"]

    expected = by_loop(model, wavy, (rows(5),))["a.weight"]
    assert float((found - expected).norm()) < 2e-2 * float(expected.norm())


# What hooks cannot see, and the rules that users write for it


def ruled(rule: Callable[[Tensor, Tensor], dict[str, Tensor]]) -> type[Opaque]:
    """Return a new class of layers with a rule of the input and the output gradient."""

    class Ruled(Opaque):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    register_gradient_rule(Ruled)(lambda module, args, kwargs, grad: rule(args[0], grad))
    return Ruled


def right(x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    return {"weight": 2 * grad * x}


def stacked(layer: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), layer).double().eval()


@pytest.mark.parametrize("self_check", [True, False])
def test_without_strict_it_is_zero_and_listed(self_check: bool) -> None:
    model, batch = stacked(Opaque()), (rows(3),)
    computer = HookGradientComputer(model, WAVY, strict=False, self_check=self_check)

    found = collect_gradients(computer, batch)

    assert not found["1.weight"].any()
    expected = by_loop(model, wavy, batch, ["0.weight"])["0.weight"]
    torch.testing.assert_close(found["0.weight"], expected, rtol=1e-10, atol=1e-12)
    coverage = computer.explain(batch)
    assert not coverage.complete
    assert (coverage["0.weight"].how, coverage["1.weight"].how) == ("rule", "refused")
    assert coverage["1.weight"].why.endswith("its rows are zero, as strict=False asks for")


def test_a_registered_rule_covers_it_also_in_subclasses_that_keep_forward() -> None:
    class Same(ruled(right)):  # type: ignore[misc]
        pass

    class Other(Same):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    for kind in (Same.__base__, Same):
        computer = assert_exact(stacked(kind()), (rows(4),))
        assert computer.explain((rows(4),))["1.weight"].why == f"rule of {kind.__name__}"
    with pytest.raises(UnsupportedModelError, match="hooks cannot see"):
        assert_exact(stacked(Other()), (rows(4),))


class Sideways(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


def packed_projection(s: Net, x: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, torch.full((len(x),), 5), batch_first=True)
    return pad_packed_sequence(s.rnn(packed)[0], batch_first=True)[0]


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, proj_size=2, batch_first=True)

    forward = packed_projection


class ComplexWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.fft.fft(x) * self.weight).abs()


def inner_gradient(s: Net, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        energy = s.b(s.a(x).tanh()).tanh().sum()
        (found,) = torch.autograd.grad(energy, x, create_graph=True)
    return found


def changed_input(s: Net, x: Tensor) -> Tensor:
    x = s.a(x)
    y = s.b(x)
    x.add_(1.0)
    return y


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "an input changed in place": (changed_input, "input of linear was changed in place"),
    "a gradient taken inside f": (inner_gradient, r"itself computes a gradient through linear"),
    "statistics of the batch": (
        lambda s, x: F.batch_norm(x[:, 0], None, None, s.p, training=True),
        r"training mode|self-check",
    ),
    "a parameter times a batch statistic": (
        lambda s, x: s.a(x[:, 0]) + s.p * s.a(x[:, 0]).mean(0),
        "no batch axis although it reads the samples",
    ),
    "samples that reach each other": (
        lambda s, x: s.a(x) - s.a(x).mean(0),
        "f of one sample depends on values of another sample",
    ),
    "pairs of samples": (
        lambda s, x: s.slope * (x[:, 0] @ x[:, 0].t()),
        r"more than one axis of its shape \(2, 2\) grows",
    ),
    "a row appended to the batch": (
        lambda s, x: torch.cat([x[:, 0], s.row]).cumsum(0)[1:],
        "axis 0 has 3 entries for 2 samples and 4 for 3",
    ),
    "a reentrant checkpoint": (
        lambda s, x: checkpoint(s.b, s.a(x), use_reentrant=True),
        "use_reentrant=False",
    ),
    "as many parameters as samples": (
        lambda s, x: s.a(x[:, 0]) * torch.stack([s.p] * len(x)),
        "functional",
    ),
    "look-ups scaled by frequency": (
        lambda: nn.Embedding(4, 3, scale_grad_by_freq=True),
        "scale_grad_by_freq",
    ),
    "packed projections": (Projected, "proj_size"),
    "dropout in a recurrent layer": (
        lambda: nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True).train(),
        "dropout masks",
    ),
    "complex parameters": (ComplexWeight, r"\['weight'\] are complex"),
    "an autograd function": (lambda: stacked(Opaque()), r"\['1.weight'\].*hooks cannot see"),
    "a rule that leaves a parameter out": (ruled(lambda x, g: {}), r"no gradient for \['weight'\]"),
    "a wrong rule": (
        ruled(lambda x, g: {"weight": (g * x).sum(1)}),
        "self-check failed: the gradient of 'weight'",
    ),
    "a ruled layer with samples on axis 1": (
        lambda: Sideways(ruled(right)()),
        "needs one result with the samples on axis 0",
    ),
}


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED)
def test_what_hooks_cannot_follow_is_refused_by_name_and_told_by_the_coverage(
    build: Callable[..., Any], message: str
) -> None:
    torch.manual_seed(0)
    takes_input = getattr(getattr(build, "__code__", None), "co_argcount", 0) == 2
    model = Net(build).double().eval() if takes_input else build().double()
    batch = (torch.randint(4, (3, 2)),) if isinstance(model, nn.Embedding) else (rows(3, 5),)
    computer = HookGradientComputer(model, WAVY)

    with pytest.raises(UnsupportedModelError, match=message):
        collect_gradients(computer, batch)

    coverage = HookGradientComputer(model, WAVY).explain(batch)
    assert "refused" in {line.how for line in coverage}, str(coverage)


@pytest.mark.parametrize("through_a_layer", [True, False])
def test_a_gradient_inside_f_is_refused_if_it_depends_on_parameters(through_a_layer: bool) -> None:
    def forward(s: Net, x: Tensor) -> Tensor:
        first = s.a(x)
        hidden = s.norm(first)
        if hidden.requires_grad:
            of = first if through_a_layer else hidden
            (inner,) = torch.autograd.grad(hidden.sin().sum(), of, create_graph=True)
            hidden = hidden + inner
        return s.b(hidden)

    model, computer = hooked(forward, self_check=False)

    for _ in range(2):
        if through_a_layer:
            with pytest.raises(UnsupportedModelError, match="itself computes a gradient"):
                collect_gradients(computer, (rows(3),))
        else:
            assert_exact(model, (rows(3),), computer=computer)


def test_a_loop_over_samples_is_refused() -> None:
    def output(call: ModelCall, batch: Any) -> Tensor:
        return torch.stack([call(x).sum() for x in batch[0]])

    with pytest.raises(UnsupportedModelError, match="without a loop over samples"):
        assert_exact(nn.Linear(4, 2).double(), (rows(4),), output)


def test_an_interrupted_pass_leaves_nothing_behind() -> None:
    interrupts = [False]

    def forward(s: Net, x: Tensor) -> Tensor:
        hidden = s.a(x[:, 0])
        if interrupts[0]:
            raise KeyboardInterrupt
        return s.b(hidden)

    model = Net(forward).double().eval()
    computer = assert_exact(model, (rows(3, 5),))
    interrupts[0] = True
    with pytest.raises(KeyboardInterrupt):
        collect_gradients(computer, (rows(3, 5),))
    interrupts[0] = False
    assert torch._C._len_torch_function_stack() == 0
    assert_exact(model, (rows(3, 5),), computer=computer)


@pytest.mark.parametrize("first_read", [0, 1])
def test_an_output_function_that_reads_a_parameter_gets_its_gradient_or_is_refused(first_read: int) -> None:
    """Operations outside the model are intercepted only if the first batch has some on parameters."""
    model, number = nn.Linear(4, 2).double(), [0]

    def output(call: ModelCall, batch: Any) -> Tensor:
        value = call(batch[0]).sin().sum(1)
        return value * call.model.weight.square().sum() if number[0] >= first_read else value

    computer = assert_exact(model, (rows(3),), output)
    number[0] = 1
    if first_read:
        with pytest.raises(UnsupportedModelError, match="hooks cannot see"):
            collect_gradients(computer, (rows(3),))
    else:
        assert_exact(model, (rows(3),), output, computer=computer)


def other_path(s: Net, x: Tensor) -> Tensor:
    return s.a(x) if x.sum() > 0 else s.a(x) * s.b.weight.sum()


def shorter_path(s: Net, x: Tensor) -> Tensor:
    return s.b(s.a(x)) if x.sum() > 0 else s.a(x)


def ruled_path(s: Net, x: Tensor) -> Tensor:
    return s.a(x) if x.sum() > 0 else s.ruled(x)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (other_path, "operations of the model differ from those of the first batch"),
        (shorter_path, "ran 1 operations on its parameters, but 2 for the first batch"),
        (ruled_path, "operations of the model differ from those of the first batch.*Ruled"),
    ],
)
def test_another_path_than_the_examined_one_is_refused(forward: Any, message: str) -> None:
    model, computer = hooked(forward)
    model.ruled = ruled(right)().double()
    collect_gradients(computer, (torch.ones(4, 4).double(),))

    with pytest.raises(UnsupportedModelError, match=message):
        collect_gradients(computer, (-torch.ones(4, 4).double(),))


# Unused parameters, and the coverage


class Idle(nn.Module):
    """One layer runs for nothing, the others do not run at all."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)
        self.never, self.recurrent = nn.Parameter(torch.ones(2)), nn.GRU(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        self.recurrent(x.unsqueeze(1))
        return self.used(x)


@pytest.mark.parametrize(
    ("names", "idle"),
    [
        (["used.*", "never"], ["never"]),
        (["used.*", "unused.bias"], ["unused.bias"]),
        (["used.*", "recurrent.weight_*"], ["recurrent.weight_ih_l0", "recurrent.weight_hh_l0"]),
    ],
)
def test_an_unused_layer_is_zero_and_refused_by_name_where_every_gradient_is_asked_for(
    names: list[str], idle: list[str]
) -> None:
    torch.manual_seed(0)
    model, batch = Idle().double(), (rows(4),)
    for strict in (None, False):
        found = assert_exact(
            model, batch, grad_wrt=names, strict=strict, names=["used.weight", "used.bias", *idle]
        ).explain(batch)
        assert {line.name: line.how for line in found} == {
            "used.weight": "rule",
            "used.bias": "rule",
            **dict.fromkeys(idle, "zero"),
        }
    with pytest.raises(UnsupportedModelError) as caught:
        assert_exact(model, batch, grad_wrt=names, strict=True)
    assert f"no operation that reads {idle}" in str(caught.value)
    assert_exact(model, batch, grad_wrt="used.*", strict=True, names=["used.weight", "used.bias"])


def test_the_coverage_prints_as_a_table_and_is_checked_as_a_run_is() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.PReLU()).double()
    table = str(HookGradientComputer(model, WAVY).explain((rows(4),))).splitlines()
    assert table[0].split() == ["parameter", "how", "why"]
    assert table[1] == "0.weight   rule      linear"
    assert table[3].startswith("1.weight   fallback  vmap of the operation (prelu)")

    _, mixing = hooked(lambda s, x: s.b(s.a(x) - s.a(x).detach().mean(0)))
    assert all("self-check failed" in line.why for line in mixing.explain((rows(3),)))
    _, hidden = hooked(
        lambda s, x: torch.func.vmap(torch.func.grad(lambda row: s.a(row).tanh().sum()))(x) + s.b(x)
    )
    lines = hidden.explain((rows(3),))
    assert {line.how for line in lines} == {"refused"}
    assert all("Hooks cannot follow Net" in line.why for line in lines)
    with pytest.raises(InvalidInputError, match="at least one sample"):
        mixing.explain((rows(0),))
    with pytest.raises(InvalidInputError, match="class of modules"):
        register_gradient_rule(nn.Linear(2, 2))  # type: ignore[arg-type]


# The pass and its caller


def test_blocks_come_during_the_backward_pass_last_layer_first_and_a_failing_sink_leaves_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.GRU(3, 2, batch_first=True)).double()
    computer, batch = HookGradientComputer(model, WAVY), (rows(3, 2),)
    names: list[str] = []
    computer.stream_gradients(batch, lambda block: names.append(block.name))
    assert names[-2:] == ["0.weight", "0.bias"]

    class Full(Exception):
        pass

    def sink(block: Any) -> None:
        raise Full

    with pytest.raises(Full):
        computer.stream_gradients(batch, sink)

    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert_exact(model, batch, computer=computer)


def test_a_computer_that_was_called_inside_anothers_sink_works_afterwards() -> None:
    model, outer = hooked(lambda s, x: s.b(s.a(x).tanh()))
    inner = HookGradientComputer(model, WAVY, grad_wrt="a.*")
    refused: list[UnsupportedModelError] = []

    def sink(block: Any) -> None:
        try:
            collect_gradients(inner, (rows(3),))
        except UnsupportedModelError as error:
            refused.append(error)

    outer.stream_gradients((rows(3),), sink)

    assert refused
    assert_exact(model, (rows(3),), computer=inner, names=["a.weight", "a.bias"])


def turned(s: Net, x: Tensor, turn: bool) -> Tensor:
    hidden = s.a(x).tanh()
    return s.b(hidden.transpose(0, 1)).transpose(0, 1).sin() if turn else s.b(hidden.sin())


@dataclass
class Flagged:
    x: Tensor
    turn: bool


FLAGS: dict[str, Callable[[Tensor, bool], Any]] = {
    "tuple": lambda x, turn: (x, turn),
    "list": lambda x, turn: [x, turn],
    "dataclass": Flagged,
    "dict": lambda x, turn: {"x": x, "turn": turn},
    "mapping that is no dict": lambda x, turn: UserDict(x=x, turn=turn),
    "keys": lambda x, turn: {"x": x, "on" if turn else "off": 1},
}


@pytest.mark.parametrize("kind", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS)
@pytest.mark.parametrize("pack", FLAGS.values(), ids=FLAGS)
def test_a_flag_in_a_batch_of_any_container_makes_another_structure_of_it(pack: Any, kind: Any) -> None:
    """The original refuses batches in dicts."""

    def read(batch: Any) -> tuple[Tensor, bool]:
        if isinstance(batch, Mapping):
            return batch["x"], "on" in batch or bool(batch.get("turn"))
        return (batch.x, batch.turn) if isinstance(batch, Flagged) else tuple(batch)

    model, _ = hooked(turned)
    computer = kind(model, resolve_task(lambda call, batch: wavy(call, read(batch))))

    for turn in (False, True, False):
        expected = by_loop(model, lambda call, batch, t=turn: wavy(call, (*batch, t)), (rows(4, 4),))
        assert_same(collect_gradients(computer, pack(rows(4, 4), turn)), expected)


def test_only_the_newest_structures_are_remembered() -> None:
    """A model is examined again where its batch is of none of the newest 64 structures."""
    model, computer = hooked(lambda s, x: s.a(x), self_check=False)
    runs: list[int] = []
    model.register_forward_hook(lambda *_: runs.append(1))

    def examined(length: int) -> bool:
        runs.clear()
        collect_gradients(computer, (rows(1, length),))
        return len(runs) > 1

    assert all(examined(length) for length in range(1, 66))
    assert not any(examined(length) for length in (2, 65))
    assert examined(1)
    assert (examined(3), examined(2)) == (True, False)


# Random numbers that an operation draws itself


class Attending(nn.Module):
    """Attention draws its own dropout mask; its keys and values, or its bias, are parameters."""

    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.query, self.biased = nn.Linear(4, 8), biased
        self.key, self.value = (nn.Parameter(torch.randn(1, 2, 3, 4)) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(1, 2, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).view(-1, 2, 1, 4)
        bias = self.bias if self.biased else None
        return F.scaled_dot_product_attention(query, self.key, self.value, bias, dropout_p=0.5).flatten(1)


@pytest.mark.parametrize("biased", [True, False])
def test_an_operation_that_runs_again_draws_the_same_mask(biased: bool) -> None:
    torch.manual_seed(0)
    model, batch = Attending(biased).double(), (rows(5),)
    computer = HookGradientComputer(model, WAVY, self_check=False)
    collect_gradients(computer, batch)  # the model is examined
    torch.manual_seed(5)
    found = collect_gradients(computer, batch)
    after = torch.rand(3)
    torch.manual_seed(5)
    total = wavy(ModelCall(model), batch).sum()

    assert torch.equal(torch.rand(3), after)
    used = [name for name in found if biased or name != "bias"]
    for name, grad in zip(
        used, torch.autograd.grad(total, [model.get_parameter(n) for n in used]), strict=True
    ):
        torch.testing.assert_close(found[name].sum(0), grad, rtol=1e-10, atol=1e-12)
