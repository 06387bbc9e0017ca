"""Do: a certificate authority for one cluster, its certificates and the kubeconfig files made of them, with openssl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from harness.processes import run

__all__ = ["Authority"]

DAYS = "30"
CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """Owns a folder with `ca.crt` and a key and certificate for each name that was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        run(["openssl", "req", "-x509", *CURVE, "-keyout", self.key("ca"), "-out", self.certificate("ca"),
             "-subj", "/CN=mammoth-test-ca", "-days", DAYS])  # fmt: skip

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def certificate(self, name: str) -> Path:
        return self.folder / f"{name}.crt"

    def issue(self, name: str, *, user: str, group: str, addresses: Sequence[str] = ("DNS:localhost",)) -> None:
        """Make `name`.key and `name`.crt: `user` of `group`, valid for `addresses` (`DNS:…`, `IP:…`)."""
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={','.join(addresses)}\n")
        run(["openssl", "req", *CURVE, "-keyout", self.key(name), "-out", request, "-subj", f"/O={group}/CN={user}"])
        run(["openssl", "x509", "-req", "-in", request, "-CA", self.certificate("ca"), "-CAkey", self.key("ca"),
             "-CAcreateserial", "-days", DAYS, "-out", self.certificate(name), "-extfile", extensions])  # fmt: skip

    def signing_pair(self, name: str) -> tuple[Path, Path]:
        """Make a bare private key and its public key, and return their paths."""
        private, public = self.key(name), self.folder / f"{name}.pub"
        run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", private])
        run(["openssl", "ec", "-in", private, "-pubout", "-out", public])
        return private, public

    def kubeconfig(self, path: Path, *, user: str, server: str) -> Path:
        """Write a kubeconfig (JSON is YAML) for the certificate `user` at `path` and return it."""
        credentials = {"client-certificate": str(self.certificate(user)), "client-key": str(self.key(user))}
        cluster = {"server": server, "certificate-authority": str(self.certificate("ca"))}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": credentials}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "current-context": "test",
        }
        path.write_text(json.dumps(content, indent=1))
        path.chmod(0o600)
        return path
