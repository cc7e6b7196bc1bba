"""Command lines that cannot be meant: every numeric option at its limits, and what contradicts."""

from __future__ import annotations

from malformed import Case, file_case

_GENERATE = """
generate '' -m $M | 4 | the prompt is empty
generate x y -m $M | 2 | needs quotes
generate - --prompt-file y -m $M | 2 | give the prompt once
generate --prompt-file / -m $M | 2 | cannot read the prompt
generate --prompt-file nowhere -m $M | 2 | nowhere
generate x -m $M -n 0 | 2 | --max-new-tokens
generate x -m $M -n -1 | 2 | --max-new-tokens
generate x -m $M -n 1.5 | 2 | --max-new-tokens
generate x -m $M -n '' | 2 | --max-new-tokens
generate x -m $M -n 128 | 4 | at most 127 new tokens
generate x -m $M -n 9223372036854775808 | 4 | at most 127 new tokens
generate x -m $M --temperature -0.1 | 2 | --temperature must be 0 or more
generate x -m $M --temperature inf | 2 | --temperature must be 0 or more
generate x -m $M --temperature nan | 2 | --temperature must be 0 or more
generate x -m $M --temperature warm | 2 | --temperature
generate x -m $M --temperature 1 --top-k 0 | 2 | --top-k must be 1 or more
generate x -m $M --temperature 1 --top-k -3 | 2 | --top-k must be 1 or more
generate x -m $M --top-k 3 | 2 | add --temperature
generate x -m $M --temperature 1 --top-p 0 | 2 | --top-p must be in (0, 1]
generate x -m $M --temperature 1 --top-p 1.01 | 2 | --top-p must be in (0, 1]
generate x -m $M --temperature 1 --top-p nan | 2 | --top-p must be in (0, 1]
generate x -m $M --top-p 0.9 | 2 | add --temperature
generate x -m $M --temperature 1 --min-p -0.1 | 2 | --min-p must be in [0, 1]
generate x -m $M --temperature 1 --min-p 1.1 | 2 | --min-p must be in [0, 1]
generate x -m $M --min-p 0.1 | 2 | add --temperature
generate x -m $M --repetition-penalty 0 | 2 | --repetition-penalty must be above 0
generate x -m $M --repetition-penalty -1 | 2 | --repetition-penalty must be above 0
generate x -m $M --repetition-penalty nan | 2 | --repetition-penalty must be above 0
generate x -m $M --repetition-penalty inf | 2 | --repetition-penalty must be above 0
generate x -m $M --seed -1 | 2 | --seed
generate x -m $M --temperature 1 --seed 9223372036854775808 | 2 | --seed must be below 2^63
generate x -m $M --stop '' | 2 | --stop needs text
generate x -m $M --cache-step 0 | 2 | --cache-step
generate x -m $M --cache-step 16777217 | 2 | at most 16,777,216 slots
generate x -m $M --cache-step 99999999999999999999 | 2 | at most 16,777,216 slots
generate x -m $M --cache-step 4 --cache int8 | 2 | --cache-step is for --cache step
generate x -m $M --cache-step 4 --no-cache | 2 | leave out --no-cache
generate x -m $M --cache exact --no-cache | 2 | leave out --no-cache
generate x -m $M --cache int3 | 2 | unknown cache 'int3'
generate x -m $M --cache window | 2 | window:N
generate x -m $M --cache window:0 | 2 | window:N
generate x -m $M --cache window:4,sink:-1 | 2 | window:N
generate x -m $M --cache window:4,sink:x | 2 | whole number
generate x -m $M --cache window:4,snk:1 | 2 | the nearest option is sink
generate x -m $M --cache step:0 | 2 | at least 1 slot
generate x -m $M --prefill-chunk 0 | 2 | --prefill-chunk
generate x -m $M --prefill-chunk 2 --no-cache | 2 | leave out --no-cache
generate x -m $M --threads 0 | 2 | --threads
generate x -m $M --threads 100000 | 2 | choose at most that
generate x -m $M --dtype float8 | 2 | --dtype
generate x -m $M --device tpu | 2 | unknown device
generate x -m $M --device cuda:99 | 2 | not available here
generate x -m $M --device cuda:x | 2 | unknown device
generate x -m $M --recompute none | 2 | --recompute
generate x -m $M --load-format pt | 2 | --load-format
generate x -m $M --format xml | 2 | --format
generate x -m $M --chat | 2 | no chat template
generate x -m $M --revision main | 2 | --revision is for models on the Hub
generate x -m $M -o / | 2 | cannot write /
generate x -m $M -o /no/such/place | 2 | its folder must exist
generate x -m $M --no-such-option | 2 | No such option
generate x --model | 2 | requires an argument
generate x -m '' | 2 | the model name is empty
generate x -m $M/config.json | 3 | neither a model folder nor a .gguf file
generate x -m nobody/nothing | 3 | offline mode is on
generate x -m nobody/nothing/more | 3 | not the form of a Hub id
generate x --load-format dummy | 2 | needs --model FILE
generate x --load-format dummy -m nowhere.json | 2 | nowhere.json
generate x --config nowhere.toml | 2 | nowhere.toml
generate x --config / | 2 | cannot read the configuration file
"""

_COMPARE = """
compare -m $M --depth x | 2 | --depth x
compare -m $M --depth '' | 2 | --depth
compare -m $M --depth -1 | 2 | --depth -1
compare -m $M --depth 5-3+1 | 2 | begins after its end
compare -m $M --depth 0-9*2 | 2 | never end
compare -m $M --depth 1-10000000+1 | 2 | more than 1,000 depths
compare -m $M --depth 1000 | 4 | at depth 1,000
compare -m $M --depth 99999999999999999999 | 4 | at depth 99,999,999,999,999,999,999
compare -m $M --prompt-tokens 0 | 2 | --prompt-tokens
compare -m $M --prompt-tokens 4 abc | 2 | leave it out with a prompt
compare -m $M --prompt-tokens 127 -n 2 | 4 | -n 1
compare -m $M --prompt-tokens 99999999999 | 4 | 99,999,999,999 tokens
compare -m $M -r 0 | 2 | --repetitions
compare -m $M -n 0 | 2 | --max-new-tokens
compare -m $M --against vllm | 2 | unknown; choose one of
compare -m $M --against transformers --against transformers | 2 | named twice
compare -m $M --cache nope | 2 | unknown cache
compare -m $M --dtype float32 --dtype int8 | 2 | --dtype
compare -m $M --max-kv-bytes x | 2 | expected a size
compare -m $M --max-tpot-ms -1 | 2 | --max-tpot-ms
compare -m $M --max-tpot-ms nan | 2 | --max-tpot-ms
compare -m $M --fail-under-speedup -1 | 2 | --fail-under-speedup
compare -m $M --max-regression 10% | 2 | belong together
compare -m $M --baseline nowhere.json --max-regression 10% | 2 | nowhere.json
compare -m $M --baseline $M/config.json --max-regression x | 2 | expected a part
compare -m $M --export x | 2 | cannot tell the format
compare -m $M --export /no/x.json | 2 | its folder must exist
compare -m $M --export a.json --export a.json | 2 | name each file once
compare -m $M --plot x.gif | 2 | cannot plot to x.gif
compare -m $M --tokens nowhere.json | 2 | nowhere.json
compare -m $M --tokens x.json abc | 2 | brings its own prompt
compare -m $M --chat | 2 | need a prompt
compare -m $M '' | 4 | the prompt is empty
"""

_OTHERS = """
explain x -m $M -n 0 | 2 | --max-new-tokens
explain x -m $M -n 65 | 2 | --max-new-tokens
explain x -m $M --layer -1 | 2 | --layer
explain x -m $M --layer 2 | 2 | layers 0 to 1
explain x -m $M -o a --html a | 2 | name two
verify a -m b | 2 | two models are named
verify $M -f csv | 2 | --format
chat -m $M | 2 | no chat template
chat -m $M -n 0 | 2 | --max-new-tokens
chat -m $M --cache nope | 2 | unknown cache
chat -m $M --stop '' | 2 | --stop needs text
generate x -m $M --parallel some | 2 | --parallel
generate x -m $M --parallel tensor --device-map auto | 2 | exclude each other
generate x -m $M --load-format dummy --device-map auto | 2 | leave out --load-format dummy
size $M --context 0 | 2 | --context 0
size $M --context 4g | 2 | --context 4g
size $M --context 4k,,5 | 2 | --context 4k,,5
size $M --batch 0 | 2 | --batch 0
size $M --kv-dtype float8 | 2 | --kv-dtype
size $M --kv-dtype int8, | 2 | --kv-dtype
size $M --budget x | 2 | expected a size
size $M --budget 0 | 4 | more than the budget
size $M --cache nope | 2 | unknown cache
size $M --as-if vllm | 2 | --as-if
size $M --prefill-chunk 0 | 2 | --prefill-chunk
size nowhere.json | 3 | no such file
size $M/model.safetensors | 3 | neither a model folder
report | 2 | Missing argument
report nowhere.json | 2 | nowhere.json
report / | 2 | cannot read /
report $M/config.json --export $M/config.json | 2 | one of the results
generrate x | 2 | generate
"""

LINES = [
    Case(line.strip(), int(code), says.strip())
    for table in (_GENERATE, _COMPARE, _OTHERS)
    for line, code, says in (row.split(" | ") for row in table.strip().splitlines())
]

_PROMPT = "generate --prompt-file $F -m $M -n 1"
PROMPTS = [
    file_case("empty prompt file", "p", "", _PROMPT, 4, "the prompt is empty"),
    file_case("prompt file of one line break", "p", "\n", _PROMPT, 4, "the prompt is empty"),
    file_case("prompt of only a byte order mark", "p", "\ufeff", _PROMPT, 4, "the prompt is empty"),
    file_case("Latin-1 prompt", "p", b"caf\xe9", _PROMPT, 4, "not UTF-8"),
    file_case("UTF-16 prompt", "p", "a".encode("utf-16"), _PROMPT, 4, "not UTF-8"),
    file_case("encoded lone surrogate", "p", b"\xed\xa0\x80", _PROMPT, 4, "not UTF-8"),
    file_case("prompt of 10 MB", "p", b"x" * 10_000_000, _PROMPT, 4, "10,000,000 tokens"),
    Case("generate \udcff -m $M", 4, "half of a surrogate pair", name="lone surrogate"),
]

_PROFILE = "generate x -m $M --config $F"
PROFILES = [
    file_case(f"profile {text!r}", "p.toml", text, _PROFILE, 2, says)
    for text, says in (
        ("max-new-tokens", "not valid TOML"),
        ("max-new-tokens = ", "not valid TOML"),
        ("a = [", "not valid TOML"),
        (b"\xff", "cannot read the configuration file"),
        ("max-new-token = 3", "the nearest is 'max-new-tokens'"),
        ("max-new-tokens = true", "must be text or a number"),
        ("max-new-tokens = [3]", "must be text or a number"),
        ("max-new-tokens = 0", "in the file of --config"),
        ("max-new-tokens = 1.5", "in the file of --config"),
        ("max-new-tokens = 2024-01-01", "must be text or a number"),
        ("temperature = 'hot'", "in the file of --config"),
        ("temperature = nan", "--temperature must be 0 or more"),
        ("chat = 1", "must be true or false"),
        ("stop = 5", "must be text or a list of texts"),
        ("stop = ['a', 5]", "must be text or a list of texts"),
        ("stop = ''", "--stop needs text"),
        ("generate = 3", "must be a table"),
        ("[genrate]\nmax-new-tokens = 3", "the nearest is 'generate'"),
        ("[generate]\nmax-new-tokenz = 3", "the nearest is 'max-new-tokens'"),
        ("[generate.deep]\nx = 1", "unknown option 'deep'"),
        ("dtype = 'float8'", "--dtype"),
        ("config = 'other.toml'", "unknown option 'config'"),
    )
]
