"""Model output functions: for each task the attributed scalar f(z), its out-to-loss gradient q and its curvature w.

A task is a name in :data:`MODEL_OUTPUTS`, an instance or a class of :class:`AbstractModelOutput`, or a plain
function ``f(model_call, batch) -> (B,)``; :func:`resolve_task` accepts any of them. A custom class defines
``evaluate``, or the two methods of the original TRAK; ``trak_lite.testing.modelout.ModelOutputTests`` checks it
against the requirements. Source: TRAK (arXiv:2303.14186), sections 2, 3 and 5.1.
"""

from trak_lite.modelout_functions._base import (
    MODEL_OUTPUTS,
    TASK_TO_MODELOUT,
    AbstractModelOutput,
    CallableModelOutput,
    ModelCall,
    resolve_task,
)
from trak_lite.modelout_functions.contrastive import CLIPModelOutput, ContrastiveModelOutput
from trak_lite.modelout_functions.diffusion import DiffusionModelOutput
from trak_lite.modelout_functions.language_modeling import (
    CausalLanguageModelingModelOutput,
    DenseClassificationModelOutput,
    MaskedLanguageModelingModelOutput,
    SequenceToSequenceModelOutput,
)
from trak_lite.modelout_functions.packed import require_separate_documents
from trak_lite.modelout_functions.post_training import (
    AnswerDifferenceModelOutput,
    DPOModelOutput,
    PolicyGradientModelOutput,
    RewardModelOutput,
    reference_columns,
    response_labels,
)
from trak_lite.modelout_functions.questions import ActivationModelOutput, QuestionsModelOutput
from trak_lite.modelout_functions.supervised import (
    BinaryClassificationModelOutput,
    ImageClassificationModelOutput,
    IterativeImageClassificationModelOutput,
    MultiLabelModelOutput,
    RegressionModelOutput,
    TextClassificationModelOutput,
)

for _task in list(vars().values()):
    if isinstance(_task, type) and issubclass(_task, AbstractModelOutput) and _task.name:
        MODEL_OUTPUTS[_task.name] = _task
MODEL_OUTPUTS["classification"] = ImageClassificationModelOutput  # nothing in it is about images

__all__ = [
    "MODEL_OUTPUTS",
    "TASK_TO_MODELOUT",
    "AbstractModelOutput",
    "ActivationModelOutput",
    "AnswerDifferenceModelOutput",
    "BinaryClassificationModelOutput",
    "CLIPModelOutput",
    "CallableModelOutput",
    "CausalLanguageModelingModelOutput",
    "ContrastiveModelOutput",
    "DPOModelOutput",
    "DenseClassificationModelOutput",
    "DiffusionModelOutput",
    "ImageClassificationModelOutput",
    "IterativeImageClassificationModelOutput",
    "MaskedLanguageModelingModelOutput",
    "ModelCall",
    "MultiLabelModelOutput",
    "PolicyGradientModelOutput",
    "QuestionsModelOutput",
    "RegressionModelOutput",
    "RewardModelOutput",
    "SequenceToSequenceModelOutput",
    "TextClassificationModelOutput",
    "reference_columns",
    "require_separate_documents",
    "resolve_task",
    "response_labels",
]
