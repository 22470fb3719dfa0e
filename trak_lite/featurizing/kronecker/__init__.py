r"""Kronecker-factored curvature (K-FAC, EK-FAC), and gradients times its inverse.

:func:`fit_curvature` sums the factors of every layer over train rows and corrects their eigenvalues.
:class:`Preconditioner` multiplies the gradients of targets by the inverse. :class:`PreconditionedProjector` does so
before the projection of the train rows, so the stored train rows can be used as for TRAK.

Weight and bias of a linear or convolution layer are one matrix with Kronecker factors. Other matrices with factored
gradients (recurrent layers, transposed convolutions) have factors without their bias. All other parameters (norms,
embeddings, grouped convolutions, biases without a weight, a weight that is both embedding and head) have the diagonal
of their curvature; :meth:`KroneckerCurvature.treatments` lists them. Every kept parameter is covered.

Sources: Martens & Grosse (arXiv:1503.05671), Grosse & Martens (arXiv:1602.01407), George et al. (arXiv:1806.03884),
Grosse et al. (arXiv:2308.03296).
"""
