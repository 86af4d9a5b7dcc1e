"""Eager code runs without dynamo and sympy; whoever needs them still gets them."""

import subprocess
import sys
import textwrap

import pytest
import torch
from forked import run_copies
from torch.fx.experimental import symbolic_shapes

from snugfit.memory import deferred_imports, process

EAGER = """
import sys, torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from snugfit.memory import prepare_process, saved_bytes, tensor_peak_bytes
prepare_process(1)

def loaded(name):
    return type(sys.modules.get(name)).__name__ == "module"

network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

def step(device):
    images = torch.ones(2, 3, 8, 8, device=device).to(memory_format=torch.channels_last)
    network.to(device)(images).pow(2).mean().backward()
"""
OPTIM = """
optimizer = torch.optim.Adam(network.parameters())
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
step("cpu")
optimizer.step()
schedule.step()
"""


def run(*parts):
    code = "\n".join(textwrap.dedent(part) for part in parts)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def run_each(*cases):
    """Run each behind EAGER and OPTIM, in a copy of a process that has imported torch alone."""
    found = run_copies(EAGER, *(OPTIM + textwrap.dedent(case) for case in cases))
    assert [code for code, _ in found] == [0] * len(cases)


def test_eager_code_loads_neither_dynamo_nor_sympy():
    run(
        EAGER,
        OPTIM,
        """
        checkpoint(network, torch.ones(2, 3, 8, 8), use_reentrant=False).sum().backward()
        with FlopCounterMode(display=False) as counter:
            step("meta")
        assert counter.get_total_flops() > 0
        tensor_peak_bytes(lambda: step("meta"))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.ones(4, 3, device="meta", requires_grad=True)[1:, ::2].mean().backward()
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        names = "sympy", "mpmath", "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes"
        assert not any(map(loaded, names)), [*filter(loaded, names)]
        """,
    )


def test_what_needs_them_loads_them():
    run_each(
        """
        compiled = torch.compile(lambda x: (x + 1).relu(), backend="eager", fullgraph=True)
        assert torch.equal(compiled(torch.tensor([-2.0, 1.0])), torch.tensor([0.0, 2.0]))
        assert loaded("torch._dynamo") and torch._dynamo is sys.modules["torch._dynamo"]
        """,
        """
        import sympy
        class Own(sympy.Basic):
            pass
        assert sympy.Symbol("x") + 1 == 1 + sympy.Symbol("x") and isinstance(sympy.Symbol("x"), sympy.Basic)
        assert issubclass(Own, type(sympy.Symbol("x")).mro()[-3]) and not isinstance(3, sympy.Basic)
        """,
        """
        from torch._subclasses import FakeTensorMode
        with FakeTensorMode():
            assert (torch.ones(3, 1) + torch.ones(4)).shape == (3, 4)
        """,
    )


@pytest.mark.slow
def test_so_do_other_ways_of_needing_them():
    run_each(
        """
        @torch.compile(backend="eager")
        def whole():
            step("cpu")
            optimizer.step()
        before = network[0].weight.detach().clone()
        whole()
        assert not torch.equal(network[0].weight, before)
        """,
        "from torch._dynamo import config; import torch._dynamo.utils; assert torch._dynamo.config is config",
        """
        config = torch._dynamo.config
        config.error_on_nested_fx_trace = False
        assert loaded("torch._dynamo") and torch._dynamo.config.error_on_nested_fx_trace is False
        assert config.error_on_nested_fx_trace is False
        """,
        "import torch._dynamo.testing; torch._dynamo.testing.CompileCounter(); torch._dynamo.reset()",
        "from sympy.core.numbers import Integer; import sympy; assert isinstance(Integer(3), sympy.Basic)",
        """
        from torch.export import Dim, export
        program = export(nn.Linear(3, 2), (torch.ones(4, 3),), dynamic_shapes=({0: Dim("batch")},))
        assert program.module()(torch.ones(7, 3)).shape == (7, 2)
        """,
    )


def test_functions_are_hidden_from_a_compiler_with_and_without_options():
    run_each(
        *(
            f"""
            def plain(x):
                "Double it."
                return 2 * x
            hidden = [{disable}(plain), {disable}()(plain), {disable}(recursive=False)(plain), {disable}(fn=plain)]
            assert [each(3) for each in hidden] == [6] * 4 and not loaded("torch._dynamo")
            assert {{(each.__name__, each.__doc__) for each in hidden}} == {{("plain", "Double it.")}}
            assert sum(p.numel() for p in {disable}(nn.Linear(3, 2)).parameters()) == 8
            """
            for disable in ("torch.compiler.disable", "torch._dynamo.disable")
        )
    )


def test_where_they_are_loaded_already_nothing_changes():
    code = "import torch._dynamo; dynamo = torch._dynamo\n" + EAGER
    run(code, "assert torch._dynamo is dynamo is sys.modules['torch._dynamo']")


SIZES = [True, False, 0, 1, 5]


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        *((name, [(True,), (False,)]) for name in ("guard_or_false", "guard_or_true", "statically_known_true")),
        *((name, [(True,), (False,)]) for name in ("guard_size_oblivious", "expect_true")),
        ("guard_int", [(0,), (7,)]),
        ("free_unbacked_symbols", [(torch.ones(2, 3),), ([1, 2],)]),
        *((name, [(each,) for each in SIZES]) for name in ("guarding_hint_or_throw", "has_guarding_hint")),
        *((name, [(each,) for each in SIZES]) for name in ("is_nested_int", "has_free_unbacked_symbols")),
        *(
            (name, [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)])
            for name in ("sym_and", "sym_or")
        ),
        ("sym_eq", [(1, 1), (1, 2), ((1, 2), [1, 2]), ([1, (2, 3)], (1, [2, 4])), ((1,), (1, 2)), ((), ())]),
    ],
)
def test_plain_numbers_give_what_torch_gives(name, cases):
    if not hasattr(symbolic_shapes, name):
        pytest.skip("this version of torch has no such function")
    for case in cases:
        want, got = (getattr(symbolic_shapes, name)(*case), deferred_imports._SHAPES[name](*case))
        assert got == want and type(got) is type(want), case


def test_symbols_are_left_to_torch():
    environment = symbolic_shapes.ShapeEnv()
    size = environment.create_unbacked_symint()
    assert deferred_imports._SHAPES["guard_or_false"](size == 3) is False
    assert deferred_imports._SHAPES["guard_or_true"](size == 3) is True
    assert isinstance(deferred_imports._SHAPES["sym_or"](size == 3, size == 4), torch.SymBool)


@pytest.mark.skipif(sys.platform != "linux", reason="limits need Linux")
def test_a_late_import_belongs_to_the_resting_process_not_to_the_budget():
    run(
        """
        import sys, torch
        from snugfit.memory import MemoryLimit, is_out_of_memory, make_meter, prepare_process, read_status
        cpu, baseline = torch.device("cpu"), prepare_process(1)
        meter = make_meter(baseline, cpu)
        with MemoryLimit(12_000_000, baseline, cpu) as limit:
            before = read_status().anon
            import sympy
            sympy.Symbol("x")
            assert read_status().anon - before > 20_000_000 and meter.mark() < 12_000_000
            limit.refresh()
            assert limit.left_bytes > 6_000_000
            kept = torch.ones(1_000_000)
            try:
                torch.ones(4_000_000)
            except RuntimeError as error:
                assert is_out_of_memory(error)
            else:
                raise AssertionError("the budget still holds")
        """
    )


def test_what_other_threads_allocate_during_an_import_is_not_credited_without_end(monkeypatch):
    """200 MB appear in two imports, of which no library takes more than 80 MiB."""
    grown = iter(range(0, 400, 100))
    monkeypatch.setattr(process, "_late_bytes", [])
    monkeypatch.setattr(process, "read_status", lambda: process.MemoryStatus(anon=next(grown) * 10**6))
    for name in ("first", "second"):
        with process.library_import():  # another thread allocates
            monkeypatch.setitem(sys.modules, f"library_{name}", sys)
    assert process.late_bytes() == process.MOST_LATE_BYTES == 80 * 2**20


def test_nothing_is_credited_if_nothing_was_imported(monkeypatch):
    grown = iter(range(0, 400, 100))
    monkeypatch.setattr(process, "_late_bytes", [])
    monkeypatch.setattr(process, "read_status", lambda: process.MemoryStatus(anon=next(grown) * 10**6))
    with process.library_import():
        import sys as known
    assert known is sys and process.late_bytes() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="limits need Linux")
def test_a_late_import_takes_from_a_budget_that_counts_imports():
    run(
        """
        import torch
        from snugfit.memory import MemoryLimit, prepare_process, read_status
        cpu, baseline = torch.device("cpu"), prepare_process(1)
        import sympy
        sympy.Symbol("x")  # before the context: at rest
        with MemoryLimit(80_000_000, baseline, cpu, counts_imports=True) as limit:
            assert limit.left_bytes > 75_000_000
            before = read_status().anon
            import torch._dynamo
            torch._dynamo.config.verbose
            grown = read_status().anon - before
            limit.refresh()
            assert grown > 20_000_000 and abs(limit.left_bytes - (80_000_000 - grown)) < 5_000_000
        """
    )
