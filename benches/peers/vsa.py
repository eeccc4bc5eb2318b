"""The competitor `flashinfer_vsa` of block-sparse attention forward: FlashInfer's kernel for video
sparse attention on Hopper, blocks of 64 × 64 at head_dim 128."""

import torch

from block_sparse import Inputs
from measure import Absent, Call, needs_cuda

BLOCK = 64


class FlashInferVsa(Call):
    """Planned beforehand on the host, outside its time. It compiles at the first run."""

    Inputs = Inputs

    @classmethod
    def available(cls, device):
        needs_cuda(device)
        try:
            import flashinfer.cake_vsa_sm90  # noqa: F401
        except ImportError as error:
            raise Absent(f"python3 has no flashinfer with VSA for Hopper ({error})") from error
        if torch.cuda.get_device_capability(device) != (9, 0):
            raise Absent("needs a GPU of compute capability 9.0")

    def __init__(self, inputs, _options):
        import flashinfer

        if inputs.batch != 1 or inputs.causal:
            raise ValueError("this kernel takes one sequence without a causal mask")
        if (inputs.block_q, inputs.block_kv) != (BLOCK, BLOCK):
            raise ValueError(f"this kernel takes blocks of {BLOCK} x {BLOCK}")
        if inputs.seqlen_q % BLOCK or inputs.seqlen_kv % BLOCK:
            raise ValueError("this kernel takes whole blocks")
        heads, heads_kv, device = inputs.heads_q, inputs.heads_kv, inputs.device
        self.q, self.k, self.v = (
            t[0].transpose(0, 1).contiguous() for t in (inputs.q, inputs.k, inputs.v)
        )
        self.out = torch.empty_like(self.q)
        chosen = torch.zeros(heads * inputs.q_blocks, inputs.kv_blocks, dtype=torch.bool)
        chosen[inputs.row, inputs.col_idx] = True
        lists = chosen.view(heads_kv, heads // heads_kv, inputs.q_blocks, inputs.kv_blocks)
        if not torch.equal(lists, lists[:, :1].expand_as(lists)):
            raise ValueError("this kernel takes one list for all heads that share keys")
        sizes = (torch.full((heads_kv, n), BLOCK) for n in (inputs.q_blocks, inputs.kv_blocks))
        scratch = torch.zeros(1, dtype=torch.uint8, device=device)
        self.wrapper = flashinfer.VariableBlockSparseAttentionWrapper(scratch, backend="cake")
        self.wrapper.plan(
            lists[:, 0].contiguous(),
            *sizes,
            heads,
            heads_kv,
            inputs.head_dim,
            sm_scale=inputs.scale,
            q_data_type=inputs.dtype,
        )
        self.settings = f"flashinfer {flashinfer.__version__}, planned beforehand"
        self.run()  # compiles before anything is captured

    def run(self):
        self.wrapper.run(self.q, self.k, self.v, out=self.out.view(-1, 1, self.out.shape[-1]))

    def output(self):
        return self.out.transpose(0, 1)[None]
