"""Retraining on subsets of the train rows, to test scores."""

from trak_lite.retraining.subsets import Retrained as Retrained
from trak_lite.retraining.subsets import retrain as retrain
from trak_lite.retraining.subsets import retrain_many as retrain_many

__all__ = ["Retrained", "retrain", "retrain_many"]
