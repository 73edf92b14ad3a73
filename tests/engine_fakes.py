"""Stand-ins for SGLang's worker and batch, with its habits: it overwrites what the probe must have copied."""

from __future__ import annotations

from types import SimpleNamespace

import torch

HIDDEN, WIDTH, N = 4, 12, 4  # the drafter's width, the feed's width, draft tokens
PREFIX = "eaglelab-test-"


class Mode:
    def __init__(self, name: str) -> None:
        self.name = name

    def is_idle(self) -> bool:
        return self.name == "IDLE"

    def is_extend(self) -> bool:
        return self.name == "EXTEND"


class Request(SimpleNamespace):
    def __init__(self, rid: str, ids: list[int]) -> None:
        super().__init__(rid=rid, origin_input_ids=ids)


def make_worker(topk: int = 1):
    target = torch.nn.Module()
    target.layers = torch.nn.ModuleList([torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(2)])
    target.embed_tokens = torch.nn.Embedding(10, HIDDEN)
    target.norm = torch.nn.LayerNorm(HIDDEN)
    target.layers_to_capture = []
    target.lm_head = torch.nn.Linear(HIDDEN, 10, bias=False)
    drafter = torch.nn.Module()
    drafter.embed_tokens = target.embed_tokens
    drafter.fc = torch.nn.Linear(WIDTH, HIDDEN, bias=False).bfloat16()
    drafter.hot_token_id = torch.arange(5)
    config = SimpleNamespace(
        hidden_size=HIDDEN, num_hidden_layers=2, vocab_size=10, architectures=["Fake"], rms_norm_eps=1e-5
    )
    runner = SimpleNamespace(
        model=target,
        dtype=torch.float32,
        model_config=SimpleNamespace(hf_config=config, hf_text_config=config),
    )
    return SimpleNamespace(
        device="cpu", gpu_id=0, topk=topk, speculative_num_steps=N - 1, speculative_num_draft_tokens=N,
        cuda_graph_runner=None, cuda_graph_runner_for_draft_extend=None, hot_token_id=None,
        speculative_algorithm=SimpleNamespace(name="EAGLE3"),
        target_worker=SimpleNamespace(model_runner=runner, tp_rank=0),
        draft_runner=SimpleNamespace(model=drafter),
    )  # fmt: skip


class Engine:
    """Runs requests through the hooks as EAGLEWorkerV2 would, and keeps what was true."""

    def __init__(
        self, hooks, worker, rids: list[str], lengths: list[int], topk: int = 1, seed: int = 0
    ) -> None:
        self.hooks, self.worker = hooks, worker
        self.random = torch.Generator().manual_seed(seed)
        self.reqs = [Request(rid, self.ints(n)) for rid, n in zip(rids, lengths, strict=True)]
        self.tokens = {r.rid: list(r.origin_input_ids) for r in self.reqs}
        self.features = {r.rid: torch.zeros(0, WIDTH) for r in self.reqs}
        self.drafts = {r.rid: [] for r in self.reqs}
        self.accepts = {r.rid: [] for r in self.reqs}

    def ints(self, n: int) -> list[int]:
        return torch.randint(0, 1000, (n,), generator=self.random).tolist()

    def rows(self, n: int, width: int = WIDTH) -> torch.Tensor:
        return torch.randn(n, width, generator=self.random)

    def prefill(self, chunk: int = 10**6) -> None:
        """All requests together, in chunks; only the last request is ever cut, as in SGLang."""
        start = dict.fromkeys(self.tokens, 0)
        live = list(self.reqs)
        while live:
            reqs = live if len(live) == 1 else live[:-1]
            ends = {r.rid: min(start[r.rid] + chunk, len(r.origin_input_ids)) for r in reqs}
            lengths = [ends[r.rid] - start[r.rid] for r in reqs]
            cut = [r for r in reqs if ends[r.rid] < len(r.origin_input_ids)]
            hidden = self.rows(sum(lengths))
            new = {r.rid: self.ints(1)[0] for r in reqs if r not in cut}
            at, fed = 0, []
            for r, length in zip(reqs, lengths, strict=True):
                self.features[r.rid] = torch.cat([self.features[r.rid], hidden[at : at + length]])
                nxt = new[r.rid] if r.rid in new else r.origin_input_ids[ends[r.rid]]
                fed += [*r.origin_input_ids[start[r.rid] + 1 : ends[r.rid]], nxt]
                self.tokens[r.rid] += [new[r.rid]] if r.rid in new else []
                at += length
            batch = SimpleNamespace(
                reqs=reqs, extend_lens=lengths, prefix_lens=[start[r.rid] for r in reqs],
                input_ids=torch.zeros(sum(lengths), dtype=torch.int64), forward_mode=Mode("EXTEND"),
                chunked_req=cut[-1] if cut else None,
            )  # fmt: skip
            buffer = hidden.clone()

            def original(worker, batch, hidden, *_, fed=fed):
                batch.input_ids = torch.tensor(fed)
                hidden.add_(1000)  # as the drafter without fc does, into its own input
                return "prefilled"

            assert self.hooks.prefill_extend(original, self.worker, batch, buffer, None) == "prefilled"
            buffer.fill_(-1)
            batch.input_ids.fill_(-1)
            start |= ends
            live = [r for r in live if start[r.rid] < len(r.origin_input_ids)]

    def round(self, accepts: list[int]) -> None:
        n = [len(self.tokens[r.rid]) - 1 for r in self.reqs]
        drafts = [self.ints(N - 1) for _ in self.reqs]
        fed, ids = self.rows(len(self.reqs), HIDDEN), torch.tensor([[-5, *d] for d in drafts])
        batch = SimpleNamespace(
            reqs=self.reqs, seq_lens=torch.tensor(n), forward_mode=Mode("DECODE"),
            spec_info=SimpleNamespace(hidden_states=fed),
        )  # fmt: skip
        verify = SimpleNamespace(draft_token_num=N, draft_token=ids.flatten())
        verify.retrieve_next_token = torch.tensor([[1, -1, -1, -1]] * len(n))
        verify.retrieve_next_sibling = torch.tensor([[-1, 2, 3, -1]] * len(n))

        def draft(worker, batch):
            batch.spec_info.hidden_states.fill_(-1)
            return verify

        assert self.hooks.draft(draft, self.worker, batch) is verify
        verify.draft_token.fill_(-1)
        hidden, committed = self.rows(len(n) * N), torch.tensor([self.ints(N) for _ in n])
        for j, (r, count) in enumerate(zip(self.reqs, accepts, strict=True)):
            self.features[r.rid] = torch.cat([self.features[r.rid], hidden[j * N : j * N + count]])
            self.tokens[r.rid] += committed[j, :count].tolist()
            self.drafts[r.rid].append(drafts[j])
            self.accepts[r.rid].append(count)
        result = SimpleNamespace(
            accept_lens=torch.tensor(accepts), next_token_ids=committed.flatten(),
            logits_output=SimpleNamespace(hidden_states=hidden),
        )  # fmt: skip

        def extend(worker, batch, result):
            result.logits_output.hidden_states.fill_(-1)
            result.next_token_ids.fill_(-1)

        assert self.hooks.decode_extend(extend, self.worker, batch, result) is None
