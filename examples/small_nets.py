"""Small networks by hand: an LSTM, two U-Nets and a transformer whose attention has a trained bias."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Recurrent(nn.Module):
    """An LSTM of two layers that reads words."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, 2 * width, 2, batch_first=True)
        self.head = nn.Linear(2 * width, words)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


class UNet(nn.Module):
    """Two levels down, two up, and what is passed across."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([self.level(width, 2 * width), self.level(2 * width, 4 * width)])
        self.up = nn.ModuleList([self.level(6 * width, 2 * width), self.level(3 * width, width)])
        self.leave = nn.Conv2d(width, 10, 1)

    @staticmethod
    def level(before: int, after: int) -> nn.Module:
        first, second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        return nn.Sequential(first, nn.GroupNorm(8, after), nn.SiLU(), second, nn.GroupNorm(8, after), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        passed = [self.enter(x)]
        for level in self.down:
            passed.append(level(F.avg_pool2d(passed[-1], 2)))
        x = passed.pop()
        for level in self.up:
            x = level(torch.cat([F.interpolate(x, scale_factor=2.0), passed.pop()], dim=1))
        return self.leave(x)


class TimedBlock(nn.Module):
    """A residual block that is told the time. [B, C, H, W], [B, T] → [B, C', H, W]."""

    def __init__(self, before: int, after: int, times: int) -> None:
        super().__init__()
        self.norm_1, self.conv_1 = nn.GroupNorm(8, before), nn.Conv2d(before, after, 3, padding=1)
        self.norm_2, self.conv_2 = nn.GroupNorm(8, after), nn.Conv2d(after, after, 3, padding=1)
        self.time = nn.Linear(times, after)
        self.shortcut = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv_1(F.silu(self.norm_1(x))) + self.time(time)[:, :, None, None]
        return self.conv_2(F.silu(self.norm_2(y))) + self.shortcut(x)


class PixelAttention(nn.Module):
    """Self-attention of all pixels around a shortcut. [B, C, H, W] → [B, C, H, W]."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.GroupNorm(8, width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        parts = self.qkv(pixels).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts.unbind()).transpose(1, 2).flatten(2)
        return x + self.out(attended).transpose(1, 2).unflatten(2, x.shape[2:])


class DiffusionUNet(nn.Module):
    """A U-Net that predicts the noise in an image at a time, with attention at its lowest level."""

    def __init__(self, width: int) -> None:
        super().__init__()
        times = 4 * width
        self.time = nn.Sequential(nn.Linear(1, times), nn.SiLU(), nn.Linear(times, times))
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        sizes = [width, 2 * width, 4 * width]
        downward, upward = itertools.pairwise(sizes), [(6 * width, 2 * width), (3 * width, width)]
        self.down = nn.ModuleList([TimedBlock(*channels, times) for channels in downward])
        self.up = nn.ModuleList([TimedBlock(*channels, times) for channels in upward])
        self.attention = PixelAttention(sizes[-1])

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        time = self.time(time)
        passed = [self.enter(x)]
        for block in self.down:
            passed.append(block(F.avg_pool2d(passed[-1], 2), time))
        x = self.attention(passed.pop())
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), passed.pop()], dim=1), time)
        return self.leave(x)


class BiasedBlock(nn.Module):
    """A transformer block whose attention adds a trained bias for each head and pair of positions."""

    def __init__(self, width: int, length: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.bias = nn.Parameter(torch.zeros(heads, length, length))
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts.unbind(), attn_mask=self.bias[None])
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class BiasedAttention(nn.Module):
    """A language model of :class:`BiasedBlock`."""

    def __init__(self, words: int, width: int, length: int, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*[BiasedBlock(width, length, heads) for _ in range(layers)])
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))
