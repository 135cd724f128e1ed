"""What a rank measures: the loss, memory, and when it computes or waits for other ranks."""
