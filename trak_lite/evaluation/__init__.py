"""Evaluation: how well scores rank, in pure NumPy.

Area under the ROC curve and precision for detection tasks such as finding mislabeled train rows, and
Spearman's rank correlation, which the linear datamodeling score averages. All of them treat ties exactly.
"""

from trak_lite.evaluation.ranking import auc as auc
from trak_lite.evaluation.ranking import precision_at as precision_at
from trak_lite.evaluation.ranking import spearman as spearman

__all__ = ["auc", "precision_at", "spearman"]
