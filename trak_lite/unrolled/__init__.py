"""Attribution through training itself: exact derivatives of a run by the weights of its train rows."""

from trak_lite.unrolled.optimizers import SGD as SGD
from trak_lite.unrolled.optimizers import AbstractOptimizer as AbstractOptimizer
from trak_lite.unrolled.optimizers import Adam as Adam
from trak_lite.unrolled.optimizers import AdamW as AdamW
from trak_lite.unrolled.replay import unrolled as unrolled
from trak_lite.unrolled.runs import Recipe as Recipe
from trak_lite.unrolled.runs import TrainingRun as TrainingRun
from trak_lite.unrolled.subsets import SubsetTraining as SubsetTraining

__all__ = ["SGD", "AbstractOptimizer", "Adam", "AdamW", "Recipe", "SubsetTraining", "TrainingRun", "unrolled"]
