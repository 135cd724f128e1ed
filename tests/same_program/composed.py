"""Programs composed of fragments by a seeded choice: what each does alone, it must do together with the others, too."""

from __future__ import annotations

import random

from same_program.harness import Program

__all__ = ["composed"]

COUNT = 60

# Each is complete, prints or writes something that any run prints or writes, and can stand beside all others.
FRAGMENTS = {
    "file": "left{i} = open('left{i}', 'w'); left{i}.write('x' * {i})",
    "gzip": "import gzip\nzipped{i} = gzip.open('zipped{i}.gz', 'wt'); zipped{i}.write('line\\n')",
    "atexit": "import atexit\natexit.register(print, 'atexit {i}')",
    "atexit file": "import atexit\natexit.register(lambda: open('at{i}', 'w').write('end'))",
    "finalizer": "class Kept{i}:\n    def __del__(self): open('del{i}', 'w').write('deleted')\nkept{i} = Kept{i}()",
    "thread": "import threading\nthread{i} = threading.Thread(target=print, args=('thread {i}',)); thread{i}.start(); thread{i}.join()",
    "late thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.2), open('late{i}', 'w').write('x'))).start()",
    "daemon": "import threading, time\nthreading.Thread(target=lambda: time.sleep(60), daemon=True).start()",
    "environment": "import os\nos.environ['MINE{i}'] = '{i}'\nprint(sorted(n for n in os.environ if n.startswith(('MINE', 'LABKIT_GUEST'))))",
    "child": "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'import sys; print(len(sys.path), sys.argv)'], capture_output=True, text=True).stdout)",
    "fork": "import os\npid{i} = os.fork()\nif not pid{i}: os._exit({i})\nprint(os.waitstatus_to_exitcode(os.waitpid(pid{i}, 0)[1]))",
    "handler": "import signal\nsignal.signal(signal.SIGUSR1, lambda *a: print('signal {i}', flush=True)); signal.raise_signal(signal.SIGUSR1)",
    "modules": "import sys\nprint(sorted(n for n in sys.modules if n.startswith(('labkit', 'psutil', 'json')))[:0], sys.argv)",
    "warning": "import warnings\nwarnings.warn('warning {i}')",
    "logging": "import logging\nlogging.basicConfig(level='INFO'); logging.getLogger('metrics').info('value %(v)d', {{'v': {i}}})",
    "stack": "import traceback\nprint(len(traceback.extract_stack()))",
    "stderr": "import sys\nprint('to stderr {i}', file=sys.stderr)",
    "random": "import random\nrandom.seed({i}); print(random.random())",
    "exec": "exec('print({i} + 1)')",
    "chdir": "import os\nos.makedirs('down{i}', exist_ok=True); os.chdir('down{i}'); open('here', 'w').write('x'); os.chdir('..')",
    "descriptor": "import os\nfile{i} = os.open('descriptor{i}', os.O_CREAT | os.O_WRONLY); print(file{i}); os.close(file{i})",
    "pool": "from concurrent.futures import ThreadPoolExecutor\nprint([*ThreadPoolExecutor(2).map(abs, [-{i}, 2])])",
    "torch": "import torch\ntorch.manual_seed({i}); print(torch.rand(2).tolist(), torch.get_num_threads())",
    "training": (
        "import torch\nmodel{i} = torch.nn.Linear(3, 1); optimizer{i} = torch.optim.SGD(model{i}.parameters(), lr=.1)\n"
        "torch.manual_seed({i})\nfor _ in range({i} + 2):\n    loss{i} = model{i}(torch.ones(2, 3)).pow(2).mean()\n"
        "    optimizer{i}.zero_grad(); loss{i}.backward(); optimizer{i}.step()\nprint(loss{i}.grad_fn is not None)"
    ),
    "loader": "import torch\nprint([b.tolist() for b in torch.utils.data.DataLoader(torch.arange({i} + 3), batch_size=2)])",
    "recursion": "import sys\nsys.setrecursionlimit(2000 + {i}); print(sys.getrecursionlimit())",
    "excepthook": "import sys\nsys.excepthook = lambda kind, value, trace: print('hook {i}', value, file=sys.stderr)",
    "umask": "import os\nos.umask(0o02{i}); open('masked{i}', 'w').close(); print(oct(os.stat('masked{i}').st_mode))",
    "interrupt": "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    print('interrupted {i}')",
}
ENDS = {
    "falls off its end": "print('end')",
    "exits with a code": "import sys\nsys.exit({i} + 2)",
    "exits with a message": "raise SystemExit('message {i}')",
    "raises": "def deep():\n    raise ValueError('boom {i}')\ndeep()",
    "exits at once": "import os\nos._exit({i})",
    "is killed": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "is interrupted": "raise KeyboardInterrupt",
    "exits with nothing": "raise SystemExit",
}


def composed() -> list[Program]:
    return [_program(seed) for seed in range(COUNT)]


def _program(seed: int) -> Program:
    draw = random.Random(seed)
    names = draw.sample(sorted(FRAGMENTS), draw.randint(3, 7))
    # half of them end well
    end = "falls off its end" if draw.random() < 0.5 else draw.choice(sorted(ENDS))
    parts = [FRAGMENTS[name].format(i=number) for number, name in enumerate(names)] + [ENDS[end].format(i=len(names))]
    # torchrun ends the other rank when one fails: what that still does is a race
    ranks = "# ranks 2\n" if draw.random() < 0.25 and end in ("falls off its end", "exits with nothing") else ""
    return Program(f"composed_{seed}", f"{ranks}# {', '.join(names)}; {end}\n" + "\n".join(parts) + "\n")
