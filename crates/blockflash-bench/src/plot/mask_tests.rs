use super::*;
use blockflash_ops::{Align, BlockGeometry};

fn picture(mask: &BlockMask, shown: &[[usize; 2]]) -> Figure {
    MaskPicture { mask, name: "test", shown }.draw().unwrap().0
}

fn local(seqlen: usize) -> BlockMask {
    let geometry = BlockGeometry::new(seqlen, seqlen, 64, 64).unwrap();
    let window = BlockMask::window(geometry, Some(1), Some(0), Align::BottomRight).unwrap();
    window.union(&BlockMask::sink(geometry, 1).unwrap()).unwrap()
}

#[test]
fn every_block_of_a_small_mask_is_a_cell() {
    let mask = local(256);
    let figure = picture(&mask, &[[0, 0]]);
    assert_eq!(figure.title, "test: density 56.2 %, 9 blocks, imbalance 1.33");
    assert!(
        figure.subtitle.starts_with("256 × 256 tokens in blocks of 64 × 64 · imbalance"),
        "{}",
        figure.subtitle
    );
    let [panel, lengths] = &figure.panels[..] else { panic!("{} panels", figure.panels.len()) };
    let cells = panel.cells.as_ref().unwrap();
    let dark: Vec<_> = cells.shades.iter().map(|&shade| shade / Cells::SHADES).collect();
    assert_eq!(
        (cells.columns, &dark[..]),
        (4, &[1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 1, 1][..])
    );
    assert!(cells.shades.iter().all(|shade| shade % Cells::SHADES == 0));
    assert_eq!((panel.y.low, panel.y.high, panel.x.high), (256.0, 0.0, 256.0));
    assert_eq!(lengths.lines[1].points, [(1.0, 32.0), (2.0, 96.0), (3.0, 160.0), (3.0, 224.0)]);
    assert_eq!(lengths.lines[0].points[0].0, 2.25);
}

#[test]
fn many_blocks_share_a_cell_and_a_single_one_is_still_seen() {
    // 2048 blocks in each direction; the last row visits all, the others the first.
    let geometry = BlockGeometry::new(131_072, 131_072, 64, 64).unwrap();
    let mask = BlockMask::global(geometry, &[2047], &[0]).unwrap();
    let figure = picture(&mask, &[[0, 0]]);
    let cells = figure.panels[0].cells.as_ref().unwrap();
    let rows = cells.shades.len() / cells.columns;
    assert!(cells.columns < 400 && rows < 400, "{rows} x {}", cells.columns);
    assert!(figure.legend[0].0.starts_with("all of 9 × 9 blocks"), "{:?}", figure.legend);
    for (row, shades) in cells.shades.chunks_exact(cells.columns).enumerate() {
        assert!(shades[0] > 0, "{row}");
        let last = row + 1 == rows;
        assert!(shades[1..].iter().all(|&shade| (shade > 0) == last), "{row}");
    }
}

#[test]
fn heads_are_small_multiples_with_their_own_densities() {
    let geometry = BlockGeometry::new(256, 128, 64, 64).unwrap();
    let blocks = |head: usize| (0..8).map(move |block| block <= head);
    let mask =
        BlockMask::from_bool(geometry, 1, 6, &(0..6).flat_map(blocks).collect::<Vec<_>>()).unwrap();
    let shown: Vec<_> = (0..6).map(|head| [0, head]).collect();
    let figure = picture(&mask, &shown);
    let titles: Vec<_> = figure.panels.iter().map(|panel| panel.title.as_str()).collect();
    assert_eq!((figure.columns, titles.len()), (3, 6));
    assert_eq!(titles[0], "head 0: 12.5 %, longest row 1");
    assert_eq!(titles[5], "head 5: 75.0 %, longest row 2");
    assert!(
        figure.subtitle.contains("6 of 6 heads") && figure.subtitle.contains("queries downwards")
    );
    // Queries twice as many as keys: panels that are higher than wide.
    assert!(figure.panel_height > 300, "{}", figure.panel_height);

    let wrong = |shown: &[[usize; 2]]| {
        MaskPicture { mask: &mask, name: "", shown }.draw().unwrap_err().to_string()
    };
    assert!(wrong(&[]).contains("1 to 16 heads, not 0"));
    assert!(wrong(&[[0, 0]; 17]).contains("not 17"));
    assert!(wrong(&[[0, 6]]).contains("no head 6") && wrong(&[[1, 0]]).contains("batch entry 1"));
}

#[test]
fn empty_masks_have_a_picture() {
    let geometry = BlockGeometry::new(128, 128, 64, 64).unwrap();
    let mask = BlockMask::from_bool(geometry, 1, 1, &[false; 4]).unwrap();
    let figure = picture(&mask, &[[0, 0]]);
    assert_eq!(figure.title, "test: density 0.000 %, 0 blocks, imbalance 1.00");
    let drawing = Drawing(figure);
    assert!(drawing.svg().unwrap().contains("<path "));
}

#[test]
fn a_name_is_cut_and_numbers_are_grouped() {
    assert_eq!(
        (thousands(1), thousands(1000), thousands(1_234_567)),
        ("1".into(), "1,000".into(), "1,234,567".into())
    );
    assert_eq!(
        (percent(0.5), percent(0.0312), percent(0.0012)),
        ("50.0 %".into(), "3.12 %".into(), "0.120 %".into())
    );
    let mask = local(256);
    let name = "µ".repeat(60);
    let figure = MaskPicture { mask: &mask, name: &name, shown: &[[0, 0]] }.draw().unwrap().0;
    assert!(
        figure.title.starts_with(&format!("{}...: density", "µ".repeat(44))),
        "{}",
        figure.title
    );
    let labels: Vec<_> = positions(65536, 4).into_iter().map(|(_, label)| label).collect();
    assert_eq!(labels, ["0", "16k", "32k", "48k", "64k"]);
    assert_eq!(positions(1000, 4).len(), 4);
}

#[test]
fn a_file_of_a_picture_is_small_and_its_name_decides_the_format() {
    let geometry = BlockGeometry::new(65536, 65536, 64, 64).unwrap();
    let columns: Vec<_> = (0..1024).filter(|column| column % 7 == 0).collect();
    let mask = BlockMask::global(geometry, &[5, 900], &columns).unwrap();
    let drawing = MaskPicture { mask: &mask, name: "x", shown: &[[0, 0]] }.draw().unwrap();
    let svg = drawing.svg().unwrap();
    assert!(svg.trim_end().ends_with("</svg>") && svg.len() < 1_000_000, "{}", svg.len());
    let folder = std::env::temp_dir().join(format!("blockflash-picture-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    drawing.write(&[folder.join("a.SVG")]).unwrap();
    assert_eq!(std::fs::read_to_string(folder.join("a.SVG")).unwrap(), svg);
    assert!(
        drawing
            .write(&[folder.join("a.gif")])
            .unwrap_err()
            .to_string()
            .contains("must end in .svg")
    );
    assert!(matches!(drawing.write(&[folder.join("no/a.svg")]), Err(PlotError::File(_))));
    std::fs::remove_dir_all(&folder).unwrap();
}
