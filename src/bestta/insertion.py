"""Put a layer behind a named module of any model, for the length of one forward.

The layers hang on forward hooks that exist only while an adapter is running the model, and act
only in its thread: in between, and for everybody else, the model is the one its owner built.
Several adapters can therefore share one model, each with layers of its own.
"""

from __future__ import annotations

import copy
import difflib
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bestta.bein import channel_axis

FeatureFunction = Callable[[Tensor], Tensor | None]
"""Sees the features a module returned and gives the ones to go on with (None: the same)."""


def layers(
    model: nn.Module, image: Tensor | None = None, *, leaves: bool | None = None
) -> list[str]:
    """Names of the modules of ``model`` that BeIN can be put behind, in the model's own order.

    Args:
        model: Any model.
        image: An example input. With it the model is run once, and only modules that ran
            exactly once and returned features BeIN can work on are listed.
        leaves: Whether to list single operations (a convolution, an activation) beside stages
            and blocks. By default only where the model has no stages or blocks.

    Example:
        >>> layers(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))
        ['0', '1', '2']
    """
    never_run = nn.ModuleList | nn.ModuleDict
    modules = {n: m for n, m in model.named_modules() if n and not isinstance(m, never_run)}
    blocks = [n for n, m in modules.items() if any(True for _ in m.children())]
    names = list(modules) if leaves or (leaves is None and not blocks) else blocks
    if image is None:
        return names
    check_model(model)

    good: set[str] = set()

    def look(name: str) -> FeatureFunction:
        def see(features: Tensor) -> None:
            channel_axis(features)
            check_batch(features, image, name)
            good.add(name)

        return see

    with torch.no_grad(), inserted(model, {n: look(n) for n in names}, lenient=True) as runs:
        model(image)
    return [n for n in names if n in good and runs[n] == 1]


def find_module(model: nn.Module, name: str) -> nn.Module:
    """The module called ``name``, or a ValueError that says which ones would do."""
    try:
        if name:
            return model.get_submodule(name)
    except AttributeError:
        pass
    names = [n for n, _ in model.named_modules(remove_duplicate=False) if n]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    shallow = sorted(layers(model), key=lambda n: n.count("."))[:12]
    raise ValueError(
        f"no module named {name!r} in {type(model).__name__}."
        + (f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else "")
        + f"\nLayers that can host BeIN: {', '.join(shallow)}"
        + (", …" if len(layers(model)) > 12 else "")
        + " (bestta.layers(model) lists them all)."
    )


@contextmanager
def inserted(
    model: nn.Module, functions: Mapping[str, FeatureFunction], *, lenient: bool = False
) -> Iterator[Counter[str]]:
    """While the context lasts, the output of each named module goes through its function.

    Yields a counter of how often each module ran. With ``lenient``, outputs that hold no
    features BeIN can work on pass unseen; otherwise they are a ValueError.
    """
    runs: Counter[str] = Counter()
    thread = threading.get_ident()

    def hook(name: str, function: FeatureFunction) -> Callable[..., Any]:
        def replace(module: nn.Module, inputs: Any, output: Any) -> Any:
            if threading.get_ident() != thread:
                return None  # somebody else is running the model at the same time
            runs[name] += 1
            try:
                features = features_of(output, name, module)
                changed = function(features)
            except ValueError:
                if lenient:
                    return None
                raise
            if changed is None:
                return None
            return changed if isinstance(output, Tensor) else type(output)((changed, *output[1:]))

        return replace

    handles = []
    try:
        for name, function in functions.items():
            module = find_module(model, name)
            handles.append(module.register_forward_hook(hook(name, function)))
        yield runs
    finally:
        for handle in handles:
            handle.remove()


def features_of(output: Any, name: str, module: nn.Module) -> Tensor:
    """The features in what a module returned: a tensor, or the first of a tuple or list."""
    if isinstance(output, Tensor):
        return output
    plain = type(output) in (tuple, list)
    if plain and output and isinstance(output[0], Tensor):
        features: Tensor = output[0]
        return features
    seen = (
        f"{type(output).__name__} of {', '.join(type(o).__name__ for o in output) or 'nothing'}"
        if isinstance(output, tuple | list)
        else type(output).__name__
    )
    raise ValueError(
        f"module {name!r} ({type(module).__name__}) returned no tensor but a {seen}; "
        "BeIN needs one that returns a tensor, or a plain tuple or list that begins with one."
    )


def check_batch(features: Tensor, image: Tensor, name: str) -> None:
    """Raise a ValueError unless the features' first axis is that of the images."""
    if features.shape[0] != image.shape[0]:
        raise ValueError(
            f"module {name!r} returned features {tuple(features.shape)} for {image.shape[0]} "
            "images: their first axis is not the images', so that they cannot be normalised "
            "one by one. Choose another layer: bestta.layers(model, image) lists them."
        )


def check_ran_once(runs: Mapping[str, int], names: Iterable[str], model: nn.Module) -> None:
    """Raise a ValueError unless each of ``names`` ran exactly once in the last forward."""
    for name in names:
        if runs.get(name, 0) == 0:
            raise ValueError(
                f"module {name!r} never ran in the forward of {type(model).__name__}; choose "
                "one that does: bestta.layers(model, image) runs the model and lists them."
            )
        if runs[name] > 1:
            raise ValueError(
                f"module {name!r} ran {runs[name]} times in one forward of "
                f"{type(model).__name__}; BeIN needs a module that runs once, so that its "
                "features have one style."
            )


def check_model(model: Any) -> None:
    """Raise a ValueError unless this is a model that hooks reach, and all of it in eval mode."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None)
    if compiled or isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"this model is compiled ({type(model).__name__}): its layers cannot be reached. "
            "Give the model as it was before torch.compile or torch.jit."
        )
    every = list(_every_module(model))
    if any(
        p.is_inference() for module in every for p in module._parameters.values() if p is not None
    ):
        raise ValueError(
            f"the parameters of {type(model).__name__} were made under torch.inference_mode(), "
            "so that nothing can be learned through them. Build or load the model outside of it."
        )
    if any(module.training for module in every):
        training = [name or "the model itself" for name, m in model.named_modules() if m.training]
        raise ValueError(
            f"{type(model).__name__} is in training mode ({', '.join(training[:3])}"
            + (f" and {len(training) - 3} more modules" if len(training) > 3 else "")
            + "): its batch norms and dropouts would change with every image. "
            "Call model.eval() first."
        )


def _every_module(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model, without their names: done for every image, and many times as fast."""
    waiting, seen = [model], set[int]()
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            waiting.extend(child for child in module._modules.values() if child is not None)


def device_of(model: nn.Module) -> torch.device:
    """Where the model is: the device of its first parameter."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


_frozen: WeakKeyDictionary[nn.Module, tuple[int, list[nn.Parameter]]] = WeakKeyDictionary()
"""Per model: how many hold it frozen, and the parameters that were trainable before."""


def freeze(model: nn.Module) -> None:
    """Stop gradients to every parameter of ``model``, until as many calls of `unfreeze`."""
    holders, trainable = _frozen.get(model, (0, []))
    trainable = trainable + [p for p in model.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    _frozen[model] = holders + 1, trainable


def unfreeze(model: nn.Module) -> None:
    """Undo one `freeze`; the last one gives each parameter back its ``requires_grad``."""
    holders, trainable = _frozen.pop(model)
    if holders > 1:
        _frozen[model] = holders - 1, trainable
        return
    for parameter in trainable:
        parameter.requires_grad_(True)


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of the modules of ``model`` that shares all of its parameters and buffers."""
    shared: dict[int, object] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        if isinstance(vars(module).get("forward"), FunctionType | partial):
            raise ValueError(
                f"the forward of {name or type(model).__name__!r} was replaced by a function, "
                "which a copy of its module would not run through. Give the model as it was before."
            )
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            shared |= {id(hook): hook for hook in hooks.values()}
    try:
        return copy.deepcopy(model, shared)
    except (TypeError, RuntimeError, AttributeError, pickle.PickleError) as error:
        raise ValueError(
            f"the modules of {type(model).__name__} cannot be copied, which this method needs: "
            f"{error} Usually something that is no module, such as a lock, an open file or a "
            "tensor with a history, hangs on one of them."
        ) from error
