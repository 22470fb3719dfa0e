"""Model output functions: for each task the attributed scalar f(z), its out-to-loss gradient q and its curvature w.

A task is a name in :data:`MODEL_OUTPUTS`, an instance or a class of :class:`AbstractModelOutput`, or a plain
function ``f(model_call, batch) -> (B,)``; :func:`resolve_task` accepts any of them. A custom class defines
``evaluate``, or the two methods of the original TRAK; ``trak_lite.testing.modelout.ModelOutputTests`` checks it
against the requirements. Source: TRAK (arXiv:2303.14186), sections 2, 3 and 5.1.
"""

from __future__ import annotations

from trak_lite.modelout_functions._base import AbstractModelOutput as AbstractModelOutput
from trak_lite.modelout_functions._base import ModelCall as ModelCall
from trak_lite.modelout_functions._chat import response_labels as response_labels
from trak_lite.modelout_functions._registry import MODEL_OUTPUTS as MODEL_OUTPUTS
from trak_lite.modelout_functions._registry import TASK_TO_MODELOUT as TASK_TO_MODELOUT
from trak_lite.modelout_functions._registry import resolve_task as resolve_task
from trak_lite.modelout_functions.binary import (
    BinaryClassificationModelOutput as BinaryClassificationModelOutput,
)
from trak_lite.modelout_functions.binary import MultiLabelModelOutput as MultiLabelModelOutput
from trak_lite.modelout_functions.callable import CallableModelOutput as CallableModelOutput
from trak_lite.modelout_functions.classification import (
    ImageClassificationModelOutput as ImageClassificationModelOutput,
)
from trak_lite.modelout_functions.classification import (
    IterativeImageClassificationModelOutput as IterativeImageClassificationModelOutput,
)
from trak_lite.modelout_functions.classification import (
    TextClassificationModelOutput as TextClassificationModelOutput,
)
from trak_lite.modelout_functions.clip import CLIPModelOutput as CLIPModelOutput
from trak_lite.modelout_functions.contrastive import ContrastiveModelOutput as ContrastiveModelOutput
from trak_lite.modelout_functions.dense import (
    DenseClassificationModelOutput as DenseClassificationModelOutput,
)
from trak_lite.modelout_functions.diffusion import DiffusionModelOutput as DiffusionModelOutput
from trak_lite.modelout_functions.language_modeling import (
    CausalLanguageModelingModelOutput as CausalLanguageModelingModelOutput,
)
from trak_lite.modelout_functions.language_modeling import (
    MaskedLanguageModelingModelOutput as MaskedLanguageModelingModelOutput,
)
from trak_lite.modelout_functions.language_modeling import (
    SequenceToSequenceModelOutput as SequenceToSequenceModelOutput,
)
from trak_lite.modelout_functions.policy_gradient import (
    PolicyGradientModelOutput as PolicyGradientModelOutput,
)
from trak_lite.modelout_functions.preferences import (
    AnswerDifferenceModelOutput as AnswerDifferenceModelOutput,
)
from trak_lite.modelout_functions.preferences import DPOModelOutput as DPOModelOutput
from trak_lite.modelout_functions.preferences import RewardModelOutput as RewardModelOutput
from trak_lite.modelout_functions.preferences import reference_columns as reference_columns
from trak_lite.modelout_functions.questions import ActivationModelOutput as ActivationModelOutput
from trak_lite.modelout_functions.questions import QuestionsModelOutput as QuestionsModelOutput
from trak_lite.modelout_functions.regression import RegressionModelOutput as RegressionModelOutput

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
    "resolve_task",
    "response_labels",
]
