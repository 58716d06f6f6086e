"""What to say when Hydra cannot compose a config: its own words, with 'did you mean' for unknown keys."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import OmegaConf

from leyden.config import WIRED, closest, conf_dir
from leyden.errors import ConfigError
from leyden.signatures import locate, parameters


def explain_composition_error(err: Exception, arguments: list[str]) -> str:
    """One message for a command line that does not compose."""
    text = str(err)
    unknown = re.search(r"Could not (?:override|append) '([^']+)'", text)
    if unknown and "not in struct" in f"{text} {err.__cause__}":
        return f"ConfigError: {_explain_unknown_key(unknown.group(1), arguments)}"
    missing = re.search(r"Could not find '([^']+)'", text) or re.search(r"Could not override '([^'@]+)'", text)
    if missing:
        group, _, option = missing.group(1).rpartition("/")
        if option == "None":
            return f"ConfigError: there is no option '{group}/None'. Write {group}=null for none."
        options = re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)
        near = closest(option, options)
        if options:
            return f"ConfigError: there is no {group} '{option}'.{near} Available: {', '.join(options)}."
    there = re.search(r"Could not append to config\. An item is already at '([^']+)'", text)
    if there:
        key = there.group(1)
        return f"ConfigError: `{key}` is in the config already. Set it without the plus: {key}=VALUE."
    quoting = ""
    if "LexerNoViableAltException" in text or "mismatched input" in text or "no viable alternative" in text:
        quoting = "\nA value with =, blanks, commas or brackets needs quotes inside quotes: 'key=\"a=b c\"'."
    cause = f"\n{err.__cause__}" if err.__cause__ and str(err.__cause__) not in text else ""
    return f"ConfigError: {text}{cause}{quoting}"


def _explain_unknown_key(key: str, arguments: list[str]) -> str:
    cfg = _compose_without(key, arguments)
    if cfg is None:
        return f"there is no key `{key}`. `python train.py --cfg job` prints all keys."
    allowed = sorted(_flat_keys(cfg))
    parent, _, name = key.rpartition(".")
    while parent and OmegaConf.select(cfg, parent) is None:
        parent, _, name = parent.rpartition(".")
    block = OmegaConf.select(cfg, parent) if parent else cfg
    siblings = [str(child) for child in block] if hasattr(block, "keys") else []
    more: list[str] = []
    if "_target_" in siblings:
        try:
            more = sorted(set(parameters(locate(block._target_))[0]) - set(siblings))
        except ConfigError:
            more = []
    wired = WIRED.get(parent, {})
    if name in wired:
        return f"`{key}` is set by Leyden. Use `{wired[name]}` instead."
    if name in more:
        return f"`{key}` is not in the config, but {block._target_} takes it. Add it: +{key}=VALUE."
    prefix = f"{parent}." if parent else ""
    near = closest(name, [key for key in siblings + more if not key.startswith("_")])
    near = near.replace("`", f"`{prefix}", 1) if near else closest(key, allowed)
    listed = ", ".join(child for child in siblings if not child.startswith("_"))
    return f"there is no key `{key}`.{near} Keys of {parent or 'the config'}: {listed}."


def _compose_without(key: str, arguments: list[str]) -> Any:
    """The config that the other arguments give, or None where they do not compose either."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    groups = [a for a in arguments if "=" in a and not a.startswith(("-", "+", "~")) and "." not in a.split("=")[0]]
    groups = [a for a in groups if "," not in a and a.split("=")[0] != key]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return compose("train", overrides=groups)
    except (HydraException, OmegaConfBaseException):
        return None


def _flat_keys(cfg: Any, prefix: str = "") -> set[str]:
    keys: set[str] = set()
    for name in cfg:
        key = f"{prefix}{name}"
        keys.add(key)
        child = cfg._get_node(name)
        if OmegaConf.is_dict(child) and cfg[name] is not None:
            keys |= _flat_keys(child, f"{key}.")
    return keys
