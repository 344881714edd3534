"""How long does a step of an engine take on a GPU? A Llama-shaped model with random weights in plain PyTorch (bf16, one
CUDA graph a step, as engines run them): steps that generate for n answers over contexts of C tokens, steps that compute a
chunk of a prompt, and steps that do both. Prints a table, the fit of

    step = t0 + prompt tokens / rate + b x answers + d x tokens of their contexts

by relative errors, and for steps that do both by how much a chunk makes a step longer, as a share of prompt tokens / rate:
1 if answers stand still for as long as the prompt takes, which is what a choice assumes (docs/concepts.md), 0 if it is free.
Times are medians of ROUNDS passes over all steps, each of 15 replays, with the least and greatest round.

    python3 benches/engine_step.py                 # an 8B model: 50 GB of GPU memory, a minute or two
    python3 benches/engine_step.py 32b             # 110 GB
    python3 benches/engine_step.py tiny cpu        # tries the script itself

What it leaves out: kernels of an engine's own (paged attention, fused layers), sampling, the scheduler, several GPUs,
quantization, a prompt's chunk that attends to chunks before it.
"""

import os
import sys
import time
from statistics import median

import torch
import torch.nn.functional as F

SHAPES = {
    "8b": dict(layers=32, dim=4096, heads=32, kv=8, head=128, ffn=14336, vocab=128256),
    "32b": dict(layers=64, dim=5120, heads=64, kv=8, head=128, ffn=25600, vocab=151936),
    "tiny": dict(layers=2, dim=128, heads=4, kv=2, head=32, ffn=256, vocab=1000),
}
NAME = sys.argv[1] if len(sys.argv) > 1 else "8b"
DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cuda"
GPU = DEVICE == "cuda"
ROUNDS = int(os.environ.get("ROUNDS", "5"))
REPLAYS = 15
KV_BYTES_MAX = 45e9
LAYERS, DIM, HEADS, KV, HEAD, FFN, VOCAB = (SHAPES[NAME][key] for key in ("layers", "dim", "heads", "kv", "head", "ffn", "vocab"))
TYPE = torch.bfloat16 if GPU else torch.float32
TOKEN_BYTES = 2 * KV * HEAD * LAYERS * (2 if GPU else 4)


def random(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=TYPE) * 0.02


LAYER_WEIGHTS = [
    dict(qkv=random(DIM, (HEADS + 2 * KV) * HEAD), out=random(HEADS * HEAD, DIM), up=random(DIM, 2 * FFN), down=random(FFN, DIM))
    for _ in range(LAYERS)
]
VOCABULARY = random(DIM, VOCAB)


def attend(q, k, v, causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


@torch.inference_mode()
def step(tokens, caches, answers, chunk):
    """All tokens pass the layers together; answers attend to their contexts, the chunk of a prompt to itself."""
    x = tokens
    for weights, cache in zip(LAYER_WEIGHTS, caches or [None] * LAYERS):
        q, k, v = (F.rms_norm(x, (DIM,)) @ weights["qkv"]).split([HEADS * HEAD, KV * HEAD, KV * HEAD], dim=1)
        parts = []
        if answers:
            q_answers = q[:answers].view(answers, 1, HEADS, HEAD).transpose(1, 2)
            parts.append(attend(q_answers, *cache, False).transpose(1, 2).reshape(answers, HEADS * HEAD))
        if chunk:
            heads = lambda t, count: t[answers:].view(1, chunk, count, HEAD).transpose(1, 2)
            attended = attend(heads(q, HEADS), heads(k, KV), heads(v, KV), True)
            parts.append(attended.transpose(1, 2).reshape(chunk, HEADS * HEAD))
        x = x + torch.cat(parts) @ weights["out"]
        gate, up = (F.rms_norm(x, (DIM,)) @ weights["up"]).chunk(2, dim=1)
        x = x + (F.silu(gate) * up) @ weights["down"]
    return (F.rms_norm(x[: answers + (1 if chunk else 0)], (DIM,)) @ VOCABULARY).argmax(1)


def wait():
    if GPU:
        torch.cuda.synchronize()


def seconds(answers, context, chunk):
    """The median time of a step."""
    tokens = random(answers + chunk, DIM)
    caches = [(random(answers, KV, context, HEAD), random(answers, KV, context, HEAD)) for _ in range(LAYERS)] if answers else None
    run = lambda: step(tokens, caches, answers, chunk)
    for _ in range(2):
        run()
    graph = None
    if GPU:
        wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    times = []
    for _ in range(REPLAYS):
        wait()
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    del graph, caches
    if GPU:
        torch.cuda.empty_cache()
    return median(times[2:])


if GPU:
    ANSWERS, CONTEXTS, CHUNKS = (1, 8, 32, 64, 128, 256), (256, 1024, 4096, 8192), (128, 256, 512, 1024, 2048, 4096, 8192)
    BOTH = ((8, 1024, 512), (32, 1024, 512), (64, 1024, 512), (64, 4096, 512), (128, 1024, 512), (32, 1024, 2048), (64, 1024, 2048), (64, 4096, 2048), (128, 1024, 2048), (64, 1024, 8192))
else:
    ANSWERS, CONTEXTS, CHUNKS, BOTH = (1, 4), (16, 64), (16, 64), ((4, 64, 64),)
steps = [(n, context, 0) for n in ANSWERS for context in CONTEXTS if n * context * TOKEN_BYTES < KV_BYTES_MAX]
steps += [(0, 0, chunk) for chunk in CHUNKS] + [one for one in BOTH if one[0] * one[1] * TOKEN_BYTES < KV_BYTES_MAX]
seen = {one: [] for one in steps}
for number in range(ROUNDS):
    for one in steps:
        seen[one].append(seconds(*one))
    print(f"round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
time_of = {one: median(times) for one, times in seen.items()}

apart = [one for one in steps if not (one[0] and one[2])]
rows = torch.tensor([(1, chunk, n, n * context) for n, context, chunk in apart], dtype=torch.float64)
times = torch.tensor([time_of[one] for one in apart], dtype=torch.float64)
t0, prompt_token, b, d = torch.linalg.lstsq(rows / times[:, None], torch.ones_like(times)).solution.tolist()
fitted = lambda n, context, chunk: t0 + prompt_token * chunk + b * n + d * n * context
errors = sorted(abs(fitted(*one) / time_of[one] - 1) for one in apart)

print(f"{torch.cuda.get_device_name() if GPU else 'CPU'}, {NAME}, {TOKEN_BYTES // 1024} KiB of KV cache a token, {ROUNDS} rounds\n")
print("| answers | context of each | prompt tokens | a step, ms (rounds) | fit, ms | a chunk's share |\n|---:|---:|---:|---|---:|---:|")
for one in steps:
    n, context, chunk = one
    share = f"{(time_of[one] - time_of[n, context, 0]) / (chunk * prompt_token):.2f}" if n and chunk else ""
    low, high = min(seen[one]), max(seen[one])
    print(f"| {n or ''} | {context or ''} | {chunk or ''} | {1e3 * time_of[one]:.2f} ({1e3 * low:.2f}-{1e3 * high:.2f}) | {1e3 * fitted(*one):.2f} | {share} |")
print(f"\nt0 {1e3 * t0:.2f} ms, {1 / prompt_token:.0f} prompt tokens a second, b {b:.2e} s an answer, d {d:.2e} s a token of context;")
print(f"relative error of the fit: median {median(errors):.2f}, worst {errors[-1]:.2f}")
