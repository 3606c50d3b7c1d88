"""The device that this rank computes on, in DeepSpeed's words."""

from __future__ import annotations

import torch


class Accelerator:
    def _cuda(self) -> bool:
        return torch.cuda.is_available()

    def device_name(self, device_index: int | None = None) -> str:
        name = "cuda" if self._cuda() else "cpu"
        return name if device_index is None or name == "cpu" else f"{name}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(torch.cuda.current_device()) if self._cuda() else "cpu"

    def current_device(self) -> int:
        return torch.cuda.current_device() if self._cuda() else 0

    def device_count(self) -> int:
        return torch.cuda.device_count() if self._cuda() else 1

    def is_available(self) -> bool:
        return True

    def communication_backend_name(self) -> str:
        return "nccl" if self._cuda() else "gloo"

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self._cuda() else True

    def is_fp16_supported(self) -> bool:
        return True

    def set_device(self, device_index: int) -> None:
        if self._cuda():
            torch.cuda.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        if self._cuda():
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        if self._cuda():
            torch.cuda.empty_cache()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(device_index) if self._cuda() else 0

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_allocated(device_index) if self._cuda() else 0


_accelerator = Accelerator()


def get_accelerator() -> Accelerator:
    return _accelerator
