"""Linear algebra that turns feature rows into attribution scores.

This package does not use disks, models or projectors. One pass over train blocks accumulates the gram matrix H of
each segment (:class:`GramAccumulator`). It is damped and factorised (:func:`factorise`), and the targets are
multiplied by (H + lambda I)^-1 (:func:`precondition`). A second pass multiplies train blocks by the result
(:func:`score_block`) and keeps the best rows (:class:`TopK`). Memory: a segment's width squared, one block, one tile of
scores.
"""
