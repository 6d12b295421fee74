"""C kernels: differences, generated values and sketches at the speed of memory."""
