"""Models by the hook computer, batch after batch, against one forward and backward pass per sample in float64."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from models import (
    CASES,
    Exact,
    Net,
    Tagged,
    assert_exact_in_every_batch,
    assert_same,
    assert_steady,
    by_loop,
    make,
    net,
    rows,
    wavy,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from trak_lite.errors import UnsupportedModelError
from trak_lite.gradient_computers import HookGradientComputer, choose_gradient_computer, collect_gradients
from trak_lite.modelout_functions import resolve_task


@pytest.mark.parametrize("count", [4, 1])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_computer_that_is_chosen_for_a_whole_model_is_exact(case, count):
    model, batch = make(case, count)
    name, reason, computer = choose_gradient_computer(model, resolve_task(case.output), batch)
    assert (name, reason) == ("hook", "every kept parameter is covered")
    expected = by_loop(model, case.output, batch)
    scale = max(float(value.abs().max()) for value in expected.values())
    assert_same(collect_gradients(computer, batch), expected, atol=1e-12 * max(scale, 1))
    assert_steady(computer, batch, expected)


def parameter(*shape):
    return lambda: nn.Parameter(torch.randn(shape))


# ---- What Python does between layers
def residual(product):
    """Add to a result in place: writing into a view replaces its history, and the hooks with it."""

    def forward(s, x):
        x = torch.tanh(s.a(x))
        y = product(s, x)
        y += x
        return torch.tanh(y)

    return forward


def recomputed(s, x):
    """The checkpointed parts run again in the backward pass, and keep nothing to carry a gradient back with."""

    def part(x):
        x = x * s.p.exp() + s.embed(torch.arange(4)).cos() + s.slope.sin()
        weight = s.a.weight * (s.norm.weight / s.a.weight.norm(dim=1))[:, None]
        return F.linear(x @ (s.b.weight.tanh() @ s.b.weight), weight, s.a.bias).tanh()

    x = checkpoint(part, x, use_reentrant=False)
    nested = partial(checkpoint, part, use_reentrant=False)
    return s.c(checkpoint(nested, x, use_reentrant=False))


def requiring(s, x):
    x.requires_grad_()
    return s.b(s.norm(x.sin())) + s.a(x).sum(1, keepdim=True)


class Negated(torch.autograd.Function):
    """Changes its incoming gradient in place, which autograd forbids and does not notice."""

    forward = staticmethod(lambda ctx, value: -value)
    backward = staticmethod(lambda ctx, grad: grad.neg_())


def slope_inside(s, x):
    """A gradient that depends on no parameter is taken inside f."""
    hidden = s.norm(s.a(x))
    if hidden.requires_grad:
        (inner,) = torch.autograd.grad(hidden.sin().sum(), hidden, create_graph=True)
        hidden = hidden + inner
    return s.b(hidden)


def write_by_name(s, x):
    row = torch.arange(len(x))
    return s.a(x).index_put(indices=(row, torch.zeros_like(row)), values=torch.zeros(len(x), dtype=x.dtype))


def change_sparse(s, x):
    doubled = torch.eye(4, dtype=x.dtype).to_sparse().mul_(2.0)
    return s.a(torch.sparse.mm(doubled, x.T).T)


def doubled_gradient(s, x):
    """Small gradients are collected by autograd, large ones by hooks; a hook of the model changes them."""
    hidden = s.norm(s.a(x))
    if hidden.requires_grad:
        hidden.register_hook(lambda grad: 2 * grad)
    return (s.b(hidden.relu()) * s.p).square().mean((1, 2))[:, None]


EXACT = {
    "positions without a batch, as many as samples": net(lambda s, x: x * s.embed(torch.arange(4)), rows(4, 4)),
    "a weight that is made of a parameter": net(
        lambda s, x: F.linear(x, s.a.weight / s.a.weight.norm(dim=1, keepdim=True), s.a.bias), rows(4)
    ),
    "in place, twice": net(
        lambda s, x: s.b(F.silu(s.a(x), inplace=True).mul_(x).sum(1, keepdim=True).expand(-1, 4, 4)),
        rows(3, 5),
    ),
    "added to a layer": net(residual(lambda s, x: s.a(x)), rows(3, 4)),
    "added to a transposed layer": net(residual(lambda s, x: s.a(x).mT), rows(3, 4)),
    "added to an einsum": net(residual(lambda s, x: torch.einsum("btd,de->bet", x, s.a.weight)), rows(3, 4)),
    "added to a tensordot": net(residual(lambda s, x: torch.tensordot(x, s.a.weight, 1)), rows(3, 4)),
    "an order within each sample": net(lambda s, x: s.c(x.topk(4, dim=1).values.sort(1)[0]), rows(4).repeat(1, 2)),
    "values of parameters alone in a checkpoint": net(recomputed, rows(5, 4)),
    "an input that requires grad": net(requiring, rows(3)),
    "complex factors": net(lambda s, x: torch.fft.ifft(torch.fft.fft(s.a(x)) * torch.fft.fft(s.norm.weight)).real,
                           rows(3)),
    "parameters in a list": net(lambda s, x: s.a(x) @ torch.stack([s.norm.weight, s.norm.bias]).t(), rows(3)),
    "a tensor subclass": net(lambda s, x: s.b(s.norm(s.a(x).as_subclass(Tagged))).as_subclass(Tensor), rows(3)),
    "a backward pass that changes gradients": net(lambda s, x: s.b(Negated.apply(s.a(x)) + s.norm.weight), rows(3)),
    "torch.as_tensor": net(lambda s, x: s.b(x * torch.as_tensor(s.norm.weight)), rows(3)),
    "another parameter": net(lambda s, x: s.b(x * nn.Parameter(s.norm.weight)), rows(3)),
    "the class of a parameter": net(lambda s, x: s.b(x * 2 if type(s.b.weight) is nn.Parameter else s.a(x)), rows(3)),
    "a gradient inside f": net(slope_inside, rows(3), unchecked=True),
    "a compiled part": net(lambda s, x: s.c(s.up(x).tanh()), rows(3),
                           up=lambda: torch.compile(nn.Linear(4, 4), backend="eager")),
    "branches without parameters": net(
        lambda s, x: s.b(torch.cond(torch.tensor(True), torch.sin, torch.cos, (x,))) + s.a(x), rows(3), rows(5)
    ),
    "writes by name": net(write_by_name, rows(3)),
    "writes into a sparse tensor": net(change_sparse, rows(3)),
    "a hook that changes a small gradient": net(doubled_gradient, rows(3, 3)),
    "a hook that changes a large gradient": net(doubled_gradient, rows(3, 50_000)),
    "a choice between parameters": net(
        lambda s, x: torch.where(x > 0, s.p, s.row.mT[:3]) * x + torch.where(x > 1, 2.0, s.p),
        rows(5, 3),
        why={"p": "choice"},
    ),
}  # fmt: skip


# ---- Operations with a rule of their own
def attended(scale, empty):
    """Attention with a bias made of a parameter, of which one row may hide every key."""

    def forward(s, x):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in x.repeat(1, 1, 6).chunk(3, -1))
        bias = s.bias * 1.0
        if empty:
            bias = bias.masked_fill(torch.eye(5, dtype=torch.bool)[2][:, None], float("-inf"))
        return F.scaled_dot_product_attention(q, k.sin(), v, attn_mask=bias, scale=scale)

    return forward


EXACT |= {
    f"attention with a bias {shape}, scale {scale}{', a row that hides all' * empty}": net(
        attended(scale, empty), rows(4, 5), why={"bias": "attention"}, bias=parameter(*shape)
    )
    for shape, scale, empty in [
        ((1, 2, 5, 5), None, True),
        ((2, 5, 5), 0.3, True),
        ((5, 5), None, False),
        ((5, 5), 0.3, False),
        ((1, 2, 1, 5), None, True),
    ]
}


def einstein(equation):
    def forward(s, x):
        if equation.startswith("tb"):
            return torch.einsum(equation, x.transpose(0, 1), s.weight).transpose(0, 1)
        return torch.einsum(equation, *((s.weight, x) if equation.startswith("oh") else (x, s.weight)))

    return forward


EXACT |= {
    f"einsum {equation} {shape}": net(
        einstein(equation), rows(5, 3), why={"weight": how}, weight=parameter(*shape)
    )
    for equation, shape, how in [
        ("bth,hnd->btnd", (4, 2, 3), "einsum"),
        ("tbh,hnd->tbnd", (4, 2, 3), "einsum"),
        ("bth,ho->bto", (4, 3), "einsum"),
        ("oh,bth->bot", (3, 4), "einsum"),
        ("bth,th->bh", (3, 4), "einsum"),
        ("bth,th->bh", (1, 4), "vmap"),
        ("bth,thk->bt", (3, 4, 2), "vmap"),
        ("b...h,hk->b...k", (4, 2), "vmap"),
        ("bth,hh->bt", (4, 4), "vmap"),
    ]
}


def filled(s, x):
    hidden = s.a(x) * 1
    hidden[torch.arange(len(x)), x.argmax(1)] = s.slope
    return hidden


NAMED = {
    "a factor of add": lambda s, x: torch.add(x @ s.a.weight, 2, s.p),
    "a factor of add in place": lambda s, x: (x @ s.a.weight).clone().add_(2, s.p),
    "a factor of sub in place": lambda s, x: (x @ s.a.weight).clone().sub_(3, s.p),
    "factors of addmm": lambda s, x: torch.addmm(s.p, x, s.a.weight, beta=0, alpha=2),
    "sub by names": lambda s, x: torch.sub(other=s.p, input=x),
    "matmul by names": lambda s, x: torch.matmul(other=s.a.weight, input=x),
    "mm by names": lambda s, x: torch.mm(mat2=s.a.weight, input=x),
    "a method by names": lambda s, x: x.matmul(other=s.a.weight),
    "a parameter on the left by names": lambda s, x: torch.matmul(other=x.t(), input=s.a.weight).t(),
    "a layer by names": lambda s, x: s.a(input=x),
    "add by NumPy's names": lambda s, x: torch.add(x1=x, x2=s.p, alpha=3),
    "matmul by NumPy's names": lambda s, x: torch.matmul(x=x, x2=s.a.weight),
    "a transpose by names": lambda s, x: (
        x @ torch.transpose(dim0=0, dim1=1, input=s.a.weight) @ torch.t(input=s.b.weight)
    ),
    "in place by names": lambda s, x: torch.clamp_(min=s.p, input=s.a(x) * 1),
    "the samples' numbers as an index": filled,
    "an index in place by names": lambda s, x: torch.index_put_(
        values=s.slope, indices=(torch.arange(len(x)), x.argmax(1)), input=s.a(x) * 1
    ),
}
EXACT |= {name: net(forward, rows(3)) for name, forward in NAMED.items()}


def with_token(s, x):
    hidden = x.new_zeros(len(x), 2, 4)
    hidden[:, 0] = s.p
    return hidden.sum(1) * x


class CallOperationError(Exception):
    """As the error of einx, which names the code that it has made."""


def compiled(s, x):
    """As hyper-connections by einx, which leaves out axes of size 1."""
    try:
        streams = x + s.experts[:2, 0] if len(x) == 1 else (x[:, None] + s.experts[:2, 0]).flatten(0, 1)
    except Exception as error:
        raise CallOperationError("c = torch.add(a, b)") from error
    return s.a(streams).tanh().unflatten(0, (len(x), 2)).sum(1)


def written_by_two(s, x):
    matrix = x.new_zeros(4, 4)
    matrix[range(1, 4), range(3)] = s.p[:3]
    matrix[range(4), range(4)] = s.b.bias.exp()
    return x @ matrix * s.b.bias


ALIKE = {"p": "vmap of the operation"}
EXACT |= {
    "an error of this package that the model wraps": net(compiled, rows(3), rows(1)),
    "a matrix that two parameters are written into": net(written_by_two, rows(3)),
    "parameters that the pass lets require grad": net(lambda s, x: s.a(x * s.p.requires_grad_()), rows(3)),
    "a parameter with the dtype of samples": net(lambda s, x: s.p.to(x) * x + s.row.type_as(s.a(x)), rows(3)),
    "samples with the dtype of a parameter": net(
        lambda s, x: s.a(x).to(s.p) * x.type_as(s.row) * s.p, rows(3)
    ),
    "a parameter written into zeros": net(with_token, rows(3), why=ALIKE),
    "positions from a table": net(
        lambda s, x: s.p[torch.arange(4).expand(len(x), -1)] * x, rows(3), why=ALIKE
    ),
}


def images(*shape):
    return lambda: (0.1 * torch.randn(shape),)


EXACT |= {
    f"a large convolution, {name}": Exact(
        partial(nn.Conv2d, inputs, outputs, 3, padding=1, groups=groups), [images(9, inputs, size, size)]
    )
    for name, inputs, outputs, groups, size in [
        ("in pieces", 48, 48, 1, 7),
        ("in pieces and groups", 64, 64, 2, 8),
        ("sample by sample", 64, 128, 1, 11),
        ("sample by sample, in groups", 128, 128, 2, 11),
    ]
}


# ---- Rows that are in place in some batches only: integers, values or lengths move them
def sorted_whole(s, x):
    order = x.flatten(1).sum(1).argsort()
    hidden = torch.tanh(s.norm(s.a(x[order]))) + 0.1
    return s.b(hidden[order.argsort()]) * s.p


def sorted_without_rule(use):
    """Sorted rows go through an operation whose rule does not apply: rows in place have their tags still."""

    def forward(s, x):
        order = x.sum(1).argsort()
        return s.c(torch.tanh(use(s, x[order]))[order.argsort()])

    return forward


SORTED = {
    "rows": (sorted_whole, (6,)),
    "positions": (sorted_whole, (6, 3)),
    "two passes": (sorted_whole, (70,)),
    "alpha": (sorted_without_rule(lambda s, x: torch.addmm(s.p, x, s.a.weight, alpha=2.0)), (6,)),
    "beta": (sorted_without_rule(lambda s, x: torch.addmm(s.p, x, s.a.weight, beta=0.5)), (66,)),
    "row": (sorted_without_rule(lambda s, x: torch.addmm(s.row, x, s.a.weight)), (6,)),
    "linear": (sorted_without_rule(lambda s, x: F.linear(x, s.a.weight, s.row)), (6,)),
}
for name, (forward, shape) in SORTED.items():
    mixed = rows(*shape)
    ordered = mixed[mixed.flatten(1).sum(1).argsort()]
    batches = (ordered, mixed, ordered.flip(0), ordered, mixed[:1])
    EXACT[f"sorted: {name}"] = net(forward, *batches, unchecked=True)


def places(expert):
    """The place of each sample among those of its expert, and the experts one-hot."""
    hot = F.one_hot(expert, 3)
    return ((hot.cumsum(0) - 1) * hot).sum(1), hot


def ranks(keys):
    i = torch.arange(len(keys))
    before = (keys[:, None] == keys) & (i[:, None] > i)
    return ((keys[:, None] > keys) | before).sum(1)


def dispatched(write):
    """Switch-style: an expert's rows are written into a buffer one after the other."""

    def forward(s, x, expert):
        place, _ = places(expert)
        buffer = x.new_zeros(3, len(x), 4)
        write(buffer, expert, place, s.a(x))
        return s.c(torch.bmm(buffer, s.experts)[expert, place].tanh())

    return forward


def dispatched_by_product(s, x, expert):
    """By matrix products with zeros and ones."""
    place, hot = places(expert)
    where = (hot[:, :, None] * F.one_hot(place, len(x))[:, None, :]).to(x)
    buffer = torch.einsum("bec,bd->ecd", where, s.a(x))
    return s.c(torch.einsum("bec,ecd->bd", where, torch.bmm(buffer, s.experts)).tanh())


def ranked(there, back):
    """Samples go to the places of their ranks, and come back from there."""

    def forward(s, x, keys):
        rank = ranks(keys)
        return s.c(back(s.a(there(x, rank)).tanh(), rank))

    return forward


def wide(rank):
    return rank[:, None].expand(-1, 4)


def inverse(rank):
    return torch.zeros_like(rank).scatter(0, rank, torch.arange(len(rank)))


def flat(rank):
    return rank[:, None] * 4 + torch.arange(4)


def sorted_by_python(s, x, keys):
    order = sorted(range(len(x)), key=lambda i: keys[i].item())
    return s.c(s.a(x[order]).tanh()[[order.index(i) for i in range(len(x))]])


def compacted(s, x, keys):
    """As many rows as ever, whatever the keys."""
    kept = keys != 1
    index = torch.nonzero_static(kept, size=len(x), fill_value=0)[:, 0]
    real = (torch.arange(len(x)) < kept.sum()).unsqueeze(1)
    flat = s.a(x)
    return torch.zeros_like(flat).index_add(0, index, s.b(flat[index]).tanh() * real)


MOVING = {
    "dispatched": dispatched(lambda to, expert, place, y: to.__setitem__((expert, place), y)),
    "dispatched by view": dispatched(
        lambda to, expert, place, y: to.view(-1, 4).__setitem__(expert * len(y) + place, y)
    ),
    "dispatched by product": dispatched_by_product,
    "index_copy": ranked(lambda x, r: torch.zeros_like(x).index_copy(0, r, x), lambda y, r: y[r]),
    "scatter and gather": ranked(
        lambda x, r: torch.zeros_like(x).scatter(0, wide(r), x), lambda y, r: y.gather(0, wide(r))
    ),
    "look-ups": ranked(lambda x, r: F.embedding(inverse(r), x), lambda y, r: y.index_select(0, r)),
    "index_put": ranked(
        lambda x, r: torch.zeros_like(x).index_put((r,), x), lambda y, r: torch.take_along_dim(y, wide(r), 0)
    ),
    "put and take": ranked(lambda x, r: torch.zeros_like(x).put_(flat(r), x), lambda y, r: y.take(flat(r))),
    "sorted by Python": sorted_by_python,
    "compacted": compacted,
}
KEYS = [torch.zeros(8, dtype=torch.long)]  # which hides that rows move
KEYS += [torch.randint(3, (8,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
EXACT |= {
    f"moved: {name}": net(forward, *((rows(8), keys) for keys in KEYS)) for name, forward in MOVING.items()
}


def beside(made):
    """Rows in the order of a value, each beside a row that is made for as many rows as there are."""

    def forward(s, x):
        order = x[:, 0].argsort()
        joined = torch.cat([x[order], made(s, x)], 1).view(len(x), 2, 4)
        return s.a(joined).tanh().flatten(1)[order.argsort()]

    return forward


BESIDE = {
    "expanded": lambda s, x: s.row.expand(len(x), -1),
    "multiplied": lambda s, x: torch.ones(len(x), 1, dtype=x.dtype) @ s.row,
    "looked up": lambda s, x: F.embedding(torch.zeros(len(x), dtype=torch.long), s.row),
}
EXACT |= {f"beside a row that is {how}": net(beside(made), rows(7)) for how, made in BESIDE.items()}


def mapped(s, x):
    return s.c(s.a(x).tanh())


def in_order(s, x, lengths):
    order = lengths.argsort(descending=True)
    return mapped(s, x[order])[order.argsort()]


def packed(s, x, lengths):
    found = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    found = PackedSequence(mapped(s, found.data), *found[1:])
    return pad_packed_sequence(found, batch_first=True, total_length=5)[0]


def sorted_to_pack(s, x, lengths):
    """Sorted by hand, because a packed sequence wants falling lengths."""
    lengths, order = lengths.sort(descending=True)
    found = pack_padded_sequence(x[order], lengths, batch_first=True)
    y, _ = pad_packed_sequence(s.rnn(found)[0], batch_first=True, total_length=5)
    return mapped(s, y)[order.argsort()]


def masked(s, x, lengths):
    mask = torch.arange(x.shape[1]) < lengths[:, None]
    return torch.zeros_like(x[..., :3]).masked_scatter(mask[..., None], mapped(s, x[mask]))


def cut(pieces):
    def forward(s, x, lengths):
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        rows = mapped(s, torch.cat(pieces(x, lengths)))
        return torch.zeros(len(lengths), 3, dtype=torch.float64).index_add(0, owner, rows)

    return forward


RAGGED = {
    "sorted": in_order,
    "packed": packed,
    "sorted to pack": sorted_to_pack,
    "masked": masked,
    "cut by numbers": cut(lambda x, n: [x[i][:k] for i, k in enumerate(n.tolist())]),
    "cut by integers": cut(lambda x, n: [x[i, : int(k)] for i, k in enumerate(n)]),
    "cut by tensors": cut(lambda x, n: [x[i, : n[i]] for i in range(len(x))]),
    "cut by sizes": cut(lambda x, n: [x[i].narrow(0, 0, n[i]) for i in range(len(x))]),
}
LENGTHS = [torch.tensor(n) for n in ([1, 1, 1, 1], [5, 4, 2, 3], [1, 5, 3, 4], [2, 1, 3, 2], [1, 2, 0, 1])]
for name, forward in RAGGED.items():
    held = {"rnn": lambda: nn.LSTM(4, 2, batch_first=True, bidirectional=True)}
    held = held if forward is sorted_to_pack else {}
    lengths = [(rows(4, 5), n) for n in LENGTHS if name.startswith("cut") or n.all()]
    for first in range(4):  # one row per sample, or not
        later = lengths if first == 0 else lengths[first : first + 1]
        EXACT[f"ragged: {name}, first {LENGTHS[first].tolist()}"] = net(forward, *later, **held)


class Padded(nn.Module):
    """Attention that leaves its mask out if no sample of the batch is padded, as Hugging Face's models do."""

    def __init__(self, exact=True):
        super().__init__()
        self.qkv, self.bias, self.exact = nn.Linear(4, 12), nn.Parameter(torch.randn(1, 2, 5, 5)), exact

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        bias, real = self.bias, x[..., 0] != 0
        if not bool(real.all()):
            bias = torch.where(real[:, None, None], bias, -30.0)
            bias = bias if self.exact else bias + 0.5 * torch.where(real[:, None, None], bias, 0.0)
        return F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2)


def padded(count, *places):
    x = rows(count, 5, seed=count)
    for place in places:
        x[place, 3:, 0] = 0.0
    return (x,)


PADDED = [(), (2,), (0, 1), (0, 1, 2, 3)]
EXACT |= {
    f"a path that other samples choose, {at} padded": Exact(
        Padded,
        [padded(4, *at), padded(4), padded(4, 3), padded(4, *at), padded(2, 1)],
        why={"bias": "choice"},
    )
    for at in PADDED
}


# ---- Recurrences that Python steps through, and texts of sentences
def stepping(s, x):
    """A cell's output is computed from the state that it returns beside it."""
    state, total = None, 0
    for step in x.unbind(1):
        state = s.cell(step, state)
        h = state[0] if isinstance(state, tuple) else state
        total = total + h.sin()
    return total + h + (state[1] if isinstance(state, tuple) else 0)


EXACT |= {
    f"{cell.__name__}, {steps} steps": net(stepping, rows(3, steps), unchecked=True, cell=partial(cell, 4, 3))
    for cell, steps in product((nn.LSTMCell, nn.GRUCell, nn.RNNCell), (4, 1))
}


def stepped(s, x, lengths):
    """Steps through a packed sequence in both directions, as Opacus' DPLSTM; backward, samples are added later."""
    data, sizes, _, back = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    steps, outputs, last = data.split(sizes.tolist()), [], []
    for layers, direction in (((s.a, s.b), 1), ((s.b, s.norm), -1)):
        h, found = x.new_zeros(0, 4), []
        for step in steps[::direction]:
            h = torch.cat([h[: len(step)], step.new_zeros(max(len(step) - len(h), 0), 4)])
            h = torch.tanh(layers[0](step) + layers[1](h))
            found.append(h)
        state = torch.zeros(len(x), 4, dtype=x.dtype)
        for sample, length in enumerate(lengths.sort(descending=True).values.tolist()):
            state[sample] = found[length - 1 if direction == 1 else -1][sample]
        last.append(state[back])
        outputs.append(torch.cat(found[::direction]))
    every = PackedSequence(torch.cat(outputs, 1), sizes, unsorted_indices=back)
    padded = pad_packed_sequence(every, batch_first=True, total_length=5)[0]
    return torch.cat([s.c(padded[..., 4:]).flatten(1), padded.flatten(1), *last], 1)


def sentences(s, x):
    """Parts of samples go through a recurrent layer as if they were samples, along either axis."""
    steps = s.first(x.flatten(0, 1))[0].transpose(0, 1)
    return s.second(steps)[0][-1].unflatten(0, x.shape[:2])


STEPS = [[2, 2, 2], [5, 4, 4, 1], [3, 5, 1, 4, 1], [4], [1, 5, 3, 3], [4, 1]]
EXACT |= {
    "a packed sequence that is stepped through": net(
        stepped, *((rows(len(lengths), 5), torch.tensor(lengths)) for lengths in STEPS)
    ),
    "sentences of a text": net(sentences, rows(4, 5, 3), first=partial(nn.LSTM, 4, 4, batch_first=True),
                               second=partial(nn.GRU, 4, 2)),
}  # fmt: skip


def dead_for_negative_numbers(s, x):
    """Rows of positions, then samples; the units of a sample without a positive number have no gradient."""
    hidden = s.a(x.transpose(0, 1).flatten(0, 1)).unflatten(0, x.shape[1::-1]).sum(0)
    return s.c(hidden * x.amax((1, 2)).relu()[:, None])


DEAD = -rows(1, 3).abs()
EXACT |= {
    "a first sample of dead units": net(dead_for_negative_numbers, torch.cat([DEAD, rows(4, 3)])),
    "a first batch of dead units": net(dead_for_negative_numbers, DEAD, rows(4, 3)),
}


@pytest.mark.filterwarnings("ignore:This overload of:UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT)
def test_rows_of_every_batch_equal_one_backward_pass_per_sample(case):
    assert_exact_in_every_batch(case)


def test_a_layer_that_a_branch_captures_goes_to_a_computer_that_follows_it():
    torch.compiler.reset()  # torch does not compile cond, and loses this gradient, after one inside a dispatch mode
    torch.manual_seed(0)
    model = Net(lambda s, x: torch.cond(torch.tensor(True), lambda v: s.a(v).sin(), torch.cos, (x,)) + s.b(x))
    batch = (rows(3, 5),)
    name, reason, computer = choose_gradient_computer(model.double(), resolve_task(wavy), batch)
    assert name == "iterative", reason
    assert (
        "the operator cond runs reads a parameter" in reason or "higher order operator" in reason
    )  # the first time
    model.forward = lambda x: model.a(x).sin() + model.b(x)
    expected = by_loop(model, wavy, batch)
    del model.forward
    assert_same(collect_gradients(computer, batch), expected)


def test_a_path_that_changes_the_gradients_of_other_samples_is_refused():
    torch.manual_seed(0)
    computer = HookGradientComputer(Padded(exact=False).double(), resolve_task(wavy))
    collect_gradients(computer, padded(4))
    with pytest.raises(UnsupportedModelError, match="self-check failed"):
        collect_gradients(computer, padded(4, 2))
