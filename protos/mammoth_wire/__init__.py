"""The wire contract: protobuf messages, tensor codec, errors, and the one parameter resolver. No torch, no kopf."""
