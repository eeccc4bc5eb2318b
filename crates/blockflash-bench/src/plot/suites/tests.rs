use super::*;
use crate::record::OURS;
use crate::report::sample::{block_sparse, grid, record};

fn named<'p>(plots: &'p [Plot], file: &str) -> &'p Plot {
    let files: Vec<_> = plots.iter().map(|plot| plot.file.as_str()).collect();
    plots
        .iter()
        .find(|plot| plot.file == file)
        .unwrap_or_else(|| panic!("{file} is not in {files:?}"))
}

/// The words of a picture.
fn words(svg: &str) -> Vec<&str> {
    svg.split("<text")
        .skip(1)
        .filter_map(|text| text.split_once('>')?.1.split('<').next())
        .map(str::trim)
        .collect()
}

#[test]
fn every_kind_of_plot_is_drawn() {
    let plots = plots(&grid()).unwrap();
    let files: Vec<_> = plots.iter().map(|plot| plot.file.as_str()).collect();
    let expected = [
        "attention_fwd_d64.svg",
        "attention_fwd_d128.svg",
        "attention_fwd_ratio.svg",
        "attention_fwd_roofline.svg",
        "block_sparse_fwd_d128.svg",
        "block_sparse_fwd_ratio.svg",
        "block_sparse_fwd_roofline.svg",
        "bsr_matmul_m8192_k8192_n1024.svg",
        "bsr_matmul_ratio.svg",
        "bsr_matmul_roofline.svg",
    ];
    assert_eq!(files, expected);
    let covers: Vec<_> =
        plots.iter().filter(|plot| plot.cover).map(|plot| plot.file.as_str()).collect();
    assert_eq!(
        covers,
        ["attention_fwd_d128.svg", "block_sparse_fwd_d128.svg", "bsr_matmul_m8192_k8192_n1024.svg"]
    );
}

#[test]
fn both_passes_of_attention_are_drawn_apart() {
    let mut records = grid();
    records.retain(|record| record.op != "bsr_matmul");
    let forward = records.clone().into_iter().filter(|record| record.op.ends_with("_fwd"));
    records.extend(forward.map(|record| Record {
        op: record.op.replace("fwd", "bwd"),
        case: format!("bwd_{}", record.case),
        ..record
    }));
    let plots = plots(&records).unwrap();
    let titles: Vec<_> = plots.iter().map(|plot| plot.alt.as_str()).collect();
    for title in [
        "Attention forward, head_dim 64",
        "Attention backward, head_dim 64",
        "Attention backward, head_dim 128",
        "Block-sparse attention backward, head_dim 128",
    ] {
        assert!(titles.contains(&title), "{title}: {titles:?}");
    }
}

#[test]
fn a_plot_names_its_lines_axes_and_origin() {
    let plots = plots(&grid()).unwrap();
    let plot = named(&plots, "attention_fwd_d64.svg");
    assert!(plot.svg.starts_with("<svg ") && plot.svg.trim_end().ends_with("</svg>"));
    let words = words(&plot.svg);
    for word in [
        "blockflash",
        "flash_attention_3",
        "torch_sdpa_cudnn",
        "matmul ceiling",
        "exp ceiling",
        "TFLOP/s",
        "sequence length",
        "512",
        "2048",
        "full, 16 heads, 16384 tokens, bf16",
        "causal, 16 heads, 16384 tokens, bf16",
        "Attention forward, head_dim 64",
    ] {
        assert!(words.contains(&word), "{word} is not in {words:?}");
    }
    assert!(
        words.iter().any(|word| word.starts_with("G · 2026-11-21 · commit abcdef012345")),
        "{words:?}"
    );
    // White below everything, ours in its colour.
    assert!(plot.svg.contains("fill=\"#FFFFFF\"") && plot.svg.contains("#D55E00"));
}

#[test]
fn densities_and_roofs_have_their_words() {
    let plots = plots(&grid()).unwrap();
    let words_of = |file| words(&named(&plots, file).svg).join("\n");
    let bsr = words_of("bsr_matmul_m8192_k8192_n1024.svg");
    for word in [
        "blocks of 32 × 32",
        "0.05",
        "binding ceiling",
        "torch_matmul_dense (dense product, useful part)",
    ] {
        assert!(bsr.contains(word), "{word} is not in {bsr}");
    }
    let sparse = words_of("block_sparse_fwd_d128.svg");
    assert!(sparse.contains("16k") && sparse.contains("0.25"), "{sparse}");
    let roofline = words_of("attention_fwd_roofline.svg");
    assert!(
        roofline.contains("matmul 830 TFLOP/s") && roofline.contains("head_dim 64, causal"),
        "{roofline}"
    );
    let ratio = words_of("attention_fwd_ratio.svg");
    assert!(ratio.contains("0.90") && ratio.contains("b32_s512_h16_d64_full_bf16"), "{ratio}");
    assert!(ratio.contains("flash_attention_3 is the best rival"), "{ratio}");
}

#[test]
fn what_is_missing_is_left_out() {
    // No rivals: nothing to compare. No ceilings: no roofs. One length: no lines.
    let alone = Record {
        op: "attention_fwd".into(),
        ..record("b1_s512_h8_d64_full_bf16", OURS, Some(1.0))
    };
    assert!(plots(&[alone]).unwrap().is_empty());
    // Rivals are drawn where there is nothing of ours.
    let mut records = grid();
    for ours in records.iter_mut().filter(|record| record.implementation == OURS) {
        (ours.us, ours.tflops, ours.error) = (None, None, Some("not there".into()));
    }
    let plots = plots(&records).unwrap();
    let words = words(&named(&plots, "block_sparse_fwd_d128.svg").svg);
    assert!(words.contains(&"flash_attention_3") && !words.contains(&"blockflash"));
    assert!(!plots.iter().any(|plot| plot.file.contains("ratio")));
}

#[test]
fn the_block_sparse_suite_is_drawn() {
    let plots = plots(&block_sparse()).unwrap();
    let files: Vec<_> = plots.iter().map(|plot| plot.file.as_str()).collect();
    let expected = [
        "block_sparse_fwd_d64.svg",
        "block_sparse_fwd_d128.svg",
        "block_sparse_fwd_ratio.svg",
        "block_sparse_fwd_roofline.svg",
    ];
    assert_eq!(files, expected);
    let svg = &named(&plots, "block_sparse_fwd_d128.svg").svg;
    let words = words(svg);
    for word in [
        "blocks of 128 × 128, bf16",
        "blocks of 64 × 64, bf16",
        "128k",
        "0.03125",
        "16k causal",
        "32k power_law",
        "32k 32 on 8",
        "blockflash, dense",
        "flex_attention_tuned",
        "binding ceiling",
    ] {
        assert!(words.contains(&word), "{word} is not in {words:?}");
    }
    assert!(!words.contains(&"8k power_law"));
}
