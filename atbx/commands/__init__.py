"""The commands of `atbx`, a module each; `run(args)` does the work and prints results to stdout, and nothing else.

A module is imported when its command is called, so that `atbx --help` and usage errors do not wait for models.
"""
