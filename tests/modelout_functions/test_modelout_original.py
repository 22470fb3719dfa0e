"""Agreement with the original TRAK's classes, and code written for them."""

import modelout_cases as cases
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from trak_lite import modelout_functions as tasks

original = pytest.importorskip("trak.modelout_functions", reason="needs the original TRAK (extra: test)")
EXACT = {"rtol": 1e-12, "atol": 1e-12}


class PlainText(nn.Module):
    """The original takes a model that answers with a tensor."""

    def __init__(self):
        super().__init__()
        self.inner = cases.prepared(cases.TextModel())

    def forward(self, **inputs):
        return self.inner(**inputs).logits


def images():
    return cases.mlp(cases.C), (cases.randn(cases.B, cases.D, seed=1), torch.tensor([0, 2, 1, 2]))


def text():
    return PlainText(), cases.text_parts()


def state(model):
    return dict(model.named_parameters()), dict(model.named_buffers())


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize(
    ("name", "make"), [("ImageClassificationModelOutput", images), ("TextClassificationModelOutput", text)]
)
def test_both_methods_and_gradients_agree_with_the_original(name, make, temperature):
    """Gradients as the original's functional computer takes them: by weights, un-batched samples under vmap."""
    model, batch = make()
    given = model, *state(model)
    ours, theirs = (getattr(package, name)(temperature) for package in (tasks, original))
    for sample in zip(*batch, strict=True):
        found, expected = (task.get_output(*given, *sample) for task in (ours, theirs))
        torch.testing.assert_close(found, expected, **EXACT)
    found, expected = (task.get_out_to_loss_grad(*given, batch) for task in (ours, theirs))
    torch.testing.assert_close(found, expected, **EXACT)
    axes = (None, None, None, *([0] * len(batch)))
    found, expected = (
        vmap(grad(task.get_output, argnums=1), in_dims=axes)(*given, *batch) for task in (ours, theirs)
    )
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("weights", ["none", "given"])
def test_the_iterative_variant_takes_a_batch(weights):
    model, batch = images()
    given = model, *((None, None) if weights == "none" else state(model))
    ours, theirs = (package.IterativeImageClassificationModelOutput() for package in (tasks, original))
    for arguments, name in ((batch, "get_output"), ([batch], "get_out_to_loss_grad")):
        found = getattr(ours, name)(*given, *arguments)
        expected = getattr(theirs, name)(model, None, None, *arguments)
        torch.testing.assert_close(found, expected, **EXACT)


class Changed(tasks.ImageClassificationModelOutput):
    """Public code derives from the built-in and overrides both methods."""

    @staticmethod
    def get_output(model, weights, buffers, image, label):
        return functional_call(model, (weights, buffers), image.unsqueeze(0))[0, label]

    def get_out_to_loss_grad(self, model, weights, buffers, batch):
        image, label = batch
        logits = functional_call(model, (weights, buffers), image)
        return (1 - logits.softmax(-1)[torch.arange(len(label)), label]).unsqueeze(-1)


class Derived(tasks.ImageClassificationModelOutput):
    """Adds nothing to the contract."""


def test_a_subclass_has_the_methods_that_it_overrides_and_the_contract_of_its_base():
    model, (inputs, labels) = images()
    logits, rows = model(inputs).detach(), torch.arange(cases.B)
    kinds, call = (Changed, Derived, tasks.ImageClassificationModelOutput), tasks.ModelCall(model)
    changed, derived, plain = (kind().evaluate(call, (inputs, labels)) for kind in kinds)
    torch.testing.assert_close(changed.output.detach(), logits[rows, labels])
    torch.testing.assert_close(changed.out_to_loss_grad, 1 - logits.softmax(-1)[rows, labels])
    assert not changed.loss_curvature.any()
    assert (Changed().has_curvature, Derived().has_curvature) == (False, True)
    assert torch.equal(derived.output, plain.output)


def test_get_output_takes_a_mapping_of_one_sample():
    model, ids = cases.prepared(cases.LanguageModel()), cases.randint(cases.V, (2, cases.T), 3)
    task = tasks.CausalLanguageModelingModelOutput()
    one = task.get_output(model, None, None, {"input_ids": ids[1], "labels": ids[1]})
    whole = task.evaluate(tasks.ModelCall(model), {"input_ids": ids, "labels": ids}).output
    torch.testing.assert_close(one, whole[1])
