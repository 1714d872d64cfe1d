"""A process's place among others: the session, its share of a batch, what ranks agree on.

On one process, and with no launcher, everything here costs nothing and does nothing.
"""

import contextlib
import operator
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from companion import device as devices
from companion.state import Execution, Mesh


@contextlib.contextmanager
def session(how: Execution) -> Iterator[Mesh]:
    """This process's :class:`Mesh`; owns the process group where there are several ranks.

    Rank and world come from torchrun's environment. Without it this is one process.

    Raises:
        ValueError: the device is not here, or the strategy does not fit the number of ranks.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = devices.choose(how.device)
    if world == 1:
        if how.strategy != "none":
            raise ValueError(
                f"strategy {how.strategy} needs several ranks and there is one: start it with "
                "torchrun --nproc-per-node=2, or leave the strategy at none"
            )
        yield Mesh(device=device)
        return
    if how.strategy == "none":
        raise ValueError(
            f"there are {world} ranks and no strategy: each would train a copy of its own; "
            "add --strategy ddp"
        )
    if device.type == "mps":
        device = torch.device("cpu")
    if device.type == "cuda":
        device = devices.choose(f"cuda:{local_rank}")  # one sentence where there are fewer GPUs
        torch.cuda.set_device(device)
    dist.init_process_group(devices.process_group_backend(device), timeout=timedelta(seconds=300))
    try:
        cpu_group = dist.new_group(backend="gloo")
        yield Mesh(device, rank, world, local_rank, cpu_group)
    finally:
        dist.destroy_process_group()


def share(count: int, rank: int, world: int) -> tuple[int, int]:
    """This rank's part ``[low, high)`` of ``count`` samples; parts differ by one at most.

    Raises:
        ValueError: there are more ranks than samples.
    """
    if count < world:
        raise ValueError(
            f"{world} ranks cannot share a batch of {count}: some would get nothing; "
            "use fewer ranks or a larger global batch"
        )
    return count * rank // world, count * (rank + 1) // world


def wrap(model: nn.Module, how: Execution, mesh: Mesh) -> nn.Module:
    """The model as the strategy asks; unchanged on one process."""
    if how.strategy == "ddp":
        device_ids = [mesh.device.index] if mesh.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=device_ids)
    return model


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A region whose backward passes leave gradients unreduced (all but the last micro-batch)."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.no_sync()
    return contextlib.nullcontext()


def total(value: int, mesh: Mesh) -> int:
    """The sum of a count over the ranks.

    Raises:
        TypeError: it is not a whole number (a tensor or NumPy number that holds one will do).
    """
    try:
        # a plain number: what a run leaves behind must not hold tensors
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"the count is {value!r}: give a whole number of targets") from None
    if mesh.world == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(tensor, group=mesh.cpu_group)
    return int(tensor)


def any_rank(flag: bool, mesh: Mesh) -> bool:
    """Whether any rank says so; it meets on the CPU, so no device is waited for."""
    return flag if mesh.world == 1 else total(int(flag), mesh) > 0


def start_sum(value: Tensor, mesh: Mesh) -> dist.Work | None:
    """Begin summing ``value`` over the ranks in place; wait on what comes back, if anything."""
    if mesh.world == 1:
        return None
    return dist.all_reduce(value, async_op=True)
