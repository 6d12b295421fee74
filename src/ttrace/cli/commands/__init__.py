"""The commands, one file each: they read options, call what does the work, and report how it ended.

What imports torch is imported inside the functions (ttrace/cli/application.py says why).
"""
