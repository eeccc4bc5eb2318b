"""What operators give without computing: for tracers, and for tensors of the device meta."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def register_fake(name: str, fake: Callable[..., Any], *, lib: torch.library.Library) -> None:
    """Registers what an operator gives without computing.

    A single tensor on meta makes torch take the call for such a one, and it would give memory that
    nobody has written.
    """
    space, _, short = name.partition("::")

    @wraps(fake)
    def checked(*arguments: Any, **options: Any) -> Any:
        tensors = [t for t in (*arguments, *options.values()) if isinstance(t, Tensor)]
        if len({t.device.type == "meta" for t in tensors}) > 1:
            packet = getattr(getattr(torch.ops, space), short.partition(".")[0])
            operator = getattr(packet, short.partition(".")[2] or "default")
            names = [argument.name for argument in operator._schema.arguments]
            given = [*zip(names, arguments), *options.items()]
            devices = [(at, t.device.type) for at, t in given if isinstance(t, Tensor)]
            told = ", ".join(f"{at} on {device}" for at, device in devices)
            raise ValueError(f"tensors are on several devices: {told}")
        return fake(*arguments, **options)

    torch.library.register_fake(name, checked, lib=lib)
