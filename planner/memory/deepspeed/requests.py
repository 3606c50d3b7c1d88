"""What DeepSpeed asks of the allocator in two steps."""

from __future__ import annotations

from dsplan.planner.memory.asking_rank import FP32, REDUCE, STEPS, AskingRank, Running, optimizer_temporaries
from dsplan.planner.memory.deepspeed.coordinator import Coordinator
from dsplan.schemas.plan import Plan


def loads_into_cache(plan: Plan) -> bool:
    """Whether the whole model was on the device, and what it took stays cached: nobody empties the cache after it.

    Where shards stay on the device, DeepSpeed does. Source: deepspeed/runtime/zero/utils.py, defragment.
    """
    return plan.engine == "deepspeed" and plan.zero_stage == 3 and plan.offload == "param" and plan.built == "host"


def ask(requests: AskingRank) -> None:
    plan, width, knobs = requests.plan, requests.width, requests.knobs
    numel = sum(requests.sizes[index] for index in requests.held)
    trained = sum(requests.sizes[index] for index in requests.trained)
    stage = plan.zero_stage
    part = -(-trained // requests.degree) if stage else trained
    groups = _groups(part, knobs.sub_group_size) if stage == 3 else [part]
    if stage == 3:
        if loads_into_cache(plan):
            requests.passing([width * requests.sizes[index] for index in requests.held])
        if plan.offload != "param":
            requests.make(width * -(-numel // requests.degree))
        requests.make(width * knobs.reduce_bucket_size)
        requests.make(width * part)
    elif stage:
        requests.make(width * numel)
    else:
        for index in requests.held:
            requests.make(width * requests.sizes[index])
    if plan.offload == "none":
        for size in groups:
            for _ in range(plan.optimizer.states + (1 if width < FP32 or stage else 0)):
                requests.make(FP32 * size)
    keeps = stage == 0 or (stage == 1 and not knobs.overlap_comm)
    segments = requests.segments()
    fetches = stage == 3 and (requests.degree > 1 or plan.offload == "param")
    coordinator = Coordinator(requests, segments) if fetches else None
    for _ in range(STEPS):
        running = Running(requests)
        bucket: list[tuple[int, int]] = []
        owned: tuple[int, int] | None = None
        if coordinator:
            coordinator.begin()
        for _, backward, events in segments:
            for storage, delta, label, module in events:
                if coordinator:
                    coordinator.enter(module)
                if label >= 0:
                    if backward and delta > 0 and not bucket and 0 < stage < 3 and knobs.contiguous_gradients:
                        count = 2 if knobs.overlap_comm else 1
                        bucket = [requests.make(width * knobs.reduce_bucket_size) for _ in range(count)]
                    if delta > 0:
                        running.change(storage, delta)
                    elif not keeps:  # whole, or dropped: copied into the bucket by then
                        running.let_go(storage)
                    continue
                running.change(storage, delta)
            if backward and not keeps and stage:
                requests.passing([width * min(knobs.reduce_bucket_size, trained)], REDUCE)
                if stage < 3 and owned is None and plan.offload == "none":
                    owned = requests.make(width * part)
        if coordinator:
            coordinator.end()
        if stage == 0 and requests.degree > 1:
            requests.passing([width * min(trained, 500_000_000)])
        for made in bucket:
            requests.drop(made)
        if plan.offload == "none":
            for size in groups:
                copy = requests.make(FP32 * size)
                if owned:
                    requests.drop(owned)
                    owned = None
                optimizer_temporaries(requests, [size])
                requests.drop(copy)
        if owned:
            requests.drop(owned)
        running.end()


def _groups(numel: int, largest: int) -> list[int]:
    whole, rest = divmod(numel, max(1, largest))
    return [largest] * whole + ([rest] if rest else [])
