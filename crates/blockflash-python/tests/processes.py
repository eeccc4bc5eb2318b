"""Processes that talk by gloo, or by NCCL with a GPU for each."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Processes are forks of a server that has imported this: that takes longer than most of the tests.
multiprocessing.set_forkserver_preload(["blockflash.distributed", "pytest"])


def _process(
    rank: int, world: int, port: int, work: Callable[[int, int], None], backend: str
) -> None:
    torch.set_num_threads(1)
    gpu = torch.device("cuda", rank) if backend == "nccl" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
        device_id=gpu,
    )
    work(rank, world)
    if gpu is not None:
        torch.cuda.synchronize()
    dist.destroy_process_group()
    # Threads of gloo may abort an interpreter that ends (torch 2.15); all is checked here.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run(world: int, work: Callable[[int, int], None], backend: str = "gloo") -> None:
    """Run `work(rank, world)` in as many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A GPU is for processes that begin on their own.
    method = "spawn" if backend == "nccl" else "forkserver"
    mp.start_processes(_process, (world, port, work, backend), world, start_method=method)
