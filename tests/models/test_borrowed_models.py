"""Models that change in eval mode: they keep values computed from parameters, as LeViT, rescale, as RWKV, or merge."""

import copy
import gc
import sys
from collections import deque

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import ConcatDataset, TensorDataset

from trak_lite import Attributor, Rows, TRAKer, methods, token_scores
from trak_lite.errors import CheckpointError, InvalidInputError, UnsupportedModelError
from trak_lite.methods import GradDot
from trak_lite.modelout_functions import AbstractModelOutput, reference_columns
from trak_lite.types import OutputTerms

TRAIN = TensorDataset(torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3)


class Biased(nn.Module):
    """Adds a table of biases, looked up once in eval mode and dropped when it is put into train mode."""

    def __init__(self, *, keeps=True):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.biases, self.keeps = nn.Linear(4, 3), nn.Parameter(torch.randn(5)), keeps
        self.kept: Tensor | None = None

    def train(self, mode=True):
        if mode:
            self.kept = None
        return super().train(mode)

    def forward(self, x):
        found = self.biases[[0, 2, 2]] if self.kept is None else self.kept
        if self.keeps and not self.training:
            self.kept = found
        return torch.tanh(self.linear(x) + found)


class Rescaling(nn.Module):
    """Halves a weight when it comes into eval mode, doubles it when it leaves, and notes which state it is in."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.rescaled = False

    def forward(self, inputs):
        if self.rescaled == self.training:
            with torch.no_grad():
                self.first.weight.mul_(2.0 if self.training else 0.5)
            self.rescaled = not self.training
        hidden = self.first(inputs).tanh()
        return self.last(hidden * 2 if self.rescaled else hidden)


def biased(*, keeps):
    return nn.Sequential(Biased(keeps=keeps), nn.Linear(3, 3))


def log_probability(call, batch):
    return call(batch[0]).log_softmax(1).gather(1, batch[1][:, None])[:, 0]


WITH_Q = {"task": "image_classification", "method": "GradDot"}


def attributed(model, engine="auto", path=None, task=log_probability, method=GradDot(q="off")):  # noqa: B008
    settings = {"projector": "none", "dtype": "float32", "progress": False, "gradient_computer": engine}
    return Attributor(model, task, path, method=method, **settings)


def scores(model, engine="auto", states=None, **settings):
    made = attributed(model, engine, **settings)
    made.featurize(Rows(TRAIN, batch_size=4), states)
    return made.score(Rows(TRAIN, batch_size=4)).numpy()


def products(make, states):
    """Mean products of gradients, by plain autograd in float64 on a fresh model for every state dict."""
    total = 0.0
    for state in states:
        model = make()
        model.load_state_dict(state)
        model = model.double().eval()
        rows, wanted = [], [p for p in model.parameters() if p.requires_grad]
        for x, y in zip(*TRAIN.tensors, strict=True):
            output = log_probability(model, (x[None].double(), y[None])).sum()
            found = torch.autograd.grad(output, wanted, allow_unused=True, materialize_grads=True)
            rows.append(torch.cat([grad.flatten() for grad in found]))
        total = total + torch.stack(rows) @ torch.stack(rows).T
    return (total / len(states)).numpy()


def assert_right(found, make, states):
    np.testing.assert_allclose(found, products(make, states), rtol=1e-4, atol=1e-5)


def copied(model, factor=None):
    return {k: v.clone() if factor is None else v * factor for k, v in model.state_dict().items()}


@pytest.mark.parametrize("engine", ["auto", "hook", "functional", "iterative"])
def test_what_a_model_keeps_in_eval_mode_stands_for_no_parameter_and_no_other_checkpoint(engine):
    model, plain, inputs = biased(keeps=True).eval(), biased(keeps=False).eval(), TRAIN.tensors[0]
    states = [copied(plain, factor) for factor in (1.0, -2.0)]
    model[1].training = True
    modes = [module.training for module in model.modules()]
    with torch.no_grad():
        before = model(inputs)  # leaves constants in the place of parameters
    found = scores(model, engine, states, **WITH_Q)
    np.testing.assert_allclose(found, scores(plain, engine, states, **WITH_Q), rtol=1e-5, atol=1e-6)
    assert [module.training for module in model.modules()] == modes
    with torch.no_grad():
        assert model(inputs).equal(before)


@pytest.mark.parametrize("engine", ["auto", "hook", "iterative"])
def test_a_forward_pass_that_changes_parameters_is_refused_and_the_model_comes_back(engine):
    model, untouched = Rescaling(), Rescaling()
    with pytest.raises(UnsupportedModelError, match=r"changes 1 of its parameters.*'first.weight'"):
        scores(model, engine, **WITH_Q)
    assert torch.equal(model.first.weight, untouched.first.weight)
    assert model.training
    assert torch.equal(model.eval()(TRAIN.tensors[0]), untouched.eval()(TRAIN.tensors[0]))


def test_after_a_pass_in_eval_mode_the_same_rows_come_out_every_time():
    model, calls = Rescaling().eval(), []
    model(TRAIN.tensors[0])

    def make_inputs_require_grads(*_):  # the name that Transformers gives it
        calls.append("called")

    handle = model.first.register_forward_hook(make_inputs_require_grads)
    first = scores(model, **WITH_Q)
    assert not calls
    assert model.first._forward_hooks == {handle.id: make_inputs_require_grads}
    assert model.rescaled
    np.testing.assert_array_equal(scores(model, **WITH_Q), first)


class Merging(nn.Module):
    """Adds a product of two factors to its weight in eval mode, and takes it out in train mode, as loralib does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.merged = nn.Parameter(torch.randn(3, 4), requires_grad=False), False
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(3, 2))

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * (self.up.data @ self.down.data)
            self.merged = not mode
        return self

    def forward(self, x):
        inside = x @ self.weight.T
        return inside if self.merged else inside + x @ self.down.T @ self.up.T


class Keeping(nn.Module):
    """Computes values from a layer in its first pass, and keeps them."""

    def __init__(self, where):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.kept_layer, self.where = nn.Linear(4, 3), nn.Linear(2, 3), where
        self.places = torch.tensor([[0.5, -1.0], [1.0, 2.0], [-1.0, 0.3]])
        self.kept, self.by_length = None, {}
        self.register_buffer("buffer", None, persistent=False)
        self.register_buffer("filled", torch.full((3, 3), torch.nan), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            found = torch.tanh(self.kept_layer(self.places.to(x.dtype)))
        if self.where in ("attribute", "new attribute", "buffer"):
            name = {"attribute": "kept", "new attribute": "new"}.get(self.where, self.where)
            if getattr(self, name, None) is None:
                setattr(self, name, found)
            found = getattr(self, name)
        elif self.where == "dict":
            found = self.by_length.setdefault(len(self.places), found)
        elif self.where == "buffer in place":
            if self.filled.isnan().any():
                self.filled.copy_(found)
            found = self.filled
        return self.linear(x) @ found.to(x.dtype)


def merging():
    return nn.Sequential(Merging(), nn.Tanh(), nn.Linear(3, 3))


@pytest.mark.parametrize("engine", ["auto", "hook", "iterative"])
@pytest.mark.parametrize("start", ["train", "eval"])
@pytest.mark.parametrize("given", ["own", "one", "two"])
def test_layers_that_merge_weights_in_eval_mode_load_what_was_saved_in_train_mode(given, start, engine):
    model = merging()
    states = [copied(model), {k: v * 1.3 + 0.1 for k, v in model.state_dict().items()}]
    states = states if given == "two" else states[:1]
    model.train(start == "train")
    before, outputs = copied(model), copy.deepcopy(model).eval()(TRAIN.tensors[0])
    given = None if given == "own" else states
    made = attributed(model, engine)
    made.featurize(TRAIN, given)
    assert_right(made.score(TRAIN).numpy(), merging, states)
    streamed = made.stream_scores(TRAIN, TRAIN, method=GradDot(q="off"), checkpoints=given)
    assert_right(streamed.numpy(), merging, states)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert (model.training, model[0].merged) == (start == "train", start == "eval")
    assert model.eval()(TRAIN.tensors[0]).equal(outputs)


def test_merged_weights_of_the_model_beside_others_are_refused():
    """They are those of eval mode; a state dict is loaded in the mode in which it was saved."""
    model = merging().eval()
    some = {**model.state_dict(), "2.bias": torch.ones(3)}
    with pytest.raises(CheckpointError, match=r"those of eval mode.*model\.train\(\)"):
        attributed(model).featurize(TRAIN, [copied(merging()), some])


def test_rows_of_merged_weights_are_found_again_from_either_mode(tmp_path):
    model = merging()
    attributed(model, path=tmp_path / "a.zarr").featurize(TRAIN)
    model.eval()
    found = attributed(model, path=tmp_path / "a.zarr").featurize(TRAIN)
    assert (found.rows_written, found.other_checkpoints) == (0, 0)


@pytest.mark.parametrize("start", ["train", "eval"])
def test_traker_loads_layers_that_merge_weights(start, tmp_path):
    model, plain = merging().train(start == "train"), merging()
    settings = {"save_dir": tmp_path, "proj_dim": 4, "use_half_precision": False}
    traker = TRAKer(model, "image_classification", len(TRAIN), **settings)
    for number, factor in enumerate((2.0, -1.0)):
        state = copied(merging(), factor)
        plain.train().load_state_dict(state)
        traker.load_checkpoint(state, model_id=number)
        torch.testing.assert_close(model(TRAIN.tensors[0]), plain.eval()(TRAIN.tensors[0]))


class Expanding(nn.Linear):
    """Computes its filter when it comes into eval mode, and removes it in train mode, as layers of e2cnn do."""

    def __init__(self, *size):
        super().__init__(*size)
        self.register_buffer("filter", torch.zeros_like(self.weight))

    def train(self, mode=True):
        if mode and hasattr(self, "filter"):
            del self.filter
        elif not mode and self.training:
            self.register_buffer("filter", self.weight.tanh())
        return super().train(mode)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.tanh() if self.training else self.filter, self.bias)


class Replacing(nn.Linear):
    """Replaces its weight in eval mode, and keeps the weight of train mode in a buffer for that time."""

    def train(self, mode=True):
        if mode and not self.training:
            self.weight.data = self.original
            del self.original
        elif not mode and self.training:
            self.register_buffer("original", self.weight.data)
            self.weight.data = self.original.tanh()
        return super().train(mode)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.tanh() if self.training else self.weight, self.bias)


class Expanded(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.tanh(), self.bias)


def expanding(make, weights, modes=()):
    """Two layers in some modes; without any, they are as built."""
    model = nn.Sequential(make(4, 3), nn.Tanh(), make(3, 3))
    if modes:
        model.eval().train()
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    for layer, mode in zip(model[::2], modes, strict=False):
        layer.train(mode == "train")
    return model


@pytest.mark.parametrize("engine", ["auto", "iterative"])
@pytest.mark.parametrize("start", [(), ("eval", "train"), ("eval", "eval")])
@pytest.mark.parametrize("saved", [None, (), ("train", "train"), ("eval", "train"), ("eval", "eval")])
@pytest.mark.parametrize("make", [Expanding, Replacing])
def test_checkpoints_may_have_buffers_that_layers_make_in_eval_mode(make, saved, start, engine):
    torch.manual_seed(0)
    weights = [
        copied(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), factor) for factor in (1, 2)
    ]
    model = expanding(make, weights[0], start)
    before, modes = copied(model), [module.training for module in model.modules()]
    states = None if saved is None else [copied(expanding(make, one, saved)) for one in weights]
    wrapped = states and [{f"module.{name}": value for name, value in one.items()} for one in states]
    plain, expected = Expanded, weights if states else weights[:1]
    if make is Replacing:  # rows are those of the weights that are there in eval mode
        plain = nn.Linear
        expected = [{k: v.tanh() if "weight" in k else v for k, v in one.items()} for one in expected]
    for given in (states, wrapped):
        assert_right(scores(model, engine, given), lambda: expanding(plain, weights[0]), expected)
    after = copied(model)
    assert after.keys() == before.keys()
    assert all(value.equal(before[name]) for name, value in after.items())
    assert [module.training for module in model.modules()] == modes
    for more in ("filters", "2.original" if make is Expanding else "2.filter"):
        with pytest.raises(CheckpointError, match=f"unexpected: .*{more}"):
            scores(model, engine, [{**(states or [before])[0], more: torch.zeros(3, 3)}])


@pytest.mark.parametrize("engine", ["auto", "hook", "iterative"])
@pytest.mark.parametrize("where", ["attribute", "new attribute", "dict", "buffer", "buffer in place"])
def test_what_a_pass_keeps_in_an_attribute_is_not_used_for_the_next_checkpoint(where, engine):
    model = Keeping(where)
    states = [copied(model, factor) for factor in (1.0, -2.0, 0.5)]
    held, by_length = dict(vars(model)), model.by_length
    assert_right(scores(model, engine, states), lambda: Keeping(where), states)
    assert vars(model) == held
    assert model.by_length is by_length
    assert not by_length
    assert model.buffer is None
    assert model.filled.isnan().all()


class Remembering(nn.Module):
    """Follows the longest text, as dynamic rotary embeddings, or takes another layer from the first short one on."""

    def __init__(self, where):
        super().__init__()
        torch.manual_seed(0)
        self.where, self.longest = where, 2
        self.first, self.last = nn.Sequential(nn.Linear(1, 4), nn.Tanh()), nn.Linear(4, 3)
        self.register_buffer("period", torch.ones(1), persistent=False)

    def scaled(self, x):
        return self.first(x[..., None] / self.period)

    def forward(self, x):
        if self.where != "submodule" and x.shape[1] > self.longest:
            self.longest, self.period = x.shape[1], torch.full_like(self.period, x.shape[1])
        elif self.where == "submodule" and x.shape[1] == 2:
            self.first[1] = nn.Sigmoid()
        if self.where == "checkpoint":  # which reads the buffer again in the backward pass
            return self.last(checkpoint(self.scaled, x, use_reentrant=False).mean(1))
        return self.last(self.scaled(x).mean(1))


@pytest.mark.parametrize("engine", ["auto", "hook", "functional", "iterative"])
@pytest.mark.parametrize("where", ["buffer", "checkpoint", "submodule"])
def test_rows_do_not_depend_on_the_texts_before(where, engine):
    if (where, engine) == ("checkpoint", "functional"):
        pytest.skip("torch.func has no checkpoints")
    lengths, labels = [2, 5, 3, 2, 5, 4], torch.arange(6) % 3
    texts = [(torch.randn(length), y) for length, y in zip(lengths, labels, strict=True)]

    def gradient(text):
        model = Remembering(where).double().eval()
        output = log_probability(model, (text[0][None].double(), text[1][None]))
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(output, list(model.parameters()))])

    rows = torch.stack(list(map(gradient, texts)))
    model = Remembering(where)
    made = attributed(model, engine)
    for _ in range(2):  # checkpoint and question
        made.featurize(Rows(texts, batch_size=1, name="texts"))
        found = made.score(Rows(texts, batch_size=1, name="texts"))
        np.testing.assert_allclose(found.numpy(), rows @ rows.T, rtol=1e-4, atol=1e-5)
    assert (model.longest, model.period.item(), type(model.first[1])) == (2, 1.0, nn.Tanh)


@pytest.mark.parametrize(
    "method",
    [
        methods.EKFAC(fisher="sampled"),
        methods.EKFAC(samples=4),
        methods.CG(),
        methods.CG(draws=2),
        methods.Fisher(),
    ],
    ids=["EKFAC", "samples", "CG", "draws", "Fisher"],
)
def test_curvatures_do_not_depend_on_the_texts_before(method):
    """What labels are drawn from, and products of vectors, are those of a model that computes its buffer anew."""

    class Forgetting(Remembering):
        def scaled(self, x):
            return self.first(x[..., None] / (x.shape[1] if x.shape[1] > 2 else 1))

    generator = torch.Generator().manual_seed(0)
    texts = [(torch.randn(n, generator=generator), n % 3) for n in (2, 5, 3, 2, 5, 4, 3, 2)]

    def scores(kind):
        settings = {"projector": "none", "dtype": "float32", "progress": False}
        made = Attributor(kind("buffer").eval(), "image_classification", None, method=method, **settings)
        made.featurize(Rows(texts, batch_size=1))
        return made.score(Rows(texts[::-1], batch_size=1)).numpy()

    found, expected = scores(Remembering), scores(Forgetting)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


class Reading(nn.Module):
    """A language model that divides by the length of the longest text, which it keeps in a buffer and notes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.longest = 2
        self.tokens, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.register_buffer("period", torch.ones(1), persistent=False)

    def forward(self, input_ids):
        if input_ids.shape[1] > self.longest:
            self.longest = input_ids.shape[1]
            self.period = torch.full_like(self.period, self.longest)
        return self.head(torch.tanh(self.tokens(input_ids).cumsum(1) / self.period))


def test_tokens_and_reference_columns_do_not_depend_on_the_texts_before():
    texts = [torch.arange(length) % 5 for length in (6, 3, 4, 2)]
    pairs = [{f"{side}_{name}": text[None] for side in ("chosen", "rejected") for name in ("input_ids", "labels")}
             for text in texts]  # fmt: skip
    found = reference_columns(Reading(), pairs)["ref_chosen_logps"]
    expected = torch.cat([reference_columns(Reading(), [pair])["ref_chosen_logps"] for pair in pairs])
    torch.testing.assert_close(found, expected)

    rows = Rows([(text, text) for text in texts], batch_size=1)
    made = attributed(Reading(), "auto", task="causal_language_modeling")
    made.featurize(rows)
    scores = made.score(rows)
    sums = [tokens.sum(0) for tokens in token_scores(scores, rows, range(len(texts))).values()]
    np.testing.assert_allclose(sums, scores.numpy(), rtol=1e-3, atol=1e-5)


class Quantised(nn.Module):
    """Multiplies by frozen weights of one byte."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.ones(4, 4).to(dtype), requires_grad=False)
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x @ self.weight.to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_frozen_parameters_may_have_one_byte(dtype):
    states = [copied(Quantised(dtype))]
    found = scores(Quantised(dtype), states=states)
    assert_right(found, lambda: Quantised(torch.float64), [{k: v.double() for k, v in states[0].items()}])


class Mixing(nn.Module):
    """Mixes the samples of a batch a little, and replaces a buffer by an equal one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.register_buffer("ones", torch.ones(3))

    def forward(self, x):
        hidden = self.linear(x) * self.ones
        self.ones = self.ones * 1.0
        return hidden.tanh() + 0.05 * hidden.mean(0, keepdim=True)


def test_a_model_that_mixes_samples_is_refused_if_it_replaces_buffers_too():
    with pytest.raises(UnsupportedModelError, match="depends on the other samples of its batch"):
        scores(Mixing(), "functional")


class FromData(nn.Module):
    """Sets parameters from its first batch, as the normalisation of Glow, or limits them, as EEGNet."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.is_ready, self.linear = kind, False, nn.Linear(4, 3)
        self.register_buffer("ready", torch.zeros(1))

    def forward(self, x):
        weight = self.linear.weight
        if self.kind == "limited":
            weight.data = weight.data.clamp(-0.3, 0.3)
        elif self.kind == "limited in place":
            with torch.no_grad():
                weight.clamp_(-0.3, 0.3)
        elif self.kind == "drifting":
            weight.data.mul_(0.99)
        elif not (self.is_ready or self.ready):
            first = x.detach()[:1] * (torch.nan if self.kind == "spread" else 1)  # of one sample
            weight.data.copy_(first.expand(3, 4).to(weight.dtype))
            self.is_ready = self.kind in ("attribute", "spread")
            self.ready.fill_(self.kind == "buffer")
        return self.linear(x)


@pytest.mark.parametrize("engine", ["auto", "hook", "iterative"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["attribute", "buffer", "drifting", "spread"])
def test_parameters_that_a_pass_sets_behind_autograd_are_refused(kind, dtype, engine):
    model = FromData(kind).to(dtype)
    weight = model.linear.weight.detach().clone()
    made = attributed(model, engine)
    data = TensorDataset(TRAIN.tensors[0].to(dtype), TRAIN.tensors[1])
    with pytest.raises(UnsupportedModelError, match=r"changes 1 of its parameters, .*'linear.weight'"):
        made.featurize(Rows(data, batch_size=1), [copied(model)])
    assert model.linear.weight.equal(weight)
    assert not model.ready


@pytest.mark.parametrize(
    ("engine", "batch_size", "after"),
    [("auto", 1, 40), ("auto", 4, 0), ("hook", 1, 40), ("iterative", 1, 40), ("iterative", 4, 40)],
)
def test_parameters_that_a_hook_sets_in_a_later_backward_pass_are_refused(engine, batch_size, after):
    """As the orthogonal layer of FrEIA, whose hook projects its weights in every 256th backward pass."""
    model, passes = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), []

    def project(module, *_):
        passes.append(module)
        if len(passes) > after:
            module.weight.data.mul_(0.5)

    model[1].register_full_backward_hook(project)
    weight, data = model[1].weight.detach().clone(), ConcatDataset([TRAIN] * 4)
    made = Attributor(model, log_probability, None, proj_dim=4, gradient_computer=engine, progress=False)
    with pytest.raises(
        UnsupportedModelError, match=r"backward pass .*changes 1 of .*'1.weight'.*backward hooks"
    ):
        made.featurize(Rows(data, batch_size=batch_size))
    assert model[1].weight.equal(weight)


@pytest.mark.parametrize("engine", ["hook", "iterative"])
def test_parameters_that_a_hook_limits_to_the_same_values_are_right(engine):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 30))
    model.not_used = nn.Parameter(torch.full((3,), torch.nan), requires_grad=False)

    def limit(module, *_):
        module.weight.data.div_(module.weight.data.norm(dim=1, keepdim=True))

    def rows():
        made = Attributor(model, log_probability, None, proj_dim=4, gradient_computer=engine, progress=False)
        made.featurize(TRAIN)
        return made.score(TRAIN).numpy()

    limit(model[1])
    expected = rows()
    model[1].register_full_backward_hook(limit)
    np.testing.assert_allclose(rows(), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def test_parameters_that_every_pass_limits_to_the_same_values_are_right():
    states = [copied(FromData("limited"))]
    assert_right(scores(FromData("limited"), states=states), lambda: FromData("limited"), states)


def test_parameters_that_every_pass_limits_in_place_are_refused_with_what_helps():
    model = FromData("limited in place").eval()
    model(TRAIN.tensors[0])  # no later pass changes a value
    with pytest.raises(UnsupportedModelError, match=r"writes into 1 of .*'linear.weight', .*may.*\.data"):
        attributed(model, "auto").featurize(TRAIN)


class Padding(nn.Linear):
    """Keeps padding with the size of its first batch, as PixelCNN++."""

    padding = None

    def forward(self, x):
        if self.padding is None:
            self.padding = torch.ones(len(x), 1, dtype=x.dtype)
        return super().forward(torch.cat([x, self.padding], 1))


def test_a_tensor_with_the_size_of_an_earlier_batch_is_a_named_cause():
    with pytest.raises(InvalidInputError, match="keeps no tensor with the size of an earlier batch"):
        attributed(Padding(5, 3), "auto").featurize(TRAIN)


class Hooking(nn.Module):
    """Adds a hook in its first pass and notes that, as models of Transformers that return hidden states."""

    def __init__(self, where):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.where = nn.Linear(4, 4), nn.Linear(4, 3), where
        self.has_hook, self.notes, self.named = False, [False], {}

    def forward(self, x):
        if not (self.has_hook or self.notes[0] or self.named):
            if self.where != "task":
                self.first.register_forward_hook(doubled)
            self.has_hook, self.notes[0] = self.where in ("attribute", "task"), self.where == "list"
            self.named.update({"dict": {"hook": True}}.get(self.where, {}))
        return self.last(torch.tanh(self.first(x)))


def doubled(module, inputs, output):
    return output * 1.5


@pytest.mark.parametrize("where", ["attribute", "dict", "list", "task"])
def test_hooks_that_a_first_pass_adds_are_there_once_and_those_of_a_task_stay(where, monkeypatch):
    monkeypatch.setattr("trak_lite.core.eval_caches._MOST_PASSES", 2)  # as in a long run

    def reference():
        model = Hooking(where)
        if where == "task":
            model.first.register_forward_hook(doubled)
        return model

    class Task(AbstractModelOutput):
        is_ready = False

        def prepare(self, model):
            if where == "task" and not self.is_ready:
                model.first.register_forward_hook(doubled)
                self.is_ready = True

        def evaluate(self, call, batch):
            output = log_probability(call, batch)
            return OutputTerms(output, torch.ones_like(output), torch.ones_like(output))

    model = Hooking(where)
    states = [copied(model, factor) for factor in (1.0, -2.0, 0.5)]
    assert_right(scores(model, states=states, task=Task()), reference, states)
    model(TRAIN.tensors[0])
    assert len(model.first._forward_hooks) == 1


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 3), lambda: merging().eval()])
def test_the_models_own_state_dict_among_others_is_that_of_the_call(make):
    """Its tensors are the model's, which hold the other checkpoint when it is loaded; merged in eval mode."""
    model = make()
    plain = copy.deepcopy(model).train()
    early, own = copied(plain, -2), copied(plain)
    found = scores(model, states=[early, model.state_dict()])
    assert_right(found, lambda: make().train(), [early, own])


class Extra(nn.Linear):
    """Has an entry of the state dict that is no tensor."""

    factor = 3.0

    def get_extra_state(self):
        return {"factor": self.factor}

    def set_extra_state(self, state):
        self.factor = state["factor"]

    def forward(self, x):
        return super().forward(x) * self.factor


@pytest.mark.parametrize("make", [nn.Linear, Extra])
@pytest.mark.parametrize("engine", ["auto", "functional"])
def test_a_state_dict_with_some_tensors_of_the_model_has_those_of_the_call(make, engine):
    """As ``{**model.state_dict(), "bias": another}``."""
    model = make(4, 3)
    early = copied(nn.Linear(4, 3), -2)
    if make is Extra:
        early["_extra_state"] = {"factor": 5.0}
    part = {**model.state_dict(), "bias": torch.ones(3)}
    expected = [early, copy.deepcopy(part), copy.deepcopy(model.state_dict())]
    found = scores(model, engine, states=[early, part, model.state_dict()])
    assert_right(found, lambda: make(4, 3), expected)


@pytest.mark.parametrize("engine", ["auto", "functional"])
def test_a_tensor_of_the_model_under_the_name_of_another_has_the_values_of_the_call(engine):
    """As in a model whose layers are swapped, to see what each is for."""

    def make():
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    model = make()
    own = dict(model.state_dict())
    swapped = {**own, "0.weight": own["2.weight"], "2.weight": own["0.weight"]}
    early = copied(model, -2)
    one = {**early, "0.bias": own["2.bias"]}
    expected = copy.deepcopy([early, swapped, one, own])
    found = scores(model, engine, states=[early, swapped, one, own])
    assert_right(found, make, expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda own: {"0.weight": own["2.weight"].T},
        lambda own: {"0.weight": own["0.weight"].T, "2.bias": own["0.weight"][:, 1]},
        lambda own: {"0.bias": own["2.bias"][1].expand(4)},
        lambda own: {"0.bias": torch.from_numpy(own["2.weight"].numpy()[1])},
    ],
)
@pytest.mark.parametrize("is_part", [True, False])
def test_views_of_the_models_tensors_have_the_values_of_the_call(view, is_part):
    def make():
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    model = make()
    early = copied(model, -2)
    own = dict(model.state_dict())
    viewed = {**(own if is_part else early), **view(own)}
    expected = copy.deepcopy([early, viewed, own])
    found = scores(model, states=[early, viewed, own])
    assert_right(found, make, expected)


def loaders(model):
    """Loaders of "early" and "late", and the weights that are meant."""
    own, early, late = model.state_dict(), copied(model, -2), copied(model, 0.5)

    def copies(name):
        for key, p in model.named_parameters():
            p.data.copy_({"early": early, "late": late}[name][key])
        return model.state_dict()

    def loads_part(name):
        model[0].load_state_dict(
            {"weight": early["0.weight"], "bias": (early if name == "early" else late)["0.bias"]}
        )
        return {**model.state_dict(), "2.bias": own["2.bias"].clone()}

    shifts = {"early": -0.3, "late": 0.4}
    part = {**copied(model), "0.weight": early["0.weight"]}
    return {
        "held": ({"early": early, "late": own}.get, [early, copied(model)]),
        "copied": (copies, [early, late]),
        "part": (loads_part, [{**part, "0.bias": early["0.bias"]}, {**part, "0.bias": late["0.bias"]}]),
        "computed": (
            lambda name: {key: value + shifts[name] for key, value in model.state_dict().items()},
            [{key: value + shift for key, value in own.items()} for shift in shifts.values()],
        ),
    }


@pytest.mark.parametrize("kind", ["held", "copied", "part", "computed"])
def test_a_loader_finds_the_model_with_its_own_weights(kind):
    def make():
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    model = make()
    loader, expected = loaders(model)[kind]
    made, before = attributed(model), copied(model)
    made.featurize(Rows(TRAIN, batch_size=4), ["early", "late", "late"], checkpoint_loader=loader)
    found = made.score(Rows(TRAIN, batch_size=4)).numpy()
    assert_right(found, make, copy.deepcopy(expected))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_merged_weights_that_a_loader_reads_are_those_of_train_mode():
    model = merging().eval()
    plain = copied(merging())
    shifted = {name: value + 0.3 * (name == "2.bias") for name, value in plain.items()}
    made = attributed(model)
    made.featurize(
        Rows(TRAIN, batch_size=4),
        [0.3, 0.0],
        checkpoint_loader=lambda shift: {
            name: value + shift * (name == "2.bias") for name, value in model.state_dict().items()
        },
    )
    assert_right(made.score(Rows(TRAIN, batch_size=4)).numpy(), merging, [shifted, plain])


def test_tensors_of_the_model_that_a_generator_yields_after_other_weights_are_refused():
    """It may mean the model's own weights, or those that it yielded last."""
    model = nn.Linear(4, 3)
    early, held = copied(model, -2), model.state_dict()
    expected = [early, copied(model)]
    for last in (held, {name: value[:] for name, value in held.items()}, {**early, "bias": held["bias"]}):
        with pytest.raises(
            CheckpointError, match=r"'1' has tensors of the model, which hold .* '0'.*None for"
        ):
            attributed(model).featurize(Rows(TRAIN, batch_size=4), iter([early, last]))
    made = attributed(model)
    made.featurize(Rows(TRAIN, batch_size=4), iter([held, early, None]))
    assert_right(made.score(TRAIN, checkpoints=expected).numpy(), lambda: nn.Linear(4, 3), expected)


@pytest.mark.parametrize("kind", [dict.values, lambda states: deque(states.values())])
def test_state_dicts_that_another_collection_holds_have_the_values_of_the_call(kind):
    model = nn.Linear(4, 3)
    early, own = copied(model, -2), copied(model)
    found = scores(model, states=kind({"early": early, "now": model.state_dict()}))
    assert_right(found, lambda: nn.Linear(4, 3), [early, own])


def test_a_transformers_that_cannot_be_imported_is_left_alone(monkeypatch):
    """Its names are imported when they are read, which fails, for example, with a torchvision of another torch."""
    monkeypatch.setitem(
        sys.modules, "transformers", type("Lazy", (), {"__getattr__": lambda self, name: 1 / 0})()
    )
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)
    model = nn.Linear(4, 3)
    states = [copied(model, -2)]
    assert_right(scores(model, states=states), lambda: nn.Linear(4, 3), states)


class Replaced(nn.Linear):
    """Replaces its parameters when a state dict is loaded."""

    def _load_from_state_dict(self, state_dict, prefix, *_):
        for name in ("weight", "bias"):
            setattr(self, name, nn.Parameter(state_dict[f"{prefix}{name}"].clone()))


@pytest.mark.parametrize("engine", ["hook", "functional", "iterative"])
def test_parameters_that_loading_replaces_come_back(engine):
    model = nn.Sequential(Replaced(4, 3), nn.Tanh(), nn.Linear(3, 3))
    parameters, own = list(model.parameters()), copied(model)
    states = [copied(model, -2), own, copied(model, 0.5)]
    found = scores(model, engine, states=[states[0], model.state_dict(), states[2]])
    assert_right(found, lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), states)
    assert all(now is was for now, was in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())


def test_a_generator_may_train_the_model_itself():
    """It goes on with the weights that it yielded last, and yields the model's own tensors."""
    model, seen = nn.Linear(4, 3), []

    def trained():
        for _ in range(3):
            model.weight.data.mul_(-1.5)  # no new version
            seen.append(copied(model))
            yield model.state_dict()

    made = attributed(model)
    made.featurize(Rows(TRAIN, batch_size=4), trained())
    assert_right(made.score(TRAIN, checkpoints=seen).numpy(), lambda: nn.Linear(4, 3), seen)
    with pytest.raises(CheckpointError, match="state dicts 0 and 1 of the list share their tensors"):
        made.stream_scores(TRAIN, TRAIN, checkpoints=trained(), method=GradDot(q="off"))


@pytest.mark.parametrize("first", [lambda: nn.Linear(4, 3), Merging])
@pytest.mark.parametrize("by_loader", [True, False])
def test_a_model_that_is_trained_for_the_next_checkpoint_is_in_eval_mode_again(by_loader, first):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(first(), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 3))

    model, seen = make(), []

    def trained(number):
        model.train()
        with torch.enable_grad():
            model(TRAIN.tensors[0]).square().sum().backward()
        torch.optim.SGD(model.parameters(), 0.01 * number).step()
        for p in model.parameters():
            p.data.mul_(64).round_().div_(64)  # merging rounds nothing
        seen.append(copied(model))
        model.train(number == 1)
        return model.state_dict()

    made = attributed(model)
    if by_loader:
        made.featurize(Rows(TRAIN, batch_size=4), [1, 2], checkpoint_loader=trained)
    else:
        made.featurize(Rows(TRAIN, batch_size=4), map(trained, [1, 2]))
    states = list(seen)
    assert_right(made.score(TRAIN, checkpoints=states).numpy(), make, states)
    assert all(module.training for module in model.modules())


class Equal(nn.Linear):
    """A layer whose ``==`` compares weights, and is no truth value."""

    __hash__ = nn.Module.__hash__

    def __eq__(self, other):
        return self.weight == other.weight


def test_a_model_may_define_equality():
    model = Equal(4, 3)
    states = [copied(model)]
    assert_right(scores(model), lambda: nn.Linear(4, 3), states)


def test_a_forward_method_that_keeps_the_former_one_is_the_models():
    """Accelerate keeps it by this name as well."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    vars(model)["_original_forward"] = model.forward
    model.forward = lambda x: 3.0 * nn.Linear.forward(model, x)
    scaled = nn.Linear(4, 3)
    scaled.load_state_dict({name: 3.0 * value for name, value in model.state_dict().items()})
    found, expected = (Attributor(m, "image_classification", None, projector="none") for m in (model, scaled))
    products = [a.stream_scores(TRAIN, TRAIN, method=GradDot()).numpy() for a in (found, expected)]
    np.testing.assert_allclose(products[0], 9.0 * products[1], rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("last", [nn.Dropout, lambda: Biased(keeps=False)])
@pytest.mark.parametrize("use", ["featurize", "capture"])
def test_scripted_modules_come_back_in_their_modes(use, last):
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Dropout().eval())
    frozen = torch.jit.freeze(torch.jit.script(nn.Linear(4, 4).eval()))  # has no mode
    model = nn.Sequential(torch.jit.script(mixed), frozen, nn.Linear(4, 4), last())
    modes = [module.training for module in model.modules() if hasattr(module, "training")]
    assert modes == [True, True, True, True, False, True, True, *[True] * isinstance(model[3], Biased)]
    made = attributed(model)
    if use == "featurize":
        made.featurize(TRAIN, [copied(model), copied(model, 0.5)])
    else:
        with made.capture(TRAIN, "step") as capture:
            capture(TRAIN[:4], range(4))
    assert [m.training for m in model.modules() if m is not frozen] == modes


def test_featurizing_leaves_no_copy_of_the_model_behind():
    """Not even until the cyclic collector runs, which does not see how large tensors are."""
    gc.collect()
    gc.disable()
    try:
        Attributor(nn.Linear(4, 3), "image_classification", None, proj_dim=8).featurize(TRAIN)
        assert not [one for one in gc.get_objects() if type(one).__name__ in ("BorrowedModel", "RowWork")]
    finally:
        gc.enable()


class Calibrated(nn.Module):
    """Divides by a mean until a scale was loaded, as brevitas: the mean is saved as the scale, and is not loaded."""

    def __init__(self, mean=1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.full((1,), mean))
        self.calibrates = True
        self.register_load_state_dict_pre_hook(self.note)

    def state_dict(self, *, destination, prefix, keep_vars=False):
        super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        mean = destination.pop(f"{prefix}mean")
        if self.calibrates:
            destination[f"{prefix}scale"] = mean

    @staticmethod
    def note(module, state_dict, prefix, *_):
        module.calibrates &= f"{prefix}scale" not in state_dict

    def forward(self, x):
        return x / (self.mean if self.calibrates else self.scale)


class MakesAnew(nn.Module):
    """Makes its submodule again when a state dict is loaded."""

    def __init__(self):
        super().__init__()
        self.inner = Calibrated(3.0)
        self.register_load_state_dict_pre_hook(self.make)

    @staticmethod
    def make(module, *_):
        module.inner = Calibrated()

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("make", [lambda: Calibrated(3.0), MakesAnew])
@pytest.mark.parametrize("engine", ["hook", "functional", "iterative"])
def test_loading_that_changes_modules_is_undone(make, engine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), make(), nn.Linear(3, 3)).eval()
    modules, x = list(model.modules()), TRAIN.tensors[0]
    expected, state = model(x), copy.deepcopy(model.state_dict())
    state["0.bias"] += 1
    loaded = nn.Sequential(nn.Linear(4, 3), make(), nn.Linear(3, 3)).eval()
    loaded.load_state_dict(state, strict=False)
    assert not torch.equal(loaded(x), expected)

    def rows(net):
        outputs = net(x).square().sum(1)
        return [torch.autograd.grad(out, net[0].weight, retain_graph=True)[0].flatten() for out in outputs]

    def output(model_call, batch):
        return model_call(batch[0]).square().sum(1)

    for given, net in (([state], loaded), (None, model), ([state], loaded)):
        made = Attributor(model, output, None, gradient_computer=engine, grad_wrt="0.weight")
        scores = made.stream_scores(TRAIN, TRAIN, method=GradDot(), checkpoints=given).numpy()
        assert list(model.modules()) == modules
        assert torch.equal(model(x), expected)
        found = torch.stack(rows(net))
        np.testing.assert_allclose(scores, found @ found.T, rtol=1e-4, atol=1e-5)
