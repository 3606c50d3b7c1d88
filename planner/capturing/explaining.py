"""What stops a script while it is traced that would not stop it on its cluster, in one line with the way round."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from dsplan.planner.capturing.confining import Refused

_NO_CUDA = (
    "not compiled with CUDA",
    "not linked with support for cuda",
    "No CUDA GPUs",
    "Found no NVIDIA driver",
    "no kernel image",
)
_OFFLINE = ("huggingface.co", "couldn't connect", "OfflineModeIsEnabled", "on the Hub", "offline mode")
_GPU_ALONE = (
    "transformer_engine",
    "mamba_ssm",
    "causal_conv1d",
    "triton",
    "fla",
    "flash_attn_interface",
    "vllm",
    "apex",
)


def why_stopped(error: BaseException) -> str | None:
    """What was met and the way round; None where the script itself is at fault."""
    for cause in _chain(error):
        if isinstance(cause, Refused):
            return f"{cause.asked} is refused while the script is traced; {cause.way}"
        if type(cause).__name__ in ("OfflineModeIsEnabled", "LocalEntryNotFoundError", "CacheNotFound"):
            return _not_cached(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        return missing(error.name)
    if isinstance(error, ImportError) and "dsplan's stand-in" in str(error):
        return (
            f"{str(error).splitlines()[0]}; guard the call, or give a model file with build_model() that goes without"
        )
    text = " ".join(str(error).split())
    if any(part in text for part in _NO_CUDA):
        return (
            f"it calls a function of CUDA that has no stand-in ({_call(error)}), but no GPU is used to trace; guard it by "
            "torch.cuda.is_available() of another name, or leave it out (arguments of the script go after --)"
        )
    if isinstance(error, OSError) and any(part in text for part in _OFFLINE):
        return _not_cached(error)
    return None


def missing(module: str) -> str:
    """Of a package that is not installed."""
    package = module.partition(".")[0]
    if package in _GPU_ALONE:
        return (
            f"{module} is not installed, and its kernels have no stand-in; let the script go without it, or give a model file "
            "with build_model()"
        )
    return (
        f"{module} is not installed where dsplan runs; install it here as well (its weights and a GPU are not needed)"
    )


def _not_cached(error: BaseException) -> str:
    name = _asked_of_the_hub(error)
    what = (
        f"{name} is not a local folder and not in the Hugging Face cache"
        if name
        else "a file is not in the Hugging Face cache"
    )
    kind = "--repo-type dataset " if _calls(error, "load_dataset") else ""
    files = "" if kind else ' --include "*.json" "tokenizer*"'
    return (
        f"{what}, but scripts are traced without network; fetch it once (hf download {kind}{name or 'NAME'}{files}: no weights "
        "are needed), or give a local path"
        if not kind
        else f"{what}, but scripts are traced without network; run the script once up to there, which fills the cache, or give a "
        "local path"
    )


def _asked_of_the_hub(error: BaseException) -> str | None:
    names = ("pretrained_model_name_or_path", "repo_id", "path_or_repo_id", "pretrained_model_name", "path", "name")
    found = []
    for cause in _chain(error):
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            for name in names[:4] if "huggingface" in frame.f_code.co_filename else names:
                value = frame.f_locals.get(name)
                in_library = any(
                    part in frame.f_code.co_filename for part in ("transformers", "datasets", "huggingface_hub", "peft")
                )
                if in_library and isinstance(value, str) and value and len(value) < 120:
                    found.append(value)
    return found[0] if found else None


def _calls(error: BaseException, function: str) -> bool:
    return any(
        frame.f_code.co_name == function
        for cause in _chain(error)
        for frame, _ in traceback.walk_tb(cause.__traceback__)
    )


def _call(error: BaseException) -> str:
    """The function of torch in which it happened: "torch.cuda.Event"."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in frames:
        module = frame.f_globals.get("__name__", "")
        if str(module).startswith("torch"):
            return f"{module}.{frame.f_code.co_name}"
    return "torch.cuda"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    stack: list[BaseException | None] = [error]
    while stack:
        here = stack.pop()
        if here is None or id(here) in seen:
            continue
        seen.add(id(here))
        yield here
        stack += [here.__context__, here.__cause__]
