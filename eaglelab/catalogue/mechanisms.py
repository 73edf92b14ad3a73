"""Findings of general mechanisms: they place a fault on its rung also when it has no name."""

from eaglelab.catalogue import Fault

FAULTS = (
    Fault(
        "feed-width", 0, "the drafter is fed rows of another width than it was trained on",
        "launch and config decide the width", ("capture",), "undo the cause that explains it", 4,
        ("check:feed-width",), source="sglang 0.5.23 models/llama_eagle3.py: it decides whether fc runs",
    ),
    Fault(
        "feed-depths", 0, "the drafter is fed other depths of the target than it was trained on",
        "layer ids that mean something else in this engine, or rows that are no depth at all", ("capture",),
        "make the ids mean the trained depths in this engine", 3, ("check:feed-depths",),
    ),
    Fault(
        "features-not-finite", 0, "what the drafter is fed holds NaN or infinity",
        "an overflow, or rows that were never written", ("capture",),
        "look at the target's dtype and attention backend", 3, ("check:features-not-finite",),
    ),
    Fault(
        "engine-refuses-drafter", 0, "this engine does not start with this drafter",
        "a class, a field or a shape that it does not know", ("config", "tensors", "launch"),
        "as the finding says; often `eaglelab convert`", 4, ("check:engine-refuses-drafter",),
    ),
    Fault(
        "tensors-dropped", 0, "tensors of the file find no parameter and are dropped without a word",
        "names that this engine's loader does not know", ("tensors",),
        "rename them as the loader wants", 4, ("check:tensors-dropped", "diff:dropped"),
    ),
    Fault(
        "parameters-not-loaded", 0, "parameters of the engine find no tensor and keep their initial values",
        "names that this engine's loader does not know, or tensors that were not exported", ("tensors",),
        "export the missing tensors, or rename", 4, ("check:parameters-not-loaded", "diff:unloaded"),
    ),
    Fault(
        "conversion-changed-tensors", 0, "the file that is served holds other numbers than the trainer's",
        "a conversion that casts, reorders or overwrites tensors, or a copy of another training run",
        ("tensors",), "convert again, with a converter that carries every tensor over", 4,
        ("check:conversion-changed-tensors",),
    ),
    Fault(
        "feed-difference", 0, "config and launch say that the drafter is fed otherwise than it was trained",
        "a field of the feed differs and no known cause explains it", ("config", "launch"),
        "make the served value the trained one", 3, ("check:feed-difference",),
    ),
    Fault(
        "wiring-difference", 0, "config and launch say that the drafter is wired otherwise than in training",
        "a field of the wiring differs and no known cause explains it", ("config", "tensors", "launch"),
        "make the served value the trained one", 4, ("check:wiring-difference",),
    ),
    Fault(
        "feed-mismatch", 0, "fed by the server the drafter accepts less than fed by the trainer's rows",
        "the features differ: depth, order, norm, dtype, basis, or another target", ("stored data", "replay"),
        "compare both rows", 3, ("check:feed-mismatch", "rung:3"),
    ),
    Fault(
        "wiring-mismatch", 0, "wired as served the drafter accepts less than wired as trained",
        "a difference of the wiring, priced", ("replay",),
        "see the differences of the wiring", 4, ("check:wiring-mismatch", "rung:4"),
    ),
    Fault(
        "runtime-mismatch", 0, "the server drafts other tokens than its launch and checkpoint say",
        "kernels, graphs, caches, stale rows; or eaglelab is wrong about the engine", ("replay",),
        "compare with graphs and caches off", 5, ("check:runtime-mismatch", "rung:5"),
    ),
    Fault(
        "weights-not-loaded", 0, "live parameters are not what the file holds",
        "a loader that drops, converts or shares without a word", ("tensors", "capture"),
        "give the tensors the names that the loader takes", 5, ("check:weights-not-loaded",),
    ),
    Fault(
        "weights-not-sane", 0, "the file holds numbers that were never trained",
        "zeros, one constant, NaN or infinity", ("tensors",),
        "export again, and look at the training run", 2, ("check:weights-not-sane",),
    ),
    Fault(
        "counters-disagree", 0, "the server's counters and the capture count differently",
        "requests recorded in part, or other traffic in the same counters", ("log", "capture"),
        "capture again", 5, ("check:counters-disagree",),
    ),
    Fault(
        "capture-incomplete", 0, "some of our requests were recorded in part",
        "events dropped because recording would have slowed the server, or a full disk", ("capture",),
        "as the finding says; fewer prompts at once", 5, ("check:capture-incomplete",),
    ),
    Fault(
        "ranks-disagree", 0, "ranks that must hold the same rows or tokens hold something else",
        "a collective between them that went wrong", ("capture",),
        "look at all-reduce kernels, their versions and the devices", 5, ("check:ranks-disagree",),
    ),
)  # fmt: skip
