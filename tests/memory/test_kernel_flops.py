"""FLOPs of operators for which torch has no formula, or a wrong one, against the same work as plain products."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_fasttrain.memory import count_flops
from lightning_fasttrain.memory.kernel_flops import flops_of


class Convolution(nn.Module):
    """A convolution in groups, also as one convolution for each group, whose FLOPs torch counts rightly."""

    def __init__(self, groups, function, transposed, apart=False):
        super().__init__()
        window = (3,) * (2 if function in (F.conv2d, F.conv_transpose2d) else 1)
        channels = (12, 8 // groups) if transposed else (8, 12 // groups)
        self.weight = nn.Parameter(torch.ones(*channels, *window))
        self.groups, self.function, self.apart = groups, function, apart

    def forward(self, x):
        if not self.apart:
            return self.function(x, self.weight, groups=self.groups)
        pairs = zip(x.chunk(self.groups, 1), self.weight.chunk(self.groups, 0), strict=True)
        return torch.cat([self.function(part, weight) for part, weight in pairs], 1)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("function", [F.conv1d, F.conv2d, F.conv_transpose2d], ids=lambda function: function.__name__)
def test_a_convolution_in_groups_has_those_of_its_groups(groups, function):
    transposed = function is F.conv_transpose2d
    x = torch.ones(2, 12, *(9,) * (1 if function is F.conv1d else 2), requires_grad=True)
    with FlopCounterMode(display=False) as expected:
        Convolution(groups, function, transposed, apart=True)(x).sum().backward()
    net = Convolution(groups, function, transposed)
    loss = lambda net, batch: net(batch.requires_grad_()).sum()  # noqa: E731
    assert count_flops(net, x.detach(), loss=loss) == expected.get_total_flops()


def test_groups_of_rows_have_those_of_a_product_for_each():
    rows, width, out, ends = 12, 8, 16, torch.tensor([4, 12], dtype=torch.int32)
    x, gradient, weight = torch.ones(rows, width), torch.ones(rows, out), torch.ones(2, width, out)
    func, each_row = torch.ops.aten._grouped_mm.default, 2 * rows * width * out
    assert flops_of(func, (x, weight), {"offs": ends}, gradient) == each_row
    assert flops_of(func, (x.T, gradient), {"offs": ends}, weight) == each_row  # of the weights, each of its own rows
    assert flops_of(func, (weight.mT, x.T), {"offs": ends}, gradient.T) == each_row


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="without oneDNN it is made of other operators")
@pytest.mark.parametrize("settings", [{}, {"num_layers": 2}, {"bidirectional": True}, {"batch_first": True}])
def test_a_recurrent_net_multiplies_each_row_by_each_matrix(settings):
    net, rows = nn.LSTM(8, 8, **settings), 3 * 5
    matrices = sum(weight.numel() for weight in net.parameters() if weight.ndim == 2)
    assert count_flops(net, torch.ones(3, 5, 8), loss=lambda net, x: net(x)[0].sum()) == 6 * rows * matrices
