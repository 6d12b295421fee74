"""Measurements of `ttrace doctor`: what works in this installation."""
