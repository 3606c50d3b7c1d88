"""What engine native asks of the allocator in two steps.

FSDP2 makes one all-gather buffer and one tensor per parameter and block, and one reduction buffer per block.
"""

from __future__ import annotations

from dsplan.planner.memory.asking_rank import GATHER, REDUCE, STEPS, AskingRank, Running, optimizer_temporaries
from dsplan.planner.memory.native_widths import widths


def ask(requests: AskingRank) -> None:
    plan, width = requests.plan, requests.width
    master, reduce = widths(plan).master, widths(plan).reduce
    shards = [requests.shard(index) for index in requests.held]
    trained = [requests.shard(index) for index in requests.trained]
    if plan.offload == "none":
        for size in shards:
            requests.make(master * size)
    mixed = width != master
    gathers = (requests.degree > 1 and plan.zero_stage > 0) or mixed
    in_place, again = plan.zero_stage == 0 and plan.offload == "none", plan.zero_stage == 3
    segments = requests.segments()
    by_unit: dict[int, list[int]] = {}
    for index in requests.held:
        by_unit.setdefault(requests.unit_of[index], []).append(index)
    last_backward = max((place for place, segment in enumerate(segments) if segment[1]), default=-1)
    for step in range(STEPS):
        gathered: dict[int, list[tuple[int, int]]] = {}
        running = Running(requests)
        flat: tuple[int, int] | None = None
        reducing: tuple[int, int] | None = None
        shards_of_grads: list[tuple[int, int]] = []
        kept: list[tuple[int, int]] = []
        grads: dict[int, list[int]] = {}

        def gather(unit: int, gathered: dict[int, list[tuple[int, int]]] = gathered) -> tuple[int, int] | None:
            if unit in gathered or not gathers:
                return None
            members = by_unit.get(unit, [])
            buffer = requests.make(width * sum(requests.sizes[index] for index in members), GATHER)
            gathered[unit] = [requests.make(width * requests.sizes[index]) for index in members]
            return buffer

        for place, (unit, backward, events) in enumerate(segments):
            if place == 0 and unit:
                buffer = gather(0)
                if buffer:
                    requests.drop(buffer)
            ahead = [segment[0] for segment in segments[place + 1 : place + 3] if segment[1] and segment[0]]
            for wanted in [unit, *(ahead[:1] if backward and again else [])]:
                buffer = gather(wanted)
                if buffer:
                    if flat:
                        requests.drop(flat)
                    flat = buffer
            for storage, delta, label, _ in events:
                if label >= 0 and delta < 0:
                    continue  # the engine decides
                if label >= 0 and delta > 0:
                    grads.setdefault(unit, []).append(storage)
                running.change(storage, delta)
            ends = place == last_backward
            if again and unit and unit in gathered:
                for made in gathered.pop(unit):
                    requests.drop(made)
            reduced = ([unit] if backward and unit else []) + ([0] if ends else [])
            for done in reduced:
                members = [index for index in by_unit.get(done, []) if requests.params[index].trainable]
                if not members:
                    continue
                new = requests.make(reduce * sum(requests.sizes[index] for index in members))
                for storage in grads.pop(done, []):
                    running.let_go(storage)
                if in_place:  # what is reduced is the gradient, or what it is cast from when backward is over
                    (shards_of_grads if master == reduce else kept).append(new)
                elif reducing:
                    requests.drop(reducing)
                reducing = None if in_place else new
                if not in_place or master != reduce:
                    shards_of_grads += [requests.make(master * requests.shard(index), REDUCE) for index in members]
                if unit and not again and done in gathered:
                    for made in gathered.pop(done):
                        requests.drop(made)
        for leftover in [*(made for unit_made in gathered.values() for made in unit_made), flat, reducing, *kept]:
            if leftover:
                requests.drop(leftover)
        running.end()
        if plan.offload == "none":
            if step == 0:
                for _ in range(plan.optimizer.states):
                    for size in trained:
                        requests.make(master * size)
            optimizer_temporaries(requests, trained)
        for made in shards_of_grads:
            requests.drop(made)
