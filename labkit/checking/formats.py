"""Writes findings for other tools: GitHub's annotations of a pull request, and SARIF 2.1.0 for code scanning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from labkit.checking.findings import Finding, Findings
from labkit.checking.rules import RULES, Rule
from labkit.checking.source import lines_of_cells
from labkit.files import Json
from labkit.text import plain
from labkit.version import __version__

LEVELS = {"hangs": "error", "wrong": "error", "slow": "warning", "outdated": "note"}
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def github(checked: Sequence[Findings]) -> str:
    """A workflow command for each finding, which GitHub shows at its line of the pull request."""
    placed = [(_path(findings), finding, line) for findings in checked for finding, line in _placed(findings)]
    return "\n".join(_annotation(path, finding, line) for path, finding, line in placed)


def _annotation(path: str, finding: Finding, line: int) -> str:
    level = LEVELS[finding.kind].replace("note", "notice")
    properties = {"file": path, "line": str(line), "title": f"{finding.number} {finding.rule}"}
    listed = ",".join(f"{name}={_encoded(value, ':,')}" for name, value in properties.items())
    return f"::{level} {listed}::{_encoded(_message(finding))}"


def _encoded(text: str, separators: str = "") -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    for character in separators:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def sarif(checked: Sequence[Findings], unreadable: Sequence[str]) -> dict[str, Json]:
    """A log of one run. `unreadable` has an error for each file that could not be checked."""
    named = {finding.rule for findings in checked for finding in findings}
    driver: dict[str, Json] = {
        "name": "labkit check",
        "version": __version__,
        "rules": [_descriptor(rule) for slug, rule in RULES.items() if slug in named],
    }
    notifications: list[Json] = [{"level": "error", "message": {"text": plain(error)}} for error in unreadable]
    invocation: dict[str, Json] = {"executionSuccessful": not unreadable, "toolExecutionNotifications": notifications}
    results: list[Json] = [
        _result(_uri(findings), finding, line) for findings in checked for finding, line in _placed(findings)
    ]
    run: dict[str, Json] = {"tool": {"driver": driver}, "invocations": [invocation], "results": results}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _descriptor(rule: Rule) -> dict[str, Json]:
    return {
        "id": rule.number,
        "name": rule.slug,
        "shortDescription": {"text": rule.slug.replace("-", " ")},
        "fullDescription": {"text": rule.why},
        "help": {"text": f"{rule.why}\n\n{rule.fix}\n\nNot caught: {rule.misses}"},
        "defaultConfiguration": {"level": LEVELS[rule.kind]},
    }


def _result(uri: str, finding: Finding, line: int) -> dict[str, Json]:
    region: dict[str, Json] = {"startLine": line}
    if finding.cell is None:
        region["snippet"] = {"text": finding.code}
    place: dict[str, Json] = {"artifactLocation": {"uri": uri}, "region": region}
    return {
        "ruleId": finding.number,
        "level": LEVELS[finding.kind],
        "message": {"text": _message(finding)},
        "locations": [{"physicalLocation": place}],
    }


def _message(finding: Finding) -> str:
    cell = f"cell {finding.cell}, line {finding.line}: " if finding.cell else ""
    return plain(f"{cell}{finding.message}. {finding.fix}")


def _path(findings: Findings) -> str:
    """Relative to the working directory, which in CI is the repository, unless the file is elsewhere."""
    path = (findings.path or Path(findings.name)).resolve()
    return (path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path).as_posix()


def _uri(findings: Findings) -> str:
    path = _path(findings)
    return Path(path).as_uri() if path.startswith("/") else quote(path)


def _placed(findings: Findings) -> list[tuple[Finding, int]]:
    """Each finding and its line in the file; in a notebook, it has its line in the cell."""
    lines: dict[tuple[int, int], int] = {}
    if findings.path and any(finding.cell for finding in findings):
        lines = lines_of_cells(findings.path.read_text(encoding="utf-8-sig"))
    return [(each, lines.get((each.cell, each.line), 1) if each.cell else each.line) for each in findings]
