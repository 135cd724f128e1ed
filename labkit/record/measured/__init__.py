"""What ranks measured, read back from their files: metrics over time, profiled steps, peaks of memory."""
