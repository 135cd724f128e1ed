"""Runs a script on tensors without data, with stand-ins for DDP, FSDP, kernels and CUDA's autocast."""
