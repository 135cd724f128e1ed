"""Finds out what this machine has: GPUs, memory, network interfaces, and what torch and NVML say about them."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.hardware.container import cpu_limit as cpu_limit  # cores whose time this process's container may use
    from labkit.hardware.container import memory_limit as memory_limit  # bytes that this process's container may use
    from labkit.hardware.machine import ASKED_AGAIN as ASKED_AGAIN  # the middle sentence of a GpusUnknownError
    from labkit.hardware.machine import FP8 as FP8  # the first compute capability with fp8
    from labkit.hardware.machine import SYMMETRIC_MEMORY as SYMMETRIC_MEMORY  # the first one with symmetric memory
    from labkit.hardware.machine import WSL_DRIVER as WSL_DRIVER  # where WSL2 has NVIDIA's driver for Windows
    from labkit.hardware.machine import Gpu as Gpu  # a GPU's name, memory and compute capability
    from labkit.hardware.machine import GpusUnknownError as GpusUnknownError  # there is a driver, but no list of GPUs
    from labkit.hardware.machine import Hardware as Hardware  # a machine's GPUs, cores and memory
    from labkit.hardware.machine import driver_version as driver_version  # the version of NVIDIA's driver
    from labkit.hardware.machine import hardware as hardware  # this machine now, or as ranks will see it
    from labkit.hardware.machine import install_for as install_for  # the pip command for a torch that fits these GPUs
    from labkit.hardware.machine import may_have_gpus as may_have_gpus  # whether a driver may show GPUs
    from labkit.hardware.machine import platform_name as platform_name  # linux, wsl2, kaggle, colab, macos, windows
    from labkit.hardware.machine import torch_report as torch_report  # what torch says about the GPUs and its build
    from labkit.hardware.machine import without_kernels as without_kernels  # the GPUs on which a torch cannot compute
    from labkit.hardware.network import check_interface as check_interface  # checks that the interfaces for gloo exist
    from labkit.hardware.network import interface_of as interface_of  # the network interface that has this address
    from labkit.hardware.network import is_loopback as is_loopback  # whether no other host can reach this address
    from labkit.hardware.network import own_address_towards as own_address_towards  # the source address towards a host
    from labkit.hardware.network import resolved as resolved  # the address that a host name resolves to here
    from labkit.hardware.nvml import NvmlCard as NvmlCard  # what NVML says about a GPU
    from labkit.hardware.nvml import ask_nvml as ask_nvml  # what NVML says about the GPUs, their processes and links
    from labkit.hardware.nvml import cards_of as cards_of  # what NVML says about each GPU, asked by this process
    from labkit.hardware.nvml import handles_of as handles_of  # NVML's handles of all GPUs
else:
    __getattr__, __dir__ = face(__name__)
