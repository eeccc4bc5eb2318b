"""Which blocks of a block-sparse matrix are stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import _native


class BlockSparsePattern:
    """Which blocks of a matrix are stored, in the arrays of the BSR format.

    Immutable and not bound to a device: the first use on a GPU copies it there, which cannot happen
    while a CUDA graph is captured. Equal patterns share one plan of the kernels.

    Args:
        rows: Rows of the matrix, a multiple of `block`.
        cols: Columns of the matrix, a multiple of `block`.
        block: Rows and columns of a block.
        row_ptr: Integers `[rows / block + 1]`: block row `i` has the blocks `row_ptr[i]` to
            `row_ptr[i + 1]`.
        col_idx: Integers `[nnz]`, the block column of each block, ascending in a block row.

    Raises:
        ValueError: The arrays are no pattern of this matrix.

    """

    def __init__(self, rows: int, cols: int, block: int, row_ptr: Tensor, col_idx: Tensor) -> None:
        if rows < 0 or cols < 0 or block < 1:
            raise ValueError(f"a matrix of {rows} x {cols} in blocks of {block}")
        self.rows, self.cols, self.block = rows, cols, block
        self.row_ptr, self.col_idx = _index("row_ptr", row_ptr), _index("col_idx", col_idx)
        self._native = _native.BsrPattern(rows, cols, block, self.row_ptr, self.col_idx)
        self.number: int = self._native.number

    @classmethod
    def from_mask(cls, mask: Tensor, block: int) -> BlockSparsePattern:
        """The blocks that are true in a bool tensor `[rows / block, cols / block]`."""
        if mask.dim() != 2 or mask.dtype != torch.bool:
            raise ValueError(f"mask is {tuple(mask.shape)} of {mask.dtype}, not a bool matrix")
        mask = mask.detach().cpu()
        row_ptr = pad(mask.sum(1).cumsum(0), (1, 0))
        rows, cols = mask.shape
        return cls(rows * block, cols * block, block, row_ptr, mask.nonzero()[:, 1])

    @property
    def nnz(self) -> int:
        """Number of stored blocks."""
        return len(self.col_idx)

    @property
    def density(self) -> float:
        """Stored blocks per block of the matrix, 0 to 1."""
        return self.nnz / max(self.rows // self.block * (self.cols // self.block), 1)

    def mask(self) -> Tensor:
        """The stored blocks as a bool tensor `[rows / block, cols / block]` on the CPU."""
        mask = torch.zeros(self.rows // self.block, self.cols // self.block, dtype=torch.bool)
        mask[block_rows(self.row_ptr, self.nnz), self.col_idx] = True
        return mask

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockSparsePattern) and self.number == other.number

    def __hash__(self) -> int:
        return hash(self.number)

    def __repr__(self) -> str:
        sizes = f"{self.rows} x {self.cols}, block={self.block}"
        return f"BlockSparsePattern({sizes}, nnz={self.nnz}, density={self.density:.1%})"

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = (self.row_ptr, self.col_idx)
        return BlockSparsePattern, (self.rows, self.cols, self.block, *arrays)


def _index(name: str, indices: Tensor) -> Tensor:
    """A copy of an index array as int32 on the CPU."""
    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int32, torch.int64):
        kind = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        raise ValueError(f"{name} must be an int32 or int64 tensor, not {kind}")
    if indices.is_meta:
        raise ValueError(f"{name} is a meta tensor, which has no indices")
    indices = indices.detach()
    if indices.numel() and (indices.min() < 0 or indices.max() > torch.iinfo(torch.int32).max):
        raise ValueError(f"{name} has entries beyond 0 to 2^31 - 1")
    return torch.empty(indices.shape, dtype=torch.int32, device="cpu").copy_(indices)


def block_rows(row_ptr: Tensor, nnz: int) -> Tensor:
    """The block row of each block."""
    rows = torch.arange(len(row_ptr) - 1, device=row_ptr.device)
    return rows.repeat_interleave(row_ptr.diff(), output_size=nnz)
