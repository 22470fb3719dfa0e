"""States of Adam by parameter, from the optimizer state that a training saves beside the weights.

Optimizer states number the parameters. Their names come from ``param_names``, which an optimizer records if it was
built with ``model.named_parameters()``, or from the order and the shapes of the parameters.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from trak_lite.core.fingerprint import tensor_bytes
from trak_lite.core.validate import some_of
from trak_lite.errors import CheckpointError, InvalidInputError
from trak_lite.models.checkpoints import HUGGING_FACE_FILES, Checkpoint, bare_name, read_content

_KEYS: Final = ("optimizer", "optimizer_state_dict", "optimizer_states")
"""Keys of the optimizer state beside the weights; the last is Lightning's, a list with one state per optimizer."""
_BESIDE: Final = "optimizer.pt"
"""File name of the optimizer state in a checkpoint folder of the Hugging Face Trainer."""
_ENTRIES: Final = {"step", "exp_avg", "exp_avg_sq"}
_SETTINGS: Final = {"betas", "eps", "amsgrad"}
_MOST_ORDERS: Final = 10_000
_NO_DECAY: Final = (r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", r"bias")
"""Names without weight decay in the Hugging Face Trainer, besides those of ``nn.LayerNorm``: its rule and its older
rule (``Trainer.get_decay_parameter_names``)."""
_HOW: Final = (
    "Save the names with the state: build the optimizer with model.named_parameters(), or save "
    "named_optimizer_state(optimizer, model) in its place"
)

_Shape: TypeAlias = tuple[int, ...]
_Slot: TypeAlias = tuple[Any, Mapping[str, Any]]
"""Key of a parameter in an optimizer state, and its parameter group."""


@dataclass(frozen=True, slots=True)
class AdamState:
    """State of ``torch.optim.Adam`` or ``AdamW`` for one parameter.

    Source: Kingma and Ba (arXiv:1412.6980), algorithm 1.
    """

    exp_avg: Tensor
    """m, the moving average of gradients, in the parameter's shape."""
    exp_avg_sq: Tensor
    """v, the moving average of squared gradients."""
    max_exp_avg_sq: Tensor | None
    """The largest v of all steps with ``amsgrad=True``, which replaces v; else ``None``."""
    step: int
    """Number of steps taken; 0 if the parameter never had a gradient."""
    beta1: float
    beta2: float
    eps: float

    @torch.no_grad()
    def scale(self) -> Tensor:
        r"""Return :math:`(\sqrt{\hat v} + \epsilon)^{-1/2}` for every entry, with the bias-corrected v.

        Adam divides an update by the square of this number. Entries with v = 0, whose gradient was zero in every step,
        have the scale 0.
        """
        second = self.exp_avg_sq if self.max_exp_avg_sq is None else self.max_exp_avg_sq
        root = second.sqrt() / math.sqrt(1 - self.beta2 ** max(self.step, 1))
        return torch.where(second > 0, (root + self.eps).rsqrt(), 0)

    @torch.no_grad()
    def updates(self, grads: Tensor) -> Tensor:
        r"""Return Adam's next update :math:`\hat m' / (\sqrt{\hat v'} + \epsilon)` for each gradient alone.

        A step subtracts the learning rate times the update. Weight decay is not part of it.

        Args:
            grads: ``(b, *parameter.shape)`` gradients of the loss; each is the whole gradient of one step.
        """
        step = self.step + 1
        first = grads * (1 - self.beta1) + self.beta1 * self.exp_avg
        second = grads.square() * (1 - self.beta2) + self.beta2 * self.exp_avg_sq
        if self.max_exp_avg_sq is not None:
            second = torch.maximum(second, self.max_exp_avg_sq)
        root = second.sqrt_() / math.sqrt(1 - self.beta2**step)
        return first.div_(1 - self.beta1**step).div_(root.add_(self.eps))


@dataclass(frozen=True, slots=True)
class AdamStates:
    """States of Adam for the differentiated parameters of a checkpoint."""

    of: Mapping[str, AdamState]
    """State by parameter name, on the model's device."""
    digest: str
    """SHA-256 over names, settings and values."""


def named_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the state dict of an Adam optimizer with the names of its parameters.

    Featurize or save it beside the weights: ``{"model": model.state_dict(), "optimizer": ...}``. It loads into the
    optimizer like its own state dict.

    Args:
        optimizer: A ``torch.optim.Adam`` or ``AdamW``, or a wrapper of one with an attribute ``optimizer``.
        model: The module whose parameters it updates, or one that contains it.

    Returns:
        ``optimizer.state_dict()`` with ``param_names`` in every group, as torch records it for an optimizer that was
        built with ``model.named_parameters()``. Its tensors are the optimizer's own, which the next step changes: copy
        them (``copy.deepcopy``) if they are kept in memory while the training continues.

    Raises:
        InvalidInputError: If it is another optimizer, or updates a parameter that is not the model's.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> named_optimizer_state(optimizer, model)["param_groups"][0]["param_names"]
        ['weight', 'bias']
    """
    inner: Any = optimizer
    while not isinstance(inner, torch.optim.Adam | torch.optim.AdamW) and hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        raise InvalidInputError(
            f"The optimizer is a {type(inner).__name__}. Expected torch.optim.Adam or AdamW, whose second moments "
            "scale gradients."
        )
    name_of = {id(p): name for name, p in model.named_parameters()}
    foreign = [tuple(p.shape) for g in inner.param_groups for p in g["params"] if id(p) not in name_of]
    if foreign:
        raise InvalidInputError(
            f"{len(foreign)} parameters of the optimizer, of shapes {foreign[:3]}, are not parameters of the "
            f"{type(model).__name__}. Pass the module that the optimizer was built for."
        )
    state = inner.state_dict()
    for group, inner_group in zip(state["param_groups"], inner.param_groups, strict=True):
        group["param_names"] = [name_of[id(p)] for p in inner_group["params"]]
    return state


def adam_states(
    model: nn.Module, parameters: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint, device: torch.device
) -> AdamStates:
    """Return the states of Adam that were saved with a checkpoint, for these parameters of its model, on a device.

    The optimizer state is searched in the file of the weights, in ``optimizer.pt`` beside the weights of a Hugging Face
    folder, and in what ``checkpoint.load`` returns. None, one of another optimizer, or one whose parameters cannot be
    matched with those of the model raises CheckpointError.
    """
    state, where = _optimizer_state(checkpoint)
    try:
        return _states_in(state, where, model, parameters, device)
    except CheckpointError:
        raise
    except (
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        NotImplementedError,
    ) as error:
        raise CheckpointError(
            f"The optimizer state in {where} cannot be read ({error!r:.200}). Expected the state dict of torch's Adam "
            "or AdamW, as optimizer.state_dict() returns it."
        ) from error


def _states_in(
    state: Mapping[str, Any],
    where: str,
    model: nn.Module,
    parameters: Mapping[str, tuple[int, ...]],
    device: torch.device,
) -> AdamStates:
    slots = _slots_by_name(model, state, where)
    lacking = [name for name in parameters if name not in slots]
    if lacking:
        raise CheckpointError(
            f"{where} holds no optimizer state for {some_of(lacking)}: the training did not update them. Leave them "
            "out with grad_wrt=..., or use normalize='none'."
        )
    states = {
        name: _adam_state(state["state"].get(slots[name][0], {}), slots[name][1], name, shape, where, device)
        for name, shape in parameters.items()
    }
    return AdamStates(states, _digest(states))


# ---------------------------------------------------------------- where states are saved


def _optimizer_state(checkpoint: Checkpoint) -> tuple[Mapping[str, Any], str]:
    """Return the optimizer state of a checkpoint, and its place for messages."""
    searched: list[str] = []
    for where, content in _places(checkpoint):
        state = _inside(content, where)
        if state is not None:
            return state, where
        searched.append(where)
    raise CheckpointError(
        f"Checkpoint {checkpoint.name!r} has no optimizer state, which normalize='adam' and 'adam_update' need. "
        f"Searched: {'; '.join(searched) or 'nothing, because these are the current weights of the model'}. Expected "
        f"{_BESIDE} beside the weights (Hugging Face Trainer), or a file or dict such as {{'model': "
        "model.state_dict(), 'optimizer': optimizer.state_dict()}."
    )


def _places(checkpoint: Checkpoint) -> Iterator[tuple[str, Any]]:
    """Yield places of the optimizer state, and what they hold."""
    path = None if checkpoint.source is None else Path(checkpoint.source)
    if path is not None and (path.is_dir() or path.name in HUGGING_FACE_FILES):
        beside = (path if path.is_dir() else path.parent) / _BESIDE
        yield str(beside), {"optimizer": read_content(beside)} if beside.is_file() else None
    elif path is not None and path.suffix != ".safetensors":
        content = None
        with contextlib.suppress(CheckpointError):  # raised again by load(), unless a loader reads it
            content = read_content(path)
        yield str(path), content
    if checkpoint.load is not None and (path is None or path.name not in HUGGING_FACE_FILES):
        yield f"the state dict of checkpoint {checkpoint.name!r}", checkpoint.load()


def _inside(content: Any, where: str) -> Mapping[str, Any] | None:
    """Return the optimizer state in a checkpoint's content."""
    if not isinstance(content, Mapping):
        return None
    state = next(
        (content[key] for key in _KEYS if isinstance(content.get(key), Mapping | list | tuple)), None
    )
    if isinstance(state, list | tuple):
        if len(state) != 1:
            raise CheckpointError(
                f"{where} holds the states of {len(state)} optimizers. Expected one. Save the state of the one that "
                "updates the attributed parameters under 'optimizer'."
            )
        state = state[0]
    if not isinstance(state, Mapping):
        return None
    if not (isinstance(state.get("state"), Mapping) and isinstance(state.get("param_groups"), Sequence)):
        raise CheckpointError(
            f"The optimizer state in {where} has the entries {some_of(map(str, state))}. Expected the state dict of a "
            "torch optimizer, with 'state' and 'param_groups'."
        )
    return state


# ---------------------------------------------------------------- whose states they are


def _slots_by_name(model: nn.Module, state: Mapping[str, Any], where: str) -> dict[str, _Slot]:
    """Return the slot of every parameter that the optimizer updates, by the model's names."""
    groups = [[(key, group) for key in group["params"]] for group in state["param_groups"]]
    keys = {key for group in groups for key, _ in group}
    strays, lacking = state["state"].keys() - keys, keys - state["state"].keys()
    if strays and lacking:  # otherwise a parameter of another key would count as one without gradients
        raise CheckpointError(
            f"The optimizer in {where} has states under {some_of(map(repr, strays))}, which no group lists, and none "
            f"under {some_of(map(repr, lacking))}, which groups list. Save the state dict with its keys as they are; "
            "JSON turns numbers into texts."
        )
    # torch.distributed.checkpoint.state_dict puts names in the place of the numbers.
    names = [group.get("param_names", group["params"]) for group in state["param_groups"]]
    if all(isinstance(name, str) for group in names for name in group):
        pairs = (zip(*both, strict=True) for both in zip(names, groups, strict=True))
        return _under_own_names(model, {name: slot for group in pairs for name, slot in group}, where)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    count = sum(map(len, groups))
    candidates = [params for params in (trainable, dict(model.named_parameters())) if len(params) == count]
    if not candidates:
        raise CheckpointError(
            f"The optimizer in {where} has {count} parameters, and the {type(model).__name__} has {len(trainable)} "
            f"that require grad, so they cannot be matched by their order. {_HOW}."
        )
    return _by_order(model, candidates[0], groups, state["state"], where)


def _under_own_names(model: nn.Module, named: Mapping[str, _Slot], where: str) -> dict[str, _Slot]:
    """Return slots under the model's names. The optimizer may know the model as a part of a larger module."""
    slot_of = {bare_name(name): slot for name, slot in named.items()}
    name_of = {bare_name(name): name for name, _ in model.named_parameters()}
    prefixes = {""} | {
        name.removesuffix(inner) for inner in name_of for name in slot_of if name.endswith(f".{inner}")
    }
    matches = [
        {name: slot_of[prefix + inner] for inner, name in name_of.items() if prefix + inner in slot_of}
        for prefix in sorted(prefixes)
    ]
    largest = max(map(len, matches))
    best = [slots for slots in matches if len(slots) == largest]
    if not largest or len(best) > 1:
        raise CheckpointError(
            f"The optimizer in {where} has parameters named {some_of(slot_of)}, and the {type(model).__name__} has "
            f"{some_of(name_of)}. Expected the same names, or the same behind one prefix."
        )
    return best[0]


def _by_order(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    groups: Sequence[Sequence[_Slot]],
    entries: Mapping[Any, Any],
    where: str,
) -> dict[str, _Slot]:
    """Return the slots of parameters without names: every group lists its parameters in the model's order."""
    shapes = [tuple(p.shape) for p in parameters.values()]
    # None for a parameter without state, because it never had a gradient.
    moments = [[entries.get(key, {}).get("exp_avg") for key, _ in group] for group in groups]
    slot_shapes = [[tuple(m.shape) if isinstance(m, Tensor) else None for m in group] for group in moments]
    choices = _orders(shapes, slot_shapes)
    if not choices:
        raise CheckpointError(
            f"The shapes of the optimizer state in {where} are not those of the {type(model).__name__}'s parameters "
            f"in their order, in {len(groups)} groups. {_HOW}."
        )
    if len(choices) > 1:
        rules = {tuple(int(name in rule) for name in parameters) for rule in _without_decay(model)}
        fitting = [way for rule in rules for way in _orders(shapes, slot_shapes, rule)]
        if len(groups) != 2 or len(fitting) != 1:
            pairs = zip(parameters, *choices, strict=False)
            raise CheckpointError(
                f"The optimizer state in {where} has {len(groups)} groups without names, and parameters of equal "
                f"shapes may be in one or another: {some_of(name for name, one, two in pairs if one != two)}. {_HOW}."
            )
        choices = fitting
    following = [iter(group) for group in groups]
    return {name: next(following[group]) for name, group in zip(parameters, choices[0], strict=True)}


def _orders(
    shapes: Sequence[_Shape], groups: Sequence[Sequence[_Shape | None]], rule: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    """Return up to two ways to divide parameters among groups that keep their order, as the group of each.

    A rule names the group of every parameter, so that at most one way is left.
    """
    # By the number of parameters that each group has received: at most two ways to get there.
    frontier: dict[tuple[int, ...], list[tuple[int, ...]]] = {(0,) * len(groups): [()]}
    for index, shape in enumerate(shapes):
        following: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for taken, ways in frontier.items():
            for number, group in enumerate(groups):
                position = taken[number]
                allowed = rule is None or rule[index] == number
                if allowed and position < len(group) and group[position] in (None, shape):
                    after = (*taken[:number], position + 1, *taken[number + 1 :])
                    some = following.setdefault(after, [])
                    some.extend((*way, number) for way in ways[: 2 - len(some)])
        if len(following) > _MOST_ORDERS:
            return [way for ways in following.values() for way in ways][:2]
        frontier = following
    return next(iter(frontier.values()), [])


def _without_decay(model: nn.Module) -> list[set[str]]:
    """Return the parameters in the second group of the Hugging Face Trainer, by its present and its older rule."""
    inside = {
        name
        for prefix, module in model.named_modules()
        if isinstance(module, nn.LayerNorm)
        for name, _ in module.named_parameters(prefix)
    }
    names = [name for name, _ in model.named_parameters()]
    return [inside | {name for name in names if re.search(rule, name.lower())} for rule in _NO_DECAY]


# ---------------------------------------------------------------- what they hold


def _adam_state(
    entry: Mapping[str, Any],
    group: Mapping[str, Any],
    name: str,
    shape: tuple[int, ...],
    where: str,
    device: torch.device,
) -> AdamState:
    """Return one parameter's state; zeros if it never had a gradient."""
    is_of_adam = entry.keys() - {"max_exp_avg_sq"} == _ENTRIES and all(
        isinstance(entry[key], Tensor)
        and entry[key].is_floating_point()
        and entry[key].layout == torch.strided
        for key in entry
        if key != "step"
    )
    if not group.keys() >= _SETTINGS or (entry and not is_of_adam):
        raise CheckpointError(
            f"The optimizer in {where} is not torch's Adam or AdamW: its groups have {some_of(map(str, group))}, and "
            f"the state of {name} {some_of(map(str, entry))}. Expected {some_of(sorted(_SETTINGS))}, and "
            f"{some_of(sorted(_ENTRIES))}, of which the moments are dense floats. Use normalize='none' for other "
            "optimizers."
        )
    if group.get("maximize"):
        raise CheckpointError(
            f"The optimizer in {where} was built with maximize=True, so its moments are not those of a loss. Expected "
            "maximize=False."
        )
    wrong = [key for key in entry if key != "step" and tuple(entry[key].shape) != shape]
    if wrong:
        raise CheckpointError(
            f"The state {wrong[0]} of {name} in {where} has the shape {tuple(entry[wrong[0]].shape)}, and the "
            f"parameter {shape}. Pass the model that the optimizer was built for."
        )

    def moved(key: str) -> Tensor:
        if not entry:
            return torch.zeros(shape, dtype=torch.float32, device=device)
        is_packed = hasattr(entry[key], "__tensor_flatten__")  # of torchao's optimizers, in 8 or 4 bits
        value: Tensor = (entry[key].dequantize() if is_packed else entry[key]).detach()
        value = value.to(device, torch.float32 if value.dtype.itemsize < 4 else value.dtype)
        if key != "exp_avg" and not (value >= 0).all():  # a scale would be 0 there
            raise CheckpointError(
                f"The state {key} of {name} in {where} has numbers that are NaN or below 0. Expected mean squares. "
                "Restore the checkpoint, or leave it out."
            )
        return value

    beta1, beta2 = map(float, group["betas"])
    step, eps = int(entry.get("step", 0)), float(group["eps"])
    if not (step >= 0 and 0 <= beta1 < 1 and 0 <= beta2 < 1 and eps >= 0):
        raise CheckpointError(
            f"The optimizer in {where} has betas {(beta1, beta2)}, eps {eps} and, for {name}, step {step}. Expected "
            "betas from 0 to below 1, and no negative number."
        )
    maximum = moved("max_exp_avg_sq") if group["amsgrad"] else None
    return AdamState(moved("exp_avg"), moved("exp_avg_sq"), maximum, step, beta1, beta2, eps)


def _digest(states: Mapping[str, AdamState]) -> str:
    """Return the SHA-256 over names, settings and values of states."""
    digest = hashlib.sha256()
    for name, state in sorted(states.items()):
        digest.update(bare_name(name).encode())
        for value in (getattr(state, field.name) for field in fields(state)):
            if isinstance(value, Tensor):
                digest.update(f"|{value.dtype}|".encode())
                digest.update(tensor_bytes(value))
            else:
                digest.update(f"|{value!r}|".encode())
    return digest.hexdigest()
