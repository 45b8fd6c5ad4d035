"""The upload by which the doctor checks the storage of a control plane."""

import hashlib
from base64 import b64encode
from typing import Any

from flytune.doctor.finding import Finding, fail, ok

NAME = "flytune-doctor.txt"
CONTENT = b"flytune doctor\n"
MD5 = hashlib.md5(CONTENT, usedforsecurity=False).digest()
_SECONDS = 10.0


def upload(place: Any, configured_by: str, verify: Any = True) -> Finding:
    """Upload CONTENT in the same way as code: to an address that the control plane has signed.

    Args:
        place: the answer of the control plane, with signed_url, native_url and headers.
        configured_by: whose configuration names the storage.
        verify: the certificates, as requests takes them.
    """
    import requests

    azure = {"x-ms-blob-type": "BlockBlob"} if place.native_url.startswith("abfs") else {}
    headers = {
        "Content-Length": str(len(CONTENT)),
        "Content-MD5": b64encode(MD5).decode(),
        **azure,
        **dict(place.headers),
    }
    try:
        done = requests.put(place.signed_url, data=CONTENT, headers=headers, verify=verify, timeout=_SECONDS)
    except requests.RequestException as error:  # its text contains the signed address, which is secret
        problem = f"{place.native_url}: upload failed: {type(error).__name__}"
        return fail("storage", problem, "check that this machine can reach the storage")
    if done.status_code not in (200, 201):
        do = (
            f"check the storage configuration of {configured_by}, and that this machine can reach the storage"
        )
        return fail("storage", f"{place.native_url}: upload refused with {done.status_code}", do)
    return ok("storage", f"accepts uploads: {place.native_url}")
