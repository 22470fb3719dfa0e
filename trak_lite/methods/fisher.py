"""Fisher: the curvature of the training loss, from labels that the model draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from trak_lite._validate import positive_int
from trak_lite.methods.base import AbstractKernelMethod
from trak_lite.modelout_functions import AbstractModelOutput
from trak_lite.modelout_functions._sampling import fisher_task
from trak_lite.types import FeatureLayout

__all__ = ["Fisher"]


@dataclass(frozen=True, kw_only=True)
class Fisher(AbstractKernelMethod):
    """Influence with the Fisher information of the model's predictions, in feature space.

    Use it for losses with many outputs per sample, such as a language model's. There the Fisher information is the
    Gauss-Newton matrix over all outputs (Martens, arXiv:1412.1193, section 9), which no weighting of the rows can
    express. It is fitted once per checkpoint to gradients for labels drawn from the model:
    by :meth:`~trak_lite.Attributor.featurize` if this is the attributor's method, otherwise by the first ``score``.
    Processes share the fit, and it resumes after a kill.
    """

    samples_per_feature: int = 4
    """Gradients for drawn labels per feature of the widest segment. A matrix of k features needs several times k
    gradients, whatever the number of train rows. On the language model of ``benchmarks/lds/table.py`` a value of 4
    gave an LDS of .694, and 8 gave .698."""
    max_draws: int = 32
    """Maximum number of labels drawn per train row."""
    seed: int = 0
    """Seed of the draws. The draws of a row depend only on the seed and the row number."""

    weighting: ClassVar[Literal["fisher"]] = "fisher"
    share_of_trace: ClassVar[float] = 1 / 16384

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        positive_int(samples_per_feature=self.samples_per_feature)
        positive_int(max_draws=self.max_draws)

    def check(self, task: AbstractModelOutput) -> None:
        """Raise if the task cannot draw labels."""
        fisher_task(task)

    def num_samples(self, layout: FeatureLayout) -> int:
        """Return the number of gradients for drawn labels to compute; ``max_draws`` may limit it."""
        return self.samples_per_feature * max(segment.width for segment in layout.segments)

    def fit_json(self) -> dict[str, Any]:
        """Return the fields that the fit depends on, as JSON values."""
        return {name: getattr(self, name) for name in ("samples_per_feature", "max_draws", "seed")}
