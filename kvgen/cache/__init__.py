"""What a KV cache is here. Nothing in this room imports another room.

The files, in the order to read them. The first eight are the cache; the rest can wait.

The cache itself
    spec             what one layer stores, and the formula for its bytes
    state            a cache taken apart into tensors and numbers
    slots            buffers with one slot per token
    policy           what a storage policy is, and the verbs of what stores pairs
    stepwise         pairs stored as they are: the policy that is used by default
    layers           one layer, made of the parts that its spec asks for
    manager          all layers and the one absolute position: advance, trim, fork, reset
    adapter          the same behind transformers' cache protocol, known to this file alone

From a configuration to specs
    settings         reading a configuration object or a config.json
    raw_config       a config.json as it was published
    shapes           one spec per layer
    states           the sizes of recurrent and convolution states
    quirks           what single model types do otherwise
    shares           what each rank stores

What a layer can keep besides plain pairs
    recurrent        states of a fixed size
    compressed       tokens pooled into fewer entries

Storage policies (``--cache``)
    policies         the names they are known by
    runs             a run of slots, cut at either end
    windowed         the first and the last tokens only
    quantized        int8 and int4
    quantized_slots  their codes and scales

Several sequences
    rows             several sequences in one cache

Reuse: prefixes stored in memory
    trie             a trie over token ids
    prefix_index     stored prefixes and a budget of bytes
    prefix_plan      where prompts known in advance part
    prefix_spans     each token of a common beginning kept once
    reuse            how much of a stored cache serves a new prompt

Reuse: cache files
    checksum         checksums of tensors
    fingerprint      what a stored cache depends on besides its tokens
    disk             the file format
    saving           a cache written to a file and read back

To measure against
    rivals           transformers' own caches
"""
