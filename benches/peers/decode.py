"""Competitors of attention to a cache of keys and values. Queries are the last ones of their
sequences, [batch, seqlen_q, heads, head_dim]; a cache is [batch, seqlen_kv, heads, head_dim] or, in
pages, [pages, page_size, heads, head_dim] with a random table."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import attention
import flash3
from measure import DTYPES, TOLERANCE, Absent, Call, Capture, needs_cuda, relative

# Most copies of a cache.
MAX_COPIES = 256


class Inputs:
    """q, k, v ~ N(0, 1), the table and the lengths. The f64 reference is of the first and the last
    sequence, each with its first and last head of keys."""

    def __init__(self, case: dict[str, Any], device: torch.device) -> None:
        self.generator = torch.Generator(device=device).manual_seed(case.get("seed", 0))
        self.device, self.dtype = device, DTYPES[case["dtype"]]
        self.batch, self.seqlen_q, self.seqlen_kv = (
            case["batch"],
            case["seqlen_q"],
            case["seqlen_kv"],
        )
        self.heads_q, self.heads_kv = case["num_heads_q"], case["num_heads_kv"]
        self.head_dim, self.page_size = case["head_dim"], case.get("page_size")
        self.group, self.window = self.heads_q // self.heads_kv, case.get("window")
        self.scale, self.tolerance = 1 / math.sqrt(self.head_dim), TOLERANCE[case["dtype"]]
        self.q = self.draw(self.batch, self.seqlen_q, self.heads_q)
        table = self.lengths = None
        if self.page_size is None:
            kv = (self.batch, self.seqlen_kv, self.heads_kv)
        else:
            pages = self.seqlen_kv // self.page_size
            kv = (self.batch * pages, self.page_size, self.heads_kv)
            table = torch.randperm(kv[0], device=device, generator=self.generator)
            table = table.int().view(self.batch, pages)
        # Keys, values and the table of a launch.
        self.copies = [(*self.cache(*kv), table)]
        lengths, self.chosen = case.get("lengths"), case.get("chosen")
        if self.chosen is not None:
            # All heads visit the same pages: to a competitor, a sequence of these pages.
            self.pages, k, v = table, *self.copies[0][:2]
            self.copies = [(k, v, self.some())]
            if lengths is not None:
                lengths = [self.chosen * self.page_size] * self.batch
        if lengths is not None:
            self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)

    def draw(self, *shape: int) -> torch.Tensor:
        shape = (*shape, self.head_dim)
        return torch.randn(shape, device=self.device, dtype=self.dtype, generator=self.generator)

    def cache(self, *rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values."""
        return self.draw(*rows), self.draw(*rows)

    def clone(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values elsewhere in memory."""
        return k.clone(), v.clone()

    def row_bytes(self) -> int:
        """Bytes of the keys and values of a token."""
        return 2 * self.heads_kv * self.head_dim * self.q.element_size()

    def some(self) -> torch.Tensor:
        """The last page of each sequence and others at random, in their order."""

        def of(pages: torch.Tensor) -> torch.Tensor:
            others = torch.randperm(len(pages) - 1, device=self.device, generator=self.generator)
            others = others[: self.chosen - 1].sort().values
            return pages[torch.cat([others, others.new_tensor([len(pages) - 1])])]

        return torch.stack([of(pages) for pages in self.pages])

    def rotate(self, size: int) -> None:
        """Enough copies that together they have `size` bytes of what a launch reads. Where pages
        are chosen, other pages of as many copies as have that size as a whole."""
        k, v, table = self.copies[0]
        keys = k[..., 0, 0].numel() if self.chosen is None else table.numel() * self.page_size
        if self.lengths is not None:
            keys = int(self.seen(self.lengths).sum())
        elif self.window is not None:
            keys = self.batch * self.seen(self.seqlen_kv)
        row = self.row_bytes()
        whole = math.ceil(size / (k[..., 0, 0].numel() * row))
        count = min(MAX_COPIES, math.ceil(size / (keys * row)))
        while len(self.copies) < count:
            if self.chosen is None or len(self.copies) < whole:
                k, v = self.clone(k, v)
            else:
                k, v, _ = self.copies[len(self.copies) % whole]
            self.copies.append((k, v, table if self.chosen is None else self.some()))

    def seen(self, keys: Any) -> Any:
        """Keys of a sequence that its queries see, of its number of keys or a tensor of them."""
        if self.window is None:
            return keys
        most = self.window + self.seqlen_q - 1
        return min(keys, most) if isinstance(keys, int) else keys.clamp(max=most)

    def sequence(
        self, copy: tuple[torch.Tensor, ...], entry: int, head: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that a sequence visits, of one head, in f64."""
        k, v, table = copy

        def rows(cache: torch.Tensor) -> torch.Tensor:
            if table is None:
                of_head = cache[entry, :, head]
            else:
                of_head = cache[table[entry].long(), :, head].flatten(0, 1)
            end = None if self.lengths is None else int(self.lengths[entry])
            return of_head[:end].double()

        return rows(k), rows(v)

    def relative_error(self, out: torch.Tensor, copy: tuple[torch.Tensor, ...]) -> float:
        """Largest over these heads; NaN anywhere in the output counts."""
        if torch.isnan(out).any():
            return math.nan
        worst = 0.0
        for entry in {0, self.batch - 1}:
            for head in {0, self.heads_kv - 1}:
                k, v = self.sequence(copy, entry, head)
                members = slice(head * self.group, (head + 1) * self.group)
                scores = self.q[entry, :, members].double() @ k.T * self.scale
                last = torch.arange(self.seqlen_q, device=self.device) + len(k) - self.seqlen_q
                keys = torch.arange(len(k), device=self.device)[None]
                hidden = keys > last[:, None]
                if self.window is not None:
                    hidden |= keys <= last[:, None] - self.window
                exact = torch.softmax(scores.masked_fill(hidden[:, None], -math.inf), -1) @ v
                worst = max(worst, relative(out[entry, :, members], exact))
        return worst


class Decode(Call):
    """A call whose launches take the copies of the cache in turn."""

    Inputs = Inputs

    def __init__(self, inputs: Inputs, _options: dict[str, Any]) -> None:
        self.inputs, self.turn = inputs, 0

    def cache(self) -> tuple[torch.Tensor, ...]:
        """The copy for the next launch."""
        self.turn += 1
        return self.current()

    def current(self) -> tuple[torch.Tensor, ...]:
        """The copy of the last launch, and so of the last one in a graph."""
        return self.inputs.copies[self.turn % len(self.inputs.copies)]

    def relative_error(self, inputs: Inputs) -> float:
        return inputs.relative_error(self.output(), self.current())


class Sdpa(Decode):
    """torch's scaled_dot_product_attention, held to one backend."""

    forward: type[attention.Sdpa]

    @classmethod
    def available(cls, device: torch.device) -> None:
        cls.forward.available(device)

    def __init__(self, inputs: Inputs, options: dict[str, Any]) -> None:
        super().__init__(inputs, options)
        if inputs.page_size is not None or inputs.lengths is not None:
            raise ValueError("torch's attention takes neither pages nor lengths")
        if inputs.window is not None:
            raise ValueError("torch's attention takes no window")
        self.options = dict(scale=inputs.scale, enable_gqa=inputs.group > 1)
        if inputs.seqlen_q > 1:
            self.options["attn_mask"] = self.diagonal(inputs)

    def diagonal(self, inputs: Inputs) -> Any:
        return causal_lower_right(inputs.seqlen_q, inputs.seqlen_kv)

    def run(self) -> None:
        k, v = (t.transpose(1, 2) for t in self.cache()[:2])
        with sdpa_kernel(self.forward.backend):
            self.out = torch.nn.functional.scaled_dot_product_attention(
                self.inputs.q.transpose(1, 2), k, v, **self.options
            )

    def output(self) -> torch.Tensor:
        return self.out.transpose(1, 2)


class SdpaFlash(Sdpa):
    """FlashAttention-2 on a GPU."""

    forward = attention.SdpaFlash


class SdpaCudnn(Sdpa):
    forward = attention.SdpaCudnn

    def diagonal(self, inputs: Inputs) -> Any:
        raise ValueError("torch's cuDNN attention has no causal diagonal that ends at the last key")


class Flash3(Decode):
    """FlashAttention-3, which chooses the number of splits itself. With lengths, what its scheduler
    needs is computed beforehand, as serving engines do."""

    @classmethod
    def available(cls, device: torch.device) -> None:
        flash3.FlashAttention3.available(device)

    def __init__(self, inputs: Inputs, options: dict[str, Any]) -> None:
        super().__init__(inputs, options)
        flash3.FlashAttention3.load()
        if not flash3.FlashAttention3.can_split(inputs):
            raise ValueError("this build of FlashAttention-3 has no kernels that split the keys")
        operators, self.settings = torch.ops.flash_attn_3, "num_splits=0: the library chooses"
        self.operator, self.out = operators.fwd.default, torch.empty_like(inputs.q)
        window = {}
        if inputs.window is not None:
            window = dict(window_size_left=inputs.window - 1, window_size_right=0)
        self.known = dict(
            q=inputs.q,
            out=self.out,
            softmax_scale=inputs.scale,
            is_causal=inputs.seqlen_q > 1,
            num_splits=0,
            seqused_k=inputs.lengths,
            **window,
        )
        if inputs.lengths is not None:
            self.settings += "; scheduler metadata computed beforehand"
            keys = inputs.seqlen_kv
            if inputs.chosen is not None:
                keys = inputs.chosen * inputs.page_size
            self.known["scheduler_metadata"] = operators.get_scheduler_metadata(
                inputs.batch,
                inputs.seqlen_q,
                keys,
                inputs.heads_q,
                inputs.heads_kv,
                inputs.head_dim,
                inputs.head_dim,
                inputs.dtype,
                inputs.lengths,
                page_size=inputs.page_size,
                is_causal=inputs.seqlen_q > 1,
                num_splits=0,
                **window,
            )

    def run(self) -> None:
        k, v, table = self.cache()
        known = dict(self.known, k=k, v=v, page_table=table)
        self.operator(*flash3.arguments(self.operator, **known))

    def output(self) -> torch.Tensor:
        return self.out


class FlashInfer(Decode):
    """FlashInfer, planned beforehand, as serving engines do once for all layers of a step. It knows
    only pages, so a contiguous cache is pages in their order."""

    # Bytes for results of parts of the keys.
    WORKSPACE = 1 << 29

    @classmethod
    def available(cls, device: torch.device) -> None:
        needs_cuda(device)
        try:
            import flashinfer  # noqa: F401
        except ImportError as error:
            raise Absent(f"python3 has no flashinfer ({error})") from error

    def __init__(self, inputs: Inputs, options: dict[str, Any]) -> None:
        super().__init__(inputs, options)
        self.page = inputs.page_size or math.gcd(inputs.seqlen_kv, 64)
        lengths = inputs.lengths
        if lengths is None:
            lengths = torch.full((inputs.batch,), inputs.seqlen_kv, device=inputs.device)
        pages = (lengths + self.page - 1) // self.page
        # A plan depends on lengths alone, so copies that differ in their tables share it.
        tables = [table for *_, table in inputs.copies[: 1 if inputs.chosen is None else None]]
        self.indices = [self.visited(table, pages) for table in tables]
        self.q, self.out = inputs.q.flatten(0, 1), torch.empty_like(inputs.q)
        found = []
        for name, wrapper in self.ways():
            self.plan(wrapper, lengths, pages)
            self.wrapper = wrapper
            us = Capture(self.run, inputs.device, 3000, MAX_COPIES).window(20)["us"]
            found.append((us, name, wrapper))
        found.sort(key=lambda way: way[0])
        self.wrapper = found[0][-1]
        self.settings = ", not ".join(f"{name} ({us:.1f} us)" for us, name, _ in found)
        self.settings += f"; pages of {self.page}; planned beforehand"

    def ways(self) -> Iterator[tuple[str, Any]]:
        """What the library leaves to its user. The fastest is taken."""
        import flashinfer

        device = self.inputs.device
        scratch = torch.zeros(self.WORKSPACE, dtype=torch.uint8, device=device)
        if self.inputs.seqlen_q == 1:
            decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper
            for cores in (True, False):
                yield f"use_tensor_cores={cores}", decode(scratch, use_tensor_cores=cores)
            return
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        hopper = torch.cuda.get_device_capability(device)[0] == 9
        for backend in ("fa2", "fa3") if hopper else ("fa2",):
            yield f"backend={backend}", prefill(scratch, backend=backend)

    def visited(self, table: torch.Tensor | None, pages: torch.Tensor) -> torch.Tensor:
        """The pages of all sequences, one after another."""
        if table is None:
            rows, columns = self.inputs.batch, self.inputs.seqlen_kv // self.page
            table = torch.arange(rows * columns, dtype=torch.int32, device=pages.device)
            table = table.view(rows, columns)
        ranks = torch.arange(table.shape[1], device=pages.device)
        return table[ranks[None] < pages[:, None]]

    def plan(self, wrapper: Any, lengths: torch.Tensor, pages: torch.Tensor) -> None:
        inputs = self.inputs
        queries, options = [], {}
        if inputs.seqlen_q > 1:
            queries = [torch.arange(inputs.batch + 1, dtype=torch.int32) * inputs.seqlen_q]
            options = dict(causal=True)
        if inputs.window is not None:
            options["window_left"] = inputs.window - 1
        wrapper.plan(
            *queries,
            torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int().cpu(),
            self.indices[0],
            ((lengths - 1) % self.page + 1).int().cpu(),
            inputs.heads_q,
            inputs.heads_kv,
            inputs.head_dim,
            self.page,
            q_data_type=inputs.dtype,
            kv_data_type=inputs.dtype,
            sm_scale=inputs.scale,
            **options,
        )

    def run(self) -> None:
        k, v, _ = self.cache()
        pages = (-1, self.page, self.inputs.heads_kv, self.inputs.head_dim)
        # Pages are no part of a plan; what the wrapper keeps goes to the launch as it is.
        self.wrapper._paged_kv_indices_buf = self.indices[self.turn % len(self.indices)]
        self.wrapper.run(self.q, (k.view(pages), v.view(pages)), out=self.out.flatten(0, 1))

    def output(self) -> torch.Tensor:
        return self.out
