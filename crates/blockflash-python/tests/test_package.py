"""The package as installed from the wheel: what it imports, links to and says."""

import ast
import os
import shutil
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

import pytest

import blockflash
from blockflash import _native


def python(code: str) -> str:
    """Standard output of code that runs in a fresh process."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def test_import_needs_neither_torch_nor_time() -> None:
    code = """
import sys, time
sys.modules["torch"] = None  # as if it were not installed
before = time.process_time()
import blockflash
print(time.process_time() - before)
try:
    blockflash.attention
except ImportError as error:
    print(error)
"""
    seconds, message = python(code).splitlines()
    assert float(seconds) < 0.02
    assert message == "blockflash.attention needs PyTorch: pip install 'torch>=2.10'"


def test_import_starts_neither_torch_nor_the_driver() -> None:
    code = "import blockflash, sys; print([m for m in sys.modules if m in ('torch', 'numpy')])"
    assert python(code) == "[]"
    assert "libcuda" not in python("import blockflash; print(open('/proc/self/maps').read())")


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
def test_nothing_is_linked_but_the_c_library() -> None:
    headers = subprocess.run(
        ["objdump", "-p", _native.__file__], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    needed = {line.split()[1] for line in headers.splitlines() if "NEEDED" in line}
    system = ("libc.", "libm.", "libgcc_s.", "libpthread.", "libdl.", "librt.", "ld-linux")
    assert needed and all(name.startswith(system) for name in needed), needed


def test_versions_agree_and_types_are_shipped() -> None:
    assert blockflash.__version__ == metadata.version("blockflash")
    assert blockflash.info()["version"] == blockflash.__version__
    files = {path.name for path in Path(str(resources.files(blockflash))).iterdir()}
    assert {"py.typed", "_native.pyi"} <= files


def test_without_a_gpu_it_says_why() -> None:
    """In a process from which CUDA hides the GPUs that there may be."""
    code = """
import blockflash
usable = blockflash.usable()
assert not usable
assert str(usable) == blockflash.info()["gpu_problem"] != ""
assert "driver" in str(usable) or "GPU" in str(usable), str(usable)
"""
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code], env=hidden, check=True)


def imports(path: Path, package: Path) -> set[Path]:
    """The modules of the package that a module imports, wherever it does, for types, too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = path.parents[node.level - 1] if node.level else package.parent
        base = base.joinpath(*(node.module or "").split("."))
        for place in (base, *(base / alias.name for alias in node.names)):
            found |= {p for p in (place.with_suffix(".py"), place / "__init__.py") if p.is_file()}
    return found - {path, package / "__init__.py"}


def test_no_modules_import_each_other() -> None:
    package = Path(blockflash.__file__).parent
    graph = {path: imports(path, package) for path in package.rglob("*.py")}
    assert sum(map(len, graph.values())) > 60
    while leaves := {path for path, needed in graph.items() if not needed & graph.keys()}:
        graph = {path: needed for path, needed in graph.items() if path not in leaves}
    # What is left is in a circle, or imports one.
    assert not graph, sorted(path.name for path in graph)
