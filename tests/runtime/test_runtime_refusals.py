"""Why a configuration is refused, in words."""

import pytest
from dsplan.runtime.refusals import judge_whole
from dsplan.schemas.problem import Problem


def test_an_auto_that_nobody_fills_in_is_named():
    config = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    with pytest.raises(Problem) as refused:
        judge_whole(config, "ds.json", dp=2, has_optimizer=True, has_scheduler=False)
    assert str(refused.value).endswith(
        'set one of them; train_batch_size and train_micro_batch_size_per_gpu: "auto" is filled in by the HF Trainer and '
        "Accelerate alone"
    )
