"""Whether the configured device is there, asked before anything slow is imported."""

from __future__ import annotations

from pie_driver_sglang.errors import StartError


def check_device(device: str) -> None:
    """Refuses a GPU that this process cannot see.

    Args:
        device: `cpu` or `cuda:N`.

    Raises:
        StartError: There is no such GPU.
    """
    if device == "cpu":
        return
    import torch

    index = int(device.removeprefix("cuda:"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        found = f"{count} CUDA devices are visible" if count else "no CUDA device is visible"
        raise StartError(
            f"device {device} does not exist: {found}",
            'set `device = ["cpu"]` or make the GPU visible',
        )
