"""Rows of a dataset: an index is an identity, and exactly the rows asked for are loaded."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
)

from trak_lite import Attributor
from trak_lite.data import datasets
from trak_lite.data.datasets import Rows
from trak_lite.errors import InvalidInputError


class Counting(Dataset[tuple[Tensor, Tensor]]):
    """Ten samples that remember which of them were loaded."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.loaded.append(index)
        return torch.tensor([float(index)]), torch.tensor(index % 3)


def plan(*rows: list[int]) -> list[np.ndarray]:
    return [np.array(part) for part in rows]


@pytest.mark.quick
def test_only_planned_rows_are_loaded_and_in_order() -> None:
    data = Counting()

    batches = list(Rows(data).batches(plan([7, 8], [2])))

    assert data.loaded == [7, 8, 2]
    assert [rows.tolist() for rows, _ in batches] == [[7, 8], [2]]
    assert [batch[0].flatten().tolist() for _, batch in batches] == [[7.0, 8.0], [2.0]]


@pytest.mark.quick
def test_a_loader_lends_its_dataset_collation_and_batch_size_and_not_its_order() -> None:
    loader = DataLoader(
        Counting(), batch_size=4, collate_fn=lambda samples: {"x": torch.stack([s[0] for s in samples])}
    )

    rows = Rows(loader)

    assert rows.batch_size == 4
    ((_, batch),) = rows.batches(plan([9, 1]))
    assert batch["x"].flatten().tolist() == [9.0, 1.0]


@pytest.mark.quick
def test_workers_of_a_loader_are_used_and_give_the_same_rows() -> None:
    rows = Rows(DataLoader(TensorDataset(torch.arange(10.0)), batch_size=4, num_workers=1))

    assert [batch[0].tolist() for _, batch in rows.batches(plan([3, 4], [9]))] == [[3.0, 4.0], [9.0]]


@pytest.mark.quick
def test_a_loader_keeps_what_it_says_of_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[DataLoader[Any]] = []

    class Recorded(DataLoader[Any]):
        def __iter__(self) -> Any:
            made.append(self)
            return super().__iter__()

    monkeypatch.setattr(datasets, "DataLoader", Recorded)
    given = {
        "num_workers": 1,
        "prefetch_factor": 3,
        "multiprocessing_context": "fork",
        "timeout": 60,
    }
    rows = Rows(Recorded(Counting(), batch_size=4, persistent_workers=True, in_order=False, **given))
    several = [batch[0].flatten().tolist() for _, batch in rows.batches(plan([3, 4], [9]))]
    (one,) = [batch[0].flatten().tolist() for _, batch in rows.batches(plan([3]))]

    assert (several, one) == ([[3.0, 4.0], [9.0]], [3.0])
    found = {name: getattr(made[0], name) for name in given}
    assert found == {**given, "multiprocessing_context": multiprocessing.get_context("fork")}
    assert (made[0].in_order, made[0].persistent_workers, made[0].pin_memory) == (True, False, False)
    assert made[1].num_workers == 0


@pytest.mark.quick
def test_indices_select_and_order_rows() -> None:
    rows = Rows(DataLoader(Counting(), shuffle=True, drop_last=True), indices=[5, 0, 7])

    assert len(rows) == 3
    ((_, batch),) = rows.batches(plan([0, 2]))
    assert batch[0].flatten().tolist() == [5.0, 7.0]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            DataLoader(Counting(), shuffle=True),
            "does not read the dataset in order.*RandomSampler.*shuffle=False",
        ),
        (DataLoader(Counting(), sampler=RandomSampler(range(10))), "does not read the dataset in order"),
        (DataLoader(Counting(), sampler=SequentialSampler(range(5))), "does not read the dataset in order"),
        (DataLoader(Counting(), batch_size=4, drop_last=True), "drop_last=True and would leave rows out"),
        (DataLoader(Counting(), batch_size=None), "batching switched off"),
        (TensorDataset(torch.empty(0, 2)), "No rows in the dataset"),
        ((torch.ones(3), torch.ones(3)), "tuple of tensors.*TensorDataset"),
        (torch.ones(3), "Tensor of tensors.*TensorDataset"),
        (3, "int without __getitem__ and __len__"),
    ],
    ids=[
        "shuffling",
        "sampler",
        "sampler of others",
        "drop_last",
        "no batching",
        "empty",
        "tuple",
        "tensor",
        "number",
    ],
)
def test_data_without_stable_rows_is_refused(data: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Rows(data)


def test_an_iterable_dataset_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self):
            return iter(range(3))

    with pytest.raises(InvalidInputError, match="IterableDataset, whose rows have no index"):
        Rows(Stream())


@pytest.mark.parametrize("indices", [[0, 10], [-1], [[0, 1]], [0.5]])
def test_indices_outside_the_dataset_are_refused(indices: list[Any]) -> None:
    with pytest.raises(InvalidInputError, match="indices"):
        Rows(Counting(), indices=indices)


def test_identity_tells_other_samples_other_order_and_other_length_apart() -> None:
    values = torch.arange(10.0)

    def identity(tensor: Tensor, indices: list[int] | None = None) -> dict[str, Any]:
        return Rows(TensorDataset(tensor), indices=indices).identity()

    changed = values.clone()
    changed[-1] += 1
    found = [
        identity(values),
        identity(changed),
        identity(values[:9]),
        identity(values, [1, 0, *range(2, 10)]),
        identity(values.double()),
    ]
    assert identity(values.clone()) == found[0]
    assert all(found[i] != found[j] for i in range(5) for j in range(i))


def test_a_name_for_the_data_spares_loading_any_row() -> None:
    data = Counting()

    identity = Rows(data, name="digits, first ten").identity()

    assert data.loaded == []
    assert identity["id"] == "digits, first ten"


@dataclass
class Sample:
    text: str
    pixels: np.ndarray


def test_samples_of_many_kinds_can_be_told_apart() -> None:
    def one(text: str = "a", pixel: int = 1, mapping: dict[str, Any] | None = None) -> dict[str, Any]:
        return Rows(
            [(Sample(text, np.array([pixel], dtype=np.uint16)), mapping or {"k": [1, None]})]
        ).identity()

    assert one() == one()
    assert len({str(one()), str(one(text="b")), str(one(pixel=2)), str(one(mapping={"k": [2, None]}))}) == 4


def test_samples_that_cannot_be_told_apart_ask_for_a_name() -> None:
    with pytest.raises(InvalidInputError, match=r"Cannot compute a digest of a object.*Rows\(data, name="):
        Rows([object()]).identity()


class Exhausted(Counting):
    """Ten samples of which the one in place 7 raises."""

    def __init__(self, error: type[BaseException] = StopIteration) -> None:
        super().__init__()
        self.error = error

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 7:
            raise self.error
        return super().__getitem__(index)


class ExhaustedBatches(Exhausted):
    """The same, of a dataset that loads a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return [self[index] for index in indices]


def exhausted_collation(samples: list[tuple[Tensor, Tensor]]) -> Tensor:
    return next(sample[1] for sample in samples if sample[0] > 8)


def exhausted_worker(worker: int) -> None:
    raise StopIteration


@pytest.mark.parametrize(
    ("loader", "named"),
    [
        (DataLoader(Exhausted()), "loading sample 7 of the dataset"),
        (DataLoader(Exhausted(), num_workers=1), "loading sample 7 of the dataset"),
        (DataLoader(ExhaustedBatches()), "loading samples 6, 7, 8 of the dataset"),
        (DataLoader(Counting(), collate_fn=exhausted_collation), "loading samples 6, 7, 8 of the dataset"),
    ],
    ids=["sample", "in a worker", "batch of samples", "collation"],
)
def test_the_end_of_an_iterator_inside_a_dataset_is_not_the_end_of_the_data(
    loader: DataLoader[Any], named: str
) -> None:
    # torch's loader hands a StopIteration on, and a for loop over the loader ends there in silence.
    with pytest.raises(InvalidInputError, match=named):
        list(Rows(loader).batches(iter(plan([6, 7, 8]))))


def test_a_run_over_such_a_dataset_ends_at_the_sample() -> None:
    # Whether all rows are there decides how long featurize goes on: it loaded samples for ever.
    attributor = Attributor(nn.Linear(1, 3), "image_classification", None, proj_dim=4, progress=False)

    with pytest.raises(InvalidInputError, match="loading sample 7 of the train data"):
        attributor.featurize(Rows(Exhausted(), name="ten samples", batch_size=4))


def test_the_end_of_an_iterator_where_a_worker_starts_is_named() -> None:
    loader = DataLoader(Counting(), num_workers=1, worker_init_fn=exhausted_worker)

    with pytest.raises(InvalidInputError, match="a worker was prepared to load the dataset"):
        list(Rows(loader).batches(plan([6], [7])))


def test_the_end_of_an_iterator_is_named_where_samples_are_probed() -> None:
    with pytest.raises(InvalidInputError, match="loading sample 7 of the targets"):
        Rows(Exhausted(), what="the targets").identity()


@pytest.mark.parametrize("error", [IndexError, GeneratorExit, KeyboardInterrupt, KeyError, OSError])
def test_other_errors_of_a_dataset_are_raised_as_they_are(error: type[BaseException]) -> None:
    with pytest.raises(error) as raised:
        list(Rows(Exhausted(error)).batches(iter(plan([6, 7, 8]))))

    assert isinstance(raised.value, Exception) == (
        getattr(raised.value, "__notes__", []) == ["Raised while loading sample 7 of the dataset."]
    )


def test_samples_of_other_lengths_name_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match="equal size") as raised:
        list(Rows([torch.zeros(2), torch.zeros(3)]).batches([np.arange(2)]))

    assert "a collate function that pads" in raised.value.__notes__[1]


@pytest.mark.parametrize("error", [IndexError, KeyError])
def test_other_errors_in_a_worker_name_the_sample(error: type[BaseException]) -> None:
    rows = Rows(DataLoader(Exhausted(error), num_workers=1))

    with pytest.raises(error, match="loading sample 7 of the dataset"):
        list(rows.batches(iter(plan([6, 7, 8]))))


def test_a_worker_that_ends_inside_a_dataset_ends_the_run() -> None:
    rows = Rows(DataLoader(Exhausted(KeyboardInterrupt), num_workers=1))

    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(rows.batches(iter(plan([6, 7, 8]))))


def name_the_dataset(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.opened_by = worker


class Opened(Counting):
    """A dataset that each worker prepares for itself."""

    opened_by = -1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return torch.tensor(float(self.opened_by)), torch.tensor(index)


def test_a_worker_finds_the_users_dataset_in_its_info() -> None:
    loader = DataLoader(Opened(), num_workers=1, worker_init_fn=name_the_dataset)

    batches = list(Rows(loader).batches(plan([3], [4, 5])))

    assert [batch[0].tolist() for _, batch in batches] == [[0.0], [0.0, 0.0]]
