"""Evaluation of attribution scores, in pure NumPy.

Retraining: linear datamodeling score with a confidence interval, removal of the highest-scoring rows, leave-one-out
correlation. Detection, such as finding mislabeled train rows: area under the ROC curve and precision. All metrics
treat ties exactly.
"""

from trak_lite.evaluation.bm25 import bm25 as bm25
from trak_lite.evaluation.datamodeling import compare_datamodeling_scores as compare_datamodeling_scores
from trak_lite.evaluation.datamodeling import leave_one_out_correlation as leave_one_out_correlation
from trak_lite.evaluation.datamodeling import linear_datamodeling_score as linear_datamodeling_score
from trak_lite.evaluation.datamodeling import seed_noise_ceiling as seed_noise_ceiling
from trak_lite.evaluation.datamodeling import summed_scores as summed_scores
from trak_lite.evaluation.ranking import auc as auc
from trak_lite.evaluation.ranking import mislabel_detection as mislabel_detection
from trak_lite.evaluation.ranking import precision_at as precision_at
from trak_lite.evaluation.ranking import spearman as spearman
from trak_lite.evaluation.subsets import leave_one_out_masks as leave_one_out_masks
from trak_lite.evaluation.subsets import removal_masks as removal_masks
from trak_lite.evaluation.subsets import subset_masks as subset_masks
from trak_lite.evaluation.subsets import target_loss_rise as target_loss_rise
from trak_lite.evaluation.verdict import Verdict as Verdict

__all__ = [
    "Verdict",
    "auc",
    "bm25",
    "compare_datamodeling_scores",
    "leave_one_out_correlation",
    "leave_one_out_masks",
    "linear_datamodeling_score",
    "mislabel_detection",
    "precision_at",
    "removal_masks",
    "seed_noise_ceiling",
    "spearman",
    "subset_masks",
    "summed_scores",
    "target_loss_rise",
]
