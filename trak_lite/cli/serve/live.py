"""The model of a store: its output for a target, and scores of targets that were not stored before."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any, Final, final

import numpy as np
import torch

from trak_lite.attributor import Attributor
from trak_lite.core.eval_caches import attributes_kept, hooks_noted
from trak_lite.data.batches import move_batch
from trak_lite.data.datasets import Rows
from trak_lite.errors import (
    MODEL_FAILURES,
    CheckpointError,
    InvalidInputError,
    StateError,
    StoreError,
    refuse_machine_failure,
)
from trak_lite.methods import Method
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall
from trak_lite.models.checkpoints import (
    Checkpoint,
    CheckpointSource,
    iterate_checkpoints,
    noted_checkpoint,
    weights_digest,
)
from trak_lite.models.loading import load_into
from trak_lite.report.content import Content, rendered
from trak_lite.run.tables import checkpoint_tables, complete_tables, model_id_of, table_path, target_names
from trak_lite.scoring.scores import Scores
from trak_lite.scoring.tokens import split_scores
from trak_lite.store import AbstractFeatureStore, open_store
from trak_lite.store.manifest import compare_fingerprints

logger = logging.getLogger(__name__)

ASKED: Final = "asked-"
"""Prefix of the names of target sets of one text each."""
MOST_ASKED: Final = 100
"""Scored texts that stay in the store."""


@final
@dataclass(eq=False)
class LiveModel:
    """A model with the weights of its last checkpoint, its data, and functions of a recipe.

    Raises:
        ManifestMismatchError: If the train data are not those of the store.
        CheckpointError: If the weights of the last checkpoint are not those of a checkpoint of the store.
    """

    attributor: Attributor
    """Attributor of the store."""
    checkpoints: CheckpointSource
    """As in :meth:`~trak_lite.Attributor.score`."""
    train: Rows
    targets: Rows
    """The stored targets of the recipe."""
    store: InitVar[AbstractFeatureStore]
    method: Method | None = None
    """The method of the scores of texts, with features of its targets; ``None`` is the attributor's."""
    salt: str = ""
    """Digest of the recipe and its arguments; it is part of the name of a text that is scored."""
    sample_of: Callable[[str], Any] | None = None
    """Returns the sample of a text, as the target data have them; ``None`` if texts cannot be scored."""
    predict: Callable[[Any, Any], Any] | None = None
    """Returns the output of the model for a sample, as a render does; ``None`` shows f only."""
    tokens: Callable[[int], Sequence[str]] | None = None
    """Returns the texts of the tokens of a train sample, one per label, by its index in the dataset."""
    most_asked: int = field(init=False, default=MOST_ASKED)
    """Number of scored texts that :meth:`drop_oldest` leaves in the store."""
    checkpoint: str = field(init=False)
    """Name of the last checkpoint."""
    _identity: dict[str, Any] = field(init=False)
    _used: dict[str, None] = field(init=False, default_factory=dict)
    """Names of texts that this process has scored or shown, the last one last."""
    _compared: bool = field(init=False, default=False)
    """Whether train rows were computed again and compared with stored ones."""

    def __post_init__(self, store: AbstractFeatureStore) -> None:
        """Load the last checkpoint and compare it and the train data with the store, which is read here only."""
        self._identity = self.train.identity()
        compare_fingerprints(
            {"train data": store.manifest.fingerprint.get("dataset", {})},
            {"train data": self._identity},
            where=str(store.path),
            remedy="Use the recipe, its arguments and the train rows that the store was made with.",
        )
        self.can_ask, self.has_tokens = self.sample_of is not None, self.tokens is not None
        self.checkpoint = self._load_last(store)

    def _load_last(self, store: AbstractFeatureStore) -> str:
        """Load the last checkpoint into the model; return its name."""
        tables = checkpoint_tables(store)
        if not tables:
            raise StateError(
                f"{store.path} has no train rows yet. Featurize them first: trak-lite run CONFIG."
            )
        if self.checkpoints is None:
            noted = noted_checkpoint(store.attributes(table_path(list(tables.values())[-1])).get("source"))
            last = noted or Checkpoint("current", None, None)
        else:
            *_, last = iterate_checkpoints(self.checkpoints)
        model = self.attributor.model
        load_into(model, last)
        model.to(self.attributor.device).eval()  # before the digest: as the rows were computed
        if weights_digest(model) not in tables:
            raise CheckpointError(
                f"The weights of checkpoint {last.name!r} are not those of a checkpoint of {store.path}. Pass "
                "--checkpoints PATH with the checkpoints that it was made with, or serve without --recipe."
            )
        return last.name

    def output(self, sample: Any, task: AbstractModelOutput) -> tuple[float, Content | None]:
        """Return f of a sample at the last checkpoint, and the output that the recipe returns for it."""
        attributor = self.attributor
        (_, batch), *_ = Rows([sample], collate=self.targets.collate).batches([np.zeros(1, np.int64)])
        put_back = attributes_kept(attributor.model.modules())
        try:
            with torch.no_grad():
                task.prepare(attributor.model)
                terms = task.evaluate(ModelCall(attributor.model), move_batch(batch, attributor.device))
                with hooks_noted():
                    shown = None if self.predict is None else self.predict(attributor.model, sample)
        finally:
            put_back()  # scores of a text load other checkpoints
        return float(terms.output[0]), None if shown is None else rendered(shown, "the output")

    def target(self, target: int) -> Any:
        """Return the sample of a stored target."""
        return self.targets.dataset[int(self.targets.indices[target])]

    def sample(self, text: str) -> Any:
        """Return the sample of a text."""
        if self.sample_of is None:
            raise InvalidInputError("The recipe defines no sample(text), so no text can be scored.")
        try:
            return self.sample_of(text)
        except MODEL_FAILURES as error:
            refuse_machine_failure(error)
            raise InvalidInputError(
                f"sample(text) of the recipe made no sample of this text ({type(error).__name__}: {error})."
            ) from error

    def name(self, text: str) -> str:
        """Return the name of the target set of a text; another recipe gives another name."""
        return ASKED + hashlib.sha256(f"{self.salt}\0{text}".encode()).hexdigest()[:32]

    def asked(self, text: str) -> Scores | None:
        """Return the scores ``(N, 1)`` of a text; ``None`` if it was not scored yet. Nothing is written."""
        try:
            return self.attributor.scores(self.name(text), method=self.method, dense=False)
        except StateError:
            return None

    def ask(self, text: str) -> Scores:
        """Compute the features of a text at all checkpoints, store them and return its scores ``(N, 1)``.

        A call that is killed leaves the store as it was, or with some of the features; the next call continues.
        """
        rows = Rows([self.sample(text)], collate=self.targets.collate)
        name = self.name(text)
        scores = self.attributor.score(
            rows, name, method=self.method, dense=False, checkpoints=self.checkpoints
        )
        self._hold_computers(scores)
        self.use(name)
        return scores

    def _hold_computers(self, scores: Scores) -> None:
        """Let later sessions use the gradient computers of earlier ones, which have made plans and self-checks."""
        run = scores.run
        run.computers = {} if run.computers is None else run.computers

    def use(self, name: str) -> None:
        """Record that a text was shown, so that it is dropped after the ones that were not."""
        self._used.pop(name, None)
        self._used[name] = None

    def drop_oldest(self) -> list[str]:
        """Remove scored texts from the store until ``most_asked`` of them are left; return the names of those removed.

        Those that this process has not shown are removed first, then those that it has shown the longest ago. A text
        that another process is scoring, or whose features are damaged, remains.
        """
        # A user may score targets under a name of their own that starts like these.
        names = [name for name in self.stored_names() if re.fullmatch(f"{ASKED}[0-9a-f]{{32}}", name)]
        recent = {name: index for index, name in enumerate(self._used)}
        oldest = sorted(names, key=lambda name: (recent.get(name, -1), name))
        gone = []
        for name in oldest[: max(0, len(names) - self.most_asked)]:
            try:
                self.attributor.drop_scores(name, features=True)
            except StoreError as error:  # another process scores it, or it is damaged
                logger.warning("%s remains: %s", name, error)
                continue
            self._used.pop(name, None)
            gone.append(name)
        return gone

    def stored_names(self) -> list[str]:
        """Return the names of all target sets with features in the store; another process may remove some."""
        path = self.attributor.path
        if path is None:
            return []
        with open_store(path) as store:
            return target_names(store)

    def warm(self, scores: Scores) -> Iterator[None]:
        """Plan the gradients of one checkpoint at each step, and compare some train rows with the stored ones."""
        run = scores.run
        self._hold_computers(scores)
        # Texts are samples of the train rows' task, which targets of another task are not.
        rows = self.train if "task" in scores.settings else self.targets
        (first, batch), *_ = rows.batches([np.zeros(1, np.int64)])
        with run.session() as session:
            digests = list(complete_tables(session.store, None))
        for digest in digests:
            with run.session(self._identity, train=self.train) as session:
                tables = complete_tables(session.store, [digest])
                model_id = model_id_of(tables[digest])
                plan = partial(session.features, batch, first, model_id=model_id, what=rows.what)
                session.visit(tables, lambda *_, plan=plan: plan(), purpose="to score texts")
            yield
        self._compared = True

    def coloured(
        self, scores: Scores, rows: Sequence[int], target: int
    ) -> Mapping[int, list[tuple[str, float]]]:
        """Return the tokens of some train rows with their contributions to the scores for a target."""
        if self.tokens is None or not rows:
            return {}
        run = scores.run
        with run.session(self._identity, train=None if self._compared else self.train) as session:
            contributions = split_scores(session, scores, self.train, rows=rows, targets=[target])
        self._compared = True
        coloured = {}
        for row, values in contributions.items():
            index = int(self.train.indices[row])
            texts = list(self.tokens(index))
            if len(texts) != len(values):
                raise InvalidInputError(
                    f"tokens({index}) of the recipe returned {len(texts)} texts for train row {row}. Expected one per "
                    f"label: {len(values)}."
                )
            coloured[row] = list(zip(texts, values[:, 0].tolist(), strict=True))
        return coloured
