"""Competitors of attention to a cache of latent rows (MLA with absorbed projections): a row is a
key of `head_dim` elements that all heads share, and its first `head_dim_v` are the value."""

import math
from typing import Any

import torch

import decode
from measure import Absent, Capture, needs_cuda, needs_triton


class Inputs(decode.Inputs):
    """q and rows ~ N(0, 1); values are views of the rows."""

    def __init__(self, case: dict[str, Any], device: torch.device) -> None:
        self.head_dim_v = case["head_dim_v"]
        super().__init__(case, device)
        if self.heads_kv != 1:
            raise ValueError(f"{self.heads_kv} heads of rows: competitors take one")

    def cache(self, *rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        k = self.draw(*rows)
        return k, k[..., : self.head_dim_v]

    def clone(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k = k.clone()
        return k, k[..., : self.head_dim_v]

    def row_bytes(self) -> int:
        return self.head_dim * self.q.element_size()

    def keys(self) -> torch.Tensor:
        """How many keys each sequence has."""
        if self.lengths is not None:
            return self.lengths
        return torch.full((self.batch,), self.seqlen_kv, dtype=torch.int32, device=self.device)

    def empty(self) -> torch.Tensor:
        """An output."""
        return self.q.new_empty(*self.q.shape[:-1], self.head_dim_v)


class Decode(decode.Decode):
    """A call over latent rows."""

    Inputs = Inputs

    def __init__(self, inputs: Inputs, options: dict[str, Any]) -> None:
        super().__init__(inputs, options)
        if inputs.window is not None or inputs.chosen is not None:
            raise ValueError("this competitor takes neither a window nor chosen pages")

    def output(self) -> torch.Tensor:
        return self.out


class FlashMla(Decode):
    """FlashMLA, in the wheel `sgl-flash-mla`. What its scheduler needs is computed by the first
    call, as an engine computes it once for all layers of a step."""

    @classmethod
    def available(cls, device: torch.device) -> None:
        needs_cuda(device)
        if torch.cuda.get_device_capability(device)[0] != 9:
            raise Absent("the dense kernels of FlashMLA are for Hopper")
        try:
            import flash_mla
        except (ImportError, OSError) as error:
            raise Absent(f"python3 has no flash_mla ({error})") from error
        if getattr(flash_mla, "has_legacy", lambda: True)() is False:
            raise Absent("this flash_mla has no dense kernels")

    def __init__(self, inputs: Inputs, options: dict[str, Any]) -> None:
        super().__init__(inputs, options)
        import flash_mla

        if inputs.page_size != 64 or [inputs.head_dim, inputs.head_dim_v] != [576, 512]:
            raise ValueError("FlashMLA takes pages of 64 and rows of 576 with values of 512")
        self.keys, self.interface = inputs.keys(), flash_mla
        self.rest: dict[str, Any] = {}
        if hasattr(flash_mla, "has_legacy"):
            self.rest = {"use_legacy": True}
            self.metadata = flash_mla.get_mla_metadata()
        else:
            rows = inputs.seqlen_q * inputs.heads_q
            self.metadata = flash_mla.get_mla_metadata(self.keys, rows, 1)
        self.settings = "scheduler metadata computed beforehand"
        self.run()

    def run(self) -> None:
        rows, _, table = self.cache()
        self.out, _ = self.interface.flash_mla_with_kvcache(
            self.inputs.q,
            rows,
            table,
            self.keys,
            self.inputs.head_dim_v,
            *self.metadata,
            softmax_scale=self.inputs.scale,
            causal=self.inputs.seqlen_q > 1,
            **self.rest,
        )


class FlashInferMla(Decode):
    """FlashInfer's BatchMLAPagedAttentionWrapper, planned beforehand, as engines do once for all
    layers of a step. It knows only pages, so a contiguous cache is pages in their order."""

    # Bytes for results of parts of the keys.
    WORKSPACE = 1 << 28

    @classmethod
    def available(cls, device: torch.device) -> None:
        decode.FlashInfer.available(device)

    def __init__(self, inputs: Inputs, options: dict[str, Any]) -> None:
        super().__init__(inputs, options)
        self.page = inputs.page_size or math.gcd(inputs.seqlen_kv, 64)
        self.parts = [inputs.head_dim_v, inputs.head_dim - inputs.head_dim_v]
        if self.parts[1] == 0:
            raise ValueError("FlashInfer takes rows with elements behind the values")
        lengths = inputs.keys()
        pages = (lengths + self.page - 1) // self.page
        indices = decode.FlashInfer.visited(self, inputs.copies[0][2], pages)
        self.q = inputs.q.flatten(0, 1).split(self.parts, -1)
        self.out = inputs.empty()
        hopper = torch.cuda.get_device_capability(inputs.device)[0] == 9
        found = []
        for backend in ("fa2", "fa3") if hopper else ("fa2",):
            self.wrapper = self.planned(backend, lengths, pages, indices)
            us = Capture(self.run, inputs.device, 3000, decode.MAX_COPIES).window(20)["us"]
            found.append((us, backend, self.wrapper))
        found.sort(key=lambda way: way[0])
        self.wrapper = found[0][-1]
        self.settings = ", not ".join(f"backend={name} ({us:.1f} us)" for us, name, _ in found)
        self.settings += f"; pages of {self.page}; planned beforehand"

    def planned(
        self, backend: str, lengths: torch.Tensor, pages: torch.Tensor, indices: torch.Tensor
    ) -> Any:
        import flashinfer

        inputs, queries = self.inputs, self.inputs.seqlen_q
        scratch = torch.zeros(self.WORKSPACE, dtype=torch.uint8, device=inputs.device)
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(scratch, backend=backend)
        starts = torch.arange(inputs.batch + 1, dtype=torch.int32, device=inputs.device)
        wrapper.plan(
            qo_indptr=starts * queries,
            kv_indptr=torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int(),
            kv_indices=indices,
            kv_len_arr=lengths,
            num_heads=inputs.heads_q,
            head_dim_ckv=self.parts[0],
            head_dim_kpe=self.parts[1],
            page_size=self.page,
            causal=queries > 1,
            sm_scale=inputs.scale,
            q_data_type=inputs.dtype,
            kv_data_type=inputs.dtype,
        )
        return wrapper

    def run(self) -> None:
        rows = self.cache()[0].view(-1, self.page, self.inputs.head_dim)
        values, behind = rows.split(self.parts, -1)
        nope, rope = self.q
        self.wrapper.run(
            q_nope=nope, q_pe=rope, ckv_cache=values, kpe_cache=behind, out=self.out.flatten(0, 1)
        )


class TritonMla(Decode):
    """Our kernels in triton_mla.py, with the fastest numbers of splits and tile of a few."""

    @classmethod
    def available(cls, device: torch.device) -> None:
        needs_cuda(device)
        needs_triton()

    def __init__(self, inputs: Inputs, options: dict[str, Any]) -> None:
        super().__init__(inputs, options)
        if inputs.seqlen_q != 1:
            raise ValueError("our kernel in Triton takes one query of each sequence")
        self.keys, self.out = inputs.keys(), inputs.empty()
        self.page = inputs.page_size or inputs.seqlen_kv
        heads = min(16, 1 << (inputs.heads_q - 1).bit_length())
        found = []
        for splits in (1, 4, 8, 16, 32, 64):
            if splits > 1 and splits * 128 > inputs.seqlen_kv:
                continue
            self.parts = inputs.q.new_empty(
                inputs.batch, inputs.heads_q, splits, inputs.head_dim_v + 1, dtype=torch.float32
            )
            for keys, warps, stages in ((32, 4, 2), (64, 8, 2), (16, 4, 2)):
                self.tile = (heads, keys, warps, stages)
                try:
                    us = self.timed()
                except Exception as error:
                    if "out of resource" not in str(error):
                        raise
                    continue
                found.append((us, splits, self.tile, self.parts))
        us, splits, self.tile, self.parts = min(found, key=lambda way: way[0])
        self.settings = f"{splits} splits, tile {self.tile}, the fastest of {len(found)}"

    def timed(self) -> float:
        if self.inputs.device.type != "cuda":
            return 0.0
        return Capture(self.run, self.inputs.device, 3000, decode.MAX_COPIES).window(20)["us"]

    def run(self) -> None:
        import triton_mla

        rows, _, table = self.cache()
        q, out = self.inputs.q[:, 0], self.out[:, 0]
        triton_mla.decode(
            q, rows, table, self.keys, self.page, self.parts, out, self.inputs.scale, self.tile
        )
