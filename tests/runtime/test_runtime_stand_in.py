"""What scripts, transformers and Accelerate import from deepspeed under a launch."""

from ranks import run_ranks


def test_what_is_imported_by_name_is_there_and_works():
    [(rates, kinds, whole)] = run_ranks(1, imports)
    # Linear warm-up from 0 to 1 in 4 steps: the first step of the schedule is step 0.
    assert rates == [0.0, 0.0, 0.25]
    assert kinds == ["DeepSpeedCPUAdagrad", "DeepSpeedCPUAdam", "FusedLamb", "FusedLion", "WarmupLR"]
    assert whole


def imports():
    import importlib
    import sys
    from pathlib import Path

    import dsplan.runtime.launching
    import torch
    from dsplan.runtime import Engine, initialize
    from training import Net

    folder = str(Path(dsplan.runtime.launching.__path__[0]) / "stand_in")
    sys.path.insert(0, folder)
    try:
        deepspeed = importlib.import_module("deepspeed")
        assert (
            deepspeed.DeepSpeedEngine is Engine is importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine
        )
        assert deepspeed.get_accelerator().current_device_name() in ("cpu", "cuda:0")
        zero = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
        assert zero.GatheredParameters is deepspeed.zero.GatheredParameters
        assert zero.zero_wrapper_for_fp_tensor_constructor(zero._orig_torch_arange) is torch.arange
        assert deepspeed.utils.groups._get_data_parallel_world_size() == 1

        weights = [torch.nn.Parameter(torch.ones(2, 2))]
        optimizers = [
            importlib.import_module(f"deepspeed.ops.{module}").__dict__[name](weights)
            for module, name in (
                ("adagrad", "DeepSpeedCPUAdagrad"),
                ("adam", "DeepSpeedCPUAdam"),
                ("lamb", "FusedLamb"),
                ("lion", "FusedLion"),
            )
        ]
        schedules = importlib.import_module("deepspeed.runtime.lr_schedules")
        schedule = schedules.WarmupLR(optimizers[0], 0.0, 1.0, 4, warmup_type="linear")
        rates = [optimizers[0].param_groups[0]["lr"]]
        for _ in range(2):
            schedule.step()
            rates.append(optimizers[0].param_groups[0]["lr"])
        kinds = [type(made).__name__ for made in (*optimizers, schedule)]

        engine = initialize(
            model=Net(), config={"train_batch_size": 8, "zero_optimization": {"stage": 3}, "optimizer": {"type": "SGD"}}
        )[0]
        clone = importlib.import_module("deepspeed.checkpoint.utils").clone_tensors_for_torch_save
        copies = clone({"state": [engine.module.state_dict()["head.weight"], 3]})["state"]
        return rates, kinds, type(copies[0]) is torch.Tensor and copies[0].shape == (11, 16) and copies[1] == 3
    finally:
        sys.path.remove(folder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
            del sys.modules[name]
