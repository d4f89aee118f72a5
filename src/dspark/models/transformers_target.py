"""The transformers target: any causal model of the library, with hooks, on our own KV memory.

Slower than the lean decoder and always there: every family that the lean decoder does not cover, and the oracle of its
tests. A short probe at construction finds what cannot be read from a config: the shape of each layer's keys and values,
whether all of the model's state lives in them (only then can it be rolled back), and where the final-norm state is.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from dspark.errors import ModelError
from dspark.models.ragged import check_batch
from dspark.models.target import FINAL, KVMemory, TargetInfo, TargetOutput, check_max_len, check_taps

RECURRENT_KINDS = ("mamba", "linear_attention", "recurrent", "conv", "hybrid")  # of layer_types: no rollback


class TransformersTarget:
    """A causal language model of transformers behind the :class:`dspark.models.target.Target` protocol."""

    def __init__(self, model: PreTrainedModel, *, name: str = "") -> None:
        """Raises :class:`ModelError` if the model keeps state that cannot be rolled back, or hides its parts."""
        config = model.config.get_text_config(decoder=True)
        _refuse_unrollable(model.config, config)
        self._model = model.eval().requires_grad_(False)
        self._decoder = model.get_decoder()
        self._layers = _find_layers(self._decoder, config)
        self._head = model.get_output_embeddings()
        if self._head is None:
            raise ModelError(f"{type(model).__name__} has no language-model head; use a causal language model")
        parameters = inspect.signature(type(model).forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters
        self.info = TargetInfo(
            name=name or str(config.name_or_path or type(model).__name__),
            family=config.model_type,
            vocab_size=self._head.weight.shape[0],
            hidden_size=self._head.weight.shape[1],
            num_layers=len(self._layers),
            max_len=_max_len(config),
            dtype=self._head.weight.dtype,
            device=self._head.weight.device,
        )
        self._shapes, self._embedding_scale, self._head_is_all = self._probe()

    def new_memory(self, *, rows: int, max_len: int) -> KVMemory:
        """KV memory for ``rows`` requests of up to ``max_len`` tokens each; :class:`RequestError` past the context."""
        check_max_len(max_len, self.info)
        shapes = [(heads, max(key, value)) for heads, key, value in self._shapes]
        return KVMemory(rows=rows, max_len=max_len, shapes=shapes, dtype=self.info.dtype, device=self.info.device)

    def embed(self, token_ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape hidden"]:
        """Input embeddings as the first layer receives them, without learned positions where the family adds some."""
        with torch.no_grad():
            return self._model.get_input_embeddings()(token_ids) * self._embedding_scale

    def logits(self, final: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """Logits of final-norm states: the head, and whatever the model does after it.

        Where that is more than the head (caps, scales), the states go through the whole model in place of the decoder's
        result, so that no family's rule is repeated here.
        """
        if self._head_is_all:
            with torch.no_grad():
                return self._head(final)

        def replace(module: nn.Module, args: Any, output: Any) -> Any:
            output.last_hidden_state = final[None]
            return output

        handle = self._decoder.register_forward_hook(replace)
        try:
            with torch.no_grad():
                token_ids = torch.zeros(1, 1, dtype=torch.long, device=self.info.device)
                return self._model(input_ids=token_ids, use_cache=False).logits[0]
        finally:
            handle.remove()

    def head_weight(self) -> Float[Tensor, "vocab hidden"]:
        """Weight of the language-model head."""
        return self._head.weight.detach()

    def forward(
        self,
        token_ids: Int[Tensor, "tokens"],
        memory: KVMemory,
        *,
        rows: Sequence[int] = (0,),
        counts: Sequence[int] | None = None,
        taps: Sequence[int] = (),
        last_only: bool = False,
        want_logits: bool = True,
    ) -> TargetOutput:
        """Run new tokens, one row after the other; see :meth:`dspark.models.target.Target.forward`."""
        if counts is None:
            rows = rows[:1]
        counts = check_batch(token_ids, memory, rows, counts)
        taps = check_taps(taps, self.info.num_layers)
        outputs = []
        for row, ids in zip(rows, token_ids.split(counts), strict=True):
            cache = MemoryCache(memory, row, self._shapes)
            outputs.append(self._run(ids, cache, taps, logits_to_keep=0 if want_logits and not last_only else 1))
        memory.advance(rows, counts)
        return TargetOutput(
            torch.cat([logits for logits, _, _ in outputs]) if want_logits else None,
            torch.cat([torch.cat(tapped, -1) for _, tapped, _ in outputs]) if taps else None,
            torch.cat([final for _, _, final in outputs]),
        )

    def _run(
        self, token_ids: Tensor, cache: Cache, taps: tuple[int, ...], *, logits_to_keep: int
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """One sequence through the model: logits (of the last tokens, or of all for 0), tapped and final states."""
        hidden_size = self.info.hidden_size
        with torch.no_grad(), _Recorder(self._layers, self._decoder, taps) as seen:
            options = {self._cache_name: cache, "use_cache": True}
            if self._keeps_logits:
                options["logits_to_keep"] = logits_to_keep
            logits = self._model(input_ids=token_ids[None], **options).logits[0]
        states = []
        tapped = [seen.final if tap == FINAL else seen.tapped[tap] for tap in taps]
        for state in (*tapped, seen.final):
            if state is None or state.shape != (1, len(token_ids), hidden_size):
                shape = None if state is None else tuple(state.shape)
                raise ModelError(
                    f"{type(self._model).__name__} passes states of shape {shape} between its layers; expected "
                    f"(1, {len(token_ids)}, {hidden_size})"
                )
            states.append(state[0])
        return logits[-logits_to_keep:], states[:-1], states[-1]

    def _probe(self) -> tuple[list[tuple[int, int, int]], float, bool]:
        """Run two tokens to learn what no config tells.

        That is, each cache layer's (kv_heads, key width, value width), the scale of the embeddings, and whether logits
        are the head's output as it is.
        """
        name = type(self._model).__name__
        cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        token_ids = torch.tensor([1, 2], device=self.info.device)
        with _HeadInput(self._head) as head:
            logits, (embedded,), final = self._run(token_ids, cache, (-1,), logits_to_keep=0)
        shapes = []
        for layer in cache.layers:
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or not layer.is_initialized:
                raise ModelError(
                    f"{name} keeps state of kind {type(layer).__name__}, which cannot be rolled back token by token; "
                    "only attention with keys and values per token is supported"
                )
            shapes.append((layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]))
        if not shapes:
            raise ModelError(f"{name} keeps no keys and values in a cache; such a model cannot be rolled back")
        if head.seen is None or not torch.equal(head.seen.reshape(-1), final.reshape(-1)):
            raise ModelError(
                f"{name}'s head does not read the decoder's last_hidden_state; its final state is not found"
            )
        with torch.no_grad():
            head_is_all = torch.equal(self._head(final), logits)
        return shapes, self._scale(token_ids, embedded), head_is_all

    def _scale(self, token_ids: Tensor, embedded: Tensor) -> float:
        """The factor between the embedding module and the first layer's input; 1 where it is more than a factor."""
        with torch.no_grad():
            plain = self._model.get_input_embeddings()(token_ids)
        if plain.shape != embedded.shape:
            return 1.0
        scale = float((embedded.float() * plain.float()).sum() / plain.float().square().sum())
        return scale if torch.allclose(plain.float() * scale, embedded.float(), rtol=1e-2, atol=1e-6) else 1.0


class MemoryCache(Cache):
    """One row of a :class:`KVMemory` in the shape that transformers expects of a cache.

    All tokens are kept in every layer, sliding ones too: the library's masks hide what a window leaves behind, and a
    rollback finds everything in place. The row's length moves when the pass is over, not here.
    """

    def __init__(self, memory: KVMemory, row: int, shapes: Sequence[tuple[int, int, int]]) -> None:
        """``shapes`` are (kv_heads, key width, value width) of each layer."""
        super().__init__(layers=[_MemoryLayer(memory, row, i, *widths[1:]) for i, widths in enumerate(shapes)])


class _MemoryLayer(CacheLayerMixin):
    """One layer of a row. The narrower of keys and values leaves the end of its slots unused."""

    is_sliding = False

    def __init__(self, memory: KVMemory, row: int, layer: int, key_width: int, value_width: int) -> None:
        super().__init__()
        self.keys = memory.keys[layer][row : row + 1, :, :, :key_width]
        self.values = memory.values[layer][row : row + 1, :, :, :value_width]
        self.past = memory.lengths[row]
        self.max_len = memory.max_len
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the memory is there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values behind the row's tokens and return all of them."""
        stop = self.past + key_states.shape[2]
        self.keys[:, :, self.past : stop] = key_states
        self.values[:, :, self.past : stop] = value_states
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Keys that a pass of ``query_length`` tokens sees (older versions hand in their positions), and an offset."""
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.past + count, 0

    def get_seq_length(self, cache_position: Tensor | None = None) -> int:
        return self.past

    def get_max_length(self) -> int:
        return self.max_len

    def get_max_cache_shape(self) -> int:
        """The older name of :meth:`get_max_length`."""
        return self.max_len


class _Recorder:
    """Hooks that keep the states of one pass: tapped layers' outputs, the first one's input, the decoder's result."""

    def __init__(self, layers: nn.ModuleList, decoder: nn.Module, taps: Sequence[int]) -> None:
        self.layers, self.decoder, self.taps = layers, decoder, [tap for tap in taps if tap != FINAL]
        self.tapped: dict[int, Tensor | None] = dict.fromkeys(self.taps)
        self.final: Tensor | None = None
        self.handles: list[Any] = []

    def __enter__(self) -> _Recorder:
        for tap in self.taps:
            if tap == -1:
                self.handles.append(self.layers[0].register_forward_pre_hook(self._keep_input, with_kwargs=True))
            else:
                self.handles.append(self.layers[tap].register_forward_hook(self._keeper(tap)))
        self.handles.append(self.decoder.register_forward_hook(self._keep_final))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _keep_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tapped[-1] = args[0] if args else kwargs.get("hidden_states")

    def _keeper(self, tap: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self.tapped[tap] = output[0] if isinstance(output, tuple) else output

        return keep

    def _keep_final(self, module: nn.Module, args: Any, output: Any) -> None:
        self.final = output[0] if isinstance(output, tuple) else output.last_hidden_state


class _HeadInput:
    """Keeps what the language-model head reads in one pass."""

    def __init__(self, head: nn.Module) -> None:
        self.head = head
        self.seen: Tensor | None = None

    def __enter__(self) -> _HeadInput:
        self.handle = self.head.register_forward_pre_hook(self._keep)
        return self

    def __exit__(self, *exception: object) -> None:
        self.handle.remove()

    def _keep(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.seen = args[0]


def load_model(
    folder: Path, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a folder as a causal model, or as an image-text model where the library has no causal class for it.

    Weights come from safetensors only. Raises :class:`ModelError` with the library's own reason.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    options = {
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "local_files_only": True,
        "use_safetensors": True,
    }
    reasons = []
    for loader in (AutoModelForCausalLM, AutoModelForImageTextToText):
        try:
            return loader.from_pretrained(folder, **options).to(device)
        except (ValueError, KeyError, OSError, RuntimeError, ImportError, SafetensorError) as error:
            reasons.append(str(error).strip().split("\n")[0])
    raise ModelError(f"{folder} cannot be loaded as a causal or an image-text model: {reasons[0]}")


def _refuse_unrollable(config: PretrainedConfig, text: PretrainedConfig) -> None:
    """Refuse, before any pass, what a config already gives away."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"model_type is {config.model_type!r}, an encoder-decoder; only decoders are supported")
    kinds = [str(kind) for kind in getattr(text, "layer_types", None) or ()]
    for kind in kinds:
        if any(recurrent in kind for recurrent in RECURRENT_KINDS):
            raise ModelError(
                f"layer_types of {text.model_type!r} has {kind!r}: its state cannot be rolled back token by token; "
                "only attention with keys and values per token is supported"
            )


def _find_layers(decoder: nn.Module, config: PretrainedConfig) -> nn.ModuleList:
    """The decoder's layers: its module list of num_hidden_layers entries."""
    count = config.num_hidden_layers
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ModelError(f"{type(decoder).__name__} has no list of {count} decoder layers that states could be tapped from")


def _max_len(config: PretrainedConfig) -> int:
    """The context limit under the names that configs give it."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(f"the config of {config.model_type!r} states no context limit (max_position_embeddings)")
