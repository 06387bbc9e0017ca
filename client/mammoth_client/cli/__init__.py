"""The `mammoth` command line: a module per group of commands, put together in mammoth_client.__main__."""
