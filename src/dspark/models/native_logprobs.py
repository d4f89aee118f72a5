"""Log-probabilities by compiled C: :func:`dspark.maths.logprobs.row_logprobs`, which stays the reference.

The same tokens in the same order; numbers within a millionth. Where there is no compiler, or the logits are on another
device, the plain form serves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dspark.maths import logprobs
from dspark.maths.logprobs import RowLogprobs
from dspark.models.native_verification import library_for


def row_logprobs(
    logits: Float[Tensor, "rows vocab"], token_ids: Sequence[int], *, top: int = 0, native: bool = True
) -> list[RowLogprobs]:
    """:func:`dspark.maths.logprobs.row_logprobs`; ``native`` False is that one."""
    library = library_for(logits) if native else None
    if library is None:
        return logprobs.row_logprobs(logits, token_ids, top=top)
    assert len(logits) == len(token_ids), "one token per row"
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    top = min(top, vocab)
    asked = np.asarray(token_ids, dtype=np.int64)
    own, top_ids, top_logprobs = np.empty(rows), np.empty((rows, top), dtype=np.int64), np.empty((rows, top))
    failed = library.verify_logprobs(
        *(logits.data_ptr(), logits.stride(0), int(logits.dtype == torch.bfloat16), rows, vocab),
        *(asked.ctypes.data, own.ctypes.data, top, top_ids.ctypes.data, top_logprobs.ctypes.data),
    )
    if failed:
        raise MemoryError("no memory for log-probabilities; ask for fewer rows at once")
    ranked = (tuple(zip(*row, strict=True)) for row in zip(top_ids.tolist(), top_logprobs.tolist(), strict=True))
    return [RowLogprobs(*row) for row in zip(asked.tolist(), own.tolist(), ranked, strict=True)]
