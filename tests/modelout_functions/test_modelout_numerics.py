"""Terms at the edges of floating point, and in half precision."""

import math

import pytest
import torch
from modelout_cases import LanguageModel, mlp, prepared, randint, randn, terms_of_logits
from torch import Tensor, nn

from trak_lite.modelout_functions import (
    BinaryClassificationModelOutput,
    CausalLanguageModelingModelOutput,
    ImageClassificationModelOutput,
    ModelCall,
    MultiLabelModelOutput,
    RegressionModelOutput,
)

pytestmark = pytest.mark.quick


def close(actual: Tensor, expected: list[float], rtol: float = 1e-6) -> None:
    torch.testing.assert_close(
        actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=rtol, atol=0.0
    )


def test_q_keeps_its_digits_where_p_is_near_one():
    """1 - softmax would be 0 in float32 from a margin of 17 on."""
    terms = terms_of_logits(
        ImageClassificationModelOutput(), torch.tensor([[40.0, 0.0, 0.0]]), torch.tensor([0])
    )

    margin = 40.0 - math.log(2.0)
    close(terms.output, [margin])
    close(terms.out_to_loss_grad, [math.exp(-margin)], rtol=1e-5)
    close(terms.loss_curvature, [math.exp(-margin)], rtol=1e-5)


def test_w_keeps_its_digits_where_p_is_near_zero():
    """There q rounds to 1, and q (1 - q) would be 0."""
    terms = terms_of_logits(ImageClassificationModelOutput(), torch.tensor([[-30.0, 0.0]]), torch.tensor([0]))

    close(terms.out_to_loss_grad, [1.0])
    close(terms.loss_curvature, [math.exp(-30.0)], rtol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e6])
def test_a_common_offset_of_two_logits_costs_no_digits(offset):
    logits = torch.tensor([[offset + 0.5, offset], [offset, offset + 2.5]])

    terms = terms_of_logits(ImageClassificationModelOutput(), logits, torch.tensor([0, 0]))

    close(terms.output, [0.5, -2.5], rtol=0.0)


def test_a_thousand_classes_agree_with_float64_softmax():
    logits = randn(8, 1000, seed=0).float() * 10
    labels = randint(1000, (8,), 1)

    terms = terms_of_logits(ImageClassificationModelOutput(), logits, labels)

    p = torch.softmax(logits.double(), 1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(terms.output.double(), torch.log(p) - torch.log1p(-p), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(terms.out_to_loss_grad.double(), 1 - p, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(terms.loss_curvature.double(), p * (1 - p), rtol=1e-5, atol=1e-12)


def test_huge_logits_give_finite_terms_and_gradients():
    logits = torch.tensor([[1e30, -1e30, 0.0], [-1e30, 1e30, 0.0]], requires_grad=True)

    terms = terms_of_logits(ImageClassificationModelOutput(), logits, torch.tensor([0, 0]))
    (gradient,) = torch.autograd.grad(terms.output.sum(), logits)

    assert all(bool(term.isfinite().all()) for term in terms)
    assert bool(gradient.isfinite().all())
    close(terms.out_to_loss_grad, [0.0, 1.0])


def test_a_class_that_is_ruled_out_by_minus_infinity_does_not_count():
    with_it = torch.tensor([[1.0, -torch.inf, 2.0]], requires_grad=True)
    without = torch.tensor([[1.0, 2.0]])

    terms = terms_of_logits(ImageClassificationModelOutput(), with_it, torch.tensor([0]))
    (gradient,) = torch.autograd.grad(terms.output.sum(), with_it)

    expected = terms_of_logits(ImageClassificationModelOutput(), without, torch.tensor([0]))
    torch.testing.assert_close(terms.output, expected.output)
    torch.testing.assert_close(gradient, torch.tensor([[1.0, 0.0, -1.0]]))


def test_temperature_changes_q_and_w_and_not_f():
    logits, labels = randn(5, 4, seed=2), randint(4, (5,), 3)
    plain = terms_of_logits(ImageClassificationModelOutput(), logits, labels)

    warm = terms_of_logits(ImageClassificationModelOutput(temperature=2.5), logits, labels)

    q = 1 - torch.softmax(logits / 2.5, 1).gather(1, labels[:, None])[:, 0]
    assert torch.equal(warm.output, plain.output)
    torch.testing.assert_close(warm.out_to_loss_grad, q)
    torch.testing.assert_close(warm.loss_curvature, q * (1 - q))
    assert not torch.allclose(warm.out_to_loss_grad, plain.out_to_loss_grad)


def test_binary_q_keeps_its_digits_at_both_ends():
    logits = torch.tensor([50.0, 50.0, -50.0, -50.0])

    terms = terms_of_logits(BinaryClassificationModelOutput(), logits, torch.tensor([1, 0, 1, 0]))

    small = math.exp(-50.0)
    close(terms.output, [50.0, -50.0, -50.0, 50.0])
    close(terms.out_to_loss_grad, [small, 1.0, 1.0, small], rtol=1e-5)
    close(terms.loss_curvature, [small] * 4, rtol=1e-5)


def test_binary_agrees_with_a_two_class_classifier():
    """A logit l is the pair of logits (0, l)."""
    logits, labels = randn(6, seed=4), randint(2, (6,), 5)
    pairs = torch.stack([torch.zeros_like(logits), logits], dim=1)

    one = terms_of_logits(BinaryClassificationModelOutput(), logits, labels)
    two = terms_of_logits(ImageClassificationModelOutput(), pairs, labels)

    for left, right in zip(one, two, strict=True):
        torch.testing.assert_close(left, right)


def test_log_prob_keeps_its_digits_where_p_is_near_one():
    """Log-softmax would round to 0 in float32 from a margin of 17 on."""
    logits = torch.tensor([[30.0]])

    terms = terms_of_logits(MultiLabelModelOutput(output="log_prob"), logits, torch.tensor([[1]]))

    close(terms.output, [-math.exp(-30.0)], rtol=1e-5)


def test_one_label_or_one_token_is_plain_cross_entropy():
    """The loss at the mean margin is the loss itself for n = 1."""
    logits = randn(1, 2, 5, seed=6)
    ids, labels = torch.tensor([[0, 0]]), torch.tensor([[-100, 3]])
    model = Answer(logits)

    token = CausalLanguageModelingModelOutput(output="margin").evaluate(ModelCall(model), (ids, labels))

    expected = terms_of_logits(ImageClassificationModelOutput(), logits[:, 0], torch.tensor([3]))
    for left, right in zip(token, expected, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("output", ["margin", "log_prob"])
def test_padding_changes_no_term(output):
    """A sample alone without padding and the same sample padded in a batch agree."""
    model = prepared(LanguageModel())
    task = CausalLanguageModelingModelOutput(output=output)
    ids = randint(7, (1, 4), 8)
    padded = torch.cat([ids, torch.full((1, 3), 6)], dim=1)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0]])

    alone = task.evaluate(ModelCall(model), {"input_ids": ids, "labels": ids})
    batch = {
        "input_ids": torch.cat([padded, randint(7, (1, 7), 9)]),
        "attention_mask": torch.cat([mask, torch.ones_like(mask)]),
        "labels": torch.cat([padded.masked_fill(mask == 0, -100), randint(7, (1, 7), 9)]),
    }
    together = task.evaluate(ModelCall(model), batch)

    for one, many in zip(alone, together, strict=True):
        torch.testing.assert_close(many[:1], one, rtol=1e-12, atol=1e-14)


def test_the_first_label_of_a_shifted_sample_is_not_used():
    """No logit predicts it, so even a value out of range there changes nothing."""
    model = prepared(LanguageModel())
    ids = randint(7, (2, 4), 8)
    other = ids.clone()
    other[:, 0] = 999

    terms = CausalLanguageModelingModelOutput().evaluate(ModelCall(model), (ids, ids))
    changed = CausalLanguageModelingModelOutput().evaluate(ModelCall(model), (ids, other))

    assert torch.equal(terms.output, changed.output)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_give_float32_terms(dtype):
    logits, labels = randn(4, 3, seed=10).to(dtype), torch.tensor([0, 1, 2, 0])

    terms = terms_of_logits(ImageClassificationModelOutput(), logits, labels)

    expected = terms_of_logits(ImageClassificationModelOutput(), logits.float(), labels)
    for term, other in zip(terms, expected, strict=True):
        assert term.dtype == torch.float32
        assert torch.equal(term, other)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_any_integer_dtype_is_a_label_dtype(dtype):
    logits = randn(3, 4, seed=11)
    expected = terms_of_logits(ImageClassificationModelOutput(), logits, torch.tensor([3, 0, 1]))

    terms = terms_of_logits(ImageClassificationModelOutput(), logits, torch.tensor([3, 0, 1], dtype=dtype))

    assert torch.equal(terms.output, expected.output)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_binary_labels_may_be_bool_float_or_integer(dtype):
    terms = terms_of_logits(
        BinaryClassificationModelOutput(), torch.tensor([2.0, 2.0]), torch.tensor([1, 0]).to(dtype)
    )

    assert terms.output.tolist() == [2.0, -2.0]


def test_regression_q_is_signed():
    terms = terms_of_logits(
        RegressionModelOutput(), torch.tensor([1.0, 5.0]).requires_grad_(), torch.tensor([3, 2])
    )

    assert terms.output.tolist() == [1.0, 5.0]
    assert terms.out_to_loss_grad.tolist() == [2.0, -3.0]
    assert terms.loss_curvature.tolist() == [1.0, 1.0]


def test_neg_squared_error_sums_over_targets_of_any_shape():
    predictions, targets = randn(2, 3, 2, seed=12), randn(2, 3, 2, seed=13)

    terms = terms_of_logits(RegressionModelOutput(output="neg_squared_error"), predictions, targets)

    expected = [-0.5 * float(((p - t) ** 2).sum()) for p, t in zip(predictions, targets, strict=True)]
    close(terms.output, expected, rtol=1e-12)


def test_an_empty_batch_gives_empty_terms():
    terms = ImageClassificationModelOutput().evaluate(
        ModelCall(mlp(3)), (torch.zeros(0, 5, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))
    )

    assert [term.shape for term in terms] == [(0,)] * 3


class Answer(nn.Module):
    """Gives the same answer whatever the input."""

    def __init__(self, answer) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, *args, **kwargs):
        return self.answer
