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
    o: Tensor,
    lse: Tensor | None = None,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_q: int = 0,
    max_k: int = 0,
    left: int = -1,
    right: int = -1,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    block_mask: int = 0,
) -> None: ...
