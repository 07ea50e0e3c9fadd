"""Transforms of one image, an array of bytes or a tensor."""

import numpy as np
import torch


class Compose:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self, image):
        for step in self.steps:
            image = step(image)
        return image


class ToTensor:
    def __call__(self, image):
        image = np.asarray(image)
        image = image[None] if image.ndim == 2 else image.transpose(2, 0, 1)
        return torch.from_numpy(image.astype(np.float32) / 255.0)


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = (torch.tensor(x).view(-1, 1, 1) for x in (mean, std))

    def __call__(self, image):
        return (image - self.mean) / self.std


class RandomHorizontalFlip:
    def __call__(self, image):
        return np.asarray(image)[:, ::-1] if torch.rand(()) < 0.5 else image


class RandomCrop:
    def __init__(self, size, padding=0):
        self.size, self.padding = size, padding

    def __call__(self, image):
        edges = [(self.padding,) * 2] * 2 + [(0, 0)] * (np.ndim(image) - 2)
        padded = np.pad(image, edges)
        top, left = torch.randint(0, 2 * self.padding + 1, (2,)).tolist()
        return padded[top : top + self.size, left : left + self.size]
