"""Competitors of the block-sparse matmul from cuSPARSE."""

import torch

from bsr import Matmul
from measure import needs_cuda
from tune import Tuned


class Cusparse(Matmul):
    @classmethod
    def available(cls, device):
        needs_cuda(device)
        from cusparse import Library

        Library.get()

    def run(self):
        self.spmm.run()


class CusparseBlockedEll(Cusparse):
    """Blocked-ELL, whose blocks are padded to the longest row."""

    layouts = ["matrix", "blocks"]

    def __init__(self, inputs, _options):
        from cusparse import BlockedEllSpmm

        columns, tiles = inputs.blocked_ell()
        rows, slots, b, _ = tiles.shape
        self.out, errors = inputs.empty_output(), {}
        # The manual leaves open whether values are one row-major [m, slots·b] matrix or block after
        # block: the first layout whose result is right is taken, and tried first from then on.
        for layout in list(self.layouts):
            values = (
                tiles
                if layout == "blocks"
                else tiles.transpose(1, 2).reshape(rows * b, slots * b).contiguous()
            )
            self.spmm = BlockedEllSpmm(columns, values, b, inputs.b, self.out)
            self.poison()
            self.run()
            torch.cuda.synchronize()
            errors[layout] = inputs.relative_error(self.out)
            if errors[layout] <= inputs.tolerance:
                CusparseBlockedEll.layouts = [layout]
                self.settings = (
                    f"CUSPARSE_SPMM_BLOCKED_ELL_ALG1, row-major b and c, {slots} blocks per row"
                )
                padding = rows * slots - inputs.nnz
                if padding:
                    self.settings += f", {padding} of {rows * slots} are padding"
                return
        raise RuntimeError(f"wrong result in every layout of the values: relative errors {errors}")


class CusparseBsr(Tuned, Cusparse):
    """BSR, in whatever layout of the blocks is the fastest."""

    def __init__(self, inputs, options):
        self.tune(inputs, options)

    def search(self, sweep):
        # Order of a block's elements, order of b and c: ours are row-major, and other ones only
        # tried if need be.
        sweep.run([("row", "row"), ("column", "row")])
        if not sweep.us:
            sweep.run([("row", "column"), ("column", "column")])

    def use(self, layout):
        from cusparse import BsrSpmm

        inputs, (block_order, order) = self.inputs, layout
        values = (
            inputs.values if block_order == "row" else inputs.values.transpose(1, 2).contiguous()
        )
        b, self.out = inputs.b, inputs.empty_output()
        if order == "column":
            b, self.out = b.T.contiguous().T, self.out.view(inputs.n, inputs.m).T
        row_ptr, col_idx = inputs.row_ptr.to(torch.int32), inputs.col_idx.to(torch.int32)
        self.spmm = BsrSpmm(row_ptr, col_idx, values, block_order, b, self.out)

    def describe(self, layout):
        return "CUSPARSE_SPMM_BSR_ALG1, {}-major blocks, {}-major b and c".format(*layout)
