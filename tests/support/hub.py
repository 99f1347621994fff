"""The Hugging Face hub, played by a server on this machine: what it serves is up to its handler.

`ModelHub` plays repositories of models: it makes them, takes commits, large files apart, and shows private ones to who
has the token. `client_of` lets the hub's client in this process speak to it.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
import yaml

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_thisOneMayWrite"


class Hub(ThreadingHTTPServer):
    """Serves a folder at a commit, and remembers which paths were asked for."""

    daemon_threads = True

    def __init__(self, folder: Path, handler: type["HubHandler"]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.folder = folder
        self.commit = COMMIT
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubHandler(BaseHTTPRequestHandler):
    """Answers a request; `do_GET` is to be written."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the client's word that it has the headers
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")

    def reply_json(self, value: object, status: int = 200, code: str | None = None) -> None:
        named = {} if code is None else {"X-Error-Code": code}
        self.reply(status, json.dumps(value).encode(), {"Content-Type": "application/json", **named})


@contextmanager
def serving(folder: Path, handler: type[HubHandler]) -> Iterator[Hub]:
    """A hub that serves the folder until the end of the context."""
    with Hub(folder, handler) as server, _running(server):
        yield server


@contextmanager
def _running(server: Hub) -> Iterator[None]:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield
    server.shutdown()


# ---- a data set -----------------------------------------------------------------------------------------------------


class DatasetHandler(HubHandler):
    """Serves the folder as every data set of the owners; of half/half, no more than the beginning of a file."""

    owners: Sequence[str] = ("wmt", "half")
    gated: Sequence[str] = ()  # owners whose files are for those with TOKEN

    def do_GET(self) -> None:
        form = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        path, _, query = self.path.partition("?")
        self.server.asked.append(path)
        match path.strip("/").split("/"):
            case ["api", "datasets", owner, _] | ["api", "datasets", owner, _, "revision", _] if owner in self.owners:
                files = [file for file in self.server.folder.rglob("*") if file.is_file()]
                siblings = [{"rfilename": self.entry(file)["path"]} for file in files]
                self.reply_json({"id": "wmt/wmt14", "sha": self.server.commit, "siblings": siblings})
            case ["api", "datasets", owner, _, "tree", _, *rest] if owner in self.owners:
                folder = self.server.folder.joinpath(*rest)
                found = folder.rglob("*") if "recursive=true" in query.lower() else folder.glob("*")
                self.reply_json([self.entry(file) for file in sorted(found)])
            case ["api", "datasets", owner, _, "paths-info", _] if owner in self.owners:
                is_json = "json" in self.headers.get("Content-Type", "")
                paths = json.loads(form)["paths"] if is_json else parse_qs(form)["paths"]
                files = [self.server.folder / name for name in ([paths] if isinstance(paths, str) else paths)]
                self.reply_json([self.entry(file) for file in files if file.exists()])
            case ["datasets", owner, _, "resolve", *_] if owner in self.gated and not self.has_token():
                self.reply(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
            case ["datasets", owner, _, "resolve", _, *rest] if self.server.folder.joinpath(*rest).is_file():
                self.send_file(self.server.folder.joinpath(*rest), dies=owner == "half" and rest[0] == "de-en")
            case [*_, "resolve", _, _]:
                self.reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.server.commit})
            case _:
                self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_POST = do_GET

    def entry(self, file: Path) -> dict[str, Any]:
        name = str(file.relative_to(self.server.folder))
        if file.is_dir():
            return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
        content = file.read_bytes()
        return {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content), "path": name}

    def send_file(self, file: Path, *, dies: bool) -> None:
        content, commit = file.read_bytes(), {"X-Repo-Commit": self.server.commit, "Accept-Ranges": "bytes"}
        headers = {**commit, "ETag": f'"{self.entry(file)["oid"]}"'}
        if self.command == "HEAD":
            return self.reply(200, b"", {**headers, "Content-Length": str(len(content))})
        if dies:
            self.reply(206, b"PAR1", {**headers, "Content-Length": str(len(content))})
            self.close_connection = True
            return None
        if self.headers.get("Range") is None:
            return self.reply(200, content, headers)
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1 if last else None]
        span = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        return self.reply(206, part, {**headers, "Content-Range": span})


# ---- repositories of models -----------------------------------------------------------------------------------------


@dataclass
class Repository:
    """The files of each commit, the newest last."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    @property
    def head(self) -> str:
        return list(self.commits)[-1]

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.head]

    def commit(self, files: dict[str, bytes]) -> str:
        """Add a commit with these files, and no others."""
        state = [len(self.commits), *((name, hashlib.sha1(data).hexdigest()) for name, data in sorted(files.items()))]
        sha = hashlib.sha1(json.dumps(state).encode()).hexdigest()
        self.commits[sha] = files
        return sha


class ModelHub(Hub):
    """Repositories of models by name; `owners` may be written to with TOKEN."""

    def __init__(self) -> None:
        super().__init__(Path(), ModelHandler)
        self.repositories: dict[str, Repository] = {}
        self.owners = {"ours"}
        self.large: dict[str, bytes] = {}  # files that were sent apart, by SHA-256
        self.ill = 0  # a status with which everything is answered, such as 503
        self.said: list[str] = []  # what commits are called
        self.forged: dict[str, Any] | list[Any] | None = None  # in place of what is said of a model, or parts of it
        self.etag = ""  # in place of a file's own

    def put(self, name: str, folder: Path) -> str:
        """Make a public repository of a folder, or a further commit of one."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return self.repositories.setdefault(name, Repository(private=False)).commit(files)


class ModelHandler(HubHandler):
    """The answers, as huggingface_hub asks for them without Xet."""

    server: ModelHub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        self.server.asked.append(path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.ill:
            return self.reply_json({"error": "ill"}, self.server.ill)
        match path.split("/"):
            case ["api", "repos", "create"]:
                return self.create(json.loads(body))
            case ["api", "validate-yaml"]:
                return self.validate(json.loads(body)["content"])
            case ["lfs", _]:
                self.server.large[hashlib.sha256(body).hexdigest()] = body
                return self.reply(200, b"", {})
            case ["api", "models", owner, name, *what]:
                pass
            case [owner, name, "resolve", *rest]:
                what = ["resolve", *rest]
            case [owner, name, "info", "lfs", "objects", "batch"]:
                what = ["batch"]
                name = name.removesuffix(".git")
            case _:
                return self.reply_json({}, 404, "RepoNotFound")

        repository = self.server.repositories.get(f"{owner}/{name}")
        if repository is None or (repository.private and not self.has_token()):
            return self.reply_json({"error": "Repository Not Found"}, 401, "RepoNotFound")
        writes = what[:1] in (["preupload"], ["commit"], ["batch"])
        if writes and not (self.has_token() and owner in self.server.owners):
            return self.reply_json({"error": "you may not write here"}, 403)
        return self.answer(f"{owner}/{name}", repository, what, body)

    do_HEAD = do_POST = do_PUT = do_GET

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if not self.has_token():
            return self.reply_json({"error": "Invalid username or password."}, 401)
        if asked["organization"] not in self.server.owners:
            return self.reply_json({"error": "you may not write there"}, 403)
        address = {"url": f"{self.server.url}/{name}"}
        if name in self.server.repositories:
            return self.reply_json({"error": "You already created this model repo", **address}, 409)
        is_private = asked.get("private", asked.get("visibility") == "private")
        self.server.repositories[name] = Repository(is_private, {COMMIT: {".gitattributes": b""}})
        return self.reply_json(address)

    def validate(self, content: str) -> None:
        """Of a card's head, only the licence."""
        licence = yaml.safe_load(content.split("---\n")[1])["license"]
        if licence not in ("cc-by-4.0", "apache-2.0", "mit", "other"):
            return self.reply_json({"errors": [{"message": f'"license" must be one of [...], not {licence}'}]}, 400)
        return self.reply_json({"errors": [], "warnings": []})

    def answer(self, name: str, repository: Repository, what: list[str], body: bytes) -> None:
        match what:
            case [] | ["revision", _]:
                sha = repository.head if what in ([], ["revision", "main"]) else what[1]
                if sha not in repository.commits:
                    return self.reply_json({"error": "Invalid rev id"}, 404, "RevisionNotFound")
                siblings = [{"rfilename": file} for file in repository.commits[sha]]
                about = {"id": name, "sha": sha, "private": repository.private, "siblings": siblings}
                forged = self.server.forged
                return self.reply_json({**about, **forged} if isinstance(forged, dict) else forged or about)
            case ["resolve", sha, *rest] if "/".join(rest) in repository.commits.get(sha, {}):
                content = repository.commits[sha]["/".join(rest)]
                headers = {"ETag": f'"{self.server.etag or hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": sha}
                return self.reply(200, content, {**headers, "Accept-Ranges": "bytes"})
            case ["preupload", "main"]:
                asked = [file["path"] for file in json.loads(body)["files"]]
                modes = {file: "lfs" if file.endswith((".safetensors", ".model")) else "regular" for file in asked}
                files = [{"path": file, "uploadMode": modes[file], "shouldIgnore": False} for file in asked]
                return self.reply_json({"files": files})
            case ["batch"]:
                objects = [{**one, "actions": self.upload(one["oid"])} for one in json.loads(body)["objects"]]
                return self.reply_json({"transfer": "basic", "objects": objects})
            case ["commit", "main"]:
                return self.commit(name, repository, [json.loads(line) for line in body.splitlines()])
        return self.reply_json({}, 404, "EntryNotFound")

    def upload(self, oid: str) -> dict[str, Any]:
        return {"upload": {"href": f"{self.server.url}/lfs/{oid}", "header": {}}}

    def commit(self, name: str, repository: Repository, lines: list[dict[str, Any]]) -> None:
        files = dict(repository.files)
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    if value.get("parentCommit") != repository.head:
                        return self.reply_json({"error": "the branch has moved"}, 412)
                    self.server.said.append(value["summary"])
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.server.large[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        sha = repository.commit(files)
        return self.reply_json({"commitUrl": f"{self.server.url}/{name}/commit/{sha}", "commitOid": sha})


@contextmanager
def model_hub() -> Iterator[ModelHub]:
    """A hub without repositories."""
    with ModelHub() as server, _running(server):
        yield server


def client_of(hub: Hub, patch: pytest.MonkeyPatch, home: Path, *, token: str | None) -> None:
    """Let the hub's client in this process speak to a hub, with its cache in a folder and this token.

    In a process of its own, environment variables would do it: the client reads them when it is imported.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import _cache_assets

    patch.setattr(constants, "ENDPOINT", hub.url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    patch.setattr(_cache_assets, "HF_ASSETS_CACHE", str(home / "assets"))
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        patch.delenv(variable, raising=False)
    if token is not None:
        patch.setenv("HF_TOKEN", token)
