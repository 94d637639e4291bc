"""Started by torchrun: gradients of policies under FSDP2 and DDP, for every case in turn; the first rank writes them.

Usage: sharded.py OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent.parent))
import tiny
from preftune.data import collate
from preftune.models import Lora, Policy
from preftune.models.adapters import add_adapter
from preftune.ops import HeadOptions
from preftune.train import leave_process_group

# wrapper, tied, lora, strategy. FSDP2 itself wants tied weights in one group, so a tied head is not sharded alone.
CASES = [
    (wrapper, tied, lora, strategy)
    for wrapper in ("fsdp", "fsdp-head", "ddp")
    for tied in (False, True)
    for lora, strategy in ((False, "keep"), (False, "recompute"), (True, "auto"))
    if not (wrapper == "fsdp-head" and tied)
]


def wrap(model, wrapper: str):
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper.startswith("fsdp"):
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        for layer in inner.model.layers:
            fully_shard(layer)
        if wrapper == "fsdp-head":
            fully_shard(inner.lm_head)
        fully_shard(model)
    return model


def gradients(wrapper: str, tied: bool, lora: bool, strategy: str, rank: int = 0, ranks: int = 1):
    """Of two passes over 4 pairs dealt out to the ranks."""
    model = tiny.llama(dtype=torch.float64, tie_word_embeddings=tied)
    if lora:
        torch.manual_seed(1)
        model = add_adapter(model, Lora(r=4, target_modules=("q_proj", "v_proj"))).double()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.normal_(std=0.1)
    policy = Policy(model, head=HeadOptions(strategy=strategy, chunk=8))
    wrapped = wrap(model, wrapper)
    for _ in range(2):
        values = policy.sequence_logps(collate(tiny.rows(4).examples[rank::ranks]), wrapped)
        ((0.02 * values).tanh().sum() * ranks).backward()  # the wrappers average over ranks
    whole = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            whole[name] = (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).detach().clone()
    return whole


def main(out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {case: gradients(*case, dist.get_rank(), dist.get_world_size()) for case in CASES}
    if dist.get_rank() == 0:
        torch.save(found, Path(out, "gradients.pt"))
    leave_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
