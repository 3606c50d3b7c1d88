"""DSP51x and DSP53x: tensor parallel (AutoTP) and sequence parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.planner.rules.mechanism import ERROR, INFO, WARNING, Hit, rule
from dsplan.planner.rules.near_names import nearest
from dsplan.planner.rules.pipeline import gpus
from dsplan.planner.rules.reading import whole
from dsplan.planner.rules.structure import one_of
from dsplan.schemas.known_keys import lookup
from dsplan.schemas.positions import Document, shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsplan.schemas.cluster import Cluster
    from dsplan.schemas.config import DsConfig

TENSOR = "/tensor_parallel"
SIZE, INNER_SIZE = f"{TENSOR}/autotp_size", f"{TENSOR}/tp/tp_size"
SEQUENCE, DATA = "/sequence_parallel_size", "/data_parallel_size"


def tensor_parallel(document: Document) -> int:
    """GPUs that share each layer; 1 where tensor parallelism is off."""
    return max(whole(document, SIZE) or 1, 1)


@rule("DSP511", "tensor-parallel-uneven", severity=ERROR, keys=[SIZE], raises="init")
def tensor_parallel_uneven(document: Document, cluster: Cluster) -> Iterator[Hit]:
    """tensor_parallel.autotp_size must divide the number of GPUs.

    Why:    The engine fails when it makes its groups of GPUs, with an empty AssertionError where there are too few.
    Given:  dp 8
    Bad:    {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "tensor_parallel": {"autotp_size": 3}}
    Good:   {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "tensor_parallel": {"autotp_size": 1}}
    Fix:    none
    Source: deepspeed/utils/groups.py, _init_tp_mesh_device
    """
    size = tensor_parallel(document)
    if size > cluster.ranks:
        yield Hit(SIZE, f"tensor_parallel.autotp_size is {size}, but there {_are(cluster)} {gpus(cluster)}")
    elif cluster.ranks % size:
        yield Hit(SIZE, f"tensor_parallel.autotp_size is {size}, which does not divide {gpus(cluster)}")


def _are(cluster: Cluster) -> str:
    return "are only" if cluster.ranks > 1 else "is only"


@rule("DSP512", "tensor-parallel-off", severity=WARNING, keys=[INNER_SIZE])
def tensor_parallel_off(document: Document) -> Iterator[Hit]:
    """tensor_parallel.tp.tp_size switches nothing on; autotp_size does.

    Why:    DeepSpeed reads tp_size only where autotp_size is above 1, and trains without tensor parallelism otherwise.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "tensor_parallel": {"tp": {"tp_size": 2}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 2}}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, DeepSpeedEngine.__init__
    """
    inner = whole(document, INNER_SIZE)
    if inner is not None and inner > 1 and tensor_parallel(document) == 1:
        yield Hit(
            INNER_SIZE,
            f"tensor_parallel.tp.tp_size {inner} has no effect: autotp_size is "
            f"{shape(document.at(SIZE, 0))}, so tensor parallelism is off",
            remedy=f'write "autotp_size": {inner} in tensor_parallel',
        )


@rule("DSP513", "tensor-parallel-sizes-differ", severity=ERROR, keys=[INNER_SIZE, SIZE], raises="init")
def tensor_parallel_sizes_differ(document: Document) -> Iterator[Hit]:
    """tensor_parallel.tp.tp_size must be 1 or the same as autotp_size.

    Why:    DeepSpeed raises a ValueError when the engine starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 2}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 4}}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _apply_autotp_partitioning
    """
    inner, size = whole(document, INNER_SIZE), tensor_parallel(document)
    if inner is not None and size > 1 and inner not in (1, size):
        yield Hit(INNER_SIZE, f"tensor_parallel.tp.tp_size is {inner}, but autotp_size is {size}", remedy=f"set {size}")


@rule("DSP515", "unknown-tensor-preset", severity=WARNING, keys=[f"{TENSOR}/preset_model"])
def unknown_tensor_preset(document: Document) -> Iterator[Hit]:
    """tensor_parallel.preset_model must name one of DeepSpeed's presets.

    Why:    DeepSpeed ignores another name without a word, and looks for the layers itself.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "tensor_parallel": {"autotp_size": 2, "preset_model": "llama3"}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "tensor_parallel": {"autotp_size": 2, "preset_model": "llama"}}
    Fix:    none
    Source: deepspeed/module_inject/autotp_config.py, AutoTPPresets.get_preset
    """
    pointer = f"{TENSOR}/preset_model"
    name, presets = document.at(pointer), (lookup(pointer) or {})["examples"]
    if isinstance(name, str) and name not in ("", "auto") and name.lower() not in presets:
        meant = nearest(name, presets)
        yield Hit(
            pointer,
            f"tensor_parallel.preset_model {shape(name)} is no preset, and DeepSpeed ignores it"
            + (f'; did you mean "{meant}"?' if meant else ""),
            remedy=f"write {one_of(presets)}",
        )


@rule("DSP516", "batch-counts-tensor-ranks", severity=INFO, keys=[SIZE, "/train_batch_size"])
def batch_counts_tensor_ranks(document: Document, config: DsConfig, cluster: Cluster) -> Iterator[Hit]:
    """The batch equation takes the GPUs of one tensor-parallel group for as many data-parallel ones.

    Why:    They must all be fed the same samples. So a step holds train_batch_size / autotp_size samples, and the learning
            rate that suits train_batch_size is too high.
    Given:  dp 8
    Bad:    {"train_batch_size": 64, "gradient_clipping": 1.0, "tensor_parallel": {"autotp_size": 4}}
    Good:   {"train_batch_size": 64, "gradient_clipping": 1.0, "tensor_parallel": {"autotp_size": 1}}
    Fix:    none
    Source: deepspeed/runtime/config.py, DeepSpeedConfig.__init__
    """
    size = tensor_parallel(document)
    if size == 1 or cluster.ranks % size:
        return
    dp, total = cluster.ranks // size, config.train_batch_size
    more = f", so of train_batch_size {total} a step holds {total // size}" if isinstance(total, int) else ""
    yield Hit(
        SIZE,
        f"the batch equation counts {gpus(cluster)} as data-parallel; with autotp_size {size} there are {dp}{more}",
    )


@rule("DSP517", "tensor-parallel-size-as-text", severity=ERROR, keys=[SIZE], raises="init")
def tensor_parallel_size_as_text(document: Document) -> Iterator[Hit]:
    """tensor_parallel.autotp_size must be a number without quotes.

    Why:    The parser would take the text, but initialize() compares it with 0 before: TypeError.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "tensor_parallel": {"autotp_size": "2"}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "tensor_parallel": {"autotp_size": 2}}
    Fix:    none
    Source: deepspeed/__init__.py, initialize
    """
    size = document.at(SIZE)
    if isinstance(size, str) and size.strip().isdecimal():
        yield Hit(SIZE, f"tensor_parallel.autotp_size is the text {shape(size)}, on which initialize() fails")


@rule("DSP531", "device-mesh-uneven", severity=ERROR, keys=[DATA, SEQUENCE], raises="init")
def device_mesh_uneven(document: Document, cluster: Cluster) -> Iterator[Hit]:
    """data_parallel_size x sequence_parallel_size must be the number of GPUs.

    Why:    DeepSpeed makes a mesh of that shape when it starts, and fails where the GPUs do not fill it.
    Given:  dp 8
    Bad:    {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "sequence_parallel_size": 4, "data_parallel_size": 4}
    Good:   {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "sequence_parallel_size": 4, "data_parallel_size": 2}
    Fix:    none
    Source: deepspeed/__init__.py, initialize
    """
    sp, dp = whole(document, SEQUENCE), whole(document, DATA)
    if sp is None or dp is None or sp < 1 or cluster.ranks % sp or sp * dp == cluster.ranks:
        return
    yield Hit(
        DATA,
        f"data_parallel_size {dp} x sequence_parallel_size {sp} = {sp * dp}, but there are {gpus(cluster)}",
        remedy=f"set {cluster.ranks // sp}",
    )


@rule("DSP532", "data-parallel-size-alone", severity=WARNING, keys=[DATA])
def data_parallel_size_alone(document: Document) -> Iterator[Hit]:
    """data_parallel_size has no effect without sequence_parallel_size.

    Why:    DeepSpeed reads it only to make a mesh of both; alone, all GPUs are data-parallel.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "data_parallel_size": 2}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "data_parallel_size": 2, "sequence_parallel_size": 2}
    Fix:    none
    Source: deepspeed/__init__.py, initialize
    """
    if whole(document, DATA) is not None and not document.has(SEQUENCE):
        yield Hit(DATA, "data_parallel_size has no effect without sequence_parallel_size", on_key=True)
