"""This folder runs reference, twins and candidate, and checks them."""
