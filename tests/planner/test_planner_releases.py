"""Lint for other releases: against recorded answers of the real ones, and what an upgrade changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import dsplan
from dsplan.planner.auditing.accepting import acceptances
from dsplan.planner.auditing.fixing import fix_all
from dsplan.planner.auditing.linting import lint_text, linter
from dsplan.planner.auditing.releasing import installed, released
from dsplan.schemas.finding import FileFindings
from dsplan.schemas.problem import Problem
from dsplan.schemas.releases import NEWEST, Upgrade, asked

RECORDED = json.loads((Path(__file__).parents[1] / "oracle/release_verdicts.json").read_text("utf-8"))


def lint_at(release: str, config: dict[str, Any]) -> FileFindings:
    return lint_text(json.dumps(config), reader="deepspeed", release=None if release == NEWEST else release)


@pytest.mark.parametrize("release", asked())
def test_lint_refuses_what_the_real_release_refuses(release: str) -> None:
    wrong = []
    for row in RECORDED:
        found = lint_at(release, row["config"]).findings
        refused = [each.rule for each in found if each.severity == "error" and each.raises in ("load", "parse")]
        if bool(refused) == (release in row["taken_by"]):
            wrong.append((row["config"], refused))
    assert wrong == []


UPGRADED = """{
  // tuned by hand
  "train_batch_size": 8,
  "amp": {"enabled": false},
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 2,
    "offload_optimizer": {"device": "cpu"},  # host
    "offload_param": {}
  }
}
"""


def upgraded(text: str, before: str = "0.14.5", after: str = "0.19.8") -> FileFindings:
    return linter(reader="deepspeed", release=after, before=before)(text, "ds.json")


def told(found: FileFindings, rule: str) -> dict[str, str]:
    return {each.pointer: each.message for each in found.findings if each.rule == rule}


def test_an_upgrade_tells_each_value_that_changes_where_it_is_in_use() -> None:
    found = upgraded(UPGRADED)
    changed = told(found, "DSP054")
    assert set(changed) == {
        "/gradient_clipping",
        "/steps_per_print",
        "/bf16/check_grad_overflow",
        "/zero_optimization/offload_optimizer/pin_memory",
    }
    assert "0.0 in DeepSpeed 0.14.5 and 1.0 in 0.19.8" in changed["/gradient_clipping"]
    assert list(told(found, "DSP052")) == ["/amp"]
    assert not told(found, "DSP005") and not told(found, "DSP202")


def test_its_fix_writes_the_old_values_keeps_the_layout_and_leaves_nothing() -> None:
    again = linter(reader="deepspeed", release="0.19.8", before="0.14.5")
    fixed = fix_all(upgraded(UPGRADED), again).text
    assert "// tuned by hand\n" in fixed and "# host\n" in fixed
    assert '\n    "offload_optimizer": {"pin_memory": false, "device": "cpu"},' in fixed
    assert '\n  "gradient_clipping": 0.0,\n' in fixed
    assert told(upgraded(fixed), "DSP054") == {}
    assert fix_all(upgraded(fixed), again).text == fixed


@pytest.mark.parametrize(
    "text",
    [
        '{"train_batch_size": 8}',
        "train_batch_size: 8",
        '{\n\t"train_batch_size": 8\n}',
        '{"train_batch_size": 8, "bf16": {"enabled": true, "check_grad_overflow": "auto"}}',
        '{ // first\n  "train_batch_size": 8, "bf16": {enabled: true}\n}',
    ],
)
def test_the_fix_of_any_layout_is_read_as_it_is_meant(text: str) -> None:
    again = linter(reader="deepspeed", release="0.19.8", before="0.14.5")
    fixed = fix_all(upgraded(text), again)
    assert fixed.count >= 2 and not fixed.held_back
    assert told(upgraded(fixed.text), "DSP054") == {}


def test_nothing_is_told_of_an_upgrade_that_changes_nothing() -> None:
    found = upgraded('{"train_batch_size": 8, "gradient_clipping": 1.0, "steps_per_print": 10}')
    assert [each.rule for each in found.findings if each.rule.startswith("DSP05")] == []


def test_what_a_later_release_checks() -> None:
    found = upgraded('{"train_batch_size": 8, "fp16": {"enabled": true, "opt_level": "O2"}}')
    assert list(told(found, "DSP055")) == ["/fp16/opt_level"]


def test_a_key_of_a_later_release_is_an_error_where_it_is_refused_and_a_warning_where_it_is_ignored() -> None:
    config = {"train_batch_size": 8, "gradient_allreduce_op": "sum", "zero_optimization": {"stage": 2, "zenflow": {}}}
    found = {each.pointer: each for each in lint_at("0.14.5", config).findings}
    assert found["/zero_optimization/zenflow"].severity == "error"
    assert found["/zero_optimization/zenflow"].raises == "parse"
    assert found["/gradient_allreduce_op"].severity == "warning"


@pytest.mark.parametrize("key", ["amp", "sparse_gradients"])
def test_a_removed_key_is_an_error_only_where_it_is_removed(key: str) -> None:
    config = {"train_batch_size": 8, key: {"enabled": True} if key == "amp" else True}
    old = [(each.rule, each.severity) for each in lint_at("0.14.5", config).findings if each.pointer == f"/{key}"]
    assert old == [("DSP051", "info")]
    assert [each.rule for each in lint_at(NEWEST, config).findings if each.pointer == f"/{key}"] == ["DSP005"]


def test_warm_up_of_no_steps_is_refused_since_0_19_3() -> None:
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}},
    }
    assert "error" in [each.severity for each in lint_at("0.19.3", config).findings]
    assert "error" not in [each.severity for each in lint_at("0.19.2", config).findings]


def test_versions_says_which_releases_take_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(
        '{"train_batch_size": 8, "amp": {"enabled": true}, "zero_optimization": {"stage": 1, "zenflow": null}}'
    )
    (acceptance,) = acceptances([str(file)])
    verdicts = {verdict.release: verdict for verdict in acceptance.verdicts}
    assert [release for release in verdicts if verdicts[release].accepts] == [
        release for release in asked() if "0.17.6" <= release < "0.19.8"
    ]
    first = verdicts["0.14.5"].first
    assert first is not None and first.rule == "DSP050"
    done = dsplan("lint", "--versions", str(file), "--format", "json")
    assert done.code == 0 and len(json.loads(done.out)["files"][0]["releases"]) == len(asked())


def test_the_installed_release_is_found_by_its_folder_name(tmp_path: Path) -> None:
    (tmp_path / "deepspeed-0.14.5.dist-info").mkdir()
    assert installed([str(tmp_path / "absent"), str(tmp_path)]) == "0.14.5"
    assert installed([str(tmp_path / "absent")]) is None


def test_an_upgrade_goes_forward() -> None:
    assert released("0.19.8", "0.14.5") == (None, Upgrade(before="0.14.5", after="0.19.8"))
    with pytest.raises(Problem, match="goes the other way"):
        released("0.14.5", "0.19.8")


def test_what_accelerate_sets_changes_for_deepspeed_alone(tmp_path: Path) -> None:
    """accelerate/accelerator.py, _prepare_deepspeed, writes steps_per_print whatever the file says."""
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "gradient_clipping": 1.0}')
    options = ("--from", "0.14.5", "--to", "0.19.8", "--format", "json")

    def pointers(reader: str) -> list[str]:
        found = json.loads(dsplan("lint", str(tmp_path / "ds.json"), "--for", reader, *options).out)["files"][0]
        return [finding["pointer"] for finding in found["findings"] if finding["rule"] == "DSP054"]

    assert pointers("deepspeed") == ["/steps_per_print"]
    assert pointers("trainer") == []
