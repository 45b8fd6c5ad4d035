"""Uploads of local files to the storage of Flyte 2's cluster, by addresses that its data proxy signs."""

from typing import Any

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from flyte._initialize import get_client, get_init_config
from flyte.syncify import syncify
from flyteidl2.dataproxy.dataproxy_service_pb2 import CreateUploadLocationRequest

from flytune.cluster import signed_uploads
from flytune.cluster.signed_uploads import SignedUpload
from flytune.errors import StorageError


class DataProxy:
    """The data proxy of the SDK's configured control plane."""

    verify = True

    def sign(self, root: str, name: str, md5: bytes | None) -> SignedUpload:
        """Sign an upload.

        Raises:
            AlreadyStoredError: the file is stored.
            StorageError: the control plane does not answer, or refuses.
        """
        config = get_init_config()
        where = {"project": config.project, "domain": config.domain, "org": config.org or ""}
        try:
            signed = _location(
                CreateUploadLocationRequest(**where, filename_root=root, filename=name, content_md5=md5)
            )
        except ConnectError as error:
            if error.code == Code.ALREADY_EXISTS:
                raise signed_uploads.AlreadyStoredError(name) from error
            at = f"project {config.project}, domain {config.domain}"
            problem = (
                f"{name} was not uploaded: the control plane answers {error.code.name}: {error.message} "
                f"({at})"
            )
            raise StorageError(f"{problem}; `flytune doctor --remote` says more") from error
        return SignedUpload(signed.native_url, signed.signed_url, dict(signed.headers))


@syncify
async def _location(request: Any) -> Any:
    return await get_client().dataproxy_service.create_upload_location(request)
