"""Paths of the tables of a store and of entries about them; columns and specs of rows, targets and scores.

What is inside the folder of a fit or of an index is named where it is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite.core.devices import to_device
from trak_lite.core.json_text import digest_of
from trak_lite.core.validate import some_of
from trak_lite.errors import InvalidInputError, StateError, StoreError
from trak_lite.store import AbstractFeatureStore, AbstractRowTable, Column, Manifest, TableSpec
from trak_lite.store._grid import chunk_rows_for

FEATURES, OUT_TO_LOSS, LOSS_CURVATURE = "features", "out_to_loss", "loss_curvature"
GRADIENT_NORM = "gradient_norm"
SCORES = "scores"
ERRORS = "errors"
CAPTURED = "captured"
"""Folder of the rows of captures; and, in the fingerprint of a checkpoint, the name of the capture of its rows."""
CHECKPOINTS = "checkpoints"
"""Attribute of a table of targets: the digests of the weights of all checkpoints that its call featurizes them with."""
COLUMNS = "columns"
"""Folder of the entries of the columns of the train data."""


class StoredMethod(Protocol):
    """What a method's tables are named by; see :class:`~trak_lite.methods.AbstractMethod`."""

    @property
    def inverse(self) -> Any:
        """The method with an inverse curvature whose targets it reads, ``None`` without one."""

    def to_json(self) -> dict[str, Any]:
        """Return the identity of its scores."""


def path_of(kind: str, *names: str, identity: Mapping[str, Any] | None = None) -> str:
    """Return the path of a table, an entry or a folder: its kind, its names and a digest of its identity.

    Args:
        kind: What it is; the first folder.
        names: Such as the name of a target set, or the path of the table that it belongs to.
        identity: JSON values that tell it apart from others of the same kind and names; ``None`` if there is one.

    Example:
        >>> path_of("scores", "test"), path_of("views", "test", identity={"name": "TRAK"})
        ('scores/test', 'views/test/ef0deea7410fd7dd')
    """
    digest = [] if identity is None else [digest_of(identity)[:16]]
    return "/".join((kind, *names, *digest))


preconditioned_folder = partial(path_of, "preconditioned")
"""Folder of the features of a target set that were multiplied by an inverse curvature."""
plain_target_folder = partial(path_of, "targets")
"""Folder of the plain features of a target set, with one table per checkpoint."""
first_score_path = partial(path_of, "scores")
"""Path of scores: by the attributor's method, or of a replay, or of a TRAKer."""
replay_path = partial(path_of, "replays")
"""Path of the finished blocks of a replay."""
capture_path = partial(path_of, CAPTURED)
"""Path of the rows of a capture, given its name and the path of its checkpoint."""
top_path = partial(path_of, "top")
"""Path of the top rows of a target set."""
retrain_path = partial(path_of, "retrains")
"""Path of the outputs of models retrained for a target set."""
verdict_path = partial(path_of, "verdicts")
"""Path of the verdict on a table of scores."""
one_run_path = partial(path_of, "one-run")
"""Path of the verdict of one run on a table of scores."""
predictions_path = partial(path_of, "predictions")
"""Path of the predictions that the verdict on a table of scores is computed from."""
trials_path = partial(path_of, "trials")
"""Path of the sets whose removal was measured for a table of scores."""
fisher_folder = partial(path_of, "fisher")
"""Folder of the Fisher information of the checkpoint with this table of train rows."""


def checkpoint_path(model_id: int) -> str:
    """Return the path of the train rows of the checkpoint with this id."""
    return f"ckpt-{model_id}"


def model_id_of(table: AbstractRowTable) -> int:
    """Return the model id of the checkpoint with these train rows or targets."""
    return int(table.spec.fingerprint["model_id"])


def model_id_for(
    digest: str, tables: Mapping[str, AbstractRowTable], store: AbstractFeatureStore | None
) -> int:
    """Return the id of the checkpoint with these weights.

    If they are not among the train tables, it is one that neither these nor the unfinished captures of the store use.
    """
    if digest in tables:
        return model_id_of(tables[digest])
    captured = {} if store is None else capture_tables(store)
    return max((*map(model_id_of, tables.values()), *captured), default=-1) + 1


def table_path(table: AbstractRowTable) -> str:
    """Return the path of a checkpoint's train rows."""
    return checkpoint_path(model_id_of(table))


def curvature_path(weights: str) -> str:
    """Return the path of the Kronecker-factored curvature of the checkpoint whose weights have this digest."""
    return path_of("ekfac", weights[:16])


def column_path(name: str) -> str:
    """Return the name of the entry of a column of the train data, whose own name may have any characters."""
    return path_of(COLUMNS, hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32])


def target_path(name: str, model_id: int) -> str:
    """Return the path of a checkpoint's table in :func:`plain_target_folder`."""
    return plain_target_folder(name, checkpoint_path(model_id))


def target_folder(name: str, method: StoredMethod) -> str:
    """Return the folder of the features of a target set that a method reads, with one table per checkpoint."""
    if method.inverse is not None:
        return preconditioned_folder(name, identity=method.inverse.target_json())
    return plain_target_folder(name)


def target_paths(store: AbstractFeatureStore, *names: str) -> list[str]:
    """Return the paths of all features of targets, plain and preconditioned, or those of one target set."""
    folders = (plain_target_folder(*names), preconditioned_folder(*names))
    return [path for folder in folders for path in store.table_names(folder)]


def without_fit(targets: Any) -> Any:
    """Return the identity of targets without that of a curvature fit, which belongs to the method of the scores."""
    if not isinstance(targets, Mapping):  # in a store of somebody else
        return targets
    return {key: value for key, value in targets.items() if key != "curvature"}


def target_table_path(name: str, method: StoredMethod, train: AbstractRowTable) -> str:
    """Return the path of the features of a target set that a method reads, for the checkpoint of a train table."""
    return f"{target_folder(name, method)}/{table_path(train)}"


def score_path(store: AbstractFeatureStore, name: str, method: StoredMethod, base: StoredMethod) -> str:
    """Return the path of the scores of a target set: the stored ones of the method, or where they are to be stored.

    Those of ``base``, the attributor's method, are stored at a short path. An attributor with another one may have
    stored them.
    """
    identity = method.to_json()
    short, other = first_score_path(name), path_of("views", name, identity=identity)
    paths = (short, other) if method == base else (other, short)
    for path in paths:
        if store.has_table(path) and store.open_table(path).spec.fingerprint.get("method") == identity:
            return path
    return paths[0]


def index_paths(fingerprint: Mapping[str, Any]) -> tuple[str, str]:
    """Return the folder of the indices of a method and checkpoints, and in it the folder of the index of some rows."""
    folder = path_of("index", identity={key: fingerprint[key] for key in ("method", "checkpoints")})
    return folder, path_of(folder, identity=fingerprint)


def retrained_path(group: str, fingerprint: Mapping[str, Any], number: int) -> str:
    """Return the path of the outputs of one training in the folder :func:`retrain_path`."""
    path = path_of(group, identity=fingerprint)
    return f"{path}-{number}" if number else path


def score_paths(store: AbstractFeatureStore, name: str) -> list[str]:
    """Return the paths of all tables of scores of a target set, one per method."""
    return [path for path in all_score_paths(store) if path.split("/")[1] == name]


def all_score_paths(store: AbstractFeatureStore) -> list[str]:
    """Return the paths of all tables of scores."""
    return [*store.table_names("scores"), *store.table_names("views")]


def scored_names(store: AbstractFeatureStore, *, own: bool = False) -> list[str]:
    """Return the names of the target sets that have scores, sorted; with ``own`` of the attributor's method."""
    paths = store.table_names("scores") if own else all_score_paths(store)
    return sorted({path.split("/")[1] for path in paths})


def target_names(store: AbstractFeatureStore, method: StoredMethod | None = None) -> list[str]:
    """Return the names of the target sets with features that a method reads, or of all with features, sorted."""
    kind = "" if method is None else f"{target_folder('', method).partition('/')[0]}/"
    return sorted({path.split("/")[1] for path in target_paths(store) if path.startswith(kind)})


def row_kind(manifest: Manifest) -> str:
    """Return the kind of the normalisation of the rows of a store."""
    return str(manifest.fingerprint.get("gradients", {}).get("normalization", {}).get("kind", "none"))


def feature_table_spec(
    num_rows: int,
    width: int,
    dtype: str,
    fingerprint: Mapping[str, Any],
    *,
    beside: Sequence[str] = (OUT_TO_LOSS, LOSS_CURVATURE),
) -> TableSpec:
    """Return the spec of the table of one checkpoint's features ``(num_rows, width)``, and of numbers beside them.

    The dtype is that of the features.
    """
    features = Column(FEATURES, width, dtype)
    columns = (features, *(Column(name, None, "float32") for name in beside))
    return TableSpec(num_rows, columns, chunk_rows_for(num_rows, features.arrays[0].row_bytes), fingerprint)


def as_tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array of the store as a tensor on a device; on the CPU it shares the mapped memory.

    The copy to an accelerator is not waited for.
    """
    if not array.flags.writeable:
        # torch warns about read-only arrays, because writing to the tensor is undefined; no caller writes to it.
        array = array.view()
        with contextlib.suppress(ValueError):  # memory that is mapped read-only: copied below
            array.flags.writeable = True
    if not array.flags.writeable:
        array = array.copy()
    return to_device(torch.from_numpy(array), device)


def score_table_spec(num_rows: int, num_targets: int, fingerprint: Mapping[str, Any]) -> TableSpec:
    """Return the spec of the table of scores ``(num_rows, num_targets)`` in float32."""
    columns = (Column(SCORES, num_targets, "float32"),)
    chunk_rows = chunk_rows_for(num_rows, 4 * num_targets, cheap=True)
    return TableSpec(num_rows, columns, chunk_rows, fingerprint)


def checkpoint_ids(store: AbstractFeatureStore) -> list[int]:
    """Return the model ids of the checkpoints with train rows, ascending."""
    names = (re.fullmatch(r"ckpt-(\d+)", path) for path in store.top_table_names())
    return [int(name[1]) for name in names if name is not None]


def checkpoint_tables(store: AbstractFeatureStore) -> dict[str, AbstractRowTable]:
    """Return the train tables by the digest of their checkpoint's weights, in id order."""
    tables = {}
    for path in map(checkpoint_path, checkpoint_ids(store)):
        try:
            table = store.open_table(path)
            tables[table.spec.fingerprint["weights"]] = table
        except StoreError:
            if store.has_table(path):  # otherwise another process has dropped it meanwhile
                raise
    return tables


def complete_tables(
    store: AbstractFeatureStore,
    digests: Sequence[str] | None,
    tables: Mapping[str, AbstractRowTable] | None = None,
) -> dict[str, AbstractRowTable]:
    """Return the finished train tables by weights digest; without ``digests`` those of all checkpoints.

    ``tables`` is the result of :func:`checkpoint_tables`, if the caller has it. The store is listed again if a digest
    is not among them: another process, or an iterable of the caller, may have featurized it meanwhile.
    """
    if tables is None or not tables.keys() >= set(digests or ()):
        tables = checkpoint_tables(store)
    unknown = [] if digests is None else [digest[:12] for digest in digests if digest not in tables]
    if unknown:
        raise StateError(
            f"The store has no features for {len(unknown)} of the {len(digests or ())} checkpoints (digests of "
            f"weights: {unknown[:5]}). Featurize them first: featurize(train_data, checkpoints=...)."
        )
    chosen = {digest: tables[digest] for digest in (tables if digests is None else digests)}
    if not chosen:
        raise StateError("No train row has been featurized yet. Call featurize(train_data, ...) first.")
    num_rows = max(num_train_rows(store.manifest), *(table.spec.num_rows for table in chosen.values()))
    for table in chosen.values():
        if table.spec.num_rows < num_rows or not table.complete:
            several = f"The store has {len(tables)} checkpoints: other weights are another one. "
            raise StateError(
                f"{table_path(table)} has {int(table.done().sum())} of {num_rows} train rows. "
                f"{several if len(tables) > 1 else ''}Call "
                "featurize(...) again with the same data and weights to continue, remove this checkpoint "
                "(drop_checkpoint), or name complete ones: score(..., checkpoints=...)."
            )
    return chosen


def require_order(tables: Mapping[str, AbstractRowTable], digests: Iterable[str]) -> None:
    """Raise InvalidInputError if tables by weights digest are in another order than these digests.

    Tables are in the order in which their checkpoints came into the store; weights of checkpoints go by it.
    """
    order = [digest for digest in dict.fromkeys(digests) if digest in tables]
    if order != [digest for digest in tables if digest in set(order)]:
        names = some_of(table_path(table) for table in tables.values())
        raise InvalidInputError(
            f"The method weighs the checkpoints, which are in another order in the store ({names}: as they came into "
            "it) than in the last featurize. Name them in the order of the weights: score(..., checkpoints=[...])."
        )


def capture_tables(store: AbstractFeatureStore, name: str | None = None) -> dict[int, str]:
    """Return the paths of the rows of captures that are not finished, by checkpoint id; of one name or path, or all."""
    paths = [path for path in store.table_names(CAPTURED) if name in (None, path, path.split("/")[1])]
    return {int(path.rpartition("-")[2]): path for path in paths}


def drop_checkpoint(store: AbstractFeatureStore, name: str) -> None:
    """Delete the rows of a checkpoint, of train data and of targets, from a store that is open for writing.

    The name is that of the checkpoint when it was featurized or captured, or of its table: ``ckpt-0``, or that of a
    capture that is not finished.
    """
    paths = [checkpoint_path(model_id) for model_id in checkpoint_ids(store)]
    names = {path: store.attributes(path).get("name") for path in paths}
    names |= {path: path.split("/")[1] for path in capture_tables(store).values()}
    matches = [path for path in paths if name in (path, names[path])]
    unfinished = capture_tables(store, name)
    if len(matches) > 1 or not (matches or unfinished):
        choices = some_of(f"{path} ({names[path]})" for path in [*matches, *unfinished.values()] or names)
        raise InvalidInputError(
            f"{len(matches)} checkpoints have the name {name!r}. Expected one of the tables {choices}."
        )
    for path in unfinished.values():
        store.drop_table(path)
    if not matches:
        return
    (train,) = matches
    weights = store.open_table(train).spec.fingerprint["weights"]
    # Targets first: without the train rows, their checkpoint could not be identified after a kill.
    targets = [path for path in target_paths(store) if path.endswith(f"/{train}")]
    for entry in store.entry_names(curvature_path(weights)):
        store.drop_entry(entry)
    for path in store.table_names("index"):
        if weights in store.open_table(path).spec.fingerprint["checkpoints"]:
            for entry in store.entry_names(path.rpartition("/")[0]):
                store.drop_entry(entry)
            store.drop_table(path)
    for path in (*targets, *store.table_names(fisher_folder(train)), train):
        store.drop_table(path)


def num_train_rows(manifest: Manifest) -> int:
    """Return the number of rows of the train data; 0 if the manifest does not contain it."""
    dataset = manifest.fingerprint.get("dataset")
    count = dataset.get("num_rows") if isinstance(dataset, Mapping) else None
    return count if isinstance(count, int) else 0


def stored_content(store: AbstractFeatureStore) -> str:
    """Return the numbers of rows and checkpoints, and the scored target sets, as text."""
    tables = [store.open_table(checkpoint_path(model_id)) for model_id in checkpoint_ids(store)]
    left = sum(not table.complete for table in tables)
    unfinished = f" ({left} not finished)" if left else ""
    scored = some_of(scored_names(store)) or "none"
    return f"{num_train_rows(store.manifest):,} train rows, {len(tables)} checkpoints{unfinished}, scores: {scored}"
