"""The lessons' pieces, a module a lesson: what is looked at, and the checks of the reader's own functions.

The notebooks in notebooks/lessons/ hold the exercises and, folded, their answers. A check calls the reader's
function on cases that it has not seen, compares with an independent result, and says in words what is wrong.
"""

from __future__ import annotations

LESSONS = {  # notebook -> its title
    "1_speculative_decoding": "Speculative decoding and its arithmetic",
    "2_eagle3_from_tensors_up": "EAGLE-3 from tensors up",
    "3_the_incident": "The incident",
    "4_layers_offsets_conventions": "Layers, offsets and conventions",
    "5_trees": "Trees",
    "6_build_your_own_check": "Build your own check",
}
