"""The processes that train one model together: those of torchrun, or only this one.

Only rank 0 reads and writes the run folder; it sends numbers and tensors to the others, and nothing
is pickled. A tensor is whole on every process, or sharded over them (FSDP2, a `DTensor`). `whole`
and `fill` convert between the two, so a checkpoint does not depend on the number of processes.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

# Its functions have the process group as a default argument. DDP imports it after the group was
# made, and the functions would then keep the group alive.
import torch.distributed.nn.functional
from torch import Tensor, nn

from vssm.checks import choose_device
from vssm.nn import BLOCKS


@dataclass(frozen=True)
class World:
    """Which process this is, of how many, and on which device."""

    device: torch.device
    rank: int = 0
    size: int = 1
    grouped: bool = False
    """Whether there is a process group, which may have one member."""
    _meshes: list[Any] = field(default_factory=list, init=False, repr=False)

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum over all processes."""
        dist.all_reduce(values)
        return values

    def check(self, batch: int, fsdp: bool) -> None:
        """Raises unless these processes can share a batch, or shard a model."""
        if batch % self.size:
            raise ValueError(
                f"batch={batch} is not divisible by the {self.size} processes; "
                f"use a multiple of {self.size}"
            )
        if fsdp and not self.grouped:
            raise ValueError("fsdp=True needs processes to shard over; use torchrun, or fsdp=False")

    def agree(self, values: list[float]) -> list[float]:
        """Returns the numbers of rank 0 on every process; all must pass equally many."""
        if self.size == 1:
            return values
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.broadcast(numbers, src=0)
        return numbers.tolist()

    def wrap(self, module: nn.Module, fsdp: bool) -> nn.Module:
        """Returns the module with gradients averaged over processes; `fsdp` shards it in place."""
        if fsdp:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(self.device.type, (self.size,))
            self._meshes.append(mesh)
            blocks = [m for m in module.modules() if isinstance(m, tuple(BLOCKS.values()))]
            for part in (*blocks, module):
                # Without resharding the root would keep the averaged weights of a validation.
                fully_shard(part, mesh=mesh, reshard_after_forward=True)
            return module
        module.to(self.device)
        return nn.parallel.DistributedDataParallel(module) if self.grouped else module

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns whole tensors on rank 0, none elsewhere; every process must call this."""
        result = {}
        for name, tensor in tensors.items():
            full: Any = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore
            if self.rank == 0:
                result[name] = full.detach().cpu().contiguous()
        return result

    @torch.no_grad()
    def fill(self, target: Tensor, source: Tensor | None) -> None:
        """Copies a whole tensor of rank 0 into the target of every process."""
        full = torch.empty(target.shape, dtype=target.dtype, device=self.device)
        if self.rank == 0:
            assert source is not None
            full.copy_(source)
        if hasattr(target, "full_tensor"):
            from torch.distributed.tensor import DTensor, distribute_tensor

            assert isinstance(target, DTensor)
            target.copy_(distribute_tensor(full, target.device_mesh, target.placements))
            return
        if self.size > 1:
            dist.broadcast(full, src=0)
        target.copy_(full)

    def forget_group(self) -> None:
        """Drops all references to the process group, so that destroying it ends its threads.

        A gloo thread that still runs while Python exits may need the GIL, to release a tensor.
        Python then ends the thread, and C++ aborts: "terminate called without an active exception".
        """
        for mesh in self._meshes:  # caches of DTensor keep the mesh, which keeps the group
            getattr(mesh, "_pg_registry", {}).clear()
        gc.collect()  # DDP and FSDP2 modules are in reference cycles


@contextmanager
def join(device: str) -> Iterator[World]:
    """Joins the processes that torchrun started, if it did, and leaves them again at the end.

    Arguments:
        device: "auto", "cpu", "cuda" or "cuda:N"; under torchrun each process takes its own GPU.
    """
    chosen = choose_device(device)
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    own = launched and not dist.is_initialized()
    if launched and chosen.type == "cuda":
        chosen = choose_device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
        torch.cuda.set_device(chosen)
    if own:
        store, rank, size = next(iter(dist.rendezvous("env://")))
        # Each group has its own keys, or a second training would read the addresses of the first.
        turn = (store.add("vssm", 1) - 1) // size
        dist.init_process_group(
            "nccl" if chosen.type == "cuda" else "gloo",
            store=dist.PrefixStore(f"vssm/{turn}", store),
            rank=rank,
            world_size=size,
        )
    if not dist.is_initialized():
        yield World(chosen)
        return
    world = World(chosen, dist.get_rank(), dist.get_world_size(), grouped=True)
    yield world
    # Not after an error: the other processes may be inside a collective, and torchrun ends them.
    world.forget_group()
    if own:
        # No process leaves while another still talks to it; NCCL warns of a plain barrier.
        world.sum(torch.zeros((), device=chosen)).item()
        dist.destroy_process_group()
