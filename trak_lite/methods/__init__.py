"""Attribution methods: objects that define how scores are computed from stored feature rows.

Pass one as ``method=`` to :class:`~trak_lite.Attributor` or to :meth:`~trak_lite.Attributor.score`. All methods read
the same stored train rows, so trying another method needs no new gradients of train rows.
"""

from trak_lite.methods.base import AbstractKernelMethod as AbstractKernelMethod
from trak_lite.methods.base import AbstractMethod as AbstractMethod
from trak_lite.methods.cg import CG as CG
from trak_lite.methods.ekfac import EKFAC as EKFAC
from trak_lite.methods.ekfac import AbstractInverseMethod as AbstractInverseMethod
from trak_lite.methods.fisher import Fisher as Fisher
from trak_lite.methods.gauss_newton import GaussNewton as GaussNewton
from trak_lite.methods.grad_cos import GradCos as GradCos
from trak_lite.methods.grad_dot import GradDot as GradDot
from trak_lite.methods.less import LESS as LESS
from trak_lite.methods.lissa import LiSSA as LiSSA
from trak_lite.methods.matrix import AbstractMatrixMethod as AbstractMatrixMethod
from trak_lite.methods.matrix import Mean as Mean
from trak_lite.methods.matrix import Unrolled as Unrolled
from trak_lite.methods.registry import METHODS as METHODS
from trak_lite.methods.registry import Method as Method
from trak_lite.methods.registry import as_method as as_method
from trak_lite.methods.tracin import TracIn as TracIn
from trak_lite.methods.trak import TRAK as TRAK

__all__ = [
    "CG",
    "EKFAC",
    "LESS",
    "METHODS",
    "TRAK",
    "AbstractInverseMethod",
    "AbstractKernelMethod",
    "AbstractMatrixMethod",
    "AbstractMethod",
    "Fisher",
    "GaussNewton",
    "GradCos",
    "GradDot",
    "LiSSA",
    "Mean",
    "Method",
    "TracIn",
    "Unrolled",
    "as_method",
]
