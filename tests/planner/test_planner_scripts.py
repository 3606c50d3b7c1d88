"""What a script says by its text: the configuration it hands over, the optimizer it makes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from command import dsplan
from dsplan.planner.auditing.model_facts import facts_of
from dsplan.planner.auditing.scripts import client_optimizer, config_in


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("import deepspeed\ndeepspeed.initialize(model=m, config='ds.json')", "ds.json"),
        ("P = 'ds.json'\ndeepspeed.initialize(model=m, config_params=P)", "ds.json"),
        ("C = {'train_batch_size': 8}\ndeepspeed.initialize(model=m, config=C)", "#C"),
        ("args = TrainingArguments(output_dir='o', deepspeed='ds.json')", "ds.json"),
        ("deepspeed.initialize(model=m, config=args.config)", None),
        ("deepspeed.initialize(model=m)", None),
        ("not python at all", None),
    ],
)
def test_config(tmp_path: Path, text: str, named: str | None) -> None:
    found = config_in(script(tmp_path, text))
    assert (found is None) if named is None else (found or "").endswith(named)


@pytest.mark.parametrize(
    ("text", "optimizer"),
    [
        ("import torch\nopt = torch.optim.SGD(p)\ndeepspeed.initialize(model=m, optimizer=opt)", "torch.optim.SGD"),
        ("from torch import optim\ndeepspeed.initialize(model=m, optimizer=optim.AdamW(p))", "torch.optim.AdamW"),
        ("from torch.optim import AdamW as A\no = A(p)\ndeepspeed.initialize(optimizer=o)", "torch.optim.AdamW"),
        (
            "from deepspeed.ops.adam import DeepSpeedCPUAdam\ndeepspeed.initialize(optimizer=DeepSpeedCPUAdam(p))",
            "deepspeed.ops.adam.DeepSpeedCPUAdam",
        ),
        ("deepspeed.initialize(model=m, optimizer=make(p))", None),
        ("import torch\nspare = torch.optim.SGD(p)\ndeepspeed.initialize(model=m)", None),
        ("import torch\ndef build_model(): ...\nopt = torch.optim.AdamW(p)", "torch.optim.AdamW"),
        ("import torch\nschedule = torch.optim.lr_scheduler.StepLR(o, 1)", None),
    ],
)
def test_client_optimizer(tmp_path: Path, text: str, optimizer: str | None) -> None:
    assert client_optimizer(script(tmp_path, text)) == optimizer


def config_of(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(kind="hf", module=SimpleNamespace(config=SimpleNamespace(**fields), modules=lambda: ()))


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"hidden_size": 64}, 64),
        ({"hidden_sizes": [32, 128, 64]}, 128),
        ({"text_config": SimpleNamespace(hidden_size=256)}, 256),
        ({"d_model": 512}, None),
    ],
)
def test_the_hidden_size_is_looked_for_as_the_trainer_does(fields: dict[str, object], size: int | None) -> None:
    facts = facts_of("config.json", config_of(**fields))  # type: ignore[arg-type]
    assert (facts.hidden_known, facts.hidden_size) == (True, size)


def test_a_script_is_not_run_for_its_facts(tmp_path: Path) -> None:
    """Nor is torch's state asked for: the script would end the process."""
    config = tmp_path / "ds.json"
    config.write_text(
        '{"train_batch_size": 8, "gradient_clipping": 1.0,'
        ' "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'
    )
    path = script(
        tmp_path, "import torch\nraise SystemExit('ran')\nopt = torch.optim.AdamW([])\nds.initialize(optimizer=opt)"
    )
    done = dsplan("lint", str(config), "--model", path)
    assert done.code == 1
    assert "[DSP912 client-optimizer-with-offload]" in done.out
    assert "ran" not in done.out + done.err
