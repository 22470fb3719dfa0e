"""Which answers, batches and labels are taken; terms at the edges of floating point, and in half precision."""

import math
from collections import UserDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from modelout_cases import Answer, changed, image_case, prepared, randint, randn, terms_of_logits, text_parts
from torch import nn

from trak_lite import modelout_functions as tasks
from trak_lite.errors import InvalidInputError

pytestmark = pytest.mark.quick

IMAGES, BINARY = tasks.ImageClassificationModelOutput(), tasks.BinaryClassificationModelOutput()
LOGITS, LABELS = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]]), torch.tensor([2, 0])
Named = namedtuple("Named", ["logits", "hidden"])


def same(terms, expected):
    for term, other in zip(terms, expected, strict=True):
        assert torch.equal(term, other)


ANSWERS = [(LOGITS, "hidden"), [LOGITS], Named(LOGITS, "hidden"), Named(hidden=LOGITS + 1, logits=LOGITS)]
ANSWERS += [{"hidden": LOGITS + 1, "logits": LOGITS}, SimpleNamespace(logits=LOGITS)]
BATCHES = [[LOGITS, LOGITS, LABELS], namedtuple("Pair", ["x", "y"])(LOGITS, LABELS)]
BATCHES += [UserDict(label=LABELS, inputs=LOGITS)]


def test_usual_answers_of_models_and_usual_batches_are_understood():
    """Dicts and dataclasses are batches of the laws."""
    expected = terms_of_logits(IMAGES, LOGITS, LABELS)
    given = [(answer, (LOGITS, LABELS)) for answer in ANSWERS] + [(LOGITS, batch) for batch in BATCHES]
    for answer, batch in given:
        same(IMAGES.evaluate(tasks.ModelCall(Answer(answer)), batch), expected)


REGRESSION, SQUARES = (
    tasks.RegressionModelOutput(output=output) for output in ("prediction", "neg_squared_error")
)
LANGUAGE = tasks.CausalLanguageModelingModelOutput()
VALUES, WANTED = randn(3, seed=1), randn(3, seed=2)
TEXT, TOKENS = randn(2, 4, 7, seed=3), randint(7, (2, 4), 8)
EQUAL = {
    "dtypes of classes": [(IMAGES, randn(3, 4, seed=11), torch.tensor([0, 1, 1], dtype=dtype))
                          for dtype in (torch.int64, torch.uint8, torch.int32)],
    "dtypes of binary labels": [(BINARY, VALUES, torch.tensor([1, 0, 1], dtype=dtype))
                                for dtype in (torch.int64, torch.bool, torch.float32)],
    "dtypes of targets": [(REGRESSION, VALUES, torch.tensor([3, 2, 1], dtype=dtype))
                          for dtype in (torch.float64, torch.int64, torch.float32)],
    **{f"a last axis of one, {task.output}": [(task, VALUES, WANTED), (task, VALUES[:, None], WANTED),
                                              (task, VALUES, WANTED[:, None])] for task in (REGRESSION, SQUARES)},
    **{f"a column of one sample, {task.output}": [(task, VALUES[:1], WANTED[:1]), (task, VALUES[:1, None], WANTED[:1])]
       for task in (REGRESSION, SQUARES)},
    "a common offset of all logits": [(IMAGES, torch.tensor([[by + 0.5, by, by - 1], [by, by + 2.5, by]]), LABELS)
                                      for by in (0.0, 1e4, -1e6)],
    "no samples": [(IMAGES, LOGITS[:0], LABELS[:0]), (IMAGES, LOGITS[:0], LABELS[:0].int())],
    # No logit predicts it, so even a value out of range there changes nothing.
    "first label of a shifted sample": [(LANGUAGE, TEXT, changed(TOKENS, (..., 0), first)) for first in (1, 999)],
    **{f"{dtype} logits": [(IMAGES, LOGITS.to(dtype).float(), LABELS), (IMAGES, LOGITS.to(dtype), LABELS)]
       for dtype in (torch.float16, torch.bfloat16)},
}  # fmt: skip


@pytest.mark.parametrize("name", EQUAL)
def test_forms_of_logits_and_labels_that_mean_the_same_give_the_same_terms(name):
    first, *others = (terms_of_logits(*given) for given in EQUAL[name])
    for other in others:
        same(other, first)
        assert {term.dtype for term in other} == {term.dtype for term in first}


def test_text_parts_can_have_other_names():
    """A model without token types takes its two parts under the names it was told."""

    class Model(nn.Module):
        def forward(self, tokens, mask):
            return torch.stack([tokens.sum(1), mask.sum(1)], dim=1).double()

    ids, _, mask, _ = text_parts()
    task = tasks.TextClassificationModelOutput(input_names=("tokens", "mask"))
    terms = task.evaluate(tasks.ModelCall(Model()), (ids, mask, torch.zeros(4, dtype=torch.int64)))
    torch.testing.assert_close(terms.output, (ids.sum(1) - mask.sum(1)).double())


def test_neg_squared_error_sums_over_targets_of_any_shape():
    predictions, targets = randn(2, 3, 2, seed=12), randn(2, 3, 2, seed=13)
    terms = terms_of_logits(tasks.RegressionModelOutput(output="neg_squared_error"), predictions, targets)
    expected = [-0.5 * float(((p - t) ** 2).sum()) for p, t in zip(predictions, targets, strict=True)]
    assert terms.output.tolist() == pytest.approx(expected, rel=1e-12)


def test_small_logits_are_resized_to_the_labels():
    model, images = prepared(nn.Conv2d(1, 3, 2, stride=2)), randn(2, 1, 4, 6, seed=1)
    labels = randint(3, (2, 4, 6), 2)
    task = tasks.DenseClassificationModelOutput(upsample=True)
    terms = task.evaluate(tasks.ModelCall(model), (images, labels))
    full = nn.functional.interpolate(model(images), size=(4, 6), mode="bilinear")
    expected = -nn.functional.cross_entropy(full, labels, reduction="none").sum((1, 2))
    torch.testing.assert_close(terms.output, expected)


# ---- Edges of floating point
class Scores(nn.Module):
    def forward(self, input_ids):
        return input_ids


SMALL, MARGIN = math.exp(-50.0), 40.0 - math.log(2.0)


@pytest.mark.parametrize(
    ("task", "logits", "labels", "f", "q", "w"),
    [
        (IMAGES, [[40.0, 0.0, 0.0]], [0], [MARGIN], [math.exp(-MARGIN)], [math.exp(-MARGIN)]),
        (IMAGES, [[-30.0, 0.0]], [0], [-30.0], [1.0], [math.exp(-30.0)]),
        (BINARY, [50.0, 50.0, -50.0, -50.0], [1, 0, 1, 0], [50.0, -50.0, -50.0, 50.0], [SMALL, 1, 1, SMALL],
         [SMALL] * 4),
        (tasks.MultiLabelModelOutput(output="log_prob"), [[30.0]], [[1]], [-math.exp(-30.0)], [1.0], [0.0]),
        (tasks.RegressionModelOutput(), [1.0, 5.0], [3, 2], [1.0, 5.0], [2.0, -3.0], [1.0, 1.0]),
        (tasks.RewardModelOutput(), [40.0, -40.0], [0.0, 0.0], [40.0, -40.0], [math.exp(-40), 1.0],
         [math.exp(-40)] * 2),
    ],
)  # fmt: skip
def test_terms_keep_their_digits_far_from_the_decision(task, logits, labels, f, q, w):
    """In float32, 1 - softmax would be 0 from a margin of 17 on, and log-softmax as well."""
    given = torch.tensor(logits), torch.tensor(labels)
    if task.name == "reward_modeling":
        batch = {"chosen_input_ids": given[0], "rejected_input_ids": given[1]}
        terms = task.evaluate(tasks.ModelCall(Scores()), batch)
    else:
        terms = terms_of_logits(task, *given)
    for term, expected in zip(terms, (f, q, w), strict=True):
        assert term.dtype == torch.float32
        assert term.tolist() == pytest.approx(expected, rel=1e-5, abs=0)
    assert terms.output.tolist() == pytest.approx(f, rel=1e-6, abs=0)


def test_huge_logits_give_finite_terms_and_gradients():
    logits = torch.tensor([[1e30, -1e30, 0.0], [-1e30, 1e30, 0.0]], requires_grad=True)
    terms = terms_of_logits(IMAGES, logits, torch.tensor([0, 0]))
    (gradient,) = torch.autograd.grad(terms.output.sum(), logits)
    assert torch.stack([*terms, gradient.sum(1)]).isfinite().all()
    assert terms.out_to_loss_grad.tolist() == [0.0, 1.0]


def test_a_class_that_is_ruled_out_by_minus_infinity_does_not_count():
    with_it = torch.tensor([[1.0, -torch.inf, 2.0]], requires_grad=True)
    terms = terms_of_logits(IMAGES, with_it, torch.tensor([0]))
    (gradient,) = torch.autograd.grad(terms.output.sum(), with_it)
    expected = terms_of_logits(IMAGES, torch.tensor([[1.0, 2.0]]), torch.tensor([0]))
    torch.testing.assert_close(terms.output, expected.output)
    torch.testing.assert_close(gradient, torch.tensor([[1.0, 0.0, -1.0]]))


@pytest.mark.parametrize("task", [LANGUAGE, tasks.DenseClassificationModelOutput(class_axis=-1)], ids=repr)
def test_a_class_may_be_ruled_out_where_labels_are_ignored(task):
    raw = randn(2, 5, 4, seed=12).requires_grad_()
    logits = raw.masked_fill(torch.arange(4) == 0, -torch.inf)
    labels = torch.tensor([[-100, -100, 1, -100, 3], [-100, 2, 3, 1, -100]])
    terms = terms_of_logits(task, logits, labels)
    at, to = (logits[:, :-1], labels[:, 1:]) if task is LANGUAGE else (logits, labels)
    expected = (
        -nn.functional.cross_entropy(at.flatten(0, 1), to.flatten(), reduction="none").view_as(to).sum(1)
    )
    torch.testing.assert_close(terms.output, expected)
    found, wanted = (torch.autograd.grad(f.sum(), raw, retain_graph=True) for f in (terms.output, expected))
    torch.testing.assert_close(found, wanted)


def test_temperature_changes_q_and_w_and_not_f():
    logits, labels = randn(5, 4, seed=2), randint(4, (5,), 3)
    warm = terms_of_logits(tasks.ImageClassificationModelOutput(temperature=2.5), logits, labels)
    q = 1 - torch.softmax(logits / 2.5, 1).gather(1, labels[:, None])[:, 0]
    assert torch.equal(warm.output, terms_of_logits(IMAGES, logits, labels).output)
    torch.testing.assert_close(warm.out_to_loss_grad, q)
    torch.testing.assert_close(warm.loss_curvature, q * (1 - q))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_label_out_of_range_leaves_the_gpu_usable():
    """An index out of range in a kernel would make every later call fail."""
    case = image_case(IMAGES)
    model, (images, labels) = case.model.cuda(), (part.cuda() for part in case.batch)
    with pytest.raises(InvalidInputError, match=r"sample 0: labels\[0\] is 77"):
        IMAGES.evaluate(tasks.ModelCall(model), (images, labels + 77))
    assert IMAGES.evaluate(tasks.ModelCall(model), (images, labels)).output.isfinite().all()
