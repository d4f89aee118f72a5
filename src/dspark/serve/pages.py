"""Who holds which page of KV memory, and which pages can be had again because they hold a known beginning of a text.

| a page is  | held by            | known by its text | what may happen to it                                  |
|------------|--------------------|-------------------|--------------------------------------------------------|
| free       | nobody             | no                | handed out                                             |
| own        | one request        | no                | written by its request                                 |
| shared     | 1 or more requests | yes               | read; another request that begins alike may join       |
| idle       | nobody             | yes               | joined again, or handed out, longest unused first      |

A page is known by the hash of all tokens up to its end, so equal pages behind unequal beginnings are different pages.
Only whole pages of committed tokens are known; what a request writes next never lies in one.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from dspark.errors import ConfigError

KEY_BYTES = 16  # of a page's hash


class PrefixKeys:
    """Hashes of a growing text's whole pages, each computed once: key i stands for tokens [0, (i + 1) * page_size)."""

    def __init__(self, *, page_size: int, salt: str) -> None:
        self.page_size = page_size
        self._keys: list[bytes] = []
        self._root = hashlib.blake2b(salt.encode(), digest_size=KEY_BYTES, person=b"dspark-pages").digest()

    def of(self, token_ids: Sequence[int], pages: int) -> list[bytes]:
        """Keys of the first ``pages`` whole pages of a text that begins with what was asked about before."""
        while len(self._keys) < pages:
            start = len(self._keys) * self.page_size
            part = np.array(token_ids[start : start + self.page_size], dtype=np.int64)
            assert len(part) == self.page_size, "only whole pages have a key"
            parent = self._keys[-1] if self._keys else self._root
            self._keys.append(hashlib.blake2b(parent + part.tobytes(), digest_size=KEY_BYTES).digest())
        return self._keys[:pages]


class PageManager:
    """Hands pages out, counts who holds them, and remembers what whole pages hold."""

    def __init__(self, *, pages: int, page_size: int) -> None:
        if pages < 1 or page_size < 1:
            raise ConfigError(f"pages is {pages} and page_size is {page_size}; both must be 1 or more")
        self.pages, self.page_size = pages, page_size
        self._free = list(range(pages - 1, -1, -1))  # the lowest number is handed out first
        self._holders = [0] * pages
        self._keys: list[bytes | None] = [None] * pages
        self._by_key: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest unused first

    @property
    def available(self) -> int:
        """Pages that can be handed out: free ones, and idle ones whose content would be forgotten."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def used(self) -> int:
        """Pages that some request holds."""
        return self.pages - self.available

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The pages that hold the longest known beginning; nobody holds them for the asker yet."""
        found: list[int] = []
        for key in keys:
            page = self._by_key.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def take(self, fresh: int, *, shared: Sequence[int] = ()) -> list[int] | None:
        """Hold ``shared`` pages (from :meth:`match`, just now) and ``fresh`` others; None, and nothing held, if there
        are too few."""
        joined = sum(self._holders[page] == 0 for page in shared)
        if fresh > self.available - joined:
            return None
        for page in shared:
            self._holders[page] += 1
            self._idle.pop(page, None)
        return [*shared, *(self._hand_out() for _ in range(fresh))]

    def publish(self, page: int, key: bytes) -> None:
        """``page`` now holds, whole and committed, the text that ``key`` stands for; no more writing to it.

        Where another page is known by the same text, this one stays unknown and is freed with its holder.
        """
        assert self._holders[page] > 0, f"page {page} belongs to nobody"
        if self._keys[page] is None and key not in self._by_key:
            self._keys[page], self._by_key[key] = key, page

    def give_back(self, page_ids: Sequence[int], *, forget: bool = False) -> None:
        """Let go of pages, each held once by the caller. ``forget`` those nobody else holds, known or not: whoever
        wrote them failed. Of one text the end is forgotten before its beginning."""
        for page in reversed(page_ids):
            assert self._holders[page] > 0, f"page {page} is given back and belongs to nobody"
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if forget:
                self._forget(page)
            if self._keys[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = None

    def check(self, holdings: Iterable[Sequence[int]]) -> None:
        """Assert that the books agree with what the requests in flight hold. For tests; a pass over all pages."""
        held = [0] * self.pages
        for page_ids in holdings:
            assert len(set(page_ids)) == len(page_ids), "a request holds a page twice"
            for page in page_ids:
                held[page] += 1
        assert held == self._holders, "holders do not add up"
        assert len(set(self._free)) == len(self._free) and not set(self._free) & set(self._idle), "a page is free twice"
        for page in range(self.pages):
            places = (held[page] > 0) + (page in self._idle) + (page in set(self._free))
            assert places == 1, f"page {page} is in {places} places"
            key = self._keys[page]
            assert (self._by_key.get(key) == page) if key is not None else page not in self._idle, f"page {page}"
        assert len(self._by_key) == sum(key is not None for key in self._keys), "a key leads nowhere"

    def _hand_out(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        self._holders[page] = 1
        return page

    def _forget(self, page: int) -> None:
        key = self._keys[page]
        if key is not None:
            del self._by_key[key]
            self._keys[page] = None
