"""The features of one target set, made for every checkpoint that lacks them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, final

from trak_lite._validate import some_of
from trak_lite.data.datasets import Rows
from trak_lite.errors import CheckpointError, StateError
from trak_lite.models.checkpoints import Checkpoint
from trak_lite.parallel.sharing import LateTable
from trak_lite.run.tables import checkpoint_tables, complete_tables
from trak_lite.run.workspace import Workspace
from trak_lite.store import AbstractFeatureStore, TableSpec
from trak_lite.store.manifest import compare_fingerprints

__all__ = ["Candidates", "TargetSession", "visit_checkpoints"]

logger = logging.getLogger(__name__)

Candidates: TypeAlias = Callable[[AbstractFeatureStore, Iterable[str]], Iterator[Checkpoint]]
"""Yields checkpoints that may hold the weights that are needed."""


@final
class TargetSession:
    """Computes what is missing of the features of a target set, while the model is borrowed."""

    def __init__(
        self,
        workspace: Workspace,
        targets: Rows,
        *,
        name: str,
        folder: str,
        identity: Mapping[str, Any],
        load: Callable[[Checkpoint], str],
        spec: Callable[[int, str], TableSpec],
        check: Callable[[str], None],
        agreed: Callable[[bool], bool],
        featurize: Callable[[LateTable, Rows, int, str], int],
    ) -> None:
        """Hold what the target set is, and how features come about.

        Args:
            workspace: The store, open.
            targets: The target rows.
            name: Name of the target set.
            folder: Where the features are kept, one table per checkpoint.
            identity: What the targets are recognised by.
            load: Loads a checkpoint and returns the digest of its weights.
            spec: Returns the table of the targets' features, from the checkpoint's id and digest.
            check: Compares train rows of the checkpoint that is loaded with what is computed now.
            agreed: Returns whether all ranks that hold parts of the model say the same.
            featurize: Fills such a table from the checkpoint that is loaded: table, rows, id, label.
        """
        self._workspace = workspace
        self._targets = targets
        self._name = name
        self._folder = folder
        self._identity = identity
        self._load = load
        self._spec = spec
        self._check = check
        self._is_compared = False
        self._agreed = agreed
        self._featurize = featurize

    def add(self, checkpoint: Checkpoint) -> str:
        """Load a checkpoint and compute the target features that it lacks; return the digest of its weights.

        Raises:
            StateError: If its train rows are not featurized.
        """
        digest = self._load(checkpoint)
        complete_tables(self._workspace.store(), [digest])
        self._fill(digest, checkpoint.name)
        return digest

    def find(
        self,
        digests: Iterable[str],
        candidates: Candidates,
    ) -> None:
        """Compute the target features that are missing, from wherever their weights are to be found.

        Args:
            digests: Weights of the checkpoints that are to have target features.
            candidates: Yields checkpoints that may hold the weights that are needed.

        Raises:
            StateError: If the weights of a checkpoint are not to be found.
        """
        store = self._workspace.store()
        waiting = {digest for digest in digests if not self._agreed(self._has(digest))}
        visit_checkpoints(store, waiting, candidates, self._load, self._fill, purpose="to score new targets")

    def compare(self, digests: Iterable[str], candidates: Candidates) -> None:
        """Compute a few stored targets again, with the first checkpoint whose weights are at hand, if any are.

        The targets, or the model, may be others by now than those whose features are there. Does nothing where
        :meth:`add` or :meth:`find` have come across stored targets.

        Raises:
            ManifestMismatchError: If they are not what is stored.
        """
        there = {digest for digest in digests if self._agreed(self._has(digest))}
        if self._is_compared or not there:
            return
        try:
            for checkpoint in candidates(self._workspace.store(), there):
                digest = self._load(checkpoint)
                if digest in there:
                    self._fill(digest, checkpoint.name)
                    return
        except CheckpointError as error:  # a file that was there once: nothing has to be computed from it
            logger.info("Stored targets are not compared: %s", error)

    def _fill(self, digest: str, label: str) -> None:
        """Compute the target features that the checkpoint lacks that is loaded; compare those that are there."""
        self._check(digest)
        self._is_compared = True
        model_id = self._workspace.model_id(digest)
        path = f"{self._folder}/ckpt-{model_id}"
        late = self._workspace.late_table(path, self._spec(model_id, digest))
        self._featurize(late, self._targets, model_id, f"Targets {self._name!r}, {label}")

    def _has(self, digest: str) -> bool:
        """Whether all target features of a checkpoint are there."""
        path = f"{self._folder}/ckpt-{self._workspace.model_id(digest)}"
        table = self._workspace.table(path)
        if table is None:
            return False
        compare_fingerprints(
            {"targets": dict(table.spec.fingerprint["targets"])},
            {"targets": dict(self._identity)},
            where=path,
            remedy="Score other targets under another name.",
        )
        return table.complete


def visit_checkpoints(
    store: AbstractFeatureStore,
    digests: Iterable[str],
    candidates: Candidates,
    load: Callable[[Checkpoint], str],
    visit: Callable[[str, str], None],
    *,
    purpose: str,
) -> None:
    """Load checkpoints of the store one by one, from wherever their weights are to be found.

    Args:
        store: Has train rows of them.
        digests: Their weights.
        candidates: Yields checkpoints that may hold the weights that are needed.
        load: Loads a checkpoint and returns the digest of its weights.
        visit: Called with the digest and the name of each checkpoint, once it is loaded.
        purpose: What the weights are needed for, for the message.

    Raises:
        StateError: If the weights of a checkpoint are not to be found.
    """
    waiting = set(digests)
    for checkpoint in candidates(store, set(waiting)):
        if not waiting:
            return
        digest = load(checkpoint)
        if digest in waiting:
            visit(digest, checkpoint.name)
            waiting.remove(digest)
    if waiting:
        paths = checkpoint_tables(store)
        lacking = {
            path: store.attributes(path).get("name") for path in sorted(paths[digest] for digest in waiting)
        }
        named = some_of(f"{path} (featurized as {name!r})" for path, name in lacking.items())
        raise StateError(
            f"The store has {len(paths)} checkpoints, and the weights of {named} are needed {purpose}, but none of the "
            "known sources holds them. Pass checkpoints=... with those to use, as they were given to featurize; others "
            f"are left out then. What is not wanted any more: drop_checkpoint({next(iter(lacking))!r})."
        )
