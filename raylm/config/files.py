"""Configuration files. What they name by a relative path is looked for beside them first."""

from __future__ import annotations

from pathlib import Path

from raylm.config.base import read_yaml
from raylm.config.chat import is_template
from raylm.config.demo import DEMO_MODELS
from raylm.errors import ConfigError

INGRESS_PATH = "raylm.serving.app:build_ingress"
"""What a Serve config file calls the HTTP face."""
MODEL_PATH = "raylm.serving.app:build_model"
"""What a Serve config file calls the application of one model."""
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
    applications = data.get("applications")
    found = [_args_of_model(application) for application in (applications if isinstance(applications, list) else [])]
    engines = [args["engine"] for args in found if args is not None and "engine" in args]
    return [read_config(engine) if isinstance(engine, str) else engine for engine in engines]


def _application(application: object, folder: Path) -> object:
    args = _args_of_model(application)
    if args is None or not isinstance(application, dict):
        return application
    engine = args.get("engine")
    if isinstance(engine, str):
        engine = str(find_config(engine, beside=folder).absolute())
    elif isinstance(engine, dict):
        engine = _engine(engine, folder)
    return {**application, "args": {**args, "engine": engine}} if "engine" in args else application


def _args_of_model(application: object) -> dict[str, object] | None:
    """None where it is no model's application, or has no args."""
    if not isinstance(application, dict) or application.get("import_path") != MODEL_PATH:
        return None
    args = application.get("args")
    return args if isinstance(args, dict) else None


def _engine(engine: dict[str, object], folder: Path) -> dict[str, object]:
    for section, key in (("model", "path"), ("model", "chat_template"), ("speculation", "model")):
        engine = _beside(engine, section, key, folder)
    return engine


def _beside(engine: dict[str, object], section: str, key: str, folder: Path) -> dict[str, object]:
    """The engine's configuration with the whole path of a model, or a chat template, that lies in the folder."""
    values = engine.get(section)
    if not isinstance(values, dict) or not isinstance(path := values.get(key), str) or path in DEMO_MODELS:
        return engine
    if key == "chat_template" and is_template(path):
        return engine
    found = folder / Path(path).expanduser()
    return {**engine, section: {**values, key: str(found)}} if found.exists() else engine
