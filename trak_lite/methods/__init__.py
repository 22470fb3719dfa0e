"""Attribution methods: objects that define how scores are computed from stored feature rows.

Pass one as ``method=`` to :class:`~trak_lite.Attributor` or to :meth:`~trak_lite.Attributor.score`. All methods read
the same stored train rows, so trying another method needs no new gradients of train rows.
"""

from trak_lite.methods.base import AbstractKernelMethod, AbstractMethod
from trak_lite.methods.inverse import CG, EKFAC, AbstractInverseMethod, LiSSA
from trak_lite.methods.matrix import AbstractMatrixMethod, Mean, Unrolled
from trak_lite.methods.registry import METHODS, Method, as_method
from trak_lite.methods.stored import LESS, TRAK, Fisher, GaussNewton, GradCos, GradDot, TracIn

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
