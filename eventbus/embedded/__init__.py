"""The buses that need no server: memory:// for one process, sqlite:///file for all processes of a machine."""
