"""Inputs and competitors of the block-sparse (BSR) matmul c[m, n] = a[m, k]·b[k, n], all on the
same pattern of blocks."""

import itertools
import math

import torch

from measure import DTYPES, TOLERANCE, Call, needs_cuda, needs_triton, relative
from tune import Tuned


def product(a, b):
    """The dense product in f32, without TF32."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return a.float() @ b.float()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


class Inputs:
    """Block pattern of the case, values and b ~ N(0, 1), and the dense f32 reference."""

    def __init__(self, case, device):
        self.seed = case.get("seed", 0)
        generator = torch.Generator(device=device).manual_seed(self.seed)
        self.dtype, self.device, self.block = DTYPES[case["dtype"]], device, case["block_size"]
        self.m, self.n, self.k = case["m"], case["n"], case["k"]
        self.tolerance, self.tuned = TOLERANCE[case["dtype"]], {}
        self.fresh_bytes = case.get("fresh_bytes", 0)
        if self.m % self.block or self.k % self.block:
            raise ValueError(
                f"m {self.m} and k {self.k} must be multiples of the block size {self.block}"
            )
        self.row_ptr, self.col_idx = (t.to(device) for t in self.pattern(case))
        self.nnz = self.col_idx.numel()
        self.block_row = torch.repeat_interleave(
            torch.arange(self.m // self.block, device=device), self.row_ptr.diff()
        )

        def draw(*shape):
            return torch.randn(shape, device=device, dtype=self.dtype, generator=generator)

        self.values = draw(self.nnz, self.block, self.block)
        self.b = draw(self.k, self.n)
        self.reference = product(self.dense(), self.b)
        # An odd step meets every row within a block.
        self.rows = torch.arange(0, self.m, (self.m // 512) | 1, device=device)
        self.sample = self.reference[self.rows]

    def pattern(self, case):
        """int64 row_ptr and col_idx: the .npy files that `blockflash bench` wrote, else
        `blocks_per_row` drawn here."""
        if "col_idx" in case:
            import numpy

            return tuple(
                torch.from_numpy(numpy.load(case[name]).astype("int64"))
                for name in ("row_ptr", "col_idx")
            )
        rows, columns, each = self.m // self.block, self.k // self.block, case["blocks_per_row"]
        draw = torch.rand(
            rows, columns, generator=torch.Generator().manual_seed(case.get("seed", 0))
        )
        return torch.arange(rows + 1) * each, draw.topk(each, dim=1).indices.sort(
            dim=1
        ).values.flatten()

    def dense(self):
        """a as a dense [m, k] matrix."""
        rows, columns, b = self.m // self.block, self.k // self.block, self.block
        tiles = torch.zeros(rows, columns, b, b, device=self.device, dtype=self.dtype)
        tiles[self.block_row, self.col_idx] = self.values
        return tiles.transpose(1, 2).reshape(self.m, self.k)

    def blocked_ell(self):
        """int32 columns [block rows, slots] with -1 for no block, and tiles [block rows,
        slots, block, block]."""
        rows, slots = self.m // self.block, int(self.row_ptr.diff().max())
        slot = torch.arange(self.nnz, device=self.device) - self.row_ptr[self.block_row]
        columns = torch.full((rows, slots), -1, dtype=torch.int32, device=self.device)
        columns[self.block_row, slot] = self.col_idx.to(torch.int32)
        tiles = torch.zeros(
            rows, slots, self.block, self.block, device=self.device, dtype=self.dtype
        )
        tiles[self.block_row, slot] = self.values
        return columns, tiles

    def in_turn(self, make, elements):
        """The same operand, of this many elements, as often as it takes to fill
        `fresh_bytes`: launches take one after another, so that
        none finds its own in a cache of half that size."""
        size = max(1, elements * self.values.element_size())
        return itertools.cycle([make() for _ in range(max(1, math.ceil(self.fresh_bytes / size)))])

    def empty_output(self):
        return torch.empty(self.m, self.n, device=self.device, dtype=self.dtype)

    def relative_error(self, out):
        return relative(out, self.reference)

    def quick_error(self, out):
        """Of about 512 rows from everywhere; NaN in any row counts. For candidates, the
        winner is verified as a whole."""
        if torch.isnan(out).any():
            return math.nan
        return relative(out[self.rows], self.sample)


class Matmul(Call):
    """A competitor that writes into its own `out`."""

    Inputs = Inputs
    takes_fresh = False  # whether launches take copies of `a` in turn

    def output(self):
        return self.out


class MatmulDense(Matmul):
    """The dense product over a with its zeros: a reference, not a competitor.

    Zeros save power, and so the clock is higher than for other numbers.
    """

    takes_fresh = True

    def __init__(self, inputs, _options):
        self.a = inputs.in_turn(lambda: self.operand(inputs), inputs.m * inputs.k)
        self.b, self.out = inputs.b, inputs.empty_output()

    def operand(self, inputs):
        return inputs.dense()

    def run(self):
        torch.matmul(next(self.a), self.b, out=self.out)


class MatmulRandom(MatmulDense):
    """The dense product of N(0, 1) numbers without zeros: what a user of dense weights has."""

    def operand(self, inputs):
        generator = torch.Generator(device=inputs.device).manual_seed(inputs.seed + 1)
        shape = (inputs.m, inputs.k)
        return torch.randn(shape, device=inputs.device, dtype=inputs.dtype, generator=generator)

    def relative_error(self, _inputs):
        return relative(self.out, product(next(self.a), self.b))


def rounded_up(number, multiple):
    return -(-number // multiple) * multiple


class TritonDefault(Matmul):
    """torch.sparse's Triton kernel as a user gets it. Its tiles are a power of two and at least 16
    columns wide, and b has a whole number of them: any other b is padded beforehand, outside the
    time."""

    meta, takes_fresh = None, True

    @classmethod
    def available(cls, device):
        needs_cuda(device)
        needs_triton()

    def __init__(self, inputs, _options):
        from torch.sparse._triton_ops import bsr_dense_addmm

        def a():
            return torch.sparse_bsr_tensor(
                inputs.row_ptr, inputs.col_idx, inputs.values.clone(), size=(inputs.m, inputs.k)
            )

        self.addmm, self.inputs, self.padded = bsr_dense_addmm, inputs, {}
        self.a = inputs.in_turn(a, inputs.values.numel())
        # Where its table has no entry, torch takes tiles as wide as a block is high.
        power = max(16, 1 << (inputs.n - 1).bit_length())
        self.pad(power if power <= inputs.block else rounded_up(inputs.n, inputs.block))

    def pad(self, columns):
        """Takes b and an output with columns of zeros up to this number."""
        if columns not in self.padded:
            n = self.inputs.n
            wide = torch.nn.functional.pad(self.inputs.b, (0, columns - n))
            self.padded[columns] = wide, wide.new_empty(self.inputs.m, columns)
            if columns > n:
                self.settings = f"b padded to {columns} columns"
        self.b, self.wide = self.padded[columns]
        self.out = self.wide[:, : self.inputs.n]

    def run(self):
        self.addmm(self.wide, next(self.a), self.b, beta=0, alpha=1, out=self.wide, meta=self.meta)


class TritonTuned(Tuned, TritonDefault):
    """The same kernel with the fastest correct launch parameters of a sweep, made for each case."""

    # Width of a tile, stages and warps that won for a block size.
    FAVOURITES = {
        16: [(512, 5, 4), (256, 5, 4), (128, 5, 4)],
        32: [(512, 5, 4), (256, 5, 4), (128, 5, 4)],
        64: [(512, 5, 8), (256, 5, 8), (256, 4, 8)],
        128: [(256, 3, 8), (128, 4, 8), (128, 3, 4)],
    }

    NAMES = ("SPLIT_N", "GROUP_SIZE_ROW", "num_stages", "num_warps")

    def __init__(self, inputs, options):
        super().__init__(inputs, options)
        self.tune(inputs, options)

    def use(self, candidate):
        self.meta = dict(candidate)
        self.pad(self.meta.pop("columns", self.inputs.n))

    def search(self, sweep):
        def named(columns, *values):
            padded = [("columns", columns)] if columns > self.inputs.n else []
            return (*zip(self.NAMES, values), *padded)

        sweep.run(named(*values) for values in self.parameters(self.inputs.block, self.inputs.n))
        # How many rows of blocks are walked together matters less: only for the best.
        for best in map(dict, sweep.best(2)):
            columns = best.get("columns", self.inputs.n)
            sweep.run(
                named(columns, best["SPLIT_N"], rows, best["num_stages"], best["num_warps"])
                for rows in (1, 2, 8, 16)
            )

    @classmethod
    def parameters(cls, block, n):
        """Columns of b, and launch parameters, those that won on other shapes first."""
        default = [(block, 1, 4)]  # what torch takes where its table has no entry
        widths = (256, 128, 512, 64) if n > 256 else (128, 64, 32, 256)
        grid = [
            (width, stages, warps)
            for width in widths
            for stages in (3, 4, 5, 2)
            for warps in (4, 8)
        ]
        for width, stages, warps in cls.FAVOURITES.get(block, []) + default + grid:
            width = max(16, min(width, 1 << (n - 1).bit_length()))
            columns = rounded_up(n, width)
            if block * width > 128 * 32 * warps:  # more than 128 accumulators a thread spill
                continue
            yield columns, columns // width, 4, stages, warps
