"""trak_lite: which training examples made the model say this?

:class:`Attributor` featurizes a train set and scores targets; :class:`TRAKer` is the original TRAK's
interface over the same rooms.
"""

from trak_lite import methods as methods
from trak_lite.attributor import Attributor as Attributor
from trak_lite.attributor import FeaturizeSummary as FeaturizeSummary
from trak_lite.core.normalization import Normalization as Normalization
from trak_lite.core.normalization import clip as clip
from trak_lite.core.normalization import clipping_threshold as clipping_threshold
from trak_lite.core.version import __version__ as __version__
from trak_lite.data.datasets import Rows as Rows
from trak_lite.data.packed import Documents as Documents
from trak_lite.data.packed import pad_documents as pad_documents
from trak_lite.models.optimizers import named_optimizer_state as named_optimizer_state
from trak_lite.retraining.calibrated import calibrate as calibrate
from trak_lite.retraining.repair import repair as repair
from trak_lite.retraining.trials import try_removals as try_removals
from trak_lite.retraining.verify import calibrated_scores as calibrated_scores
from trak_lite.retraining.verify import verify as verify
from trak_lite.retraining.verify import verify_run as verify_run
from trak_lite.retraining.what_if import what_if as what_if
from trak_lite.scoring.plan import Plan as Plan
from trak_lite.scoring.scores import Scores as Scores
from trak_lite.scoring.tokens import token_scores as token_scores
from trak_lite.scoring.unprojected import Refine as Refine
from trak_lite.selection import select as select
from trak_lite.traker import TRAKer as TRAKer
from trak_lite.utils import test_install as test_install

__all__ = [
    "Attributor",
    "Documents",
    "FeaturizeSummary",
    "Normalization",
    "Plan",
    "Refine",
    "Rows",
    "Scores",
    "TRAKer",
    "__version__",
    "calibrate",
    "calibrated_scores",
    "clip",
    "clipping_threshold",
    "methods",
    "named_optimizer_state",
    "pad_documents",
    "repair",
    "select",
    "test_install",
    "token_scores",
    "try_removals",
    "verify",
    "verify_run",
    "what_if",
]
