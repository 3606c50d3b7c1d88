"""Reads a file that torch.save wrote, on terms: no code runs, nothing is made but what DeepSpeed's checkpoints are made of.

Two walls. Before anything is built, the zip and the pickle in it are read as text: entries must be stored plainly and fill
the file, and every name that the pickle asks for must be in GLOBALS. Then torch.load reads it with weights_only, where
DeepSpeed's own classes are stand-ins that only keep what they are given.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING  # protocol 2 writes Python 2's names
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from dsplan.schemas.problem import Problem

LOSS_SCALERS = "deepspeed.runtime.fp16.loss_scaler"


class Inert:
    """Keeps arguments and attributes of an object of DeepSpeed's, and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


class StaticScale(Inert):
    """LossScaler."""


class DynamicScale(Inert):
    """DynamicLossScaler."""


class ZeroStage(Inert):
    """ZeroStageEnum: its argument is the number."""


class Fragment(Inert):
    """fragment_address: numel, start."""


STAND_INS: dict[str, type[Inert]] = {
    f"{LOSS_SCALERS}.LossScaler": StaticScale,
    f"{LOSS_SCALERS}.DynamicLossScaler": DynamicScale,
    "deepspeed.runtime.zero.config.ZeroStageEnum": ZeroStage,
    "deepspeed.utils.tensor_fragment.fragment_address": Fragment,
}
"""What DeepSpeed 0.19.8 writes of its own. Asked: tests/oracle/deepspeed_checkpoints.py."""
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
GLOBALS = {
    *STAND_INS,
    "collections.OrderedDict",
    "torch.Size",
    "torch.Tensor",
    "torch.device",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
    "torch._tensor._rebuild_from_type_v2",  # the flat fp32 parameters of stage 3, which carry attributes
    *(f"torch.{name}" for name in DTYPES),
    *(f"torch.{name}Storage" for name in STORAGES),
}
"""Tensors, and containers of them."""
OPCODES = {
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPERSID", "BINPUT",
    "BINUNICODE", "BUILD", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "GLOBAL", "LONG1", "LONG_BINGET",
    "LONG_BINPUT", "MARK", "NEWFALSE", "NEWOBJ", "NEWTRUE", "NONE", "PROTO", "REDUCE", "SETITEM", "SETITEMS",
    "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip
"""What torch.save's protocol 2 takes to write these."""
MOST_PICKLE_BYTES = 1 << 28
"""Of data.pkl, which holds no tensor's bytes: 7 KB for 30 parameters, so enough for a million."""


def read_saved(path: Path) -> Any:
    """What is in the file; its tensors are mapped from disk, not read. Problem that names the file, and what is wrong."""
    text = _pickle_of(path)
    asked = _globals_of(path, text)
    unknown = sorted(asked - GLOBALS)
    if unknown:
        raise Problem(
            f"{path}: asks for {', '.join(unknown[:3])}, which DeepSpeed's checkpoints are not made of; nothing of it was "
            "run. If it is in your client_state, save that as numbers, words, lists and dicts"
        )
    try:
        with torch.serialization.safe_globals([(kind, name) for name, kind in STAND_INS.items()]):
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (
        pickle.UnpicklingError,
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        AssertionError,
        EOFError,
        OverflowError,
        RecursionError,
        MemoryError,
        UnicodeDecodeError,
    ) as error:
        raise Problem(f"{path}: is damaged, or no file that torch.save wrote ({_first_line(error)})") from error
    on_disk = path.stat().st_size
    for tensor in _tensors(value, path):
        _refuse_stretched(path, tensor, on_disk)
    return value


def _pickle_of(path: Path) -> bytes:
    """data.pkl of the zip, whose entries are held to be what torch.save writes: stored as they are, one after another."""
    try:
        bytes_on_disk = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
            if packed:
                raise Problem(
                    f"{path}: {packed[0]} in it is compressed, which torch.save never does; it was not unpacked"
                )
            if len(set(names)) != len(names):
                raise Problem(f"{path}: holds two entries of one name, which torch.save never writes")
            if sum(entry.file_size for entry in entries) > bytes_on_disk:
                raise Problem(f"{path}: its entries claim more bytes than the file has")
            root = names[0].partition("/")[0] if names else ""
            if root not in (path.stem, "archive"):  # torch.save calls it archive where it was not given a path
                raise Problem(
                    f"{path}: was written as {root[:80]}{path.suffix}, so it is of another rank or checkpoint, and was renamed"
                )
            pickles = [entry for entry in entries if entry.filename.rpartition("/")[2] == "data.pkl"]
            if len(pickles) != 1:
                raise Problem(f"{path}: is a zip without the one data.pkl that torch.save writes")
            if pickles[0].file_size > MOST_PICKLE_BYTES:
                raise Problem(f"{path}: its data.pkl has {pickles[0].file_size} bytes, more than {MOST_PICKLE_BYTES}")
            return archive.read(pickles[0])
    except OSError as error:
        raise Problem(f"{path}: {error.strerror}") from error
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, RuntimeError) as error:
        raise Problem(f"{path}: is truncated, or no zip as torch.save writes it ({_first_line(error)})") from error


def _globals_of(path: Path, text: bytes) -> set[str]:
    """Every name that the pickle asks for, read without building anything."""
    names: set[str] = set()
    stream = io.BytesIO(text)
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name not in OPCODES:
                raise Problem(
                    f"{path}: its pickle has opcode {opcode.name}, which torch.save never writes; nothing was run"
                )
            if opcode.name == "GLOBAL":
                module, _, name = str(argument).partition(" ")
                module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
                names.add(f"{module}.{name}")
    except (ValueError, UnicodeDecodeError, IndexError, OverflowError) as error:
        raise Problem(f"{path}: its pickle is damaged ({_first_line(error)})") from error
    if stream.tell() != len(text):
        raise Problem(f"{path}: its pickle goes on after its end")
    return names


def zip_fault(path: Path) -> str | None:
    """What the checksums tell that torch.save leaves in its zip, or None. Reads it whole, piece by piece."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                return None  # what reads it says so
            bad = archive.testzip()
            told = [entry for entry in entries if entry.filename.endswith("/.data/serialization_id")]
            whole = archive.read(told[0]).decode("ascii", "replace") if told and told[0].file_size < 100 else None
    except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError, RuntimeError) as error:
        return f"{path}: is truncated, or no zip as torch.save writes it ({error})"
    if bad is not None:
        return f"{path}: checksum of {bad} in it differs: it is damaged"
    if whole is not None and not whole.endswith(_checksum_of_all(entry for entry in entries if entry not in told)):
        return f"{path}: is not as torch.save wrote it (the checksum over all its entries differs)"
    return None


def _checksum_of_all(entries: Iterable[zipfile.ZipInfo]) -> str:
    """The end of the serialization_id that torch.save writes last: the entries' own checksums, combined in their order.

    Source: caffe2/serialize/inline_container.cc, writeRecord and writeSerializationId; c10/util/hash.h, hash_combine.
    """
    combined = 0
    for entry in entries:
        if entry.file_size:
            shifted = entry.CRC + 0x9E3779B9 + (combined << 6) + (combined >> 2)
            combined = (combined ^ shifted) & 0xFFFFFFFFFFFFFFFF
    return f"{combined:020d}"


def _tensors(value: Any, path: Path) -> Iterator[torch.Tensor]:
    """Every tensor in it. Problem where containers hold themselves, or one is deeper than any of DeepSpeed's."""
    seen: set[int] = set()
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        held, depth = waiting.pop()
        if isinstance(held, torch.Tensor):
            yield held
        if not isinstance(held, (dict, list, tuple, Inert)) or id(held) in seen:
            continue
        if depth > 64:
            raise Problem(f"{path}: is nested more than 64 deep")
        seen.add(id(held))
        inside = held.values() if isinstance(held, dict) else vars(held).values() if isinstance(held, Inert) else held
        waiting += [(one, depth + 1) for one in inside]


def _refuse_stretched(path: Path, tensor: torch.Tensor, on_disk: int) -> None:
    """A stride of 0 would make terabytes out of one number."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise Problem(f"{path}: holds a tensor that is no plain one ({tensor.layout} on {tensor.device})")
    if tensor.numel() * tensor.element_size() > min(on_disk, tensor.untyped_storage().nbytes()):
        raise Problem(f"{path}: holds a tensor of shape {list(tensor.shape)} over fewer bytes than that takes")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().partition("\n")[0] or type(error).__name__)[:160]
