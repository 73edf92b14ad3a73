"""What SGLang's layer ids mean, architecture by architecture, as depths; and back.

Source: sglang 0.5.23 `set_eagle3_layers_to_capture` of every target model that has it; `releases` has what
older ones did otherwise. speculators and vLLM need no table: their id k is depth k.
"""

from __future__ import annotations

from eaglelab.errors import BadInput
from eaglelab.releases import NEWEST, at_least, does

ADD_ONE_IF_FIRST_IS_ONE = {  # classes that inherit deepseek_v2's or glm4_moe_lite's method, or pass on to it
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "MistralLarge3ForCausalLM",
    "GlmMoeDsaForCausalLM", "Glm4MoeLiteForCausalLM", "KimiK25ForConditionalGeneration",
}  # fmt: skip
ADD_ONE_UNLESS_LAST = {"GptOssForCausalLM"}
# Architectures that also capture after their last layer (depth n); on the others such an id is lost without a
# word.
CAPTURE_LAST = {
    "GptOssForCausalLM", "MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration",
    "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
}  # fmt: skip
LAST_SINCE = {"GptOssForCausalLM": (0, 5, 17), "MiniMaxM3SparseForCausalLM": (0, 5, 23),
              "MiniMaxM3SparseForConditionalGeneration": (0, 5, 23)}  # fmt: skip


def captures_last(architecture: str | None, version: str = NEWEST) -> bool:
    """Whether this release hands over the stream after the last layer too (depth n)."""
    return architecture in CAPTURE_LAST and at_least(version, LAST_SINCE.get(architecture or "", (0, 0, 0)))


def sglang_depths(
    ids: tuple[int, ...], architecture: str | None, num_layers: int | None, version: str = NEWEST
) -> tuple[int, ...]:
    """Depths that SGLang captures for these ids, in their order (`set_eagle3_layers_to_capture`).

    SGLang captures before layer i, which is depth i. Most architectures add 1 to an id first; deepseek_v2 and
    glm4_moe_lite only if the first id is 1; gpt_oss unless the largest id is the number of layers.
    """
    plus = 1
    if architecture in ADD_ONE_IF_FIRST_IS_ONE and does(version, "deepseek-ids"):
        plus = 1 if ids[:1] == (1,) else 0
    elif architecture in ADD_ONE_UNLESS_LAST and does(version, "gpt-oss-ids"):
        plus = 0 if ids and max(ids) == num_layers else 1
    return tuple(i + plus for i in ids)


def sglang_ids(depths: tuple[int, ...], architecture: str | None, num_layers: int | None) -> tuple[int, ...]:
    """Ids that make SGLang capture these depths: the inverse of `sglang_depths`.

    BadInput if no list of ids gives them on this architecture.
    """
    plain = tuple(depths)
    # Reversed, the first id is not the 1 that deepseek_v2 asks about; rows come by ascending depth in any
    # case.
    for ids in (tuple(d - 1 for d in plain), plain, plain[::-1]):
        if sorted(sglang_depths(ids, architecture, num_layers)) == sorted(plain):
            return ids
    raise BadInput(f"no layer ids make SGLang capture depths {list(depths)} on {architecture}")


def default_depths(architecture: str | None, num_layers: int) -> tuple[int, ...]:
    """What SGLang captures when no ids are given: before layers 2, n // 2 and n - 3."""
    plus = 1 if architecture == "MiniMaxM3SparseForConditionalGeneration" else 0
    return tuple(i + plus for i in (2, num_layers // 2, num_layers - 3))
