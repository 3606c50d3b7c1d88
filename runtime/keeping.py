"""What of a run outlives it: checkpoints, and whole models in one file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from dsplan.runtime.checkpoints.loading import Wishes, load
from dsplan.runtime.checkpoints.saving import save, save_whole_model, wait_for_pending
from dsplan.runtime.sharding.consolidating import consolidated
from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    from dsplan.runtime.engine import Engine


class Keeping:
    """Mixed into Engine: its calls that write and read files, and those that give the whole model."""

    @property
    def _engine(self) -> Engine:
        return cast("Engine", self)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Every rank must call it. client_state, of which rank 0's is kept, must fit into JSON."""
        self._engine.together("saves or loads")
        folder = _folder("save_dir", save_dir)
        save(self._engine, folder, _word(tag), client_state or {}, save_latest, exclude_frozen_parameters)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """(path, client state), or (None, None) where load_dir holds none. Any number of ranks, ZeRO stage and precision.

        A folder that holds a whole model in safetensors is loaded too: the model alone.
        """
        if custom_load_fn is not None:
            raise Problem(
                "custom_load_fn is not carried out: shards are read in place; leave it out, or give "
                "engine.module.load_state_dict a state_dict of your own"
            )
        wishes = Wishes(
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            lr_scheduler=load_lr_scheduler_states and not load_module_only,
            module_only=load_module_only,
        )
        self._engine.together("saves or loads")
        found = load(self._engine, _folder("load_dir", load_dir), _word(tag), wishes)
        self._engine.tell_optimizer()
        return found

    def wait_for_checkpoint(self) -> None:
        """The checkpoint that is being written in the background is there. Every rank must call it."""
        wait_for_pending(self._engine)

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """The whole model in one file, in the compute dtype, at any ZeRO stage. Every rank must call it."""
        self._engine.together("saves or loads")
        path = _folder("save_dir", save_dir) / save_filename
        save_whole_model(self._engine, path, exclude_frozen=exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """The whole model in the compute dtype, on rank 0's host; None on the others. Every rank must call it."""
        self._engine.together("saves or loads")
        return consolidated(self._engine.sharded, self._engine.compute_dtype, exclude_frozen=exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def module_state_dict(self, exclude_frozen_parameters: bool = False, **_: Any) -> dict[str, Any]:
        state = self._engine.module.state_dict()
        frozen = {name for name, held in self._engine.masters().items() if not held.requires_grad}
        return {name: held for name, held in state.items() if not (exclude_frozen_parameters and name in frozen)}

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **_: Any) -> None:
        self._engine.module.load_state_dict(state_dict, strict=strict)


def _folder(name: str, value: str | Path) -> Path:
    if not isinstance(value, (str, Path)) or not str(value):
        raise Problem(f"{name} is {'empty' if value == '' else repr(value)}, but must name a folder")
    return Path(value)


def _word(tag: Any) -> str | None:
    """As DeepSpeed takes it: a step's number is a tag too."""
    return None if tag is None else str(tag)
