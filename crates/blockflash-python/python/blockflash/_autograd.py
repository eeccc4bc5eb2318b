"""The steps of autograd around the operators: a gradient is computed or raises, a write is noticed.

torch calls an operator's kernel of the key `Autograd` first, next the one of `ADInplaceOrView`, and
then the one that computes. The kernels of the first two are here, in Python, and cost the host
several microseconds. So the functions that users call find out by themselves whether these steps
have anything to do, and otherwise enter below them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from ._native import DeviceError, Unsupported

below = torch._C._AutoDispatchBelowAutograd
"""A context in which operators pass over the step `Autograd`."""
below_writes = torch._C._AutoDispatchBelowADInplaceOrView
"""A context in which operators pass over both steps."""

_KINDS = {
    "Value": ValueError,
    "Misaligned": ValueError,
    "Unsupported": Unsupported,
    "Device": DeviceError,
    "Memory": torch.OutOfMemoryError,
}
_NO_GRADIENT = (
    "this call has no gradient: use blockflash.attention without out= and differentiate it once "
    "only, or use torch.no_grad()"
)
_NOTHING = nullcontext()
# Looked up once: every call asks.
_is_compiling = torch.compiler.is_compiling
_are_transforms_active = torch._C._are_functorch_transforms_active
_is_grad_enabled = torch.is_grad_enabled
_increment_version = torch._C._increment_version
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_WRITES = torch._C.DispatchKey.ADInplaceOrView
_FURTHER = (None,) * 20
"""Gradients of the arguments that have none. torch drops those that are too many."""


def is_transformed() -> bool:
    """Whether torch compiles the call, transforms it, or differentiates it in forward mode."""
    return _is_compiling() or _are_transforms_active() or forward_ad._current_level >= 0


def passes(*tensors: Tensor | None) -> bool:
    """Whether autograd has nothing to do with a call of these tensors, which may enter below it."""
    if _is_compiling() or _are_transforms_active() or forward_ad._current_level >= 0:
        return False
    if _is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return False
    return True


is_seen = torch._C._len_torch_dispatch_stack
"""Whether a mode of torch sees the operators that are called, and may keep their results."""


def call_below(operator: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls an operator that passes over both steps: `below_writes` for a third of its time."""
    if _is_excluded(_AUTOGRAD):  # in inference mode, or by a context of torch
        return operator(*arguments, **options)
    # Whichever of these calls is interrupted, both keys are restored.
    try:
        _exclude(_AUTOGRAD, True)
        try:
            _exclude(_WRITES, True)
            return operator(*arguments, **options)
        finally:
            _exclude(_WRITES, False)
    finally:
        _exclude(_AUTOGRAD, False)


def refuse_to_lose(*tensors: Tensor | None) -> None:
    """Raises where autograd would lose a gradient: for a call that has none."""
    given = [tensor for tensor in tensors if tensor is not None]
    lost = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    if forward_ad._current_level >= 0:
        duals = (forward_ad.unpack_dual(tensor) for tensor in given)
        lost = lost or any(dual.tangent is not None for dual in duals)
    if lost:
        raise Unsupported(_NO_GRADIENT)


def note_write(*tensors: Tensor | None) -> None:
    """The step `ADInplaceOrView`: autograd sees that tensors it has saved are overwritten."""
    for tensor in tensors:
        if tensor is not None:
            if tensor.is_inference() and not torch.is_inference_mode_enabled():
                raise RuntimeError(
                    "Inplace update to inference tensor outside InferenceMode is not allowed: pass "
                    "a clone"
                )
            _increment_version((tensor,))


def call_writing(
    operator: Callable[..., Any], tensors: tuple[Tensor | None, ...], *rest: Any
) -> Any:
    """Calls an operator that writes what is behind the second tensor.

    That is below autograd if this has no say.
    """
    if not passes(*tensors):
        refuse_to_lose(*tensors)
        return operator(*tensors, *rest)
    note_write(*tensors[2:])
    return call_below(operator, *tensors, *rest)


def typed(error: RuntimeError) -> Exception:
    """The exception that a native kernel means: C++ knows its text alone, after its kind."""
    kind, _, text = str(error).partition(": ")
    if kind in _KINDS:
        return _KINDS[kind](text)
    if "CUDA error" in str(error) and torch.cuda._is_in_bad_fork():
        return DeviceError(
            "CUDA was initialised before this process was forked, and cannot be used in it: start "
            f"processes by spawn or forkserver ({str(error).splitlines()[0]})"
        )
    return error


def _as_outside() -> AbstractContextManager[Any]:
    """Lets outer transforms differentiate, which torch has switched off inside of a function."""
    if not torch._C._are_functorch_transforms_active():
        return _NOTHING
    outside = ExitStack()
    outside.enter_context(torch.enable_grad())
    outside.enter_context(forward_ad._set_fwd_grad_enabled(True))
    return outside


def _operator(library: torch.library.Library, name: str) -> Any:
    name, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, library.ns), name), overload or "default")


def register_step(
    library: torch.library.Library, name: str, differentiable: Callable[..., Any]
) -> None:
    """Registers what is called in place of an operator where autograd records its results."""
    operator = _operator(library, name)

    def step(*arguments: Any) -> Any:
        recorded = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
        try:
            if recorded or forward_ad._current_level >= 0:
                return differentiable(*arguments)
            with below():
                return operator(*arguments)
        except RuntimeError as error:
            raise typed(error) from None

    library.impl(name, step, "Autograd")


def register_gradient(
    library: torch.library.Library,
    name: str,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., tuple[Tensor | None, ...]] | None = None,
) -> type[_SingleLevelFunction]:
    """Registers how an operator is differentiated: by `backward`, or not at all, which raises.

    `setup_context` gets the arguments without those at the end that have their default. Returns the
    function of autograd, which takes the operator's arguments. It is one of a single level, since
    transforms of torch.func come here once for each of their levels.
    """
    operator = _operator(library, name)

    def forward(ctx: Any, *arguments: Any) -> Any:
        with below(), _as_outside():
            result = operator(*arguments)
        if setup_context is not None:
            setup_context(ctx, arguments, result)
        return result

    def gradient(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if backward is None:
            raise Unsupported(_NO_GRADIENT)
        return (*backward(ctx, *grads), *_FURTHER)

    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        raise Unsupported(
            f"{name} has no derivative in forward mode (jvp, jacfwd, hessian): use grad, vjp or "
            "jacrev"
        )

    kinds = {"forward": forward, "backward": gradient, "jvp": jvp}
    methods = {kind: staticmethod(method) for kind, method in kinds.items()}
    function = type(name, (_SingleLevelFunction,), methods)

    def differentiable(*arguments: Any) -> Any:
        with enable_single_level_autograd_function():
            return function.apply(*arguments)

    register_step(library, name, differentiable)
    return function


def written(operator: Any) -> slice:
    """The places of the arguments that an operator writes, one behind another in its schema."""
    arguments = enumerate(operator._schema.arguments)
    places = [place for place, a in arguments if a.alias_info and a.alias_info.is_write]
    return slice(places[0], places[-1] + 1)


def register_writes(
    library: torch.library.Library,
    name: str,
    call: Callable[..., Any] | None = None,
) -> None:
    """Registers both steps for an operator that writes into some of its arguments.

    It has no gradient. `call` replaces the operator for whoever sees or transforms it.
    """
    operator = _operator(library, name)
    places = written(operator)

    def autograd(*arguments: Any) -> Any:
        refuse_to_lose(*(t for t in arguments if isinstance(t, Tensor)))
        try:
            if call is not None and (is_transformed() or is_seen()):
                return call(*arguments)
            with below():
                return operator(*arguments)
        except RuntimeError as error:
            raise typed(error) from None

    def write(*arguments: Any) -> Any:
        note_write(*arguments[places])
        with below_writes():
            return operator(*arguments)

    library.impl(name, autograd, "Autograd")
    library.impl(name, write, "ADInplaceOrView")
