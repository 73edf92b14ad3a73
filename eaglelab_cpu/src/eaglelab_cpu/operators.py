"""The stand-in for `sgl_kernel`: a module with just the operators that SGLang's CPU path calls.

What is not here is missing on purpose: SGLang then fails at import, or takes the branch for machines
without it.
"""

from __future__ import annotations

import types

import torch

from eaglelab_cpu import attention, slots, tree

FUNCTIONS = {
    "assign_req_to_token_pool_cpu": slots.assign_req_to_token_pool,
    "assign_extend_cache_locs_cpu": slots.assign_extend_cache_locs,
    "assign_draft_cache_locs_contiguous_cpu": slots.assign_draft_cache_locs_contiguous,
    "build_draft_decode_metadata_cpu": slots.build_draft_decode_metadata,
    "fill_bonus_tokens_cpu": slots.fill_bonus_tokens,
    "fill_accept_out_cache_loc_cpu": slots.fill_accept_out_cache_loc,
    "copy_all_layer_kv_cache_cpu": slots.copy_all_layer_kv_cache,
    "rotate_input_ids_cpu": slots.rotate_input_ids,
    "build_tree_kernel_efficient_cpu": tree.build_tree,
    "verify_tree_greedy_cpu": tree.verify_greedy,
}

_library: torch.library.Library | None = None  # torch forgets the operators when this is collected


def sgl_kernel() -> types.ModuleType:
    """The module to install as `sgl_kernel`; registers its two `torch.ops.sgl_kernel` operators, once."""
    global _library
    if _library is None:
        _library = torch.library.Library("sgl_kernel", "FRAGMENT")
        for schema, function in (
            (attention.DECODE_SCHEMA, attention.decode_attention),
            (attention.EXTEND_SCHEMA, attention.extend_attention),
        ):
            _library.define(schema)
            _library.impl(schema.partition("(")[0], function, "CPU")
    module = types.ModuleType("sgl_kernel", __doc__)
    module.__path__ = []  # a package without submodules, so that `import sgl_kernel.x` fails as it should
    module.__dict__.update(FUNCTIONS)
    return module
