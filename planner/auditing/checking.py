"""Check: a launch line in, the findings of what it will read out. Loads no torch, runs nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsplan.planner.auditing.launch_counts import Count, open_value, whole
from dsplan.planner.auditing.linting import Setting, lint_source
from dsplan.planner.auditing.project import finder
from dsplan.planner.auditing.shell_text import is_open
from dsplan.planner.auditing.sources import Source, sources
from dsplan.planner.rules import RULES
from dsplan.schemas.cluster import Cluster
from dsplan.schemas.companion import Companion, companion_of, load_options
from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    from dsplan.planner.auditing.launch_lines import LaunchLine
    from dsplan.schemas.finding import FileFindings

_CONFIG_FLAGS = (
    "deepspeed",
    "deepspeed_config",
    "deepspeed_config_file",
    "deepspeed_config_path",
    "ds_config",
    "ds_config_file",
)
_TRAINER_FLAGS = frozenset(
    {
        "output_dir",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "learning_rate",
        "max_grad_norm",
        "num_train_epochs",
        "max_steps",
        "warmup_ratio",
        "warmup_steps",
        "lr_scheduler_type",
        "model_name_or_path",
        "bf16",
        "fp16",
    }
)
"""Two of these in the script's flags (one, where it speaks of TrainingArguments): their defaults hold for the rest."""

_AT_LAUNCH = ("DSP026", "DSP034")
"""Rules of Accelerate's file that hold also where the Trainer reads the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a line starts, as far as it can be read off. companions: who reads the configuration, with what."""

    config: str
    """A file, or the configuration itself where the line holds it or Accelerate builds it."""
    name: str
    """As reports call it."""
    cluster: Cluster | None
    companions: tuple[Companion, ...]
    taken: tuple[str, ...]
    """What was taken from where, a sentence each."""
    reader: str = "auto"


def setup_of(line: LaunchLine, environment: Mapping[str, str], cluster: Cluster | None = None) -> Setup:
    """Problem where the line names no configuration. cluster: what the user says, whatever the line says."""
    files = list(_option_files(line))
    flags = flags_of(line.arguments)
    options: dict[str, Any] = {}
    for _, raw in files:
        options |= raw
    options |= flags
    accelerate = _accelerate(line, environment)
    config, origin = _config(line, files, flags, accelerate)
    companions = [accelerate] if accelerate else []
    trainer = _trainer(line, options, files)
    if trainer is not None:
        companions.append(trainer)
    count = line.count
    open_count = open_value(line.accelerate or {}, "num_processes", "n") is not None
    if accelerate is not None and count.ranks is None and accelerate.processes is not None and not open_count:
        why = f"num_processes {accelerate.processes} of {accelerate.source}"
        count = Count(ranks=accelerate.processes, nodes=count.nodes, why=why)
    counted = _counted(count) if cluster is None else f"{cluster.ranks} GPUs: --cluster {cluster.text}"
    # a bare --deepspeed is the flag of deepspeed.add_config_arguments: DeepSpeed itself reads the file
    own = flags.get("deepspeed") is True and origin == "--deepspeed_config" and not companions
    taken = [f"configuration {_short(config)}: {origin}", counted]
    taken += [f"arguments: {one.source} ({_KINDS[one.kind]})" for one in companions]
    return Setup(
        config=config,
        name=config if not _inline(config) else "the line" if origin.startswith("--") else origin,
        cluster=cluster or _cluster(count),
        companions=tuple(companions),
        taken=tuple(taken),
        reader="deepspeed" if own else "auto",
    )


_KINDS = {
    "trainer": "HF TrainingArguments",
    "accelerate": "Accelerate",
    "axolotl": "axolotl",
    "llama-factory": "LLaMA-Factory",
}


def check(setup: Setup, *, reader: str = "auto") -> list[FileFindings]:
    """The findings of the line's configuration beside all that goes with it."""
    projects = finder()
    inline = Source(setup.name, setup.config, setup.name)
    found = [inline] if _inline(setup.config) else list(sources([setup.config]))
    files = []
    for source in found:
        told = [
            lint_source(
                source,
                Setting(
                    cluster=setup.cluster,
                    reader=setup.reader if reader == "auto" else reader,
                    engine="deepspeed",
                    rules=tuple(RULES.values()),
                    companion=companion,
                    fit=None,
                    defines={},
                    project_of=projects,
                ),
            )
            for companion in setup.companions or (None,)
        ]
        files.append(_merged(told))
    return files


def _merged(told: Sequence[FileFindings]) -> FileFindings:
    """One list of what a file is told beside each companion. The last one's reader fills and compares; the others launch it."""
    early = [finding for one in told[:-1] for finding in one.findings if finding.rule in _AT_LAUNCH]
    findings = {(found.rule, found.pointer, found.severity): found for found in [*early, *told[-1].findings]}
    ordered = sorted(findings.values(), key=lambda finding: (finding.span.line, finding.span.column, finding.rule))
    skipped = tuple(skip for skip in told[-1].skipped_rules if skip.needs == "--cluster")
    return replace(told[-1], findings=tuple(ordered), skipped_rules=skipped)


def flags_of(words: Sequence[str]) -> dict[str, Any]:
    """The flags behind a script, by name with "_": --lr 1e-4, --lr=1e-4, --bf16; also name=value."""
    flags: dict[str, Any] = {}
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        match = re.fullmatch(r"(?:--?)?([A-Za-z][\w.-]*)=(.*)", word, re.S)
        if match:
            flags[match[1].replace("-", "_")] = _scalar(match[2])
        elif re.fullmatch(r"--?[A-Za-z][\w.-]*", word):
            name = word.lstrip("-").replace("-", "_")
            follows = index < len(words) and not re.match(r"--?[A-Za-z]", words[index])
            flags[name] = _scalar(words[index]) if follows else True
            index += follows
    return flags


def _scalar(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("none", "null"):
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _option_files(line: LaunchLine) -> Iterator[tuple[str, dict[str, Any]]]:
    """YAML and JSON files with arguments: the first word behind the script, or --config FILE."""
    words = line.arguments
    named = [words[0]] if words and re.fullmatch(r"[^-][^=]*\.(ya?ml|json)", words[0]) else []
    config = flags_of(words).get("config")
    if isinstance(config, str) and re.search(r"\.(ya?ml|json)$", config):
        named.append(config)
    for path in named:
        raw = load_options(path)
        yield path, dict(raw)


def _trainer(
    line: LaunchLine, options: dict[str, Any], files: Sequence[tuple[str, dict[str, Any]]]
) -> Companion | None:
    """What the Trainer's arguments are, where the script has them by its flags or files."""
    source = ", ".join([path for path, _ in files] or ["the line's flags"])
    if files and flags_of(line.arguments).keys() - {"config"}:
        source += " and the line's flags" if files else ""
    if line.program == "axolotl" or line.program.startswith("axolotl.") or "base_model" in options:
        return companion_of(options, source, "axolotl")
    if line.program == "llamafactory-cli" or "finetuning_type" in options:
        return companion_of(options, source, "llama-factory")
    named = len(_TRAINER_FLAGS & options.keys())
    if named >= 2 or (named and _speaks_of_training_arguments(line.program)):
        return companion_of(options, source, "trainer")
    return None


def _speaks_of_training_arguments(program: str) -> bool:
    try:
        return program.endswith(".py") and "TrainingArguments" in Path(program).read_text("utf-8")
    except (OSError, ValueError):
        return False


def _accelerate(line: LaunchLine, environment: Mapping[str, str]) -> Companion | None:
    """Accelerate's file with the options of accelerate launch laid over it."""
    if line.accelerate is None:
        return None
    options = line.accelerate
    path = options.get("config_file") or _default_file(environment)
    raw: dict[str, Any] = dict(load_options(path)) if path else {}
    companion = companion_of(raw, str(path or "accelerate launch"), "accelerate")
    changes: dict[str, Any] = {
        "processes": whole(options, "num_processes", "n"),
        "zero_stage": whole(options, "zero_stage"),
        "accumulation": whole(options, "gradient_accumulation_steps"),
        "gradient_clipping": _number(options.get("gradient_clipping")),
        "optimizer_device": options.get("offload_optimizer_device"),
        "param_device": options.get("offload_param_device"),
        "config_file": options.get("deepspeed_config_file"),
        "mixed_precision": options.get("mixed_precision"),
    }
    mixed = options.get("mixed_precision")
    if mixed:
        changes["precision"] = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}.get(str(mixed))
        changes["beside_config_file"] = tuple(n for n in companion.beside_config_file if n != "mixed_precision") or None
        if changes["beside_config_file"] is None:
            companion = replace(companion, beside_config_file=())
    return replace(companion, **{name: value for name, value in changes.items() if value is not None})


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _default_file(environment: Mapping[str, str]) -> str | None:
    """Source: accelerate/commands/config/config_args.py, default_yaml_config_file."""
    home = environment.get("HF_HOME") or str(Path(environment.get("HOME", "~")).expanduser() / ".cache" / "huggingface")
    file = Path(home) / "accelerate" / "default_config.yaml"
    return str(file) if file.is_file() else None


def _config(
    line: LaunchLine,
    files: Sequence[tuple[str, dict[str, Any]]],
    flags: Mapping[str, Any],
    accelerate: Companion | None,
) -> tuple[str, str]:
    """The configuration, and where the line has it."""
    for name in _CONFIG_FLAGS:
        value = flags.get(name)
        if isinstance(value, str) and is_open(value):
            raise Problem(f"--{name} is {value}, which is not set here; set it, or write the file")
        if isinstance(value, str) and value:
            own = _of_script(line.program)
            beside = f"; {line.program} hands over {own} too, so lint that as well" if own not in (None, value) else ""
            return value, f"--{name}{beside}"
    for path, raw in files:
        value = raw.get("deepspeed")
        if isinstance(value, str) and value:
            return value, f"deepspeed in {path}"
        if isinstance(value, Mapping):
            return f"{path}#/deepspeed", f"deepspeed in {path}"
    if accelerate is not None and accelerate.config_file:
        return accelerate.config_file, f"deepspeed_config_file of {accelerate.source}"
    own = _of_script(line.program)
    if own is not None:
        return own, f"in {line.program}"
    launched = line.accelerate or {}
    if accelerate is not None and (accelerate.zero_stage is not None or "use_deepspeed" in launched):
        return _as_accelerate_builds_it(accelerate), f"built by Accelerate of {accelerate.source}"
    looked = ["--deepspeed", "--deepspeed_config", "--ds_config"] + ["deepspeed in the YAML"] * bool(files)
    looked += ["deepspeed_config_file of Accelerate's file"] * (accelerate is not None)
    there = Path(line.program).exists() or not line.program.endswith(".py")
    script = "in the script" if there else f"in {line.program}, which is not there"
    raise Problem(
        f"the line names no DeepSpeed configuration (looked for {', '.join(looked)}, and for "
        f"deepspeed.initialize(config=...) {script}); run dsplan lint on the file itself"
    )


def _of_script(program: str) -> str | None:
    if not program.endswith(".py"):
        return None
    from dsplan.planner.auditing.scripts import config_in

    return config_in(program)


def _as_accelerate_builds_it(companion: Companion) -> str:
    """Source: accelerate/utils/dataclasses.py, DeepSpeedPlugin.__post_init__."""
    clipping, stage = companion.gradient_clipping, companion.zero_stage
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto" if companion.accumulation is None else companion.accumulation,
        "gradient_clipping": "auto" if clipping is None else clipping,
        "zero_optimization": {
            "stage": 2 if stage is None else stage,
            "offload_optimizer": {"device": companion.optimizer_device or "none"},
            "offload_param": {"device": companion.param_device or "none"},
            "stage3_gather_16bit_weights_on_model_save": bool(companion.gather_16bit),
        },
    }
    if companion.precision in ("fp16", "bf16"):
        config[companion.precision] = {"enabled": True}
    return json.dumps(config, indent=2)


def _inline(config: str) -> bool:
    return config.lstrip().startswith("{")


def _short(config: str) -> str:
    return "without a file" if _inline(config) else config


def _counted(count: Count) -> str:
    if count.ranks is None:
        return f"number of GPUs: not known ({count.why})"
    return f"{count.ranks} GPU{'s' if count.ranks != 1 else ''}: {count.why}"


def _cluster(count: Count) -> Cluster | None:
    if not count.ranks:
        return None
    nodes = count.nodes if count.nodes and count.ranks % count.nodes == 0 else 1
    return Cluster(nodes=nodes, gpus_per_node=count.ranks // nodes, gpu=None, text=str(count.ranks))
