"""Products as ``products.c`` computes them, where it gives the library's bits: found out by trial."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from dspark.models.eight_bit import BLOCK, EightBit, ProductForm, compiled_for
from dspark.models.linear import Linear, Product

PIECES = (1024, 512, 256, 128, 64, 32)  # pairs of inputs that the library may add up at a time, if not all
TRIAL_ROWS, TRIALS = 24, 400_000  # rows of a trial product, and results compared for each shape

_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


def compiled_forms(products: Sequence[Product], library: ctypes.CDLL) -> list[ProductForm] | None:
    """What compiled code needs to know of each product, valid as long as they live; None unless it can have them all.

    Of packed products a few of each shape are tried; those with weights of eight bits have no other form to equal.
    """
    if not hasattr(library, "short_product"):
        return None
    linears = [product for product in products if isinstance(product, Linear)]
    if any(not isinstance(product, Linear | EightBit) for product in products):
        return None
    if len(linears) < len(products) and not compiled_for(library):
        return None
    pieces: dict[tuple[int, int], int] = {}
    for shape in {(linear.out_features, linear.in_features) for linear in linears}:
        alike = [linear for linear in linears if (linear.out_features, linear.in_features) == shape]
        sizes = {size: None for size in (shape[1] // 2, *PIECES) if size <= shape[1] // 2}
        piece = next((size for size in sizes if agree(alike, size, library)), None)
        if piece is None:
            return None
        pieces[shape] = piece
    return [
        product.form()
        if isinstance(product, EightBit)
        else _form(product, pieces[product.out_features, product.in_features])
        for product in products
        if isinstance(product, Linear | EightBit)
    ]


class CompiledProduct:
    """A packed product run by compiled code, with the library's bits; see :func:`compiled_product`.

    The library takes its time to start and needs numbers of rows that it has met before; this needs neither, so rows
    are not filled up.
    """

    def __init__(self, linear: Linear, form: ProductForm, library: ctypes.CDLL) -> None:
        self._linear, self._form, self._run = linear, form, library.short_product  # the form points into the linear

    def __call__(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        """The products of ``x``, in bfloat16; other dtypes are the library's."""
        if x.dtype != torch.bfloat16:
            return self._linear(x)
        x, y = x.contiguous(), x.new_empty(x.shape[0], self._linear.out_features)
        self._run(ctypes.byref(self._form), _pointer(x.data_ptr()), _pointer(y.data_ptr()), _int64(x.shape[0]))
        return y


def compiled_product(linear: Linear, library: ctypes.CDLL) -> CompiledProduct | None:
    """One product alone; None where it would not have the library's bits."""
    forms = compiled_forms([linear], library)
    return None if forms is None else CompiledProduct(linear, forms[0], library)


def _form(linear: Linear, piece: int) -> ProductForm:
    bias = None if linear.exact_bias is None else linear.exact_bias.data_ptr()
    return ProductForm(
        weight=linear.place()[0], bias=bias, inputs=linear.in_features, outputs=linear.out_features, piece=piece
    )


def agree(linears: Sequence[Linear], piece: int, library: ctypes.CDLL) -> bool:
    """Whether compiled products of one shape equal the library's on random rows, as many as make a chance hit unlikely.

    Sums in another order differ in their last bit, and rounding to bfloat16 lets one in some 30,000 show: so few or
    small products are tried again, on other rows.
    """
    outputs, inputs = linears[0].out_features, linears[0].in_features
    generator = torch.Generator().manual_seed(inputs)
    for linear in itertools.islice(itertools.cycle(linears), -(-TRIALS // (TRIAL_ROWS * outputs))):
        if not linear.packed or outputs % BLOCK or inputs % 2 or linear.place()[1] != 2 * inputs * outputs:
            return False
        x = torch.randn(TRIAL_ROWS, inputs, generator=generator).bfloat16()
        y = torch.empty(TRIAL_ROWS, outputs, dtype=torch.bfloat16)
        library.short_product.argtypes = [ctypes.POINTER(ProductForm), _pointer, _pointer, _int64]
        library.short_product(ctypes.byref(_form(linear, piece)), x.data_ptr(), y.data_ptr(), TRIAL_ROWS)
        if not torch.equal(y, linear(x)):
            return False
    return True
