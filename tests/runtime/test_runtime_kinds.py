"""Values of a wrong kind in any block: each is named, all at once, and none reaches the first step."""

import pytest
from dsplan.runtime.refusals import judge


def refusals(config):
    return judge({"train_batch_size": 2, **config}, "ds.json", whole=True).refusals


def optimizer(kind, **params):
    return {"optimizer": {"type": kind, "params": params}}


def schedule(kind, **params):
    return {"scheduler": {"type": kind, "params": params}}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (optimizer("AdamW", lr="1e-3"), 'optimizer.params: AdamW: lr is "1e-3", but must be a number'),
        (optimizer("Adam", lr=True), "optimizer.params: Adam: lr is true, but must be a number"),
        (optimizer("AdamW", betas=[0.9]), "optimizer.params: AdamW: betas is [0.9], but must be a list of two numbers"),
        (optimizer("Lion", betas=[0.9]), "optimizer.params: Lion: betas is [0.9], but must be a list of two numbers"),
        (optimizer("Lamb", max_coeff="x"), 'optimizer.params: Lamb: max_coeff is "x", but must be a number'),
        (optimizer("Muon", muon_lr="x"), 'optimizer.params: Muon: muon_lr is "x", but must be a number'),
        (
            optimizer("Muon", lr=-1),
            "optimizer.params: Muon does not take these (lr must be at least 0, and momentum 0 to below 1)",
        ),
        (
            optimizer("SGD", lr="x", momentum="y"),
            'optimizer.params: SGD: lr is "x", but must be a number, momentum is "y", but must be a number',
        ),
        (
            schedule("WarmupLR", warmup_max_lr="x"),
            'scheduler.params: WarmupLR: warmup_max_lr is "x", but must be a number, or a list with one for each group',
        ),
        (
            schedule("WarmupCosineLR", total_num_steps=5, cos_min_ratio="x"),
            'scheduler.params: WarmupCosineLR: cos_min_ratio is "x", but must be a number',
        ),
        (schedule("StepLR", step_size="x"), 'scheduler.params: StepLR: step_size is "x", but must be a whole number'),
        (
            schedule("CosineAnnealingLR", T_max=0),
            "scheduler.params: CosineAnnealingLR does not take these (integer modulo by zero)",
        ),
        (
            schedule("WarmupLR", last_batch_iteration="x"),
            "scheduler.params: WarmupLR: last_batch_iteration is 'x', but must be a whole number",
        ),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 2000}},
            "fp16.initial_scale_power is 2000, but must be at most 127",
        ),
        ({"bf16": {"check_grad_overflow": "x"}}, 'bf16.check_grad_overflow is "x", but must be boolean'),
        ({"torch_autocast": 5}, "torch_autocast is 5, but must be object"),
        ({"data_types": 5}, "data_types is 5, but must be object"),
        ({"communication_data_type": 5}, "communication_data_type is 5, but must be string or null"),
        ({"dataloader_drop_last": "x"}, 'dataloader_drop_last is "x", but must be boolean'),
        ({"dsplan": {"stop_on_nan_loss": "x"}}, 'dsplan.stop_on_nan_loss is "x", but must be boolean'),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": "x"}}},
            'zero_optimization.offload_optimizer.pin_memory is "x", but must be boolean',
        ),
        ({"gradient_clipping": float("nan")}, "gradient_clipping is nan, but must be a number (0 switches it off)"),
    ],
)
def test_a_value_of_a_wrong_kind_is_refused_by_name(config, reason):
    assert refusals(config) == [reason]


def test_all_of_them_are_told_at_once_and_each_once():
    config = {
        **optimizer("AdamW", lr="x"),
        **schedule("StepLR", step_size="x"),
        "fp16": {"enabled": True, "loss_scale": "x"},
        "prescale_gradients": "x",
    }
    assert [reason.split(" is ")[0] for reason in refusals(config)] == [
        "fp16.loss_scale",
        "prescale_gradients",
        "optimizer.params: AdamW: lr",
        "scheduler.params: StepLR: step_size",
    ]


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": {"stage": "3", "overlap_comm": "true", "reduce_bucket_size": 5e8}},
        {"zero_optimization": True},
        {"fp16": {"enabled": "yes", "loss_scale": "128", "hysteresis": "2"}},
        {"bf16": {"enabled": 1}},
        optimizer("AdamW", lr="auto", betas="auto", eps=1, foreach=None),
        optimizer("Adam", lr=1, adam_w_mode=False, bias_correction=0),
        schedule("WarmupDecayLR", total_num_steps=1e4, warmup_max_lr=[0.1, 1], warmup_num_steps=10),
        schedule("MultiStepLR", milestones=[3, 5]),
    ],
)
def test_what_deepspeed_reads_as_such_a_value_is_taken(config):
    assert refusals(config) == []
