"""What the scripts use, and a reader of an algorithm may skip: data, sampling, grading, checkpoints, the run.

Imports go one way: utils <- run <- data <- sampling, and run <- checkpoint, grading. No module here imports
a script.
"""
