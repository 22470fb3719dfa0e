"""Rows of a dataset: an index is an identity, and exactly the rows asked for are loaded."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import tiny_runs
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data.sampler import RandomSampler, SequentialSampler

from trak_lite import Attributor, Rows
from trak_lite.errors import InvalidInputError


class Counting(tiny_runs.Counting):
    """Ten samples that remember which of them were loaded."""

    def __init__(self):
        super().__init__(TensorDataset(torch.arange(10.0)[:, None], torch.arange(10) % 3))


def plan(*rows):
    return [np.array(part) for part in rows]


def inputs(rows, *parts):
    return [batch[0].flatten().tolist() for _, batch in rows.batches(plan(*parts))]


@pytest.mark.quick
def test_only_planned_rows_are_loaded_and_in_order():
    data = Counting()
    batches = list(Rows(data).batches(plan([7, 8], [2])))
    assert data.loaded == [7, 8, 2]
    assert [rows.tolist() for rows, _ in batches] == [[7, 8], [2]]
    assert [batch[0].flatten().tolist() for _, batch in batches] == [[7.0, 8.0], [2.0]]
    rows = Rows(DataLoader(Counting(), shuffle=True, drop_last=True), indices=[5, 0, 7])
    assert len(rows) == 3
    assert inputs(rows, [0, 2]) == [[5.0, 7.0]]
    assert len(Rows(DataLoader(Counting(), sampler=range(10)))) == 10


@pytest.mark.quick
def test_a_loader_keeps_what_it_says_of_its_workers(monkeypatch):
    """They give the same rows; one batch is worth no worker."""
    made = []
    start = DataLoader.__iter__

    def recorded(loader):
        made.append(loader)
        return start(loader)

    monkeypatch.setattr(DataLoader, "__iter__", recorded)
    given = {"num_workers": 1, "prefetch_factor": 3, "multiprocessing_context": "fork", "timeout": 60}
    rows = Rows(DataLoader(Counting(), batch_size=4, persistent_workers=True, in_order=False, **given))
    assert inputs(rows, [3, 4], [9]) == [[3.0, 4.0], [9.0]]
    assert inputs(rows, [3]) == [[3.0]]
    found = {name: getattr(made[0], name) for name in given}
    assert found == {**given, "multiprocessing_context": multiprocessing.get_context("fork")}
    assert (made[0].in_order, made[0].persistent_workers, made[0].pin_memory) == (True, False, False)
    assert made[1].num_workers == 0


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(3))


@dataclass
class Sample:
    text: str
    pixels: np.ndarray


class Backwards(SequentialSampler):
    def __iter__(self):
        return iter(range(len(self.data_source) - 1, -1, -1))


NO_ORDER = "does not read the dataset in order"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("message", "data"),
    [
        (f"{NO_ORDER}.*RandomSampler.*shuffle=False", DataLoader(Counting(), shuffle=True)),
        (NO_ORDER, DataLoader(Counting(), sampler=RandomSampler(range(10)))),
        (NO_ORDER, DataLoader(Counting(), sampler=SequentialSampler(range(5)))),
        (f"{NO_ORDER}.*Backwards", DataLoader(Counting(), sampler=Backwards(range(10)))),
        (NO_ORDER, DataLoader(Counting(), sampler=range(9, -1, -1))),
        (NO_ORDER, DataLoader(Counting(), sampler=range(9))),
        ("drop_last=True and would leave rows out", DataLoader(Counting(), batch_size=4, drop_last=True)),
        ("batching switched off", DataLoader(Counting(), batch_size=None)),
        ("No rows in the dataset", TensorDataset(torch.empty(0, 2))),
        ("tuple of tensors.*TensorDataset", (torch.ones(3), torch.ones(3))),
        ("Tensor of tensors.*TensorDataset", torch.ones(3)),
        (
            r"dict with the keys 'train', 'test'.*pass one, such as data\['train'\]",
            {"train": range(3), "test": range(2)},
        ),
        (
            r"dict of tensors.*TensorDataset.*single sample, put it into a list: \[sample\]",
            {"ids": torch.ones(3)},
        ),
        ("dict of tensors.*TensorDataset.*single sample", {"input_ids": [1, 2], "labels": [1, 2]}),
        ("int without __getitem__ and __len__", 3),
        ("IterableDataset, whose rows have no index", Stream()),
        ("IterableDataset, whose rows have no index", DataLoader(Stream(), batch_size=2)),
    ],
)
def test_data_without_stable_rows_is_refused(data, message):
    with pytest.raises(InvalidInputError, match=message):
        Rows(data)


@pytest.mark.parametrize("indices", [[0, 10], [-1], [[0, 1]], [0.5]])
def test_rows_that_do_not_exist_are_refused(indices):
    with pytest.raises(InvalidInputError, match="indices"):
        Rows(Counting(), indices=indices)


def test_identity_tells_other_samples_other_order_and_other_length_apart():
    def identity(tensor, **given):
        return Rows(TensorDataset(tensor), **given).identity()

    def one(text="a", pixel=1, mapping=None):
        pixels = np.array([pixel], dtype=np.uint16)
        return Rows([(Sample(text, pixels), mapping or {"k": [1, None]})]).identity()

    values = torch.arange(10.0)
    changed = values.clone()
    changed[-1] += 1
    found = [identity(tensor) for tensor in (values, changed, values[:9], values.double())]
    found += [identity(values, indices=[1, 0, *range(2, 10)]), one(text="b"), one(pixel=2)]
    found += [one(mapping={"k": [2, None]}), one()]
    assert (identity(values.clone()), one()) == (found[0], found[-1])
    assert identity(values, indices=range(9))["tensors"] == found[0]["tensors"]  # as stores have it
    z = torch.complex(values, values).conj()
    assert (identity(z), identity(z.imag)) == (identity(z.resolve_conj()), identity(-values))
    assert all(found[i] != found[j] for i in range(len(found)) for j in range(i))


def test_sparse_samples_are_told_apart_and_may_be_made_dense_by_collate():
    def identity(*scales, form=Tensor.to_sparse):
        samples = [form(torch.eye(3) * scale) for scale in scales]
        rows = Rows(samples, collate=lambda some: torch.stack([sample.to_dense() for sample in some]))
        (_, batch), *_ = rows.batches(plan([0, 1]))
        assert torch.equal(batch, torch.stack([torch.eye(3) * scale for scale in scales]))
        return str(rows.identity())

    assert identity(1, 2) == identity(1, 2)
    assert len({identity(1, 2), identity(1, 3), identity(1, 2, form=Tensor.clone)}) == 3


def test_a_name_for_the_data_spares_loading_any_row():
    data = Counting()
    assert Rows(data, name="digits, first ten").identity()["id"] == "digits, first ten"
    assert data.loaded == []
    with pytest.raises(InvalidInputError, match=r"Cannot compute a digest of a object.*Rows\(data, name="):
        Rows([object()]).identity()


class Graph:
    """Has pairs of names and tensors as entries, like ``Data`` of torch_geometric."""

    def __init__(self, size):
        self.x, self.y = torch.ones(size, 4), torch.tensor([size % 2])

    def __iter__(self):
        return iter([("x", self.x), ("y", self.y)])

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return list(self)[index]


def test_samples_whose_entries_make_no_array_need_a_name_for_the_data():
    graphs = [Graph(size) for size in (2, 3)]
    with pytest.raises(InvalidInputError, match=r"Cannot compute a digest of a Graph.*Rows\(data, name="):
        Rows(graphs).identity()
    rows = Rows(graphs, name="graphs", collate=lambda some: torch.stack([graph.x.sum(0) for graph in some]))
    assert rows.identity()["id"] == "graphs"
    ((_, batch),) = rows.batches(plan([0, 1]))
    assert torch.equal(batch, torch.tensor([[2.0] * 4, [3.0] * 4]))


class Exhausted(Counting):
    def __init__(self, error=StopIteration):
        super().__init__()
        self.error = error

    def __getitem__(self, index):
        if index == 7:
            raise self.error
        return super().__getitem__(index)


class ExhaustedBatches(Exhausted):
    """The same, of a dataset that loads a whole batch at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def exhausted_collation(samples):
    return next(sample[1] for sample in samples if sample[0] > 8)


def exhausted_worker(worker):
    raise StopIteration


PREPARED = "a worker was prepared to load the dataset"
ONE, SEVERAL = "loading sample 7 of the dataset", "loading samples 6, 7, 8 of the dataset"


@pytest.mark.parametrize(
    ("loader", "error", "named"),
    [
        (DataLoader(Exhausted()), InvalidInputError, ONE),
        (DataLoader(Exhausted(), num_workers=1), InvalidInputError, ONE),
        (DataLoader(ExhaustedBatches()), InvalidInputError, SEVERAL),
        (DataLoader(Counting(), collate_fn=exhausted_collation), InvalidInputError, SEVERAL),
        (DataLoader(Counting(), num_workers=1, worker_init_fn=exhausted_worker), InvalidInputError, PREPARED),
        (DataLoader(Exhausted(IndexError), num_workers=1), IndexError, ONE),
        (DataLoader(Exhausted(KeyError), num_workers=1), KeyError, ONE),
        (DataLoader(Exhausted(KeyboardInterrupt), num_workers=1), RuntimeError, "exited unexpectedly"),
    ],
)
def test_an_error_inside_a_dataset_names_the_sample(loader, error, named, monkeypatch):
    """The end of an iterator too: torch's loader hands it on, and a for loop over the loader ends there in silence."""
    for waiting in (torch.utils.data._utils, torch.utils.data._utils.worker):  # 5 s, up to three times
        monkeypatch.setattr(waiting, "MP_STATUS_CHECK_INTERVAL", 0.2)
    get = torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(get, "__defaults__", (0.2,))
    before = set(multiprocessing.active_children())
    with pytest.raises(error, match=named) as raised:
        list(Rows(loader).batches(iter(plan([6, 7, 8], [9]))))
    assert raised.tb, "which holds the frames"
    assert set(multiprocessing.active_children()) <= before, (
        "workers that a collection would wait for, 5 s each"
    )


def test_an_error_outside_a_worker_names_the_sample_in_a_note_and_ends_a_run():
    """Whether all rows are there decides how long featurize goes on: it loaded samples for ever."""
    for error in (GeneratorExit, KeyboardInterrupt, OSError):
        with pytest.raises(error) as raised:
            list(Rows(Exhausted(error)).batches(iter(plan([6, 7, 8]))))
        notes = ["Raised while loading sample 7 of the dataset."] if error is OSError else []
        assert getattr(raised.value, "__notes__", []) == notes
    made = Attributor(nn.Linear(1, 3), "image_classification", None, proj_dim=4, progress=False)
    with pytest.raises(InvalidInputError, match="loading sample 7 of the train data"):
        made.featurize(Rows(Exhausted(), name="ten samples", batch_size=4))
    with pytest.raises(InvalidInputError, match="loading sample 7 of the targets"):
        Rows(Exhausted(), what="the targets").identity()


def test_a_collate_function_that_leaves_samples_out_names_the_first_that_it_cannot_collate_alone():
    some = [None if i == 5 else torch.zeros(2) for i in range(8)]
    kept = Rows(some, collate=lambda rows: torch.stack([row for row in rows if row is not None]))
    with pytest.raises(RuntimeError, match="non-empty") as raised:
        kept.identity()
    assert "collating sample 5 of the dataset alone" in raised.value.__notes__[0]


@pytest.mark.parametrize("other", [None, (torch.zeros(2), None)])
def test_a_sample_that_torch_cannot_collate_is_named(other):
    with pytest.raises(TypeError, match=r"found .*NoneType|dtype of NoneType") as raised:
        list(Rows([*4 * [(torch.zeros(2), 1)], other]).batches(iter([np.arange(5)])))
    assert "collating sample 4 of the dataset alone" in raised.value.__notes__[0]


@pytest.mark.parametrize("samples", [[torch.zeros(2), torch.zeros(3)], [{"ids": [1, 2]}, {"ids": [1, 2, 3]}]])
def test_samples_of_other_lengths_name_what_is_missing(samples):
    missing = r"collate=\.\.\., or a DataLoader with collate_fn=.*trak_lite\.pad_documents"
    for data in (
        samples,
        DataLoader(samples, batch_size=2),
        DataLoader(samples, batch_size=2, num_workers=1),
    ):
        with pytest.raises(InvalidInputError, match=f"samples 0, 1 of .* equal size.*{missing}"):
            list(Rows(data).batches(iter([np.arange(2)])))


class Opened(Counting):
    def __getitem__(self, index):
        assert get_worker_info().dataset is self
        return torch.tensor(float(self.opened_by)), torch.tensor(index)


def name_the_dataset(worker):
    get_worker_info().dataset.opened_by = worker


def test_a_worker_finds_the_users_dataset_in_its_info():
    rows = Rows(DataLoader(Opened(), num_workers=1, worker_init_fn=name_the_dataset))
    assert inputs(rows, [3], [4, 5]) == [[0.0], [0.0, 0.0]]


def with_shared(shared, samples):
    return {"x": torch.stack([sample[0] for sample in samples]), "shared": shared}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_are_read_where_the_default_device_has_no_values(num_workers):
    samples = [torch.ones(2, device="cpu") * number for number in range(4)]
    rows = Rows(DataLoader(samples, batch_size=2, num_workers=num_workers))
    with torch.device("meta"):
        found = [batch for _, batch in rows.moved(np.arange(4), torch.device("cpu"))]
    assert torch.equal(torch.cat(found), torch.stack(samples))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_tensor_that_all_samples_share_is_not_divided_among_as_many(num_workers):
    data = TensorDataset(torch.arange(12.0).reshape(6, 2))
    collate = partial(with_shared, torch.tensor([0.7, 0.2, 0.1]))
    rows = Rows(DataLoader(data, batch_size=3, collate_fn=collate, num_workers=num_workers))
    with pytest.raises(InvalidInputError, match=r"tensor of shape \(3,\).* all samples share it"):
        list(rows.batches(plan([0, 1, 2], [3, 4, 5])))


def boxes(count, size):
    return [(torch.randn(6), {"boxes": torch.rand(size, 4), "area": torch.rand(())}) for _ in range(count)]


def listed(samples, part=lambda boxes: boxes):
    return torch.stack([x for x, _ in samples]), [part(boxes) for _, boxes in samples]


def over_steps(samples):
    """Time first: as many tensors as the longest sample has steps, of which the first sample has one."""
    steps = max(int(n) for _, n in samples)
    return torch.stack([x for x, _ in samples]), [
        torch.stack([x[t] for x, _ in samples]) for t in range(steps)
    ]


PER_SAMPLE = {
    "dicts": (lambda boxes: boxes, r"batch\[1\] is a list"),
    "tensors": (lambda boxes: boxes["boxes"], r"batch\[1\] is a list"),
    "inside a dict": (lambda boxes: boxes, r"batch\['targets'\] is a list"),
}


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_a_list_with_the_tensors_of_each_sample_is_refused_if_each_has_as_many_rows_as_the_batch(name):
    part, said = PER_SAMPLE[name]

    def collate(samples):
        x, entries = listed(samples, part)
        return {"x": x, "targets": entries} if name == "inside a dict" else (x, entries)

    rows = Rows(boxes(8, 4), batch_size=4, collate=collate)
    with pytest.raises(InvalidInputError, match=f"{said} of 4 entries .*Pad and stack them in collate"):
        list(rows.batches(plan([0, 1, 2, 3], [4, 5, 6, 7])))


def test_a_list_of_tensors_over_all_samples_is_divided_whatever_its_length():
    samples = [(torch.randn(3), torch.tensor(n)) for n in (1, 3, 2)]
    ((_, (_, steps)),) = Rows(samples, collate=over_steps).batches(plan([0, 1, 2]))
    assert torch.equal(torch.stack(steps, 1), torch.stack([x for x, _ in samples]))
    pairs = [((torch.randn(2), torch.randn(2)), torch.tensor(i)) for i in range(2)]
    ((_, (columns, _)),) = Rows(pairs).batches(plan([0, 1]))
    assert [len(column) for column in columns] == [2, 2]
    numbers = Rows(boxes(3, 3), collate=lambda some: listed(some, lambda entry: entry["area"]))
    ((_, (_, areas)),) = numbers.batches(plan([0, 1, 2]))
    assert [area.shape for area in areas] == [()] * 3


def stacked(samples):
    return torch.stack([sample["x"] for sample in samples])


def several(samples):
    first, second, *_ = samples
    return stacked((first, second, *_))


UNCHANGED = {
    "pops": lambda samples: torch.stack([sample.pop("x") for sample in samples]),
    "squeezes": lambda samples: stacked(samples).squeeze(0),
    "takes several": several,
    "draws": lambda samples: stacked(samples) + torch.rand(1),
}


@pytest.mark.parametrize("collate", UNCHANGED.values(), ids=UNCHANGED)
def test_collate_functions_that_do_not_take_one_sample_alone_or_draw_are_as_they_are(collate):
    def samples():
        return [{"x": torch.full((2, 3), float(i))} for i in range(4)]

    torch.manual_seed(0)
    expected = [collate(samples()[:2]), collate(samples()[2:])]
    torch.manual_seed(0)
    rows = Rows(samples(), collate=collate, name="rows")
    found = [batch for _, batch in rows.batches(plan([0, 1], [2, 3]))]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def padded(samples):
    return torch.nn.utils.rnn.pad_sequence([sample["x"] for sample in samples], batch_first=True)


def by_length(samples, **how):
    return padded(sorted(samples, key=lambda sample: len(sample["x"]), **how))


def lengths(samples):
    return [len(sample["x"]) for sample in samples]


REORDERING = {
    "by length": lambda samples: {"x": by_length(samples, reverse=True)},
    "backwards": lambda samples: padded(samples[::-1]),
    "inputs alone": lambda samples: (by_length(samples), torch.tensor(lengths(samples))),
    "by text": lambda samples: (torch.ones(len(samples)), sorted("abcdefghi"[n] for n in lengths(samples))),
    "noisy": lambda samples: (padded(samples[::-1]), torch.rand(len(samples))),
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("collate", REORDERING.values(), ids=REORDERING)
def test_a_collate_function_that_reorders_its_samples_is_refused(collate, num_workers):
    samples = [{"x": torch.arange(float(length + 1))} for length in (7, 5, 1, 1, 3, 2)]
    samples[0]["x"][0] = torch.nan
    rows = Rows(DataLoader(samples, batch_size=3, collate_fn=collate, num_workers=num_workers), name="texts")
    with pytest.raises(InvalidInputError, match="changes the order of its samples"):
        list(rows.batches(plan([0, 1, 2], [3, 4, 5])))


def with_places(samples):
    boxes = [np.array([1.0, len(sample["x"])]) for sample in samples]
    count = len(samples)
    return padded(samples), torch.arange(count), torch.rand(count), [count] * count, boxes


def with_a_part_of_several(samples):
    """One sample alone has one part less, and the parts behind it are in other places."""
    labels = torch.arange(len(samples)).flip(0)
    return [padded(samples), *[labels] * (len(samples) > 1), torch.zeros(len(samples))]


@pytest.mark.parametrize("collate", [with_places, with_a_part_of_several])
def test_a_collate_function_may_number_draw_and_repeat(collate):
    """Entries of equal samples are equal, and what is drawn or counted is no entry of a sample alone."""
    samples = [{"x": torch.ones(2)} for _ in range(6)]
    torch.manual_seed(0)
    expected = collate(samples)
    torch.manual_seed(0)
    ((_, found),) = Rows(samples, collate=collate, name="texts").batches(plan(range(6)))
    torch.testing.assert_close(found[:3], expected[:3], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("layers", "num_rows", "loader_size", "expected"),
    [
        ([nn.Linear(4, 3)], 2048, None, 256),
        ([nn.Linear(4, 3)], 769, None, 256),
        ([nn.Linear(4, 3)], 768, None, 128),  # at least 4 batches
        ([nn.Linear(4, 3)], 96, None, 32),
        ([nn.Linear(4, 3)], 2048, 16, 16),
        ([nn.Linear(4, 400), nn.LayerNorm(400), nn.Linear(400, 500), nn.Linear(500, 3)], 2048, None, 128),
        ([nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 1), nn.Flatten(), nn.Linear(8, 3)], 512, None, 32),
    ],
)
def test_batches_of_perceptrons_are_larger_unless_a_size_is_given(layers, num_rows, loader_size, expected):
    model, seen = nn.Sequential(*layers), list[int]()
    model.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])))
    data = TensorDataset(torch.arange(4.0 * num_rows).reshape(num_rows, 4).cos(), torch.arange(num_rows) % 3)
    given = data if loader_size is None else DataLoader(data, batch_size=loader_size)
    Attributor(model, "image_classification", None, progress=False).featurize(given)
    assert max(seen) == expected
