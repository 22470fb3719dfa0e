"""Questions: other outputs of the same model as targets, answered by the train rows that are already stored.

Shapes: B samples, T positions, d channels, m members of a group.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from trak_lite.core.fingerprint import tensor_json
from trak_lite.core.validate import known_names, one_of
from trak_lite.data.datasets import Rows, rows_of
from trak_lite.data.loading import Collate
from trak_lite.errors import InvalidInputError, refuse_machine_failure, summary
from trak_lite.modelout_functions._base import AbstractModelOutput, ModelCall, Task, resolve_task
from trak_lite.modelout_functions._describe import describe_task
from trak_lite.modelout_functions._inputs import (
    LABEL_KEYS,
    fields_of,
    nan_unless,
    precise,
    refuse_invalid,
    shape_texts,
)
from trak_lite.modelout_functions._margins import UniformNoise, linear_terms
from trak_lite.modelout_functions.language_modeling import pooled
from trak_lite.types import Batch, OutputTerms

_QUESTION, _WEIGHTS, _DIGEST = "question", "weights", "digest"
_KEYS = {_QUESTION, _WEIGHTS, _DIGEST}

Position = Literal["mean", "sum", "first", "last"] | int


@final
class QuestionsModelOutput(AbstractModelOutput):
    """A task for the train rows, and named questions: other outputs f for targets.

    The train rows are those of the task, and so is their place in a store: questions can be added to a store that
    exists, and cost a gradient per target. A score is the effect of a train row on the output that the question
    defines. A question can be any task: ``"answer_difference"``, an :class:`ActivationModelOutput`, a function
    ``f(model_call, batch)``. Its q and w are not used.

    Example:
        >>> from trak_lite import Attributor
        >>> def logit_gap(model_call, batch):
        ...     logits = model_call(batch[0])
        ...     return logits[:, 0] - logits[:, 1]
        >>> _ = torch.manual_seed(0)
        >>> data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.randint(3, (20,)))
        >>> task = QuestionsModelOutput("image_classification", {"gap": logit_gap})
        >>> attributor = Attributor(nn.Linear(4, 3), task, None, proj_dim=8)
        >>> _ = attributor.featurize(data)
        >>> attributor.score(task.ask("gap", data), name="gap").shape
        (20, 20)
        >>> attributor.score(task.ask("gap", data, groups=[0, 1] * 10), name="groups").shape
        (20, 2)
    """

    def __init__(self, task: Task, questions: Mapping[str, Task]) -> None:
        """Resolve the task and the questions.

        Args:
            task: Task of the train rows, and of targets that are no question.
            questions: A task for every name.

        Raises:
            UnknownTaskError: If a task is unknown.
            InvalidInputError: If there is no question.
        """
        self.task = resolve_task(task)
        self.questions = {name: resolve_task(question) for name, question in questions.items()}
        if not self.questions:
            raise InvalidInputError("questions is empty. Expected at least one task by name.")
        self.has_curvature = self.task.has_curvature
        self.model: nn.Module | None = None
        """The attributed model, which questions may capture; see :meth:`know_model`."""

    def ask(
        self,
        name: str,
        data: Any,
        *,
        groups: Sequence[Hashable] | None = None,
        reduction: Literal["sum", "mean"] = "mean",
        collate: Collate | None = None,
    ) -> Rows:
        """Return targets of a question, for :meth:`~trak_lite.Attributor.score`.

        With ``groups``, all samples of a group are one target, whose f is the sum or mean over them. Its scores are
        exactly those of the summed gradient with any method. For methods that are linear in the target they equal the
        sums of ``scores.group(targets=...)``, at the cost of one target instead of several.

        Args:
            name: Name of the question, or ``""`` for the task itself.
            data: Samples of the question: a map-style dataset, a DataLoader that reads one in order, or ``Rows``.
            groups: Label of every sample; groups are in order of first appearance. ``None`` makes each sample a target.
            reduction: How f of a group combines those of its samples.
            collate: Turns samples into a batch, if ``data`` does not define it. The ``collate`` of the attributor is
                not used.

        Raises:
            InvalidInputError: If the name is unknown, or there is not exactly one label per sample.
        """
        known_names([name], [*self.questions, ""], what="questions")
        one_of(("sum", "mean"), reduction=reduction)
        rows = rows_of(data, what=f"the targets of {name!r}", collate=collate)
        groups = list(range(len(rows))) if groups is None else list(groups)
        if len(groups) != len(rows):
            raise InvalidInputError(
                f"There are {len(groups)} labels of groups for {len(rows)} samples. Expected one label per sample."
            )
        members: dict[Hashable, list[int]] = {}
        for index, group in zip(rows.indices.tolist(), groups, strict=True):
            members.setdefault(group, []).append(index)
        asked = Rows(
            _Asked(rows.dataset, list(members.values()), name, rows.name, mean=reduction == "mean"),
            batch_size=rows.batch_size if rows.has_batch_size else None,
            collate=_Collate(rows.collate, name),
            what=rows.what,
        )
        self._identify(asked)
        _ASKED.setdefault(self, WeakSet()).add(asked)
        return asked

    def know_model(self, model: nn.Module) -> None:
        """Take the attributed model; called by the attributor."""
        if model is not self.model:
            self.model = model
            # Without it, a model that a question captures is a reference, which is identified by its weights.
            for rows in _ASKED.get(self, ()):
                self._identify(rows)

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        """Return f, q and w of the task, or of a question; see :meth:`AbstractModelOutput.evaluate`."""
        if not isinstance(batch, Mapping) or set(batch) != _KEYS:
            return self.task.evaluate(model_call, batch)
        ((name, members),) = batch[_QUESTION].items()
        digest, weights = batch[_DIGEST], batch[_WEIGHTS]
        of_task = self._digest_of_pass(name)
        refuse_invalid(
            digest == of_task, digest, expected=f"{of_task}, the question {name!r} of this task", what=_DIGEST
        )
        outputs = [self._question(name).evaluate(model_call, member).output for member in members]
        values = torch.stack(outputs, dim=1)
        total = (values * weights.to(values.dtype)).sum(1)
        return linear_terms(total * nan_unless(digest == of_task, total))

    def prepare(self, model: nn.Module) -> None:
        """Update the state of the task and of all questions; see :meth:`AbstractModelOutput.prepare`."""
        _DIGESTS[self] = {}
        for task in (self.task, *self.questions.values()):
            task.prepare(model)

    @property
    def can_sample(self) -> bool:
        """Whether the task defines ``sample_labels``."""
        return self.task.can_sample

    def sample_labels(self, model_call: ModelCall, batch: Batch, noise: UniformNoise) -> Batch:
        """Draw labels of train rows; see :meth:`AbstractModelOutput.sample_labels`."""
        return self.task.sample_labels(model_call, batch, noise)

    def log_likelihood(self) -> AbstractModelOutput | None:
        """Return that of the task."""
        return self.task.log_likelihood()

    def train_task(self) -> AbstractModelOutput:
        """Return the task, whose description identifies stored rows."""
        return self.task.train_task()

    def state_digest(self) -> str | None:
        """Return that of the task."""
        return self.task.state_digest()

    def _question(self, name: str) -> AbstractModelOutput:
        return self.questions[name] if name else self.task

    def _identify(self, rows: Rows) -> None:
        """Set what identifies the question in its targets, and in their name if the samples have one."""
        asked = rows.dataset
        asked.digest = self._digest(asked.question)
        if asked.name is not None:
            chosen = json.dumps([asked.digest, "mean" if asked.mean else "sum", asked.groups])
            rows.name = f"{asked.name} {hashlib.sha256(chosen.encode()).hexdigest()}"

    def _digest_of_pass(self, name: str) -> int:
        """Return the digest of a question, which is computed once after :meth:`prepare`: a reference may be large."""
        digests = _DIGESTS.get(self, {})
        if name not in digests:
            digests[name] = self._digest(name)
        return digests[name]

    def _digest(self, name: str) -> int:
        """Return an int64 that identifies a question by its name and its description."""
        described = json.dumps([name, describe_task(self._question(name), self.model)], sort_keys=True)
        return int.from_bytes(hashlib.sha256(described.encode()).digest()[:8], "little") >> 1


_ASKED: WeakKeyDictionary[QuestionsModelOutput, WeakSet[Rows]] = WeakKeyDictionary()
"""Targets of questions, whose digest changes when the attributed model becomes known."""


_DIGESTS: WeakKeyDictionary[QuestionsModelOutput, dict[str, int]] = WeakKeyDictionary()
"""Digests of questions in a pass over data; not in an attribute, whose changes replays look at."""


class _Asked(Dataset[dict[str, Any]]):
    """Targets of a question: each is a list of samples. The digest is part of a target, and so of its identity."""

    def __init__(
        self, dataset: Any, groups: list[list[int]], question: str, name: str | None, *, mean: bool
    ) -> None:
        self.dataset, self.groups, self.question, self.name, self.mean = dataset, groups, question, name, mean
        self.digest = 0

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, row: int) -> dict[str, Any]:
        indices = self.groups[row]
        weight = 1 / len(indices) if self.mean else 1.0
        samples = [self.dataset[index] for index in indices]
        return {_QUESTION: samples, _WEIGHTS: weight, _DIGEST: self.digest}


class _Collate:
    """Collates targets of a question: the first samples of all targets, the second ones, and so on."""

    def __init__(self, collate: Collate, name: str) -> None:
        self.collate, self.name = collate, name

    def __call__(self, targets: list[dict[str, Any]]) -> dict[str, Any]:
        samples = [target[_QUESTION] for target in targets]
        most = max(map(len, samples))
        # A group with fewer members repeats its first one, with weight 0.
        try:
            members = [
                self.collate([some[index if index < len(some) else 0] for some in samples])
                for index in range(most)
            ]
        except RuntimeError as error:
            if self.collate is not default_collate:
                raise
            refuse_machine_failure(error)
            raise InvalidInputError(
                f"The samples of a question cannot be collated ({summary(error):.200}). Pass ask(..., collate=...): "
                "the collate of the attributor is not used there."
            ) from error
        weights = [
            [target[_WEIGHTS] * (index < len(some)) for index in range(most)]
            for target, some in zip(targets, samples, strict=True)
        ]
        return {
            _QUESTION: {self.name: members},
            _WEIGHTS: torch.tensor(weights, dtype=torch.float64, device="cpu"),
            _DIGEST: torch.tensor([target[_DIGEST] for target in targets], dtype=torch.int64, device="cpu"),
        }


@final
@dataclass(eq=False)
class ActivationModelOutput(AbstractModelOutput):
    r"""Inner product of the output of a module with a direction: a neuron, a probe, a concept vector.

    :math:`f = \langle v, h \rangle` for the direction v and the activation h of a sample. L = -f, so q = 1 and w = 0.
    It is no training loss: use it as a question (:class:`QuestionsModelOutput`).

    Activations are ``(B, d)``; ``(B, T, d)`` with one state per token, of which ``position`` selects one or takes the
    mean or sum over tokens where ``attention_mask`` is not 0; or ``(B, d, *positions)`` with ``channels_first``. Of a
    module that returns a tuple, the first element is used. If the model calls the module several times, the last call
    counts.

    Batches: ``(*inputs, labels)`` calls ``model(*inputs)``; a mapping or dataclass calls ``model(**others)`` without
    ``labels`` or ``label``; a tensor calls ``model(tensor)``.
    """

    has_curvature = False

    module: str
    """Name of the module in ``model.named_modules()``."""
    direction: Tensor
    """v, ``(d,)``; a finite vector."""
    position: Position = field(default="mean", kw_only=True)
    """``"mean"``, ``"sum"``, ``"first"`` or ``"last"`` over positions, or the number of one position."""
    channels_first: bool = field(default=False, kw_only=True)
    """Whether the channels of activations with positions are axis 1 (convolutions)."""

    def __post_init__(self) -> None:
        direction, position = self.direction, self.position
        if not isinstance(direction, Tensor) or direction.dim() != 1 or not bool(direction.isfinite().all()):
            raise InvalidInputError("direction is no vector of finite numbers. Expected a tensor (d,).")
        if isinstance(position, bool) or not isinstance(position, int):
            one_of(("mean", "sum", "first", "last"), position=position)
        self.direction = precise(direction.detach().clone(), what="The direction")
        self.channels_first = bool(self.channels_first)

    def evaluate(self, model_call: ModelCall, batch: Batch) -> OutputTerms:
        """Return f, with q = 1 and w = 0; see :meth:`AbstractModelOutput.evaluate`."""
        args, kwargs = _inputs_of(batch)
        modules = dict(model_call.model.named_modules())
        known_names([self.module], modules, what="module")
        outputs: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple | list) and output else output
            if isinstance(first, Tensor):
                outputs.append(first)

        with modules[self.module].register_forward_hook(keep):
            model_call(*args, **kwargs)
        if not outputs:
            raise InvalidInputError(f"The model does not call its module {self.module!r} for this batch.")
        states = precise(outputs[-1], what=f"The output of {self.module!r}")
        if self.channels_first and states.dim() > 2:
            states = states.movedim(1, -1)
        states = states.flatten(1, -2) if states.dim() > 3 else states
        if states.dim() < 2 or states.shape[-1] != self.direction.shape[0]:
            raise InvalidInputError(
                f"The module {self.module!r} gave activations of shape {shape_texts(outputs[-1].shape)[0]}. Expected "
                f"{self.direction.shape[0]} channels, the size of the direction."
            )
        values = states @ self.direction.to(states)
        return linear_terms(
            values if values.dim() == 1 else self._reduced(values, kwargs.get("attention_mask"))
        )

    def settings(self) -> dict[str, Any]:
        """Return module, position and layout, and a digest of the direction."""
        return {
            "module": self.module,
            "direction": tensor_json(self.direction),
            "position": self.position,
            "channels_first": self.channels_first,
        }

    def _reduced(self, values: Tensor, mask: Any) -> Tensor:
        """Return ``(B,)`` from values ``(B, T)``."""
        if isinstance(self.position, int):
            if not -values.shape[1] <= self.position < values.shape[1]:
                raise InvalidInputError(
                    f"position={self.position} does not exist: the activations have {values.shape[1]} positions."
                )
            return values[:, self.position]
        fits = isinstance(mask, Tensor) and mask.shape == values.shape
        return pooled(values.unsqueeze(-1), mask if fits else None, self.position).squeeze(-1)


def _inputs_of(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    fields = fields_of(batch)
    if fields is not None:
        return (), {name: value for name, value in fields.items() if name not in LABEL_KEYS}
    if isinstance(batch, tuple | list):
        return tuple(batch[:-1] if len(batch) > 1 else batch), {}
    return (batch,), {}
