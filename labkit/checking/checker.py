"""Finds mistakes that hang, corrupt or slow distributed training by static analysis; the script is never run."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import overload

from labkit.checking.findings import KINDS, Finding, Findings
from labkit.checking.fsdp2 import converted
from labkit.checking.migration import Migration, compared
from labkit.checking.rules import RULES, Rule
from labkit.checking.source import Piece, Source, explain, read
from labkit.checking.syntax.nodes import Placed, keyword, position
from labkit.checking.syntax.settings import configurations
from labkit.checking.syntax.tree import Around, Tree, tree_of
from labkit.errors import ScriptError
from labkit.text import plain
from labkit.write import Script, is_library, script_names

IGNORED = re.compile(r"#\s*labkit:\s*ignore\[([\w\s,-]+)\]")
NOQA = re.compile(r"# noqa(?::\s?(?P<codes>([A-Z]+[0-9]+[,\s]*)+))?", re.IGNORECASE)  # as flake8 reads it
MOST_LINES = 5
MOST_BYTES = (
    200_000  # checking takes about 50 ms per 1,000 lines, of which 20 ms are parsing; it must not delay a launch
)
WARNED_OF = ("hangs", "wrong")
_told: set[int] = set()  # scripts of this session that have been warned of


@overload
def check(script: Script | str | os.PathLike[str]) -> Findings: ...
@overload
def check(script: Script | str | os.PathLike[str], after: Script | str | os.PathLike[str]) -> Migration: ...
def check(
    script: Script | str | os.PathLike[str], after: Script | str | os.PathLike[str] | None = None
) -> Findings | Migration:
    """Find mistakes in a script that hang, corrupt or slow down distributed training, each with line, reason and fix.

    `script` is a Script, the name of one of labkit's own ("ddp"), or the path of any training script, notebook (its
    code cells and its `%%writefile` cells), Markdown page (its Python blocks) or file of settings (accelerate's, or an
    `fsdp_config`). It is read and never run. With `after`, the two are compared as a migration, for example from DDP to
    FSDP: what changed, and what was forgotten; "fsdp1" and a file of its settings give those of FSDP2. A comment
    `# labkit: ignore[rule]` or `# noqa: LK008` silences a rule on its line.

    Raises ScriptError if one of them cannot be read or is not Python.
    """
    if after is not None:
        after_source = read(after)
        if script == "fsdp1" and after_source.is_settings:
            return _converted(after_source)
        before_source = read(script)
        before_trees, after_trees = _trees(before_source), _trees(after_source)
        findings = _all_findings(before_source, before_trees), _all_findings(after_source, after_trees)
        return compared(before_trees, after_trees, *findings)
    return findings_in(read(script))


def _converted(source: Source) -> Migration:
    """The settings of FSDP1 in a file as those of FSDP2."""
    for _, tree in _trees(source):
        for configuration in configurations(tree):
            return converted(configuration, source.name)
    raise ScriptError(f"{source.name} is {source.note}")


def findings_in(source: Source) -> Findings:
    """The mistakes in what was read. Raises ScriptError if it is not Python."""
    return _all_findings(source, _trees(source))


def _trees(source: Source) -> list[tuple[Piece, Tree]]:
    """All pieces, parsed. Fragments that are not Python are skipped; each fragment knows the others' wrappers."""
    trees = []
    for piece in source.pieces:
        try:
            tree = Tree(piece.text, says=source.says, is_fragment=piece.is_fragment, location=piece.location)
            tree.lines = piece.original.split("\n") if piece.original else tree.lines
            trees.append((piece, tree))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if not piece.is_fragment:
                raise ScriptError(explain(error, source, piece)) from None
    if sum(piece.is_fragment for piece, _ in trees) > 1:
        around = Around(
            frozenset(wrap.strategy for _, tree in trees for wrap in tree.wraps),
            frozenset(name for _, tree in trees for wrap in tree.wraps for name in wrap.names),
        )
        for _, tree in trees:
            tree.around = around
    return trees


def _all_findings(source: Source, trees: list[tuple[Piece, Tree]]) -> Findings:
    findings = [finding for piece, tree in trees for finding in _findings(source, piece, tree)]
    findings.sort(key=lambda finding: (finding.cell or 0, finding.line, finding.rule))
    note = source.note or ("it contains no Python" if not trees else "")
    return Findings(findings, source.name, source.path, note)


def _findings(source: Source, piece: Piece, tree: Tree) -> list[Finding]:
    findings: dict[tuple[str, int], Finding] = {}
    for rule in RULES.values():
        for node, message in () if rule.kind == "slow" and tree.is_a_test else rule.looks(tree):
            line = position(node)[0]
            if (rule.slug, line) in findings or _is_silenced(tree, node, rule):
                continue
            cell, at = piece.place(line)
            findings[rule.slug, line] = Finding(
                rule.slug,
                rule.kind,
                at,
                message,
                rule.why,
                rule.fix,
                source.name,
                cell,
                tree.lines[line - 1],
                rule.number,
            )
    return list(findings.values())


def _is_silenced(tree: Tree, node: Placed, rule: Rule) -> bool:
    """Whether a comment on the finding's first or last line silences the rule."""
    lines = {node.lineno, node.end_lineno or node.lineno}
    texts = [tree.lines[line - 1] for line in lines if line <= len(tree.lines)]
    slugs = [slug for text in texts for own in IGNORED.finditer(text) for slug in re.split(r"[\s,]+", own[1])]
    codes = [(noqa["codes"] or "LK").upper() for text in texts for noqa in NOQA.finditer(text)]
    return rule.slug in slugs or any(rule.number.startswith(tuple(re.findall(r"\w+", each))) for each in codes)


def warn(script: Script | str | os.PathLike[str]) -> None:
    """Warn on stderr about mistakes in the user's own script that may hang or corrupt training, once in a session for
    the same text."""
    try:
        lines = _lines(script)
        if not lines or _is_told(script):
            return
    except Exception:  # an error of the checker must not prevent training
        return
    print("\n".join(lines), file=sys.stderr, flush=True)


def _is_told(script: Script | str | os.PathLike[str]) -> bool:
    """Whether this script has been warned of in this session; from now on, it has."""
    source = read(script)
    known = hash((source.path.resolve() if source.path else source.name, source.pieces))
    is_told = known in _told
    _told.add(known)
    return is_told


def _lines(script: Script | str | os.PathLike[str]) -> list[str]:
    if _is_ours(script) or _size(script) > MOST_BYTES:
        return []
    by_rule: dict[str, list[Finding]] = {}
    for finding in sorted(check(script), key=lambda finding: KINDS.index(finding.kind)):
        if finding.kind in WARNED_OF:
            by_rule.setdefault(finding.rule, []).append(finding)
    own = _own_processes(script)
    if not by_rule:
        return own
    lines = [found[0].short + (f" (and {len(found) - 1} more)" if found[1:] else "") for found in by_rule.values()]
    more = f"{len(lines) - MOST_LINES} more; " if len(lines) > MOST_LINES else ""
    return [*own, *lines[:MOST_LINES], f"{more}{_call(script)} explains why and the fix"]


def _call(script: Script | str | os.PathLike[str]) -> str:
    """What the user may type for the whole of it, in a notebook or in a terminal."""
    if isinstance(script, Script):
        return "labkit.check(script)"
    from labkit.frontend import notebook_shell  # and psutil, which flake8 does not need

    path = plain(os.fspath(script))
    return f"labkit.check({path!r})" if notebook_shell() else f"labkit check {shlex.quote(path)}"


def _own_processes(script: Script | str | os.PathLike[str]) -> list[str]:
    """Mistakes that matter only because torchrun runs the script on every rank."""
    source = read(script)
    tree = tree_of(source.pieces[0].text)
    lines = [
        f"{source.name}:{call.lineno}: mp.spawn starts ranks, but torchrun has already started them: call the spawned "
        "function directly with int(os.environ['RANK'])"
        for call in tree.torch_calls("spawn", "start_processes")
    ]
    loaders = [
        call
        for call in tree.torch_calls("DataLoader")
        if tree.value(keyword(call, "multiprocessing_context")) == "spawn"
    ]
    loaders += [
        call for call in tree.torch_calls("set_start_method") if call.args and tree.value(call.args[0]) == "spawn"
    ]
    if loaders and not tree.has_main_guard:
        lines.append(
            f"{source.name}:{loaders[0].lineno}: every spawned worker process imports this script again and trains: "
            'put the main code under `if __name__ == "__main__":`'
        )
    return lines


def _is_ours(script: Script | str | os.PathLike[str]) -> bool:
    if isinstance(script, Script):
        return is_library(script)
    return isinstance(script, str) and script in script_names()


def _size(script: Script | str | os.PathLike[str]) -> int:
    return len(str(script)) if isinstance(script, Script) else Path(script).stat().st_size
