"""Negatives of the contrastive task: who holds them, how they are drawn, where they come from."""

import math
from types import SimpleNamespace

import pytest
import torch
from modelout_cases import Answer, D, PairModel, prepared, randn
from test_modelout_errors import Reshaped
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions import CLIPModelOutput, ModelCall

IMAGES, TEXTS = randn(6, D, seed=1), randn(6, 4, seed=2)
PAIRS = [(IMAGES[:4], TEXTS[:4]), {"image": IMAGES[4:], "text": TEXTS[4:]}]


def ready(**settings):
    task = CLIPModelOutput(simulated_batch_size=3, **settings)
    task.set_embeddings(randn(8, 3, seed=3), randn(8, 3, seed=4))
    return task


def evaluate(task, model):
    return task.evaluate(ModelCall(model), (IMAGES, TEXTS))


def test_instances_do_not_share_their_negatives_and_the_seed_decides_them():
    same, again, other = ready(seed=0), ready(seed=0), ready(seed=1)
    assert same.state_digest() == again.state_digest() != other.state_digest()
    assert len(same.state_digest()) == 64
    fresh = CLIPModelOutput(simulated_batch_size=3)
    for task, before in (
        (same, again.state_digest()),
        (fresh, None),
    ):  # without pairs, prepare changes nothing
        task.prepare(prepared(PairModel()))
        assert task.state_digest() == before
    with_pairs = [CLIPModelOutput(simulated_batch_size=3, pairs=some).settings() for some in ([], PAIRS)]
    assert with_pairs == [fresh.settings()] * 2


def test_negatives_are_distinct_pairs_drawn_uniformly():
    """Over many seeds every pair is drawn equally often, never twice in one draw, image and text together.

    Pair j has the factor 2^j in both sums of exp(-f), so that f tells which pairs were drawn.
    """
    numbers, counts = torch.arange(10.0).double() * math.log(2), torch.zeros(10)
    nothing, features = torch.zeros(10).double(), torch.eye(2).double()
    model = Answer((features[:1], features[1:]))
    for seed in range(400):
        task = CLIPModelOutput(1.0, simulated_batch_size=4, seed=seed)
        task.set_embeddings(torch.stack([nothing, numbers], 1), torch.stack([numbers, nothing], 1))
        product = float(torch.exp(-evaluate(task, model).output[0]))
        drawn = [number for number in range(10) if round(product**0.5) >> number & 1]
        assert product == pytest.approx(sum(2**number for number in drawn) ** 2, rel=1e-9)
        assert len(drawn) == 4
        counts[drawn] += 1

    assert (counts - 160).abs().max() < 5 * (400 * 0.4 * 0.6) ** 0.5  # five standard deviations


def test_a_later_change_of_the_given_embeddings_changes_nothing():
    bank, task = randn(8, 3, seed=3), CLIPModelOutput(simulated_batch_size=3)
    task.set_embeddings(bank, bank)
    before = task.state_digest()
    bank.zero_()
    assert task.state_digest() == before


@pytest.mark.parametrize(
    "form",
    [
        lambda phi, psi, s: (phi, psi, s.item()),
        lambda phi, psi, s: [phi, psi, s, "bias"],
        lambda phi, psi, s: {"image_features": phi, "text_features": psi, "logit_scale": s},
        lambda phi, psi, s: {"image_embeds": phi, "text_embeds": psi, "logit_scale": s.reshape(1)},
        lambda phi, psi, s: SimpleNamespace(image_features=phi, text_features=psi, logit_scale=s.item()),
        lambda phi, psi, s: (phi, psi, s.expand(phi.shape[0])),
    ],
)
def test_usual_answers_of_contrastive_models_are_understood(form):
    found, expected = evaluate(ready(), Reshaped(form)), evaluate(ready(), prepared(PairModel()))
    torch.testing.assert_close([*found], [*expected])


def test_a_temperature_takes_the_place_of_a_scale():
    found = evaluate(ready(temperature=2.0), Reshaped(lambda phi, psi, s: (phi, psi)))
    expected = evaluate(ready(), Reshaped(lambda phi, psi, s: (phi, psi, 2.0)))
    torch.testing.assert_close([*found], [*expected])


def test_parts_are_passed_by_keyword_by_position_or_by_other_names():
    class Model(nn.Module):
        def forward(self, pixels, tokens):
            return prepared(PairModel())(pixels, tokens)

    expected = evaluate(ready(), prepared(PairModel()))

    for names in (None, ("pixels", "tokens")):
        terms = evaluate(ready(input_names=names), Model())
        torch.testing.assert_close(terms.output, expected.output)


def in_mixed_modes(model):
    model.train()
    model.text_tower.eval()
    return model


def modes(model):
    return [module.training for module in model.modules()]


def test_get_embeddings_is_set_embeddings_of_the_models_features():
    """In eval mode, in loader order, cut at ``size``; the model's modes come back."""
    model, plain = in_mixed_modes(prepared(PairModel())), prepared(PairModel())
    loader = [(IMAGES[:4] + 1, TEXTS[:4]), (IMAGES[4:] + 1, TEXTS[4:]), "never reached"]
    image, text, _ = plain(IMAGES, TEXTS)
    expected, task = CLIPModelOutput(simulated_batch_size=3), CLIPModelOutput(simulated_batch_size=3)
    expected.set_embeddings(image[:5].detach(), text[:5].detach())

    task.get_embeddings(
        model, loader, batch_size=4, size=5, embedding_dim=3, preprocess_fn_img=lambda images: images - 1
    )

    found = evaluate(task, plain)
    torch.testing.assert_close([*found], [*evaluate(expected, plain)], rtol=1e-12, atol=1e-14)
    assert modes(model) == modes(in_mixed_modes(prepared(PairModel())))


@pytest.mark.parametrize("seed", [0, 7])
def test_prepare_embeds_the_pairs_with_the_weights_of_each_checkpoint(seed):
    """The negatives are those that get_embeddings draws for the same weights, whatever came before."""
    task = CLIPModelOutput(simulated_batch_size=3, pairs=PAIRS)
    task.prepare(prepared(PairModel(), seed=3))
    before = task.state_digest()
    model, expected = prepared(PairModel(), seed=seed), CLIPModelOutput(simulated_batch_size=3)
    expected.get_embeddings(model, PAIRS)

    task.prepare(in_mixed_modes(model))

    assert task.state_digest() == expected.state_digest() != before
    assert torch.equal(evaluate(task, model).output, evaluate(expected, model).output)
    assert modes(model) == modes(in_mixed_modes(prepared(PairModel())))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(term.requires_grad for term in evaluate(task, Answer((IMAGES[:, :3], TEXTS[:, :3], 1.0))))


def test_every_checkpoint_has_the_same_pairs_as_negatives():
    """Features of the second weights are twice those of the first; a loader gives the pairs in its order."""

    class Numbers(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(factor))

        def forward(self, image, text):
            return image * self.factor, text * self.factor, 1.0

    numbers = torch.arange(10.0)[:, None]
    task = CLIPModelOutput(simulated_batch_size=4, pairs=DataLoader(TensorDataset(numbers, numbers), 3))
    whole, half = (Answer((torch.full((6, 1), value), torch.zeros(6, 1), 1.0)) for value in (0.5, 0.25))
    task.prepare(Numbers(1.0))
    first = evaluate(task, whole).output

    task.prepare(Numbers(2.0))

    assert torch.equal(evaluate(task, half).output, first)
    assert not torch.equal(evaluate(task, whole).output, first)


def test_the_models_modes_come_back_after_an_error():
    model = in_mixed_modes(prepared(PairModel()))
    with pytest.raises(InvalidInputError, match=r"Expected .images, texts."):
        CLIPModelOutput().get_embeddings(model, [(IMAGES, TEXTS, TEXTS)])
    assert modes(model) == modes(in_mixed_modes(prepared(PairModel())))


@pytest.mark.parametrize("mode", ["autocast", "bfloat16 features"])
def test_terms_are_computed_in_float32(mode):
    """Also where autocast would put the products into half precision."""
    dtype = torch.float32 if mode == "autocast" else torch.bfloat16
    features = [part.detach().to(dtype) for part in prepared(PairModel())(IMAGES, TEXTS)]
    expected = evaluate(ready(), Answer(tuple(part.float() for part in features)))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "autocast"):
        terms = evaluate(ready(), Answer(tuple(features)))
    for term, other in zip(terms, expected, strict=True):
        assert term.dtype == torch.float32
        assert torch.equal(term, other)
