"""dsplan checkpoint: exit codes, one line for what goes wrong, and what a script can read."""

import json
import shutil
from pathlib import Path

import pytest
from command import dsplan

DEEPSPEED = Path(__file__).parents[2] / "examples/deepspeed_checkpoint"


@pytest.fixture
def imported(tmp_path):
    """A folder with two of our checkpoints, the second of them the latest."""
    folder = tmp_path / "ckpt"
    assert dsplan("checkpoint", "import", str(DEEPSPEED), "-o", str(folder)).code == 0
    later = tmp_path / "later"
    shutil.copytree(DEEPSPEED / "global_step3", later / "global_step4")
    assert dsplan("checkpoint", "import", str(later / "global_step4"), "-o", str(folder)).code == 0
    return folder


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def test_inspect_tells_scripts_what_there_is(imported):
    (imported / ".partial_global_step5").mkdir()
    done = dsplan("checkpoint", "inspect", str(imported), "--format", "json")
    told = json.loads(done.out)
    assert (done.code, told["version"], told["latest"], told["leftovers"]) == (
        0,
        1,
        "global_step4",
        [".partial_global_step5"],
    )
    first, second = told["checkpoints"]
    assert (first["tag"], first["latest"], second["tag"], second["latest"]) == (
        "global_step3",
        False,
        "global_step4",
        True,
    )
    same = {
        "kind": "native",
        "complete": True,
        "global_steps": 3,
        "world_size": 2,
        "zero_stage": 2,
        "precision": "bf16",
    }
    assert {key: second[key] for key in same} == same
    assert second["optimizer"] == ["exp_avg", "exp_avg_sq", "step"]
    assert second["groups"] == [{"lr": 0.008, "weight_decay": 0.1, "params": 13}]
    assert (second["num_parameters"], second["num_tensors"], second["client_state"]) == (344, 17, ["epoch", "note"])


def test_what_stands_in_the_way_of_latest_is_told(imported):
    (imported / "latest").write_text("\0", "utf-8")
    assert "latest names '\\x00', which is no checkpoint there" in dsplan("checkpoint", "inspect", str(imported)).out
    (imported / "latest").unlink()
    (imported / "latest").mkdir()
    done = dsplan("checkpoint", "verify", str(imported))
    assert done.code == 1
    assert "latest: is a folder, but must be the file that names the newest checkpoint; move it away" in done.out


def test_checkpoints_are_in_the_order_of_their_numbers(imported):
    for number in (10, 9):
        shutil.copytree(imported / "global_step3", imported / f"global_step{number}")
    lines = dsplan("checkpoint", "verify", str(imported)).out.splitlines()
    told = [line.partition(":")[0] for line in lines if line.startswith("global_step")]
    assert told == [f"global_step{number}" for number in (3, 4, 9, 10)]


def test_a_folder_with_nothing_but_what_a_save_left_says_so(tmp_path):
    (tmp_path / ".partial_global_step9").mkdir()
    done = dsplan("checkpoint", "verify", str(tmp_path))
    assert done.code == 2
    assert ".partial_global_step9 was left by a save that was cut off, or is being written" in done.err


def test_verify_names_the_damaged_file_and_the_newest_complete_one(imported):
    assert dsplan("checkpoint", "verify", str(imported)).out == "global_step3: complete\nglobal_step4: complete\n"
    flip(imported / "global_step4/model.safetensors")
    done = dsplan("checkpoint", "verify", str(imported))
    assert done.code == 1
    assert done.out.splitlines() == [
        "global_step3: complete",
        "global_step4: damaged",
        f"  {imported}/global_step4/model.safetensors: checksum differs: it is damaged, or of another checkpoint",
        "newest complete: global_step3",
    ]
    told = json.loads(dsplan("checkpoint", "verify", str(imported), "--format", "json").out)
    assert [each["complete"] for each in told["checkpoints"]] == [True, False] and told[
        "newest_complete"
    ] == "global_step3"
    assert dsplan("checkpoint", "verify", str(imported / "global_step3")).code == 0
    (imported / "latest").write_text("global_step9")
    assert f"{imported}/latest: names 'global_step9'" in dsplan("checkpoint", "verify", str(imported)).out


@pytest.mark.parametrize("file", ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_verify_finds_a_flipped_bit_in_deepspeeds_files(tmp_path, file):
    folder = shutil.copytree(DEEPSPEED, tmp_path / "ckpt")
    path = folder / "global_step3" / file
    data = bytearray(path.read_bytes())
    data[data.index(b"data.pkl") + 900] ^= 4
    path.write_bytes(data)
    done = dsplan("checkpoint", "verify", str(folder))
    assert done.code == 1 and f"{path}: " in done.out


def lines(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    no_latest = shutil.copytree(DEEPSPEED, tmp_path / "no_latest")
    (no_latest / "latest").unlink()
    other = shutil.copytree(DEEPSPEED, tmp_path / "other")
    (other / "latest").write_text("global_step7")
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine").write_text("")
    good = str(DEEPSPEED)
    return [
        (["verify", "absent"], "absent does not exist"),
        (
            ["inspect", "empty"],
            "empty holds no checkpoint: neither dsplan's, nor DeepSpeed's, nor a model in safetensors",
        ),
        (["verify", "file"], "file is a file, but must be a folder of checkpoints, or one of them"),
        (
            ["consolidate", "no_latest", "-o", "out"],
            "no_latest/latest is absent, so name one of no_latest/global_step3",
        ),
        (
            ["import", "other", "-o", "out"],
            "other/latest names 'global_step7', which is no checkpoint there; name one of",
        ),
        (["consolidate", good, "-o", "there"], "there exists already; remove it, or name another folder"),
        (["consolidate", good, "-o", "out", "--dtype", "fp8"], "--dtype is fp8, but must be one of fp32, fp16, bf16"),
        (["consolidate", good, "-o", "out", "--max-shard-size", "big"], "--max-shard-size: 'big' is no size"),
        (["consolidate", good, "-o", "out", "--max-shard-size", "0"], "must be more than nothing, as 5GB"),
        (["consolidate", good, "-o", "file/out"], "nothing was left of file/out"),
        (["import", good], "Missing option '-o' / '--output'"),
        (["repair", good], "No such command 'repair'"),
    ]


def test_what_goes_wrong_is_one_line_and_exit_2(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, said in lines(tmp_path):
        done = dsplan("checkpoint", *arguments)
        assert (done.code, done.out) == (2, ""), arguments
        assert said in done.err and done.err.startswith("dsplan: error: ") and done.err.count("\n") == 1, done.err
    assert not (tmp_path / "out").exists()


def test_import_is_for_deepspeeds_alone(imported, tmp_path):
    done = dsplan("checkpoint", "import", str(imported), "-o", str(tmp_path / "out"))
    assert done.code == 2 and "is dsplan's own already: load it with load_checkpoint" in done.err


def test_without_optimizer_the_weights_come_alone(tmp_path):
    done = dsplan("checkpoint", "import", str(DEEPSPEED), "-o", str(tmp_path / "out"), "--no-optimizer")
    assert done.code == 0 and "17 tensors" in done.out
    assert done.err == "dsplan: note: not taken over: the optimizer's state: not asked for\n"
