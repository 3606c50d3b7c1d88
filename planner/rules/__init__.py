"""The lint rules. Importing this package registers them all in RULES, by id."""

from dsplan.planner.rules import (
    arguments,
    batch,
    checkpointing,
    compiling,
    data,
    experts,
    fit,
    monitors,
    native,
    offload,
    optimizer,
    parallel,
    pipeline,
    policy,
    precision,
    profiling,
    readers,
    scheduler,
    structure,
    suppressions,
    wrong_values,
    zero,
)
from dsplan.planner.rules.mechanism import RULES, Hit, Rule, rule, run

_FAMILIES = (
    structure,
    readers,
    wrong_values,
    arguments,
    batch,
    precision,
    zero,
    offload,
    pipeline,
    parallel,
    experts,
    optimizer,
    scheduler,
    native,
    data,
    monitors,
    checkpointing,
    compiling,
    profiling,
    fit,
    suppressions,
    policy,
)
for _id in sorted(RULES):  # by id, whatever order the families came in
    RULES[_id] = RULES.pop(_id)

__all__ = ["RULES", "Hit", "Rule", "rule", "run"]
