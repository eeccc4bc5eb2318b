"""The nodes with the functions of ComfyUI itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import test_comfyui as cases
import torch
from engine import needs

import blockflash

needs("comfy", "comfy.cli_args")

from comfy.cli_args import args  # noqa: E402

args.cpu = not torch.cuda.is_available()  # Read when the next module is imported.

from comfy.ldm.modules import attention  # noqa: E402

FUNCTIONS = ["attention_pytorch", "attention_sub_quad", "attention_split"]
# At masks of booleans and of one query two of ComfyUI's own functions fail.
CASES = [
    (name, mask)
    for name in FUNCTIONS
    for mask in cases.MASKS
    if name == "attention_pytorch" or mask not in ("bool", "keys")
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    blockflash.reset_stats()
    yield
    blockflash.reset_stats()


@pytest.mark.parametrize(("name", "mask"), CASES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("skip", [False, True])
def test_dense(name: str, mask: str, layout: str, skip: bool) -> None:
    cases.check_dense(getattr(attention, name), mask, layout, skip)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_sparse(name: str, layout: str) -> None:
    cases.check_sparse(getattr(attention, name), layout)


def test_a_block_of_a_transformer() -> None:
    """Attention to itself and to a text, as ComfyUI's own block calls it."""
    torch.manual_seed(0)
    block = attention.BasicTransformerBlock(64, 2, 32, context_dim=24, operations=torch.nn)
    x, text = torch.randn(2, 50, 64), torch.randn(2, 7, 24)
    options = cases.node("BlockflashAttention")
    with torch.no_grad():
        expected = block(x, context=text)
        found = block(x, context=text, transformer_options=options)
    assert cases.calls() == (2, 0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
