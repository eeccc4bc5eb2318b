"""Competitors of attention by an index to latent rows, as DeepSeek's DSA reads them."""

from typing import Any

import torch

import engines
from index_attention import IndexCall, Inputs
from measure import Absent, needs_cuda


class Latent(IndexCall):
    """Sparse attention of DeepSeek's DSA: latent rows, which lists name by their slot; the slots
    are found beforehand."""

    def refuses(self, inputs: Inputs) -> str | None:
        if not inputs.latent or [inputs.head_dim, inputs.head_dim_v] != [576, 512]:
            return "latent rows of 576 with values of 512"
        if inputs.granularity != 1 or inputs.groups != 1:
            return "one list of single keys for all heads"
        return None if inputs.dtype == torch.bfloat16 else "bf16 only"

    def list(self, entries: torch.Tensor) -> torch.Tensor:
        return self.inputs.slots(self.inputs.tokens(entries)).squeeze(0)[:, None].contiguous()

    def prepare(self, inputs: Inputs) -> None:
        self.engine = self.kernels()
        self.rows = inputs.k.view(-1, 1, inputs.head_dim)
        self.q = inputs.q.flatten(0, 1)
        self.run()


class SglangDsaDecode(Latent):
    """SGLang's Triton kernels for decoding, which split the keys."""

    @classmethod
    def kernels(cls) -> Any:
        return engines.load(
            "sglang.kernels.ops.attention.dsa.triton_sparse_mla_decode",
            "sglang.kernels.ops.attention.dsa.triton_sparse_mla",
        )

    def prepare(self, inputs: Inputs) -> None:
        self.workspace = []
        super().prepare(inputs)

    def run(self) -> None:
        nope, rope = self.q.split([512, 64], -1)
        out = self.engine.triton_sparse_mla_decode_splitk(
            nope, rope, self.rows, self.next(), self.inputs.scale, workspace=self.workspace
        )
        self.out = out[0]


class SglangDsaPrefill(Latent):
    """SGLang's Triton kernel for prompts on Hopper: a query's heads are a tile."""

    @classmethod
    def kernels(cls) -> Any:
        return engines.load("sglang.kernels.ops.attention.dsa.triton_sparse_mla_prefill")

    def refuses(self, inputs: Inputs) -> str | None:
        if inputs.heads_q > 32:
            return "SGLang takes it for up to 32 heads"
        return super().refuses(inputs)

    def prepare(self, inputs: Inputs) -> None:
        shape = (inputs.queries,)
        self.counts = torch.full(shape, inputs.entries, dtype=torch.int32, device=inputs.device)
        super().prepare(inputs)

    def run(self) -> None:
        self.out = self.engine.sparse_mla_prefill(
            self.q, self.rows, self.next(), self.inputs.scale, topk_length=self.counts
        )


class VllmXpuDsa(Latent):
    """vLLM's Triton kernel, which it takes where FlashMLA is not."""

    @classmethod
    def kernels(cls) -> Any:
        return engines.load("vllm.v1.attention.ops.xpu_mla_sparse")

    def run(self) -> None:
        self.out = self.engine.triton_bf16_mla_sparse_interface(
            self.q, self.rows, self.next(), self.inputs.scale
        )[0]


class FlashMlaSparse(Latent):
    """FlashMLA's sparse kernel for Hopper, in the wheel `sgl-flash-mla`: no Triton. It takes 64 or
    128 heads, so fewer are filled up with zeros beforehand."""

    @classmethod
    def available(cls, device: torch.device) -> None:
        needs_cuda(device)
        if torch.cuda.get_device_capability(device)[0] != 9:
            raise Absent("these kernels of FlashMLA are for Hopper")
        cls.kernels()

    @classmethod
    def kernels(cls) -> Any:
        try:
            import flash_mla
        except (ImportError, OSError) as error:
            raise Absent(f"python3 has no flash_mla ({error})") from error
        return flash_mla

    def prepare(self, inputs: Inputs) -> None:
        self.engine, self.q = self.kernels(), inputs.q.flatten(0, 1)
        missing = -inputs.heads_q % 64
        self.q = torch.nn.functional.pad(self.q, (0, 0, 0, missing)).contiguous()
        self.rows = inputs.k.view(-1, 1, inputs.head_dim)
        self.rest = {}
        if hasattr(self.engine, "has_legacy"):
            self.rest = dict(use_legacy=True, return_log2_lse=False)
        self.run()

    def run(self) -> None:
        out = self.engine.flash_mla_sparse_fwd(
            self.q, self.rows, self.next(), self.inputs.scale, **self.rest
        )[0]
        self.out = out[:, : self.inputs.heads_q]
