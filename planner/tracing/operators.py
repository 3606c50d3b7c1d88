"""Multiply-adds of the operators that fvcore and torch's counter lack, and convolutions that can be traced on meta."""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from dsplan.planner.capturing.standing import functions
from torch.overrides import TorchFunctionMode

FLOPS_PER_MAC = 2
"""One multiply and one add. Formulas count multiply-adds; what is shown is FLOPs."""


class MetaConvolutions(TorchFunctionMode):
    """Convolutions by torch._convolution, since the python form of meta convolutions cannot be traced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CONVOLUTIONS:
            dims, transposed = _CONVOLUTIONS[func]
            return (_transposed if transposed else _convolution)(dims, *args, **kwargs)
        return func(*args, **kwargs)


_CONVOLUTIONS = {
    F.conv1d: (1, False),
    F.conv2d: (2, False),
    F.conv3d: (3, False),
    F.conv_transpose1d: (1, True),
    F.conv_transpose2d: (2, True),
    F.conv_transpose3d: (3, True),
}


def _each(value: Any, dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def _convolution(
    dims: int,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    dilations = _each(dilation, dims)
    if padding == "same":
        reach = [step * (kernel - 1) for step, kernel in zip(dilations, weight.shape[2:], strict=True)]
        input = F.pad(input, [side for total in reversed(reach) for side in (total // 2, total - total // 2)])
    paddings = [0] * dims if isinstance(padding, str) else _each(padding, dims)
    return _raw(input, weight, bias, _each(stride, dims), paddings, dilations, False, [0] * dims, groups)


def _transposed(
    dims: int,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    extra = _each(output_padding, dims)
    return _raw(
        input, weight, bias, _each(stride, dims), _each(padding, dims), _each(dilation, dims), True, extra, groups
    )


def _raw(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    extra: Any,
    groups: int,
) -> Any:
    return torch._convolution(
        input, weight, bias, stride, padding, dilation, transposed, extra, groups, False, False, True, True
    )


def _shape(value: Any) -> list[int]:
    sizes = value.type().sizes() if value.isCompleteTensor() else None
    if sizes is None:
        raise ValueError("the trace holds a tensor of unknown shape")
    return list(sizes)


def _matmul(inputs: Any, outputs: Any) -> float:
    """Output elements times the length that is summed, for any broadcast."""
    return float(math.prod(_shape(outputs[0])) * _shape(inputs[0])[-1])


def _baddbmm(inputs: Any, outputs: Any) -> float:
    return float(math.prod(_shape(outputs[0])) * _shape(inputs[1])[-1])


def _attention(inputs: Any, outputs: Any) -> Counter[str]:
    """Scores and their product with v: batch x heads x Lq x Lk x (dq + dv)."""
    query, key, value = (_shape(part) for part in inputs[:3])
    return Counter({"attention": math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])})


def _stood_in_attention(inputs: Any, outputs: Any) -> Counter[str]:
    """As _attention, with the keys that a query meets told."""
    query, value = _shape(inputs[0]), _shape(inputs[2])
    return Counter({"attention": math.prod(query[:-1]) * inputs[3].toIValue() * (query[-1] + value[-1])})


def _stood_in_loss(inputs: Any, outputs: Any) -> Counter[str]:
    """The output layer of a loss that is fused with it."""
    return Counter({"linear": math.prod(_shape(inputs[0])) * _shape(inputs[1])[0]})


def _grouped(inputs: Any, outputs: Any) -> Counter[str]:
    """Tokens x in x out: each token meets one expert's matrix per product."""
    left, right = _shape(inputs[0]), _shape(inputs[1])
    return Counter({"grouped_mm": math.prod(left) * right[-1]})


def _einsum(inputs: Any, outputs: Any) -> float:
    """One product of two operands: the lengths of all letters. More operands: pairwise from the left."""
    equation = inputs[0].toIValue().replace(" ", "")
    shapes = [_shape(value) for value in inputs[1].node().inputs()]
    terms = equation.partition("->")[0].split(",")
    sizes = {
        letter: length
        for term, shape in zip(terms, shapes, strict=False)
        for letter, length in zip(term, shape, strict=False)
    }
    if "..." in equation or len(terms) > 2:
        from fvcore.nn.jit_handles import einsum_flop_jit

        return float(einsum_flop_jit(inputs, outputs))
    return float(math.prod(sizes.values())) if len(terms) == 2 else 0.0


def _recurrent(inputs: Any, outputs: Any) -> Counter[str]:
    """LSTM, GRU and RNN: every step multiplies the input and the hidden state by all gates' weights."""
    lists = [value for value in inputs if value.node().kind() == "prim::ListConstruct"]
    weights = [_shape(value) for value in lists[-1].node().inputs()]
    steps = math.prod(_shape(inputs[0])[:-1])
    return Counter({"recurrent": steps * sum(math.prod(shape) for shape in weights if len(shape) == 2)})


def _nothing(inputs: Any, outputs: Any) -> float:
    return 0.0


HANDLES: dict[str, Any] = {
    "aten::matmul": _matmul,
    "aten::mm": _matmul,
    "aten::bmm": _matmul,
    "aten::baddbmm": _baddbmm,
    "aten::einsum": _einsum,
    "aten::scaled_dot_product_attention": _attention,
    "aten::_grouped_mm": _grouped,
    "aten::rms_norm": _nothing,
    "aten::lstm": _recurrent,
    "aten::gru": _recurrent,
    "aten::rnn_tanh": _recurrent,
    "aten::rnn_relu": _recurrent,
    "dsplan::attention": _stood_in_attention,
    "dsplan::linear_loss": _stood_in_loss,
}
"""What fvcore lacks, or counts for some shapes only."""


def _counted_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(FLOPS_PER_MAC * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))


def _counted_grouped(left: Any, right: Any, *_: Any, **__: Any) -> int:
    return int(FLOPS_PER_MAC * math.prod(left) * right[-1])


def _counted_stood_in_attention(query: Any, key: Any, value: Any, keys: int, *_: Any, **__: Any) -> int:
    return int(FLOPS_PER_MAC * math.prod(query[:-1]) * keys * (query[-1] + value[-1]))


def _counted_stood_in_loss(input: Any, weight: Any, *_: Any, **__: Any) -> int:
    return int(FLOPS_PER_MAC * math.prod(input) * weight[0])


def _counted_attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Scores again, and a product for each of the gradients of value, probabilities, query and key (Dao 2023, arXiv:2307.08691)."""
    return int(FLOPS_PER_MAC * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1]))


def _counted_convolution_backward(
    gradient: Any, input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    extra: Any, groups: int, wanted: Any, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """A product as large as forward's for each of the two gradients, also where channels are grouped.

    torch's own formula forgets the groups: a depthwise convolution's backward would cost as a dense one's.
    """
    forward = math.prod(input if transposed else gradient) * math.prod(weight[1:])
    return int(FLOPS_PER_MAC * forward * (bool(wanted[0]) + bool(wanted[1])))


def _counted_lstm(input: Any, of_input: Any, of_state: Any, *_: Any, **__: Any) -> int:
    """One layer of an LSTM in fp32 on cpu, one way; weights are [gates, length]."""
    return int(FLOPS_PER_MAC * math.prod(input[:-1]) * (math.prod(of_input) + math.prod(of_state)))


def _counted_lstm_backward(*args: Any, **_: Any) -> int:
    return 2 * _counted_lstm(*args)


def _counted_products(like: Any, macs: int, *_: Any, **__: Any) -> int:
    return FLOPS_PER_MAC * macs


assert functions  # defines the operators that are named below
COUNTER_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _counted_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _counted_attention_backward,
    torch.ops.aten._grouped_mm: _counted_grouped,
    torch.ops.aten.mkldnn_rnn_layer: _counted_lstm,
    torch.ops.aten.mkldnn_rnn_layer_backward: _counted_lstm_backward,
    torch.ops.aten.convolution_backward: _counted_convolution_backward,
    torch.ops.dsplan.attention: _counted_stood_in_attention,
    torch.ops.dsplan.linear_loss: _counted_stood_in_loss,
    torch.ops.dsplan.products: _counted_products,
}
"""What torch's counter lacks: without them attention on cpu counts as 0."""


@functools.cache
def formulas() -> dict[Any, Any]:
    """FLOPs by operator: torch's own and those above, called with the operator's arguments and out_val."""
    from torch.utils.flop_counter import flop_registry, shape_wrapper

    own = {operator: shape_wrapper(formula) for operator, formula in COUNTER_FORMULAS.items()}  # type: ignore[no-untyped-call]
    return {**flop_registry, **own}
