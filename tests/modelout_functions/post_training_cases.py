"""Cases for the tasks of post-training and of positions; losses are plain loops, independent of the package."""

import math

import torch
from modelout_cases import (
    B,
    C,
    D,
    LanguageModel,
    T,
    V,
    language_labels,
    log_odds,
    mean_margin_loss,
    prepared,
    randint,
    randn,
    softplus,
)
from torch import Tensor, nn
from torch.nn import functional as F

from trak_lite._random import seeded_normals, seeded_uniforms
from trak_lite.modelout_functions import (
    AnswerDifferenceModelOutput,
    ContrastiveModelOutput,
    DenseClassificationModelOutput,
    DiffusionModelOutput,
    DPOModelOutput,
    MaskedLanguageModelingModelOutput,
    PolicyGradientModelOutput,
    RewardModelOutput,
    SequenceToSequenceModelOutput,
)
from trak_lite.testing.modelout import ModelOutputCase

IGNORED = -100


class EncoderDecoder(nn.Module):
    """The running mean of the decoder's tokens, shifted by the mean of the encoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(V, 4), nn.Linear(4, V)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> dict[str, Tensor]:
        counts = torch.arange(1, decoder_input_ids.shape[1] + 1).double()[:, None]
        states = self.tokens(decoder_input_ids).cumsum(1) / counts
        return {"logits": self.head(torch.tanh(states + self.tokens(input_ids).mean(1, keepdim=True)))}


class RewardModel(nn.Module):
    """One score from the mean of the embedded tokens."""

    def __init__(self, *, column: bool = True) -> None:
        super().__init__()
        self.tokens, self.head, self.column = nn.Embedding(V, 4), nn.Linear(4, 1), column

    def forward(self, input_ids: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.tokens(input_ids).mean(1)))
        return scores if self.column else scores[:, 0]


class TokenEncoder(nn.Module):
    """States of tokens; the attention mask changes nothing but how they are pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(V, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        return {"last_hidden_state": torch.tanh(self.head(self.tokens(input_ids)))}


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.times, self.head = nn.Linear(D, 4), nn.Embedding(10, 4), nn.Linear(4, D)

    def forward(self, sample: Tensor, timestep: Tensor, shift: Tensor | None = None) -> dict[str, Tensor]:
        states = torch.tanh(self.inner(sample) + self.times(timestep))
        return {"sample": self.head(states if shift is None else states + shift)}


class PixelModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, C, 1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        return {"out": self.last(torch.tanh(self.first(image)))}


def losses_of(output: str, pairs: list[tuple[Tensor, int]]) -> Tensor:
    """L of one sample from the logits and label of each of its positions."""
    if output == "margin":
        return mean_margin_loss([log_odds(logits, label) for logits, label in pairs])
    return -sum(torch.log(torch.softmax(logits, -1)[label]) for logits, label in pairs)


def by_output(output: str, counts: Tensor):
    return (lambda f: counts * softplus(-f / counts)) if output == "margin" else torch.neg


def masked_case(output: str) -> ModelOutputCase:
    ids, labels = randint(V, (B, T), 20), language_labels(randint(V, (B, T), 21))
    out_of_range, empty = labels.clone(), labels.clone()
    out_of_range[3, 0] = V
    empty[0] = IGNORED

    def loss(model, batch):
        rows = zip(model(ids)["logits"], labels.tolist(), strict=True)
        return torch.stack(
            [
                losses_of(output, [(x, y) for x, y in zip(logits, row, strict=True) if y != IGNORED])
                for logits, row in rows
            ]
        )

    return ModelOutputCase(
        task=MaskedLanguageModelingModelOutput(output=output),
        model=prepared(LanguageModel()),
        batch={"input_ids": ids, "labels": labels},
        loss=loss,
        loss_of_output=by_output(output, (labels != IGNORED).sum(1)),
        invalid=[
            ({"input_ids": ids, "labels": out_of_range}, 3),
            ({"input_ids": ids, "labels": empty}, 0),
        ],
    )


def seq2seq_case(output: str, *, explicit: bool) -> ModelOutputCase:
    """Start token 1, padding token 0."""
    ids, labels = randint(V, (B, 3), 22), language_labels(randint(V, (B, T), 23))
    decoder = torch.tensor([[1, *(0 if y == IGNORED else y for y in row[:-1])] for row in labels.tolist()])
    more = {"decoder_input_ids": decoder} if explicit else {}
    out_of_range, empty = labels.clone(), labels.clone()
    # The last label: any other one is an input of the decoder, whose embedding would fail first.
    out_of_range[3, T - 1] = V
    empty[0] = IGNORED

    def loss(model, batch):
        rows = zip(model(ids, decoder)["logits"], labels.tolist(), strict=True)
        return torch.stack(
            [
                losses_of(output, [(x, y) for x, y in zip(logits, row, strict=True) if y != IGNORED])
                for logits, row in rows
            ]
        )

    tokens = {} if explicit else {"decoder_start_token_id": 1, "pad_token_id": 0}
    return ModelOutputCase(
        task=SequenceToSequenceModelOutput(output=output, **tokens),
        model=prepared(EncoderDecoder()),
        batch={"input_ids": ids, "labels": labels, **more},
        loss=loss,
        loss_of_output=by_output(output, (labels != IGNORED).sum(1)),
        invalid=[
            ({"input_ids": ids, "labels": out_of_range, **more}, 3),
            ({"input_ids": ids, "labels": empty, **more}, 0),
        ],
    )


def dense_case(output: str) -> ModelOutputCase:
    """Images of 4 x 5 pixels, 255 for no label."""
    images, labels = randn(B, 1, 4, 5, seed=24), randint(C, (B, 4, 5), 25)
    labels[1, :2] = 255
    labels[2, 1:, :4] = 255
    out_of_range, empty = labels.clone(), labels.clone()
    out_of_range[3, 2, 2] = C
    empty[2] = 255

    def loss(model, batch):
        logits = model(images)["out"]
        return torch.stack(
            [
                losses_of(
                    output,
                    [
                        (logits[i, :, y, x], int(labels[i, y, x]))
                        for y in range(4)
                        for x in range(5)
                        if labels[i, y, x] != 255
                    ],
                )
                for i in range(B)
            ]
        )

    return ModelOutputCase(
        task=DenseClassificationModelOutput(output=output, ignore_index=255),
        model=prepared(PixelModel()),
        batch=(images, labels),
        loss=loss,
        loss_of_output=by_output(output, (labels != 255).flatten(1).sum(1)),
        invalid=[((images, out_of_range), 3), ((images, empty), 2)],
    )


def dense_token_case() -> ModelOutputCase:
    """Classes on the last axis, as of tokens or of a detector's queries."""
    ids, labels = randint(V, (B, T), 26), language_labels(randint(V, (B, T), 27))

    def loss(model, batch):
        rows = zip(model(ids)["logits"], labels, strict=True)
        return torch.stack([F.cross_entropy(logits, row, reduction="sum") for logits, row in rows])

    return ModelOutputCase(
        task=DenseClassificationModelOutput(class_axis=-1),
        model=prepared(LanguageModel()),
        batch={"input_ids": ids, "labels": labels},
        loss=loss,
        loss_of_output=torch.neg,
    )


def answer_log_prob(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """Sum of log p of the labelled tokens of one row."""
    logits = model(ids[None])["logits"][0]
    return sum(
        torch.log(torch.softmax(logits[t - 1], -1)[y])
        for t, y in enumerate(labels.tolist())
        if t > 0 and y != IGNORED
    )


def preference_columns() -> dict[str, Tensor]:
    """Chosen answers of T tokens, rejected ones of T - 1, after a prompt of two or three tokens."""
    chosen, rejected = randint(V, (B, T), 28), randint(V, (B, T - 1), 29)
    labels = [part.clone() for part in (chosen, rejected)]
    for part in labels:
        part[:, :2] = IGNORED
        part[1, :3] = IGNORED
    labels[0][2, 4:] = IGNORED
    return {
        "chosen_input_ids": chosen,
        "chosen_labels": labels[0],
        "rejected_input_ids": rejected,
        "rejected_labels": labels[1],
        "ref_chosen_logps": -3 - randn(B, seed=30).abs(),
        "ref_rejected_logps": -3 - randn(B, seed=31).abs(),
    }


def dpo_case(*, preferred: bool = False, margin: bool = False) -> ModelOutputCase:
    beta = 0.7
    batch = preference_columns()
    signs, offsets = torch.ones(B), torch.zeros(B)
    if preferred:
        batch["preferred"] = torch.tensor([1, 0, 0, 1])
        signs = torch.tensor([1.0, -1.0, -1.0, 1.0])
    if margin:
        batch["margin"] = offsets = torch.tensor([0.5, 0.0, 1.0, -0.3], dtype=torch.float64)

    def loss(model, batch):
        losses = []
        for i in range(B):
            gain = [
                answer_log_prob(model, batch[f"{side}_input_ids"][i], batch[f"{side}_labels"][i])
                - batch[f"ref_{side}_logps"][i]
                for side in ("chosen", "rejected")
            ]
            logit = signs[i] * (beta * (gain[0] - gain[1]) - offsets[i])
            losses.append(-torch.log(torch.sigmoid(logit)))
        return torch.stack(losses)

    def changed(name: str, row: int, value: float) -> tuple[dict[str, Tensor], int]:
        column = batch[name].clone()
        column[row] = value
        return {**batch, name: column}, row

    return ModelOutputCase(
        task=DPOModelOutput(beta=beta),
        model=prepared(LanguageModel()),
        batch=batch,
        loss=loss,
        loss_of_output=lambda f: softplus(-beta * f + signs * offsets),
        invalid=[
            changed("ref_chosen_logps", 1, torch.nan),
            changed("ref_rejected_logps", 2, -torch.inf),
            changed("chosen_labels", 3, V),
            changed("rejected_labels", 0, IGNORED),
            *([changed("preferred", 3, 2)] if preferred else []),
            *([changed("margin", 1, torch.inf)] if margin else []),
        ],
    )


def difference_case() -> ModelOutputCase:
    batch = {name: part for name, part in preference_columns().items() if not name.startswith("ref_")}
    empty = torch.full_like(batch["rejected_labels"], IGNORED)
    empty[1:] = batch["rejected_labels"][1:]

    def loss(model, batch):
        logits = [
            answer_log_prob(model, batch["chosen_input_ids"][i], batch["chosen_labels"][i])
            - answer_log_prob(model, batch["rejected_input_ids"][i], batch["rejected_labels"][i])
            for i in range(B)
        ]
        return -torch.log(torch.sigmoid(torch.stack(logits)))

    return ModelOutputCase(
        task=AnswerDifferenceModelOutput(),
        model=prepared(LanguageModel()),
        batch=batch,
        loss=loss,
        loss_of_output=lambda f: softplus(-f),
        invalid=[({**batch, "rejected_labels": empty}, 0)],
    )


def reward_case(*, more: bool) -> ModelOutputCase:
    ids = randint(V, (B, T), 32), randint(V, (B, T - 2), 33)
    batch = {"chosen_input_ids": ids[0], "rejected_input_ids": ids[1]}
    signs, offsets = torch.ones(B, dtype=torch.float64), torch.zeros(B, dtype=torch.float64)
    if more:
        signs[2], offsets[:2] = -1, torch.tensor([0.4, 1.0])
        batch |= {"preferred": signs == 1, "margin": offsets}

    def loss(model, batch):
        gaps = model(ids[0]).reshape(B) - model(ids[1]).reshape(B) - offsets
        return -torch.log(torch.sigmoid(signs * gaps))

    return ModelOutputCase(
        task=RewardModelOutput(),
        model=prepared(RewardModel(column=not more)),
        batch=batch,
        loss=loss,
        loss_of_output=lambda f: softplus(-f + signs * offsets),
        invalid=[({**batch, "margin": torch.tensor([0.0, 0.0, torch.nan, 0.0])}, 2)],
    )


def policy_case(kind: str) -> ModelOutputCase:
    """The old policy is not far, so that some ratios are clipped and others are not."""
    ids = randint(V, (B, T), 34)
    labels = ids.clone()
    labels[:, :2] = IGNORED
    labels[1, 4:] = IGNORED
    model = prepared(LanguageModel())
    with torch.no_grad():
        now = torch.log_softmax(model(ids)["logits"], -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    shifts = 0.3 * randn(B, T, seed=35)
    old = torch.cat([torch.full((B, 1), -torch.inf, dtype=torch.float64), now], 1) + shifts
    old[:, 1] = torch.inf  # the label of this position is ignored
    ref = torch.cat([torch.zeros(B, 1, dtype=torch.float64), now], 1) - 2 * shifts
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.5], dtype=torch.float64)
    per_token = torch.stack([advantages] * T, 1) * (1 + torch.arange(T) / 10)
    batch = {"input_ids": ids, "labels": labels, "advantages": advantages}
    options = {}
    if kind != "reinforce":
        batch["old_logps"] = old
    if kind == "clipped":
        options = {"clip": (0.2, 0.3)}
    if kind == "grpo":
        batch |= {"ref_logps": ref, "advantages": per_token}
        options = {"clip": 0.2, "kl_weight": 0.3, "reduction": "mean"}
    if kind == "tempered":
        batch["ref_logps"] = ref
        options = {"clip": 0.2, "kl_weight": 0.3, "temperature": 0.7, "kl_correction": True}
    low, high = (0.2, 0.3) if kind == "clipped" else (0.2, 0.2)
    temperature = 0.7 if kind == "tempered" else 1.0

    def token_loss(log_p: Tensor, i: int, t: int) -> Tensor:
        a = per_token[i, t] if kind == "grpo" else advantages[i]
        if kind == "reinforce":
            return -a * log_p
        ratio = torch.exp(log_p) / math.exp(old[i, t])
        gain = a * ratio
        if kind in ("clipped", "grpo", "tempered"):
            kept = ratio if 1 - low <= ratio <= 1 + high else ratio.detach().clamp(1 - low, 1 + high)
            gain = min(gain, a * kept)
        if kind in ("grpo", "tempered"):
            r = math.exp(ref[i, t]) / torch.exp(log_p)
            gain = gain - 0.3 * (r - torch.log(r) - 1) * (ratio if kind == "tempered" else 1)
        return -gain

    def loss(model, batch):
        losses = []
        for i, row in enumerate(labels.tolist()):
            log_p = torch.log(torch.softmax(model(ids)["logits"][i] / temperature, -1))
            terms = [token_loss(log_p[t - 1, y], i, t) for t, y in enumerate(row) if t and y != IGNORED]
            losses.append(sum(terms) / (len(terms) if kind == "grpo" else 1))
        return torch.stack(losses)

    def changed(name: str, place: tuple[int, ...], value: float) -> tuple[dict[str, Tensor], int]:
        column = batch[name].clone()
        column[place] = value
        return {**batch, name: column}, place[0]

    first = (0,) if kind != "grpo" else (0, 3)
    return ModelOutputCase(
        task=PolicyGradientModelOutput(**options),
        model=model,
        batch=batch,
        loss=loss,
        loss_of_output=torch.neg,
        invalid=[
            changed("advantages", first, torch.inf),
            changed("labels", (2,), IGNORED),
            changed("labels", (2, 5), V),
            *([changed("old_logps", (1, 3), torch.nan)] if "old_logps" in batch else []),
            *([changed("ref_logps", (3, 4), -torch.inf)] if "ref_logps" in batch else []),
        ],
    )


def betas_of(schedule: str, steps: int) -> list[float]:
    return torch.linspace(1e-4, 0.02, steps, dtype=torch.float64).tolist()


def diffusion_case(
    prediction: str, *, draws: int = 1, given: bool = False, form: str = "dict"
) -> ModelOutputCase:
    """Ten steps."""
    samples, seeds = randn(B, D, seed=36), torch.tensor([3, 2**62 + 5, -7, 0])
    shift = randn(B, 4, seed=37)
    times = randint(10, (B, draws), 38)
    levels, product = [], 1.0
    for beta in betas_of("linear", 10):
        product *= 1 - beta
        levels.append(product)
    batch = {"sample": samples, "seed": seeds, "shift": shift}
    if given:
        batch["timestep"] = times[:, 0] if draws == 1 else times
    if form == "tuple":
        batch = (samples, shift, seeds)

    def loss(model, batch):
        losses = []
        for i in range(B):
            total = 0.0
            for d in range(draws):
                seed = seeds[i : i + 1]
                t = int(times[i, d] if given else seeded_uniforms(seed, (), stream=2 * d)[0] * 10)
                noise = seeded_normals(seed, (D,), stream=2 * d + 1)[0].double()
                a, s = math.sqrt(levels[t]), math.sqrt(1 - levels[t])
                noisy = a * samples[i] + s * noise
                seen = model(noisy[None], torch.tensor([t]), shift[i : i + 1])["sample"][0]
                wanted = {"epsilon": noise, "sample": samples[i], "v_prediction": a * noise - s * samples[i]}
                total = total + ((seen - wanted[prediction]) ** 2).sum() / 2
            losses.append(total)
        return torch.stack(losses)

    def invalid() -> list:
        if not given:
            return []
        wrong = batch["timestep"].clone()
        wrong[(2,) if draws == 1 else (2, 1)] = 10
        return [({**batch, "timestep": wrong}, 2)]

    return ModelOutputCase(
        task=DiffusionModelOutput(prediction=prediction, num_steps=10, draws=draws),
        model=prepared(Denoiser()),
        batch=batch,
        loss=loss,
        loss_of_output=torch.neg,
        invalid=invalid(),
    )


def contrastive_case(pooling: str, similarity: str, *, labelled: bool = False) -> ModelOutputCase:
    """Two negatives; texts are padded on the right."""
    temperature = 0.5
    query, positive, negatives = randint(V, (B, T), 39), randint(V, (B, 4), 40), randint(V, (B, 2, 3), 41)
    mask = torch.ones_like(positive)
    mask[1, 2:] = 0
    batch = {
        "query_input_ids": query,
        "positive_input_ids": positive,
        "positive_attention_mask": mask,
        "negative_input_ids": negatives,
    }
    wanted = [0] * B
    invalid = []
    if labelled:
        wanted = [0, 2, 1, 0]
        batch["labels"] = torch.tensor(wanted)
        invalid = [({**batch, "labels": torch.tensor([0, 2, 3, 0])}, 2)]

    def embedded(model, ids: Tensor, length: int) -> Tensor:
        states = model(ids[None])["last_hidden_state"][0, :length]
        found = {"mean": states.mean(0), "first": states[0], "last": states[-1]}[pooling]
        return found / found.norm() if similarity == "cosine" else found

    def loss(model, batch):
        losses = []
        for i in range(B):
            u = embedded(model, query[i], T)
            candidates = [embedded(model, positive[i], int(mask[i].sum()))]
            candidates += [embedded(model, negatives[i, j], 3) for j in range(2)]
            logits = torch.stack([u @ v for v in candidates]) / temperature
            losses.append(-torch.log(torch.softmax(logits, 0)[wanted[i]]))
        return torch.stack(losses)

    return ModelOutputCase(
        task=ContrastiveModelOutput(temperature=temperature, similarity=similarity, pooling=pooling),
        model=prepared(TokenEncoder()),
        batch=batch,
        loss=loss,
        loss_of_output=lambda f: softplus(-f),
        invalid=invalid,
    )


POST_TRAINING = {
    "masked_language_modeling": {
        "margin": lambda: masked_case("margin"),
        "log_prob": lambda: masked_case("log_prob"),
    },
    "sequence_to_sequence": {
        "margin": lambda: seq2seq_case("margin", explicit=True),
        "log_prob": lambda: seq2seq_case("log_prob", explicit=False),
    },
    "dense_classification": {
        "margin": lambda: dense_case("margin"),
        "log_prob": lambda: dense_case("log_prob"),
        "tokens": dense_token_case,
    },
    "dpo": {
        "plain": dpo_case,
        "preferred": lambda: dpo_case(preferred=True),
        "margin": lambda: dpo_case(preferred=True, margin=True),
    },
    "answer_difference": {"plain": difference_case},
    "reward_modeling": {
        "plain": lambda: reward_case(more=False),
        "margin": lambda: reward_case(more=True),
    },
    "policy_gradient": {
        "reinforce": lambda: policy_case("reinforce"),
        "ratio": lambda: policy_case("ratio"),
        "clipped": lambda: policy_case("clipped"),
        "grpo": lambda: policy_case("grpo"),
        "tempered": lambda: policy_case("tempered"),
    },
    "diffusion": {
        "epsilon": lambda: diffusion_case("epsilon"),
        "sample": lambda: diffusion_case("sample", form="tuple"),
        "v_prediction": lambda: diffusion_case("v_prediction", draws=2, given=True),
        "timestep": lambda: diffusion_case("epsilon", given=True),
    },
    "contrastive": {
        "mean": lambda: contrastive_case("mean", "cosine"),
        "first": lambda: contrastive_case("first", "dot"),
        "last": lambda: contrastive_case("last", "cosine", labelled=True),
    },
}
"""Builders by task name and variant."""
