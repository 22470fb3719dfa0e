"""Tasks of post-training and of positions: gradients, drawn labels, noise, helpers, and what is refused."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from modelout_cases import B, LanguageModel, T, V, prepared, randint, randn
from post_training_cases import IGNORED, POST_TRAINING, RewardModel, preference_columns
from torch import Tensor, nn
from torch.func import vmap

from trak_lite._random import seeded_normals, seeded_uniforms
from trak_lite.errors import InvalidInputError
from trak_lite.gradient_computers import FunctionalGradientComputer, HookGradientComputer
from trak_lite.modelout_functions import (
    CausalLanguageModelingModelOutput,
    ContrastiveModelOutput,
    DenseClassificationModelOutput,
    DiffusionModelOutput,
    DPOModelOutput,
    ModelCall,
    PolicyGradientModelOutput,
    RewardModelOutput,
    SequenceToSequenceModelOutput,
    reference_columns,
)
from trak_lite.modelout_functions._describe import describe_task
from trak_lite.modelout_functions._sampling import LossModelOutput, fisher_task

BY_NAME = {f"{name}-{kind}": build for name, some in POST_TRAINING.items() for kind, build in some.items()}
COMPUTERS = {"hook": HookGradientComputer, "functional": FunctionalGradientComputer}


@pytest.mark.parametrize("computer", COMPUTERS.values(), ids=COMPUTERS)
@pytest.mark.parametrize("name", BY_NAME)
def test_q_times_the_gradients_is_minus_that_of_a_plain_loss(name, computer):
    """One row at a time, by autograd of the loss that the case writes without the package."""
    case = BY_NAME[name]()
    names = [name for name, _ in case.model.named_parameters()]
    losses = case.loss(case.model, case.batch)

    found = {}
    gradients = computer(case.model, case.task)
    terms = gradients.stream_gradients(case.batch, lambda block: found.update({block.name: block.dense()}))

    assert sorted(found) == sorted(names)
    for row, loss in enumerate(losses):
        plain = torch.autograd.grad(loss, list(case.model.parameters()), retain_graph=True, allow_unused=True)
        for name, parameter, grad in zip(names, case.model.parameters(), plain, strict=True):
            expected = torch.zeros_like(parameter) if grad is None else grad
            ours = -terms.out_to_loss_grad[row] * found[name][row]
            torch.testing.assert_close(ours, expected.flatten(), rtol=1e-9, atol=1e-12)


def evenly(count: int):
    """The numbers (i + 1/2) / count: frequencies are probabilities, up to one draw per class."""

    def noise(shape) -> Tensor:
        grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        return grid.reshape(count, *[1] * len(shape)).expand(count, *shape)

    return noise


def repeated(batch: dict[str, Tensor], row: int, count: int) -> dict[str, Tensor]:
    return {name: column[row : row + 1].repeat_interleave(count, 0) for name, column in batch.items()}


@pytest.mark.parametrize("name", ["dpo-plain", "dpo-margin", "reward_modeling-margin"])
@pytest.mark.parametrize("row", range(B))
def test_drawn_preferences_come_as_often_as_the_loss_says(name, row):
    """Their probability is exp(-L), and the mean of q^2 over them is w: the Fisher information is Gauss-Newton's."""
    case, count = BY_NAME[name](), 4000
    call = ModelCall(case.model)

    drawn = case.task.sample_labels(call, repeated(case.batch, row, count), evenly(count))
    terms = case.task.evaluate(call, drawn)

    own = float(case.batch["preferred"][row]) if "preferred" in case.batch else 1.0
    likelihood = float(torch.exp(-case.loss(case.model, case.batch)[row].detach()))
    assert float((drawn["preferred"] == own).double().mean()) == pytest.approx(likelihood, abs=2 / count)
    w = case.task.evaluate(call, case.batch).loss_curvature[row]
    torch.testing.assert_close(terms.out_to_loss_grad.square().mean(), w, rtol=0, atol=1 / count)


@pytest.mark.parametrize("name", ["contrastive-mean", "contrastive-last"])
@pytest.mark.parametrize("row", range(B))
def test_drawn_positives_come_as_often_as_the_loss_says(name, row):
    case, count = BY_NAME[name](), 2000

    drawn = case.task.sample_labels(ModelCall(case.model), repeated(case.batch, row, count), evenly(count))[
        "labels"
    ]

    own = int(case.batch["labels"][row]) if "labels" in case.batch else 0
    likelihood = float(torch.exp(-case.loss(case.model, case.batch)[row].detach()))
    assert float((drawn == own).double().mean()) == pytest.approx(likelihood, abs=2 / count)
    assert set(drawn.tolist()) <= {0, 1, 2}


@pytest.mark.parametrize("name", ["sequence_to_sequence-log_prob", "masked_language_modeling-margin"])
def test_labels_are_drawn_at_labelled_positions_only(name):
    case, count = BY_NAME[name](), 2000
    batch = repeated(case.batch, 1, count)

    drawn = case.task.sample_labels(ModelCall(case.model), batch, evenly(count))

    kept = batch["labels"] == IGNORED
    assert bool((drawn["labels"][kept] == IGNORED).all())
    logits = case.model(**{key: value[:1] for key, value in drawn.items() if key != "labels"})["logits"][0]
    shares = torch.bincount(drawn["labels"][:, 0], minlength=V) / count
    torch.testing.assert_close(shares.double(), logits[0].softmax(0), rtol=0, atol=2 / count)


def test_drawn_answers_of_a_decoder_do_not_change_its_inputs():
    case = BY_NAME["sequence_to_sequence-log_prob"]()
    explicit = BY_NAME["sequence_to_sequence-margin"]()

    drawn = case.task.sample_labels(ModelCall(case.model), case.batch, lambda shape: torch.rand(B, *shape))

    assert torch.equal(drawn["decoder_input_ids"], explicit.batch["decoder_input_ids"])
    assert not torch.equal(drawn["labels"], case.batch["labels"])


def test_pixels_are_drawn_from_the_classes_of_their_own_position():
    case, count = BY_NAME["dense_classification-log_prob"](), 2000
    images, labels = (part[1:2].repeat_interleave(count, 0) for part in case.batch)

    drawn = case.task.sample_labels(ModelCall(case.model), (images, labels), evenly(count))[1]

    p = case.model(images[:1])["out"][0, :, 3, 4].softmax(0)
    torch.testing.assert_close(
        torch.bincount(drawn[:, 3, 4], minlength=3).double() / count, p, rtol=0, atol=2 / count
    )
    assert bool((drawn[:, :2] == 255).all())


def test_the_fisher_information_of_a_policy_has_no_advantages():
    """Tokens are drawn from the policy, and the gradient is that of their log-probability."""
    case = BY_NAME["policy_gradient-grpo"]()
    call = ModelCall(case.model)
    drawn = case.task.sample_labels(call, case.batch, lambda shape: torch.full((B, *shape), 0.3))

    found = fisher_task(case.task).evaluate(call, drawn).output

    plain = {key: drawn[key] for key in ("input_ids", "labels")}
    expected = CausalLanguageModelingModelOutput().evaluate(call, plain).output
    torch.testing.assert_close(found, expected)
    assert not torch.equal(drawn["labels"], case.batch["labels"])
    assert torch.equal(drawn["labels"] == IGNORED, case.batch["labels"] == IGNORED)


def test_drawn_targets_of_a_denoiser_have_unit_variance_around_its_predictions():
    case, count = BY_NAME["diffusion-v_prediction"](), 1000
    batch = repeated(case.batch, 0, count)
    call = ModelCall(case.model)

    drawn = case.task.sample_labels(call, batch, evenly(count))
    terms = case.task.evaluate(call, drawn)

    assert drawn["target"].shape == (count, 2, 5)
    assert bool((drawn["target"].var(0) - 1).abs().max() < 1e-2)
    assert float(terms.output.detach().mean()) == pytest.approx(-10 / 2, rel=1e-2)


MASK = 2**64 - 1


def splitmix(number: int) -> int:
    """The mix of SplitMix64 in whole numbers of Python."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & MASK
    return number ^ (number >> 31)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, -1, -(2**63)])
@pytest.mark.parametrize("stream", [0, 1, 7])
def test_the_noise_of_a_seed_is_splitmix64(seed, stream):
    step = 0x9E3779B97F4A7C15
    start = splitmix(splitmix((seed + step) & MASK) + (stream + 1) * step & MASK)
    expected = [((splitmix(start + i * step & MASK) >> 41) + 0.5) / 2**23 for i in range(1, 7)]

    uniform = seeded_uniforms(torch.tensor([5, seed]), (2, 3), stream=stream)
    normal = seeded_normals(torch.tensor([5, seed]), (2, 3), stream=stream)

    assert uniform[1].flatten().tolist() == expected
    inverse = [NormalDist().inv_cdf(value) for value in expected]
    np.testing.assert_allclose(normal[1].flatten(), inverse, rtol=1e-4, atol=1e-5)


def test_noise_is_the_same_under_vmap_and_looks_gaussian():
    seeds = torch.arange(200)

    normals = seeded_normals(seeds, (500,), stream=1)

    mapped = vmap(lambda seed: seeded_normals(seed.unsqueeze(0), (500,), stream=1)[0])(seeds)
    assert torch.equal(mapped, normals)
    flat = normals.flatten().double()
    assert abs(float(flat.mean())) < 0.02
    assert abs(float(flat.var()) - 1) < 0.02
    assert abs(float(flat.pow(4).mean()) - 3) < 0.1
    assert float(torch.corrcoef(normals[:50].double()).fill_diagonal_(0).abs().max()) < 0.25


def test_schedules_are_those_of_the_papers():
    def levels(name: str, steps: int) -> list[float]:
        return DiffusionModelOutput(schedule=name, num_steps=steps)._levels

    betas = np.linspace(1e-4, 0.02, 1000)
    np.testing.assert_allclose(levels("linear", 1000), np.cumprod(1 - betas), rtol=1e-12)
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    np.testing.assert_allclose(levels("scaled_linear", 1000), np.cumprod(1 - betas), rtol=1e-12)
    t = np.arange(51) / 50
    bars = np.cos((t + 0.008) / 1.008 * np.pi / 2) ** 2
    np.testing.assert_allclose(
        levels("cosine", 50)[:40], (bars[1:] / bars[0])[:40], rtol=1e-9
    )  # the last betas are cut at 0.999
    given = DiffusionModelOutput(schedule=[0.9, 0.5])
    assert (given.num_steps, given._levels, given.settings()["schedule"]) == (2, [0.9, 0.5], [0.9, 0.5])


def test_reference_columns_are_log_probabilities_under_the_reference():
    model, columns = prepared(LanguageModel(), seed=5), preference_columns()
    model.train()
    rows = {name: column for name, column in columns.items() if not name.startswith("ref_")}
    batches = [{name: column[part] for name, column in rows.items()} for part in (slice(0, 3), slice(3, B))]

    found = reference_columns(model, batches)

    for side in ("chosen", "rejected"):
        for i in range(B):
            logits = model(columns[f"{side}_input_ids"][i : i + 1])["logits"][0].detach()
            log_p = torch.log_softmax(logits, -1)
            labels = columns[f"{side}_labels"][i].tolist()
            total = sum(float(log_p[t - 1, y]) for t, y in enumerate(labels) if t and y != IGNORED)
            assert float(found[f"ref_{side}_logps"][i]) == pytest.approx(total, rel=1e-12)
    assert model.training
    assert not found["ref_chosen_logps"].requires_grad
    at_reference = DPOModelOutput().evaluate(ModelCall(model), {**rows, **found})
    torch.testing.assert_close(at_reference.output, torch.zeros(B, dtype=torch.float64))
    torch.testing.assert_close(at_reference.out_to_loss_grad, torch.full((B,), 0.05, dtype=torch.float64))
    with pytest.raises(InvalidInputError, match="There is no batch"):
        reference_columns(model, [])
    with pytest.raises(InvalidInputError, match=r"Missing: \['chosen_labels'\]"):
        reference_columns(model, [{key: value for key, value in rows.items() if key != "chosen_labels"}])


def test_columns_without_prefix_are_inputs_of_both_answers():
    class Shared(RewardModel):
        def forward(self, input_ids: Tensor, scale: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            assert (attention_mask is None) == (input_ids.shape[1] == 4)
            return super().forward(input_ids) * scale[:, None]

    model = prepared(Shared())
    batch = {
        "chosen_input_ids": randint(V, (B, T), 1),
        "chosen_attention_mask": torch.ones(B, T),
        "rejected_input_ids": randint(V, (B, 4), 2),
        "scale": randn(B, seed=3),
    }

    terms = RewardModelOutput().evaluate(ModelCall(model), batch)

    plain = RewardModel.forward
    gap = plain(model, batch["chosen_input_ids"]) - plain(model, batch["rejected_input_ids"])
    torch.testing.assert_close(terms.output, gap[:, 0] * batch["scale"])


def test_q_keeps_its_digits_far_from_the_decision():
    class Fixed(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return input_ids.float()

    batch = {"chosen_input_ids": torch.tensor([40, -40]), "rejected_input_ids": torch.tensor([0, 0])}

    terms = RewardModelOutput().evaluate(ModelCall(Fixed()), batch)

    assert terms.out_to_loss_grad.tolist() == pytest.approx([math.exp(-40), 1.0], rel=1e-5)
    assert terms.loss_curvature.tolist() == pytest.approx([math.exp(-40)] * 2, rel=1e-5)


def test_small_logits_are_resized_to_the_labels():
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(1, 3, 2, stride=2)

        def forward(self, image: Tensor) -> Tensor:
            return self.layer(image)

    model, images, labels = prepared(Small()), randn(2, 1, 4, 6, seed=1), randint(3, (2, 4, 6), 2)

    terms = DenseClassificationModelOutput(upsample=True).evaluate(ModelCall(model), (images, labels))

    full = nn.functional.interpolate(model(images), size=(4, 6), mode="bilinear")
    expected = -nn.functional.cross_entropy(full, labels, reduction="none").sum((1, 2))
    torch.testing.assert_close(terms.output, expected)
    with pytest.raises(InvalidInputError, match=r"labels have shape \(2, 4, 6\). Expected \(2, 2, 3\)"):
        DenseClassificationModelOutput().evaluate(ModelCall(model), (images, labels))


@pytest.mark.parametrize("name", BY_NAME)
def test_a_task_of_the_same_settings_has_the_same_description(name):
    """A store makes its task again from the settings that it holds."""
    task = BY_NAME[name]().task

    again = type(task)(**task.settings())

    assert describe_task(again) == describe_task(task)
    assert task.log_likelihood() is None or LossModelOutput(task).task is not task


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (DPOModelOutput(), DPOModelOutput(beta=0.2)),
        (PolicyGradientModelOutput(), PolicyGradientModelOutput(clip=0.2)),
        (PolicyGradientModelOutput(clip=0.2), PolicyGradientModelOutput(clip=(0.2, 0.3))),
        (PolicyGradientModelOutput(), PolicyGradientModelOutput(kl_weight=0.1)),
        (PolicyGradientModelOutput(), PolicyGradientModelOutput(reduction="mean")),
        (PolicyGradientModelOutput(), PolicyGradientModelOutput(temperature=0.7)),
        (PolicyGradientModelOutput(), PolicyGradientModelOutput(kl_correction=True)),
        (DiffusionModelOutput(), DiffusionModelOutput(schedule="cosine")),
        (DiffusionModelOutput(), DiffusionModelOutput(prediction="v_prediction")),
        (DiffusionModelOutput(), DiffusionModelOutput(draws=2)),
        (DiffusionModelOutput(), DiffusionModelOutput(num_steps=100)),
        (ContrastiveModelOutput(), ContrastiveModelOutput(similarity="dot")),
        (ContrastiveModelOutput(), ContrastiveModelOutput(pooling="last")),
        (ContrastiveModelOutput(), ContrastiveModelOutput(temperature=1.0)),
        (DenseClassificationModelOutput(), DenseClassificationModelOutput(class_axis=-1)),
        (DenseClassificationModelOutput(), DenseClassificationModelOutput(ignore_index=255)),
        (DenseClassificationModelOutput(), DenseClassificationModelOutput(upsample=True)),
        (SequenceToSequenceModelOutput(), SequenceToSequenceModelOutput(pad_token_id=0)),
    ],
)
def test_settings_that_change_numbers_change_the_description(one, other):
    assert describe_task(one) != describe_task(other)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPOModelOutput(beta=0.0), "beta must be"),
        (lambda: PolicyGradientModelOutput(clip=-0.1), "clip must be"),
        (lambda: PolicyGradientModelOutput(clip=1.5), "clip must be at most 1 below"),
        (lambda: PolicyGradientModelOutput(clip=(0.1, 0.2, 0.3)), "clip must be a number, two numbers"),
        (lambda: PolicyGradientModelOutput(kl_weight=-1.0), "kl_weight must be"),
        (lambda: PolicyGradientModelOutput(reduction="max"), "reduction must be one of"),
        (lambda: PolicyGradientModelOutput(temperature=0.0), "temperature must be"),
        (lambda: PolicyGradientModelOutput(kl_correction=1), "kl_correction must be"),
        (lambda: DenseClassificationModelOutput(class_axis=2), "class_axis must be 1"),
        (lambda: DenseClassificationModelOutput(ignore_index=1.5), "ignore_index must be an integer"),
        (lambda: DenseClassificationModelOutput(class_axis=-1, upsample=True), "upsample must be"),
        (lambda: DiffusionModelOutput(schedule="sigmoid"), "schedule must be one of"),
        (lambda: DiffusionModelOutput(schedule=[1.5]), "schedule must be the name"),
        (lambda: DiffusionModelOutput(prediction="x"), "prediction must be one of"),
        (lambda: DiffusionModelOutput(draws=0), "draws must be"),
        (lambda: ContrastiveModelOutput(similarity="l2"), "similarity must be one of"),
        (lambda: ContrastiveModelOutput(temperature=-1), "temperature must be"),
        (lambda: SequenceToSequenceModelOutput(pad_token_id=-1), "pad_token_id must be a token id"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(InvalidInputError, match=message):
        make()


def without(name: str):
    return lambda batch: {key: value for key, value in batch.items() if key != name}


def changed(**columns):
    return lambda batch: {**batch, **columns}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("dpo-plain", without("ref_chosen_logps"), r"Missing: \['ref_chosen_logps'\]"),
        ("dpo-plain", lambda batch: tuple(batch.values()), "batch is a tuple. Expected a dict"),
        ("dpo-plain", changed(chosen_labels=[1]), "'chosen_labels' is a list"),
        ("dpo-plain", changed(rejected_labels=torch.zeros(B, 2).long()), "rejected_labels have shape"),
        (
            "dpo-plain",
            changed(ref_chosen_logps=torch.zeros(B, 1)),
            "'ref_chosen_logps' is a .*one real number",
        ),
        ("policy_gradient-clipped", without("old_logps"), r"Missing: \['old_logps'\]"),
        ("policy_gradient-grpo", without("ref_logps"), r"Missing: \['ref_logps'\]"),
        ("policy_gradient-ratio", changed(old_logps=torch.zeros(B, T - 1)), "one number per token"),
        ("policy_gradient-ratio", changed(advantages=3.0), "'advantages' is a float"),
        ("policy_gradient-ratio", changed(labels=[1]), "labels are a list"),
        ("diffusion-epsilon", without("seed"), r"Missing: \['seed'\]"),
        ("diffusion-epsilon", changed(seed=torch.zeros(B)), "seeds are not a tensor of integers"),
        ("diffusion-epsilon", changed(sample=torch.zeros(B)), "Expected a tensor"),
        ("diffusion-epsilon", changed(timestep=torch.zeros(B, 2).long()), "does not fit 1 draw"),
        ("contrastive-mean", without("negative_input_ids"), "none of which begins with 'negative_'"),
        (
            "contrastive-mean",
            changed(negative_input_ids=torch.zeros(B).long()),
            "the same number of negatives",
        ),
        ("contrastive-mean", changed(labels=[0]), "labels are a list"),
        ("sequence_to_sequence-log_prob", lambda batch: tuple(batch.values()), "batch is a tuple"),
        ("dense_classification-tokens", lambda batch: tuple(batch.values())[:1], "batch is a tuple of 1"),
    ],
)
def test_batches_that_do_not_fit_are_refused(name, change, message):
    case = BY_NAME[name]()

    with pytest.raises(InvalidInputError, match=message):
        case.task.evaluate(ModelCall(case.model), change(case.batch))


class Answer(nn.Module):
    """Gives the same answer whatever the input."""

    def __init__(self, answer) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, *args, **kwargs):
        return self.answer


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [
        ("reward_modeling-plain", torch.zeros(B, 2), r"scores of shape \(4, 2\). Expected \(B,\)"),
        ("diffusion-epsilon", torch.zeros(B, 2), r"predicted shape \(4, 2\) for samples of shape \(4, 5\)"),
        ("diffusion-epsilon", {"logits": torch.zeros(B, 5)}, "model gave a dict with the keys"),
        ("contrastive-mean", torch.zeros(B), "embeddings of shape"),
        ("contrastive-mean", {"logits": torch.zeros(B)}, "model gave a dict with the keys"),
        ("dense_classification-tokens", torch.zeros(B, 2), "for one label per sample"),
        ("dpo-plain", torch.zeros(B, 2), r"logits of shape \(4, 2\). Expected \(B, T, V\)"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(name, answer, message):
    case = BY_NAME[name]()

    with pytest.raises(InvalidInputError, match=message):
        case.task.evaluate(ModelCall(Answer(answer)), case.batch)


def test_a_decoder_without_a_start_token_is_refused():
    case = BY_NAME["sequence_to_sequence-log_prob"]()

    with pytest.raises(InvalidInputError, match=r"model.config has no decoder_start_token_id"):
        SequenceToSequenceModelOutput().evaluate(ModelCall(case.model), case.batch)


def test_targets_are_not_drawn_for_positional_batches():
    case = BY_NAME["diffusion-sample"]()

    with pytest.raises(InvalidInputError, match="batches with named columns"):
        case.task.sample_labels(ModelCall(case.model), case.batch, evenly(B))
