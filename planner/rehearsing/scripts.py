"""A training script rehearsed: run in a child for two optimizer steps, its own loop and loss, under the engine itself."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsplan.planner.capturing.capture import ScriptSubject, answer_of
from dsplan.planner.rehearsing.rehearsal import Rehearsal
from dsplan.schemas.ledger import Ledger
from dsplan.schemas.plan import Plan
from dsplan.schemas.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the child is to carry out. config: the user's own DeepSpeed configuration; None: none."""

    plan: Plan
    config: dict[str, Any] | None

    def packed(self) -> str:
        return base64.b64encode(pickle.dumps(self)).decode()

    @staticmethod
    def unpacked(text: str) -> Order:
        order = pickle.loads(base64.b64decode(text))
        assert isinstance(order, Order)
        return order


def rehearse_script(subject: ScriptSubject, plan: Plan, config: Mapping[str, Any] | None = None) -> Rehearsal:
    """Rank 0 over the second optimizer step of the script's own loop, under the plan's engine.

    Problem, in one line, where the script makes no two steps, or the engine does not carry the plan out.
    """
    order = Order(plan=plan, config=dict(config) if config is not None else None)
    request = {
        "order": order.packed(),
        "micro_batch": None if plan.micro_batch == subject.micro_batch else plan.micro_batch,
    }
    try:
        answer = answer_of(subject, request, "rehearsing.script_child", "second engine.step()")
    except Problem as problem:
        text = str(problem)
        raise Problem(text if text.endswith("the formula stands") else f"{text}; the formula stands") from problem
    return Rehearsal(
        ledger=Ledger.from_json(answer["ledger"]),
        events=tuple((number, delta) for number, delta in answer["events"]),
        resident=answer["resident"],
    )
