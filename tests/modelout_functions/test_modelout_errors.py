"""What tasks say of settings, batches, labels and answers that do not fit."""

from collections.abc import Callable
from typing import Any

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
from torch.utils.data import DataLoader, TensorDataset

from trak_lite.errors import InvalidInputError, StateError, UnknownTaskError
from trak_lite.modelout_functions import (
    AbstractModelOutput,
    ActivationModelOutput,
    BinaryClassificationModelOutput,
    CallableModelOutput,
    CausalLanguageModelingModelOutput,
    CLIPModelOutput,
    ContrastiveModelOutput,
    DenseClassificationModelOutput,
    DiffusionModelOutput,
    DPOModelOutput,
    ImageClassificationModelOutput,
    ModelCall,
    MultiLabelModelOutput,
    PolicyGradientModelOutput,
    QuestionsModelOutput,
    RegressionModelOutput,
    SequenceToSequenceModelOutput,
    TextClassificationModelOutput,
    reference_columns,
    resolve_task,
)

IMAGES, BINARY, LANGUAGE = (
    ImageClassificationModelOutput(),
    BinaryClassificationModelOutput(),
    CausalLanguageModelingModelOutput(),
)
LOGITS, LABELS = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]]), torch.tensor([2, 0])
LINEAR = "torch.nn.modules.linear.Linear.*Pass the model as the argument `model`"
FOREIGN = "Derive it from trak_lite.modelout_functions.AbstractModelOutput"


class NeedsWidth(AbstractModelOutput):
    def __init__(self, width: int, *rest: Any, **options: Any) -> None:
        self.width = width

    def evaluate(self, model_call: Any, batch: Any) -> Any:
        raise NotImplementedError


class ForeignTask:
    """As if derived from the original package's class."""

    def get_output(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("image_clasification", "Did you mean 'image_classification'.*Known names"),
        ("?", "Known names: .*'binary_classification'"),
        (nn.Linear(1, 1), f"is a {LINEAR}"),
        (nn.Linear, f"is the class {LINEAR}"),
        (3, "is a builtins.int"),
        (None, "is a builtins.NoneType"),
        (AbstractModelOutput, "is the class .*AbstractModelOutput"),
        (AbstractModelOutput(), "is a .*AbstractModelOutput"),
        (ForeignTask(), FOREIGN),
        (ForeignTask, FOREIGN),
        (NeedsWidth, r"needs the arguments \['width'\]. Pass an instance"),
        (CallableModelOutput, r"needs the arguments \['function'\]"),
    ],
)
def test_what_is_no_task_is_refused(task: Any, message: str) -> None:
    with pytest.raises(UnknownTaskError, match=message):
        resolve_task(task)


SETTINGS: list[tuple[Any, dict[str, Any], str]] = [
    *(
        (task, {"temperature": value}, "temperature must be a finite number")
        for task in (ImageClassificationModelOutput, TextClassificationModelOutput)
        for value in (0.0, -1.0, float("nan"), "1", True)
    ),
    *(
        (TextClassificationModelOutput, {"input_names": names}, "distinct keyword names")
        for names in ("input_ids", ("mask", "mask"))
    ),
    (MultiLabelModelOutput, {"output": "logprob"}, "output must be one of"),
    (RegressionModelOutput, {"output": "loss"}, "output must be one of"),
    (CausalLanguageModelingModelOutput, {"output": "logit"}, "output must be one of"),
    (CausalLanguageModelingModelOutput, {"shift": "yes"}, "shift must be True or False"),
    (CallableModelOutput, {"function": 3}, "is a int. Expected a callable"),
    (DPOModelOutput, {"beta": 0.0}, "beta must be"),
    (PolicyGradientModelOutput, {"clip": -0.1}, "clip must be"),
    (PolicyGradientModelOutput, {"clip": 1.5}, "clip must be at most 1 below"),
    (PolicyGradientModelOutput, {"clip": (0.1, 0.2, 0.3)}, "clip must be a number, two numbers"),
    (PolicyGradientModelOutput, {"kl_weight": -1.0}, "kl_weight must be"),
    (PolicyGradientModelOutput, {"reduction": "max"}, "reduction must be one of"),
    (PolicyGradientModelOutput, {"temperature": 0.0}, "temperature must be"),
    (PolicyGradientModelOutput, {"kl_correction": 1}, "kl_correction must be"),
    (DenseClassificationModelOutput, {"class_axis": 2}, "class_axis must be 1"),
    (DenseClassificationModelOutput, {"ignore_index": 1.5}, "ignore_index must be an integer"),
    (DenseClassificationModelOutput, {"class_axis": -1, "upsample": True}, "upsample must be"),
    (DiffusionModelOutput, {"schedule": "sigmoid"}, "schedule must be one of"),
    (DiffusionModelOutput, {"schedule": [1.5]}, "schedule must be the name"),
    (DiffusionModelOutput, {"prediction": "x"}, "prediction must be one of"),
    (DiffusionModelOutput, {"draws": 0}, "draws must be"),
    (ContrastiveModelOutput, {"similarity": "l2"}, "similarity must be one of"),
    (ContrastiveModelOutput, {"temperature": -1}, "temperature must be"),
    (SequenceToSequenceModelOutput, {"pad_token_id": -1}, "pad_token_id must be a token id"),
    (CLIPModelOutput, {"temperature": 0.0}, "temperature"),
    (CLIPModelOutput, {"simulated_batch_size": 0}, "simulated_batch_size"),
    (CLIPModelOutput, {"seed": 1.5}, "seed must be an integer"),
    (CLIPModelOutput, {"input_names": ("image",)}, "two distinct names"),
    (
        CLIPModelOutput,
        {"pairs": iter([])},
        "pairs is a list_iterator. Expected a list of batches or a loader",
    ),
    (CLIPModelOutput, {"pairs": 3}, "pairs is a int"),
    (
        CLIPModelOutput,
        {"pairs": DataLoader(TensorDataset(LOGITS), shuffle=True)},
        "DataLoader that shuffles.*shuffle=False",
    ),
    (QuestionsModelOutput, {"task": IMAGES, "questions": {}}, "questions is empty"),
    *(
        (ActivationModelOutput, {"module": "0", "direction": torch.ones(5), **options}, message)
        for options, message in (
            ({"direction": torch.ones(2, 2)}, "no vector of finite numbers"),
            ({"direction": torch.tensor([1.0, torch.nan])}, "no vector of finite numbers"),
            ({"direction": torch.ones(5, dtype=torch.long)}, "has dtype torch.int64"),
            ({"position": "middle"}, "position must be one of"),
            ({"position": True}, "position must be one of"),
        )
    ),
]


@pytest.mark.parametrize(("task", "settings", "message"), SETTINGS)
def test_settings_out_of_range_are_refused(task: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        task(**settings)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


TERMS: list[tuple[Any, Any, Any, str]] = [
    # answers of models
    (IMAGES, {"scores": LOGITS}, LABELS, r"dict with the keys \['scores'\]"),
    (IMAGES, (), LABELS, "gave a tuple"),
    (IMAGES, None, LABELS, "gave a NoneType"),
    (IMAGES, ("text", LOGITS), LABELS, "gave a tuple"),
    (IMAGES, LABELS, LABELS, "dtype torch.int64"),
    # class labels and their logits
    (IMAGES, LOGITS, torch.tensor([1, 5]), r"^sample 1: labels\[1\] is 5\. Expected an integer from 0 to 2"),
    (IMAGES, LOGITS[1:], torch.tensor([5]), r"^sample 0: labels\[0\] is 5\. Expected an integer from 0 to 2"),
    (IMAGES, LOGITS, [2, 0], "labels are a list"),
    (IMAGES, LOGITS, LABELS.float(), "dtype torch.float32. Expected integer class indices"),
    (IMAGES, LOGITS, LABELS == 2, "dtype torch.bool"),
    (
        IMAGES,
        LOGITS,
        LABELS[:, None],
        r"shape \(2, 1\). Expected \(2,\) .*the last axis: labels.squeeze\(-1\)",
    ),
    (IMAGES, LOGITS, LABELS[:1], r"shape \(1,\). Expected \(2,\)"),
    (IMAGES, LOGITS, LOGITS, r"shape \(2, 3\)"),
    (IMAGES, LOGITS[:, 0], LABELS, r"shape \(2,\). Expected \(B, C\)"),
    (IMAGES, LOGITS[:, :, None], LABELS, r"shape \(2, 3, 1\)"),
    (IMAGES, LOGITS[:, :1], LABELS, "at least 2 classes.*binary_classification"),
    # binary and several labels
    (BINARY, LOGITS[:, 0], torch.tensor([1, 5]), r"sample 1: labels\[1\] is 5\. Expected .*0 .*1"),
    (BINARY, LOGITS, LABELS, r"logits have shape \(2, 3\). Expected \(B,\) or \(B, 1\).*multilabel"),
    (BINARY, LOGITS[:, 0], LOGITS, r"labels have shape \(2, 3\)"),
    (BINARY, LOGITS[:, 0], LABELS[:1], r"labels have shape \(1,\), the logits \(2,\)"),
    (MultiLabelModelOutput(), LOGITS[:, 0], LABELS, r"logits of shape \(2,\)"),
    (MultiLabelModelOutput(), LOGITS[:, :0], LABELS, r"logits of shape \(2, 0\)"),
    (MultiLabelModelOutput(), LOGITS, LABELS, r"labels have shape \(2,\), the logits \(2, 3\)"),
    (
        MultiLabelModelOutput(),
        LOGITS,
        LOGITS.long() * 0 + 2,
        r"sample 0: labels\[0, 0\] is 2. Expected 0 or 1",
    ),
    # regression
    *(
        (
            RegressionModelOutput(output=output),
            zeros(*shapes[0]),
            zeros(*shapes[1]),
            "Expected the same shape",
        )
        for output in ("prediction", "neg_squared_error")
        for shapes in (
            ((3, 1), (1,)),
            ((3,), (1, 3)),
            ((3,), (2,)),
            ((3,), (2, 1)),
            ((3, 1), (3, 1, 1, 1)),
            ((1,), ()),
            ((), (1,)),
            ((), ()),
        )
    ),
    (RegressionModelOutput(), LOGITS, LOGITS, r"\(2, 3\).*neg_squared_error"),
    (RegressionModelOutput(), LOGITS[:, 0], LABELS == 2, "Expected real numbers"),
    (RegressionModelOutput(), LOGITS[:, 0], LOGITS[:, 0] * 1j, "Expected real numbers"),
    (
        RegressionModelOutput(),
        LOGITS[:, 0],
        LOGITS[:, 0] / 0,
        r"targets\[0\] is inf. Expected a finite number",
    ),
    # texts
    (LANGUAGE, zeros(2, 7), zeros(2, 1), r"Expected \(B, T, V\) with at least 2 positions"),
    (LANGUAGE, zeros(2, 1, 7), zeros(2, 1), r"Expected \(B, T, V\) with at least 2 positions"),
    (LANGUAGE, zeros(2, 4, 7), zeros(2, 3).long(), r"shape \(2, 3\). Expected \(2, 4\)"),
    (
        LANGUAGE,
        zeros(2, 4, 7),
        torch.tensor([[0, 1, 2, 3], [0, 1, 99, 3]]),
        r"sample 1: labels\[1, 2\] is 99\..* 0 to 6 .*-100",
    ),
    (
        LANGUAGE,
        zeros(2, 4, 7),
        torch.tensor([[0, 1, 2, 3], [5, -100, -100, -100]]),
        "sample 1 has no token to predict",
    ),
    # functions
    (
        CallableModelOutput(lambda call, batch: call(batch[0]).sum()),
        LOGITS,
        LABELS,
        r"shape \(\). Expected .*\(2,\)",
    ),
    (CallableModelOutput(lambda call, batch: call(batch[0])), LOGITS, LABELS, r"shape \(2, 3\)"),
    (CallableModelOutput(lambda call, batch: 1.0), LOGITS, LABELS, "returned float"),
    (CallableModelOutput(lambda call, batch: zeros(2).long()), LOGITS, LABELS, "dtype torch.int64"),
]


@pytest.mark.parametrize(("task", "logits", "labels", "message"), TERMS)
def test_logits_and_labels_that_do_not_fit_are_refused(
    task: AbstractModelOutput, logits: Any, labels: Any, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        task.evaluate(ModelCall(Answer(logits)), (zeros(2, 1) if logits is None else logits, labels))


@pytest.mark.parametrize(
    ("task", "logits", "labels", "message"),
    [
        (IMAGES, (3,), (1,), r"shape \(B, 1\). Expected \(B,\) .*squeeze"),
        (IMAGES, (3, 4), (), r"logits of shape \(B, 3, 4\). Expected \(B, C\)"),
        (BINARY, (3,), (), r"logits have shape \(B, 3\). Expected \(B,\) or \(B, 1\)"),
        (MultiLabelModelOutput(), (3,), (2,), r"labels have shape \(B, 2\), the logits \(B, 3\)"),
        (MultiLabelModelOutput(), (), (2,), r"logits of shape \(B,\). Expected \(B, C\)"),
        (RegressionModelOutput(), (3,), (2,), r"predictions have shape \(B, 3\), the targets \(B, 2\)"),
        (RegressionModelOutput(), (3,), (3,), r"predictions of shape \(B, 3\). Expected \(B,\) or \(B, 1\)"),
        (LANGUAGE, (3,), (3,), r"logits of shape \(B, 3\). Expected \(B, T, V\)"),
        (LANGUAGE, (3, 4), (2,), r"shape \(B, 2\). Expected \(B, 3\)"),
        (lambda call, batch: call(batch[0]), (3,), (), r"returned shape \(B, 3\). Expected .* shape \(B,\)"),
        (
            lambda call, batch: call(batch[0]).sum(),
            (3,),
            (),
            r"returned shape \(\). Expected .* shape \(B,\)",
        ),
    ],
)
def test_shapes_under_transforms_do_not_speak_of_a_batch_of_one(
    task: Any, logits: tuple[int, ...], labels: tuple[int, ...], message: str
) -> None:
    """A sample-by-sample computer gives each sample an axis of one, which the user has never seen."""
    run = torch.func.grad(
        lambda values, label: terms_of_logits(resolve_task(task), values[None], label[None]).output[0]
    )

    with pytest.raises(InvalidInputError, match=message):
        torch.func.vmap(run)(zeros(5, *logits), zeros(5, *labels).long())


IDS, TYPES, MASK, TEXT_LABELS = text_parts()
BATCHES: list[tuple[Any, Callable[[], nn.Module], Any, str]] = [
    (IMAGES, nn.Identity, LOGITS, "batch is a Tensor"),
    (IMAGES, nn.Identity, (LOGITS,), "tuple of 1"),
    (IMAGES, nn.Identity, {"inputs": LOGITS}, r"keys \['inputs'\]"),
    (IMAGES, nn.Identity, {"inputs": LOGITS, "label": LABELS, "labels": LABELS}, "exactly one of"),
    (IMAGES, nn.Identity, {"labels": LABELS}, r"keys \['labels'\]"),
    (LANGUAGE, LanguageModel, (IDS, IDS, IDS, IDS), "3 parts before the labels.*use dict batches"),
    (
        TextClassificationModelOutput(),
        TextModel,
        (IDS, MASK, TEXT_LABELS),
        r"2 part.s. before the labels.*token_type_ids.*input_names",
    ),
]


@pytest.mark.parametrize(("task", "model", "batch", "message"), BATCHES)
def test_batches_of_another_form_are_refused(
    task: AbstractModelOutput, model: Callable[[], nn.Module], batch: Any, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        task.evaluate(ModelCall(model()), batch)


LACKING = [
    ("dpo-plain", "ref_chosen_logps", r"Missing: \['ref_chosen_logps'\]"),
    ("policy_gradient-clipped", "old_logps", r"Missing: \['old_logps'\]"),
    ("policy_gradient-grpo", "ref_logps", r"Missing: \['ref_logps'\]"),
    ("diffusion-epsilon", "seed", r"Missing: \['seed'\]"),
    ("contrastive-mean", "negative_input_ids", "none of which begins with 'negative_'"),
]
COLUMNS: list[tuple[str, dict[str, Any], str]] = [
    ("dpo-plain", {"chosen_labels": [1]}, "'chosen_labels' is a list"),
    ("dpo-plain", {"rejected_labels": zeros(B, 2).long()}, "rejected_labels have shape"),
    ("dpo-plain", {"ref_chosen_logps": zeros(B, 1)}, "'ref_chosen_logps' is a .*one real number"),
    ("policy_gradient-ratio", {"old_logps": zeros(B, T - 1)}, "one number per token"),
    ("policy_gradient-ratio", {"advantages": 3.0}, "'advantages' is a float"),
    ("policy_gradient-ratio", {"labels": [1]}, "labels are a list"),
    ("diffusion-epsilon", {"seed": zeros(B)}, "seeds are not a tensor of integers"),
    ("diffusion-epsilon", {"sample": zeros(B)}, "Expected a tensor"),
    ("diffusion-epsilon", {"timestep": zeros(B, 2).long()}, "does not fit 1 draw"),
    ("contrastive-mean", {"negative_input_ids": zeros(B).long()}, "the same number of negatives"),
    ("contrastive-mean", {"labels": [0]}, "labels are a list"),
]
POSITIONAL = [
    ("dpo-plain", 6, "batch is a tuple. Expected a dict"),
    ("sequence_to_sequence-log_prob", 2, "batch is a tuple"),
    ("dense_classification-tokens", 1, "batch is a tuple of 1"),
]
ANSWERS: list[tuple[str, Any, str]] = [
    ("reward_modeling-plain", zeros(B, 2), r"scores of shape \(4, 2\). Expected \(B,\)"),
    ("diffusion-epsilon", zeros(B, 2), r"predicted shape \(4, 2\) for samples of shape \(4, 5\)"),
    ("diffusion-epsilon", {"logits": zeros(B, 5)}, "model gave a dict with the keys"),
    ("contrastive-mean", zeros(B), "embeddings of shape"),
    ("contrastive-mean", {"logits": zeros(B)}, "model gave a dict with the keys"),
    ("dense_classification-tokens", zeros(B, 2), "for one label per sample"),
    ("dpo-plain", zeros(B, 2), r"logits of shape \(4, 2\). Expected \(B, T, V\)"),
]
CHANGES: list[tuple[str, Callable[[Any], Any], Any, str]] = [
    *(
        (name, lambda batch, key=key: {k: v for k, v in batch.items() if k != key}, None, message)
        for name, key, message in LACKING
    ),
    *(
        (name, lambda batch, columns=columns: {**batch, **columns}, None, message)
        for name, columns, message in COLUMNS
    ),
    *(
        (name, lambda batch, count=count: tuple(batch.values())[:count], None, message)
        for name, count, message in POSITIONAL
    ),
    *((name, dict, answer, message) for name, answer, message in ANSWERS),
]


@pytest.mark.parametrize(("name", "change", "answer", "message"), CHANGES)
def test_columns_and_answers_of_post_training_that_do_not_fit_are_refused(
    name: str, change: Callable[[Any], Any], answer: Any, message: str
) -> None:
    case = POST_TRAINING[name]()
    model = case.model if answer is None else Answer(answer)

    with pytest.raises(InvalidInputError, match=message):
        case.task.evaluate(ModelCall(model), change(case.batch))


def test_helpers_of_post_training_say_what_is_missing() -> None:
    seq2seq, diffusion = POST_TRAINING["sequence_to_sequence-log_prob"](), POST_TRAINING["diffusion-sample"]()
    columns = POST_TRAINING["answer_difference-plain"]().batch

    with pytest.raises(InvalidInputError, match=r"model.config has no decoder_start_token_id"):
        SequenceToSequenceModelOutput().evaluate(ModelCall(seq2seq.model), seq2seq.batch)
    with pytest.raises(InvalidInputError, match="batches with named columns"):
        diffusion.task.sample_labels(ModelCall(diffusion.model), diffusion.batch, zeros)
    with pytest.raises(InvalidInputError, match="There is no batch"):
        reference_columns(LanguageModel(), [])
    with pytest.raises(InvalidInputError, match=r"Missing: \['chosen_labels'\]"):
        reference_columns(LanguageModel(), [{k: v for k, v in columns.items() if k != "chosen_labels"}])
    with pytest.raises(InvalidInputError, match=r"labels have shape \(2, 4, 6\). Expected \(2, 2, 3\)"):
        DenseClassificationModelOutput().evaluate(
            ModelCall(nn.Identity()), (zeros(2, C, 2, 3), zeros(2, 4, 6).long())
        )


# CLIP

PAIRS = randn(6, 5, seed=1), randn(6, 4, seed=2)


class Reshaped(nn.Module):
    """The pair model with its answer in another form."""

    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.pair, self.form = prepared(PairModel()), form

    def forward(self, image: Any, text: Any) -> Any:
        return self.form(*self.pair(image, text))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda phi, psi, s: phi, "gave a Tensor"),
        (lambda phi, psi, s: {"image_features": phi}, "gave a dict"),
        (lambda phi, psi, s: (phi, psi), "gave no scale.*temperature"),
        (lambda phi, psi, s: (phi, psi[:, :2], s), r"\(6, 3\) \(image\) and \(6, 2\) \(text\)"),
        (lambda phi, psi, s: (phi, psi, s.expand(4)), r"a scale of shape \(4,\)"),
        (lambda phi, psi, s: (phi, psi, -s), r"sample 0: scale\[0\] is -.*Expected a positive factor"),
        (lambda phi, psi, s: (phi[:, :2], psi[:, :2], s), "width 2, the negatives have width 3"),
        (lambda phi, psi, s: (phi.long(), psi.long(), s), "image features has dtype torch.int64"),
    ],
)
def test_answers_that_are_no_pair_of_features_are_refused(form: Callable[..., Any], message: str) -> None:
    task = CLIPModelOutput(simulated_batch_size=3)
    task.set_embeddings(randn(8, 3, seed=3), randn(8, 3, seed=4))

    with pytest.raises(InvalidInputError, match=message):
        task.evaluate(ModelCall(Reshaped(form)), PAIRS)


def clip(**settings: Any) -> CLIPModelOutput:
    return CLIPModelOutput(simulated_batch_size=3, **settings)


def clip_batch(batch: Any) -> Any:
    task = clip()
    task.set_embeddings(randn(8, 3, seed=3), randn(8, 3, seed=4))
    return task.evaluate(ModelCall(prepared(PairModel())), batch)


CLIP: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: clip().evaluate(ModelCall(prepared(PairModel())), PAIRS),
        StateError,
        "no negatives yet. Call task.get_embeddings",
    ),
    (lambda: clip_batch(PAIRS[:1]), InvalidInputError, "Expected .images, texts."),
    (lambda: clip_batch((*PAIRS, PAIRS[1])), InvalidInputError, "Expected .images, texts."),
    (lambda: clip_batch(PAIRS[0]), InvalidInputError, "Expected .images, texts."),
    (lambda: clip().set_embeddings(zeros(8, 3), zeros(8, 2)), InvalidInputError, "same .N, d. for both"),
    (lambda: clip().set_embeddings(zeros(8), zeros(8)), InvalidInputError, "same .N, d. for both"),
    (
        lambda: clip().set_embeddings(zeros(2, 3), zeros(2, 3)),
        InvalidInputError,
        "2 embedded pairs. Expected at least simulated_batch_size = 3",
    ),
    (lambda: clip(pairs=[]).prepare(prepared(PairModel())), InvalidInputError, "gave no batch"),
    (
        lambda: clip(pairs=[(PAIRS[0][:2], PAIRS[1][:2])]).prepare(prepared(PairModel())),
        InvalidInputError,
        "2 embedded pairs",
    ),
    (lambda: clip().get_embeddings(prepared(PairModel()), []), InvalidInputError, "loader gave no batch"),
    (
        lambda: clip().get_embeddings(prepared(PairModel()), [PAIRS], embedding_dim=512),
        InvalidInputError,
        "width 3, expected embedding_dim = 512",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), CLIP)
def test_negatives_that_cannot_serve_are_refused(
    call: Callable[[], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call()


# Classes of one's own


def half(base: type, *names: str) -> Callable[[], Any]:
    return lambda: type("Half", (base,), dict.fromkeys(names, lambda *_: None))


@pytest.mark.parametrize(
    "define",
    [
        half(AbstractModelOutput),
        half(AbstractModelOutput, "get_output"),
        half(AbstractModelOutput, "get_out_to_loss_grad"),
        half(ImageClassificationModelOutput, "get_output"),
    ],
)
def test_a_class_with_half_a_contract_is_refused(define: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=r"Half must define evaluate.*or both"):
        define()
