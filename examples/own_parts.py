"""An own data set, network and loss: `own_parts.py train`, then `own_parts.py` (docs/how-to/python.md)."""

import sys

import torch.nn.functional as F  # noqa: N812
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

import ratp


class Digits:
    """Handwritten digits on paper of any grey."""

    def __init__(self, first, last, paper=0):
        self.pixels, self.labels = (part[first:last] for part in load_digits(return_X_y=True))
        self.paper = paper

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, place):
        grey = self.paper + self.pixels[place].reshape(8, 8) / 16 * (255 - self.paper)
        return Image.fromarray(grey.astype("uint8")).resize((16, 16)), self.labels[place]


def small_net():
    """Builds a network of two convolutions."""
    return nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten())


@ratp.loss_method
def sure_labels(network, images, labels, confidence, memory, *, threshold: float = 0.5):
    """Learns sure pseudo-labels, and stored images of earlier domains."""
    losses = F.cross_entropy(network(images).logits, labels, reduction="none")
    replay = F.cross_entropy(network(memory.images).logits, memory.labels)
    return {"sure": (losses * (confidence > threshold)).mean(), "replay": replay}


if __name__ == "__main__":
    if "train" in sys.argv:
        sizes = {"size": 16, "epochs": 5, "steps": 20, "batch": 32, "lr": 0.01}
        grey = {"grey": Digits(600, 1200, paper=90)}
        result = ratp.fit(Digits(0, 600), grey, method=sure_labels, backbone=small_net, **sizes)
        print(result)
        result.save("digits-run")
    model = ratp.load("digits-run", method=sure_labels, backbone=small_net)
    print("sum of logits:", model.predict(Digits(1200, 1797, paper=90)).double().sum().item())
