"""The AR stage: a prompt in, conditioning rows out to the DiT, its pictures back. The public front door."""
