"""What lint can be pointed at, and what of a template it tells."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import dsplan
from dsplan.planner.auditing.linting import lint, lint_text
from dsplan.planner.auditing.sources import sources
from dsplan.schemas.problem import Problem

CLEAN = '{"train_batch_size": 8, "gradient_clipping": 1.0}'


def rules_of(text: str, **options: object) -> list[str]:
    return [finding.rule for finding in lint_text(text, **options).findings]  # type: ignore[arg-type]


def test_globs_folders_and_names_give_each_file_once(tmp_path: Path) -> None:
    for name in ("ds_a.json", "ds_b.json", "deep/ds_c.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(CLEAN)
    (tmp_path / "package.json").write_text('{"name": "x"}')
    found = sources([str(tmp_path / "*.json"), str(tmp_path), str(tmp_path / "ds_a.json")])
    assert [Path(source.name).name for source in found] == ["ds_a.json", "ds_b.json", "package.json", "ds_c.json"]


def test_a_glob_that_matches_nothing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="no file matches"):
        list(sources([str(tmp_path / "*.json")]))


def test_a_name_with_the_signs_of_a_glob_or_a_part_is_still_a_name(tmp_path: Path) -> None:
    for name in ("a[1].json", "b#c.json"):
        (tmp_path / name).write_text(CLEAN)
    assert len(list(sources([str(tmp_path / "a[1].json"), str(tmp_path / "b#c.json")]))) == 2


def test_parts_of_yaml_json_and_python_are_linted_at_their_places(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("x: 1\ndeepspeed:\n  train_batch_size: 8\n  zero_optimisation: {stage: 2}\n")
    (tmp_path / "t.json").write_text('{"deepspeed":\n {"train_batch_size": 8, "zero_optimisation": {"stage": 2}}}')
    (tmp_path / "t.py").write_text('ds = {\n  "train_batch_size": 8, "zero_optimisation": {"stage": S},\n}\n')
    names = ["t.yaml#/deepspeed", "t.json#/deepspeed", "t.py#ds"]
    found = lint([str(tmp_path / name) for name in names])
    errors = [[f for f in file.findings if f.severity == "error"] for file in found]
    assert [(f.rule, f.pointer, f.span.line) for [f] in errors] == [
        ("DSP001", "/zero_optimisation", 4),
        ("DSP001", "/zero_optimisation", 2),
        ("DSP001", "/zero_optimisation", 2),
    ]
    assert [file.file for file in found] == [str(tmp_path / name) for name in names]
    assert all(finding.fix is None for file in found for finding in file.findings)


@pytest.mark.parametrize(("name", "part"), [("t.yaml", "t.yaml#/deepspeed"), ("t.py", "t.py#ds_config")])
def test_a_file_of_another_kind_needs_the_part(name: str, part: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("x: 1\n")
    done = dsplan("lint", str(tmp_path / name))
    assert done.code == 2 and done.err.count("\n") == 1
    assert f"as in {tmp_path / part}" in done.err


def test_what_depends_on_a_placeholder_is_not_told_and_the_rest_is() -> None:
    text = """{
      "train_batch_size": ${BATCH}, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3,
      "gradient_clipping": CLIP,
      "zero_optimization": {"stage": {{ stage }}, "offload_param": {"device": "cpu"}, "overlap_com": true},
      "fp16": {"enabled": FP16}, "bf16": {"enabled": BF16}
    }"""
    assert rules_of(text) == ["DSP070", "DSP001"]


@pytest.mark.parametrize(
    ("defines", "rule"),
    [
        ({"BATCH": "30"}, "DSP103"),  # 30 is no multiple of 4 x 3
        ({"stage": "2"}, "DSP401"),  # offload_param below stage 3
        ({"FP16": "true", "BF16": "true"}, "DSP201"),
        ({"stage": "7"}, "DSP004"),
    ],
)
def test_a_filled_placeholder_is_judged(defines: dict[str, str], rule: str) -> None:
    text = """{
      "train_batch_size": ${BATCH}, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3,
      "gradient_clipping": 1.0,
      "zero_optimization": {"stage": {{ stage }}, "offload_param": {"device": "cpu"}},
      "fp16": {"enabled": FP16}, "bf16": {"enabled": BF16}
    }"""
    assert rule not in rules_of(text)
    assert rule in rules_of(text, defines=defines)


def test_a_quoted_placeholder_may_be_of_any_type_and_a_longer_text_may_not() -> None:
    assert rules_of('{"train_batch_size": "${X}", "gradient_clipping": 1.0}') == ["DSP070"]
    assert "DSP003" in rules_of('{"train_batch_size": "8${X}", "gradient_clipping": 1.0}')


def test_the_trainers_autos_are_seen_round_placeholders() -> None:
    found = lint_text('{"train_batch_size": "auto", "gradient_accumulation_steps": ${STEPS}, "gradient_clipping": 1.0}')
    assert found.read_as == "trainer"


def test_every_branch_of_a_template_is_read() -> None:
    text = '{{% if x %}"zero_optimisation": {"stage": 2},{% else %}"bf17": {},{% endif %} "train_batch_size": 8, "gradient_clipping": 1.0}'
    assert [(f.rule, f.pointer) for f in lint_text(text).findings] == [
        ("DSP001", "/zero_optimisation"),
        ("DSP001", "/bf17"),
    ]


def test_branches_that_exclude_each_other_are_not_read_together() -> None:
    text = """{"train_batch_size": 8, "gradient_clipping": 1.0,
      {% if bf16 %}"bf16": {"enabled": true}{% else %}"fp16": {"enabled": true}{% endif %},
      {% if not bf16 %}"communication_data_type": "fp16",{% endif %}
      {% if zero3 %}"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": true}
      {% elif zero2 %}"zero_optimization": {"stage": 2}
      {% else %}"zero_optimization": {"stage": {{ stage }}}{% endif %}}"""
    assert rules_of(text) == ["DSP070"]


@pytest.mark.parametrize(
    "text",
    [
        'x = {**base, "zero_optimization": {"offload_param": {"device": "cpu"}, **zero}}',
        'x = dict(zero_optimization={"offload_param": {"device": "cpu"}}, **base)\nx["zero_optimization"]["stage"] = 3',
        'x = {"zero_optimization": {"offload_param": {"device": "cpu"}, key: 3}, other: 1}',
        'x = {"zero_optimization": {"offload_param": {"device": "cpu"}}}\nx.update(base)\nx["zero_optimization"].update(z)',
        'x = {"zero_optimization": {"stage": 0, "offload_param": {"device": "cpu"}}}\nx["zero_optimization"]["stage"] = s\nx |= base',
    ],
)
def test_members_that_a_program_adds_may_be_any(text: str, tmp_path: Path) -> None:
    """No word of a batch size, of clipping or of the stage, which may be among them; what is wrong whatever they are is told."""
    (tmp_path / "t.py").write_text(text.replace('"cpu"', '"cpu", "buffer_cnt": 5'))
    [found] = lint([f"{tmp_path / 't.py'}#x"])
    assert [finding.rule for finding in found.findings if finding.rule != "DSP070"] == ["DSP001"]


def test_members_that_a_template_adds_may_be_any() -> None:
    assert rules_of('{ {{ base }}, "zero_optimization": {"offload_param": {"device": "cpu"}, {{ zero }} } }') == [
        "DSP070"
    ]
    assert rules_of('{ {{ base }}: 1, "zero_optimization": {"offload_param": {"device": "cpu"}, "${K}": 3 } }') == [
        "DSP070"
    ]


@pytest.mark.parametrize("key", ["${A}/x", "x~${A}", "{{ a }}/b/c"])
def test_a_key_with_a_placeholder_and_the_signs_of_a_pointer_is_open(key: str) -> None:
    batch = '"train_batch_size": 8, "gradient_clipping": 1.0'
    assert rules_of(f'{{{batch}, "{key}": {{"b": "${{C}}"}}}}') == ["DSP070"]
    assert rules_of(f'{{{batch}, "fp16": {{"enabled": true, "{key}": 1}}}}') == ["DSP070"]


def test_a_loop_is_read_as_of_one_entry() -> None:
    text = """{"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "Adam", "params": {"betas":
      [{% for b in betas %}{{ b }}{% if not loop.last %}, {% endif %}{% endfor %}], "lr": 0.1, "adam_w_mode": true}}}"""
    assert "DSP000" not in rules_of(text) and "DSP071" not in rules_of(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{% if x %}\n{"train_batch_size": 8\n{% else %}\n{"train_batch_size": 4\n{% endif %}', 3),
        ('{"train_batch_size": {% if x %}\n[{% else %}{{% endif %} }', 2),
    ],
)
def test_blocks_that_break_the_structure_have_a_place(text: str, line: int) -> None:
    [finding] = lint_text(text).findings
    assert finding.rule == "DSP000" and finding.span.line >= line
    assert "render it first" in finding.message and "\ue000" not in finding.message


def test_a_fix_never_writes_over_a_placeholder() -> None:
    """The batch could be mended by writing another train_batch_size, but that is the template's to fill."""
    found = lint_text(
        '{"zero_optimization": {"stage": "${S}"}, "train_batch_size": 8, "gradient_clipping": 1.0}',
        defines={"S": '"2"'},
    )
    assert [(finding.rule, finding.fix) for finding in found.findings if finding.rule == "DSP016"] in (
        [],
        [("DSP016", None)],
    )


def test_a_name_that_no_file_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"train_batch_size": ${BATCH}, "gradient_clipping": 1.0}')
    done = dsplan("lint", str(tmp_path / "t.json"), "--define", "BACH=8")
    assert (done.code, done.err) == (
        2,
        "dsplan: error: --define BACH: no placeholder is called so; there is BATCH\n",
    )


def test_the_reader_is_told_and_what_another_would_refuse_is_info() -> None:
    loose = lint_text('{"train_batch_size": 8, "gradient_clipping": 1.0,}')
    assert loose.read_as == "deepspeed"
    assert [(f.rule, f.severity, f.about) for f in loose.findings] == [("DSP080", "info", "trainer")]
    auto = lint_text('{"train_batch_size": "auto", "gradient_clipping": 1.0}')
    assert auto.read_as == "trainer"
    assert ("DSP081", "info", "deepspeed") in [(f.rule, f.severity, f.about) for f in auto.findings]
    assert "DSP081" not in rules_of('{"train_batch_size": "auto", "gradient_clipping": 1.0}', reader="trainer")


def test_a_file_that_is_named_in_two_ways_is_linted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(CLEAN)
    assert [source.name for source in sources(["ds.json", "./ds.json", str(tmp_path / "ds.json"), "."])] == ["ds.json"]


@pytest.mark.parametrize("name", ["a.json#b.json", "x.yaml#/y", "c.py#d"])
def test_a_file_with_a_hash_in_its_name_is_reported_by_its_whole_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name.rpartition("/")[0]).mkdir(exist_ok=True)
    (tmp_path / name).write_text(CLEAN)
    (found,) = lint([str(tmp_path / name)])
    assert (found.path, found.part) == (str(tmp_path / name), "")


def test_an_empty_path_is_not_the_folder_here() -> None:
    done = dsplan("lint", "")
    assert (done.code, done.out) == (2, "") and "a path is empty" in done.err


def test_a_notebook_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "n.ipynb").write_text('{"cells": []}')
    for part in ("", "#ds_config"):
        done = dsplan("lint", f"{tmp_path / 'n.ipynb'}{part}")
        assert done.code == 2 and "save it as .py" in done.err and done.err.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="only where there is a file without an end")
def test_a_file_without_an_end_is_one_line() -> None:
    with pytest.raises(Problem, match="holds more than 100 MB"):
        lint(["/dev/zero"])


def test_output_that_cannot_hold_a_character_escapes_it(tmp_path: Path) -> None:
    (tmp_path / "ä.json").write_text('{"train_batch_size": 8, "gradient_clipping": 1.0, "ö": 1}')
    plain = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "dsplan.planner.cli", "lint", "ä.json"]
    done = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b'\\xe4.json:1:51: warning: unknown key "\\xf6"' in done.stdout


def test_jinja_in_a_yaml_file_leaves_values_open(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(
        "who: {{ who }}\n{% if big %}\nx: 1\n{% endif %}\ndeepspeed:\n  train_batch_size: {{ batch }}\n"
        "  gradient_clipping: 1.0\n  {{ key }}: 1\n  zero_optimisation: {stage: 2}\n  wall_clock_breakdown: {{ y | int }}\n"
    )
    (found,) = lint([f"{tmp_path / 't.yaml'}#/deepspeed"])
    assert [(one.rule, one.span.line) for one in found.findings] == [("DSP070", 6), ("DSP001", 9)]
    assert {"batch", "y"} <= set(found.placeholders)
    (filled,) = lint([f"{tmp_path / 't.yaml'}#/deepspeed"], defines={"batch": "0"})
    assert ("DSP004", "/train_batch_size") in [(one.rule, one.pointer) for one in filled.findings]
    (tmp_path / "t.yaml").write_text("deepspeed: {{ ds }}\n")
    with pytest.raises(Problem, match=r"/deepspeed is \{\{ ds \}\}, which is not known here"):
        lint([f"{tmp_path / 't.yaml'}#/deepspeed"])


def test_a_key_twice_in_yaml_is_a_warning_since_its_reader_keeps_the_last(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("ds: {train_batch_size: 8, train_batch_size: 9, gradient_clipping: 1.0}\n")
    (found,) = lint([f"{tmp_path / 't.yaml'}#/ds"])
    assert [(one.rule, one.severity, one.raises) for one in found.findings] == [("DSP006", "warning", None)]
    assert "only this one counts" in found.findings[0].message


@pytest.mark.parametrize(("name", "text"), [("t.py#ds", "ds = {}"), ("t.yaml#/ds", "ds: {}")])
def test_a_byte_order_mark_of_another_language_is_none_of_lints(name: str, text: str, tmp_path: Path) -> None:
    body = '{"train_batch_size": 8, "gradient_clipping": 1.0, "our_own": 1}'
    (tmp_path / name.partition("#")[0]).write_text("\ufeff" + text.replace("{}", body), "utf-8")
    (found,) = lint([str(tmp_path / name)])
    (finding,) = found.findings
    column = text.index("{") + body.index('"our_own"') + 1
    assert (finding.rule, finding.span.column, finding.span.end_column) == ("DSP001", column, column + 9)


def test_a_misspelt_key_beside_members_that_nobody_knows_is_named() -> None:
    found = lint_text(
        '{"train_batch_size": 8, ${MORE}, "zero_optimisation": {"stage": 2}, "fp16": {${X}, "enable": true}}'
    )
    assert [one.pointer for one in found.findings if one.severity == "error"] == ["/zero_optimisation", "/fp16/enable"]


def test_a_name_that_a_placeholder_completes_may_be_any() -> None:
    assert "DSP601" not in rules_of('{"train_batch_size": 8, "optimizer": {"type": "${KIND}W"}}')
    assert "DSP003" in rules_of('{"train_batch_size": "1${X}"}')  # a text, whatever it is
