"""A model, its data and its optimizer as somebody would bring them: nothing here knows of labkit."""

from __future__ import annotations


def make_resnet():
    import torch
    from torch import nn

    class Bottleneck(nn.Module):
        def __init__(self, before, width, stride=1):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
            self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
            self.downsample = None
            if stride != 1 or before != width:
                self.downsample = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

        def forward(self, x):
            out = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
            return torch.relu(out + (x if self.downsample is None else self.downsample(x)))

    class ResNet(nn.Module):
        def __init__(self, classes=3):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
            self.layer1 = nn.Sequential(Bottleneck(8, 8), Bottleneck(8, 8))
            self.layer2 = nn.Sequential(Bottleneck(8, 16, 2), Bottleneck(16, 16))
            self.fc = nn.Linear(16, classes)

        def forward(self, x):
            x = torch.relu(self.bn1(self.conv1(x)))
            return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))

    return ResNet()


def sgd(parameters, args):
    import torch

    return torch.optim.SGD(parameters, lr=args.lr, momentum=0.9, nesterov=True)
