"""What Min-SNR weights change about the training of a small diffusion model, on letters in many fonts.

    python examples/min_snr.py [--steps 1500] [--seeds 3] [--out RESULTS.json]

A U-Net learns to predict the noise in images of 16 × 16 pixels, with plain weights and with those of Min-SNR-5, from
the same weights, images, noise and timesteps. At a third, two thirds and the end of the run it draws 512 images by 25
steps of DDIM. Their distance from the letters is the Fréchet distance of Gaussians fitted to the pixels of both.
"""

import argparse
import json
import shlex
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
from letters import read_letters
from small_nets import DiffusionUNet

import lightning_fasttrain as ft
from lightning_fasttrain.bench.ladder.turns import without_paths
from lightning_fasttrain.core.atomic_write import write_atomic
from lightning_fasttrain.core.device import hardware, versions

SIDE, WIDTH, BATCH, DRAWN, TIMES = 16, 16, 32, 512, 1000
GAMMA, SIZES = 5.0, (11, 12, 13, 14)


def cosine_schedule():
    """ᾱ of each timestep, as of Nichol and Dhariwal 2021."""
    angles = (torch.linspace(0, 1, TIMES + 1) + 0.008) / 1.008 * torch.pi / 2
    alphas = angles.cos().square() / angles[0].cos().square()
    return alphas[1:].clamp(1e-4, 1)


def train(letters, alphas, weighted, steps, seed):
    """The distances at a third, two thirds and the end of the run."""
    torch.manual_seed(seed)
    net = DiffusionUNet(WIDTH)
    optimizer = ft.build_optimizer(net, "adamw", lr=1e-3)
    found = []
    for step in range(1, steps + 1):
        images = letters[torch.randint(len(letters), (BATCH,))]
        times, noise = torch.randint(TIMES, (BATCH,)), torch.randn_like(images)
        signal = alphas[times].view(-1, 1, 1, 1)
        guess = net(signal.sqrt() * images + (1 - signal).sqrt() * noise, times[:, None] / TIMES)
        errors = (guess - noise).square().mean((1, 2, 3))
        weights = ft.loss.min_snr_weights(alphas, times, GAMMA) if weighted else torch.ones(BATCH)
        optimizer.zero_grad()
        (weights * errors).mean().backward()
        optimizer.step()
        if step % (steps // 3) == 0:
            with torch.random.fork_rng():
                found.append(distance(draw(net, alphas), letters))
    return found


@torch.no_grad()
def draw(net, alphas, steps=25):
    """Images by DDIM without noise, from the same noise in all runs."""
    images = torch.randn(DRAWN, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    times = torch.linspace(TIMES - 1, 0, steps).long()
    for place, time in enumerate(times):
        signal = alphas[time]
        after = alphas[times[place + 1]] if place + 1 < steps else torch.ones(())
        noise = net(images, torch.full((DRAWN, 1), time / TIMES))
        clean = ((images - (1 - signal).sqrt() * noise) / signal.sqrt()).clamp(-1, 1)
        images = after.sqrt() * clean + (1 - after).sqrt() * noise
    return images.clamp(-1, 1)


def distance(one, other):
    """The Fréchet distance of two sets of images: |μ − ν|² + tr(Σ + T − 2 (ΣT)^½), of the mean over their channels."""
    pixels = [images.mean(1).flatten(1).double() for images in (one, other)]
    means = [values.mean(0) for values in pixels]
    first, second = (torch.cov(values.T) for values in pixels)
    # The eigenvalues of a product of two positive semidefinite matrices are real and not negative.
    roots = torch.linalg.eigvals(first @ second).real.clamp(min=0).sqrt()
    return float((means[0] - means[1]).square().sum() + first.trace() + second.trace() - 2 * roots.sum())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    letters, alphas, rows = read_letters(SIDE, SIZES)[0], cosine_schedule(), []
    print(f"{len(letters)} letters; Fréchet distance of pixels after {options.steps} steps and two earlier moments")
    for name, weighted in (("plain", False), (f"Min-SNR-{GAMMA:g}", True)):
        runs = [train(letters, alphas, weighted, options.steps, seed) for seed in range(options.seeds)]
        means = [statistics.mean(at) for at in zip(*runs, strict=True)]
        print(f"{name:<12}" + "".join(f"{mean:>10.2f}" for mean in means), " last:", [f"{run[-1]:.2f}" for run in runs])
        rows.append({"run": name, "distances": means, "last_by_seed": [run[-1] for run in runs]})
    if options.out is not None:
        command = without_paths(shlex.join(["python", "examples/min_snr.py", *sys.argv[1:]]))
        when = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"hardware": hardware(), "versions": versions(), "date": when, "command": command}
        write_atomic(options.out, json.dumps({**about, "steps": options.steps, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
