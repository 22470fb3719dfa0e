"""Labels that tasks draw from the model, and the helpers of preferences."""

import modelout_cases as cases
import pytest
import torch
from modelout_cases import IGNORED, B, T
from post_training_cases import POST_TRAINING, answer_log_prob, preference_columns
from torch import nn

from trak_lite import Attributor
from trak_lite import modelout_functions as tasks


def evenly(count):
    """The numbers (i + 1/2) / count: frequencies are probabilities, up to one draw per class."""
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return lambda shape: grid.reshape(count, *[1] * len(shape)).expand(count, *shape)


def repeated(batch, row, count):
    parts = {name: column[row : row + 1].repeat_interleave(count, 0) for name, column in batch.items()}
    return parts, evenly(count)


@pytest.mark.parametrize(
    ("name", "place", "ignored"),
    [
        ("sequence_to_sequence-log_prob", (0,), IGNORED),
        ("masked_language_modeling-margin", (0,), IGNORED),
        ("dense_classification-log_prob", (3, 4), 255),
    ],
)
def test_labels_are_drawn_from_the_classes_of_their_own_position_if_it_has_a_label(name, place, ignored):
    case, count = POST_TRAINING[name](), 2000
    columns = case.batch
    if isinstance(columns, tuple):
        columns = {"image": columns[0], "labels": columns[1]}
    batch, noise = repeated(columns, 1, count)
    drawn = case.task.sample_labels(tasks.ModelCall(case.model), batch, noise)
    assert torch.equal(drawn["labels"] == ignored, batch["labels"] == ignored)
    answer = case.model(**{key: value[:1] for key, value in drawn.items() if key != "labels"})
    logits = answer["logits"][0] if "logits" in answer else answer["out"][0].movedim(0, -1)
    shares = torch.bincount(drawn["labels"][:, *place], minlength=logits.shape[-1]).double() / count
    torch.testing.assert_close(shares, logits[place].softmax(0), rtol=0, atol=2 / count)


def test_drawn_answers_of_a_decoder_do_not_change_its_inputs():
    case = POST_TRAINING["sequence_to_sequence-log_prob"]()
    drawn = case.task.sample_labels(tasks.ModelCall(case.model), case.batch, evenly(B))
    explicit = POST_TRAINING["sequence_to_sequence-margin"]().batch["decoder_input_ids"]
    assert torch.equal(drawn["decoder_input_ids"], explicit)
    assert not torch.equal(drawn["labels"], case.batch["labels"])


def test_the_fisher_information_of_a_policy_has_no_advantages():
    """Tokens are drawn from the policy, and the gradient is that of their log-probability."""
    case = POST_TRAINING["policy_gradient-grpo"]()
    call = tasks.ModelCall(case.model)
    drawn = case.task.sample_labels(call, case.batch, lambda shape: torch.full((B, *shape), 0.3))
    found = case.task.log_likelihood().evaluate(call, drawn).output
    plain = {key: drawn[key] for key in ("input_ids", "labels")}
    expected = tasks.CausalLanguageModelingModelOutput().evaluate(call, plain).output
    torch.testing.assert_close(found, expected)
    assert not torch.equal(drawn["labels"], case.batch["labels"])
    assert torch.equal(drawn["labels"] == IGNORED, case.batch["labels"] == IGNORED)


def test_drawn_targets_of_a_denoiser_have_unit_variance_around_its_predictions():
    case, count = POST_TRAINING["diffusion-v_prediction"](), 1000
    batch, noise = repeated(case.batch, 0, count)
    call = tasks.ModelCall(case.model)
    drawn = case.task.sample_labels(call, batch, noise)
    assert drawn["target"].shape == (count, 2, 5)
    assert bool((drawn["target"].var(0) - 1).abs().max() < 1e-2)
    output = case.task.evaluate(call, drawn).output.detach()
    assert float(output.mean()) == pytest.approx(-10 / 2, rel=1e-2)


def test_reference_columns_are_log_probabilities_under_the_reference():
    model, columns = cases.prepared(cases.LanguageModel(), seed=5), preference_columns()
    model.train()
    rows = {name: column for name, column in columns.items() if not name.startswith("ref_")}
    batches = [{name: column[part] for name, column in rows.items()} for part in (slice(0, 3), slice(3, B))]
    found = tasks.reference_columns(model, batches)
    for side in ("chosen", "rejected"):
        pairs = zip(columns[f"{side}_input_ids"], columns[f"{side}_labels"], strict=True)
        expected = torch.stack([answer_log_prob(model, *pair) for pair in pairs]).detach()
        torch.testing.assert_close(found[f"ref_{side}_logps"], expected, rtol=1e-12, atol=0)
        assert not found[f"ref_{side}_logps"].requires_grad
    assert model.training
    at_reference = tasks.DPOModelOutput().evaluate(tasks.ModelCall(model), {**rows, **found})
    torch.testing.assert_close(at_reference.output, torch.zeros(B).double())
    torch.testing.assert_close(at_reference.out_to_loss_grad, torch.full((B,), 0.05).double())


def test_reference_columns_do_not_depend_on_the_callers_autocast():
    class InFloat32(cases.LanguageModel):
        def forward(self, input_ids, attention_mask=None):
            return {"logits": self.head(torch.tanh(self.tokens(input_ids)))}

    model, columns = cases.prepared(InFloat32()).float(), preference_columns()
    rows = {name: column for name, column in columns.items() if not name.startswith("ref_")}
    expected = tasks.reference_columns(model, [rows])
    with torch.autocast("cpu", torch.bfloat16):
        found = tasks.reference_columns(model, [rows])
    for name, column in expected.items():
        assert column.dtype == torch.float32
        torch.testing.assert_close(found[name], column, rtol=0, atol=0)


class Tied(nn.Module):
    """Its table is used twice: gradients of two equal passes are summed in an order in which they do not cancel."""

    def __init__(self, *, scores):
        super().__init__()
        self.tokens, self.scores = nn.Embedding(cases.V, 4), scores

    def forward(self, input_ids):
        logits = torch.tanh(self.tokens(input_ids).cumsum(1)) @ self.tokens.weight.T
        return {"logits": logits.logsumexp(-1).mean(1) if self.scores else logits}


@pytest.mark.parametrize("computer", ["auto", "functional", "iterative"])
@pytest.mark.parametrize("name", ["dpo", "answer_difference", "reward_modeling"])
def test_only_a_pair_of_equal_answers_has_no_gradient_and_it_is_exactly_0(name, computer):
    """Pairs become equal where they are cut off. What rounding leaves of a difference would count in a cosine."""
    columns = {f"{side}_input_ids": cases.randint(cases.V, (B, T), 40) for side in ("chosen", "rejected")}
    columns["rejected_input_ids"][2:, -1] = (columns["chosen_input_ids"][2:, -1] + 1) % cases.V
    if name != "reward_modeling":
        columns |= {f"{side}_labels": columns[f"{side}_input_ids"].clone() for side in ("chosen", "rejected")}
        columns["rejected_labels"][1, 1] = IGNORED  # the same tokens, of which others are predicted
    if name == "dpo":
        columns |= {"ref_chosen_logps": cases.randn(B, seed=1), "ref_rejected_logps": cases.randn(B, seed=2)}
    rows = [{key: column[row] for key, column in columns.items()} for row in range(B)]
    settings = {"gradient_computer": computer, "batch_size": 2, "store_norms": True, "progress": False}
    model = cases.prepared(Tied(scores=name == "reward_modeling"))
    attributor = Attributor(model, name, None, proj_dim=8, **settings)
    attributor.featurize(rows)
    expected = [True, name == "reward_modeling", False, False]
    assert (attributor.gradient_norms()[0] == 0).tolist() == expected


@pytest.mark.parametrize("computer", ["auto", "iterative"])
@pytest.mark.parametrize("marks", [("labels",), ("labels", "attention_mask"), ("attention_mask",)])
def test_equal_answers_of_other_lengths_or_with_other_columns_have_a_gradient_of_exactly_0(marks, computer):
    """The rejected answers have two more tokens, which are padding but in rows 2 and 3."""

    class Masked(Tied):
        def forward(self, input_ids, attention_mask=None, note=None):
            kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            table, scale = self.tokens.weight, [1.0 + (one == "b") for one in note or "a" * len(input_ids)]
            logits = torch.tanh((table[input_ids] * kept[..., None]).cumsum(1)) @ table.T
            logits = logits * torch.tensor(scale)[:, None, None]
            if not self.scores:
                return {"logits": logits}
            return {"logits": (logits.logsumexp(-1) * kept).sum(1) / kept.sum(1)}

    chosen = cases.randint(cases.V, (B, T), 40)
    rejected = torch.cat([chosen, cases.randint(cases.V, (B, 2), 41)], 1)
    columns = {"chosen_input_ids": chosen, "rejected_input_ids": rejected}
    for mark in marks:
        padding = IGNORED if mark == "labels" else 0
        columns[f"chosen_{mark}"] = chosen.clone() if mark == "labels" else torch.ones_like(chosen)
        columns[f"rejected_{mark}"] = rejected.clone() if mark == "labels" else torch.ones_like(rejected)
        columns[f"rejected_{mark}"][:2, T:] = padding
        columns[f"rejected_{mark}"][2, T + 1] = padding
    rows = [{key: column[row] for key, column in columns.items()} for row in range(B)]
    for row, answers in zip(rows, ["aa", "ab", "aa", "aa"], strict=True):
        row["chosen_note"], row["rejected_note"] = answers
    name = "answer_difference" if "labels" in marks else "reward_modeling"
    settings = {"gradient_computer": computer, "batch_size": 4, "store_norms": True, "progress": False}
    model = cases.prepared(Masked(scores="labels" not in marks))
    attributor = Attributor(model, name, None, proj_dim=8, **settings)
    attributor.featurize(rows)
    assert (attributor.gradient_norms()[0] == 0).tolist() == [True, False, False, False]
    absent = columns | {"chosen_note": None, "rejected_note": None}
    grads = attributor.task.evaluate(tasks.ModelCall(model), absent).output[:2].sum()
    assert not any(grad.any() for grad in torch.autograd.grad(grads, list(model.parameters())))


def test_settings_of_one_side_that_all_rows_share_may_be_tensors_without_axes():
    """They are keyword arguments of the model, as a temperature."""

    class Scaled(Tied):
        def forward(self, input_ids, scale):
            return {"logits": super().forward(input_ids)["logits"] * scale}

    columns = {f"{side}_input_ids": cases.randint(cases.V, (B, T), 40) for side in ("chosen", "rejected")}
    columns |= {f"{side}_labels": columns[f"{side}_input_ids"] for side in ("chosen", "rejected")}
    for rejected, dtype, is_same in (
        (2.0, torch.float32, True),
        (3.0, torch.float32, False),
        (2, torch.uint16, None),
    ):
        scales = {"chosen_scale": torch.tensor(2.0), "rejected_scale": torch.tensor(rejected, dtype=dtype)}
        model = cases.prepared(Scaled(scores=False)).double()
        terms = tasks.AnswerDifferenceModelOutput().evaluate(tasks.ModelCall(model), {**columns, **scales})
        grads = torch.autograd.grad(terms.output.sum(), list(model.parameters()))
        if is_same is not None:
            assert all(not grad.any() for grad in grads) == is_same


def rows_of(batch):
    """The rows of a batch, and the first one again."""
    if isinstance(batch, tuple):
        return [tuple(part[row % B] for part in batch) for row in range(B + 1)]
    return [{name: part[row % B] for name, part in batch.items()} for row in range(B + 1)]


NAMES = [name for name in POST_TRAINING if name != "diffusion-sample"]  # no labels are drawn for tuples


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_scored_from_end_to_end(name):
    """A row helps itself, and twice the same row has the same scores."""
    case = POST_TRAINING[name]()
    attributor = Attributor(case.model, case.task, None, proj_dim=32, progress=False)
    rows = rows_of(case.batch)
    attributor.featurize(rows)
    scores = attributor.score(rows).numpy()
    assert (scores.diagonal() > 0).all()
    assert scores[0] == pytest.approx(scores[B], rel=1e-2, abs=1e-3 * float(abs(scores).max()))
