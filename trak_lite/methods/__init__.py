"""Attribution methods: objects that define how scores are computed from stored feature rows.

Pass one as ``method=`` to :class:`~trak_lite.Attributor` or to :meth:`~trak_lite.Attributor.score`. All methods read
the same stored train rows, so trying another method needs no new gradients of train rows.
"""

from trak_lite.methods.base import AbstractKernelMethod as AbstractKernelMethod
from trak_lite.methods.base import AbstractMethod as AbstractMethod
from trak_lite.methods.inverse import CG as CG
from trak_lite.methods.inverse import EKFAC as EKFAC
from trak_lite.methods.inverse import AbstractInverseMethod as AbstractInverseMethod
from trak_lite.methods.inverse import LiSSA as LiSSA
from trak_lite.methods.kernels import TRAK as TRAK
from trak_lite.methods.kernels import Fisher as Fisher
from trak_lite.methods.kernels import GaussNewton as GaussNewton
from trak_lite.methods.matrix import AbstractMatrixMethod as AbstractMatrixMethod
from trak_lite.methods.matrix import Mean as Mean
from trak_lite.methods.matrix import Unrolled as Unrolled
from trak_lite.methods.products import LESS as LESS
from trak_lite.methods.products import GradCos as GradCos
from trak_lite.methods.products import GradDot as GradDot
from trak_lite.methods.products import TracIn as TracIn
from trak_lite.methods.registry import METHODS as METHODS
from trak_lite.methods.registry import Method as Method
from trak_lite.methods.registry import as_method as as_method

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
