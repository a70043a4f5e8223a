"""From a path or URL to the folder that it names."""

from pathlib import Path
from urllib.parse import urlsplit

from eagle3.errors import InputError, require_packages
from eagle3.storage.folder import LocalFolder, Storage

SCHEMES = ("s3", "gs", "az")


def open_folder(place: str | Path, *, setting: str) -> Storage:
    """Open the folder that the config key `setting` names; nothing is read or made yet."""
    scheme, separator, _ = str(place).partition("://")
    if not separator:
        return LocalFolder(place)
    parts = urlsplit(str(place))
    if "@" in parts.netloc or parts.query or parts.fragment:  # not shown: it may be a secret
        raise InputError(
            f"{setting} is a URL with more than a bucket and a folder; give {scheme}://BUCKET/FOLDER and put "
            f"credentials into the environment"
        )
    if scheme not in SCHEMES or not parts.netloc or not parts.path.strip("/"):
        raise InputError(
            f"{setting}={place} must be a local folder, or a URL of a bucket and a folder in it: "
            f"{', '.join(f'{each}://BUCKET/FOLDER' for each in SCHEMES)}"
        )
    require_packages("obstore", extra="objects", needed_by=f"{setting}={place}")
    from eagle3.storage.object_store import Bucket

    return Bucket(str(place), setting=setting)
