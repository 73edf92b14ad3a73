"""eaglelab: where between the trainer and the server did my EAGLE-3 drafter lose its acceptance?

Import what you need from its modules (`eaglelab.capture`, `eaglelab.wiring`, ...); importing the package
itself loads neither torch nor sglang.
"""

__version__ = "0.1.0"
