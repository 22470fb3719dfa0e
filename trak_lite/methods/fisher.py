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
    """Influence with the Fisher information of the model's own predictions, in the space of the features.

    For losses of many outputs per sample, such as a language model's: there the Fisher information is the Gauss-Newton
    matrix over all outputs (Martens, arXiv:1412.1193, section 9), which no weight per row gives. It is fitted to
    gradients of labels that the model draws, once per checkpoint, by the call that needs it:
    :meth:`~trak_lite.Attributor.featurize` if this is the attributor's method, else the first ``score``. The fit is
    shared by processes and resumes.
    """

    samples_per_feature: int = 4
    """Gradients of drawn labels per feature of the widest segment. A matrix of k features needs several times k of
    them, however many train rows there are. On the language model of ``benchmarks/lds_digits.py`` 8 gave .698 where 4
    gave .694."""
    max_draws: int = 32
    """Labels drawn for one train row at most."""
    seed: int = 0
    """Seed of the draws, which depend only on it and on the number of the row."""

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
        """Return how many gradients of drawn labels are computed, if there are enough train rows."""
        return self.samples_per_feature * max(segment.width for segment in layout.segments)

    def fit_json(self) -> dict[str, Any]:
        """Return the fields that the fit depends on, as JSON values."""
        return {name: getattr(self, name) for name in ("samples_per_feature", "max_draws", "seed")}
