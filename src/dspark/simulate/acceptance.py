"""Where a simulated round's fate comes from: a model with a handful of numbers, or rounds that were really played.

A source keeps, for every seat, the request that sits there, and draws its next round: how many drafts are proposed,
the confidence of each, and how many would be accepted if all were checked. With ``verify_len`` of them checked, the
smaller of the two numbers is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int

from dspark.errors import ConfigError, DataError
from dspark.maths.calibration import sigmoid

Seats = Int[np.ndarray, "requests"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rounds:
    """A round for each of some requests."""

    proposed: Int[np.ndarray, "requests"]  # 0..block
    confidence: Float[np.ndarray, "requests block"]  # 0 behind a request's last draft
    accepted: Int[np.ndarray, "requests"]  # if all were checked; 0..proposed


@runtime_checkable
class RoundSource(Protocol):
    """Draws the rounds of the requests that sit on ``seats``."""

    block_size: int
    has_confidence: bool

    def open(self, seats: Seats, rng: np.random.Generator) -> None:
        """A new request takes each of ``seats``, any numbers from 0."""
        ...

    def draw(self, seats: Seats, rng: np.random.Generator) -> Rounds:
        """The next round of the requests on ``seats``."""
        ...

    def describe(self) -> dict[str, Any]:
        """What it is, for the file of results."""
        ...


@dataclass(frozen=True, kw_only=True)
class AcceptanceModel:
    """Drafts whose chance the confidence head knows as well as it says.

    Of draft k of a request, the true chance of surviving, given that its prefix did, is

        c_k = sigmoid(m_k + spread x request + sharpness x draft)

    with one standard normal number per request and one per draft, and it survives with that chance. The head shows
    sigmoid(overconfidence x logit(c_k)). m_k is such that ``conditional[k]`` is what is measured on average: of the
    drafts at k whose prefix survived, the share that did.
    """

    conditional: tuple[float, ...] = (0.85, 0.84, 0.83, 0.82, 0.81, 0.80, 0.79)  # per position, in (0, 1)
    spread: float = 0.8  # how much requests differ; logits, >= 0
    sharpness: float = 1.2  # how much drafts differ to the head's knowledge; logits, >= 0; 0: it knows the request only
    overconfidence: float = 1.0  # > 0; 1 is calibrated, more is too sure of itself

    def __post_init__(self) -> None:
        if not self.conditional or not all(0.0 < chance < 1.0 for chance in self.conditional):
            raise ConfigError(f"conditional is {list(self.conditional)}; give a chance inside (0, 1) per position")
        for name in ("spread", "sharpness"):
            if not 0.0 <= getattr(self, name) <= 10.0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be in [0, 10] logits")
        if not 0.0 < self.overconfidence <= 100.0:
            raise ConfigError(f"overconfidence is {self.overconfidence}; it must be in (0, 100], 1 for calibrated")

    def first_only(self) -> AcceptanceModel:
        """The same for a block of one draft: an MTP-1 module that is as good at its one position."""
        return AcceptanceModel(**{**asdict(self), "conditional": self.conditional[:1]})


class ModelledRounds:
    """Rounds of an :class:`AcceptanceModel`."""

    has_confidence = True

    def __init__(self, model: AcceptanceModel) -> None:
        self.model, self.block_size = model, len(model.conditional)
        self._middle = _middles(model)
        self._request = np.zeros(0)

    def open(self, seats: Seats, rng: np.random.Generator) -> None:
        self._request = _grown(self._request, seats)
        self._request[seats] = rng.standard_normal(len(seats))

    def draw(self, seats: Seats, rng: np.random.Generator) -> Rounds:
        shape = (len(seats), self.block_size)
        logits = rng.standard_normal(shape)
        logits *= self.model.sharpness
        logits += self._middle
        logits += self.model.spread * self._request[seats, None]
        chance = sigmoid(logits)
        accepted = _leading(rng.random(shape) < chance)
        if self.model.overconfidence != 1.0:
            chance = sigmoid(self.model.overconfidence * logits)
        return Rounds(proposed=np.full(len(seats), self.block_size), confidence=chance, accepted=accepted)

    def describe(self) -> dict[str, Any]:
        return {"source": "model", **asdict(self.model), "conditional": list(self.model.conditional)}


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedRounds:
    """Rounds as they were played, request by request, in their order.

    A request takes a played conversation at random, starts at a random round of it and goes round in circles, so its
    rounds hang together as they did. Where a scheduler cuts a round short, the real request would have gone on from
    another place of its text; here it goes on with the next round of the record.
    """

    confidence: Float[np.ndarray, "rounds block"]  # 0 where there is none
    proposed: Int[np.ndarray, "rounds"]
    accepted: Int[np.ndarray, "rounds"]
    starts: Int[np.ndarray, "conversations"]  # first round of each
    has_confidence: bool = True
    description: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        rounds, block = self.confidence.shape
        if not rounds or not block:
            raise DataError("the records hold no round that drafted; play prompts with dspark eval")
        if not ((self.accepted >= 0) & (self.accepted <= self.proposed) & (self.proposed <= block)).all():
            raise DataError("accepted and proposed must satisfy 0 <= accepted <= proposed <= block in every round")
        if not ((self.confidence >= 0) & (self.confidence <= 1)).all():
            raise DataError("confidence must be in [0, 1] in every round (apply the sigmoid)")
        ordered = list(self.starts) == sorted({*self.starts.tolist()})
        if not len(self.starts) or self.starts[0] != 0 or not ordered or self.starts[-1] >= rounds:
            raise DataError("starts must ascend from 0 and leave every conversation a round")

    @property
    def block_size(self) -> int:
        return self.confidence.shape[1]

    def first_only(self) -> RecordedRounds:
        """The same rounds cut to their first draft: an MTP-1 module that is as good at its one position."""
        return RecordedRounds(
            confidence=self.confidence[:, :1],
            proposed=np.minimum(self.proposed, 1),
            accepted=np.minimum(self.accepted, 1),
            starts=self.starts,
            has_confidence=self.has_confidence,
            description=self.description,
        )


class ReplayedRounds:
    """Rounds from :class:`RecordedRounds`."""

    def __init__(self, records: RecordedRounds) -> None:
        self.records, self.block_size, self.has_confidence = records, records.block_size, records.has_confidence
        self._lengths = np.diff(np.append(records.starts, len(records.proposed)))
        self._conversation = self._next = np.zeros(0, dtype=np.int64)

    def open(self, seats: Seats, rng: np.random.Generator) -> None:
        self._conversation, self._next = _grown(self._conversation, seats), _grown(self._next, seats)
        # a conversation as often as it has rounds: requests are then a sample of the work, not of the prompts
        played = rng.integers(0, len(self.records.proposed), len(seats))
        chosen = np.searchsorted(self.records.starts, played, side="right") - 1
        self._conversation[seats], self._next[seats] = chosen, played - self.records.starts[chosen]

    def draw(self, seats: Seats, rng: np.random.Generator) -> Rounds:
        records, chosen = self.records, self._conversation[seats]
        at = records.starts[chosen] + self._next[seats]
        self._next[seats] = (self._next[seats] + 1) % self._lengths[chosen]
        return Rounds(proposed=records.proposed[at], confidence=records.confidence[at], accepted=records.accepted[at])

    def describe(self) -> dict[str, Any]:
        records = self.records
        counts = {"rounds": len(records.proposed), "conversations": len(records.starts), "block_size": self.block_size}
        return {"source": "records", **counts, **(records.description or {})}


def conditional_acceptance(
    proposed: Int[np.ndarray, "rounds"], accepted: Int[np.ndarray, "rounds"], block: int
) -> Float[np.ndarray, "block"]:
    """Of the drafts at each position whose prefix was accepted, the share that was; nan where there was none."""
    reached = np.array([np.count_nonzero((proposed > k) & (accepted >= k)) for k in range(block)])
    stood = np.array([np.count_nonzero(accepted > k) for k in range(block)])
    return np.where(reached > 0, stood / np.maximum(reached, 1), np.nan)


def _leading(alive: Bool[np.ndarray, "requests block"]) -> Int[np.ndarray, "requests"]:
    """Number of leading Trues of each row."""
    ended = ~alive
    return np.where(ended.any(axis=1), ended.argmax(axis=1), alive.shape[1])


def _grown(values: np.ndarray, seats: Seats) -> np.ndarray:
    """``values`` with an entry for every seat."""
    most = int(seats.max(initial=-1)) + 1
    return values if len(values) >= most else np.concatenate((values, np.zeros(most - len(values), dtype=values.dtype)))


def _middles(model: AcceptanceModel) -> Float[np.ndarray, "block"]:
    """m_k of every position: by bisection, over a quadrature of both normal numbers.

    Whoever reaches position k is a better request than most; the weights of the quadrature follow that along.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    request, draft = model.spread * nodes[:, None], model.sharpness * nodes[None, :]
    mass, per_draft = weights / weights.sum(), weights / weights.sum()
    middles = []
    for wanted in model.conditional:
        low, high = -60.0, 60.0
        for _ in range(60):
            middle = 0.5 * (low + high)
            chance = sigmoid(middle + request + draft) @ per_draft  # of each request
            low, high = (middle, high) if mass @ chance < wanted else (low, middle)
        middles.append(middle)
        mass = mass * chance / (mass @ chance)
    return np.array(middles)
