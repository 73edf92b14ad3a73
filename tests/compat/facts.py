"""The facts: every hook target and import of the probe, and every line of SGLang that `served` relies on.

A fact has places, the newest first: it is *there* if the first place says it, *moved* if another one does,
*absent* otherwise. `since` and `until`: the releases in which eaglelab expects it; a release that does not
agree is a finding. Snippets are compared with the source as `ast.unparse` spells it, so that formatting and
comments do not matter.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from compat.sources import Release
from eaglelab.definitions import FIELDS
from eaglelab.probe.hooks import OWN_PREFILL, Hooks
from eaglelab.releases import FIRST_WITH_PLUGINS, FIRST_WITH_PROBE, NEWEST, OLDEST, SINCE, Number

PROBE = Path(__file__).resolve().parents[2] / "eaglelab" / "probe"
RELEASES = (
    "0.5.10.post1", "0.5.11", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14", "0.5.15",
    "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23",
)  # fmt: skip
V1_UNTIL: Number = (0, 5, 13)  # the first release without the v1 worker
# What the probe needs and older releases lack; without it, it does what its docs say.
PROBE_SINCE: dict[str, Number] = {
    "EagleDraftWorker.alloc_memory_pool": FIRST_WITH_PROBE,
    "EAGLEDraftCudaGraphRunner.execute": (0, 5, 14),
    "EAGLEDraftExtendCudaGraphRunner.execute": (0, 5, 14),
    "EAGLEWorkerV2._forward_prefill_batch": OWN_PREFILL,
    "runtime_context.get_parallel": (0, 5, 14),
    "runtime_context.get_serving": (0, 5, 17),
    "cuda_graph_config.Backend": (0, 5, 14),
    "cuda_graph_config.Phase": (0, 5, 14),
    "cuda_graph_config.check_cuda_graph_backend": (0, 5, 14),
    "hook_registry.HookRegistry": FIRST_WITH_PLUGINS,
    "hook_registry.HookType": FIRST_WITH_PLUGINS,
}
Place = tuple[str, str]  # path below sglang/srt, and a class, method or function in it ("": the whole file)


@dataclass(frozen=True)
class Fact:
    """`says` is asked of the source of each place; expected from `since` on, before `until`."""

    name: str
    places: tuple[Place, ...]
    says: Callable[[str], bool]
    since: Number = (0, 0, 0)
    until: Number | None = None

    def status(self, release: Release) -> str:
        """there, moved or absent."""
        for i, (path, name) in enumerate(self.places):
            source = release.source(path, name)
            if source and self.says(source):
                return "moved" if i else "there"
        return "absent"

    def expected(self, version: Number) -> bool:
        return version >= self.since and (self.until is None or version < self.until)


def has(*snippets: str) -> Callable[[str], bool]:
    return lambda source: all(s in source for s in snippets)


def _behaviour(name: str, snippet: str | Callable[[str], bool], *places: Place) -> Fact:
    """A line of the table of `releases`: expected from the release on which the table says so."""
    says = has(snippet) if isinstance(snippet, str) else snippet
    return Fact(f"{name} (releases.py)", places, says, SINCE[name])


def steps_after_forward(source: str) -> bool:
    """The positions of draft steps are moved on after the forward, by hand or by the kernel that samples."""
    forward = source.find("self.draft_runner.forward(")
    moves = [m.start() for m in re.finditer(r"positions\.add_\(1\)|draft_topk1_postprocess\(", source)]
    return forward >= 0 and bool(moves) and min(moves) > forward


LLAMA3, LLAMA, KIMI = "models/llama_eagle3.py", "models/llama.py", "models/kimi_k25_eagle3.py"
WORKER, V1 = "speculative/eagle_worker_v2.py", "speculative/eagle_worker.py"
AUX = "model_executor/model_runner_components/spec_aux_hidden_state.py"
RUNNER = "model_executor/model_runner.py"
SPEC, ARGS = "arg_groups/speculative_hook.py", "server_args.py"
MODEL, DRAFTER = "LlamaModel", "LlamaForCausalLMEagle3"
FLASH = "layers/attention/flashattention_backend.py"
IDS = "set_eagle3_layers_to_capture"
RULES = ("val + 1 for val in layer_ids", "layer_ids[0] == 1", "max(layer_ids) == num_layers")
DEFAULTS = "[2, num_layers // 2, num_layers - 3]"

SERVED = (
    Fact("fc is skipped where the widths agree", ((LLAMA3, f"{MODEL}.forward"),),
         has("hidden_states.shape[-1] != embeds.shape[-1]", "self.fc(hidden_states)")),
    Fact("names that no parameter has are dropped", ((LLAMA3, f"{DRAFTER}.load_weights"),),
         has("if param_name in params_dict", "name if name in params_dict else f'model.{name}'")),
    Fact("d2t holds offsets", ((LLAMA3, f"{DRAFTER}.load_weights"),),
         has("loaded_weight + torch.arange(loaded_weight.shape[0])")),
    Fact("the head is the target's without draft_vocab_size", ((LLAMA3, f"{DRAFTER}.__init__"),),
         has("config.draft_vocab_size is None", "self.load_lm_head_from_target = True")),
    Fact("a tied head is the embedding", ((LLAMA3, f"{DRAFTER}.__init__"),),
         has("self.lm_head = self.model.embed_tokens")),
    _behaviour("several-layers", "for i in range(config.num_hidden_layers)", (LLAMA3, f"{MODEL}.__init__")),
    Fact("midlayer is another name of layers.0", ((LLAMA3, f"{DRAFTER}.load_weights"),),
         has("'midlayer': 'layers.0'"), SINCE["several-layers"]),
    Fact("one layer, called midlayer", ((LLAMA3, f"{MODEL}.__init__"),), has("self.midlayer ="),
         until=SINCE["several-layers"]),
    _behaviour("chunk-count", "self.hidden_size_in * self.num_aux_hidden_states",
               (LLAMA3, f"{MODEL}.__init__")),
    _behaviour("fc-norm", "self.fc_norm is not None", (LLAMA3, f"{MODEL}.forward")),
    _behaviour("norm-output", "getattr(config, 'norm_output', False)", (LLAMA3, f"{MODEL}.__init__")),
    _behaviour("norm-before-fc", "self.input_norm(hidden_states)", (LLAMA3, f"{MODEL}.forward")),
    _behaviour("draft-window", "speculative_draft_window_size", (LLAMA3, f"{DRAFTER}.__init__"),
               (LLAMA3, f"{DRAFTER}.get_attention_sliding_window_size")),
    _behaviour("step-positions", steps_after_forward, (WORKER, "EagleDraftWorker.draft_forward")),
    _behaviour("mla-drafter", "class Eagle3DeepseekV2ForCausalLM", (KIMI, "")),
    _behaviour("mla-norms", has("'fc_norm'", "'norm_output'"), (KIMI, "")),
    _behaviour("deepseek-ids", RULES[1], ("models/deepseek_v2.py", IDS)),
    _behaviour("gpt-oss-ids", RULES[2], ("models/gpt_oss.py", IDS)),
    Fact("Kimi hands its ids on to DeepSeek's rule", (("models/kimi_k25.py", IDS),),
         has("self.language_model.set_eagle3_layers_to_capture(layer_ids)")),
    Fact("Llama: id + 1; without ids 2, n/2, n-3", ((LLAMA, IDS),), has(RULES[0], DEFAULTS)),
    Fact("layer ids from the nested eagle_config only", ((AUX, ""), (RUNNER, "ModelRunner")),
         has("eagle_config['eagle_aux_hidden_state_layer_ids']", "'use_aux_hidden_state', True")),
    Fact("the embedding is the target's where widths agree", ((LLAMA, "LlamaForCausalLM.set_embed"),),
         has("self.config.target_hidden_size != self.config.hidden_size",
             "self.model.embed_tokens.weight = embed")),
    Fact("EAGLE replaces embedding and head", ((WORKER, "EagleDraftWorker.init_lm_head"),),
         has("self.draft_runner.model.set_embed_and_head(embed, head)",
             "self.draft_runner.model.set_embed(embed)")),
    Fact("EAGLE3 applies d2t, EAGLE does not", ((WORKER, "EagleDraftWorker.init_lm_head"),),
         has("self.hot_token_id = self.draft_runner.model.hot_token_id.to(embed.device)")),
    Fact("EAGLE3 ignores a token map", ((WORKER, "EagleDraftWorker.init_token_map"),),
         has("self.speculative_algorithm.is_eagle3()", "self.hot_token_id = None")),
    Fact("logits are cut to the vocabulary", (("layers/logits_processor.py", ""),),
         has("[:, :self.vocab_size]")),
    Fact("float32 is served as float16", (("configs/model_config.py", "_get_and_verify_dtype"),),
         has("if config_dtype == torch.float32:", "torch_dtype = torch.float16")),
    Fact("a window counts the token itself besides", ((FLASH, ""),), has("(layer.sliding_window_size, 0")),
    Fact("NEXTN is EAGLE", ((SPEC, ""), (ARGS, "")), has("'NEXTN'", "'EAGLE'")),
    Fact("a chain has S + 1 draft tokens", ((SPEC, ""), (ARGS, "ServerArgs")),
         has("speculative_num_draft_tokens is adjusted to speculative_num_steps + 1")),
    Fact("Llama and Grok: a tree by default", ((SPEC, ""), (ARGS, "auto_choose_speculative_params")),
         has("['LlamaForCausalLM']", "['Grok1ForCausalLM', 'Grok1VForCausalLM']", "return (5, 4, 8)")),
    _behaviour("accept-rate", has("draft_per_round", "self.spec_num_forward_ct * draft_per_round"),
               ("managers/scheduler_components/metrics_reporter.py", ""),
               ("observability/scheduler_metrics_mixin.py", "")),
    Fact("v1 worker: the incident's", ((V1, "EAGLEWorker"),),
         has("self.draft_model_runner.model.set_embed_and_head(embed, head)",
             "self.draft_model_runner.model.hot_token_id.to(embed.device)"), until=V1_UNTIL),
    *(Fact(f"responses count {what}", (("managers/tokenizer_manager.py", ""),),
           lambda source, names=names: any(f"'{name}'" in source for name in names))
      for what, names in FIELDS.items() if what != "completion"),
)  # fmt: skip


def hook_facts() -> list[Fact]:
    """One fact a hook target of the probe, from the probe's own list."""
    found = []
    old, new = (list(Hooks(None, v).targets()) for v in (OLDEST, NEWEST))  # type: ignore[arg-type]
    for target in dict.fromkeys([*new, *old]):
        module, _, name = target.removeprefix("sglang.srt.").rpartition(".")
        module, _, owner = module.rpartition(".")
        name = f"{owner}.{name}"
        places = ((module.replace(".", "/") + ".py", name),)
        found.append(Fact(f"hook {name}", places, bool, PROBE_SINCE.get(name, (0, 0, 0))))
    return found


def import_facts(folder: Path = PROBE) -> list[Fact]:
    """One fact a name that the probe imports from SGLang, read off the probe's sources."""
    names = set()
    for file in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.srt."):
                names |= {(node.module.removeprefix("sglang.srt."), a.name) for a in node.names}
    found = []
    for module, name in sorted(names):
        short = f"{module.rpartition('.')[2]}.{name}"
        path = module.replace(".", "/")
        since = PROBE_SINCE.get(short, (0, 0, 0))
        found.append(
            _Import(f"import {short}", ((f"{path}.py", name), (f"{path}/__init__.py", name)), bool, since)
        )
    return found


class _Import(Fact):
    """A name that a module has: defined there, or imported into it."""

    def status(self, release: Release) -> str:
        return "there" if any(release.defines(path, name) for path, name in self.places) else "absent"


class _Rules(Fact):
    """Every target's rule for layer ids is one that eaglelab knows, or hands the ids on."""

    def status(self, release: Release) -> str:
        return "absent" if unknown_rules(release) else "there"


def unknown_rules(release: Release) -> list[str]:
    """Models whose `set_eagle3_layers_to_capture` is of no known form."""
    found = []
    for path in release.files("models/*.py"):
        for node in ast.walk(release.tree(path) or ast.Module([], [])):
            if not isinstance(node, ast.ClassDef):
                continue
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == IDS:
                    text = "\n".join(ast.unparse(line) for line in method.body)
                    handed_on = f".{IDS}(" in text or re.search(
                        r"= (list\()?(layers_to_capture|layer_ids)\b", text
                    )
                    if not (handed_on or any(rule in text for rule in RULES)):
                        found.append(f"{path}:{node.name}")
    return found


def all_facts() -> list[Fact]:
    """Every fact, those of the probe first."""
    rules = _Rules("every target's rule for layer ids is known", (), bool)
    return [*hook_facts(), *import_facts(), *SERVED, rules]


def needed(path: str, content: bytes) -> bool:
    """Whether a file of the wheel is one that a fact looks at."""
    return path in _PATHS or (path.startswith("models/") and IDS.encode() in content)


_PATHS = {path for fact in all_facts() for path, _ in fact.places}
KEY = hashlib.sha256("\n".join(sorted(_PATHS)).encode()).hexdigest()
