"""Where the scores of a target set are kept: one table for the attributor's settings, one for each other view."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from trak_lite.errors import StateError
from trak_lite.featurizing.fisher import FisherFits
from trak_lite.linalg import ScoreSettings
from trak_lite.parallel.ranks import AbstractRanks
from trak_lite.parallel.sharing import unwatched
from trak_lite.run.workspace import checkpoint_tables, complete_tables
from trak_lite.scoring.matrix import both_ends
from trak_lite.scoring.source import ScoreSource, target_folder
from trak_lite.scoring.tiles import score_rows, score_table_spec
from trak_lite.store import AbstractFeatureStore, AbstractRowTable, Manifest, TableSpec
from trak_lite.store.manifest import compare_fingerprints

__all__ = ["ScoreResult", "drop_scores", "finished_scores", "scorable_tables", "score_path"]


def score_path(name: str, settings: ScoreSettings, base: ScoreSettings) -> str:
    """Return where the scores of a target set are kept.

    Args:
        name: Name of the target set.
        settings: How the scores are made.
        base: How the attributor makes them where a call says nothing.
    """
    if settings == base:
        return f"scores/{name}"
    return f"views/{name}/{Manifest(settings.fingerprint()).digest()[:16]}"


def finished_scores(
    store: AbstractFeatureStore, name: str, settings: ScoreSettings, base: ScoreSettings
) -> AbstractRowTable:
    """Return the complete table of the scores of a target set.

    Raises:
        StateError: If they were never computed, or not finished, or train rows were appended since.
    """
    path = score_path(name, settings, base)
    if path not in store.table_names():
        known = [table.removeprefix("scores/") for table in store.table_names("scores")]
        how = "" if settings == base else f" made with {settings.to_json()}"
        raise StateError(
            f"There are no scores {name!r}{how}; there are {known}. Call score(data, name={name!r})."
        )
    table = store.open_table(path)
    if not table.complete:
        raise StateError(f"The scores {name!r} are not finished. Call score(...) again; it resumes.")
    train = complete_tables(store, list(table.spec.fingerprint["checkpoints"]))
    _refuse_outgrown(name, table.spec, next(iter(train.values())).spec)
    return table


def drop_scores(store: AbstractFeatureStore, name: str) -> None:
    """Remove the scores of a target set, made in whatever way, for good; the targets' own features stay.

    Raises:
        StateError: If there are none.
        BusyError: If another process computes some of them.
        ReadOnlyStoreError: If the store cannot be written.
    """
    views = store.table_names(f"views/{name}")
    found = [path for path in (*views, f"scores/{name}") if path in (*views, *store.table_names("scores"))]
    if not found:
        known = [table.removeprefix("scores/") for table in store.table_names("scores")]
        raise StateError(f"There are no scores {name!r}; there are {known}.")
    for path in (
        *found,
        *store.table_names(f"preconditioned/{name}"),
    ):  # these depend on the train data as well
        store.drop_table(path)


def _refuse_outgrown(name: str, scores: TableSpec, train: TableSpec) -> None:
    """Raise if train rows were appended since the scores were computed: the kernel is another one by now."""
    if scores.num_rows < train.num_rows:
        raise StateError(
            f"The scores {name!r} are those of {scores.num_rows} train rows, and there are {train.num_rows} by now. "
            f"Score under another name, or drop_scores({name!r}) and score again."
        )


def scorable_tables(
    store: AbstractFeatureStore, name: str, settings: ScoreSettings, digests: Sequence[str] | None
) -> list[AbstractRowTable]:
    """Return the train tables of the checkpoints that a target set has features for.

    Args:
        store: The store.
        name: Name of the target set.
        settings: How the scores are made, which says which features of the targets.
        digests: Weights of the checkpoints; ``None`` takes all that have such features.

    Raises:
        StateError: If there is none, or train rows are pending.
    """
    folder = target_folder(name, settings)
    known = store.table_names(folder.split("/")[0])
    if digests is None:
        digests = [
            digest
            for digest, path in checkpoint_tables(store).items()
            if f"{folder}/{path}" in known and store.open_table(f"{folder}/{path}").complete
        ]
    if not digests:
        names = sorted({path.split("/")[1] for path in known})
        raise StateError(
            f"There are no features of targets {name!r}; there are those of {names}. Call score(data, name={name!r})."
        )
    return list(complete_tables(store, digests).values())


@final
class ScoreResult:
    """The scores of one target set, made in one way, in an open store."""

    def __init__(
        self,
        store: AbstractFeatureStore,
        train: Mapping[str, AbstractRowTable],
        name: str,
        settings: ScoreSettings,
        base: ScoreSettings,
        identity: Mapping[str, Any],
        num_targets: int,
    ) -> None:
        """Determine where they are kept and what they are compared by.

        Args:
            store: The store, open for writing if there is something to fill.
            train: Train tables by weights digest.
            name: Name of the target set.
            settings: How the scores are made.
            base: How the attributor makes them where a call says nothing.
            identity: What the targets are recognised by.
            num_targets: M.
        """
        tables = list(train.values())
        fingerprint = {
            "checkpoints": list(train),
            "targets": dict(identity),
            "train_rows": [table.content_key() for table in tables],
            **settings.fingerprint(),
        }
        if settings.kernel == "fisher":
            fingerprint["fisher"] = FisherFits(store).record()
        self._store = store
        self._name = name
        self._path = score_path(name, settings, base)
        self._spec = score_table_spec(tables[0].spec.num_rows, num_targets, fingerprint)

    def is_finished(self) -> bool:
        """Whether the scores are there, made with these settings, and complete.

        Raises:
            ManifestMismatchError: If they were made with other targets, checkpoints or settings.
            StateError: If train rows were appended since.
        """
        if self._path not in self._store.table_names():
            return False
        table = self._store.open_table(self._path)
        _refuse_outgrown(self._name, table.spec, self._spec)
        there, here = table.spec.fingerprint, self._spec.fingerprint
        stored, given = len(there["checkpoints"]), len(here["checkpoints"])
        counts = "" if stored == given else f" ({stored} checkpoints were used there, {given} here)"
        compare_fingerprints(
            there,
            here,
            where=f"{self._path}{counts}",
            remedy="Score these under another name, or pass the targets, checkpoints and kernel of that time.",
        )
        return table.complete

    def fill(
        self,
        source: ScoreSource,
        *,
        device: torch.device,
        progress: bool | None,
        watch: Callable[[], None] = unwatched,
    ) -> None:
        """Compute the rows that are pending."""
        terms = source.terms()
        score_rows(
            self._store.create_table(self._path, self._spec),
            terms,
            q=source.settings.q,
            device=device,
            label=f"Scoring {self._name!r}",
            progress=progress,
            watch=watch,
        )

    def both_ends(self, source: ScoreSource, k: int, *, ranks: AbstractRanks) -> NDArray[np.float64]:
        """Return the k most helpful and most harmful rows of every target, as kept in the store or from one pass.

        Redoing it costs one pass over the stored rows; a store that is open for reading keeps nothing. All ranks find
        them together.
        """
        name, key = f"top/{self._name}", self.digest()
        kept = self._store.cached(name, key)
        enough = kept is not None and kept.shape[-1] >= min(k, source.num_rows)
        if not ranks.merged(enough, operator.and_):  # in an object store, what is kept may be elsewhere
            kept = both_ends(source, k, ranks=ranks)
            if ranks.rank == 0:
                self._store.cache(name, key, kept)
        return np.array(kept)

    def digest(self) -> str:
        """Return a digest of all that the scores are made from."""
        return Manifest(self._spec.fingerprint).digest()
