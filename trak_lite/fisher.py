r"""The Fisher information of a checkpoint in the space of its features: a kernel for losses of many outputs.

The curvature w of a sample's loss as a function of f alone is all there is to know where the model predicts one label
per sample. A language model predicts one per token: the gradients of the tokens are added up in f, and no weight of the
sum gives back the curvature :math:`\sum_t \nabla f_t (\cdot) \nabla f_t^\top` that each of them has. Labels that
the model draws itself do: :math:`E[g g^\top]` of the gradient g of their log-likelihood is the Fisher information,
which for these losses is the Gauss-Newton matrix (Martens, arXiv:1412.1193, section 9), as the tokens' labels are
independent given the text. So some thousands of these gradients are projected as the train rows are, and their gram
matrix is kept as a derived array of the store (where that is in an object store: on the machine that fitted it); the
gradients themselves are not.

Shapes: N train rows, K feature width, k columns of one segment.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trak_lite._batches import move_batch
from trak_lite._progress import progress_bar
from trak_lite._validate import positive_int
from trak_lite.datasets import Rows, evenly_spread
from trak_lite.diagnosis import refuse_non_finite
from trak_lite.errors import InvalidInputError, ReadOnlyStoreError, StateError
from trak_lite.gradient_computers import AbstractGradientComputer
from trak_lite.kronecker import row_noise
from trak_lite.modelout_functions import AbstractModelOutput, LossModelOutput, ModelCall
from trak_lite.pipeline import compute_features
from trak_lite.projectors import AbstractProjector
from trak_lite.scoring import accumulation_dtype, gram
from trak_lite.store import AbstractFeatureStore, Manifest
from trak_lite.types import Batch, FeatureLayout

__all__ = ["FisherFits", "FisherSettings", "fisher_task", "split_squares"]

_RECORD = "fisher/record"
_VERSION = 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FisherSettings:
    """How closely the Fisher information is estimated.

    Example:
        >>> FisherSettings().num_samples(FeatureLayout.joint(512))
        2048
    """

    samples_per_feature: int = 4
    """Samples with labels drawn by the model, for every feature of the widest segment. A gram matrix of k features
    needs several times k of them, however many train rows there are: they are drawn for rows evenly spread, and
    several times for each where rows are few. On the language model of ``benchmarks/lds_digits.py`` 8 gave .698 where 4
    gave .694."""
    max_draws: int = 32
    """Labels drawn for one row at most: of few rows, more labels tell little more."""
    seed: int = 0
    """Seed of the draws, which depend on it and on a row's number alone."""

    def __post_init__(self) -> None:
        """Refuse values that nothing can be fitted with."""
        positive_int(samples_per_feature=self.samples_per_feature)
        positive_int(max_draws=self.max_draws)

    def num_samples(self, layout: FeatureLayout) -> int:
        """Return how many samples are to be drawn, where rows are enough."""
        return self.samples_per_feature * max(segment.width for segment in layout.segments)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return asdict(self)


def fisher_task(task: AbstractModelOutput) -> AbstractModelOutput:
    """Return the task whose output has the gradient of the log-likelihood.

    Raises:
        InvalidInputError: If the task cannot draw labels.
    """
    if not task.can_sample:
        raise InvalidInputError(
            f"kernel='fisher' draws labels from the model, and {type(task).__name__} does not say how they are "
            "distributed. Use kernel='curvature' or 'trak', or define sample_labels."
        )
    return LossModelOutput(task)


@final
class FisherFits:
    """The gram matrices of one store's checkpoints: all of the same settings."""

    def __init__(self, store: AbstractFeatureStore) -> None:
        """Hold where they are kept."""
        self._store = store

    def begin(self, settings: FisherSettings) -> None:
        """Make these the settings of the store's fits; fits of others count as absent from then on.

        Raises:
            ReadOnlyStoreError: If the store was opened for reading.
        """
        if not self._store.writable:
            raise self._not_writable()
        text = json.dumps({"version": _VERSION, **settings.to_json()}, sort_keys=True).encode()
        self._store.cache(_RECORD, "record", np.frombuffer(text, dtype=np.uint8))

    def is_begun(self) -> bool:
        """Whether there are settings to fit with."""
        return self._store.cached(_RECORD, "record") is not None

    def record(self) -> dict[str, Any]:
        """Return what the fits were made with, as JSON values.

        Raises:
            StateError: If there is no fit.
        """
        found = self._store.cached(_RECORD, "record")
        if found is None:
            raise StateError(
                "No Fisher information was fitted on this machine, which kernel='fisher' needs. Call "
                "fit_curvature(train_data, settings=trak_lite.fisher.FisherSettings()) first."
            )
        record: dict[str, Any] = json.loads(np.asarray(found).tobytes())
        return record

    def has(self, path: str, layout: FeatureLayout) -> bool:
        """Whether the checkpoint with this table is fitted."""
        return self.is_begun() and self._flat(path, layout) is not None

    def grams(self, path: str, layout: FeatureLayout, *, device: torch.device) -> list[Tensor]:
        """Return the gram matrix of one checkpoint, segment by segment.

        Args:
            path: Table of its train rows.
            layout: Segments of the stored rows.
            device: Where to put them.

        Raises:
            StateError: If it was not fitted with these settings and segments, or train rows were appended since.
        """
        record, flat = self.record(), self._flat(path, layout)
        if flat is None:
            raise StateError(
                f"The Fisher information of {path} was not fitted with {record} on the train rows that there are by "
                "now. Call fit_curvature(train_data, settings=FisherSettings(...)) again."
            )
        matrices = split_squares(flat, layout, device=device)
        return [matrix.to(accumulation_dtype(device)) for matrix in matrices]

    def fit(
        self,
        path: str,
        task: AbstractModelOutput,
        computer: AbstractGradientComputer,
        projector: AbstractProjector,
        rows: Rows,
        *,
        layout: FeatureLayout,
        model_id: int,
        device: torch.device,
        label: str,
        progress: bool | None,
    ) -> None:
        """Fit the checkpoint that the model holds.

        Args:
            path: Table of its train rows.
            task: Draws the labels.
            computer: Gives the gradients of :func:`fisher_task`.
            projector: What the train rows were projected with.
            rows: The train rows.
            layout: Segments of the stored rows.
            model_id: The checkpoint's number, which the projection depends on.
            device: Where the model is.
            label: What the progress bar is called.
            progress: Show the bar; ``None`` shows it on a terminal only.

        Raises:
            NonFiniteError: If a gradient is NaN or infinite; names the rows.
            ReadOnlyStoreError: If the store was opened for reading.
        """
        if not self._store.writable:
            raise self._not_writable()
        record = self.record()
        known = FisherSettings().to_json()
        settings = FisherSettings(**{name: value for name, value in record.items() if name in known})
        wanted = evenly_spread(len(rows), settings.num_samples(layout))
        draws = min(math.ceil(settings.num_samples(layout) / len(wanted)), settings.max_draws)
        plan = np.split(wanted, range(rows.batch_size, len(wanted), rows.batch_size)) * draws

        def features() -> Iterator[Tensor]:
            seen = 0
            for numbers, batch in rows.batches(plan):
                drawn = _redrawn(
                    task, computer, move_batch(batch, device), numbers, settings.seed, seen // len(wanted)
                )
                seen += len(numbers)
                block, terms = compute_features(
                    computer, projector, drawn, model_id=model_id, rows=numbers, what=rows.what
                )
                refuse_non_finite(block, terms, numbers, rows.what, computer, drawn)
                bar.update(len(numbers))
                yield block

        with progress_bar(draws * len(wanted), label=label, progress=progress) as bar:
            grams = gram(features(), layout=layout, exact=False)
        scale = len(rows) / (draws * len(wanted))  # a sum over the train rows
        # float32 holds an estimate from samples well below its own error, in half the room
        flat = np.concatenate([(scale * matrix).float().cpu().numpy().reshape(-1) for matrix in grams])
        self._store.cache(_name(path), self._key(path, layout), flat)

    def _not_writable(self) -> ReadOnlyStoreError:
        return ReadOnlyStoreError(
            f"The store at {self._store.path} was opened for reading, so a fit could not be kept. Make it writable."
        )

    def _flat(self, path: str, layout: FeatureLayout) -> NDArray[Any] | None:
        return self._store.cached(_name(path), self._key(path, layout))

    def _key(self, path: str, layout: FeatureLayout) -> str:
        found: Mapping[str, Any] = {
            **self.record(),
            "dataset": self._store.manifest.fingerprint.get("dataset", {}),
            "layout": layout.to_json(),
            "weights": self._store.open_table(path).spec.fingerprint["weights"],
        }
        return Manifest(found).digest()


def _name(path: str) -> str:
    return f"fisher-{path.replace('/', '-')}"


@torch.no_grad()
def _redrawn(
    task: AbstractModelOutput,
    computer: AbstractGradientComputer,
    batch: Batch,
    rows: NDArray[np.int64],
    seed: int,
    draw: int,
) -> Batch:
    noise = row_noise(rows, seed=seed, draw=draw)
    return task.sample_labels(ModelCall(computer.model), batch, noise)


def split_squares(flat: NDArray[Any], layout: FeatureLayout, *, device: torch.device) -> list[Tensor]:
    """Return the square matrices of all segments that follow each other in one array."""
    sizes = [segment.width**2 for segment in layout.segments]
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return [
        torch.from_numpy(part.reshape(segment.width, segment.width).copy()).to(device)
        for part, segment in zip(parts, layout.segments, strict=True)
    ]
