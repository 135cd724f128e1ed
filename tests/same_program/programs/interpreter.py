# What a script sees of its interpreter before its first line, and of its process. Programs of test_same_program.py.

# %% first_line
import sys; print(sorted(sys.modules)); print(sys.path); print(sys.argv, sys.flags, sys.warnoptions, sys._xoptions)
print({name: value for name, value in globals().items() if name not in ("sys", "__loader__", "__builtins__")})
print(type(__loader__).__name__, __loader__.name, __loader__.path, [*vars(__loader__)], __builtins__.__name__)
print([*globals()], __name__, sys.modules["__main__"].__dict__ is globals(), sys.modules["__main__"])
print(sys.executable, sys.prefix, sys.exec_prefix, sys.base_prefix, sys.dont_write_bytecode, sys.pycache_prefix)
print(sys.getrecursionlimit(), sys.getswitchinterval(), sys.getdefaultencoding(), sys.getfilesystemencoding())
print([type(hook).__name__ for hook in sys.path_hooks], [*map(str, sys.path_importer_cache.values())][:0])

# %% first_line_two_ranks
# ranks 2
# args 50 --lr 1e-3 --log x -- -v --nnodes 3
import sys; print(sorted(sys.modules)); print(sys.path); print(sys.argv)
import os, threading
print(os.environ["RANK"], os.environ["LOCAL_RANK"], threading.enumerate(), threading.active_count())

# %% environment
# env MINE=ü=1 EMPTY= OMP_SCHEDULE=static PYTHONHASHSEED=7
import os
for name in sorted(os.environ):
    print(name, repr(os.environ[name]))
print(hash("a"), os.environb[b"MINE"], os.getenv("NOTHING"))

# %% environment_of_children
import os, subprocess, sys
code = "import os, sys; print(sorted(os.environ.items())); print(sys.path, sorted(sys.modules), sys.flags)"
print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
print(subprocess.run("env | sort", shell=True, capture_output=True, text=True).stdout)

# %% threads_of_four
# ranks 4
import os
print(os.environ.get("OMP_NUM_THREADS"), os.environ["WORLD_SIZE"])

# %% threads_chosen
# env OMP_NUM_THREADS=3
# ranks 2
import os, torch
print(os.environ["OMP_NUM_THREADS"], torch.get_num_threads(), torch.get_num_interop_threads())

# %% threads_by_default
import os, torch
print(os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads(), torch.get_num_interop_threads())
import threading
seen = []
thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads())); thread.start(); thread.join()
print(seen)

# %% process
import os, resource, signal, stat, sys, time
old = os.umask(0o022); os.umask(old)
print(oct(old), os.getcwd(), os.nice(0), sorted(os.sched_getaffinity(0)), os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid())
print({name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")})
print({number: str(signal.getsignal(number)) for number in range(1, 65) if number not in (32, 33)})
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getitimer(signal.ITIMER_REAL), signal.set_wakeup_fd(-1))
status = dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines())
print({name: status[name] for name in ("Uid", "Gid", "Groups", "Umask", "SigBlk", "SigIgn", "SigPnd", "NoNewPrivs", "Seccomp")})
print(hex(int(status["SigCgt"], 16) & ~sum(1 << number - 1 for number in (4, 6, 7, 8, 11, 32, 33, 62))))  # faulthandler's, and libc's own
print(open("/proc/self/oom_score_adj").read(), open("/proc/self/coredump_filter").read(), os.getpriority(os.PRIO_PROCESS, 0))

# %% descriptors
import os, stat
for number in sorted(map(int, os.listdir("/proc/self/fd"))):
    try:
        kind = stat.filemode(os.fstat(number).st_mode)[0]
    except OSError:
        continue  # the one of the list
    if number < 1000:
        print(number, kind, os.get_inheritable(number), os.isatty(number))
print(os.open("new", os.O_CREAT | os.O_WRONLY), open("another", "w").fileno(), os.pipe())

# %% streams
import sys, io
for stream in (sys.stdin, sys.stdout, sys.stderr):
    print(type(stream), stream.name, stream.mode, stream.encoding, stream.errors, stream.line_buffering, stream.write_through if stream is not sys.stdin else "", stream.isatty(), stream.fileno())
print(sys.stdout is sys.__stdout__, sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.unraisablehook is sys.__unraisablehook__)
print(repr(sys.stdin.read()))

# %% hooks
import sys, threading, gc, warnings, logging, builtins, tracemalloc
print(sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile(), threading.excepthook is threading.__excepthook__)
print(gc.isenabled(), gc.get_threshold(), gc.callbacks, gc.get_freeze_count(), gc.get_debug(), tracemalloc.is_tracing())
print([str(f[:1] + f[2:]) for f in warnings.filters], logging.root.handlers, logging.root.level, sorted(logging.root.manager.loggerDict))
print(sorted(vars(builtins)), sys.get_asyncgen_hooks(), sys.breakpointhook is sys.__breakpointhook__)

# %% stack
import inspect, sys, traceback, warnings
print(sys._getframe().f_back, [frame.function for frame in inspect.stack()], inspect.currentframe().f_code.co_filename)
def inner():
    print([frame.function for frame in inspect.stack()])
    traceback.print_stack()
    warnings.warn("deep", stacklevel=9)
    warnings.warn("here", stacklevel=2)
    print(traceback.format_stack())
inner()
try:
    sys._getframe(1)
except ValueError as error:
    print(error)
print([*map(len, map(inspect.getouterframes, sys._current_frames().values()))][:0])

# %% stack_in_thread
import sys, threading, traceback
thread = threading.Thread(target=traceback.print_stack, name="mine"); thread.start(); thread.join()
print([(t.name, t.daemon, t.ident == threading.get_ident()) for t in threading.enumerate()], threading.main_thread().name)

# %% random_state
# ranks 2
import random, uuid, tempfile
random.seed(3); print(random.random(), random.getrandbits(64))
import numpy, torch
numpy.random.seed(3); torch.manual_seed(3)
print(numpy.random.rand(2), torch.rand(2), torch.initial_seed(), torch.random.default_generator.get_state().sum())
print(len({random.Random().random(), random.Random().random()}), tempfile.gettempdir())

# %% random_differs
# ranks 2
import os, random, time, numpy, torch
rank, files = os.environ["RANK"], ["drawn-0", "drawn-1"]
with open(f"new-{rank}", "w") as file: print(random.random(), numpy.random.rand(), torch.rand(1).item(), file=file)
os.rename(f"new-{rank}", f"drawn-{rank}")
while not all(map(os.path.exists, files)): time.sleep(.01)
print(len({value for name in files for value in open(name).read().split()}), torch.initial_seed() != 67280421310721)
open(f"seen-{rank}", "w").close()
while not all(map(os.path.exists, ["seen-0", "seen-1"])): time.sleep(.01)
open(f"drawn-{rank}", "w").close()

# %% start_methods
import multiprocessing, torch.multiprocessing, sys
print(multiprocessing.get_start_method(allow_none=True), multiprocessing.get_all_start_methods(), torch.multiprocessing.get_sharing_strategy())
print(multiprocessing.current_process(), multiprocessing.parent_process(), multiprocessing.active_children())
multiprocessing.set_start_method("spawn"); print(multiprocessing.get_start_method())

# %% locale_and_time
# env LANG=C.UTF-8 TZ=Asia/Kolkata
import locale, time, os
print(locale.getlocale(), locale.setlocale(locale.LC_ALL), time.tzname, time.strftime("%z"), os.get_terminal_size.__name__)

# %% python_options
# env PYTHONDONTWRITEBYTECODE=1 PYTHONWARNINGS=error::UserWarning PYTHONOPTIMIZE=1 PYTHONUTF8=1
import sys, warnings
assert False, "removed by PYTHONOPTIMIZE"
print(sys.flags, sys.warnoptions, __debug__)
warnings.warn("raised")

# %% safe_path
# env PYTHONSAFEPATH=1
import sys
print(sys.path, sys.flags.safe_path)
import beside_safe_path

# %% safe_path: beside_safe_path.py
print("must not be found")

# %% python_path
# env PYTHONPATH=lib:more
import sys, os
print(sys.path, os.environ["PYTHONPATH"])
import in_lib
print(in_lib.WHERE)

# %% python_path: lib/in_lib.py
WHERE = __file__

# %% no_torch_at_all
import json, sys
print(json.dumps({"a": 1}), "torch" in sys.modules, "labkit" in sys.modules, sorted(name for name in sys.modules if "labkit" in name))

# %% modules_with_torch
import torch, sys
print(torch.__spec__.name, type(torch.__spec__.loader).__name__, vars(torch.__loader__).keys(), torch.__file__, [type(f).__name__ for f in sys.meta_path if not isinstance(f, type) and type(f).__name__ != "Finder"])
print("torch.distributed" in sys.modules, "torch._dynamo" in sys.modules, "psutil" in sys.modules, "resource" in sys.modules, "secrets" in sys.modules, "html" in sys.modules)

# %% torch_twice
import importlib, importlib.util, sys
print(importlib.util.find_spec("torch").name, importlib.util.find_spec("torch.nn").name, importlib.util.find_spec("nothing_of_this_name"))
import torch.nn.functional as F
from torch import nn, optim
print(F.relu.__name__, nn.Linear(2, 1).weight.shape, importlib.import_module("torch") is sys.modules["torch"])

# %% torch_is_missing
import sys
sys.modules["torch"] = None
try:
    import torch
except ImportError as error:
    print(error)
del sys.modules["torch"]
import torch
print(torch.ones(2).sum().item())

# %% torch_fails_first
import sys, os
sys.path.insert(0, os.path.abspath("broken"))
try:
    import torch
except RuntimeError as error:
    print(error)
sys.path.pop(0)
import torch
print(torch.ones(2).sum().item())

# %% torch_fails_first: broken/torch/__init__.py
raise RuntimeError("a broken torch")

# %% settings_before_torch
import os
os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_LOGS": "+dynamo", "PYTORCH_JIT": "0", "TORCHDYNAMO_DISABLE": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
import torch, torch.distributed as dist, logging
class M(torch.nn.Module):
    def forward(self, x): return x * 2
print(torch.get_num_threads(), type(torch.jit.script(M())).__name__, logging.getLogger("torch._dynamo").level, dist.get_debug_level())
import torch._dynamo
print(torch._dynamo.config.disable)

# %% settings_between
import torch, os
os.environ["TORCHDYNAMO_DISABLE"] = "1"
import torch._dynamo
print(torch._dynamo.config.disable)

# %% affinity_before_torch
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import torch
print(torch.get_num_threads(), os.cpu_count(), len(os.sched_getaffinity(0)))

# %% mutated_before_torch
import sys, os
os.chdir("elsewhere"); sys.setrecursionlimit(3000); sys.path.append(os.getcwd())
import torch, in_elsewhere
print(os.getcwd(), sys.getrecursionlimit(), in_elsewhere.X, sys.path[-1])

# %% mutated_before_torch: elsewhere/in_elsewhere.py
X = 3

# %% torchs_loggers_after_a_configuration
import torch, logging.config
logging.config.dictConfig({"version": 1, "root": {"level": "INFO"}})
print([logging.getLogger(n).disabled for n in ("torch._dynamo.convert_frame", "torch.distributed.elastic.multiprocessing.api")])

# %% a_submodule_that_was_not_imported
import torch
print(torch.distributed.fsdp.fully_shard.__name__)

# %% names_of_threads
import torch, concurrent.futures as cf, threading
with cf.ThreadPoolExecutor(1) as p: print(p.submit(lambda: threading.current_thread().name).result())

# %% site_customisation
# env PYTHONPATH=site
import builtins, torch
print(builtins.SITE)
# %% site_customisation: site/sitecustomize.py
import builtins, os
builtins.SITE = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
