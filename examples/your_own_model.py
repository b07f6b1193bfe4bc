"""Wrap a model you already have: any nn.Module, from any library, as it is.

    python examples/your_own_model.py

The model below stands for yours: it returns a dict, as segmentation models do. With models from
libraries nothing changes but the names of the layers, which ``bestta.layers`` lists:

    torchvision   deeplabv3_resnet50()                      "backbone.layer1" … "backbone.layer4"
    transformers  SegformerForSemanticSegmentation(config)  "segformer.stages.0.blocks.1", …
    timm          create_model("resnet50")                  "layer1" … "layer4"
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import bestta


class YourModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def stage(inputs: int, outputs: int) -> nn.Sequential:
            convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
            return nn.Sequential(convolution, nn.GroupNorm(4, outputs), nn.GELU())

        self.encoder = nn.ModuleDict({"early": stage(3, 16), "late": stage(16, 32)})
        self.decoder = nn.Sequential(nn.Conv2d(32, 7, 1), nn.Upsample(scale_factor=4))

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        return {"out": self.decoder(self.encoder["late"](self.encoder["early"](image)))}


def main() -> None:
    torch.manual_seed(0)
    model = YourModel().eval()
    image = torch.rand(1, 3, 64, 64)

    print("BeIN can go behind:", ", ".join(bestta.layers(model, image)))

    # Once, before deployment: unlabelled images of the kind the model was trained on.
    source_images = [torch.rand(1, 3, 64, 64) for _ in range(20)]
    profile = bestta.SourceProfile.collect(model, source_images, layers=["encoder.early"])
    print(profile)

    # On board: three lines.
    adapter = bestta.adapt(model, profile)
    for _ in range(5):
        logits = adapter(0.3 * torch.rand(1, 3, 64, 64) + 0.6)

    print("logits:", tuple(logits.shape), "of the dict's 'out'; the last step:", adapter.last)

    # Whenever you like: your model again, exactly.
    with adapter.paused(), torch.no_grad():
        print("paused, it is your model:", torch.equal(adapter(image), model(image)["out"]))
    adapter.remove()


if __name__ == "__main__":
    main()
