"""What a supervisor watches while its run lives: progress, stalled ranks, other nodes."""
