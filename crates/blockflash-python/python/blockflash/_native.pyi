from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__version__: str

class Unsupported(NotImplementedError): ...
class Misaligned(ValueError): ...
class DeviceError(RuntimeError): ...

def describe() -> dict[str, Any]: ...
def driver_problem() -> str | None: ...
def gpu_problem() -> str | None: ...
def initialised() -> bool: ...
def set_checks(enabled: bool) -> None: ...
def options(operator: str) -> list[tuple[str, str, Any]]: ...
def xla_targets() -> list[tuple[str, str, int]]: ...
def register_kernels(namespace: str) -> list[str]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor | None = None,
    *options: Any,
) -> None: ...
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    d_o: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    d_sink: Tensor | None,
    d_bias: Tensor | None,
    allocate: Callable[[int], Tensor],
    *options: Any,
) -> None: ...
def quantize(
    x: Tensor,
    codes: Tensor,
    given: Tensor | None,
    scale: Tensor | None,
    mean: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    per: str,
    rotate: bool,
) -> None: ...
def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    like: Tensor,
    causal: bool,
    top_left: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]: ...
def sdpa_backward(
    d_o: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    o: Tensor,
    lse: Tensor,
    make: Callable[[Tensor], Tensor],
    bytes: Tensor,
    causal: bool,
    top_left: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]: ...
def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    o: Tensor,
    lse: Tensor | None,
    allocate: Callable[[int], Tensor],
    k: Tensor | None = None,
    v: Tensor | None = None,
    *options: Any,
    k_token_scale: Tensor | None = None,
    v_token_scale: Tensor | None = None,
) -> None: ...
def index_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Tensor,
    o: Tensor,
    lse: Tensor | None,
    allocate: Callable[[int], Tensor],
    granularity: int,
    max_k: int,
    *options: Any,
) -> None: ...
def index_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Tensor,
    o: Tensor,
    lse: Tensor,
    d_o: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    d_sink: Tensor | None,
    allocate: Callable[[int], Tensor],
    granularity: int,
    max_k: int,
    *options: Any,
) -> None: ...
def block_scores(
    q: Tensor,
    k: Tensor,
    scores: Tensor,
    weights: Tensor | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    granularity: int,
    max_q: int,
    max_k: int,
    left: int,
    right: int,
    mean: bool,
    relu: bool,
    scale: float,
) -> None: ...
def top_k(
    scores: Tensor,
    chosen: Tensor,
    allocate: Callable[[int], Tensor],
    k: int,
    seqused_k: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    granularity: int,
    batch: int,
    capacity: int,
    max_q: int,
    max_k: int,
    left: int,
    right: int,
    first: int,
    last: int,
) -> None: ...
def attention_merge(parts_o: Tensor, parts_lse: Tensor, o: Tensor, lse: Tensor) -> None: ...
def summarize_pages(
    k_cache: Tensor,
    summaries: Tensor,
    block_table: Tensor,
    seqused_k: Tensor | None,
    tokens: int,
) -> None: ...
def choose_pages(
    q: Tensor,
    k_cache: Tensor,
    summaries: Tensor,
    lists: Tensor,
    counts: Tensor,
    allocate: Callable[[int], Tensor],
    block_table: Tensor,
    seqused_k: Tensor | None,
    cu_seqlens_q: Tensor | None,
    max_q: int,
) -> None: ...
def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor | None,
    seqused_k: Tensor | None,
    cu_seqlens_k: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None: ...
def mla_append(
    kv_latent: Tensor,
    k_rope: Tensor | None,
    cache: Tensor,
    block_table: Tensor | None,
    seqused_k: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None: ...
def bsr_linear(
    x: Tensor, values: Tensor, bias: Tensor | None, y: Tensor, pattern: int, activation: int = 0
) -> None: ...
def dense_bsr(x: Tensor, values: Tensor, y: Tensor, pattern: int) -> None: ...
def sddmm(a: Tensor, b: Tensor, values: Tensor, pattern: int) -> None: ...
def forecasts(
    sizes: Sequence[int],
    window: Sequence[int | None],
    backward: bool,
    ranks: Sequence[int],
    rates: Sequence[float],
    cu_seqlens: Sequence[int] | None,
    density: Sequence[float] | None,
) -> list[tuple[tuple[int, int], float, float, float, float, float]]: ...
def shard_block_mask(whole: BlockMask, place: _Place) -> BlockMask: ...

_Place = tuple[Sequence[int], Sequence[int]]
_Rows = tuple[int, int]
PlanCall = tuple[_Rows, _Rows, int, int, bool, int, list[int], BlockMask | None]
PlanStep = tuple[int, int, int, list[_Rows], list[PlanCall]]

def shard_ranges(seqlen: int, world: int, rank: int, block: int) -> list[_Rows]: ...
def group_pieces(
    place: Sequence[int], block: int, scheme: Sequence[int]
) -> list[tuple[_Rows, _Rows]]: ...
def plan_steps(
    place: Sequence[int],
    block: int,
    scheme: Sequence[int],
    window: Sequence[int],
    cu_seqlens: Sequence[int] | None,
) -> list[PlanStep]: ...

class BlockMaskExchange:
    def __new__(
        cls, lists: BlockMask, window: Sequence[int], place: _Place, scheme: Sequence[int]
    ) -> BlockMaskExchange: ...
    def messages(self) -> list[list[int]]: ...
    def finish(
        self, messages: Sequence[Sequence[int]]
    ) -> tuple[int, tuple[float, float], list[list[PlanStep]]]: ...

class BsrPattern:
    def __new__(
        cls, rows: int, cols: int, block_size: int, row_ptr: Tensor, col_idx: Tensor
    ) -> BsrPattern: ...
    @staticmethod
    def of(number: int) -> BsrPattern: ...
    @property
    def number(self) -> int: ...
    @property
    def sizes(self) -> tuple[int, int, int, int]: ...

_Sizes = tuple[int, int, int, int]
_Window = tuple[int, int, bool]
_Choice = tuple[int, int, int, bool, bool]

class BlockMask:
    @staticmethod
    def from_bool(blocks: Tensor, sizes: _Sizes, nnz: int) -> BlockMask: ...
    @staticmethod
    def from_lists(
        row_ptr: Tensor,
        col_idx: Tensor,
        sizes: _Sizes,
        bits: tuple[Tensor, Tensor] | None = None,
    ) -> BlockMask: ...
    @staticmethod
    def from_scores(
        scores: Tensor, sizes: _Sizes, choice: _Choice, always: BlockMask | None
    ) -> BlockMask: ...
    @staticmethod
    def from_means(
        q: Tensor, k: Tensor, sizes: _Sizes, choice: _Choice, always: BlockMask | None
    ) -> BlockMask: ...
    @staticmethod
    def window(sizes: _Sizes, left: int, right: int, top_left: bool) -> BlockMask: ...
    @staticmethod
    def sink(sizes: _Sizes, count: int) -> BlockMask: ...
    @staticmethod
    def packed(masks: Sequence[BlockMask]) -> BlockMask: ...
    def sequences(self) -> list[BlockMask]: ...
    @property
    def is_packed(self) -> bool: ...
    def union(self, other: BlockMask) -> BlockMask: ...
    def intersection(self, other: BlockMask) -> BlockMask: ...
    def to_device_of(self, tensor: Tensor) -> BlockMask: ...
    def write_bool(self, out: Tensor) -> None: ...
    @property
    def counts(self) -> tuple[int, int | None]: ...
    def write_lists(
        self, row_ptr: Tensor, col_idx: Tensor, bits: tuple[Tensor, Tensor] | None = None
    ) -> None: ...
    @staticmethod
    def of(number: int) -> BlockMask: ...
    @property
    def number(self) -> int: ...
    @property
    def shape(self) -> tuple[int, int, int, int]: ...
    @property
    def sizes(self) -> tuple[int, int, int, int]: ...

def mask_of_intervals(intervals: Tensor, sizes: _Sizes) -> BlockMask: ...
def mask_of_documents(ids_q: Tensor, ids_k: Tensor, sizes: _Sizes) -> BlockMask: ...
def mask_of_tree(parents: Tensor, sizes: _Sizes) -> BlockMask: ...
def mask_of_prefixes(prefixes: list[int], window: _Window, sizes: _Sizes) -> BlockMask: ...
def mask_of_streaming(count: int, window: _Window, sizes: _Sizes) -> BlockMask: ...
def mask_of_padding(keys: list[tuple[int, int]], sizes: _Sizes) -> BlockMask: ...
def mask_of_dilated_window(dilation: int, window: _Window, sizes: _Sizes) -> BlockMask: ...
def mask_of_neighborhood(
    grid: Sequence[int], window: Sequence[int], dilation: Sequence[int], sizes: _Sizes
) -> BlockMask: ...
def mask_complement(mask: BlockMask, window: _Window) -> BlockMask: ...
