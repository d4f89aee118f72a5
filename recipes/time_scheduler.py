"""How long a scheduler's decision takes on one core: 256 requests by 16 positions unless told otherwise.

    python recipes/time_scheduler.py [REQUESTS [BLOCK]]

Prints microseconds, the least and the median of many, for numpy's arithmetic and the compiled one, in both dtypes;
`lagged*` is the lagged scheduler with a request gone and a new one come in every step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import numpy as np

from dspark.maths.batch_schedulers import (
    BatchScheduler,
    FixedBatch,
    GreedyBatch,
    LaggedBatch,
    StepDrafts,
    ThresholdBatch,
)
from dspark.maths.global_scheduling import NUMPY
from dspark.models.native_schedule import fast_arithmetic

REPEATS = 2000


def microseconds(scheduler: BatchScheduler, steps: Sequence[StepDrafts]) -> tuple[float, float]:
    """Least and median of a decision."""
    times = []
    for number in range(REPEATS):
        drafts = steps[number % len(steps)]
        start = time.perf_counter()
        scheduler.choose(drafts)
        times.append(1e6 * (time.perf_counter() - start))
    return min(times), float(np.median(times))


def main(requests: int = 256, block: int = 16) -> None:
    sps = 1.0 / (1.0 + np.arange(requests * (block + 1) + 1) / 2000)
    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.float64):
        confidence = [rng.uniform(0.5, 1.0, (requests, block)).astype(dtype) for _ in range(8)]
        proposed = np.full(requests, block)
        still = [StepDrafts(request_ids=np.arange(requests), proposed=proposed, confidence=c) for c in confidence]
        moving = [
            StepDrafts(request_ids=np.arange(i, requests + i), proposed=proposed, confidence=c)
            for i, c in enumerate(confidence)
        ]
        for name, scheduler in (("fixed", FixedBatch(4)), ("threshold", ThresholdBatch(0.7))):
            print(f"{dtype.__name__:8} {'':18} {name:10} {'{:7.1f} {:7.1f}'.format(*microseconds(scheduler, still))}")
        for arithmetic in dict.fromkeys((NUMPY, fast_arithmetic())):
            for name, steps in (("greedy", still), ("lagged", still), ("lagged*", moving)):
                scheduler: BatchScheduler = GreedyBatch(sps, arithmetic)
                if name != "greedy":
                    scheduler = LaggedBatch(sps, block_size=block, arithmetic=arithmetic)
                figures = "{:7.1f} {:7.1f}".format(*microseconds(scheduler, steps))
                print(f"{dtype.__name__:8} {type(arithmetic).__name__:18} {name:10} {figures}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
