import subprocess
import sys

PUT_OFF = """
import sys
import torch
from dsplan.planner.compiler_put_off import compiler_put_off, is_put_off
"""


def run(code: str) -> str:
    """A process of its own: whoever has loaded torch._dynamo keeps it."""
    done = subprocess.run([sys.executable, "-c", PUT_OFF + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_fake_tensors_work_without_the_compiler_and_leave_no_trace():
    code = """
from torch._subclasses import FakeTensorMode
with compiler_put_off():
    with FakeTensorMode():
        made = torch.ones(2, 3) @ torch.ones(3, 4)
    @torch.compiler.disable
    def plain(x): return x + 1
    assert is_put_off()
assert not [name for name in sys.modules if name.startswith("torch._dynamo")]
assert not hasattr(FakeTensorMode.__torch_dispatch__.__wrapped__, "__dynamo_disable")
assert plain(1) == 2 and "torch._dynamo" in sys.modules
print(tuple(made.shape))
"""
    assert run(code) == "(2, 4)"


def test_what_needs_the_compiler_gets_it():
    code = """
with compiler_put_off():
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    assert is_put_off()
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
    assert not is_put_off()
    with TransformGetItemToIndex():
        pass
torch._dynamo.config.suppress_errors = True
assert torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(2)).tolist() == [2, 2]
print("well")
"""
    assert run(code) == "well"
