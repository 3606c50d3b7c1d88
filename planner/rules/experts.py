"""DSP52x: expert parallel (AutoEP). Its block is checked when the engine starts, and only where it is enabled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.planner.rules.mechanism import ERROR, WARNING, Hit, rule
from dsplan.planner.rules.parallel import TENSOR, tensor_parallel
from dsplan.planner.rules.pipeline import gpus
from dsplan.planner.rules.precision import on
from dsplan.planner.rules.reading import block, truthy, whole
from dsplan.planner.rules.structure import one_of
from dsplan.schemas.positions import Document, shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsplan.schemas.cluster import Cluster

BLOCK = "/expert_parallel"
SIZE, INNER_SIZE = f"{BLOCK}/autoep_size", f"{BLOCK}/expert_tensor_parallel_size"
PRESETS = ("mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3")
"""Source: deepspeed/module_inject/auto_ep_presets/registry.py of 0.19.8."""
ACTIVATIONS = ("swiglu", "geglu_tanh", "swiglu_clamped", "swiglu_oai")
"""Source: deepspeed/module_inject/auto_ep_config.py of 0.19.8, EXPERT_ACTIVATIONS."""

ATTRIBUTES = (
    "expert_w1", "expert_w2", "expert_w3", "num_experts_attr", "top_k_attr", "router_pattern", "expert_pattern",
    "shared_experts_pattern", "shared_experts_gate_pattern",
)  # fmt: skip
"""Keys that hold the name of an attribute."""


def enabled(document: Document) -> bool:
    return truthy(document, f"{BLOCK}/enabled")


def expert_parallel(document: Document) -> int:
    """GPUs that share the experts; 1 where the file does not say, or says nonsense."""
    return max(whole(document, SIZE) or 1, 1)


@rule("DSP521", "expert-parallel-uneven", severity=ERROR, keys=[SIZE], raises="init")
def expert_parallel_uneven(document: Document, cluster: Cluster) -> Iterator[Hit]:
    """expert_parallel.autoep_size must divide the number of GPUs.

    Why:    DeepSpeed raises a ValueError when the engine starts.
    Given:  dp 8
    Bad:    {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "expert_parallel": {"enabled": true, "autoep_size": 3}}
    Good:   {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "expert_parallel": {"enabled": true, "autoep_size": 4}}
    Fix:    none
    Source: deepspeed/module_inject/auto_ep_folding.py, build_folding_spec
    """
    size = expert_parallel(document)
    if enabled(document) and cluster.ranks % size:
        fitting = [count for count in range(1, cluster.ranks + 1) if cluster.ranks % count == 0][:8]
        yield Hit(
            SIZE,
            f"expert_parallel.autoep_size is {size}, which does not divide {gpus(cluster)}",
            remedy=f"set {one_of([str(count) for count in fitting])}",
        )


@rule("DSP522", "experts-split-by-tensor", severity=ERROR, keys=[INNER_SIZE], raises="init")
def experts_split_by_tensor(document: Document) -> Iterator[Hit]:
    """expert_parallel.expert_tensor_parallel_size must be 1.

    Why:    The key is reserved: DeepSpeed raises a ValueError when the engine starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "expert_parallel": {"enabled": true, "autoep_size": 2, "expert_tensor_parallel_size": 2}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "expert_parallel": {"enabled": true, "autoep_size": 2, "expert_tensor_parallel_size": 1}}
    Fix:    none
    Source: deepspeed/module_inject/auto_ep_folding.py, validate_folding_global
    """
    size = whole(document, INNER_SIZE)
    if enabled(document) and size is not None and size != 1:
        yield Hit(INNER_SIZE, f"expert_parallel.expert_tensor_parallel_size is {size}, but must be 1", remedy="set 1")


@rule("DSP523", "experts-everywhere", severity=WARNING, keys=[SIZE])
def experts_everywhere(document: Document) -> Iterator[Hit]:
    """expert_parallel with autoep_size 1 shares no experts.

    Why:    Every GPU holds all experts, and nothing is saved. autoep_size is 1 where it is absent.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "expert_parallel": {"enabled": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "expert_parallel": {"enabled": true, "autoep_size": 2}}
    Fix:    none
    Source: deepspeed/module_inject/auto_ep_config.py, validate_autoep_config
    """
    if enabled(document) and document.at(SIZE, 1) == 1 and tensor_parallel(document) == 1:
        by_default = "" if document.has(SIZE) else " by default"
        yield Hit(
            SIZE if document.has(SIZE) else BLOCK,
            f"expert_parallel.autoep_size is 1{by_default}: every GPU holds all experts",
            remedy="set the number of GPUs that share them",
        )


@rule(
    "DSP524",
    "unknown-expert-preset",
    severity=ERROR,
    keys=[f"{BLOCK}/preset_model", f"{BLOCK}/expert_activation"],
    raises="init",
)
def unknown_expert_preset(document: Document) -> Iterator[Hit]:
    """expert_parallel.preset_model and expert_activation must be names that DeepSpeed knows.

    Why:    DeepSpeed raises a ValueError when the engine starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "expert_parallel": {"enabled": true, "autoep_size": 2, "preset_model": "mixtral_8x7b"}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "expert_parallel": {"enabled": true, "autoep_size": 2, "preset_model": "mixtral"}}
    Fix:    none
    Source: deepspeed/module_inject/auto_ep_config.py, validate_autoep_config
    """
    for name, known in (("preset_model", PRESETS), ("expert_activation", ACTIVATIONS)):
        value = document.at(f"{BLOCK}/{name}")
        if enabled(document) and isinstance(value, str) and value not in known:
            yield Hit(
                f"{BLOCK}/{name}",
                f"expert_parallel.{name} is {shape(value)}, but must be {one_of(list(known))}",
            )


@rule(
    "DSP525", "presets-differ", severity=ERROR, keys=[f"{BLOCK}/preset_model", f"{TENSOR}/preset_model"], raises="init"
)
def presets_differ(document: Document) -> Iterator[Hit]:
    """The preset_model of tensor_parallel and that of expert_parallel must be the same.

    Why:    DeepSpeed raises a ValueError when the engine starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "tensor_parallel": {"preset_model": "deepseek_v2"}, "expert_parallel": {"enabled": true, "autoep_size": 2, "preset_model": "mixtral"}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "tensor_parallel": {"preset_model": "mixtral"}, "expert_parallel": {"enabled": true, "autoep_size": 2, "preset_model": "mixtral"}}
    Fix:    none
    Source: deepspeed/module_inject/auto_ep_folding.py, validate_folding_global
    """
    tensor, expert = document.at(f"{TENSOR}/preset_model"), document.at(f"{BLOCK}/preset_model")
    if enabled(document) and isinstance(tensor, str) and isinstance(expert, str) and "auto" != tensor != expert:
        yield Hit(
            f"{BLOCK}/preset_model",
            f"expert_parallel.preset_model is {shape(expert)}, but tensor_parallel.preset_model is {shape(tensor)}",
            remedy="write the same in both, or remove one",
        )


@rule("DSP526", "deepep-without-limit", severity=ERROR, keys=[f"{BLOCK}/comm_max_tokens_per_rank"], raises="init")
def deepep_without_limit(document: Document) -> Iterator[Hit]:
    """comm_backend deepep needs comm_max_tokens_per_rank.

    Why:    DeepSpeed raises a ValueError when the engine starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "expert_parallel": {"enabled": true, "autoep_size": 2, "comm_backend": "deepep"}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "expert_parallel": {"enabled": true, "autoep_size": 2, "comm_backend": "deepep", "comm_max_tokens_per_rank": 4096}}
    Fix:    none
    Source: deepspeed/module_inject/auto_ep_config.py, validate_autoep_config
    """
    pointer = f"{BLOCK}/comm_max_tokens_per_rank"
    if enabled(document) and document.at(f"{BLOCK}/comm_backend") == "deepep" and document.at(pointer, 0) == 0:
        yield Hit(
            pointer if document.has(pointer) else f"{BLOCK}/comm_backend",
            'expert_parallel.comm_backend is "deepep", which needs comm_max_tokens_per_rank',
            remedy="set micro_batch x longest sequence",
        )


@rule("DSP527", "fused-experts-refused", severity=ERROR, keys=[BLOCK], raises="init")
def fused_experts_refused(document: Document) -> Iterator[Hit]:
    """The fused parts of expert_parallel need what they are fused with.

    Why:    combine_impl fused_weighted_sum goes neither with tensor parallelism nor with deepep; row_weighting_impl fused
            needs deepep and more than one GPU; gate_up_impl fused needs use_grouped_mm. DeepSpeed raises a ValueError.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "expert_parallel": {"enabled": true, "autoep_size": 2, "row_weighting_impl": "fused"}}
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "expert_parallel": {"enabled": true, "autoep_size": 2, "gate_up_impl": "fused", "use_grouped_mm": false}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "expert_parallel": {"enabled": true, "autoep_size": 2, "gate_up_impl": "fused"}}
    Fix:    none
    Source: deepspeed/module_inject/auto_ep_config.py, validate_autoep_config
    """
    if not enabled(document):
        return
    deepep, size = document.at(f"{BLOCK}/comm_backend") == "deepep", expert_parallel(document)
    if document.at(f"{BLOCK}/combine_impl") == "fused_weighted_sum":
        other = "tensor parallelism" if tensor_parallel(document) > 1 else "deepep" if deepep and size > 1 else None
        if other:
            yield Hit(f"{BLOCK}/combine_impl", f"combine_impl fused_weighted_sum does not go with {other}", "remove it")
    if document.at(f"{BLOCK}/row_weighting_impl") == "fused" and (not deepep or size == 1):
        needs = "comm_backend deepep" if not deepep else "autoep_size above 1"
        yield Hit(f"{BLOCK}/row_weighting_impl", f"row_weighting_impl fused needs {needs}", "remove it")
    if document.at(f"{BLOCK}/gate_up_impl") == "fused" and not document.at(f"{BLOCK}/use_grouped_mm", True):
        yield Hit(f"{BLOCK}/gate_up_impl", "gate_up_impl fused needs use_grouped_mm", "remove one of the two")


@rule("DSP528", "experts-beside-tensor-parallel", severity=ERROR, keys=[BLOCK, f"{TENSOR}/autotp_size"], raises="init")
def experts_beside_tensor_parallel(document: Document, zero_stage: int) -> Iterator[Hit]:
    """expert_parallel together with tensor_parallel excludes offload, sequence parallel, DeepCompile and autoep_size 1.

    Why:    DeepSpeed raises a ValueError when the engine starts. use_data_before_expert_parallelism and async_split_plan
            are excluded too.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}, "tensor_parallel": {"autotp_size": 2}, "expert_parallel": {"enabled": true, "autoep_size": 2}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}, "expert_parallel": {"enabled": true, "autoep_size": 2}}
    Fix:    none
    Source: deepspeed/module_inject/auto_ep_folding.py, validate_folding_global; auto_ep_config.py, validate_autoep_config
    """
    size = tensor_parallel(document)
    if not enabled(document) or size == 1:
        return
    zero = "/zero_optimization"
    refused = {
        f"{zero}/offload_optimizer": isinstance(document.at(f"{zero}/offload_optimizer"), dict),
        f"{zero}/offload_param": isinstance(document.at(f"{zero}/offload_param"), dict),
        "/sequence_parallel_size": (whole(document, "/sequence_parallel_size") or 1) > 1,
        "/compile/deepcompile": on(document, "/compile/deepcompile"),
        "/use_data_before_expert_parallelism": truthy(document, "/use_data_before_expert_parallelism"),
        f"{BLOCK}/async_split_plan": document.at(f"{BLOCK}/async_split_plan") is True and expert_parallel(document) > 1,
    }
    for pointer, given in refused.items():
        if given:
            name = pointer.rpartition("/")[2]
            yield Hit(
                pointer,
                f"{name} does not go with expert_parallel and tensor_parallel together (autotp_size {size})",
                remedy="remove it, or set autotp_size to 1",
                on_key=True,
            )
    if document.at(SIZE, 1) == 1:
        yield Hit(
            SIZE if document.has(SIZE) else BLOCK,
            f"expert_parallel with autotp_size {size} needs autoep_size above 1",
            remedy="set autoep_size",
        )


@rule("DSP529", "expert-settings-unpaired", severity=WARNING, keys=[BLOCK])
def expert_settings_unpaired(document: Document) -> Iterator[Hit]:
    """Keys of expert_parallel that come in pairs.

    Why:    shared_experts_pattern and has_shared_experts need each other, top_k sets top_k_attr aside: DeepSpeed warns and
            ignores one. num_limited_groups above num_expert_groups is refused: error.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "expert_parallel": {"enabled": true, "autoep_size": 2, "shared_experts_pattern": "shared_experts"}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "expert_parallel": {"enabled": true, "autoep_size": 2, "has_shared_experts": true, "shared_experts_pattern": "shared_experts"}}
    Fix:    none
    Source: deepspeed/module_inject/auto_ep_config.py, validate_autoep_config
    """
    if not enabled(document):
        return
    values = block(document, BLOCK)
    shared = values.get("has_shared_experts") is True
    for name in ("shared_experts_pattern", "shared_experts_gate_pattern"):
        if values.get(name) and not shared:
            yield Hit(f"{BLOCK}/{name}", f"{name} is ignored where has_shared_experts is not true", "add it")
    if shared and not values.get("shared_experts_pattern"):
        yield Hit(f"{BLOCK}/has_shared_experts", "has_shared_experts needs shared_experts_pattern", "add it")
    if whole(document, f"{BLOCK}/top_k") is not None and values.get("top_k_attr") is not None:
        yield Hit(f"{BLOCK}/top_k_attr", "top_k_attr is ignored beside a top_k that is a number", "remove one of them")
    groups, limited = whole(document, f"{BLOCK}/num_expert_groups"), whole(document, f"{BLOCK}/num_limited_groups")
    if groups is not None and limited is not None and limited > groups:
        yield Hit(
            f"{BLOCK}/num_limited_groups",
            f"num_limited_groups is {limited}, more than num_expert_groups {groups}",
            severity=ERROR,
        )


@rule("DSP530", "dotted-attribute", severity=ERROR, keys=[BLOCK], raises="init")
def dotted_attribute(document: Document) -> Iterator[Hit]:
    """Names of attributes in expert_parallel must be plain names: not empty, and without dots.

    Why:    DeepSpeed looks them up in the module itself, and raises a ValueError when the engine starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "expert_parallel": {"enabled": true, "autoep_size": 2, "expert_w1": "experts.w1"}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "expert_parallel": {"enabled": true, "autoep_size": 2, "expert_w1": "w1"}}
    Fix:    none
    Source: deepspeed/module_inject/auto_ep_config.py, validate_autoep_config
    """
    for name in ATTRIBUTES:
        value = document.at(f"{BLOCK}/{name}")
        if enabled(document) and isinstance(value, str) and (not value or "." in value):
            what = "is empty" if not value else f"{shape(value)} has a dot"
            yield Hit(f"{BLOCK}/{name}", f"expert_parallel.{name} {what}, but must be the plain name of an attribute")
