"""Activation checkpointing for a model's own forward, under DeepSpeed's names.

Source of names and meanings: deepspeed/runtime/activation_checkpointing/checkpointing.py (0.19.8). Here each checkpoint is
torch's non-reentrant one: inputs without gradients, keyword arguments and several backward passes work.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from dsplan.runtime.groups import note
from dsplan.runtime.recompute import on_host
from dsplan.schemas.jsonfile import load_config_file
from dsplan.schemas.problem import Problem
from dsplan.schemas.units import seconds
from torch.utils import checkpoint as torch_checkpoint

MODEL_PARALLEL = "model-parallel-rng"
"""The tracker's state that model_parallel_cuda_manual_seed makes. Source: _MODEL_PARALLEL_RNG_TRACKER_NAME."""
SEED_OFFSET = 2718
"""Between the seeds of data and model parallel states. Source: model_parallel_cuda_manual_seed."""


@dataclass(frozen=True)
class Settings:
    """What configure() has settled."""

    partition: bool = False
    contiguous: bool = False
    num_checkpoints: int | None = None
    inputs_on_host: bool = False
    synchronize: bool = False
    profile: bool = False


_settings: Settings | None = None


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """How checkpoint() works from now on: the activation_checkpointing block, and over it the arguments that are not None.

    deepspeed_config: a path or a dict. Problem where contiguous checkpoints lack what DeepSpeed demands for them.
    """
    global _settings
    _settings = None
    block = _block(deepspeed_config)
    chosen = Settings(
        partition=bool(block.get("partition_activations", False)),
        contiguous=bool(block.get("contiguous_memory_optimization", False)),
        num_checkpoints=block.get("number_checkpoints"),
        inputs_on_host=bool(block.get("cpu_checkpointing", False)),
        synchronize=bool(block.get("synchronize_checkpoint_boundary", False)),
        profile=bool(block.get("profile", False)),
    )
    given: dict[str, Any] = {
        "partition": partition_activations,
        "contiguous": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "inputs_on_host": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    chosen = replace(chosen, **{name: value for name, value in given.items() if value is not None})
    if chosen.contiguous and not (chosen.partition and chosen.num_checkpoints is not None):
        missing = "num_checkpoints" if chosen.partition else "partition_activations"
        raise Problem(f"contiguous activation checkpoints need {missing}; set it, or leave contiguous checkpoints out")
    tp = _model_parallel(mpu_, "world_size", 1)
    if tp != 1:
        raise Problem(f"mpu says that {tp} ranks share each layer, but tensor parallelism is not carried out yet")
    if chosen.partition:
        note(
            "partition_activations has no effect: it splits checkpoints over the ranks that share a layer, and there is one"
        )
    _settings = chosen


def _block(config: Any) -> Mapping[str, Any]:
    if config is None:
        return {}
    raw = config if isinstance(config, Mapping) else load_config_file(config)
    block = raw.get("activation_checkpointing")
    return block if isinstance(block, Mapping) else {}


def _model_parallel(mpu: Any, what: str, default: int) -> int:
    for name in (f"get_tensor_model_parallel_{what}", f"get_model_parallel_{what}"):
        if hasattr(mpu, name):
            return int(getattr(mpu, name)())
    return default


def is_configured() -> bool:
    return _settings is not None


def reset() -> None:
    """Nothing is kept between steps: there are no buffers to give back."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Noted; on one rank per layer it has no effect."""
    global _settings
    _settings = replace(_settings or Settings(), partition=partition_activation)


def set_num_layers(nlayers: int) -> None:
    """Noted; only contiguous checkpoints read it."""
    global _settings
    _settings = replace(_settings or Settings(), num_checkpoints=nlayers)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), of which only the inputs are kept for backward; there it is computed again.

    Random numbers are the same the second time, also those of get_cuda_rng_tracker().
    """
    settings = _settings or Settings()
    at_forward = _tracker.get_states()
    again = False

    def run(*inputs: Any, **options: Any) -> Any:
        nonlocal again
        first, again = not again, True
        with _observed("forward" if first else "forward again", settings):
            if first:
                return function(*inputs, **options)
            with _tracker.as_it_was(at_forward):
                return function(*inputs, **options)

    with on_host() if settings.inputs_on_host else contextlib.nullcontext():
        return torch_checkpoint.checkpoint(run, *args, use_reentrant=False, **kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The same as checkpoint()."""
    return checkpoint(function, *args)


class CheckpointFunction:
    """For code that calls DeepSpeed's autograd function itself."""

    @staticmethod
    def apply(function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> None:
        outputs = checkpoint(function, *args)
        all_outputs += outputs if isinstance(outputs, tuple) else (outputs,)


@contextlib.contextmanager
def _observed(what: str, settings: Settings) -> Iterator[None]:
    cuda = (settings.synchronize or settings.profile) and torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    try:
        yield
    finally:  # torch ends the second forward by an exception, once it has what backward needs
        if cuda:
            torch.cuda.synchronize()
        if settings.profile:
            note(f"checkpoint: {what} {seconds(time.perf_counter() - start)}")


# --- random states ---


class CudaRNGStatesTracker:
    """Named random states of this rank's device beside its own: dropout that shall be the same, or differ, over ranks."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Exception where name or seed is taken, as in DeepSpeed."""
        if seed in self.seeds_:
            raise Exception(f"seed {seed} already exists")
        if name in self.states_:
            raise Exception(f"cuda rng state {name} already exists")
        self.seeds_.add(seed)
        own = _rng_state()
        _seed(seed)
        self.states_[name] = _rng_state()
        _set_rng_state(own)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from that state inside, and from the device's own after it."""
        if name not in self.states_:
            raise Exception(f"cuda rng state {name} is not added")
        own = _rng_state()
        _set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _rng_state()
            _set_rng_state(own)

    @contextlib.contextmanager
    def as_it_was(self, states: Mapping[str, torch.Tensor]) -> Iterator[None]:
        now = self.get_states()
        self.set_states(states)
        try:
            yield
        finally:
            self.set_states(now)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """The device's own state from seed, alike on ranks that share a layer; the tracker's from another one for each of them."""
    _tracker.reset()
    _seed(seed)
    _tracker.add(MODEL_PARALLEL, seed + SEED_OFFSET)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """The tracker's state anew, from seed."""
    with _tracker.fork():
        _seed(seed + SEED_OFFSET)


def _seed(seed: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _rng_state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_rng_state(state: torch.Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)
