"""Scoring: from feature rows to attribution scores, as pure linear algebra.

Nothing here touches a disk, a model or a projector. One pass over train blocks gives the gram matrix of
every segment (:func:`gram`); damped and factorised (:func:`factorise_segments`) it is applied to the targets
(:func:`precondition`); a second pass multiplies train blocks with the result (:func:`score_block`) and keeps
the best rows (:class:`TopK`). Memory: the square of a segment's width, one block, one tile of scores.
"""

from trak_lite.scoring.kernel import DEFAULT_DAMPING as DEFAULT_DAMPING
from trak_lite.scoring.kernel import EigenKernel as EigenKernel
from trak_lite.scoring.kernel import KernelSettings as KernelSettings
from trak_lite.scoring.kernel import SegmentKernel as SegmentKernel
from trak_lite.scoring.kernel import accumulation_dtype as accumulation_dtype
from trak_lite.scoring.kernel import eigenpath as eigenpath
from trak_lite.scoring.kernel import factorise as factorise
from trak_lite.scoring.kernel import factorise_segments as factorise_segments
from trak_lite.scoring.kernel import gram as gram
from trak_lite.scoring.kernel import precondition as precondition
from trak_lite.scoring.scores import cosine as cosine
from trak_lite.scoring.scores import dot_product as dot_product
from trak_lite.scoring.scores import score_block as score_block
from trak_lite.scoring.scores import self_scores as self_scores
from trak_lite.scoring.topk import TopK as TopK

__all__ = [
    "DEFAULT_DAMPING",
    "EigenKernel",
    "KernelSettings",
    "SegmentKernel",
    "TopK",
    "accumulation_dtype",
    "cosine",
    "dot_product",
    "eigenpath",
    "factorise",
    "factorise_segments",
    "gram",
    "precondition",
    "score_block",
    "self_scores",
]
