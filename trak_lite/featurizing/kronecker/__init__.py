r"""Kronecker-factored curvature (K-FAC, EK-FAC), and gradients times its inverse.

:func:`fit_curvature` sums the factors of every layer over train rows and corrects their eigenvalues;
:class:`Preconditioner` multiplies the gradients of targets with the inverse, and :class:`PreconditionedProjector` does
so before the projection that the train rows had: stored rows serve this kernel as they serve TRAK's.

What is covered: weights and biases of linear and convolution layers as one matrix each; other matrices whose gradients
come in factors (recurrent layers, transposed convolutions) without their bias. Everything else (norms, embeddings,
grouped convolutions, biases that go with no weight, a weight that is both embedding and head) has the diagonal of its
curvature; :meth:`KroneckerCurvature.treatments` lists it. Nothing is left out.

Sources: Martens & Grosse (arXiv:1503.05671), Grosse & Martens (arXiv:1602.01407), George et al. (arXiv:1806.03884),
Grosse et al. (arXiv:2308.03296).
"""
