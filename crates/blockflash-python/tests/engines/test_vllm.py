"""The backend as vLLM's registry, its selector and its runner of models see it."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import needs

needs("vllm", "vllm.config", "vllm.v1.attention.backend")

import vllm  # noqa: E402
from vllm.config import AttentionConfig  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention.backend import (  # noqa: E402
    AttentionCGSupport,
    AttentionImpl,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends import registry  # noqa: E402
from vllm.v1.attention.selector import AttentionSelectorConfig  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode  # noqa: E402

from blockflash import Unsupported  # noqa: E402
from blockflash import vllm as plugin  # noqa: E402
from blockflash.vllm._backend import BlockflashBackend  # noqa: E402
from blockflash.vllm._reasons import MORE  # noqa: E402

CAPABILITIES = [(8, 0), (8, 9), (9, 0), (12, 0)]


def reasons(capability: tuple[int, int] = (9, 0), **changes: Any) -> list[str]:
    """What vLLM's selector gets to hear."""
    config = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto"}
    config = AttentionSelectorConfig(**(config | {"block_size": 16} | changes))
    return BlockflashBackend.validate_configuration(
        device_capability=DeviceCapability(*capability), **config._asdict()
    )


def test_the_name_leads_to_the_class_however_often_it_is_registered() -> None:
    plugin.register()
    plugin.register()
    member = registry.AttentionBackendEnum["BLOCKFLASH"]
    assert member.get_class() is BlockflashBackend
    assert registry.AttentionBackendEnum[BlockflashBackend.get_name()] is member
    assert AttentionConfig(backend="BLOCKFLASH").backend is member
    path = ".".join(BlockflashBackend.full_cls_name())
    assert member.get_path() == path


def test_vllm_finds_the_plugin() -> None:
    found = metadata.entry_points(group="vllm.general_plugins", name="blockflash")
    if not found:
        pytest.skip("the package is imported from its source and has no entry points")
    assert [point.load() for point in found] == [plugin.register]


def test_another_registry_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(registry, "register_backend")
    with caplog.at_level(logging.WARNING, logger="blockflash.vllm"):
        plugin.register()
    assert "does not take the attention backend BLOCKFLASH" in caplog.text


def test_another_version_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = importlib.util.find_spec("blockflash.vllm._backend")
    for version, said in (("0.33.0", ""), ("0.34.1", "this is 0.34.1")):
        monkeypatch.setattr(vllm, "__version__", version)
        with caplog.at_level(logging.WARNING):
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
        assert said in caplog.text and bool(said) == bool(caplog.records)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_size": 64, "has_sink": True, "has_sliding_window": True},
        {"head_size": 256, "block_size": 32},
        {"head_size": 72, "block_size": None},
        {"use_non_causal": True},
        {"kv_cache_dtype": "fp8", "use_per_head_quant_scales": True},
        {"kv_cache_dtype": "fp8_e4m3", "block_size": 784},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"kv_cache_dtype": "int8_per_token_head"},
    ],
)
def test_what_is_taken(
    capability: tuple[int, int], dtype: torch.dtype, changes: dict[str, Any]
) -> None:
    if changes.get("kv_cache_dtype") == "int8_per_token_head" and capability < (8, 9):
        capability = (8, 9)
    assert reasons(capability, dtype=dtype, **changes) == []


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"head_size": 520}, "multiples of 8 up to 512"),
        ({"head_size": 100}, "multiples of 8 up to 512"),
        ({"dtype": torch.float32}, "give --dtype"),
        ({"kv_cache_dtype": "nvfp4"}, "give --kv-cache-dtype"),
        ({"kv_cache_dtype": "float16"}, "float16 beside queries of torch.bfloat16"),
        ({"kv_cache_dtype": "fp8", "head_size": 72}, "head_size is 72 with kv_cache_dtype fp8"),
        ({"kv_cache_dtype": "fp8", "head_size": 512}, "beside 8 bits it takes multiples of 16 up"),
        ({"block_size": 8}, "a multiple of 16"),
        ({"use_mla": True}, "--attention-backend BLOCKFLASH_MLA"),
        ({"use_sparse": True}, "no choice of keys for each query"),
        ({"use_mm_prefix": True}, "tokens of an image"),
        ({"use_rswa": True}, "no prompt is excepted"),
        ({"use_batch_invariant": True}, "unset VLLM_BATCH_INVARIANT"),
        ({"use_pcp": True}, "--prefill-context-parallel-size 1"),
        ({"use_dcp": True}, "--decode-context-parallel-size 1"),
        ({"use_adaptive_verification": True}, "enable_adaptive_verification"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "as decoders do"),
    ],
)
def test_what_is_refused_has_a_reason(changes: dict[str, Any], said: str) -> None:
    found = reasons(**changes)
    assert len(found) == 1 and said in found[0], found


def test_old_gpus_are_refused() -> None:
    assert ["8.0 or newer" in reason for reason in reasons((7, 5))] == [True]
    (reason,) = reasons((8, 0), kv_cache_dtype="fp8_per_token_head")
    assert "8.9" in reason and "--kv-cache-dtype fp8" in reason


def test_reasons_are_those_of_vllm() -> None:
    """A reason that vLLM words anew would lose what is added to it."""
    changes = [
        {"head_size": 520, "dtype": torch.float32, "kv_cache_dtype": "nvfp4", "block_size": 8},
        {"use_mla": True, "use_sparse": True, "use_mm_prefix": True, "use_rswa": True},
        {"use_batch_invariant": True, "use_pcp": True, "use_dcp": True},
        {"use_adaptive_verification": True},
    ]
    found = {reason.split(":")[0] for each in changes for reason in reasons((7, 5), **each)}
    assert found == set(MORE)


def test_scales_of_rows_get_room_in_pages() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.uint8)
    assert BlockflashBackend.customize_spec(spec) is spec
    own = FullAttentionSpec(
        block_size=16,
        num_kv_heads=2,
        head_size=64,
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD,
    )
    own = BlockflashBackend.customize_spec(own)
    assert own.page_size_bytes == 16 * 2 * (64 + 64 + 16)
    assert BlockflashBackend.customize_spec(own) is own


def common(**changes: Any) -> CommonAttentionMetadata:
    """Two requests and one of padding."""
    ints = {"dtype": torch.int32}
    given = {
        "query_start_loc": torch.tensor([0, 5, 6, 6], **ints),
        "query_start_loc_cpu": torch.tensor([0, 5, 6, 6], **ints),
        "seq_lens": torch.tensor([5, 30, 0], **ints),
        "num_reqs": 3,
        "num_actual_tokens": 6,
        "max_query_len": 5,
        "max_seq_len": 30,
        "block_table_tensor": torch.zeros(3, 2, **ints),
        "slot_mapping": torch.arange(6),
    }
    return CommonAttentionMetadata(**(given | changes))


def builder() -> Any:
    made = BlockflashBackend.get_builder_cls()
    return made(None, ["layer"], None, torch.device("cpu"))


def test_metadata_are_the_tensors_that_vllm_has() -> None:
    given = common()
    made = builder().build(0, given)
    assert made.query_start_loc is given.query_start_loc and made.seq_lens is given.seq_lens
    assert made.block_table is given.block_table_tensor
    assert made.slot_mapping is given.slot_mapping
    assert (made.max_query_len, made.max_seq_len, made.num_actual_tokens) == (5, 30, 6)
    table, slots = torch.ones(3, 2, dtype=torch.int32), torch.arange(6, 12)
    other = builder().update_block_table(made, table, slots)
    assert other.block_table is table and other.slot_mapping is slots
    assert made.block_table is given.block_table_tensor and other.seq_lens is made.seq_lens
    assert builder().build(0, common(max_query_len=0)).max_query_len == 1
    assert builder().build_for_drafting(given, 0).causal is True


def test_steps_that_are_refused() -> None:
    with pytest.raises(Unsupported, match="cascade attention"):
        builder().build(16, common())
    with pytest.raises(Unsupported, match="causal is a tensor"):
        builder().build(0, common(causal=torch.ones(3, dtype=torch.int32)))
    with pytest.raises(Unsupported, match="mm_req_doc_ranges"):
        builder().build(0, common(mm_req_doc_ranges={0: [(1, 3)]}))
    with pytest.raises(Unsupported, match="rswa_prefix_lens"):
        builder().build(0, common(rswa_prefix_lens=torch.ones(3, dtype=torch.int32)))


def test_graphs_hold_batches_of_equal_lengths() -> None:
    made = BlockflashBackend.get_builder_cls()
    assert made.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH
    assert made.reorder_batch_threshold is None


def test_layers_that_are_refused() -> None:
    impl = BlockflashBackend.get_impl_cls()
    assert issubclass(impl, AttentionImpl)
    with pytest.raises(Unsupported, match="attn_type"):
        impl(4, 32, 0.1, 2, None, None, "auto", None, AttentionType.ENCODER)
    with pytest.raises(Unsupported, match="ALiBi with kv_cache_dtype fp8"):
        impl(4, 32, 0.1, 2, [0.5] * 4, None, "fp8")
    with pytest.raises(ValueError, match=r"sinks have shape \[3\], expected \[4\]"):
        impl(4, 32, 0.1, 2, sinks=torch.zeros(3))
    layer = impl(4, 32, 0.1, 2)
    with pytest.raises(Unsupported, match="fuse_attn_quant"):
        none = torch.empty(0)
        layer.forward(None, none, none, none, none, None, none, output_scale=torch.ones(1))
    output = torch.full((3, 4, 32), torch.nan)
    assert layer.forward(None, output, output, output, output, None, output).eq(0).all()


@pytest.mark.parametrize(
    "program, lines", [("vllm_layer.py", 4), ("vllm_mla.py", 6), ("vllm_sparse_mla.py", 7)]
)
def test_a_layer_of_vllm_drives_the_backend(program: str, lines: int) -> None:
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(here.parent), *sys.path])  # Where this process finds modules.
    done = subprocess.run(
        [sys.executable, here / program],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    said = [line for line in done.stdout.splitlines() if line.endswith(" ok")]
    assert done.returncode == 0 and len(said) == lines, done.stdout


def test_the_arguments_of_serve_check() -> None:
    path = Path(__file__).resolve().parents[2] / "examples" / "serve_check.py"
    spec = importlib.util.spec_from_file_location("serve_check", path)
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    args = check.parse(["MODEL", "--batch", "1", "4", "--new=8", "--", "--dtype", "half"])
    assert (args.model, args.batch, args.new, args.prompt) == ("MODEL", [1, 4], 8, 1024)
    assert args.engine == ["--dtype", "half"] and check.parse(["MODEL"]).engine == []
    with pytest.raises(SystemExit):
        check.parse(["MODEL", "--batch", "0"])
    assert check.first_difference([1, 2], [1, 2]) is None
    assert check.first_difference([1, 2], [1, 3]) == check.first_difference([1], [1, 2]) == 1
