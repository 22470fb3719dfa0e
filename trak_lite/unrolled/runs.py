"""A training that was made, with stored states from which any step can be repeated bit by bit."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from trak_lite.core.fingerprint import tensor_json
from trak_lite.core.folders import whole_file
from trak_lite.core.json_text import canonical_json
from trak_lite.core.progress import KeptProgress
from trak_lite.core.sealed import BLANK, SEAL, seal, sealed_content
from trak_lite.core.validate import one_of, positive_int
from trak_lite.errors import InvalidInputError, ManifestMismatchError, StateError, UnsupportedModelError
from trak_lite.models.checkpoints import bare_name, weights_digest
from trak_lite.run.repeats import SAME, compare
from trak_lite.store import RemotePlace
from trak_lite.store.disk.check_run import RUN, run_identity
from trak_lite.store.manifest import compare_fingerprints, stored_json
from trak_lite.store.remote.place import resolve_place
from trak_lite.unrolled.optimizers import Adam, State
from trak_lite.unrolled.program import Operations, Part, Program, naming_failures, repeatable
from trak_lite.unrolled.settings import TrainingSettings, made_by, run_fingerprint
from trak_lite.unrolled.states import StateFiles
from trak_lite.unrolled.subsets import (
    SubsetTraining,
    non_finite,
    refuse_non_finite,
    trained_alone,
    trained_model,
    trained_side_by_side,
)

logger = logging.getLogger(__name__)

Spacing = Literal["sqrt", "log", "all"]
SMOOTH = 0.9
"""Metasmoothness from which a metagradient predicts retraining well, in the settings of the documentation."""
_SIZE = 1e-3
"""Weight of the norm of stored weights beside their change, as unit of a difference."""
_KINKS = {
    "GELU in place of ReLU": (
        "relu",
        "leaky_relu",
        "_prelu",
        "hardtanh",
        "hardswish",
        "hardsigmoid",
        "threshold",
    ),
    "average in place of max pooling": ("max_pool", "adaptive_max_pool", "fractional_max_pool"),
}
"""What is smoother than some operations of torch, by the beginning of their names."""


@final
class TrainingRun:
    """A finished training: its recipe, row weights, and states at some steps."""

    def __init__(self, recipe: TrainingSettings, path: Path | None, weights: Tensor) -> None:
        self.recipe, self.path = recipe, path
        model = recipe.model(recipe.seed)
        self.program = Program(recipe, model)
        self.device = self.program.device
        self.num_steps = recipe.num_steps
        like = next(p for name, p in model.named_parameters() if name in self.program.names)
        self.weights = weights.to(like.dtype).to(self.device)
        self._first, self.frozen = self.program.start(model)
        self.fingerprint = run_fingerprint(recipe, model, self.program.names, self.weights)
        self.identity = run_identity(self.fingerprint)
        self.states = StateFiles(None if path is None else path / "states", self.device, self.identity)
        self._held: dict[str, Any] = {}
        """The record of a run in memory."""

    @cached_property
    def digest(self) -> str:
        """Digest of the settings and of the trained weights, in which changes show that settings do not tell."""
        if not {0, self.num_steps} <= set(self.states.numbers()):
            raise InvalidInputError(
                "The training is not finished. Call recipe.train(path) again; it resumes."
            )
        trained = {name: tensor_json(value) for name, value in self.final.parameters.items()}
        return hashlib.sha256(canonical_json([self.fingerprint, trained]).encode()).hexdigest()[:16]

    @property
    def final(self) -> State:
        """The state after the last step."""
        return self.states.get(self.num_steps)

    def model(self) -> nn.Module:
        """Return the trained model, in eval mode."""
        return trained_model(self.recipe, self.recipe.seed, self.program.model, self.final)

    def rows(self, number: int) -> NDArray[np.int64]:
        """Return the train rows ``(b,)`` of a step."""
        return self.recipe.order(number, num_rows=len(self.recipe.rows), seed=self.recipe.seed)

    def parts(self, number: int) -> list[Part]:
        """Return the samples of a step."""
        return self.program.parts(self.rows(number))

    def step(self, state: State, number: int) -> State:
        """Return the state after a step, with the same bits as in the training."""
        parts = self.parts(number)  # outside the block: a dataset's exceptions are not the model's
        with naming_failures(self.program.model, "train"):
            return self.program.step(state, self.frozen, parts, self.weights, number, self.recipe.seed)

    def steps(self, state: State, first: int, stop: int) -> State:
        """Return the state after the steps from ``first`` up to ``stop``."""
        for number in range(first, stop):
            state = self.step(state, number)
        return state

    def _record(self) -> dict[str, Any]:
        """Return JSON values that are stored with the run beside its states; none before it begins."""
        if self.path is None:
            return self._held
        file = self.path / RUN
        return stored_json(sealed_content(str(file), RUN), what=str(file)) if file.exists() else {}

    def _note(self, **values: Any) -> None:
        record = {**self._record(), **values}
        if self.path is None:
            self._held = record
            return
        with whole_file(self.path / RUN) as partial:
            partial.write_text(json.dumps({**record, SEAL: BLANK}, indent=1) + "\n", encoding="utf-8")
            seal(str(partial), RUN)

    def _finish(self, wanted: set[int], progress: bool | None) -> None:
        """Train from the last stored state on, and store the states with these numbers."""
        stored = self.states.numbers()
        first = last = max(stored, default=0)
        state = self.states.get(first) if stored else self._first
        self.program.check(state, self.frozen, self.parts(0)[0])
        if 0 not in stored:
            self.states.put(0, self._first)
        with KeptProgress(self.num_steps, first, label="Training", unit="step", progress=progress) as done:
            for number in range(first, self.num_steps):
                state = self.step(state, number)
                if number + 1 in wanted:
                    if non_finite(state) is not None:
                        state = self.states.get(last)
                        for repeated in range(last, number + 1):
                            state = self.step(state, repeated)
                            refuse_non_finite(state, repeated)  # the first one
                    self.states.put(number + 1, state)
                    last = number + 1
                done.advance(1)

    def require_repeatable(self, first: int, before: State, last: int) -> None:
        """Raise if the steps between two stored states, the last one from ``before``, do not lead to the second.

        Raises:
            StateError: If the repeated state differs by more than rounding.
        """
        apart = self._distance(first, last)(self.step(before, last - 1), self.states.get(last))
        if not apart <= SAME:
            raise StateError(_changed(first, last, apart))

    def require_same(self) -> None:
        """Repeat the first and the last stored segment and compare, unless the recipe has a ``train_id``.

        Raises:
            ManifestMismatchError: If they lead to other weights, or the schedule has other factors.
        """
        numbers = self.states.numbers()
        if self.recipe.train_id is not None or len(numbers) < 2:
            return
        now = made_by(self.recipe)
        made = self._record()
        if made.get("schedule", now["schedule"]) != now["schedule"]:
            raise ManifestMismatchError(
                f"The schedule of {self.path or 'this run'} had other factors than it has now. Undo the change, or "
                "train in another folder."
            )
        exact = made.get("conditions") == now["conditions"]
        for first, last in {numbers[0]: numbers[1], numbers[-2]: numbers[-1]}.items():

            def repeat(_: int, first: int = first, last: int = last) -> State:
                with repeatable(self.device):
                    return self.steps(self.states.get(first), first, last)

            # Another process, perhaps with other threads, may have continued the run after its first segment.
            here = exact and first == numbers[0]
            comparison = compare(self.states.get(last), repeat, self._distance(first, last), exact=here)
            if comparison.is_random or not comparison.is_same:
                raise ManifestMismatchError(_changed(first, last, comparison.apart))
            logger.info("Steps %d to %d were repeated and lead to the stored weights.", first, last - 1)

    def _distance(self, first: int, last: int) -> Callable[[State, State], float]:
        """Return the distance of states in units of the change from one stored state to another."""
        start, stored = self.states.get(first), self.states.get(last)
        unit = _norm(stored, start) + _SIZE * _norm(stored, None)
        return lambda one, other: _norm(one, other) / (unit or 1.0)

    def checkpoints(self, count: int = 8) -> list[dict[str, Tensor]]:
        """Return state dicts of the model along the run, for :meth:`Attributor.featurize`.

        Args:
            count: Most checkpoints, evenly spaced among the stored states; the trained model is the last.
        """
        numbers = [number for number in self.states.numbers() if number]
        ends = np.linspace(0, len(numbers), positive_int(count=count) + 1)[1:]
        chosen = np.unique(np.maximum(ends.round().astype(int) - 1, 0))
        state = self.program.model.state_dict()
        return [{**state, **self.states.get(numbers[index]).parameters} for index in chosen]

    def __repr__(self) -> str:
        return f"TrainingRun({self.num_steps} steps on {len(self.weights)} rows, {self.path or 'in memory'})"

    def advice(self) -> str:
        """Return what makes this training smoother: what its first step, model and settings leave to change."""
        with repeatable(self.device), Operations() as used:
            self.step(self.states.get(0), 0)
        kinks = [kink for kink, names in _KINKS.items() if any(one.startswith(names) for one in used.names)]
        batches = ["larger batches"] if self.recipe.batch_size < len(self.weights) else []
        root = ["a larger eps_root"] if isinstance(self.recipe.optimizer, Adam) else []
        return f"Smoother are: {', '.join([*kinks, 'a smaller learning rate', *batches, *root])}."

    def metasmoothness(self, h: float = 0.1, *, seed: int = 0) -> float:
        r"""Return how linearly the trained weights follow the row weights, at most 1 (smooth).

        Three trainings with row weights 1, 1 + h v and 1 + 2 h v, v drawn from a unit Gaussian, give two changes of
        every trained parameter. The result is the mean of the product of their signs, weighted by the total change.
        Metagradients predict retraining well where it is near 1, and not at all where it is near 0.

        Source: Engstrom et al., "Optimizing ML Training with Metagradient Descent" (arXiv:2503.13751), section 3.

        Args:
            h: Size of the perturbation of the row weights.
            seed: Seed of v.

        Returns:
            The metasmoothness. With ``h=0.1`` and seed 0 it is stored with the run.

        Raises:
            ManifestMismatchError: If repeated steps lead to other weights than those of the run.
        """
        usual = h == 0.1 and seed == 0
        stored = self._record().get("metasmoothness")
        self.require_same()  # the value of a random or of another training would mislead
        if usual and stored is not None:
            return float(stored)
        generator = torch.Generator().manual_seed(seed)
        direction = torch.randn(len(self.weights), generator=generator, device="cpu").to(self.weights)
        weights = torch.stack([self.weights + k * h * direction for k in range(3)])
        everything, seeds = [np.arange(len(self.weights))] * 3, [self.recipe.seed] * 3
        try:
            models = trained_side_by_side(self.recipe, weights, everything, seeds)
        except UnsupportedModelError as error:
            logger.info("%s The models are trained one after the other.", error)
            models = [trained_alone(self.recipe, some, everything[0], seeds[0]) for some in weights]
        names = self.program.names
        trained = [dict(model.named_parameters()) for model in models]
        flat = [torch.cat([some[name].detach().flatten() for name in names]).double() for some in trained]
        total = (flat[2] - flat[0]).abs()
        agree = torch.sign(flat[1] - flat[0]) * torch.sign(flat[2] - flat[1])
        smoothness = float((agree * total).sum() / total.sum()) if float(total.sum()) else 1.0
        if usual:
            self._note(metasmoothness=smoothness)
        return smoothness

    @property
    def leave_out_fn(self) -> SubsetTraining:
        """A ``train_fn(rows, seed)`` that repeats this run with the weight 0 for the other rows."""
        return SubsetTraining(self.recipe, keep_order=True, row_weights=self.weights)

    def require_train_rows(self, stored: Mapping[str, Any]) -> None:
        """Raise if the run was not trained on the rows with this identity.

        Raises:
            InvalidInputError: If rows, their number or their order differ, or only one of both has a name.
        """
        trained = self.fingerprint["data"]
        if ("id" in stored) != ("id" in trained):
            raise InvalidInputError(
                "The train rows of the scores or of the run have a name (Rows(name=...)), and the other have none, so "
                "they cannot be compared. Give both the same name, or none."
            )
        shared = stored.keys() & trained.keys()
        if any(stored[key] != trained[key] for key in shared):
            raise InvalidInputError(
                f"The run was trained on other data, or in another order ({trained['num_rows']} rows), than the scores "
                f"were made from ({stored['num_rows']} rows). Make both from the same rows."
            )

    def require_parameters(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise if the model of the run has no parameters of these names and shapes.

        Raises:
            InvalidInputError: If it has not; names the first five.
        """
        model_shapes = {bare_name(name): list(p.shape) for name, p in self.program.model.named_parameters()}
        wrong = [name for name, shape in shapes.items() if model_shapes.get(bare_name(name)) != list(shape)]
        if wrong:
            raise InvalidInputError(
                f"The scores were made with another architecture than that of the run, which has no parameters "
                f"{wrong[:5]} of the same shapes. Pass a run of the model that was scored."
            )


def _folder(path: str | PathLike[str] | None) -> Path | None:
    """Return the path of a run's folder with its links resolved: below it no link is followed."""
    root = None if path is None else resolve_place(path)
    if isinstance(root, RemotePlace):
        raise InvalidInputError(f"A run is stored in a local folder, got {root}. Pass the path of a folder.")
    if root is not None and (Path(root) / "zarr.json").exists():
        raise InvalidInputError(f"{root} is a store of features. Pass another folder for the run.")
    return None if root is None else Path(root).resolve()


@final
@dataclass(frozen=True, eq=False)
class Recipe(TrainingSettings):
    r"""A training whose result is a function of the weights of its rows.

    One step takes the gradient of :math:`\frac1B \sum_i w_i L_i` over the rows of a batch, where B counts the rows of
    weight zero too. Initial weights, order of rows and dropout masks are pure functions of the seed, so the same run
    can be repeated with other row weights: this is what :func:`~trak_lite.unrolled.unrolled` differentiates.

    The model is trained in the mode in which ``model_fn`` returns it. Dropout draws its masks from the seed. A batch
    norm that updates running statistics is refused; use it in eval mode, or another normalisation.

    Raises:
        InvalidInputError: If a setting is out of range.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.nn.functional import cross_entropy
        >>> from torch.utils.data import TensorDataset
        >>> from trak_lite.unrolled import SGD, Recipe
        >>> data = TensorDataset(torch.randn(20, 4), torch.randint(2, (20,)))
        >>> def loss(model, batch):
        ...     return cross_entropy(model(batch[0]), batch[1], reduction="none")
        >>> recipe = Recipe(lambda seed: nn.Linear(4, 2), loss, data, SGD(lr=0.1), batch_size=10, epochs=3)
        >>> recipe.num_steps
        6
    """

    def train(
        self,
        path: str | PathLike[str] | None = None,
        *,
        checkpoints: Spacing = "sqrt",
        interval: int | None = None,
        weights: ArrayLike | None = None,
        progress: bool | None = None,
    ) -> TrainingRun:
        """Train, and store the states that a replay starts from.

        The same call again continues after a kill at the last stored state, with the same bits, and returns the run if
        it is finished. It first repeats the first and the last stored segment, to check that the training is unchanged.

        Args:
            path: Folder of the run; ``None`` keeps the states in memory.
            checkpoints: Which states are stored: ``"sqrt"``, every sqrt(T)-th of T steps; ``"log"``, those 1, 2, 4, ...
                steps before the end; ``"all"``. Fewer states take less disk, and more time in a replay.
            interval: Store every ``interval``-th state instead.
            weights: Row weights ``(N,)``; ``None`` is 1 for every row.
            progress: Show a bar; ``None`` shows it on a terminal only.

        Returns:
            The finished run.

        Raises:
            InvalidInputError: If an argument is invalid, or the loss does not return one number per row.
            UnsupportedModelError: If the training cannot be repeated (batch statistics, other random numbers).
            NonFiniteError: If a parameter becomes NaN or infinite; names the step.
            ManifestMismatchError: If another training is stored at the path; names every difference of settings, or the
                steps that lead to other weights when they are repeated.
        """
        one_of(("sqrt", "log", "all"), checkpoints=checkpoints)
        array = np.ones(len(self.rows)) if weights is None else np.asarray(weights, np.float64)
        if array.shape != (len(self.rows),) or not np.isfinite(array).all():
            raise InvalidInputError(
                f"weights must be one finite number per train row, ({len(self.rows)},), got shape {array.shape}."
            )
        run = TrainingRun(self, _folder(path), torch.from_numpy(array))
        if weights_digest(self.model(self.seed)) != run.fingerprint["weights"]:
            raise InvalidInputError(
                f"model_fn({self.seed}) returned other initial weights in its second call, so the run cannot be "
                "repeated. Draw them from torch's generator alone, which is seeded before each call, and load or train "
                "anything else outside model_fn."
            )
        if not run._record():
            run._note(fingerprint=run.fingerprint, **made_by(self))
        made, remedy = run._record().get("fingerprint", {}), "Train this recipe in another folder."
        compare_fingerprints(made, run.fingerprint, where=str(run.path), remedy=remedy)
        run.require_same()
        last = run.num_steps
        every = 1 if checkpoints == "all" else math.ceil(math.sqrt(last))
        if interval is not None:
            every = positive_int(interval=interval)
        wanted: Iterable[int] = range(0, last, every)
        if checkpoints == "log" and interval is None:
            wanted = (last - (1 << k) for k in range(last.bit_length()))
        with repeatable(run.device):
            run._finish({*wanted, last}, progress)
        return run

    @property
    def train_fn(self) -> SubsetTraining:
        """A ``train_fn(rows, seed)`` for :func:`~trak_lite.verify` and ``retrain_many``: trains on the subset alone."""
        return SubsetTraining(self, keep_order=False)


def _norm(state: State, other: State | None) -> float:
    """Return the norm of the difference of the parameters of two states; ``None`` stands for zeros."""
    named = state.parameters.items()
    changes = (value if other is None else value - other.parameters[name] for name, value in named)
    return math.sqrt(sum(float(change.double().square().sum()) for change in changes))


def _changed(first: int, last: int, apart: float) -> str:
    return (
        f"Repeating steps {first} to {last - 1} leads to other weights than the training did: they differ by "
        f"{apart:.1%} of the change. The samples, the model, the loss or the optimizer are random, or have changed. "
        "Draw random numbers of the dataset from a generator that is seeded with the row, undo changes, or train again "
        "in another folder."
    )
