"""DeepSpeed's own checkpoints, imported: against what DeepSpeed itself answered (tests/oracle/deepspeed_checkpoints.py)."""

import json
import shutil
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dsplan.runtime.checkpoints.choosing import Chosen
from dsplan.runtime.checkpoints.consolidating import consolidate
from dsplan.runtime.checkpoints.importing import reading
from dsplan.runtime.checkpoints.importing.deepspeed import import_checkpoint
from dsplan.runtime.checkpoints.importing.pickles import read_saved
from dsplan.runtime.checkpoints.manifest import faults
from dsplan.schemas.problem import Problem
from exchanged import CASES, CLIENT_STATE, SAVED_AT, STOP, digest
from ranks import run_ranks
from safetensors.torch import load_file

ORACLE = Path(__file__).parents[1] / "oracle"
TOLD = json.loads((ORACLE / "deepspeed_checkpoints.json").read_text("utf-8"))
BY_NAME = {case.name: case for case in CASES}
TOLERANCE = {"fp32": 1e-6, "bf16": 5e-3, "fp16": 5e-3}
"""Of losses, relative: DeepSpeed's stages differ by as much among themselves."""


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """A folder with what DeepSpeed wrote, by case."""
    folder = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(ORACLE / "deepspeed_checkpoints.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def tag_of(folder):
    return folder / (folder / "latest").read_text()


@pytest.fixture(scope="session")
def imported(written, tmp_path_factory):
    """The same, imported."""
    folder = tmp_path_factory.mktemp("imported")
    for name in TOLD:
        import_checkpoint(tag_of(written / name), folder / name)
    return folder


@pytest.fixture
def broken(written, tmp_path):
    """A copy that may be damaged."""

    def copy(name):
        return Path(shutil.copytree(tag_of(written / name), tmp_path / "broken" / "global_step3"))

    return copy


@pytest.mark.parametrize("name", TOLD)
def test_every_weight_is_the_one_that_deepspeeds_own_zero_to_fp32_gives(imported, name):
    tensors = load_file(tag_of(imported / name) / "model.safetensors")
    told = TOLD[name]["weights"]
    assert told or BY_NAME[name].zero_stage == 0  # zero_to_fp32 reads the other stages
    for key, weight in told.items():
        if key == "head.weight":  # tied: kept under its first name alone
            assert weight == told["tokens.weight"] and "model.head.weight" not in tensors
        else:
            assert digest(tensors[f"model.{key}"]) == weight, key


@pytest.mark.parametrize("name", TOLD)
def test_counters_scale_and_client_state_are_taken_over(imported, name):
    path = tag_of(imported / name)
    assert faults(path) == []
    state = json.loads((path / "state.json").read_text())
    told, case = TOLD[name], BY_NAME[name]
    assert (state["global_steps"], state["skipped_steps"]) == (told["global_steps"], told["skipped_steps"])
    assert (state["zero_stage"], state["world_size"], state["precision"]) == (
        case.zero_stage,
        case.ranks,
        case.precision,
    )
    assert (state["loss_scale"] or {}).get("value") == told.get("loss_scale")
    assert state["client_state"] == CLIENT_STATE and state["imported"] == {"engine": "deepspeed", "version": "0.19.8"}
    if case.optimizer == "none":
        assert state["groups"] is None
    else:
        decays = [group["weight_decay"] for group in state["groups"]]
        weight_decay = 0.0 if case.optimizer == "SGD" else 0.1
        assert decays == ([0.0, weight_decay] if case.groups else [weight_decay])
        held = (
            15 if case.frozen_given and case.zero_stage == 0 else 13
        )  # the other stages leave the two frozen ones out
        assert sum(len(group["params"]) for group in state["groups"]) == held


def resumed(name, folder):
    """Losses after an import, by the native engine on these ranks, from other weights; and the steps skipped in all."""
    import torch.distributed as dist
    from dsplan.runtime import initialize
    from exchanged import build, run

    case = replace(BY_NAME[name], ranks=dist.get_world_size(), zero=())
    model, given = build(case, seed=11)
    config = case.config()
    config.pop("zero_allow_untested_optimizer")
    config["zero_optimization"].pop("offload_optimizer", None)
    config.get("optimizer", {"params": {}})["params"].pop("torch_adam", None)
    engine, *_ = initialize(model=model, config=config, **given)
    path, client_state = engine.load_checkpoint(folder)
    assert client_state == CLIENT_STATE and Path(path).parent == Path(folder)
    return run(engine, SAVED_AT, STOP, case.optimizer != "none"), engine.skipped_steps


BROKEN_IN_DEEPSPEED = {"z0_fp16"}
"""Its stage 0 divides gradients by a loss scale that the loss was never multiplied with, so its losses are no target."""


@pytest.mark.parametrize("name", sorted(TOLD.keys() - BROKEN_IN_DEEPSPEED))
def test_the_native_engine_goes_on_as_deepspeed_did(imported, name):
    losses, skipped = run_ranks(2, resumed, name, str(imported / name))[0]
    assert losses == pytest.approx(TOLD[name]["after"], rel=TOLERANCE[BY_NAME[name].precision])
    assert skipped == TOLD[name]["skipped_at_end"]


@pytest.mark.parametrize(("name", "ranks"), [("z3_three_ranks", 1), ("z1_fp32", 3), ("z2_groups_round_robin", 3)])
def test_on_other_numbers_of_ranks_too(imported, name, ranks):
    losses, _ = run_ranks(ranks, resumed, name, str(imported / name))[0]
    assert losses == pytest.approx(TOLD[name]["after"], rel=TOLERANCE[BY_NAME[name].precision])


def refusal(folder, out):
    with pytest.raises(Problem) as refused:
        import_checkpoint(folder, out)
    assert not out.exists() or not list(out.iterdir())
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "removed", "said"),
    [
        ("z2_fp32", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "is absent, so the part of rank 0 is lost"),
        ("z2_fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt is absent"),
        ("z3_fp32", "zero_pp_rank_1_mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt is absent"),
        ("z3_three_ranks", "zero_pp_rank_1_mp_rank_00_model_states.pt", "the part of rank 1 is lost"),
        ("z1_fp32", "mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt: is absent"),
        ("z1_fp32", "*_optim_states.pt", "has no *_optim_states.pt"),
    ],
)
def test_absent_files_are_named(broken, tmp_path, name, removed, said):
    folder = broken(name)
    for path in folder.glob(removed):
        path.unlink()
    assert said in refusal(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "other", "file", "said"),
    [
        (
            "z2_bf16",
            "z2_groups_round_robin",
            "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
            "files of two checkpoints are mixed",
        ),
        ("z2_fp32", "z1_fp16", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "files of two checkpoints are mixed"),
        ("z2_bf16", "z2_fp16", "mp_rank_00_model_states.pt", "has another ds_config than"),
        ("z3_bf16", "z3_fp16", "zero_pp_rank_1_mp_rank_00_model_states.pt", "files of two checkpoints are mixed"),
        ("z2_bf16", "z2_fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt", "files of two runs are mixed"),
    ],
)
def test_files_of_two_checkpoints_are_refused_by_name(broken, written, tmp_path, name, other, file, said):
    folder = broken(name)
    shutil.copy(tag_of(written / other) / file, folder / file)
    assert said in refusal(folder, tmp_path / "out")


def changed(path, *keys, value):
    """One value in a file, which torch.save then writes again: with sound checksums."""
    held = torch.load(path, weights_only=True)
    place = held
    for key in keys[:-1]:
        place = place[key]
    if value is None:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    torch.save(held, path)


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (
            ["global_steps"],
            2,
            "counts 2 steps, 0 of them skipped, but the optimizer's files 3 steps; files of two check",
        ),
        (["global_steps"], -3, "its global_steps is -3, but must be a count"),
        (["dp_world_size"], 3, "was written by 3 ranks, but there are optimizer files of 2"),
        (["ds_version"], "0.18.0", "has ds_version 0.19.8, but mp_rank_00_model_states.pt has 0.18.0; files of two"),
        (["ds_config", "seed"], 1, "has another ds_config than mp_rank_00_model_states.pt; files of two checkpoints"),
        (["buffer_names"], None, "has no `buffer_names`, so it is no file that save_checkpoint"),
        (["buffer_names", 0], "lost", "its buffer_names are not those of tensors in it"),
        (["module", "tokens.weight"], torch.ones(7, 5).bfloat16(), "is not the fp32 weight of the optimizer's files"),
        (["module", "tokens.weight"], "lost", "tokens.weight in it is no tensor, but [7, 5] in its param_shapes"),
        (
            ["param_shapes", 0, "tokens.weight"],
            torch.Size([6, 5]),
            "is of shape [7, 5], but [6, 5] in its param_shapes",
        ),
        (["param_shapes"], [7], "its files are not laid out as DeepSpeed 0.19.8 does it (AttributeError"),
    ],
)
def test_model_files_that_tell_other_things_than_the_optimizers_are_refused(broken, tmp_path, keys, value, said):
    folder = broken("z2_bf16")
    changed(folder / "mp_rank_00_model_states.pt", *keys, value=value)
    assert said in refusal(folder, tmp_path / "out")


STATES = ["optimizer_state_dict", "optimizer_state_dict", "state", 0]


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        ([*STATES, "exp_avg"], None, "differ from those of zero_pp_rank_0"),
        ([*STATES, "exp_avg"], torch.zeros(160).double(), "differ from those of zero_pp_rank_0"),
        ([*STATES, "exp_avg"], torch.zeros(161), "sub-group 0 has 161 numbers on a rank instead of 160"),
        ([*STATES, "step"], torch.tensor(2.0), "differ from those of zero_pp_rank_0"),
        (["optimizer_state_dict", "partition_count"], 3, "is one of 3 ranks' files, but there are 2"),
        (["optimizer_state_dict", "dynamic_loss_scale"], True, "has dynamic_loss_scale True, but zero_pp_rank_0"),
        (["optimizer_state_dict", "fp32_flat_groups", 0], torch.ones(160).int(), "are no arrays of floating numbers"),
    ],
)
def test_one_ranks_optimizer_file_that_differs_from_the_others_is_refused(
    broken, tmp_path, keys, value, said, monkeypatch
):
    folder = broken("z3_fp32")
    path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    held = read_saved(path)
    place = held
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    if value is None:
        del place[keys[-1]]
    monkeypatch.setattr(reading, "read_saved", lambda asked: held if asked == path else read_saved(asked))
    assert said in refusal(folder, tmp_path / "out")


@pytest.mark.parametrize("name", ["z2_fp32", "z3_fp32"])
def test_optimizer_files_of_two_ranks_that_were_swapped_are_refused(broken, tmp_path, name):
    folder = broken(name)
    first, second = (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)
    assert f"{first}: was written as {second.name}, so it is of another rank" in refusal(folder, tmp_path / "out")


def test_a_checkpoint_under_the_name_of_another_step_is_remarked_on(broken, tmp_path):
    folder = broken("z3_sgd_three_ranks")
    other = folder.rename(folder.with_name("global_step4"))
    written = import_checkpoint(other, tmp_path / "out")
    assert written.notes == (f"{other}: its files count 3 steps, which is not what its name says",)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("layer_0_expert_0_mp_rank_00_model_states.pt", "holds a mixture of experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "holds a mixture of experts"),
        ("layer_00-model_00-model_states.pt", "was written by a pipeline"),
        ("mp_rank_01_model_states.pt", "split by tensor parallelism"),
        ("zero/tokens.weight/fp32.pt", "is a universal checkpoint"),
    ],
)
def test_kinds_that_are_not_imported_are_refused_by_name(broken, tmp_path, file, said):
    folder = broken("z2_fp32")
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / file)
    assert said in refusal(folder, tmp_path / "out")


@pytest.mark.parametrize("file", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_a_truncated_file_is_named(broken, tmp_path, file):
    folder = broken("z1_fp32")
    (folder / file).write_bytes((folder / file).read_bytes()[:-700])
    assert file in refusal(folder, tmp_path / "out")


@pytest.mark.parametrize(
    "file",
    ["mp_rank_00_model_states.pt", *(f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))],
)
def test_one_flipped_bit_in_any_tensor_is_refused_by_the_files_name(broken, tmp_path, file):
    """Also of an optimizer's state, which nothing else in the files tells; a step is told by the other ranks'."""
    folder = broken("z1_bf16")
    whole = (folder / file).read_bytes()
    with zipfile.ZipFile(folder / file) as held:
        entries = [entry for entry in held.infolist() if "/data/" in entry.filename and entry.file_size > 8]
    assert len(entries) > 2
    for entry in entries:
        at = entry.header_offset + 30 + int.from_bytes(whole[entry.header_offset + 26 :][:2], "little")
        at += int.from_bytes(whole[entry.header_offset + 28 :][:2], "little")
        (folder / file).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        said = refusal(folder, tmp_path / "out")
        assert said == f"{folder / file}: checksum of {entry.filename} in it differs: it is damaged"
        with pytest.raises(Problem, match="it is damaged"):
            consolidate(Chosen(folder, "deepspeed"), tmp_path / "model", "fp32", 1000)


def test_what_cannot_be_told_in_json_is_dropped_by_name(broken, tmp_path):
    folder = broken("z2_fp32")
    path = folder / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=True)
    state |= {"best": torch.ones(3), "pair": (1, 2.5), 7: "seven", "random_ltd": {"step": 1}}
    torch.save(state, path)
    written = import_checkpoint(folder, tmp_path / "out")
    assert [note.partition(" is ")[0].partition(": the")[0] for note in written.notes] == [
        "not taken over: random_ltd",
        "not taken over: client_state['best']",
        "not taken over: client_state[7] has a key that",
    ]
    told = json.loads((Path(written.path) / "state.json").read_text())["client_state"]
    assert told == {**CLIENT_STATE, "pair": {"!tuple": [1, 2.5]}}


def test_what_is_there_is_not_written_over_and_a_full_disk_leaves_nothing(written, tmp_path, monkeypatch):
    source = tag_of(written / "z2_fp32")
    import_checkpoint(source, tmp_path / "out")
    with pytest.raises(Problem, match="global_step3 exists already"):
        import_checkpoint(source, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(Problem, match="is a file, but must be a folder"):
        import_checkpoint(source, tmp_path / "file")

    def full(*_):
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr("dsplan.runtime.checkpoints.importing.deepspeed.write_parts", full)
    with pytest.raises(Problem, match=r"model\.safetensors: No space left on device; nothing was left"):
        import_checkpoint(source, tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []
