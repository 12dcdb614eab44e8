"""Keeps docs/settings.md what its script would write."""

from __future__ import annotations

import re
import runpy

from pages import DOCS


def test_the_settings_page_is_current() -> None:
    script = runpy.run_path(str(DOCS / "make_settings.py"))
    wanted = "run `python docs/make_settings.py`"
    assert (DOCS / "settings.md").read_text() == script["page"](), wanted


def test_every_setting_of_a_preset_is_on_the_page() -> None:
    from qfleet.cli.flags import flag_of
    from qfleet.cli.overrides import visible_settings
    from qfleet.presets import preset

    listed = set(re.findall(r"`(--[\w.-]+)`", (DOCS / "settings.md").read_text()))
    settings = [setting for setting in visible_settings(preset("cartpole")) if not setting.section]
    missing = [flag_of(s.name) for s in settings if not s.name.endswith("kind") and flag_of(s.name) not in listed]
    assert missing == []
