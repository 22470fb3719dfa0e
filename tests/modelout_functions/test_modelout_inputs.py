"""Which batches, labels and model answers are taken, and what is said about the others."""

import dataclasses
from collections import UserDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from modelout_cases import C, LanguageModel, TextModel, mlp, prepared, randn, terms_of_logits, text_parts
from torch import nn

from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions import (
    BinaryClassificationModelOutput,
    CallableModelOutput,
    CausalLanguageModelingModelOutput,
    ImageClassificationModelOutput,
    ModelCall,
    MultiLabelModelOutput,
    RegressionModelOutput,
    TextClassificationModelOutput,
    _inputs,
)
from trak_lite.modelout_functions._inputs import logits_of, split_labels

LOGITS = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]])
LABELS = torch.tensor([2, 0])
Named = namedtuple("Named", ["logits", "hidden"])


@pytest.mark.parametrize(
    "answer",
    [
        LOGITS,
        (LOGITS, "hidden"),
        [LOGITS],
        Named(LOGITS, "hidden"),
        Named(hidden=LOGITS + 1, logits=LOGITS),
        {"hidden": LOGITS + 1, "logits": LOGITS},
        SimpleNamespace(logits=LOGITS),
    ],
)
def test_logits_are_found_in_a_models_usual_answers(answer):
    assert logits_of(answer) is LOGITS


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        ({"scores": LOGITS}, r"dict with the keys \['scores'\]"),
        ((), "gave a tuple"),
        (None, "gave a NoneType"),
        (("text", LOGITS), "gave a tuple"),
        (LABELS, "dtype torch.int64"),
    ],
)
def test_an_answer_without_logits_is_described(answer, seen):
    with pytest.raises(InvalidInputError, match=seen):
        logits_of(answer)


@dataclasses.dataclass
class Example:
    inputs: torch.Tensor
    labels: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "args", "keys"),
    [
        ((LOGITS, LABELS), 1, []),
        ([LOGITS, LOGITS, LABELS], 2, []),
        ({"labels": LABELS, "inputs": LOGITS}, 0, ["inputs"]),
        (UserDict(label=LABELS, inputs=LOGITS), 0, ["inputs"]),
        (Example(LOGITS, LABELS), 0, ["inputs"]),
        (namedtuple("Pair", ["x", "y"])(LOGITS, LABELS), 1, []),
    ],
)
def test_labels_are_split_off_any_usual_batch(batch, args, keys):
    parts = split_labels(batch)

    assert parts.labels is LABELS
    assert len(parts.args) == args
    assert list(parts.kwargs) == keys


@pytest.mark.parametrize(
    ("batch", "seen"),
    [
        (LOGITS, "batch is a Tensor"),
        ((LOGITS,), "tuple of 1"),
        ({"inputs": LOGITS}, r"keys \['inputs'\]"),
        ({"inputs": LOGITS, "label": LABELS, "labels": LABELS}, "exactly one of"),
        ({"labels": LABELS}, r"keys \['labels'\]"),
        ((LOGITS, [2, 0]), "labels are a list"),
    ],
)
def test_a_batch_without_inputs_and_labels_is_described(batch, seen):
    with pytest.raises(InvalidInputError, match=seen):
        split_labels(batch)


@pytest.mark.parametrize("task", [ImageClassificationModelOutput(), BinaryClassificationModelOutput()])
def test_a_refused_label_names_sample_value_and_range(task):
    logits = LOGITS if task.name.startswith("image") else LOGITS[:, 0]

    with pytest.raises(InvalidInputError, match=r"sample 1: labels\[1\] is 5\. Expected .*0 .*[12]"):
        terms_of_logits(task, logits, torch.tensor([1, 5]))


@pytest.mark.parametrize(
    ("labels", "seen"),
    [
        (torch.tensor([1.0, 0.0]), "dtype torch.float32. Expected integer class indices"),
        (torch.tensor([True, False]), "dtype torch.bool"),
        (
            torch.tensor([[2], [0]]),
            r"shape \(2, 1\). Expected \(2,\) .*Drop the last axis: labels.squeeze\(-1\)",
        ),
        (torch.tensor([1]), r"shape \(1,\). Expected \(2,\)"),
        (LOGITS, r"shape \(2, 3\)"),
    ],
)
def test_class_labels_of_another_form_are_refused(labels, seen):
    with pytest.raises(InvalidInputError, match=seen):
        terms_of_logits(ImageClassificationModelOutput(), LOGITS, labels)


@pytest.mark.parametrize(
    ("logits", "seen"),
    [
        (LOGITS[:, 0], r"shape \(2,\). Expected \(B, C\)"),
        (LOGITS[:, :, None], r"shape \(2, 3, 1\)"),
        (LOGITS[:, :1], "at least 2 classes.*binary_classification"),
    ],
)
def test_class_logits_of_another_form_are_refused(logits, seen):
    with pytest.raises(InvalidInputError, match=seen):
        terms_of_logits(ImageClassificationModelOutput(), logits, LABELS)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), "1", True])
@pytest.mark.parametrize("task", [ImageClassificationModelOutput, TextClassificationModelOutput])
def test_a_temperature_must_be_a_positive_number(task, value):
    with pytest.raises(InvalidInputError, match="temperature must be a finite number"):
        task(value)


@pytest.mark.parametrize("torch_tells", [True, False])
def test_a_transformed_tensor_is_told_from_a_plain_one(monkeypatch, torch_tells):
    """Also without torch's own answer, which is a private function."""
    if not torch_tells:
        monkeypatch.setattr(_inputs, "_ask_torch", None)
    seen = []

    def function(label):
        seen.append(_inputs.is_transformed(label == 1))
        return label.clone()

    torch.func.vmap(function)(LABELS)

    assert seen == [True]
    assert not _inputs.is_transformed(LABELS)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_label_out_of_range_leaves_the_gpu_usable():
    """An index out of range in a kernel would make every later call fail."""
    logits = LOGITS.cuda()

    with pytest.raises(InvalidInputError, match=r"sample 0: labels\[0\] is 77"):
        terms_of_logits(ImageClassificationModelOutput(), logits, torch.tensor([77, 0], device="cuda"))

    assert terms_of_logits(ImageClassificationModelOutput(), logits, LABELS.cuda()).output.isfinite().all()


def test_a_label_error_names_the_place_in_a_sequence():
    ids = torch.zeros(2, 4, dtype=torch.int64)
    labels = torch.tensor([[0, 1, 2, 3], [0, 1, 99, 3]])

    with pytest.raises(InvalidInputError, match=r"sample 1: labels\[1, 2\] is 99\..* 0 to 6 .*-100"):
        CausalLanguageModelingModelOutput().evaluate(ModelCall(prepared(LanguageModel())), (ids, labels))


def test_a_sample_without_any_token_to_predict_is_refused():
    ids = torch.zeros(2, 4, dtype=torch.int64)
    labels = torch.tensor([[0, 1, 2, 3], [5, -100, -100, -100]])

    with pytest.raises(InvalidInputError, match="sample 1 has no token to predict"):
        CausalLanguageModelingModelOutput().evaluate(ModelCall(prepared(LanguageModel())), (ids, labels))


@pytest.mark.parametrize("shape", [(2, 7), (2, 1, 7)])
def test_language_logits_of_another_form_are_refused(shape):
    with pytest.raises(InvalidInputError, match=r"Expected \(B, T, V\) with at least 2 positions"):
        terms_of_logits(CausalLanguageModelingModelOutput(), torch.zeros(shape), torch.zeros(2, 1))


def test_language_labels_of_another_shape_are_refused():
    with pytest.raises(InvalidInputError, match=r"shape \(2, 3\). Expected \(2, 4\)"):
        terms_of_logits(
            CausalLanguageModelingModelOutput(), torch.zeros(2, 4, 7), torch.zeros(2, 3, dtype=torch.int64)
        )


def test_a_long_positional_language_batch_is_refused():
    part = torch.zeros(2, 4, dtype=torch.int64)

    with pytest.raises(InvalidInputError, match=r"3 parts before the labels.*use dict batches"):
        CausalLanguageModelingModelOutput().evaluate(ModelCall(prepared(LanguageModel())), (part,) * 4)


@pytest.mark.parametrize(
    ("logits", "labels", "seen"),
    [
        (LOGITS, LABELS, r"logits have shape \(2, 3\). Expected \(B,\) or \(B, 1\).*multilabel"),
        (LOGITS[:, 0], LOGITS, r"labels have shape \(2, 3\)"),
        (LOGITS[:, 0], torch.tensor([1]), r"labels have shape \(1,\), the logits \(2,\)"),
    ],
)
def test_binary_shapes_that_do_not_fit_are_refused(logits, labels, seen):
    with pytest.raises(InvalidInputError, match=seen):
        terms_of_logits(BinaryClassificationModelOutput(), logits, labels)


@pytest.mark.parametrize(
    ("logits", "labels", "seen"),
    [
        (LOGITS[:, 0], LABELS, r"logits of shape \(2,\)"),
        (LOGITS[:, :0], LABELS, r"logits of shape \(2, 0\)"),
        (LOGITS, LABELS, r"labels have shape \(2,\), the logits \(2, 3\)"),
        (LOGITS, torch.full((2, 3), 2), r"sample 0: labels\[0, 0\] is 2. Expected 0 or 1"),
    ],
)
def test_multilabel_input_that_does_not_fit_is_refused(logits, labels, seen):
    with pytest.raises(InvalidInputError, match=seen):
        terms_of_logits(MultiLabelModelOutput(), logits, labels)


@pytest.mark.parametrize(
    ("predictions", "targets"),
    [
        ((3, 1), (1,)),
        ((3,), (1, 3)),
        ((3,), (2,)),
        ((3,), (2, 1)),
        ((3, 1), (3, 1, 1, 1)),
        ((1,), ()),
        ((), (1,)),
        ((), ()),
    ],
)
@pytest.mark.parametrize("output", ["prediction", "neg_squared_error"])
def test_regression_shapes_that_would_broadcast_are_refused(output, predictions, targets):
    with pytest.raises(InvalidInputError, match="Expected the same shape"):
        terms_of_logits(RegressionModelOutput(output=output), torch.zeros(predictions), torch.zeros(targets))


@pytest.mark.parametrize("output", ["prediction", "neg_squared_error"])
@pytest.mark.parametrize(("predictions", "targets"), [((3, 1), (3,)), ((3,), (3, 1)), ((1, 1), (1,))])
def test_a_last_axis_of_one_is_taken_off_the_predictions_or_the_targets(output, predictions, targets):
    values, wanted = randn(predictions[0], seed=1), randn(predictions[0], seed=2)
    task = RegressionModelOutput(output=output)

    terms = terms_of_logits(task, values.reshape(predictions), wanted.reshape(targets))

    for term, expected in zip(terms, terms_of_logits(task, values, wanted), strict=True):
        assert torch.equal(term, expected)


def test_a_last_axis_of_one_is_taken_off_under_transforms_too():
    values, wanted = randn(3, 1, seed=1), randn(3, seed=2)

    def squared_error(value, target):
        return terms_of_logits(
            RegressionModelOutput(output="neg_squared_error"), value[None], target[None]
        ).output[0]

    gradients = torch.func.vmap(torch.func.grad(squared_error))(values, wanted)

    torch.testing.assert_close(gradients, wanted[:, None] - values)


@pytest.mark.parametrize(
    ("task", "logits", "labels", "seen"),
    [
        (ImageClassificationModelOutput(), (3,), (1,), r"shape \(B, 1\). Expected \(B,\) .*squeeze"),
        (ImageClassificationModelOutput(), (3, 4), (), r"logits of shape \(B, 3, 4\). Expected \(B, C\)"),
        (
            BinaryClassificationModelOutput(),
            (3,),
            (),
            r"logits have shape \(B, 3\). Expected \(B,\) or \(B, 1\)",
        ),
        (MultiLabelModelOutput(), (3,), (2,), r"labels have shape \(B, 2\), the logits \(B, 3\)"),
        (MultiLabelModelOutput(), (), (2,), r"logits of shape \(B,\). Expected \(B, C\)"),
        (RegressionModelOutput(), (3,), (2,), r"predictions have shape \(B, 3\), the targets \(B, 2\)"),
        (RegressionModelOutput(), (3,), (3,), r"predictions of shape \(B, 3\). Expected \(B,\) or \(B, 1\)"),
        (CausalLanguageModelingModelOutput(), (3,), (3,), r"logits of shape \(B, 3\). Expected \(B, T, V\)"),
        (CausalLanguageModelingModelOutput(), (3, 4), (2,), r"shape \(B, 2\). Expected \(B, 3\)"),
        (
            CallableModelOutput(lambda call, batch: call(batch[0])),
            (3,),
            (),
            r"returned shape \(B, 3\). Expected a tensor of shape \(B,\)",
        ),
        (
            CallableModelOutput(lambda call, batch: call(batch[0]).sum()),
            (3,),
            (),
            r"returned shape \(\). Expected a tensor of shape \(B,\)",
        ),
    ],
)
def test_shapes_under_transforms_do_not_speak_of_a_batch_of_one(task, logits, labels, seen):
    """A sample-by-sample computer gives each sample an axis of one, which the user has never seen."""

    def run(values, label):
        return terms_of_logits(task, values[None], label[None]).output[0]

    arguments = torch.zeros(5, *logits), torch.zeros(5, *labels, dtype=torch.int64)
    with pytest.raises(InvalidInputError, match=seen):
        torch.func.vmap(torch.func.grad(run))(*arguments)


def test_an_error_of_one_row_alone_still_names_sample_place_value_and_range():
    """As when a refused batch is gone through row by row to find the row."""
    with pytest.raises(
        InvalidInputError, match=r"^sample 0: labels\[0\] is 5\. Expected an integer from 0 to 2"
    ):
        terms_of_logits(ImageClassificationModelOutput(), LOGITS[1:], torch.tensor([5]))


def test_a_vector_prediction_is_no_scalar_output():
    with pytest.raises(InvalidInputError, match=r"\(2, 3\).*neg_squared_error"):
        terms_of_logits(RegressionModelOutput(), LOGITS, LOGITS)


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_targets_that_are_no_real_numbers_are_refused(dtype):
    with pytest.raises(InvalidInputError, match="Expected real numbers"):
        terms_of_logits(RegressionModelOutput(), LOGITS[:, 0], torch.zeros(2, dtype=dtype))


def test_an_infinite_target_is_refused():
    with pytest.raises(InvalidInputError, match=r"sample 1: targets\[1\] is inf. Expected a finite number"):
        terms_of_logits(RegressionModelOutput(), LOGITS[:, 0], torch.tensor([0.0, torch.inf]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: MultiLabelModelOutput(output="logprob"),
        lambda: RegressionModelOutput(output="loss"),
        lambda: CausalLanguageModelingModelOutput(output="logit"),
    ],
)
def test_an_unknown_choice_of_f_is_refused(make):
    with pytest.raises(InvalidInputError, match="output must be one of"):
        make()


def test_shift_must_be_a_truth_value():
    with pytest.raises(InvalidInputError, match="shift must be True or False"):
        CausalLanguageModelingModelOutput(shift="yes")


def test_text_parts_can_have_other_names():
    """A model without token types takes its two parts under the names it was told."""

    class Model(nn.Module):
        def forward(self, tokens, mask):
            return torch.stack([tokens.sum(1), mask.sum(1)], dim=1).double()

    ids, _, mask, _ = text_parts()
    task = TextClassificationModelOutput(input_names=("tokens", "mask"))

    terms = task.evaluate(ModelCall(Model()), (ids, mask, torch.zeros(4, dtype=torch.int64)))

    torch.testing.assert_close(terms.output, (ids.sum(1) - mask.sum(1)).double())


def test_a_text_batch_with_other_parts_than_names_is_refused():
    ids, _, mask, labels = text_parts()

    with pytest.raises(InvalidInputError, match=r"2 part.s. before the labels.*token_type_ids.*input_names"):
        TextClassificationModelOutput().evaluate(ModelCall(prepared(TextModel())), (ids, mask, labels))


@pytest.mark.parametrize("names", ["input_ids", ("mask", "mask")])
def test_input_names_must_be_distinct_names(names):
    with pytest.raises(InvalidInputError, match="distinct keyword names"):
        TextClassificationModelOutput(input_names=names)


@pytest.mark.parametrize(
    ("function", "seen"),
    [
        (lambda call, batch: call(batch[0]).sum(), r"shape \(\). Expected a tensor of shape \(2,\)"),
        (lambda call, batch: call(batch[0]), r"shape \(2, 3\)"),
        (lambda call, batch: 1.0, "returned float"),
        (lambda call, batch: torch.zeros(2, dtype=torch.int64), "dtype torch.int64"),
    ],
)
def test_a_functions_result_must_be_one_number_per_sample(function, seen):
    with pytest.raises(InvalidInputError, match=seen):
        CallableModelOutput(function).evaluate(ModelCall(mlp(C)), (randn(2, 5, seed=0),))


def test_a_function_that_cannot_be_called_is_refused():
    with pytest.raises(InvalidInputError, match=r"is a int. Expected a callable"):
        CallableModelOutput(3)
