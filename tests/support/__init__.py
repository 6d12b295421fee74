"""What tests share: ranks that really run, and small models to run on them."""
