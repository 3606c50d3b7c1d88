"""What a manifest says of the files beside it."""

import json

import pytest
from dsplan.runtime.checkpoints.manifest import NAME, complete_tags, faults, read_manifest, write_manifest, write_whole
from dsplan.schemas.problem import Problem


def checkpoint(folder, tag, content="content"):
    path = folder / tag
    path.mkdir(parents=True)
    files = {
        name: write_whole(path / name, f"{content} of {name} in {tag}") for name in ("state.json", "a.safetensors")
    }
    write_manifest(path, tag, files)
    return path


def test_a_whole_checkpoint_has_no_faults_and_the_manifest_is_plain_json(tmp_path):
    path = checkpoint(tmp_path, "global_step1")
    assert faults(path) == []
    held = json.loads((path / NAME).read_text())
    assert (held["version"], held["tag"]) == (1, "global_step1")
    # sha256sum of the file's bytes, by the standard library
    import hashlib

    digest = hashlib.sha256((path / "state.json").read_bytes()).hexdigest()
    assert held["files"]["state.json"] == {"bytes": (path / "state.json").stat().st_size, "sha256": digest}
    assert read_manifest(path).files["state.json"].sha256 == digest


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda path: (path / "state.json").unlink(), "state.json: is absent"),
        (lambda path: (path / "state.json").write_text("x"), "state.json: has 1 bytes instead of 37"),
        (lambda path: flip(path / "a.safetensors"), "a.safetensors: checksum differs"),
        (lambda path: (path / "b.safetensors").write_text(""), "b.safetensors: is not in the manifest"),
        (lambda path: (path / NAME).unlink(), "manifest.json: is absent"),
        (lambda path: (path / NAME).write_text(""), "manifest.json: is no manifest"),
        (lambda path: (path / NAME).write_text("[]"), "manifest.json: is no manifest"),
        (lambda path: (path / NAME).write_text((path / NAME).read_text() + " "), "manifest.json: is not as it was"),
        (lambda path: path.rename(path.parent / "moved") and (path.parent / "moved").rename(path), None),
    ],
)
def test_a_fault_names_the_file_and_what_is_wrong(tmp_path, damage, fault):
    path = checkpoint(tmp_path, "global_step1")
    damage(path)
    found = faults(path)
    assert [line for line in found if fault in line] == found and len(found) == 1 if fault else not found


def flip(path):
    data = bytearray(path.read_bytes())
    data[3] ^= 4
    path.write_bytes(data)


def test_every_flipped_bit_of_the_manifest_shows(tmp_path):
    path = checkpoint(tmp_path, "t")
    whole = (path / NAME).read_bytes()
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        (path / NAME).write_bytes(data)
        with pytest.raises(Problem, match=r"manifest\.json: "):
            read_manifest(path)


def test_files_of_another_step_and_a_manifest_of_another_step_are_found(tmp_path):
    one, two = checkpoint(tmp_path, "step1"), checkpoint(tmp_path, "step2")
    (two / "a.safetensors").write_bytes((one / "a.safetensors").read_bytes())
    assert faults(two) == [f"{two / 'a.safetensors'}: checksum differs: it is damaged, or of another checkpoint"]
    (two / NAME).write_bytes((one / NAME).read_bytes())
    assert faults(two) == [f"{two / NAME}: belongs to step1, not to step2"]


def test_complete_tags_are_newest_first_and_leave_out_what_is_damaged_or_aside(tmp_path):
    for tag in ("step9", "step10", ".partial_step11", "step12"):
        checkpoint(tmp_path, tag)
    (tmp_path / "step12" / "state.json").unlink()
    (tmp_path / "empty").mkdir()
    assert complete_tags(tmp_path) == ["step10", "step9"]
    assert complete_tags(tmp_path / "nowhere") == []
