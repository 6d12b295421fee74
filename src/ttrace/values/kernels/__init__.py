"""This folder holds the C kernels: sums, generated values and sketches at the speed of memory."""
