#!/usr/bin/env python3
"""Competitors of blockflash, measured one window at a time on behalf of `blockflash bench`.

usage: serve.py [--device cuda:0]                    JSON lines on stdin and stdout, see README.md
in the parent folder
       serve.py --self-test [--peer NAME] [--device cuda:0]   every competitor once on small
       cases, tracebacks on stderr

The process stays up for a whole run and is idle between two windows, so that ours and the
competitors take turns on one GPU.
"""

import argparse
import importlib
import json
import math
import os
import signal
import sys
import traceback

# Operation -> competitor -> (module beside this file, class in it).
PEERS = {
    "attention_fwd": {
        "torch_sdpa_flash": ("attention", "SdpaFlash"),
        "torch_sdpa_cudnn": ("attention", "SdpaCudnn"),
        "torch_sdpa_efficient": ("attention", "SdpaEfficient"),
        "flash_attention_3": ("flash3", "FlashAttention3"),
        "triton_flash": ("triton_attention", "TritonFlash"),
        "flash_attention_4": ("flash4", "Flash4Forward"),
    },
    "attention_packed": {
        "flash_attention_3": ("packed", "Flash3"),
        "torch_varlen": ("packed", "TorchVarlen"),
    },
    "attention_e4m3": {
        "cudnn_frontend": ("codes", "Cudnn"),
    },
    "block_sparse_fwd": {
        "flex_attention": ("flex", "FlexAttention"),
        "flex_attention_tuned": ("flex", "FlexAttentionTuned"),
        "fa4": ("flash4", "Flash4BlockSparseForward"),
        "flashinfer_vsa": ("vsa", "FlashInferVsa"),
    },
    "attention_bwd": {
        "fa3": ("backward", "Flash3"),
        "fa3_deterministic": ("backward", "Flash3Deterministic"),
        "fa4": ("flash4", "Flash4"),
        "fa4_deterministic": ("flash4", "Flash4Deterministic"),
        "cudnn": ("backward", "SdpaCudnn"),
        "fa2": ("backward", "SdpaFlash"),
        "fa2_deterministic": ("backward", "SdpaFlashDeterministic"),
    },
    "block_sparse_bwd": {
        "fa4": ("flash4", "Flash4BlockSparse"),
        "fa4_deterministic": ("flash4", "Flash4BlockSparseDeterministic"),
        "flex": ("backward", "Flex"),
    },
    "masks_fwd": {
        "flex_attention": ("masks", "FlexAttention"),
        "flex_attention_tuned": ("masks", "FlexAttentionTuned"),
    },
    "masks_bwd": {
        "flex": ("masks", "Flex"),
    },
    "attention_decode": {
        "cudnn": ("decode", "SdpaCudnn"),
        "fa2": ("decode", "SdpaFlash"),
        "fa3": ("decode", "Flash3"),
        "flashinfer": ("decode", "FlashInfer"),
    },
    "mla_decode": {
        "flash_mla": ("mla", "FlashMla"),
        "flashinfer_mla": ("mla", "FlashInferMla"),
        "triton_mla": ("mla", "TritonMla"),
    },
    "attention_index": {
        "vllm_msa": ("index_blocks", "VllmMsa"),
        "sglang_msa": ("index_blocks", "SglangMsa"),
        "nsa": ("index_blocks", "Nsa"),
        "fla_nsa": ("index_blocks", "Fla"),
    },
    "attention_index_shared": {
        "vllm_qsa": ("index_blocks", "VllmQsa"),
        "sglang_qsa": ("index_blocks", "SglangQsa"),
    },
    "attention_index_latent": {
        "flash_mla_sparse": ("index_latent", "FlashMlaSparse"),
        "sglang_dsa": ("index_latent", "SglangDsaDecode"),
        "sglang_dsa_prefill": ("index_latent", "SglangDsaPrefill"),
        "vllm_dsa": ("index_latent", "VllmXpuDsa"),
    },
    "index_choice": {
        "vllm_msa_index": ("index_choice", "VllmMsa"),
        "vllm_msa_index_decode": ("index_choice", "VllmMsaDecode"),
        "sglang_msa_index": ("index_choice", "SglangMsa"),
        "sglang_msa_index_decode": ("index_choice", "SglangMsaDecode"),
    },
    "index_choice_weighted": {
        "vllm_dsa_index_e4m3": ("index_choice", "VllmDsaCodes"),
        "torch_index": ("index_choice", "TorchDsa"),
    },
    "bsr_matmul": {
        "torch_triton_bsr": ("bsr", "TritonDefault"),
        "torch_triton_bsr_tuned": ("bsr", "TritonTuned"),
        "cusparse_blocked_ell": ("bsr_cusparse", "CusparseBlockedEll"),
        "cusparse_bsr": ("bsr_cusparse", "CusparseBsr"),
        "torch_matmul_dense": ("bsr", "MatmulDense"),
        "torch_matmul_random": ("bsr", "MatmulRandom"),
    },
}
# No competitors but references: they do another job (a dense product), so no ratio is taken against
# them.
REFERENCES = ["torch_matmul_dense", "torch_matmul_random"]


def one_line(error):
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400]


def load(op, name):
    """The class of a competitor (a measure.Call)."""
    module, cls = PEERS[op][name]
    return getattr(importlib.import_module(module), cls)


class Server:
    """Inputs of one case, and the competitors that are prepared for it."""

    def __init__(self, device):
        self.device_name = device
        self.device = None
        self.inputs = None
        self.case = None
        self.prepared = {}
        self.scratch = None  # what a cold cache is overwritten with

    def hello(self, _request):
        answer = {
            "ok": True,
            "python": sys.version.split()[0],
            "references": REFERENCES,
            "deterministic": [],
            "peers": {},
            "absent": {},
        }
        try:
            import torch

            self.device = torch.device(self.device_name)
            answer["torch"] = torch.__version__
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
                answer["device"] = torch.cuda.get_device_name(self.device)
                answer["cudnn"] = torch.backends.cudnn.version()
            missing = None
        except ImportError as error:
            missing = f"python3 has no torch ({error})"
        except Exception as error:  # torch without a usable GPU
            missing = "torch cannot use the device: " + one_line(error)
        for op, peers in PEERS.items():
            answer["peers"][op] = []
            for name in peers:
                reason = missing
                if reason is None:
                    try:
                        peer = load(op, name)
                        peer.available(self.device)
                        if peer.deterministic:
                            answer["deterministic"].append(name)
                    except Exception as error:
                        if type(error).__name__ != "Absent":
                            traceback.print_exc()
                        reason = str(error) or one_line(error)
                if reason is None:
                    answer["peers"][op].append(name)
                else:
                    answer["absent"][name] = reason
        return answer

    def prepare(self, request):
        """Builds the inputs of the case (once), makes the competitor's call, captures it, and
        verifies what the replay wrote."""
        case, name = request["case"], request["peer"]
        op = case["op"]
        peer, flush = load(op, name), self.flush(request)
        self.prepared.pop(name, None)  # its memory may be needed again
        if self.case != case:
            self.drop({})
            self.inputs = peer.Inputs(case, self.device)
            self.case = case
        if request.get("cache") == "rotated":
            if not hasattr(self.inputs, "rotate"):
                raise ValueError("launches take copies in turn only of a cache of keys and values")
            self.inputs.rotate(request.get("flush_bytes", 0))
        if case.get("fresh_bytes", 0) > 0 and not getattr(peer, "takes_fresh", False):
            raise ValueError(
                "this competitor multiplies one and the same a, which may be in a cache"
            )
        call, capture = self.captured(peer, request, flush)
        call.poison()
        capture.replay()
        rel_err = call.relative_error(self.inputs)
        if call.deterministic and not call.repeats(capture):
            raise RuntimeError(
                "another launch gave other bits, but this competitor is deterministic"
            )
        self.prepared[name] = (capture, call)
        self.give_back()
        limit = self.inputs.tolerance
        return {
            "ok": True,
            "verified": bool(rel_err <= limit),  # false for NaN
            "rel_err": rel_err
            if math.isfinite(rel_err)
            else None,  # JSON has neither NaN nor infinity
            "tolerance": limit,
            "settings": call.settings,
            "launches": capture.launches,
        }

    def captured(self, peer, request, flush):
        """The competitor's call and its graph. The first backward pass of a process cannot be
        captured: torch makes its stream and the default one wait for each other. A second call
        can."""
        import measure

        limits = request.get("graph_us", 3000), request.get("max_launches", 512)
        for attempt in (1, 2):
            call = peer(self.inputs, request.get("options", {}))
            try:
                return call, measure.Capture(call.run, self.device, *limits, flush)
            except RuntimeError as error:
                if attempt == 2 or "capture" not in str(error):
                    raise
                traceback.print_exc()

    def flush(self, request):
        """A tensor to overwrite before each launch if the L2 cache shall be cold, else None."""
        cache, size = request.get("cache", "warm"), request.get("flush_bytes", 0)
        if cache in ("warm", "rotated"):
            return None
        if cache != "cold" or size <= 0:
            raise ValueError(
                f"cache {cache!r} with flush_bytes {size}: it is warm, rotated, or cold with "
                f"bytes to overwrite"
            )
        if self.scratch is None or self.scratch.numel() < size:
            import torch

            self.scratch = None  # before the larger one is allocated
            self.scratch = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self.scratch[:size]

    def give_back(self):
        """Memory that torch holds but does not need: ours runs on the same GPU."""
        if self.device is not None and self.device.type == "cuda":
            import torch

            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def window(self, request):
        capture, _ = self.prepared[request["peer"]]
        return {"ok": True, **capture.window(request["ms"])}

    def drop(self, _request):
        self.prepared.clear()
        self.inputs = self.case = None
        import gc

        gc.collect()
        self.give_back()
        return {"ok": True}

    def answer(self, request):
        """One request, one answer; `fatal` says that the device context is lost and the
        process ends."""
        try:
            op = request.get("op")
            if op not in ("hello", "prepare", "window", "drop"):
                return {"error": f"unknown op {op!r}"}
            return getattr(self, op)(request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": one_line(error)}
            self.prepared.pop(request.get("peer"), None)
            try:
                if self.device is not None and self.device.type == "cuda":
                    import torch

                    torch.cuda.synchronize()
            except Exception as lost:
                answer["fatal"] = one_line(lost)
            return answer


def serve(device):
    # Ctrl-C goes to the whole process group: whoever reads the answers ends this process by closing
    # stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Libraries that print must not break the protocol: they get stderr as their stdout.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    server = Server(device)
    for line in sys.stdin:
        if not line.strip():
            continue
        try:
            request = json.loads(line)
        except ValueError as error:
            request, answer = {}, {"error": one_line(error)}
        else:
            answer = server.answer(request)
        try:
            channel.write(json.dumps(answer) + "\n")
            channel.flush()
        except BrokenPipeError:
            return 0
        if "fatal" in answer:
            return 1
    return 0


def self_test(device, only):
    """Each competitor on all cases of its operation."""
    from cases import cases, refused

    server = Server(device)
    hello = server.hello({})
    print(json.dumps(hello, indent=1), flush=True)
    if not any(hello["peers"].values()):
        print("error: no competitor can run here", file=sys.stderr)
        return 2
    failed = 0
    for case, cache in cases():
        shape = " ".join(str(v) for k, v in {**case, **cache}.items() if k not in ("op", "seed"))
        for name in hello["peers"][case["op"]]:
            if only and only not in name:
                continue
            request = {
                "op": "prepare",
                "case": case,
                "peer": name,
                "options": {"tune_seconds": 3},
                **cache,
            }
            answer = server.answer(request)
            if answer.get("ok"):
                answer.update(server.answer({"op": "window", "peer": name, "ms": 20}))
            reason = refused(case, name)
            good = (
                ("error" in answer)
                if reason
                else (answer.get("verified", False) and "error" not in answer)
            )
            failed += not good
            mark = "ok   " if good else "ERROR"
            print(
                mark,
                case["op"],
                shape,
                name,
                f"({reason})" if reason else "",
                json.dumps(answer),
                flush=True,
            )
            if "fatal" in answer:
                print("ERROR the device context is lost, the rest was not run", flush=True)
                return 1
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--device", default="cuda:0", help="cuda:N, or cpu to try the protocol without a GPU"
    )
    parser.add_argument(
        "--self-test", action="store_true", help="run every competitor once on small cases"
    )
    parser.add_argument("--peer", help="self-test only competitors whose name contains this")
    arguments = parser.parse_args()
    return (
        self_test(arguments.device, arguments.peer)
        if arguments.self_test
        else serve(arguments.device)
    )


if __name__ == "__main__":
    sys.exit(main())
