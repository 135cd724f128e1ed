"""The outermost frame of the supervisor and of the warm process, invisible like a guest's (launcher/warm/process.py).

    python -u RUN/outermost.pyc labkit.launcher.supervisor RUN OWNER

A fork that is to become another process raises Become. Its stack unwinds to here, so that a rank's script is at the
bottom of its stack, as in a process of its own, and the interpreter ends it as it ends any script.
"""

import importlib
import sys

from labkit.launcher.warm.process import Become


def main() -> None:
    del sys.argv[0]
    steps = [importlib.import_module(sys.argv[0]).main]
    while steps:
        step = steps.pop(0)
        try:
            step()
        except Become as fork:
            steps = [*fork.steps]


if __name__ == "__main__":
    main()
