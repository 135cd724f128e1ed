"""Trains a little on one rank, which prints what no page and no terminal should be given as it is: first a bit of
everything, then a million lines at once, then lines of a megabyte."""

import sys
import time

import torch

EVERYTHING = (
    b"</pre><b id=injected>bold</b><script>alert(1)</script>"
    b"<img src=nowhere onerror=alert(2)><svg onload=alert(3)></svg>&lt;i&gt;\n"
    b"\x1b[2J\x1b[31mred\x1b[0m \x1b]8;;javascript:alert(4)\x07link\x1b]8;;\x07 \x00\n"
    b"10 percent\r50 percent\r90 percent\n"
    b"caf\xe9 \xff\xfe \xed\xa0\x80\n"
)
FLOOD_AT, LONG_AT = 60, 160
say = sys.stdout.buffer.write

weight = torch.nn.Parameter(torch.zeros(8))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(1, 100_000):
    if step < FLOOD_AT:
        say(EVERYTHING)
    elif step == FLOOD_AT:
        for thousand in range(1000):
            say(b"".join(b"line %d\n" % (1000 * thousand + i) for i in range(1000)))
    elif step >= LONG_AT and step % 5 == 0:
        say(b"x" * (1 << 20) + b"\n")
    say(b"step %d\n" % step)
    sys.stdout.flush()
    ((weight - 1) ** 2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
