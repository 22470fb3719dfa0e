"""Scoring: from feature rows to attribution scores, as pure linear algebra.

Nothing here touches a disk, a model or a projector. One pass over train blocks gives the gram matrix of
every segment (:func:`gram`); damped and factorised (:func:`factorise_segments`) it is applied to the targets
(:func:`precondition`); a second pass multiplies train blocks with the result (:func:`score_block`) and keeps
the best rows (:class:`TopK`). Memory: the square of a segment's width, one block, one tile of scores.
"""

from trak_lite.linalg.kernel import DEFAULT_DAMPING as DEFAULT_DAMPING
from trak_lite.linalg.kernel import EigenKernel as EigenKernel
from trak_lite.linalg.kernel import GramAccumulator as GramAccumulator
from trak_lite.linalg.kernel import KernelSettings as KernelSettings
from trak_lite.linalg.kernel import SegmentKernel as SegmentKernel
from trak_lite.linalg.kernel import accumulation_dtype as accumulation_dtype
from trak_lite.linalg.kernel import eigenpath as eigenpath
from trak_lite.linalg.kernel import eigenpath_segments as eigenpath_segments
from trak_lite.linalg.kernel import factorise as factorise
from trak_lite.linalg.kernel import factorise_segments as factorise_segments
from trak_lite.linalg.kernel import gram as gram
from trak_lite.linalg.kernel import precondition as precondition
from trak_lite.linalg.kernel import precondition_path as precondition_path
from trak_lite.linalg.products import cosine as cosine
from trak_lite.linalg.products import dot_product as dot_product
from trak_lite.linalg.products import score_block as score_block
from trak_lite.linalg.products import self_scores as self_scores
from trak_lite.linalg.products import unit_segments as unit_segments
from trak_lite.linalg.spread import Spread as Spread
from trak_lite.linalg.spread import agreement as agreement
from trak_lite.linalg.spread import expected_agreement as expected_agreement
from trak_lite.linalg.topk import TopK as TopK
from trak_lite.linalg.topk import merged_top as merged_top

__all__ = [
    "DEFAULT_DAMPING",
    "EigenKernel",
    "KernelSettings",
    "SegmentKernel",
    "Spread",
    "TopK",
    "accumulation_dtype",
    "agreement",
    "cosine",
    "dot_product",
    "eigenpath",
    "eigenpath_segments",
    "expected_agreement",
    "factorise",
    "factorise_segments",
    "gram",
    "precondition",
    "precondition_path",
    "score_block",
    "self_scores",
    "unit_segments",
]
