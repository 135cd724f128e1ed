"""Only deterministic kernels, which are slower."""

# %% deterministic
import argparse
import os

import torch


class Deterministic(argparse.Action):
    """Takes effect while the options are parsed, before CUDA starts."""

    def __call__(self, *_):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def deterministic_arguments(parser):
    parser.add_argument("--deterministic", action=Deterministic, nargs=0, help="only deterministic kernels")
