"""The schemas of docs/reference/json.md, read from its tables, and what of a document disagrees with them."""

import json
import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "json.md"
TYPES = {"text": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict, "list": list}
SINGULAR = {"objects": "object", "integers": "integer", "numbers": "number"}


def schemas():
    """`{"labkit.run/1": {"cause.kind": "text", …}, …}`"""
    found, fields = {}, {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if head := re.match(r"\| `(labkit\.[\w.]+/\d+)` \| type \|", line):
            fields = found[head[1]] = {}
        elif not line.startswith("|"):
            fields = {}
        elif row := re.match(r"\| `([\w.*\[\]]+)` \| (.+?) \|", line):
            fields[row[1]] = row[2]
    return found


def problems(text, schema, known=None):
    """How a verb's output disagrees with the schema of its object, or of each object of its list."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    document = json.loads(text, parse_constant=refuse)
    each = document if isinstance(document, list) else [document]
    return [problem for one in each for problem in _of_object(one, schema, known or schemas())]


def _of_object(document, schema, known):
    if document.get("schema") != schema:
        return [f"schema is {document.get('schema')!r}, expected {schema!r}"]
    return [*_of_fields(document, "", known[schema], known)]


def _of_fields(value, at, fields, known):
    prefix = f"{at}." if at else ""
    own = {path.removeprefix(prefix).split(".")[0] for path in fields if path.startswith(prefix)}
    own = {name.removesuffix("[]") for name in own}
    if own == {"*"}:
        for each in value.values():
            yield from _of_fields(each, f"{prefix}*", fields, known)
        return
    if own and set(value) != own:
        yield f"{at or 'the document'} has {sorted(set(value) - own)} beside, and lacks {sorted(own - set(value))}"
    for name in own & set(value):
        yield from _of_value(value[name], f"{prefix}{name}", fields[f"{prefix}{name}"], fields, known)


def _of_value(value, at, kind, fields, known):
    base = kind.removesuffix(" or null")
    if value is None:
        if base == kind:
            yield f"{at} is null, expected {kind}"
    elif base in known:
        yield from (f"{at}: {problem}" for problem in _of_object(value, base, known))
    elif outer := re.fullmatch(r"(list|object) of (.+)", base):
        inner = SINGULAR.get(outer[2], outer[2])
        if not isinstance(value, TYPES[outer[1]]):
            yield f"{at} is {value!r}, expected {kind}"
        elif outer[1] == "list":
            for each in value:
                yield from _of_value(each, f"{at}[]", inner, fields, known)
        elif inner == "object":
            yield from _of_fields(value, at, fields, known)
        else:
            for each in value.values():
                yield from _of_value(each, f"{at}.*", f"{inner} or null", fields, known)
    elif not isinstance(value, TYPES[base]) or (isinstance(value, bool) and base != "boolean"):
        yield f"{at} is {value!r}, expected {kind}"
    elif isinstance(value, str) and re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", value):
        yield f"{at} has control characters: {value!r}"
    elif isinstance(value, dict):
        yield from _of_fields(value, at, fields, known)
