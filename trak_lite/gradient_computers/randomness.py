"""Random numbers that a model draws: replay of them, and refusal of models that are random in eval mode."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trak_lite.core.devices import rng_state, seed_rng, set_rng_state, wide_dtype
from trak_lite.core.eval_caches import attributes_kept, remembering
from trak_lite.data.batches import batch_size, is_equal, map_tensors, take_rows
from trak_lite.errors import MODEL_FAILURES, UnsupportedModelError, refuse_machine_failure
from trak_lite.gradient_computers.parameters import Kept, differentiating_only
from trak_lite.gradient_computers.recording import version_of
from trak_lite.gradient_computers.reference import (
    CheckedComputer,
    SeenDtypes,
    fits_in_float64,
    in_float64,
    widened,
)
from trak_lite.models._adapters import changed_parameters, parameter_versions
from trak_lite.models.sharded import class_of, is_sharded
from trak_lite.types import Batch

_ROUNDING = 1e-6
"""Relative change of the norm of a parameter that another pass may make; half a rounding of 16 bits is more."""


@dataclass(frozen=True, slots=True)
class RandomState:
    """State of torch's generators on the CPU and on accelerators."""

    states: Mapping[torch.device, Tensor]

    @classmethod
    def of(cls, values: Iterable[Any]) -> RandomState:
        """Return the generator states of the CPU and of these values' devices."""
        devices = {value.device for value in values if isinstance(value, Tensor)}
        return cls.on({torch.device("cpu"), *devices} - {torch.device("meta")})

    @classmethod
    def on(cls, devices: Iterable[torch.device]) -> RandomState:
        """Return the generator states of these devices."""
        return cls({device: rng_state(device) for device in devices})

    def has_moved(self) -> bool:
        """Whether random numbers were drawn since the state was saved."""
        return any(not torch.equal(state, rng_state(device)) for device, state in self.states.items())

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Restore the saved states inside the block, so that the same numbers are drawn."""
        now = RandomState.on(self.states)
        try:
            self._set()
            yield
        finally:
            now._set()

    def _set(self) -> None:
        for device, state in self.states.items():
            set_rng_state(device, state)


@contextmanager
def restoring_draws(model: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Restore the random states of a model's devices after the block; inside it they start from ``seed``, if given."""
    before = RandomState.of(model.parameters())
    try:
        if seed is not None:
            for device in before.states:
                seed_rng(device, seed)
        yield
    finally:
        before._set()


def draws_numbers(computer: CheckedComputer, batch: Batch) -> bool:
    """Whether the model draws random numbers for a batch."""
    with restoring_draws(computer.model, 0), torch.enable_grad():
        before = RandomState.of(computer.model.parameters())
        computer.terms(batch)
        return before.has_moved()


def outputs_of(computer: CheckedComputer, parts: Iterable[Batch], seed: int = 0) -> Tensor:
    """Return f of the samples of some batches, in order, with random numbers that start from a seed."""
    with restoring_draws(computer.model, seed), torch.enable_grad():  # without gradients a checkpoint warns
        outputs = torch.cat([computer.terms(part).output.detach() for part in parts])
    computer.undo_passes()
    return outputs


def differ(values: Tensor, rounding: float = 1e-3) -> bool:
    """Whether f of some samples ``(passes, B)`` differs between passes by more than rounding; false if any is NaN."""
    wide = values.to(wide_dtype(values.device))
    return float((wide - wide[0]).abs().max()) > rounding * float(wide.abs().max())


class _Draws(TorchFunctionMode):
    """Records the names of the operations that draw random numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.devices, self.names = list(RandomState.of(model.parameters()).states), dict[str, None]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = RandomState.on(self.devices)
        result = func(*args, **(kwargs or {}))
        if before.has_moved():
            self.names[getattr(func, "__name__", "an operation")] = None
        return result


MIXES = "f of a sample depends on the other samples of its batch, or on its place among them"


def refusal_of_mixing(model: nn.Module) -> str:
    """Return the message for a model whose f of a sample depends on the other samples of its batch."""
    return f"{type(model).__name__}: {MIXES}. Use gradient_computer='iterative', which computes every sample alone."


def depends_on_batch(
    computer: CheckedComputer,
    batch: Batch,
    size: int = 1,
    *,
    sure: bool = False,
    together: Tensor | None = None,
    alone: Tensor | None = None,
) -> bool:
    """Whether f of samples in their batch differs by more than rounding from f in batches of ``size``.

    f of a pass that was made, ``together`` or ``alone``, is not computed again. A small f may be a difference of large
    numbers, and rounding may send a row to another expert. So a difference is looked for again in float64; where that
    is not possible, only a large one counts, or none if ``sure``. ``False`` if the model takes only one sample at a
    time.
    """
    known = [(together, alone)]  # in float64, f is another one

    def difference(given: Batch) -> tuple[float, torch.dtype]:
        whole, parts = known.pop() if known else (None, None)
        if whole is None:
            whole = outputs_of(computer, [given])
        if parts is None:
            starts = range(0, len(whole), size)
            parts = outputs_of(computer, [take_rows(given, slice(start, start + size)) for start in starts])
        return _error(parts, whole), whole.dtype

    return _exceeds_rounding(computer, batch, difference, sure=sure)


def refuse_reading_of_flags(computer: CheckedComputer, batch: Batch, kept: Kept) -> None:
    """Raise if f of the first sample is another one while only the kept parameters require grad, as in a pass."""
    model = computer.model
    if all(p.requires_grad == (name in kept) for name, p in model.named_parameters()):
        return

    def difference(batch: Batch) -> tuple[float, torch.dtype]:
        expected = outputs_of(computer, [batch])
        with differentiating_only(model.parameters(), kept):
            return _error(outputs_of(computer, [batch]), expected), expected.dtype

    if _exceeds_rounding(computer, take_rows(batch, [0]), difference):
        raise UnsupportedModelError(
            f"f of {class_of(model).__name__} is another one if only the {len(kept)} chosen parameters require grad, "
            "as in a pass: its forward pass reads requires_grad. Expected an f that does not depend on it. If "
            "that is the model you mean, let only these parameters require grad (requires_grad_) before."
        )


def _error(outputs: Tensor, expected: Tensor) -> float:
    """Return the largest difference, divided by the largest number."""
    error, most = (value.nan_to_num(0.0).abs().max() for value in (expected - outputs, expected))
    return float(error) / (float(most) or 1.0)


def _exceeds_rounding(
    computer: CheckedComputer,
    batch: Batch,
    difference: Callable[[Batch], tuple[float, torch.dtype]],
    *,
    sure: bool = False,
) -> bool:
    """Whether a relative difference of f is more than rounding; see :func:`depends_on_batch`."""
    try:
        deviation, _ = difference(batch)
    except MODEL_FAILURES as error:
        refuse_machine_failure(error)
        return False
    if deviation > 1e-3 and fits_in_float64(computer.model):
        try:
            with in_float64(computer.model), SeenDtypes() as mode:
                exact, dtype = difference(map_tensors(widened, batch))
        except (torch.OutOfMemoryError, *MODEL_FAILURES) as error:
            refuse_machine_failure(error)
        else:
            if dtype == torch.float64:
                # Parts that a model computes in a dtype of their own round to that.
                return exact > (1e-3 if sure and mode.dtypes - {torch.float64} else 1e-6)
    return deviation > 1e-1 and not sure


def refuse_random(computer: CheckedComputer, batch: Batch) -> None:
    """Raise if f of some samples changes with what the model draws, or with buffers or parameters that it changes."""
    held = computer.model.named_buffers()
    buffers = [(name, buffer, buffer.detach().clone(), version_of(buffer)) for name, buffer in held]
    weights, put_back = parameter_sizes(computer.model), _state_kept(computer.model, buffers)

    def draws(part: Batch) -> bool | None:
        try:
            return draws_numbers(computer, part)
        except MODEL_FAILURES as error:
            refuse_machine_failure(error)
            return None

    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(put_back)
        stack.enter_context(remembering())
        # One by one, as some models take samples, or together, as others do. One that takes neither fails in its pass.
        parts = [take_rows(batch, [row]) for row in range(batch_size(batch))]
        if (is_random := draws(parts[0])) is None:
            parts, is_random = [batch], draws(batch)
        if is_random is not None:
            if changed := changed_sizes(computer.model, weights, 0.0):
                weights = parameter_sizes(computer.model)
                put_back()
                try:
                    draws_numbers(computer, map_tensors(_other_values, parts[-1]))
                except Exception as error:  # the user's model need not take these values
                    refuse_machine_failure(error)
                    draws(parts[-1])
                # A limit of their norms changes them once. What is computed from samples changes them again, or is NaN.
                again = {name for name in changed if weights[name][1].isnan()}
                again |= changed_sizes(computer.model, weights) & changed
                refuse_changed_parameters(computer.model, again)
            _refuse_changed_buffers(computer, parts, buffers)
        if not is_random:
            return
        drawn = stack.enter_context(_Draws(computer.model))
        is_changed = _changes_with_draws(computer, parts)
    if is_changed:
        raise UnsupportedModelError(
            f"{type(computer.model).__name__}, or its task, draws random numbers in eval mode "
            f"({', '.join(drawn.names)}), and f of the same sample changes with them, so its gradient is not defined. "
            "Expected an f without randomness in eval mode: pass training=self.training to dropout, replace what is "
            "drawn by a constant, or, where f needs noise (diffusion, a VAE), draw it from a seed in the row, as the "
            "task 'diffusion' does, or make it a column of the row."
        )


def _changes_with_draws(computer: CheckedComputer, parts: Sequence[Batch]) -> bool:
    """Whether f of some samples changes with what the model draws, by more than rounding."""

    def values(parts: Sequence[Batch]) -> Tensor:
        return torch.stack([outputs_of(computer, parts, seed) for seed in range(4)])

    found = values(parts)
    if differ(found) or not differ(found, 64 * torch.finfo(found.dtype).eps):
        return differ(found)
    # A small change may be all that a part of the model does: its gradient is then random, and is not rounding.
    if not fits_in_float64(computer.model):
        return False
    try:
        with in_float64(computer.model), SeenDtypes() as mode:
            found = values([map_tensors(widened, part) for part in parts])
    except (torch.OutOfMemoryError, *MODEL_FAILURES) as error:
        refuse_machine_failure(error)
        return False
    return found.dtype == torch.float64 and differ(found, 1e-5 if mode.dtypes - {torch.float64} else 1e-6)


def parameter_sizes(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the norm of every parameter of 16 bits or more, and its sum over the root of its number of entries."""
    sizes = {}
    for name, p in model.named_parameters():
        is_number = p.is_complex() or (p.is_floating_point() and p.dtype.itemsize > 1)
        if type(p) is not nn.Parameter or not is_number:  # quantised
            continue
        values = torch.view_as_real(p.detach()) if p.is_complex() else p.detach()
        wide, narrow = wide_dtype(values.device), torch.promote_types(values.dtype, torch.float32)
        # In float64 alone it takes twenty times as long.
        rows = values.flatten(1) if values.dim() > 1 else values.reshape(1, -1)
        norms, sums = torch.linalg.vector_norm(rows, dim=1, dtype=narrow), rows.sum(1, dtype=narrow)
        norm = torch.linalg.vector_norm(norms, dtype=wide)
        sizes[name] = norm, sums.sum(dtype=wide) / math.sqrt(max(values.numel(), 1))
    return sizes


def changed_sizes(
    model: nn.Module, before: Mapping[str, tuple[Tensor, Tensor]], rounding: float = _ROUNDING
) -> set[str]:
    """Return the names of parameters whose norm or sum differs by more than rounding; NaN is equal to NaN."""
    now, parameters = parameter_sizes(model) if before else {}, dict(model.named_parameters())
    names = set()
    for name in now.keys() & before.keys():
        most = max(rounding, rounding and torch.finfo(parameters[name].dtype).eps / 2) * float(
            before[name][0]
        )
        for a, b in zip(now[name], before[name], strict=True):
            if float((a - b).abs()) > most or bool(a.isnan() != b.isnan()):
                names.add(name)
    return names


def _other_values(tensor: Tensor) -> Tensor:
    """Return other inputs in the range of these: a batch may have equal samples. Integers below zero may be marks."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * 0.75
    return tensor if tensor.dtype == torch.bool else torch.where(tensor > 0, tensor // 2, tensor)


def _state_kept(
    model: nn.Module, buffers: Iterable[tuple[str, Tensor, Tensor, int | None]]
) -> Callable[[], None]:
    """Return a function that puts back attributes of a model, and the values of buffers."""
    put_back_attributes = attributes_kept(model.modules())

    def put_back() -> None:
        put_back_attributes()
        with torch.no_grad():
            for _, buffer, value, version in buffers:
                if _is_written(buffer, value, version):  # a pass may hold the others for its backward pass
                    buffer.copy_(value)

    return put_back


def _is_written(buffer: Tensor, value: Tensor, version: int | None) -> bool:
    """Whether a buffer changed: ``.data`` and the observers of torch.ao.quantization leave its version as it is."""
    is_plain = type(buffer) is Tensor and buffer.layout is torch.strided
    return version_of(buffer) != version or (is_plain and not is_equal(buffer, value))


class ChangedParametersError(UnsupportedModelError):
    """A pass changes parameters, which the next pass need not do."""


def refuse_changed_parameters(
    model: nn.Module, names: Collection[str], which: str = "forward", *, does: str = "changes"
) -> None:
    """Raise if a pass has changed parameters: rows of one checkpoint would belong to two models."""
    if names:
        first = next(name for name, _ in model.named_parameters() if name in names)
        remedy = "Remove the backward hooks that write into them."
        if which == "forward":
            remedy = (
                "If only the first pass changes them, call model.eval() and run one pass before you create the "
                "Attributor."
            )
        would = "would"
        if does == "writes into":  # perhaps the values that are there
            would = "may"
            remedy += (
                " If every pass writes the same values (a limit), let it write to their .data or to a copy."
            )
        raise ChangedParametersError(
            f"The {which} pass of {class_of(model).__name__} in eval mode {does} {len(names)} of its parameters, the "
            f"first of them {first!r}, so rows {would} not be those of the checkpoint. Expected a {which} pass "
            f"that only reads them. {remedy}"
        )


@contextmanager
def refusing_changes(model: nn.Module) -> Iterator[None]:
    """Raise if a pass inside the block changes parameters of the model."""
    versions = {} if is_sharded(model) else parameter_versions(model)
    # Backward hooks may write behind autograd in a later pass than the first one, which the self-check watches.
    with_hooks = versions and any(m._backward_hooks or m._backward_pre_hooks for m in model.modules())
    sizes = parameter_sizes(model) if with_hooks else {}
    try:
        yield
    except ChangedParametersError:
        raise
    except UnsupportedModelError:  # of which a hook may be the cause
        refuse_changed_parameters(model, changed_sizes(model, sizes), "backward")
        raise
    refuse_changed_parameters(model, changed_parameters(model, versions), does="writes into")
    refuse_changed_parameters(model, changed_sizes(model, sizes), "backward")


def _refuse_changed_buffers(
    computer: CheckedComputer,
    parts: Sequence[Batch],
    before: Iterable[tuple[str, Tensor, Tensor, int | None]],
) -> None:
    """Raise if passes have changed buffers since ``before``, and f of the same samples changes with them."""
    now = dict(computer.model.named_buffers())
    changed = [
        name
        for name, old, value, version in before
        if now.get(name) is not old or _is_written(old, value, version)
    ]
    if not changed:
        return
    pairs = [(outputs_of(computer, [part]), outputs_of(computer, [part])) for part in parts]
    one, other = map(torch.cat, zip(*pairs, strict=True))
    rounding = 64 * torch.finfo(one.dtype).eps
    if float((other - one).abs().max()) > rounding * float(one.abs().max()):  # false if any is NaN
        raise UnsupportedModelError(
            f"The forward pass of {class_of(computer.model).__name__} in eval mode changes {len(changed)} of its "
            f"buffers, the first of them {changed[0]!r}, and f of the same sample changes with them, so its gradient "
            "is not defined. Expected a forward pass that only reads them in eval mode: change them under "
            "'if self.training:', or, of observers of quantisation, set their buffers observer_enabled to 0, in "
            "checkpoints too."
        )
