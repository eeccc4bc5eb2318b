//! One page about one launch, or two side by side.

use super::{
    ceilings::Ceilings,
    figures::{Figures, derive, figures},
    gpu::Gpu,
    launch::Launch,
    lines::PAGE,
    raw::Raw,
    unit::shown,
};
use crate::table;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::Path};

/// Version of the JSON form.
const SCHEMA: u32 = 1;

/// How many reasons for waiting are shown.
const STALLS_SHOWN: usize = 6;

/// What is known about a profiled launch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Page {
    schema: u32,
    /// Name of the GPU.
    pub gpu: String,
    /// Version of its driver.
    pub driver: String,
    /// Where the image comes from.
    pub images: String,
    /// The kernel and its counted work.
    pub launch: Launch,
    /// The GPU's limits.
    pub ceilings: Ceilings,
    /// The numbers, in seconds, bytes, operations and per cent.
    pub figures: Figures,
    /// Cycles that a warp waits for each reason, per instruction issued.
    pub stalls: BTreeMap<String, f64>,
}

impl Page {
    /// Puts together what was measured.
    pub fn new(gpu: &Gpu, images: &str, launch: Launch, ceilings: Ceilings, raw: &Raw) -> Self {
        let reasons = raw.between("smsp__average_warps_issue_stalled_", "_per_issue_active.ratio");
        let page = Self {
            schema: SCHEMA,
            gpu: gpu.name.clone(),
            driver: gpu.driver.clone(),
            images: images.into(),
            figures: figures(raw, &launch, &ceilings),
            stalls: reasons.map(|(reason, cycles)| (reason.to_string(), cycles)).collect(),
            launch,
            ceilings: ceilings.clone(),
        };
        // Where the rate of the matrix units is not known, their utilisation says how much faster
        // they could be.
        let implied = || {
            Some(
                page.figures.get("flop_rate")? * 100.0
                    / page.figures.get("tensor_pipe").filter(|busy| **busy > 0.0)?,
            )
        };
        let matmul = ceilings.matmul.or_else(implied);
        page.held_against(Ceilings { matmul, ..ceilings })
    }

    /// The same launch held against other ceilings.
    pub fn held_against(mut self, ceilings: Ceilings) -> Self {
        derive(&mut self.figures, &self.launch, &ceilings);
        Self { ceilings, ..self }
    }

    /// Reads a saved page.
    pub fn load(path: &Path) -> Result<Self> {
        let text = crate::workspace::read(path)?;
        let page: Self = serde_json::from_str(&text)
            .with_context(|| format!("{} is no saved page", path.display()))?;
        ensure!(
            page.schema == SCHEMA,
            "{} is a page of schema {}, not {SCHEMA}",
            path.display(),
            page.schema
        );
        Ok(page)
    }

    /// The page for people.
    pub fn text(&self) -> String {
        let mut text = self.heading();
        text += &body(&[self], &[String::new(), String::new()]);
        text += &self.conclusion();
        text
    }

    fn heading(&self) -> String {
        let Launch { symbol, case, .. } = &self.launch;
        format!(
            "{symbol}\n{case} on {}, driver {}; images: {}\n\n",
            self.gpu, self.driver, self.images
        )
    }

    fn conclusion(&self) -> String {
        let bytes = |key: &str| self.figures.get(key).copied().unwrap_or(0.0);
        let limit = self.ceilings.limit(&self.launch, bytes("l2_read"), bytes("hbm"));
        match (limit, self.figures.get("attained")) {
            (Some(limit), Some(attained)) => {
                let origin = &self.ceilings.origin;
                format!(
                    "\n{attained:.0} % of the attainable; the limit is {} (ceilings {origin})\n",
                    limit.name
                )
            }
            _ => "\nno ceilings are known for this GPU\n".into(),
        }
    }

    /// Two pages side by side.
    pub fn compare(a: &Page, b: &Page) -> String {
        let mut text = format!("A: {}B: {}", a.heading().trim_start(), b.heading());
        text = text.replace("\n\nB: ", "\nB: ");
        text += &body(&[a, b], &["", "A", "B", "B / A"].map(String::from));
        text
    }
}

/// The lines of one page, or of two with their ratio.
fn body(pages: &[&Page], header: &[String]) -> String {
    let cells = |label: &str, values: &[Option<f64>], written: &dyn Fn(f64) -> String| {
        let mut cells = vec![format!("  {label}")];
        cells.extend(values.iter().map(|value| value.map_or("not reported".into(), written)));
        if let [a, b] = values {
            let ratio = a.zip(*b).filter(|(a, _)| *a != 0.0).map(|(a, b)| format!("{:.2}", b / a));
            cells.push(ratio.unwrap_or_default());
        }
        cells
    };
    let mut rows = Vec::new();
    for (heading, lines) in PAGE {
        rows.push(vec![heading.to_string()]);
        for line in *lines {
            let values: Vec<_> =
                pages.iter().map(|page| page.figures.get(line.key).copied()).collect();
            rows.push(cells(line.label, &values, &|value| shown(value, line.unit)));
        }
    }
    rows.push(vec!["stalls, cycles per instruction".to_string()]);
    for reason in reasons(pages) {
        let values: Vec<_> = pages.iter().map(|page| page.stalls.get(&reason).copied()).collect();
        rows.push(cells(&reason.replace('_', " "), &values, &|value| format!("{value:.2}")));
    }
    table::text(header, &rows).trim_start_matches('\n').to_string()
}

/// The reasons that cost most in one of the pages. A warp that issues is not waiting.
fn reasons(pages: &[&Page]) -> Vec<String> {
    let mut highest: BTreeMap<&str, f64> = BTreeMap::new();
    for (reason, &cycles) in
        pages.iter().flat_map(|page| &page.stalls).filter(|(reason, _)| *reason != "selected")
    {
        let known = highest.entry(reason).or_default();
        *known = known.max(cycles);
    }
    let mut reasons: Vec<(&str, f64)> = highest.into_iter().collect();
    reasons.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    reasons.into_iter().take(STALLS_SHOWN).map(|(reason, _)| reason.to_string()).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::raw;
    use super::*;
    use blockflash_sys::ComputeCapability;

    pub(in super::super) fn sample() -> Page {
        let raw = raw::parse(raw::tests::CSV, "blockflash_sample").unwrap();
        let gpu = Gpu {
            name: "Some GPU".into(),
            capability: ComputeCapability::new(9, 0),
            driver: "1.2".into(),
        };
        let launch = Launch {
            case: "b4_s4096_h32_d64_full_bf16".into(),
            symbol: "blockflash_sample".into(),
            flops: 200e9,
            bytes: 125e6,
            l2_bytes: 1e9,
            ..Launch::default()
        };
        let ceilings = Ceilings::stated(&raw, "bf16");
        Page::new(&gpu, "0123456789ab", launch, ceilings, &raw)
    }

    #[test]
    fn a_page_is_one_page() {
        let text = sample().text();
        assert!(text.starts_with(
            "blockflash_sample\nb4_s4096_h32_d64_full_bf16 on Some GPU, driver 1.2; images: 0123456789ab\n"
        ));
        for part in [
            "500.0 µs",
            "400.0 TFLOP/s",
            "54.1 %",
            "not reported",
            "short scoreboard",
            "200 000 000",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert!(!text.contains("  selected") && !text.contains("branch resolving"), "{text}");
        assert!(
            text.lines().count() < 66 && text.lines().all(|line| line.chars().count() <= 100),
            "{text}"
        );
        assert!(text.contains(" % of the attainable; the limit is "), "{text}");
    }

    #[test]
    fn two_pages_stand_side_by_side() {
        let (a, mut b) = (sample(), sample());
        b.figures.insert("seconds".into(), 250e-6);
        b.figures.remove("tensor_pipe");
        let text = Page::compare(&a, &b);
        let line = |label: &str| {
            text.lines().find(|line| line.trim_start().starts_with(label)).unwrap().to_string()
        };
        assert!(
            line("duration")
                .split_whitespace()
                .eq(["duration", "500.0", "µs", "250.0", "µs", "0.50"])
        );
        assert!(
            line("matrix").split_whitespace().skip(3).eq(["54.1", "%", "not", "reported"]),
            "{text}"
        );
        assert!(
            text.starts_with("A: blockflash_sample\n") && text.contains("\nB: blockflash_sample\n"),
            "{text}"
        );
    }

    #[test]
    fn a_page_can_be_held_against_other_ceilings() {
        let page = sample();
        let ceilings =
            Ceilings { origin: "measured".into(), matmul: Some(800e12), ..Ceilings::default() };
        let page = page.held_against(ceilings);
        assert!((page.figures["attained"] - 50.0).abs() < 1e-9);
        assert!(
            page.text().contains(
                "50 % of the attainable; the limit is the matrix units (ceilings measured)"
            )
        );
    }

    #[test]
    fn pages_are_saved() {
        let path = std::env::temp_dir().join(format!("xtask-page-{}.json", std::process::id()));
        std::fs::write(&path, serde_json::to_string(&sample()).unwrap()).unwrap();
        assert_eq!(Page::load(&path).unwrap(), sample());
        std::fs::write(&path, "{}").unwrap();
        assert!(Page::load(&path).unwrap_err().to_string().contains("is no saved page"));
        std::fs::remove_file(path).unwrap();
    }
}
