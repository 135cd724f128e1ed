"""The options of a Slurm job. They are defined only here, for `submit`, its signature, `labkit slurm` and the launch
file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from labkit.arguments import AtLeastOne, ZeroOrMore
from labkit.cluster.timelimit import NOTICE_SECONDS
from labkit.record import Nodes
from labkit.write import CallOptions, flag, whole_number

__all__ = ["JobOptions"]


@dataclass(frozen=True, kw_only=True)
class JobOptions(CallOptions):
    """How a script is run as a Slurm job, independent of the script; `submit` explains the options."""

    time: str | int = field(
        metadata=flag(
            "time limit: 02:00:00, 1-12:00:00, or minutes", expected="'02:00:00', '1-12:00:00' or a number of minutes"
        )
    )
    nodes: AtLeastOne = field(default=1, metadata=flag(type=int, metavar="N"))
    nproc_per_node: int | str = field(
        default="auto",
        metadata=flag(
            "ranks per node (default: one per GPU)", type=whole_number, metavar="N", expected="an integer or 'auto'"
        ),
    )
    partition: str | None = field(default=None, metadata=flag())
    account: str | None = field(default=None, metadata=flag())
    gpus_per_node: ZeroOrMore | None = field(
        default=None, metadata=flag("default: one per rank, if the nodes have them", type=int, metavar="N")
    )
    cpus_per_task: AtLeastOne | None = field(
        default=None, metadata=flag("cores of each node (default: two per rank)", type=int, metavar="N")
    )
    options: Sequence[str] = field(
        default=(),
        metadata=flag(
            "any other sbatch option, such as --option=--qos=high; may be repeated",
            flag="--option",
            action="append",
            default=[],
            metavar="OPTION",
            expected="a list such as ['--qos=high', '--mem=64G']",
        ),
    )
    setup: str = field(default="", metadata=flag("commands to run first, such as 'module load cuda'", metavar="SHELL"))
    saving_seconds: ZeroOrMore = field(
        default=NOTICE_SECONDS,
        metadata=flag("save this long before the time limit (default: %(default)s)", type=int, metavar="S"),
    )

    @property
    def counts(self) -> Nodes:
        """The nodes and their ranks, once `nproc_per_node` is a number."""
        return Nodes(self.nodes, int(self.nproc_per_node))
