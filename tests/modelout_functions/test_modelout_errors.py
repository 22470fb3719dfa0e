"""What tasks say of settings, batches, labels and answers that do not fit."""

from functools import partial

import pytest
import torch
from modelout_cases import (
    Answer,
    B,
    C,
    LanguageModel,
    PairModel,
    T,
    TextModel,
    prepared,
    randn,
    terms_of_logits,
    text_parts,
)
from post_training_cases import POST_TRAINING
from torch import nn
from torch.utils.data import DataLoader

from trak_lite import modelout_functions as tasks
from trak_lite.errors import InvalidInputError, StateError, UnknownTaskError

IMAGES, BINARY, LANGUAGE = (
    tasks.ImageClassificationModelOutput(),
    tasks.BinaryClassificationModelOutput(),
    tasks.CausalLanguageModelingModelOutput(),
)
LOGITS, LABELS = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]]), torch.tensor([2, 0])
LINEAR = "torch.nn.modules.linear.Linear.*Pass the model as the argument `model`"
FOREIGN = "Derive it from trak_lite.modelout_functions.AbstractModelOutput"


class NeedsWidth(tasks.AbstractModelOutput):
    def __init__(self, width, *rest, **options):
        self.width = width

    def evaluate(self, model_call, batch):
        raise NotImplementedError


class ForeignTask:
    """As if derived from the original package's class."""

    def get_output(self):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("image_clasification", "Did you mean 'image_classification'.*Known names"),
        ("language_modeling", "mean 'causal_language_modeling' or 'masked_language_modeling'"),
        ("?", "Known names: .*'binary_classification'"),
        (nn.Linear(1, 1), f"is a {LINEAR}"),
        (nn.Linear, f"is the class {LINEAR}"),
        (3, "is a builtins.int"),
        (None, "is a builtins.NoneType"),
        (tasks.AbstractModelOutput, "is the class .*AbstractModelOutput"),
        (tasks.AbstractModelOutput(), "is a .*AbstractModelOutput"),
        (ForeignTask(), FOREIGN),
        (ForeignTask, FOREIGN),
        (NeedsWidth, r"needs the arguments \['width'\]. Pass an instance"),
        (tasks.CallableModelOutput, r"needs the arguments \['function'\]"),
    ],
)  # fmt: skip
def test_what_is_no_task_is_refused(task, message):
    with pytest.raises(UnknownTaskError, match=message):
        tasks.resolve_task(task)


def flat(table):
    return [(key, *row) for key, rows in table.items() for row in rows]


BAD_TEMPERATURES = [
    ({"temperature": value}, "temperature must be a finite number")
    for value in (0.0, -1.0, float("nan"), "1", True)
]
SETTINGS = {
    tasks.ImageClassificationModelOutput: BAD_TEMPERATURES,
    tasks.TextClassificationModelOutput: [*BAD_TEMPERATURES, ({"input_names": "input_ids"}, "distinct keyword names"),
                                          ({"input_names": ("mask", "mask")}, "distinct keyword names"),
                                          ({"input_names": iter(["mask"])}, r"distinct .*, such as \('input_ids',\)")],
    tasks.MultiLabelModelOutput: [({"output": "logprob"}, "output must be one of")],
    tasks.RegressionModelOutput: [({"output": "loss"}, "output must be one of")],
    tasks.CausalLanguageModelingModelOutput: [({"output": "logit"}, "output must be one of"),
                                              ({"shift": "yes"}, "shift must be True or False")],
    tasks.CallableModelOutput: [({"function": 3}, "is a int. Expected a callable")],
    tasks.DPOModelOutput: [({"beta": 0.0}, "beta must be")],
    tasks.PolicyGradientModelOutput: [({"clip": -0.1}, "clip must be"),
                                      ({"clip": 1.5}, "clip must be at most 1 below"),
                                      ({"clip": (0.1, 0.2, 0.3)}, "clip must be a number, two numbers"),
                                      ({"kl_weight": -1.0}, "kl_weight must be"),
                                      ({"reduction": "max"}, "reduction must be one of"),
                                      ({"temperature": 0.0}, "temperature must be"),
                                      ({"kl_correction": 1}, "kl_correction must be")],
    tasks.DenseClassificationModelOutput: [({"class_axis": 2}, "class_axis must be 1"),
                                           ({"ignore_index": 1.5}, "ignore_index must be an integer"),
                                           ({"class_axis": -1, "upsample": True}, "upsample must be")],
    tasks.DiffusionModelOutput: [({"schedule": "sigmoid"}, "schedule must be one of"),
                                 ({"schedule": [1.5]}, "schedule must be the name"),
                                 ({"prediction": "x"}, "prediction must be one of"), ({"draws": 0}, "draws must be")],
    tasks.ContrastiveModelOutput: [({"similarity": "l2"}, "similarity must be one of"),
                                   ({"temperature": -1}, "temperature must be")],
    tasks.SequenceToSequenceModelOutput: [({"pad_token_id": -1}, "pad_token_id must be an integer of at least 0")],
    tasks.CLIPModelOutput: [({"temperature": 0.0}, "temperature"),
                            ({"simulated_batch_size": 0}, "simulated_batch_size"),
                            ({"seed": 1.5}, "seed must be an integer"),
                            ({"input_names": ("image",)}, r"2 distinct .*, such as \('image', 'text'\), or None"),
                            ({"pairs": iter([])}, "pairs is a list_iterator. Expected a list of batches or a loader"),
                            ({"pairs": 3}, "pairs is a int"),
                            ({"pairs": DataLoader(LOGITS, shuffle=True)}, "DataLoader that shuffles.*shuffle=False")],
    partial(tasks.QuestionsModelOutput, IMAGES): [({"questions": {}}, "questions is empty")],
    partial(tasks.ActivationModelOutput, "0"): [
        ({"direction": torch.ones(2, 2)}, "no vector of finite numbers"),
        ({"direction": torch.tensor([1.0, torch.nan])}, "no vector of finite numbers"),
        ({"direction": torch.ones(5, dtype=torch.long)}, "has dtype torch.int64"),
        ({"direction": torch.ones(5), "position": "middle"}, "position must be one of"),
        ({"direction": torch.ones(5), "position": True}, "position must be one of"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("task", "settings", "message"), flat(SETTINGS))
def test_settings_out_of_range_are_refused(task, settings, message):
    with pytest.raises(InvalidInputError, match=message):
        task(**settings)


def zeros(*shape):
    return torch.zeros(shape)


BROADCAST = [((3, 1), (1,)), ((3,), (1, 3)), ((3,), (2,)), ((3,), (2, 1)), ((3, 1), (3, 1, 1, 1))]
BROADCAST += [((1,), ()), ((), (1,)), ((), ())]
SAME_SHAPE = [(zeros(*one), zeros(*other), "Expected the same shape") for one, other in BROADCAST]
FIRST = LOGITS[:, 0]
TERMS = {
    IMAGES: [
        # answers of models
        ({"scores": LOGITS}, LABELS, r"dict with the keys \['scores'\]"),
        ((), LABELS, "gave a tuple"),
        (None, LABELS, "gave a NoneType"),
        (("text", LOGITS), LABELS, "gave a tuple"),
        (LABELS, LABELS, "dtype torch.int64"),
        # labels and logits
        (LOGITS, torch.tensor([1, 5]), r"^sample 1: labels\[1\] is 5\. Expected an integer from 0 to 2"),
        (LOGITS[1:], torch.tensor([5]), r"^sample 0: labels\[0\] is 5\. Expected an integer from 0 to 2"),
        (LOGITS, [2, 0], "labels are a list"),
        (LOGITS, LABELS.float(), "dtype torch.float32. Expected integer class indices"),
        (LOGITS, LABELS == 2, "dtype torch.bool"),
        (LOGITS, LABELS[:, None], r"shape \(2, 1\). Expected \(2,\) .*last axis: labels.squeeze\(-1\)"),
        (LOGITS, LOGITS, r"shape \(2, 3\)\. Expected \(2,\) .*label of 0 or 1 per class .*multilabel_classification"),
        (LOGITS, LABELS[:1], r"shape \(1,\). Expected \(2,\)"),
        (FIRST, LABELS, r"shape \(2,\). Expected \(B, C\)"),
        (LOGITS[:, :, None], LABELS, r"shape \(2, 3, 1\)"),
        (LOGITS[:, :1], LABELS, "at least 2 classes.*binary_classification"),
    ],
    BINARY: [(FIRST, torch.tensor([1, 5]), r"sample 1: labels\[1\] is 5\. Expected .*0 .*1"),
             (LOGITS, LABELS, r"logits have shape \(2, 3\). Expected \(B,\) or \(B, 1\).*multilabel"),
             (FIRST, LOGITS, r"labels have shape \(2, 3\)"),
             (FIRST, LABELS[:1], r"labels have shape \(1,\), the logits \(2,\)")],
    tasks.MultiLabelModelOutput(): [
        (FIRST, LABELS, r"logits of shape \(2,\)"),
        (LOGITS[:, :0], LABELS, r"logits of shape \(2, 0\)"),
        (LOGITS, LABELS, r"labels have shape \(2,\), the logits \(2, 3\)"),
        (LOGITS, torch.full((2, 3), 2), r"sample 0: labels\[0, 0\] is 2. Expected 0 or 1"),
        *((LOGITS, torch.tensor([[0.0, 1, 1], [0, gap, 1]]), rf"labels\[1, 1\] is {gap:.1f}. .*masks them.*Subset")
          for gap in (torch.nan, -1.0, -100.0)),
    ],
    tasks.RegressionModelOutput(output="neg_squared_error"): SAME_SHAPE,
    tasks.RegressionModelOutput(): [
        *SAME_SHAPE,
        (LOGITS, LOGITS, r"\(2, 3\).*neg_squared_error"),
        (FIRST, LABELS == 2, "Expected real numbers"),
        (FIRST, FIRST * 1j, "Expected real numbers"),
        (FIRST, torch.tensor([0.0, torch.inf]), r"sample 1: targets\[1\] is inf. Expected a finite number"),
    ],
    LANGUAGE: [
        (zeros(2, 7), zeros(2, 1), r"Expected \(B, T, V\) with at least 2 positions"),
        (zeros(2, 1, 7), zeros(2, 1), r"Expected \(B, T, V\) with at least 2 positions"),
        (zeros(2, 4, 7), zeros(2, 3).long(), r"shape \(2, 3\). Expected \(2, 4\)"),
        (zeros(2, 3, 7), torch.tensor([[0, 1, 2], [0, 1, 99]]), r"sample 1: labels\[1, 2\] is 99\..* 0 to 6 .*-100"),
        (zeros(2, 3, 7), torch.tensor([[0, 1, 2], [5, -100, -100]]), "sample 1 has no position to predict"),
    ],
    tasks.DenseClassificationModelOutput(ignore_index=255): [
        (zeros(2, 7, 2, 2), torch.tensor([[[0, 1], [255, 2]], [[255] * 2] * 2]), r"sample 1 .*pixel.* 255\. .*Subset"),
    ],
    tasks.DenseClassificationModelOutput(): [
        (zeros(2, C, 2, 3), zeros(2, 4, 6).long(), r"labels have shape \(2, 4, 6\). Expected \(2, 2, 3\)"),
    ],
    tasks.CallableModelOutput(lambda call, batch: call(batch[0]).sum()): [
        (LOGITS, LABELS, r"shape \(\). Expected a tensor of shape \(2,\)")
    ],
    tasks.CallableModelOutput(lambda call, batch: call(batch[0])): [(LOGITS, LABELS, r"shape \(2, 3\)"),
                                                                    (LABELS, LABELS, "dtype torch.int64"),
                                                                    (1.0, LABELS, "returned float")],
}  # fmt: skip


@pytest.mark.parametrize(("task", "logits", "labels", "message"), flat(TERMS))
def test_logits_and_labels_that_do_not_fit_are_refused(task, logits, labels, message):
    with pytest.raises(InvalidInputError, match=message):
        task.evaluate(tasks.ModelCall(Answer(logits)), (zeros(2, 1), labels))


@pytest.mark.parametrize(
    ("task", "logits", "labels", "message"),
    [
        (IMAGES, (3,), (1,), r"shape \(B, 1\). Expected \(B,\) .*squeeze"),
        (IMAGES, (3, 4), (), r"logits of shape \(B, 3, 4\). Expected \(B, C\)"),
        (BINARY, (3,), (), r"logits have shape \(B, 3\). Expected \(B,\) or \(B, 1\)"),
        (tasks.MultiLabelModelOutput(), (3,), (2,), r"labels have shape \(B, 2\), the logits \(B, 3\)"),
        (tasks.MultiLabelModelOutput(), (), (2,), r"logits of shape \(B,\). Expected \(B, C\)"),
        (tasks.RegressionModelOutput(), (3,), (2,), r"predictions have shape \(B, 3\), the targets \(B, 2\)"),
        (tasks.RegressionModelOutput(), (3,), (3,), r"predictions of shape \(B, 3\). Expected \(B,\) or \(B, 1\)"),
        (LANGUAGE, (3,), (3,), r"logits of shape \(B, 3\). Expected \(B, T, V\)"),
        (LANGUAGE, (3, 4), (2,), r"shape \(B, 2\). Expected \(B, 3\)"),
        (lambda call, batch: call(batch[0]), (3,), (), r"returned shape \(B, 3\). Expected .* shape \(B,\)"),
        (lambda call, batch: call(batch[0]).sum(), (3,), (), r"returned shape \(\). Expected .* shape \(B,\)"),
    ],
)  # fmt: skip
def test_shapes_under_transforms_do_not_speak_of_a_batch_of_one(task, logits, labels, message):
    """A sample-by-sample computer gives each sample an axis of one, which the user has never seen."""
    run = torch.func.grad(
        lambda values, label: terms_of_logits(tasks.resolve_task(task), values[None], label[None]).output[0]
    )
    with pytest.raises(InvalidInputError, match=message):
        torch.func.vmap(run)(zeros(5, *logits), zeros(5, *labels).long())


IDS, TYPES, MASK, TEXT_LABELS = text_parts()
BATCHES = [
    (IMAGES, nn.Identity, LOGITS, "batch is a Tensor"),
    (IMAGES, nn.Identity, (LOGITS,), "tuple of 1"),
    (IMAGES, nn.Identity, {"inputs": LOGITS}, r"keys \['inputs'\]"),
    (IMAGES, nn.Identity, {"inputs": LOGITS, "label": LABELS, "labels": LABELS}, "exactly one of"),
    (IMAGES, nn.Identity, {"labels": LABELS}, r"keys \['labels'\]"),
    (LANGUAGE, LanguageModel, (IDS, IDS, IDS, IDS), "3 parts before the labels.*use dict batches"),
    (tasks.TextClassificationModelOutput(), TextModel, (IDS, MASK, TEXT_LABELS),
     r"2 part.s. before the labels.*token_type_ids.*input_names"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "model", "batch", "message"), BATCHES)
def test_batches_of_another_form_are_refused(task, model, batch, message):
    with pytest.raises(InvalidInputError, match=message):
        task.evaluate(tasks.ModelCall(model()), batch)


COLUMNS = {
    "dpo-plain": [({"ref_chosen_logps": None}, r"Missing: \['ref_chosen_logps'\]"),
                  ({"chosen_labels": [1]}, "'chosen_labels' is a list"),
                  ({"rejected_labels": zeros(B, 2).long()}, "rejected_labels have shape"),
                  ({"ref_chosen_logps": zeros(B, 1)}, "'ref_chosen_logps' is a .*one real number"),
                  (tuple, "batch is a tuple. Expected a dict"),
                  (Answer(zeros(B, 2)), r"logits of shape \(4, 2\). Expected \(B, T, V\)")],
    "policy_gradient-clipped": [({"old_logps": None}, r"Missing: \['old_logps'\]")],
    "policy_gradient-grpo": [({"ref_logps": None}, r"Missing: \['ref_logps'\]")],
    "policy_gradient-ratio": [({"old_logps": zeros(B, T - 1)}, "one number per token"),
                              ({"advantages": 3.0}, "'advantages' is a float"),
                              ({"labels": [1]}, "labels are a list")],
    "diffusion-epsilon": [({"seed": None}, r"Missing: \['seed'\]"),
                          ({"seed": zeros(B)}, "seeds are not a tensor of integers"),
                          ({"sample": zeros(B)}, "Expected a tensor"),
                          ({"timestep": zeros(B, 2).long()}, "does not fit 1 draw"),
                          (Answer(zeros(B, 2)), r"predicted shape \(4, 2\) for samples of shape \(4, 5\)"),
                          (Answer({"logits": zeros(B, 5)}), "model gave a dict with the keys")],
    "contrastive-mean": [({"negative_input_ids": None}, "none of which begins with 'negative_'"),
                         ({"negative_input_ids": zeros(B).long()}, "the same number of negatives"),
                         ({"labels": [0]}, "labels are a list"), (Answer(zeros(B)), "embeddings of shape"),
                         (Answer({"logits": zeros(B)}), "model gave a dict with the keys")],
    "reward_modeling-plain": [(Answer(zeros(B, 2)), r"scores of shape \(4, 2\). Expected \(B,\)")],
    "sequence_to_sequence-log_prob": [(tuple, "batch is a tuple")],
    "dense_classification-tokens": [(lambda columns: tuple(columns)[:1], "batch is a tuple of 1"),
                                    (Answer(zeros(B, 2)), "for one label per sample")],
}  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message"), flat(COLUMNS))
def test_columns_and_answers_of_post_training_that_do_not_fit_are_refused(name, change, message):
    """Changed columns (None leaves one out), columns without names, or another answer of the model."""
    case = POST_TRAINING[name]()
    model, batch = case.model, case.batch
    if isinstance(change, Answer):
        model = change
    elif isinstance(change, dict):
        batch = {key: part for key, part in {**batch, **change}.items() if part is not None}
    else:
        batch = change(batch.values())
    with pytest.raises(InvalidInputError, match=message):
        case.task.evaluate(tasks.ModelCall(model), batch)


def test_helpers_of_post_training_say_what_is_missing():
    seq2seq, diffusion = POST_TRAINING["sequence_to_sequence-log_prob"](), POST_TRAINING["diffusion-sample"]()
    columns = POST_TRAINING["answer_difference-plain"]().batch
    with pytest.raises(InvalidInputError, match=r"model.config has no decoder_start_token_id"):
        tasks.SequenceToSequenceModelOutput().evaluate(tasks.ModelCall(seq2seq.model), seq2seq.batch)
    with pytest.raises(InvalidInputError, match="batches with named columns"):
        diffusion.task.sample_labels(tasks.ModelCall(diffusion.model), diffusion.batch, zeros)
    with pytest.raises(InvalidInputError, match="There is no batch"):
        tasks.reference_columns(LanguageModel(), [])
    with pytest.raises(InvalidInputError, match=r"Missing: \['chosen_labels'\]"):
        tasks.reference_columns(LanguageModel(), [{k: v for k, v in columns.items() if k != "chosen_labels"}])


# ---- CLIP
PAIRS = randn(6, 5, seed=1), randn(6, 4, seed=2)


class Reshaped(nn.Module):
    """The pair model with its answer in another form."""

    def __init__(self, form):
        super().__init__()
        self.pair, self.form = prepared(PairModel()), form

    def forward(self, image, text):
        return self.form(*self.pair(image, text))


def clip(**settings):
    return tasks.CLIPModelOutput(simulated_batch_size=3, **settings)


def ready(**settings):
    task = clip(**settings)
    task.set_embeddings(randn(8, 3, seed=3), randn(8, 3, seed=4))
    return task


def clip_terms(batch=PAIRS, form=lambda *answer: answer):
    return ready().evaluate(tasks.ModelCall(Reshaped(form)), batch)


def embed(*loader, **settings):
    clip().get_embeddings(prepared(PairModel()), loader, **settings)


FEW = (PAIRS[0][:2], PAIRS[1][:2])
CLIP = [
    (lambda: clip_terms(form=lambda phi, psi, s: phi), "gave a Tensor"),
    (lambda: clip_terms(form=lambda phi, psi, s: {"image_features": phi}), "gave a dict"),
    (lambda: clip_terms(form=lambda phi, psi, s: (phi, psi)), "gave no scale.*temperature"),
    (lambda: clip_terms(form=lambda phi, psi, s: (phi, psi[:, :2], s)), r"\(6, 3\) \(image\) and \(6, 2\) \(text\)"),
    (lambda: clip_terms(form=lambda phi, psi, s: (phi, psi, s.expand(4))), r"a scale of shape \(4,\)"),
    (lambda: clip_terms(form=lambda phi, psi, s: (phi, psi, -s)),
     r"sample 0: scale\[0\] is -.*Expected a positive factor"),
    (lambda: clip_terms(form=lambda phi, psi, s: (phi[:, :2], psi[:, :2], s)), "width 2, the negatives have width 3"),
    (lambda: clip_terms(form=lambda phi, psi, s: (phi.long(), psi.long(), s)), "image features has dtype torch.int64"),
    (lambda: clip_terms(PAIRS[:1]), "Expected .images, texts."),
    (lambda: clip_terms((*PAIRS, PAIRS[1])), "Expected .images, texts."),
    (lambda: clip_terms(PAIRS[0]), "Expected .images, texts."),
    (lambda: clip().set_embeddings(zeros(8, 3), zeros(8, 2)), "same .N, d. for both"),
    (lambda: clip().set_embeddings(zeros(8), zeros(8)), "same .N, d. for both"),
    (lambda: clip().set_embeddings(*FEW), "same .N, d. for both"),
    (lambda: clip().set_embeddings(*2 * FEW[:1]), "2 embedded pairs. Expected at least simulated_batch_size = 3"),
    (lambda: clip(pairs=[]).prepare(prepared(PairModel())), "gave no batch"),
    (lambda: clip(pairs=[FEW]).prepare(prepared(PairModel())), "2 embedded pairs"),
    (embed, "loader gave no batch"),
    (lambda: embed(PAIRS, embedding_dim=512), "width 3, expected embedding_dim = 512"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CLIP)
def test_pairs_and_negatives_that_do_not_fit_are_refused(call, message):
    with pytest.raises(InvalidInputError, match=message):
        call()
    with pytest.raises(StateError, match=r"no negatives yet. Call task.get_embeddings"):
        clip().evaluate(tasks.ModelCall(prepared(PairModel())), PAIRS)


# ---- Classes of one's own
def half(base, *names):
    return lambda: type("Half", (base,), dict.fromkeys(names, lambda *_: None))


@pytest.mark.parametrize(
    "define",
    [
        half(tasks.AbstractModelOutput),
        half(tasks.AbstractModelOutput, "get_output"),
        half(tasks.AbstractModelOutput, "get_out_to_loss_grad"),
        half(tasks.ImageClassificationModelOutput, "get_output"),
    ],
)
def test_a_class_with_half_a_contract_is_refused(define):
    with pytest.raises(TypeError, match=r"Half must define evaluate.*or both"):
        define()
