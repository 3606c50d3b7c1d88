"""Laws of the memory formula, for both engines, and figures worked out by hand."""

import itertools
from dataclasses import replace

import pytest
from dsplan.planner.memory import ledger, ledgers, replay, state_bytes
from dsplan.planner.memory.replay import block_cut, timelines
from dsplan.planner.memory.shards import outside_blocks, shards
from dsplan.planner.models.load import load_subject
from dsplan.planner.tracing.tracer import trace as trace_of
from dsplan.schemas.choices import OFFLOADS, OPTIMIZERS, PIPELINE_SCHEDULES, RECOMPUTES, OptimizerSpec, ZeroKnobs
from dsplan.schemas.layout import Layout
from dsplan.schemas.ledger import CATEGORIES, STEP_PHASES
from dsplan.schemas.plan import ENGINES, Plan
from dsplan.schemas.trace import Trace
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import subject
from traces import param, stack, stacks

SMALL = ZeroKnobs(reduce_bucket_size=1000, allgather_bucket_size=1000, prefetch_bucket_size=500)
plans = st.builds(
    Plan,
    engine=st.sampled_from(ENGINES),
    layout=st.builds(Layout, dp_shard=st.sampled_from([1, 2, 3, 8]), tp=st.sampled_from([1, 2, 4])),
    zero_stage=st.integers(0, 3),
    precision=st.just("bf16"),
    micro_batch=st.just(1),
    accumulation=st.sampled_from([1, 2, 5]),
    offload=st.sampled_from(OFFLOADS),
    optimizer=st.builds(OptimizerSpec, kernel=st.sampled_from(["fused", "foreach", "for-loop"])),
    knobs=st.sampled_from([ZeroKnobs(), SMALL]),
)


def of(trace: Trace, plan: Plan) -> Plan:
    return replace(plan, precision=trace.precision)


@given(stacks, plans)
def test_states_never_rise_with_the_zero_stage(trace, plan):
    totals = [sum(state_bytes(trace, replace(of(trace, plan), zero_stage=stage)).values()) for stage in range(4)]
    assert totals == sorted(totals, reverse=True)


@given(stacks, plans)
def test_one_rank_holds_the_same_states_at_every_stage(trace, plan):
    alone = replace(of(trace, plan), layout=Layout())
    assert len({tuple(state_bytes(trace, replace(alone, zero_stage=stage)).items()) for stage in range(4)}) == 1


@given(stacks, plans)
def test_more_tensor_parallel_never_takes_more(trace, plan):
    """But for DeepSpeed's prefetch at stage 3, which takes whole parameters: smaller ones fill its bucket better."""
    plan = of(trace, plan)
    twice = replace(plan, layout=replace(plan.layout, tp=2 * plan.layout.tp))
    fetched = plan.engine == "deepspeed" and plan.zero_stage == 3
    slack = 2 * 4 * plan.knobs.prefetch_bucket_size if fetched else 0  # the flat buffer and the copies out of it, fp32
    assert ledger(trace, twice).allocated_bytes <= ledger(trace, plan).allocated_bytes + slack
    assert ledger(trace, twice).resident_bytes <= ledger(trace, plan).resident_bytes


@given(stacks, plans)
def test_items_add_up_and_none_is_negative(trace, plan):
    book = ledger(trace, of(trace, plan))
    assert {moment.phase for moment in book.moments} >= set(STEP_PHASES)
    assert len({moment.phase for moment in book.moments}) == len(book.moments)
    for moment in book.moments:
        assert all(item.bytes > 0 and item.why and isinstance(item.bytes, int) for item in moment.items)
        assert sum(moment.category_bytes(category) for category in CATEGORIES) == moment.allocated_bytes
        kept = max(each.category_bytes("gathered_params") for each in book.moments)  # DeepSpeed's step lets go of them
        assert moment.phase == "load" or moment.allocated_bytes >= book.resident_bytes - kept


@given(stacks, plans)
def test_the_ledger_holds_the_states(trace, plan):
    """Padding apart, what lies on device and host between steps is at least the states of the table."""
    plan = of(trace, plan)
    states, book = state_bytes(trace, plan), ledger(trace, plan)
    assert book.resident_bytes + book.host_bytes >= states["params"] + states["optimizer"] - 64


@given(stacks, plans)
def test_offload_moves_bytes_to_the_host(trace, plan):
    plan = replace(of(trace, plan), zero_stage=3)
    books = {offload: ledger(trace, replace(plan, offload=offload)) for offload in OFFLOADS}
    assert books["none"].host_bytes == 0
    assert books["none"].host_bytes < books["optimizer"].host_bytes <= books["param"].host_bytes
    assert books["none"].resident_bytes > books["optimizer"].resident_bytes >= books["param"].resident_bytes


@given(st.integers(0, 40), st.integers(1, 9))
def test_the_cut_of_blocks_is_whole_contiguous_and_even(blocks, pp):
    cut = block_cut(blocks, pp)
    assert [unit for part in cut for unit in part] == list(range(1, blocks + 1))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


def plan(engine="native", *, dp=1, pp=1, zero_stage=0, precision="bf16", accumulation=1, **more) -> Plan:
    return Plan(
        engine=engine,
        layout=Layout(dp_shard=dp, pp=pp),
        zero_stage=zero_stage,
        precision=precision,
        micro_batch=1,
        accumulation=accumulation,
        **more,
    )


def test_without_a_sample_batch_the_states_remain():
    trace = replace(stack(blocks=2, hidden=8, vocab=16, tokens=4, precision="bf16"), segments=())
    for engine in ENGINES:
        book = ledger(trace, plan(engine, dp=2, zero_stage=2))
        assert "step" in {moment.phase for moment in book.moments} <= {"load", "step", "save"}
        states = state_bytes(trace, plan(engine, dp=2, zero_stage=2))
        step = next(moment for moment in book.moments if moment.phase == "step")
        held = sum(step.category_bytes(category) for category in ("params", "optimizer"))
        assert held == pytest.approx(states["params"] + states["optimizer"], abs=64)


def test_shards_are_padded_in_the_first_dim_of_each_tensor():
    trace = stack(blocks=1, hidden=8, vocab=16, tokens=4, precision="bf16")
    sizes = shards(trace, 1, 3)
    # block: norm [8] -> 9, up [32, 8] -> [33, 8], down [8, 32] -> [9, 32]
    assert sizes.padded[1] == 9 + 33 * 8 + 9 * 32
    assert sizes.shard[1] == 3 + 11 * 8 + 3 * 32
    assert sizes.whole[1] == 8 + 32 * 8 + 8 * 32
    assert shards(trace, 2, 1).whole[1] == 8 + 16 * 8 + 8 * 16, "the norm is on every tp rank"


def test_native_by_hand():
    """Two blocks of 520 parameters, 264 outside, on 2 ranks: masters and two states of the half, and a counter a tensor."""
    trace = stack(blocks=2, hidden=8, vocab=16, tokens=4, precision="bf16")
    params = 2 * 520 + 264
    book = ledger(trace, plan(dp=2, zero_stage=3))
    assert book.resident_bytes == 12 * params // 2 + 4 * 9
    step = next(moment for moment in book.moments if moment.phase == "step")
    assert step.category_bytes("grads") == 4 * params // 2
    # The fullest moment of backward: blocks.0 has just been gathered, and the reduction of blocks.1 is not over.
    backward = next(moment for moment in book.moments if moment.phase == "backward")
    assert backward.where == "before backward of blocks.0"
    head = (8 + 16 * 8) * 2
    assert {category: backward.category_bytes(category) for category in CATEGORIES} == {
        "params": 4 * params // 2,
        "optimizer": 8 * params // 2 + 4 * 9,
        "activations": 7 * 4 * 8 * 2,  # the embedding's output, and what one block keeps
        "gathered_params": 2 * (264 + 520) + 2 * 520,  # copies, and the buffer that they were copied out of
        "grads": head + 4 * 520 // 2,  # the head's wait for the embedding's; those of blocks.1 are in fp32
        "buckets": 2 * 520,
        "temporary": 0,
    }


def test_deepspeed_buckets_do_not_shrink_with_the_model():
    """Two buckets of 5e8 elements in bf16 are 2e9 bytes under overlap_comm, however small the model."""
    trace = stack(blocks=2, hidden=8, vocab=16, tokens=4, precision="bf16")
    knobs = ZeroKnobs(overlap_comm=True)
    with_overlap = ledger(trace, plan("deepspeed", dp=2, zero_stage=2, knobs=knobs))
    assert with_overlap.peak.category_bytes("buckets") == 2 * 2 * 500_000_000
    assert ledger(trace, plan("deepspeed", dp=2, zero_stage=2)).peak.category_bytes("buckets") == 2 * 500_000_000


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_deepspeed_keeps_a_second_fp32_master(zero_stage):
    """fp32 at stages 1 and 2: 4 N and a partition of masters and two states, 12 N / dp."""
    trace = stack(blocks=2, hidden=8, vocab=16, tokens=4, precision="fp32")
    book = ledger(trace, plan("deepspeed", dp=2, zero_stage=zero_stage, precision="fp32"))
    assert book.resident_bytes == 4 * 1304 + 12 * 1304 // 2 + 4


def test_the_pipeline_keeps_as_many_micro_batches_as_stages_follow():
    """The last stage holds one micro-batch, whatever the accumulation; the first of four up to four."""
    trace = stack(blocks=4, hidden=8, vocab=16, tokens=4096, precision="bf16")
    line = 4096 * 8 * 2

    def waiting(accumulation: int) -> int:
        book = ledger(trace, plan(pp=4, accumulation=accumulation, zero_stage=1))
        return book.phase_bytes("forward") // (7 * line)

    assert [waiting(accumulation) for accumulation in (1, 2, 3, 4, 8)] == [1, 2, 3, 4, 4]


def test_parts_outside_the_blocks_go_to_the_ends_of_the_pipeline():
    trace = stack(blocks=4, hidden=8, vocab=16, tokens=4, precision="bf16")
    assert [param.name for param in outside_blocks(trace, "first")] == ["tokens"]
    assert [param.name for param in outside_blocks(trace, "last")] == ["norm", "head"]


def test_a_pipeline_of_blocks_alone_has_nothing_at_its_ends():
    trace = stack(blocks=4, hidden=8, vocab=16, tokens=4, precision="bf16")
    rest, *blocks = trace.units
    alone = replace(trace, units=(replace(rest, params=()), *blocks))
    held = ledger(alone, plan(pp=4, zero_stage=0)).resident_bytes
    # fp32 masters and two states of a block, and a step count for each of its tensors
    assert held == 12 * blocks[0].numel + 4 * len(blocks[0].params)


def test_rows_left_out_never_hold_the_peak(monkeypatch):
    """Of equal blocks in a row only the ends are kept: the ledger is that of all rows."""
    for blocks, tokens, pp in ((12, 1, 1), (12, 256, 1), (13, 16, 2), (24, 16, 4)):
        trace = stack(blocks=blocks, hidden=24, vocab=100, tokens=tokens, precision="bf16")
        for zero_stage in range(4):
            for accumulation in (1, 2, 5):
                of = plan(dp=3, pp=pp, zero_stage=zero_stage, accumulation=accumulation)
                short = ledgers(trace, of)
                with monkeypatch.context() as patch:
                    patch.setattr(replay, "ends_of_runs", lambda trace, kept, *_: list(range(len(kept))))
                    whole = ledgers(replace(trace), of)
                assert [[(m.phase, m.allocated_bytes) for m in book.moments] for book in short] == [
                    [(m.phase, m.allocated_bytes) for m in book.moments] for book in whole
                ]
                assert len(timelines(trace, pp)[0].unit) < len(trace.segments)


def test_blocks_that_take_turns_are_runs_too():
    """Two kinds of block, one after the other, as local and global attention: two of each are kept at both ends."""
    even = stack(blocks=16, hidden=24, vocab=100, tokens=16, precision="bf16")
    units = tuple(
        replace(unit, params=(*unit.params, param("extra", 7, width=2))) if index and index % 2 else unit
        for index, unit in enumerate(even.units)
    )
    trace = replace(even, units=units)
    assert len(timelines(trace, 1)[0].unit) == 4 + 2 * 8


@settings(max_examples=25)
@given(stacks, plans)
def test_the_ledger_is_the_fullest_of_the_pipeline(trace, of_any):
    of_any = replace(of(trace, of_any), layout=replace(of_any.layout, pp=min(3, len(trace.blocks))), zero_stage=0)
    books = ledgers(trace, of_any)
    assert len(books) == of_any.layout.pp
    assert ledger(trace, of_any).allocated_bytes == max(book.allocated_bytes for book in books)


@settings(max_examples=25)
@given(stacks, plans)
def test_splitting_the_sequence_never_takes_more(trace, of_any):
    of_any = replace(of(trace, of_any), engine="native")
    alone = ledger(trace, of_any).allocated_bytes
    assert ledger(trace, replace(of_any, sequence_parallel=True)).allocated_bytes <= alone
    even = replace(of_any, layout=Layout(dp_shard=2))  # shards without padding, before and after
    longer = replace(even, layout=Layout(dp_shard=2, sp=2))
    assert ledger(trace, longer).allocated_bytes <= ledger(trace, even).allocated_bytes


@settings(max_examples=25)
@given(stacks, plans, st.sampled_from(OPTIMIZERS), st.sampled_from(["fp32", "bf16", "8bit"]))
def test_more_shards_never_hold_more_states(trace, of_any, name, dtype):
    """But for a maximum per block of 256 elements, of which a small shard may begin one more."""
    spec = OptimizerSpec(name=name, state_dtype=dtype)
    of_any = replace(of(trace, of_any), engine="native", zero_stage=1, optimizer=spec, offload="none")
    held = [ledger(trace, replace(of_any, layout=Layout(dp_shard=dp))).resident_bytes for dp in (1, 2, 4, 8)]
    if dtype != "8bit":  # small shards keep fp32 states there
        assert held == sorted(held, reverse=True)
    assert held[-1] < held[0]


def test_native_loads_unit_by_unit():
    """Two blocks of 520 parameters and 264 outside, fp32, on 2 ranks: the second block whole, beside half of both."""
    trace = stack(blocks=2, hidden=8, vocab=16, tokens=4, precision="bf16")
    book = ledger(trace, plan(dp=2, zero_stage=3))
    load = next(moment for moment in book.moments if moment.phase == "load")
    assert (load.where, load.allocated_bytes) == ("sharding blocks.1", 4 * (260 + 520 + 260))
    assert book.load_host_bytes == 4 * (2 * 520 + 264), "each rank's script builds the whole model"
    assert ledger(trace, replace(plan(dp=2, zero_stage=3), built="meta")).load_host_bytes == 0


def test_an_evaluation_takes_less_than_a_training_step():
    trace = stack(blocks=4, hidden=24, vocab=100, tokens=16, precision="bf16")
    for zero_stage in range(4):
        moments = {moment.phase: moment for moment in ledger(trace, plan(dp=2, zero_stage=zero_stage)).moments}
        assert 0 < moments["eval"].allocated_bytes < moments["forward"].allocated_bytes
        assert moments["eval"].category_bytes("grads") == 0


def test_saving_whole_gathers_one_parameter_at_a_time_and_the_model_on_the_host():
    trace = stack(blocks=2, hidden=8, vocab=16, tokens=4, precision="bf16")
    asked = replace(plan(dp=2, zero_stage=3), knobs=ZeroKnobs(gather_16bit_weights_on_save=True))
    book = ledger(trace, asked)
    save = next(moment for moment in book.moments if moment.phase == "save")
    assert save.allocated_bytes == book.resident_bytes + 4 * 32 * 8
    assert book.save_host_bytes == (4 + 2) * (2 * 520 + 264)
    assert ledger(trace, plan(dp=2, zero_stage=3)).save_host_bytes == 0


def test_quantised_weights_and_whole_numbers_have_the_bytes_they_are_stored_in():
    trace = stack(blocks=2, hidden=8, vocab=16, tokens=4, precision="bf16")
    block = trace.units[1]
    norm, up, down = block.params
    stored = replace(up, trainable=False, stored_bytes=up.numel // 2)
    flags = replace(down, trainable=False, dtype_bytes=1)
    sizes = shards(replace(trace, units=(trace.units[0], replace(block, params=(norm, stored, flags)))), 1, 2)
    assert sizes.master_bytes[1] == 4 * 8 // 2 + 256 // 2 // 2 + 256 // 2
    assert sizes.gathered_bytes[1] == 2 * 8 + 256 // 2 + 256


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_are_linear_in_the_micro_batch(recompute):
    """Exactly, on a model without buffers that do not depend on the batch; but for the loss, one number."""
    found = [
        trace_of(subject("untied"), precision="bf16", micro_batch=micro_batch, seq_len=16, recompute=recompute)
        for micro_batch in (1, 2, 4)
    ]

    def points(trace):
        return [p.activation_bytes for s in trace.segments for p in (s.start, s.end)]

    one, two, four = map(points, found)
    assert [b - a for a, b in zip(one, two, strict=True)] == [(b - a) // 2 for a, b in zip(two, four, strict=True)]
    assert all(abs(2 * a - b) <= 16 for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_doubling_tp_never_takes_more_on_a_real_trace(zero_stage):
    trace = trace_of(subject("llama"), precision="bf16", micro_batch=2, seq_len=16)
    books = [
        ledger(trace, replace(plan(dp=2, zero_stage=zero_stage), layout=Layout(dp_shard=2, tp=tp))) for tp in (1, 2, 4)
    ]
    assert trace.tp_limit >= 2
    assert [book.allocated_bytes for book in books] == sorted((b.allocated_bytes for b in books), reverse=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_item_is_negative_where_a_pipeline_cuts_tied_weights(engine):
    """The head's part of the gradient lives on the last stage, the embedding's on the first: neither frees the other's."""
    small = {"layers": "4", "width": "64", "heads": "4", "vocab": "1000", "positions": "64"}
    model = load_subject("examples/gpt.py", sets=small)
    for recompute, zero_stage, schedule in itertools.product(RECOMPUTES[:2], (0, 1), PIPELINE_SCHEDULES):
        traced = trace_of(model, precision="bf16", recompute=recompute, micro_batch=1, seq_len=64)
        cut = plan(engine, dp=2, pp=2, zero_stage=zero_stage, recompute=recompute, schedule=schedule)
        for book in ledgers(traced, cut):
            assert all(item.bytes > 0 for moment in book.moments for item in moment.items)
