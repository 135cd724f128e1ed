"""The five articles on distributed training that the course grew from. Their addresses are not known."""

from __future__ import annotations

NOTE, GUIDE, README, BLOG, SCRIPT = "note", "guide", "README", "blog", "script"
ARTICLES = {
    NOTE: "Distributed Training (DDP vs FSDP)",
    GUIDE: "A guide that begins with “Introduction: The Scaling Challenge”",
    README: "Distributed Training with PyTorch: DDP vs FSDP",
    BLOG: "Distributed Training Techniques: DDP, Pipeline Parallelism, and FSDP",
    SCRIPT: "FSDP vs. DDP",
}
