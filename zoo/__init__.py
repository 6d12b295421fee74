"""Silent bugs of distributed training that TTrace must find, and clean cases that it must not accuse."""
