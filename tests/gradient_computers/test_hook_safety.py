"""What other engines get wrong in silence is right here, or is refused by name."""

import copy
import gc
import threading
import weakref
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from models import (
    CASES,
    Model,
    Net,
    Opaque,
    Tagged,
    assert_exact,
    assert_same,
    by_loop,
    classify,
    hooked,
    make,
    rows,
    ruled,
    wavy,
)
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_along
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode
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
def test_a_parameter_that_is_also_used_in_a_lower_precision_is_not_refused(inner):
    model, computer = hooked(lambda s, x: s.a(x) + F.linear(x.to(inner), s.a.weight.to(inner)).double())
    found = collect_gradients(computer, (rows(5),))["a.weight"]
    expected = by_loop(model, wavy, (rows(5),))["a.weight"]
    assert float((found - expected).norm()) < 2e-2 * float(expected.norm())


# ---- What hooks cannot see, and the rules that users write for it
def right(x, grad):
    return {"weight": 2 * grad * x}


def stacked(layer):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), layer).double().eval()


@pytest.mark.parametrize("self_check", [True, False])
def test_without_strict_it_is_zero_and_listed(self_check):
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


def test_a_registered_rule_covers_it_also_in_subclasses_that_keep_forward():
    class Same(ruled(right)):  # type: ignore[misc]
        pass

    class Other(Same):
        def forward(self, x):
            return super().forward(x) + 1

    for kind in (Same.__base__, Same):
        computer = assert_exact(stacked(kind()), (rows(4),))
        assert computer.explain((rows(4),))["1.weight"].why == f"rule of {kind.__name__}"
    with pytest.raises(UnsupportedModelError, match="hooks cannot see"):
        assert_exact(stacked(Other()), (rows(4),))


def inner_gradient(s, x):
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        energy = s.b(s.a(x).tanh()).tanh().sum()
        (found,) = torch.autograd.grad(energy, x, create_graph=True)
    return found


def changed_input(s, x):
    x = s.a(x)
    y = s.b(x)
    x.add_(1.0)
    return y


def alone(s, x):
    """Runs one operation more if the batch has samples of both signs, which no sample alone has."""
    signs = x[:, 0] > 0
    out = s.a(x)
    return out if bool(signs.all()) or not bool(signs.any()) else out + s.a.bias


def nested(s, x):
    found = torch.nested.as_nested_tensor([row[: 1 + i % 2] for i, row in enumerate(s.a(x))])
    return found.to_padded_tensor(0.0).flatten(1)


def packed_projection(s, x):
    packed = pack_padded_sequence(x, torch.full((len(x),), 5), batch_first=True)
    return pad_packed_sequence(s.rnn(packed)[0], batch_first=True)[0]


def on_axis_1(s, x):
    return s.layer(x.transpose(0, 1)).transpose(0, 1)


def of_branches(change, other=torch.cos, flag=True):
    """The last layer reads what a branch computes from the input alone, or from what it captures."""

    def forward(s, x):
        on = torch.tensor(flag)
        return s.b(torch.cond(on, lambda v: change(s, v), other, (x,)) + 0 * s.a(x))

    return forward


def captured_activation(s, x):
    hidden = s.a(x)
    return s.b(torch.cond(torch.tensor(True), lambda v: v * hidden, torch.cos, (x,)))


def unseen(s, x):
    with torch._C.DisableTorchFunction():
        return s.a(x)


def complex_weight():
    weight = nn.Parameter(torch.randn(4, dtype=torch.complex128))
    return Model(lambda s, x: (torch.fft.fft(x) * s.weight).abs(), weight=weight)


def ruled_path():
    forward = lambda s, x: s.a(x) if x.sum() > 0 else s.ruled(x)  # noqa: E731
    return Model(forward, a=nn.Linear(4, 4), ruled=ruled(right)())


BOTH_SIGNS = rows(4)
BOTH_SIGNS[:, 0] = torch.tensor([1.0, 1.0, -1.0, 1.0])
ANOTHER_PATH = torch.ones(4, 4).double(), -torch.ones(4, 4).double()
REFUSED = {
    "a path that no sample takes alone": (alone, "operations", BOTH_SIGNS),
    "operations of another parameter": (lambda s, x: s.a(x) if x.sum() > 0 else s.a(x) * s.b.weight.sum(),
                                        "operations of the model differ from those of the first batch", *ANOTHER_PATH),
    "fewer operations": (lambda s, x: s.b(s.a(x)) if x.sum() > 0 else s.a(x),
                         "ran 1 operations on its parameters, but 2 for the first batch", *ANOTHER_PATH),
    "a ruled layer that did not run": (ruled_path,
                                       "operations of the model differ from those of the first batch.*Ruled",
                                       *ANOTHER_PATH),
    "nested tensors": (nested, r"nested tensor \(torch.nested\)"),
    "an input changed in place": (changed_input, "input of linear was changed in place"),
    "a gradient taken inside f": (inner_gradient, r"itself computes a gradient through linear"),
    "statistics of the batch": (lambda s, x: F.batch_norm(x[:, 0], None, None, s.p, training=True),
                                r"training mode|self-check"),
    "a parameter times a batch statistic": (lambda s, x: s.a(x[:, 0]) + s.p * s.a(x[:, 0]).mean(0),
                                            "no batch axis although it reads the samples"),
    "samples that reach each other": (lambda s, x: s.a(x) - s.a(x).mean(0),
                                      "f of one sample depends on values of another sample"),
    "pairs of samples": (lambda s, x: s.slope * (x[:, 0] @ x[:, 0].t()),
                         r"more than one axis of its shape \(2, 2\) grows"),
    "a row appended to the batch": (lambda s, x: torch.cat([x[:, 0], s.row]).cumsum(0)[1:],
                                    "axis 0 has 3 entries for 2 samples and 4 for 3"),
    "a reentrant checkpoint": (lambda s, x: checkpoint(s.b, s.a(x), use_reentrant=True), "use_reentrant=False"),
    "as many parameters as samples": (lambda s, x: s.a(x[:, 0]) * torch.stack([s.p] * len(x)), "functional"),
    "look-ups scaled by frequency": (lambda: nn.Embedding(4, 3, scale_grad_by_freq=True), "scale_grad_by_freq"),
    "packed projections": (lambda: Model(packed_projection, rnn=nn.LSTM(4, 4, proj_size=2, batch_first=True)),
                           "proj_size"),
    "dropout in a recurrent layer": (lambda: nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True).train(),
                                     "dropout masks"),
    "complex parameters": (complex_weight, r"\['weight'\] are complex"),
    "a layer that a branch captures": (of_branches(lambda s, x: s.a(x)), "operator cond runs reads a parameter"),
    "a layer that the other branch captures": (of_branches(lambda s, x: s.a(x), flag=False),
                                               "operator cond runs reads a parameter"),
    "a layer that a branch captures out of sight": (of_branches(unseen), "gradient of 'a.weight' differs"),
    "an activation that a branch captures": (captured_activation, "operator cond runs reads"),
    "a layer that a function captures, along an axis": (
        lambda s, x: s.b(map_along(lambda row: s.a(row), x)), "operator map_impl runs reads a parameter"
    ),
    "an autograd function": (lambda: stacked(Opaque()), r"\['1.weight'\].*hooks cannot see"),
    "a transform of torch.func": (lambda s, x: torch.func.vmap(lambda row: row @ s.a.weight)(x),
                                  "a transform of torch.func"),
    "a rule that leaves a parameter out": (ruled(lambda x, g: {}), r"no gradient for \['weight'\]"),
    "a wrong rule": (ruled(lambda x, g: {"weight": (g * x).sum(1)}), "self-check failed: the gradient of 'weight'"),
    "a ruled layer with samples on axis 1": (lambda: Model(on_axis_1, layer=ruled(right)()),
                                             "needs one result with the samples on axis 0"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_hooks_cannot_follow_is_refused_by_name_and_told_by_the_coverage(case):
    """The last batch is refused, those before it are not."""
    build, message, *batches = case
    torch.manual_seed(0)
    takes_input = getattr(getattr(build, "__code__", None), "co_argcount", 0) == 2
    model = Net(build).double().eval() if takes_input else build().double()
    default = torch.randint(4, (3, 2)) if isinstance(model, nn.Embedding) else rows(3, 5)
    *earlier, last = batches or [default]
    computer = HookGradientComputer(model, WAVY)
    for batch in earlier:
        collect_gradients(computer, (batch,))
    with pytest.raises(UnsupportedModelError, match=message):
        collect_gradients(computer, (last,))
    if not batches:
        coverage = HookGradientComputer(model, WAVY).explain((last,))
        assert "refused" in {line.how for line in coverage}, str(coverage)


@pytest.mark.parametrize("first_read", [0, 1])
def test_an_output_function_that_reads_a_parameter_gets_its_gradient_or_is_refused(first_read):
    """Operations outside the model are intercepted only if the first batch has some on parameters."""
    model, number = nn.Linear(4, 2).double(), [0]

    def output(call, batch):
        value = call(batch[0]).sin().sum(1)
        return value * call.model.weight.square().sum() if number[0] >= first_read else value

    computer = assert_exact(model, (rows(3),), output)
    number[0] = 1
    if first_read:
        with pytest.raises(UnsupportedModelError, match="hooks cannot see"):
            collect_gradients(computer, (rows(3),))
    else:
        assert_exact(model, (rows(3),), output, computer=computer)


def test_samples_that_an_output_function_orders_in_some_batches_are_refused():
    """The first batch has equal lengths, so that its plan knows nothing of the order of the others."""

    def output(call, batch):
        x, lengths = batch
        if bool((lengths == lengths[0]).all()):
            return call(x).sin().sum(1)
        order = lengths.argsort()
        return call(x[order])[order.argsort()].sin().sum(1)

    model = nn.Linear(4, 2).double()
    computer = assert_exact(model, (rows(3), torch.tensor([2, 2, 2])), output)
    assert_exact(model, (rows(3), torch.tensor([5, 5, 5])), output, computer=computer)
    with pytest.raises(UnsupportedModelError, match="may mix samples"):
        collect_gradients(computer, (rows(3), torch.tensor([3, 1, 2])))


# ---- Unused parameters, and the coverage
def idle_layers(s, x):
    s.unused(x)
    s.recurrent(x.unsqueeze(1))
    return s.used(x)


@pytest.mark.parametrize(
    ("names", "idle"),
    [
        (["used.*", "never"], ["never"]),
        (["used.*", "unused.bias"], ["unused.bias"]),
        (["used.*", "recurrent.weight_*"], ["recurrent.weight_ih_l0", "recurrent.weight_hh_l0"]),
    ],
)
def test_an_unused_layer_is_zero_and_refused_by_name_where_every_gradient_is_asked_for(names, idle):
    torch.manual_seed(0)
    held = {"used": nn.Linear(4, 2), "unused": nn.Linear(4, 2), "never": nn.Parameter(torch.ones(2))}
    model = Model(idle_layers, **held, recurrent=nn.GRU(4, 2, batch_first=True)).double()
    batch = (rows(4),)
    for strict in (None, False):
        kept = dict.fromkeys(["used.weight", "used.bias"], "rule") | dict.fromkeys(idle, "zero")
        computer = assert_exact(model, batch, grad_wrt=names, strict=strict, names=list(kept))
        assert {line.name: line.how for line in computer.explain(batch)} == kept
    with pytest.raises(UnsupportedModelError) as caught:
        assert_exact(model, batch, grad_wrt=names, strict=True)
    assert f"no operation that reads {idle}" in str(caught.value)
    assert_exact(model, batch, grad_wrt="used.*", strict=True, names=["used.weight", "used.bias"])


def test_the_coverage_prints_as_a_table_and_is_checked_as_a_run_is():
    model = nn.Sequential(nn.Linear(4, 2), nn.PReLU()).double()
    table = str(HookGradientComputer(model, WAVY).explain((rows(4),))).splitlines()
    assert table[0].split() == ["parameter", "how", "why"]
    assert table[1] == "0.weight   rule      linear"
    assert table[3].startswith("1.weight   fallback  vmap of the operation (prelu)")
    _, mixing = hooked(lambda s, x: s.b(s.a(x) - s.a(x).detach().mean(0)))
    assert all("self-check failed" in line.why for line in mixing.explain((rows(3),)))
    inner = lambda s: torch.func.grad(lambda row: s.a(row).tanh().sum())  # noqa: E731
    _, hidden = hooked(lambda s, x: torch.func.vmap(inner(s))(x) + s.b(x))
    lines = hidden.explain((rows(3),))
    assert {line.how for line in lines} == {"refused"}
    assert all("Hooks cannot follow Net" in line.why for line in lines)
    with pytest.raises(InvalidInputError, match="at least one sample"):
        mixing.explain((rows(0),))
    with pytest.raises(InvalidInputError, match="class of modules"):
        register_gradient_rule(nn.Linear(2, 2))  # type: ignore[arg-type]


# ---- The pass and its caller
def test_blocks_come_during_the_backward_pass_last_layer_first():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.GRU(3, 2, batch_first=True)).double()
    names = []
    HookGradientComputer(model, WAVY).stream_gradients((rows(3, 2),), lambda block: names.append(block.name))
    assert names[-2:] == ["0.weight", "0.bias"]


def test_a_computer_that_was_called_inside_anothers_sink_works_afterwards():
    model, outer = hooked(lambda s, x: s.b(s.a(x).tanh()))
    inner = HookGradientComputer(model, WAVY, grad_wrt="a.*")
    refused = []

    def sink(block):
        try:
            collect_gradients(inner, (rows(3),))
        except UnsupportedModelError as error:
            refused.append(error)

    outer.stream_gradients((rows(3),), sink)
    assert refused
    assert_exact(model, (rows(3),), computer=inner, names=["a.weight", "a.bias"])


def turned(s, x, turn):
    hidden = s.a(x).tanh()
    return s.b(hidden.transpose(0, 1)).transpose(0, 1).sin() if turn else s.b(hidden.sin())


@dataclass
class Flagged:
    x: Tensor
    turn: bool


FLAGS = {
    "tuple": lambda x, turn: (x, turn),
    "list": lambda x, turn: [x, turn],
    "dataclass": Flagged,
    "dict": lambda x, turn: {"x": x, "turn": turn},
    "mapping that is no dict": lambda x, turn: UserDict(x=x, turn=turn),
    "keys": lambda x, turn: {"x": x, "on" if turn else "off": 1},
}


@pytest.mark.parametrize("kind", GRADIENT_COMPUTERS.values(), ids=GRADIENT_COMPUTERS)
@pytest.mark.parametrize("pack", FLAGS.values(), ids=FLAGS)
def test_a_flag_in_a_batch_of_any_container_makes_another_structure_of_it(pack, kind):
    """The original refuses batches in dicts."""

    def read(batch):
        if isinstance(batch, Mapping):
            return batch["x"], "on" in batch or bool(batch.get("turn"))
        return (batch.x, batch.turn) if isinstance(batch, Flagged) else tuple(batch)

    model, _ = hooked(turned)
    computer = kind(model, resolve_task(lambda call, batch: wavy(call, read(batch))))
    for turn in (False, True, False):
        expected = by_loop(model, lambda call, batch, t=turn: wavy(call, (*batch, t)), (rows(4, 4),))
        assert_same(collect_gradients(computer, pack(rows(4, 4), turn)), expected)


def test_equal_flags_of_other_types_make_other_structures():
    """1 == True, but a model may tell them apart; NaN equals nothing, and is one flag in all batches."""

    def forward(s, x, mode):
        order = x[:, 0].argsort() if mode is True else torch.arange(len(x))
        return s.c(s.a(x[order]).tanh())[order.argsort()]

    model, computer = hooked(forward, self_check=False)
    for mode in (1, True, 1.0, False, 0):
        expected = by_loop(model, lambda call, batch, m=mode: wavy(call, (*batch, m)), (rows(4),))
        assert_same(collect_gradients(computer, (rows(4), mode)), expected)
    runs = []
    model.register_forward_hook(lambda *_: runs.append(1))
    for mode in (float("nan"), float("nan")):
        runs.clear()
        collect_gradients(computer, (rows(4), mode))
    assert len(runs) == 1


def test_only_the_newest_structures_are_remembered(monkeypatch):
    """A model is examined again where its batch is of none of the newest structures: 256, and here 16."""
    monkeypatch.setattr("trak_lite.gradient_computers.hooks.computer._MAX_PLANS", 16)
    model, computer = hooked(lambda s, x: s.a(x), self_check=False)
    runs = []
    model.register_forward_hook(lambda *_: runs.append(1))

    def examined(length):
        runs.clear()
        collect_gradients(computer, (rows(1, length),))
        return len(runs) > 1

    assert all(examined(length) for length in range(1, 18))
    assert not any(examined(length) for length in (2, 17))
    assert examined(1)
    assert (examined(3), examined(2)) == (True, False)


# ---- Random numbers that an operation draws itself
def attending(s, x):
    """Attention draws its own dropout mask; its keys and values, or its bias, are parameters."""
    query, bias = s.query(x).view(-1, 2, 1, 4), s.bias if s.biased else None
    return F.scaled_dot_product_attention(query, s.key, s.value, bias, dropout_p=0.5).flatten(1)


@pytest.mark.parametrize("biased", [True, False])
def test_an_operation_that_runs_again_draws_the_same_mask(biased):
    torch.manual_seed(0)
    key, value = (nn.Parameter(torch.randn(1, 2, 3, 4)) for _ in range(2))
    held = {"query": nn.Linear(4, 8), "bias": nn.Parameter(torch.randn(1, 2, 1, 3)), "biased": biased}
    model, batch = Model(attending, key=key, value=value, **held).double(), (rows(5),)
    computer = HookGradientComputer(model, WAVY, self_check=False)
    collect_gradients(computer, batch)  # the model is examined
    torch.manual_seed(5)
    found = collect_gradients(computer, batch)
    after = torch.rand(3)
    torch.manual_seed(5)
    total = wavy(ModelCall(model), batch).sum()
    assert torch.equal(torch.rand(3), after)
    used = [name for name in found if biased or name != "bias"]
    grads = torch.autograd.grad(total, [model.get_parameter(name) for name in used])
    for name, grad in zip(used, grads, strict=True):
        torch.testing.assert_close(found[name].sum(0), grad, rtol=1e-10, atol=1e-12)


# ---- Kernels and caches
def routed(s, x):
    """Stacked experts that sorted tokens are multiplied with, in one operation or in one per expert."""
    flat = x.reshape(-1, 4)
    share, chosen = s.router(flat).softmax(-1).max(-1)
    order = chosen.argsort(stable=True)
    ends = torch.bincount(chosen, minlength=3).cumsum(0)
    if x.dtype == torch.float32:
        out = torch._grouped_mm(flat[order], s.experts.transpose(1, 2), offs=ends.to(torch.int32))
    else:
        parts = flat[order].tensor_split(ends[:-1])
        out = torch.cat([part @ own.T for part, own in zip(parts, s.experts, strict=True)])
    return (out[order.argsort()] * share[:, None]).view(*x.shape[:-1], 8)


@pytest.mark.parametrize("length", [1, 4])
def test_a_grouped_product_equals_one_product_per_expert_in_float64(length):
    """Of rows that are sorted by expert already, too."""
    torch.manual_seed(0)
    x, experts = rows(5, length).float(), nn.Parameter(torch.randn(3, 8, 4))
    model = Model(routed, router=nn.Linear(4, 3), experts=experts)
    reference = copy.deepcopy(model).double()
    computer = HookGradientComputer(model, WAVY)
    order = model.router(x[:, 0]).argmax(-1).argsort(stable=True)
    for batch in (x, x[order], x.flip(0), x[order]):
        found = collect_gradients(computer, (batch,))
        expected = by_loop(reference, wavy, (batch.double(),))
        for name, value in expected.items():
            torch.testing.assert_close(found[name].double(), value, rtol=1e-3, atol=1e-3)
    assert "grouped matmul" in computer.explain((x,))["experts"].why


def test_what_the_first_run_caches_does_not_look_like_moved_rows():
    def forward(s, x):
        """Computes an index in its first run, and reads it from then on."""
        if s.index is None:
            s.index = (torch.arange(4).flip(0) * 2 + 1) // 2
        return s.a(x) * s.embed.weight[s.index].sum(0)

    model, computer = hooked(forward)
    model.index = None
    assert computer.explain((rows(5, 4),))["a.weight"].why == "linear"
    model.index = None
    assert_exact(model, (rows(5, 4),))


def test_another_choice_of_parameters_is_seen_by_the_next_pass():
    model, computer = hooked(lambda s, x: s.b(s.a(x)), grad_wrt=["a.weight"])
    for name in ("a.weight", "b.bias"):
        computer.grad_wrt = [name]
        assert_exact(model, (rows(2),), computer=computer, names=[name])


def test_another_look_at_a_parameter_is_no_other_path():
    """Recurrent layers ask for their weights' device again after ``functional_call``."""
    model, batch = make(CASES["LSTM tagger"])
    computer = assert_exact(model, batch, classify)
    collect_gradients(GRADIENT_COMPUTERS["iterative"](model, resolve_task(classify)), batch)
    torch.func.functional_call(model, dict(model.named_parameters()), batch[0])
    assert_exact(model, batch, classify, computer=computer)


# ---- The classes of parameters and tensors
class OwnParameter(nn.Parameter):
    """A parameter class of somebody else."""


def test_a_subclass_that_appears_in_a_later_batch_is_followed():
    def forward(s, x):
        hidden = s.a(x)
        out = s.b(hidden.as_subclass(Tagged) if s.tags else hidden)
        return (out * 2 if type(out) is Tagged else out).as_subclass(Tensor)

    model, computer = hooked(forward, self_check=False)
    for tags in (False, False, True, True):
        model.tags = tags
        assert_exact(model, (rows(3),), computer=computer)


@pytest.mark.parametrize("error", [None, FloatingPointError, KeyboardInterrupt])
def test_a_pass_leaves_nothing_behind_also_if_it_fails(error):
    """What a failed pass held is freed at once; parameters have their own class again."""
    held = []

    def forward(s, x):
        s.merged, hidden = s.a.weight.t(), s.a(x)
        held.append(weakref.ref(hidden))
        if s.error is not None:
            raise s.error
        return s.b(hidden + x @ s.merged)

    model, computer = hooked(forward, self_check=False)
    model.error, model.b.weight = None, OwnParameter(model.b.weight.detach())
    for _ in range(2):
        assert_exact(model, (rows(3),), computer=computer)
    if error is not None:
        model.error = error
        gc.disable()
        try:
            with pytest.raises(error):
                computer.stream_gradients((rows(3),), lambda _: None)
            assert held[-1]() is None
        finally:
            gc.enable()

    classes = {name: type(p) for name, p in model.named_parameters()}
    assert classes.pop("b.weight") is OwnParameter
    assert {*classes.values()} == {nn.Parameter}
    assert type(model.merged) is Tensor
    assert torch.equal(model.a.weight.relu(), F.relu(model.a.weight.detach()))
    assert torch._C._len_torch_function_stack() == 0
    model.error = None
    assert_exact(model, (rows(3),), computer=computer)


def test_a_copy_of_a_parameter_is_a_parameter():
    copies = []

    def forward(s, x):
        copies.append(copy.deepcopy(s.a))
        return s.b(s.a(x) + copies[-1](x).detach())

    model, computer = hooked(forward, self_check=False)
    for _ in range(2):
        assert_exact(model, (rows(3),), computer=computer)
        collect_gradients(computer, (rows(3),))
    assert {type(p) for made in copies for p in made.parameters()} == {nn.Parameter}
    assert torch.equal(copies[-1](rows(3)), model.a(rows(3)))


class Running(TorchFunctionMode):
    """Records the names of torch's functions."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_the_default_device_may_be_set_and_modes_of_others_see_the_model():
    model, computer = hooked(lambda s, x: s.b(s.norm(s.a(x))))
    with torch.device("cpu"), Running() as running:
        for _ in range(2):
            found = collect_gradients(computer, (rows(3),))
    assert "linear" in running.names
    assert_same(found, by_loop(model, wavy, (rows(3),)))


# ---- Threads
def in_a_thread(run):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


class Waits(torch.autograd.Function):
    """The identity; another thread uses a weight meanwhile, and trains it in the backward pass."""

    @staticmethod
    def forward(ctx, weight, found, x):
        ctx.weight, ctx.found, ctx.x = weight, found, x.detach()
        in_a_thread(lambda: found.append(F.linear(x, weight)))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        def train():
            with torch.enable_grad():
                value = F.linear(ctx.x[:1], ctx.weight).sin().sum()
            ctx.found.extend(torch.autograd.grad(value, ctx.weight))

        in_a_thread(train)
        return None, None, grad


def test_another_thread_may_use_and_train_the_model_meanwhile():
    found = []
    model, computer = hooked(lambda s, x: s.b(Waits.apply(s.b.weight, found, s.a(x))), self_check=False)
    x = rows(3)
    for _ in range(2):
        found.clear()
        got = collect_gradients(computer, (x,))
        used, trained = found[-2:]
        hidden = model.a(x).detach()
        assert torch.equal(used, F.linear(hidden, model.b.weight))
        loss = F.linear(hidden[:1], model.b.weight).sin().sum()
        torch.testing.assert_close(trained, torch.autograd.grad(loss, model.b.weight)[0])
        assert_same(got, by_loop(model, wavy, (x,)))
