"""Files of pre-trained ImageNet weights, found or downloaded by torchvision's and timm's own means."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch

from snugfit._core.known import weights_source
from snugfit._models.external import _package
from snugfit.errors import ModelError, first_line

_HASH = re.compile(r"-([a-f0-9]{8,})\.")
"""The beginning of a file's SHA-256 in torchvision's names."""
_FILE = "model.safetensors"


def pretrained_file(model: str) -> Path:
    """The file of a model's ImageNet weights, downloaded if it is in neither cache.

    torchvision's is in the cache of ``torch.hub``; its hash is checked only when it is downloaded.
    timm's is in the cache of ``huggingface_hub``. Only plain tensors are read from either later.

    Raises:
        UsageError: no library has weights for this model, or the library is not installed.
        ModelError: it knows no such model or no weights, or the download failed.
    """
    package, name = weights_source(model)
    found = _from_timm if package == "timm" else _from_torchvision
    try:
        return found(name)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        reason = first_line(error).rstrip(".")
        raise ModelError(
            f"the ImageNet weights of {model} cannot be downloaded: {reason}. Download them elsewhere, and give "
            "the file: --weights FILE."
        ) from error


def _from_torchvision(name: str) -> Path:
    models: Any = _package("torchvision.models", "torchvision")
    url = str(models.get_model_weights(name).DEFAULT.url)
    path = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = _HASH.search(path.name)
        torch.hub.download_url_to_file(url, str(path), digest.group(1) if digest else None, progress=False)
    return path


def _from_timm(name: str) -> Path:
    timm: Any = _package("timm", "timm")
    config = timm.get_pretrained_cfg(name)
    repository = getattr(config, "hf_hub_id", None)
    if not repository:
        raise ModelError(f"timm has no weights of {name} on its hub; give a file: --weights FILE.")
    hub, logger = _package("huggingface_hub", "timm"), logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)  # what it warns of is in the error
    try:
        return Path(hub.hf_hub_download(repository, _FILE))
    finally:
        logger.setLevel(level)
