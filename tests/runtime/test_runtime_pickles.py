"""Files that torch.save did not write, or not for DeepSpeed: refused by name, nothing in them run."""

import os
import pickle
import struct
import zipfile
from collections import OrderedDict

import pytest
import torch
from dsplan.runtime.checkpoints.importing.pickles import read_saved, zip_fault
from dsplan.schemas.problem import Problem


class Runs:
    """Pickled as a call of a function of somebody else's choice."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def archive(path, text, *, compression=zipfile.ZIP_STORED, more=()):
    """A zip as torch.save lays it out, around a pickle of our own."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", text)
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/version", "3\n")
        for name, data in more:
            file.writestr(name, data)
    return path


def storage(numbers, kind=b"FloatStorage"):
    """The opcodes that ask for storage `0` of the zip, of so many numbers."""
    words = b"(X\x07\x00\x00\x00storagectorch\n" + kind + b"\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    return words + b"J" + struct.pack("<i", numbers) + b"tQ"


def tensor(size, stride, numbers):
    """The opcodes of a tensor over that storage."""

    def ints(values):
        return b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", value) for value in values) + b"t"

    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n("
    return rebuild + storage(numbers) + b"K\x00" + ints(size) + ints(stride) + b"\x89ccollections\nOrderedDict\n)RtR"


NAMES = {
    "posix.system": Runs(os.system, "touch RAN"),
    "builtins.eval": Runs(eval, "open('RAN', 'w')"),
    "builtins.exec": Runs(exec, "open('RAN', 'w')"),
    "builtins.getattr": Runs(getattr, "word", "join"),
    "builtins.bytearray": Runs(bytearray, 1 << 40),
    "subprocess.Popen": Runs(__import__("subprocess").Popen, ["touch", "RAN"]),
    "torch.serialization.load": Runs(torch.load, "other.pt"),
    "torch.hub.load": Runs(torch.hub.load, "repo", "model"),
    "functools.partial": Runs(__import__("functools").partial, os.system, "touch RAN"),
    "numpy": __import__("numpy").arange(3),
    "argparse.Namespace": __import__("argparse").Namespace(lr=1),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_global_but_deepspeeds_own_is_refused_by_name_wherever_it_lies(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for place, value in enumerate(
        [NAMES[name], {"module": OrderedDict(weight=NAMES[name])}, [({"deep": [NAMES[name]]},)]]
    ):
        path = archive(tmp_path / f"{place}.pt", pickle.dumps(value, protocol=2))
        with pytest.raises(
            Problem,
            match=rf"{place}\.pt: asks for .*{name.partition('.')[0].removeprefix('builtins')}.*nothing of it was run",
        ):
            read_saved(path)
    assert not (tmp_path / "RAN").exists()


@pytest.mark.parametrize("protocol", [0, 1, 3, 4, 5])
def test_other_protocols_are_refused_by_their_opcodes(tmp_path, monkeypatch, protocol):
    """They have other ways to ask for a function: INST, STACK_GLOBAL, EXT1."""
    monkeypatch.chdir(tmp_path)
    path = archive(
        tmp_path / "file.pt", pickle.dumps({"a": Runs(os.system, "touch RAN"), "b": b"bytes"}, protocol=protocol)
    )
    with pytest.raises(Problem, match=r"file\.pt: (its pickle has opcode|asks for)"):
        read_saved(path)
    assert not (tmp_path / "RAN").exists()


FORGED = {
    "opcode INST": b"\x80\x02(K\x01ios\nsystem\n.",
    "opcode EXT1": b"\x80\x02\x82\x01.",
    "opcode STACK_GLOBAL": b"\x80\x02X\x02\x00\x00\x00osX\x06\x00\x00\x00system\x93K\x01\x85R.",
    "asks for os.system": b"\x80\x02}cos\nsystem\nb.",  # BUILD over it
    "goes on after its end": b"\x80\x02N." + b"\x80\x02cos\nsystem\n.",
    "is damaged": b"\x80\x02X\xff\xff\xff\x7fshort",
    "damaged, or no file": b"\x80\x02ctorch\nSize\n)R" + b"0" * 3 + b".",
}


@pytest.mark.parametrize("reason", FORGED)
def test_forged_pickles_are_refused(tmp_path, reason):
    with pytest.raises(Problem) as refused:
        read_saved(archive(tmp_path / "file.pt", FORGED[reason]))
    assert "file.pt: " in str(refused.value) and (reason in str(refused.value) or "opcode POP" in str(refused.value))


@pytest.mark.parametrize(
    ("size", "stride", "numbers"),
    [((1 << 40,), (0,), 4), ((1 << 20, 1 << 20), (0, 0), 4), ((5,), (1,), 4), ((-1,), (1,), 4)],
)
def test_tensors_beyond_their_bytes_are_refused(tmp_path, size, stride, numbers):
    text = b"\x80\x02" + tensor(size, stride, numbers) + b"."
    path = archive(tmp_path / "file.pt", text, more=[("archive/data/0", b"\0" * 16)])
    with pytest.raises(Problem, match=r"file\.pt: "):
        read_saved(path)


def test_an_allocation_by_a_tensors_class_is_refused(tmp_path):
    """torch.Tensor(n), which weights_only allows, of more bytes than the file has."""
    text = b"\x80\x02ctorch\nTensor\n\x8a\x08" + struct.pack("<q", 1 << 28) + b"\x85R."
    with pytest.raises(Problem, match=r"file\.pt: "):
        read_saved(archive(tmp_path / "file.pt", text))


def test_zip_bombs_and_other_zips_are_refused_unopened(tmp_path):
    huge = archive(tmp_path / "packed.pt", b"\x80\x02N." + b"\0" * (1 << 24), compression=zipfile.ZIP_DEFLATED)
    assert huge.stat().st_size < 1 << 16
    with pytest.raises(Problem, match=r"packed\.pt: archive/data\.pkl in it is compressed"):
        read_saved(huge)
    with pytest.warns(UserWarning, match="Duplicate"):
        twice = archive(tmp_path / "twice.pt", b"\x80\x02N.", more=[("archive/data.pkl", b"\x80\x02cos\nsystem\n.")])
    with pytest.raises(Problem, match=r"twice\.pt: holds two entries of one name"):
        read_saved(twice)
    with pytest.raises(Problem, match=r"two\.pt: is a zip without the one data\.pkl"):
        read_saved(archive(tmp_path / "two.pt", b"\x80\x02N.", more=[("other/data.pkl", b"\x80\x02N.")]))
    liar = bytearray(archive(tmp_path / "liar.pt", b"\x80\x02N.").read_bytes())
    entry = liar.index(b"PK\x01\x02")
    liar[entry + 20 : entry + 28] = struct.pack("<II", 1 << 30, 1 << 30)
    (tmp_path / "liar.pt").write_bytes(liar)
    with pytest.raises(Problem, match=r"liar\.pt: its entries claim more bytes"):
        read_saved(tmp_path / "liar.pt")


def test_files_cut_anywhere_and_files_of_other_kinds_are_refused_by_name(tmp_path):
    whole = tmp_path / "whole.pt"
    torch.save({"module": OrderedDict(weight=torch.arange(40.0))}, whole)
    data = whole.read_bytes()
    path = tmp_path / "cut.pt"
    for length in range(0, len(data), 97):
        path.write_bytes(data[:length])
        with pytest.raises(Problem, match=r"cut\.pt: is truncated"):
            read_saved(path)
    for other in (b"", b"hello\n" * 30, pickle.dumps([1, 2])):
        path.write_bytes(other)
        with pytest.raises(Problem, match=r"cut\.pt: is truncated, or no zip"):
            read_saved(path)
    with pytest.raises(Problem, match=r"absent\.pt: No such file"):
        read_saved(tmp_path / "absent.pt")


def test_no_change_of_one_byte_is_more_than_a_refusal_or_other_numbers(tmp_path):
    """What comes is a Problem or a value, never another error."""
    path = tmp_path / "whole.pt"
    torch.save({"module": OrderedDict(weight=torch.arange(4.0)), "steps": 3}, path)
    data = path.read_bytes()
    refused = 0
    for place in range(0, len(data), 3):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        try:
            read_saved(path)
        except Problem:
            refused += 1
    assert 100 < refused < len(data) // 3


def rewritten(path, change):
    """Its entries in a new zip with checksums of their own, one of them changed."""
    with zipfile.ZipFile(path) as file:
        entries = [(entry.filename, file.read(entry)) for entry in file.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for name, data in entries:
            file.writestr(name, change(name, data))


def test_a_pickle_rewritten_within_a_sound_zip_is_told_by_the_checksum_over_all_entries(tmp_path):
    path = tmp_path / "some.pt"
    torch.save({"module": OrderedDict(weight=torch.arange(4.0), none=torch.empty(0)), "steps": 3}, path)
    assert zip_fault(path) is None
    rewritten(path, lambda _, data: data)
    assert zip_fault(path) is None
    rewritten(path, lambda name, data: data.replace(b"K\x03", b"K\x07") if name.endswith(".pkl") else data)
    assert read_saved(path)["steps"] == 7
    assert zip_fault(path) == f"{path}: is not as torch.save wrote it (the checksum over all its entries differs)"


def test_a_file_under_another_name_than_it_was_written_as_is_refused(tmp_path):
    """torch.save puts its name into the zip: what tells the files of two ranks apart at stage 3."""
    first = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"module": OrderedDict()}, first)
    read_saved(first)
    other = first.rename(tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    with pytest.raises(
        Problem, match=r"rank_1.*\.pt: was written as zero_pp_rank_0_mp_rank_00_optim_states\.pt, so it is"
    ):
        read_saved(other)


def test_what_deepspeed_writes_of_its_own_becomes_inert(tmp_path):
    text = (
        b"\x80\x02(cdeepspeed.runtime.zero.config\nZeroStageEnum\nK\x02\x85R"
        b"cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n)\x81}X\x09\x00\x00\x00cur_scaleG@p\x00\x00\x00\x00\x00\x00sbt."
    )
    stage, scaler = read_saved(archive(tmp_path / "file.pt", text))
    assert stage.arguments == (2,) and vars(scaler) == {"cur_scale": 256.0}
