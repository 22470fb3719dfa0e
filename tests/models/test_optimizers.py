"""States of Adam by parameter: found wherever trainings save them, and matched with the right parameters."""

import copy
import gc
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_runs import adam_scale
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import TensorDataset

from trak_lite import Attributor, named_optimizer_state
from trak_lite.errors import CheckpointError, InvalidInputError, ManifestMismatchError

AdamW = torch.optim.AdamW


class Normed(nn.Module):
    """Weights and biases of equal shapes side by side: batch norm decays its weight and not its bias in Trainer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.batch = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.batch(self.norm(self.first(x)).tanh()))


def model():
    torch.manual_seed(0)
    return Normed().double()


def saved(net, optimizer):
    """What a model and its optimizer are saved as after three steps."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(6, 3, dtype=torch.float64, generator=generator)
        (net(x) * torch.randn(6, 3, dtype=torch.float64, generator=generator)).sum().backward()
        optimizer.step()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


def with_optimizer(make=AdamW):
    net = model()
    optimizer = make(net.parameters())
    return net, optimizer, saved(net, optimizer)


def decayed(net, *wanted):
    """An optimizer with two groups: the wanted parameters, and the others."""
    named = dict(net.named_parameters())
    kept, rest = [named[name] for name in wanted], [p for name, p in named.items() if name not in wanted]
    return AdamW([{"params": kept, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])


def total(call, batch):
    """Its gradient is one everywhere, so that a row is what gradients are multiplied by."""
    return sum(p.sum() for p in call.parameters.values()).expand(len(batch[0]))


@pytest.fixture
def check(load):
    """Return what holds the rows of a checkpoint against the states that the optimizer holds for each parameter."""

    def check(net, optimizer, source, loader=None, **settings):
        _, (row,) = load(net, source, loader, task=total, normalize="adam", **settings)
        trained = [p for p in net.parameters() if p.requires_grad]
        states = [optimizer.state.get(p, {"exp_avg_sq": torch.zeros_like(p), "step": 1}) for p in trained]
        scales = [adam_scale(state) for state in states]
        np.testing.assert_allclose(row, torch.cat(scales).numpy(), rtol=1e-6)

    return check


OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "foreach": partial(AdamW, foreach=True),
    "fused": partial(torch.optim.Adam, fused=True),
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_dict_or_file_with_model_and_optimizer(make, tmp_path, check):
    net, optimizer, content = with_optimizer(make)
    torch.save({"model": content["model"], "optimizer_state_dict": content["optimizer"]}, tmp_path / "a.pt")
    for source in (content, tmp_path / "a.pt"):
        check(net, optimizer, source)
    check(net, optimizer, ["epoch 1"], lambda _: content)


def test_a_loader_that_trains_the_model_gives_weights_and_state_of_one_training(load):
    """It draws its batches at random, so that a second call would train another model."""
    net, _, content = with_optimizer()
    own, made = copy.deepcopy(net), []

    def trained(_):
        for p in net.parameters():
            p.data.add_(torch.randn_like(p))
        state = copy.deepcopy(content["optimizer"])
        for key, p in enumerate(net.parameters()):
            state["state"][key]["exp_avg_sq"] = p.detach().square()
        made.append(copy.deepcopy({"model": net.state_dict(), "optimizer": state}))
        return {"model": net.state_dict(), "optimizer": state}

    _, found = load(net, [1, 2], trained, normalize="adam")
    _, expected = load(own, list(made), None, normalize="adam")
    assert len(made) == 2
    np.testing.assert_allclose(np.stack(found), np.stack(expected), rtol=1e-5)


@pytest.mark.parametrize("stored", [False, True])
def test_what_a_loader_returns_is_freed_before_it_is_called_again(stored, tmp_path):
    net, _, content = with_optimizer()
    given, alive, data = [], [], TensorDataset(torch.ones(4, 3).double())

    def loader(number):
        gc.collect()
        alive.append(sum(tensor() is not None for tensor in given))
        made = copy.deepcopy(content)
        for value in made["model"].values():
            value.add_(number)
        given.extend(map(weakref.ref, made["model"].values()))
        return made

    for _ in range(1 + stored):
        made = Attributor(net, total, tmp_path / "a.zarr", normalize="adam", proj_dim=4)
        made.featurize(data, checkpoints=[1, 2, 3], checkpoint_loader=loader)
    assert alive == [0] * 3 * (1 + stored)


def test_a_loader_that_changes_the_model_is_asked_for_the_state_and_not_for_other_weights(load):
    net, _, content = with_optimizer()
    trained = dict(net.named_parameters())
    shifted = {name: value + 0.5 * (name in trained) for name, value in net.state_dict().items()}

    def shift(_):
        for p in net.parameters():
            p.data.add_(0.5)
        return {"model": net.train().state_dict(), "optimizer": content["optimizer"]}

    def squares(call, batch):
        return sum(p.square().sum() for p in call.parameters.values()).expand(len(batch[0]))

    state = {"model": copy.deepcopy(shifted), "optimizer": copy.deepcopy(content["optimizer"])}
    (found,), (expected,) = (
        load(net, [source], loader, task=squares, normalize="adam")[1]
        for source, loader in ((1, shift), (state, None))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


class Packed(TwoTensor):
    """A value and its scale, as the 8-bit states of torchao."""

    def dequantize(self):
        return self.a * self.b


def test_states_of_few_bits_are_what_they_stand_for(check):
    net, optimizer, content = with_optimizer()
    for entry in content["optimizer"]["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            entry[key] = Packed(entry[key] / 4, torch.full_like(entry[key], 4.0))
    optimizer.load_state_dict({**content["optimizer"], "state": unpacked(content["optimizer"]["state"])})
    check(net, optimizer, content)


def unpacked(states):
    return {
        number: {
            key: value.dequantize() if isinstance(value, Packed) else value for key, value in entry.items()
        }
        for number, entry in states.items()
    }


def test_a_lightning_style_dict_of_a_module_around_the_model(tmp_path, check):
    net, optimizer, state = with_optimizer()
    weights = {f"net.{name}": value for name, value in state["model"].items()}
    content = {"state_dict": weights, "optimizer_states": [state["optimizer"]], "epoch": 1}
    torch.save(content, tmp_path / "a.ckpt")
    torch.save({**content, "optimizer_states": [state["optimizer"]] * 2}, tmp_path / "two.ckpt")
    check(net, optimizer, tmp_path / "a.ckpt", lambda path: net.state_dict())
    torch.save({**content, "hyper_parameters": Path("x")}, tmp_path / "unsafe.ckpt")
    check(net, optimizer, tmp_path / "unsafe.ckpt", lambda path: state)
    with pytest.raises(CheckpointError, match="2 optimizers"):
        check(net, optimizer, tmp_path / "two.ckpt", lambda path: net.state_dict())


def test_a_folder_of_hugging_face_in_which_only_the_decay_rule_tells_groups_apart(tmp_path, check):
    """The shapes alone do not: nn.BatchNorm1d's weight decays, its bias does not, and both have the same shape."""
    net = model()
    optimizer = decayed(net, "first.weight", "batch.weight", "last.weight")
    content = saved(net, optimizer)
    (tmp_path / "checkpoint-3").mkdir()
    save_file(content["model"], tmp_path / "checkpoint-3" / "model.safetensors")
    torch.save(content["optimizer"], tmp_path / "checkpoint-3" / "optimizer.pt")
    check(net, optimizer, tmp_path / "checkpoint-3")


def test_other_groups_that_the_shapes_do_not_tell_apart_are_refused_unless_they_have_names(check):
    net = model()
    by_hand = decayed(net, "norm.bias", "batch.weight", "last.bias")
    content = saved(net, by_hand)
    with pytest.raises(CheckpointError, match=r"2 groups without names.*named_optimizer_state"):
        check(net, by_hand, content)
    check(net, by_hand, {**content, "optimizer": named_optimizer_state(by_hand, net)})


@pytest.mark.quick
def test_groups_of_modules_in_another_order_are_told_apart_by_shapes(check):
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 3)).double()
    optimizer = AdamW([{"params": net[2].parameters()}, {"params": net[:2].parameters()}])
    check(net, optimizer, saved(net, optimizer))


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "net.inner."])
def test_names_that_torch_records_are_used_in_any_order_and_behind_a_prefix(prefix, check):
    net = model()
    optimizer = AdamW([(prefix + name, p) for name, p in list(net.named_parameters())[::-1]])
    check(net, optimizer, saved(net, optimizer))


def test_named_states_load_into_the_optimizer_and_wrappers_are_opened():
    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    net, optimizer, _ = with_optimizer()
    state = named_optimizer_state(Wrapper(optimizer), net)
    again = AdamW(net.parameters())
    again.load_state_dict(state)
    assert state["param_groups"][0]["param_names"] == [name for name, _ in net.named_parameters()]
    for p in net.parameters():
        assert torch.equal(again.state[p]["exp_avg_sq"], optimizer.state[p]["exp_avg_sq"])


def test_frozen_parameters_are_skipped_and_those_without_gradient_have_zeros(check):
    net = model()
    net.first.requires_grad_(False)
    net.extra = nn.Parameter(torch.ones(2, dtype=torch.float64))  # in the optimizer, but without a gradient
    optimizer = AdamW([p for p in net.parameters() if p.requires_grad])
    content = saved(net, optimizer)
    check(net, optimizer, content)
    named = [name for name, p in net.named_parameters() if p.requires_grad]
    net.requires_grad_(True)
    content["optimizer"]["param_groups"][0]["param_names"] = named
    with pytest.raises(CheckpointError, match=r"no optimizer state for .*first\.weight.*grad_wrt"):
        check(net, optimizer, content)


def test_missing_states_name_the_places_that_were_searched(tmp_path, check):
    net, optimizer, content = with_optimizer()
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    torch.save(net.state_dict(), tmp_path / "a.pt")
    for source, message in (
        (tmp_path / "model.safetensors", r"Searched: .*optimizer\.pt\. Expected"),
        (tmp_path / "a.pt", r"Searched: .*a\.pt;"),
        (None, "current weights"),
        (content["model"], "the state dict of checkpoint '0'"),
        ({**content, "optimizer": {"lr": 1}}, "has the entries.*'state' and 'param_groups'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            check(net, optimizer, source)


SGD = partial(torch.optim.SGD, lr=0.1)
REFUSED = (*(getattr(torch.optim, name) for name in ("RAdam", "NAdam", "Adamax", "Adagrad")), SGD)


@pytest.mark.parametrize("make", [*REFUSED, partial(SGD, momentum=0.9)])
def test_other_optimizers_are_refused(make, check):
    net, optimizer, content = with_optimizer(make)
    with pytest.raises(CheckpointError, match=r"is not torch's Adam or AdamW"):
        check(net, optimizer, content)
    with pytest.raises(InvalidInputError, match=f"is a {type(optimizer).__name__}"):
        named_optimizer_state(optimizer, net)


def test_states_of_another_model_or_of_maximised_objectives_are_refused(check):
    other, wide = nn.Linear(3, 3).double(), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).double()
    reversed_order = AdamW([*wide[1].parameters(), *wide[0].parameters()])
    net, optimizer, content = with_optimizer(partial(AdamW, maximize=True))
    for some, given, message in (
        (net, content, "maximize"),
        (other, {**content, "model": other.state_dict()}, "has 8 parameters, and the Linear has 2"),
        (wide, saved(wide, reversed_order), "shapes of the optimizer state"),
    ):
        with pytest.raises(CheckpointError, match=message):
            check(some, optimizer, given)
    with pytest.raises(InvalidInputError, match="not parameters of the Linear"):
        named_optimizer_state(optimizer, other)


def of_first(key, value):
    return lambda state: state["state"][0].update({key: value})


def of_group(key, value):
    return lambda state: state["param_groups"][0].update({key: value})


def of_keys(make):
    """JSON makes texts of the numbers, and then no parameter has a state."""
    return lambda state: state.update(state={make(key): value for key, value in state["state"].items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_keys(str), "states under '.*', which no group lists, and none under"),
        (
            lambda state: state["state"][0]["exp_avg_sq"][0, 0].fill_(torch.nan),
            r"exp_avg_sq of first\.weight .*NaN",
        ),
        (
            lambda state: state["state"][0]["exp_avg_sq"][0, 0].fill_(-1),
            r"exp_avg_sq of first\.weight .*below 0",
        ),
        (of_first("exp_avg_sq", torch.ones(3, 3, dtype=torch.uint8)), "moments are dense floats"),
        (of_first("exp_avg", torch.zeros(3, 3).to_sparse()), "moments are dense floats"),
        (of_first("exp_avg", torch.zeros(3, 3, device="meta")), "cannot be read"),
        (of_first("step", -1), "step -1"),
        (of_first("step", None), "cannot be read"),
        (lambda state: state["state"].update({0: None}), "cannot be read"),
        (of_group("betas", (0.9, 1.0)), r"betas \(0\.9, 1\.0\)"),
        (of_group("betas", None), "cannot be read"),
        (of_group("eps", -1.0), r"eps -1\.0"),
        (of_group("amsgrad", True), "cannot be read .*max_exp_avg_sq"),
        (of_group("param_names", ["first.weight"]), "cannot be read"),
        (lambda state: state["param_groups"][0].pop("params"), "cannot be read .*params"),
        (lambda state: state.update(param_groups=[None]), "cannot be read"),
    ],
)
def test_states_that_cannot_be_those_of_a_training_are_refused(change, message, check):
    net, optimizer, content = with_optimizer()
    content = copy.deepcopy(content)
    change(content["optimizer"])
    with pytest.raises(CheckpointError, match=message):
        check(net, optimizer, content)


def test_states_that_name_parameters_in_the_place_of_numbers_need_no_other_names(check):
    net = model()
    optimizer = decayed(net, "batch.bias", "last.weight")  # shapes do not tell these groups apart
    content = saved(net, optimizer)
    with pytest.raises(CheckpointError, match="equal shapes"):
        check(net, optimizer, content)
    check(net, optimizer, {**content, "optimizer": get_optimizer_state_dict(net, optimizer)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_states_in_fewer_bits_are_read_as_the_numbers_that_they_are(dtype, check):
    net, optimizer, content = with_optimizer()
    content = copy.deepcopy(content)
    for p, state in zip(net.parameters(), content["optimizer"]["state"].values(), strict=True):
        state["exp_avg_sq"] = state["exp_avg_sq"].to(dtype)
        optimizer.state[p]["exp_avg_sq"] = state["exp_avg_sq"].double()
    check(net, optimizer, content)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda state: state["state"][0]["exp_avg"].mul_(1.0001), False),
        (lambda state: state["state"][7]["exp_avg_sq"].mul_(1.0001), False),
        (lambda state: state["param_groups"][0].update(betas=(0.8, 0.999)), False),
        (lambda state: state["param_groups"][0].update(eps=1e-7), False),
        (lambda state: state["param_groups"][0].update(lr=0.5), True),  # no row depends on it
    ],
)
def test_moments_and_settings_of_the_optimizer_tell_checkpoints_apart(change, same, load):
    net, _, content = with_optimizer()
    other = copy.deepcopy(content)
    change(other["optimizer"])
    if same:
        summary, _ = load(net, [content, other], task=total, normalize="adam")
        assert (summary.rows_written, summary.rows_found) == (1, 1)
    else:
        with pytest.raises(ManifestMismatchError, match="optimizer"):
            load(net, [content, other], task=total, normalize="adam")
