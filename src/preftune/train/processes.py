"""The end of a run on several processes."""

from __future__ import annotations

import gc

import torch.distributed as dist


def leave_process_group() -> None:
    """Close the connections to other processes; call it when trainer and model are out of use. Alone it does nothing.

    Left open, their threads may abort a process that is ending. Closed while a wrapper (DDP) still holds them, they are
    taken down with the wrapper by a thread that owns the interpreter, and may wait for it for ever: hence the
    collection first.
    """
    if dist.is_available() and dist.is_initialized():
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
