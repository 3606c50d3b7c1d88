"""Checkpoints that cannot be written, that are written in the background, and how many stay."""

import json

import pytest
from ranks import run_ranks


def engine_of(keys=None, *, zero_stage=3, frozen=False, net=None, **config):
    import torch
    from dsplan.runtime import initialize
    from training import Net

    torch.manual_seed(0)
    model = net or Net()
    if frozen:
        model.blocks[0].requires_grad_(False)
    engine, *_ = initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": zero_stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "dsplan": {"checkpoint": keys or {}},
            **config,
        },
    )
    return engine


def steps(engine, count):
    import torch
    from training import loss_of

    generator = torch.Generator().manual_seed(engine.global_steps)
    for _ in range(count):
        tokens = torch.randint(11, (2, 4), generator=generator)
        engine.backward(loss_of(engine(tokens), tokens))
        engine.step()


def said(action):
    """The one line of its Problem."""
    from dsplan.schemas.problem import Problem

    with pytest.raises(Problem) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_full_disk_on_one_rank_is_told_to_all_and_leaves_the_earlier_checkpoint(tmp_path):
    first, second = run_ranks(2, save_with_little_room, str(tmp_path))
    assert first == second
    place = tmp_path / "global_step2"
    earlier = f"; the newest complete checkpoint is {tmp_path / 'global_step1'}"
    # EFBIG is what a limit on a file's size gives; ENOSPC of rank 0, which writes state.json, is made up
    assert (
        first[0]
        == f"checkpoint {place} was not saved: rank 1: shard-00002-model-00001-of-00001.safetensors: File too large{earlier}"
    )
    assert first[1] == f"checkpoint {place} was not saved: {place.parent}/state.json: No space left on device{earlier}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "global_step2", "latest"]
    assert (tmp_path / "latest").read_text() == "global_step2"


def save_with_little_room(folder):
    import errno
    import os
    import resource

    import torch.distributed as dist
    from dsplan.runtime.checkpoints import saving

    engine = engine_of()
    steps(engine, 1)
    engine.save_checkpoint(folder)
    steps(engine, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    lines = [said(lambda: engine.save_checkpoint(folder))]
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(os.listdir(folder)) == ["global_step1", "latest"]

    def full(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{folder}/{path.name}")

    write_whole, saving.write_whole = saving.write_whole, full
    lines.append(said(lambda: engine.save_checkpoint(folder)))
    saving.write_whole = write_whole
    dist.barrier()
    assert sorted(os.listdir(folder)) == ["global_step1", "latest"]
    engine.save_checkpoint(folder)
    return lines


def test_what_cannot_be_saved_is_told_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")
    first, second = run_ranks(2, refused_saves, str(tmp_path))
    assert first == second
    assert first == [
        f"rank 0: {tmp_path}/file/sub: Not a directory",
        "rank 1: client_state['best']['loss'] is a torch.Tensor of shape [], which JSON cannot hold; give its .item()",
        "client_state['seen'] is a set, which JSON cannot hold; give numbers, words, lists and dicts",
        "client_state has the key 3, but keys must be words",
        "'a/b' cannot be a checkpoint's tag: it must be the name of one folder, shorter than 200 bytes, not begin with a dot, and not be latest",
        "'latest' cannot be a checkpoint's tag: it must be the name of one folder, shorter than 200 bytes, not begin with a dot, and not be latest",
        "'' cannot be a checkpoint's tag: it must be the name of one folder, shorter than 200 bytes, not begin with a dot, and not be latest",
        "save_dir is None, but must name a folder",
        "save_dir is empty, but must name a folder",
        f"rank 0: {tmp_path}/file/sub/model.bin: the model was not saved: Not a directory",
        "the checkpoint's tag differs: it is one on rank 1 and zero on rank 0; give one tag on every rank "
        "(checkpoint.tag_validation is Fail)",
        f"save_dir differs: it is {tmp_path}/1 on rank 1 and {tmp_path}/0 on rank 0; every rank must give the same folder, on a "
        "file system that all share",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "tags"]
    assert sorted(path.name for path in (tmp_path / "tags").iterdir()) == ["latest", "zero"]


def refused_saves(folder):
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    engine = engine_of(checkpoint={"tag_validation": "FAIL"})
    odd = {"best": {"loss": torch.ones(()) if rank == 1 else 1.0}}
    tag = "one" if rank == 1 else "zero"
    lines = [
        said(lambda: engine.save_checkpoint(f"{folder}/file/sub")),
        said(lambda: engine.save_checkpoint(folder, client_state=odd)),
        said(lambda: engine.save_checkpoint(folder, client_state={"seen": {1}})),
        said(lambda: engine.save_checkpoint(folder, client_state={3: 1})),
        said(lambda: engine.save_checkpoint(folder, tag="a/b")),
        said(lambda: engine.save_checkpoint(folder, tag="latest")),
        said(lambda: engine.save_checkpoint(folder, tag="")),
        said(lambda: engine.save_checkpoint(None)),
        said(lambda: engine.save_checkpoint("")),
        said(lambda: engine.save_16bit_model(f"{folder}/file/sub", "model.bin")),
        said(lambda: engine.save_checkpoint(folder, tag=tag)),
        said(lambda: engine.save_checkpoint(f"{folder}/{rank}")),
    ]
    engine = engine_of()  # Warn: rank 0's tag is taken
    engine.save_checkpoint(f"{folder}/tags", tag=tag)
    return lines


def test_a_folder_by_a_relative_path_a_tag_that_is_a_number_and_latest_that_is_a_folder(tmp_path):
    lines, _ = run_ranks(2, save_relatively, str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "one" / "held").iterdir()) == ["0", "latest"]
    assert list((tmp_path / "two").iterdir()) == []
    assert lines == [
        f"rank 0: {tmp_path}/one/held/latest is a folder, but must be the file that names the newest checkpoint; move it away"
    ]


def save_relatively(folder):
    """The folder is changed while the checkpoint is written in the background."""
    import os
    import threading
    from pathlib import Path

    import torch.distributed as dist
    from dsplan.runtime.checkpoints import saving

    before = os.getcwd()
    for name in ("one", "two"):
        Path(folder, name).mkdir(exist_ok=True)
    engine = engine_of({"async": True})
    gate, write = threading.Event(), saving.write_pieces

    def held(*args):
        gate.wait()
        return write(*args)

    saving.write_pieces = held
    try:
        os.chdir(f"{folder}/one")
        engine.save_checkpoint("held", tag=0)
        os.chdir(f"{folder}/two")
        gate.set()
        engine.wait_for_checkpoint()
        assert engine.load_checkpoint(f"{folder}/one/held", tag=0)[0] == f"{folder}/one/held/0"
    finally:
        saving.write_pieces = write
        os.chdir(before)
    latest = Path(folder, "one", "held", "latest")
    dist.barrier()
    if dist.get_rank() == 0:
        latest.unlink()
        latest.mkdir()
    dist.barrier()
    lines = [said(lambda: engine.save_checkpoint(f"{folder}/one/held"))]
    dist.barrier()
    return lines


def test_a_background_save_holds_what_was_there_when_it_was_asked_for(tmp_path):
    """The same run saves at once and in the background, and trains on."""
    run_ranks(2, save_both_ways, str(tmp_path))
    for name in (
        "state.json",
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001.safetensors",
    ):
        at_once, later = (tmp_path / way / "global_step1" / name for way in ("at_once", "later"))
        assert at_once.read_bytes() == later.read_bytes()
    assert (tmp_path / "later" / "latest").read_text() == "global_step1"


def save_both_ways(folder):
    import threading

    from dsplan.runtime.checkpoints import saving

    engine = engine_of({"async": True})
    steps(engine, 1)
    gate = threading.Event()
    write = saving.write_pieces

    def held_up(*args):
        assert gate.wait(60)
        return write(*args)

    saving.write_pieces = held_up
    engine.save_checkpoint(f"{folder}/later")
    saving.write_pieces = write
    at_once = engine_of()
    steps(at_once, 1)
    at_once.save_checkpoint(f"{folder}/at_once")
    steps(engine, 2)
    gate.set()
    engine.wait_for_checkpoint()


def test_what_went_wrong_in_the_background_is_told_at_the_next_call(tmp_path):
    lines = run_ranks(2, fail_later, str(tmp_path))
    assert lines[0] == lines[1]
    assert lines[0] == [
        f"checkpoint {tmp_path}/global_step0 was not saved: rank 1: shard-00002-model-00001-of-00001.safetensors: No space left on device; there is no earlier one"
    ]
    assert [path.name for path in tmp_path.iterdir()] == []


def fail_later(folder):
    import errno
    import os

    import torch.distributed as dist
    from dsplan.runtime.checkpoints import saving

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    engine = engine_of({"async": True})
    write = saving.write_pieces
    if dist.get_rank() == 1:
        saving.write_pieces = full
    engine.save_checkpoint(folder)  # returns before anything is known
    lines = [said(lambda: engine.load_checkpoint(folder))]
    saving.write_pieces = write
    return lines


def test_the_last_of_the_engines_own_checkpoints_stay(tmp_path):
    run_ranks(1, save_many, str(tmp_path))
    held = sorted(path.name for path in tmp_path.iterdir())
    # best has a name of the script's own; global_step1 was being read whenever it could have been removed
    assert held == ["best", "global_step1", "global_step4", "global_step5", "latest"]


def save_many(folder):
    from pathlib import Path

    from dsplan.runtime.checkpoints.places import being_read

    engine = engine_of({"keep_last": 2})
    engine.save_checkpoint(folder, tag="best", save_latest=False)
    steps(engine, 1)
    engine.save_checkpoint(folder)
    with being_read(Path(folder) / "global_step1"):
        for _ in range(4):
            steps(engine, 1)
            engine.save_checkpoint(folder)


def test_frozen_parameters_can_be_left_out(tmp_path):
    run_ranks(2, save_without_frozen, str(tmp_path))
    held = json.loads((tmp_path / "global_step0" / "state.json").read_text())["left_out"]
    assert held == sorted(held) and all(name.startswith("blocks.0.") for name in held) and len(held) == 6


def save_without_frozen(folder):
    import torch

    engine = engine_of(frozen=True)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    again = engine_of(frozen=True)
    with torch.no_grad():
        for parameter in again.masters().values():
            parameter.zero_()
    again.load_checkpoint(folder)
    for name, parameter in again.masters().items():
        expected = 0 if name.startswith("blocks.0.") else engine.masters()[name].full_tensor()
        assert torch.equal(parameter.full_tensor(), torch.zeros_like(parameter.full_tensor()) + expected)
    trained = engine_of()
    line = said(lambda: trained.load_checkpoint(folder))
    assert "blocks.0.norm.weight is absent there" in line


def test_a_save_within_a_step_is_of_the_step_before(tmp_path):
    run_ranks(1, save_within_a_step, str(tmp_path))


def save_within_a_step(folder):
    from training import batches, loss_of

    def start():
        engine = engine_of(gradient_accumulation_steps=2)
        return engine

    def micro_batches(engine, tokens):
        for part in tokens:
            engine.backward(loss_of(engine(part), part))
            engine.step()

    tokens = [part for batch in batches(1) for part in batch.split(2)]
    engine = start()
    micro_batches(engine, tokens[:3])
    assert engine.unfinished_micro_batches() == 1
    engine.save_checkpoint(folder)
    micro_batches(engine, tokens[3:])
    again = start()
    again.load_checkpoint(folder)
    assert (again.global_steps, again.micro_steps, again.unfinished_micro_batches()) == (1, 2, 0)
    micro_batches(again, tokens[2:])
    for name, parameter in engine.masters().items():
        assert parameter.full_tensor().equal(again.masters()[name].full_tensor())
