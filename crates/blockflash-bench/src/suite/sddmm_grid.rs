//! Grids of sampled products.

use super::grid::uniform;
use crate::case::{Case, Pattern, SddmmShape};
use blockflash_sys::{DType, Major};
use serde::Deserialize;

/// Every combination of the lists is a case; m and n are equal.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SddmmGrid {
    /// m and n.
    size: Vec<usize>,
    k: Vec<usize>,
    block_size: Vec<usize>,
    density: Vec<f64>,
    #[serde(default = "uniform")]
    pattern: Vec<Pattern>,
    /// Of A and of B.
    layout: Vec<[Layout; 2]>,
    dtype: Vec<DType>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Layout {
    Row,
    Column,
}

impl From<Layout> for Major {
    fn from(layout: Layout) -> Self {
        match layout {
            Layout::Row => Major::Row,
            Layout::Column => Major::Column,
        }
    }
}

impl SddmmGrid {
    pub(super) fn expand(&self, cases: &mut Vec<Case>) -> Result<(), String> {
        for &dtype in &self.dtype {
            for layouts in &self.layout {
                let [a_major, b_major] = layouts.map(Major::from);
                for (&size, &k) in
                    self.size.iter().flat_map(|size| self.k.iter().map(move |k| (size, k)))
                {
                    for &block_size in &self.block_size {
                        for &density in &self.density {
                            let shape = |pattern| SddmmShape {
                                m: size,
                                n: size,
                                k,
                                block_size,
                                density,
                                pattern,
                                a_major,
                                b_major,
                                dtype,
                            };
                            for shape in self.pattern.iter().map(|&pattern| shape(pattern)) {
                                shape.check()?;
                                cases.push(Case::BsrSddmm(shape));
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::suite::Suite;

    const GRID: &str = "description = 'x'\n[[bsr_sddmm]]\nsize = [512]\nk = [64, 128]\nblock_size = [64]\n\
                        density = [0.5]\nlayout = [['column', 'row']]\ndtype = ['f16']\n";

    #[test]
    fn grids_expand_to_every_combination() {
        let suite = Suite::parse("t".into(), GRID).unwrap();
        let ids: Vec<_> = suite.cases.iter().map(ToString::to_string).collect();
        let expected = [
            "sddmm_m512_n512_k64_b64_d0.5_uniform_column_row_f16",
            "sddmm_m512_n512_k128_b64_d0.5_uniform_column_row_f16",
        ];
        assert_eq!(ids, expected);
        let problem = |from, to| Suite::parse("t".into(), &GRID.replace(from, to)).unwrap_err();
        assert!(problem("[0.5]", "[1.5]").contains("not in (0, 1]"));
        assert!(problem("[512]", "[0]").contains("size of 0"));
        assert!(problem("'row'", "'both'").contains("unknown variant"));
    }
}
