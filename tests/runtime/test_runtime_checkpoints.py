"""A run that is saved and loaded goes on as if it had never stopped, whatever it is loaded into."""

import json

import pytest
from ranks import run_ranks

SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 20, "warmup_type": "linear"}}


def train(folder, zero_stage, first, stop, load, precision="fp32"):
    """Steps first..stop of one fixed run; losses from rank 0's point of view, averaged over ranks."""
    import torch
    import torch.distributed as dist
    from dsplan.runtime import initialize
    from training import SAMPLES, Net, batches, loss_of

    torch.manual_seed(5 if load else 0)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Net()
    groups = [
        {"params": [parameter for parameter in model.parameters() if parameter.dim() == 1], "weight_decay": 0.0},
        {"params": [parameter for parameter in model.parameters() if parameter.dim() > 1]},
    ]
    config = {
        "train_batch_size": SAMPLES,
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": SCHEDULE,
        precision: {"enabled": True},
    }
    engine, _, _, _ = initialize(model=model, model_parameters=groups, config=config)
    if load:
        path, client_state = engine.load_checkpoint(folder)
        assert path == f"{folder}/global_step{first}" and client_state == {"epoch": 3}
        assert engine.global_steps == first
    losses = []
    for tokens in batches(stop)[first:]:
        part = tokens.chunk(world)[rank]
        loss = loss_of(engine(part), part)
        engine.backward(loss)
        engine.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    if not load:
        engine.save_checkpoint(folder, client_state={"epoch": 3})
    return losses, engine.get_lr()


@pytest.mark.parametrize(("saved", "loaded", "ranks"), [(3, 3, 2), (2, 0, 2), (0, 3, 1), (3, 1, 3)])
def test_a_loaded_run_goes_on_as_the_one_that_was_saved(tmp_path, saved, loaded, ranks):
    """From 2 ranks at one stage to `ranks` at another. fp32: only the order of sums differs."""
    if ranks == 3:  # 8 samples do not go into 3: what is loaded on 3 ranks is saved again, and compared on 2
        run_ranks(2, train, str(tmp_path), saved, 0, 5, False)
        run_ranks(3, load_and_save, str(tmp_path), loaded)
        ranks = 2
    else:
        run_ranks(2, train, str(tmp_path), saved, 0, 5, False)
    whole, lr = run_ranks(2, train, str(tmp_path / "whole"), saved, 0, 8, False)[0]
    rest, rest_lr = run_ranks(ranks, train, str(tmp_path), loaded, 5, 8, True)[0]
    assert rest == pytest.approx(whole[5:], rel=1e-5)
    assert rest_lr == lr


def load_and_save(folder, zero_stage):
    from dsplan.runtime import initialize
    from training import Net

    model = Net()
    groups = [
        {"params": [parameter for parameter in model.parameters() if parameter.dim() == 1], "weight_decay": 0.0},
        {"params": [parameter for parameter in model.parameters() if parameter.dim() > 1]},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": SCHEDULE,
    }
    engine, _, _, _ = initialize(model=model, model_parameters=groups, config=config)
    _, client_state = engine.load_checkpoint(folder)
    engine.save_checkpoint(folder, client_state=client_state)


def test_what_lies_on_disk_needs_no_pickle_and_leaves_nothing_half_done(tmp_path):
    run_ranks(2, train, str(tmp_path), 3, 0, 2, False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step2", "latest"]
    assert (tmp_path / "latest").read_text() == "global_step2"
    kinds = {path.suffix for path in (tmp_path / "global_step2").iterdir()}
    assert kinds == {".json", ".safetensors"}
    state = json.loads((tmp_path / "global_step2/state.json").read_text())
    assert (state["global_steps"], state["client_state"]) == (2, {"epoch": 3})


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
def test_the_whole_model_is_one_file_in_the_compute_dtype(tmp_path, name):
    import torch
    from safetensors.torch import load_file
    from training import Net

    run_ranks(2, save_whole, str(tmp_path), name)
    path = tmp_path / name
    whole = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    torch.manual_seed(0)
    buffers = dict(Net().named_buffers())  # these keep their type, as in DeepSpeed
    torch.manual_seed(0)
    expected = {key: held if key in buffers else held.bfloat16() for key, held in Net().state_dict().items()}
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[key], expected[key]) for key in expected)


def save_whole(folder, name):
    import torch
    import torch.distributed as dist
    from dsplan.runtime import initialize
    from training import Net

    torch.manual_seed(dist.get_rank())
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    engine, _, _, _ = initialize(model=Net(), config=config)
    engine.save_16bit_model(folder, name)


def test_an_empty_folder_is_told_and_nothing_is_loaded(tmp_path):
    assert run_ranks(1, load_nothing, str(tmp_path)) == [(None, None)]  # as DeepSpeed answers


def load_nothing(folder):
    from dsplan.runtime import initialize
    from training import Net

    engine, _, _, _ = initialize(model=Net(), config={"train_batch_size": 1})
    return engine.load_checkpoint(folder)
