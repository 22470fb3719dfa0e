"""Documents of packed rows against documents that were never packed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import Counting
from torch import nn
from torch.utils.data import DataLoader

from trak_lite import Attributor, Documents, Rows, pad_documents
from trak_lite.errors import InvalidInputError, UnknownNameError
from trak_lite.modelout_functions import require_separate_documents

pytestmark = pytest.mark.quick
IGNORED = -100
BORDERS = ("seq_lengths", "cu_seqlens", "cu_seq_lens_q", "seq_idx", "position_ids")
LM = "causal_language_modeling"
KINDS = {
    "lists": list,
    "arrays": np.array,
    "tensors": torch.tensor,
    "batches of lists": lambda values: [values],
    "batches of tensors": lambda values: torch.tensor([values]),
}


def joined(parts):
    return [value for part in parts for value in part]


def pack(texts, borders, kind=list, padding=0):
    """A packed row with padding at its end, and a column that is not per token."""
    lengths = [len(text) for text in texts]
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    columns = {
        "seq_lengths": lengths,
        "cu_seqlens": torch.from_numpy(bounds),
        "cu_seq_lens_q": bounds.tolist(),
        "seq_idx": kind(joined([[i] * n for i, n in enumerate(lengths)]) + [-1] * padding),
        "position_ids": kind(joined([list(range(n)) for n in lengths]) + [0] * padding),
    }
    ids = joined(texts) + [0] * padding
    labels = joined([[IGNORED, *text[1:]] for text in texts if text]) + [IGNORED] * padding
    more = {borders: columns[borders], "max_length_q": 9, "source": "a"}
    return {"input_ids": kind(ids), "labels": kind(labels), **more}


def listed(sample):
    return {name: torch.as_tensor(values).tolist() for name, values in sample.items()}


@settings(deadline=None)
@given(
    rows=st.lists(
        st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=4), min_size=1, max_size=3
    ),
    borders=st.sampled_from(BORDERS),
    kind=st.sampled_from(list(KINDS)),
    padding=st.integers(0, 3),
)
def test_documents_are_the_texts_that_were_packed(rows, borders, kind, padding):
    rows = [[*texts, [7, 8]] for texts in rows]
    packed = [pack(texts, borders, KINDS[kind], padding) for texts in rows]
    counted = borders not in ("seq_idx", "position_ids")  # in these an empty text leaves no trace
    expected = []
    for row, texts in enumerate(rows):
        start = place = 0
        for text in texts:
            if len(text) > 1:
                expected.append((text, row, place, start, start + len(text)))
            place, start = place + (counted or len(text) > 0), start + len(text)
    documents = Documents(packed)
    found = [documents[i] for i in range(len(documents))]
    wanted = [{"input_ids": text, "labels": [IGNORED, *text[1:]]} for text, *_ in expected]
    assert [listed(sample) for sample in found] == wanted
    assert [type(sample["input_ids"]) for sample in found] == [type(KINDS[kind]([1])[0:])] * len(found)
    where = zip(documents.row, documents.place, documents.start, documents.stop, strict=True)
    assert list(where) == [tuple(place) for _, *place in expected]
    assert [[listed(sample) for sample in documents.__getitems__([i, 0])] for i in range(len(found))] == [
        [listed(sample), listed(found[0])] for sample in found
    ]


TEXTS = [[[5, 6, 7], [8, 9]], [[4, 3, 2, 1]], [[3, 3], [2, 2], [1, 1, 1]]]


def test_borders_are_found_once_and_a_batch_loads_each_packed_row_once():
    packed = Counting([pack(texts, "seq_lengths") for texts in TEXTS])
    documents = Documents(packed)
    assert packed.loaded == [0, 1, 2]
    packed.loaded.clear()
    rows = Rows(documents, collate=pad_documents)
    ((_, batch), (_, last)) = rows.batches([np.array([0, 1, 3, 4]), np.array([5])])
    assert packed.loaded == [0, 2, 2]
    found = {name: batch[name].tolist() for name in ("input_ids", "labels", "attention_mask")}
    assert found == {
        "input_ids": [[5, 6, 7], [8, 9, 0], [3, 3, 0], [2, 2, 0]],
        "labels": [[IGNORED, 6, 7], *([IGNORED, i, IGNORED] for i in (9, 3, 2))],
        "attention_mask": [[1, 1, 1], *[[1, 1, 0]] * 3],
    }
    assert last["attention_mask"].tolist() == [[1, 1, 1]]
    loader = DataLoader(documents, batch_size=4, collate_fn=pad_documents, num_workers=1)
    batches = Rows(loader).batches([np.arange(4), np.arange(4, 6)])
    assert [len(found["labels"]) for _, found in batches] == [4, 2]


def test_the_identity_is_that_of_the_documents():
    def identity(texts, borders="seq_lengths", **more):
        documents = Documents([pack(row, borders) for row in texts], **more)
        return Rows(documents, collate=pad_documents).identity()

    first = identity(TEXTS)
    assert identity(TEXTS) == first
    assert identity(TEXTS, "position_ids") == first  # the same texts, whatever their borders are called
    assert identity([[[5, 6], [7, 8, 9]], *TEXTS[1:]]) != first
    assert identity([TEXTS[0], [[4, 3, 2, 9]], TEXTS[2]]) != first
    assert identity(TEXTS[:2]) != first


def test_padding_is_no_part_of_a_document():
    mask = {"attention_mask": [0, 1, 1, 1, 1, 0, 0]}
    ids = {"input_ids": [0, 5, 6, 7, 8, 0, 0]}
    for borders in ({"position_ids": [0, 0, 1, 0, 1, 2, 3]}, {"seq_idx": [0, 0, 0, 1, 1, 1, 1]}):
        documents = Documents([{**ids, **mask, **borders}])
        assert [documents[i] for i in range(2)] == [{"input_ids": [5, 6]}, {"input_ids": [7, 8]}]
        assert documents.place.tolist() == [0, 1]
        assert documents.start.tolist() == [1, 3]
    ends_early = {"input_ids": torch.arange(7), "cu_seqlens": torch.tensor([0, 2, 5], dtype=torch.int32)}
    for marked in ({"labels": [0, 1, 2, 3, 4, IGNORED, IGNORED]}, {"attention_mask": torch.arange(7) < 5}):
        found = [sample["input_ids"].tolist() for sample in Documents([{**ends_early, **marked}])]
        assert found == [[0, 1], [2, 3, 4]]


def test_the_rest_of_a_text_that_was_cut_keeps_its_positions():
    """Over two packed rows: it is a document of its own. Within a row, positions that go on are one document."""
    whole = {"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 0, 1]}
    rest = {"input_ids": [9, 4, 3, 2], "position_ids": [2, 3, 0, 1]}
    assert [sample["input_ids"] for sample in Documents([whole, rest])] == [[5, 6], [7, 8], [9, 4], [3, 2]]
    assert [sample["position_ids"] for sample in Documents([whole, rest])] == [[0, 1], [0, 1], [2, 3], [0, 1]]
    assert [list(sample) for sample in Documents([whole])] == [["input_ids"]] * 2
    going_on = {"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 2, 3], "seq_lengths": [2, 2]}
    assert [sample["position_ids"] for sample in Documents([going_on])] == [[0, 1], [2, 3]]
    assert len(Documents([going_on], borders="position_ids")) == 1


def test_a_document_without_a_token_to_predict_is_left_out():
    labels = [IGNORED, IGNORED, 7, IGNORED, 9]
    row = {"input_ids": [5, 6, 7, 8, 9], "labels": labels, "seq_lengths": [2, 1, 0, 2]}
    documents = Documents([row])
    assert list(documents) == [{"input_ids": [8, 9], "labels": [IGNORED, 9]}]
    assert (documents.row[0], documents.place[0]) == (0, 3)
    assert [sample["input_ids"] for sample in Documents([row], shift=False)] == [[7], [8, 9]]


TWO = {"input_ids": [1, 2]}
THREE = {"input_ids": [1, 2, 3], "seq_lengths": [3]}


@pytest.mark.parametrize(
    ("message", "row"),
    [
        ("Packed row 1 is a dict with the columns.*featurize them as they are", TWO),
        ("Expected input_ids and seq_lengths", {"seq_lengths": [2]}),
        ("Packed row 1 is a list", [1, 2]),
        (r"Packed row 1: seq_lengths is \[2, 1\].*at most 2", {**TWO, "seq_lengths": [2, 1]}),
        ("lengths of documents", {**TWO, "seq_lengths": [-1, 2]}),
        (
            "Packed row 1: seq_lengths ends at token 1 of 2, and 1 tokens after it .*token 1.*or mark",
            {**TWO, "seq_lengths": [1]},
        ),
        ("cu_seqlens ends at token 1 of 2", {**TWO, "cu_seqlens": [0, 1], "labels": [IGNORED, 4]}),
        ("lengths of documents", {**TWO, "seq_lengths": [0.5, 1.5]}),
        ("begin with 0", {**TWO, "cu_seqlens": [1, 2]}),
        ("begin with 0", {**TWO, "cu_seqlens": []}),
        ("do not fall", {**TWO, "cu_seqlens": [0, 2, 1]}),
        ("end at most at 2", {**TWO, "cu_seqlens": [0, 3]}),
        ("2 integers, one per token", {**TWO, "seq_idx": [0]}),
        ("2 integers, one per token", {**TWO, "position_ids": torch.zeros(3, 2)}),
        ("inside a document", {**THREE, "attention_mask": [1, 0, 1]}),
        (r"labels has shape \(2,\), and input_ids \(3,\)", {**THREE, "labels": [1, 0]}),
        (r"input_ids has shape \(2, 3\)", {"input_ids": torch.ones(2, 3), "position_ids": torch.ones(2, 3)}),
    ],
)
def test_borders_that_contradict_the_tokens_are_refused(row, message):
    with pytest.raises(InvalidInputError, match=message):
        Documents([{"input_ids": [3, 4], "seq_lengths": [2]}, row])


def test_other_data_are_refused():
    for error, said, call in (
        (InvalidInputError, r"DataLoader.*collate=pad_documents", lambda: Documents(DataLoader([]))),
        (InvalidInputError, "the packed dataset is a int", lambda: Documents(3)),
        (UnknownNameError, "Did you mean 'seq_lengths'", lambda: Documents([], borders="seq_length")),
        (
            InvalidInputError,
            "No rows in the dataset",
            lambda: Rows(Documents([{**TWO, "seq_lengths": [1, 1]}])),
        ),
        (
            InvalidInputError,
            r"got the columns \['chosen', 'rejected'\].*Rows\(pairs, collate=...\)",
            lambda: pad_documents([{"chosen": [1, 2], "rejected": [1]}]),
        ),
        (InvalidInputError, "input_ids, and got tuple", lambda: pad_documents([(torch.ones(2), 1)])),
    ):
        with pytest.raises(error, match=said):
            call()


class Averaging(nn.Module):
    """A token sees the mean of all tokens before it: of its document, if it is given where documents begin."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)

    def forward(self, input_ids, attention_mask=None, seq_idx=None, cu_seqlens=None):
        if cu_seqlens is not None:  # as kernels for attention take it
            assert (cu_seqlens.dtype, cu_seqlens.dim()) == (torch.int32, 1)
            seq_idx = torch.bucketize(torch.arange(input_ids.shape[1]), cu_seqlens, right=True)[None]
        seq_idx = torch.zeros_like(input_ids) if seq_idx is None else seq_idx
        sees = (seq_idx[:, :, None] == seq_idx[:, None]).tril().to(self.head.weight.dtype)
        return self.head((sees / sees.sum(-1, keepdim=True)) @ self.embed(input_ids))


def attributor(model):
    return Attributor(model, LM, None, collate=pad_documents, proj_dim=8, progress=False)


@pytest.mark.parametrize("borders", ["seq_idx", "cu_seqlens"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_model_that_mixes_documents_is_refused_before_the_first_row(dtype, borders):
    model, kind = Averaging().to(dtype), KINDS["batches of lists"]
    apart, mixed = (Documents([pack(texts, name) for texts in TEXTS]) for name in (borders, "seq_lengths"))
    require_separate_documents(model, apart)
    require_separate_documents(model, Documents([pack(texts, borders, kind) for texts in TEXTS]))
    made = attributor(model)
    message = (
        r"Document 1 of packed row 0 .* at its token 0.*passed as \['input_ids'\].*featurize the packed rows"
    )
    with pytest.raises(InvalidInputError, match=message):
        made.featurize(mixed)
    assert made.featurize(apart).rows_written == 6  # nothing was written before


def test_the_check_runs_the_batch_of_training():
    """Given by training_collate; check=False leaves it out, and rows of one document need none."""
    packed = [pack(texts, "seq_lengths") for texts in TEXTS]
    numbers = torch.tensor([[0, 0, 0, 1, 1]])

    def collate(rows):
        return {"input_ids": torch.tensor([rows[0]["input_ids"]]), "seq_idx": numbers, "labels": numbers}

    model, given = Averaging(), Documents(packed, training_collate=collate)
    for documents in (given, Documents(packed, check=False), Documents(packed[1:2])):
        assert attributor(model).featurize(documents).rows_written == len(documents)
    model.train()
    require_separate_documents(model, given)
    assert model.training
    four = {"input_ids": torch.ones(1, 4, dtype=torch.int64)}
    short = Documents(packed, training_collate=lambda rows: four)
    with pytest.raises(InvalidInputError, match=r"logits of shape \(1, 4, 10\).*T at least 5"):
        require_separate_documents(model, short)
