"""Agreement with the original TRAK's classes, and code written for them."""

import pytest
import torch
from modelout_cases import B, C, D, T, TextModel, V, mlp, prepared, randint, randn, text_parts
from torch import nn
from torch.func import functional_call, grad, vmap

from trak_lite import modelout_functions
from trak_lite.modelout_functions import (
    AbstractModelOutput,
    CausalLanguageModelingModelOutput,
    ImageClassificationModelOutput,
    ModelCall,
)

original = pytest.importorskip("trak.modelout_functions", reason="needs the original TRAK (extra: test)")


class PlainText(nn.Module):
    """The original takes a model that answers with a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = prepared(TextModel())

    def forward(self, **inputs):
        return self.inner(**inputs).logits


def images():
    return mlp(C), (randn(B, D, seed=1), torch.tensor([0, 2, 1, 2]))


def text():
    return PlainText(), text_parts()


def state(model):
    return dict(model.named_parameters()), dict(model.named_buffers())


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize(
    ("name", "make"),
    [("ImageClassificationModelOutput", images), ("TextClassificationModelOutput", text)],
)
def test_both_methods_agree_with_the_original(name, make, temperature):
    model, batch = make()
    ours = getattr(modelout_functions, name)(temperature)
    theirs = getattr(original, name)(temperature)

    for sample in zip(*batch, strict=True):
        torch.testing.assert_close(
            ours.get_output(model, *state(model), *sample),
            theirs.get_output(model, *state(model), *sample),
            rtol=1e-12,
            atol=1e-12,
        )
    torch.testing.assert_close(
        ours.get_out_to_loss_grad(model, *state(model), batch),
        theirs.get_out_to_loss_grad(model, *state(model), batch),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize(
    ("name", "make"),
    [("ImageClassificationModelOutput", images), ("TextClassificationModelOutput", text)],
)
def test_per_sample_gradients_agree_with_the_original(name, make):
    """Taken as the original's functional computer takes them: by weights, un-batched samples under vmap."""
    model, batch = make()

    def gradients(task):
        axes = (None, None, None, *([0] * len(batch)))
        return vmap(grad(task.get_output, argnums=1), in_dims=axes)(model, *state(model), *batch)

    theirs = gradients(getattr(original, name)())
    for key, value in gradients(getattr(modelout_functions, name)()).items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("weights", ["none", "given"])
def test_the_iterative_variant_takes_a_batch(weights):
    model, batch = images()
    given = (None, None) if weights == "none" else state(model)
    ours = modelout_functions.IterativeImageClassificationModelOutput()
    theirs = original.IterativeImageClassificationModelOutput()

    output = ours.get_output(model, *given, *batch)

    assert output.shape == (B,)
    torch.testing.assert_close(output, theirs.get_output(model, None, None, *batch), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        ours.get_out_to_loss_grad(model, *given, batch),
        theirs.get_out_to_loss_grad(model, None, None, batch),
        rtol=1e-12,
        atol=1e-12,
    )


def test_the_originals_task_names_are_known():
    assert set(original.TASK_TO_MODELOUT) <= set(modelout_functions.TASK_TO_MODELOUT)


class LogitOfLabel(AbstractModelOutput):
    """A task as the original's tutorial writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    @staticmethod
    def get_output(model, weights, buffers, image, label):
        logits = functional_call(model, (weights, buffers), image.unsqueeze(0))
        return logits[torch.arange(1), label.unsqueeze(0)].sum()

    def get_out_to_loss_grad(self, model, weights, buffers, batch):
        image, label = batch
        logits = functional_call(model, (weights, buffers), image)
        return (1 - logits.softmax(-1)[torch.arange(len(label)), label]).unsqueeze(-1)


def test_a_subclass_in_the_originals_style_works_unchanged():
    model, (inputs, labels) = images()

    terms = LogitOfLabel().evaluate(ModelCall(model), (inputs, labels))

    logits = model(inputs)
    expected = [logits[i, y] for i, y in enumerate(labels.tolist())]
    torch.testing.assert_close(terms.output, torch.stack(expected))
    q = torch.stack([1 - row.softmax(0)[y] for row, y in zip(logits, labels.tolist(), strict=True)])
    torch.testing.assert_close(terms.out_to_loss_grad, q.detach())
    assert not terms.loss_curvature.any()
    assert not LogitOfLabel.has_curvature


def test_a_subclass_in_the_originals_style_works_under_vmap():
    model, (inputs, labels) = images()
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def value(parameters, image, label):
        batch = (image.unsqueeze(0), label.unsqueeze(0))
        return LogitOfLabel().evaluate(ModelCall(model, parameters, {}), batch).output.squeeze(0)

    gradients = vmap(grad(value), in_dims=(None, 0, 0))(weights, inputs, labels)

    for index, label in enumerate(labels.tolist()):
        logit = model(inputs[index : index + 1])[0, label]
        expected = torch.autograd.grad(logit, list(model.parameters()))
        for (name, _), one in zip(model.named_parameters(), expected, strict=True):
            torch.testing.assert_close(gradients[name][index], one)


def test_original_methods_below_a_built_in_are_not_ignored():
    """Public code derives from the built-in and overrides both methods."""

    class Changed(ImageClassificationModelOutput):
        get_output = staticmethod(LogitOfLabel.get_output)
        get_out_to_loss_grad = LogitOfLabel.get_out_to_loss_grad

    model, batch = images()

    terms = Changed().evaluate(ModelCall(model), batch)

    expected = LogitOfLabel().evaluate(ModelCall(model), batch)
    torch.testing.assert_close(terms.output, expected.output)
    torch.testing.assert_close(terms.out_to_loss_grad, expected.out_to_loss_grad)


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"get_output": LogitOfLabel.get_output},
        {"get_out_to_loss_grad": LogitOfLabel.get_out_to_loss_grad},
    ],
)
def test_a_class_with_half_a_contract_is_refused(members):
    with pytest.raises(TypeError, match=r"Half must define evaluate.*or both"):
        type("Half", (AbstractModelOutput,), members)


def test_half_an_override_of_a_built_in_is_refused():
    with pytest.raises(TypeError, match=r"Half must define evaluate.*or both"):
        type("Half", (ImageClassificationModelOutput,), {"get_output": LogitOfLabel.get_output})


def test_a_subclass_of_a_task_that_adds_nothing_to_the_contract_keeps_it():
    class Base(AbstractModelOutput):
        def evaluate(self, model_call, batch):
            return ImageClassificationModelOutput().evaluate(model_call, batch)

    class Derived(Base):
        pass

    model, batch = images()

    assert Derived.has_curvature
    torch.testing.assert_close(
        Derived().evaluate(ModelCall(model), batch).output, Base().evaluate(ModelCall(model), batch).output
    )


def test_get_output_takes_a_mapping_of_one_sample():
    from modelout_cases import LanguageModel

    model, ids = prepared(LanguageModel()), randint(V, (2, T), 3)
    task = CausalLanguageModelingModelOutput()
    whole = task.evaluate(ModelCall(model), {"input_ids": ids, "labels": ids}).output

    one = task.get_output(model, None, None, {"input_ids": ids[1], "labels": ids[1]})

    torch.testing.assert_close(one, whole[1])
