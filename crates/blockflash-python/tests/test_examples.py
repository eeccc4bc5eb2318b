"""The examples run in their small size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "says"),
    [("finetune_sparse", "sparse"), ("long_context", "same token")],
)
def test_example(name: str, says: str, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    command = [sys.executable, EXAMPLES / f"{name}.py", "--small", "--plot", plot]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0 and says in done.stdout
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_generate(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "generate.py", "--small"]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0 and "100.0% of the tokens" in done.stdout


def test_cache_of_8_bits(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "cache_of_8_bits.py", "--small"]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0 and "Every perplexity is within its bound" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()[2:7]]
    assert [row[0] for row in rows] == ["bf16", "e4m3", "e4m3", "int8", "int8"]
    # It has learned, codes take less memory, and they are not bf16.
    assert all(2 < float(row[-4]) < 30 for row in rows)
    assert all(float(row[-1]) < 0.6 * float(rows[0][-1]) for row in rows[1:])
    assert len({row[-4] for row in rows}) > 3


@pytest.mark.parametrize("size", [["--small"], pytest.param([], marks=pytest.mark.gpu)])
def test_deepseek_layer(size: list[str], tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "deepseek_layer.py", *size]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0 and "Every error is within its bound" in done.stdout
    rows = done.stdout.splitlines()[2:6]
    names = ["prefill, SDPA", "prefill, attention", "a token, SDPA", "a token, mla_decode"]
    assert [row[:20].strip() for row in rows] == names
    # Latent rows are smaller than keys and values of all heads.
    assert int(rows[3].split()[-1]) < int(rows[2].split()[-1]) / 2


GPU = pytest.mark.gpu
ON_GPU = ["--device=cuda", "--steps=20"]


@pytest.mark.parametrize("size", [["--small"], pytest.param([*ON_GPU, "--tokens=8192"], marks=GPU)])
def test_long_document_generation(size: list[str], tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    command = [sys.executable, EXAMPLES / "long_document_generation.py", *size, "--plot", plot]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0 and ElementTree.parse(plot).getroot().tag.endswith("svg")
    rows = [line.split() for line in done.stdout.splitlines()[3:13]]
    assert [row[0] for row in rows] == ["all", *["means"] * 3, *["bounds"] * 3, *["scores"] * 3]
    share, weight, same = ([float(row[at].rstrip("%")) for row in rows] for at in (2, 3, 4))
    assert (share[0], weight[0], same[0]) == (100, 100, 100)
    assert all(0 < of_some < 99 for of_some in weight[1:])
    if "--small" in size:
        # Of a single layer, whose queries are the same, more pages hold more of the weight.
        assert all(weight[at] < weight[at + 1] for at in (1, 2, 4, 5, 7, 8))
        assert min(same) > 80
    # Something is left out.
    assert all(float(row[5]) > 0 for row in rows[1:])


@pytest.mark.parametrize("size", [["--small"], pytest.param(ON_GPU, marks=GPU)])
def test_train_sparse(size: list[str], tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    command = [sys.executable, EXAMPLES / "train_sparse.py", *size, "--plot", plot]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0 and ElementTree.parse(plot).getroot().tag.endswith("svg")
    rows = [line.rsplit(maxsplit=4) for line in done.stdout.splitlines()[2:6]]
    names = ["all keys", "chosen by keys", "chosen by means", "window alone"]
    assert [row[0].strip() for row in rows] == names
    # All of them have learned since they guessed among 256 bytes, from the same start.
    losses = [float(row[2]) for row in rows]
    assert max(losses) < 5.5 and max(losses) - min(losses) < 0.5 and len(set(losses)) > 1


def test_context_parallel(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, EXAMPLES / "context_parallel.py", "--small"]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0 and "201 tokens on 2 processes" in done.stdout


def test_video_attention(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "video_attention.py", "--small", "--repeats=1"]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0 and "sliding tile 1 x 3 x 3" in done.stdout
    rows = [line.split()[-3:] for line in done.stdout.splitlines()[2:]]
    visited = [float(share.rstrip("%")) for share, _, _ in rows]
    assert visited[0] == 100 and all(share < 100 for share in visited[1:])
    assert all((float(error) > 0) == (share < 100) for share, (_, error, _) in zip(visited, rows))
