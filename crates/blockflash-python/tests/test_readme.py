"""Every Python example of the READMEs and of the guide runs as it is printed, on its own.

An example that says "needs a GPU" in a comment is a GPU test.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import processes  # noqa: F401  # says what the server of forks imports
import pytest

PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parents[1]
GUIDE = ROOT / "docs/src"
CHAPTERS = re.findall(r"\]\((.*?)\)", (GUIDE / "SUMMARY.md").read_text(encoding="utf-8"))
PAGES = [PACKAGE / "README.md", ROOT / "README.md", *(GUIDE / name for name in CHAPTERS)]
# Warnings of torch about what it has in place of ours.
KNOWN = ["Sparse BSR tensor support", "flex_attention called without"]


def examples() -> Iterator[Any]:
    """The examples, by page and line."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            marks = [pytest.mark.gpu] if re.search(r"#.*needs a GPU", match[1]) else []
            if "import jax" in match[1] and importlib.util.find_spec("jax") is None:
                # tests/engines/test_jax_decode.py runs them.
                marks.append(pytest.mark.skip(reason="there is no JAX"))
            line = text.count("\n", 0, match.start(1)) + 1
            name = f"{page.relative_to(ROOT)}:{line}"
            yield pytest.param(match[1], id=name, marks=marks)


@pytest.mark.parametrize("code", list(examples()))
def test_example(code: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for checkpoint in re.findall(r'from_pretrained\(\s*"(.*?)"', code):
        save_small_model(tmp_path / checkpoint)
    # A fork has imported torch before. A GPU is for processes that begin on their own.
    gpu = request.node.get_closest_marker("gpu") is not None
    context = multiprocessing.get_context("spawn" if gpu else "forkserver")
    process = context.Process(target=run, args=(code, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 0, (tmp_path / "output").read_text(encoding="utf-8")


def run(code: str, folder: Path) -> None:
    """Run a program in a folder, as `__main__`; what it prints goes to the file `output` there."""
    os.chdir(folder)
    output = os.open("output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    warnings.simplefilter("error", UserWarning)
    for text in KNOWN:
        warnings.filterwarnings("ignore", text)
    program = folder / "program.py"
    program.write_text(code, encoding="utf-8")
    runpy.run_path(str(program), run_name="__main__")


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
