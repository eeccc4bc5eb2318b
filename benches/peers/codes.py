"""The competitor of attention forward in e4m3: cuDNN by nvidia-cudnn-frontend. Inputs are N(0, 1)
rounded to e4m3, without scales, as ours are."""

import torch

import attention
from measure import Absent, Call, needs_cuda

CODE = torch.float8_e4m3fn
# Relative error that probabilities of three fraction bits stay under; it grows with the number of
# keys where sums stay in the tensor cores.
TOLERANCE = 0.08
# Probabilities are at most 1: with this factor they take up most of e4m3.
UNIT = 256.0


class Inputs(attention.Inputs):
    """Codes of q, k and v; `q`, `k` and `v` are the same numbers in f32."""

    def __init__(self, case, device):
        super().__init__(dict(case, dtype="f32"), device)
        self.codes = tuple(t.to(CODE) for t in (self.q, self.k, self.v))
        self.q, self.k, self.v = (codes.float() for codes in self.codes)
        self.tolerance = TOLERANCE


class Cudnn(Call):
    """cuDNN's graph of one node. The output is bf16, or e4m3 where cuDNN takes nothing else."""

    Inputs = Inputs

    @classmethod
    def available(cls, device):
        needs_cuda(device)
        if torch.cuda.get_device_capability(device)[0] < 9:
            raise Absent("cuDNN has attention in e4m3 from Hopper on")
        try:
            import cudnn  # noqa: F401
        except ImportError as error:
            raise Absent("python3 has no nvidia-cudnn-frontend") from error

    def __init__(self, inputs, _options):
        import cudnn

        inputs.without_window()
        if inputs.causal and inputs.seqlen_q != inputs.seqlen_kv:
            raise ValueError("the causal diagonal of this graph begins at the first key")
        self.cudnn, self.handle = cudnn, cudnn.create_handle()
        kinds = ((cudnn.data_type.BFLOAT16, torch.bfloat16), (cudnn.data_type.FP8_E4M3, CODE))
        refusals = []
        for kind, dtype in kinds:
            try:
                self.build(inputs, kind, dtype)
                self.settings = f"output in {str(dtype).removeprefix('torch.')}"
                return
            except Exception as error:  # of any type, by the version of cuDNN
                refusals.append(str(error))
        raise RuntimeError("; ".join(refusals))

    def build(self, inputs, kind, dtype):
        data_type, device = self.cudnn.data_type, inputs.device
        graph = self.cudnn.pygraph(
            io_data_type=data_type.FP8_E4M3,
            intermediate_data_type=data_type.FLOAT,
            compute_data_type=data_type.FLOAT,
        )

        def layout(tensor):  # [batch, seqlen, heads, head_dim] with heads before rows
            b, s, h, d = tensor.shape
            return {"dim": (b, h, s, d), "stride": (s * h * d, d, h * d, 1)}

        one = {"dim": (1, 1, 1, 1), "stride": (1, 1, 1, 1), "data_type": data_type.FLOAT}
        q, k, v = (
            graph.tensor(name=name, **layout(codes), data_type=data_type.FP8_E4M3)
            for name, codes in zip("qkv", inputs.codes, strict=True)
        )
        factors = {
            name: graph.tensor(name=name, **one)
            for name in ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        }
        o, _, largest_s, largest_o = graph.sdpa_fp8(
            q=q,
            k=k,
            v=v,
            **factors,
            generate_stats=False,
            attn_scale=inputs.scale,
            use_causal_mask=inputs.causal,
        )
        self.out = torch.empty(inputs.q.shape, dtype=dtype, device=device)
        shape = layout(self.out)
        o.set_output(True).set_dim(shape["dim"]).set_stride(shape["stride"]).set_data_type(kind)
        for largest in (largest_s, largest_o):
            largest.set_output(True).set_dim(one["dim"]).set_stride(one["stride"])
            largest.set_data_type(data_type.FLOAT)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self.cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()

        def number(value):
            return torch.full((1, 1, 1, 1), value, device=device)

        values = dict.fromkeys(factors, 1.0) | {"descale_s": 1 / UNIT, "scale_s": UNIT}
        self.graph, self.memory = (
            graph,
            {
                **{
                    node: _bytes(codes) for node, codes in zip((q, k, v), inputs.codes, strict=True)
                },
                **{node: number(values[name]) for name, node in factors.items()},
                o: _bytes(self.out),
                largest_s: number(0.0),
                largest_o: number(0.0),
            },
        )
        size = max(graph.get_workspace_size(), 1)
        self.workspace = torch.empty(size, dtype=torch.uint8, device=device)

    def run(self):
        stream = torch.cuda.current_stream().cuda_stream
        self.cudnn.set_stream(handle=self.handle, stream=stream)
        self.graph.execute(self.memory, self.workspace, handle=self.handle)

    def output(self):
        return self.out.float() if self.out.dtype == CODE else self.out

    def poison(self):
        self.out.view(torch.uint8).fill_(0xFF)  # NaN in both types


def _bytes(tensor):
    """What is passed by its address alone."""
    return tensor.view(torch.uint8) if tensor.dtype == CODE else tensor
