"""DeepSpeed's calls: what they do against plain torch, and the one line that each refuses with."""

import base64
import dataclasses
import json
from argparse import Namespace

import pytest
from ranks import run_ranks

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
}


def engine_and_plain(kind, zero_stage, **config):
    """The same model twice: under the engine, and with plain SGD on what all ranks see."""
    import torch
    from dsplan.runtime import initialize

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(kind())
    engine = initialize(model=models[0], config={**CONFIG, "zero_optimization": {"stage": zero_stage}, **config})[0]
    return engine, models[1], torch.optim.SGD(models[1].parameters(), lr=0.3)


def plain_step(model, optimizer, losses):
    """The gradient norm of a step on the mean of the losses."""
    import torch

    (sum(losses) / len(losses)).backward()
    held = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(held, float("inf")).item()
    optimizer.step()
    optimizer.zero_grad()
    return norm


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_outputs_of_any_kind_frozen_and_unused_parts_and_uneven_batches(zero_stage):
    """Rank 0 is fed 3 and 1 samples, rank 1 twice 2: the step is that of the mean over ranks and micro-batches."""
    for found in run_ranks(2, uneven_losses, zero_stage):
        for norm, plain_norm, worst in found:
            assert norm == pytest.approx(plain_norm, rel=2e-6)
            assert worst < 1e-6


def uneven_losses(zero_stage):
    import torch
    import torch.distributed as dist
    from dsplan.runtime import zero
    from training import Net, batches, loss_of

    @dataclasses.dataclass
    class Answer:
        logits: torch.Tensor
        more: dict

    class Wrapping(Net):
        """Its second block is frozen; it has a part that is never used."""

        def __init__(self):
            super().__init__()
            self.unused = torch.nn.Linear(3, 3)
            self.blocks[1].requires_grad_(False)

        def forward(self, tokens):
            logits = super().forward(tokens)
            return {
                "tuple": (None, [logits]),
                "dict": {"logits": logits, "count": 1},
                "dataclass": Answer(logits, {}),
            }[self.kind]

    read = {
        "tuple": lambda out: out[1][0],
        "dict": lambda out: out["logits"],
        "dataclass": lambda out: out.logits,
    }
    found = []
    for kind in read:
        Wrapping.kind = kind
        engine, model, optimizer = engine_and_plain(Wrapping, zero_stage, gradient_accumulation_steps=2)
        for tokens in batches(2):
            parts = [tokens[:3], tokens[3:4], tokens[4:6], tokens[6:8]]
            for part in parts[2 * dist.get_rank() :][:2]:
                engine.backward(loss_of(read[kind](engine(part)), part))
                engine.step()
            norm = plain_step(model, optimizer, [loss_of(read[kind](model(part)), part) for part in parts])
        with zero.GatheredParameters(list(engine.module.parameters())):
            pairs = zip(engine.module.parameters(), model.parameters(), strict=True)
            worst = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
        found.append((engine.get_global_grad_norm(), norm, worst))
    return found


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_other_methods_of_the_model_find_their_parameters_and_train_them(zero_stage):
    for same, losses, plain_losses in run_ranks(2, by_methods, zero_stage):
        assert same
        assert losses == pytest.approx(plain_losses, rel=1e-6)


def by_methods(zero_stage):
    import torch
    from training import Net, batches, loss_of

    class Generates:
        @torch.no_grad()
        def generate(self, tokens):
            first = self.encode(tokens)  # parts alone, as encoder-decoders do, and the whole model
            return first, self(tokens), self.norm(first), self(tokens)

    class Encoder(Net, Generates):
        def encode(self, tokens):
            return self.tokens(tokens) + self.offset

        def score(self, tokens):
            x = self.encode(tokens)
            for block in self.blocks:
                x = block(x)
            return torch.nn.functional.linear(self.norm(x), self.head.weight)

        def forward(self, tokens):
            return self.score(tokens)

    engine, model, optimizer = engine_and_plain(Encoder, zero_stage)
    same, losses, plain_losses = True, [], []
    for tokens in batches(3):
        with torch.no_grad():
            same = same and torch.equal(engine.encode(tokens), model.encode(tokens))
        same = same and all(map(torch.equal, engine.module.generate(tokens), model.generate(tokens)))
        loss = loss_of(engine.module.score(tokens), tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        loss = loss_of(model(tokens), tokens)
        plain_losses.append(loss.item())
        plain_step(model, optimizer, [loss])
    return same, losses, plain_losses


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_no_sync_sums_up_and_zero_grad_drops_what_was_summed(zero_stage):
    for norms, plain_norms in run_ranks(2, in_no_sync, zero_stage):
        assert norms == pytest.approx(plain_norms, rel=2e-6)


def in_no_sync(zero_stage):
    from training import Net, batches, loss_of

    engine, model, optimizer = engine_and_plain(Net, zero_stage)
    first, second, third, fourth = batches(4)
    with engine.no_sync():
        engine.backward(loss_of(engine(first), first))
    engine.backward(loss_of(engine(second), second))
    engine.step()
    norms = [engine.get_global_grad_norm()]
    plain_norms = [plain_step(model, optimizer, [2 * loss_of(model(part), part) for part in (first, second)])]
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(loss_of(engine(third), third))
    engine.zero_grad()
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(loss_of(engine(fourth), fourth))
    engine.step()
    norms.append(engine.get_global_grad_norm())
    plain_norms.append(plain_step(model, optimizer, [loss_of(model(fourth), fourth)]))
    return norms, plain_norms


def test_another_train_batch_size_takes_more_micro_batches_from_the_next_step_on():
    """Counted from the end of the last step, whatever micro_steps is by then."""
    assert run_ranks(2, other_batch_sizes) == [([2, 5, 8], (24, 4, 3), (48, 8, 3), 16 + 24 + 24)] * 2


def other_batch_sizes():
    from training import Net, batches, loss_of

    engine, _, _ = engine_and_plain(Net, 2, gradient_accumulation_steps=2)
    [tokens] = batches(1)
    ends = []
    for micro_step in range(1, 9):
        engine.backward(loss_of(engine(tokens), tokens))
        engine.step()
        if engine.was_step_applied():
            ends.append(micro_step)
        if micro_step == 2:
            engine.set_train_batch_size(24)
    info = engine.get_batch_info()
    engine.set_train_micro_batch_size(8)
    return ends, info, engine.get_batch_info(), engine.global_samples


def test_answers_are_deepspeeds():
    [answers] = run_ranks(1, asked)
    assert answers == {
        "scale": (16.0, 0, 16.0, 16.0),
        "overflow": [False, True],
        "lr": [[0.3], [0.25]],
        "mom": [0.9],
        "names": ("SGD", None),
        "gathers": True,
        "stage": (3, True, True),
    }


def asked():
    from dsplan.runtime import initialize
    from training import Net, batches

    engine = initialize(
        model=Net(),
        config={
            "train_batch_size": 8,
            "fp16": {"enabled": True, "initial_scale_power": 4},
            "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
            "optimizer": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9}},
        },
    )[0]
    scale = (float(engine.loss_scale), engine.loss_scale(), engine.optimizer.cur_scale, engine.cur_scale)
    overflow, lr = [engine.optimizer.overflow], [engine.get_lr()]
    engine.backward(engine(batches(1)[0]).float().sum() * float("inf"))
    engine.step()
    overflow.append(engine.optimizer.overflow)
    engine.set_lr(0.25)
    lr.append(engine.get_lr())
    return {
        "scale": scale,
        "overflow": overflow,
        "lr": lr,
        "mom": engine.get_mom(),
        "names": (engine.optimizer_name(), engine.scheduler_name()),
        "gathers": engine.zero_gather_16bit_weights_on_model_save(),
        "stage": (
            engine.zero_optimization_stage(),
            engine.zero_optimization_partition_gradients(),
            engine.zero_optimization_partition_weights(),
        ),
    }


def refused(call, *args, **kwargs):
    from dsplan.schemas.problem import Problem

    with pytest.raises(Problem) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_calls_that_cannot_be_meant_are_one_line():
    first, second = run_ranks(2, wrong_calls)
    for rank, lines in enumerate((first, second)):
        assert lines.pop("step").startswith(f"rank {rank}: engine.step() at step 0 comes without engine.backward(loss)")
        for wrong in ("shape", "float", "graph"):
            lines[wrong] = lines[wrong].removeprefix(f"rank {rank}: ")
    assert first == second
    assert first == {
        "shape": "backward needs one number as loss, but got shape [8, 4, 11]; take the mean or the sum",
        "float": "backward needs one number as loss, a tensor, but got float; pass what engine(inputs) gives, or a loss of it",
        "graph": "backward needs a loss that depends on the model's parameters, but this one has no graph; compute it from "
        "engine(inputs) outside of torch.no_grad(), without .detach() or .item()",
        "option": "engine.backward does not take retain=True; it takes the loss, retain_graph and scale_wrt_gas",
        "batch": "train_batch_size 17 is no multiple of micro-batch 4 x dp 2 = 8",
        "rates": "set_lr was given 2 learning rates, but the optimizer has 1 groups",
        "no_sync": "no_sync does not go with zero stage 2, which keeps no gradient whole; use stage 0 or 1, or "
        "gradient_accumulation_steps",
        "own step": "optimizer.step() is called by the script, which neither unscales nor clips gradients and leaves schedule "
        "and counters behind; call engine.step() in its place",
        "apart": "rank 0 evaluates while rank 1 trains, at step 1; at zero stage 2 parameters are gathered from all ranks, so "
        "that each must do the same: give every rank as many batches, and evaluate, save, load and ask for state_dict on every "
        "rank",
    }


def wrong_calls():
    import torch
    import torch.distributed as dist
    from training import Net, batches, loss_of

    engine, _, _ = engine_and_plain(Net, 2)
    [tokens] = batches(1)
    lines = {
        "step": refused(engine.step),
        "shape": refused(engine.backward, engine(tokens)),
        "float": refused(engine.backward, 1.0),
        "graph": refused(engine.backward, torch.tensor(1.0)),
        "option": refused(engine.backward, loss_of(engine(tokens), tokens), retain=True),
        "batch": refused(engine.set_train_batch_size, 17),
        "rates": refused(engine.set_lr, [0.1, 0.2]),
        "no_sync": refused(engine.no_sync().__enter__),
        "own step": refused(engine.optimizer.step),
    }
    engine.backward(loss_of(engine(tokens), tokens), allreduce_gradients=True)  # as older releases spelt it
    engine.step()
    if dist.get_rank() == 0:
        with torch.no_grad():
            lines["apart"] = refused(engine, tokens)
    else:
        lines["apart"] = refused(engine, tokens)
    return lines


def test_a_loop_that_forgets_to_step_is_told_once():
    [(lines, steps)] = run_ranks(1, never_steps)
    assert steps == 0
    assert lines == [
        "dsplan: engine.backward has run 8 times without engine.step(); it goes after each of them, at a boundary or not"
    ]


def never_steps():
    import contextlib
    import io

    from training import Net, batches, loss_of

    with contextlib.redirect_stderr(io.StringIO()) as said:
        engine, _, _ = engine_and_plain(Net, 1)
        for tokens in batches(10):
            engine.backward(loss_of(engine(tokens), tokens))
    return [line for line in said.getvalue().splitlines() if "engine." in line], engine.global_steps


def test_one_config_on_all_ranks_or_the_key_is_named():
    first, second = run_ranks(2, unequal_configs)
    assert first == second
    assert first == [
        "rank 1 has another config than rank 0: zero_optimization.stage is 2 there and 1 on rank 0; give every rank the same",
        "rank 1, and not every rank: absent.json: cannot be read (No such file or directory)",
        "initialize is given config= and args.deepspeed_config (x.json); DeepSpeed takes one of them: leave out config=, or set "
        "args.deepspeed_config to None",
        "config is int, but must be a path or a dict",
        'rank 1 has another config than rank 0: initialize\'s optimizer is "Adam" there and "SGD" on rank 0; give every rank the '
        "same",
        "rank 1 has another config than rank 0: initialize's optimizer, group 0.lr is 0.2 there and 0.1 on rank 0; give every "
        "rank the same",
        "rank 1 holds another model than rank 0: norm.weight is frozen float32 [16] there and float32 [16] on rank 0; build "
        "the same model on every rank",
        "step 0: the loss is nan on rank 1, and dsplan.stop_on_nan_loss is true; look at that batch, or lower the learning rate",
        "packed in base64: stage 1",
        "monitors are each rank's own",
    ]


def unequal_configs():
    import torch.distributed as dist
    from dsplan.runtime import initialize
    from torch.optim import SGD, Adam
    from training import Net, batches, loss_of

    rank = dist.get_rank()
    config = {**CONFIG, "zero_optimization": {"stage": 1}}
    other = {**config, "zero_optimization": {"stage": 1 + rank}}
    lines = [
        refused(initialize, model=Net(), config=other),
        refused(initialize, model=Net(), config=config if rank == 0 else "absent.json"),
        refused(initialize, Namespace(deepspeed_config="x.json"), Net(), config=config),
        refused(initialize, model=Net(), config=3),
    ]
    model = Net()
    for optimizer in ((SGD, Adam)[rank](model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1 * (1 + rank))):
        lines.append(refused(initialize, model=model, optimizer=optimizer, config=config))
    model.norm.weight.requires_grad_(rank == 0)
    lines.append(refused(initialize, model=model, config=config))
    engine = initialize(model=Net(), config={**config, "dsplan": {"stop_on_nan_loss": True}})[0]
    [tokens] = batches(1)
    lines.append(refused(engine.backward, loss_of(engine(tokens), tokens) * (float("nan") if rank == 1 else 1.0)))
    packed = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    args = Namespace(deepspeed_config=packed, local_rank=-1)
    engine = initialize(args, Net())[0]
    assert args.local_rank == rank
    lines.append(f"packed in base64: stage {engine.zero_optimization_stage()}")
    initialize(model=Net(), config_params={**config, "steps_per_print": 10 if rank == 0 else 10**9})
    return [*lines, "monitors are each rank's own"]


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_values_of_one_parameter_are_plain_torchs(zero_stage):
    for grad, weight, scalar, momentum, changed in run_ranks(2, values_of_one, zero_stage):
        assert grad and weight and momentum
        assert (scalar, changed) == (2.0, 1.0)


def values_of_one(zero_stage):
    import torch
    from dsplan.runtime import values
    from training import Net, batches, loss_of

    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(2.0))

    name = "blocks.1.up.weight"
    engine, model, _ = engine_and_plain(Scaled, zero_stage, optimizer={"type": "Adam", "params": {"lr": 0.1}})
    ours, theirs = dict(engine.module.named_parameters()), dict(model.named_parameters())[name]
    [tokens] = batches(1)
    weight = torch.equal(values.safe_get_full_fp32_param(ours[name]), theirs)
    engine.backward(loss_of(engine(tokens), tokens))
    loss_of(model(tokens), tokens).backward()
    grad = torch.allclose(values.safe_get_full_grad(ours[name]), theirs.grad, rtol=1e-5)
    engine.step()
    # Adam's first moment after one step: (1 - 0.9) x gradient.
    momentum = torch.allclose(
        values.safe_get_full_optimizer_state(ours[name], "exp_avg"), 0.1 * theirs.grad, rtol=1e-4, atol=1e-8
    )
    values.safe_set_full_fp32_param(ours[name], torch.ones(48, 16))
    scalar = values.safe_get_full_fp32_param(ours["scale"]).item()
    return grad, weight, scalar, momentum, values.safe_get_full_fp32_param(ours[name]).mean().item()


def test_two_engines_train_as_each_alone():
    for together, alone in run_ranks(2, two_engines):
        assert together == alone


def two_engines():
    from training import Net, batches, loss_of

    def train(engines, steps):
        losses = [[] for _ in engines]
        for tokens in batches(steps):
            for engine, found in zip(engines, losses, strict=True):
                loss = loss_of(engine(tokens), tokens)
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
        return losses

    both = train([engine_and_plain(Net, 3)[0], engine_and_plain(Net, 1)[0]], 3)
    return both, train([engine_and_plain(Net, 3)[0]], 3) + train([engine_and_plain(Net, 1)[0]], 3)


def test_what_the_file_says_is_answered_and_what_is_not_there_is_deepspeeds():
    for answers, missing in run_ranks(2, asked_more):
        assert answers == {
            "get_data_types": ("torch.bfloat16", "torch.bfloat16"),
            "communication_data_type": "torch.bfloat16",
            "optimizer_params": {"lr": 0.3},
            "scheduler_params": None,
            "zero_offload_optimizer": {"device": "cpu"},
            "zero_offload_param": None,
            "zero_cpu_offload": True,
            "dataloader_drop_last": True,
            "torch_autocast_enabled": False,
            "managed_gradient_accumulation": True,
            "postscale_gradients": True,
            "gradient_predivide_factor": 1.0,
        }
        assert missing == [
            "engine.allreduce_gradients of DeepSpeed is not carried out by dsplan's native engine; run this script with DeepSpeed",
            "'FSDPLinear' object has no attribute 'nonsense'",
        ]


def asked_more():
    import torch
    from dsplan.runtime import initialize

    engine = initialize(
        model=torch.nn.Linear(2, 2),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "dataloader_drop_last": True,
            "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
            "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
        },
    )[0]
    names = ("get_data_types", "optimizer_params", "scheduler_params", "zero_offload_optimizer", "zero_offload_param")
    names += ("zero_cpu_offload", "dataloader_drop_last", "torch_autocast_enabled", "managed_gradient_accumulation")
    names += ("postscale_gradients", "gradient_predivide_factor")
    answers = {name: getattr(engine, name)() for name in names}
    answers["get_data_types"] = tuple(map(str, answers["get_data_types"]))
    answers["communication_data_type"] = str(engine.communication_data_type)
    read = engine.deepspeed_io(list(range(6)), batch_size=2, route="eval")
    assert [batch.tolist() for batch in read] == [[engine.global_rank, engine.global_rank + 2]]
    missing = []
    for name in ("allreduce_gradients", "nonsense"):
        assert not hasattr(engine, name)
        with pytest.raises(AttributeError) as caught:
            getattr(engine, name)
        missing.append(str(caught.value))
    engine.empty_partition_cache()
    return answers, missing


def test_the_whole_model_in_half_precision_may_lack_its_frozen_parameters_but_no_buffer():
    first, second = run_ranks(2, consolidated_states)
    assert second == [None, None]
    trained = {"0.weight": "torch.bfloat16", "0.bias": "torch.bfloat16"}
    buffers = {
        "1.running_mean": "torch.float32",
        "1.running_var": "torch.float32",
        "1.num_batches_tracked": "torch.int64",
    }
    frozen = {"1.weight": "torch.bfloat16", "1.bias": "torch.bfloat16"}
    assert first == [trained | buffers | frozen, trained | buffers]


def consolidated_states():
    """As DeepSpeed's get_layer_state_dict has it: parameters as they compute, buffers as they are."""
    import torch
    from dsplan.runtime import initialize

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[1].requires_grad_(False)
    engine = initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "data_types": {"buffer_dtype": "bf16"},
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
        },
    )[0]
    for buffer in (model[1].running_mean, model[1].running_var):
        buffer.data = buffer.data.float()
    found = []
    for exclude in (False, True):
        state = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=exclude)
        found.append(None if state is None else {name: str(tensor.dtype) for name, tensor in state.items()})
    return found


def test_a_parameter_that_another_block_uses_is_gathered_once_it_is_registered():
    for losses, plain in run_ranks(2, uses_a_neighbours):
        assert losses == pytest.approx(plain, rel=1e-6)


def uses_a_neighbours():
    import torch
    from dsplan.runtime import zero
    from torch import nn

    class Borrows(nn.Module):
        """Its second block multiplies by the first one's weight, of which it is no owner."""

        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))
            zero.register_external_parameter(self, self.blocks[0][0].weight)

        def forward(self, x):
            for block in self.blocks:
                x = torch.tanh(block(x)) @ self.blocks[0][0].weight
            return x

    engine, model, optimizer = engine_and_plain(Borrows, 3)
    torch.manual_seed(1)
    losses, plain = [], []
    for _ in range(3):
        x = torch.randn(4, 4)
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.append(loss.item())
    return losses, plain
