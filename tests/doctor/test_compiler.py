"""What the compiler does while a run is watched: graph breaks by line, and recompilations with their time."""

import pytest
import torch

from tests.doctor.examined import examine_script

SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        x = self.layer(x)
        {inside}
        return x.sum()

def main():
    net = Net()
    net.compile(backend="eager", dynamic=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(12):
        x = torch.ones({rows}, 8)
        optimizer.zero_grad()
        net(x).backward()
        optimizer.step()

if __name__ == "__main__":
    main()
"""


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def examine(tmp_path, monkeypatch, inside="pass", rows="4"):
    script = SCRIPT.replace("{inside}", inside).replace("{rows}", rows)
    return examine_script(script, tmp_path, monkeypatch)


def test_a_graph_break_is_found_at_its_line(tmp_path, monkeypatch):
    examined = examine(tmp_path, monkeypatch, inside="print(end='')  # <-")
    assert examined.lines("graph_break") == examined.marked
    (finding,) = examined.of_kind("graph_break")
    assert "print" in finding["details"][0]
    assert finding["cost"]["unit"] == ""
    assert "not measured" in examined.table
    assert examined.of_kind("recompilation") == []


def test_recompilations_are_counted_with_their_time(tmp_path, monkeypatch):
    examined = examine(tmp_path, monkeypatch, rows="4 + step")
    (finding,) = examined.of_kind("recompilation")
    assert "`forward` was compiled again" in finding["what"]
    assert "size mismatch" in finding["details"][0]
    assert finding["cost"]["value"] > 0
    assert examined.of_kind("graph_break") == []


def test_a_model_that_compiles_once_has_no_finding(tmp_path, monkeypatch):
    examined = examine(tmp_path, monkeypatch)
    assert {one["kind"] for one in examined.all}.isdisjoint({"graph_break", "recompilation"})
