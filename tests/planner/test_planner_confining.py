"""What a traced script may do to the machine: nothing outside a temporary folder, no network; it finds its own writes again."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

START = """
import sys
from pathlib import Path
from dsplan.planner.capturing.confining import Confinement, Refused
confinement = Confinement(Path(sys.argv[1]), lambda: "train.py:3")
confinement.begin()
"""


def confined(tmp_path, body):
    """Run the body in `work`, confined to `kept`; what it printed."""
    work, kept = tmp_path / "work", tmp_path / "kept"
    work.mkdir(exist_ok=True)
    kept.mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", START + textwrap.dedent(body) + "\nprint(*confinement.notes(), sep='\\n')", str(kept)],
        cwd=work,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def listing(folder):
    return sorted(
        (str(path.relative_to(folder)), path.read_text() if path.is_file() else None) for path in folder.rglob("*")
    )


def test_a_script_writes_and_finds_it_again_and_nothing_is_there(tmp_path):
    work = tmp_path / "work"
    (work / "old").mkdir(parents=True)
    (work / "data.txt").write_text("as it was")
    (work / "old" / "part.txt").write_text("part")
    before = listing(work)
    printed = confined(
        tmp_path,
        """
        import io, json, logging, os, pathlib, pickle, shutil, tempfile
        os.makedirs("out/deep", exist_ok=True)
        os.makedirs("out/deep", exist_ok=True)
        with open("out/deep/log.txt", "w") as file:
            file.write("one")
        with open("out/deep/log.txt", "a") as file:
            file.write(" two")
        assert open("out/deep/log.txt").read() == "one two"
        assert os.listdir("out") == ["deep"] and os.path.isfile("out/deep/log.txt") and os.path.isdir("out")
        assert os.path.getsize("out/deep/log.txt") == 7
        with open("data.txt", "a") as file:
            file.write(", and more")
        assert open("data.txt").read() == "as it was, and more"
        path = pathlib.Path("run")
        path.mkdir(parents=True, exist_ok=True)
        (path / "a.json").write_text(json.dumps([1]))
        assert [entry.name for entry in path.iterdir()] == ["a.json"] and list(path.glob("*.json"))
        os.replace("run/a.json", "run/b.json")
        assert json.loads((path / "b.json").read_text()) == [1] and not (path / "a.json").exists()
        descriptor = os.open("run/c", os.O_CREAT | os.O_WRONLY)
        os.write(descriptor, b"c")
        os.close(descriptor)
        assert sorted(os.listdir(".")) == ["data.txt", "old", "out", "run"]
        assert sorted(name for _, _, files in os.walk(".") for name in files) == ["b.json", "c", "data.txt", "log.txt", "part.txt"]
        os.remove("old/part.txt")
        shutil.rmtree("old")
        shutil.rmtree("run")
        assert not os.path.exists("run")
        shutil.copy("data.txt", "copy.txt")
        logging.basicConfig(filename="train.log", level=logging.INFO)
        logging.info("a line")
        with tempfile.NamedTemporaryFile("w") as file:
            file.write("x")
        os.chdir("out/deep")
        assert open("log.txt").read() == "one two"
        try:
            os.mkdir("/usr")
        except FileExistsError:
            print("there")
        """,
    )
    assert listing(work) == before
    assert printed.startswith("there\n")
    assert "the script wrote " in printed and "(out/deep/log.txt, ...), kept nowhere" in printed


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("import urllib.request; urllib.request.urlopen('http://192.0.2.1/x', timeout=5)", "the network (192.0.2.1)"),
        ("import socket; socket.create_connection(('example.org', 80))", "the network (example.org)"),
        ("import socket; socket.getaddrinfo('example.org', 80)", "the network (example.org)"),
        ("import subprocess; subprocess.run(['wget', 'x'])", "running another program (wget)"),
        ("import os; os.system('curl example.org')", "running another program (curl)"),
        ("import sqlite3; sqlite3.connect('/a.db')", "writing /a.db"),
    ],
)
def test_what_is_refused_is_named_with_the_line(tmp_path, body, told):
    printed = confined(
        tmp_path,
        f"""
        try:
            {body}
        except OSError as error:
            while error.__context__ is not None and not isinstance(error, Refused):
                error = error.__context__
            print(error)
        else:
            raise SystemExit("was not refused")
        """,
    )
    assert f"{told} is refused while dsplan traces the script" in printed
    assert f"{told} was refused while the script was traced (train.py:3)" in printed


def test_what_a_script_asks_of_its_machine_is_answered(tmp_path):
    printed = confined(
        tmp_path,
        """
        import socket, subprocess, sqlite3
        server = socket.create_server(("127.0.0.1", 0))
        socket.create_connection(server.getsockname()).close()
        assert subprocess.check_output(["uname"])
        sqlite3.connect(":memory:").execute("select 1")
        open("/dev/null", "w").write("x")
        """,
    )
    assert printed.strip() == ""


def test_the_line_that_the_time_went_to(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import time\nx = 1\ntime.sleep(1.2)  # waits\n")
    start = (
        "import os, runpy, sys\nfrom pathlib import Path\nfrom dsplan.planner.capturing import progress\n"
        "progress.watch(sys.argv[1], Path(sys.argv[2]), os.getppid())\nrunpy.run_path(sys.argv[1])\n"
    )
    progress_file = tmp_path / "progress.json"
    subprocess.run([sys.executable, "-c", start, str(script), str(progress_file)], check=True, timeout=60)
    from dsplan.planner.capturing.progress import slowest_line

    told = slowest_line(progress_file, script)
    assert told.endswith("s of it in line 3 (time.sleep(1.2)  # waits)")
    assert slowest_line(Path(os.devnull), script) == "the imports of dsplan itself took all of it"
