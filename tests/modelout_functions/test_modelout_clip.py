"""Negatives of the contrastive task: who holds them, how they are drawn, where they come from."""

from types import SimpleNamespace

import pytest
import torch
from modelout_cases import Answer, D, PairModel, prepared, randn
from test_modelout_errors import Reshaped, clip, ready
from torch import nn

from trak_lite.errors import InvalidInputError
from trak_lite.modelout_functions import CLIPModelOutput, ModelCall

IMAGES, TEXTS = randn(6, D, seed=1), randn(6, 4, seed=2)
PAIRS = [(IMAGES[:4], TEXTS[:4]), {"image": IMAGES[4:], "text": TEXTS[4:]}]


def evaluate(task, model):
    return task.evaluate(ModelCall(model), (IMAGES, TEXTS))


def test_instances_do_not_share_their_negatives_and_the_seed_decides_them():
    """What happens to the given embeddings later changes nothing, and neither does prepare without pairs."""
    same, again, other, bank = ready(seed=0), ready(seed=0), ready(seed=1), randn(8, 3, seed=3)
    again.set_embeddings(bank, randn(8, 3, seed=4))
    bank.zero_()
    assert same.state_digest() == again.state_digest() != other.state_digest()
    assert len(same.state_digest()) == 64
    fresh = clip()
    for task, before in ((same, again.state_digest()), (fresh, None)):
        task.prepare(prepared(PairModel()))
        assert task.state_digest() == before
    with_pairs = [clip(pairs=some).settings() for some in ([], PAIRS)]
    assert with_pairs == [fresh.settings()] * 2


class OtherNames(nn.Module):
    def forward(self, pixels, tokens):
        return prepared(PairModel())(pixels, tokens)


FORMS = [
    lambda phi, psi, s: (phi, psi, s.item()),
    lambda phi, psi, s: [phi, psi, s, "bias"],
    lambda phi, psi, s: {"image_features": phi, "text_features": psi, "logit_scale": s},
    lambda phi, psi, s: {"image_embeds": phi, "text_embeds": psi, "logit_scale": s.reshape(1)},
    lambda phi, psi, s: SimpleNamespace(image_features=phi, text_features=psi, logit_scale=s.item()),
    lambda phi, psi, s: (phi, psi, s.expand(phi.shape[0])),
]
SCALE = prepared(PairModel())(IMAGES, TEXTS)[2].item()


@pytest.mark.parametrize(
    ("settings", "model"),
    [
        *(({}, Reshaped(form)) for form in FORMS),
        ({"temperature": SCALE}, Reshaped(lambda phi, psi, s: (phi, psi))),
        *(({"input_names": names}, OtherNames()) for names in (None, ("pixels", "tokens"))),
    ],
)
def test_usual_answers_and_arguments_of_contrastive_models_are_understood(settings, model):
    """A temperature takes the place of a scale; parts are passed by keyword, by position or by other names."""
    found, expected = evaluate(ready(**settings), model), evaluate(ready(), prepared(PairModel()))
    torch.testing.assert_close([*found], [*expected])


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
    expected, task = clip(), clip()
    expected.set_embeddings(image[:5].detach(), text[:5].detach())
    settings = {"batch_size": 4, "size": 5, "embedding_dim": 3}
    task.get_embeddings(model, loader, preprocess_fn_img=lambda images: images - 1, **settings)
    found = evaluate(task, plain)
    torch.testing.assert_close([*found], [*evaluate(expected, plain)], rtol=1e-12, atol=1e-14)
    assert modes(model) == modes(in_mixed_modes(prepared(PairModel())))


@pytest.mark.parametrize("seed", [0, 7])
def test_prepare_embeds_the_pairs_with_the_weights_of_each_checkpoint(seed):
    """The negatives are those that get_embeddings draws for the same weights, whatever came before."""
    task = clip(pairs=PAIRS)
    task.prepare(prepared(PairModel(), seed=3))
    before = task.state_digest()
    model, expected = prepared(PairModel(), seed=seed), clip()
    expected.get_embeddings(model, PAIRS)
    task.prepare(in_mixed_modes(model))
    assert task.state_digest() == expected.state_digest() != before
    assert torch.equal(evaluate(task, model).output, evaluate(expected, model).output)
    assert modes(model) == modes(in_mixed_modes(prepared(PairModel())))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(term.requires_grad for term in evaluate(task, Answer((IMAGES[:, :3], TEXTS[:, :3], 1.0))))


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
