"""Faults of which layers of the target feed the drafter."""

from eaglelab.catalogue import Fault

FAULTS = (
    Fault(
        "ids-plus-one",
        23,
        "the engine adds 1 to layer ids that already count so",
        "two conventions are in use, output of layer i and input of layer i; today deepseek_v2 and "
        "glm4_moe_lite add 1 only if the first id is 1, gpt_oss unless the largest is the number of layers, "
        "most others always",
        ("config", "launch", "capture"),
        "write ids that mean the trained depths on this architecture (`eaglelab inspect` prints them)",
        3,
        ("check:feed-depths", "check:stored-features-shifted", "check:feed-mismatch"),
        "where one file is given as trained and served, its ids are taken at their word: only stored "
        "features (--features) show it then",
        symptom="-0.10 accept length (kimi-k2.5-eagle3-mla)",
        threads="sglang#25454",
        source="sglang 0.5.23 set_eagle3_layers_to_capture of every target; before 0.5.13 DeepSeek and Kimi "
        "add 1 to every id (`make compat`)",
        inferred="drafters with ids [2, 30, 58] may now be read one layer early",
    ),
    Fault(
        "ids-off-by-one",
        24,
        "ids in one engine's convention are served by another's",
        "vLLM's id k is the output of layer k - 1; the drafter was written for SGLang",
        ("config", "capture"),
        "add 1 to the ids",
        3,
        ("check:feed-depths", "check:stored-features-shifted", "check:feed-mismatch"),
        "where one file is given as trained and served, its ids are taken at their word: only stored "
        "features (--features) show it then",
        symptom="first position about 10 % in place of 45 % (MiniMax-M2.5)",
        threads="vllm#43671",
    ),
    Fault(
        "ids-missing",
        25,
        "the config lists no layer ids, and the engine takes its default without a word",
        "SGLang reads the nested eagle_config only, behind an except that says nothing; its width is read "
        "from top-level keys too",
        ("config",),
        "write the ids in eagle_config and at the top",
        3,
        ("diff:depths", "check:feed-depths"),
        symptom="1.21 % (341 of 28,281), 1.036 in place of 2.77 (Llama-3.3-70B)",
        threads="vllm#50170",
        source="sglang 0.5.23 spec_aux_hidden_state.py",
    ),
    Fault(
        "ids-hard-coded",
        26,
        "the engine ignores the config's layer ids",
        "ids are written into the engine for one model",
        ("config", "launch", "log"),
        "upgrade the engine",
        3,
        ("check:feed-depths", "check:feed-mismatch"),
        symptom="1.00 -> 2.39 (gpt-oss-120b v3)",
        threads="tokenspeed#526 llama.cpp#18039 llama.cpp#25794",
    ),
    Fault(
        "id-past-the-last-layer",
        27,
        "a listed layer lies past the end, or its output is normed on one side only",
        "ids [24, 30, 36] moved by one leave the model; the last one is before the final norm in SGLang, "
        "after it in transformers",
        ("config", "capture"),
        "an engine that captures after its last layer, and ids that it has",
        3,
        ("check:engine-refuses-drafter", "check:feed-depths"),
        symptom="a crash, 5760 against 8640; then low; fixed: 2.680 (v3), 2.224 (long), 1.921 (short)",
        threads="sglang#32334 sglang#32226 SpeCo#21 Automodel#3083",
    ),
    Fault(
        "embedding-counted",
        28,
        "one side counts the embedding as a layer's output",
        "transformers' hidden_states[0] is the embedding; trainers number from there or from the first layer",
        ("config", "stored data", "capture"),
        "write ids as outputs of layers on both sides",
        3,
        ("check:feed-depths", "check:stored-features-shifted", "check:feed-mismatch"),
        "where one file is given as trained and served, its ids are taken at their word: only stored "
        "features (--features) show it then",
        threads="BaldEagle#18 EAGLE#213 EAGLE#239 SpecForge#240",
        source="SafeAILab captures before 2, n//2, n-3; SpecForge's file for gpt-oss-120B says [1, 17, 33], "
        "its formula [1, 17, 32]",
    ),
    Fault(
        "ids-copied-in-conversion",
        29,
        "a conversion copies the ids, although the destination counts otherwise",
        "a published conversion keeps [1, 46, 90] where ids of vLLM are meant",
        ("config", "capture"),
        "add 1 to the ids; `eaglelab convert` translates them",
        3,
        ("check:feed-depths", "check:feed-mismatch"),
        "where one file is given as trained and served, its ids are taken at their word: only stored "
        "features (--features) show it then",
        threads="nm-testing/Qwen3-235B-A22B-EAGLE3-converted-speculators-lmsys",
        inferred="the loss, and that it is one block",
    ),
    Fault(
        "stored-features-shifted",
        31,
        "the trainer's stored features lie one block beside its ids",
        "old dumps of speculators (0.3, 0.4) capture after a layer with ids that mean before it; "
        "Model-Optimizer's two dumps differ by one",
        ("stored data",),
        "dump again, or shift the ids",
        3,
        ("check:stored-features-shifted", "rung:3", "check:feed-mismatch"),
        source="speculators 0.3 custom_worker; Model-Optimizer",
        inferred="unreported, the loss is not known",
    ),
    Fault(
        "hybrid-attention-target",
        32,
        "some layers of a hybrid target cannot be captured",
        "no hook on linear-attention layers",
        ("config", "capture"),
        "choose ids of attention layers, or an engine with hooks on all",
        3,
        ("check:features-not-finite", "check:feed-depths"),
        symptom="NaN, or an assertion",
        threads="thoughtworks/Qwen3-Coder-Next-Eagle3 llama.cpp#24541 llama.cpp#25604 vllm#45734",
    ),
    Fault(
        "chunk-order",
        0,
        "the chunks of a row come in another order than the columns of fc were trained in",
        "engines hand over depths ascending, each once, and so does vLLM to speculators; SpecForge's "
        "transformers backend concatenates in the order of its ids (its SGLang backend ascending: then "
        "nothing is wrong), and a conversion that sorts the ids must move the columns of fc alike",
        ("config", "tensors", "replay"),
        "convert again: `eaglelab convert` moves the columns",
        4,
        ("diff:depths", "check:feed-depths", "check:stored-features-shifted", "replay:chunk-order"),
        source="sglang 0.5.23 models/llama.py and vllm 0.21.0 models/llama.py collect in the order of the "
        "layers; specforge modeling/target/eagle3_target_model.py; run here",
    ),
)
