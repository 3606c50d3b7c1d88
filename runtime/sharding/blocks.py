"""Which modules of a model are its repeated blocks: what is sharded, gathered and recomputed together."""

from __future__ import annotations

from torch import nn


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of a model as (qualified name, module), in the order in which they are held.

    A block is a member of a ModuleList or Sequential with at least two members of the same class that hold parameters
    and have submodules of their own; the outermost such containers count. A list of bare layers (nn.Linear, ...) is no
    list of blocks, unless it is all the model has. A Sequential may be the model itself.
    """
    return _find(model, "", bare=False) or _find(model, "", bare=True)


def _find(module: nn.Module, prefix: str, *, bare: bool) -> list[tuple[str, nn.Module]]:
    dot = f"{prefix}." if prefix else ""
    members = _members(module, bare) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
    if members:
        return [(dot + key, member) for key, member in members]
    return [block for name, child in module.named_children() for block in _find(child, dot + name, bare=bare)]


def _members(container: nn.Module, bare: bool) -> list[tuple[str, nn.Module]]:
    held = [
        (name, child)
        for name, child in container.named_children()
        if any(True for _ in child.parameters()) and (bare or any(True for _ in child.children()))
    ]
    kinds = [type(child) for _, child in held]
    return [(name, child) for name, child in held if kinds.count(type(child)) >= 2]
