"""Object stores on loopback, by the two protocols that models are read through: Amazon S3's and Google Cloud
Storage's."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

ACCESS_KEY, SECRET_KEY = "key-of-the-test", "secret-of-the-test"
_WHEN = 1_700_000_000


class ObjectStore(ThreadingHTTPServer):
    """One bucket: what it holds by key, and which requests came for it."""

    def __init__(self, handler: type[_Handler], bucket: str) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.bucket = bucket
        self.objects: dict[str, bytes] = {}
        self.breaks_after: int | None = None
        """Bytes of an object's body after which a connection is cut, once."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def listed(self, prefix: str, delimiter: str) -> tuple[list[str], list[str]]:
        """Keys that begin so, and what others have in common up to the next delimiter."""
        keys, common = [], set()
        for key in sorted(key for key in self.objects if key.startswith(prefix)):
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if found:
                common.add(prefix + head + found)
            else:
                keys.append(key)
        return keys, sorted(common)


@contextmanager
def running(handler: type[_Handler], bucket: str) -> Iterator[ObjectStore]:
    """A store until the block ends."""
    with ObjectStore(handler, bucket) as store:
        thread = Thread(target=store.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield store
        finally:
            store.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ObjectStore

    def log_message(self, format: str, *args: object) -> None:
        pass

    def asked(self) -> tuple[list[str], dict[str, str]]:
        """The path's parts, decoded, and the query."""
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        return [unquote(part) for part in parts.path.split("/")[1:]], query

    def answer(self, status: int, body: bytes, kind: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_object(self, body: bytes, **headers: str) -> None:
        """All of it, or the range that was asked for; cut off where the store breaks."""
        status, asked = 200, self.headers.get("Range")
        if asked is not None:
            first, last = asked.removeprefix("bytes=").split("-")
            end = min(int(last) + 1 if last else len(body), len(body))
            headers["Content_Range"] = f"bytes {first}-{end - 1}/{len(body)}"
            body, status = body[int(first) : end], 206
        cut = self.server.breaks_after
        if cut is None or self.command == "HEAD":
            self.answer(status, body, "application/octet-stream", **headers)
            return
        self.server.breaks_after = None
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:cut])
        self.close_connection = True


class S3Handler(_Handler):
    """ListObjectsV2, HeadObject and GetObject, in the path's style, for one access key."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        (bucket, *rest), query = self.asked()
        key = "/".join(rest)
        if f"Credential={ACCESS_KEY}/" not in self.headers.get("Authorization", ""):
            self._fail(403, "InvalidAccessKeyId", "The access key is not known.")
        elif bucket != self.server.bucket:
            self._fail(404, "NoSuchBucket", "There is no such bucket.")
        elif "list-type" in query:
            self._list(query.get("prefix", ""), query.get("delimiter", ""))
        elif (body := self.server.objects.get(key)) is None:
            self._fail(404, "NoSuchKey", "There is no such key.")
        else:
            self.send_object(body, ETag=_etag(body), Last_Modified=formatdate(_WHEN, usegmt=True))

    def _list(self, prefix: str, delimiter: str) -> None:
        keys, common = self.server.listed(prefix, delimiter)
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2023-11-14T22:13:20.000Z</LastModified>"
            f"<ETag>{escape(_etag(self.server.objects[key]))}</ETag><Size>{len(self.server.objects[key])}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for key in keys
        )
        folders = "".join(f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in common)
        text = (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{self.server.bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(keys)}</KeyCount>"
            f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{contents}{folders}</ListBucketResult>"
        )
        self.answer(200, text.encode(), "application/xml")

    def _fail(self, status: int, code: str, message: str) -> None:
        text = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'
        self.answer(status, text.encode(), "application/xml")


class GcsHandler(_Handler):
    """The JSON API's lists, objects and downloads, for anybody."""

    def do_GET(self) -> None:
        parts, query = self.asked()
        while parts[:1] != ["b"] and parts:
            parts = parts[1:]
        bucket, key = (parts + ["", ""])[1], "/".join(parts[3:])
        if bucket != self.server.bucket:
            self._fail("The specified bucket does not exist.")
        elif not key:
            self._list(query.get("prefix", ""), query.get("delimiter", ""))
        elif (body := self.server.objects.get(key)) is None:
            self._fail(f"No such object: {bucket}/{key}")
        elif query.get("alt") == "media":
            self.send_object(body)
        else:
            self._say(self._about(key))

    def _about(self, key: str) -> dict[str, str]:
        body = self.server.objects[key]
        digest = base64.b64encode(hashlib.md5(body).digest()).decode()
        when = "2023-11-14T22:13:20.000Z"
        own = {"name": key, "size": str(len(body)), "md5Hash": digest, "updated": when, "timeCreated": when}
        return {"kind": "storage#object", "bucket": self.server.bucket, "generation": "1", **own}

    def _list(self, prefix: str, delimiter: str) -> None:
        keys, common = self.server.listed(prefix, delimiter)
        self._say({"kind": "storage#objects", "items": [self._about(key) for key in keys], "prefixes": common})

    def _say(self, value: object, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode(), "application/json")

    def _fail(self, message: str) -> None:
        self._say({"error": {"code": 404, "message": message}}, 404)


def _etag(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'
