"""The tuner measures which backend, and which choices of a kernel, are fastest here: offline or beside a program."""
