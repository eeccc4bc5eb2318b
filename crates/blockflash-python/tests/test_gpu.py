"""What only a GPU can show: graphs, streams, threads, memory, compiled code and a second GPU.

Most tests run for each way to the kernels: `blockflash.attention`, SDPA on blockflash, and a linear
layer with a block-sparse weight. Results are compared bit by bit: kernels sum in one fixed order.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from test_compile import Block
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention

import blockflash
from blockflash import sparse

pytestmark = pytest.mark.gpu

SHAPE = (2, 384, 8, 64)
# 4 x 4 blocks of 64 x 64, of which every third is stored.
BLOCKS = torch.arange(16).view(4, 4) % 3 == 0


@dataclass(frozen=True)
class Case:
    """A function of some bfloat16 tensors."""

    call: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]

    def inputs(self, device: str = "cuda") -> list[Tensor]:
        """Normally distributed operands."""
        return [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in self.shapes]


def sdpa(*by_sequence: Tensor) -> Tensor:
    """The function of torch for tensors `[B, S, H, D]`."""
    by_head = (t.transpose(1, 2) for t in by_sequence)
    return scaled_dot_product_attention(*by_head, is_causal=True).transpose(1, 2)


@pytest.fixture(params=["attention", "padded", "sdpa", "bsr_linear"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    torch.manual_seed(0)
    if request.param == "bsr_linear":
        pattern = sparse.BlockSparsePattern.from_mask(BLOCKS, 64)

        def linear(x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
            return sparse.linear(x, values, pattern, bias, "gelu")

        yield Case(linear, ((96, 256), (pattern.nnz, 64, 64), (256,)))
    elif request.param == "sdpa":
        with blockflash.activate_sdpa():
            yield Case(sdpa, (SHAPE,) * 3)
    else:
        # A head dimension of 59 makes temporary copies.
        shape = SHAPE if request.param == "attention" else (*SHAPE[:3], 59)
        yield Case(lambda q, k, v: blockflash.attention(q, k, v, causal=True), (shape,) * 3)


def same(left: Tensor, right: Tensor) -> Tensor:
    """Whether two results agree bit by bit, as a tensor: asking it would wait for the GPU."""
    return (left.view(torch.int16) == right.view(torch.int16)).all()


def overwritten(case: Case) -> None:
    """Takes the memory that operands had before, and fills it with NaN."""
    for operand in case.inputs() + case.inputs():
        operand.fill_(torch.nan)


def test_a_graph_replays_1000_times(case: Case) -> None:
    inputs = case.inputs()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        case.call(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.call(*inputs)
    right = torch.ones((), dtype=torch.bool, device="cuda")
    memory = set()
    for _ in range(1000):
        for operand in inputs:
            operand.normal_()
        graph.replay()
        right &= same(found, case.call(*inputs))
        memory.add(torch.cuda.memory_allocated())
    assert right.item()
    assert len(memory) == 1


FIRST_USE = """
import blockflash, torch
from torch.nn.functional import scaled_dot_product_attention

def sdpa(q, k, v):
    with blockflash.activate_sdpa():
        return scaled_dot_product_attention(q, k, v, is_causal=True)

# Different kernels, so that each call is the first use of its own.
for head_dim, call in ((64, blockflash.attention), (128, sdpa)):
    inputs = [
        torch.randn(1, 256, 256, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    ]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call(*inputs)
    for _ in range(3):
        for operand in inputs:
            operand.normal_()
        graph.replay()
        assert torch.equal(o, call(*inputs)), call
"""


def test_first_use_inside_a_capture() -> None:
    """In a fresh process, where no kernel is loaded yet."""
    subprocess.run([sys.executable, "-c", FIRST_USE], check=True)


def test_8_threads_with_2_streams_each(case: Case) -> None:
    operands = [[case.inputs() for _ in range(2)] for _ in range(8)]
    expected = [[case.call(*inputs) for inputs in pair] for pair in operands]
    torch.cuda.synchronize()

    def run(thread: int) -> bool:
        streams = [torch.cuda.Stream() for _ in range(2)]
        right = [torch.ones((), dtype=torch.bool, device="cuda") for _ in streams]
        torch.cuda.current_stream().synchronize()
        for _ in range(50):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    right[i] &= same(case.call(*operands[thread][i]), expected[thread][i])
        for stream in streams:
            stream.synchronize()
        return all(flag.item() for flag in right)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(8))) == [True] * 8


def test_operands_are_freed_right_after_the_call(case: Case) -> None:
    """The allocator gives their memory to the next operation of the same stream."""
    inputs = case.inputs()
    expected = case.call(*inputs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        right = torch.ones((), dtype=torch.bool, device="cuda")
        torch.cuda._sleep(20_000_000)  # the calls are queued while their operands are freed
        for _ in range(50):
            o = case.call(*(operand.clone() for operand in inputs))
            overwritten(case)
            right &= same(o, expected)
    side.synchronize()
    assert right.item()


def test_operands_of_another_stream(case: Case) -> None:
    """`record_stream` keeps the memory of operands until a stream that is not theirs is done."""
    inputs = case.inputs()
    expected = case.call(*inputs)
    side = torch.cuda.Stream()
    for _ in range(10):
        copies = [operand.clone() for operand in inputs]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            o = case.call(*copies)
            right = same(o, expected)
        while copies:
            copies.pop().record_stream(side)
        overwritten(case)
        side.synchronize()
        assert right.item()


def test_out_of_memory_is_an_exception_of_torch() -> None:
    """And the call succeeds as soon as there is memory again."""
    q, k, v = torch.randn(3, 1, 65536, 8, 64, device="cuda", dtype=torch.bfloat16)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
    try:
        for options in ({}, {"return_lse": True}):
            with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 64.00 MiB"):
                blockflash.attention(q, k, v, window=(64, 0), **options)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            blockflash.attention_decode(q, k, v)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    o = blockflash.attention(q, k, v, window=(64, 0))
    first = blockflash.attention(q[:, :128], k[:, :128], v[:, :128], window=(64, 0))
    torch.testing.assert_close(o[:, :128], first, rtol=1.6e-2, atol=1.6e-2)


def test_what_is_allocated_natively_finds_what_torch_keeps() -> None:
    """Masks and workspaces are not of torch's allocator, which keeps freed memory from them."""
    script = """
import torch, blockflash
from blockflash import BlockMask

scores = torch.randn(1, 8, 512, 512, device="cuda")
q = torch.randn(1, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
cache = torch.randn(1, 65536, 8, 64, device="cuda", dtype=torch.bfloat16)
sizes = {"seqlens": (32768, 32768), "block": 64}
makers = [
    lambda: BlockMask.top_k(scores, 400, **sizes),
    lambda: BlockMask.causal(**sizes).to("cuda"),
    lambda: BlockMask.from_dense_bool(scores > 0, **sizes),
    lambda: blockflash.attention_decode(q, cache, cache),
]
free, _ = torch.cuda.mem_get_info()
pieces, size = [], 1 << 30
while size >= 1 << 20:
    try:
        pieces.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size //= 2
for maker in makers[:3]:
    try:
        maker()
    except torch.OutOfMemoryError as error:
        assert "out of memory" in str(error), error
    else:
        raise AssertionError("there was memory")
del pieces  # torch keeps it
for maker in makers:
    maker()
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_memory_under_pressure(case: Case) -> None:
    """The allocator has to give cached memory back to the driver between calls."""
    inputs = case.inputs()
    expected = case.call(*inputs)
    torch.cuda.synchronize()
    total, limit = torch.cuda.get_device_properties(0).total_memory, 256 * 2**20
    fraction = (torch.cuda.memory_allocated() + limit) / total
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        side = torch.cuda.Stream()
        for _ in range(10):
            # Cached memory of one stream does not serve the other.
            for stream in (torch.cuda.current_stream(), side):
                stream.wait_stream(torch.cuda.default_stream())
                with torch.cuda.stream(stream):
                    torch.empty(limit // 2, dtype=torch.uint8, device="cuda").fill_(255)
                    right = same(case.call(*inputs), expected)
                stream.synchronize()
                assert right.item()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_autocast(case: Case) -> None:
    inputs = case.inputs()
    expected = case.call(*inputs)
    leaves = [operand.float().requires_grad_() for operand in inputs]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        o = case.call(*leaves)
    assert o.dtype == torch.bfloat16 and same(o, expected).item()
    o.float().square().sum().backward()
    for leaf in leaves:
        assert leaf.grad.dtype == torch.float32
        assert leaf.grad.isfinite().all() and leaf.grad.abs().max() > 0


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The output and all gradients of a model, one after another in float64 on the CPU."""
    model.zero_grad()
    o = run(x)
    o.float().square().sum().backward()
    parts = [o.detach(), *(parameter.grad for parameter in model.parameters())]
    return torch.cat([part.flatten().double().cpu() for part in parts])


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile_for_training(mode: str) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    counters.clear()
    model = nn.Sequential(Block(causal=True), Block()).cuda().bfloat16()
    exact = nn.Sequential(Block(causal=True), Block())
    exact.load_state_dict(model.state_dict())
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    for _ in range(4):  # warm-up, capture, replays
        x = torch.randn(2, 96, 32).bfloat16()
        torch.compiler.cudagraph_mark_step_begin()
        found = gradients(model, compiled, x.cuda())
        expected = gradients(exact, exact, x.float())
        allowed = 2 * (gradients(model, model, x.cuda()) - expected).norm()
        assert (found - expected).norm() <= allowed
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_compile_for_inference(case: Case) -> None:
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(case.call, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            inputs = case.inputs()
            torch.compiler.cudagraph_mark_step_begin()
            assert same(compiled(*inputs), case.call(*inputs)).item()
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_a_second_gpu(case: Case) -> None:
    """The device of the operands decides, whatever the current device is."""
    if torch.cuda.device_count() < 2:
        pytest.skip("there is no second GPU")
    inputs = case.inputs()
    expected = case.call(*inputs)
    for current in (0, 1):
        with torch.cuda.device(current):
            there = [operand.to("cuda:1") for operand in inputs]
            o = case.call(*there)
            assert o.device == there[0].device
            assert same(o.to("cuda:0"), expected).item()
            side = torch.cuda.Stream("cuda:1")
            side.wait_stream(torch.cuda.current_stream("cuda:1"))
            with torch.cuda.stream(side):
                o = case.call(*there)
            side.synchronize()
            assert same(o.to("cuda:0"), expected).item()
    with pytest.raises((ValueError, RuntimeError)):
        case.call(inputs[0], *there[1:])
    there = [operand.requires_grad_() for operand in there]
    case.call(*there).float().sum().backward()
    assert all(operand.grad.device == operand.device for operand in there)
