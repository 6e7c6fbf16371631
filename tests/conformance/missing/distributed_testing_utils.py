"""Stands in for a module that the source distribution leaves out: rank processes on the CPU, with gloo."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _get_distributed_device_type():
    return "cpu"


def _get_distributed_backend():
    return "gloo"


def _get_rank_device(rank):
    return torch.device("cpu")


def _set_rank_device(rank):
    torch.set_num_threads(1)


def _start_rank_processes(function, args, nprocs):
    """Runs `function(rank, *args)` in `nprocs` fresh processes and raises what any of them raised."""
    mp.spawn(function, args=args, nprocs=nprocs, join=True)


def run_distributed(world_size):
    """`run_distributed(n)(function)(*args)` runs `function(rank, *args)` in a process group of n ranks."""

    def decorate(function):
        def run(*args):
            _start_rank_processes(_in_process_group, (function, world_size, _free_port(), args), world_size)

        return run

    return decorate


def _in_process_group(rank, function, world_size, port, args):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    _set_rank_device(rank)
    dist.init_process_group(_get_distributed_backend(), rank=rank, world_size=world_size)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()


def _free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
