"""Offload changes where bytes are, and no number."""

import pytest
from ranks import run_ranks

CPU = {"device": "cpu"}


def config_of(zero, **more):
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 2,
        "zero_optimization": zero,
        **more,
    }


@pytest.mark.parametrize(
    ("zero", "precision"),
    [
        ({"stage": 0, "offload_optimizer": CPU}, "bf16"),
        ({"stage": 1, "offload_optimizer": CPU}, "fp32"),
        ({"stage": 2, "cpu_offload": True}, "bf16"),
        ({"stage": 3, "offload_optimizer": {**CPU, "ratio": 0.4}}, "bf16"),
        ({"stage": 3, "offload_param": CPU, "offload_optimizer": {**CPU, "pin_memory": True}}, "fp32"),
    ],
)
def test_losses_are_those_without_offload_to_the_bit(zero, precision):
    more = {} if precision == "fp32" else {precision: {"enabled": True}}
    without = {"stage": zero["stage"]}
    assert run_ranks(2, trained, config_of(zero, **more)) == run_ranks(2, trained, config_of(without, **more))


def trained(config):
    from training import engine_losses

    return engine_losses(config, None, 3)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_an_overflow_is_skipped_and_a_resumed_run_goes_on_as_if_never_left(tmp_path, zero_stage):
    """fp16 with a first scale that is far too large; two micro-batches a step; states on the host are saved and loaded."""
    scaled = {"fp16": {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}}
    offloaded = config_of({"stage": zero_stage, "offload_optimizer": CPU}, **scaled)
    plain = config_of({"stage": zero_stage}, **scaled)
    answers = run_ranks(2, resumed, offloaded, str(tmp_path / "offloaded"))
    assert answers == run_ranks(2, resumed, plain, str(tmp_path / "plain"))
    for whole, after, scales, skipped in answers:
        assert after == whole[len(whole) - len(after) :]
        assert skipped > 0 and scales == sorted(scales, reverse=True)


def resumed(config, folder):
    """(losses of every step, those after a resume in the middle, loss scales, skipped steps)."""
    import contextlib
    import io

    import torch
    from dsplan.runtime import initialize

    def engine_of():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(9, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        return initialize(model=model, config=config | {"train_micro_batch_size_per_gpu": 2})[0]

    def step(engine, number):
        losses = []
        for micro_batch in range(2):
            torch.manual_seed(10 * number + micro_batch + 100 * engine.global_rank)
            loss = engine(torch.randn(2, 9)).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    total, middle = 30, 26
    with contextlib.redirect_stderr(io.StringIO()):
        engine, whole, scales = engine_of(), [], []
        for number in range(total):
            if number == middle:
                engine.save_checkpoint(folder)
            whole += step(engine, number)
            scales.append(engine.loss_scale)
        again = engine_of()
        again.load_checkpoint(folder)
        after = [loss for number in range(middle, total) for loss in step(again, number)]
    return whole, after, scales, engine.skipped_steps
