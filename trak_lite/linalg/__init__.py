"""Scoring: from feature rows to attribution scores, as pure linear algebra.

Nothing here touches a disk, a model or a projector. One pass over train blocks gives the gram matrix of
every segment (:func:`gram`); damped and factorised (:func:`factorise_segments`) it is applied to the targets
(:func:`precondition`); a second pass multiplies train blocks with the result (:func:`score_block`) and keeps
the best rows (:class:`TopK`). Memory: the square of a segment's width, one block, one tile of scores.
"""
