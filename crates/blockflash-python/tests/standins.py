"""Lets the CUDA build of torch be imported on a machine without a GPU. A tool for tests only.

PyPI's torch for Linux on x86-64 is a CUDA build. It does not import without NVIDIA's libraries,
which are another 2.4 GB to download. This script replaces them with empty libraries: every function
that torch names returns 1, an error code in all of NVIDIA's interfaces. Two small libraries must be
the real ones, since torch already calls them while it is loaded: install `nvidia-cuda-runtime` and
`nvidia-cuda-cupti` for them. Everything on CPU tensors then works, and torch finds no GPU.

Usage, in an environment into which torch was installed with `--no-deps`:

    python standins.py
"""

import ctypes
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path


def output(*command: object) -> str:
    """Standard output of a command; raises when the command fails."""
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def is_found(soname: str) -> bool:
    """Whether the loader finds a library in the places of the system."""
    try:
        ctypes.CDLL(soname)
    except OSError:
        return False
    return True


def missing_libraries(folder: Path) -> dict[str, dict[str, set[str]]]:
    """The libraries that torch's libraries in `folder` need and nobody has.

    Only `libtorch_python.so` and what it needs in turn is looked at: torch opens its other
    libraries when a GPU is used. The result maps `soname -> version -> symbols`; the version is
    empty for symbols without one. The loader ends the process where a versioned symbol lacks its
    version.
    """
    installed = {path.name: path for path in (folder.parents[1] / "nvidia").glob("**/lib/*.so*")}
    missing: dict[str, dict[str, set[str]]] = {}
    unversioned: set[str] = set()
    versioned: list[tuple[str, str, str]] = []
    to_visit, seen = ["libtorch_python.so"], set()
    while to_visit:
        soname = to_visit.pop()
        if soname in seen or soname in installed:
            continue
        seen.add(soname)
        library = folder / soname
        if not library.exists():
            if not is_found(soname):
                missing[soname] = defaultdict(set)
            continue
        headers = output("objdump", "-p", library)
        to_visit += re.findall(r"NEEDED\s+(\S+)", headers)
        owners: dict[str, str] = {}
        for owner, versions in re.findall(r"required from (\S+):\n((?:\s+0x.*\n)+)", headers):
            owners |= dict.fromkeys(re.findall(r"(\S+)\n", versions), owner)
        for symbol in re.findall(r"\s[Uw] (\S+)", output("nm", "-D", "--undefined-only", library)):
            name, _, version = symbol.partition("@")
            if version:
                versioned.append((owners[version], version, name))
            else:
                unversioned.add(name)
    for soname, version, name in versioned:
        if soname in missing:
            missing[soname][version].add(name)
    for soname, symbols in missing.items():
        prefix = soname.removeprefix("lib").partition(".")[0].lower()
        symbols[""] = {name for name in unversioned if name.lower().startswith(prefix)}
    return missing


def make(target: Path, symbols: dict[str, set[str]]) -> None:
    """Compiles a library whose functions, given as `version -> symbols`, all return 1."""
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "standin.c"), Path(scratch, "versions")
        names = sorted(set().union(*symbols.values()))
        source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in names))
        nodes = [
            f"{version} {{ global: {'; '.join(sorted(group))}; }};\n"
            for version, group in symbols.items()
            if version
        ]
        script.write_text("".join(nodes))
        flags = ["-x", "c", "-w", "-fno-builtin", "-nostdlib", "-shared", "-fPIC"]
        if nodes:
            flags.append(f"-Wl,--version-script={script}")
        output("g++", *flags, f"-Wl,-soname={target.name}", "-o", target, source)


def main() -> None:
    """Makes what is missing beside torch's own libraries, where their search path finds it."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        sys.exit("torch is not installed in this environment")
    folder = Path(torch.origin).parent / "lib"
    missing = missing_libraries(folder)
    for soname, symbols in sorted(missing.items()):
        make(folder / soname, symbols)
        print(f"{soname}: {sum(map(len, symbols.values()))} functions that return an error")


if __name__ == "__main__":
    main()
