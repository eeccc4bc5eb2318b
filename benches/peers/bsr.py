"""Rivals of the block-sparse (BSR) matmul c[m, n] = a[m, k]·b[k, n], all on the same pattern of blocks."""
import math
import time

import torch

from measure import DTYPES, TOLERANCE, Absent, Call, Capture, needs_cuda, relative


class Inputs:
    """Block pattern of the case, values and b ~ N(0, 1), and the dense f32 reference."""

    def __init__(self, case, device):
        generator = torch.Generator(device=device).manual_seed(case.get("seed", 0))
        self.dtype, self.device, self.block = DTYPES[case["dtype"]], device, case["block_size"]
        self.m, self.n, self.k = case["m"], case["n"], case["k"]
        self.tolerance = TOLERANCE[case["dtype"]]
        if self.m % self.block or self.k % self.block:
            raise ValueError(f"m {self.m} and k {self.k} must be multiples of the block size {self.block}")
        self.row_ptr, self.col_idx = (t.to(device) for t in self.pattern(case))
        self.nnz = self.col_idx.numel()
        self.block_row = torch.repeat_interleave(torch.arange(self.m // self.block, device=device), self.row_ptr.diff())

        def draw(*shape):
            return torch.randn(shape, device=device, dtype=torch.float32, generator=generator).to(self.dtype)

        self.values = draw(self.nnz, self.block, self.block)
        self.b = draw(self.k, self.n)
        tf32 = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        self.reference = self.dense().float() @ self.b.float()
        torch.backends.cuda.matmul.allow_tf32 = tf32

    def pattern(self, case):
        """int64 row_ptr and col_idx: the .npy files that `blockflash bench` wrote, else `blocks_per_row` drawn here."""
        if "col_idx" in case:
            import numpy

            return tuple(torch.from_numpy(numpy.load(case[name]).astype("int64")) for name in ("row_ptr", "col_idx"))
        rows, columns, each = self.m // self.block, self.k // self.block, case["blocks_per_row"]
        draw = torch.rand(rows, columns, generator=torch.Generator().manual_seed(case.get("seed", 0)))
        return torch.arange(rows + 1) * each, draw.topk(each, dim=1).indices.sort(dim=1).values.flatten()

    def dense(self):
        """a as a dense [m, k] matrix."""
        rows, columns, b = self.m // self.block, self.k // self.block, self.block
        tiles = torch.zeros(rows, columns, b, b, device=self.device, dtype=self.dtype)
        tiles[self.block_row, self.col_idx] = self.values
        return tiles.transpose(1, 2).reshape(self.m, self.k)

    def blocked_ell(self):
        """int32 columns [block rows, slots] with -1 for no block, and tiles [block rows, slots, block, block]."""
        rows, slots = self.m // self.block, int(self.row_ptr.diff().max())
        slot = torch.arange(self.nnz, device=self.device) - self.row_ptr[self.block_row]
        columns = torch.full((rows, slots), -1, dtype=torch.int32, device=self.device)
        columns[self.block_row, slot] = self.col_idx.to(torch.int32)
        tiles = torch.zeros(rows, slots, self.block, self.block, device=self.device, dtype=self.dtype)
        tiles[self.block_row, slot] = self.values
        return columns, tiles

    def empty_output(self):
        return torch.empty(self.m, self.n, device=self.device, dtype=self.dtype)

    def relative_error(self, out):
        return relative(out, self.reference)


class Matmul(Call):
    """A rival that writes into its own `out`."""

    Inputs = Inputs

    def output(self):
        return self.out


class MatmulDense(Matmul):
    """The dense product over a with its zeros: a mark to beat, not a rival."""

    def __init__(self, inputs, _options):
        self.a, self.b, self.out = inputs.dense(), inputs.b, inputs.empty_output()

    def run(self):
        torch.matmul(self.a, self.b, out=self.out)


class TritonDefault(Matmul):
    """torch.sparse's Triton kernel as a user gets it."""

    meta = None

    @classmethod
    def available(cls, device):
        needs_cuda(device)
        try:
            import triton  # noqa: F401
        except ImportError as error:
            raise Absent("python3 has no triton") from error

    def __init__(self, inputs, _options):
        from torch.sparse._triton_ops import bsr_dense_addmm

        self.addmm, self.b, self.out = bsr_dense_addmm, inputs.b, inputs.empty_output()
        self.a = torch.sparse_bsr_tensor(inputs.row_ptr, inputs.col_idx, inputs.values, size=(inputs.m, inputs.k))

    def run(self):
        self.addmm(self.out, self.a, self.b, beta=0, alpha=1, out=self.out, meta=self.meta)


class TritonTuned(TritonDefault):
    """The same kernel with the fastest correct launch parameters of a sweep, made for each case."""

    def __init__(self, inputs, options):
        super().__init__(inputs, options)
        limit, start, tried, failed = options.get("tune_seconds", 60), time.monotonic(), 0, 0
        best_us, best = math.inf, None
        for meta in self.sweep(inputs):
            if best is not None and time.monotonic() - start > limit:
                break
            tried += 1
            try:
                us = self.quick_time(inputs, meta)
            except Exception as error:
                # Triton refuses tiles that do not fit into shared memory; a broken context is not ours to hide.
                torch.cuda.synchronize()
                failed, last_error = failed + 1, str(error)  # the exception itself would keep tensors alive
                continue
            if us < best_us:
                best_us, best = us, meta
        if best is None:
            raise RuntimeError(f"none of {tried} launch parameters ran: {last_error}")
        self.meta = best
        self.settings = "SPLIT_N={SPLIT_N} GROUP_SIZE_ROW={GROUP_SIZE_ROW} num_stages={num_stages} num_warps={num_warps}".format(**best)
        self.settings += f", best of {tried - failed}"

    @staticmethod
    def sweep(inputs):
        """Launch parameters, those that won on other shapes first."""
        block, n = inputs.block, inputs.n
        favourites = {
            16: [(512, 5, 4), (256, 5, 4), (128, 5, 4)],
            32: [(512, 5, 4), (256, 5, 4), (128, 5, 4)],
            64: [(512, 5, 8), (256, 5, 8), (256, 4, 8)],
            128: [(256, 3, 8), (128, 4, 8), (128, 3, 4)],
        }.get(block, [])
        grid = [(tile, stages, warps) for tile in (256, 128, 512, 64) for stages in (3, 4, 5, 2) for warps in (4, 8)]
        seen = set()
        default = [(block, 1, 4)]  # what torch takes where its table has no entry
        for tile, stages, warps in favourites + default + grid:
            tile = min(tile, n)
            if n % tile or (tile, stages, warps) in seen or tile < 16:
                continue
            if block * tile > 128 * 32 * warps:  # more than 128 accumulators a thread spill
                continue
            seen.add((tile, stages, warps))
            yield dict(SPLIT_N=n // tile, GROUP_SIZE_ROW=4, num_stages=stages, num_warps=warps)

    def quick_time(self, inputs, meta):
        """Microseconds of a launch in a short graph; wrong output is an error."""
        self.meta = meta
        self.poison()
        self.run()
        torch.cuda.synchronize()
        rel_err = inputs.relative_error(self.out)
        if not rel_err <= inputs.tolerance:
            raise RuntimeError(f"wrong result with {meta}: relative error {rel_err}")
        return Capture(self.run, inputs.device, graph_us=500, max_launches=32).window(5)["us"]


class CusparseBlockedEll(Matmul):
    """cuSPARSE SpMM, the format whose blocks are padded to the longest row."""

    layouts = ["matrix", "blocks"]

    @classmethod
    def available(cls, device):
        needs_cuda(device)
        from cusparse import Library

        Library.get()

    def __init__(self, inputs, _options):
        from cusparse import BlockedEllSpmm

        columns, tiles = inputs.blocked_ell()
        rows, slots, b, _ = tiles.shape
        self.out, errors = inputs.empty_output(), {}
        # The manual leaves open whether values are one row-major [m, slots·b] matrix or block after block: the first
        # layout whose result is right is taken, and tried first from then on.
        for layout in list(self.layouts):
            values = tiles if layout == "blocks" else tiles.transpose(1, 2).reshape(rows * b, slots * b).contiguous()
            self.spmm = BlockedEllSpmm(columns, values, b, inputs.b, self.out)
            self.poison()
            self.run()
            torch.cuda.synchronize()
            errors[layout] = inputs.relative_error(self.out)
            if errors[layout] <= inputs.tolerance:
                CusparseBlockedEll.layouts = [layout]
                self.settings = f"CUSPARSE_SPMM_BLOCKED_ELL_ALG1, row-major b and c, {slots} blocks per row"
                return
        raise RuntimeError(f"wrong result in every layout of the values: relative errors {errors}")

    def run(self):
        self.spmm.run()
