"""Packed rows for models of transformers: documents against loops over texts alone, and against the packed loss."""

import warnings

import hub_models as hub
import numpy as np
import pytest
import torch
from hub_models import EXACT, IGNORED, PRECISE, ROUNDED, gradients_of, transformers
from late import Late

from trak_lite import Attributor, Documents, Rows, pad_documents
from trak_lite.errors import InvalidInputError
from trak_lite.gradient_computers import HookGradientComputer
from trak_lite.modelout_functions import require_separate_documents, resolve_task

huggingface = Late("trak_lite.integrations.huggingface")


def made(build, attention="sdpa"):
    model = hub.spread(build)
    model.set_attn_implementation(attention)
    return model


def texts(lengths=(4, 3, 6, 4, 6)):
    generator = np.random.default_rng(0)
    return [generator.integers(3, hub.VOCABULARY, n).tolist() for n in lengths]


def packed_rows(first=0):
    """The texts in two packed rows with padding; the first begins at a position."""
    found = []
    for row in (texts()[:3], texts()[3:]):
        ids = torch.tensor([token for text in row for token in text] + [hub.PAD] * 2)
        positions = torch.cat([torch.arange(len(text)) for text in row] + [torch.zeros(2, dtype=torch.int64)])
        if not found:
            positions[: len(row[0])] += first
        labels = ids.masked_fill(positions == 0, IGNORED)
        labels[-2:] = IGNORED
        found.append({"input_ids": ids, "labels": labels, "position_ids": positions})
    return found


def output_alone(model, ids, labels, first=0):
    """f of a text that was never packed, in a plain loop."""
    logits = model(input_ids=torch.tensor([ids]), position_ids=torch.arange(len(ids))[None] + first).logits[0]
    pairs = zip(logits, labels[1:], strict=False)
    terms = [row.log_softmax(-1)[label] for row, label in pairs if label != IGNORED]
    return torch.stack(terms).sum()


def output_within(model, row, start, stop):
    """f of the labels from start to stop alone, through the packed row, as transformers shifts them."""
    inputs = {name: values[None] for name, values in row.items() if name != "labels"}
    log_probs = model(**inputs, use_cache=False).logits[0].log_softmax(-1)
    places = [t for t in range(max(start, 1), stop) if row["labels"][t] != IGNORED]
    return torch.stack([log_probs[t - 1, row["labels"][t]] for t in places]).sum()


def flat(value, model):
    return torch.cat(list(gradients_of(value, model).values()))


def rows_of(model, documents):
    """Gradients of f of all documents in one padded batch, in the model's dtype, ``(N, P)``."""
    found = {}
    computer = HookGradientComputer(model, resolve_task("causal_language_modeling"))
    batch = pad_documents([documents[i] for i in range(len(documents))])
    computer.stream_gradients(batch, lambda block: found.update({block.name: block.dense()}))
    return torch.cat([found[name] for name, _ in model.named_parameters()], 1)


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("build", [hub.gpt2, hub.llama])
def test_a_document_has_the_gradient_of_its_text_alone_and_of_its_loss_in_the_packed_row(
    build, attention, first
):
    """Also the rest of a cut text, whose positions go on from the packed row before."""
    model, rows = made(build, attention), packed_rows(first)
    close = PRECISE if build is hub.gpt2 else ROUNDED
    documents = Documents(rows)
    require_separate_documents(model, documents)
    found = rows_of(model, documents)
    assert len(documents) == len(texts()) == len(found)
    for i, ids in enumerate(texts()):
        start, stop, row = (int(of[i]) for of in (documents.start, documents.stop, documents.row))
        labels = rows[row]["labels"][start:stop].tolist()
        alone = output_alone(model, ids, labels, first if i == 0 else 0)
        within = output_within(model, rows[row], start, stop)
        for expected in (alone, within):
            torch.testing.assert_close(found[i], flat(expected, model), **close)


def test_a_loss_on_first_tokens_has_a_term_per_border_that_no_document_has():
    """With input_ids as labels transformers predicts the first token of a document from the last of the one before."""
    model, row = made(hub.gpt2), packed_rows()[1]
    row = {name: values[:-2] for name, values in row.items()} | {"labels": row["input_ids"][:-2]}
    batch = {name: values[None] for name, values in row.items()}
    answer = model(**batch, use_cache=False)
    found = sum(output_alone(model, ids, ids) for ids in texts()[3:])
    documents = Documents([row])
    border = int(documents.start[1])
    term = answer.logits[0, border - 1].log_softmax(-1)[row["labels"][border]]
    computer = HookGradientComputer(model, resolve_task("causal_language_modeling"))
    terms = computer.stream_gradients(pad_documents(list(documents)), lambda block: None)
    torch.testing.assert_close(terms.output.sum(), found, **PRECISE)
    loss = answer.loss.double() * (len(row["labels"]) - 1)
    torch.testing.assert_close(-(found + term), loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("build", [hub.gpt2, hub.llama])
def test_transformers_mixes_documents_with_a_mask_or_a_cache(build, attention):
    """Then documents alone are not what was trained, and are refused; the first that differs is named."""
    model, rows = made(build, attention), packed_rows()
    masked = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
    pairs = zip(rows, ([4, 3, 6], [4, 6]), strict=True)
    joined = [
        {"input_ids": row["input_ids"], "labels": row["labels"], "seq_lengths": lengths}
        for row, lengths in pairs
    ]

    def cached(samples):
        return {**{name: values[None] for name, values in samples[0].items()}, "use_cache": True}

    def whole(samples):
        return {"input_ids": samples[0]["input_ids"][None]}

    require_separate_documents(model, Documents(joined))
    tokenized = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in joined]
    require_separate_documents(model, Documents(tokenized))  # TRL's collator leaves the mask out
    collated = Documents(rows, training_collate=cached), Documents(joined, training_collate=whole)
    for documents in (Documents(masked), *collated):
        with pytest.raises(InvalidInputError, match="Document 1 of packed row 0 has other logits"):
            require_separate_documents(model, documents)


@pytest.mark.parametrize("cached", [True, False])
def test_packed_rows_with_a_cache_are_named_in_a_warning(cached):
    model, rows = made(hub.llama), packed_rows()
    model.config.use_cache = cached
    row = {name: values[:13] for name, values in rows[0].items()}
    alone = {name: values[: len(texts()[0])] for name, values in row.items()}
    settings = {"projector": "none", "dtype": "float32", "method": "GradDot", "progress": False}
    attributor = Attributor(model, "causal_language_modeling", None, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attributor.featurize(Rows([alone], name="one text"))
        attributor.score([row])
    begins = "In the rows of the targets, texts that are packed into one row"
    assert [str(w.message)[: len(begins)] for w in caught] == [begins] * cached


def test_batches_of_a_padding_free_collator_are_documents():
    """With all columns of borders that the collator can make, in lists, tensors and a BatchEncoding."""
    model = made(hub.llama)
    rows = [{"input_ids": ids, "labels": [IGNORED, *ids[1:]]} for ids in texts()]
    settings = {"return_flash_attn_kwargs": True, "return_seq_idx": True}
    expected = [{name: torch.tensor(values) for name, values in row.items()} for row in rows]
    for given in ({}, settings):
        collator = transformers.DataCollatorWithFlattening(**given)
        batches = [collator(rows[:3], return_tensors="pt"), collator(rows[3:], return_tensors="pt")]
        for packed in (batches, [transformers.BatchEncoding(dict(batch)) for batch in batches]):
            documents = Documents(packed)
            require_separate_documents(model, documents)
            assert [list(sample) for sample in documents] == [["input_ids", "labels"]] * 5
            for sample, row in zip(documents, expected, strict=True):
                assert all(torch.equal(sample[name], row[name]) for name in row)


def test_a_trainer_with_a_collator_that_flattens_is_told_what_to_use(tmp_path):
    model, rows = hub.made(hub.llama), hub.texts(hub.made(hub.llama))
    trainer = hub.trainer_of(model, tmp_path, rows=rows, collator=transformers.DataCollatorWithFlattening())
    said = r"Collating 2 samples .* gave a batch of 1.*collate=trak_lite\.pad_documents"
    with pytest.raises(InvalidInputError, match=said):
        huggingface.attributor_from_trainer(trainer, None)
    ids = rows.select_columns(["input_ids", "labels"])
    path = tmp_path / "a.zarr"
    made_for = huggingface.attributor_from_trainer(trainer, path, rows=ids, collate=pad_documents, **EXACT)
    made_for.featurize(ids)
    expected = hub.expected_rows(model, rows)
    assert hub.relative_error(hub.stored_rows(tmp_path / "a.zarr"), expected) < 1e-5
