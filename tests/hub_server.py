"""A small server that speaks the Hub's protocol: enough of it for `huggingface_hub` to read and publish."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest

TOKEN = "hf_of_this_test"


@dataclass
class Repository:
    """Files by commit, and the names of commits."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def put(self, files: dict[str, str | bytes], branch: str = "main", tag: str | None = None) -> str:
        """Commit on top of a branch; return the commit."""
        before = self.commits.get(self.refs.get(branch, ""), {})
        encoded = {name: text.encode() if isinstance(text, str) else text for name, text in files.items()}
        commit = hashlib.sha1(f"{len(self.commits)}{id(self)}".encode()).hexdigest()
        self.commits[commit] = {**before, **encoded}
        self.refs[branch] = commit
        if tag is not None:
            self.refs[tag] = commit
        return commit


@dataclass
class Faults:
    """What the server does wrong, or what is done behind its back.

    Args:
        status: every answer.
        no_size: no file has a size.
        redirect_to: another server, which has the files.
        moves_on: whenever a file of a branch was downloaded, the branch gets an empty one.
    """

    status: int | None = None
    no_size: bool = False
    redirect_to: str | None = None
    moves_on: bool = False


@dataclass
class Asked:
    """One request."""

    method: str
    path: str
    token: str | None


class HubServer:
    """A Hub at ``endpoint``; ``requests`` are all that came, in order."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Asked] = []
        self.faults = Faults()
        self.messages: list[dict[str, Any]] = []
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def repository(self, name: str, **how: bool) -> Repository:
        """Make a repository, empty."""
        self.repositories[name] = Repository(**how)
        return self.repositories[name]

    def asked(self, method: str) -> list[str]:
        """Paths that were asked for with a method."""
        return [request.path for request in self.requests if request.method == method]

    def close(self) -> None:
        """Be gone: connections are rejected from here on. Safe to call again."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        path = unquote(urlsplit(self.path).path).strip("/")
        hub = self.server_hub
        hub.requests.append(Asked(self.command, path, token))
        if hub.faults.status is not None:
            self._send(hub.faults.status)
        elif path.startswith("api/"):
            self._api(path.removeprefix("api/"), body, token)
        else:
            self._resolve(path, token)

    def _send(self, status: int, body: bytes = b"", error: str = "", **headers: str) -> None:
        self.send_response(status)
        if error:
            self.send_header("X-Error-Code", error)
            self.send_header("X-Error-Message", error)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers and not (self.server_hub.faults.no_size and status == 200):
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")  # or a client would still be served when the server is gone
        self.close_connection = True
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, document: Any, status: int = 200) -> None:
        self._send(status, json.dumps(document).encode(), Content_Type="application/json")

    def _may_see(self, repository: Repository | None, token: str | None) -> Repository | None:
        if repository is None or (repository.private and token != TOKEN):
            self._send(401 if token is None else 404, error="RepoNotFound")
            return None
        if repository.gated and token != TOKEN:
            self._send(401 if token is None else 403, error="GatedRepo")
            return None
        return repository

    def _resolve(self, path: str, token: str | None) -> None:
        owner, name, _, rest = path.split("/", 3)
        repository = self._may_see(self.server_hub.repositories.get(f"{owner}/{name}"), token)
        if repository is None:
            return
        revision, _, file_name = rest.rpartition("/")
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            self._send(404, error="RevisionNotFound")
            return
        content = repository.commits[commit].get(file_name)
        if content is None:
            self._send(404, error="EntryNotFound", X_Repo_Commit=commit)
            return
        faults = self.server_hub.faults
        headers = {
            "X_Repo_Commit": commit,
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
        }
        if faults.redirect_to is not None:
            headers["X_Linked_Size"] = str(len(content))
            self._send(302, Location=f"{faults.redirect_to}/{path}", **headers)
            return
        self._send(200, content, **headers)
        if faults.moves_on and self.command == "GET" and revision in repository.refs:
            repository.put({file_name: ""}, revision)

    def _api(self, path: str, body: bytes, token: str | None) -> None:
        if path == "validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif token != TOKEN:
            self._send(401, error="Unauthorized")
        elif path == "repos/create":
            self._create(json.loads(body))
        else:
            _, owner, name, verb, *rest = path.split("/")
            repository = self._may_see(self.server_hub.repositories.get(f"{owner}/{name}"), token)
            if repository is not None:
                getattr(self, f"_{verb}")(repository, f"{owner}/{name}", "/".join(rest), body)

    def _create(self, requested: dict[str, Any]) -> None:
        name = f"{requested.get('organization') or 'me'}/{requested['name']}"
        known = name in self.server_hub.repositories
        private = requested.get("visibility") == "private" or bool(
            requested.get("private")
        )  # newer and older clients
        if not known:
            self.server_hub.repository(name, private=private).put({".gitattributes": ""})
        answer = {"url": f"{self.server_hub.endpoint}/{name}", "name": name, "id": name}
        self._json(answer, status=409 if known else 200)

    def _branch(self, repository: Repository, name: str, branch: str, body: bytes) -> None:
        known = branch in repository.refs
        if not known:
            repository.refs[branch] = repository.refs["main"]
        self._send(409 if known else 201)

    def _preupload(self, repository: Repository, name: str, revision: str, body: bytes) -> None:
        files = json.loads(body)["files"]
        answer = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
        self._json({"files": answer})

    def _commit(self, repository: Repository, name: str, revision: str, body: bytes) -> None:
        lines = [json.loads(line) for line in body.splitlines()]
        files = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        self.server_hub.messages += [line["value"] for line in lines if line["key"] == "header"]
        pull_request = "create_pr=1" in self.path
        commit = repository.put(files, "refs/pr/1" if pull_request else revision)
        url = f"{self.server_hub.endpoint}/{name}"
        answer = {"success": True, "commitOid": commit, "commitUrl": f"{url}/commit/{commit}"}
        self._json({**answer, "pullRequestUrl": f"{url}/discussions/1"} if pull_request else answer)


@contextmanager
def hub_server(patch: pytest.MonkeyPatch, cache: str) -> Iterator[HubServer]:
    """Serve, and let the client of this process know no other Hub, no token and no other cache."""
    server = HubServer()
    constants = huggingface_hub.constants
    patch.setattr(constants, "ENDPOINT", server.endpoint)
    template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_CACHE", cache)
    patch.setattr(constants, "HF_TOKEN_PATH", f"{cache}/no_token")
    patch.delenv("HF_TOKEN", raising=False)
    try:
        yield server
    finally:
        server.close()
