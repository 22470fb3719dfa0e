"""Conformance kit for model output functions: the laws that every f, q and w must obey.

Subclass :class:`ModelOutputTests` in a test file and return a case; pytest runs the laws::

    class TestMyTask(ModelOutputTests):
        def make_case(self):
            return ModelOutputCase(task=MyTask(), model=..., batch=..., loss=..., loss_of_output=...)

Everything is checked in float64 against the loss of the case. Write this loss independently of the task. Needs
pytest (the ``test`` extra).
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from trak_lite.data.batches import batch_size, flatten_batch, take_rows
from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions import AbstractModelOutput, ModelCall
from trak_lite.modelout_functions._base import LossModelOutput
from trak_lite.modelout_functions._describe import describe_task
from trak_lite.types import Batch, OutputTerms

_RTOL, _ATOL = 1e-9, 1e-11
_DRAWS = ((128, 2.0), (512, 12.0))
"""Numbers of draws, and how often its expectation the squared norm of their mean may be: the same mean for both."""


@dataclass(frozen=True)
class ModelOutputCase:
    """A task with the model, data and losses that its laws are tested with."""

    task: AbstractModelOutput
    model: nn.Module
    """Small, deterministic, in eval mode, all parameters float64. If the task draws labels, not certain of them."""
    batch: Batch
    """At least two samples of train rows."""
    loss: Callable[[nn.Module, Batch], Tensor]
    """L of every sample ``(B,)`` from the model, written independently of the task."""
    loss_of_output: Callable[[Tensor], Tensor]
    """L of every sample of ``batch`` as a function of f, ``(B,) -> (B,)``, twice differentiable."""
    invalid: Sequence[tuple[Batch, int]] = ()
    """Batches of the right structure in which only the sample with the given index has no valid terms."""
    log_likelihood: Callable[[nn.Module, Batch], Tensor] | None = None
    """Log p of the labels of every sample ``(B,)``, up to a constant, written as ``loss`` is. ``None`` for minus
    ``loss``. Needed for a task that defines ``log_likelihood`` because ``loss`` is another one."""


class ModelOutputTests:
    """Laws of model output functions; a subclass defines :meth:`make_case` or overrides the fixture ``case``."""

    def make_case(self) -> ModelOutputCase:
        """Return a fresh case."""
        raise NotImplementedError(f"{type(self).__name__} must define make_case() or the fixture `case`.")

    @pytest.fixture
    def case(self) -> ModelOutputCase:
        """The case that the laws are checked on."""
        return self.make_case()

    def test_terms_are_one_finite_float64_number_per_sample(self, case: ModelOutputCase) -> None:
        """f, q and w have shape (B,); only f carries a graph."""
        terms = _evaluate(case)

        for term in terms:
            assert term.shape == (batch_size(case.batch),)
            assert term.dtype == torch.float64
            assert bool(term.isfinite().all())
        assert terms.output.requires_grad
        assert not terms.out_to_loss_grad.requires_grad
        assert not terms.loss_curvature.requires_grad

    def test_output_gradient_passes_gradcheck(self, case: ModelOutputCase) -> None:
        """Autograd through f agrees with finite differences in every parameter."""
        names, values = zip(*case.model.named_parameters(), strict=True)

        def output(*tensors: Tensor) -> Tensor:
            call = ModelCall(case.model, dict(zip(names, tensors, strict=True)))
            return case.task.evaluate(call, case.batch).output

        inputs = tuple(value.detach().clone().requires_grad_() for value in values)
        assert torch.autograd.gradcheck(output, inputs)

    def test_loss_gradient_is_minus_q_times_output_gradient(self, case: ModelOutputCase) -> None:
        """For every sample, grad L == -q * grad f, where L is the loss of the case."""
        _check_gradients(case.task, case, -case.loss(case.model, case.batch))

    def test_the_log_likelihood_has_the_gradient_of_log_p(self, case: ModelOutputCase) -> None:
        """For the task that ``log_likelihood()`` returns, q * grad f is the gradient of log p, if it returns one."""
        if (likelihood := case.task.log_likelihood()) is None:
            pytest.skip("the task does not define log_likelihood")
        log_p = case.log_likelihood or (lambda model, batch: -case.loss(model, batch))
        _check_gradients(likelihood, case, log_p(case.model, case.batch))

    def test_the_train_task_has_the_terms_of_the_task(self, case: ModelOutputCase) -> None:
        """For train rows, because its description identifies what is computed by the task itself."""
        terms = case.task.train_task().evaluate(ModelCall(case.model), case.batch)

        torch.testing.assert_close(terms, _evaluate(case), rtol=_RTOL, atol=_ATOL)

    def test_q_and_w_are_the_derivatives_of_the_loss_by_the_output(self, case: ModelOutputCase) -> None:
        """Differentiating the loss twice gives q = -dL/df and w = d2L/df2."""
        terms = _evaluate(case)
        value = terms.output.detach().requires_grad_()
        (slope,) = torch.autograd.grad(case.loss_of_output(value).sum(), value, create_graph=True)

        torch.testing.assert_close(terms.out_to_loss_grad, -slope.detach(), rtol=_RTOL, atol=_ATOL)
        if case.task.has_curvature:
            (curvature,) = torch.autograd.grad(slope.sum(), value)
            torch.testing.assert_close(terms.loss_curvature, curvature, rtol=_RTOL, atol=_ATOL)
            assert bool((curvature > 0).all()), "has_curvature is True, but the loss is not curved in f"
        else:
            assert not terms.loss_curvature.any(), "has_curvature is False, but w is not zero"

    def test_a_sample_does_not_depend_on_its_batch(self, case: ModelOutputCase) -> None:
        """A sample has the same terms alone, in its batch and in a permuted batch."""
        whole = _evaluate(case)
        count = batch_size(case.batch)
        order = list(reversed(range(count)))
        permuted = _evaluate(case, take_rows(case.batch, order))
        alone = [_evaluate(case, take_rows(case.batch, [index])) for index in range(count)]

        for position, term in enumerate(whole):
            torch.testing.assert_close(permuted[position], term[order], rtol=_RTOL, atol=_ATOL)
            together = torch.cat([terms[position] for terms in alone])
            torch.testing.assert_close(together, term, rtol=_RTOL, atol=_ATOL)

    def test_terms_and_gradients_under_vmap_equal_eager_ones(self, case: ModelOutputCase) -> None:
        """``vmap(grad(f))`` over samples gives what one backward per sample gives, with no warning."""
        eager = _evaluate(case)
        gradients, terms = _transformed(case, case.batch)

        for mapped, term in zip(terms, eager, strict=True):
            torch.testing.assert_close(mapped, term.detach(), rtol=_RTOL, atol=_ATOL)
        for index, row in enumerate(gradients):
            expected = _gradient(eager.output[index], case.model)
            torch.testing.assert_close(row, expected, rtol=_RTOL, atol=_ATOL)

    def test_the_mean_gradient_over_drawn_labels_is_zero(self, case: ModelOutputCase) -> None:
        """The mean over drawn labels of the gradient of log p is zero, as over labels of the model's distribution."""
        if not case.task.can_sample:
            pytest.skip("the task does not draw labels")
        task, call, count = LossModelOutput(case.task), ModelCall(case.model), batch_size(case.batch)
        generator = torch.Generator().manual_seed(0)

        def noise(shape: Sequence[int]) -> Tensor:
            return torch.rand((count, *shape), generator=generator, dtype=torch.float64)

        expected = 0.0
        if case.task.has_curvature and case.task.log_likelihood() is None:
            # The expected variance: a confident model may draw no rare label, and then there is none.
            terms = _evaluate(case)
            squares = (_gradient(f, case.model).square().sum() for f in terms.output)
            weighted = (w * square for w, square in zip(terms.loss_curvature, squares, strict=True))
            expected = float(sum(weighted))
        rows: list[Tensor] = []
        for draws, bound in _DRAWS:
            while len(rows) < draws:
                drawn = case.task.sample_labels(call, copy.deepcopy(case.batch), noise)
                rows.append(_gradient(task.evaluate(call, drawn).output.sum(), case.model))
            variance, mean = torch.var_mean(torch.stack(rows), 0)
            # The mean of D draws has the squared norm tr(cov) / D in expectation.
            limit = bound * max(float(variance.sum()), expected) / draws + _ATOL
            if float(mean.square().sum()) <= limit:
                return
        pytest.fail(
            "The loss is no negative log-likelihood of the drawn labels: the mean of its gradients is not 0."
        )

    def test_drawn_labels_of_a_sample_are_a_function_of_its_noise(self, case: ModelOutputCase) -> None:
        """A sample gets the same labels in its batch and alone, with the same noise, as a resumed fit needs them."""
        if not case.task.can_sample:
            pytest.skip("the task does not draw labels")
        count = batch_size(case.batch)

        def drawn(rows: list[int], seed: int) -> list[Tensor]:
            generator = torch.Generator().manual_seed(seed)

            def noise(shape: Sequence[int]) -> Tensor:
                return torch.rand((count, *shape), generator=generator, dtype=torch.float64)[rows]

            batch = copy.deepcopy(take_rows(case.batch, rows))
            return flatten_batch(case.task.sample_labels(ModelCall(case.model), batch, noise))[0]

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # what a task draws from torch's own generator differs from call to call
            for seed in range(8):
                together = drawn(list(range(count)), seed)
                alone = zip(*(drawn([row], seed) for row in range(count)), strict=True)
                for whole, parts in zip(together, alone, strict=True):
                    found = torch.cat(parts)
                    torch.testing.assert_close(found, whole, rtol=_RTOL, atol=_ATOL, equal_nan=True)

    def test_an_invalid_sample_is_named_when_run_eagerly_and_nan_under_vmap(
        self, case: ModelOutputCase
    ) -> None:
        """Under vmap, f and its gradient are NaN for the invalid sample only."""
        if not case.invalid:
            pytest.skip("the case names no invalid sample")
        for batch, sample in case.invalid:
            with pytest.raises(InvalidInputError, match=rf"[Ss]ample {sample}\b"):
                _evaluate(case, batch)
            gradients, terms = _transformed(case, batch)

            assert bool(terms.output[sample].isnan())
            assert bool(gradients[sample].isnan().any())
            others = [index for index in range(batch_size(batch)) if index != sample]
            assert bool(terms.output[others].isfinite().all())
            assert bool(gradients[others].isfinite().all())

    def test_original_out_to_loss_grad_is_q_as_a_column(self, case: ModelOutputCase) -> None:
        """The original TRAK's method and ``evaluate`` return the same q."""
        weights, buffers = dict(case.model.named_parameters()), dict(case.model.named_buffers())
        column = case.task.get_out_to_loss_grad(case.model, weights, buffers, case.batch)

        assert column.shape[0] == batch_size(case.batch)
        torch.testing.assert_close(column.reshape(-1), _evaluate(case).out_to_loss_grad)

    def test_evaluate_leaves_the_batch_as_it_was(self, case: ModelOutputCase) -> None:
        before = copy.deepcopy(case.batch)
        _evaluate(case)

        assert type(case.batch) is type(before)
        tensors, _ = flatten_batch(case.batch)
        expected, _ = flatten_batch(before)
        assert len(tensors) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(tensors, expected, strict=True))

    def test_the_description_is_json_and_stable(self, case: ModelOutputCase) -> None:
        """A copy of the task has the same description, and evaluating the task does not change it."""
        before = describe_task(case.task)
        _evaluate(case)

        assert json.loads(json.dumps(before, allow_nan=False)) == before
        assert describe_task(case.task) == before
        assert describe_task(copy.deepcopy(case.task)) == before


def _evaluate(case: ModelOutputCase, batch: Batch = None) -> OutputTerms:
    """Run the task eagerly on the case's batch or another one."""
    return case.task.evaluate(ModelCall(case.model), case.batch if batch is None else batch)


def _check_gradients(task: AbstractModelOutput, case: ModelOutputCase, expected: Tensor) -> None:
    """Assert that q * grad f of every sample is the gradient of ``expected``."""
    terms = task.evaluate(ModelCall(case.model), case.batch)
    for value, output, q in zip(expected, terms.output, terms.out_to_loss_grad, strict=True):
        of_output = q * _gradient(output, case.model)
        torch.testing.assert_close(of_output, _gradient(value, case.model), rtol=_RTOL, atol=_ATOL)


def _gradient(value: Tensor, model: nn.Module) -> Tensor:
    """Return the flat gradient of a scalar by all parameters; zeros for parameters that it does not depend on."""
    parts = torch.autograd.grad(value, list(model.parameters()), retain_graph=True, materialize_grads=True)
    return torch.cat([part.reshape(-1) for part in parts])


def _transformed(case: ModelOutputCase, batch: Batch) -> tuple[Tensor, OutputTerms]:
    """Return per-sample gradients ``(B, P)`` and the terms by ``vmap(grad)``; a warning is an error."""
    leaves, rebuild = flatten_batch(batch)
    buffers = dict(case.model.named_buffers())

    def value(parameters: dict[str, Tensor], sample: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        one = rebuild([leaf.unsqueeze(0) for leaf in sample])
        terms = case.task.evaluate(ModelCall(case.model, parameters, buffers), one)
        return terms.output.squeeze(0), tuple(term.detach().squeeze(0) for term in terms)

    parameters = {name: p.detach() for name, p in case.model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        per_sample, terms = vmap(grad(value, has_aux=True), in_dims=(None, 0))(parameters, leaves)
    rows = torch.cat([part.reshape(part.shape[0], -1) for part in per_sample.values()], dim=1)
    return rows, OutputTerms(*terms)
