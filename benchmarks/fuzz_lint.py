"""Random mutations of configurations: `python benchmarks/fuzz_lint.py --count 100000 --seed 0`

Takes the project's own configurations (examples, tests/cases, the rules' examples), some of them as templates and inside YAML
and Python, and changes bytes (flips, cuts, repeats, splices, odd characters) or the structure (values of other types, keys
moved, deep nests, long lists, huge numbers). Lint must answer each with findings or with a Problem in one line, in under 2 s
of CPU time. Prints each input that it does not, and the slowest; exit code 1 where there is one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsplan.planner.auditing.fixing import fix_text
from dsplan.planner.auditing.linting import lint, lint_text
from dsplan.planner.rules import RULES
from dsplan.schemas.cluster import parse_cluster
from dsplan.schemas.jsonfile import decode
from dsplan.schemas.problem import Problem

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 2.0
ODD = [
    b"\x00", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\r\n", b"\r", b"\xe2\x80\xa8", b"\xf0\x9f\x98\x80", b"\\u", b"\\ud800",
    b"'''", b"/*", b"*/", b"//", b"#", b"{", b"}", b"[", b"]", b",", b":", b'"', b"'", b"{{", b"}}", b"{% if x %}", b"{% endif %}",
    b"${X}", b"$", b"NaN", b"-Infinity", b"1e999", b"-", b"0x10", b"1_000", b"None", b"True,", b"9" * 5000, b" " * 300, b"~1", b"/",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 1.5, 1e308, 2**70, "", "auto", "x" * 3000, "\u2028", "~1/", [], {}, [[]], [None, {}], {"": {}},
    {"enabled": "auto"}, {"a/b": {"c~d": [1]}}, {"type": []}, {"params": [[1]]}, "${X}", "{{ x }}", "UPPER_CASE", "1e3", "\ud83d",
]  # fmt: skip


def seeds() -> list[str]:
    """Texts that lint knows: examples, cases, and what the rules' pages show."""
    files = [*sorted((ROOT / "examples").rglob("*.json")), *sorted((ROOT / "tests" / "cases").glob("*/*.json"))]
    texts = [file.read_text("utf-8") for file in files if file.stat().st_size < 20_000]
    for rule in RULES.values():
        texts += [*rule.section("Bad"), *rule.section("Good")]
    return texts


def of_bytes(text: str, draw: random.Random, all_seeds: list[str]) -> bytes:
    """The text with up to eight changes to its bytes."""
    content = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(content) + 1)
        kind = draw.randrange(6)
        if kind == 0 and content:
            content[at % len(content)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del content[at : at + draw.randint(1, 30)]
        elif kind == 2:
            content[at:at] = content[at : at + draw.randint(1, 60)] * draw.randint(1, 20)
        elif kind == 3:
            content[at:at] = draw.choice(ODD)
        elif kind == 4:
            other = draw.choice(all_seeds).encode("utf-8", "surrogatepass")
            start = draw.randrange(len(other) + 1)
            content[at : at + draw.randint(0, 40)] = other[start : start + draw.randint(1, 80)]
        else:
            del content[at:]
    return bytes(content)


def of_structure(text: str, draw: random.Random) -> bytes:
    """The configuration with up to five changes to its values, as JSON, in one line or indented."""
    try:
        config = json.loads(text)
    except ValueError:
        config = {}
    for _ in range(draw.randint(1, 5)):
        blocks = _blocks(config)
        if not blocks:
            break
        block = draw.choice(blocks)
        keys = list(block) if isinstance(block, dict) else list(range(len(block)))
        kind = draw.randrange(5)
        if kind == 0 and keys:
            block[draw.choice(keys)] = draw.choice(VALUES)
        elif kind == 1 and isinstance(block, dict):
            block[
                draw.choice(
                    ["", "a", "zero_optimization", "stage", "auto", "x" * 500, "a/b~c", "\u0130", *map(str, keys)]
                )
            ] = draw.choice(VALUES) if draw.random() < 0.9 else _nested(draw.choice([3, 90, 101, 400]))
        elif kind == 2 and keys:
            taken = block.pop(draw.choice(keys))
            home = draw.choice(_blocks(config) or [{}])
            if isinstance(home, dict):
                home[draw.choice(["fp16", "optimizer", "params", "scheduler", "moved"])] = json.loads(json.dumps(taken))
        elif kind == 3 and keys:
            key = draw.choice(keys)
            block[key] = [json.loads(json.dumps(block[key]))] * draw.choice([1, 2, 300])
        elif kind == 4 and isinstance(block, dict) and keys:
            block[f"{draw.choice(keys)}{draw.choice(['s', ' ', 'x', ''])}"] = draw.choice(VALUES)
        config = json.loads(json.dumps(config))
    return json.dumps(config, indent=draw.choice([None, 2]), ensure_ascii=draw.random() < 0.5).encode(
        "utf-8", "surrogatepass"
    )


def _blocks(value: Any) -> list[Any]:
    found: list[Any] = []
    waiting = [value]
    while waiting and len(found) < 500:
        entry = waiting.pop()
        if isinstance(entry, (dict, list)):
            found.append(entry)
            waiting += entry.values() if isinstance(entry, dict) else entry
    return found


def _nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def hand_made() -> list[tuple[str, bytes]]:
    """Inputs that are hard on purpose: deep, huge, empty, binary."""
    ten = 10_000_000
    member = b'"key_%d": {"enabled": true, "value": [1, 2.5, "text"]},\n'
    return [
        ("empty", b""),
        ("binary", bytes(range(256)) * 40),
        ("10,000 braces", b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
        ("10,000 brackets", b"[" * 10_000),
        ("1,000,000 brackets", b"[" * 1_000_000),
        ("10,000 members of one block", b'{"fp16": {' + b"".join(b'"k%d": 1,' % i for i in range(10_000)) + b'"z": 1}}'),
        ("10 MB: one text", b'{"train_batch_size": 8, "x": "' + b"a" * ten + b'"}'),
        ("10 MB: one line of spaces", b'{"train_batch_size": 8,' + b" " * ten + b"}"),
        ("10 MB: lines", b'{"train_batch_size": 8' + b"\n" * ten + b"}"),
        ("10 MB: comment", b'{"train_batch_size": 8 /*' + b"*" * ten + b"*/}"),
        ("10 MB: zeros", b"0" * ten),
        ("10 MB: list", b'{"train_batch_size": 8, "x": [' + b"1," * (ten // 2) + b"1]}"),
        ("10 MB: members", b"{" + b"".join(member % i for i in range(180_000)) + b'"train_batch_size": 8}'),
        ("10 MB: unknown strict members", b'{"fp16": {' + b"".join(b'"k_%d": 1,\n' % i for i in range(700_000)) + b'"z": 1}}'),
        ("10 MB: duplicates", b"{" + b'"fp16": 1,' * (ten // 10) + b'"fp16": 1}'),
        ("10 MB: without quotes", b"train_batch_size: 8\n" + b"key: word\n" * (ten // 10)),
        ("10 MB: placeholders", b'{"train_batch_size": 8, "x": [' + b"${NAME}," * (ten // 8) + b"1]}"),
        ("10 MB: line comment", b"{# " + b"a" * ten + b'\n"train_batch_size": 8}'),
    ]  # fmt: skip


def embedded(text: str, draw: random.Random) -> tuple[str, bytes]:
    """The text inside a YAML or Python file, its bytes changed: a path's end, and the file."""
    if draw.random() < 0.5:
        lines = "\n".join("  " + line for line in text.splitlines())
        return "train.yaml#/deepspeed", of_bytes(f"model: x\ndeepspeed:\n{lines}\n", draw, [text])
    return "train.py#ds_config", of_bytes(f"import torch\nds_config = {text}\nmain(ds_config)\n", draw, [text])


class Judge:
    """Runs lint on inputs; remembers the slowest and what went wrong."""

    def __init__(self) -> None:
        self.slowest: list[tuple[float, str]] = []
        self.faults: list[str] = []

    def run(self, name: str, content: bytes, act: Callable[[], Any]) -> None:
        start = time.process_time()
        try:
            act()
        except Problem as problem:
            if "\n" in str(problem).strip():
                self.faults.append(f"{name}: a Problem of several lines: {problem}; {content[:300]!r}")
        except BaseException as fault:
            if isinstance(fault, KeyboardInterrupt):
                raise
            place = traceback.extract_tb(fault.__traceback__)[-1]
            said = f"{type(fault).__name__}: {str(fault)[:200]} ({Path(place.filename).name}:{place.lineno})"
            self.faults.append(f"{name}: {said}; {content[:1500]!r}")
            print(self.faults[-1], flush=True)
        took = time.process_time() - start
        self.slowest = sorted([*self.slowest, (took, name)], reverse=True)[:5]
        if took > LIMIT_SECONDS:
            self.faults.append(f"{name}: took {took:.1f} s; {content[:120]!r}")
            print(self.faults[-1], flush=True)


def lint_bytes(content: bytes, reader: str, ranks: str | None, fix: bool) -> None:
    found = lint_text(decode(content, "fuzz"), "fuzz", reader=reader, cluster=parse_cluster(ranks) if ranks else None)
    if fix:
        fix_text(found, unsafe=True)


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--count", type=int, default=1000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--no-large", action="store_true", help="leave out the inputs of 10 MB")
    chosen = options.parse_args()
    draw, texts, judge = random.Random(chosen.seed), seeds(), Judge()
    for name, content in hand_made():
        if not (chosen.no_large and "MB" in name):
            act = lambda: lint_bytes(content, "auto", None, False)  # noqa: B023, E731
            start = time.process_time()
            judge.run(name, content, act)
            print(f"{name:32} {time.process_time() - start:6.2f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for index in range(chosen.count):
            text, name = draw.choice(texts), f"{chosen.seed}/{index}"
            reader = draw.choice(["auto", "auto", "deepspeed", "trainer", "accelerate"])
            if index % 20 == 19:
                end, content = embedded(text, draw)
                path = Path(folder) / end
                Path(str(path).partition("#")[0]).write_bytes(content)
                judge.run(name, content, lambda path=path, reader=reader: lint([str(path)], reader=reader))
                continue
            content = of_bytes(text, draw, texts) if index % 2 else of_structure(text, draw)
            ranks, fix = draw.choice([None, "1", "8", "2x8"]), draw.random() < 0.2
            judge.run(name, content, lambda c=content, r=reader, n=ranks, f=fix: lint_bytes(c, r, n, f))
    print("slowest: " + "; ".join(f"{took:.2f} s {name}" for took, name in judge.slowest))
    print(f"{len(judge.faults)} faults in {chosen.count} mutations of seed {chosen.seed}")
    return 1 if judge.faults else 0


if __name__ == "__main__":
    sys.exit(main())
