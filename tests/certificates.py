"""Certificates for one test: an authority, and what it has signed."""

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass
class Authority:
    """A certificate authority that writes its files into `folder`."""

    folder: Path
    ca: trustme.CA
    ca_file: str

    def pair(self, *names: str) -> str:
        """Return the path of a PEM file with a certificate for `names`, and its key."""
        path = self.folder / f"{'-'.join(names)}.pem"
        self.ca.issue_cert(*names).private_key_and_cert_chain_pem.write_to_path(path)
        return str(path)


def authority(folder: Path, name: str = "ca") -> Authority:
    """Return a new authority."""
    ca = trustme.CA()
    path = folder / f"{name}.pem"
    ca.cert_pem.write_to_path(path)
    return Authority(folder, ca, str(path))
