"""Every Python example of the READMEs and of the guide runs as it is printed, on its own.

An example that says "needs a GPU" in a comment is a GPU test.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parents[1]
GUIDE = ROOT / "docs/src"
CHAPTERS = re.findall(r"\]\((.*?)\)", (GUIDE / "SUMMARY.md").read_text(encoding="utf-8"))
PAGES = [PACKAGE / "README.md", ROOT / "README.md", *(GUIDE / name for name in CHAPTERS)]
# Warnings are errors, but for those of torch about what it has in place of ours.
STRICT = ["-W", "error::UserWarning"]
STRICT += ["-W", "ignore:Sparse BSR tensor support", "-W", "ignore:flex_attention called without"]


def examples() -> Iterator[Any]:
    """The examples, by page and line."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            marks = [pytest.mark.gpu] if re.search(r"#.*needs a GPU", match[1]) else []
            line = text.count("\n", 0, match.start(1)) + 1
            name = f"{page.relative_to(ROOT)}:{line}"
            yield pytest.param(match[1], id=name, marks=marks)


@pytest.mark.parametrize("code", list(examples()))
def test_example(code: str, tmp_path: Path) -> None:
    for checkpoint in re.findall(r'from_pretrained\(\s*"(.*?)"', code):
        save_small_model(tmp_path / checkpoint)
    run = subprocess.run(
        [sys.executable, *STRICT, "-c", code],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout


def save_small_model(folder: Path) -> None:
    """A small Llama under the name of a checkpoint: transformers looks into folders first."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, **sizes, **heads)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def test_pages_have_examples() -> None:
    found = {example.id.rpartition(":")[0] for example in examples()}
    assert {"crates/blockflash-python/README.md", "README.md", "docs/src/pytorch.md"} <= found
