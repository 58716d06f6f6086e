"""The loop by hand: what a careful person writes in PyTorch for this one experiment, and nothing else.

Run: python -m benchmarks.raw WORK OUT [--epochs N] [--limit-batches N] [--channels-last] [--profile FILE]
"""

from __future__ import annotations

import os

import torch
from torch.nn import functional as F

from benchmarks.arguments import work_parser
from benchmarks.clock import EpochClock
from benchmarks.experiment import Parts, build_parts
from benchmarks.works import WARMUP_EPOCHS, WORKS


def train(parts: Parts, num_epochs: int, limit_batches: int | None, clock: EpochClock, channels_last: bool) -> int:
    """Trains; returns the batches of an epoch."""
    net, optimizer, batch_size = parts.net, parts.optimizer, parts.data.batch_size
    num_rows = parts.data.num_samples("train")
    used_rows = min(num_rows, (limit_batches or num_rows) * batch_size)
    num_batches = -(-used_rows // batch_size)
    rates = [parts.rate(step, num_epochs * num_batches) for step in range(num_epochs * num_batches)]
    if channels_last:
        net.to(memory_format=torch.channels_last)
    step = 0
    for _ in range(num_epochs):
        clock.start_epoch()
        order = torch.randperm(num_rows)[:used_rows]
        total = torch.zeros(())
        for rows in order.split(batch_size):
            x, y = parts.cut(rows)
            if channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            optimizer.param_groups[0]["lr"] = rates[step]
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(net(x), y, label_smoothing=parts.label_smoothing)
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(y)
            step += 1
        print(f"loss {total.item() / used_rows:.4f}")
    clock.finish()
    return num_batches


def main() -> None:
    """Measures the loop and writes the result."""
    parser = work_parser(__doc__, WORKS)
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--profile")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"  # set by importing Lightning; a loop by hand would not
    parts = build_parts([*WORKS[args.work].overrides, *args.override])
    clock = EpochClock(WARMUP_EPOCHS, args.profile)
    batches = train(parts, WARMUP_EPOCHS + args.epochs, args.limit_batches, clock, args.channels_last)
    rows = {"num_rows": parts.data.num_samples("train"), "batch_size": parts.data.batch_size}
    clock.write(args.out, num_batches=batches, facts=rows)


if __name__ == "__main__":
    main()
