"""Hydra finds this by its place: configs of the current folder's `conf/` come before Leyden's own."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from leyden.config import conf_dirs


class LeydenSearchPath(SearchPathPlugin):
    """Adds `conf/` of the current folder in front of the search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in conf_dirs()[:-1]:
            search_path.prepend("leyden-user", f"file://{folder}")
