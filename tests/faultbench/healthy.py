"""Cases of the fault bench."""

CASES = ()
