"""This folder holds what a run leaves behind on disk: its format, its writer, its reader."""
