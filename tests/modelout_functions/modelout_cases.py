"""Cases for tasks whose f is made of logits and labels; losses are plain loops, independent of the package."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from trak_lite import modelout_functions as tasks
from trak_lite.testing import ModelOutputCase

B, C, D, T, V = 4, 3, 5, 6, 7
IGNORED = -100


def randn(*shape, seed):
    return torch.as_tensor(np.random.RandomState(seed).standard_normal(shape))


def randint(high, shape, seed):
    return torch.from_numpy(np.random.RandomState(seed).randint(high, size=shape).astype(np.int64))


def prepared(model, seed=0):
    """The model in float64 and eval mode with seeded parameters."""
    model, random = model.double().eval(), np.random.RandomState(seed)
    for parameter in model.parameters():
        parameter.data.copy_(0.5 * randn(*parameter.shape, seed=random.randint(2**31)))
    return model


# ---- Models
class Answer(nn.Module):
    """Gives the same answer whatever the input."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, *args, **kwargs):
        return self.answer


def mlp(outputs):
    return prepared(nn.Sequential(nn.Flatten(), nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, outputs)))


class TextModel(nn.Module):
    """Masked mean of token and type embeddings; answers as Hugging Face models do."""

    def __init__(self):
        super().__init__()
        self.tokens, self.types, self.head = nn.Embedding(V, 4), nn.Embedding(2, 4), nn.Linear(4, C)

    def forward(self, input_ids, token_type_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1).double()
        states = (self.tokens(input_ids) + self.types(token_type_ids)) * mask
        return SimpleNamespace(logits=self.head(states.sum(1) / mask.sum(1)))


class LanguageModel(nn.Module):
    """Causal running mean of token embeddings; answers with a mapping."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(V, 4), nn.Linear(4, V)

    def forward(self, input_ids, attention_mask=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mask = mask.unsqueeze(-1).double()
        sums = (self.tokens(input_ids) * mask).cumsum(1)
        return {"logits": self.head(torch.tanh(sums / mask.cumsum(1).clamp(min=1.0)))}


class EncoderDecoder(nn.Module):
    """The running mean of the decoder's tokens, shifted by the mean of the encoder's."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(V, 4), nn.Linear(4, V)

    def forward(self, input_ids, decoder_input_ids):
        counts = torch.arange(1, decoder_input_ids.shape[1] + 1).double()[:, None]
        states = self.tokens(decoder_input_ids).cumsum(1) / counts
        return {"logits": self.head(torch.tanh(states + self.tokens(input_ids).mean(1, keepdim=True)))}


class PixelModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, C, 1)

    def forward(self, image):
        return {"out": self.last(torch.tanh(self.first(image)))}


class PairModel(nn.Module):
    """Two linear towers on the sphere and a learned scale."""

    def __init__(self):
        super().__init__()
        self.image_tower, self.text_tower = nn.Linear(D, 3), nn.Linear(4, 3)
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, image, text):
        phi = F.normalize(self.image_tower(image), dim=-1)
        psi = F.normalize(self.text_tower(text), dim=-1)
        return phi, psi, self.log_scale.exp()


# ---- Losses of one sample, from the logits and the label of each of its positions


def softplus(x):
    return torch.log1p(torch.exp(x))


def log_odds(logits, label):
    """log(p / (1 - p)) from the softmax itself."""
    p = torch.softmax(logits, -1)[label]
    return torch.log(p / (1 - p))


def loss_of_pairs(output, pairs):
    """The summed cross-entropy, or n log(1 + exp(-mean margin)); the same thing for n = 1."""
    if output == "margin" and len(pairs) > 1:
        return len(pairs) * softplus(-sum(log_odds(logits, y) for logits, y in pairs) / len(pairs))
    return -sum(torch.log(torch.softmax(logits, -1)[label]) for logits, label in pairs)


def pairs_of(logits, labels, *, offset=0, ignored=IGNORED):
    """Pairs of each row of logits ``(B, T, V)`` and labels ``(B, T)``; logits lie ``offset`` before their label."""
    return [
        [(row[t - offset], y) for t, y in enumerate(some) if t >= offset and y != ignored]
        for row, some in zip(logits, labels.tolist(), strict=True)
    ]


def binary_pairs(logits, labels):
    """A logit l is the pair of logits (0, l) of two classes."""
    return pairs_of(torch.stack([torch.zeros_like(logits), logits], -1), labels)


def case_of(task, model, batch, labels, pairs, *wrong, output="margin"):
    """``batch`` makes one of labels; wrong are places in the labels, whose first axis is the sample, and values."""
    counts = torch.tensor([len(some) for some in pairs(model)])

    def loss(model, batch, output=output):
        return torch.stack([loss_of_pairs(output, some) for some in pairs(model)])

    log_p = lambda model, batch: -loss(model, batch, "log_prob")  # noqa: E731
    of_output = (lambda f: counts * softplus(-f / counts)) if output == "margin" else torch.neg
    others = [changed(labels.double() if value == 0.5 else labels, place, value) for place, value in wrong]
    invalid = [(batch(some), place[0]) for some, (place, _) in zip(others, wrong, strict=True)]
    return ModelOutputCase(task, model, batch(labels), loss, of_output, invalid, log_p)


def changed(part, place, value):
    part = part.clone()
    part[place] = value
    return part


# ---- Cases
@dataclass
class ImageBatch:
    input: Tensor
    label: Tensor


FORMS = {
    "tuple": lambda images, labels: (images, labels),
    "dict": lambda images, labels: {"label": labels, "input": images},
    "dataclass": ImageBatch,
}


def image_case(task, form="tuple"):
    images, labels = randn(B, D, seed=1), torch.tensor([0, 2, 1, 2])
    pairs = lambda model: pairs_of(model(images)[:, None], labels[:, None])  # noqa: E731
    return case_of(task, mlp(C), partial(FORMS[form], images), labels, pairs, ((2,), C), ((1,), -1))


def text_parts():
    mask = torch.tensor([[1] * T, [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1] * T])
    return randint(V, (B, T), 2), randint(2, (B, T), 3), mask, torch.tensor([1, 0, 2, 2])


def text_case(*, as_dict):
    ids, types, mask, labels = text_parts()

    def batch(labels):
        if as_dict:
            return {"labels": labels, "input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        return ids, types, mask, labels

    pairs = lambda model: pairs_of(model(ids, types, mask).logits[:, None], labels[:, None])  # noqa: E731
    task, model = tasks.TextClassificationModelOutput(), prepared(TextModel())
    return case_of(task, model, batch, labels, pairs, ((3,), 99))


def binary_case(*, column):
    inputs, labels = randn(B, D, seed=4), torch.tensor([0, 1, 1, 0])
    task, model = tasks.BinaryClassificationModelOutput(), mlp(1)
    model = model if column else nn.Sequential(model, nn.Flatten(0))
    pairs = lambda model: binary_pairs(model(inputs).reshape(B, 1), labels[:, None])  # noqa: E731
    return case_of(task, model, lambda labels: (inputs, labels), labels, pairs, ((2,), 2), ((3,), 0.5))


def multilabel_case(output):
    inputs, labels = randn(B, D, seed=5), randint(2, (B, C), 6)
    task, wrong = tasks.MultiLabelModelOutput(output=output), ((1, 2), -1)
    pairs = lambda model: binary_pairs(model(inputs), labels)  # noqa: E731
    return case_of(task, mlp(C), lambda labels: (inputs, labels), labels, pairs, wrong, output=output)


def regression_case(output, outputs=1):
    """Predictions ``(B, 1)`` have targets ``(B,)``."""
    scalar = output == "prediction"
    inputs, targets = randn(B, D, seed=7), randn(B, *() if scalar else (outputs,), seed=8)
    loss = lambda model, batch: (model(batch[0]) - batch[1].reshape(B, -1)).pow(2).sum(1) / 2  # noqa: E731
    of_output = (lambda f: (f - targets).pow(2) / 2) if scalar else torch.neg
    task, wrong = tasks.RegressionModelOutput(output=output), changed(targets, (2, ...), torch.nan)
    return ModelOutputCase(task, mlp(outputs), (inputs, targets), loss, of_output, [((inputs, wrong), 2)])


def language_labels(ids):
    labels = ids.clone()
    labels[1, 3:] = IGNORED
    labels[2, :4] = IGNORED
    return labels


def language_case(output, *, shift=True, form="dict"):
    ids = randint(V, (B, T), 9)
    mask, labels = changed(torch.ones_like(ids), (1, slice(3, None)), 0), language_labels(ids)
    offset = int(shift)

    def batch(labels):
        if form == "dict":
            return {"input_ids": ids, "attention_mask": mask, "labels": labels}
        return (ids, labels) if form == "pair" else (ids, mask, labels)

    given = None if form == "pair" else mask
    pairs = lambda model: pairs_of(model(ids, given)["logits"], labels, offset=offset)  # noqa: E731
    task = tasks.CausalLanguageModelingModelOutput(output=output, shift=shift)
    wrong = ((3, 2), V), ((0, slice(offset, None)), IGNORED)
    return case_of(task, prepared(LanguageModel()), batch, labels, pairs, *wrong, output=output)


def masked_case(output):
    ids, labels = randint(V, (B, T), 20), language_labels(randint(V, (B, T), 21))
    task, wrong = tasks.MaskedLanguageModelingModelOutput(output=output), (((3, 0), V), ((0,), IGNORED))
    batch = lambda labels: {"input_ids": ids, "labels": labels}  # noqa: E731
    pairs = lambda model: pairs_of(model(ids)["logits"], labels)  # noqa: E731
    return case_of(task, prepared(LanguageModel()), batch, labels, pairs, *wrong, output=output)


def seq2seq_case(output, *, explicit):
    """Start token 1, padding token 0."""
    ids, labels = randint(V, (B, 3), 22), language_labels(randint(V, (B, T), 23))
    decoder = torch.tensor([[1, *(0 if y == IGNORED else y for y in row[:-1])] for row in labels.tolist()])
    more = {"decoder_input_ids": decoder} if explicit else {}
    tokens = {} if explicit else {"decoder_start_token_id": 1, "pad_token_id": 0}
    task = tasks.SequenceToSequenceModelOutput(output=output, **tokens)
    batch = lambda labels: {"input_ids": ids, "labels": labels, **more}  # noqa: E731
    pairs = lambda model: pairs_of(model(ids, decoder)["logits"], labels)  # noqa: E731
    # The last label: any other one is an input of the decoder, whose embedding would fail first.
    wrong = ((3, T - 1), V), ((0,), IGNORED)
    return case_of(task, prepared(EncoderDecoder()), batch, labels, pairs, *wrong, output=output)


def dense_case(output):
    """Images of 4 x 5 pixels, 255 for no label."""
    images, labels = randn(B, 1, 4, 5, seed=24), randint(C, (B, 4, 5), 25)
    labels[1, :2] = 255
    labels[2, 1:, :4] = 255

    def pairs(model):
        return pairs_of(model(images)["out"].flatten(2).mT, labels.flatten(1), ignored=255)

    task = tasks.DenseClassificationModelOutput(output=output, ignore_index=255)
    wrong, batch = (((3, 2, 2), C), ((2,), 255)), lambda labels: (images, labels)
    return case_of(task, prepared(PixelModel()), batch, labels, pairs, *wrong, output=output)


def dense_token_case():
    """Classes on the last axis, as of tokens or of a detector's queries."""
    ids, labels = randint(V, (B, T), 26), language_labels(randint(V, (B, T), 27))
    task, model = tasks.DenseClassificationModelOutput(class_axis=-1), prepared(LanguageModel())
    batch = lambda labels: {"input_ids": ids, "labels": labels}  # noqa: E731
    pairs = lambda model: pairs_of(model(ids)["logits"], labels)  # noqa: E731
    return case_of(task, model, batch, labels, pairs, output="log_prob")


def clip_case(temperature=None):
    model, bank_image, bank_text = prepared(PairModel()), randn(9, 3, seed=10), randn(9, 3, seed=11)
    task = tasks.CLIPModelOutput(temperature, simulated_batch_size=4, seed=3)
    task.set_embeddings(bank_image, bank_text)
    chosen = torch.randperm(9, generator=torch.Generator().manual_seed(3))[:4].tolist()
    s = model.log_scale.exp().item() if temperature is None else temperature

    def loss(model, batch):
        losses = []
        for phi, psi in zip(*model(**batch)[:2], strict=True):
            by_text = sum(torch.exp(-(phi @ (psi - bank_text[j]))) for j in chosen)
            by_image = sum(torch.exp(-(psi @ (phi - bank_image[j]))) for j in chosen)
            losses.append(2 / s * softplus(s / 2 * (torch.log(by_text) + torch.log(by_image))))
        return torch.stack(losses)

    batch = {"image": randn(B, D, seed=12), "text": randn(B, 4, seed=13)}
    return ModelOutputCase(task, model, batch, loss, lambda f: 2 / s * softplus(-s * f / 2))


def mean_of_squares(model_call, batch):
    return model_call(batch[0]).square().mean(1)


def callable_case():
    loss = lambda model, batch: -sum(model(batch[0])[:, j] ** 2 for j in range(C)) / C  # noqa: E731
    task, batch = tasks.CallableModelOutput(mean_of_squares), (randn(B, D, seed=14),)
    return ModelOutputCase(task, mlp(C), batch, loss, torch.neg)


BUILDERS = {
    **{
        f"image_classification-{form}": lambda form=form: image_case(
            tasks.ImageClassificationModelOutput(), form
        )
        for form in FORMS
    },
    "iterative_image_classification-tuple": lambda: image_case(tasks.IterativeImageClassificationModelOutput()),
    "text_classification-positional": lambda: text_case(as_dict=False),
    "text_classification-dict": lambda: text_case(as_dict=True),
    "binary_classification-column": lambda: binary_case(column=True),
    "binary_classification-flat": lambda: binary_case(column=False),
    "multilabel_classification-margin": lambda: multilabel_case("margin"),
    "multilabel_classification-log_prob": lambda: multilabel_case("log_prob"),
    "regression-prediction": lambda: regression_case("prediction"),
    "regression-neg_squared_error": lambda: regression_case("neg_squared_error", outputs=C),
    "causal_language_modeling-margin": lambda: language_case("margin"),
    "causal_language_modeling-log_prob": lambda: language_case("log_prob"),
    "causal_language_modeling-unshifted": lambda: language_case("margin", shift=False, form="triple"),
    "causal_language_modeling-pair": lambda: language_case("margin", form="pair"),
    "clip-model-scale": clip_case,
    "clip-temperature": lambda: clip_case(2.5),
    "callable": callable_case,
}  # fmt: skip
"""By task name and variant; what ``tests/attributor`` scores as well."""
POSITIONS = {
    "masked_language_modeling-margin": lambda: masked_case("margin"),
    "masked_language_modeling-log_prob": lambda: masked_case("log_prob"),
    "sequence_to_sequence-margin": lambda: seq2seq_case("margin", explicit=True),
    "sequence_to_sequence-log_prob": lambda: seq2seq_case("log_prob", explicit=False),
    "dense_classification-margin": lambda: dense_case("margin"),
    "dense_classification-log_prob": lambda: dense_case("log_prob"),
    "dense_classification-tokens": dense_token_case,
}


def terms_of_logits(task, logits, labels):
    """Terms for a model that answers with its input."""
    return task.evaluate(tasks.ModelCall(nn.Identity()), (logits, labels))


def identity_of(task):
    """What tells targets that a task asks from those of another one, for the same data; a task may be a function."""
    asked = tasks.QuestionsModelOutput("regression", {"f": task}).ask("f", TensorDataset(torch.zeros(1, 1)))
    return asked.identity()


# ---- Gradients
def gradients_of(value, model):
    kept = {name: p for name, p in model.named_parameters() if p.requires_grad}
    settings = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad(value, list(kept.values()), **settings)
    return {name: grad.flatten() for name, grad in zip(kept, grads, strict=True)}


def check_gradients(computer, batch, values, **close):
    """Hold q times the gradients of f against those of one value for each row."""
    found = {}
    terms = computer.stream_gradients(batch, lambda block: found.update({block.name: block.dense()}))
    for row, (q, value) in enumerate(zip(terms.out_to_loss_grad, values, strict=True)):
        for name, expected in gradients_of(value, computer.model).items():
            ours = found[name][row] if name in found else torch.zeros_like(expected)
            torch.testing.assert_close(q * ours, expected, **close)
