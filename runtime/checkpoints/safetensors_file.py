"""One safetensors file, written tensor by tensor with its checksum made on the way."""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from dsplan.runtime.checkpoints.manifest import File

KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes. Source: safetensors/torch.py, _TYPES."""
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class Part:
    """One tensor to be written. make: gives it, of that shape and dtype, on whatever device."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(path: Path, parts: Sequence[Part], metadata: Mapping[str, str]) -> File:
    """The file, on disk (fsync) when this returns. OSError where it cannot be written; what there is of it is left.

    Format: 8 bytes that count the header's, the header as JSON, the tensors' bytes. Source: safetensors' README.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    start = 0
    for part in parts:
        end = start + part.num_bytes
        header[part.name] = {"dtype": KINDS[part.dtype], "shape": list(part.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:

        def write(data: bytes | memoryview) -> None:
            digest.update(data)
            view = memoryview(data)
            while len(view):
                view = view[file.write(view) or 0 :]

        write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            tensor = part.make().to("cpu").contiguous()
            assert (tensor.dtype, tuple(tensor.shape)) == (part.dtype, part.shape), part.name
            if part.num_bytes:
                view = memoryview((ctypes.c_char * part.num_bytes).from_address(tensor.data_ptr())).cast("B")
                for first in range(0, len(view), _PIECE_BYTES):
                    write(view[first : first + _PIECE_BYTES])
            del tensor
        os.fsync(file.fileno())
    return File(8 + len(text) + start, digest.hexdigest())
