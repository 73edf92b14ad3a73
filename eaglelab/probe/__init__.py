"""The probe: runs inside SGLang as a general plugin, idle until armed."""


def register() -> None:
    """Entry point of the plugin group `sglang.srt.plugins`."""
