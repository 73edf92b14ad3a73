import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglelab.errors import BadInput
from eaglelab.launch import Launch, Target

CHAIN = "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6"
LLAMA = Target("LlamaForCausalLM", 128, 8, 1024)
KIMI = Target("KimiK25ForConditionalGeneration", 7168, 61, 163840)


def shape(launch: Launch):
    return launch.algorithm, launch.steps, launch.topk, launch.draft_tokens


def test_a_whole_command_line():
    launch = Launch.parse(
        "CUDA_VISIBLE_DEVICES=0,1 nohup python3 -m sglang.launch_server --model-path /models/kimi \\\n"
        " --speculative-algorithm EAGLE3 --speculative-draft-model-path '/my drafts/k' "
        f"{CHAIN} --tp 8 --dtype half --trust-remote-code --cuda-graph-bs 1 2 4 "
        "--speculative-draft-window-size=512 "
        "--mem-fraction-static -1 > log 2>&1 &",
        KIMI,
    )
    assert launch == Launch(
        algorithm="EAGLE3",
        steps=5,
        topk=1,
        draft_tokens=6,
        dtype="float16",
        tp_size=8,
        draft_window=512,
        target_path="/models/kimi",
        draft_path="/my drafts/k",
        target=KIMI,
        flags=(("--trust-remote-code", ""), ("--cuda-graph-bs", "1 2 4"), ("--mem-fraction-static", "-1")),
    )
    assert launch.flag("--trust-remote-code") == "" and launch.flag("--cuda-graph-bs") == "1 2 4"
    assert launch.flag("--kv-cache-dtype") is None and launch.topk == 1
    assert launch.command() == (
        "--speculative-algorithm EAGLE3 --speculative-num-steps 5 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 6 --speculative-draft-model-path '/my drafts/k' "
        "--speculative-draft-window-size 512 --model-path /models/kimi --tp-size 8 --dtype float16 "
        "--trust-remote-code --cuda-graph-bs 1 2 4 --mem-fraction-static=-1"
    )


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("--speculative-algo NEXTN", "algorithm", "EAGLE"),
        ("--speculative-algorithm eagle3", "algorithm", "EAGLE3"),
        ("--speculative-draft-model d", "draft_path", "d"),
        ("--speculative-draft-model-p d", "draft_path", "d"),
        ("--model m", "target_path", "m"),
        ("--tensor-parallel-size 4", "tp_size", 4),
        ("--tp=2", "tp_size", 2),
        ("--dtype auto", "dtype", None),
        ("--dtype float", "dtype", "float32"),
        ("--speculative-draft-window-size 7", "draft_window", 7),
    ],
)
def test_aliases_and_abbreviations(text, field, value):
    assert getattr(Launch.parse(text, LLAMA), field) == value


@pytest.mark.parametrize(
    ("text", "target", "expected"),
    [
        ("--speculative-algorithm EAGLE3", LLAMA, ("EAGLE3", 5, 4, 8)),  # SGLang's choice for Llama: a tree
        ("--speculative-algorithm EAGLE3", KIMI, ("EAGLE3", 3, 1, 4)),
        ("--speculative-algorithm EAGLE3", None, ("EAGLE3", 3, 1, 4)),
        (
            "--speculative-algorithm EAGLE --speculative-num-steps 2 --speculative-eagle-topk 1",
            None,
            ("EAGLE", 2, 1, 3),
        ),
        (
            f"--speculative-algorithm EAGLE3 {CHAIN.replace('6', '9')}",
            None,
            ("EAGLE3", 5, 1, 6),
        ),  # N rewritten
        (
            "--speculative-algorithm EAGLE3 --speculative-num-steps 5 --speculative-eagle-topk 4 "
            "--speculative-num-draft-tokens 16",
            None,
            ("EAGLE3", 5, 4, 16),
        ),
        ("--speculative-algorithm EAGLE3 --speculative-adaptive", None, ("EAGLE3", 3, 1, 4)),
        ("--tp 2", LLAMA, (None, 0, 0, 0)),
        ("", None, (None, 0, 0, 0)),
    ],
)
def test_what_sglang_makes_of_the_numbers(text, target, expected):
    assert shape(Launch.parse(text, target)) == expected


@pytest.mark.parametrize(
    "flag",  # SGLang's own that look most like those read here
    [
        "--speculative-dflash-draft-window-size", "--speculative-draft-model-revision", "--pp-size",
        "--speculative-draft-model-quantization", "--expert-parallel-size", "--dp-size", "--ep-size",
    ],
)  # fmt: skip
def test_a_flag_that_only_looks_alike_is_no_slip(flag):
    assert Launch.parse(f"{flag} 2").flag(flag) == "2"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("--speculative-algorithm EAGLE3 --speculative-eagle-topk 4", "without --speculative-num-steps"),
        ("--speculative-algorithm EAGLE3 --speculative-num-steps 3", "without --speculative-eagle-topk"),
        (
            "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 4",
            "topk 4 is a tree: give --speculative-num-draft-tokens too",
        ),
        (
            "--speculative-algorithm EAGLE3 --speculative-num-steps 2 --speculative-eagle-topk 2 "
            "--speculative-num-draft-tokens 8",
            "has room for 2 to 7",
        ),
        (
            "--speculative-algorithm EAGLE3 --speculative-num-steps 0 --speculative-eagle-topk 1",
            "at least 1 step",
        ),
        ("--speculative-num-steps five", "'five' is not a whole number"),
        ("--tp", "flag --tp has no value"),
        ("--tp 0", "must be at least 1"),
        ("--speculative-draft-window-size 0", "must be positive"),
        ("--model-path 'open", "cannot be read as a shell line"),
        ("vllm serve --model m", "only launches of SGLang"),
        ("--speculative-algoritm EAGLE", "(did you mean --speculative-algorithm?)"),
        ("--speculative_num_steps 3", "(did you mean --speculative-num-steps?)"),
        ("speculative-algorithm EAGLE", "has no flag in it"),
    ],
)
def test_what_sglang_refuses(text, says):
    with pytest.raises(BadInput) as error:
        Launch.parse(text)
    assert says in str(error.value)


def test_a_chain_cannot_be_built_crooked():
    with pytest.raises(BadInput, match=r"a chain of 3 steps has 4 draft tokens \(the root counts\), not 6"):
        Launch(steps=3)


def test_secrets_are_left_out():
    launch = Launch.parse(
        "--api-key s3cret --admin-api-key=x --ssl-keyfile-password p --max-total-tokens 8 --host h"
    )
    assert launch.flags == (("--max-total-tokens", "8"), ("--host", "h"))
    assert "s3cret" not in repr(launch) + launch.command()


def test_edits_are_resolved_again():
    wrong = Launch.parse(f"--speculative-algorithm EAGLE {CHAIN} --disable-cuda-graph", LLAMA)
    right = wrong.with_flags("--speculative-algorithm EAGLE3")
    assert shape(right) == ("EAGLE3", 5, 1, 6) and right.flags == wrong.flags and right.target == LLAMA
    assert shape(right.edit(steps=3)) == ("EAGLE3", 3, 1, 4)
    assert shape(right.edit(algorithm="NEXTN")) == ("EAGLE", 5, 1, 6)
    assert right.with_flags("--dtype float32 --page-size 16").flags == (
        ("--disable-cuda-graph", ""),
        ("--page-size", "16"),
    )
    assert shape(Launch.parse("", LLAMA).with_flags("--speculative-algorithm EAGLE3")) == ("EAGLE3", 5, 4, 8)
    with pytest.raises(BadInput, match="no field 'stepz'"):
        right.edit(stepz=3)


def test_defaults_fill_what_the_line_leaves_out():
    launch = Launch.parse("--speculative-algorithm EAGLE3", steps=5, topk=1, draft_tokens=6, version="0.5.20")
    assert shape(launch) == ("EAGLE3", 5, 1, 6) and launch.version == "0.5.20"


def test_from_a_config_mapping():
    launch = Launch.from_config(
        {
            "speculative_algorithm": "EAGLE3",
            "tp-size": 2,
            "cuda_graph_bs": [1, 2],
            "disable_cuda_graph": True,
            "x": None,
        }
    )
    assert launch.algorithm == "EAGLE3" and launch.tp_size == 2
    assert launch.flags == (("--cuda-graph-bs", "1 2"), ("--disable-cuda-graph", ""))


SERVER_INFO = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 5,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 6,
    "tp_size": 8,
    "dtype": "auto",
    "version": "0.5.23",
    "model_path": "/t",
    "speculative_draft_model_path": "/d",
    "speculative_draft_window_size": None,
    "api_key": "s3cret",
    "quantization": None,
    "disable_cuda_graph": True,
    "speculative_attention_mode": "prefill",
    "page_size": 1,
    "json_model_override_args": '{"a": 1}',
    "hf_token": "hf_abc",
    "launch_command": "python --api-key s3cret",
}


def test_from_a_server():
    launch = Launch.from_server(SERVER_INFO, LLAMA)
    assert shape(launch) == ("EAGLE3", 5, 1, 6)
    assert (launch.tp_size, launch.dtype, launch.version) == (8, None, "0.5.23")
    assert (launch.target_path, launch.draft_path, launch.target) == ("/t", "/d", LLAMA)
    assert launch.flag("--disable-cuda-graph") == "" and launch.flag("--quantization") is None
    assert launch.flag("--json-model-override-args") == '{"a": 1}'
    assert "s3cret" not in repr(launch) and "hf_abc" not in repr(launch)
    assert Launch.parse(launch.command(), LLAMA) == launch
    with pytest.raises(BadInput, match="no field 'speculative_algorithm'"):
        Launch.from_server({"data": []})
    plain = Launch.from_server({"speculative_algorithm": None})
    assert shape(plain) == (None, 0, 0, 0) and plain.version == "unknown"


WORDS = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=6
)


@given(
    st.sampled_from(["EAGLE", "EAGLE3"]),
    st.integers(1, 6),
    st.integers(1, 8),
    st.integers(1, 8),
    st.lists(st.tuples(st.from_regex(r"--zz-[a-z]{1,5}", fullmatch=True), WORDS), max_size=3),
)
def test_a_printed_command_reads_back_as_the_same_launch(algorithm, steps, topk, tp, more):
    nodes = topk + (steps - 1) * topk * topk
    words = [
        "--speculative-algorithm",
        algorithm,
        "--speculative-num-steps",
        steps,
        "--speculative-eagle-topk",
        topk,
    ]
    words += ["--speculative-num-draft-tokens", nodes + 1 if topk > 1 else steps + 1, "--tp-size", tp]
    launch = Launch.parse([*map(str, words), *(f"{flag}={value}" for flag, value in more)])
    assert Launch.parse(launch.command()) == launch
