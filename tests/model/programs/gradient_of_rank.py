"""Saves the gradients of one of two ranks: RANK MEETING_FILE FOLDER."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.model.test_reversible import example, loss, network


def main(rank: int, meeting: str, folder: str) -> None:
    """Sends the gradients of half a batch to the other rank, and saves the sum."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    model = network(dropout=0.0).double()
    # Small buckets: gradients are sent while others are computed.
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.02)
    tokens_BL, mask_BL = (x[4 * rank : 4 * rank + 4] for x in example(batch=8))
    with parallel.no_sync():
        loss(parallel(tokens_BL[:2], mask_BL[:2], causal=False).logits_BLV).backward()
    loss(parallel(tokens_BL[2:], mask_BL[2:], causal=False).logits_BLV).backward()
    torch.save({name: p.grad for name, p in model.named_parameters()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
