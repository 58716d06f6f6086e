"""torch.compile in place: names of weights, random numbers, and what is said where it does not work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from leyden.engine import compile as compiling
from leyden.engine.compile import compile_net, explain_failure, find_obstacle, keep_gradients
from leyden.engine.settings import PLAIN_STEP
from leyden.errors import ConfigError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(3, 4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.dropout(self.hidden(rows).tanh()))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Graphs that were captured, which then run without generated code."""
    captured: list[torch.fx.GraphModule] = []

    def run_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        captured.append(graph)
        return graph

    monkeypatch.setattr(compiling, "compile_arguments", lambda mode: {"backend": run_graph})
    torch._dynamo.reset()
    return captured


def test_weights_keep_their_names_and_one_graph_serves_all_sizes(graphs: list[torch.fx.GraphModule]) -> None:
    torch.manual_seed(0)
    net = Net()
    names = list(net.state_dict())
    rows = [torch.randn(size, 3) for size in (8, 5, 2, 8)]
    torch.manual_seed(1)
    expected = [net(part) for part in rows]
    compile_net(net, "default", "cpu")
    torch.manual_seed(1)
    assert all(net(part).equal(output) for part, output in zip(rows, expected, strict=True))
    assert len(graphs) == 1
    assert list(net.state_dict()) == names


def test_generated_code_draws_the_same_dropout() -> None:
    """With the real backend: compiles C++."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, rows = Net(), torch.randn(6, 3)
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        net.zero_grad()
        output = net(rows)
        output.square().sum().backward()
        results.append([output.detach(), *(p.grad for p in net.parameters())])
        compile_net(net, "default", "cpu")
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)


def test_off_leaves_the_network_alone() -> None:
    net = Net()
    compile_net(net, "off", "cpu")
    assert net._compiled_call_impl is None


def test_false_of_yaml_is_off() -> None:
    from dataclasses import replace

    assert replace(PLAIN_STEP, compile=False).compile_mode == "off"
    assert replace(PLAIN_STEP, compile="max-autotune").uses_cuda_graphs
    assert not replace(PLAIN_STEP, compile="default").uses_cuda_graphs


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    def search() -> str:
        raise cpp_builder.exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", search)
    with pytest.raises(ConfigError) as caught:
        compile_net(Net(), "max-autotune", "cpu")
    assert str(caught.value) == (
        "`engine.compile` is max-autotune, but nothing can be compiled here: there is no C++ compiler "
        "(install g++ or clang, or name one in the variable CXX). Use engine.compile=off."
    )


def test_without_triton_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import _triton

    monkeypatch.setattr(_triton, "has_triton", lambda: False)
    assert "Triton is missing" in (find_obstacle("cuda") or "")


def test_failure_of_the_compiler_names_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> None:
        raise RuntimeError("no such header\nlong trace")

    monkeypatch.setattr(compiling, "compile_arguments", lambda mode: {"backend": fail})
    torch._dynamo.reset()
    net = Net()
    compile_net(net, "default", "cpu")
    with pytest.raises(Exception, match="no such header") as caught:
        net(torch.zeros(2, 3))
    explained = explain_failure(caught.value, net)
    assert str(explained) == (
        "`engine.compile`: torch.compile fails on `model.net` (Net): no such header. Use engine.compile=off."
    )
    assert explain_failure(ValueError("other"), net) is None


def test_kept_gradients_are_copies_and_add_up() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    memory = torch.zeros(2)

    def backward(loss: Tensor) -> None:
        # as a CUDA graph: the gradient of each call is in the same memory
        memory.copy_(torch.tensor([3.0, 4.0]))
        if weight.grad is None:
            weight.grad = memory
        else:
            weight.grad += memory

    kept = keep_gradients(backward, [weight, nn.Parameter(torch.zeros(1))])
    kept(torch.zeros(()))
    kept(torch.zeros(()))
    assert weight.grad is not None
    assert weight.grad.tolist() == [6.0, 8.0]
