"""A run for other tools: CSV and Parquet files, TensorBoard, Trackio, Weights \& Biases.

Everything is read from the run folder, so no script needs a logger.
"""
