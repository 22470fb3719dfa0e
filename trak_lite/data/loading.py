"""How samples are loaded and collated for torch's loader: exceptions name them, and their order is looked at."""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info

from trak_lite.core.devices import undisturbed
from trak_lite.data.batches import pads, parts_of
from trak_lite.data.column_marks import ColumnMarks
from trak_lite.errors import InvalidInputError, refuse_machine_failure, summary
from trak_lite.types import Batch

logger = logging.getLogger(__name__)

Collate: TypeAlias = Callable[[list[Any]], Batch]
"""Turns a list of samples into a batch."""
NUM_HELD = 8
"""Samples of the first loaded batch that are kept, and of some batches that are collated again."""


@dataclasses.dataclass(eq=False)
class Samples(Dataset[Any]):
    """Wraps the user's dataset and collate function for torch's loader; their exceptions name the samples."""

    _dataset: Any
    _collate: Collate
    _worker_init: Callable[[int], None] | None
    what: str
    _marks: ColumnMarks = dataclasses.field(default_factory=ColumnMarks)
    _num_batches: int = 0
    """Batches of several samples that the user's collate function made."""

    def __getitems__(self, indices: list[int]) -> Batch:
        fetch = getattr(self._dataset, "__getitems__", None)
        if fetch is None:
            samples = loaded(self._dataset, indices, self.what)
        else:
            with _naming(indices, self.what):
                samples = fetch(indices)
        with _naming(indices, self.what):
            copies = None
            if self._collate is not default_collate and len(samples) > 1:
                self._num_batches += 1
                if self._num_batches & (self._num_batches - 1) == 0:  # 1, 2, 4, ...
                    copies = _copied(samples)  # before the collate function may change them
            if copies is not None and self._reorders(copies):
                raise InvalidInputError(
                    f"The collate function of {self.what} changes the order of its samples: some entries of a batch "
                    "are those of other samples. Expected entry i to be made from sample i, because rows are numbered "
                    "by it. Do not sort or roll samples in the collate function: "
                    "nn.utils.rnn.pack_padded_sequence(..., enforce_sorted=False) takes lengths in any order."
                )
            try:
                batch = self._collate(samples)
            except (TypeError, RuntimeError):
                if self._collate is default_collate:  # the error need not name a sample that is or holds None
                    collated_alone(default_collate, samples, indices, self.what)
                raise
            return self._marks.marked(batch, lambda: self._collated(copies and copies[:1]))

    def _reorders(self, samples: list[Any]) -> bool:
        """Whether a batch of some samples has the entries of the samples collated alone in another order."""
        batches = [self._collated(samples), self._collated(samples, seed=1)]
        batches += [self._collated([sample]) for sample in samples]
        parts = [[*leaves, *sized] for leaves, sized in map(parts_of, batches)]
        count = len(samples)
        if len({len(some) for some in parts}) > 1:  # a part is left out for some
            return False
        try:
            for part, again, *alone in zip(*parts, strict=True):
                if len(part) != count or any(len(one) != 1 for one in alone):
                    return False
                if not _fits(part, again):
                    continue  # drawn anew
                fits = [[_fits(part[j : j + 1], one) for j in range(count)] for one in alone]
                matches = [*fits, *zip(*fits, strict=True)]
                # A part that numbers the places of a batch does not match the samples alone.
                if all(map(any, matches)) and not all(fits[i][i] for i in range(count)):
                    return True
        except Exception as error:  # values without equality, such as lists of arrays
            refuse_machine_failure(error)
            logger.debug("The order of a batch is not looked at: %s", error)
        return False

    def _collated(self, samples: list[Any] | None, seed: int = 0) -> Batch | None:
        """Return the batch of copies of some samples, if the collate function makes one."""
        try:
            with undisturbed(seed):  # collate functions may draw masks
                return None if samples is None else self._collate(copy.deepcopy(samples))
        except Exception as error:  # a user's function, which need not take so few samples
            refuse_machine_failure(error)
            logger.debug("Samples are not collated again: %s", error)
            return None

    def init_worker(self, worker: int) -> None:
        """Put the user's dataset into the worker info and run the user's ``worker_init_fn``."""
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", self._dataset)  # WorkerInfo is frozen and holds this wrapper
        if self._worker_init is not None:
            with _naming([], self.what):
                self._worker_init(worker)


def _fits(entries: Any, alone: Any) -> bool:
    """Whether entries of a batch are those of samples alone, padded or not."""
    if isinstance(entries, Tensor):
        is_dense = entries.layout == alone.layout == torch.strided and not entries.is_nested
        return is_dense and pads(entries, alone) is not None
    return np.array_equal(entries, alone) if isinstance(entries, np.ndarray) else list(entries) == list(alone)


def _copied(samples: Any) -> list[Any] | None:
    """Return copies of a few samples in a list; ``None`` if the dataset gave a batch, or a sample has no copy."""
    try:
        return copy.deepcopy(samples[:NUM_HELD]) if isinstance(samples, list) else None
    except Exception as error:
        refuse_machine_failure(error)
        logger.debug("Samples are not copied: %s", error)
        return None


def loaded(dataset: Any, indices: Sequence[int], what: str) -> list[Any]:
    """Return the samples of some indices; exceptions name the one that raised them."""
    samples = []
    for index in indices:
        with _naming([index], what):
            samples.append(dataset[index])
    return samples


def collated_alone(
    collate: Collate, samples: Sequence[Any], indices: Sequence[int], what: str
) -> list[Batch]:
    """Return the batches of single samples; an exception names the sample."""
    batches = []
    for index, sample in zip(indices, samples, strict=True):
        try:
            batches.append(collate([sample]))
        except Exception as error:
            error.add_note(
                f"Raised while collating sample {index} of {what} alone. Expected a collate function that makes a "
                "batch of any sample alone, and leaves no sample out: select rows by Rows(data, indices=...) instead."
            )
            raise
    return batches


@contextmanager
def _naming(indices: Sequence[int], what: str) -> Iterator[None]:
    """Add the sample numbers to exceptions raised while loading; turn ``StopIteration`` into ``InvalidInputError``.

    A ``for`` loop over a loader would treat a dataset's ``StopIteration`` as the end of the data.
    """
    samples = f"sample {indices[0]}" if len(indices) == 1 else f"samples {', '.join(map(str, indices))}"
    doing = f"loading {samples} of {what}" if indices else f"a worker was prepared to load {what}"
    try:
        yield
    except StopIteration as error:
        raise InvalidInputError(
            f"StopIteration was raised while {doing}. An exhausted next(...) in the dataset raises it: give next() "
            "a default, or raise an error that says what is missing."
        ) from error
    except Exception as error:
        # By torch's default collate function.
        is_ragged = re.search("(to be|be of) equal size", str(error)) and not isinstance(
            error, InvalidInputError
        )
        if len(indices) > 1 and is_ragged:
            raise InvalidInputError(
                f"The {samples} of {what} have different lengths ({summary(error):.200}). Expected a collate function "
                "that pads them: collate=..., or a DataLoader with collate_fn=... as data, which the functions of a "
                "recipe may return; trak_lite.pad_documents pads the tokens of texts."
            ) from error
        error.add_note(f"Raised while {doing}.")
        raise
