"""EcoTTA: small meta networks beside a frozen network learn, held near it (Song et al., 2023).

"EcoTTA: Memory-Efficient Continual Test-time Adaptation via Self-distilled Regularization" (Song,
Lee, Kweon, Choi). The source network is split into K parts, and none of its numbers ever changes.
Behind part k sits a meta block, ``x̃_k = BN(x_k) + ReLU(BN(conv(x̃_{k-1})))``: x̃_{k-1} goes into the
part, x_k comes out of it, and x̃_k goes on in its place. The blocks are trained on source images
once (the warm-up, by `bestta.prepare`). On the stream they descend along the entropy of the
predictions that are reliable, below E0 = 0.4 ln C of C classes, plus λ Σ_k mean |x̃_k − x_k|, which
holds each block to its frozen part. One step of SGD per batch; the prediction is that of before it.

The authors have released a notebook of the network, not their whole code; a community version of
the rest is linked from their page. The notebook says that the approach is patented by Qualcomm.
Followed from there: x_k is the frozen part applied to the *adapted* features, and a constant; the
distance at part k moves block k alone, not the blocks before it; the entropy is the mean over the
reliable predictions; the blocks' batch norms go by the batch, on the stream too, while those of the
source network keep the source's statistics.

Deviations:

- The entropy moves every block, as the paper's text has it. The community version cuts the graph
  between the parts there too, so that it moves the last block alone.
- One forward serves the entropy and the distances, where the community version runs two: the values
  are the same, and the gradients are taken apart.
- The notebook's blocks start as PyTorch makes them, and have to learn the scale of the source's
  features first. Here they start from the first source batch as nearly the source network
  (`MetaBlock.begun`), so that a short warm-up will do.
- ``prior`` lets the blocks' batch norms lean on the statistics of the warm-up: those of a single
  image are poor.

Choice: a pixel counts as a sample. Choice: a batch without any reliable prediction is still learned
from, through the distances, which are what is left of the loss: they lead back to the source
network, the safe way to go while nothing is reliable. Choice: parts need not follow each other
directly; what lies between them, or leads past them, is the source network's and works on the
adapted features.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestta.adapters.base import Adapter, AdapterConfig, StepReport
from bestta.adapters.batchnorm import MixedNorm, share_of_batch, values_per_channel
from bestta.adapters.network import Network, gradients
from bestta.adapters.optimiser import Optimiser
from bestta.adapters.preparation import Preparation, source_loss
from bestta.adapters.registry import register_adapter
from bestta.adapters.settings import at_least_one, not_negative, prior_strength, within
from bestta.insertion import find_module, skeleton
from bestta.lean import lean_entropy
from bestta.moments import moments
from bestta.outputs import OutputKey, select_logits

FEWEST, MOST = 3, 5
"""How many parts `choose_parts` looks for. The paper has 4 or 5."""
BRANCH_START = 0.1
"""How strong the convolution of a block is at first, in deviations of the part's output."""


@dataclass(frozen=True, kw_only=True)
class EcottaConfig(AdapterConfig):
    """Settings of EcoTTA: the published ones, for both tasks."""

    parts: tuple[str, ...] = ()
    """Modules that get a meta block, each taking one (B, C, H, W) and returning another; by default
    those of `choose_parts`. Once prepared, those of the profile."""
    kernel: int = 3
    """Side of the blocks' convolutions; odd. 1 is smaller and quicker."""

    warmup_epochs: int = 10
    """How often the warm-up goes through the source images."""
    warmup_lr: float = 5e-2
    """Step size of SGD in the warm-up."""

    lr: float = 5e-3
    """Step size of SGD on the stream. 0 holds the blocks as the warm-up left them."""
    momentum: float = 0.9
    """Of SGD, in the warm-up and on the stream."""
    margin: float = 0.4
    """E0 in units of ln C, of C classes: predictions of an entropy below it are learned from."""
    lambda_distillation: float = 0.5
    """λ: weight of the distance to the frozen parts. The paper has 0.25 to 0.5."""
    prior: float = 0.0
    """In the blocks' batch norms the warm-up's statistics count as so many images against the
    batch: 0 as published, infinity for the warm-up's alone."""

    def __post_init__(self) -> None:
        parts = (self.parts,) if isinstance(self.parts, str) else tuple(self.parts or ())
        object.__setattr__(self, "parts", parts)
        check_apart(parts)
        at_least_one(self, "kernel", "warmup_epochs")
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, so that it has a middle, not {self.kernel}.")
        not_negative(self, "warmup_lr", "lr", "margin", "lambda_distillation")
        within(self, 0, 1, "momentum")
        prior_strength(self, "prior")


# --- the network ------------------------------------------------------------------------------


class MetaBlock(nn.Module):
    """``BN(y) + ReLU(BN(conv(x)))`` for a part that made ``y`` of ``x``, both (B, C, H, W)."""

    def __init__(self, conv: Tensor, stride: tuple[int, int]) -> None:
        """``conv`` is (C of y, C of x, kernel, kernel); it and the norms are in fp32 at least."""
        super().__init__()
        self.stride = stride
        self.conv = nn.Parameter(conv)
        self.branch_norm: nn.BatchNorm2d | MixedNorm = _norm_for(conv)
        self.output_norm: nn.BatchNorm2d | MixedNorm = _norm_for(conv)

    @classmethod
    @torch.no_grad()
    def begun(cls, x: Tensor, y: Tensor, kernel: int, generator: torch.Generator) -> MetaBlock:
        """A block that starts from what goes into and comes out of its part on a source batch.

        Choice: weight and bias of the norm of ``y`` start at the deviation and mean of ``y``, so
        that it gives ``y`` back, at the scale that the rest of the network knows. The branch starts
        small. It cannot start at zero: there ReLU has no slope, and the branch would never learn.
        """
        wide = torch.promote_types(y.dtype, torch.float32)
        shape = (y.shape[1], x.shape[1], kernel, kernel)
        # As PyTorch draws the weights of a convolution, but from our own generator.
        bound = 1 / math.sqrt(x.shape[1] * kernel**2)
        conv = (torch.rand(shape, generator=generator) * 2 - 1) * bound
        height, width = (max(1, round(x.shape[i] / y.shape[i])) for i in (2, 3))
        block = cls(conv.to(y.device, wide), (height, width))
        mean, variance = moments(y)
        branch_mean, branch_variance = moments(block.branch(x, y))
        deviation = (variance + block.output_norm.eps).sqrt()
        starts = {
            "output_norm.weight": deviation,
            "output_norm.bias": mean,
            "output_norm.running_mean": mean,
            "output_norm.running_var": variance,
            "branch_norm.weight": BRANCH_START * deviation,
            "branch_norm.running_mean": branch_mean,
            "branch_norm.running_var": branch_variance,
        }
        for name, value in starts.items():
            block.state_dict()[name].copy_(value)
        return block

    @classmethod
    def loaded(cls, tensors: Mapping[str, Tensor]) -> MetaBlock:
        """The block that `saved` wrote down."""
        height, width = tensors["stride"].tolist()
        block = cls(tensors["conv"].clone(), (height, width))
        with torch.no_grad():
            for name, tensor in block.state_dict().items():
                tensor.copy_(tensors[name])
        return block

    def saved(self) -> dict[str, Tensor]:
        """All there is to know of it, by name."""
        return {**self.state_dict(), "stride": torch.tensor(self.stride)}

    def mix_statistics(self, share: Callable[[int], float]) -> None:
        """From now on normalise by a share of the batch's statistics, the rest the warm-up's."""
        for name in ("branch_norm", "output_norm"):
            setattr(self, name, MixedNorm(getattr(self, name), share))

    def branch(self, x: Tensor, y: Tensor) -> Tensor:
        """The convolution of ``x``, in the size of ``y``.

        Choice: the stride is the whole number nearest to the ratio of the sizes; where that does
        not do (odd sizes, a part that enlarges), the map is interpolated.
        """
        padding = self.conv.shape[-1] // 2
        out = _wide(F.conv2d(x, self.conv.to(x.dtype), None, self.stride, padding))
        if out.shape[2:] != y.shape[2:]:
            out = F.interpolate(out, size=y.shape[2:], mode="bilinear", align_corners=False)
        return out

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x̃: what goes on in place of ``y``, in its shape and precision."""
        branch = F.relu(_normed(self.branch_norm, self.branch(x, y)))
        return (_normed(self.output_norm, _wide(y)) + branch).to(y.dtype)


def _normed(norm: nn.BatchNorm2d | MixedNorm, x: Tensor) -> Tensor:
    """``norm(x)``; in the warm-up, one value per channel is normalised by the statistics so far."""
    if isinstance(norm, nn.BatchNorm2d) and values_per_channel(x) == 1:
        mean, variance = norm.running_mean, norm.running_var
        return F.batch_norm(x, mean, variance, norm.weight, norm.bias, False, 0.0, norm.eps)
    out: Tensor = norm(x)
    return out


class MetaNetwork:
    """The frozen source network with a meta block behind each part."""

    def __init__(
        self, model: nn.Module, blocks: Mapping[str, MetaBlock], output: OutputKey
    ) -> None:
        self.network = Network(model, output)
        self.blocks = blocks
        self.runs: Counter[str] = Counter()
        self.distances: dict[str, Tensor] = {}
        for name, block in blocks.items():
            put_behind(self.network.module, name, _through(name, block, self.distances), self.runs)

    def __call__(self, image: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The logits of ``image``, and mean |x̃_k − x_k| of each part."""
        self.runs.clear()
        self.distances.clear()
        logits = self.network(image)
        check_ran_once(self.runs, self.blocks, self.network.module)
        distances = dict(self.distances)
        self.distances.clear()  # they hold on to the graph
        return logits, distances

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters of the blocks, by part."""
        return {n: w for part in self.blocks for n, w in self.weights_of(part).items()}

    def weights_of(self, part: str) -> dict[str, nn.Parameter]:
        """The parameters of one block."""
        return {f"{part}/{key}": p for key, p in self.blocks[part].named_parameters()}


PartFunction = Callable[[Tensor, Tensor], Tensor | None]
"""Sees what goes into a part and what comes out, and gives what goes on (None: the same)."""


def _through(name: str, block: MetaBlock, distances: dict[str, Tensor]) -> PartFunction:
    def put(x: Tensor, y: Tensor) -> Tensor:
        adapted: Tensor = block(x, y)
        # At once: the network may change the map it is given in place.
        distances[name] = (_wide(adapted) - _wide(y).detach()).abs().mean()
        return adapted

    return put


def put_behind(root: nn.Module, name: str, function: PartFunction, runs: Counter[str]) -> None:
    """Put ``function`` behind the module ``name`` of a skeleton, for good; ``runs`` counts."""

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Tensor | None:
        runs[name] += 1
        for what, value in (("takes", inputs), ("returns", (output,))):
            if len(value) != 1 or not _is_map(value[0]):
                raise ValueError(
                    f"module {name!r} ({type(module).__name__}) {what} {_describe(value)}; a part "
                    "of EcoTTA takes one tensor (B, C, H, W), by position, and returns another. "
                    "Name others: parts=(…)."
                )
        return function(inputs[0], output)

    find_module(root, name).register_forward_hook(hook)


def choose_parts(model: nn.Module, image: Tensor) -> tuple[str, ...]:
    """The parts of ``model`` that get a meta block if nobody names them, in the order they run.

    Those that can have one are stages and blocks (modules with children) that run once and map one
    (B, C, H, W) to another. Of these the outermost are taken; while they are fewer than three, the
    one with most parameters is taken apart, if there are at least two in it. At most the first five
    are: the paper splits the encoder, and that is what runs first.

    Raises:
        ValueError: If there is none.
    """
    root = skeleton(model)
    runs: Counter[str] = Counter()  # in the order they begin
    good: set[str] = set()

    def watch(name: str, module: nn.Module) -> None:
        def before(module: nn.Module, inputs: Any) -> None:
            runs[name] += 1

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            if len(inputs) == 1 and _is_map(inputs[0]) and _is_map(output):
                good.add(name)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    for name, module in root.named_modules():
        if name and any(True for _ in module.children()):
            watch(name, module)
    with torch.no_grad():
        root(image)
    able = [name for name, count in runs.items() if count == 1 and name in good]

    def outermost(prefix: str) -> list[str]:
        inside = [name for name in able if name.startswith(prefix)]
        return [n for n in inside if not any(n.startswith(f"{other}.") for other in inside)]

    parts = outermost("")
    while len(parts) < FEWEST:
        divisible = {n: inside for n in parts if len(inside := outermost(f"{n}.")) >= 2}
        if not divisible:
            break
        largest = max(divisible, key=lambda n: _count(root.get_submodule(n)))
        at = parts.index(largest)
        parts[at : at + 1] = divisible[largest]
    if not parts:
        raise ValueError(
            "method 'ecotta' puts meta blocks behind stages that map (B, C, H, W) to (B, C, H, W), "
            f"and finds none in {type(model).__name__}. If it has single layers that do, name "
            "them: parts=(…)."
        )
    return tuple(parts[:MOST])


def check_apart(parts: Iterable[str]) -> None:
    """Raise a ValueError if a part is named twice, or lies inside another."""
    parts = list(parts)
    for i, name in enumerate(parts):
        if name in parts[:i]:
            raise ValueError(f"a part is named twice: {name!r}.")
        for other in parts:
            if name.startswith(f"{other}."):
                raise ValueError(f"part {name!r} lies inside part {other!r}: name one of them.")


def check_ran_once(runs: Mapping[str, int], parts: Iterable[str], model: nn.Module) -> None:
    """Raise a ValueError unless each part ran exactly once in the last forward."""
    for name in parts:
        if runs.get(name, 0) != 1:
            raise ValueError(
                f"module {name!r} ran {runs.get(name, 0)} times in one forward of "
                f"{type(model).__name__}; a part of EcoTTA runs once. Name others: parts=(…)."
            )


# --- the warm-up ------------------------------------------------------------------------------


class EcottaPreparation(Preparation):
    """The warm-up: the meta blocks learn the source task, the source network stays as it is."""

    config: EcottaConfig
    reads = ("parts", "kernel", "warmup_epochs", "warmup_lr", "momentum", "output", "seed")

    def __init__(self, model: nn.Module, config: EcottaConfig) -> None:
        super().__init__(model, config)
        self.epochs = config.warmup_epochs

    def begin(self, image: Tensor) -> None:
        """Choose the parts, and start a block for each from the source network's own features."""
        generator = torch.Generator().manual_seed(self.config.seed)
        blocks: dict[str, MetaBlock] = {}
        runs: Counter[str] = Counter()
        root = skeleton(self.model)

        def build(name: str) -> PartFunction:
            def see(x: Tensor, y: Tensor) -> None:
                blocks[name] = MetaBlock.begun(x, y, self.config.kernel, generator)

            return see

        parts = self.config.parts or choose_parts(self.model, image)
        for name in parts:
            put_behind(root, name, build(name), runs)
        with torch.no_grad():
            root(image)
        check_ran_once(runs, parts, self.model)
        self.network = MetaNetwork(self.model, blocks, self.config.output)
        self.weights = self.network.weights
        self.optimiser = Optimiser.sgd(self.weights, self.config.warmup_lr, self.config.momentum)

    def see(self, image: Tensor, label: Tensor | None) -> float:
        """One step on the cross entropy with the labels, or with the source network's own."""
        if label is None:
            with torch.no_grad():
                label = select_logits(self.model(image), self.config.output).argmax(1)
        logits, _ = self.network(image)
        loss = source_loss(logits, label)
        self.optimiser.step(gradients(loss, self.weights))
        return loss.item()

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and running statistics of the blocks, and SGD's velocities."""
        blocks = {
            f"{part}/{key}": tensor
            for part, block in self.network.blocks.items()
            for key, tensor in block.state_dict().items()
        }
        return {**blocks, **self.optimiser.tensors()}

    def result(self) -> dict[str, Tensor]:
        """The blocks."""
        return {
            f"{part}/{key}": tensor
            for part, block in self.network.blocks.items()
            for key, tensor in block.saved().items()
        }

    def settings(self) -> dict[str, Any]:
        """The parts, in the order they run, and the size of the convolutions."""
        return {"parts": list(self.network.blocks), "kernel": self.config.kernel}


# --- the stream -------------------------------------------------------------------------------


@register_adapter("ecotta")
class Ecotta(Adapter):
    """The source network with meta blocks, of which each batch moves the blocks."""

    Config = EcottaConfig
    config: EcottaConfig
    Preparation = EcottaPreparation
    state_settings: ClassVar[tuple[str, ...]] = ("parts", "kernel")

    def prepare(self) -> None:
        """Put the warmed-up blocks behind their parts."""
        blocks = {part: MetaBlock.loaded(tensors) for part, tensors in self.warmed_up().items()}
        for block in blocks.values():
            block.mix_statistics(share_of_batch(self.config.prior))
        self.network = MetaNetwork(self.model, blocks, self.config.output)
        self.weights = self.network.weights
        self.optimiser = Optimiser.sgd(self.weights, self.config.lr, self.config.momentum)

    def warmed_up(self) -> dict[str, dict[str, Tensor]]:
        """What the warm-up left, by part; a ValueError if it was of other parts."""
        blocks: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.prepared().items():
            part, _, key = name.rpartition("/")
            blocks.setdefault(part, {})[key] = tensor
        kernel = next(iter(blocks.values()))["conv"].shape[-1]
        wanted = self.config.parts
        if set(wanted) != set(blocks) or self.config.kernel != kernel:
            raise ValueError(
                f"the profile was prepared with parts={tuple(blocks)} and kernel={kernel}, and "
                f"parts={wanted} and kernel={self.config.kernel} are asked for. Leave them out, "
                "or prepare anew: bestta.prepare(model, images, method='ecotta', parts=…)."
            )
        return {part: blocks[part] for part in wanted}

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """Convolution, and weights and biases of both batch norms, of every block."""
        return self.weights

    def step(self, image: Tensor) -> tuple[Tensor, StepReport]:
        """Predict; descend along the entropy of what is reliable and the distance to the source."""
        if self.config.lr == 0:
            with torch.no_grad():
                return self.network(image)[0], StepReport(reason="the blocks are held still: lr=0")
        logits, distances = self.network(image)
        reliable = self.keep_reliable(lean_entropy(logits), classes=logits.shape[1])
        losses = {"distillation": torch.stack(list(distances.values())).sum()}
        total = self.config.lambda_distillation * losses["distillation"]
        if len(reliable):
            losses["entropy"] = reliable.mean()
            total = total + losses["entropy"]
        elif not self.config.lambda_distillation:
            return logits, StepReport(
                reason="no prediction is reliable, and there is no other loss"
            )
        values = {name: loss.item() for name, loss in {**losses, "total": total}.items()}
        self.optimiser.step(self.gradients(losses.get("entropy"), distances))
        return logits, StepReport(adapted=True, losses=values)

    def keep_reliable(self, entropies: Tensor, classes: int) -> Tensor:
        """Those of the entropies (B,) or (B, H, W) that lie below E0 = margin · ln C, as (n,)."""
        return entropies[entropies < self.config.margin * math.log(classes)]

    def gradients(
        self, reliable_entropy: Tensor | None, distances: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Of the entropy for every block, and of each λ-weighted distance for its own block."""
        found = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        for part, distance in distances.items():
            if self.config.lambda_distillation == 0:
                break
            own = self.network.weights_of(part)
            loss = self.config.lambda_distillation * distance
            # Only the block itself is walked back through, and the entropy still needs the graph.
            of_distance = torch.autograd.grad(loss, list(own.values()), retain_graph=True)
            found.update(zip(own, of_distance, strict=True))
        if reliable_entropy is not None:
            of_entropy = gradients(reliable_entropy, self.weights)
            found = {name: found[name] + of_entropy[name] for name in found}
        return found

    def tensors(self) -> dict[str, Tensor]:
        """The blocks' parameters, and SGD's velocities."""
        return {**self.weights, **self.optimiser.tensors()}


# --- inside -----------------------------------------------------------------------------------


def _norm_for(conv: Tensor) -> nn.BatchNorm2d:
    """A batch norm behind ``conv``, in training mode; it does not count its batches."""
    norm = nn.BatchNorm2d(conv.shape[0], device=conv.device, dtype=conv.dtype)
    norm.register_buffer("num_batches_tracked", None)
    return norm


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _is_map(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _describe(values: tuple[Any, ...]) -> str:
    """What a module takes or returns, in words."""
    words = [
        f"a tensor {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else f"a {type(value).__name__}"
        for value in values
    ]
    return " and ".join(words) or "nothing by position"
