"""Resolve against what real DeepSpeed 0.19.8 held of the same texts, and where each value is said to be from."""

import json
from pathlib import Path

import pytest
from command import dsplan
from dsplan.planner.auditing.resolving import held_values, resolve
from dsplan.schemas.cluster import parse_cluster
from dsplan.schemas.companion import companion_of
from dsplan.schemas.jsonfile import read_document
from dsplan.schemas.problem import Problem
from dsplan.schemas.resolved import Held

RECORD = json.loads((Path(__file__).parents[1] / "oracle" / "resolved_values.json").read_text("utf-8"))
NOT_SHOWN = {
    "/disable_allgather",
    "/pipeline/partition",
    "/pipeline/seed_layers",
    "/pipeline/stages",
    "/zero_optimization/allgather_partitions",
    "/zero_optimization/elastic_checkpoint",
    "/zero_optimization/legacy_stage1",
    "/zero_optimization/stage3_gather_fp16_weights_on_model_save",
}
"""Old keys and keys that nothing reads: shown where the file has them, not by their defaults."""
WHOLE = ("zero_optimization", "fp16", "bf16")
"""Blocks of which DeepSpeed holds every member."""


def held(text: str, **how: object) -> dict[str, Held]:
    values, _ = held_values(read_document(text, how.pop("dialect", "hjson")), how.pop("reader", "deepspeed"), **how)  # type: ignore[arg-type]
    return {value.pointer: value for value in values}


@pytest.mark.parametrize("answer", RECORD["answers"], ids=lambda answer: answer["text"][:80])
def test_deepspeed_holds_what_resolve_says(answer: dict) -> None:
    truth = {**RECORD["answers"][0]["held"], **answer["held"]}
    for pointer in [*answer["not_held"], *NOT_SHOWN]:
        truth.pop(pointer, None)
    ours = held(answer["text"], cluster=parse_cluster(str(RECORD["ranks"])), everything=True)
    for pointer, value in truth.items():
        got = ours[pointer].value if pointer in ours else None
        if pointer == "/optimizer/type" and value is not None:  # DeepSpeed keeps its own names in lower case
            got = got.lower() if value.islower() else got
        assert got == value and isinstance(got, bool) == isinstance(value, bool), pointer
    for pointer, one in ours.items():
        if pointer.split("/")[1] in WHOLE and one.value is not None and not one.note.startswith("not a key"):
            assert pointer in truth, pointer


def test_there_are_forty_texts() -> None:
    assert len(RECORD["answers"]) >= 40


@pytest.mark.parametrize(
    ("text", "pointer", "value", "origin", "note"),
    [
        ('{"zero_optimization": {"stage": "2"}}', "/zero_optimization/stage", 2, "coerced", 'written as "2"'),
        (
            '{"zero_optimization": {"reduce_bucket_size": 5e8}}',
            "/zero_optimization/reduce_bucket_size",
            500_000_000,
            "coerced",
            "written as 5e8",
        ),
        ('{"zero_optimization": {"stage": true}}', "/zero_optimization/stage", 1, "coerced", "written as true"),
        ('{"zero_optimization": {"stage": 2}}', "/zero_optimization/stage", 2, "file", ""),
        ('{"zero_optimization": {}}', "/zero_optimization/stage", 0, "default", ""),
        ('{"zero_optimization": {"stage": "auto"}}', "/zero_optimization/stage", 0, "default", '"auto" is dropped'),
        ("{}", "/gradient_clipping", 1.0, "default", ""),
        ('{"gradient_cliping": 2}', "/gradient_cliping", 2, "ignored", "not a key that DeepSpeed reads"),
        (
            '{"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 7}}',
            "/zero_optimization/stage3_max_live_parameters",
            7,
            "ignored",
            "no effect at ZeRO stage 2",
        ),
        (
            '{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}',
            "/zero_optimization/offload_param/device",
            "cpu",
            "ignored",
            "no effect at ZeRO stage 2",
        ),
        (
            '{"zero_optimization": {"stage": 3}}',
            "/zero_optimization/overlap_comm",
            True,
            "derived",
            "from ZeRO stage 3",
        ),
        (
            '{"zero_optimization": {"stage": 2, "cpu_offload": true}}',
            "/zero_optimization/offload_optimizer/device",
            "cpu",
            "derived",
            "from cpu_offload",
        ),
        (
            '{"zero_optimization": {"stage": 3, "max_live_parameters": 7}}',
            "/zero_optimization/stage3_max_live_parameters",
            7,
            "file",
            'written as "max_live_parameters"',
        ),
        ('{"bfloat16": {"enabled": true}}', "/bf16/enabled", True, "file", 'written as "bfloat16"'),
        ("{prescale_gradients: False,\n}", "/prescale_gradients", "False,", "file", "a text, which counts as true"),
        ('{"train_batch_size": 8}', "/gradient_accumulation_steps", 1, "derived", "from the other batch keys"),
        (
            '{"train_batch_size": 8}',
            "/train_micro_batch_size_per_gpu",
            None,
            "derived",
            "needs the number of GPUs: give --cluster",
        ),
    ],
)
def test_origin(text: str, pointer: str, value: object, origin: str, note: str) -> None:
    one = held(text)[pointer]
    assert (one.value, one.origin, one.note) == (value, origin, note)


def test_the_trainer_fills_and_adds() -> None:
    companion = companion_of({"per_device_train_batch_size": 4, "bf16": True}, "args.yaml", "trainer")
    text = '{"train_batch_size": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}}}'
    ours = held(text, reader="trainer", dialect="json", companion=companion, cluster=parse_cluster("8"))
    assert ours["/train_batch_size"].value == 32
    assert ours["/train_batch_size"].note.startswith("from per_device_train_batch_size")
    assert (ours["/optimizer/params/lr"].value, ours["/optimizer/params/lr"].origin) == (5e-5, "auto")
    assert ours["/optimizer/params/lr"].note == "from learning_rate's default"
    assert ours["/bf16/enabled"].origin == "reader"
    assert ours["/gradient_accumulation_steps"].value == 1
    assert ours["/steps_per_print"].value == float("inf")


def test_an_auto_that_nothing_fills_yet_says_who_will() -> None:
    ours = held('{"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}', reader="trainer", dialect="json")
    lr = ours["/optimizer/params/lr"]
    assert (lr.value, lr.origin, lr.note) == ("auto", "auto", "will be filled by learning_rate; give --args")


def test_blocks_that_are_not_there_come_with_everything() -> None:
    assert "/fp16/loss_scale" not in held('{"train_batch_size": 8}')
    assert held('{"train_batch_size": 8}', everything=True)["/fp16/loss_scale"].value == 0


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"train_batch_size": 8,\n "fp16": {"enabeld": true}}', "2:11"),
        ('{"train_batch_size": 8,\n "zero_optimization": {"stage": 4}}', "2:33"),
        ('{"train_batch_size": 8,\n "train_batch_size": 8}', "2:2"),
        ('{"a": [1', ":1:"),
        ("[1]", "1:1"),
    ],
)
def test_what_the_reader_refuses_is_one_line_with_its_place(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(Problem, match=where) as problem:
        resolve(str(path))
    assert "\n" not in str(problem.value)


def test_a_file_without_a_batch_size_is_resolved(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}}')
    table = resolve(str(path)).by_pointer()
    assert table["/train_batch_size"].note == "the script must give a batch size"


def test_the_command(tmp_path: Path) -> None:
    config, args = tmp_path / "ds.json", tmp_path / "args.yaml"
    config.write_text('{"train_batch_size": "auto", "zero_optimization": {"stage": "3"}}')
    args.write_text("per_device_train_batch_size: 2\n")
    done = dsplan("resolve", str(config), "--args", str(args), "--world-size", "4", "--format", "json")
    values = {held["pointer"]: held for held in json.loads(done.out)["values"]}
    assert (done.code, json.loads(done.out)["version"]) == (0, 1)
    assert values["/train_batch_size"]["value"] == 8
    assert values["/zero_optimization/stage"] == {
        "pointer": "/zero_optimization/stage",
        "value": 3,
        "origin": "coerced",
        "note": 'written as "3"',
    }
    config.write_text("{")
    done = dsplan("resolve", str(config))
    assert (done.code, done.err.count("\n")) == (2, 1)


def test_what_the_trainer_refuses_is_said_beside_the_values(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"train_micro_batch_size_per_gpu": 2}')
    companion = companion_of({"per_device_train_batch_size": 4}, "args.yaml", "trainer")
    (refusal,) = resolve(str(config), companion=companion).refusals
    assert "1:36: train_micro_batch_size_per_gpu is 2" in refusal


def test_a_template_keeps_its_placeholders_open(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(
        '{"train_batch_size": 8, "zero_optimization": {"stage": ${STAGE}, "stage3_max_live_parameters": 7}}'
    )
    table = resolve(str(config)).by_pointer()
    assert table["/zero_optimization/stage"].value == "${STAGE}"
    assert table["/zero_optimization/stage3_max_live_parameters"].origin == "file"
    assert table["/zero_optimization/overlap_comm"].value is None
    defined = resolve(str(config), defines={"STAGE": "3"}).by_pointer()
    assert defined["/zero_optimization/stage"].value == 3
    assert defined["/zero_optimization/overlap_comm"].value is True


def test_what_will_fill_a_batch_names_no_number_of_gpus(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"train_batch_size": "auto"}')
    (held,) = [one for one in resolve(str(file), reader="trainer").values if one.pointer == "/train_batch_size"]
    assert "x dp; give --args and --cluster" in held.note


def test_what_the_trainer_leaves_to_accelerate_is_held_as_accelerate_fills_it() -> None:
    """transformers 5.24 with accelerate 1.15: stage "auto" of the file became 2, the device "none"."""
    text = '{"train_batch_size": 8, "zero_optimization": {"stage": "auto", "offload_param": {"device": "auto"}}}'
    held = {value.pointer: value.value for value in held_values(read_document(text, "json"), "trainer")[0]}
    assert (held["/zero_optimization/stage"], held["/zero_optimization/offload_param/device"]) == (2, "none")
