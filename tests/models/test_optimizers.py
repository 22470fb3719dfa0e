"""States of Adam by parameter: found wherever trainings save them, and matched with the right parameters."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trak_lite import named_optimizer_state
from trak_lite.errors import CheckpointError, InvalidInputError
from trak_lite.models.checkpoints import Checkpoint, iterate_checkpoints
from trak_lite.models.optimizers import AdamStates, adam_states

pytestmark = pytest.mark.quick


class Normed(nn.Module):
    """Weights and biases of equal shapes side by side: batch norm decays its weight and not its bias in Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.batch = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.batch(self.norm(self.first(x)).tanh()))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Normed().double()


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(6, 3, dtype=torch.float64, generator=generator)
        (net(x) * torch.randn(6, 3, dtype=torch.float64, generator=generator)).sum().backward()
        optimizer.step()


def decayed(net: nn.Module, wanted: Any) -> list[dict[str, Any]]:
    """Two groups: parameters with a wanted name, and the others."""
    named = dict(net.named_parameters())
    return [
        {"params": [p for name, p in named.items() if wanted(name)], "weight_decay": 0.1},
        {"params": [p for name, p in named.items() if not wanted(name)], "weight_decay": 0.0},
    ]


def check(found: AdamStates, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every name has the moments that the optimizer holds for this very parameter."""
    for name, p in net.named_parameters():
        state = optimizer.state[p]
        torch.testing.assert_close(found.of[name].exp_avg, state["exp_avg"], rtol=0, atol=0)
        torch.testing.assert_close(found.of[name].exp_avg_sq, state["exp_avg_sq"], rtol=0, atol=0)
        assert found.of[name].step == int(state["step"])


def states_of(net: nn.Module, source: Any, **loader: Any) -> AdamStates:
    (checkpoint,) = iterate_checkpoints(source, **loader)
    return adam_states(
        net, {name: tuple(p.shape) for name, p in net.named_parameters()}, checkpoint, torch.device("cpu")
    )


OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "foreach": partial(torch.optim.AdamW, foreach=True),
    "fused": partial(torch.optim.Adam, fused=True),
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("key", ["optimizer", "optimizer_state_dict"])
def test_a_dict_or_file_with_model_and_optimizer(make: Any, key: str, tmp_path: Path) -> None:
    net = model()
    optimizer = make(net.parameters())
    trained(net, optimizer)
    content = {"model": net.state_dict(), key: optimizer.state_dict()}
    torch.save(content, tmp_path / "a.pt")

    check(states_of(net, content), net, optimizer)
    check(states_of(net, tmp_path / "a.pt"), net, optimizer)
    assert states_of(net, content).digest == states_of(net, tmp_path / "a.pt").digest


def test_a_lightning_style_dict_of_a_module_around_the_model(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    trained(net, optimizer)
    weights = {f"net.{name}": value for name, value in net.state_dict().items()}
    content = {"state_dict": weights, "optimizer_states": [optimizer.state_dict()], "epoch": 1}
    torch.save(content, tmp_path / "a.ckpt")

    check(
        states_of(net, tmp_path / "a.ckpt", checkpoint_loader=lambda path: net.state_dict()), net, optimizer
    )

    two = {**content, "optimizer_states": content["optimizer_states"] * 2}
    with pytest.raises(CheckpointError, match="2 optimizers"):
        states_of(net, two)


def test_a_loader_may_return_both() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    trained(net, optimizer)

    found = states_of(
        net,
        ["epoch 1"],
        checkpoint_loader=lambda _: {"model": net.state_dict(), "optimizer": optimizer.state_dict()},
    )

    check(found, net, optimizer)


def test_a_folder_of_hugging_face_in_which_only_the_decay_rule_tells_groups_apart(tmp_path: Path) -> None:
    """The shapes alone do not: nn.BatchNorm1d's weight decays, its bias does not, and both have the same shape."""
    net = model()
    optimizer = torch.optim.AdamW(decayed(net, lambda n: n in HUGGING_FACE_DECAYS))
    trained(net, optimizer)
    (tmp_path / "checkpoint-3").mkdir()
    save_file(net.state_dict(), tmp_path / "checkpoint-3" / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "checkpoint-3" / "optimizer.pt")

    check(states_of(net, tmp_path / "checkpoint-3"), net, optimizer)


HUGGING_FACE_DECAYS = {"first.weight", "batch.weight", "last.weight"}


def test_other_groups_that_the_shapes_do_not_tell_apart_are_refused_unless_they_have_names() -> None:
    net = model()
    by_hand = torch.optim.AdamW(decayed(net, lambda name: name in {"norm.bias", "batch.weight", "last.bias"}))
    trained(net, by_hand)
    content = {"model": net.state_dict(), "optimizer": by_hand.state_dict()}

    with pytest.raises(CheckpointError, match=r"2 groups without names.*named_optimizer_state"):
        states_of(net, content)

    content["optimizer"] = named_optimizer_state(by_hand, net)
    check(states_of(net, content), net, by_hand)


def test_groups_of_modules_in_another_order_are_told_apart_by_shapes() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 3)).double()
    optimizer = torch.optim.AdamW([{"params": net[2].parameters()}, {"params": net[:2].parameters()}])
    trained(net, optimizer)

    check(states_of(net, {"model": net.state_dict(), "optimizer": optimizer.state_dict()}), net, optimizer)


def test_names_that_torch_records_are_used_in_any_order_and_behind_a_prefix() -> None:
    net = model()
    reverse = list(net.named_parameters())[::-1]
    for prefix in ("", "_orig_mod.", "module.", "net.inner."):
        own = copy.deepcopy(net)
        named = [(prefix + name, own.get_parameter(name)) for name, _ in reverse]
        optimizer = torch.optim.AdamW(named)
        trained(own, optimizer)

        check(
            states_of(own, {"model": own.state_dict(), "optimizer": optimizer.state_dict()}), own, optimizer
        )


def test_a_state_dict_with_names_still_loads_into_the_optimizer() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    trained(net, optimizer)
    again = torch.optim.AdamW(net.parameters())
    again.load_state_dict(named_optimizer_state(optimizer, net))
    assert again.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


def test_frozen_parameters_are_skipped_and_those_without_gradient_have_zeros() -> None:
    net = model()
    net.first.requires_grad_(False)
    net.extra = nn.Parameter(torch.ones(2, dtype=torch.float64))  # in the optimizer, but without a gradient
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    trained(net, optimizer)
    content = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    kept = {name: tuple(p.shape) for name, p in net.named_parameters() if p.requires_grad}

    found = adam_states(net, kept, next(iter(iterate_checkpoints(content))), torch.device("cpu"))

    assert found.of["extra"].step == 0
    assert not found.of["extra"].scale().any()
    torch.testing.assert_close(found.of["last.bias"].exp_avg, optimizer.state[net.last.bias]["exp_avg"])
    with pytest.raises(CheckpointError, match=r"no optimizer state for .*first\.weight.*grad_wrt"):
        states_of(net, content)


def test_missing_states_name_the_places_that_were_searched(tmp_path: Path) -> None:
    net = model()
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    torch.save(net.state_dict(), tmp_path / "a.pt")

    with pytest.raises(CheckpointError, match=r"Searched: .*optimizer\.pt\. Expected"):
        states_of(net, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"Searched: .*a\.pt;"):
        states_of(net, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="current weights"):
        states_of(net, None)
    with pytest.raises(CheckpointError, match="the state dict of checkpoint '0'"):
        states_of(net, net.state_dict())


REFUSED = (
    torch.optim.RAdam,
    torch.optim.NAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    partial(torch.optim.SGD, lr=0.1),
)


@pytest.mark.parametrize("make", REFUSED)
def test_other_optimizers_are_refused(make: Any) -> None:
    net = model()
    optimizer = make(net.parameters())
    trained(net, optimizer)

    with pytest.raises(CheckpointError, match=r"is not torch's Adam or AdamW"):
        states_of(net, {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    with pytest.raises(InvalidInputError, match=f"is a {type(optimizer).__name__}"):
        named_optimizer_state(optimizer, net)


def test_states_of_another_model_or_of_maximised_objectives_are_refused() -> None:
    net, other = model(), nn.Linear(3, 3).double()
    optimizer = torch.optim.AdamW(net.parameters(), maximize=True)
    trained(net, optimizer)

    with pytest.raises(CheckpointError, match="maximize"):
        states_of(net, {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    with pytest.raises(CheckpointError, match=r"has 8 parameters, and the Linear has 2"):
        states_of(other, {"model": other.state_dict(), "optimizer": optimizer.state_dict()})
    with pytest.raises(InvalidInputError, match="not parameters of the Linear"):
        named_optimizer_state(optimizer, other)
    wide = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).double()
    optimizer = torch.optim.AdamW([*wide[1].parameters(), *wide[0].parameters()])
    trained(wide, optimizer)
    with pytest.raises(CheckpointError, match=r"shapes of the optimizer state"):
        states_of(wide, {"model": wide.state_dict(), "optimizer": optimizer.state_dict()})


def test_a_wrapper_of_the_optimizer_is_opened() -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    state = named_optimizer_state(Wrapper(optimizer), net)
    assert state["param_groups"][0]["param_names"] == [name for name, _ in net.named_parameters()]


def test_the_digest_depends_on_moments_and_settings() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    trained(net, optimizer)
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters()}

    def digest() -> str:
        content = {"optimizer": copy.deepcopy(optimizer.state_dict())}
        return adam_states(net, shapes, Checkpoint("0", None, lambda: content), torch.device("cpu")).digest

    found = [digest()]
    optimizer.state[net.last.bias]["exp_avg_sq"][0] *= 1.0001
    found.append(digest())
    optimizer.state[net.last.bias]["exp_avg"][0] *= 1.0001
    found.append(digest())
    optimizer.param_groups[0]["betas"] = (0.8, 0.999)
    found.append(digest())
    assert len(set(found)) == 4
    optimizer.param_groups[0]["lr"] = 0.5  # no row depends on it
    assert digest() == found[-1]
