"""State that a model and its optimizer keep from step to step: parameters, buffers, gradients, moments."""
