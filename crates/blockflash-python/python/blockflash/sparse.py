"""Block-sparse matrices and linear layers that train.

A matrix W `[rows, cols]` is stored as its nonzero blocks: a pattern says which, and values
`[nnz, block, block]` hold them in the order of `torch.sparse_bsr`. On a GPU the element types are
float16 and bfloat16 and the block sizes 16, 32, 64 and 128; the CPU takes float32 and any block
size up to 1024, too. Rows and columns are multiples of the block size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from . import _bsr
from ._pattern import BlockSparsePattern, block_rows, known, read, remember

__all__ = [
    "BlockSparseLinear",
    "BlockSparsePattern",
    "linear",
    "matmul",
    "sddmm",
    "sparsify_",
]

_OPS = torch.ops.blockflash


def linear(
    x: Tensor,
    values: Tensor,
    pattern: BlockSparsePattern,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """`activation(x @ W.T + bias)` in one kernel, with gradients of x, values and bias.

    The backward pass computes the sum before a gelu or silu again rather than keep it.

    Args:
        x: `[..., cols]`, in any number of dimensions.
        values: The blocks of W, `[nnz, block, block]`, contiguous, in the element type of x.
        pattern: Which blocks of W these are.
        bias: `[rows]`.
        activation: None, "relu", "gelu" (exact, by the error function) or "silu".

    Returns:
        `[..., rows]` in the element type of x; under autocast, in that of autocast.

    Raises:
        ValueError: Shapes, element types, devices or the activation are wrong.
        blockflash.Unsupported: No kernel takes the call on this GPU.

    """
    number = _activation(activation)
    x, values, bias = _bsr.autocast(x, values, bias)
    return _OPS.bsr_linear.default(x, values, bias, pattern.number, number)


def matmul(x: Tensor, values: Tensor, pattern: BlockSparsePattern) -> Tensor:
    """`x @ W` of x `[..., rows]`, to `[..., cols]`; operands and errors as in `linear`."""
    x, values, _ = _bsr.autocast(x, values, None)
    return _OPS.dense_bsr.default(x, values, pattern.number)


def sddmm(a: Tensor, b: Tensor, pattern: BlockSparsePattern) -> Tensor:
    """The blocks of a pattern of `a @ b`: a sampled dense-dense matrix product, with gradients.

    Args:
        a: `[rows, k]`, with contiguous rows or columns (else it is copied).
        b: `[k, cols]` in the element type of a, likewise.
        pattern: Which blocks of the product are computed.

    Returns:
        `[nnz, block, block]` in the element type of a.

    """
    a, b, _ = _bsr.autocast(a, b, None)
    return _OPS.sddmm.default(a, b, pattern.number)


def _activation(name: str | None) -> int:
    """The number of an activation."""
    if name not in _bsr.ACTIVATIONS:
        raise ValueError(f"activation is {name!r}, not one of {list(_bsr.ACTIVATIONS)}")
    return _bsr.ACTIVATIONS[name]


class BlockSparseLinear(nn.Module):
    """`activation(x @ W.T + bias)` with a block-sparse W: `torch.nn.Linear` with fewer blocks.

    The parameters are `values` `[nnz, block, block]` and `bias` `[out_features]`. The pattern is in
    the buffers `row_ptr` and `col_idx` and nowhere else: a state_dict is complete, and whatever
    writes or exchanges the buffers changes the pattern. A call that finds other buffers than the
    last one, or buffers written since, reads them, for which it waits for the GPU; buffers that
    hold no pattern of the layer raise. So a captured CUDA graph keeps the pattern of its capture,
    writes through `.data` go unnoticed as for autograd, and `DistributedDataParallel`, which writes
    all buffers in each step, needs `broadcast_buffers=False` for speed.

    Args:
        in_features: Columns of W, a multiple of `block`.
        out_features: Rows of W, a multiple of `block`.
        block: Rows and columns of a block.
        pattern: The stored blocks, or a bool tensor `[out_features / block, in_features / block]`.
        bias: Whether there is a bias.
        activation: None, "relu", "gelu" or "silu".
        device: Where the parameters are made.
        dtype: Element type of the parameters; float16 or bfloat16 on a GPU, or float32 under
            autocast.

    """

    values: nn.Parameter
    bias: nn.Parameter | None
    row_ptr: Tensor
    col_idx: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        block: int,
        pattern: BlockSparsePattern | Tensor,
        *,
        bias: bool = True,
        activation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if isinstance(pattern, Tensor):
            pattern = BlockSparsePattern.from_mask(pattern, block)
        if (pattern.rows, pattern.cols, pattern.block) != (out_features, in_features, block):
            raise ValueError(
                f"the pattern is {pattern}, but the layer {out_features} x {in_features} in blocks "
                f"of {block}"
            )
        _activation(activation)
        self.in_features, self.out_features, self.block = in_features, out_features, block
        self.activation = activation
        made = {"device": device, "dtype": dtype}
        self.values = nn.Parameter(torch.empty(pattern.nnz, block, block, **made))
        self.bias = nn.Parameter(torch.empty(out_features, **made)) if bias else None
        self.register_buffer("row_ptr", None)
        self.register_buffer("col_idx", None)
        self._place(pattern, self.values.device)
        self.reset_parameters()

    @property
    def pattern(self) -> BlockSparsePattern:
        """The pattern that is in the buffers; a `ValueError` if they hold none."""
        return read(self.row_ptr, self.col_idx, *self._shape)

    @property
    def _shape(self) -> list[int]:
        return [self.out_features, self.in_features, self.block]

    @property
    def _density(self) -> float:
        """Stored blocks per block of W, by the shape of the buffers."""
        blocks = self.out_features // self.block * (self.in_features // self.block)
        return len(self.col_idx) / max(blocks, 1)

    def _place(self, pattern: BlockSparsePattern, device: torch.device) -> None:
        """Puts a pattern into new buffers, whose later writes torch counts in any mode."""
        with torch.inference_mode(False):
            self.row_ptr = pattern.row_ptr.to(device)
            self.col_idx = pattern.col_idx.to(device)
        remember(self.row_ptr, self.col_idx, pattern)

    def reset_parameters(self) -> None:
        """Draws parameters as `torch.nn.Linear`, for as many inputs as an output has on average."""
        inputs = max(self.in_features * self._density, 1)
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -(inputs**-0.5), inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        # nn.Module finds a buffer slowly as an attribute.
        row_ptr, col_idx = self._buffers["row_ptr"], self._buffers["col_idx"]
        traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        if not traced and type(row_ptr) is Tensor and not row_ptr.is_meta:
            pattern = read(row_ptr, col_idx, *self._shape)
            return linear(x, self.values, pattern, self.bias, self.activation)
        # The operator reads the buffers when it runs, so a graph obeys later ones.
        x, values, bias = _bsr.autocast(x, self.values, self.bias)
        arrays = (row_ptr, col_idx, self._shape)
        return _OPS.bsr_linear.arrays(x, values, bias, *arrays, _activation(self.activation))

    @classmethod
    def from_dense(
        cls,
        weight: Tensor,
        block: int,
        *,
        density: float | None = None,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> BlockSparseLinear:
        """A layer with blocks of a dense weight `[out_features, in_features]`, copied.

        These are the share `density` of all blocks, at least one, with the largest Frobenius norms;
        without a `density`, all blocks with an element that is not 0.
        """
        if weight.dim() != 2 or block < 1 or weight.shape[0] % block or weight.shape[1] % block:
            raise ValueError(
                f"weight has shape {tuple(weight.shape)}, which is not a matrix of blocks of "
                f"{block} x {block}"
            )
        rows, cols = weight.shape
        weight = weight.detach()
        blocks = weight.view(rows // block, block, cols // block, block).transpose(1, 2)
        if density is None:
            mask = blocks.ne(0).any(-1).any(-1)
        elif not 0 < density <= 1:
            raise ValueError(f"density is {density}, but must be above 0 and at most 1")
        else:
            norms = torch.linalg.vector_norm(blocks, dim=(-2, -1), dtype=torch.float32).flatten()
            kept = norms.topk(min(max(round(density * norms.numel()), 1), norms.numel())).indices
            mask = torch.zeros_like(norms, dtype=torch.bool).index_fill(0, kept, True)
            mask = mask.view(blocks.shape[:2])
        pattern = BlockSparsePattern.from_mask(mask, block)
        return cls._of(pattern, blocks[mask], bias, activation)

    @classmethod
    def from_linear(
        cls,
        layer: nn.Linear,
        block: int = 64,
        density: float = 0.1,
        *,
        activation: str | None = None,
    ) -> BlockSparseLinear:
        """A layer with the blocks of a `torch.nn.Linear` that have the largest norms."""
        made = cls.from_dense(
            layer.weight, block, density=density, bias=layer.bias, activation=activation
        )
        return made.train(layer.training)

    @classmethod
    def from_sparse_bsr(
        cls, weight: Tensor, *, bias: Tensor | None = None, activation: str | None = None
    ) -> BlockSparseLinear:
        """A layer of a `torch.sparse_bsr` weight with square blocks; shares its values."""
        if weight.layout != torch.sparse_bsr or weight.dim() != 2:
            raise ValueError(f"weight has layout {weight.layout} and {weight.dim()} dimensions")
        values = weight.values().detach()
        if values.dim() != 3 or values.shape[1] != values.shape[2]:
            raise ValueError(f"the values have shape {tuple(values.shape)}: no square blocks")
        arrays = (weight.crow_indices(), weight.col_indices())
        pattern = BlockSparsePattern(*weight.shape, values.shape[1], *arrays)
        return cls._of(pattern, values, bias, activation)

    @classmethod
    def _of(
        cls,
        pattern: BlockSparsePattern,
        values: Tensor,
        bias: Tensor | None,
        activation: str | None,
    ) -> BlockSparseLinear:
        if bias is not None and tuple(bias.shape) != (pattern.rows,):
            raise ValueError(f"bias has shape {tuple(bias.shape)}, not [{pattern.rows}]")
        layer = cls(
            pattern.cols, pattern.rows, pattern.block, pattern, bias=bias is not None,
            activation=activation, device="meta", dtype=values.dtype,
        )  # fmt: skip
        layer.values = nn.Parameter(values.contiguous())
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().to(values, copy=True))
        layer._place(pattern, values.device)
        return layer

    def to_dense(self) -> Tensor:
        """W `[out_features, in_features]` with zeros for the other blocks; has a gradient."""
        pattern, block = self.pattern, self.block
        shape = (pattern.rows // block, pattern.cols // block, block, block)
        row_ptr, col_idx = (t.to(self.values.device) for t in (pattern.row_ptr, pattern.col_idx))
        places = (block_rows(row_ptr, pattern.nnz), col_idx)
        blocks = self.values.new_zeros(shape).index_put(places, self.values)
        return blocks.transpose(1, 2).reshape(pattern.rows, pattern.cols)

    def to_sparse_bsr(self) -> Tensor:
        """W as a `torch.sparse_bsr` tensor, which shares the values."""
        values, size = self.values.detach(), (self.out_features, self.in_features)
        arrays = (t.to(values.device) for t in (self.pattern.row_ptr, self.pattern.col_idx))
        made = {"dtype": values.dtype, "layout": torch.sparse_bsr, "device": values.device}
        # The pattern was checked; the public function warns that it is not, whatever it is told.
        return torch.ops.aten._sparse_bsr_tensor_unsafe(*arrays, values, size, **made)

    def extra_repr(self) -> str:
        """What `repr` says about the layer."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"block={self.block}, density={self._density:.1%}, "
            f"bias={self.bias is not None}, activation={self.activation}"
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **options: Any
    ) -> None:
        arrays = [state_dict.get(prefix + name) for name in ("row_ptr", "col_idx")]
        if all(array is not None for array in arrays):
            try:
                self._adopt(
                    BlockSparsePattern(*self._shape, *arrays),
                    state_dict.get(prefix + "values", self.values),
                )
            except ValueError as error:
                rest[-1].append(f"the pattern of {prefix.rstrip('.') or 'the layer'}: {error}")
                return
        super()._load_from_state_dict(state_dict, prefix, *rest, **options)

    def _adopt(self, pattern: BlockSparsePattern, values: Tensor) -> None:
        """Makes room for these values of another pattern; optimizers keep their parameter."""
        shape = (pattern.nnz, self.block, self.block)
        if tuple(values.shape) != shape:
            raise ValueError(f"size mismatch: values have shape {tuple(values.shape)}, not {shape}")
        if tuple(self.values.shape) != shape:
            self.values.data = self.values.new_empty(shape)
            self.values.grad = None
        self._place(pattern, self.row_ptr.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BlockSparseLinear:
        """Also gives the pattern to buffers that come without it, as those of `to_empty`."""
        before = self.row_ptr
        pattern = known(self.row_ptr, self.col_idx, *self._shape)
        super()._apply(fn, recurse)
        if pattern is not None and self.row_ptr is not before:
            self._place(pattern, self.row_ptr.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if self.row_ptr.is_meta:  # a copy has other buffers, which cannot be read
            state["_pattern"] = known(self.row_ptr, self.col_idx, *self._shape)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        pattern = state.pop("_pattern", None)
        super().__setstate__(state)
        if pattern is not None:
            remember(self.row_ptr, self.col_idx, pattern)


def sparsify_(
    model: nn.Module,
    block: int = 64,
    density: float = 0.1,
    *,
    include: Iterable[str] = ("*",),
    exclude: Iterable[str] = (),
) -> dict[str, BlockSparseLinear]:
    """Replaces linear layers of a model in place, by their blocks of the largest norms.

    Left as they are: subclasses of `torch.nn.Linear`, layers whose weight another module shares
    (tied embeddings), and layers whose sizes are no multiples of `block`. The model itself is no
    layer of its own. Make the optimizer afterwards.

    Args:
        model: A model with `torch.nn.Linear` layers.
        block: Rows and columns of a block.
        density: Which share of the blocks of each layer is kept.
        include: Names of layers as in `model.named_modules()`, with `*` and `?`.
        exclude: Names that are left out of `include`.

    Returns:
        The new layers by name.

    Raises:
        ValueError: No layer was replaced.

    """
    include, exclude = list(include), list(exclude)
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    made: dict[int, BlockSparseLinear] = {}
    replaced = {}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        named = any(fnmatchcase(name, glob) for glob in include)
        if not name or not named or any(fnmatchcase(name, glob) for glob in exclude):
            continue
        if type(layer) is not nn.Linear or len(owners[id(layer.weight)]) > 1:
            continue
        if layer.in_features % block or layer.out_features % block:
            continue
        if id(layer) not in made:
            made[id(layer)] = BlockSparseLinear.from_linear(layer, block, density)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made[id(layer)])
        replaced[name] = made[id(layer)]
    if not replaced:
        raise ValueError(f"no linear layer of the model is named and has blocks of {block}")
    return replaced
