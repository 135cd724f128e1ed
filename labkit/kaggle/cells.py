"""Writes the cells that bring labkit into a notebook: in their own text, or from a wheel that was uploaded."""

from __future__ import annotations

import io
import lzma
import re
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence

from labkit.kaggle.wheels import MADE

FROM_UPLOAD = """\
# labkit from its wheel: a dataset that was added to this notebook (Kaggle), or a file in the folder /content (Colab)
import sys; from glob import glob
found = [w for f in ("kaggle/input/*", "kaggle/input/*/*/*", "content") for w in glob(f"/{f}/labkit*.whl")]
wheels = {w.split("/")[-1].split("-")[0]: w for w in sorted(found, key=lambda w: w.split("/")[-1])}.values()
assert wheels, "there is no labkit-….whl: add its dataset with Add Input (Kaggle), or upload it into /content (Colab)"
!{sys.executable} -m pip install --quiet --no-index --no-deps {" ".join(wheels)}
import labkit.kaggle; print(labkit.kaggle.what_is_missing())
"""
"""The cell for an editor: short, for a wheel that has been uploaded."""

IN_TEXT = "in text, because a session may have no internet"  # identifies a cell that holds labkit
EMBEDDED = '''\
# labkit {version} in text, because a session may have no internet and Kaggle takes one file. `labkit kaggle` put it
# here. Where this version can already be imported, this installs nothing; no file is replaced.
def unpacked(text):
    import lzma
    from functools import reduce

    digits = {{chr(c): i for i, c in enumerate(c for c in range(33, 127) if c not in (34, 92))}}
    text = "".join(text.split())  # 16 digits are 13 bytes
    numbers = (reduce(lambda n, c: n * 92 + digits[c], text[i : i + 16], 0) for i in range(0, len(text), 16))
    return lzma.LZMADecompressor().decompress(b"".join(n.to_bytes(13, "big") for n in numbers))


def install(wheels, text):
    import importlib.util, os, re, shutil, subprocess, sys, tempfile
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    def is_here(wheel):
        package, its_version = wheel.split("-")[:2]
        importlib.invalidate_caches()
        spec = importlib.util.find_spec(package)  # a folder of that name has no origin
        try:
            return bool(spec and spec.origin) and version(package) == its_version
        except PackageNotFoundError:
            return False

    if all(map(is_here, wheels)):
        return
    *words, data = unpacked(text).split(b"\\0", 128)  # a byte of 128 or more is a word, unless a 1 precedes it
    data = re.sub(rb"\\x01[\\x01\\x80-\\xff]|[\\x80-\\xff]", lambda m: m[0][1:] or words[m[0][0] - 128], data)
    for wheel, size in wheels.items():
        file = Path(tempfile.mkdtemp(), wheel)
        file.write_bytes(data[:size])
        data = data[size:]
        if is_here(wheel):
            continue
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(file)]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode or not is_here(wheel):
            why = (done.stderr.strip().splitlines() or ["it is not on sys.path"])[-1]
            print(f"{{wheel.split('-')[0]}}: pip could not install it ({{why}}); it is used from {{file.parent}}")
            shutil.unpack_archive(file, file.parent, "zip")
            sys.path.insert(0, str(file.parent))
            path = [str(file.parent), os.environ.get("PYTHONPATH")]
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))  # for the ranks


def bring(text):
    import io, zipfile
    from pathlib import Path

    with zipfile.ZipFile(io.BytesIO(unpacked(text))) as archive:
        for entry in archive.infolist():
            file, content = Path(entry.filename), archive.read(entry)
            if file.exists() and file.read_bytes() != content:
                print(f"{{file}} is left as it is; the one that came with the notebook differs")
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            file.chmod(entry.external_attr >> 16)


install({sizes}, """
{wheels}
""")
{files}import labkit.kaggle

print(labkit.kaggle.what_is_missing())
del bring, install, unpacked
print("{mark}")
'''
BRING = '''\
bring("""
{files}
""")
'''
LINE = 8000  # characters: a page of the notebook shows every line of its cells
DIGITS = [chr(c) for c in range(33, 127) if c not in (34, 92)]  # neither " nor \\
WORD = re.compile(rb"[A-Za-z_]{2,}|\n? {4,}")


def embedded_cell(
    wheels: Sequence[tuple[str, bytes]], mark: str, files: Mapping[str, tuple[bytes, int]] | None = None
) -> str:
    """A cell that holds the wheels (name and content) and installs them, without a network, and unpacks `files`
    (content and mode, by relative path) into the folder in which it runs. It prints `mark` at its end."""
    return EMBEDDED.format(
        version=wheels[0][0].split("-")[1],
        sizes={name: len(content) for name, content in wheels},
        wheels=_in_text(_with_words(b"".join(content for _, content in wheels))),
        files=BRING.format(files=_in_text(_zipped(files))) if files else "",
        mark=mark,
    )


def _zipped(files: Mapping[str, tuple[bytes, int]]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, (content, mode) in files.items():
            entry = zipfile.ZipInfo(name, MADE)
            entry.external_attr = mode << 16
            archive.writestr(entry, content)
    return out.getvalue()


def _with_words(data: bytes) -> bytes:
    """128 words that end in a 0 byte each, then the data in which single bytes stand for them: it compresses to 4 %
    less."""
    found = Counter(WORD.findall(data))
    words = sorted(found, key=lambda word: -found[word] * (len(word) - 1))[:128]
    codes = {word: bytes([128 + number]) for number, word in enumerate(words)}
    escaped = re.sub(rb"[\x01\x80-\xff]", lambda match: b"\x01" + match[0], data)
    coded = WORD.sub(lambda match: codes.get(match[0], match[0]), escaped)
    return b"".join(word + b"\0" for word in [*words, *[b""] * (128 - len(words))]) + coded


def _in_text(data: bytes) -> str:
    """The data, compressed, in 16 digits for 13 bytes, all printable characters that JSON leaves alone: 1.5 % less than
    base 85."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "pb": 0}]
    packed = lzma.compress(data, filters=filters)
    numbers = (int.from_bytes(packed[i : i + 13].ljust(13, b"\0"), "big") for i in range(0, len(packed), 13))
    text = "".join(DIGITS[number // 92**place % 92] for number in numbers for place in range(15, -1, -1))
    return "\n".join(text[i : i + LINE] for i in range(0, len(text), LINE))
