"""What load_checkpoint takes, what it makes of it, and what it refuses in one line before anything is changed."""

import json
import shutil

import pytest
from ranks import run_ranks
from test_runtime_saving import engine_of, said, steps


def values(engine):
    return {name: parameter.full_tensor().clone() for name, parameter in engine.masters().items()}


def same(one, other):
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_no_checkpoint_of_this_model_is_refused_with_the_first_differences(tmp_path):
    first, second = run_ranks(2, refused_loads, str(tmp_path))
    assert first == second
    wider, fewer, groups, custom, foreign, nothing, absent = first
    path = tmp_path / "own" / "global_step1"
    assert wider.startswith(
        f"{path} is a checkpoint of another model: tokens.weight is [11, 16] there and [13, 16] here; build the model"
    )
    assert fewer == (
        f"{path} is a checkpoint of another model: more.weight is absent there; more.bias is absent there; build "
        "the model as when it was saved, or load with load_module_strict=False"
    )
    assert groups == (
        "the optimizer's groups of parameters: 2 here, 1 in the checkpoint; build them as when it was saved, or load with "
        "load_optimizer_states=False"
    )
    assert custom.startswith("custom_load_fn is not carried out")
    assert foreign == (
        f"{tmp_path}/theirs/global_step7 is DeepSpeed's own checkpoint, which holds pickles; convert it by `dsplan checkpoint "
        f"import {tmp_path}/theirs -o OUT` and load OUT"
    )
    assert nothing == (
        f"{tmp_path}/own/global_step9: does not exist, so it is no checkpoint; the newest other complete checkpoint is {path}: "
        f'load_checkpoint("{tmp_path}/own", tag="global_step1")'
    )
    assert absent.startswith(f"{tmp_path}/lost/latest: is absent, but there are checkpoints; the newest other complete")


def refused_loads(folder):
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from training import WIDTH, Net

    own = f"{folder}/own"
    engine = engine_of()
    steps(engine, 1)
    engine.save_checkpoint(own)
    if dist.get_rank() == 0:
        theirs = Path(folder) / "theirs" / "global_step7"
        theirs.mkdir(parents=True)
        (theirs.parent / "latest").write_text("global_step7")
        (theirs / "mp_rank_00_model_states.pt").write_bytes(b"PK")
        shutil.copytree(own, f"{folder}/lost")
        (Path(folder) / "lost" / "latest").unlink()
    dist.barrier()

    class Wider(Net):
        def __init__(self):
            super().__init__()
            self.tokens = torch.nn.Embedding(13, WIDTH)
            self.head.weight = self.tokens.weight

    class More(Net):
        def __init__(self):
            super().__init__()
            self.more = torch.nn.Linear(WIDTH, 2)

    wider, more = engine_of(net=Wider()), engine_of(net=More())
    lines = [said(lambda: wider.load_checkpoint(own)), said(lambda: more.load_checkpoint(own))]
    assert more.load_checkpoint(own, load_module_strict=False, load_optimizer_states=False)[0] == f"{own}/global_step1"
    assert same({name: value for name, value in values(more).items() if "more" not in name}, values(engine))
    from dsplan.runtime import initialize

    model = Net()
    held = list(model.parameters())
    grouped, *_ = initialize(
        model=model,
        model_parameters=[{"params": held[:3]}, {"params": held[3:]}],
        config={"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}},
    )
    before = values(grouped)
    lines.append(said(lambda: grouped.load_checkpoint(own)))
    assert same(values(grouped), before)  # nothing was changed
    lines.append(said(lambda: engine.load_checkpoint(own, custom_load_fn=print)))
    lines.append(said(lambda: engine.load_checkpoint(f"{folder}/theirs")))
    lines.append(said(lambda: engine.load_checkpoint(own, tag="global_step9")))
    lines.append(said(lambda: engine.load_checkpoint(f"{folder}/lost")))
    return lines


def test_another_optimizer_or_schedule_is_refused_before_anything_is_changed(tmp_path):
    first, second = run_ranks(2, load_into_others, str(tmp_path))
    assert first == second
    path = tmp_path / "global_step1"
    rest = "build it as when it was saved, or load with"
    assert first == [
        f"the checkpoint's optimizer is AdamW, but Lion here; {rest} load_optimizer_states=False",
        f"{path}: its schedule's state has no last_batch_iteration, so it is of another schedule than Schedule here; {rest} "
        "load_lr_scheduler_states=False",
    ]


def load_into_others(folder):
    import torch
    from dsplan.runtime import initialize
    from training import Net

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine, *_ = initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3),
        config={"train_batch_size": 4},
    )
    steps(engine, 1)
    engine.save_checkpoint(folder, client_state={"!tuple": [1]})  # looks like our mark for a tuple
    lion = engine_of(optimizer={"type": "Lion", "params": {"lr": 0.01}})
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}
    warm = engine_of(optimizer={"type": "Adam", "params": {"lr": 0.01}}, scheduler=schedule)
    before = values(lion), values(warm)
    lines = [said(lambda: lion.load_checkpoint(folder)), said(lambda: warm.load_checkpoint(folder))]
    assert same(values(lion), before[0]) and same(values(warm), before[1]) and not lion.optimizer.state
    assert lion.load_checkpoint(folder, load_optimizer_states=False)[1] == {"!tuple": [1]}
    warm.load_checkpoint(folder, load_lr_scheduler_states=False)  # Adam takes what AdamW had
    assert same(values(warm), values(engine)) and len(warm.optimizer.state) == len(engine.optimizer.state)
    return lines


def test_parts_of_a_checkpoint_alone(tmp_path):
    run_ranks(2, load_parts, str(tmp_path))


def load_parts(folder):
    engine = engine_of()
    steps(engine, 2)
    engine.save_checkpoint(folder, client_state={"epoch": 2})
    model_only = engine_of()
    assert model_only.load_checkpoint(folder, load_module_only=True)[1] == {"epoch": 2}
    assert same(values(model_only), values(engine))
    assert model_only.global_steps == 0 and not model_only.optimizer.state
    without = engine_of()
    without.load_checkpoint(folder, load_optimizer_states=False)
    assert same(values(without), values(engine))
    assert without.global_steps == 2 and not without.optimizer.state


def test_a_whole_model_in_safetensors_is_loaded_whatever_its_dtype_and_the_name_of_what_is_tied(tmp_path):
    import torch
    from safetensors.torch import save_file
    from training import Net

    torch.manual_seed(3)
    held = Net().state_dict()
    tied = held.pop("tokens.weight")  # head.weight is the same
    held = {name: tensor.bfloat16().contiguous() for name, tensor in held.items()}
    first = {name: tensor for name, tensor in held.items() if "blocks" in name}
    rest = {name: tensor.clone() for name, tensor in held.items() if "blocks" not in name}
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    save_file(rest, tmp_path / "model-00002-of-00002.safetensors")
    index = {name: "model-00001-of-00002.safetensors" for name in first} | {
        name: "model-00002-of-00002.safetensors" for name in rest
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    expected = {"tokens.weight": tied.bfloat16().float(), **{name: tensor.float() for name, tensor in held.items()}}
    (loaded, line), _ = run_ranks(2, load_whole, str(tmp_path))
    assert set(loaded) < set(expected)  # head.weight is tokens.weight, offset a buffer
    assert all(torch.equal(torch.tensor(loaded[name]), expected[name]) for name in loaded)
    assert "model-00002-of-00002.safetensors" in line or "cannot be read" in line


def load_whole(folder):
    from pathlib import Path

    import torch.distributed as dist

    engine = engine_of()
    assert engine.load_checkpoint(folder) == (folder, {})
    held = {name: value.tolist() for name, value in values(engine).items()}
    dist.barrier()
    if dist.get_rank() == 0:
        (Path(folder) / "model-00002-of-00002.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    dist.barrier()
    return held, said(lambda: engine.load_checkpoint(folder))


def test_nothing_is_unpickled(tmp_path):
    """Beside the checkpoint lie pickles that would tell of themselves, and torch.load raises."""
    run_ranks(1, load_beside_pickles, str(tmp_path))


class Told:
    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


def load_beside_pickles(folder):
    import pickle
    import sys
    from pathlib import Path

    import torch

    engine = engine_of()
    steps(engine, 1)
    engine.save_checkpoint(folder)
    for name in (".metadata", "__0_0.distcp", "data.pkl", "optimizer.pt"):
        (Path(folder) / "global_step1" / name).write_bytes(pickle.dumps(Told()))
    looked_up = []
    listening = [True]
    sys.addaudithook(lambda event, args: looked_up.append(args) if listening and event == "pickle.find_class" else None)
    load, torch.load = torch.load, None
    again = engine_of()
    assert again.load_checkpoint(folder)[0]
    torch.load = load
    listening.clear()
    assert looked_up == []
    assert same(values(again), values(engine))


def test_on_other_ranks_the_same_samples_give_the_same_losses(tmp_path):
    """Saved by 2 ranks of accumulation 2, gone on by 1 rank of accumulation 4: the order of sums differs, 1e-6 of a loss."""
    whole = run_ranks(2, go_on_with_data, str(tmp_path), True)
    ((resumed, accumulation),) = run_ranks(1, go_on_with_data, str(tmp_path), False)
    means = [(one + other) / 2 for one, other in zip(whole[0][0], whole[1][0], strict=True)]
    assert resumed == pytest.approx(means, rel=1e-6)
    assert (whole[0][1], accumulation) == (2, 4)
    (line,) = run_ranks(1, refused_batch, str(tmp_path))
    assert line == (
        "the checkpoint was trained with train_batch_size 6, which 1 ranks of micro-batch 4 do not divide; start no number of "
        "ranks, choose another micro-batch, or name another train_batch_size in the config"
    )


def go_on_with_data(folder, save):
    """Mean loss of each step on this rank after the save, or after the load."""
    import torch
    from dsplan.runtime import initialize
    from training import Net, batches, loss_of

    torch.manual_seed(0)
    engine, _, loader, _ = initialize(
        model=Net(),
        training_data=list(torch.cat(batches(8))),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        },
    )
    if not save:
        engine.load_checkpoint(folder)
    else:
        run_steps(engine, loader, 2, loss_of)
        engine.save_checkpoint(folder)
    return run_steps(engine, loader, 4, loss_of), engine.gradient_accumulation_steps()


def run_steps(engine, loader, count, loss_of):
    accumulation = engine.gradient_accumulation_steps()
    losses = []
    for _ in range(count):
        total = 0.0
        for _ in range(accumulation):
            tokens = next(loader)
            loss = loss_of(engine(tokens), tokens)
            engine.backward(loss)
            engine.step()
            total += loss.item() / accumulation
        losses.append(total)
    return losses


def refused_batch(folder):
    from pathlib import Path

    from dsplan.runtime.checkpoints.manifest import File, read_manifest, write_manifest, write_whole

    path = Path(folder) / "global_step2"
    state = json.loads((path / "state.json").read_text()) | {"train_batch_size": 6, "micro_batch": 4}
    files = {**read_manifest(path).files, "state.json": write_whole(path / "state.json", json.dumps(state))}
    assert isinstance(files["state.json"], File)
    write_manifest(path, "global_step2", files)
    engine = engine_of(train_micro_batch_size_per_gpu=4)
    return said(lambda: engine.load_checkpoint(folder))
