"""What a rank says that it is doing before its first step."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading, time, types
from labkit.worker.guest import doing_now

seen = []
stop = threading.Event()
main = threading.get_ident()

def watch():
    while not stop.is_set():
        if (now := doing_now(main, "theirs.py")) not in seen:
            seen.append(now)
        time.sleep(0.005)

threading.Thread(target=watch, daemon=True).start()
text = '''{text}'''
module = types.ModuleType("__main__")
module.__file__ = "theirs.py"
sys.modules["__main__"] = module
exec(compile(text, "theirs.py", "exec"), module.__dict__)
stop.set()
print(seen)
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import time\ntime.sleep(0.2)", "line 2"),
        ("import time\ndef build():\n    time.sleep(0.2)\nbuild()", "line 3, in build"),
        ("import wave, slow_module_of_theirs", "importing slow_module_of_theirs"),
        (
            "import time\ndef init_process_group():\n    time.sleep(0.2)\ninit_process_group()",
            "joining the process group",
        ),
        ("import time\ndef größe():\n    time.sleep(0.2)\ngröße()", "line 3, in größe"),
    ],
)
def test_the_outermost_call_that_says_something_is_named(tmp_path, text, expected):
    (tmp_path / "slow_module_of_theirs.py").write_text("import time\ntime.sleep(0.2)\n")
    (tmp_path / "run.py").write_text(SCRIPT.format(text=text.replace("\n", "\\n")))

    done = subprocess.run([sys.executable, "run.py"], cwd=tmp_path, capture_output=True, text=True, check=True)

    assert expected in done.stdout
