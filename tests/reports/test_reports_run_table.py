"""The table after a launch, as a person reads it."""

from dataclasses import replace

from dsplan.reports.measured_table import as_text as measured_text
from dsplan.reports.run_table import as_text
from dsplan.schemas.ledger import Collective, Ledger, MemoryItem, Moment

MIB = 2**20


def ledger(activations):
    items = (
        MemoryItem(category="params", bytes=4 * MIB, why=""),
        MemoryItem(category="activations", bytes=activations * MIB, why=""),
    )
    return Ledger(
        engine="native",
        level="measurement",
        moments=(Moment(phase="backward", where="backward", items=items),),
        resident_bytes=4 * MIB,
        collectives=(Collective(kind="all_gather", count=3, payload_bytes=8 * MIB),),
    )


def test_the_fullest_rank_stands_beside_the_prediction():
    predicted = {"params_bytes": 4 * MIB, "activations_bytes": 12 * MIB, "allocated_bytes": 16 * MIB}
    lines = as_text(predicted, [ledger(6), ledger(8)]).splitlines()
    assert lines[0] == "peak of rank 1, the fullest of 2, in backward (engine native)"
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert rows["params"] == ["4", "MiB", "4", "MiB", "0.0%"]
    assert rows["activations"] == ["12", "MiB", "8", "MiB", "+50.0%"]
    assert rows["allocated"] == ["16", "MiB", "12", "MiB", "+33.3%"]
    assert lines[-1] == "all_gather: 3 per step, 8 MiB"


def test_without_a_prediction_only_the_measure_is_shown():
    text = as_text(None, [ledger(8)])
    assert "predicted" not in text and "12 MiB" in text


def test_what_is_offloaded_has_a_line_of_its_own():
    offloaded = replace(ledger(8), host_bytes=48 * MIB)
    assert "on the host (offload): 48 MiB of rank 0" in as_text(None, [offloaded]).splitlines()
    assert "on the host (offload): 48 MiB" in measured_text(offloaded, step=3, rank=0).splitlines()
    assert "offload" not in as_text(None, [ledger(8)]) + measured_text(ledger(8), step=3, rank=0)


def test_the_slowest_ranks_step_and_the_devices_are_told():
    gpu = "NVIDIA H100 80GB HBM3"
    text = as_text(None, [ledger(8)] * 3, steps=[0.312, 0.4, None], devices=[gpu, gpu, None], predicted_step=0.25)
    assert text.splitlines()[-1] == f"step: 400 ms on 2 x {gpu}; predicted 250 ms on the plan's cluster"
    text = as_text(None, [ledger(8)], steps=[None], devices=["cpu"])
    assert text.splitlines()[-1] == "step: not timed, too few steps, on 1 x cpu"


def test_a_rank_without_a_record_is_named():
    assert as_text(None, [None, ledger(8)]).endswith("no record of rank 0")
    assert as_text(None, [None]) == "nothing was measured: no step was watched to its end\nno record of rank 0"


def test_a_rank_that_watched_nothing_has_its_record():
    assert as_text(None, [None], devices=["cpu"]) == "nothing was measured: no step was watched to its end"
