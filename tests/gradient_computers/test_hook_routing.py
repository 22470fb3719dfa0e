"""Rows whose sample no shape tells (routed experts, sorted and ragged samples): the gradient tells it, exactly."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from models import (
    Case,
    DenseMixture,
    Exact,
    Model,
    RoutedMixture,
    assert_exact,
    assert_exact_in_every_batch,
    by_loop,
    classify,
    hooked,
    make,
    net,
    rows,
    ruled,
    tokens,
    wavy,
)
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers import HookGradientComputer, collect_gradients
from trak_lite.gradient_computers.hooks.owners import SampleCode, sketch
from trak_lite.modelout_functions import ModelCall, resolve_task


# ---- Mixtures of experts
class Expert(nn.Module):
    """Every kind of operation that has rows: norm, linear, bare parameters, and a fallback."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 5), nn.Linear(5, 6)
        self.scale, self.slope = nn.Parameter(torch.randn(5)), nn.PReLU(5)

    def forward(self, x):
        return self.down(self.slope(self.up(self.norm(x)) * self.scale))


class Mixture(DenseMixture):
    """The two best experts of each token, each run on its own tokens, and left out where it has none."""

    def __init__(self, expert=Expert, best=2):
        super().__init__()
        self.experts = nn.ModuleList(expert() for _ in range(4))
        self.router, self.best = nn.Linear(6, 4), best

    def mixed(self, flat):
        share, chosen = self.router(flat).softmax(-1).topk(self.best)
        mixed = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if mask.any():
                rows, places = torch.where(mask)
                mixed.index_add_(0, rows, (share[rows, places, None] * expert(flat[rows])).to(flat))
        return mixed


class ByMask(Mixture):
    """One expert per token, read and written by a mask; an expert without tokens runs on none."""

    def mixed(self, flat):
        share, chosen = self.router(flat).softmax(-1).max(-1)
        mixed = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            mixed[chosen == i] = expert(flat[chosen == i])
        return mixed * share[:, None]


MIXTURES = {"by index": RoutedMixture, "top 1": lambda: Mixture(best=1), "top 2": Mixture, "by mask": ByMask}


def mixture(build, count=5, length=5):
    return make(Case(build, tokens(length), classify), count)


def send_everything_to(model, expert):
    with torch.no_grad():
        model.router.weight.zero_()
        model.router.bias.copy_(F.one_hot(torch.tensor(expert), len(model.router.bias)))


@pytest.mark.parametrize("build", [lambda: Mixture(best=1), ByMask], ids=["left out", "run on no rows"])
def test_an_expert_without_rows_has_gradient_zero_and_is_said_to(build):
    model, batch = mixture(build)
    send_everything_to(model, 2)
    computer = assert_exact(model, batch, classify, strict=True)
    found = collect_gradients(computer, batch)
    idle = [name for name in found if name.startswith("experts.") and not name.startswith("experts.2")]
    assert len(idle) == 3 * 8
    assert not any(bool(found[name].any()) for name in idle)
    coverage = HookGradientComputer(model, resolve_task(classify)).explain(batch)
    assert coverage["experts.2.up.weight"].why == "linear, rows found by their gradients"
    assert coverage["experts.2.slope.weight"].how == "fallback"
    if build is not ByMask:
        assert coverage["experts.0.up.weight"].how == "zero"
        assert coverage["experts.0.up.weight"].why.startswith("no row of these samples reaches it")


def odd_expert():
    """Operations whose rows no rule knows, or which have none: every entry is found by itself."""

    def forward(s, x):
        y = torch.einsum("nd,de->ne", s.pair(x, x.sin()), s.mix)
        z = s.up(s.group(s.conv(s.rms(x).unsqueeze(1)))).squeeze(1)
        w = (s.left @ x.t()).t() + x @ s.left
        return s.normed(y + torch.sigmoid(z) ** s.power - w.div(s.power, rounding_mode=None))

    mix, left = (nn.Parameter(torch.randn(6, 6)) for _ in range(2))
    held = {"mix": mix, "left": left, "power": nn.Parameter(torch.tensor([0.7]))}
    model = Model(forward, pair=nn.Bilinear(6, 6, 6), **held)
    model.conv, model.up = nn.Conv1d(1, 2, 3, padding=1), nn.ConvTranspose1d(2, 1, 1)
    model.group, model.rms = nn.GroupNorm(1, 2), nn.RMSNorm(6)
    model.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    return model


def in_place_expert():
    def forward(s, x):
        h = s.first(x).mul_(s.scale).add_(s.shift)
        return h.relu_() - s.row.expand(len(x), -1)

    scale, shift, row = (nn.Parameter(torch.randn(*shape)) for shape in ((6,), (1, 6), (6,)))
    return Model(forward, first=nn.Linear(6, 6), scale=scale, shift=shift, row=row)


class Recomputed(Expert):
    """Runs again in every backward pass."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def recurrent_expert(kind=nn.GRU, **settings):
    def forward(s, x):
        steps = torch.stack([x, x.cos(), x.sin()], int(s.rnn.batch_first))
        return s.out(s.rnn(steps)[0].select(int(s.rnn.batch_first), 2))

    return Model(forward, rnn=kind(6, 5, **settings), out=nn.Linear(settings.get("proj_size", 5), 6))


PRODUCT = ruled(lambda x, grad: {"weight": 2 * grad * x})
FACTORS = ruled(lambda x, grad: {"weight": (x.unsqueeze(1), grad.unsqueeze(1)), "bias": grad}, nn.Linear)
EXPERTS = {
    "operations without known rows": odd_expert,
    "in place": in_place_expert,
    "checkpointed": Recomputed,
    "GRU": recurrent_expert,
    "LSTM": lambda: recurrent_expert(nn.LSTM, batch_first=True, num_layers=2),
    "LSTM with a projection": lambda: recurrent_expert(nn.LSTM, proj_size=2),
    "a rule that gives gradients per row": lambda: PRODUCT(6),
    "a rule that gives factors per row": lambda: FACTORS(6, 6),
}


def given(build, *batches, **settings):
    return Exact(build, batches, classify, settings=settings)


def drawn(length, *counts):
    return [partial(tokens(length), count) for count in counts]


def above_a_recurrent_layer(kind):
    """A layer that is differentiated more than once."""
    model = Mixture()
    rnn = kind(6, 6, batch_first=True)
    model.embed = Model(lambda s, ids: s.rnn(s.words(ids))[0], words=model.embed, rnn=rnn)
    return model


ONE_TOKEN = (torch.full((5, 5), 3), torch.arange(25).view(5, 5) % 11)
EXACT = {name: given(build, *drawn(5, 6, 1, 19)) for name, build in MIXTURES.items()}
EXACT |= {
    f"{kind.__name__}, after samples of one token, then {counts}": given(
        kind, ONE_TOKEN, *drawn(5, *counts), self_check=False
    )
    for kind in (Mixture, ByMask)
    for counts in [(5, 5, 5, 5), (5, 3, 5, 1)]
}
for kind in (nn.LSTM, nn.GRU):
    build = partial(above_a_recurrent_layer, kind)
    EXACT[f"above {kind.__name__}"] = given(build, *drawn(4, 5))


@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT)
def test_gradients_of_routed_experts_equal_one_backward_pass_per_sample(case):
    """Of other sizes and routes than those examined, and of experts that the examined samples never reached."""
    assert_exact_in_every_batch(case)


# torch's recurrent layers take no empty batch
FITTING = [(name, ByMask) for name in EXPERTS if name[:3] not in ("GRU", "LST")]
FITTING += [(name, Mixture) for name in EXPERTS]


@pytest.mark.parametrize(("name", "kind"), FITTING)
def test_experts_of_any_kind_are_exact(name, kind):
    model, batch = mixture(lambda: kind(EXPERTS[name]), 4, 3)
    assert_exact(model, batch, classify)
    send_everything_to(model, 1)
    assert_exact(model, batch, classify)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_low_precision_finds_the_same_rows(autocast):
    model, batch = make(Case(lambda: Mixture(best=1), tokens(5), classify), 20, torch.float32)
    send_everything_to(model, 2)  # rounding moves no token to another expert
    computer = HookGradientComputer(model, resolve_task(classify), autocast_dtype=autocast)
    found = collect_gradients(computer, batch)
    for name, value in by_loop(model, classify, batch).items():
        error = float((found[name] - value).norm())
        assert error <= (1e-5 if autocast is None else 0.1) * float(value.norm()) + 1e-5, name


# ---- Rows that are moved by an operation with named arguments
def repeated(h, order, counts):
    samples = torch.repeat_interleave(repeats=counts)
    assert torch.equal(samples, torch.arange(len(h)).repeat_interleave(repeats=counts))
    return h.repeat_interleave(repeats=counts, dim=0), samples


def repeated_by_a_function(h, order, counts):
    samples = torch.repeat_interleave(dim=0, repeats=counts, input=torch.arange(len(h)))
    return torch.repeat_interleave(repeats=counts, input=h, dim=0), samples


def sorted_along(function, **dim):
    def move(h, order, counts):
        values, order = function(input=h[:, :1], **dim)
        return values.expand(-1, 4), order[:, 0]

    return move


BY_NAME = {
    "repeat_interleave": repeated,
    "torch.repeat_interleave": repeated_by_a_function,
    "sort": sorted_along(torch.sort, dim=0),
    "sort by NumPy's names": sorted_along(torch.sort, axis=0),
    "topk by NumPy's names": sorted_along(lambda input: torch.topk(axis=0, k=len(input), input=input)),
    "sort of torch.ops": sorted_along(lambda input: torch.ops.aten.sort(self=input, dim=0)),
    "gather": lambda h, order, _: (torch.gather(index=order[:, None].expand(-1, 4), dim=0, input=h), order),
    "gather by NumPy's names": lambda h, order, _: (torch.gather(x=h, axis=0, index=order.expand(4, -1).T), order),
    "index_select": lambda h, order, _: (torch.index_select(index=order, axis=0, a=h), order),
    "take_along_dim": lambda h, order, _: (torch.take_along_dim(input=h, indices=order[:, None], dim=0), order),
    "take": lambda h, order, _: (torch.take(index=order[:, None] * 4 + torch.arange(4), input=h), order),
    "put": lambda h, order, _: (torch.put(input=0 * h, index=order[:, None] * 4 + torch.arange(4), source=h),
                                order.argsort()),
    "index_put": lambda h, order, _: (torch.index_put(input=0 * h, indices=(order,), values=h), order.argsort()),
    "index_copy": lambda h, order, _: (torch.index_copy(input=0 * h, dim=0, index=order, source=h), order.argsort()),
    "index of torch.ops": lambda h, order, _: (torch.ops.aten.index(self=h, indices=[order]), order),
    "embedding": lambda h, order, _: (torch.embedding(indices=order, weight=h), order),
}  # fmt: skip


@pytest.mark.parametrize("move", BY_NAME.values(), ids=BY_NAME)
def test_rows_that_an_operation_with_named_arguments_moves_are_found(move):
    """In batches of the shapes of the first ones, in which rows stay in order, with other values."""

    def forward(s, x, counts):
        moved, samples = move(s.a(x), x[:, 0].argsort(), counts)
        return torch.zeros(len(x), 3, dtype=x.dtype).index_add(0, samples, s.c(s.b(moved).tanh()))

    still = torch.arange(4.0, dtype=torch.float64)[:, None].expand(-1, 4) / 4, torch.tensor([2, 2, 2, 2])
    others = [
        (rows(4, seed=seed), torch.tensor(counts)) for seed, counts in enumerate(([1, 3, 2, 2], [3, 2, 1, 2]))
    ]
    assert_exact_in_every_batch(net(forward, still, still, *others, unchecked=True))


# ---- Rows of another number than ever
def test_rows_of_another_number_than_examined_are_found_by_their_gradients():
    def forward(s, x):
        """The sum of the lengths is on no tensor's shape but the rows'."""
        at = [(i, t) for i in range(len(x)) for t in range(2 + (len(x) > 3 and i == 1))]
        i, t = torch.tensor(at).t()
        return torch.zeros(len(x), 3, dtype=x.dtype).index_add(0, i, s.c(s.a(x[i, t]).tanh()))

    model, computer = hooked(forward, self_check=False)
    batch = (rows(5, 5),)
    found = collect_gradients(computer, batch)
    for i in range(5):
        used = [model.a.weight, model.c.bias]
        grads = torch.autograd.grad(wavy(ModelCall(model), batch)[i], used)
        for name, grad in zip(["a.weight", "c.bias"], grads, strict=True):
            torch.testing.assert_close(found[name][i], grad, rtol=1e-10, atol=1e-12)


# ---- What models pay that move no samples
def backward_passes(model, batch, output=wavy):
    """The number of backward passes that f of a batch takes, after one in which the model is examined."""
    seen = []

    def evaluate(call, batch):
        f = output(call, batch)
        if f.requires_grad:
            f.register_hook(lambda grad: seen.append(1))
        return f

    computer = HookGradientComputer(model, resolve_task(evaluate), self_check=False)
    collect_gradients(computer, batch)
    seen.clear()
    collect_gradients(computer, batch)
    return len(seen)


def recurrent(s, x, lengths):
    found = pack_padded_sequence(s.a(x), lengths, batch_first=True, enforce_sorted=False)
    return s.c(s.rnn(found)[1][0][-1])


def reordered_output(call, batch):
    """An output function that moves what the last parameter gave."""
    x, labels = batch
    logits = call(x, labels).log_softmax(-1)
    order = labels.argsort(stable=True)
    picked = logits[order][order.argsort()][torch.arange(len(x)), labels - 1]
    return picked + logits.gather(1, labels[:, None] - 1)[:, 0] * len(labels.tolist()) / len(x)


STILL = {
    "last token": (lambda s, x, n: s.c(s.a(x)[torch.arange(len(x)), n - 1]), wavy),
    "last token gathered": (lambda s, x, n: s.c(s.a(x).gather(1, (n - 1).view(-1, 1, 1).expand(-1, 1, 4)).squeeze(1)),
                            wavy),
    "first of a range": (lambda s, x, n: s.c(s.a(x)[list(range(len(x))), n - 1]), wavy),
    "words": (lambda s, x, n: s.c(s.embed(n) + s.embed.weight[n] + s.embed.weight.index_select(0, n)), wavy),
    "recurrent": (recurrent, wavy),
    "in the output function": (lambda s, x, n: s.c(s.a(x[:, 0])), reordered_output),
}  # fmt: skip


@pytest.mark.parametrize(("forward", "output"), STILL.values(), ids=STILL)
def test_an_index_that_moves_no_samples_costs_nothing(forward, output):
    model, _ = hooked(forward)
    model.rnn = nn.LSTM(4, 4, batch_first=True).double()
    batch = (rows(4, 3), torch.tensor([2, 3, 1, 2]))
    assert backward_passes(model, batch, output) == 1
    assert_exact(model, batch, output)
    # Up to 64 samples have numbers of one digit, so there is one weighted pass and the plain one.
    for build, passes in ((DenseMixture, 1), (RoutedMixture, 2)):
        assert backward_passes(*mixture(build, 20, 4), classify) == passes


# ---- What is refused
class Limited(ByMask):
    """Experts that take the first six of their tokens."""

    def mixed(self, flat):
        chosen = self.router(flat).argmax(-1)
        mixed = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            kept = (chosen == i).nonzero().squeeze(1)[:6]
            mixed[kept] = expert(flat[kept])
        return mixed


class Both(RoutedMixture):
    """One use with and without samples."""

    def forward(self, ids):
        return super().forward(ids) * self.embed(torch.arange(4).unsqueeze(0)).mean()


def changed(change):
    """Return mixtures of experts whose rows are changed after the first layer."""
    layers = lambda: {"up": nn.Linear(6, 5), "down": nn.Linear(5, 6)}  # noqa: E731
    return lambda: ByMask(lambda: Model(lambda s, x: s.down(change(s.up(x))), **layers()))


def centred():
    slope = nn.Parameter(torch.ones(()))
    return Model(lambda s, x: x * s.slope - (x * s.slope).mean(0), slope=slope)


class DropsSmall(torch.autograd.Function):
    """Passes no gradient on where all of it is small, as that of the second weighted pass is."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad if grad.abs().amax() > 1e-6 else None


def test_a_weighted_pass_without_a_gradient_is_no_digit_of_the_next():
    """Samples 64 to 69 would be taken for 0 to 5."""

    def forward(s, x):
        order = x[:, 0].argsort()
        return s.b(DropsSmall.apply(s.a(x[order]) * s.p)[order.argsort()])

    _, computer = hooked(forward, self_check=False)
    with pytest.raises(UnsupportedModelError, match="not every weighted backward pass reached its result"):
        collect_gradients(computer, (rows(70),))


REFUSED = {
    "rows that mix samples": (changed(lambda y: y - y.mean(0)),
                              r"linear, which uses \['experts.*several samples depends"),
    "a scalar mixed over rows": (lambda: ByMask(centred), r"mul, which uses .*several samples depends"),
    "a limit on the rows of an expert": (Limited, "self-check"),
    "an infinite gradient": (changed(lambda y: y + (y - y.detach()).sqrt()), "is not finite"),
    "a use with and without samples": (Both, "runs on samples and on what all samples share"),
}  # fmt: skip


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED)
def test_rows_that_belong_to_no_one_sample_are_refused_by_name(build, message):
    model, batch = mixture(build, 6, 4)
    if build is Limited:
        send_everything_to(model, 0)
    names = None if build in (Both, Limited) else "experts.*"
    with pytest.raises(UnsupportedModelError, match=message):
        collect_gradients(HookGradientComputer(model, resolve_task(classify), grad_wrt=names), batch)


def test_a_small_row_of_several_samples_is_refused_in_bfloat16_too():
    """In a batch that the self-check does not compare; the row's gradient is a tenth of the largest one."""

    def forward(s, x):
        order = x[:, 0].argsort()
        moved = s.a(x[order]) * ((x[order][:, :1] > -3).to(x.dtype) + 0.03)
        return s.c(moved[order.argsort()] + moved[:1] * (x[:, :1].amin() < -3).to(x.dtype))

    model, computer = hooked(forward, self_check=False)
    model.to(torch.bfloat16)
    batch = rows(8).to(torch.bfloat16)
    collect_gradients(computer, (batch,))
    batch[0] = -4
    with pytest.raises(UnsupportedModelError, match="several samples depends on one row"):
        collect_gradients(computer, (batch,))


# ---- The code that tells samples
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_code_tells_the_sample_of_every_row(dtype):
    generator, one = torch.Generator().manual_seed(0), torch.zeros(1, dtype=dtype)
    for count in (1, 2, 64, 65, 300):
        owners = torch.randint(count, (50,), generator=generator)
        found = torch.randn(50, 7, generator=generator).to(dtype)
        found[3] = 0
        code = SampleCode.for_gradients(count, [dtype])
        tagged = [sketch(found * weights[owners, None]) for weights in code.weights(one)]
        told = code.owners(sketch(found), tagged, dtype)
        owners[3] = -1
        assert told is not None
        assert told.tolist() == owners.tolist()


def test_a_row_of_two_samples_has_no_owner_unless_it_is_rounding_noise():
    code = SampleCode(5, base=16)
    (weights,) = code.weights(torch.zeros(1, dtype=torch.float64))
    one, other = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)

    def owners(size, back):
        plain = torch.stack([one, size * (one + back)])
        tagged = torch.stack([weights[1] * one, size * (weights[2] * one + weights[4] * back)])
        return code.owners(plain, [tagged], torch.float64)

    noise = owners(1e-15, other)
    assert owners(1.0, other) is None
    assert owners(1.0, -one) is None  # two samples that cancel
    assert noise is not None
    assert noise.tolist() == [1, -1]
