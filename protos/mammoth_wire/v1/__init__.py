"""Package mammoth.v1: the .proto files and the modules generated from them by `make protos`."""
