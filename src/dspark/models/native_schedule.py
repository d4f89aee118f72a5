"""The arithmetic of batch schedulers as compiled C (``schedule.c``), a third of the time of numpy's.

Where there is no compiler, or ``DSPARK_NATIVE=0`` says so, numpy's serves, which is also its reference
(:class:`dspark.maths.global_scheduling.NumpyArithmetic`).
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from dspark.maths import global_scheduling as rules
from dspark.maths.batch_schedulers import recall
from dspark.maths.global_scheduling import Arithmetic, Ranked
from dspark.models.native import compiled, native_wanted

SOURCE = Path(__file__).with_name("schedule.c")
_pointer, _int64, _double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


class _Drafts(ctypes.Structure):
    """``struct drafts`` of schedule.c, field by field."""

    _fields_ = (
        *((name, _pointer) for name in ("given", "survival", "ordered")),
        *((name, _int64) for name in ("requests", "block", "wide", "survive")),
    )


class _Past(ctypes.Structure):
    """``struct past`` of schedule.c, field by field."""

    _fields_ = (
        *((name, _pointer) for name in ("ids", "survival", "ordered")),
        *((name, _int64) for name in ("requests", "block", "wide", "count")),
    )


class NativeArithmetic:
    """:class:`dspark.maths.global_scheduling.Arithmetic` in C; what it cannot take, or must refuse, numpy's gets."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._order, self._greedy, self._capacity, self._admit, self._recall = (
            getattr(library, name) for name in ("order", "greedy", "capacity", "admit", "recall")
        )
        self._recall.argtypes = [ctypes.POINTER(_Past), _pointer, _int64, _pointer, _pointer]
        self._recall.restype = _int64
        self._order.argtypes = [ctypes.POINTER(_Drafts)]
        self._greedy.argtypes = [_pointer, _int64, _pointer, _int64, _int64]
        self._capacity.argtypes = [_pointer, _int64, _pointer, _int64]
        self._admit.argtypes = [_pointer, _int64, _int64, _int64, _int64, _double, _pointer]
        self._order.restype = self._greedy.restype = self._capacity.restype = _int64
        self._admit.restype = None

    def ranked(self, confidence: Float[np.ndarray, "requests block"]) -> Ranked:
        given = np.ascontiguousarray(confidence)
        if given.dtype not in _DTYPES:
            return rules.NUMPY.ranked(confidence)
        survival = np.empty_like(given)
        ordered = self._ordered(given, survival)
        return rules.NUMPY.ranked(confidence) if ordered is None else Ranked(survival=survival, ordered=ordered)

    def descending(self, survival: Float[np.ndarray, "rows block"]) -> Float[np.ndarray, "candidates"]:
        given = np.ascontiguousarray(survival)
        ordered = None if given.dtype not in _DTYPES else self._ordered(given, None)
        return rules.NUMPY.descending(survival) if ordered is None else ordered

    def greedy(self, ranked: Ranked, sps: Float[np.ndarray, "max_tokens_plus_1"]) -> int:
        requests, block = ranked.survival.shape
        full = requests * (1 + block)
        if len(sps) > full and _plain(sps) and _plain(ranked.ordered):
            count = self._greedy(_at(ranked.ordered), len(ranked.ordered), _at(sps), requests, full)
            if count >= 0:
                return int(count)
        return rules.NUMPY.greedy(ranked, sps)

    def capacity(
        self,
        ordered: Float[np.ndarray, "candidates"],
        sps: Float[np.ndarray, "max_tokens_plus_1"],
        requests: int,
    ) -> int:
        if len(sps) > requests + len(ordered) and _plain(sps) and _plain(ordered):
            count = self._capacity(_at(ordered), len(ordered), _at(sps), requests)
            if count >= 0:
                return int(count)
        return rules.NUMPY.capacity(ordered, sps, requests)

    def admit(self, ranked: Ranked, capacity: int) -> Int[np.ndarray, "requests"]:
        survival, ordered = ranked.survival, ranked.ordered
        if survival.dtype not in _DTYPES or not survival.flags.c_contiguous:
            return rules.NUMPY.admit(ranked, capacity)
        admitted = min(capacity, len(ordered))
        lens = np.empty(len(survival), dtype=np.int64)
        least = float(ordered[admitted - 1]) if admitted else 1.0
        wide = survival.dtype == np.float64
        self._admit(_at(survival), *survival.shape, wide, admitted, least, _at(lens))
        return lens

    def recall(
        self,
        past_ids: Int[np.ndarray, "past_requests"],
        past: Ranked,
        request_ids: Int[np.ndarray, "requests"],
        guess: Float[np.ndarray, "block"],
    ) -> Float[np.ndarray, "candidates"]:
        """:func:`dspark.maths.batch_schedulers.recall`, as a merge instead of a sort where all ids ascend."""
        survival, ids = past.survival, np.ascontiguousarray(request_ids, dtype=np.int64)
        before = np.ascontiguousarray(past_ids, dtype=np.int64)
        usable = survival.dtype in _DTYPES and survival.flags.c_contiguous and _plain(past.ordered) and _plain(guess)
        if usable:
            out = np.empty(len(ids) * len(guess))
            wide = survival.dtype == np.float64
            call = _Past(_at(before), _at(survival), _at(past.ordered), *survival.shape, wide, len(past.ordered))
            count = self._recall(ctypes.byref(call), _at(ids), len(ids), _at(guess), _at(out))
            if count == -2:
                raise MemoryError("no memory to recall drafts")
            if count >= 0:
                return out[:count]
        return recall(past_ids, past, request_ids, guess, arithmetic=self)

    def _ordered(
        self, given: Float[np.ndarray, "rows block"], survival: Float[np.ndarray, "rows block"] | None
    ) -> Float[np.ndarray, "candidates"] | None:
        """What the C code orders, or None if it refuses."""
        ordered = np.empty(given.size)
        call = _Drafts(
            _at(given),
            None if survival is None else _at(survival),
            _at(ordered),
            *given.shape,
            given.dtype == np.float64,
            survival is not None,
        )
        count = self._order(ctypes.byref(call))
        if count == -2:
            raise MemoryError("no memory to order drafts")
        return None if count < 0 else ordered[:count]


@functools.cache
def fast_arithmetic() -> Arithmetic:
    """The fastest arithmetic that this machine has."""
    library = compiled(SOURCE, ()) if native_wanted() else None
    return rules.NUMPY if library is None else NativeArithmetic(library)


def _at(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _plain(array: np.ndarray) -> bool:
    return bool(array.dtype == np.float64 and array.flags.c_contiguous)
