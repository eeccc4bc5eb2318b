"""Processes that talk by gloo."""

from __future__ import annotations

import datetime
import os
import socket
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _process(rank: int, world: int, port: int, work: Callable[[int, int], None]) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=limit)
    work(rank, world)
    dist.destroy_process_group()
    # Threads of gloo may abort an interpreter that ends (torch 2.15); all is checked here.
    sys.stdout.flush()
    os._exit(0)


def run(world: int, work: Callable[[int, int], None]) -> None:
    """Run `work(rank, world)` in as many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_process, (world, port, work), nprocs=world)
