r"""The Fisher information of a checkpoint in feature space: a kernel for losses with several outputs per sample.

For one label per sample, the curvature w of the loss in f gives the Gauss-Newton matrix. A language model predicts one
label per token: f is a sum over tokens, and no weight of the gradient of the sum gives the curvature
:math:`\sum_t \nabla f_t (\cdot) \nabla f_t^\top` of the single tokens. Labels drawn from the model give it. With g the
gradient of their log-likelihood, :math:`E[g g^\top]` is the Fisher information, which for these losses is the
Gauss-Newton matrix (Martens, arXiv:1412.1193, section 9), because the labels of the tokens are independent given the
text. A fit projects some thousands of these gradients, as train rows are projected, into a table of the store. It then
writes their gram matrices into a second table and drops the first. Both tables are filled chunk by chunk, by any number
of processes, and continue after a kill.

Shapes: N train rows, n drawn samples, K feature width, k columns of one segment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from trak_lite.core.devices import full_float32, wide_dtype
from trak_lite.core.eval_caches import passes_undone
from trak_lite.core.random import row_noise
from trak_lite.data.batches import map_tensors
from trak_lite.data.datasets import RowNumbers, Rows, spread_rows
from trak_lite.errors import BusyError, MissingStoreError, ReadOnlyStoreError, StateError, StoreError
from trak_lite.featurizing.rows import RowWork
from trak_lite.gradient_computers.recording import repeating_inputs
from trak_lite.methods import Fisher
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall
from trak_lite.modelout_functions._margins import UniformNoise
from trak_lite.run.tables import FEATURES, as_tensor, feature_table_spec, fisher_folder
from trak_lite.store import AbstractFeatureStore, AbstractRowTable, Column, TableSpec
from trak_lite.store._base import NEEDED_UNTIL
from trak_lite.store.sharing import SharedRows, has_free_rows
from trak_lite.types import Batch, FeatureLayout, Segment

_VERSION = 3
_GRAM = "gram"
_GRAM_ROWS = 512
"""Rows of the gram matrices that are computed at once; a process claims this many."""
_PANEL = 256
"""Rows of a product that are computed at once, up to the diagonal."""
_ROWS_AT_ONCE = 32
"""Train rows whose draws follow one another; a batch of them has one draw of each, or a few."""
_CHUNK_BYTES = 2**26
"""Chunks of drawn rows may become so large."""
_PRODUCT_ROWS = 1024
"""Samples per float32 product; the products are summed in float64."""


def require_writable(store: AbstractFeatureStore) -> None:
    """Raise :class:`ReadOnlyStoreError` if a fit cannot be stored."""
    if not store.writable:
        raise ReadOnlyStoreError(
            f"The store at {store.path} is open for reading only, and a fit must be stored. Make it writable."
        )


def drawn_spec(
    num_rows: int, num_draws: int, width: int, fingerprint: Mapping[str, Any]
) -> tuple[TableSpec, int]:
    """Return the spec of a table of drawn rows, and the number of train rows whose draws follow one another.

    A chunk has all draws of its train rows. Neither depends on the batch size, which may change when a fit resumes.
    """
    spec = feature_table_spec(num_rows * num_draws, width, "float32", fingerprint)
    fewest, fitting = -(-spec.chunk_rows // num_draws), _CHUNK_BYTES // (4 * width * num_draws)
    most = min(max(fewest, fitting), _ROWS_AT_ONCE)
    # Groups of one size, if there is one: in a smaller last group, batches have draws of other rows.
    at_once = next((size for size in range(most, most // 2, -1) if num_rows % size == 0), most)
    group = at_once * num_draws
    return dataclasses.replace(spec, chunk_rows=max(spec.chunk_rows // group, 1) * group), at_once


def gram_spec(layout: FeatureLayout, fingerprint: Mapping[str, Any]) -> TableSpec:
    """Return the spec of the table of a fit's gram matrices."""
    widest = max(segment.width for segment in layout.segments)
    column = Column(_GRAM, widest, "float32")  # rounds less than the error of the estimate
    return TableSpec(layout.width, (column,), _GRAM_ROWS, fingerprint)


def drawn_batch_size(batch_size: int, num_draws: int, at_once: int) -> int:
    """Return the largest size up to ``batch_size`` of batches that end where a group of train rows does.

    If that is a quarter of ``batch_size`` or less, as with a prime number of draws and large batches, they do not.
    """
    layers = batch_size // at_once
    ending = max((number for number in range(1, layers + 1) if num_draws % number == 0), default=0)
    return (ending if 4 * ending > layers else layers) * at_once or batch_size


@final
@dataclass(frozen=True, slots=True)
class FisherFits:
    """Gram matrices of the checkpoints of a store, fitted with the settings of a method.

    A checkpoint is named by the path of its table of train rows.
    """

    store: AbstractFeatureStore
    method: Fisher
    """Its fields set the accuracy of the estimate of the Fisher information."""
    layout: FeatureLayout
    """Segments of the stored rows."""

    def has(self, path: str) -> bool:
        """Whether the checkpoint is fitted."""
        return self._fitted(path) is not None

    def is_left_alone(self, path: str) -> bool:
        """Whether the fit of the checkpoint is incomplete, and no process works on the rest."""
        if self.has(path):
            return False
        try:
            names = self.store.table_names(fisher_folder(path))
            drawn, gram = (
                self.store.open_table(name) if name in names else None for name in self._paths(path)
            )
            table = gram or drawn
            return table is None or table.complete or has_free_rows(table)
        except (StoreError, StateError):
            # Another process has completed the matrices and dropped the table that they are computed from.
            if not self.has(path):
                raise
            return False

    def grams(self, path: str, *, device: torch.device) -> list[Tensor]:
        """Return the gram matrix of the checkpoint, segment by segment, if it is fitted to the present train rows."""
        table = self._fitted(path)
        if table is None:
            raise StateError(
                f"The Fisher information of {path} is not fitted with the settings {self.method.fit_json()} on the "
                "present train rows. Call score(targets, method=..., dense=False) with this method, which fits it."
            )
        dtype = wide_dtype(device)
        matrices = []
        for segment in self.layout.segments:
            blocks = table.blocks(_GRAM, segment.start, segment.stop)
            rows = [as_tensor(block[:, : segment.width], device).to(dtype) for _, block in blocks]
            lower = torch.cat(rows).tril_()
            matrices.append(lower + lower.tril(-1).T)
        return matrices

    def drawn_table(self, path: str, spec: TableSpec) -> tuple[str, TableSpec, dict[str, str]]:
        """Return the path, spec and attributes of the table of drawn rows, whose shape is that of ``spec``."""
        drawn, gram = self._paths(path)
        return drawn, dataclasses.replace(spec, fingerprint=self._fingerprint(path)), {NEEDED_UNTIL: gram}

    def fit(self, path: str, drawn: RowWork, num_rows: int, *, wait: bool) -> None:
        """Fit the checkpoint that is loaded in the model, or the missing part, together with other processes.

        ``path`` is its table of train rows. ``drawn`` fills :meth:`drawn_table` with the features of
        :class:`DrawnRows`; their normalisation is none, or one that is linear in the gradient. Without ``wait``, chunks
        that other processes hold are left out.
        """
        require_writable(self.store)

        def stop_when_fitted() -> None:
            if self.has(path):
                raise _FittedByOthersError

        try:
            # Batches of a fit are the same texts with one drawn label after the other.
            with drawn.ranks.checking(stop_when_fitted), repeating_inputs():
                drawn.fill(wait=wait)
            drawn_path, gram_path = self._paths(path)
            table = self.store.open_table(drawn_path)
            if table.complete:
                self._sum_up(gram_path, table, num_rows, drawn, wait=wait)
        except (_FittedByOthersError, StoreError, StateError):
            # The process that completes the matrices drops the table that they are computed from, while others use it.
            if not self.has(path):
                raise
        self.sweep(path)

    def sweep(self, path: str) -> None:
        """Drop tables that a kill may have left: inputs of a finished fit, and fits to fewer train rows."""
        if not self.store.writable or not self.has(path):
            return
        _, current = self._paths(path)
        for name in self.store.table_names(fisher_folder(path)):
            # Another process may write it or have dropped it.
            with contextlib.suppress(BusyError, MissingStoreError):
                record = self.store.open_table(name).spec.fingerprint["fisher"]
                if name != current and record == self._record:
                    self.store.drop_table(name)

    @torch.no_grad()
    def _sum_up(
        self, path: str, drawn: AbstractRowTable, num_rows: int, work: RowWork, *, wait: bool
    ) -> None:
        """Fill the table of gram matrices: row i has the products of feature i with the features of its segment.

        The products after the diagonal may be missing. Rows of narrower segments than the widest end in zeros.
        """
        spec = gram_spec(self.layout, drawn.spec.fingerprint)
        scale = num_rows / drawn.spec.num_rows  # from drawn samples to a sum over the train rows
        device = work.passes.device
        table = self.store.create_table(path, spec)
        # For all rounds: the first use of new memory takes longer than the products.
        widest = max(segment.width for segment in self.layout.segments)
        memory = torch.empty(_GRAM_ROWS, widest, dtype=wide_dtype(device), device=device)
        with SharedRows(table, _GRAM_ROWS, label="Gram matrices", progress=False, ranks=work.ranks) as shared:
            for wanted in (wanted for batches in shared.rounds(wait=wait) for wanted in batches):
                rows = memory[: len(wanted)].zero_()
                for segment in self.layout.segments:
                    self._add_products(rows, wanted, drawn, segment)
                shared.put(wanted, {_GRAM: rows.mul_(scale).float().cpu().numpy()})

    def _add_products(
        self, rows: Tensor, wanted: RowNumbers, drawn: AbstractRowTable, segment: Segment
    ) -> None:
        """Add the rows of a segment's gram matrix of drawn features that are among ``wanted`` to ``rows``."""
        index = np.flatnonzero((wanted >= segment.start) & (wanted < segment.stop))
        if not len(index):
            return
        device = rows.device
        columns = wanted[index] - segment.start
        for _, block in drawn.blocks(FEATURES):
            for start in range(0, len(block), _PRODUCT_ROWS):
                part = as_tensor(block[start : start + _PRODUCT_ROWS, segment.start : segment.stop], device)
                for first in range(0, len(index), _PANEL):
                    panel = columns[first : first + _PANEL]
                    begin, stop = int(panel[0]), int(panel[-1]) + 1
                    selected = part[:, begin:stop]
                    if stop - begin > len(panel):  # other processes compute the rows between
                        selected = selected[:, torch.from_numpy(panel - begin).to(device)]
                    with full_float32(device):
                        rows[index[first] : index[first] + len(panel), :stop] += selected.T @ part[:, :stop]

    @property
    def _record(self) -> dict[str, Any]:
        return {"version": _VERSION, **self.method.fit_json()}

    def _fitted(self, path: str) -> AbstractRowTable | None:
        _, name = self._paths(path)
        if name not in self.store.table_names(fisher_folder(path)):
            return None
        table = self.store.open_table(name)
        return table if table.complete else None

    def _paths(self, path: str) -> tuple[str, str]:
        """Return the paths of the drawn rows and of the gram matrices; another fit has other paths."""
        folder = fisher_folder(path, identity=self._fingerprint(path))
        return f"{folder}/drawn", f"{folder}/gram"

    def _fingerprint(self, path: str) -> dict[str, Any]:
        return {
            "fisher": self._record,
            "dataset": self.store.manifest.fingerprint.get("dataset", {}),
            "layout": self.layout.to_json(),
            "weights": self.store.open_table(path).spec.fingerprint["weights"],
        }


@final
class _FittedByOthersError(Exception):
    """Another process has completed the matrices, so this process need not continue."""


@final
@dataclass(eq=False)
class DrawnRows:
    """The n samples of a fit: train rows with drawn labels, each train row as often as the method needs.

    They are ordered by groups of train rows, in a group by draw, so that a batch has the texts of the
    batch before it. What depends on the texts alone is then computed once: their loading, the model's predictions that
    labels are drawn from, and the forward pass of a replay.
    """

    rows: Rows
    """The N train rows."""
    task: AbstractModelOutput
    """Draws the labels from the model."""
    model: nn.Module
    num_chosen: int
    """Number of train rows to use."""
    draws: int
    """Number of draws of each."""
    seed: int
    at_once: int
    """Train rows of a group; see :func:`drawn_spec`."""
    draws_ahead: bool
    """Draw all labels of a text with one pass of the model. Ranks that must run the model equally often cannot."""

    def __post_init__(self) -> None:
        self.what = self.rows.what
        self.batch_size = drawn_batch_size(self.rows.batch_size, self.draws, self.at_once)
        self._chosen = spread_rows(len(self.rows), self.num_chosen)
        self._drawn: dict[tuple[bytes, bytes], Batch] = {}
        """Batches of the same train rows with drawn labels, by the numbers of the rows and of the draws."""

    def numbers(self, rows: RowNumbers) -> RowNumbers:
        """Return the train rows of some drawn samples."""
        group, size, position = self._places(rows)
        return self._chosen[group * self.at_once + position % size]

    def _places(self, rows: RowNumbers) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the groups of some drawn samples, how many train rows each has, and the positions in the groups."""
        group, position = np.divmod(rows, self.at_once * self.draws)
        return group, np.minimum(self.at_once, len(self._chosen) - group * self.at_once), position

    def batches(self, plan: Iterable[RowNumbers]) -> Iterator[tuple[RowNumbers, Batch]]:
        """Yield every list of rows in the plan with its batch; labels are those of the data."""
        drawn: deque[list[RowNumbers]] = deque()

        def train_rows() -> Iterator[RowNumbers]:
            for _, same in itertools.groupby(plan, lambda wanted: self.numbers(wanted).tobytes()):
                drawn.append(list(same))
                yield self.numbers(drawn[-1][0])

        # A plan that is a list stays a list, so that one batch starts no worker.
        loaded = self.rows.batches([*train_rows()] if isinstance(plan, list) else train_rows())
        for _, batch in loaded:
            for wanted in drawn.popleft():
                yield wanted, batch

    @torch.no_grad()
    def prepared(self, batch: Batch, rows: RowNumbers) -> Batch:
        """Return the batch with labels drawn from the model.

        If the next batches have the same train rows, their labels are drawn too, with the same pass of the model.
        """
        numbers, (_, size, position) = self.numbers(rows), self._places(rows)
        draws = position // size
        key = numbers.tobytes(), draws.tobytes()
        if key in self._drawn:
            return self._drawn.pop(key)
        call, step = _RepeatedCall(self.model), len(rows) // int(size[0])
        repeats = self.draws_ahead and position[0] % size[0] == 0 and len(rows) == step * size[0]
        self._drawn.clear()
        for ahead in range(0, self.draws - int(draws.max()) if repeats else 1, max(step, 1)):
            noise = row_noise(numbers, seed=self.seed, draw=draws + ahead)
            self._drawn[key[0], (draws + ahead).tobytes()] = self._labelled(call, batch, noise)
        return self._drawn.pop(key)

    def _labelled(self, call: ModelCall, batch: Batch, noise: UniformNoise) -> Batch:
        """Return a batch with drawn labels, whose other tensors are those of ``batch``; a task may write to its own."""
        copies: dict[int, tuple[Tensor, Tensor, list[int] | None]] = {}

        def copied(tensor: Tensor) -> Tensor:
            copy = tensor.clone()
            copies[id(copy)] = copy, tensor, _versions(copy)
            return copy

        def restored(tensor: Tensor) -> Tensor:
            _, original, version = copies.get(id(tensor), (tensor, tensor, None))
            return tensor if version is None or _versions(tensor) != version else original

        with passes_undone(self.model):
            return map_tensors(restored, self.task.sample_labels(call, map_tensors(copied, batch), noise))


class _RepeatedCall(ModelCall):
    """Calls a model; another call with equal inputs returns the same outputs, if nothing has written to them."""

    _last: tuple[list[Any], Any, list[Any], Any, list[int]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        if self._last is not None:
            last, before, state, outputs, versions = self._last
            is_written = _versions(outputs) != versions or list(map(_state_of, last)) != state
            if structure == before and not is_written and all(map(_is_same, leaves, last)):
                return outputs
        outputs = super().__call__(*args, **kwargs)
        output_versions = _versions(outputs)
        state = list(map(_state_of, leaves))
        self._last = None if output_versions is None else (leaves, structure, state, outputs, output_versions)
        return outputs


def _versions(outputs: Any) -> list[int] | None:
    """Return numbers that change with the values of a model's outputs; ``None`` if something else may hold values."""
    leaves = [leaf for leaf in tree_flatten(outputs)[0] if leaf is not None]
    is_known = all(isinstance(leaf, Tensor) and not leaf.is_inference() for leaf in leaves)
    return [leaf._version for leaf in leaves] if is_known else None


def _state_of(value: Any) -> Any:
    """Return what changes with an argument of a model; it equals nothing if that cannot be known."""
    if isinstance(value, Tensor):
        return object() if value.is_inference() else value._version
    return value if value is None or isinstance(value, bool | int | float | str) else object()


def _is_same(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other
    return one is other or (one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other))
