from typing import Any

from torch import Tensor

class Unsupported(NotImplementedError): ...
class Misaligned(ValueError): ...
class DeviceError(RuntimeError): ...

def describe() -> dict[str, Any]: ...
def gpu_problem() -> str | None: ...
def register_kernels(namespace: str, /) -> bool: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_q: int,
    max_k: int,
    left: int,
    right: int,
    top_left: bool,
    scale: float | None,
    softcap: float,
    block_mask: int,
    o: Tensor,
    lse: Tensor | None,
    /,
) -> None: ...
