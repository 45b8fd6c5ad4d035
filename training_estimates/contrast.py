"""The vectors of all rows of an optimizer step, whose similarities are its loss: their memory on one GPU.

Each process first makes those of its own rows without gradients, micro batch by micro batch; the loss of all,
and its gradient with regard to them, follow before anything is trained, while there are neither activations
nor gradients (flytune/objectives/embed.py). Copies are counted as torch has them
(tests/training_estimates/test_contrast.py).
"""

from training_estimates.workload import BYTES, Workload

_COPIES = 7.0
"""Times that the complete vectors are in memory at the fullest moment, the backward pass of their division by
their lengths: they themselves, their gradient, the quotients, the gradient of these, and three results on its
way."""
_SIMILARITIES = 2.25
"""Times that a block of similarities is there beside one that each length of vectors keeps for backward:
divided by the temperature, and without what is no negative, with a mask of a byte each."""


def kept_bytes(workload: Workload) -> float:
    """Return bytes of the gradient of a process's own vectors, which lasts until the next step's."""
    rows = workload.micro_batch * workload.accumulation
    return _vectors(workload, rows) if workload.contrast else 0.0


def loss_bytes(workload: Workload) -> float:
    """Return bytes of the vectors of all processes, and of their loss, at the fullest moment."""
    if (contrast := workload.contrast) is None:
        return 0.0
    rows = workload.degrees.batch(workload.micro_batch, workload.accumulation)
    *shorter, size = contrast.sizes
    own, texts = kept_bytes(workload), workload.sequences_per_row
    # Those of micro batches; where several processes gather them, joined ones too.
    own *= 1 if workload.degrees.data_parallel == 1 else 2
    # Of each other length backward has the quotients, and those of documents where a row has several.
    of_others = sum(shorter) / size * (1 + ((texts - 1) / texts if texts > 2 else 0))
    of_query = rows * (texts - 1)
    block = min(max(contrast.similarities, of_query), rows * of_query)
    similarities = BYTES["float32"] * block * (_SIMILARITIES + len(contrast.sizes))
    return own + _vectors(workload, rows) * (_COPIES + of_others) + similarities


def _vectors(workload: Workload, rows: int) -> float:
    """Return bytes of the complete vectors of rows, in float32."""
    assert workload.contrast
    return float(BYTES["float32"] * rows * workload.sequences_per_row * workload.contrast.sizes[-1])
