"""Every CUDA kernel against float32 on the CPU: fresh random inputs, poisoned outputs, and replays with changed inputs.

Each check raises AssertionError naming what was off, and returns what it measured.
"""

from __future__ import annotations

import random as chance
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from msgspec import structs

from engine_core.ops import philox
from engine_core.ops.cuda import reference
from engine_core.ops.cuda.attention import DecodeAttention
from engine_core.ops.cuda.cublaslt import CublasLt, Product
from engine_core.ops.cuda.kernel import Kernels
from engine_core.ops.cuda.layer import AddRmsNorm, EmbedLast, Heads, RopeAndStore, SiluMul
from engine_core.ops.cuda.linear import Epilogue, LinearWeights, SkinnyLinear, Tile
from engine_core.ops.cuda.sampling import Sampler, SamplingTables, encode_row
from engine_core.ops.masks import allowed_ids, mask_size
from engine_core.step import RowSampling
from scripts.gpu_kernel_cases import (
    BF16,
    DEVICE,
    EPSILON,
    QWEN3_4B,
    Context,
    Decoder,
    Measured,
    angles,
    capture,
    integers,
    make_context,
    make_kernels,
    near,
    poisoned,
    random,
    sms,
)
from scripts.gpu_prefill_checks import check_prefill
from scripts.gpu_streamk_checks import check_streamk


def on_cpu(layer: LinearWeights) -> LinearWeights:
    """The layer in float32, for the reference."""
    norm = None if layer.norm is None else layer.norm.cpu()
    bias = None if layer.bias is None else layer.bias.cpu()
    return LinearWeights(layer.weight.cpu().float(), layer.epilogue, norm, layer.epsilon, bias, layer.wide)


def check_linear(cache: Path) -> Measured:
    kernels, measured, shape = make_kernels(cache), Measured(), QWEN3_4B
    layers = {
        "qkv": LinearWeights(random(shape.qkv_rows, shape.hidden), norm=random(shape.hidden), epsilon=EPSILON),
        "out": LinearWeights(random(shape.hidden, shape.attention_width), Epilogue.ADD),
        "gate_up": LinearWeights(
            random(2 * shape.intermediate, shape.hidden, scale=0.02), Epilogue.GATED, random(shape.hidden), EPSILON
        ),
        "down": LinearWeights(random(shape.hidden, shape.intermediate), Epilogue.ADD),
        "biased": LinearWeights(random(1001, 896), bias=random(1001)),
        "head": LinearWeights(random(20000, shape.hidden), norm=random(shape.hidden), epsilon=EPSILON, wide=True),
    }
    for name, layer in layers.items():
        host = on_cpu(layer)
        for tile in (None, Tile(4, 2, 2), Tile(16, 1, 2)):
            linear = SkinnyLinear(layer, kernels, tile)
            for tokens in (1, 5, 8, 16):
                x = random(tokens, layer.weight.shape[1])
                y = poisoned(tokens, layer.outputs, dtype=torch.float32 if layer.wide else BF16)
                residual = random(tokens, layer.outputs) if layer.epilogue is Epilogue.ADD else None
                graph = capture(partial(linear, x, y, residual))
                x.copy_(random(*x.shape))
                y.fill_(torch.nan)
                graph.replay()
                wanted = reference.linear(host, x.cpu(), None if residual is None else residual.cpu())
                near(measured, f"{name}/{tile or 'default'}/{tokens}", y, wanted)
    return measured


def check_matmul(_: Path) -> Measured:
    """Every algorithm that the library proposes, on the whole GPU and for a lane of 64 SMs."""
    torch.zeros(1, device=DEVICE)  # makes the context
    library, measured, shape = CublasLt(sms()), Measured(), QWEN3_4B
    sizes = {
        "qkv": (shape.qkv_rows, shape.hidden),
        "out": (shape.hidden, shape.attention_width),
        "down": (shape.hidden, shape.intermediate),
        "head": (20000, shape.hidden),
    }
    for name, (outputs, inputs) in sizes.items():
        weight, bias = random(outputs, inputs, scale=0.02), random(outputs) if name == "qkv" else None
        host = LinearWeights(weight.cpu().float(), bias=None if bias is None else bias.cpu(), wide=name == "head")
        for rows in (12, 64, 256, 400, 2048):
            x = random(rows, inputs)
            wanted = reference.linear(host, x.cpu(), None)
            for lane_sms in (sms(), 60):
                product = Product(rows, outputs, inputs, lane_sms, name == "head", bias is not None)
                problem = library.problem(product)
                for place, algorithm in enumerate(problem.proposals()):
                    y = problem.launch(algorithm, x, weight, bias)
                    near(measured, f"{name}/{rows}/{lane_sms}/{place}", y, wanted)
    return measured


def check_layer(cache: Path) -> Measured:
    kernels, measured = make_kernels(cache), Measured()
    for rows, width in ((1, 2560), (300, 2560), (7, 1000)):
        x, residual, weight, y = random(rows, width), random(rows, width), random(width), poisoned(rows, width)
        total = (x.cpu().float() + residual.cpu().float()).to(BF16)
        AddRmsNorm(width, EPSILON, kernels)(x, residual, weight, y)
        near(measured, f"norm/{rows}x{width}", y, reference.rms_norm(total, weight.cpu(), EPSILON))
        assert torch.equal(residual.cpu(), total), "the residual sum is off"
        gate_up, product = random(rows, 2 * width), poisoned(rows, width)
        SiluMul(kernels)(gate_up, product)
        near(measured, f"silu/{rows}x{width}", product, reference.silu_mul(gate_up.cpu()))
    table, last = random(1000, 2560), integers([5, 999, 3])
    fed = poisoned(3, 2560)
    EmbedLast(kernels)(table, last, integers([2, -1, 1]), fed)
    assert torch.equal(fed, torch.stack([table[3], torch.zeros_like(table[0]), table[999]])), "embedding"
    for heads, qk_norm in ((Heads(32, 8, 128), True), (Heads(14, 2, 64), False)):
        check_rope(kernels, measured, heads, qk_norm=qk_norm)
    return measured


def check_rope(kernels: Kernels, measured: Measured, heads: Heads, *, qk_norm: bool) -> None:
    slots, lengths = [3, -1, 0, 5, 5], [1, 9, 700, 33, 34]
    context = make_context(heads, slots, lengths, 6, 1024, 1)
    norms = (random(heads.head_dim), random(heads.head_dim)) if qk_norm else None
    rope, qkv, (kv,) = angles(1024, heads.head_dim), random(5, heads.total, heads.head_dim), context.pools
    before, kv_before = qkv.clone().cpu(), kv.clone()
    run = RopeAndStore(heads, EPSILON, kernels, qk_norm=qk_norm)
    run(qkv, norms, rope, context.positions, context.slots, context.page_table, kv)
    live = [0, 2, 3, 4]
    half = heads.head_dim // 2
    turned = rope[context.positions[live].long()].cpu()
    queries, keys = before[live, : heads.query], before[live, heads.query : heads.query + heads.kv]
    if norms is not None:
        queries, keys = (
            reference.rms_norm(part, norm.cpu(), EPSILON) for part, norm in zip((queries, keys), norms, strict=True)
        )
    name = f"rope/{heads.query}x{heads.head_dim}"
    near(measured, f"{name}/q", qkv[live, : heads.query], reference.rotate(queries, turned[:, :half], turned[:, half:]))
    position = context.positions[live].long()
    page = context.page_table[context.slots[live].long(), position // 16].long()
    near(measured, f"{name}/k", kv[page, 0, position % 16], reference.rotate(keys, turned[:, :half], turned[:, half:]))
    assert torch.equal(kv[page, 1, position % 16].cpu(), before[live, heads.query + heads.kv :]), "values"
    assert torch.equal(qkv[1].cpu(), before[1]), "a padding row was touched"
    kv[page, :, position % 16] = kv_before[page, :, position % 16]
    assert torch.equal(kv, kv_before), "something else was written"


def attended(context: Context, qkv: torch.Tensor, heads: Heads) -> torch.Tensor:
    """The reference for every live row of a context."""
    rows, kv = [], context.pools[0].cpu()
    for row, slot in enumerate(context.slots.tolist()):
        if slot >= 0:
            q = qkv[row : row + 1, : heads.query].cpu()
            length = int(context.positions[row]) + 1
            rows.append(reference.paged_attention(q, kv, context.page_table[slot].cpu(), length, heads.head_dim**-0.5))
    return torch.cat(rows)


def check_attention(cache: Path) -> Measured:
    kernels, measured = make_kernels(cache), Measured()
    for heads in (Heads(32, 8, 128), Heads(16, 8, 128), Heads(14, 2, 64), Heads(64, 8, 128)):
        slots = [3, -1, 0, 11, 7, 4, -1, 9]
        context = make_context(heads, slots, [1, 5, 16, 17, 1000, 4000, 4, 250], 12, 4096, 1)
        qkv, out = random(8, heads.total, heads.head_dim), poisoned(8, heads.query, heads.head_dim)
        attention = DecodeAttention(heads, 8, sms(), DEVICE, kernels)
        norm = partial(AddRmsNorm(64, EPSILON, kernels), None, random(1, 64), random(64), random(1, 64))

        def work(
            attention: DecodeAttention = attention,
            norm: Callable[[], None] = norm,
            context: Context = context,
            qkv: torch.Tensor = qkv,
            out: torch.Tensor = out,
            scale: float = heads.head_dim**-0.5,
        ) -> None:
            attention.plan(context.slots, context.positions)
            norm()  # attention may start before its predecessor ends, so that one must not be the plan
            attention(qkv, context.pools[0], context.page_table, out, scale)

        graph = capture(work)
        for name, lengths in (("mixed", None), ("grown", [2, 0, 4096, 18, 1024, 1, 0, 3000]), ("short", [1] * 8)):
            if lengths is not None:
                context.positions.copy_(integers([max(length, 1) - 1 for length in lengths]))
            out.fill_(torch.nan)
            graph.replay()
            live = [row for row, slot in enumerate(slots) if slot >= 0]
            near(
                measured,
                f"attention/{heads.query}x{heads.kv}x{heads.head_dim}/{name}",
                out[live],
                attended(context, qkv, heads),
            )
            assert bool(out[1].isnan().all()), "a padding row was written"
            first = out.clone()
            for _ in range(20):
                graph.replay()
                assert torch.equal(out[live], first[live]), "replays differ: a race"
    return measured


MIXES = (
    RowSampling(temperature=0.0),
    RowSampling(temperature=1.0),
    RowSampling(temperature=0.6, top_k=20, top_p=0.95),
    RowSampling(temperature=1.0, top_p=0.9),
    RowSampling(temperature=1.5, min_p=0.05),
    RowSampling(temperature=3.0, top_p=0.999),
    RowSampling(temperature=1.0, top_k=5000, top_p=0.99),
    RowSampling(temperature=0.7, top_p=0.8, min_p=0.1, top_k=50),
)


def check_sampling(cache: Path) -> Measured:
    """Every row draws what the float64 reference draws, save where the two best scores are within 1e-4.

    Every third row has a mask: of few candidates, of one in 50, of half of them.
    """
    kernels, vocabulary, rows = make_kernels(cache), QWEN3_4B.vocabulary, 16
    tables = SamplingTables(64, vocabulary, DEVICE)
    sampler, close = Sampler(tables, rows, kernels), 0
    logits, tokens = (
        poisoned(rows, vocabulary, dtype=torch.float32),
        torch.zeros(rows, dtype=torch.int32, device=DEVICE),
    )
    slots, positions = integers(list(range(rows))), integers([0] * rows)
    graph = capture(partial(sampler, logits, slots, positions, tokens))
    for spread in (2.5, 8.0, 0.01):
        chosen = chance.sample(range(64), rows)
        slots.copy_(integers([-1 if row == 3 else slot for row, slot in enumerate(chosen)]))
        places = [chance.randrange(1, 10000) for _ in range(rows)]
        positions.copy_(integers(places))
        samplings = [structs.replace(MIXES[row % len(MIXES)], seed=chance.randrange(2**64)) for row in range(rows)]
        for slot, sampling in zip(chosen, samplings, strict=True):
            tables.put(slot, encode_row(sampling, 1))
        logits.copy_(torch.randn_like(logits) * spread)
        raw = logits.clone().cpu()
        mask_rows(sampler, raw)
        tokens.fill_(-7)
        graph.replay()
        drawn = tokens.tolist()
        for row, sampling in enumerate(samplings):
            if row == 3:
                assert drawn[row] == -7, "a padding row drew"
                continue
            close += draws_differ(raw[row], sampling, places[row] + 1, drawn[row], f"spread {spread}, {sampling}")
            assert int(tables.last_token[chosen[row]]) == drawn[row]
    sampler.masks.fill_(-1)
    check_penalties(sampler)
    check_bad_logits(sampler)
    return {"draws at ties": float(close)}


def mask_rows(sampler: Sampler, raw: torch.Tensor) -> None:
    """Masks for every third row, also in its raw logits."""
    rows, vocabulary = raw.shape
    size = mask_size(vocabulary)
    mask_of, words = np.full(rows, -1, np.int32), np.zeros((rows, size), np.uint32)
    for number, row in enumerate(range(0, rows, 3)):
        share = (1e-4, 0.02, 0.5)[number % 3]
        allowed = np.random.default_rng(chance.randrange(2**32)).random(32 * size) < share
        allowed[vocabulary - 1] = True
        mask_of[row], words[number] = number, np.packbits(allowed, bitorder="little").view("<u4")
        raw[row, torch.from_numpy(~allowed_ids(words[number], vocabulary))] = -torch.inf
    packed = np.concatenate((mask_of, words.view(np.int32).ravel()))
    sampler.masks.copy_(torch.from_numpy(packed))


def draws_differ(raw: torch.Tensor, sampling: RowSampling, position: int, drawn: int, what: str) -> bool:
    """Whether the draw isn't the reference's; raises unless both scores are about equal."""
    seed, place = np.array([sampling.seed], np.uint64), np.array([position], np.uint64)
    noise = philox.noise_for_all(seed, place, len(raw))[0].double()
    scores = reference.scores(raw, sampling, noise)
    best = int(scores.argmax())
    assert float(scores[best] - scores[drawn]) < 1e-4, f"{what}: drew {drawn}, the reference {best}"
    return best != drawn


def check_penalties(sampler: Sampler) -> None:
    """Counts, bias and suppression, over three greedy draws that feed the counts."""
    tables, prompt = sampler.tables, [7, 7, 9]
    sampling = RowSampling(
        temperature=0.0,
        repetition_penalty=1.3,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        logit_bias={11: 30.0, 5: -100.0},
        suppress=np.array([11], "<i4").tobytes(),
        min_tokens=2,
    )
    tables.put(0, encode_row(sampling, len(prompt)))
    sampler.count_seen(0, integers(prompt), len(prompt))
    output: list[int] = []
    for step in range(4):
        raw = torch.randn(1, tables.vocabulary, device=DEVICE)
        raw[0, 7], raw[0, 5] = 5.0 + step, 50.0
        wanted = raw[0].clone().cpu()
        if step < 2:
            wanted[11] = -torch.inf
        wanted[11] += 30.0
        wanted[5] -= 100.0
        for seen in {*prompt, *output}:
            wanted[seen] = wanted[seen] / 1.3 if wanted[seen] > 0 else wanted[seen] * 1.3
        for seen in set(output):
            wanted[seen] -= 0.5 * output.count(seen) + 0.25
        token = integers([0])
        sampler(raw, integers([0]), integers([len(prompt) + len(output) - 1]), token)
        assert int(token) == int(wanted.argmax()), f"step {step}: drew {int(token)}, not {int(wanted.argmax())}"
        output.append(int(token))
    assert output[2] == 11, "the bias had no effect once min_tokens was reached"


def check_bad_logits(sampler: Sampler) -> None:
    tables = sampler.tables
    logits = torch.randn(3, tables.vocabulary, device=DEVICE)
    logits[0, 77], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    for slot in range(3):
        tables.put(slot, encode_row(RowSampling(temperature=1.0, top_k=5), 1))
    tables.last_token.fill_(42)
    tokens = integers([0, 0, 0])
    sampler(logits, integers([0, 1, 2]), integers([9, 9, 9]), tokens)
    assert tokens.tolist() == [-1, -1, -1], tokens
    assert tables.last_token[:3].tolist() == [42, 42, 42], "a failed draw changed the tables"


def check_step(cache: Path) -> Measured:
    """Launches that overlap give bit for bit what launches in strict order give, over 30 replays with new inputs."""
    rows, layers = 5, 6
    context = make_context(QWEN3_4B.heads, [0, 1, -1, 2, 3], [900, 17, 1, 333, 1500], 4, 2048, layers)
    torch.manual_seed(7)
    overlapped = Decoder(QWEN3_4B, rows, context, make_kernels(cache), layers=layers)
    torch.manual_seed(7)
    ordered = Decoder(QWEN3_4B, rows, context, make_kernels(cache, overlap=False), layers=layers)
    live = [0, 1, 3, 4]
    graph = capture(overlapped.step)
    for repeat in range(30):
        tokens = integers([chance.randrange(QWEN3_4B.vocabulary) for _ in range(4)])
        context.positions.copy_(integers([chance.randrange(1, 2000) for _ in range(rows)]))
        outcomes = []
        for decoder, run in ((overlapped, graph.replay), (ordered, ordered.step)):
            decoder.tables.last_token.copy_(tokens)
            run()
            torch.cuda.synchronize()
            outcomes.append(
                (decoder.residual[live].clone(), decoder.logits[live].clone(), decoder.tokens[live].clone())
            )
        for left, right in zip(*outcomes, strict=True):
            assert torch.equal(left, right), f"replay {repeat}: overlap changes the result"
        assert bool(outcomes[0][1].isfinite().all())
    return {"replays equal": 30.0}


CHECKS: dict[str, Callable[[Path], Measured]] = {
    "linear": check_linear,
    "streamk": check_streamk,
    "matmul": check_matmul,
    "layer": check_layer,
    "attention": check_attention,
    "prefill": check_prefill,
    "sampling": check_sampling,
    "step": check_step,
}
