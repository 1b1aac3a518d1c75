"""Configuration files. What they name by a relative path is looked for beside them first."""

from __future__ import annotations

from pathlib import Path

from raylm.config.base import read_yaml
from raylm.config.source import DEMO_MODELS
from raylm.errors import ConfigError

IMPORT_PATH = "raylm.serving.app:build_app"
"""What a Serve config file calls an application of ours."""
_PROJECT = Path(__file__).resolve().parents[2]


def read_config(path: str | Path) -> object:
    """The content of an engine file or a Serve config file, with the whole paths of what lies beside it.

    Raises ConfigError when it is missing or not YAML, or names an engine file that is nowhere.
    """
    data = read_yaml(path)
    folder = Path(path).absolute().parent
    if not isinstance(data, dict):
        return data
    if not isinstance(applications := data.get("applications"), list):
        return _engine(data, folder)
    return {**data, "applications": [_application(application, folder) for application in applications]}


def find_config(name: str, *, beside: Path | None = None) -> Path:
    """A configuration file: in the folder `beside`, as given, or below the folder that holds the project.

    Raises ConfigError with all of these.
    """
    places = [Path(name).expanduser(), _PROJECT / name]
    if beside is not None:
        places.insert(0, beside / places[0])
    for place in places:
        if place.is_file():
            return place
    looked = dict.fromkeys(str(place.absolute()) for place in places)
    raise ConfigError(f"configuration file {name!r} not found; looked at {' and '.join(looked)}")


def named_engines(data: dict[str, object]) -> list[object]:
    """The content of every engine that a Serve config file's content has or names. Raises ConfigError."""
    engines: list[object] = []
    applications = data.get("applications")
    for application in applications if isinstance(applications, list) else []:
        if not isinstance(application, dict) or application.get("import_path") != IMPORT_PATH:
            continue
        args = application.get("args")
        models = args.get("models") if isinstance(args, dict) else None
        found = [model.get("engine") for model in models or [] if isinstance(model, dict)]
        engines += [read_config(engine) if isinstance(engine, str) else engine for engine in found]
    return engines


def _application(application: object, folder: Path) -> object:
    if not isinstance(application, dict) or application.get("import_path") != IMPORT_PATH:
        return application
    args = application.get("args")
    if not isinstance(args, dict) or not isinstance(args.get("models"), list):
        return application
    return {**application, "args": {**args, "models": [_deployment(model, folder) for model in args["models"]]}}


def _deployment(model: object, folder: Path) -> object:
    if not isinstance(model, dict):
        return model
    engine = model.get("engine")
    if isinstance(engine, str):
        return {**model, "engine": str(find_config(engine, beside=folder).absolute())}
    return {**model, "engine": _engine(engine, folder)} if isinstance(engine, dict) else model


def _engine(engine: dict[str, object], folder: Path) -> dict[str, object]:
    model = engine.get("model")
    if not isinstance(model, dict) or not isinstance(path := model.get("path"), str) or path in DEMO_MODELS:
        return engine
    found = folder / Path(path).expanduser()
    return {**engine, "model": {**model, "path": str(found)}} if found.exists() else engine
