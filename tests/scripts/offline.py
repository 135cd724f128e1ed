"""`unshare -rn python offline.py COMMAND …`: run a command where there is no network but the machine's own."""

import fcntl
import os
import socket
import struct
import sys

SIOCSIFFLAGS, UP_AND_RUNNING = 0x8914, 0x1 | 0x40  # a new namespace's loopback is down, and gloo meets there

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", UP_AND_RUNNING))
os.execvp(sys.argv[1], sys.argv[1:])
