"""Other versions of torch and of Python than the ones that run this."""
