"""A consolidated model: against the model that was saved, in plain PyTorch and by transformers."""

import json
import weakref

import pytest
import torch
from dsplan.runtime.checkpoints import consolidating, whole_files
from dsplan.runtime.checkpoints.choosing import choose
from dsplan.schemas.problem import Problem
from ranks import run_ranks
from safetensors.torch import load_file, load_model
from training import Net as Trained

GB = 10**9


class Net(Trained):
    """With a whole number, and numbers without a dimension."""

    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.tensor(7))


def save(folder, zero_stage):
    """The plain state dict that was saved by these ranks."""
    import torch.distributed as dist
    from dsplan.runtime import initialize

    torch.manual_seed(dist.get_rank())
    model = Net()
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = {"train_batch_size": 6, "zero_optimization": {"stage": zero_stage}}
    engine, *_ = initialize(model=model, config=config)
    engine.save_checkpoint(folder)
    return whole


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder of checkpoints, the model that is in it), on 3 ranks, which none of its sizes is a multiple of."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(3, save, str(folder), 3)[0]


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_every_tensor_is_there_once_and_whole(saved, tmp_path, precision, dtype):
    folder, model = saved
    consolidating.consolidate(choose(folder), tmp_path / "out", precision, 5 * GB)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert tensors.keys() == model.keys() - {"head.weight"}  # tied, under its first name alone
    for name, tensor in tensors.items():
        expected = model[name].to(dtype) if model[name].is_floating_point() else model[name]
        assert tensor.dtype == expected.dtype and tensor.shape == expected.shape and torch.equal(tensor, expected), name


def test_plain_pytorch_loads_it(saved, tmp_path):
    folder, model = saved
    consolidating.consolidate(choose(folder / "global_step0"), tmp_path / "out", "fp32", 5 * GB)
    fresh = Net()
    assert load_model(fresh, tmp_path / "out/model.safetensors") == (set(), [])
    assert fresh.head.weight is fresh.tokens.weight
    assert torch.equal(fresh.head.weight, model["tokens.weight"])


def test_files_are_cut_and_indexed_as_hugging_face_does(saved, tmp_path):
    folder, model = saved
    most = 4000
    written = consolidating.consolidate(choose(folder), tmp_path / "out", "fp32", most)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    names = sorted({*index["weight_map"].values()})
    assert names == [f"model-{number:05d}-of-{len(names):05d}.safetensors" for number in range(1, len(names) + 1)]
    assert sorted(written.files) == [*names, "model.safetensors.index.json"]
    sizes = {}
    for name in names:
        tensors = load_file(tmp_path / "out" / name)
        assert all(index["weight_map"][key] == name for key in tensors)
        sizes[name] = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        assert sizes[name] <= most or len(tensors) == 1
    assert index["metadata"]["total_size"] == sum(sizes.values()) == written.tensor_bytes
    assert index["weight_map"].keys() == model.keys() - {"head.weight"}


def test_from_pretrained_takes_it(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8)
    expected = run_ranks(2, save_gpt2, str(tmp_path / "saved"), config.to_dict())[0]
    consolidating.consolidate(choose(tmp_path / "saved"), tmp_path / "out", "fp32", 2000)
    config.save_pretrained(tmp_path / "out")
    model, told = GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    state = model.state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)


def save_gpt2(folder, config):
    from dsplan.runtime import initialize
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**config))
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine, *_ = initialize(model=model, config={"train_batch_size": 2, "zero_optimization": {"stage": 3}})
    engine.save_checkpoint(folder)
    return whole


def test_no_more_than_one_tensor_is_ever_held(saved, tmp_path, monkeypatch):
    folder, _ = saved
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0
    read = whole_files.read_held

    def counted(held):
        nonlocal most
        tensor = read(held)
        alive.add(tensor)
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(consolidating, "read_held", counted)
    consolidating.consolidate(choose(folder), tmp_path / "out", "fp16", 5 * GB)
    assert most == 1


def damaged(saved, tmp_path, change):
    import shutil

    folder = shutil.copytree(saved[0], tmp_path / "damaged")
    change(folder / "global_step0")
    with pytest.raises(Problem) as refused:
        consolidating.consolidate(choose(folder), tmp_path / "out", "fp32", 5 * GB)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".partial_*"))
    return str(refused.value)


def test_a_damaged_checkpoint_is_refused_by_the_files_name(saved, tmp_path):
    def flip(folder):
        path = folder / "shard-00002-model-00001-of-00001.safetensors"
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)

    assert "shard-00002-model-00001-of-00001.safetensors: checksum differs" in damaged(saved, tmp_path, flip)


def test_an_absent_part_is_refused(saved, tmp_path):
    name = "shard-00003-model-00001-of-00001.safetensors"
    assert f"{name}: is absent" in damaged(saved, tmp_path, lambda folder: (folder / name).unlink())


def test_what_is_there_is_kept(saved, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("kept")
    with pytest.raises(Problem, match="out exists already"):
        consolidating.consolidate(choose(saved[0]), tmp_path / "out", "fp32", GB)
    assert (tmp_path / "out/mine").read_text() == "kept"


def test_numbers_beyond_fp16_are_told(tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "in").mkdir()
    save_file({"large": torch.tensor([1e5, 1.0]), "small": torch.ones(2)}, tmp_path / "in/model.safetensors")
    written = consolidating.consolidate(choose(tmp_path / "in"), tmp_path / "out", "fp16", GB)
    assert written.notes == ("large holds numbers beyond fp16's largest, which are infinite now",)
