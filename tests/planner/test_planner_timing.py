"""Step time against sums worked out by hand on a GPU with round numbers."""

from dataclasses import replace

import pytest
import torch
from dsplan.planner.models.load import ModelSubject
from dsplan.planner.timing import step_time
from dsplan.planner.tracing.tracer import trace
from dsplan.planner.traffic import hidden_size, traffic
from dsplan.schemas.choices import OptimizerSpec
from dsplan.schemas.cluster import Cluster, Gpu
from dsplan.schemas.layout import Layout, Move
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import Param, Point, Segment, Trace, Unit
from torch import nn

GPU = Gpu(
    name="round",
    memory_bytes=10**10,
    usable_bytes=10**10,
    flops_per_second={"bf16": 1e12 / 0.7},  # 1 TFLOP/s after the efficiency
    memory_bytes_per_second=1e10 / 0.8,  # 10 GB/s after the efficiency
    link_bytes_per_second=1e9,
    inter_node_bytes_per_second=1e8,
    source="test",
)


def cluster(nodes: int, per_node: int) -> Cluster:
    return Cluster(nodes=nodes, gpus_per_node=per_node, gpu=GPU, text="test")


def unit(name: str, numel: int, flops: float) -> Unit:
    weight = Param(name=f"{name}.w", shape=(numel // 100, 100), dtype_bytes=4, trainable=True, tp_dim=0)
    norm = Param(name=f"{name}.n", shape=(100,), dtype_bytes=4, trainable=True)
    return Unit(name=name, params=(weight, norm), forward_flops=flops)


UNITS = (
    Unit(name="", params=(), forward_flops=0.0),
    unit("blocks.0", 1_000_000, 1e12),
    unit("blocks.1", 1_000_000, 1e12),
)
TRACE = Trace(
    source="test",
    units=UNITS,
    buffer_bytes=0,
    precision="bf16",
    recompute="none",
    micro_batch=2,
    seq_len=10,
    segments=(
        Segment(unit=1, phase="forward", start=Point(0, 0, 0), end=Point(10**9, 0, 0), points=(Point(10**9, 0, 0),)),
        Segment(unit=1, phase="backward", start=Point(10**9, 0, 0), end=Point(0, 0, 0), points=(Point(10**9, 0, 0),)),
    ),
    forward_flops=2e12,
    flops_source="test",
)
N = 2 * 1_000_100


def plan(dp: int = 1, *, tp: int = 1, pp: int = 1, accumulation: int = 1, zero_stage: int = 0) -> Plan:
    return Plan(
        engine="native",
        layout=Layout(dp_shard=dp, tp=tp, pp=pp),
        zero_stage=zero_stage,
        precision="bf16",
        micro_batch=2,
        accumulation=accumulation,
        optimizer=OptimizerSpec(name="adamw"),
    )


def test_one_gpu_is_matmuls_elementwise_and_the_optimizer() -> None:
    forward = 2.0 + 2 * 1e9 / 1e10  # 2 TFLOP at 1 TFLOP/s; 1 GB written and read at 10 GB/s
    sweep = 4 * (1 + 2 + 4) * N / 1e10
    time = step_time(TRACE, plan(), cluster(1, 1))
    assert time.step_seconds == pytest.approx(3 * forward + sweep, rel=1e-12)
    assert time.samples_per_second == pytest.approx(2 / (3 * forward + sweep))
    assert time.tokens_per_second_per_gpu == pytest.approx(20 / (3 * forward + sweep))
    assert time.mfu == pytest.approx(6e12 / (3 * forward + sweep) / (1e12 / 0.7))
    assert time.bubble_seconds == time.exposed_communication_seconds == 0


def test_full_recompute_adds_one_forward_of_the_blocks_and_leaves_model_flops() -> None:
    plain = step_time(TRACE, plan(), cluster(1, 1))
    again = step_time(replace(TRACE, recompute="full"), replace(plan(), recompute="full"), cluster(1, 1))
    assert plain.step_seconds is not None and again.step_seconds is not None
    assert again.step_seconds - plain.step_seconds == pytest.approx(2.0 + 0.2)
    assert again.mfu is not None and plain.mfu is not None
    assert again.mfu * again.step_seconds == pytest.approx(plain.mfu * plain.step_seconds)


def test_a_counted_backward_is_taken_for_what_it_is() -> None:
    """Frozen weights: 2.5 TFLOP of backward for 2 of forward, at 1 TFLOP/s; elementwise work twice that of forward, 0.4 s."""
    sweep = 4 * (1 + 2 + 4) * N / 1e10
    frozen = step_time(replace(TRACE, backward_flops=2.5e12, recompute_flops=0.0), plan(), cluster(1, 1))
    assert frozen.step_seconds == pytest.approx(2.2 + 2.5 + 0.4 + sweep)
    assert frozen.mfu == pytest.approx(4.5e12 / (2.2 + 2.9 + sweep) / (1e12 / 0.7))
    again = step_time(replace(TRACE, backward_flops=4.2e12, recompute_flops=1.5e12), plan(), cluster(1, 1))
    assert again.step_seconds == pytest.approx(2.2 + 4.2 + 0.4 + 1.5 + 0.2 + sweep)
    assert again.mfu is not None and again.step_seconds is not None
    # the 0.2 TFLOP above 2 x forward are attention scores made again: time, but not the model's FLOPs
    assert again.mfu * again.step_seconds == pytest.approx(6e12 / (1e12 / 0.7))


def test_the_backward_of_an_adapter_over_a_frozen_base_is_about_one_forward() -> None:
    """By hand, in multiply-adds of one token: frozen W (64 x 64) nine times, A (64 x 4) and B (4 x 64) beside the first.

    forward 9 x 4096 + 512. backward: the way through eight W, whose own gradients are not made (8 x 4096), those of A and B
    (512), and the way through B to A (256); nothing before the first W needs a gradient.
    """

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(9))).requires_grad_(False)
            self.a, self.b = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base[1:](self.base[0](x) + self.b(self.a(x))).sum()

    subject = ModelSubject(
        source="adapted",
        kind="file",
        module=Adapted(),
        sample_batch=lambda micro_batch, _: (torch.zeros(micro_batch, 64),),
    )
    traced = trace(subject, precision="fp32", micro_batch=8)
    assert traced.forward_flops == 2 * 8 * (9 * 4096 + 512)
    assert traced.backward_flops == 2 * 8 * (8 * 4096 + 512 + 256)


def test_the_bubble_is_pp_minus_1_micro_batches() -> None:
    """(pp - 1) / m of the ideal time: Narayanan et al. 2021, section 2.2.1."""
    time = step_time(TRACE, plan(pp=2, accumulation=4, zero_stage=1), cluster(1, 2))
    one = (2.0 + 0.2) * 3 / 2
    assert time.bubble_seconds == pytest.approx(one)


def test_dp_moves_have_the_papers_bytes() -> None:
    width = 2
    moved = {(s.move, s.event): s.wire_bytes for s in traffic(TRACE, plan(dp=4, zero_stage=3))}
    share = width * N * 3 // 4
    assert moved == {
        (Move.ALL_GATHER, "forward"): share,
        (Move.ALL_GATHER, "backward"): share,
        (Move.REDUCE_SCATTER, "backward"): share,
    }


def test_tp_reduces_the_residual_stream_four_times_a_block() -> None:
    assert hidden_size(UNITS[1:]) == 100
    sent = list(traffic(TRACE, plan(tp=2)))
    tensor = 2 * 10 * 100 * 2  # micro_batch x seq x hidden x 2 B
    assert [s.payload_bytes for s in sent] == [2 * 2 * tensor, 2 * 2 * tensor]  # two blocks, twice each, two directions


def test_communication_shows_only_where_compute_is_shorter() -> None:
    slow = replace(GPU, link_bytes_per_second=1e6)
    hidden = step_time(TRACE, plan(dp=2, zero_stage=3), cluster(1, 2))
    shown = step_time(TRACE, plan(dp=2, zero_stage=3), Cluster(nodes=1, gpus_per_node=2, gpu=slow, text="slow"))
    assert hidden.exposed_communication_seconds == 0
    gather = 2 * N / 2 / 1e6
    assert shown.exposed_communication_seconds == pytest.approx(
        max(0.0, gather - 2.2) + max(0.0, 2 * gather - 4.4), rel=1e-6
    )


def test_a_group_that_spans_nodes_takes_the_network() -> None:
    network = replace(GPU, inter_node_bytes_per_second=1e5)
    inside = step_time(TRACE, plan(dp=2, zero_stage=3), Cluster(nodes=2, gpus_per_node=2, gpu=network, text=""))
    across = step_time(TRACE, plan(dp=4, zero_stage=3), Cluster(nodes=2, gpus_per_node=2, gpu=network, text=""))
    assert inside.exposed_communication_seconds == 0
    assert (across.exposed_communication_seconds or 0) > 20


def test_what_is_not_known_has_no_time() -> None:
    assert step_time(TRACE, plan(), replace(cluster(1, 1), gpu=None)).step_seconds is None
    assert step_time(replace(TRACE, segments=()), plan(), cluster(1, 1)).step_seconds is None
    assert step_time(TRACE, replace(plan(), precision="fp16"), cluster(1, 1)).step_seconds is None  # no rate given
