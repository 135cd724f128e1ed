"""Install timm and torchvision beside the environment. A CPU build of torch cannot load torchvision's operators; the
models need none of them.

    python tests/vision_packages.py build/vision         (then PYTHONPATH=build/vision)
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

DECLARED = """
if not _has_ops():
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main(folder: str) -> None:
    minor = int(version("torch").split(".")[1])
    wanted = ["timm>=1.0.20", f"torchvision==0.{minor + 15}.*"]  # torch 2.13 goes with torchvision 0.28
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *wanted], check=True)
    extension = Path(folder, "torchvision", "extension.py")
    if DECLARED not in (text := extension.read_text()):
        extension.write_text(text + DECLARED)


if __name__ == "__main__":
    main(sys.argv[1])
