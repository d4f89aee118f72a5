"""RMSNorm in as few operations as the device allows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

MANY_ROWS = 48


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in fp32 and rounded once to x's dtype.

    ``weight`` [width], or [heads, width] with a row of its own per head; its dtype may be wider than that of x (Gemma).

    On a CPU, PyTorch composes this norm of a dozen operations, which cost a decode step more than the arithmetic. The
    layer norm of [x, -x] is one operation and the same function: its mean is zero and its variance is mean(x^2).
    Beyond ``MANY_ROWS`` rows arithmetic outweighs dispatch and nothing is won. ``composed`` True takes PyTorch's own
    form always, the reference of the other.
    """

    def __init__(self, weight: Float[Tensor, "*heads width"], eps: float, *, composed: bool = False) -> None:
        self.weight, self.eps, self.width = weight, eps, weight.shape[-1]
        # For compiled code: fp32, [width], or [2 * width] for the first head and the last (queries' weights and keys').
        self.exact = (weight if weight.dim() == 1 else torch.cat((weight[0], weight[-1]))).float().contiguous()
        self._doubled = None
        if weight.dim() == 1 and weight.device.type == "cpu" and not composed:
            self._doubled = torch.cat((weight, weight))

    def __call__(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        if self._doubled is not None and x.shape[0] <= MANY_ROWS:
            both = torch.cat((x, -x), -1)
            return torch.native_layer_norm(both, (2 * self.width,), self._doubled, None, self.eps)[0][..., : self.width]
        if self.weight.dim() == 1:
            return F.rms_norm(x.to(self.weight.dtype), (self.width,), self.weight, self.eps).to(x.dtype)
        return F.rms_norm(x.to(self.weight.dtype), (self.width,), None, self.eps).mul_(self.weight).to(x.dtype)
