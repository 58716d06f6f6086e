"""The top level of the config, its resolvers and `validate`.

What belongs here: which sections exist, and the check of a whole composed config. The rules of a section live
with its owner (types and ranges in the annotations of the constructor, rules between its keys in a
`config_problems` class method). Nothing here imports torch at import time, so that `--help` stays quick.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from annotated_types import Ge, Gt, Le, Lt
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from leyden.errors import ConfigError
from leyden.signatures import locate, parameter_types, parameters

Seed = Annotated[int, Ge(0), Lt(2**32)]

# Keys whose value the data fixes. `null` in the config means "take it from the data".
FACTS = frozenset(
    {
        "class_names",
        "feature_names",
        "image_size",
        "in_channels",
        "max_length",
        "num_classes",
        "num_features",
        "num_targets",
        "target_mean",
        "target_std",
        "vocab_size",
    }
)

# Arguments that the wiring fills in, so that the config need not (and must not) name them.
WIRED: dict[str, dict[str, str]] = {
    "model": {"optim": "optim", "schedule": "schedule"},
    "logger": {"save_dir": "paths.outputs"},
    "trainer": {
        "accelerator": "hardware.accelerator",
        "devices": "hardware.devices",
        "strategy": "hardware.strategy",
        "num_nodes": "hardware",
        "precision": "engine.precision",
        "accumulate_grad_batches": "engine.accumulate_batches",
        "gradient_clip_val": "engine.gradient_clip_norm",
        "gradient_clip_algorithm": "engine.gradient_clip_norm",
        "deterministic": "engine.deterministic",
        "logger": "logger",
        "callbacks": "callbacks",
        "default_root_dir": "paths.outputs",
        "enable_progress_bar": "callbacks.progress",
        "enable_checkpointing": "callbacks.checkpoint",
        "enable_model_summary": "callbacks",
        "benchmark": "hardware.cudnn_benchmark",
        "use_distributed_sampler": "data",
        "plugins": "engine",
    },
}

_SHARE_OR_COUNT = Annotated[float, Ge(0), Le(1)] | Annotated[int, Ge(0)] | None

# Ranges of arguments that belong to other libraries, which do not state them.
_FOREIGN_RULES: dict[str, dict[str, Any]] = {
    "trainer": {
        "max_epochs": Annotated[int, Ge(1)],
        "max_steps": Annotated[int, Ge(1)] | Literal[-1],
        "log_every_n_steps": Annotated[int, Ge(1)],
        "check_val_every_n_epoch": Annotated[int, Ge(1)] | None,
        "num_sanity_val_steps": Annotated[int, Ge(0)],
        "limit_train_batches": _SHARE_OR_COUNT,
        "limit_val_batches": _SHARE_OR_COUNT,
        "limit_test_batches": _SHARE_OR_COUNT,
        "val_check_interval": Annotated[float, Gt(0), Le(1)] | Annotated[int, Ge(1)] | None,
        "fast_dev_run": bool | Annotated[int, Ge(1)],
    },
    "optim": {
        "lr": Annotated[float, Gt(0)],
        "weight_decay": Annotated[float, Ge(0)],
        "momentum": Annotated[float, Ge(0), Lt(1)],
        "eps": Annotated[float, Gt(0)],
    },
}


def _top_level(
    name: str,
    seed: Seed,
    test: bool,
    resume: str | None,
    resume_force: bool,
    objective: Mapping[str, Any],
    paths: Mapping[str, Any],
    data: Mapping[str, Any],
    model: Mapping[str, Any],
    optim: Mapping[str, Any],
    schedule: Mapping[str, Any],
    engine: Mapping[str, Any],
    hardware: Mapping[str, Any],
    trainer: Mapping[str, Any],
    callbacks: Mapping[str, Any] | None,
    logger: Mapping[str, Any] | None,
) -> None:
    """The sections of a config and their types (the signature is the schema)."""


def _objective(metric: str, mode: Literal["min", "max"]) -> None:
    """The metric that picks the best checkpoint and that sweeps compare."""


def _paths(outputs: str, data: str) -> None:
    """Where run folders and downloaded data sets go."""


def conf_dir() -> Path:
    """The folder of Leyden's own config groups: beside the code when installed, `conf/` in a checkout."""
    inside = Path(__file__).parent / "conf"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "conf"


def conf_dirs() -> list[Path]:
    """Folders searched for configs, first match wins: `conf/` of the current folder, then Leyden's own."""
    own = conf_dir()
    here = Path.cwd() / "conf"
    return [here, own] if here.is_dir() and here.resolve() != own.resolve() else [own]


def list_options(group: str) -> dict[str, str]:
    """The options of a config group with the first comment line of each file as its description."""
    options: dict[str, str] = {}
    for folder in conf_dirs():
        for path in sorted((folder / group).glob("*.yaml")):
            lines = path.read_text(encoding="utf-8").splitlines()
            comments = (line.lstrip("# ").rstrip() for line in lines if line.startswith("#"))
            first = next((line for line in comments if line and not line.startswith("@package")), "")
            options.setdefault(path.stem, first)
    return dict(sorted(options.items()))


def closest(word: str, allowed: Sequence[str]) -> str:
    """A 'did you mean' clause for `word`, empty when nothing allowed is near."""
    near = difflib.get_close_matches(word, allowed, n=1, cutoff=0.6)
    return f" Did you mean `{near[0]}`?" if near else ""


def validate(cfg: DictConfig) -> None:
    """Checks a whole composed config without touching data or hardware.

    Raises:
        ConfigError: naming every problem found, one per line.
    """
    problems = list(_missing_values(cfg)) or list(_problems(cfg))
    if problems:
        head = "" if len(problems) == 1 else f"{len(problems)} problems in the configuration:\n  - "
        raise ConfigError(head + "\n  - ".join(problems))


def _missing_values(cfg: DictConfig) -> Iterator[str]:
    missing = sorted(_missing_keys(OmegaConf.to_container(cfg, resolve=False), ""))
    if missing:
        keys = ", ".join(f"`{key}`" for key in missing)
        example = f"{missing[0]}=VALUE"
        yield f"These keys need a value and have none: {keys}. Give them on the command line, e.g. {example}."


def _missing_keys(node: Any, key: str) -> Iterator[str]:
    """Keys whose own value is `???` (OmegaConf's function stops at the first interpolation to one of them)."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _missing_keys(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _missing_keys(value, f"{key}[{index}]")
    elif node == "???":
        yield key


def _problems(cfg: DictConfig) -> Iterator[str]:
    try:
        plain = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as err:
        yield f"An interpolation in the config cannot be resolved: {err}".replace("\n", " ")
        return
    plain = cast(dict[str, Any], plain)
    yield from _text_none(plain, "")
    yield from _check_call(_top_level, plain, "")
    for key, owner in (("objective", _objective), ("paths", _paths)):
        if isinstance(plain.get(key), dict):
            yield from _check_call(owner, plain[key], key)
    from leyden.engine.settings import Engine
    from leyden.hardware.plan import plan_hardware

    for key, section_owner in (("engine", Engine), ("hardware", plan_hardware)):
        if isinstance(plain.get(key), dict):
            yield from _check_call(section_owner, plain[key], key)
    if isinstance(plain.get("engine"), dict):
        yield from (problem.format(key="engine") for problem in Engine.config_problems(plain["engine"]))
    for key in ("data", "model", "optim", "schedule", "trainer", "callbacks", "logger"):
        yield from _check_blocks(plain.get(key), key)
    yield from _blocks_without_target(plain)
    yield from _objective_problems(plain)


def _text_none(node: Any, key: str) -> Iterator[str]:
    """`key=None` on the command line is the text "None"; Hydra's word for nothing is `null`."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _text_none(value, f"{key}.{name}" if key else str(name))
    elif node == "None":
        yield f"`{key}` is the text 'None'. Write {key}=null for no value."


def _blocks_without_target(plain: dict[str, Any]) -> Iterator[str]:
    """Sections, callbacks and loggers that name nothing to build."""
    blocks: dict[str, Any] = {
        key: plain[key] for key in ("data", "model", "optim", "schedule", "trainer") if key in plain
    }
    blocks = {key: block for key, block in blocks.items() if isinstance(block, dict)}  # others are reported already
    for group in ("callbacks", "logger"):
        if isinstance(plain.get(group), dict):
            blocks |= {f"{group}.{name}": block for name, block in plain[group].items() if block is not None}
    for key, block in blocks.items():
        if not isinstance(block, dict) or "_target_" not in block:
            yield f"`{key}` builds nothing, since it has no `_target_`. Name a class: +{key}._target_=MODULE.CLASS."


def _check_blocks(node: Any, key: str) -> Iterator[str]:
    """Checks every `_target_` block in a section against the signature of what it builds."""
    if isinstance(node, list):
        for index, value in enumerate(node):
            yield from _check_blocks(value, f"{key}[{index}]")
    if not isinstance(node, dict):
        return
    if "_target_" in node:
        try:
            target = locate(node["_target_"])
        except ConfigError as err:
            yield f"`{key}._target_`: {err}"
        else:
            arguments = {name: value for name, value in node.items() if not name.startswith("_")}
            top, _, below = key.partition(".")
            section = top if not below or (top == "logger" and "." not in below) else ""
            yield from _check_call(target, arguments, key, bool(node.get("_partial_")), section)
            rules = getattr(target, "config_problems", None)
            if rules is not None:
                yield from (problem.format(key=key) for problem in rules(arguments))
    for name, value in node.items():
        yield from _check_blocks(value, f"{key}.{name}")


def _check_call(
    target: Callable[..., Any], values: dict[str, Any], key: str, partial: bool = False, section: str = ""
) -> Iterator[str]:
    """Problems of calling `target(**values)`: unknown and missing names, types and ranges."""
    named, takes_any = parameters(target)
    wired = WIRED.get(section, {})
    prefix = f"{key}." if key else ""
    for name in values:
        if name in wired:
            yield f"`{prefix}{name}` is set by Leyden. Use `{wired[name]}` instead."
        elif name not in named and not takes_any:
            allowed = sorted(set(named) - set(wired))
            near = closest(name, allowed).replace("`", f"`{prefix}", 1) if closest(name, allowed) else ""
            listed = "" if near else f" Allowed: {', '.join(allowed)}."
            yield f"There is no key `{prefix}{name}`.{near}{listed}"
    if not partial:
        given = {*values, *wired, *FACTS}
        for name, parameter in named.items():
            if parameter.default is parameter.empty and name not in given:
                yield f"`{prefix}{name}` is required and was not given. Add it: +{prefix}{name}=VALUE."
    hints = {**parameter_types(target), **_FOREIGN_RULES.get(section, {})}
    typed = {name: hints[name] for name in values if name in hints and name not in wired}
    yield from _type_problems(typed, values, prefix)


# Pydantic's words for what a YAML file has
IN_YAML = {
    "an instance of Sequence": "a list",
    "a valid tuple": "a list",
    "a valid list": "a list",
    "an instance of Mapping": "a mapping",
    "a valid dictionary": "a mapping",
}


def _type_problems(types: dict[str, Any], values: dict[str, Any], prefix: str) -> Iterator[str]:
    """Checks values against annotations (with annotated-types ranges) by pydantic's strict rules."""
    from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError

    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    for name, annotation in types.items():
        value = values[name]
        if _holds_block(value):
            continue  # blocks are built first; each is checked by itself
        if value is None and name in FACTS:
            continue
        try:
            # A Sequence annotation gets lists here, a tuple annotation does not: both mean a YAML list.
            value = tuple(value) if isinstance(value, list) and "tuple[" in str(annotation) else value
            TypeAdapter(annotation, config=config).validate_python(value)
        except ValidationError as err:
            reasons = []
            for detail in err.errors():
                # A list too short for a tuple lacks a "field", in pydantic's words
                reason = "longer" if detail["type"] == "missing" else detail["msg"].replace("Input should be ", "")
                reason = IN_YAML.get(reason, reason)
                if reason not in reasons and not reason.startswith(("None", "an instance of")):
                    reasons.append(reason)
            yield f"`{prefix}{name}` must be {' or '.join(reasons) or 'valid'}, got {value!r}."
        except (PydanticSchemaGenerationError, TypeError, AttributeError):
            continue  # an annotation that says nothing about plain values, e.g. a Protocol of another library


def _holds_block(value: Any) -> bool:
    if isinstance(value, dict):
        return "_target_" in value or any(map(_holds_block, value.values()))
    return isinstance(value, list) and any(map(_holds_block, value))


def _objective_problems(plain: dict[str, Any]) -> Iterator[str]:
    """The objective must be a metric that the task logs."""
    model, objective = plain.get("model"), plain.get("objective")
    if not isinstance(model, dict) or not isinstance(objective, dict):
        return
    try:
        task = locate(model.get("_target_", ""))
    except ConfigError:
        return  # already reported where the blocks are checked
    names = getattr(task, "metric_names", None)
    metric = objective.get("metric")
    if names is None or not isinstance(metric, str):
        return  # a plain LightningModule: what it logs is known only when it runs
    logged = [f"{phase}/{name}" for phase in ("train", "val", "test") for name in ("loss", *names)]
    if metric not in logged:
        yield (
            f"`objective.metric` is '{metric}', which is never logged.{closest(metric, logged)} "
            f"Logged: {', '.join(logged)}."
        )
    elif metric.startswith("test/") and plain.get("test") is False:
        yield f"`objective.metric` is '{metric}', but `test` is false, so it is never known. Set test=true."


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat
