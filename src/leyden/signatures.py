"""What the callables that a config names take."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any, Unpack, get_args, get_origin, get_type_hints

from leyden.errors import ConfigError


def locate(path: str) -> Callable[..., Any]:
    """The class or function at a dotted path.

    Raises:
        ConfigError: when there is none.
    """
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError, TypeError) as err:
        raise ConfigError(f"there is nothing to build at '{path}' ({str(err).splitlines()[0]}).") from err
    if not callable(found):
        raise ConfigError(f"'{path}' is not a class or function.")
    return found


def parameters(target: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """The named parameters of a callable (of `Unpack[...]` too), and whether it also takes any other keyword."""
    try:
        found = inspect.signature(target).parameters
    except ValueError:  # some built-in classes do not say what they take
        return {}, True
    named = {
        name: parameter
        for name, parameter in found.items()
        if parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    rest = next((p.name for p in found.values() if p.kind is inspect.Parameter.VAR_KEYWORD), None)
    unpacked = _unpacked(target, rest)
    for name in unpacked:
        named[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
    return named, rest is not None and not unpacked


def _unpacked(target: Callable[..., Any], rest: str | None) -> dict[str, Any]:
    """Name -> type of the keywords that a callable takes as `**rest: Unpack[SomeTypedDict]`."""
    annotation = _hints(target).get(rest) if rest else None
    if get_origin(annotation) is not Unpack:
        return {}
    return get_type_hints(get_args(annotation)[0], include_extras=True)


def parameter_types(target: Callable[..., Any]) -> dict[str, Any]:
    """Name -> type of what a callable takes, as far as it says so."""
    rest = next((name for name, hint in _hints(target).items() if get_origin(hint) is Unpack), None)
    return {**_hints(target), **_unpacked(target, rest)}


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    function = target.__init__ if inspect.isclass(target) else target
    try:
        return get_type_hints(inspect.unwrap(function), include_extras=True)
    except (NameError, TypeError):  # a foreign library's annotations that only its type checker can read
        return {}
