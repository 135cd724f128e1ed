"""The script run on tensors without data: what stands in for DDP, FSDP, kernels and CUDA's autocast."""
