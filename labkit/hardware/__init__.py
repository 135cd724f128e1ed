"""TODO"""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.hardware.container import memory_limit as memory_limit  # The smallest limit of the groups that this
    from labkit.hardware.machine import ASKED_AGAIN as ASKED_AGAIN  # in the message of a GpusUnknownError, between the
    from labkit.hardware.machine import FP8 as FP8  # this, and that each GPU can read every other's memory:
    from labkit.hardware.machine import SYMMETRIC_MEMORY as SYMMETRIC_MEMORY  # this, and that each GPU can read every
    from labkit.hardware.machine import Gpu as Gpu  # `memory` in bytes
    from labkit.hardware.machine import GpusUnknownError as GpusUnknownError  # An NVIDIA driver is installed, but
    from labkit.hardware.machine import Hardware as Hardware  # `cores` this process may use
    from labkit.hardware.machine import driver_version as driver_version  # The NVIDIA driver's version, without asking
    from labkit.hardware.machine import hardware as hardware  # This machine now, or as ranks with
    from labkit.hardware.machine import has_driver as has_driver
    from labkit.hardware.machine import install_for as install_for  # The pip command for the newest torch that
    from labkit.hardware.machine import may_have_gpus as may_have_gpus  # Whether an NVIDIA driver is installed and
    from labkit.hardware.machine import platform_name as platform_name
    from labkit.hardware.machine import torch_report as torch_report  # What torch reports about the visible GPUs
    from labkit.hardware.machine import without_kernels as without_kernels  # The GPUs on which a torch with these
    from labkit.hardware.network import interface_of as interface_of  # The name of the interface that has this address
    from labkit.hardware.network import is_loopback as is_loopback
    from labkit.hardware.network import own_address_towards as own_address_towards  # The source address of packets to
    from labkit.hardware.network import resolved as resolved  # The address that a host name or address resolves to on
    from labkit.hardware.nvml import ask_nvml as ask_nvml  # the driver, the GPUs and their links, by another process
    from labkit.hardware.nvml import cards_of as cards_of  # what NVML says about each GPU, asked by this process
    from labkit.hardware.nvml import handles_of as handles_of  # NVML's handles of all GPUs
else:
    __getattr__, __dir__ = face(__name__)
