"""dsplan schema: the JSON Schema of a DeepSpeed configuration, for editors."""

from __future__ import annotations

from pathlib import Path

import typer


def schema() -> None:
    """Print the JSON Schema (2020-12) of a DeepSpeed configuration, for editors and other validators."""
    from dsplan.schemas import known_keys

    file = Path(known_keys.__file__).with_name("ds_config.schema.json")
    typer.echo(file.read_text("utf-8"), nl=False)
