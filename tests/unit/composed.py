"""What labkit's own scripts can be composed of."""

from labkit.errors import ScriptError
from labkit.write import Script
from labkit.write.compose import library


def goes(strategy, *extras, task="bytes"):
    try:
        return Script.load(strategy, *extras, task=task)
    except ScriptError:
        return None


def together(strategy, first=()):
    """As many extras as go together, the first ones whatever comes."""
    chosen = list(first)
    for extra in library().extras:
        if extra not in chosen and goes(strategy, *chosen, extra):
            chosen.append(extra)
    return chosen


def combinations(strategy):
    """None, each extra alone, and all that go together; each extra is in one of the latter."""
    alone = [[extra] for extra in library().extras if goes(strategy, extra)]
    every = [together(strategy)]
    every += [together(strategy, extra) for extra in alone if extra[0] not in every[0]]
    return [[], *alone, *every]
