# How a script ends, and what Python does then.

# %% files_left_open
import gzip, json, os, tempfile, zipfile, csv, lzma, bz2, sqlite3
g = gzip.open("a.gz", "wt", newline=""); j = open("b.jsonl", "a"); t = tempfile.NamedTemporaryFile(dir=".", prefix="tmp-")
z = zipfile.ZipFile("d.zip", "w"); x = lzma.open("e.xz", "wt"); b = bz2.open("f.bz2", "wt"); c = csv.writer(open("g.csv", "w"))
g.write("line\n" * 9); j.write(json.dumps([1]) + "\n"); z.writestr("x", "y" * 100); x.write("x" * 50); b.write("b"); c.writerow([1, 2])
d = tempfile.TemporaryDirectory(dir="."); u = open("unbuffered", "wb", buffering=0); u.write(b"u"); binary = open("binary", "wb"); binary.write(b"1" * 5)
print(sorted(os.listdir("."))[:0])

# %% files_left_open_with_torch
import os, torch, numpy as np
log = open("log.csv", "w"); m = torch.nn.Linear(4, 1); o = torch.optim.SGD(m.parameters(), lr=.1)
mm = np.lib.format.open_memmap("c.npy", "w+", "f4", (10,))
for step in range(20):
    l = m(torch.ones(8, 4)).pow(2).mean(); o.zero_grad(); l.backward(); o.step()
    log.write(f"{step}\n"); mm[step % 10] = step
class Keeper:
    handle = open("in_class", "w")
    def __init__(self): self.own = open("in_cycle", "w"); self.me = self; self.own.write("cycle")
Keeper.handle.write("class"); keeper = Keeper()

# %% files_in_modules
import keeps, os
keeps.log("from main")
keeps.register(lambda: keeps.log("in atexit"))

# %% files_in_modules: keeps.py
import atexit
_file = open("kept", "w")
def log(text): _file.write(text + "\n")
register = atexit.register

# %% tee
import sys
class Tee:
    def __init__(self): self.terminal, self.log = sys.stdout, open("tee.txt", "w")
    def write(self, s): self.terminal.write(s); self.log.write(s)
    def flush(self): pass
sys.stdout = Tee()
for i in range(5): print(i)

# %% deleted_at_the_end
import atexit, weakref, sys
class Owner:
    def __init__(self, name): self.name = name
    def __del__(self): open("deleted", "a").write(self.name + " " + str(sys.is_finalizing() if sys else None) + "\n")
a = Owner("global"); b = Owner("cycle"); b.me = b; _c = Owner("private")
class Holder: held = Owner("class")
def function(x=Owner("default")): return x
weakref.finalize(a, lambda: open("finalized", "w").write("yes"))
atexit.register(lambda: open("order", "a").write("first registered\n"))
atexit.register(lambda: open("order", "a").write("second registered\n"))
import threading
threading._register_atexit(lambda: open("order", "a").write("threading\n"))

# %% atexit_raises
import atexit, sys
atexit.register(lambda: print("after"))
atexit.register(lambda: 1 / 0)
atexit.register(print, "before", file=sys.stderr)
print("main ended")

# %% atexit_exits
import atexit, os
atexit.register(os._exit, 5)
print("main ended")

# %% atexit_raises_system_exit
import atexit
def leave(): raise SystemExit(4)
atexit.register(leave)

# %% atexit_starts_thread
import atexit, threading
def late():
    try:
        thread = threading.Thread(target=print, args=("in thread",)); thread.start(); thread.join()
    except RuntimeError as error:
        print(error)
atexit.register(late)

# %% exit_code_3
import sys
sys.exit(3)

# %% exit_message
import sys
sys.exit("a message, ü")

# %% exit_in_function
import sys, argparse
parser = argparse.ArgumentParser(prog="train"); parser.add_argument("--lr", type=float, required=True)
parser.parse_args(["--lr", "x"])

# %% os_exit
import os
print("not flushed" if False else "printed")
open("lost", "w").write("x" * 10)
os._exit(7)

# %% raises
def inner(x):
    return 1 / x
def outer():
    inner(0)
outer()

# %% raises_chained
try:
    {}["key"]
except KeyError as error:
    raise RuntimeError("second") from error

# %% raises_deep
def f(n): return f(n + 1)
try:
    f(0)
except RecursionError as error:
    print(str(error)[:40])
f(0)

# %% raises_keyboard_interrupt
raise KeyboardInterrupt

# %% raises_in_thread
import threading
def work(): raise ValueError("in thread")
t = threading.Thread(target=work, name="worker"); t.start(); t.join(); print("main done")

# %% excepthook
import sys
def hook(kind, value, trace):
    print("hook", kind.__name__, value, trace.tb_frame.f_code.co_name, trace.tb_next, file=sys.stderr)
    open("hooked", "w").write("yes")
sys.excepthook = hook
raise ValueError("hooked")

# %% excepthook_raises
import sys
sys.excepthook = lambda *args: 1 / 0
raise ValueError("hooked")

# %% excepthook_exits
import sys
sys.excepthook = lambda *args: sys.exit(9)
raise ValueError("hooked")

# %% last_exception
import atexit, sys
def look(): print(sys.last_type.__name__, sys.last_value, sys.last_traceback.tb_lineno, sys.exc_info())
atexit.register(look)
raise ValueError("last")

# %% unraisablehook
import sys
sys.unraisablehook = lambda u: print("unraisable", u.exc_value, u.err_msg)
class D:
    def __del__(self): raise ValueError("x")
D()

# %% frames_do_not_leak
import gc, sys
class Big: ...
def f():
    big = Big()
    raise ValueError("x")
try:
    f()
except ValueError:
    pass
print(sum(isinstance(o, Big) for o in gc.get_objects()), sys.exc_info())

# %% stdout_replaced_and_unflushed
import io, sys
sys.stdout = io.TextIOWrapper(open("own_out", "wb"), encoding="utf-8")
print("kept in a buffer")

# %% stdout_detached
import sys
raw = sys.stdout.detach(); raw.write(b"raw\n"); raw.flush()

# %% stdout_descriptor
import os, sys
os.write(1, b"one\n"); print("two"); os.write(1, b"three\n"); os.write(2, b"err\n"); sys.stderr.write("partial")

# %% daemon_thread_at_end
import threading, time
def forever():
    while True: time.sleep(.01)
threading.Thread(target=forever, daemon=True).start(); print("main ended")

# %% thread_after_main
import threading, time
def later():
    time.sleep(.5); print("after main"); open("later", "w").write("done")
threading.Thread(target=later).start(); print("main ended")

# %% thread_after_failure
import threading, time
def later():
    time.sleep(.5); print("after failure")
threading.Thread(target=later).start()
raise ValueError("main failed")

# %% join_all_threads
import threading, time
t = threading.Thread(target=time.sleep, args=(.3,)); t.start()
for other in threading.enumerate():
    if other is not threading.main_thread(): other.join()
print("all joined")

# %% executor_at_end
from concurrent.futures import ThreadPoolExecutor
import time
pool = ThreadPoolExecutor(2); futures = [pool.submit(lambda i=i: (time.sleep(.1), open(f"f{i}", "w").write("x"))) for i in range(4)]
print("submitted")

# %% asyncio_program
import asyncio
async def main():
    await asyncio.sleep(.01); print("awaited"); asyncio.get_running_loop().call_soon(print, "soon")
asyncio.run(main())

# %% logging_program
import logging, logging.handlers
logging.basicConfig(filename="run.log", level="DEBUG", format="%(name)s %(levelname)s %(message)s %(threadName)s %(processName)s %(funcName)s %(lineno)d")
logging.getLogger("a.b").info("x %s", 1, stack_info=True)
handler = logging.handlers.MemoryHandler(100, target=logging.FileHandler("memory.log")); logging.getLogger("m").addHandler(handler); logging.getLogger("m").warning("kept")
metrics = logging.getLogger("metrics"); print(metrics.handlers, metrics.level, metrics.isEnabledFor(20), metrics.hasHandlers(), metrics.propagate)
metrics.info("step %(step)d", {"step": 1}); metrics.info({"step": 2})

# %% metrics_logger_with_torch
import logging, torch
logging.basicConfig(format="%(name)s %(message)s %(funcName)s %(lineno)d", level="WARNING")
metrics = logging.getLogger("metrics")
print(metrics.handlers, metrics.level, metrics.filters, metrics.disabled, metrics.isEnabledFor(20), logging.LoggerAdapter(metrics, {}).isEnabledFor(20))
metrics.info("step %(step)d f1 %(f1).3f", {"step": 1, "f1": .5}); metrics.warning("seen %(a)d", {"a": 2})
logging.getLogger("metrics").setLevel("INFO"); metrics.info({"step": 2})

# %% logging_configured_after_torch
import logging.config, torch
print("metrics" in logging.root.manager.loggerDict)
stream = {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}
logging.config.dictConfig({"version": 1, "handlers": {"out": stream}, "root": {"level": "INFO", "handlers": ["out"]}})  # disables the loggers that exist
metrics = logging.getLogger("metrics"); metrics.info("seen"); print(metrics.disabled)

# %% crash_reports_of_its_own
import faulthandler, os, sys, time
faulthandler.enable(open("crash.txt", "w"), all_threads=False); os.closerange(4, 2048); time.sleep(2.5)  # the file is 3
faulthandler.disable(); print(faulthandler.is_enabled())
faulthandler.enable(sys.stdout, all_threads=False); time.sleep(1.5); os.closerange(4, 2048); time.sleep(1.5)
os.abort()

# %% waits_for_a_blocked_signal
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM}); os.kill(os.getpid(), signal.SIGUSR1)
print("got", signal.sigwait({signal.SIGUSR1}))
signal.signal(signal.SIGTERM, lambda *a: print("handled", a[0])); os.kill(os.getpid(), signal.SIGTERM); open("saved", "w").write("all")
print("saved"); signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}); print("after")

# %% execs_another_script
# args one
import os, sys
os.execv(sys.executable, [sys.executable, "another.py", *sys.argv[1:]])
# %% execs_another_script: another.py
import sys; print("another", sys.argv, __file__)
# %% execs_a_module
import os, sys
os.execv(sys.executable, [sys.executable, "-manother", "a"])
# %% execs_a_module: another.py
import sys; print("another", sys.argv[1:])
# %% execs_code
import os, sys
os.execv(sys.executable, (sys.executable, "-uc", "import sys; print('code', sys.argv)", "b"))
# %% execs_itself_with_names
import os, pathlib, sys
print("again", os.environ.get("AGAIN"), os.execv.__name__, flush=True)
for wrong in (("x",), (sys.executable, "abc"), (sys.executable, [1])):
    try: os.execv(*wrong)
    except (TypeError, OSError) as e: print(type(e).__name__, e)
if "AGAIN" not in os.environ: os.execve(path=sys.executable, argv=[sys.executable, "-u", pathlib.Path(__file__), b"bytes"], env={**os.environ, "AGAIN": "1"})
print(sys.argv)

# %% warnings_program
import warnings
for _ in range(3): warnings.warn("once per place")
warnings.simplefilter("error")
warnings.warn("now an error")

# %% subprocess_left_behind
# leaves something running
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1); open('uploaded', 'w').write('x')"])
print("end")

# %% shared_memory_left
# leaves something running
from multiprocessing import shared_memory
s = shared_memory.SharedMemory(create=True, size=1000); s.buf[0] = 1
print(len(s.buf))

# %% manager_left
# leaves something running
from multiprocessing import Manager
m = Manager(); d = m.dict(); d["a"] = 1; print(dict(d))

# %% semaphores_left
# leaves something running
import multiprocessing
lock = multiprocessing.Lock(); queue = multiprocessing.Queue(); queue.put(1); print(queue.get())

# %% temporary_folder_by_atexit
import tempfile, atexit, shutil, os
folder = tempfile.mkdtemp(dir="."); atexit.register(shutil.rmtree, folder); open(os.path.join(folder, "x"), "w").write("x")

# %% closes_all_descriptors
import os, torch
m = torch.nn.Linear(4, 1); o = torch.optim.SGD(m.parameters(), lr=.1)
os.closerange(3, 2048)
mine = [os.open(f"mine{i}", os.O_CREAT | os.O_RDWR) for i in range(3)]; high = os.dup2(mine[0], 1023); os.dup2(mine[1], 1022); os.dup2(mine[2], 1021); os.dup2(mine[2], 1020)
import time
for step in range(30):
    l = m(torch.ones(8, 4)).pow(2).mean(); o.zero_grad(); l.backward(); o.step(); time.sleep(.05)
os.write(1023, b"mine"); os.write(1021, b"too")
print([open(f"mine{i}").read() for i in range(3)])

# %% kills_itself
import os, signal
os.kill(os.getpid(), signal.SIGKILL)

# %% terminates_itself
import os, signal
os.kill(os.getpid(), signal.SIGTERM)

# %% user_signal
import os, signal
os.kill(os.getpid(), signal.SIGUSR1)

# %% user_signal_handled
import os, signal
signal.signal(signal.SIGUSR1, lambda *a: print("handled", a[0])); os.kill(os.getpid(), signal.SIGUSR1); print("after")

# %% segfault
import ctypes
ctypes.string_at(0)

# %% own_faulthandler
import faulthandler, sys
faulthandler.enable()
import ctypes
ctypes.string_at(0)

# %% aborts
import os
os.abort()

# %% alarm
import signal, time
signal.alarm(1)
time.sleep(5)

# %% interrupted_and_saves
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT); time.sleep(5)
except KeyboardInterrupt:
    open("saved", "w").write("model"); print("saved")

# %% interrupted_unhandled
import os, signal, time
os.kill(os.getpid(), signal.SIGINT); time.sleep(5)

# %% broken_pipe
import os
r, w = os.pipe(); os.close(r)
os.write(w, b"x")

# %% reexec
import os, sys
if os.environ.get("REEXEC") != "1":
    os.environ["REEXEC"] = "1"
    os.execv(sys.executable, [sys.executable] + sys.argv)
print(sys.argv, __file__, sorted(name for name in os.environ if "LABKIT_GUEST" in name), sys.path[0])
raise ValueError("after exec")

# %% reexec_with_environment
import os, sys
if "AGAIN" not in os.environ:
    os.execve(sys.executable, [sys.executable, "-X", "dev", "-W", "ignore", __file__, "more"], {**os.environ, "AGAIN": "1"})
print(sys.argv, sys.flags.dev_mode, sorted(os.environ)[:0], os.environ["AGAIN"])

# %% exec_fails
import os
try:
    os.execv("/nothing/here", ["x"])
except FileNotFoundError as error:
    print(error, sorted(name for name in os.environ if "LABKIT_GUEST" in name))

# %% becomes_a_shell
import os
os.execlp("sh", "sh", "-c", "echo from the shell; env | grep -c LABKIT_GUEST; exit 6")

# %% forks
import os, sys, atexit
atexit.register(lambda: print("atexit of", "child" if os.environ.get("CHILD") else "parent", flush=True))
pid = os.fork()
if not pid:
    os.environ["CHILD"] = "1"; print("child", flush=True); sys.exit(3)
print("parent", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

# %% forked_child_raises
import os
pid = os.fork()
if not pid:
    raise ValueError("in the child")
print("parent", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

# %% pool_of_processes
import multiprocessing as mp
def square(x): return x * x
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with mp.get_context(method).Pool(2) as pool: print(method, pool.map(square, range(4)))

# %% spawned_children_see
import multiprocessing as mp, os, sys, threading
def look(q): q.put((sys.argv, [*sys.path], __name__, len(threading.enumerate()), sorted(n for n in os.environ if "GUEST" in n)))
if __name__ == "__main__":
    c = mp.get_context("spawn"); q = c.Queue(); p = c.Process(target=look, args=(q,)); p.start(); print(q.get()); p.join()

# %% settrace
import sys
events = []
def trace(frame, event, arg): events.append((event, frame.f_code.co_name)); return trace
sys.settrace(trace)
def f(): return 1
f()
sys.settrace(None)
print(events)

# %% profile_program
import cProfile, pstats, io
profile = cProfile.Profile(); profile.runcall(sorted, [3, 1, 2])
out = io.StringIO(); pstats.Stats(profile, stream=out).print_stats(); print("guest" in out.getvalue(), "labkit" in out.getvalue())

# %% time_limit
import signal
def expire(*_): raise TimeoutError("too long")
signal.signal(signal.SIGALRM, expire); signal.setitimer(signal.ITIMER_REAL, .2)
try:
    while True: pass
except TimeoutError as error: print(error)

# %% interactive_input
try:
    print(input("name? "))
except EOFError as error:
    print("EOF", error)
