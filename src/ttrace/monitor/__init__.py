"""Watch over a long run without a reference: what must be equal on several ranks is compared every few steps."""
