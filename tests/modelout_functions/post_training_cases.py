"""Cases for the tasks of post-training and of noise; losses are plain loops, independent of the package."""

import math
from functools import partial

import torch
from modelout_cases import (
    BUILDERS,
    IGNORED,
    POSITIONS,
    B,
    D,
    LanguageModel,
    T,
    V,
    changed,
    pairs_of,
    prepared,
    randint,
    randn,
    softplus,
)
from torch import nn

from trak_lite import modelout_functions as tasks
from trak_lite.testing import ModelOutputCase


class RewardModel(nn.Module):
    """One score from the mean of the embedded tokens; a column of the scores has a scale of its own row."""

    def __init__(self, *, column=True):
        super().__init__()
        self.tokens, self.head, self.column = nn.Embedding(V, 4), nn.Linear(4, 1), column

    def forward(self, input_ids, scale=1.0, weights=None):
        states = self.tokens(input_ids)
        states = states if weights is None else states * weights.unsqueeze(-1)
        scores = self.head(torch.tanh(states.mean(1)))[:, 0] * scale
        return scores[:, None] if self.column else scores


class TokenEncoder(nn.Module):
    """States of tokens; the attention mask changes nothing but how they are pooled."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(V, 4), nn.Linear(4, 3)

    def forward(self, input_ids, attention_mask=None):
        return {"last_hidden_state": torch.tanh(self.head(self.tokens(input_ids)))}


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.times, self.head = nn.Linear(D, 4), nn.Embedding(10, 4), nn.Linear(4, D)

    def forward(self, sample, timestep, shift=None):
        states = torch.tanh(self.inner(sample) + self.times(timestep))
        return {"sample": self.head(states if shift is None else states + shift)}


def with_column(batch, name, place, value):
    """The batch with one changed value, and its row."""
    return {**batch, name: changed(batch[name], place, value)}, place[0]


def answer_log_prob(model, ids, labels):
    """Sum of log p of the labelled tokens of one row."""
    (pairs,) = pairs_of(model(ids[None])["logits"], labels[None], offset=1)
    return sum(torch.log(torch.softmax(logits, -1)[y]) for logits, y in pairs)


def preference_columns():
    """Chosen answers of T tokens, rejected ones of T - 1, after a prompt of two or three tokens."""
    columns = {"chosen": randint(V, (B, T), 28), "rejected": randint(V, (B, T - 1), 29)}
    labels = {side: ids.clone() for side, ids in columns.items()}
    for part in labels.values():
        part[:, :2] = IGNORED
        part[1, :3] = IGNORED
    labels["chosen"][2, 4:] = IGNORED
    return {
        **{f"{side}_input_ids": ids for side, ids in columns.items()},
        **{f"{side}_labels": part for side, part in labels.items()},
        "ref_chosen_logps": -3 - randn(B, seed=30).abs(),
        "ref_rejected_logps": -3 - randn(B, seed=31).abs(),
    }


def preference_case(task, batch, *, beta=1.0, more="", invalid=()):
    """DPO, or the plain difference of two answers; ``more`` names optional columns."""
    signs, offsets = torch.ones(B), torch.zeros(B)
    if "preferred" in more:
        batch["preferred"], signs = torch.tensor([1, 0, 0, 1]), torch.tensor([1.0, -1.0, -1.0, 1.0])
    if "margin" in more:
        batch["margin"] = offsets = torch.tensor([0.5, 0.0, 1.0, -0.3], dtype=torch.float64)

    def gain(model, side, i):
        log_p = answer_log_prob(model, batch[f"{side}_input_ids"][i], batch[f"{side}_labels"][i])
        return log_p - batch.get(f"ref_{side}_logps", torch.zeros(B))[i]

    def loss(model, _):
        gaps = torch.stack([gain(model, "chosen", i) - gain(model, "rejected", i) for i in range(B)])
        return -torch.log(torch.sigmoid(signs * (beta * gaps - offsets)))

    wrong = [with_column(batch, *some) for some in invalid]
    of_output = lambda f: softplus(-beta * f + signs * offsets)  # noqa: E731
    return ModelOutputCase(task, prepared(LanguageModel()), batch, loss, of_output, wrong)


def dpo_case(more=""):
    wrong = [("ref_chosen_logps", (1,), torch.nan), ("ref_rejected_logps", (2,), -torch.inf)]
    wrong += [("chosen_labels", (3,), V), ("rejected_labels", (0,), IGNORED)]
    wrong += [some for some in (("preferred", (3,), 2), ("margin", (1,), torch.inf)) if some[0] in more]
    task = tasks.DPOModelOutput(beta=0.7)
    return preference_case(task, preference_columns(), beta=0.7, more=more, invalid=wrong)


def difference_case():
    batch = {name: part for name, part in preference_columns().items() if not name.startswith("ref_")}
    wrong = [("rejected_labels", (0,), IGNORED)]
    return preference_case(tasks.AnswerDifferenceModelOutput(), batch, invalid=wrong)


def reward_case(*, more):
    """With more: columns without a prefix are inputs of both answers, those with one of their own answer."""
    ids = randint(V, (B, T), 32), randint(V, (B, T - 2), 33)
    batch = {"chosen_input_ids": ids[0], "rejected_input_ids": ids[1]}
    signs, offsets = torch.ones(B, dtype=torch.float64), torch.zeros(B, dtype=torch.float64)
    if more:
        signs[2], offsets[:2] = -1, torch.tensor([0.4, 1.0])
        batch |= {"preferred": signs == 1, "margin": offsets, "scale": randn(B, seed=3)}
        batch |= {"chosen_weights": randn(B, T, seed=4)}
    scale, weights = batch.get("scale", 1.0), batch.get("chosen_weights")

    def loss(model, _):
        gaps = model(ids[0], scale, weights).reshape(B) - model(ids[1], scale).reshape(B) - offsets
        return -torch.log(torch.sigmoid(signs * gaps))

    wrong = [({**batch, "margin": torch.tensor([0.0, 0.0, torch.nan, 0.0])}, 2)]
    model, of_output = prepared(RewardModel(column=not more)), lambda f: softplus(-f + signs * offsets)
    return ModelOutputCase(tasks.RewardModelOutput(), model, batch, loss, of_output, wrong)


POLICIES = {
    "reinforce": {},
    "ratio": {},
    "clipped": {"clip": (0.2, 0.3)},
    "grpo": {"clip": 0.2, "kl_weight": 0.3, "reduction": "mean"},
    "tempered": {"clip": 0.2, "kl_weight": 0.3, "temperature": 0.7, "kl_correction": True},
}


def policy_case(kind):
    """The old policy is not far, so that some ratios are clipped and others are not."""
    options = POLICIES[kind]
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
    per_token = torch.stack([advantages] * T, 1)
    if kind == "grpo":
        per_token = per_token * (1 + torch.arange(T) / 10)
    batch = {"input_ids": ids, "labels": labels, "advantages": per_token if kind == "grpo" else advantages}
    batch |= {"old_logps": old} if kind != "reinforce" else {}
    batch |= {"ref_logps": ref} if "kl_weight" in options else {}
    low, high = options["clip"] if isinstance(options.get("clip"), tuple) else (0.2, 0.2)

    def token_loss(log_p, i, t):
        a = per_token[i, t]
        if kind == "reinforce":
            return -a * log_p
        ratio = torch.exp(log_p) / math.exp(old[i, t])
        gain = a * ratio
        if "clip" in options:
            kept = ratio if 1 - low <= ratio <= 1 + high else ratio.detach().clamp(1 - low, 1 + high)
            gain = min(gain, a * kept)
        if "kl_weight" in options:
            r = math.exp(ref[i, t]) / torch.exp(log_p)
            gain = gain - 0.3 * (r - torch.log(r) - 1) * (ratio if "kl_correction" in options else 1)
        return -gain

    def token_terms(model, term_of):
        for i, row in enumerate(labels.tolist()):
            log_p = torch.log(torch.softmax(model(ids)["logits"][i] / options.get("temperature", 1.0), -1))
            yield [term_of(log_p[t - 1, y], i, t) for t, y in enumerate(row) if t and y != IGNORED]

    def loss(model, _):
        sums = [
            sum(terms) / (len(terms) if "reduction" in options else 1)
            for terms in token_terms(model, token_loss)
        ]
        return torch.stack(sums)

    def log_p(model, _):
        return torch.stack([sum(terms) for terms in token_terms(model, lambda log_p, *_: log_p)])

    wrong = [("advantages", (0, 3) if kind == "grpo" else (0,), torch.inf), ("labels", (2,), IGNORED)]
    wrong += [("labels", (2, 5), V), ("old_logps", (1, 3), torch.nan), ("ref_logps", (3, 4), -torch.inf)]
    invalid = [with_column(batch, *some) for some in wrong if some[0] in batch]
    task = tasks.PolicyGradientModelOutput(**options)
    return ModelOutputCase(task, model, batch, loss, torch.neg, invalid, log_p)


def seen_by(model, task, batch):
    """The noisy samples and the timesteps that a task passes to a denoiser, for each draw."""
    seen = []
    with model.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[:2])):
        task.evaluate(tasks.ModelCall(model), batch)
    return seen


def signal_levels(schedule):
    """Products of 1 - beta over ten steps, by the formulas of the papers."""
    if not isinstance(schedule, str):
        return torch.tensor(schedule, dtype=torch.float64)
    if schedule == "cosine":
        bars = torch.cos((torch.arange(11, dtype=torch.float64) / 10 + 0.008) / 1.008 * math.pi / 2) ** 2
        return torch.cumprod(1 - (1 - bars[1:] / bars[:-1]).clamp(max=0.999), 0)
    low, high, power = (1e-4, 0.02, 1) if schedule == "linear" else (0.00085**0.5, 0.012**0.5, 2)
    return torch.cumprod(1 - torch.linspace(low, high, 10, dtype=torch.float64) ** power, 0)


def diffusion_case(prediction, *, schedule="linear", draws=1, given=False, form="dict"):
    """Ten steps; that the noise is the one of the seeds is told by the goldens."""
    samples, seeds = randn(B, D, seed=36), torch.tensor([3, 2**62 + 5, -7, 0])
    shift, times = randn(B, 4, seed=37), randint(10, (B, draws), 38)
    levels = signal_levels(schedule)
    batch = {"sample": samples, "seed": seeds, "shift": shift}
    if given:
        batch["timestep"] = times[:, 0] if draws == 1 else times
    if form == "tuple":
        batch = (samples, shift, seeds)
    steps = {"num_steps": 10} if isinstance(schedule, str) else {}
    task = tasks.DiffusionModelOutput(prediction=prediction, schedule=schedule, draws=draws, **steps)
    model = prepared(Denoiser())
    seen = seen_by(model, task, batch)

    def loss(model, _):
        losses = []
        for i in range(B):
            total = torch.zeros(())
            for d, (noisy, steps) in enumerate(seen):
                t = int(times[i, d] if given else steps[i])
                a, s = math.sqrt(levels[t]), math.sqrt(1 - levels[t])
                noise = (noisy[i] - a * samples[i]) / s
                found = model(noisy[i : i + 1], torch.tensor([t]), shift[i : i + 1])["sample"][0]
                wanted = {"epsilon": noise, "sample": samples[i], "v_prediction": a * noise - s * samples[i]}
                total = total + ((found - wanted[prediction]) ** 2).sum() / 2
            losses.append(total)
        return torch.stack(losses)

    wrong = [with_column(batch, "timestep", (2,) if draws == 1 else (2, 1), 10)] if given else []
    return ModelOutputCase(task, model, batch, loss, torch.neg, wrong)


def contrastive_case(pooling, similarity, *, labelled=False):
    """Two negatives; texts are padded on the right."""
    temperature = 0.5
    query, positive, negatives = randint(V, (B, T), 39), randint(V, (B, 4), 40), randint(V, (B, 2, 3), 41)
    mask = torch.ones_like(positive)
    mask[1, 2:] = 0
    batch = {"query_input_ids": query, "positive_input_ids": positive, "positive_attention_mask": mask}
    batch["negative_input_ids"] = negatives
    wanted = [0, 2, 1, 0] if labelled else [0] * B
    if labelled:
        batch["labels"] = torch.tensor(wanted)

    def embedded(model, ids, length):
        states = model(ids[None])["last_hidden_state"][0, :length]
        found = {"mean": states.mean(0), "first": states[0], "last": states[-1]}[pooling]
        return found / found.norm() if similarity == "cosine" else found

    def loss(model, _):
        losses = []
        for i in range(B):
            u = embedded(model, query[i], T)
            candidates = [embedded(model, positive[i], int(mask[i].sum()))]
            candidates += [embedded(model, negatives[i, j], 3) for j in range(2)]
            logits = torch.stack([u @ v for v in candidates]) / temperature
            losses.append(-torch.log(torch.softmax(logits, 0)[wanted[i]]))
        return torch.stack(losses)

    task = tasks.ContrastiveModelOutput(temperature=temperature, similarity=similarity, pooling=pooling)
    wrong = [with_column(batch, "labels", (2,), 3)] if labelled else []
    return ModelOutputCase(task, prepared(TokenEncoder()), batch, loss, lambda f: softplus(-f), wrong)


POST_TRAINING = {
    **POSITIONS,
    "dpo-plain": dpo_case,
    "dpo-preferred": lambda: dpo_case("preferred"),
    "dpo-margin": lambda: dpo_case("preferred, margin"),
    "answer_difference-plain": difference_case,
    "reward_modeling-plain": lambda: reward_case(more=False),
    "reward_modeling-margin": lambda: reward_case(more=True),
    **{f"policy_gradient-{kind}": lambda kind=kind: policy_case(kind) for kind in POLICIES},
    "diffusion-epsilon": lambda: diffusion_case("epsilon"),
    "diffusion-sample": lambda: diffusion_case("sample", form="tuple"),
    "diffusion-cosine": lambda: diffusion_case("epsilon", schedule="cosine"),
    "diffusion-v_prediction": partial(diffusion_case, "v_prediction", schedule="scaled_linear", draws=2, given=True),
    "diffusion-timestep": partial(diffusion_case, "epsilon", schedule=[0.99 - 0.05 * t for t in range(10)], given=True),
    "contrastive-mean": lambda: contrastive_case("mean", "cosine"),
    "contrastive-first": lambda: contrastive_case("first", "dot"),
    "contrastive-last": lambda: contrastive_case("last", "cosine", labelled=True),
}  # fmt: skip
"""By task name and variant."""
BY_NAME = {**BUILDERS, **POST_TRAINING}
