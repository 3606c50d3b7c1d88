"""What a profiled step computed: in all, and by module."""

from __future__ import annotations

from dataclasses import dataclass

from dsplan.schemas.units import count, flops, rate, seconds
from tabulate import tabulate


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFlops:
    """One module of the model, all its calls in the step. name: its path; empty for the model itself."""

    name: str
    kind: str
    params: int
    forward_flops: int

    @property
    def depth(self) -> int:
        return self.name.count(".") + 1 if self.name else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One rank's step. Counts are those of matrix products, convolutions and attention; one FLOP is one add or multiply."""

    step: int
    micro_batches: int
    params: int
    forward_flops: int
    step_flops: int
    """Forward and backward, with what was computed again."""
    step_seconds: float | None
    """Of one that nothing slows down; None where it is not known yet."""
    global_batch: int
    device_flops_per_second: float | None
    """The GPU's dense peak in the compute precision; None where it is not known."""
    modules: tuple[ModuleFlops, ...]

    @property
    def model_flops(self) -> int:
        """Forward, and backward as twice that: what a step has to compute, however it is carried out."""
        return 3 * self.forward_flops


def as_text(profile: Profile, *, depth: int = -1, top: int = 1, detailed: bool = True) -> str:
    """Totals; the `top` kinds of modules at `depth` (-1: the deepest) with most FLOPs; where detailed, each module."""
    parts = [_totals(profile), _kinds(profile, depth, top)]
    if detailed:
        parts.append(_modules(profile))
    return "\n\n".join(part for part in parts if part)


def _totals(profile: Profile) -> str:
    passes = f"{profile.micro_batches} micro-batch{'es' if profile.micro_batches > 1 else ''}"
    return (
        f"FLOPs of step {profile.step}, per GPU (measured): forward {flops(profile.forward_flops)}, forward and backward "
        f"{flops(profile.step_flops)}, in {passes}; {count(profile.params)} parameters"
    )


def rates_text(profile: Profile) -> str:
    """How fast a step of so many FLOPs is; step_seconds must be known."""
    assert profile.step_seconds is not None
    speed = profile.model_flops / profile.step_seconds
    peak = profile.device_flops_per_second
    mfu = f"MFU {speed / peak:.1%}" if peak else "no MFU: the peak of this device is not known"
    return (
        f"a step like that takes {seconds(profile.step_seconds)}: {rate(profile.global_batch / profile.step_seconds)} samples/s, "
        f"{flops(speed)}/s per GPU (3 x forward), {mfu}"
    )


def _kinds(profile: Profile, depth: int, top: int) -> str:
    """Modules of one depth, summed by class."""
    deepest = max((module.depth for module in profile.modules), default=0)
    wanted = deepest if depth < 0 else min(depth, deepest)
    kinds: dict[str, list[ModuleFlops]] = {}
    for module in profile.modules:
        if module.depth == wanted:
            kinds.setdefault(module.kind, []).append(module)
    ranked = sorted(kinds.items(), key=lambda item: -sum(module.forward_flops for module in item[1]))[:top]
    rows = [(kind, len(members), *_numbers(profile, members)) for kind, members in ranked]
    if not rows:
        return ""
    title = f"at depth {wanted}, by class:"
    headers = ("class", "modules", "params", "forward", "share")
    return f"{title}\n{tabulate(rows, headers, disable_numparse=True, colalign=('left', *('right',) * 4))}"


def _modules(profile: Profile) -> str:
    rows = [
        (
            f"{'  ' * module.depth}{module.name.rpartition('.')[2] or module.kind}",
            module.kind,
            *_numbers(profile, [module]),
        )
        for module in profile.modules
    ]
    headers = ("module", "class", "params", "forward", "share")
    tabulated = tabulate(
        rows, headers, disable_numparse=True, colalign=("left", "left", *("right",) * 3), preserve_whitespace=True
    )
    return tabulated


def _numbers(profile: Profile, members: list[ModuleFlops]) -> tuple[str, str, str]:
    forward = sum(module.forward_flops for module in members)
    share = f"{forward / profile.forward_flops:.1%}" if profile.forward_flops else "-"
    return count(sum(module.params for module in members)), flops(forward), share
