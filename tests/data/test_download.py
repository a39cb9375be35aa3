"""Downloads against a real server on the loopback that does what servers do: break off, lie, redirect, change."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import resource
import socket
import urllib.request
from email.message import Message
from types import SimpleNamespace
from urllib.error import HTTPError

import pytest

from loopback import BODY, Answer, running
from ratp.data.catalogue import CATALOGUE
from ratp.data.catalogue import download as downloads
from ratp.data.catalogue.download import DownloadError, Patience, download
from ratp.data.catalogue.partial import Version, partial_of
from ratp.errors import RatpError

OTHER = bytes(reversed(range(256))) * 3000
HASH = hashlib.sha256(BODY).hexdigest()
QUICK = Patience(attempts=4, backoff=0, timeout=10)
PAGE = b"\n<!DOCTYPE html>\n<html><body>Please sign in</body></html>"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def server():
    with running() as server:
        yield server


@pytest.fixture
def target(tmp_path):
    return tmp_path / "sub" / "data.bin"


def left(target):
    return sorted(path.name for path in target.parent.iterdir())


def ranges(server):
    return [headers.get("Range") for _, headers in server.log]


def test_whole_file(server, target):
    seen = []
    url = server.serve("/a", Answer())
    path = download([url], target, HASH, lambda done, total: seen.append((done, total)), patience=QUICK)
    assert path == target
    assert target.read_bytes() == BODY
    assert left(target) == ["data.bin"]
    assert seen[-1] == (len(BODY), len(BODY))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert server.log[0][1]["Accept-Encoding"] == "identity"
    assert server.log[0][1]["User-Agent"].startswith("ratp/")


@pytest.mark.parametrize("sha256", [HASH, None])
def test_present_file_is_not_downloaded(server, target, sha256):
    target.parent.mkdir()
    target.write_bytes(BODY)
    download([server.serve("/a", Answer())], target, sha256, patience=QUICK)
    assert not server.log


def test_present_file_with_wrong_hash_is_replaced(server, target):
    target.parent.mkdir()
    target.write_bytes(BODY[:100])
    download([server.serve("/a", Answer())], target, HASH, patience=QUICK)
    assert target.read_bytes() == BODY


def test_present_file_with_wrong_hash_stays_until_replaced(server, target):
    target.parent.mkdir()
    target.write_bytes(b"old")
    with pytest.raises(DownloadError):
        download([server.serve("/a", Answer(status=404))], target, HASH, patience=QUICK)
    assert target.read_bytes() == b"old"


@pytest.mark.parametrize("sha256", [HASH, None])
def test_resumes_within_a_call(server, target, sha256):
    url = server.serve("/a", Answer(stop_after=1000), Answer(stop_after=2000), Answer())
    download([url], target, sha256, patience=QUICK)
    assert target.read_bytes() == BODY
    assert ranges(server) == [None, "bytes=1000-", "bytes=3000-"]
    assert server.log[1][1]["If-Range"] == '"one"'


@pytest.mark.faults(8, "the download continues where it stopped, and ratp uses the file only if its hash is right")
def test_resumes_in_a_later_call(server, target):
    url = server.serve("/a", Answer(stop_after=5000), *[Answer(stop_after=0)] * 3, Answer())
    with pytest.raises(DownloadError, match=r"broke off after 5,000 of 768,000 bytes, in the last of 4 attempts"):
        download([url], target, None, patience=QUICK)
    assert left(target) == ["data.bin.part", "data.bin.part.json"]
    download([url], target, None, patience=QUICK)
    assert target.read_bytes() == BODY
    assert ranges(server)[-1] == "bytes=5000-"


def test_resumes_with_date_without_strong_etag(server, target):
    dated = {"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
    url = server.serve("/a", Answer(stop_after=10, etag='W/"weak"', headers=dated), Answer(etag=None, headers=dated))
    download([url], target, None, patience=QUICK)
    assert server.log[1][1]["If-Range"] == dated["Last-Modified"]
    assert target.read_bytes() == BODY


def test_restarts_without_validator(server, target):
    url = server.serve("/a", Answer(stop_after=10, etag=None), Answer(etag=None))
    download([url], target, None, patience=QUICK)
    assert ranges(server) == [None, None]
    assert target.read_bytes() == BODY


def test_known_hash_allows_resume(server, target):
    url = server.serve("/a", Answer(stop_after=10, etag=None), Answer(etag=None))
    download([url], target, HASH, patience=QUICK)
    assert ranges(server) == [None, "bytes=10-"]
    assert target.read_bytes() == BODY


@pytest.mark.faults(8, "if the file has changed on the server, ratp downloads all of it again")
def test_changed_file_is_not_appended_to_old_part(server, target):
    url = server.serve("/a", Answer(OTHER, stop_after=5000), Answer(etag='"two"'))
    download([url], target, None, patience=QUICK)
    assert target.read_bytes() == BODY


def test_changed_file_is_detected_without_if_range(server, target):
    url = server.serve("/a", Answer(OTHER, stop_after=5000), Answer(etag='"two"', if_range=False))
    download([url], target, None, patience=QUICK)
    assert target.read_bytes() == BODY
    assert ranges(server) == [None, "bytes=5000-", None]


def test_changed_file_with_same_etag_is_caught_by_hash(server, target):
    url = server.serve("/a", Answer(OTHER, stop_after=5000), *[Answer(stop_after=0)] * 3, Answer())
    with pytest.raises(DownloadError):
        download([url], target, HASH, patience=QUICK)
    download([url], target, HASH, patience=QUICK)
    assert target.read_bytes() == BODY
    assert ranges(server)[-2:] == ["bytes=5000-", None]


def test_server_that_ignores_ranges(server, target):
    url = server.serve("/a", Answer(stop_after=5000), Answer(ranges=False))
    download([url], target, HASH, patience=QUICK)
    assert target.read_bytes() == BODY


def test_complete_part_needs_no_request(server, target):
    target.parent.mkdir()
    url = server.serve("/a", Answer())
    with partial_of(target) as partial:
        partial.begin(Version(url, '"one"', None, len(BODY)))
        partial.append(BODY)
    download([url], target, HASH, patience=QUICK)
    assert not server.log
    assert target.read_bytes() == BODY


@pytest.mark.parametrize(("have", "last"), [(BODY, "bytes=768000-"), (BODY + b"surplus", None)])
def test_416(server, target, have, last):
    target.parent.mkdir()
    url = server.serve("/a", Answer())
    with partial_of(target) as partial:
        partial.begin(Version(url, '"one"', None, None))
        partial.append(have)
    download([url], target, HASH, patience=QUICK)
    assert target.read_bytes() == BODY
    assert ranges(server)[-1] == last


def test_part_without_metadata_is_discarded(server, target):
    target.parent.mkdir()
    target.with_name("data.bin.part").write_bytes(OTHER[:1000])
    download([server.serve("/a", Answer())], target, None, patience=QUICK)
    assert ranges(server) == [None]
    assert target.read_bytes() == BODY


@pytest.mark.parametrize("note", ["", "[]", '{"url": 1, "surprise": 2}', "\x00"])
def test_damaged_metadata(server, target, note):
    target.parent.mkdir()
    target.with_name("data.bin.part").write_bytes(OTHER[:1000])
    target.with_name("data.bin.part.json").write_text(note)
    download([server.serve("/a", Answer())], target, None, patience=QUICK)
    assert target.read_bytes() == BODY


def test_body_without_a_length(server, target):
    download([server.serve("/a", Answer(length=False))], target, HASH, patience=QUICK)
    assert target.read_bytes() == BODY


def test_truncated_chunks(server, target):
    coding = {"Transfer-Encoding": "chunked"}
    broken = Answer(b"bb800\r\n" + BODY[:7000], headers=coding, length=False)
    download([server.serve("/a", broken, Answer())], target, HASH, patience=QUICK)
    assert target.read_bytes() == BODY


def test_wrong_bytes_name_both_hashes_and_leave_nothing(server, target):
    url = server.serve("/a", Answer(OTHER))
    with pytest.raises(DownloadError) as caught:
        download([url], target, HASH, patience=QUICK)
    assert HASH in str(caught.value)
    assert hashlib.sha256(OTHER).hexdigest() in str(caught.value)
    assert left(target) == []
    assert len(server.log) == 1


def test_next_mirror_after_wrong_bytes(server, target):
    download([server.serve("/a", Answer(OTHER)), server.serve("/b", Answer())], target, HASH, patience=QUICK)
    assert target.read_bytes() == BODY


def test_next_mirror_resumes_where_first_stopped(server, target):
    first = server.serve("/a", Answer(stop_after=4000, etag='"a"'), Answer(status=503))
    second = server.serve("/b", Answer(etag='"b"'))
    download([first, second], target, HASH, patience=QUICK)
    assert target.read_bytes() == BODY
    assert server.log[-1][0] == "/b"
    assert server.log[-1][1]["Range"] == "bytes=4000-"
    assert "If-Range" not in server.log[-1][1]


def test_next_mirror_restarts_without_hash(server, target):
    first = server.serve("/a", Answer(OTHER, stop_after=4000), Answer(status=503))
    download([first, server.serve("/b", Answer())], target, None, patience=QUICK)
    assert target.read_bytes() == BODY


def test_size(server, target):
    url = server.serve("/a", Answer())
    with pytest.raises(DownloadError, match=r"offers 768,000 bytes, expected 5"):
        download([url], target, None, size=5, patience=QUICK)
    with pytest.raises(DownloadError, match=r"expected 5 bytes, found 768,000"):
        download([server.serve("/b", Answer(length=False))], target, None, size=5, patience=QUICK)
    download([url], target, None, size=len(BODY), patience=QUICK)


def test_empty_response_is_an_error(server, target):
    with pytest.raises(DownloadError, match="the file is empty"):
        download([server.serve("/a", Answer(b""))], target, None, patience=QUICK)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (PAGE, {"Content-Type": "text/html; charset=utf-8"}),
        (PAGE, {"Content-Type": "application/octet-stream"}),
        (b"\xef\xbb\xbf<html>", {}),
        (b"Quota exceeded", {"Content-Type": "text/html"}),
    ],
)
@pytest.mark.faults(9, "ratp recognises a web page served instead of a file and says how to get the file by hand")
def test_web_page_instead_of_the_file(server, target, body, headers):
    url = server.serve("/a", Answer(body, headers=headers))
    with pytest.raises(DownloadError) as caught:
        download([url], target, HASH, size=len(BODY), manual="Fetch it with a browser from X.", patience=QUICK)
    if "Content-Type" in headers and "html" in headers["Content-Type"]:
        assert "a web page came instead of the file" in str(caught.value)
    assert str(caught.value).endswith("Fetch it with a browser from X.")
    assert left(target) == []
    with pytest.raises(DownloadError, match="a web page came instead of the file"):
        download([url], target, None, patience=QUICK)


def test_blank_web_page_falls_back_to_next_mirror(server, target):
    blank = server.serve("/blank", Answer(b"\n \n", headers={"Content-Type": "text/html"}))
    download([blank, server.serve("/a", Answer())], target, HASH, patience=QUICK)
    assert target.read_bytes() == BODY


def test_binary_file_mislabelled_as_html_is_taken(server, target):
    url = server.serve("/a", Answer(headers={"Content-Type": "text/html"}))
    download([url], target, HASH, patience=QUICK)
    assert target.read_bytes() == BODY


@pytest.mark.parametrize("sha256", [hashlib.sha256(gzip.compress(BODY, mtime=0)).hexdigest(), None])
def test_gzip_file_with_encoding_header_stays_packed(server, tmp_path, sha256):
    packed = gzip.compress(BODY, mtime=0)
    target = tmp_path / "data.gz"
    url = server.serve("/a", Answer(packed, headers={"Content-Encoding": "x-gzip"}))
    download([url], target, sha256, size=len(packed), patience=QUICK)
    assert target.read_bytes() == packed


@pytest.mark.parametrize("sha256", [HASH, None])
def test_transfer_encoding_is_decoded(server, target, sha256):
    headers = {"Content-Encoding": "gzip"}
    packed = gzip.compress(BODY)
    url = server.serve("/a", Answer(packed, headers=headers, stop_after=500), Answer(packed, headers=headers))
    download([url], target, sha256, size=len(BODY), patience=QUICK)
    assert target.read_bytes() == BODY
    assert left(target) == ["data.bin"]


def test_damaged_encoding(server, target):
    url = server.serve("/a", Answer(b"no gzip", headers={"Content-Encoding": "gzip"}))
    with pytest.raises(DownloadError, match="gzip encoding is damaged"):
        download([url], target, None, patience=QUICK)


@pytest.mark.faults(28, "unpacking and receiving stop at the file's size")
@pytest.mark.parametrize("size", [None, 5000])
def test_encoding_that_unpacks_without_end(server, target, size):
    packed = gzip.compress(bytes(10**7))
    url = server.serve("/a", Answer(packed, headers={"Content-Encoding": "gzip"}))
    with pytest.raises(DownloadError, match=f"it unpacks to more than the {size or 100 * len(packed):,} bytes allowed"):
        download([url], target, None, size=size, patience=QUICK)
    assert left(target) == []


@pytest.mark.faults(28, "unpacking and receiving stop at the file's size")
def test_answer_without_end(server, target, monkeypatch):
    monkeypatch.setattr(downloads, "_PACKED_MORE", 10)
    url = server.serve("/a", Answer(length=False))
    with pytest.raises(DownloadError, match="it sends more than the 5 bytes expected"):
        download([url], target, None, size=5, patience=QUICK)
    assert left(target) == []


@pytest.mark.faults(28, "over http, only files are downloaded whose sha256 is known")
def test_plain_http_needs_a_hash(target):
    url = "http://example.invalid/a"
    with pytest.raises(DownloadError, match="over http, a file needs a known sha256"):
        download(["https://example.invalid/a", url], target, None, patience=QUICK)
    asked = []

    def opener(request, timeout):
        asked.append(request.full_url)
        raise HTTPError(url, 404, "Not Found", Message(), None)

    with pytest.raises(DownloadError, match="404"):
        download([url], target, HASH, opener=opener, patience=QUICK)
    assert asked == [url]


@pytest.mark.faults(28, "over http, only files are downloaded whose sha256 is known")
def test_plain_http_in_the_catalogue():
    files = [file for entry in CATALOGUE.values() for source in entry.domains.values() for file in source.files]
    assert [file for file in files if file.sha256 is None and any(url.startswith("http:") for url in file.urls)] == []


def test_redirect_from_https_to_http():
    request = urllib.request.Request("https://example.invalid/a")
    with pytest.raises(downloads._MirrorError, match="which is not https"):
        downloads._WebRedirects().redirect_request(
            request, io.BytesIO(), 302, "", Message(), "http://example.invalid/a"
        )


def test_redirect(server, target):
    end = server.serve("/end", Answer())
    start = server.serve("/start", Answer(b"", status=302, headers={"Location": end}))
    download([start], target, HASH, patience=QUICK)
    assert target.read_bytes() == BODY


@pytest.mark.parametrize("location", ["file:///etc/hostname", "ftp://127.0.0.1/x", "data:,x"])
def test_redirect_to_non_web_scheme(server, target, location):
    start = server.serve("/start", Answer(b"", status=302, headers={"Location": location}))
    with pytest.raises(DownloadError, match=location):
        download([start], target, None, patience=QUICK)
    assert left(target) == []


def test_endless_redirects(server, target):
    url = server.serve("/start", Answer(b"", status=302, headers={"Location": "/start"}))
    with pytest.raises(DownloadError, match="302"):
        download([url], target, None, patience=QUICK)


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/x", "/etc/hostname", "http://"])
def test_non_web_addresses(target, url):
    with pytest.raises(DownloadError, match="only http and https"):
        download([url], target, None)


@pytest.mark.parametrize(("status", "requests"), [(404, 1), (403, 1), (500, 4), (503, 4), (429, 4)])
def test_refusals(server, target, status, requests):
    url = server.serve("/a", Answer(b"", status=status))
    with pytest.raises(DownloadError, match=rf"/a: HTTP {status} "):
        download([url], target, HASH, patience=QUICK)
    assert len(server.log) == requests
    assert left(target) == []


def test_recovers_from_a_server_error(server, target):
    download([server.serve("/a", Answer(status=500), Answer())], target, HASH, patience=QUICK)
    assert target.read_bytes() == BODY


def test_connection_refused(target):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/a"
        with pytest.raises(DownloadError, match=r"no connection .*\nCheck the connection"):
            download([url], target, None, patience=QUICK)


def test_server_timeout(server, target):
    url = server.serve("/a", Answer(hang=True))
    with pytest.raises(DownloadError, match="timed out"):
        download([url], target, None, patience=Patience(attempts=2, backoff=0, timeout=0.2))


def test_every_problem_is_named(server, target):
    urls = [server.serve("/a", Answer(status=404)), server.serve("/b", Answer(OTHER)), server.serve("/c", Answer(PAGE))]
    with pytest.raises(DownloadError) as caught:
        download(urls, target, HASH, patience=QUICK)
    lines = str(caught.value).splitlines()
    assert lines[0] == "could not download data.bin:"
    assert [line.split(": ")[0].strip() for line in lines[1:4]] == urls
    assert isinstance(caught.value, RatpError)


def test_full_disk_while_writing(server, target):
    url = server.serve("/a", Answer())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(DownloadError, match=r"File too large\. Free some space .* what has arrived is kept"):
            download([url], target, HASH, patience=QUICK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left(target) == ["data.bin.part", "data.bin.part.json"]
    download([url], target, HASH, patience=QUICK)
    assert ranges(server) == [None, "bytes=300000-"]
    assert target.read_bytes() == BODY


def test_not_enough_space(server, target, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(DownloadError, match=r"has 768,000 bytes, and .* has room for 10"):
        download([server.serve("/a", Answer())], target, HASH, patience=QUICK)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder(server, tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(DownloadError, match="Permission denied"):
            download([server.serve("/a", Answer())], tmp_path / "x", HASH, patience=QUICK)
    finally:
        tmp_path.chmod(0o700)


def test_folder_that_is_a_file(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match="cannot write"):
        download([server.serve("/a", Answer())], tmp_path / "file" / "x", HASH, patience=QUICK)


def test_two_at_once(server, target):
    url = server.serve("/a", Answer())
    with partial_of(target), pytest.raises(DownloadError, match="another process"):
        download([url], target, None, patience=QUICK)


def test_backoff_doubles(server, target, monkeypatch):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    with pytest.raises(DownloadError):
        download([server.serve("/a", Answer(status=500))], target, None, patience=Patience(backoff=0.5, timeout=2))
    assert waits == [0.5, 1.0, 2.0]


def test_an_interrupted_call_keeps_what_arrived(server, target):
    def stop(done, total):
        raise KeyboardInterrupt

    url = server.serve("/a", Answer())
    with pytest.raises(KeyboardInterrupt):
        download([url], target, HASH, stop, patience=QUICK)
    assert left(target) == ["data.bin.part", "data.bin.part.json"]
    note = json.loads(target.with_name("data.bin.part.json").read_text())
    assert note["url"] == url and note["total"] == len(BODY)
    download([url], target, HASH, patience=QUICK)
    assert target.read_bytes() == BODY


def test_versions_conflict_only_on_known_fields():
    base = Version("u", "e", "m", 5, None)
    assert not base.contradicts(base)
    assert not base.contradicts(Version("other", "f", "n", 5))
    assert base.contradicts(Version("u", "f", "m", 5))
    assert base.contradicts(Version("other", total=6))
