"""The competitor FlashAttention-4: forward and gradients, dense and under a block mask."""

from typing import Any

import torch
from torch.nn.attention import flex_attention

import attention
import flex
from backward import Backward, BlockSparseInputs, Inputs
from measure import Absent, Call, needs_cuda


def available(device: torch.device) -> None:
    """Raises Absent without the package, or a GPU that it takes."""
    needs_cuda(device)
    if torch.cuda.get_device_capability(device)[0] < 9:
        raise Absent("FlashAttention-4 is for Hopper and later")
    try:
        import flash_attn.cute.interface  # noqa: F401
    except ImportError as error:
        raise Absent(f"python3 has no flash-attn-4 ({error})") from error


def whole_blocks(inputs: flex.Inputs) -> list[torch.Tensor]:
    """The lists of blocks, [1, heads, ...]."""
    if inputs.causal:
        raise ValueError("causal lists: only whole blocks are known here")
    return [t[None] for t in inputs.blocks(torch.ones_like(inputs.row, dtype=torch.bool))]


class Flash4(Backward):
    """FlashAttention-4, from the package flash-attn-4, whose first call compiles its kernels."""

    @classmethod
    def available(cls, device: torch.device) -> None:
        available(device)

    def __init__(self, inputs: Inputs, _options: dict[str, Any]) -> None:
        from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

        q, k, v = inputs.q, inputs.k, inputs.v
        forward_blocks, backward_blocks = self.blocks(inputs)
        common = dict(softmax_scale=inputs.scale, causal=inputs.causal)
        o, lse, *_ = _flash_attn_fwd(
            q, k, v, return_lse=True, block_sparse_tensors=forward_blocks, **common
        )
        self.gradients = tuple(torch.empty_like(t) for t in (q, k, v))
        self.operator = _flash_attn_bwd
        self.arguments = (q, k, v, o, inputs.d_o, lse)
        self.options = dict(
            zip(("dq", "dk", "dv"), self.gradients),
            deterministic=self.deterministic,
            block_sparse_tensors=backward_blocks,
            **common,
        )

    def blocks(self, _inputs: Inputs) -> tuple[Any, Any]:
        """Lists of blocks of the forward and of the backward pass."""
        return None, None

    def run(self) -> None:
        self.operator(*self.arguments, **self.options)


class Flash4Deterministic(Flash4):
    deterministic = True


class Flash4BlockSparse(Flash4):
    """The backward pass walks the transposed lists. In a fixed order it also wants the place of
    each block among those that add to the same rows of dq."""

    Inputs = BlockSparseInputs

    def blocks(self, inputs: BlockSparseInputs) -> tuple[Any, Any]:
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch, compute_dq_write_order

        of_rows = whole_blocks(inputs)
        if self.deterministic and torch.cuda.get_device_capability(inputs.device)[0] == 9:
            # It would say so itself, after compiling for seconds.
            raise ValueError("on Hopper it has no fixed order under a block mask")
        mask = flex_attention.BlockMask.from_kv_blocks(
            *of_rows, BLOCK_SIZE=(inputs.block_q, inputs.block_kv)
        )
        of_columns = [mask.q_num_blocks, mask.q_indices]
        none = [[torch.zeros_like(t) for t in lists] for lists in (of_rows, of_columns)]
        more = {}
        if self.deterministic:
            order = compute_dq_write_order(*none[0], *of_rows, *none[1], *of_columns, spt=False)
            more = dict(zip(("dq_write_order", "dq_write_order_full"), order), spt=False)
        size = (inputs.block_q, inputs.block_kv)
        return (
            BlockSparseTensorsTorch(*none[0], *of_rows, block_size=size),
            BlockSparseTensorsTorch(*none[1], *of_columns, block_size=size, **more),
        )


class Flash4BlockSparseDeterministic(Flash4BlockSparse):
    deterministic = True


class Flash4Forward(Call):
    """The dense forward pass. Its output is allocated by torch."""

    Inputs = attention.Inputs

    @classmethod
    def available(cls, device: torch.device) -> None:
        available(device)

    def __init__(self, inputs: attention.Inputs, _options: dict[str, Any]) -> None:
        from flash_attn.cute.interface import _flash_attn_fwd

        inputs.without_window()
        self.operator, self.tensors = _flash_attn_fwd, (inputs.q, inputs.k, inputs.v)
        self.options = dict(softmax_scale=inputs.scale, causal=inputs.causal)

    def run(self) -> None:
        self.out, *_ = self.operator(*self.tensors, **self.options)

    def output(self) -> torch.Tensor:
        return self.out


class Flash4BlockSparseForward(Flash4Forward):
    """The forward pass under lists of whole blocks."""

    Inputs = flex.Inputs

    def __init__(self, inputs: flex.Inputs, _options: dict[str, Any]) -> None:
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
        from flash_attn.cute.interface import _flash_attn_fwd

        of_rows = whole_blocks(inputs)
        none = [torch.zeros_like(t) for t in of_rows]
        size = (inputs.block_q, inputs.block_kv)
        blocks = BlockSparseTensorsTorch(*none, *of_rows, block_size=size)
        self.operator, self.tensors = _flash_attn_fwd, (inputs.q, inputs.k, inputs.v)
        self.options = dict(softmax_scale=inputs.scale, block_sparse_tensors=blocks)
