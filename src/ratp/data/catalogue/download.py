"""Files from the web: resumed where they broke off, verified, and only then given their name."""

from __future__ import annotations

import gzip
import http.client
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.message import Message
from http import HTTPStatus
from http.client import HTTPMessage
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from ratp import __version__
from ratp._core.files import sha256_of
from ratp.data.catalogue.partial import DownloadError, Partial, TooLongError, Version, partial_of

__all__ = ["DownloadError", "Patience", "download", "open_web"]

Progress = Callable[[int, int | None], None]
Opener = Callable[[urllib.request.Request, float], http.client.HTTPResponse]

_CHUNK = 1 << 18
_WORTH_ANOTHER_TRY = frozenset({408, 425, 429, 500, 502, 503, 504})
_PACKED_MORE = 1 << 20  # bytes by which packing may make a file longer
_UNPACKED_RATIO = 100  # what a file of unknown size may grow by when it is unpacked
_PAGE_TYPES = frozenset({"text/html", "application/xhtml+xml"})
_PAGE = re.compile(rb"\s*<(!doctype|html|head|body|\?xml|!--)", re.IGNORECASE)


class _MirrorError(Exception):
    """This address does not give the file."""


class _WrongBytesError(_MirrorError):
    """The address gives something else."""


class _BrokenOffError(Exception):
    """The transfer ended early; what has arrived stays, and another attempt may finish it."""


@dataclass(frozen=True)
class Patience:
    """How long to keep trying.

    Attributes:
        attempts: Requests an address gets before the next one is tried.
        backoff: Seconds before the second attempt; doubled before every further one.
        timeout: Seconds without a byte after which a connection counts as dead.
    """

    attempts: int = 4
    backoff: float = 1.0
    timeout: float = 30.0


PATIENCE = Patience()


class _WebRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        if not _is_web(newurl):
            fp.close()
            raise _MirrorError(f"it redirects to {newurl}, which is not a web address")
        if _is_safe(req.full_url) and not _is_safe(newurl):
            fp.close()
            raise _MirrorError(f"it redirects to {newurl}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def open_web(request: urllib.request.Request, timeout: float) -> http.client.HTTPResponse:
    """Sends the request, through the user's proxy if there is one; knows http and https and nothing else."""
    director = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        _WebRedirects,
    ):
        director.add_handler(handler())
    response: http.client.HTTPResponse = director.open(request, timeout=timeout)
    return response


def download(
    urls: Sequence[str],
    target: Path,
    sha256: str | None,
    progress: Progress | None = None,
    opener: Opener = open_web,
    *,
    size: int | None = None,
    manual: str = "",
    patience: Patience = PATIENCE,
) -> Path:
    """Downloads a file, unless it is there already.

    Args:
        urls: Addresses of the same file, tried in this order; https, or http if ``sha256`` is given.
        target: Where the file goes; its folder is made if need be.
        sha256: What the file must hash to, or None if that is not known.
        progress: Called with the number of bytes so far and, where known, of all.
        opener: Sends a request with a timeout.
        size: Number of bytes the file must have, if known.
        manual: How to get the file by hand, for the message if no address gives it.
        patience: How long to try.

    Returns:
        ``target``.
    """
    for url in urls:
        if not _is_web(url):
            raise DownloadError(f"cannot download {url!r}: only http and https addresses are allowed.")
        if sha256 is None and not _is_safe(url):
            raise DownloadError(f"cannot download {url!r}: over http, a file needs a known sha256. Use https.")
    if target.is_file() and (sha256 is None or sha256_of(target) == sha256):
        return target
    problems = []
    with partial_of(target) as partial:
        transfer = _Transfer(partial, target.name, sha256, size, progress, opener, patience)
        for url in urls:
            try:
                transfer.fetch(url)
            except _MirrorError as problem:
                problems.append(f"  {url}: {problem}.")
            else:
                partial.finish(target)
                return target
    advice = manual or "Check the connection and try again later: what has arrived is kept, and the rest is added."
    raise DownloadError("\n".join([f"could not download {target.name}:", *problems, advice]))


@dataclass(frozen=True)
class _Transfer:
    partial: Partial
    name: str
    sha256: str | None
    size: int | None
    progress: Progress | None
    opener: Opener
    patience: Patience

    def fetch(self, url: str) -> None:
        """Makes the partial file whole and verifies it."""
        resumed = self.partial.length > 0
        try:
            self._complete(url)
            self._verify()
        except _WrongBytesError:
            if not resumed:
                raise
            self._complete(url)  # what had arrived before may be to blame: once more, all from this address
            self._verify()

    def _complete(self, url: str) -> None:
        problem = ""
        for attempt in range(self.patience.attempts):
            if attempt:
                time.sleep(self.patience.backoff * 2 ** (attempt - 1))
            try:
                self._request(url)
            except _BrokenOffError as error:
                problem = str(error)
            else:
                return
        raise _MirrorError(f"{problem}, in the last of {self.patience.attempts} attempts")

    def _request(self, url: str) -> None:
        arrived, known = self.partial.length, self.partial.version
        if known is not None and arrived == known.total:
            return None
        headers = {"User-Agent": f"ratp/{__version__}", "Accept-Encoding": "identity"}
        validator = known.validator if known is not None and known.url == url else None
        if arrived and (validator or self.sha256):
            headers["Range"] = f"bytes={arrived}-"
            if validator:
                headers["If-Range"] = validator
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - only web addresses come this far
        try:
            response = self.opener(request, self.patience.timeout)
        except urllib.error.HTTPError as error:
            with error:
                return self._refused(error)
        except urllib.error.URLError as error:
            final = isinstance(error.reason, socket.gaierror | ssl.SSLCertVerificationError)
            raise (_MirrorError if final else _BrokenOffError)(f"no connection ({error.reason})") from error
        except (OSError, http.client.HTTPException) as error:
            raise _BrokenOffError(f"no answer ({error or type(error).__name__})") from error
        with response:
            return self._receive(url, response)

    def _refused(self, error: urllib.error.HTTPError) -> None:
        if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            match = re.fullmatch(r"bytes \*/(\d+)", error.headers.get("Content-Range", ""))
            if match and int(match[1]) == self.partial.length:
                return
            self.partial.clear()
            raise _BrokenOffError("what had arrived was not part of the file") from error
        problem = f"HTTP {error.code} {error.reason}"
        raise (_BrokenOffError if error.code in _WORTH_ANOTHER_TRY else _MirrorError)(problem) from error

    def _receive(self, url: str, response: http.client.HTTPResponse) -> None:
        if response.status == HTTPStatus.PARTIAL_CONTENT:
            version = self._continued(url, response.headers)
        else:
            version = self._begun(url, response.headers)
        try:
            while chunk := self._read(response):
                if not self.partial.length:
                    self._refuse_page(response.headers, chunk)
                self.partial.append(chunk)
                self._refuse_more()
                if self.progress:
                    self.progress(self.partial.length, version.total)
        finally:
            self.partial.flush()
        arrived = self.partial.length
        if version.total is not None and arrived != version.total:
            if arrived > version.total:
                self.partial.clear()
            raise _BrokenOffError(f"it broke off after {arrived:,} of {version.total:,} bytes")

    def _begun(self, url: str, headers: Message) -> Version:
        length = headers.get("Content-Length", "")
        version = Version.of(url, headers, int(length) if length.isdigit() else None)
        whole = version.encoding is None and headers.get_content_type() not in _PAGE_TYPES
        if whole and self.size is not None and version.total not in (None, self.size):
            raise _MirrorError(f"it offers {version.total:,} bytes, expected {self.size:,}")
        self.partial.begin(version)
        return version

    def _continued(self, url: str, headers: Message) -> Version:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", ""))
        known = self.partial.version
        if match and known is not None and int(match[1]) == self.partial.length:
            now = Version.of(url, headers, int(match[2]) if match[2].isdigit() else None)
            if not known.contradicts(now):
                return known
        self.partial.clear()
        raise _BrokenOffError("the file changed while it was downloaded")

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, http.client.IncompleteRead):
                self.partial.append(error.partial)
            raise _BrokenOffError(f"it broke off after {self.partial.length:,} bytes ({error})") from error

    def _refuse_page(self, headers: Message, chunk: bytes) -> None:
        kind = headers.get_content_type()
        is_text = kind in _PAGE_TYPES and b"\0" not in chunk
        if is_text or _PAGE.match(chunk.removeprefix(b"\xef\xbb\xbf")):
            self.partial.clear()
            beginning = (chunk.lstrip()[:40].decode("latin-1").splitlines() or [""])[0]
            raise _MirrorError(f"a web page came instead of the file ({kind}, it begins with {beginning!r})")

    def _refuse_more(self) -> None:
        """Stops a transfer that has become longer than the file can be, packed or not."""
        if self.size is not None and self.partial.length > self.size + _PACKED_MORE:
            self.partial.clear()
            raise _MirrorError(f"it sends more than the {self.size:,} bytes expected")

    def _verify(self) -> None:
        """Checks size and hash of what has arrived, and discards it if they are wrong."""
        try:
            if self._is_packed():
                self.partial.unpack(_UNPACKED_RATIO * self.partial.length if self.size is None else self.size)
            found, length = self.partial.sha256() if self.sha256 else None, self.partial.length
        except TooLongError as error:
            self.partial.clear()
            raise _WrongBytesError(str(error)) from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            self.partial.clear()
            raise _WrongBytesError(f"its gzip encoding is damaged ({error})") from error
        if found != self.sha256:
            problem = f"expected a file with sha256 {self.sha256}, found {found}"
        elif self.size not in (None, length):
            problem = f"expected {self.size:,} bytes, found {length:,}"
        elif not length:
            problem = "the file is empty"
        else:
            return
        self.partial.clear()
        raise _WrongBytesError(problem)

    def _is_packed(self) -> bool:
        """Whether the server compressed the file for the transfer; a file may also be a gzip file in itself."""
        version = self.partial.version
        if version is None or version.encoding not in {"gzip", "x-gzip"}:
            return False
        if self.sha256:
            return self.partial.sha256() != self.sha256
        return not self.name.endswith((".gz", ".tgz"))


def _is_safe(url: str) -> bool:
    """Whether nobody on the way can change what the address gives: https, or this machine."""
    parts = urlsplit(url)
    return parts.scheme == "https" or parts.hostname in {"localhost", "127.0.0.1", "::1"}


def _is_web(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in {"http", "https"} and bool(parts.hostname)
