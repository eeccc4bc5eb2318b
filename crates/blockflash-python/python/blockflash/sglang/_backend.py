"""The attention of a model that SGLang serves: `attention_decode` over the pages of SGLang."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.layout.paged_view import paged_kv_view
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.speculative.eagle_utils import TreeMaskMode, default_tree_mask_mode
from torch import Tensor

from .. import _autograd, _decode, _stats
from .._arguments import scores
from .._schema import DECODE
from ._latent import Latent
from ._metadata import GraphBuffers, Metadata, PageTables, offsets, trees
from ._refusals import check_layer, check_modes, check_runner, refuse


class BlockflashBackend(AttentionBackend):
    """Attention of prompts, single tokens and drafted tokens to the pages of a cache.

    Lengths and tables are made on the device and read there, so a step waits for nothing.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        spec, parallel = runtime_context.get_spec(), runtime_context.get_parallel()
        self.drafted: int = spec.speculative_num_draft_tokens or 0
        ngram, is_draft = runner.spec_algorithm.is_ngram(), runner.is_draft_worker
        self.trees: bool = ngram or (spec.speculative_eagle_topk or 0) > 1
        ranks = max(parallel.attn_cp_size, parallel.attn_dcp_size)
        check_runner(runner, self.trees, ranks)
        check_modes(runtime_context.get_exec())
        self.latent = Latent(runner, self.trees) if runner.use_mla_backend else None
        self.max_context_len: int = runner.model_config.context_len
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.kv_index_translator = runner.kv_index_translator
        self.kv_cache_dtype, self.page = runner.kv_cache_dtype, runner.page_size
        rows = runner.req_to_token_pool
        self.tables = PageTables(rows.req_to_token, self.page, self.token_to_kv_pool)
        self.graphs: GraphBuffers | None = None
        # NGRAM makes masks of all keys, but on the CPU. The masks of others are of drafted tokens.
        self._full_masks = ngram and default_tree_mask_mode() == TreeMaskMode.FULL_MASK
        self._verify_mask: VerifyMask | None = None
        if self.drafted and not ngram and not is_draft:
            self._keep_mask(rows.size)

    def _keep_mask(self, size: int) -> None:
        device = self.tables.starts.device
        cells = torch.ones(size * self.drafted**2, dtype=torch.bool, device=device)
        self._verify_mask = VerifyMask(cells, TreeMaskMode.QLEN_ONLY, size, is_read=self.trees)

    @property
    def verify_mask(self) -> VerifyMask | None:
        """Where SGLang writes which drafted tokens see which."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, batch: int | None) -> None:
        """Nothing is to do: the mask is read where SGLang writes it."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of the sequences that pad a graph."""
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured graphs read."""
        tree = self.drafted if self._full_masks else 0
        self.graphs = GraphBuffers(self.tables, max_bs, tree)
        if self._verify_mask is not None and not self._verify_mask.fits(max_bs):
            self._keep_mask(max_bs)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a step that is not in a graph."""
        self.forward_metadata = self._metadata(forward_batch, forward_batch.seq_lens_cpu)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare the capture of a step, or a replay: buffers of the graph get its numbers."""
        mode = forward_batch.forward_mode
        if mode.is_extend() and not mode.is_target_verify():
            refuse(
                "prompts are not captured as a whole: pass --cuda-graph-backend-prefill breakable"
            )
        if self.graphs is None:
            raise RuntimeError("init_cuda_graph_state comes before the first capture")
        fresh = self._metadata(forward_batch, None, masks=not in_capture)
        self.forward_metadata = self.graphs.of(fresh)
        self.forward_metadata.fill(fresh)

    def _metadata(self, batch: Any, host_lengths: Any, masks: bool = True) -> Metadata:
        """The batch to the kernels; `masks` says whether SGLang's mask of trees is there yet."""
        mode, size, spec = batch.forward_mode, batch.batch_size, batch.spec_info
        seq_lens, rows = batch.seq_lens[:size], batch.req_pool_indices[:size]
        drafted, cu_seqlens, tail_mask = 0, None, None
        if mode.is_decode_or_idle():
            queries = 1
        elif mode.is_target_verify():
            if getattr(spec, "ragged_verify_layout", None) is not None:
                refuse("sequences to verify have different numbers of drafted tokens (ragged)")
            drafted = queries = spec.draft_token_num
            if self.trees:
                tail_mask = self._tree_mask(spec, seq_lens, masks)
        elif mode.is_extend_or_draft_extend_or_mixed(include_draft_extend_v2=True):
            counts, queries = _new_tokens(batch, size)
            cu_seqlens = offsets(counts)
        else:
            refuse(f"there is no attention of forward_mode {mode.name}")
        longest = None
        # Where tokens are drafted, lengths on the host may be behind.
        if spec is None and host_lengths is not None and size:
            longest = int(host_lengths[:size].max())
        table, window_table = self.tables.of_slots(self.tables.slots(rows, longest))
        lengths = (seq_lens + drafted).int()
        return Metadata(lengths, table, window_table, queries, cu_seqlens, tail_mask)

    def _tree_mask(self, spec: Any, seq_lens: Tensor, made: bool) -> Tensor:
        size, tokens = seq_lens.shape[0], spec.draft_token_num
        if self._full_masks and made:
            return trees(spec.custom_mask, seq_lens, tokens)
        mask = spec.custom_mask if self._verify_mask is None else self._verify_mask.buffer
        if made and self._verify_mask is not None and not self._verify_mask.fits(size):
            mask = spec.custom_mask
        if mask is None or self._full_masks:
            return torch.ones(size, tokens, tokens, dtype=torch.bool, device=seq_lens.device)
        return mask[: size * tokens**2].view(size, tokens, tokens)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Attention of one token of each sequence: `[tokens, heads * v_head_dim]`."""
        check_layer(layer, options)
        if self.latent is not None and not self.latent.has(layer):
            return self.latent.prompts(q, k, v, layer, self.forward_metadata)
        if k is not None and save_kv_cache:
            self._write(k, v, layer, forward_batch)
        return self._attend(q, layer, sinks)

    forward_extend = forward_decode
    """Attention of prompts, parts of them, and drafted tokens, which differs by metadata alone."""

    def _write(self, k: Tensor, v: Tensor | None, layer: Any, batch: Any) -> None:
        pool, window_slots = self.token_to_kv_pool, None
        if self.tables.in_window_pool(layer):
            # Of the step's own slots, which a captured graph reads at each replay.
            window_slots = pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
        slots = KVWriteLoc.for_layer(batch, layer, swa_loc=window_slots)
        scales = () if self.latent is not None else (layer.k_scale, layer.v_scale)
        pool.set_kv_buffer(layer, slots, k, v, *scales)

    def _attend(self, q: Tensor, layer: Any, sinks: Tensor | None) -> Tensor:
        step: Metadata = self.forward_metadata
        q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        keys = paged_kv_view(keys, self.page, layer.tp_k_head_num, layer.head_dim)
        if self.latent is None:
            values = paged_kv_view(values, self.page, layer.tp_v_head_num, layer.v_head_dim)
        else:
            values = keys[..., : layer.v_head_dim]
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        left = layer.sliding_window_size if layer.sliding_window_size >= 0 else None
        logits = None if sinks is None else sinks.float()
        window = (left, None if causal else left)
        options = scores(causal, window, layer.scaling, layer.logit_cap or None, logits)
        of_window = self.tables.in_window_pool(layer)
        options |= {
            "seqused_k": step.lengths,
            "block_table": step.window_table if of_window else step.table,
        }
        if keys.dtype.itemsize == 1:
            options |= {"k_scale": _factor(layer.k_scale), "v_scale": _factor(layer.v_scale)}
        if step.tail_mask is not None:
            options["tail_mask"] = step.tail_mask.view(torch.uint8)
        if step.cu_seqlens is not None:
            options |= {"cu_seqlens_q": step.cu_seqlens, "max_q": step.queries}
            return _call(q, keys, values, options).flatten(1)
        size, rows = step.lengths.shape[0], step.lengths.shape[0] * step.queries
        of_sequences = q[:rows].unflatten(0, (size, step.queries))
        o = _call(of_sequences, keys, values, options).flatten(0, 1).flatten(1)
        if rows == q.shape[0]:
            return o
        # Rows behind those of the sequences pad the batch.
        return torch.cat((o, o.new_zeros(q.shape[0] - rows, o.shape[1])))


def _call(q: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any]) -> Tensor:
    """`attention_decode` with options by the names of its operator."""
    try:
        o, _ = _decode._OPS.attention_decode.default(q, keys, values, *DECODE.leading(options))
    except RuntimeError as error:
        raise _autograd.typed(error) from None
    _stats.count("attention_decode")
    return o


def _new_tokens(batch: Any, size: int) -> tuple[Tensor, int]:
    """The number of queries of each sequence, on the device, and the most of one.

    A replay of a draft's extension has them beside its other inputs, or equally many for each.
    """
    spec = batch.spec_info
    counts = _first("extend_seq_lens", batch, "extend_seq_lens_tensor", spec)
    on_host = _first("extend_seq_lens_cpu", batch, "extend_seq_lens_cpu", spec)
    each = getattr(spec, "num_tokens_per_req", None) or 0
    if counts is None:
        if each <= 0:
            refuse("the batch does not say how many new tokens its sequences have")
        counts = torch.full((size,), each, device=batch.seq_lens.device)
    if on_host is not None and len(on_host):
        return counts[:size], int(max(on_host[:size]))
    return counts[:size], each if each > 0 else batch.input_ids.shape[0]


def _first(name: str, batch: Any, other: str, spec: Any) -> Any:
    """An attribute of the batch, or else of what is drafted."""
    found = getattr(batch, name, None)
    return getattr(spec, other, None) if found is None else found


def _factor(scale: Any) -> Tensor | None:
    """A scale of the cache as `attention_decode` takes it; 1 is None."""
    return None if scale is None else scale.reshape(1).float()
