"""Small models under every parallelism, ranks that really run, and what traces and judges them."""
