r"""Projectors map per-sample gradients (P numbers) to features (K numbers).

A projector is a linear map that preserves inner products in expectation (TRAK, arXiv:2303.14186, section 3.2).
It receives gradients one parameter at a time and sums their projections in one ``(B, K)`` accumulator. Native
projectors scale features so that :math:`E\|\phi\|^2 = \|g\|^2`. Projectors with names of the original TRAK do not
scale, like the originals.
"""

from trak_lite.projectors._base import AbstractProjector as AbstractProjector
from trak_lite.projectors._base import ProjectionType as ProjectionType
from trak_lite.projectors.dense.original import BasicProjector as BasicProjector
from trak_lite.projectors.dense.original import BasicSingleBlockProjector as BasicSingleBlockProjector
from trak_lite.projectors.dense.original import ChunkedCudaProjector as ChunkedCudaProjector
from trak_lite.projectors.dense.original import CudaProjector as CudaProjector
from trak_lite.projectors.dense.projectors import FastJLProjector as FastJLProjector
from trak_lite.projectors.dense.projectors import GaussianProjector as GaussianProjector
from trak_lite.projectors.dense.projectors import RademacherProjector as RademacherProjector
from trak_lite.projectors.mask import GraSSProjector as GraSSProjector
from trak_lite.projectors.mask import MaskProjector as MaskProjector
from trak_lite.projectors.per_module import NoOpProjector as NoOpProjector
from trak_lite.projectors.select import PROJECTORS as PROJECTORS
from trak_lite.projectors.sketch.countsketch import CountSketchProjector as CountSketchProjector
from trak_lite.projectors.two_sided.projector import TwoSidedProjector as TwoSidedProjector

__all__ = [
    "PROJECTORS",
    "AbstractProjector",
    "BasicProjector",
    "BasicSingleBlockProjector",
    "ChunkedCudaProjector",
    "CountSketchProjector",
    "CudaProjector",
    "FastJLProjector",
    "GaussianProjector",
    "GraSSProjector",
    "MaskProjector",
    "NoOpProjector",
    "ProjectionType",
    "RademacherProjector",
    "TwoSidedProjector",
]
