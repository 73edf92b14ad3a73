"""Runs in the server's environment: what genuine SGLang itself does with launches, layer ids and drafters.

usage: genuine.py JOB.json ANSWER.json
"""

import hashlib
import importlib
import json
import sys
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from sglang.srt.server_args import PortArgs, prepare_server_args

SENTINEL = 12345.5  # in every parameter before loading: what still holds it was never filled
FIELDS = {
    "algorithm": "speculative_algorithm",
    "steps": "speculative_num_steps",
    "topk": "speculative_eagle_topk",
    "draft_tokens": "speculative_num_draft_tokens",
    "tp_size": "tp_size",
    "dtype": "dtype",
    "draft_window": "speculative_draft_window_size",
    "target_path": "model_path",
    "draft_path": "speculative_draft_model_path",
}
CPU = [
    "--device", "cpu", "--disable-cuda-graph", "--prefill-attention-backend", "intel_amx",
    "--decode-attention-backend", "intel_amx",
]  # fmt: skip


def launch(argv):
    """The resolved arguments, or the error with which SGLang stops."""
    try:
        arguments = prepare_server_args([*argv, *CPU])
        arguments.resolve_once()
    except (SystemExit, Exception) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    resolved = arguments.resolved_dict()
    return {ours: resolved[theirs] for ours, theirs in FIELDS.items()}


def depths(architecture, module, ids, layers):
    """`layers_to_capture` after the genuine method ran on a stand-in for the target's model."""
    models = "sglang.srt.models."
    method = getattr(importlib.import_module(models + module), architecture).set_eagle3_layers_to_capture
    deepseek = importlib.import_module(models + "deepseek_v2").DeepseekV3ForCausalLM
    config = SimpleNamespace(num_hidden_layers=layers)
    config.text_config = config
    model = SimpleNamespace(layers=[SimpleNamespace() for _ in range(layers + 1)])
    model.set_eagle3_layers_to_capture = lambda chosen: setattr(model, "layers_to_capture", chosen)
    fake = SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True), config=config, model=model)
    fake.language_model = SimpleNamespace(  # what Kimi K2.5 passes on to
        set_eagle3_layers_to_capture=lambda chosen: deepseek.set_eagle3_layers_to_capture(fake, chosen)
    )
    method(fake, ids)
    return list(model.layers_to_capture)


def start(target, drafter):
    """Process-wide set-up, as a scheduler does it, for one rank on the CPU."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.runtime_context import SpawnRanks, get_device, publish

    arguments = prepare_server_args(
        [
            "--model-path",
            target,
            "--dtype",
            "float32",
            "--speculative-algorithm",
            "EAGLE3",
            "--speculative-draft-model-path",
            drafter,
            "--speculative-num-steps",
            "5",
            "--speculative-eagle-topk",
            "1",
            *CPU,
        ]
    )
    arguments.resolve_once()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    port = PortArgs.init_new(arguments).nccl_port
    bootstrap.init_parallel_runtime(server_args=arguments, device=get_device().device, dist_port=port)
    model_config = ModelConfig.from_server_args(arguments)
    bootstrap.init_layer_runtime(model_config=model_config)
    return arguments, model_config


def feed(folder, algorithm, arguments, model_config):
    """Whether auxiliary states are used, the layer ids that are handed to the target, and the expected
    width.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner_components import spec_aux_hidden_state as module
    from sglang.srt.speculative.eagle_utils import get_draft_input_from_target_hidden_dim
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    found = module.SpecAuxHiddenStateConfig()
    kind = SpeculativeAlgorithm.from_string(algorithm)
    module.get_spec = lambda: SimpleNamespace(
        speculative_draft_model_path=folder, speculative_draft_model_revision=None
    )
    module._resolve_eagle_aux_hidden_state(
        config=found,
        server_args=arguments,
        model_config=model_config,
        spec_algorithm=kind,
        is_draft_worker=False,
    )
    draft = ModelConfig.from_server_args(arguments, model_path=folder, is_draft_model=True)
    width = get_draft_input_from_target_hidden_dim(SimpleNamespace(model_config=draft, spec_algorithm=kind))
    return {
        "aux": found.eagle_use_aux_hidden_state,
        "ids": found.eagle_aux_hidden_state_layer_ids,
        "width": width,
    }


def load(folder, algorithm, shared):
    """What the genuine class, its load_weights and the worker's init_lm_head leave in every parameter."""
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from transformers import AutoConfig

    model = LlamaForCausalLMEagle3(AutoConfig.from_pretrained(folder))
    for parameter in model.parameters():
        parameter.data.fill_(SENTINEL)
    taken = []
    for name, tensor in load_file(folder + "/model.safetensors").items():
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        model.load_weights([(name, tensor)])
        if any(not torch.equal(before[n], p) for n, p in model.named_parameters()):
            taken.append(name)
    initial = [n for n, p in model.named_parameters() if (p == SENTINEL).any()]
    embed, head = (torch.nn.Parameter(t) for t in shared)
    target = SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(lm_head=None)))
    worker = SimpleNamespace(
        target_worker=target,
        draft_runner=SimpleNamespace(model=model),
        speculative_algorithm=SpeculativeAlgorithm.from_string(algorithm),
        hot_token_id=None,
        _resolve_shared_embed_and_head=lambda: (embed, head),
    )
    EagleDraftWorker.init_lm_head(worker)
    named = dict(model.named_parameters(remove_duplicate=False))
    rope = model.model.layers[0].self_attn.rotary_emb
    return {
        "taken": taken,
        "initial": initial,
        "shared": [n for n, p in named.items() if p is embed or p is head],
        "map_applied": worker.hot_token_id is not None,
        "shapes": {n: list(p.shape) for n, p in named.items()},
        "checksums": {n: sha256(p) for n, p in named.items()},
        "logits_width": model.logits_processor.vocab_size,
        "norm_output": bool(model.model.norm_output),
        "fc_in": model.model.fc.in_features,
        "head_dim": model.model.layers[0].self_attn.head_dim,
        "eps": model.model.norm.variance_epsilon,
        "rope": [type(rope).__name__, float(rope.base), rope.rotary_dim, rope.is_neox_style],
    }


def sha256(tensor):
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def main():
    with open(sys.argv[1]) as file:
        job = json.load(file)
    answer = {"launches": [launch(argv) for argv in job["launches"]]}
    arguments, model_config = start(job["target"], job["drafter"])
    answer["depths"] = [depths(*case) for case in job["depths"]]
    answer["drafters"] = []
    stored = load_file(job["target"] + "/model.safetensors")
    shared = [stored[n].float() for n in ("model.embed_tokens.weight", "lm_head.weight")]
    for folder, algorithm in job["drafters"]:
        try:
            found = load(folder, algorithm, shared) | feed(folder, algorithm, arguments, model_config)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        answer["drafters"].append(found)
    with open(sys.argv[2], "w") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main()
