# Variants of what is in ends.py: of these and of the composed programs (composed.py) CI runs a part.

# %% atexit_unregistered
import atexit
def never(): print("never")
atexit.register(never); atexit.unregister(never); print(atexit._ncallbacks() >= 0)

# %% exit_none
raise SystemExit

# %% exit_zero
exit(0)

# %% exit_256
import sys
sys.exit(256)

# %% exit_negative
raise SystemExit(-1)

# %% exit_float
raise SystemExit(2.5)

# %% exit_tuple
import sys
sys.exit((1, "x"))

# %% exit_true
raise SystemExit(True)

# %% exit_object
class Code:
    def __str__(self): raise ValueError("no text")
raise SystemExit(Code())

# %% quick_exit_zero
import os
os._exit(0)

# %% raises_during_handling
try:
    int("x")
except ValueError:
    undefined_name

# %% raises_group
raise ExceptionGroup("several", [ValueError(1), TypeError("two"), ExceptionGroup("inner", [KeyError("k")])])

# %% raises_with_notes
error = ValueError("noted"); error.add_note("a note"); raise error

# %% raises_unprintable
class Odd(Exception):
    def __str__(self): raise RuntimeError("no text")
raise Odd()

# %% raises_base_exception
class Leave(BaseException): ...
raise Leave("not an Exception")

# %% raises_keyboard_interrupt_subclass
class Mine(KeyboardInterrupt): ...
raise Mine("x")

# %% raises_generator_exit
raise GeneratorExit("x")

# %% raises_in_import
import raising

# %% raises_in_import: raising.py
raise OSError(2, "No such file", "name")

# %% raises_in_del
class D:
    def __del__(self): raise ValueError("in del")
d = D(); del d
keep = D()
print("done")

# %% stdout_closed
import sys
sys.stdout.close()

# %% stdout_none
import sys
sys.stdout = None; sys.stderr = None
print("nothing")

