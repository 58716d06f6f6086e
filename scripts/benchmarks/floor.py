"""The floor: an epoch's matrix products and convolutions, forward and backward, and nothing else.

Run: python -m benchmarks.floor WORK OUT [--epochs N] [--limit-batches N]
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.arguments import work_parser
from benchmarks.clock import EpochClock
from benchmarks.experiment import build_parts
from benchmarks.works import WARMUP_EPOCHS, WORKS


def record_products(net: nn.Module, x: Tensor) -> list[Callable[[], object]]:
    """The products of one training step on input `x`, each as a call without arguments.

    The first layer needs no gradient of its input.
    """
    calls: list[Callable[[], object]] = []

    def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        needs_input_gradient = inputs[0].requires_grad
        given, grad, weight = inputs[0].detach(), torch.randn_like(output), module.weight.detach()  # type: ignore[operator]
        if isinstance(module, nn.Linear):
            flat, flat_grad = given.flatten(0, -2), grad.flatten(0, -2)
            calls.append(lambda: flat @ weight.T)
            calls.append(lambda: flat_grad.T @ flat)
            if needs_input_gradient:
                calls.append(lambda: flat_grad @ weight)
        elif isinstance(module, nn.Conv2d):
            layout = (module.stride, module.padding, module.dilation)
            mask = [needs_input_gradient, True, False]
            calls.append(lambda: torch.conv2d(given, weight, None, *layout))  # type: ignore[arg-type]
            backward = torch.ops.aten.convolution_backward
            calls.append(lambda: backward(grad, given, weight, None, *layout, False, [0, 0], module.groups, mask))

    handles = [m.register_forward_hook(record) for m in net.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    net(x)
    for handle in handles:
        handle.remove()
    return calls


def main() -> None:
    """Measures the products and writes the result."""
    args = work_parser(__doc__, WORKS).parse_args()
    torch.set_num_threads(1)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"  # set by importing Lightning; a loop by hand would not
    parts = build_parts([*WORKS[args.work].overrides, *args.override])
    size, rows = parts.data.batch_size, parts.data.num_samples("train")
    num_batches = min(-(-rows // size), args.limit_batches or rows)
    calls = record_products(parts.net, parts.cut(torch.arange(min(size, rows)))[0])
    clock = EpochClock(WARMUP_EPOCHS)
    with torch.no_grad():
        for _ in range(WARMUP_EPOCHS + args.epochs):
            clock.start_epoch()
            for _ in range(num_batches):
                for call in calls:
                    call()
    clock.finish()
    clock.write(args.out, num_batches=num_batches)


if __name__ == "__main__":
    main()
