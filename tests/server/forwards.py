"""Runs in the server's environment: SGLang's own drafter classes, loaders and attention on random features.

usage: forwards.py JOB.json ANSWER_FOLDER

No server and no worker: this does what `EagleDraftWorker` does around the model (share the target's tensors,
a draft-extend after prefill, one after verify, draft steps), with SGLang's classes, KV pools and attention.
"""

import json
import sys
from types import SimpleNamespace

import torch
from genuine import SENTINEL, sha256, start
from safetensors.torch import load_file, save_file
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models import kimi_k25_eagle3, llama_eagle3
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils.hf_transformers_utils import get_config
from torch.nn.functional import scaled_dot_product_attention

SLOTS = 256


def load(case, shared):
    """-> (the class for this drafter, loaded, with the target's tensors; its map or None; its parameters)."""
    config = get_config(case["folder"], trust_remote_code=False)
    window = case.get("window")
    llama_eagle3.get_spec = lambda: SimpleNamespace(speculative_draft_window_size=window)
    classes = {
        "LlamaForCausalLMEagle3": llama_eagle3.LlamaForCausalLMEagle3,
        "Eagle3DeepseekV2ForCausalLM": kimi_k25_eagle3.Eagle3DeepseekV2ForCausalLM,
    }
    model = classes[config.architectures[0]](config)
    tensors = load_file(case["folder"] + "/model.safetensors")
    seen = {"initial": unfilled(model, {n: t for n, t in tensors.items() if n not in case["dropped"]})}
    before = {n: sha256(p) for n, p in model.named_parameters()}
    unfilled(model, tensors)
    seen["dropped have no effect"] = before == {n: sha256(p) for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():  # what nothing fills must not look harmless
        if (parameter == SENTINEL).any():
            parameter.data.fill_(1.0 if "norm" in name else float("nan"))
    embed, head = (torch.nn.Parameter(t, requires_grad=False) for t in shared)
    worker = SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(lm_head=None))),
        draft_runner=SimpleNamespace(model=model),
        speculative_algorithm=SpeculativeAlgorithm.from_string(case["algorithm"]),
        hot_token_id=None,
        _resolve_shared_embed_and_head=lambda: (embed, head),
    )
    EagleDraftWorker.init_lm_head(worker)
    named = dict(model.named_parameters(remove_duplicate=False))
    seen["shared"] = [n for n, p in named.items() if p is embed or p is head]
    seen["parameters"] = {n: [sha256(p), list(p.shape)] for n, p in named.items()}
    return model, worker.hot_token_id, seen


def unfilled(model, tensors):
    """The parameters that these tensors leave as they were."""
    for parameter in model.parameters():
        parameter.data.fill_(SENTINEL)
    model.load_weights(tensors.items())
    return [n for n, p in model.named_parameters() if (p == SENTINEL).any()]


def pool(model):
    config, layers = model.config, model.config.num_hidden_layers
    rest = dict(layer_num=layers, device="cpu", enable_memory_saver=False)
    if hasattr(model.model, "midlayer"):
        return MLATokenToKVPool(
            SLOTS, 1, torch.float32, config.kv_lora_rank, qk_rope_head_dim=config.qk_rope_head_dim, **rest
        )
    attention = model.model.layers[0].self_attn
    return MHATokenToKVPool(SLOTS, 1, torch.float32, attention.num_kv_heads, attention.head_dim, **rest)


class Attention(TorchNativeAttnBackend):
    """SGLang's torch attention, and what it lacks: a prefill of MLA, whose unfolded keys are in no pool."""

    def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True, **kwargs):
        if save_kv_cache:
            return super().forward_extend(q, k, v, layer, batch, save_kv_cache, **kwargs)
        assert batch.extend_prefix_lens_cpu == [0] * batch.batch_size
        parts = [x.unflatten(-1, (layer.tp_q_head_num, -1)) if x.dim() == 2 else x for x in (q, k, v)]
        mixed = [
            scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in request), is_causal=True, scale=layer.scaling
            )
            for request in zip(*(x.split(batch.extend_seq_lens_cpu) for x in parts), strict=True)
        ]
        return torch.cat([m.transpose(0, 1).flatten(1) for m in mixed])


class Server:
    """One model with its KV pool; request i owns row i of the page table, slot after slot."""

    def __init__(self, model, requests):
        table = torch.arange(1, SLOTS + 1).repeat(requests, 1)[:, : SLOTS // requests]
        table = table + torch.arange(requests)[:, None] * (SLOTS // requests)
        runner = SimpleNamespace(
            device="cpu", token_to_kv_pool=pool(model), req_to_token_pool=SimpleNamespace(req_to_token=table)
        )
        self.model, self.table, self.backend = model, table, Attention(runner)
        self.rows = torch.arange(requests)

    def run(self, mode, ids, hidden, before, counts):
        """One forward of counts[i] rows after before[i] of request i -> (logits, states) of those rows."""
        before, counts = torch.tensor(before), torch.tensor(counts)
        after = before + counts
        spans = [torch.arange(b, a) for b, a in zip(before.tolist(), after.tolist(), strict=True)]
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(counts),
            input_ids=ids,
            req_pool_indices=self.rows,
            seq_lens=after,
            out_cache_loc=torch.cat([self.table[i, s] for i, s in enumerate(spans)]),
            seq_lens_sum=int(after.sum()),
        )
        batch.seq_lens_cpu, batch.positions = after, torch.cat(spans)
        batch.extend_prefix_lens, batch.extend_seq_lens = before, counts
        batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = before.tolist(), counts.tolist()
        batch.extend_start_loc = counts.cumsum(0) - counts
        batch.spec_info = SimpleNamespace(hidden_states=hidden, dsa_seed_topk_capture=None, select_index=None)
        batch.capture_hidden_mode = CaptureHiddenMode.FULL
        self.backend.init_forward_metadata(batch)
        with torch.no_grad(), forward_context(ForwardContext(self.backend), forward_batch=batch):
            out = self.model.forward(ids, batch.positions, batch)
        return out.next_token_logits, out.hidden_states


def forward(case, shared, given):
    """Prefill, verify and draft steps of a few requests -> logits and states of all, and what was loaded."""
    model, chosen, seen = load(case, shared)
    lengths, last, steps = case["lengths"], case["verified"], case["steps"]
    first = [n - last for n in lengths]
    server, answer = Server(model, len(lengths)), {}
    ids = given["ids"].split(lengths)
    features = given["features"].split(lengths)

    def joined(parts, cut):
        return torch.cat([p[: len(p) - last] if cut else p[len(p) - last :] for p in parts])

    extend = server.run(
        ForwardMode.EXTEND, joined(ids, True), joined(features, True), [0] * len(first), first
    )
    answer["prefill.logits"], answer["prefill.states"] = extend
    logits, states = server.run(
        ForwardMode.DRAFT_EXTEND_V2, joined(ids, False), joined(features, False), first, [last] * len(first)
    )
    answer["verify.logits"], answer["verify.states"] = logits, states
    ends = torch.arange(1, len(lengths) + 1) * last - 1
    logits, states = logits[ends], states[ends]
    for step in range(steps):
        answer[f"step{step}.logits"] = logits
        tokens = logits.argmax(-1)
        tokens = answer[f"step{step}.tokens"] = tokens if chosen is None else chosen[tokens]
        if step < steps - 1:
            before = [n + step for n in lengths]
            logits, states = server.run(ForwardMode.DECODE, tokens, states, before, [1] * len(before))
            answer[f"step{step}.states"] = states
    return {name: tensor.contiguous() for name, tensor in answer.items()}, seen


def main():
    with open(sys.argv[1]) as file:
        job = json.load(file)
    torch.set_num_threads(1)
    torch.cuda.synchronize = lambda *a: None  # Eagle3DeepseekV2ForCausalLM.set_embed asks for it
    start(job["target"], job["drafter"])
    stored = load_file(job["target"] + "/model.safetensors")
    shared = [stored[n].float() for n in ("model.embed_tokens.weight", "lm_head.weight")]
    errors, loaded = {}, {}
    for name, case in job["cases"].items():
        try:
            answer, loaded[name] = forward(case, shared, load_file(case["given"]))
            save_file(answer, f"{sys.argv[2]}/{name}.safetensors")
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    with open(f"{sys.argv[2]}/answer.json", "w") as file:
        json.dump({"errors": errors, "loaded": loaded}, file)


if __name__ == "__main__":
    main()
