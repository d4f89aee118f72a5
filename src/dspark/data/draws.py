"""A token per row of logits: the draws of a batch, plain and as one call of compiled C.

A model's head gives a row of logits per answer under way, tens of thousands of tokens each. Drawn by single operations
(convert, subtract, divide, exponentiate, sum, search), they cost as much as a third of a small model's pass; ``draw.c``
reads the logits twice and writes one number. Where there is no compiler the plain form serves, its reference.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.core import SamplingParams
from dspark.errors import RequestError
from dspark.maths.sampling import blockwise_inverse_cdf, inverse_cdf, target_probs
from dspark.models.native import compiled, native_wanted

SOURCE = Path(__file__).with_name("draw.c")
_pointer, _int64, _float, _double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_double


def draw_tokens(
    logits: Float[Tensor, "rows vocab"],
    params: SamplingParams,
    u: Float[Tensor, "rows"],
    *,
    fast: bool = True,
    native: bool = True,
) -> Int[Tensor, "rows"]:
    """One token per row from the distribution that ``params`` makes of ``logits``, at the shares ``u`` in [0, 1) of
    its mass.

    ``fast`` False is the plain version: :func:`target_probs`, then a running sum. The fast ones need neither normalised
    probabilities nor a running sum over the vocabulary. In all versions a token owns the same stretch of [0, 1), in the
    order of ids, up to fp32 rounding of the weights; they can differ only where ``u`` lies within a relative 2**-20 of
    the edge between two tokens, or where two weights at the edge of a filter are equal in one version's rounding and
    not in the other's. ``native`` False keeps to PyTorch. Raises :class:`RequestError` for a row without a positive
    finite sum.
    """
    if params.greedy and fast:
        return logits.argmax(1)
    if not fast:
        return inverse_cdf(target_probs(logits, params), u)
    if native and (library := _library_for(logits)) is not None:
        return _draw_native(library, logits, params, u)
    if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0:
        return blockwise_inverse_cdf(target_probs(logits, params), u)
    weights = logits.to(torch.float32, copy=True)
    weights.sub_(weights.amax(1, keepdim=True)).div_(params.temperature).exp_()
    return blockwise_inverse_cdf(weights, u)


def _library_for(logits: Tensor) -> ctypes.CDLL | None:
    covered = logits.device.type == "cpu" and logits.dtype in (torch.bfloat16, torch.float32) and logits.numel() > 0
    return _library(logits.dtype == torch.bfloat16) if covered and native_wanted() else None


@functools.cache
def _library(bfloat16: bool) -> ctypes.CDLL | None:
    """draw.c for one type of logits; None without a working compiler."""
    library = compiled(SOURCE, (f"-DLOGITS_BF16={int(bfloat16)}",))
    if library is not None:
        library.draw_rows.argtypes = [_pointer] * 3 + [_int64] * 3 + [_float, _int64, _double, _float]
    return library


def _draw_native(library: ctypes.CDLL, logits: Tensor, params: SamplingParams, u: Tensor) -> Tensor:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    shares = u.to(torch.float64).contiguous()
    tokens = torch.empty(len(logits), dtype=torch.long)
    failed = library.draw_rows(
        *(part.data_ptr() for part in (logits, shares, tokens)),
        *(*logits.shape, logits.stride(0)),
        *(params.temperature, params.top_k, params.top_p, params.min_p),
    )
    if failed:
        raise MemoryError("no memory to draw tokens; lower rows")
    if bool((tokens < 0).any()):
        bad = (tokens < 0).nonzero()[:, 0].tolist()
        raise RequestError(
            f"the weights of a token to draw in rows {bad} have no sum that is positive and finite "
            "(check the logits for nan, and that masks leave a token)"
        )
    return tokens
