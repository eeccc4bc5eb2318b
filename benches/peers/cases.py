"""The cases of the self-test of `serve.py`."""


def cases():
    """Small cases of every kind the suites hold, with the fields of the request that are not
    `warm`."""
    attention = dict(
        op="attention_fwd",
        batch=2,
        seqlen_q=512,
        seqlen_kv=512,
        num_heads_q=4,
        num_heads_kv=4,
        seed=1,
    )
    warm, cold = {}, {"cache": "cold", "flush_bytes": 1 << 27}
    yield dict(attention, head_dim=64, mask="full", dtype="bf16"), warm
    yield dict(attention, head_dim=64, mask="full", dtype="bf16"), cold
    yield dict(attention, head_dim=128, mask="causal", dtype="f16"), warm
    yield dict(attention, head_dim=256, mask="causal", dtype="bf16"), warm
    yield dict(attention, head_dim=128, mask="causal", dtype="bf16", num_heads_kv=2), warm
    yield (
        dict(attention, head_dim=128, mask="causal", dtype="bf16", seqlen_q=128, num_heads_kv=2),
        warm,
    )
    yield dict(attention, head_dim=128, mask="window64", dtype="bf16", num_heads_kv=1), warm
    unequal = dict(attention, head_dim=192, head_dim_v=128, dtype="bf16")
    for mask in ("full", "causal"):
        yield dict(unequal, mask=mask), warm
        yield dict(unequal, op="attention_bwd", mask=mask), warm
    for queries in (1, 16):
        yield (
            dict(
                attention,
                head_dim=128,
                mask="full",
                dtype="bf16",
                seqlen_q=queries,
                seqlen_kv=4096,
                num_heads_kv=1,
            ),
            warm,
        )
    packed = dict(attention, op="attention_packed", batch=3, lengths=[500, 37, 700], dtype="bf16")
    for head_dim, mask in ((64, "full"), (128, "causal"), (128, "window64"), (72, "causal")):
        yield dict(packed, head_dim=head_dim, mask=mask), warm
    yield dict(packed, head_dim=128, mask="causal", num_heads_kv=1), warm
    codes = dict(attention, op="attention_e4m3", dtype="e4m3")
    for head_dim, mask, heads in ((64, "full", 4), (128, "causal", 2), (256, "causal", 4)):
        yield dict(codes, head_dim=head_dim, mask=mask, num_heads_kv=heads), warm
    sparse = dict(
        attention, op="block_sparse_fwd", pattern="uniform", mask="full", dtype="bf16", density=0.25
    )
    for block, head_dim, heads_kv in ((128, 64, 4), (128, 128, 4), (64, 64, 2), (64, 128, 4)):
        row = dict(
            block_q=block,
            block_kv=block,
            blocks_per_row=128 // block,
            head_dim=head_dim,
            num_heads_kv=heads_kv,
        )
        yield dict(sparse, **row), warm
        yield dict(sparse, **{**row, "mask": "causal"}), warm
    for case in (
        dict(attention, head_dim=64, mask="full", dtype="bf16"),
        dict(attention, head_dim=128, mask="causal", dtype="bf16", num_heads_kv=2),
        dict(sparse, block_q=128, block_kv=128, blocks_per_row=2, head_dim=128),
        dict(sparse, block_q=64, block_kv=64, blocks_per_row=3, head_dim=128, num_heads_kv=2),
    ):
        yield dict(case, op=case["op"].replace("fwd", "bwd")), warm
    for pairs, mask in (
        ("documents4b64", "full"),
        ("documents4b128", "causal"),
        ("prefix100b64", "full"),
        ("grid7b64", "full"),
        ("dilated9x5b64", "full"),
        ("sharedbias", "causal"),
        ("bias", "full"),
        ("alibi", "full"),
    ):
        masked = dict(attention, op="masks_fwd", pairs=pairs, mask=mask, head_dim=64, dtype="bf16")
        yield masked, warm
        yield dict(masked, op="masks_bwd"), warm
    tree = dict(attention, op="masks_fwd", pairs="treeb64", mask="full", head_dim=64, dtype="bf16")
    yield dict(tree, seqlen_q=64), warm
    decode = dict(
        op="attention_decode",
        batch=3,
        seqlen_q=1,
        seqlen_kv=2048,
        num_heads_q=8,
        num_heads_kv=2,
        head_dim=128,
        dtype="bf16",
        seed=1,
    )
    rotated = {"cache": "rotated", "flush_bytes": 1 << 24}
    for head_dim in (64, 128, 256):
        yield dict(decode, head_dim=head_dim), rotated
    yield dict(decode, seqlen_q=4), rotated
    yield dict(decode, window=100), rotated
    yield dict(decode, window=100, seqlen_q=4, page_size=16, lengths=[2048, 300, 5]), rotated
    yield dict(decode, lengths=[2048, 300, 5]), rotated
    for page in (16, 256):
        yield dict(decode, page_size=page, lengths=[2048, 300, 5]), rotated
    yield dict(decode, seqlen_q=16, page_size=64, lengths=[2048] * 3), warm
    yield dict(decode, page_size=64, chosen=5, lengths=[2048] * 3), rotated
    latent = dict(decode, op="mla_decode", num_heads_q=16, num_heads_kv=1, head_dim_v=512)
    for row, page in ((576, 64), (576, 16), (576, None), (512, 64)):
        given = dict(latent, head_dim=row, page_size=page)
        yield given, rotated
        yield dict(given, num_heads_q=8, lengths=[2048, 300, 5]), rotated
    yield dict(latent, head_dim=576, page_size=64, seqlen_q=4, num_heads_q=128), rotated
    yield from index_cases(rotated)
    product = dict(op="bsr_matmul", m=1024, n=512, k=1024, dtype="f16", seed=1)
    for block in (16, 32, 64, 128):
        yield dict(product, block_size=block, blocks_per_row=256 // block), warm
    for columns in (8, 200):
        yield dict(product, n=columns, block_size=64, blocks_per_row=4), warm
    yield dict(product, n=128, block_size=64, blocks_per_row=4), cold
    yield dict(product, n=16, block_size=64, blocks_per_row=4, fresh_bytes=1 << 27), warm


def index_cases(rotated):
    """Attention by an index, and the choice of blocks."""
    index = dict(
        op="attention_index",
        batch=3,
        seqlen_q=1,
        seqlen_kv=2048,
        num_heads_q=32,
        num_heads_kv=2,
        groups=2,
        head_dim=128,
        page_size=128,
        granularity=128,
        entries=8,
        lists="uniform",
        dtype="bf16",
        seed=1,
    )
    prompt = dict(batch=1, seqlen_q=2048, lists="near")
    nsa = dict(page_size=None, granularity=64)
    for of in ({}, nsa):
        yield dict(index, **of), rotated
        yield dict(index, **of, seqlen_q=4), rotated
        yield dict(index, **of, **prompt), rotated
    qsa = dict(index, op="attention_index_shared", groups=1, head_dim=256, page_size=64)
    qsa = dict(qsa, num_heads_q=24, granularity=4, entries=256)
    yield qsa, rotated
    yield dict(qsa, **prompt), rotated
    latent = dict(index, op="attention_index_latent", groups=1, num_heads_kv=1, head_dim=576)
    latent = dict(latent, head_dim_v=512, latent=True, page_size=64, granularity=1, entries=1024)
    for heads in (16, 128):
        yield dict(latent, num_heads_q=heads), rotated
    choice = dict(op="index_choice", batch=3, seqlen_q=1, seqlen_kv=8192, heads=4, head_dim=128)
    choice = dict(choice, page_size=128, granularity=128, entries=16, dtype="bf16", seed=1)
    for queries in (1, 4, 64):
        yield dict(choice, seqlen_q=queries), rotated
    weighted = dict(choice, op="index_choice_weighted", weighted=True, heads=64, page_size=64)
    for queries in (1, 4):
        yield dict(weighted, seqlen_q=queries, granularity=1, entries=2048), rotated


def on_hopper():
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def refused(case, name):
    """Why a competitor cannot run a case: then an error is right."""
    window = case.get("window") or case.get("mask", "").startswith("window")
    if window and name in ("cudnn", "fa2", "triton_flash") or window and "torch_sdpa" in name:
        return "no window"
    if name == "triton_flash" and case["seqlen_q"] < 64:
        return "no tile for so few queries"
    one_head_dim = ("torch_sdpa_flash", "triton_flash", "fa2", "fa2_deterministic")
    if case.get("head_dim_v") and name in one_head_dim:
        return "one head_dim for q, k and v"
    if window and name == "flash_attention_4":
        return "no window"
    if case.get("fresh_bytes") and "cusparse" in name:
        return "one matrix only"
    if name.startswith("fa4") and case.get("block_kv") == 64:
        return "no tile for so few keys"
    if name == "fa4_deterministic" and case["op"] == "block_sparse_bwd" and on_hopper():
        return "no fixed order under a block mask"
    if name == "fa4" and case["op"] == "block_sparse_fwd" and case["mask"] == "causal":
        return "whole blocks only"
    if case["op"] == "attention_decode" and name in ("cudnn", "fa2"):
        if case.get("lengths") or case.get("page_size"):
            return "neither pages nor lengths"
        if name == "cudnn" and case["seqlen_q"] > 1:
            return "no diagonal that ends at the last key"
    if case["op"] == "attention_index":
        if name.endswith("_msa") and case["page_size"] != 128:
            return "pages and blocks of 128 keys only"
        if name == "nsa" and case["seqlen_q"] not in (1, case["seqlen_kv"]):
            return "whole prompts, or one query of each sequence"
    if name == "sglang_dsa_prefill" and case["num_heads_q"] > 32:
        return "at most 32 heads"
    if name.endswith("_index_decode") and case["seqlen_q"] > 8:
        return "few queries only"
    if case["op"] == "mla_decode":
        if name == "flash_mla" and (case["page_size"] != 64 or case["head_dim"] != 576):
            return "pages of 64 and rows of 576 only"
        if name == "flashinfer_mla" and case["head_dim"] == 512:
            return "rows with elements behind the values only"
        if name == "triton_mla" and case["seqlen_q"] > 1:
            return "one query only"
    if case["op"] != "attention_fwd":
        return None
    if name == "torch_sdpa_efficient" and case["num_heads_q"] != case["num_heads_kv"]:
        return "no grouped heads"
    if (
        name == "torch_sdpa_cudnn"
        and case["mask"] == "causal"
        and case["seqlen_q"] != case["seqlen_kv"]
    ):
        return "no diagonal that ends at the last key"
    return None
