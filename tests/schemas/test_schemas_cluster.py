"""Cluster strings and files."""

import json
from pathlib import Path

import pytest
from dsplan.schemas.cluster import aliases, gpus, parse_cluster
from dsplan.schemas.problem import Problem


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "gpu"),
    [
        ("8xH100-80GB", 1, 8, "H100-80GB"),
        ("4x8xA100-80GB", 4, 8, "A100-80GB"),
        ("8", 1, 8, None),
        ("2x8", 2, 8, None),
        ("8 x h100", 1, 8, "H100-80GB"),
        ("1xRTX4090", 1, 1, "RTX4090-24GB"),
    ],
)
def test_forms(text: str, nodes: int, per_node: int, gpu: str | None) -> None:
    cluster = parse_cluster(text)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpu and cluster.gpu.name) == (nodes, per_node, gpu)
    assert cluster.ranks == nodes * per_node


@pytest.mark.parametrize("text", ["", "H100", "8x", "x8", "0xH100-80GB", "0", "8xH100-80GBx", "eight", "-3", "8.5"])
def test_what_cannot_be_read_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(Problem) as refused:
        parse_cluster(text)
    assert "\n" not in str(refused.value)


def test_an_unknown_kind_names_near_ones() -> None:
    with pytest.raises(Problem, match="H100-80GB"):
        parse_cluster("8xH100-8GB")


def test_a_file_with_a_gpu_of_its_own(tmp_path: Path) -> None:
    gpu = {"name": "X1", "memory_gb": 10, "tflops": {"bf16": 2}, "memory_gb_per_second": 3, "link_gb_per_second": 4}
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"nodes": 2, "gpus_per_node": 4, "gpu": gpu}))
    cluster = parse_cluster(str(path))
    assert cluster.ranks == 8
    assert cluster.gpu is not None
    assert cluster.gpu.flops_per_second == {"bf16": 2e12}
    assert cluster.gpu.memory_bytes == 10 * 10**9


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"gpus_per_node": 0}',
        '{"gpus_per_node": 8, "gpu": {"memory_gb": 1}}',
        '{"gpus_per_node": true}',
    ],
)
def test_a_file_of_the_wrong_shape_names_itself(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(content)
    with pytest.raises(Problem, match="cluster.json"):
        parse_cluster(str(path))


def test_every_gpu_has_a_source_and_sane_numbers() -> None:
    for gpu in gpus().values():
        assert gpu.source
        assert 0.85 * gpu.memory_bytes < gpu.usable_bytes < 1.1 * gpu.memory_bytes, gpu.name
        assert gpu.flops_per_second["fp16"] >= gpu.flops_per_second["fp32"]


def test_no_alias_means_two_gpus() -> None:
    names = [alias for name in gpus() for alias in (name.lower(),)]
    assert set(names) <= set(aliases())
    assert len(names) == len(set(names))
