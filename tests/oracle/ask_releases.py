"""Asks real releases of DeepSpeed what they make of each key: `python tests/oracle/ask_releases.py [FOLDER]`

Writes schemas/releases.json. Each release is installed without its dependencies into a folder of its own below FOLDER (kept:
a second run installs nothing) and asked in a forked process of its own, all with the torch, numpy, pydantic and hjson of the Python
that runs this. STAND_INS lists what releases before 0.14 import and newer packages lost; none of it is called.

How a release is asked, the same for all: DeepSpeedConfig reads a dict that notes each key asked of it and the default that is
asked with; a block that refuses a key nobody has names its pydantic model, whose fields and defaults follow; a key that is
refused whatever its value is `refused`. A key that the parser does not ask for, since the engine reads it, counts as read
where the release's source holds its name as a string (`source`).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import KeysView
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RELEASES = (
    *("0.9.5", "0.10.3", "0.11.2", "0.12.6", "0.13.5", "0.14.0", "0.14.5", "0.15.4", "0.16.9"),
    *("0.17.6", "0.18.0", "0.18.9"),
    *("0.19.0", "0.19.1", "0.19.2", "0.19.3", "0.19.4", "0.19.5", "0.19.6", "0.19.7", "0.19.8"),
)
NEWEST = "0.19.8"
STAND_INS = {
    "intel_extension_for_pytorch.py": "",
    "oneccl_bindings_for_pytorch.py": "",
    "stand_ins.py": """
import logging
import numpy
import torch.distributed.elastic.agent.server.api as api
lost = ((api, "log", logging.getLogger("api")), (api, "_get_socket_with_port", None), (numpy, "BUFSIZE", 8192))
for module, name, value in lost:
    if not hasattr(module, name):
        setattr(module, name, value)
""",
}
PYDANTIC_1 = ("0.9.5", "0.10.3")
"""Releases that import pydantic 1 by its own name; later ones reach it as pydantic.v1."""
UNHEARD_OF = "dsplan_asks"
SAMPLES: dict[str, Any] = {
    "boolean": True,
    "integer": 1,
    "number": 1.0,
    "string": "x",
    "object": {},
    "array": [],
    "null": None,
}


# ---- in the release's own process


ASKED: dict[str, dict[str, Any]] = {}
"""Block to the keys that were asked of it, each with the default that was named, or NO_DEFAULT."""
NO_DEFAULT = object()


class Asking(dict[str, Any]):
    """A block that notes what is asked of it. `at` is its pointer."""

    at = ""

    def _note(self, key: Any, default: Any = NO_DEFAULT) -> None:
        known = ASKED.setdefault(self.at, {})
        if known.get(key, NO_DEFAULT) is NO_DEFAULT or known[key] in (None, {}):
            known[key] = default

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key, default)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        return KeysView(self)


def asking(value: Any, at: str = "") -> Any:
    """The same value, its dicts noting what is asked of them."""
    if not isinstance(value, dict):
        return value
    block = Asking({key: asking(entry, f"{at}/{key}") for key, entry in value.items()})
    block.at = at
    return block


def plain(value: Any) -> Any:
    """A default as JSON holds it."""
    value = getattr(value, "value", value)
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def worker(asked_of: dict[str, Any]) -> dict[str, Any]:
    """What the release on sys.path makes of the keys of the schema, and of those that it has besides."""
    import logging

    import stand_ins  # noqa: F401

    logging.disable(logging.CRITICAL)
    import deepspeed
    from deepspeed.runtime import config as runtime_config
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    def parse(config: dict[str, Any]) -> Exception | None:
        try:
            runtime_config.DeepSpeedConfig(asking(config))
        except Exception as error:
            return error
        return None

    def at(pointer: str, value: Any, beside: dict[str, Any] | None = None) -> dict[str, Any]:
        """A configuration with that value there. beside: the other members of its block."""
        *path, name = pointer.split("/")[1:]
        inner: dict[str, Any] = {**(beside or {}), name: value}
        for step in reversed(path):
            inner = {step: inner, "enabled": True} if step in NEED_ENABLED else {step: inner}
        return inner | {"train_batch_size": 1}

    met: list[Any] = []  # the models that were handed the unheard-of member, outer ones first

    def watch(model: Any) -> None:
        own = model.__init__

        def noting(self: Any, *args: Any, **members: Any) -> None:
            if UNHEARD_OF in members:
                met.append(type(self))
            own(self, *args, **members)

        model.__init__ = noting

    base = next(each for each in DeepSpeedConfigModel.__mro__ if each.__name__ == "BaseModel")
    watch(base)
    watch(DeepSpeedConfigModel)

    def model_at(pointer: str) -> Any:
        """The model that refuses an unheard-of member of that block; None where none does."""
        met.clear()
        error = parse(at(f"{pointer}/{UNHEARD_OF}", 1))
        refused = error is not None and (UNHEARD_OF in str(error) or parse(at(pointer, {})) is None)
        return met[-1] if met and refused else None

    keys: dict[str, dict[str, Any]] = {}
    strict: dict[str, bool] = {}

    def enter_model(model: Any, pointer: str) -> None:
        strict[pointer] = True
        default = instance(model)
        for name, field in fields_of(model).items():
            effective = getattr(default, name, NO_DEFAULT) if default is not None else field_default(field)
            for spelling in {name, field.alias or name}:
                keys[f"{pointer}/{spelling}"] = {"status": "read", "default": effective}
                nested = nested_model(field)
                if nested is not None:
                    enter_model(nested, f"{pointer}/{spelling}")

    def explore(pointer: str, depth: int) -> None:
        """Fills keys with what is read below that block."""
        model = model_at(pointer) if pointer else None
        if model is not None:
            enter_model(model, pointer)
            return
        names = asked_of["blocks"].get(pointer, {})
        tries: list[dict[str, Any]] = [{}, {"enabled": True}] + [
            {"enabled": True, name: sample} for name, sample in names.items()
        ]
        ASKED.pop(pointer, None)
        for inside in tries:
            parse({"train_batch_size": 1, **inside} if not pointer else at(pointer, inside))
        for name, default in list(ASKED.get(pointer, {}).items()):
            keys.setdefault(f"{pointer}/{name}", {"status": "read", "default": default})
            if depth < 4 and name not in ("params", "type"):
                explore(f"{pointer}/{name}", depth + 1)
        if ASKED.get(pointer):
            strict[pointer] = False

    explore("", 0)
    words = strings_of(Path(deepspeed.__file__).parent)
    for pointer, samples in asked_of["keys"].items():
        block, _, name = pointer.rpartition("/")
        errors = [parse(at(pointer, sample)) for sample in samples]
        refused = all(error is not None for error in errors)
        if refused and not (pointer in keys and strict.get(block)):
            keys[pointer] = {"status": "refused", "why": str(errors[0]).splitlines()[0][:200]}
        elif pointer not in keys and not strict.get(block):
            read = name in words and (not block or keys.get(block, {}).get("status") in ("read", "source"))
            keys[pointer] = {"status": "source" if read else "ignored"}
    values = {
        pointer: [value for value in own if parse(at(pointer, value)) is None]
        for pointer, own in asked_of["values"].items()
        if keys.get(pointer, {}).get("status") == "read"
    }
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES, WarmupLR
    from torch import nn, optim

    try:
        WarmupLR(optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), warmup_num_steps=0)
        warmup_zero = "taken"
    except Exception:
        warmup_zero = "refused"

    for fact in keys.values():
        if fact.get("default", NO_DEFAULT) is NO_DEFAULT:
            fact.pop("default", None)
        else:
            fact["default"] = plain(fact["default"])
    return {
        "deepspeed": deepspeed.__version__,
        "keys": keys,
        "strict": strict,
        "values": {pointer: taken for pointer, taken in values.items()},
        "optimizers": sorted(plain(runtime_config.DEEPSPEED_OPTIMIZERS)),
        "schedules": sorted(VALID_LR_SCHEDULES),
        "warmup_zero": warmup_zero,
    }


NEED_ENABLED = ("curriculum_learning", "random_ltd", "data_sampling", "data_routing", "data_efficiency")
"""Blocks of which nothing below is read unless they are enabled."""


def fields_of(model: Any) -> dict[str, Any]:
    return dict(getattr(model, "model_fields", None) or model.__fields__)


def field_default(field: Any) -> Any:
    value = field.default
    return NO_DEFAULT if "Undefined" in type(value).__name__ else value


def nested_model(field: Any) -> Any:
    """The model that a field holds, whether it may be absent or not."""
    from typing import get_args

    if field is None:
        return None
    waiting = [getattr(field, "outer_type_", None) or getattr(field, "annotation", None)]
    waiting.append(getattr(field, "type_", None))
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, type) and (hasattr(kind, "model_fields") or hasattr(kind, "__fields__")):
            return kind
        waiting += get_args(kind)
    return None


def instance(model: Any) -> Any:
    try:
        return model()
    except Exception:
        return None


def strings_of(folder: Path) -> set[str]:
    """Every string in the package's source that could be a key's name."""
    import ast

    found: set[str] = set()
    for file in folder.rglob("*.py"):
        try:
            tree = ast.parse(file.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        found |= {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier()
        }
    return found


# ---- around them


def questions() -> dict[str, Any]:
    """Of the schema: each key to the values to try, each block to its keys and a value for each."""
    schema = json.loads((ROOT / "schemas/ds_config.schema.json").read_text("utf-8"))
    keys: dict[str, list[Any]] = {}
    blocks: dict[str, dict[str, Any]] = {}
    values: dict[str, list[Any]] = {}  # of a key with an enum, and null where the schema takes it

    def named(reference: str) -> dict[str, Any]:
        node = schema
        for step in reference.lstrip("#/").split("/"):
            node = node[step]
        return node

    def visit(node: dict[str, Any], pointer: str) -> None:
        for name, member in node.get("properties", {}).items():
            if name == "$schema" or f"{pointer}/{name}" == "/dsplan":
                continue
            if "$ref" in member:
                member = {**named(member["$ref"]), **member}
            types = member.get("type", [])
            types = [types] if isinstance(types, str) else types
            own = [value for value in member.get("enum", ()) if value not in ("auto", None)]
            if member.get("default") is not None:
                own.insert(0, member["default"])
            listed = [value for value in member.get("enum", ()) if value not in ("auto", None)]
            nothing = [None] if "null" in types else []
            if listed or nothing:
                values[f"{pointer}/{name}"] = listed + nothing
            own += [SAMPLES[kind] for kind in types] or list(SAMPLES.values())
            blocks.setdefault(pointer, {})[name] = own[0]
            keys[f"{pointer}/{name}"] = [*own, False, None, {}, {"enabled": False}, {"enabled": True}]
            visit(member, f"{pointer}/{name}")

    visit(schema, "")
    return {"keys": keys, "blocks": blocks, "values": values}


def ask(release: str, folder: Path) -> dict[str, Any]:
    """Installs the release where it is not yet, and asks it. {"skipped": why} where it cannot be had."""
    home, shims, old = folder / release, folder / "stand_ins", folder / "pydantic1"
    shims.mkdir(parents=True, exist_ok=True)
    for name, text in STAND_INS.items():
        (shims / name).write_text(text)
    if release in PYDANTIC_1 and not old.exists():
        install(["pydantic<2"], old, os.environ)
    path = [str(shims), str(home), *([str(old)] if release in PYDANTIC_1 else [])]
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(reversed(path)), "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    if not (home / "deepspeed").exists():
        failed = install(["--no-deps", "--no-build-isolation", f"deepspeed=={release}"], home, own)
        if failed:
            return {"skipped": f"does not install: {failed}"}
    context = multiprocessing.get_context("fork")  # torch, imported once, is there already
    mine, theirs = context.Pipe(duplex=False)
    child = context.Process(target=answer, args=(theirs, list(reversed(path)), questions()))
    child.start()
    theirs.close()
    try:
        told: dict[str, Any] = json.loads(mine.recv())
    except EOFError:
        told = {"skipped": "the process died"}
    child.join()
    assert "skipped" in told or told["deepspeed"].startswith(release), told["deepspeed"]
    return told


def answer(to: Any, path: list[str], asked: dict[str, Any]) -> None:
    """In the forked process: the worker's answer, or why there is none."""
    sys.path[:0] = path
    os.environ |= {"DS_ACCELERATOR": "cpu"}
    try:
        told = worker(asked)
    except Exception as error:
        told = {"skipped": f"does not import: {type(error).__name__}: {str(error).splitlines()[0]}"}
    to.send(json.dumps(told))
    to.close()


def install(what: list[str], home: Path, environment: Any) -> str:
    """The last line of what pip said where it failed."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(home), *what]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


PASSED = ("/optimizer/params", "/scheduler/params")
"""Arguments of a type, which is asked when the engine is built."""


def merged(answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What differs between the releases. Each change stands at the first release, of those asked, from which it holds."""
    told = {release: answer for release, answer in answers.items() if "skipped" not in answer}
    newest, schema_keys = told[NEWEST], questions()["keys"]
    schema = json.loads((ROOT / "schemas/ds_config.schema.json").read_text("utf-8"))
    keys: dict[str, dict[str, Any]] = {}
    for pointer in sorted(set().union(*(answer["keys"] for answer in told.values()))):
        block = pointer.rpartition("/")[0]
        node = node_at(schema, pointer)
        gone = newest["keys"].get(block, {}).get("status") == "refused"
        if gone or pointer.startswith(PASSED) or (block and node_at(schema, block) is None):
            continue
        status = {
            release: status_in(answer, pointer, node or {}, newest)
            for release, answer in told.items()
            if not block or answer["keys"].get(block, {}).get("status") == "read"
        }
        if pointer not in schema_keys and "read" not in status.values():
            continue
        facts = {release: answer["keys"].get(pointer, {}) for release, answer in told.items()}
        leaf = "object" not in (node or {}).get("type", []) and not any(
            pointer in answer["strict"] for answer in told.values()
        )
        defaults = {
            release: fact["default"]
            for release, fact in facts.items()
            if leaf and "default" in fact and status.get(release) == "read"
        }
        unknown = {
            release: "refused" if answer["strict"][pointer] else "ignored"
            for release, answer in told.items()
            if pointer in answer["strict"] and status.get(release) == "read"
        }
        changed = {
            "status": changes(status),
            "default": changes(defaults),
            "unknown": changes(unknown),
            "values": changes(
                {release: answer["values"][pointer] for release, answer in told.items() if pointer in answer["values"]}
            ),
        }
        kept = {name: points for name, points in changed.items() if len(points) > 1}
        if kept:
            keys[pointer] = kept
    return {
        "about": "Written by tests/oracle/ask_releases.py. Each change stands at the first release, of those asked, from which it holds.",
        "releases": [
            {"release": release, "how": "skipped: " + answer["skipped"] if "skipped" in answer else "asked"}
            for release, answer in answers.items()
        ],
        "optimizers": changes({release: answer["optimizers"] for release, answer in told.items()}),
        "schedules": changes({release: answer["schedules"] for release, answer in told.items()}),
        "warmup_num_steps 0": changes({release: answer["warmup_zero"] for release, answer in told.items()}),
        "keys": keys,
    }


def status_in(answer: dict[str, Any], pointer: str, node: dict[str, Any], newest: dict[str, Any]) -> str:
    """read, ignored or refused."""
    block = pointer.rpartition("/")[0]
    status = answer["keys"].get(pointer, {}).get("status")
    if status == "source":  # its name is in the source; that says little where the newest release's parser asks for it
        engine_reads = newest["keys"].get(pointer, {}).get("status") == "source" and "x-unread" not in node
        return "read" if engine_reads else "ignored"
    return status or ("refused" if answer["strict"].get(block) else "ignored")


def node_at(schema: dict[str, Any], pointer: str) -> dict[str, Any] | None:
    """None also below an alias, which shares its block's nodes."""
    node = schema
    for step in pointer.split("/")[1:]:
        node = node.get("properties", {}).get(step)
        if node is None:
            return None
    return node


def changes(values: dict[str, Any]) -> dict[str, Any]:
    """Only the first of equal neighbours."""
    kept: dict[str, Any] = {}
    last: Any = NO_DEFAULT
    for release, value in values.items():
        if value != last or isinstance(value, bool) != isinstance(last, bool):
            kept[release] = last = value
    return kept


def written(data: dict[str, Any]) -> str:
    """One key a line."""
    rows = ",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in data["keys"].items())
    asked = ",\n".join(f"    {json.dumps(row)}" for row in data["releases"])
    names = ",\n".join(
        f'  "{name}": {json.dumps(data[name])}' for name in ("optimizers", "schedules", "warmup_num_steps 0")
    )
    return f'{{\n  "about": {json.dumps(data["about"])},\n  "releases": [\n{asked}\n  ],\n{names},\n  "keys": {{\n{rows}\n  }}\n}}\n'


def main() -> None:
    """FOLDER: ask all and write the data. FOLDER RELEASE ...: ask those again, and write the data from all answers held."""
    import torch  # noqa: F401

    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp/dsplan_releases")
    answers = folder / "answers"
    answers.mkdir(parents=True, exist_ok=True)
    for release in sys.argv[2:] or RELEASES:
        print(release, file=sys.stderr, flush=True)
        (answers / f"{release}.json").write_text(json.dumps(ask(release, folder)))
    held = {release: answers / f"{release}.json" for release in RELEASES}
    told = {release: json.loads(file.read_text()) for release, file in held.items() if file.exists()}
    (ROOT / "schemas/releases.json").write_text(written(merged(told)), "utf-8")


if __name__ == "__main__":
    main()
