"""What a launch lays over the script's config."""

from dsplan.runtime.launching.orders import lay_over, with_kept_batch


def test_ordered_keys_win_and_others_stay():
    script = {"gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "overlap_comm": True}}
    merged, changes = lay_over(script, {"zero_optimization": {"stage": 3}})
    assert merged == {"gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "overlap_comm": True}}
    assert changes == ["zero_optimization.stage 2 -> 3"]


def test_what_is_equal_is_no_change():
    assert lay_over({"gradient_clipping": 1.0}, {"gradient_clipping": 1.0}) == ({"gradient_clipping": 1.0}, [])


def test_one_batch_key_replaces_all_three():
    merged, changes = lay_over(
        {"train_batch_size": 32, "gradient_accumulation_steps": 4}, {"train_micro_batch_size_per_gpu": 2}
    )
    assert merged == {"train_micro_batch_size_per_gpu": 2}
    assert changes == [
        "train_batch_size 32 -> absent",
        "gradient_accumulation_steps 4 -> absent",
        "train_micro_batch_size_per_gpu absent -> 2",
    ]


def test_one_precision_switched_on_switches_the_others_off():
    merged, _ = lay_over({"fp16": {"enabled": True, "loss_scale": 128}}, {"bf16": {"enabled": True}})
    assert merged == {"fp16": {"enabled": False, "loss_scale": 128}, "bf16": {"enabled": True}}


def test_an_optimizer_of_another_type_leaves_no_params_behind():
    script = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.9]}}}
    merged, _ = lay_over(script, {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    assert merged == {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def test_auto_orders_nothing():
    assert lay_over({"gradient_clipping": 0.5}, {"gradient_clipping": "auto"}) == ({"gradient_clipping": 0.5}, [])
    assert lay_over({}, {"gradient_clipping": "auto"}) == ({"gradient_clipping": "auto"}, [])


def test_a_kept_batch_leaves_accumulation_to_the_number_of_ranks():
    given = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    assert with_kept_batch(given, (8, 2)) == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
    }
