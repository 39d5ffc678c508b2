"""What the scripts use, and a reader of an algorithm may skip: data, sampling, grading, and the run itself.

Imports go one way: utils <- run <- data <- sampling, and run <- grading. No module here imports a script.
"""
