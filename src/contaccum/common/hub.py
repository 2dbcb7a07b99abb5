"""The hub, where there is no network: an answer at once instead of a minute of retries."""

from __future__ import annotations

import os
import socket

HOST = ("huggingface.co", 443)
SECONDS = 3.0


def go_offline_without_network() -> None:
    """Where the hub cannot be reached, its library looks only at what is stored here. To be called before that library is imported.

    Whoever has a proxy, a mirror or HF_HUB_OFFLINE set has decided for oneself.
    """
    own = ("HF_HUB_OFFLINE", "HF_ENDPOINT", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    if any(os.environ.get(name) for name in own):
        return
    try:
        socket.create_connection(HOST, timeout=SECONDS).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
