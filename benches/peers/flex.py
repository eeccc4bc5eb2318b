"""Competitors of block-sparse attention forward: torch's FlexAttention over lists of blocks."""

import torch
from torch.nn.attention import flex_attention as flex

from block_sparse import Inputs as BlockSparseInputs
from measure import Call, needs_cuda, needs_triton
from tune import Tuned

# Tiles and launch parameters: those that torch takes itself first, then those that may beat them.
OPTIONS = {
    64: [
        (128, 128, 4, 3),
        (128, 64, 4, 3),
        (64, 64, 4, 3),
        (128, 128, 8, 2),
        (64, 128, 4, 3),
        (128, 64, 8, 3),
        (64, 64, 4, 2),
    ],
    128: [
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (64, 64, 4, 3),
        (64, 64, 4, 2),
        (128, 64, 8, 2),
        (64, 128, 4, 2),
        (128, 64, 4, 3),
    ],
    256: [(64, 32, 4, 3), (128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2), (64, 32, 4, 2)],
}
NAMES = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")


def fresh_compiler():
    """Forgets compiled kernels."""
    import torch._dynamo
    import torch._inductor.config

    torch._dynamo.reset()
    torch._inductor.config.compile_threads = 1  # no pool of processes that outlives this one
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 4096)


class Inputs(BlockSparseInputs):
    """A case, whose compiled kernels go with it: each shape compiles anew, and torch stops at a
    number of them."""

    def __init__(self, case, device):
        super().__init__(case, device)
        fresh_compiler()


class FlexAttention(Call):
    """With torch's own choice of tiles, as far as they fit into the blocks. Its output is
    allocated by torch."""

    Inputs = Inputs

    @classmethod
    def available(cls, device):
        if device.type == "cuda":
            needs_triton()

    def __init__(self, inputs, options):
        self.inputs, self.out, self.kernel_options = inputs, None, None
        self.q, self.k, self.v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
        # A mask is evaluated only in the blocks that the diagonal cuts; the slow path of a CPU asks
        # for all pairs.
        mask_mod = inputs.before() if inputs.causal else None
        crossed = inputs.crossed()
        self.block_mask = flex.BlockMask.from_kv_blocks(
            *(t[None] for t in (*inputs.blocks(crossed), *inputs.blocks(~crossed))),
            BLOCK_SIZE=(inputs.block_q, inputs.block_kv),
            mask_mod=mask_mod if inputs.q.is_cuda else inputs.visible(),
            seq_lengths=(inputs.seqlen_q, inputs.seqlen_kv),
        )
        self.attend = flex.flex_attention
        if inputs.q.is_cuda:
            self.attend = torch.compile(flex.flex_attention, dynamic=False, fullgraph=True)
        self.choose(options)

    def choose(self, _options):
        """The first run, which compiles."""
        try:
            self.run()
        except Exception as error:
            if "divisible by BLOCK" not in str(error):
                raise
            self.kernel_options = dict(
                BLOCK_M=min(64, self.inputs.block_q), BLOCK_N=min(64, self.inputs.block_kv)
            )
            self.settings = (
                "BLOCK_M={BLOCK_M} BLOCK_N={BLOCK_N}, as torch's own do not fit into the blocks"
            ).format(**self.kernel_options)
            self.run()

    def run(self):
        with torch.set_grad_enabled(self.q.requires_grad):
            self.out = self.attend(
                self.q,
                self.k,
                self.v,
                block_mask=self.block_mask,
                enable_gqa=self.inputs.heads_q != self.inputs.heads_kv,
                kernel_options=self.kernel_options,
            )

    def output(self):
        return self.out.transpose(1, 2)


class FlexAttentionTuned(Tuned, FlexAttention):
    """With the fastest options of a sweep, made for each case."""

    @classmethod
    def available(cls, device):
        needs_cuda(device)
        needs_triton()

    def choose(self, options):
        self.tune(self.inputs, options)

    def search(self, sweep):
        inputs = self.inputs
        fitting = [
            tuple(zip(NAMES, values))
            for values in OPTIONS.get(inputs.head_dim, OPTIONS[128])
            if inputs.block_q % values[0] == 0 and inputs.block_kv % values[1] == 0
        ]
        extras = [("PRESCALE_QK", True)]
        if inputs.row_length.min() > 0:
            extras.append(("ROWS_GUARANTEED_SAFE", True))
        sweep.run(fitting[:3])
        for best in sweep.best():
            sweep.run([(*best, *extras), (*best, *extras, ("USE_TMA", True))])
        sweep.run((*candidate, *extras) for candidate in fitting)
        for best in sweep.best(2):
            sweep.run([best if ("USE_TMA", True) in best else (*best, ("USE_TMA", True))])

    def use(self, candidate):
        self.kernel_options = dict(candidate)
        self.run()  # compiles before anything is captured
