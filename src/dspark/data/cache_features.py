"""Features from a cache on disk, behind the same door as the target itself: training cannot tell the difference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from dspark.artifacts import read_json
from dspark.data.cache_format import TargetIdentity, file_sha256
from dspark.data.cache_reader import FeatureCache
from dspark.data.features import FeatureSource, Sample, SampleFeatures
from dspark.errors import ModelError
from dspark.models.target import Target

# config.json says where it was loaded from and by which version; neither changes a number
VOLATILE = ("_name_or_path", "transformers_version")
# encoded once, so that two tokenizers of one vocabulary that cut texts otherwise are told apart
PROBE = "The 3 quick brown foxes don't jump...\n\tdef f(x):  return x**2  # naïve, 日本語, ¿qué? 12,345.67\n"


class CachedFeatureSource(FeatureSource):
    """A :class:`FeatureSource` that reads instead of computing; ``computed`` stays 0, ``read`` counts."""

    def __init__(
        self,
        cache: FeatureCache,
        target: Target,
        taps: tuple[int, ...],
        draft_ids: Int[Tensor, "draft_vocab"],
        *,
        top: int = 64,
        memory_bytes: int = 8 << 30,
    ) -> None:
        """The same request as to a :class:`FeatureSource`; raises :class:`DataError` naming what the cache cannot
        serve. Whether ``target`` is the cache's own is asked by :meth:`FeatureCache.check_target`."""
        super().__init__(target, taps, draft_ids, top=top, memory_bytes=memory_bytes)
        cache.form.check_request(taps=taps, draft_ids=draft_ids, top=self.top, hidden_size=target.info.hidden_size)
        self.cache, self.read = cache, 0

    def require(self, samples: Iterable[Sample]) -> None:
        """Raise :class:`DataError` naming a sample that the cache lacks or holds with other tokens: before the run."""
        for sample in samples:
            self.cache.find(sample)

    def _compute(self, sample: Sample) -> SampleFeatures:
        arrays = self.cache.arrays(self.cache.find(sample))
        self.read += 1
        return self.cache.form.load(arrays, sample, self.target, taps=self.taps, draft_ids=self.draft_ids, top=self.top)


def open_features(
    folder: Path | str,
    target: Target,
    identity: TargetIdentity,
    samples: Iterable[Sample],
    *,
    taps: tuple[int, ...],
    draft_ids: Int[Tensor, "draft_vocab"],
    top: int,
    memory_bytes: int,
) -> CachedFeatureSource:
    """The features of a training run from the cache in ``folder``.

    Raises :class:`DataError` naming what is wrong: the target, its tokenizer, the layers, the draft vocabulary, the
    samples, or the files.
    """
    cache = FeatureCache(folder)
    cache.check_target(identity)
    source = CachedFeatureSource(cache, target, taps, draft_ids, top=top, memory_bytes=memory_bytes)
    source.require(samples)
    return source


def target_identity(folder: Path, name: str, tokenizer: Any) -> TargetIdentity:
    """Identity of the model in ``folder``, its weights read once in full (some seconds per ten gigabytes).

    ``tokenizer`` is transformers'. Raises :class:`ModelError` if the config cannot be read.
    """
    config = read_json(folder / "config.json", remedy="download the model again", error=ModelError)
    kept = {key: value for key, value in config.items() if key not in VOLATILE}
    weights = [(path.name, file_sha256(path)) for path in sorted(folder.glob("*.safetensors"))]
    encoded = tokenizer(PROBE, add_special_tokens=True)["input_ids"]
    return TargetIdentity(
        name=name,
        config_sha256=_json_sha256(kept),
        weights_sha256=_json_sha256(weights),
        tokenizer_sha256=_json_sha256([sorted(tokenizer.get_vocab().items()), list(encoded)]),
    )


def _json_sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
