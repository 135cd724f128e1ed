# Where a script is found, how it is read, and which modules it gets.

# %% own_folder_first
import helper, sys, os
print(helper.X, helper.__file__, __file__, sys.path[0], os.path.samefile(sys.path[0], os.path.dirname(__file__)))

# %% own_folder_first: helper.py
X = 2

# %% shadowed_secrets
import torch, torch.utils.data
from secrets import KEY
print("ok", KEY, torch.ones(2).numpy())

# %% shadowed_secrets: secrets.py
KEY = "mine"

# %% shadowed_html_and_others
import html, resource, sysconfig, faulthandler as f, concurrent_of_mine, torch
print(html.MINE, resource.MINE, sysconfig.MINE, f.MINE)
m = torch.nn.Linear(2, 1); o = torch.optim.SGD(m.parameters(), lr=.1)
for _ in range(3):
    l = m(torch.ones(4, 2)).sum(); o.zero_grad(); l.backward(); o.step()
print("trained")

# %% shadowed_html_and_others: html.py
MINE = "html"

# %% shadowed_html_and_others: resource.py
MINE = "resource"

# %% shadowed_html_and_others: sysconfig.py
MINE = "sysconfig"

# %% shadowed_html_and_others: faulthandler.py
MINE = "faulthandler"

# %% shadowed_html_and_others: concurrent_of_mine.py
import secrets, psutil

# %% shadowed_traceback_on_failure
import torch
def train(): raise ValueError("boom")
train()

# %% shadowed_traceback_on_failure: contextlib2.py
X = 1

# %% shadowed_json_on_failure
# A script that fails before it imports torch, beside modules with names of those that a report of it needs.
import json
print(json.dumps)
raise KeyError("no torch yet")

# %% shadowed_json_on_failure: json.py
dumps = "mine"

# %% shadowed_json_on_failure: itertools_of_mine.py
X = 1

# %% own_labkit
import labkit, torch
print(labkit.MINE)
m = torch.nn.Linear(2, 1); o = torch.optim.SGD(m.parameters(), lr=.1)
l = m(torch.ones(4, 2)).sum(); l.backward(); o.step()
print("trained")

# %% own_labkit: labkit.py
MINE = "the script's own"

# %% uses_labkit
import labkit
print(labkit.Script.load("ddp").name, labkit.__name__)
import torch
print(torch.ones(1).item())

# %% path_appended_before_import
import os, sys
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import mylib
print("ok", mylib.X)

# %% path_appended_before_import: lib/mylib.py
X = 5

# %% package_beside
from pkg.sub import thing
import pkg
print(thing(), pkg.__name__, pkg.__path__)

# %% package_beside: pkg/__init__.py
from . import sub

# %% package_beside: pkg/sub.py
def thing(): return __name__

# %% named_like_a_package
print("a script called numpy_of_mine is no package", __name__)
import named_like_a_package
print(named_like_a_package.__name__)

# %% imports_itself
import sys
if __name__ == "__main__":
    import imports_itself
    print(imports_itself.__name__, imports_itself.__spec__.name, sys.modules["__main__"] is not imports_itself)
else:
    print("imported", __name__)

# %% linked
# start a/b/link.py
import helper_mod, sys, os
print("ok", helper_mod.X, sys.argv, __file__, sys.path[0])

# %% linked: helper_mod.py
X = 2

# %% relative_path
# start ./sub/../relative_path.py
import sys
print(sys.argv, __file__, sys.path[0])
raise ValueError("where")

# %% without_suffix
# start program
print(__file__, __name__, __loader__.name)

# %% latin1
# bytes latin-1
# -*- coding: latin-1 -*-
print("café", len("café"))
raise ValueError("ü")

# %% byte_order_mark
# bytes utf-8-sig
print("ü", len("ü"))

# %% crlf
# bytes crlf
text = """a
b"""
print(repr(text), len(text))
raise ValueError("line 4")

# %% form_feed_and_tabs
if True:
	print("tab")
print("after a form feed")

# %% syntax_error_in_module
import broken_module

# %% syntax_error_in_module: broken_module.py
x = = 1

# %% future_annotations
from __future__ import annotations
def f(x: nothing) -> nowhere: ...
print(f.__annotations__)
y: int = 3
print(__annotations__)

# %% docstring_and_names
"""The docstring."""
x: int
print(__doc__, __annotations__, __file__, __cached__, __package__, __spec__, __loader__.get_source("__main__")[:20])

# %% star_import
from math import *
from os.path import *
print(join("a", "b"), floor(2.5))

# %% pickles_main
import pickle, os
class Thing:
    def __init__(self): self.x = 1
data = pickle.dumps(Thing())
print(pickle.loads(data).x, Thing.__module__, Thing.__qualname__, b"__main__" in data)

# %% module
# start -m mypkg.train
import sys
print("the file beside it is not started")

# %% module: mypkg/__init__.py
print("package", __name__)

# %% module: mypkg/train.py
import sys, os
from . import other
print(__name__, __package__, __spec__.name, __file__, sys.argv, sys.path[0], other.X, sorted(globals()))
print(sorted(sys.modules))
raise SystemExit("module ended")

# %% module: mypkg/other.py
X = 1

# %% module_main
# start -m withmain
print("not started")

# %% module_main: withmain/__init__.py
# %% module_main: withmain/__main__.py
import sys, inspect
print(__name__, __package__, __spec__.name, sys.argv, [frame.function for frame in inspect.stack()])

# %% module_missing
# start -m no_such_module_anywhere
print("not started")

# %% folder
# start app
print("not started")

# %% folder: app/__main__.py
import sys, inside
print(__name__, repr(__package__), __spec__ and __spec__.name, __file__, sys.argv, sys.path[0], inside.X)

# %% folder: app/inside.py
X = 7

# %% archive
# start archive.pyz
print("not started")

# %% archive: archive.pyz/__main__.py
import sys, zipped
print(__name__, repr(__package__), __file__, sys.argv, sys.path[0], zipped.X)

# %% archive: archive.pyz/zipped.py
X = 8

# %% edits_itself
import pathlib
pathlib.Path(__file__).write_text("raise SystemExit('edited')\n")
import linecache
print("still the old one")
