"""The commands that need model and data, such as ``run`` and ``verify``, and the steps that they are made of."""

from __future__ import annotations

import json
import os
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

import numpy as np
from safetensors.torch import save_file

from trak_lite import unrolled
from trak_lite.attributor import Attributor, FeaturizeSummary
from trak_lite.cli.configs import RunConfig
from trak_lite.cli.recipes import Recipe, last_trained, recipe_columns, trained_states
from trak_lite.cli.records import RunRecord, store_record_of_run
from trak_lite.cli.stored import beside
from trak_lite.core.folders import publish_folder, scratch_folder
from trak_lite.core.sealed import BLANK, SEAL, seal, sealed_content
from trak_lite.data.columns import require_columns
from trak_lite.data.datasets import Rows
from trak_lite.errors import CheckpointError, InvalidInputError, ManifestMismatchError, MissingStoreError
from trak_lite.featurizing.settings import versions
from trak_lite.methods import AbstractMethod
from trak_lite.modelout_functions import resolve_task
from trak_lite.retraining.plans import TrainFunction
from trak_lite.retraining.trials import try_removals
from trak_lite.retraining.verify import verify
from trak_lite.run.columns import stored_columns
from trak_lite.scoring.scores import Scores
from trak_lite.store import RemotePlace, open_store
from trak_lite.store._names import check_name
from trak_lite.store.manifest import compare_fingerprints, stored_json

_TRAINING = "trained-with.json"
"""File beside the checkpoints of the recipe's ``train``: their number, and what they were trained with."""
_SHOWN_TARGETS, _SHOWN_ROWS = 3, 5
_SHOWN_GROUPS = 20


@final
@dataclass(eq=False)
class Job:
    """The steps that a config and its recipe describe. Every step resumes, and building it writes nothing."""

    config: RunConfig
    recipe: Recipe
    where: Mapping[str, list[str]] | None = None
    """Values by column that the train rows have that are printed."""
    by: str | None = None
    """Column to print mean scores by."""
    attributor: Attributor = field(init=False)
    _training: dict[str, Any] | None = field(init=False)

    def __post_init__(self) -> None:
        # First: the recipe's functions may change the global variables in it.
        self._training = self.recipe.training()
        model = self.recipe.call("build_model")
        self.attributor = Attributor(model, **self.config.attributor_arguments())

    @cached_property
    def train_data(self) -> Any:
        """The recipe's train data."""
        return self.recipe.call("train_data")

    @property
    def _samples(self) -> Any:
        """The dataset of the train data; the length of a loader counts batches."""
        return getattr(self.train_data, "dataset", self.train_data)

    @cached_property
    def train_rows(self) -> Rows:
        """The rows of the train data that the config selects."""
        return Rows(self.train_data, **self.config.values["train_data"], what="the train data")

    @cached_property
    def target_rows(self) -> Rows:
        """The rows of the recipe's targets that the config selects."""
        data = self.recipe.call("target_data")
        return Rows(data, **self.config.values["target_data"], what="the targets")

    def _trained_with(self, num_rows: int | None = None) -> dict[str, Any]:
        """Return JSON values that differ for trainings with other results, on the first ``num_rows`` rows or on all."""
        data = Rows(self._samples, name=self.config.values["train_data"]["name"], what="the train data")
        seed = self.config.values["train_seed"]
        return {**(self._training or {}), "train_seed": seed, "dataset": data.identity(num_rows=num_rows)}

    def _require_same_training(self) -> None:
        """Raise if the checkpoints are of another training of the recipe, or not all of one.

        Those of the user, and of earlier versions, have no file that says it.
        """
        folder = self.config.values["checkpoints"]
        if not isinstance(folder, str) or not os.path.isfile(os.path.join(folder, _TRAINING)):
            return
        file = os.path.realpath(os.path.join(folder, _TRAINING))
        stored = stored_json(sealed_content(file, _TRAINING, delete="its folder"), what=file)
        number = stored["checkpoints"]
        count = len(list(Path(folder).glob("checkpoint-*.safetensors")))
        keep = f"To use what is there as it is, delete {_TRAINING} in it."
        if count < number:
            raise CheckpointError(
                f"{folder} holds {count} of the {number} checkpoints of its training. Delete the folder, and make the "
                f"call again. {keep}"
            )
        if self._training is None:
            return
        # Rows that were appended since are no other training.
        num_rows, number = stored["dataset"]["num_rows"], len(self._samples)
        fingerprint = self._trained_with(num_rows if number > num_rows else None)
        if number > num_rows and not self.config.values["featurize"]["append"]:
            warnings.warn(
                f"The checkpoints in {folder} were trained on the first {num_rows} of the {number} train rows.",
                UserWarning,
                stacklevel=2,
            )
        where = f"The training of the checkpoints in {folder}"
        remedy = f"Use another folder (--checkpoints PATH), or delete this one to train again. {keep}"
        code = ("train()", "global variables")
        values = {name: value for name, value in stored.items() if name in fingerprint}
        compare_fingerprints(
            {name: value for name, value in values.items() if name not in code},
            {name: value for name, value in fingerprint.items() if name not in code},
            where=where,
            remedy=remedy,
        )
        try:
            compare_fingerprints(values, fingerprint, where=where, remedy=remedy)
        except ManifestMismatchError as error:  # a comment or a path may be no other training
            warnings.warn(f"{error}", UserWarning, stacklevel=2)

    def train(self) -> int:
        """Train if the recipe defines ``train`` and there is no checkpoint; return the number of checkpoints written.

        In a distributed run rank 0 trains, and the others wait.
        """
        folder = self.config.values["checkpoints"]
        train = self.recipe.bound("train")
        if train is None or not isinstance(folder, str):
            return 0
        with self.attributor._run.joined("train") as ranks:
            return ranks.broadcast("the number of checkpoints", lambda: self._train_into(folder, train))

    def _train_into(self, folder: str, train: Callable[..., Any]) -> int:
        """Train if a folder has no entries; return the number of checkpoints written.

        The checkpoints are moved to their path after the training, so that an interrupted training leaves none there.
        """
        if _has_entries(folder):
            return 0
        if "checkpoints" in self.config.recorded:
            raise CheckpointError(
                f"There is no checkpoint at {folder}, the path in the run stored in {self.config.path}. To train and "
                "write checkpoints, pass --checkpoints PATH: a path that a store names is never written to."
            )
        trained_with = self._trained_with()
        folder = os.path.realpath(folder)  # scratch_folder follows no link
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        with scratch_folder(folder) as scratch:  # also removes the folders of killed trainings
            number = 0
            trained = train(np.arange(len(self._samples)), self.config.values["train_seed"])
            for number, state in enumerate(trained_states(trained), start=1):
                file = f"{scratch}/checkpoint-{number}.safetensors"
                save_file(state, file, {SEAL: BLANK})
                seal(file, os.path.basename(file))
            if not number:
                raise InvalidInputError(
                    "The recipe's train() returned no weights. Return or yield a state dict."
                )
            note = os.path.join(scratch, _TRAINING)
            Path(note).write_text(json.dumps({SEAL: BLANK, "checkpoints": number, **trained_with}), "utf-8")
            seal(note, _TRAINING)
            publish_folder(scratch, folder)  # or delete it, if another process was first
        return number

    def featurize(self) -> FeaturizeSummary:
        """Featurize the train rows for every checkpoint."""
        checkpoints = self.config.values["checkpoints"]
        if isinstance(checkpoints, str):
            if not _has_entries(checkpoints):
                raise CheckpointError(
                    f"There is no checkpoint at {checkpoints}. Put the model's .safetensors or .pt files there, name "
                    "another path with --checkpoints PATH, or train with trak-lite run CONFIG and a recipe that "
                    "defines train(indices, seed)."
                )
            # Those of the user have no checksum.
            for file in Path(checkpoints).glob("checkpoint-*.safetensors"):
                sealed_content(os.path.realpath(file), file.name, required=False, delete="its folder")
        columns = recipe_columns(self.recipe, self.train_rows)
        values = {name: column.values for name, column in columns.items()}
        more = self.config.values["featurize"]
        return self.attributor.featurize(self.train_rows, checkpoints, columns=values, **more)

    def scored_by(self) -> AbstractMethod:
        """Check the arguments of :meth:`score`, before anything is trained or computed; return its method."""
        arguments = dict(self.config.values["score"])
        del arguments["batch_size"]  # read_config checks it
        return self.attributor._asked(**arguments)[0]

    def score(self) -> Scores:
        """Score the targets. A method that must be fitted is fitted to the recipe's train data."""
        arguments = self.config.values["score"]
        chosen = self.scored_by()
        if chosen.fisher_fit is not None or chosen.inverse is not None:
            self.featurize()  # gives the attributor the train data, to which the method is fitted
        return self.attributor.score(self.target_rows, **arguments)

    def to_retrain(self) -> tuple[Scores, TrainFunction, Rows]:
        """Return the scores, the recipe's training of rows that are numbered as in these, and the targets."""
        score = self.config.values["score"]
        scores = self.attributor.scores(score["name"], method=score["method"], task=score["task"])
        train = self.recipe.bound("train")
        if train is None:
            raise InvalidInputError(
                f"The recipe {self.recipe.path} defines no train(indices, seed), which verify calls for every random "
                "subset. Add it; it returns the trained module or its state dict."
            )
        rows = self.config.values["train_data"]["indices"]
        if rows is not None:
            train = partial(_chosen, tuple(rows), train)
        return scores, partial(last_trained, train), self.target_rows

    def unroll(self) -> Scores:
        """Train so that the training can be replayed, and return the derivatives of the targets through it."""
        training = self.recipe.bound("training")
        made = None if training is None else training()
        if not isinstance(made, unrolled.Recipe):
            raise InvalidInputError(
                f"The recipe {self.recipe.path} needs a function training() that returns a trak_lite.unrolled.Recipe, "
                f"{'and defines none' if training is None else f'got {type(made).__name__}'}."
            )
        if self.config.values["train_data"]["indices"] is not None:
            raise InvalidInputError(
                "unroll trains on the rows of training() alone. Leave out train_data.indices."
            )
        arguments, score = dict(self.config.values["unroll"]), self.config.values["score"]
        # Before the training: these may be refused.
        task = resolve_task(self.attributor.task if score["task"] is None else score["task"])
        name, targets = check_name(score["name"], what="target set"), self.target_rows
        folder, progress = arguments.pop("path"), self.config.values["progress"]
        run = made.train(beside(self.config, ".run") if folder is None else folder, progress=progress)
        return unrolled.unrolled(run, targets, task, name=name, progress=progress, **arguments)

    def check_columns(self) -> None:
        """Check that the columns of ``--where`` and ``--by`` exist, before anything is computed."""
        names = [*(self.where or ()), *([] if self.by is None else [self.by])]
        if not names:
            return
        columns = recipe_columns(self.recipe, self.train_rows)
        if _is_store(self.config.path):
            with open_store(self.config.path) as store:
                columns |= stored_columns(store)
        require_columns(names, columns)

    def shown(self, scores: Scores) -> list[str]:
        """Return scores, the top rows of some targets, and mean scores by group as lines."""
        lines = [str(scores)]
        for target in range(min(_SHOWN_TARGETS, scores.shape[1])):
            for sign in ("helpful", "harmful"):
                top = scores.top(_SHOWN_ROWS, target=target, sign=sign, where=self.where)
                pairs = zip(top.indices, top.scores, strict=True)
                rows = "  ".join(f"{row} ({value:+.2e})" for row, value in pairs)
                lines.append(f"target {target}, most {sign} rows: {rows}")
        return lines if self.by is None else [*lines, *_grouped(scores, self.by, self.where)]

    @contextmanager
    def recorded(self, command: str) -> Iterator[None]:
        """Write the record of a command into the store at the end of the command.

        A command that fails is recorded only if it created the store: an existing store may have other settings. A plan
        writes nothing.
        """
        if command == "plan":
            yield
            return
        if command in ("run", "featurize"):  # score needs no train data
            self._require_same_training()
        config, time = self.config, datetime.now(UTC).isoformat(timespec="seconds")
        made_with = versions(self.attributor.device)
        record = RunRecord(command, time, config.values, self.recipe.digest, made_with)
        accepted = not _is_store(config.path)
        try:
            yield
            accepted = True
        finally:
            if accepted and _is_store(config.path):
                store_record_of_run(config.path, record)


def run(job: Job) -> Iterator[str]:
    """Train if there are no checkpoints, featurize and score. Yield the lines to print."""
    job.scored_by()
    num_trained = job.train()
    if num_trained:
        yield f"trained: {num_trained} checkpoints in {job.config.values['checkpoints']}"
    yield from featurize(job)
    yield from job.shown(job.score())
    here = os.getcwd() + os.sep
    store, recipe = (shlex.quote(str(path).removeprefix(here)) for path in (job.config.path, job.recipe.path))
    yield f"next: trak-lite serve {store} --recipe {recipe}          (questions in a browser)"
    yield f"      trak-lite report {store} --recipe {recipe}         (one page of HTML)"
    if "train" in job.recipe.functions:
        yield f"      trak-lite verify --from {store} --recipe {recipe}  (a test against retrained models)"


def plan(job: Job) -> Iterator[str]:
    """Measure what ``run`` would take. Yield the lines to print."""
    checkpoints = job.config.values["checkpoints"]
    if isinstance(checkpoints, str) and not _has_entries(checkpoints):
        yield f"There is no checkpoint at {checkpoints}: for one checkpoint with the weights of build_model()."
        checkpoints = None
    yield str(job.attributor.plan(job.train_rows, job.target_rows, checkpoints=checkpoints))


def featurize(job: Job) -> Iterator[str]:
    """Featurize the train rows. Yield the lines to print."""
    done = job.featurize()
    yield (
        f"featurized: {done.rows_written} rows written, {done.rows_found} found, checkpoints "
        f"{', '.join(done.checkpoints)}"
    )


COMMANDS: dict[str, Callable[[Job], Iterable[str]]] = {
    "plan": plan,
    "run": run,
    "featurize": featurize,
    "score": lambda job: job.shown(job.score()),
    "verify": lambda job: [str(verify(*job.to_retrain(), **job.config.values["verify"]))],
    "trials": lambda job: [str(try_removals(*job.to_retrain(), **job.config.values["trials"]))],
    "unroll": lambda job: job.shown(job.unroll()),
}
"""The commands that need model and data; each returns the lines to print."""


def conditions(texts: Sequence[str]) -> dict[str, list[str]] | None:
    """Return the values that rows must have by column, from ``NAME=VALUE``; ``None`` without conditions.

    Several values of a column are alternatives.

    Example:
        >>> conditions(["source=web", "source=book", "year=2024"])
        {'source': ['web', 'book'], 'year': ['2024']}
    """
    by_column: dict[str, list[str]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidInputError(f"--where must be NAME=VALUE, such as source=web, got {text!r:.80}.")
        by_column.setdefault(name, []).append(value)
    return by_column or None


def _grouped(scores: Scores, by: str, where: Mapping[str, list[str]] | None) -> Iterator[str]:
    """Yield the mean score of each group of train rows over all targets, the largest first."""
    groups = scores.group(by, np.zeros(scores.shape[1], np.int64), where=where)
    means, counts = groups.means[:, 0], groups.counts[:, 0] // scores.shape[1]
    order = np.argsort(-means, kind="stable")
    yield f"mean score over all targets by {by}:"
    for group in order[:_SHOWN_GROUPS]:
        yield f"  {means[group]:+.2e}  {groups.train_groups[group]} ({counts[group]} rows)"
    if len(order) > _SHOWN_GROUPS:
        yield f"  ... {len(order) - _SHOWN_GROUPS} more"


def _chosen(
    rows: tuple[int, ...], train: Any, indices: np.ndarray[Any, np.dtype[np.int64]], seed: int
) -> Any:
    """Train on rows that are numbered as in the scores, and not as in the dataset."""
    return train(np.asarray(rows, np.int64)[indices], seed)


def _is_store(path: str | RemotePlace) -> bool:
    try:
        open_store(path).close()
    except MissingStoreError:
        return False
    return True


def _has_entries(path: str) -> bool:
    """Whether the path is a file or a folder that is not empty."""
    return os.path.isfile(path) or (os.path.isdir(path) and bool(os.listdir(path)))
