"""--max, --min gpus and --lengths: held against trying every value, one after the other."""

from dataclasses import replace

import pytest
import torch
from dsplan.planner.asking import SURE, Tried, cluster_sizes, fewest_gpus, largest, reach_of
from dsplan.planner.asking_lengths import Padded, lengths_answer, padded_batches, read_lengths
from dsplan.planner.candidates import regrouped
from dsplan.planner.rows import Bench
from dsplan.planner.tables import position_table
from dsplan.schemas.answers import Probe
from dsplan.schemas.cluster import Cluster, find_gpu
from dsplan.schemas.layout import Layout
from dsplan.schemas.plan import Plan
from dsplan.schemas.problem import Problem
from dsplan.schemas.units import MIB
from hypothesis import given
from hypothesis import strategies as st
from models import residual, subject
from torch import nn

PLAN = Plan(
    engine="native", layout=Layout(), zero_stage=1, precision="fp32", micro_batch=1, accumulation=1, seq_len=None
)


def gpus(usable_bytes: int, ranks: int = 1) -> Cluster:
    gpu = replace(find_gpu("T4"), usable_bytes=usable_bytes)
    return Cluster(nodes=1, gpus_per_node=ranks, gpu=gpu, text=f"{ranks}xT4")


def bench(of, usable_bytes: int, ranks: int = 1) -> Bench:
    return Bench(subject=of, cluster=gpus(usable_bytes, ranks), own_seq_len=None)


class Words(nn.Module):
    """Tokens of 64 numbers each through two linears: bytes grow with the sequence. 48 positions."""

    def __init__(self, width=64):
        super().__init__()
        self.tokens = nn.Embedding(100, width)
        self.positions = nn.Embedding(48, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.down(torch.relu(self.up(x))).mean()


def words():
    return subject(Words, lambda micro_batch, seq_len: (torch.zeros(micro_batch, seq_len or 8, dtype=torch.long),))


# The search


def tried(bytes_of, usable: int) -> Tried:
    def attempt(value: int) -> Probe:
        taken = bytes_of(value)
        if taken is None:
            return Probe(value=value, fits=False, verdict="refused", why="refused")
        verdict = "oom" if taken > usable else "tight" if 1.1 * taken > usable else "fits"
        return Probe(
            value=value,
            fits=taken <= usable,
            verdict=verdict,
            why="" if taken <= usable else "oom",
            allocated_bytes=taken,
            device_bytes=taken,
            device_bytes_high=int(1.1 * taken),
        )

    return Tried(attempt, usable)


@given(
    base=st.integers(1, 10**6),
    slope=st.integers(1, 10**4),
    square=st.integers(0, 50),
    usable=st.integers(1, 10**7),
    start=st.integers(1, 300),
    limit=st.integers(1, 3000),
)
def test_the_search_finds_what_trying_each_value_finds(base, slope, square, usable, start, limit) -> None:
    def bytes_of(value: int) -> int:
        return base + slope * value + square * value * value

    search = tried(bytes_of, usable)
    answer, following = largest(search, start, limit)
    best = max((value for value in range(1, limit + 1) if bytes_of(value) <= usable), default=None)
    assert (answer.value if answer else None) == best
    if best != limit:
        assert following is not None and following.value == (best or 0) + 1
    sure, _ = largest(search, answer.value, answer.value, SURE) if answer else (None, None)
    assert (sure.value if sure else None) == max(
        (value for value in range(1, limit + 1) if int(1.1 * bytes_of(value)) <= usable), default=None
    )


def test_bytes_linear_in_the_value_take_four_probes() -> None:
    search = tried(lambda value: 1000 + 37 * value, 100_000)
    answer, _ = largest(search, 1, 1 << 20)
    assert answer is not None and answer.value == 2675  # (100,000 - 1,000) / 37
    assert len(search.by_value) <= 5


def test_a_value_that_the_model_refuses_is_one_that_does_not_fit() -> None:
    answer, following = largest(tried(lambda value: 1 if value <= 77 else None, 10), 1, 1 << 20)
    assert answer is not None and answer.value == 77
    assert following is not None and following.why == "refused"


def test_a_device_that_is_full_by_what_the_allocator_caches_takes_few_probes_too() -> None:
    """The cache shrinks as the allocated grow, down to a tenth of the device, so that each line ends a step further."""
    usable, most = 100_000, 90_000

    def attempt(value: int) -> Probe:
        cached = min(5_000, (usable - value) // 2)
        return Probe(
            value=value,
            fits=value <= most,
            verdict="fits" if value <= most else "oom",
            why="" if value <= most else "oom",
            allocated_bytes=value,
            device_bytes=value + max(cached, usable - most + 500),
        )

    search = Tried(attempt, usable)
    answer, _ = largest(search, 10, 1 << 20)
    assert answer is not None and answer.value == most
    assert len(search.by_value) <= 40


# Of a model


def test_the_largest_micro_batch_is_that_of_a_table_of_all() -> None:
    one = bench(residual(), 1 << 40)
    at = {n: one.row(replace(PLAN, micro_batch=n)).memory.device_bytes for n in range(1, 13)}
    usable = at[7] + 1
    asked = bench(one.subject, usable)
    best = max(n for n in at if asked.row(replace(PLAN, micro_batch=n)).memory.device_bytes <= usable)
    found = reach_of(asked, PLAN, "micro-batch")
    assert found.answer.value == best
    assert found.answer.device_bytes <= usable < found.next.device_bytes
    assert found.answer.room_bytes == usable - found.answer.device_bytes
    assert found.next.value == best + 1


def test_where_even_one_sample_does_not_fit_there_is_no_answer() -> None:
    found = reach_of(bench(residual(), 1024), PLAN, "micro-batch")
    assert found.answer is None and found.next.value == 1
    assert "more than it has" in found.stopped_by


def test_the_longest_sequence_ends_at_the_table_of_positions() -> None:
    found = reach_of(bench(words(), 1 << 40), replace(PLAN, seq_len=8), "seq-len")
    assert found.answer.value == 48 and found.next is None
    assert found.stopped_by == "positions has 48 positions"
    assert position_table(residual()) is None


def test_the_longest_sequence_is_that_of_a_table_of_all() -> None:
    of, plan = words(), replace(PLAN, seq_len=8, micro_batch=4096)
    wide = bench(of, 1 << 40)
    taken = {n: wide.row(replace(plan, seq_len=n)).memory.device_bytes for n in range(16, 22)}
    usable = taken[18]
    asked = bench(of, usable)
    best = max(n for n in taken if asked.row(replace(plan, seq_len=n)).memory.device_bytes <= usable)
    found = reach_of(asked, plan, "seq-len")
    assert found.answer.value == best and found.next.value == best + 1


def test_what_has_no_length_cannot_be_asked_for_one() -> None:
    with pytest.raises(Problem, match="of the same shape at seq_len 8 and 16"):
        reach_of(bench(residual(), 1 << 40), PLAN, "seq-len")


def test_gpus_of_unknown_kind_cannot_be_filled() -> None:
    unknown = Bench(subject=residual(), cluster=Cluster(nodes=1, gpus_per_node=2, gpu=None, text="2"), own_seq_len=None)
    for ask in (lambda: reach_of(unknown, PLAN, "micro-batch"), lambda: fewest_gpus(unknown, PLAN, None)):
        with pytest.raises(Problem, match="the kind of GPU is not known"):
            ask()


# GPUs


def test_sizes_are_parts_of_a_node_and_then_whole_nodes() -> None:
    sizes = [size.ranks for size in cluster_sizes(gpus(1, 8), 1)]
    assert sizes[:6] == [1, 2, 4, 8, 16, 24]
    assert [size.ranks for size in cluster_sizes(gpus(1, 8), 4)][:3] == [4, 8, 16]


def test_the_fewest_gpus_are_those_of_a_table_of_all() -> None:
    of, plan = wide_model(), replace(PLAN, zero_stage=3, layout=Layout(dp_shard=8))
    everywhere = Bench(subject=of, cluster=gpus(1 << 40, 8), own_seq_len=None)
    sizes = cluster_sizes(everywhere.cluster, 1)[:4]
    taken = {s.ranks: everywhere.row(regrouped(plan, s.ranks, None), s).memory.device_bytes for s in sizes}
    assert taken[4] > taken[8]
    asked = Bench(subject=of, cluster=gpus(taken[8] + 1, 8), own_seq_len=None)
    fitting = {
        s.ranks: asked.row(regrouped(plan, s.ranks, None), s).verdict for s in cluster_sizes(asked.cluster, 1)[:4]
    }
    found = fewest_gpus(asked, plan, None)
    assert found.answer.value == min(n for n, verdict in fitting.items() if verdict in ("fits", "tight"))
    assert found.plan.layout.dp == found.answer.value and found.plan.micro_batch == plan.micro_batch


def wide_model():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.mean()

    return subject(Wide, lambda micro_batch, seq_len: (torch.zeros(micro_batch, 512),))


def test_zero_0_is_not_helped_by_more_gpus() -> None:
    found = fewest_gpus(bench(residual(), 1024, 8), replace(PLAN, zero_stage=0, layout=Layout(dp_shard=8)), None)
    assert found.answer is None
    assert "zero 0 shares nothing out" in found.stopped_by


@pytest.mark.parametrize(
    ("ranks", "global_batch", "accumulation", "becomes"),
    [(4, 32, 4, 32), (8, 32, 2, 32), (16, 32, 1, 32), (24, 32, 4, 192), (4, None, 4, 32)],
)
def test_accumulation_gives_way_where_the_global_batch_divides(ranks, global_batch, accumulation, becomes) -> None:
    plan = replace(PLAN, micro_batch=2, accumulation=4, layout=Layout(dp_shard=4))
    changed = regrouped(plan, ranks, global_batch)
    assert (changed.accumulation, changed.global_batch, changed.micro_batch) == (accumulation, becomes, 2)


# Lengths


def test_lines_are_batched_in_the_order_of_the_file() -> None:
    assert padded_batches((5, 9, 3, 3, 7), 2) == [Padded(9, 1, 2), Padded(3, 3, 4), Padded(7, 5, 5)]


def test_bad_lines_are_named_by_number(tmp_path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("12\nabc\n\n-3\n4.5\n")
    with pytest.raises(Problem, match=r"line 2 is 'abc', line 3 is '', line 4 is '-3' and 1 more"):
        read_lengths(str(file))
    file.write_text("")
    with pytest.raises(Problem, match="is empty"):
        read_lengths(str(file))
    with pytest.raises(Problem, match="cannot be read"):
        read_lengths(str(tmp_path / "none"))


def test_the_share_of_steps_over_is_that_of_every_length_traced(tmp_path) -> None:
    lengths = [3, 30, 8, 8, 20, 5, 41, 9, 17, 17, 2, 33]
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(map(str, lengths)) + "\n\n")
    of, plan = words(), replace(PLAN, micro_batch=2, accumulation=2, seq_len=8)
    wide = bench(of, 1 << 40)
    batches = [max(lengths[i : i + 2]) for i in range(0, 12, 2)]  # 30 8 20 41 17 33
    usable = wide.row(replace(plan, seq_len=30)).memory.device_bytes
    asked = bench(of, usable)
    over = [asked.row(replace(plan, seq_len=n)).verdict == "oom" for n in batches]
    assert any(over) and not all(over)
    found = lengths_answer(asked, plan, str(file))
    assert found.micro_batches == 6 and found.micro_batches_over == sum(over)
    assert found.steps == 3 and found.steps_over == sum(any(over[i : i + 2]) for i in range(0, 6, 2))
    assert (found.worst.value, found.worst_first_line, found.worst_last_line) == (41, 7, 8)
    assert found.limit_length == max(n for n, too_much in zip(batches, over, strict=True) if not too_much)


def test_one_trace_is_enough_where_the_longest_fits(tmp_path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(str(1 + n % 40) for n in range(400)))
    found = lengths_answer(bench(words(), 1 << 40), replace(PLAN, micro_batch=4, seq_len=8), str(file))
    assert (found.steps_over, found.limit_length, found.traced_lengths) == (0, 40, (40,))


def test_a_length_beyond_the_positions_is_named_by_its_line(tmp_path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("12\n49\n")
    with pytest.raises(Problem, match="line 2 is 49, but positions has 48 positions"):
        lengths_answer(bench(words(), 1 << 40), replace(PLAN, seq_len=8), str(file))


def test_what_is_reserved_is_taken_off_the_verdict() -> None:
    free = gpus(100 * MIB)
    left = free.reserving(40 * MIB)
    assert left.gpu.usable_bytes == 60 * MIB and left.to_json()["reserve_bytes"] == 40 * MIB
    assert "after 40 MiB reserved" in str(left)
    with pytest.raises(Problem, match="leaves nothing"):
        free.reserving(100 * MIB)
    with pytest.raises(Problem, match="the kind of GPU is not known"):
        replace(free, gpu=None).reserving(1)
