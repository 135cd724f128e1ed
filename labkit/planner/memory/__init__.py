"""What a rank holds at the peak of a step, by formulas: no torch, no process."""
