"""Every Python example of the READMEs runs as it is printed, in a fresh interpreter.

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
PAGES = [PACKAGE / "README.md", PACKAGE.parents[1] / "README.md"]


def examples() -> Iterator[Any]:
    """The examples, by page and line."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            marks = [pytest.mark.gpu] if re.search(r"#.*needs a GPU", match[1]) else []
            line = text.count("\n", 0, match.start(1)) + 1
            name = f"{page.relative_to(PACKAGE.parents[1])}:{line}"
            yield pytest.param(match[1], id=name, marks=marks)


@pytest.mark.parametrize("code", list(examples()))
def test_example(code: str, tmp_path: Path) -> None:
    for checkpoint in re.findall(r'from_pretrained\(\s*"(.*?)"', code):
        save_small_model(tmp_path / checkpoint)
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code],
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
    assert {example.id.rpartition(":")[0] for example in examples()} == {
        "crates/blockflash-python/README.md",
        "README.md",
    }
