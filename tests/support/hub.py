"""A small model hub on loopback: the requests that the hub library sends, answered from folders."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"


@dataclass
class Repository:
    """One model: its files by commit, and what its branches and tags name."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    token: str | None = None
    """Only who sends it sees the repository."""
    gated: bool = False

    def commit_of(self, revision: str) -> str | None:
        return self.refs.get(revision, revision if revision in self.commits else None)


@dataclass
class Hub:
    """The hub's address and models. Every request is in `log`, as "METHOD path"."""

    url: str = ""
    models: dict[str, Repository] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    held: str | None = None
    """A file whose second half is not sent before `go_on` is set."""
    go_on: threading.Event = field(default_factory=threading.Event)
    half_sent: threading.Event = field(default_factory=threading.Event)

    def add(self, name: str, files: dict[str, bytes] | Path, *, branch: str = "main", **of_repository: object) -> str:
        """A new commit at the head of a branch; its name."""
        if isinstance(files, Path):
            root = files
            files = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        commit = sha1(b"".join(key.encode() + value for key, value in files.items())).hexdigest()
        known = self.models.setdefault(name, Repository({}, {}, **of_repository))
        known.commits[commit] = files
        known.refs[branch] = commit
        return commit

    def fetched(self) -> set[str]:
        """The files that were asked for with their content."""
        marks = [line.split("/resolve/", 1)[1] for line in self.log if line.startswith("GET ") and "/resolve/" in line]
        return {mark.split("/", 1)[1] for mark in marks}


@contextmanager
def running() -> Iterator[Hub]:
    """A hub while the block runs."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.log.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        owner_name = "/".join(parts[2:4] if is_api else parts[:2])
        repository = self.hub.models.get(owner_name)
        sent = self.headers.get("Authorization")
        if repository is None or (repository.token is not None and sent != f"Bearer {repository.token}"):
            return self._refuse(401, "RepoNotFound", "Repository not found")
        if is_api:
            return self._describe(owner_name, repository, parts[4:])
        return self._file(repository, parts[3], "/".join(parts[4:]), has_body=has_body)

    def _describe(self, name: str, repository: Repository, rest: list[str]) -> None:
        kind, revision = (rest[0], "/".join(rest[1:])) if rest else ("revision", "main")
        commit = repository.commit_of(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repository.commits[commit]
        if kind == "tree":
            listed = [{"type": "file", "path": path, "size": len(data), "oid": sha1(data).hexdigest()}
                      for path, data in files.items()]  # fmt: skip
            return self._send(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})
        siblings = [{"rfilename": path} for path in files]
        info = {"id": name, "modelId": name, "sha": commit, "private": False, "tags": [], "siblings": siblings}
        return self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _file(self, repository: Repository, revision: str, path: str, *, has_body: bool) -> None:
        if repository.gated:
            return self._refuse(403, "GatedRepo", "Access to this model is restricted")
        commit = repository.commit_of(revision)
        data = repository.commits[commit].get(path) if commit else None
        if commit is None or data is None:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        headers = {"ETag": f'"{sha1(data).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        return self._send(200, data, headers, has_body=has_body, held=path == self.hub.held)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(
        self, status: int, data: bytes, headers: dict[str, str], *, has_body: bool = True, held: bool = False
    ) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if not has_body:
            return
        half = len(data) // 2 if held else len(data)
        try:
            self.wfile.write(data[:half])
            if held:
                self.wfile.flush()
                self.hub.half_sent.set()
                self.hub.go_on.wait()
                self.wfile.write(data[half:])
        except OSError:
            self.close_connection = True  # the client is gone
