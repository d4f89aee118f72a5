"""Texts that say the same: near-duplicates among prompts, and prompts that evaluation sets hold already.

Among prompts: the Jaccard similarity of their sets of three-word runs, found through MinHash signatures in bands, so
that a text is compared with the few that share a band and not with all. Against evaluation sets: a run of thirteen
words in common, the usual measure of contamination (Brown et al. 2020, appendix C).
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import UInt64

from dspark.errors import ConfigError

OVERLAP_WORDS = 13
SHINGLE_WORDS = 3
BANDS, BAND_ROWS = 16, 4  # a pair of similarity s shares a band with chance 1 - (1 - s**4)**16: 0.99 at 0.7
# Scripts without spaces: every character counts as a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")


def words_of(text: str) -> list[str]:
    """The words of a text without case, punctuation and compatibility forms."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def word_runs(words: Sequence[str], length: int) -> set[str]:
    """All runs of ``length`` words; a shorter text is one run as it stands, an empty one has none."""
    if not words:
        return set()
    return {" ".join(words[i : i + length]) for i in range(max(1, len(words) - length + 1))}


def repetition(text: str) -> float:
    """Share of a text's three-word runs that it has said before, 0 to below 1; 0 for fewer than three words."""
    words = words_of(text)
    count = len(words) - SHINGLE_WORDS + 1
    return 1.0 - len(word_runs(words, SHINGLE_WORDS)) / count if count > 0 else 0.0


class NearDuplicates:
    """Remembers texts and finds the earlier one that a new text repeats. The same texts give the same answers."""

    def __init__(self, threshold: float = 0.7) -> None:
        """``threshold``: Jaccard similarity of three-word runs from which on two texts count as the same; (0, 1].

        A pair exactly at 0.7 is missed with chance 0.01, one at 0.8 with 0.0002; pairs below are never named.
        """
        if not 0.0 < threshold <= 1.0:
            raise ConfigError(f"threshold is {threshold}; a similarity lies in (0, 1]")
        self.threshold = threshold
        self._seeds = _mixed(np.arange(1, BANDS * BAND_ROWS + 1, dtype=np.uint64))[:, None]
        self._bands: dict[bytes, list[int]] = {}  # places in the list of texts
        self._texts: list[tuple[str, np.ndarray]] = []  # id and hashes of each

    def find(self, text: str) -> str | None:
        """Id of the earliest remembered text that ``text`` repeats, or None."""
        runs = _hashes(text)
        if not len(runs):
            return None
        near = {place for band in self._signature_bands(runs) for place in self._bands.get(band, ())}
        for place in sorted(near):
            key, others = self._texts[place]
            if _jaccard(runs, others) >= self.threshold:
                return key
        return None

    def add(self, key: str, text: str) -> None:
        """Remember a text under its id; a text without words is not remembered."""
        runs = _hashes(text)
        if len(runs):
            for band in self._signature_bands(runs):
                self._bands.setdefault(band, []).append(len(self._texts))
            self._texts.append((key, runs))

    def _signature_bands(self, runs: UInt64[np.ndarray, "runs"]) -> list[bytes]:
        signature = _mixed(self._seeds ^ runs).min(1)
        return [bytes([i]) + part.tobytes() for i, part in enumerate(signature.reshape(BANDS, BAND_ROWS))]


class OverlapFilter:
    """Knows the thirteen-word runs of evaluation sets, and says which of them a text shares one with."""

    def __init__(self, sets: Mapping[str, Iterable[str]], *, length: int = OVERLAP_WORDS) -> None:
        """``sets`` gives the texts of each named set. A text of fewer than ``length`` words counts as one run: a text
        is found in it only if it is the same from beginning to end."""
        self.length = length
        self._sets: dict[str, str] = {}
        for name, texts in sets.items():
            for text in texts:
                for run in word_runs(words_of(text), length):
                    self._sets.setdefault(run, name)

    def find(self, text: str) -> str | None:
        """Name of the set that ``text`` overlaps with, or None."""
        return next((self._sets[run] for run in word_runs(words_of(text), self.length) if run in self._sets), None)


def _hashes(text: str) -> UInt64[np.ndarray, "runs"]:
    """Hashes of a text's distinct three-word runs, ascending."""
    runs = {zlib.crc32(run.encode("utf-8", "surrogatepass")) for run in word_runs(words_of(text), SHINGLE_WORDS)}
    return np.array(sorted(runs), dtype=np.uint64)


def _mixed(x: UInt64[np.ndarray, "*shape"]) -> UInt64[np.ndarray, "*shape"]:
    """A permutation of the 64-bit numbers without visible order, so that each seed ranks all runs anew.

    The finaliser of SplitMix64 (Steele et al. 2014). A linear hash would not do: near seeds rank alike.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _jaccard(one: UInt64[np.ndarray, "some"], other: UInt64[np.ndarray, "others"]) -> float:
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared)
