"""What a save leaves aside when it is killed at any of its steps, and what the next one makes of it."""

import subprocess
import sys

import pytest
from dsplan.runtime.checkpoints import places
from dsplan.runtime.checkpoints.finding import find
from dsplan.runtime.checkpoints.manifest import complete_tags, write_manifest, write_whole
from dsplan.schemas.problem import Problem


class Killed(BaseException):
    pass


def fill(folder, tag, text):
    write_manifest(
        folder, tag, {"state.json": write_whole(folder / "state.json", f'{{"latest": true, "held": "{text}"}}')}
    )


def save(folder, tag, text="one"):
    aside = places.begin(folder, tag)
    fill(aside, tag, text)
    places.put_in_place(folder, tag, save_latest=True)


def killed_at(monkeypatch, count):
    """Every function by which put_in_place changes the folder; the count-th call is the last."""
    left = [count]

    def counted(call):
        def wrapper(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return call(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(places.Path, "rename", counted(places.Path.rename))
    monkeypatch.setattr(places.os, "replace", counted(places.os.replace))
    monkeypatch.setattr(places.shutil, "rmtree", counted(places.shutil.rmtree))
    monkeypatch.setattr(places, "write_whole", counted(places.write_whole))
    monkeypatch.setattr(places, "sync_folder", counted(places.sync_folder))


BEGIN = """
import sys, time
from pathlib import Path
from dsplan.runtime.checkpoints import places
places.begin(Path(sys.argv[1]), "step1")
print("begun", flush=True)
sys.stdin.read()
"""


def test_what_another_process_is_writing_is_left_alone_until_that_process_has_ended(tmp_path):
    aside = tmp_path / ".partial_step1"
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"begun\n"
        save(tmp_path, "step2")
        with pytest.raises(Problem) as refused:
            places.begin(tmp_path, "step1")
        other.kill()
    assert str(refused.value) == f"{aside} is being written by another process; give each run a folder of its own"
    assert aside.is_dir()
    save(tmp_path, "step1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step1", "step2"]
    assert sorted(path.name for path in (tmp_path / "step1").iterdir()) == ["manifest.json", "state.json"]


def test_two_engines_of_one_process_write_side_by_side(tmp_path):
    """In the background, into one folder under tags of their own."""
    first = places.begin(tmp_path, "one")
    second = places.begin(tmp_path, "two")
    for aside, tag in ((first, "one"), (second, "two")):
        fill(aside, tag, tag)
        places.put_in_place(tmp_path, tag, save_latest=True)
    assert sorted(complete_tags(tmp_path)) == ["one", "two"]


@pytest.mark.parametrize("other", ["done it", "cleaned up", "decided another"])
def test_another_run_that_saves_there_meanwhile_does_not_end_this_one(tmp_path, monkeypatch, other):
    """Between the folder's name and `latest`: its begin has given `latest` the tag, or its own save comes in between."""
    wanted = tmp_path / ".partial_latest"
    aside = places.begin(tmp_path, "step2")
    fill(aside, "step2", "two")
    meanwhile = {
        "done it": lambda: places.os.rename(wanted, tmp_path / "latest"),
        "cleaned up": wanted.unlink,
        "decided another": lambda: wanted.write_text("step7", "utf-8"),
    }[other]

    def between(folder, sync=places.sync_folder):
        sync(folder)
        if wanted.exists():
            monkeypatch.undo()
            meanwhile()

    monkeypatch.setattr(places, "sync_folder", between)
    places.put_in_place(tmp_path, "step2", save_latest=True)
    assert (tmp_path / "latest").read_text("utf-8") == "step2"
    assert not wanted.exists()


@pytest.mark.parametrize("again", ["step2", "step1"])
def test_whenever_a_save_is_killed_what_was_complete_is_loaded_and_the_next_save_cleans_up(
    tmp_path, monkeypatch, again
):
    """again: the tag of the save that is killed, a new one or that of the checkpoint which is there."""
    outcomes = set()
    for count in range(20):
        folder = tmp_path / str(count)
        save(folder, "step1")
        finished = True
        with monkeypatch.context() as patched:
            killed_at(patched, count)
            try:
                save(folder, again, "two")
            except Killed:
                finished = False
                places._writing.clear()  # a process that is killed loses its locks
        found = find(folder, None)
        text = (folder / found.path / "state.json").read_text()
        outcomes.add(text)
        assert "two" in text or not finished
        save(folder, "step3")
        assert find(folder, None).path == str(folder / "step3")
        assert {path.name for path in folder.iterdir()} - {"step1", "step2"} == {"step3", "latest"}
        assert "step1" in complete_tags(folder)
        if finished:
            break
    assert finished and len(outcomes) == 2


def test_latest_that_names_nothing_is_refused(tmp_path):
    save(tmp_path, "step1")
    for text in ("", "step2", "../step1", ".partial_x", "\x00"):
        (tmp_path / "latest").write_text(text)
        with pytest.raises(Problem, match=rf"latest: .*{tmp_path}.*load_checkpoint\(.*tag=\"step1\"\)"):
            find(tmp_path, None)


def test_without_any_checkpoint_nothing_is_found(tmp_path):
    assert find(tmp_path, None) is None
    assert find(tmp_path / "nowhere", None) is None
    places.begin(tmp_path, "step1")  # killed in the first save
    assert find(tmp_path, None) is None
