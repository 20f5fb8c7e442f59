"""What the benchmarks share: the load server, measured processes, statistics, targets, tables and the plot."""
