"""Products with weights of eight bits, for drafters: a pass over few tokens is the reading of bytes; this halves them.

A drafter may be rounded freely: the output is exact for whatever drafts it proposes, as long as the distribution that
it reports is the one they were drawn from. A weight is its output's scale times a whole number in -127..127, and so is
a state, whose scale it shares with the 64 neighbours of its group; the sums within a group are then exact in 32 bits,
and those of the groups are added up in float32, in order. So a row's numbers depend on the row alone.

``products.c`` does the same with AVX512-VNNI; :meth:`EightBit.plain` is its reference. States are rounded in groups
because a few of them are many times as large as the others: with one scale a row, the head of the drafter that we ship
cost 0.5 % of its analytic acceptance length, and 0.2 % with these groups.
"""

from __future__ import annotations

import ctypes

import torch
from jaxtyping import Float, Int8
from torch import Tensor

BLOCK = 64  # output columns that lie together
SHARED = 64  # neighbouring states that share a scale
OFFSET = 128  # weights are kept without a sign
MOST = 127

_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class ProductForm(ctypes.Structure):
    """``struct product`` of products.c, field by field."""

    _fields_ = (
        *((name, _pointer) for name in ("weight", "bias", "scale")),
        *((name, _int64) for name in ("inputs", "outputs", "piece")),
    )


class EightBit:
    """A frozen product x W^T + b like :class:`dspark.models.linear.Linear`, with W in eight bits.

    Keeps nothing but the rounded weight. With ``library`` (see :func:`compiled_for`) bfloat16 rows go through it.
    """

    def __init__(
        self,
        weight: Float[Tensor, "out in"],
        bias: Float[Tensor, "out"] | None = None,
        *,
        library: ctypes.CDLL | None = None,
    ) -> None:
        """``weight`` must fit (:func:`fits`)."""
        self.out_features, self.in_features = weight.shape
        assert fits(weight), f"a weight of {tuple(weight.shape)} does not fit; sizes are multiples of {BLOCK}"
        self.bias = bias
        self.exact_bias = None if bias is None else bias.float().contiguous()
        exact = weight.detach().float()
        self.scale = (exact.abs().amax(1) / MOST).contiguous()
        numbers = (exact / self.scale.clamp_min(1e-30)[:, None]).round().clamp(-MOST, MOST) + OFFSET
        parts = numbers.to(torch.uint8).view(-1, BLOCK, self.in_features // 4, 4)
        self._bytes = parts.transpose(1, 2).contiguous()  # [out / 64, in / 4, 64, 4]
        self._library = library

    def place(self) -> tuple[int, int]:
        """Address and bytes of the weight that products read."""
        return self._bytes.data_ptr(), self._bytes.nbytes

    def form(self) -> ProductForm:
        """What compiled code knows of it; valid as long as this object lives."""
        return ProductForm(
            weight=self._bytes.data_ptr(),
            bias=None if self.exact_bias is None else self.exact_bias.data_ptr(),
            scale=self.scale.data_ptr(),
            inputs=self.in_features,
            outputs=self.out_features,
        )

    def __call__(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        if self._library is None or x.dtype != torch.bfloat16:
            return self.plain(x)
        x, y = x.contiguous(), torch.empty(x.shape[0], self.out_features, dtype=x.dtype)
        if self._library.short_product(ctypes.byref(self.form()), _at(x), _at(y), _int64(x.shape[0])):
            raise MemoryError("no memory to round a product's inputs; free some")
        return y

    def plain(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        """The product in plain PyTorch."""
        numbers, scales = rounded(x)
        weights = self.numbers().float().view(self.out_features, -1, SHARED)
        total = torch.zeros(x.shape[0], self.out_features)
        for group in range(weights.shape[1]):
            sums = numbers[:, group].float() @ weights[:, group].T  # whole numbers below 2^24: exact in any order
            total = (total.double() + sums.double() * scales[:, group, None].double()).float()  # rounded once
        total = total * self.scale
        return (total if self.exact_bias is None else total + self.exact_bias).to(x.dtype)

    def numbers(self) -> Int8[Tensor, "out in"]:
        """The rounded weight without its scales."""
        flat = self._bytes.transpose(1, 2).reshape(self.out_features, self.in_features)
        return (flat.short() - OFFSET).to(torch.int8)


def rounded(x: Float[Tensor, "rows in"]) -> tuple[Int8[Tensor, "rows groups shared"], Float[Tensor, "rows groups"]]:
    """States as whole numbers in -127..127, and the scale of each group; a scale is nan where a state is not finite."""
    parts = x.float().view(x.shape[0], -1, SHARED)
    largest = parts.abs().amax(-1)
    inverse = torch.where(largest > 1e-30, torch.full_like(largest, MOST) / largest, 0.0)
    numbers = (parts * inverse[..., None]).round().nan_to_num(0.0).clamp(-MOST, MOST)
    return numbers.to(torch.int8), largest / MOST + (parts * 0.0).sum(-1)


def fits(weight: Tensor) -> bool:
    """Whether a weight [out, in] may be kept in eight bits: on a CPU, both sizes multiples of 64."""
    return weight.device.type == "cpu" and weight.shape[0] % BLOCK == weight.shape[1] % SHARED == 0


def compiled_for(library: ctypes.CDLL | None) -> bool:
    """Whether a library of :mod:`dspark.models.native` multiplies eight-bit weights on this CPU."""
    return library is not None and hasattr(library, "eight_bits") and bool(library.eight_bits())


def _at(x: Tensor) -> ctypes.c_void_p:
    return _pointer(x.data_ptr())
