"""What cards can do at most, by the exact name that the driver gives them. An unknown card has no number.

Dense: makers also print numbers for matrices of which half is zero, which are twice as large. One multiply-add counts
as two operations.
"""

from __future__ import annotations

_HOPPER_SXM = {"float32": 66.9, "tf32": 494.7, "bfloat16": 989.4, "float16": 989.4}
_AMPERE_A100 = {"float32": 19.5, "tf32": 156.0, "bfloat16": 312.0, "float16": 312.0}
_VOLTA_SXM2 = {"float32": 15.7, "float16": 125.0}

# Of a multiplication of matrices, in TFLOP/s. Sources, in this order:
#   H100 Tensor Core GPU Architecture, NVIDIA's white paper, for SXM5; H200 has the same chip (dense in the table)
#   https://www.nvidia.com/en-us/data-center/a100/ (dense in the table)
#   https://www.nvidia.com/en-us/data-center/l40s/ (dense in the table)
#   https://www.nvidia.com/en-us/data-center/l4/ (120 and 242 with sparsity, halved)
#   https://www.nvidia.com/en-us/data-center/v100/ (SXM2)
#   https://www.nvidia.com/en-us/data-center/tesla-t4/
PEAK_TFLOPS: dict[str, dict[str, float]] = {
    "NVIDIA H200": _HOPPER_SXM,
    "NVIDIA H100 80GB HBM3": _HOPPER_SXM,
    "NVIDIA A100-SXM4-40GB": _AMPERE_A100,
    "NVIDIA A100-SXM4-80GB": _AMPERE_A100,
    "NVIDIA A100-PCIE-40GB": _AMPERE_A100,
    "NVIDIA A100 80GB PCIe": _AMPERE_A100,
    "NVIDIA L40S": {"float32": 91.6, "tf32": 183.0, "bfloat16": 362.05, "float16": 362.05},
    "NVIDIA L4": {"float32": 30.3, "tf32": 60.0, "bfloat16": 121.0, "float16": 121.0},
    "Tesla V100-SXM2-16GB": _VOLTA_SXM2,
    "Tesla V100-SXM2-32GB": _VOLTA_SXM2,
    "Tesla T4": {"float32": 8.1, "float16": 65.0},
}


def peak_tflops(name: str, number_format: str) -> float | None:
    """The most a card can multiply in a number format ("float32", "tf32", "bfloat16", "float16"), in TFLOP/s.

    None for a card or a format that is not in the table.
    """
    return PEAK_TFLOPS.get(name, {}).get(number_format)
