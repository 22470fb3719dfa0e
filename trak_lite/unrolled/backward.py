r"""Exact derivatives of targets by the weights of train rows, by replaying a training backwards.

With state :math:`s_{t+1} = \mathrm{step}_t(s_t, w)`, the derivative of a target :math:`f(s_T)` by the row weights w is

.. math:: \sum_t \lambda_{t+1}^\top \frac{\partial\, \mathrm{step}_t}{\partial w},
          \qquad \lambda_T = \nabla f(s_T), \quad
          \lambda_t = \frac{\partial\, \mathrm{step}_t}{\partial s_t}^\top \lambda_{t+1}

A step takes the gradient :math:`g = \sum_i w_i \nabla L_i / B` and updates the state with it. Its products are formed
in two parts: first those of the update, which is elementwise, then those of g with the result
:math:`\mu = (\partial\,\mathrm{update} / \partial g)^\top \lambda`: a Hessian-vector product for :math:`\lambda_t`, and
:math:`\mu^\top \nabla L_i / B` for row i. All targets of a block share the states, the losses and their first gradient.

Source: Engstrom et al., "Optimizing ML Training with Metagradient Descent" (arXiv:2503.13751), section 2.

Shapes: N train rows, M targets, m targets of a block, T steps, b rows of a part of a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad, vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map

from trak_lite.core.garbage import no_collection
from trak_lite.core.meeting import num_ranks
from trak_lite.core.progress import KeptProgress
from trak_lite.data.batches import map_tensors, move_batch, rows_in_batches, take_rows, with_own_containers
from trak_lite.data.datasets import Rows, spread_rows
from trak_lite.errors import (
    MODEL_FAILURES,
    CorruptStoreError,
    NonFiniteError,
    UnsupportedModelError,
    refuse_machine_failure,
)
from trak_lite.gradient_computers.reference import fit_in_float64, widened
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall
from trak_lite.types import Batch
from trak_lite.unrolled.dropout import step_key
from trak_lite.unrolled.optimizers import Named, State
from trak_lite.unrolled.program import (
    LOOKED_AT,
    Frozen,
    Operations,
    Part,
    gradient_of,
    naming_failures,
    repeatable,
    require_parameters,
    through_the_call,
)
from trak_lite.unrolled.runs import TrainingRun
from trak_lite.unrolled.states import flat, load_tensors, save_tensors, unflat

logger = logging.getLogger(__name__)

_TOLERANCE: Final = 0.05
"""Of the check of second derivatives; wide enough for half precision."""
_DIFFERENCES: Final = ((1e-6, 1e-4), (1e-3, 0.02))
"""Relative steps, the shorter of two, and tolerances of the other checks. Short steps seldom cross the kink of a ReLU;
longer ones are for models that compute parts in float32."""
_FEW_ROWS: Final = 8
"""Rows whose step is compared."""


@final
class Replay:
    """The backward replay of a run for blocks of targets."""

    def __init__(
        self,
        run: TrainingRun,
        task: AbstractModelOutput,
        targets: Rows,
        *,
        max_bytes: int,
        progress: bool | None,
    ) -> None:
        self._run, self._task, self._targets = run, task, targets
        self._max_bytes, self._progress = max_bytes, progress
        self._compared = False
        """Whether the steps of a block were compared with the training."""
        first, final = run.states.get(0), run.final
        self._moved = {name: value != first.parameters[name] for name, value in final.parameters.items()}
        """Whether the training has changed an entry of a parameter."""
        self._state_bytes = sum(t.nbytes for t in tree_leaves(final))
        self._held = max(2, int(max_bytes // 4 // self._state_bytes))
        """States of a segment that are in memory at once."""
        with repeatable(run.device), naming_failures(run.program.model, "differentiate a training step of"):
            self._check_second_derivative()
            # Where differences of the last weights do not converge, those of the first may.
            any(self._check_step(state) for state in (final, first))
            self._one, self._more = self._measured(final)
        """Bytes of a step's Hessian products for one target, and for each further one."""
        self._target_bytes = int(4 * self._state_bytes + 3 * run.weights.nbytes)
        self._most = max(1, max_bytes // 2 // self._target_bytes)
        """Targets of a block that memory allows."""

    def _measured(self, final: State) -> tuple[int, int]:
        """Return the bytes of the first step's products for one target, and for each further one."""
        first = self._run.states.get(0)

        def measured(count: int) -> int:
            ones = State(*tree_map(lambda value: value.new_ones(count, *value.shape), tuple(final)))
            used = Operations()
            # A collection would free cycles at other moments in every call, and the bits of scores depend on this.
            with no_collection(), used:
                self._adjoint(0, first, ones, None, count)
            return used.peak_bytes

        one = measured(1)
        return one, max(1, measured(2) - one) if 4 * one <= self._max_bytes else one

    def _chunk(self, targets: int) -> int:
        """Return the targets of a block whose Hessian products are computed at once."""
        # A quarter is for states, whose number depends on the stored ones, as bits must not, and a quarter for what
        # kernels and the allocator take beside tensors.
        free = max(self._max_bytes // 4, self._max_bytes // 2 - targets * self._target_bytes)
        return max(1, 1 + (free - self._one) // self._more)

    def size(self, block: int | None) -> int:
        """Return the targets of a block; ``None`` divides them equally, among the ranks of a distributed run too."""
        count = len(self._targets)
        if block is not None:
            return min(count, block)
        blocks = max(-(-count // min(count, self._most)), min(count, num_ranks()))
        return -(-count // blocks)

    def progress(self, blocks: int) -> KeptProgress:
        """Return a bar over the steps of some blocks."""
        total = blocks * self._run.num_steps
        return KeptProgress(total, 0, label="Replaying", unit="step", progress=self._progress)

    def scores(self, block: int | None) -> NDArray[np.float32]:
        """Return the scores ``(N, M)``; nothing is stored."""
        blocks = rows_in_batches(np.arange(len(self._targets)), self.size(block))
        scores = np.empty((len(self._run.weights), len(self._targets)), np.float32)
        with self.progress(len(blocks)) as done:
            for targets in blocks:
                scores[:, targets] = self.block(targets, None, done).T
        return scores

    def block(self, targets: NDArray[np.int64], file: Path | None, done: KeptProgress) -> NDArray[np.float32]:
        """Return the scores of a block of targets, ``(m, N)``; finished segments are kept in a file."""
        failures = naming_failures(self._run.program.model, "differentiate a training step of")
        with repeatable(self._run.device), failures:
            columns = self._block(targets, file, done)
        wrong = ~columns.isfinite().all(1)
        if bool(wrong.any()):
            raise NonFiniteError(
                f"The derivatives of targets {targets[wrong.cpu().numpy()][:5].tolist()} are NaN or infinite. "
                f"The training is too rough to be differentiated. {self._run.advice()}"
            )
        self._compared = True
        return columns.float().cpu().numpy()

    def _block(self, targets: NDArray[np.int64], file: Path | None, done: KeptProgress) -> Tensor:
        """Return the derivatives of a block of targets, ``(m, N)``."""
        run, chunk = self._run, self._chunk(len(targets))
        bounds = [number for number in run.states.numbers() if number < run.num_steps]
        reached = run.num_steps
        stored = None if file is None or not file.exists() else _stored(file, run)
        if stored is not None:
            columns, reached = stored[0].pop("scores"), stored[1]
            cotangents = unflat(stored[0])
            done.advance(run.num_steps - reached)
        else:
            cotangents = self._target_gradients(targets)
            wide = torch.promote_types(run.weights.dtype, torch.float32)
            columns = torch.zeros(len(targets), len(run.weights), dtype=wide, device=run.device)
        for first in reversed([number for number in bounds if number < reached]):
            for number, state in self._backwards(first, run.states.get(first), reached):
                if not self._compared and number == reached - 1:  # other blocks repeat the same steps
                    run.require_repeatable(first, state, reached)
                cotangents = self._adjoint(number, state, cotangents, columns, chunk)
                done.advance(1)
            reached = first
            if file is not None:
                named = {**flat(cotangents), "scores": columns}
                save_tensors(file, named, reached, run.identity)
        return columns

    def _backwards(self, first: int, state: State, stop: int) -> Iterator[tuple[int, State]]:
        """Yield step numbers and the states before them from ``stop - 1`` down to ``first``.

        At most ``_held`` states, and one per halving of a longer segment, are in memory.
        """
        if stop - first <= self._held:
            states = [state]
            for number in range(first, stop - 1):
                states.append(self._run.step(states[-1], number))
            for number in reversed(range(first, stop)):
                yield number, states.pop()
            return
        middle = (first + stop) // 2
        yield from self._backwards(middle, self._run.steps(state, first, middle), stop)
        yield from self._backwards(first, state, middle)

    def _adjoint(
        self, number: int, state: State, cotangents: State, columns: Tensor | None, chunk: int
    ) -> State:
        """Return the cotangents of the state before a step, from those of the state after it, for m targets.

        The derivatives of the rows of the step are added to ``columns``, ``(m, N)``, if there are any. Products with
        Hessians are formed for ``chunk`` targets at once.
        """
        run, program = self._run, self._run.program
        parts = run.parts(number)
        size = sum(len(part.rows) for part in parts)

        gradient = partial(self._gradient, number, state, size)
        single = len(parts) == 1  # several are computed again below: together they would not fit in memory
        first = gradient(0, parts[0])
        total = first[0]
        for index, part in enumerate(parts[1:], 1):
            total = {name: total[name] + g for name, g in gradient(index, part)[0].items()}
        _, update_back = _vjp(lambda before, g: program.update(before, g, number), state, total)
        result, inner = vmap(update_back)(cotangents)
        targets = len(next(iter(cotangents.parameters.values())))
        fitting = chunk if chunk < targets else None  # a single chunk would be copied
        for index, part in enumerate(parts):
            back = first[1] if single else gradient(index, part)[1]
            products, by_row = vmap(back, chunk_size=fitting)(inner)
            for name, product in products.items():
                result.parameters[name].add_(product)
            if columns is not None:
                columns[:, torch.from_numpy(part.rows).to(columns.device)] += by_row
        return State(*tree_map(Tensor.contiguous, tuple(result)))

    def _gradient(
        self, number: int, state: State, size: int, index: int, part: Part
    ) -> tuple[Named, Callable[[Named], tuple[Named, Tensor]]]:
        """Return the gradient of a part of a step, and its product with the derivatives by parameters and weights."""
        run = self._run
        args = run.frozen, part.batch, step_key(run.recipe.seed, number, index, run.device)
        weights = run.weights[torch.from_numpy(part.rows).to(run.device)]
        return _vjp(
            lambda values, some: grad(partial(run.program.total, args, some, size))(values),
            state.parameters,
            weights,
        )

    def _check_second_derivative(self) -> None:
        """Raise if a derivative is a constant for torch, as that of an autograd function with once_differentiable.

        The gradient g is linear in the row weights w, so w times the derivative of its norm's half square by w is the
        square of the norm.
        """
        run = self._run
        part = run.parts(0)[0]
        gradient, back = self._gradient(0, run.states.get(0), len(part.rows), 0, part)
        expected = float(sum(g.double().square().sum() for g in gradient.values()))
        weights = run.weights[torch.from_numpy(part.rows).to(run.device)]
        product = float((weights.double() * back(gradient)[1].double()).sum())
        if abs(product - expected) > _TOLERANCE * expected:
            raise UnsupportedModelError(
                f"{type(run.program.model).__name__} has an operation whose derivative torch treats as a constant, so "
                "a training step cannot be differentiated. This is so for an autograd.Function with "
                "once_differentiable: write its backward with operations of torch."
            )

    def _check_step(self, state: State) -> bool:
        """Raise if the second derivatives that torch forms of a step are not those of its gradient, near a state.

        Return whether they were compared. A few rows of the first step are enough.
        """
        run, part = self._run, self._run.parts(0)[0]
        rows = part.rows[:_FEW_ROWS]
        if not fit_in_float64(tree_leaves([state.parameters, *run.frozen])):
            return False
        tensors = [state.parameters, [*run.frozen], take_rows(part.batch, range(len(rows)))]
        at, fixed, batch = map_tensors(widened, tensors)
        weights = run.weights[torch.from_numpy(rows).to(run.device)].double()
        args = Frozen(*fixed), batch, step_key(run.recipe.seed, 0, 0, run.device)
        total = partial(run.program.total, args, weights, len(rows))
        return _require_differences(
            "second derivatives of a training step",
            partial(gradient_of, total),
            lambda at, c: _vjp(grad(total), at)[1](c)[0],
            at,
            self._moved,
        )

    def _target_gradients(self, targets: NDArray[np.int64]) -> State:
        """Return the gradients of the targets' outputs at the trained parameters as cotangents of the last state."""
        run, final = self._run, self._run.final
        model = run.model()
        self._task.prepare(model)
        gradients: list[Named] = []

        def output(values: Named, frozen: Frozen, batch: Batch) -> Tensor:
            call = ModelCall(model, {**frozen.parameters, **values}, frozen.buffers)
            return self._task.evaluate(call, with_own_containers(batch)).output.sum()

        for _, batch in self._targets.batches([targets[i : i + 1] for i in range(len(targets))]):
            moved = move_batch(batch, run.device)
            is_first = not self._compared and not gradients
            if is_first:
                leaves = {name: value.detach().requires_grad_() for name, value in final.parameters.items()}
                passed = partial(output, leaves, run.frozen)
                every = self._targets.batches(rows_in_batches(spread_rows(len(self._targets), LOOKED_AT), 1))
                others = (passed(move_batch(one, run.device)) for _, one in every)
                with torch.enable_grad():
                    value = through_the_call("f of a target", model, leaves, partial(passed, moved))
                    require_parameters("f of a target", chain([value], others), leaves.values())
            if is_first and fit_in_float64(tree_leaves([final.parameters, *run.frozen])):
                at, fixed, wide = map_tensors(widened, [final.parameters, [*run.frozen], moved])
                self._check_target(partial(output, frozen=Frozen(*fixed), batch=wide), at)
            gradients.append(gradient_of(partial(output, frozen=run.frozen, batch=moved), final.parameters))
        stacked = {name: torch.stack([one[name] for one in gradients]) for name in final.parameters}
        count = len(targets)
        slots = tree_map(lambda value: value.new_zeros(count, *value.shape), final.slots)
        return State(stacked, slots)

    def _check_target(self, output: Callable[[Named], Tensor], at: Named) -> None:
        """Raise if the derivatives that torch forms of a target's f are not those of its values."""
        _require_differences(
            "derivatives of a target's f",
            lambda values: {"f": output(values)},
            lambda at, c: {name: c["f"] * part for name, part in gradient_of(output, at).items()},
            at,
            self._moved,
        )


def _require_differences(
    what: str,
    values: Callable[[Named], Named],
    back: Callable[[Named, Named], Named],
    near: Named,
    moved: Named,
) -> bool:
    """Raise if ``back(point, cotangents)`` is not the transposed derivative of a function's values, in float64.

    Return whether differences converge, so that they can be compared.

    A part that is detached, hooks, and operations with a wrong second derivative make a difference. The change c of
    the values along a random direction u, whose part for every name is scaled to norm 1, is multiplied by c, and by the
    derivative along u. Only entries that the training has moved change along u: those of a row for padding have a
    gradient of zero, whatever they do to the loss.
    """
    generator = torch.Generator().manual_seed(0)
    size = torch.cat([value.flatten() for value in near.values()]).square().mean().sqrt()
    aside, along = (
        {
            name: torch.randn(value.shape, generator=generator, dtype=value.dtype, device="cpu").to(
                value.device
            )
            * (value.square().mean().sqrt() + 0.01 * size)
            * moved[name]
            for name, value in near.items()
        }
        for _ in range(2)
    )
    # Zeros, as of new biases, are often a kink.
    at = {name: value + 0.01 * aside[name] for name, value in near.items()}

    @torch.enable_grad()
    def valued(step: float) -> Named:
        # As parameters are: a hook that the model registers on an activation raises without a graph.
        moved = values({name: (at[name] + step * along[name]).requires_grad_() for name in at})
        return {name: value.detach() for name, value in moved.items()}

    def change(h: float) -> Named:
        ahead, behind = valued(h), valued(-h)
        return {name: (ahead[name] - behind[name]) / (2.0 * h) for name in ahead}

    wrong = None
    try:
        with Operations() as used:
            valued(0.0)
        if used.dtypes & {torch.float16, torch.bfloat16}:  # differences are below their rounding
            return False
        for h, allowed in _DIFFERENCES:
            short, long = change(h), change(3.0 * h)
            norms = {name: torch.linalg.vector_norm(one) for name, one in short.items()}
            expected = float(sum(norms.values()))
            apart = float(sum(torch.linalg.vector_norm(long[name] - one) for name, one in short.items()))
            if not apart <= allowed * expected:  # a kink, rounding, or weights that have grown without bound
                continue
            products = back(at, {name: one / norms[name].clamp(min=1e-300) for name, one in short.items()})
            product = float(sum((along[name] * one).sum() for name, one in products.items()))
            if abs(product - expected) <= 3.0 * allowed * expected:
                return True
            wrong = abs(product - expected) / expected
            break
    except MODEL_FAILURES as error:
        refuse_machine_failure(error)
        logger.info("The %s are not compared with differences in float64: %.200s", what, error)
    if wrong is None:
        return False
    raise UnsupportedModelError(
        f"The {what} that torch forms are off by {wrong:.1%}, so a replay is not exact. A part is detached "
        "(detach, no_grad, data), a hook or an autograd.Function changes gradients, or an operation has a wrong second "
        "derivative (torch's weight_norm, Embedding(scale_grad_by_freq=True)). Let gradients flow through all of it, "
        "and write such operations out. Scores of an Attributor need none of these."
    )


def _stored(file: Path, run: TrainingRun) -> tuple[Named, int] | None:
    """Return the content of the file of a block, ``None`` if it is damaged."""
    try:
        return load_tensors(file, run.device, run.identity)
    except CorruptStoreError as error:
        logger.warning("%s The block is replayed from the end of the training.", error)
        return None


def _vjp(function: Callable[..., Any], *at: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return the value of a function, and the map from cotangents of the value to those of the arguments."""
    value, back = vjp(function, *at)[:2]
    return value, back
