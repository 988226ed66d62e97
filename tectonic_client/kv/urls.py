"""Metadata URLs as messages and daemons show them."""

from __future__ import annotations

import os
from urllib.parse import unquote


def absolute_url(url: str) -> str:
    """`url` with the working directory in it, where it is a relative path. "" names nothing."""
    return url if "://" in url or not url else os.path.abspath(url)


def display_url(url: str) -> str:
    """`url` without its password, also where it is malformed."""
    scheme, separator, rest = url.partition("://")
    if scheme not in ("postgresql", "postgres") or not separator:
        return url
    # The last "@" ends the credentials: a password with an unescaped "/" or "?" stays hidden.
    credentials, at, place = rest.rpartition("@")
    user, colon, _ = credentials.partition(":")
    base, question, query = place.partition("?")
    settings = "&".join(map(_without_secret, query.split("&")))
    return f"{scheme}://{user}{':***' if colon else ''}{at}{base}{question}{settings}"


def _without_secret(setting: str) -> str:
    name, equals, _ = setting.partition("=")
    return f"{name}{equals}***" if "password" in unquote(name).lower() else setting
