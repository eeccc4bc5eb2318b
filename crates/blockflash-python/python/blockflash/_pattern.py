"""Which blocks of a block-sparse matrix are stored."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

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
        arrays = (_index("row_ptr", row_ptr), _index("col_idx", col_idx))
        native = _native.BsrPattern(rows, cols, block, *arrays)
        self.__dict__.update(
            rows=rows, cols=cols, block=block, number=native.number, _arrays=arrays, _native=native
        )

    rows: int
    cols: int
    block: int
    number: int
    _arrays: tuple[Tensor, Tensor]
    _native: _native.BsrPattern

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} of a pattern cannot change: make another pattern")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name} of a pattern cannot be deleted")

    @property
    def row_ptr(self) -> Tensor:
        """A copy of the array: int32 `[rows / block + 1]` on the CPU."""
        return self._arrays[0].clone()

    @property
    def col_idx(self) -> Tensor:
        """A copy of the array: int32 `[nnz]` on the CPU."""
        return self._arrays[1].clone()

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
        return len(self._arrays[1])

    @property
    def density(self) -> float:
        """Stored blocks per block of the matrix, 0 to 1."""
        return self.nnz / max(self.rows // self.block * (self.cols // self.block), 1)

    def mask(self) -> Tensor:
        """The stored blocks as a bool tensor `[rows / block, cols / block]` on the CPU."""
        row_ptr, col_idx = self._arrays
        blocks = (self.rows // self.block, self.cols // self.block)
        mask = row_ptr.new_zeros(blocks, dtype=torch.bool)
        mask[block_rows(row_ptr, self.nnz), col_idx] = True
        return mask

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockSparsePattern) and self.number == other.number

    def __hash__(self) -> int:
        return hash(self.number)

    def __repr__(self) -> str:
        sizes = f"{self.rows} x {self.cols}, block={self.block}"
        return f"BlockSparsePattern({sizes}, nnz={self.nnz}, density={self.density:.1%})"

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockSparsePattern, (self.rows, self.cols, self.block, *self._arrays)


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


@dataclass(frozen=True)
class _Known:
    """The pattern that two arrays had when their versions were these."""

    col_idx: weakref.ref[Tensor]
    versions: tuple[int, int]
    pattern: BlockSparsePattern


_KNOWN: Any = WeakTensorKeyDictionary()
"""What is known of arrays, by their `row_ptr`: reading a GPU's memory would wait for it."""


def remember(row_ptr: Tensor, col_idx: Tensor, pattern: BlockSparsePattern) -> None:
    """Notes that these arrays hold this pattern, until either is written.

    Arrays on the meta device hold nothing: theirs is the pattern that they get with their memory.
    """
    if not (row_ptr.is_inference() or col_idx.is_inference()):  # writes into them go unnoticed
        versions = (row_ptr._version, col_idx._version)
        _KNOWN[row_ptr] = _Known(weakref.ref(col_idx), versions, pattern)


def known(
    row_ptr: Tensor, col_idx: Tensor, rows: int, cols: int, block: int
) -> BlockSparsePattern | None:
    """The pattern in these arrays if it is known without reading them."""
    found = _KNOWN.get(row_ptr)
    if found is None or found.col_idx() is not col_idx:
        return None
    pattern = found.pattern
    same = (pattern.rows, pattern.cols, pattern.block) == (rows, cols, block)
    return pattern if same and found.versions == (row_ptr._version, col_idx._version) else None


def read(row_ptr: Tensor, col_idx: Tensor, rows: int, cols: int, block: int) -> BlockSparsePattern:
    """The pattern in these arrays, on any device, which are read only if they have changed.

    Raises:
        ValueError: They hold no pattern of this matrix, or a CUDA graph is being captured, in which
            they cannot be read.

    """
    pattern = known(row_ptr, col_idx, rows, cols, block)
    if pattern is None:
        if row_ptr.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "row_ptr and col_idx are new or were written, and cannot be read while a CUDA "
                "graph is captured: run the layer once before"
            )
        pattern = BlockSparsePattern(rows, cols, block, row_ptr, col_idx)
        remember(row_ptr, col_idx, pattern)
    return pattern
