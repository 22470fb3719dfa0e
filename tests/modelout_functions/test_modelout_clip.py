"""Negatives of the contrastive task: who holds them, how they are drawn, where they come from."""

from types import SimpleNamespace

import pytest
import torch
from modelout_cases import D, PairModel, prepared, randn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trak_lite.errors import InvalidInputError, StateError
from trak_lite.modelout_functions import CLIPModelOutput, ModelCall

IMAGES, TEXTS = randn(6, D, seed=1), randn(6, 4, seed=2)


def ready(**settings) -> CLIPModelOutput:
    task = CLIPModelOutput(simulated_batch_size=3, **settings)
    task.set_embeddings(randn(8, 3, seed=3), randn(8, 3, seed=4))
    return task


def evaluate(task, model, batch=(IMAGES, TEXTS)):
    return task.evaluate(ModelCall(model), batch)


class Reshaped(nn.Module):
    """The pair model with its answer in another form."""

    def __init__(self, form) -> None:
        super().__init__()
        self.pair, self.form = prepared(PairModel()), form

    def forward(self, image, text):
        return self.form(*self.pair(image, text))


def test_scoring_before_embeddings_is_a_state_error():
    with pytest.raises(StateError, match=r"no negatives yet. Call task.get_embeddings"):
        evaluate(CLIPModelOutput(), prepared(PairModel()))


def test_instances_do_not_share_their_negatives():
    ready()

    assert CLIPModelOutput(simulated_batch_size=3).state_digest() is None


def test_the_seed_decides_the_negatives():
    same, again, other = ready(seed=0), ready(seed=0), ready(seed=1)

    assert same.state_digest() == again.state_digest()
    assert same.state_digest() != other.state_digest()


def test_negatives_are_distinct_pairs_drawn_uniformly():
    """Over many seeds every pair is drawn equally often, never twice in one draw, image and text together."""
    bank = torch.arange(10.0)[:, None]
    counts = torch.zeros(10)
    for seed in range(400):
        task = CLIPModelOutput(simulated_batch_size=4, seed=seed)
        task.set_embeddings(bank, bank + 100)
        image, text = task._negatives
        assert torch.equal(text, image + 100)
        assert image.unique().numel() == 4
        counts[image[:, 0].long()] += 1

    assert (counts - 160).abs().max() < 5 * (400 * 0.4 * 0.6) ** 0.5  # five standard deviations


def test_a_later_change_of_the_given_embeddings_changes_nothing():
    bank = randn(8, 3, seed=3)
    task = CLIPModelOutput(simulated_batch_size=3)
    task.set_embeddings(bank, bank)
    before = task.state_digest()

    bank.zero_()

    assert task.state_digest() == before


@pytest.mark.parametrize(
    "form",
    [
        lambda phi, psi, s: [phi, psi, s, "bias"],
        lambda phi, psi, s: {"image_features": phi, "text_features": psi, "logit_scale": s},
        lambda phi, psi, s: {"image_embeds": phi, "text_embeds": psi, "logit_scale": s.reshape(1)},
        lambda phi, psi, s: SimpleNamespace(image_features=phi, text_features=psi, logit_scale=s.item()),
        lambda phi, psi, s: (phi, psi, s.expand(phi.shape[0])),
    ],
)
def test_usual_answers_of_contrastive_models_are_understood(form):
    expected = evaluate(ready(), prepared(PairModel()))

    terms = evaluate(ready(), Reshaped(form))

    for left, right in zip(terms, expected, strict=True):
        torch.testing.assert_close(left, right)


def test_a_model_without_scale_needs_a_temperature():
    model = Reshaped(lambda phi, psi, s: (phi, psi))

    assert evaluate(ready(temperature=2.0), model).output.shape == (6,)
    with pytest.raises(InvalidInputError, match=r"gave no scale.*temperature"):
        evaluate(ready(), model)


@pytest.mark.parametrize(
    ("form", "seen"),
    [
        (lambda phi, psi, s: phi, "gave a Tensor"),
        (lambda phi, psi, s: {"image_features": phi}, "gave a dict"),
        (lambda phi, psi, s: (phi, psi[:, :2], s), r"\(6, 3\) \(image\) and \(6, 2\) \(text\)"),
        (lambda phi, psi, s: (phi, psi, s.expand(4)), r"a scale of shape \(4,\)"),
        (lambda phi, psi, s: (phi, psi, -s), r"sample 0: scale\[0\] is -.*Expected a positive factor"),
        (lambda phi, psi, s: (phi[:, :2], psi[:, :2], s), "width 2, the negatives have width 3"),
        (lambda phi, psi, s: (phi.long(), psi.long(), s), "image features has dtype torch.int64"),
    ],
)
def test_other_answers_are_described(form, seen):
    with pytest.raises(InvalidInputError, match=seen):
        evaluate(ready(), Reshaped(form))


@pytest.mark.parametrize("batch", [(IMAGES,), (IMAGES, TEXTS, TEXTS), IMAGES])
def test_a_batch_that_is_no_pair_is_refused(batch):
    with pytest.raises(InvalidInputError, match=r"Expected .images, texts."):
        evaluate(ready(), prepared(PairModel()), batch)


def test_parts_are_passed_by_keyword_by_position_or_by_other_names():
    class Model(nn.Module):
        def forward(self, pixels, tokens):
            return prepared(PairModel())(pixels, tokens)

    expected = evaluate(ready(), prepared(PairModel()))

    for names in (None, ("pixels", "tokens")):
        terms = evaluate(ready(input_names=names), Model())
        torch.testing.assert_close(terms.output, expected.output)


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"simulated_batch_size": 0}, "simulated_batch_size"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"input_names": ("image",)}, "two distinct names"),
    ],
)
def test_settings_out_of_range_are_refused(settings, seen):
    with pytest.raises(InvalidInputError, match=seen):
        CLIPModelOutput(**settings)


@pytest.mark.parametrize(
    ("image", "text", "seen"),
    [
        ((8, 3), (8, 2), "same .N, d. for both"),
        ((8,), (8,), "same .N, d. for both"),
        ((2, 3), (2, 3), "2 embedded pairs. Expected at least simulated_batch_size = 3"),
    ],
)
def test_embeddings_that_cannot_serve_are_refused(image, text, seen):
    with pytest.raises(InvalidInputError, match=seen):
        CLIPModelOutput(simulated_batch_size=3).set_embeddings(torch.zeros(image), torch.zeros(text))


def test_get_embeddings_is_set_embeddings_of_the_models_features():
    """In eval mode, in loader order, cut at ``size``; the model's modes come back."""
    model = prepared(PairModel())
    model.train()
    model.text_tower.eval()
    loader = [(IMAGES[:4] + 1, TEXTS[:4]), (IMAGES[4:] + 1, TEXTS[4:]), "never reached"]
    with torch.no_grad():
        image, text, _ = model(IMAGES, TEXTS)
    expected = CLIPModelOutput(simulated_batch_size=3)
    expected.set_embeddings(image[:5], text[:5])

    task = CLIPModelOutput(simulated_batch_size=3)
    task.get_embeddings(
        model, loader, batch_size=4, size=5, embedding_dim=3, preprocess_fn_img=lambda images: images - 1
    )

    for left, right in zip(task._negatives, expected._negatives, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)
    assert (model.training, model.text_tower.training) == (True, False)


def pairs_in_batches():
    return [(IMAGES[:4], TEXTS[:4]), {"image": IMAGES[4:], "text": TEXTS[4:]}]


@pytest.mark.parametrize("seed", [0, 7])
def test_prepare_embeds_the_pairs_with_the_weights_of_each_checkpoint(seed):
    """The negatives are those that get_embeddings draws for the same weights, whatever came before."""
    task = CLIPModelOutput(simulated_batch_size=3, pairs=pairs_in_batches())
    task.prepare(prepared(PairModel(), seed=3))
    before = task.state_digest()
    model = prepared(PairModel(), seed=seed)
    expected = CLIPModelOutput(simulated_batch_size=3)
    expected.get_embeddings(model, pairs_in_batches())

    task.prepare(model)

    assert task.state_digest() == expected.state_digest() != before
    assert torch.equal(evaluate(task, model).output, evaluate(expected, model).output)


def test_every_checkpoint_has_the_same_pairs_as_negatives():
    """Features of weights 1 and 2 are told apart by their size only."""

    class Numbers(nn.Module):
        def __init__(self, factor) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(factor))

        def forward(self, image, text):
            return image * self.factor, text * self.factor, 1.0

    numbers = torch.arange(10.0)[:, None]
    task = CLIPModelOutput(simulated_batch_size=4, pairs=DataLoader(TensorDataset(numbers, numbers), 3))
    task.prepare(Numbers(1.0))
    first, _ = task._negatives

    task.prepare(Numbers(2.0))

    assert torch.equal(task._negatives[0], 2 * first)
    assert not any(part.requires_grad for part in task._negatives)


def test_prepare_leaves_the_model_as_it_was():
    model = prepared(PairModel())
    model.train()
    model.text_tower.eval()

    CLIPModelOutput(simulated_batch_size=3, pairs=pairs_in_batches()).prepare(model)

    assert (model.training, model.text_tower.training) == (True, False)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_without_pairs_prepare_keeps_the_negatives_that_were_set():
    task = ready()
    before = task.state_digest()

    task.prepare(prepared(PairModel()))

    assert task.state_digest() == before
    fresh = CLIPModelOutput(simulated_batch_size=3)
    fresh.prepare(prepared(PairModel()))
    assert fresh.state_digest() is None


def test_pairs_are_told_by_the_state_digest_and_not_by_the_settings():
    task, other = (CLIPModelOutput(simulated_batch_size=3, pairs=some) for some in ([], pairs_in_batches()))

    assert task.settings() == other.settings() == CLIPModelOutput(simulated_batch_size=3).settings()


@pytest.mark.parametrize(
    ("pairs", "seen"),
    [
        (iter([]), "pairs is a list_iterator. Expected a list of batches or a loader"),
        (3, "pairs is a int"),
        (DataLoader(TensorDataset(IMAGES, TEXTS), shuffle=True), "DataLoader that shuffles.*shuffle=False"),
    ],
)
def test_pairs_that_differ_between_checkpoints_are_refused(pairs, seen):
    with pytest.raises(InvalidInputError, match=seen):
        CLIPModelOutput(pairs=pairs)


@pytest.mark.parametrize(
    ("pairs", "seen"), [([], "gave no batch"), ([(IMAGES[:2], TEXTS[:2])], "2 embedded pairs")]
)
def test_too_few_pairs_are_refused(pairs, seen):
    with pytest.raises(InvalidInputError, match=seen):
        CLIPModelOutput(simulated_batch_size=3, pairs=pairs).prepare(prepared(PairModel()))


def test_the_models_modes_come_back_after_an_error():
    model = prepared(PairModel())
    model.train()

    with pytest.raises(InvalidInputError, match=r"Expected .images, texts."):
        CLIPModelOutput().get_embeddings(model, [(IMAGES, TEXTS, TEXTS)])

    assert model.training


def test_an_empty_loader_is_refused():
    with pytest.raises(InvalidInputError, match="loader gave no batch"):
        CLIPModelOutput().get_embeddings(prepared(PairModel()), [])


def test_embeddings_of_another_width_are_refused():
    with pytest.raises(InvalidInputError, match="width 3, expected embedding_dim = 512"):
        CLIPModelOutput().get_embeddings(prepared(PairModel()), [(IMAGES, TEXTS)], embedding_dim=512)


class Answer(nn.Module):
    """Gives the same features whatever the pair."""

    def __init__(self, *answer) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, image, text):
        return self.answer


def test_autocast_does_not_put_the_products_into_half_precision():
    with torch.no_grad():
        model = Answer(*(part.float() for part in prepared(PairModel())(IMAGES, TEXTS)))
    expected = evaluate(ready(), model)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        terms = evaluate(ready(), model)

    for term, other in zip(terms, expected, strict=True):
        assert term.dtype == torch.float32
        assert torch.equal(term, other)


def test_half_precision_features_give_float32_terms():
    with torch.no_grad():
        model = Answer(*(part.bfloat16() for part in prepared(PairModel())(IMAGES, TEXTS)))

    assert [term.dtype for term in evaluate(ready(), model)] == [torch.float32] * 3
