"""What labkit's own scripts can be composed of."""

from labkit.errors import ScriptError
from labkit.write import Script
from labkit.write.compose import library


def goes(strategy, *extras, task="bytes"):
    try:
        return Script.load(strategy, *extras, task=task)
    except ScriptError:
        return None


def together(strategy, first=(), task="bytes"):
    """As many extras as go together, the first ones whatever comes."""
    chosen = list(first)
    for extra in library().extras:
        if extra not in chosen and goes(strategy, *chosen, extra, task=task):
            chosen.append(extra)
    return chosen


def combinations(strategy, task="bytes"):
    """None, each extra alone, and all that go together; each extra is in one of the latter."""
    alone = [[extra] for extra in library().extras if goes(strategy, extra, task=task)]
    every = [together(strategy, task=task)]
    every += [together(strategy, extra, task) for extra in alone if extra[0] not in every[0]]
    return [[], *alone, *every]
