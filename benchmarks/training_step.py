"""Time of one training step of each recipe's network: precision, memory format, our gradients.

    python benchmarks/training_step.py                      all recipes, one thread, three minutes
    python benchmarks/training_step.py --recipe cityscapes --threads 2

"stock" computes depthwise convolutions as PyTorch does; otherwise their gradients are those of
`bestta.models.depthwise`. The contenders run in turn, round after round, in one process, so that a
busy neighbour slows them all; the ratio is taken within each round, over the last contender, which
is what `bestta train` does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestta.models import depthwise, efficientnet_lite
from bestta.progress import Progress
from bestta.provenance import provenance
from bestta.training import Recipe, recipes


@dataclass(frozen=True)
class Contender:
    bf16: bool
    channels_last: bool
    ours: bool

    def __str__(self) -> str:
        words = ["bf16" if self.bf16 else "fp32"]
        words += ["channels_last"] if self.channels_last else []
        return ", ".join([*words, "ours" if self.ours else "stock"])


CONTENDERS = (
    Contender(bf16=False, channels_last=False, ours=False),
    Contender(bf16=False, channels_last=True, ours=False),
    Contender(bf16=False, channels_last=True, ours=True),
    Contender(bf16=True, channels_last=True, ours=False),
    Contender(bf16=True, channels_last=True, ours=True),
)


@contextmanager
def stock_depthwise() -> Iterator[None]:
    """PyTorch's own depthwise convolution in the networks, for as long as this lasts."""

    def stock(x: Tensor, weight: Tensor, stride: int, padding: int, dilation: int) -> Tensor:
        return F.conv2d(x, weight, None, stride, padding, dilation, groups=x.shape[1])

    with (
        mock.patch.object(efficientnet_lite, "depthwise_conv2d", stock),
        mock.patch.object(depthwise, "depthwise_conv2d", stock),
    ):
        yield


def has_depthwise(model: nn.Module) -> bool:
    return any(
        isinstance(module, nn.Conv2d) and module.groups == module.in_channels > 1
        for module in model.modules()
    )


def step_of(contender: Contender, recipe: Recipe, batch: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model = recipe.build().train()
    width, height = recipe.augment.crop
    images = torch.randn(batch, 3, height, width)
    if contender.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = images.contiguous(memory_format=torch.channels_last)
    shape = (batch,) if recipe.task == "classification" else (batch, height, width)
    labels = torch.randint(len(recipe.classes), shape)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True)
    every = (slice(None, None, recipe.loss_stride),) * (labels.ndim - 1)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=contender.bf16):
            logits = model(images)
        logits, wanted = logits[:, :, *every], labels[:, *every]
        optimiser.zero_grad(set_to_none=True)
        F.cross_entropy(logits.float(), wanted).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    def with_stock() -> None:
        with stock_depthwise():
            step()

    return step if contender.ours else with_stock


def measure(recipe: Recipe, batch: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds per image of each contender in each round; one round before warms up."""
    contenders: tuple[Contender, ...] = CONTENDERS
    if not has_depthwise(recipe.build()):
        contenders = tuple(c for c in CONTENDERS if c.ours or not c.channels_last)
    steps = {str(c): step_of(c, recipe, batch) for c in contenders}
    times: dict[str, list[float]] = {name: [] for name in steps}
    total = (rounds + 1) * len(steps)
    with Progress(f"{recipe.name}: steps", total, show=True) as progress:
        for turn in range(rounds + 1):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                if turn:
                    times[name].append((time.perf_counter() - start) * 1e3 / batch)
                progress.advance()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of one training step.")
    parser.add_argument("--recipe", choices=list(recipes()), help="only this one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the record to this JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    measured: dict[str, dict[str, list[float]]] = {}
    for name, recipe in recipes().items():
        if arguments.recipe in (None, name):
            times = measure(recipe, min(recipe.batch, 64), arguments.rounds)
            measured[name] = times
            last = times[str(CONTENDERS[-1])]
            print(f"\n{recipe.about}, {arguments.threads} threads")
            for contender, values in times.items():
                ratio = statistics.median(a / b for a, b in zip(values, last, strict=True))
                print(f"{contender:<28}{ratio:>6.2f}x{statistics.median(values):>9.1f} ms an image")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    record = {
        "benchmark": "training_step",
        "rounds": arguments.rounds,
        "ms_per_image": measured,
        "load": load,
        "seed": 0,
        **provenance(),
    }
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        print(f"Written: {arguments.out}")
    else:
        print("\nNext: --out FILE keeps the record; docs/models.md tells what the recipes do.")


if __name__ == "__main__":
    main()
