"""Error that refuses a setting, with a code by which users and tests find the refusal.

A code never changes its meaning; the wording of a message may. The first digit names the kind:

- DS1xx: the value of one setting;
- DS2xx: settings that contradict each other;
- DS3xx: the text of a config file;
- DS4xx: settings that do not fit the data or the network.

``docs/refusals.md`` lists all codes, each with an example of its message.
"""

from __future__ import annotations


class SettingError(ValueError):
    """Error for a wrong setting; its text ends with a code: ``optim.clip must be ... (DS120)``.

    Attributes:
        code: the code, such as ``DS120``, by which users and tests find the error.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code = code

    def __str__(self) -> str:
        return f"{self.args[1]} ({self.code})"
