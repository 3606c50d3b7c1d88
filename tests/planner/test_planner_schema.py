"""dsplan schema, and the page that tells editors of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from command import dsplan

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "editors.md").read_text("utf-8")
BLOCKS = [json.loads(block) for block in re.findall(r"^```json\n(.*?)^```$", PAGE, re.M | re.S)]


def test_it_prints_the_schema_and_nothing_else() -> None:
    done = dsplan("schema")
    assert (done.code, done.err) == (0, "")
    jsonschema.Draft202012Validator.check_schema(json.loads(done.out))
    assert done.out == (ROOT / "schemas" / "ds_config.schema.json").read_text("utf-8")


def test_the_setting_of_vs_code_has_the_fields_that_it_reads() -> None:
    """code.visualstudio.com/docs/languages/json, "Mapping in the User Settings"."""
    (entry,) = BLOCKS[0]["json.schemas"]
    assert entry.keys() == {"fileMatch", "url"}
    assert all(isinstance(glob, str) for glob in entry["fileMatch"])
    assert entry["url"] == BLOCKS[1]["$schema"] == "./.vscode/ds_config.schema.json"


@pytest.mark.parametrize("reader", ["deepspeed", "trainer", "accelerate"])
def test_no_reader_minds_the_key_that_names_the_schema(reader: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    stage = {"zero_optimization": {"stage": 1}, "gradient_clipping": 1.0}
    file.write_text(json.dumps(BLOCKS[1] | stage), "utf-8")
    done = dsplan("lint", str(file), "--for", reader, "--format", "json")
    assert json.loads(done.out)["files"][0]["findings"] == []


def test_a_rule_is_explained_by_id_or_name() -> None:
    assert dsplan("explain", "dsp001").out == dsplan("explain", "unknown-key").out
    wrong = dsplan("explain", "unknwon-key")
    assert (wrong.code, wrong.out) == (2, "")
    assert wrong.err == "dsplan: error: unknwon-key is no rule; did you mean unknown-key (DSP001)?\n"
