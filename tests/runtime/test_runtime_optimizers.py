"""Optimizers by name over two ranks against plain ones of one process, on whole tensors: losses to fp32 rounding."""

import pytest
from ranks import run_ranks
from training import batches, engine_losses, loss_of

STEPS = 4


def plain(make):
    """Losses of one process on the whole batch."""
    import torch
    from training import Net

    torch.manual_seed(0)
    model = Net()
    step = make(dict(model.named_parameters()))
    losses = []
    for tokens in batches(STEPS):
        model.zero_grad()
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        step()
        losses.append(loss.item())
    return losses


def by_name(kind, zero_stage, **params):
    config = {
        "optimizer": {"type": kind, "params": params},
        "zero_optimization": {"stage": zero_stage},
        "gradient_clipping": 0.0,
    }
    return run_ranks(2, engine_losses, config, None, STEPS)[0][0]


def torchs(kind, **params):
    def make(named):
        import torch

        optimizer = getattr(torch.optim, kind)(named.values(), **params)
        return optimizer.step

    return make


@pytest.mark.parametrize(
    ("kind", "params", "plain_kind", "plain_params"),
    [
        ("Adam", {"lr": 1e-2, "weight_decay": 0.1}, "AdamW", {"lr": 1e-2, "weight_decay": 0.1}),
        ("Adam", {"lr": 1e-2, "torch_adam": True, "adam_w_mode": False}, "Adam", {"lr": 1e-2}),
        ("adamw", {"lr": 1e-2, "torch_adam": True}, "AdamW", {"lr": 1e-2}),  # torch's weight decay, not 0
        ("AdamW", {"lr": 1e-2, "amsgrad": True, "eps": 1e-3}, "AdamW", {"lr": 1e-2, "amsgrad": True, "eps": 1e-3, "weight_decay": 0}),
        ("Adagrad", {"lr": 1e-2}, "Adagrad", {"lr": 1e-2}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ],
)  # fmt: skip
def test_named_ones_are_torchs_with_deepspeeds_defaults(kind, params, plain_kind, plain_params):
    assert by_name(kind, 2, **params) == pytest.approx(plain(torchs(plain_kind, **plain_params)), rel=2e-6)


def test_adam_without_bias_correction():
    def make(named):
        state = {name: [0.0, 0.0] for name in named}

        def step():
            import torch

            with torch.no_grad():
                for name, parameter in named.items():
                    grad = parameter.grad
                    first, second = state[name]
                    state[name] = first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
                    parameter.sub_(1e-3 * first / (second.sqrt() + 1e-8))

        return step

    losses = by_name("Adam", 3, lr=1e-3, bias_correction=False)
    assert losses == pytest.approx(plain(make), rel=2e-6)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_lion_is_the_papers(zero_stage):
    """Algorithm 2 of arXiv:2302.06675."""

    def make(named):
        means = dict.fromkeys(named, 0.0)

        def step():
            import torch

            with torch.no_grad():
                for name, parameter in named.items():
                    update = torch.sign(0.9 * means[name] + (1 - 0.9) * parameter.grad)
                    parameter.sub_(1e-3 * (update + 0.1 * parameter))
                    means[name] = 0.99 * means[name] + (1 - 0.99) * parameter.grad

        return step

    losses = by_name("Lion", zero_stage, lr=1e-3, betas=[0.9, 0.99], weight_decay=0.1)
    assert losses == pytest.approx(plain(make), rel=2e-5)  # a sign turns where a gradient is nothing but rounding


@pytest.mark.parametrize(("zero_stage", "bias_correction"), [(0, True), (3, True), (2, False)])
def test_lamb_is_deepspeeds(zero_stage, bias_correction):
    """csrc/lamb/fused_lamb_cuda_kernel.cu of 0.19.8; without bias correction also arXiv:1904.00962, algorithm 2, clipped."""

    def make(named):
        state = {name: [0.0, 0.0, 0] for name in named}

        def step():
            import torch

            with torch.no_grad():
                for name, parameter in named.items():
                    first, second, count = state[name]
                    first, second = 0.9 * first + 0.1 * parameter.grad, 0.999 * second + 0.001 * parameter.grad**2
                    state[name] = [first, second, count + 1]
                    size = (1 - 0.999 ** (count + 1)) ** 0.5 / (1 - 0.9 ** (count + 1)) if bias_correction else 1.0
                    update = first / (second.sqrt() + 1e-8) + 0.01 * parameter
                    weights, change = parameter.norm().item(), update.norm().item()
                    ratio = min(10.0, max(0.01, weights / change)) if weights and change else 1.0
                    parameter.sub_(1e-2 * size * ratio * update)

        return step

    losses = by_name("Lamb", zero_stage, lr=1e-2, weight_decay=0.01, bias_correction=bias_correction)
    assert losses == pytest.approx(plain(make), rel=2e-6)


def split(named):
    matrices = [it for name, it in named.items() if it.dim() >= 2 and "embed" not in name and "lm_head" not in name]
    return matrices, [it for it in named.values() if not any(it is other for other in matrices)]


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_muon_is_torchs_muon_and_adamw(zero_stage):
    def make(named):
        import torch

        matrices, others = split(named)
        muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1)
        adam = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)
        return lambda: (muon.step(), adam.step())

    losses = by_name("Muon", zero_stage, lr=1e-2, adam_lr=1e-3, weight_decay=0.1, ns_method="standard")
    assert losses == pytest.approx(plain(make), rel=1e-3)  # bf16 inside: one rounding of a gradient moves it


def test_muons_two_methods_agree():
    standard, gram = by_name("Muon", 3, lr=1e-2, ns_method="standard"), by_name("Muon", 3, lr=1e-2)
    assert gram == pytest.approx(standard, rel=2e-3)
    assert gram[-1] < gram[0]


def test_the_scripts_own_muon_orthogonalises_whole_matrices():
    def make(named):
        import torch

        matrices, _ = split(named)
        return torch.optim.Muon(matrices, lr=1e-2).step

    assert run_ranks(2, own_muon)[0] == pytest.approx(plain(make), rel=1e-3)


def own_muon():
    import torch
    import torch.distributed as dist
    from dsplan.runtime import initialize
    from training import SAMPLES, Net

    torch.manual_seed(0)
    model = Net()
    matrices, _ = split(dict(model.named_parameters()))
    optimizer = torch.optim.Muon(matrices, lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // 2,
        "zero_optimization": {"stage": 3},
        "gradient_clipping": 0.0,
    }
    engine, held, _, _ = initialize(model=model, optimizer=optimizer, config=config)
    assert held is optimizer and isinstance(held, torch.optim.Muon)
    losses = []
    for tokens in batches(STEPS):
        part = tokens.chunk(2)[dist.get_rank()]
        loss = loss_of(engine(part), part)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / 2)
    return losses


def test_groups_keep_their_own_options_and_empty_ones_go():
    for groups in run_ranks(2, groups_of_muon):
        assert [(group["name"], group["use_muon"], group["lr"], group["weight_decay"]) for group in groups] == [
            ("group0-muon-params", True, 0.5, 0.2),
            ("group1-adam-params", False, 0.3, 0.0),
        ]


def groups_of_muon():
    import torch
    from dsplan.runtime import initialize
    from training import Net

    torch.manual_seed(0)
    model = Net()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    _, optimizer, _, _ = initialize(
        model=model,
        model_parameters=[
            {"params": decayed, "weight_decay": 0.2},
            {"params": others, "weight_decay": 0.0, "lr": 0.3},
            {"params": []},
        ],
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Muon", "params": {"lr": 0.5}},
            "zero_optimization": {"stage": 2},
        },
    )
    return [{key: group[key] for key in ("name", "use_muon", "lr", "weight_decay")} for group in optimizer.param_groups]
