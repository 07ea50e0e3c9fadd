"""As much of torchvision as Flower's examples use."""
