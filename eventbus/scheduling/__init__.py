"""Which delivery is handled next: pure structures, no I/O, time comes in as an argument."""
