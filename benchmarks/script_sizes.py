"""How long labkit's own scripts are: `python benchmarks/script_sizes.py`."""

from labkit.write import Script, script_files, script_names
from labkit.write.compose import library

PAIRS = (("single", "ddp"), ("ddp", "zero1"), ("ddp", "fsdp"), ("fsdp", "zero2"), ("ddp", "tensor_parallel"))

print("lines of each strategy's default script")
for name in script_names():
    print(f"{name:32}{len(str(Script.load(name)).splitlines()):6}")
print("\nchanged lines")
for before, after in PAIRS:
    print(f"{f'{before} to {after}':32}{Script.load(after).diff(before).changed:6}")
for extra, part in library().extras.items():
    strategy = next(iter(part.goes_with), "ddp")
    print(f"{f'{strategy} with {extra}':32}{Script.load(strategy, extra).diff(strategy).changed:6}")
print(f"\nscripts/ in all {sum(len(path.read_text().splitlines()) for path in script_files().values()):,} lines")
