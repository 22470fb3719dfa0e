"""Evaluation of attribution scores, in pure NumPy.

Retraining: linear datamodeling score with a confidence interval, removal of the highest-scoring rows, leave-one-out
correlation. Detection, such as finding mislabeled train rows: area under the ROC curve and precision. All metrics
treat ties exactly.
"""

from trak_lite.evaluation.bm25 import bm25
from trak_lite.evaluation.datamodeling import (
    compare_datamodeling_scores,
    leave_one_out_correlation,
    linear_datamodeling_score,
    seed_noise_ceiling,
    summed_scores,
)
from trak_lite.evaluation.ranking import auc, mislabel_detection, precision_at, spearman
from trak_lite.evaluation.subsets import leave_one_out_masks, removal_masks, subset_masks, target_loss_rise
from trak_lite.evaluation.verdict import Verdict

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
