//! `cargo xtask sass`: counts machine instructions, and checks them against the expectations that
//! the manifest declares for each kernel.

mod code;
mod listing;

use crate::{
    kernels::{self, lock, store, toolchain::Toolchain},
    workspace::{output, print, table, target_dir, write},
};
use anyhow::{Context, Result, bail, ensure};
use blockflash_sys::{Kernel, Target, manifest};
use code::{Instruction, instructions};
use listing::{Mix, opcodes};
use rayon::prelude::*;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    process::Command,
    time::Instant,
};

/// Count the instructions of the committed machine code, and check what the manifest's kernels
/// declare about it.
#[derive(clap::Args, Default)]
pub struct Args {
    /// Select only images whose name contains this text.
    pattern: Option<String>,
    /// Select only images for this target; may be repeated. sm_90a includes sm_90, since such a GPU
    /// uses both.
    #[arg(long, value_name = "TARGET", value_parser = kernels::parse_target)]
    arch: Vec<Target>,
    /// Fail unless each image contains and lacks what the manifest declares for it.
    #[arg(long)]
    check: bool,
    /// Print the machine code of the selected image; exactly one must be selected.
    #[arg(long, conflicts_with = "check")]
    full: bool,
}

/// Instructions that get a column when one of the listed images contains them: matrix units, bulk
/// and asynchronous copies, shared and global memory, register spills, special functions,
/// synchronisation.
const COLUMNS: &[&str] = &[
    "HGMMA", "QGMMA", "IGMMA", "HMMA", "QMMA", "OMMA", "IMMA", "UTMALDG", "UTMASTG", "UBLKCP",
    "LDGSTS", "LDSM", "STSM", "LDS", "STS", "LDG", "STG", "RED", "ATOM", "ATOMG", "LDL", "STL",
    "MUFU", "SHFL", "SYNCS", "BAR",
];

/// Columns that are always shown: an empty column proves that nothing is spilled.
const ALWAYS: &[&str] = &["LDL", "STL"];

impl Args {
    fn selects(&self, kernel: &Kernel) -> bool {
        kernels::is_among(kernel.target, &self.arch)
            && self.pattern.as_deref().is_none_or(|pattern| kernel.image_name().contains(pattern))
    }
}

/// A disassembled image.
#[derive(Clone)]
struct Image {
    kernel: &'static Kernel,
    mix: Mix,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let selected: Vec<&'static Kernel> =
        manifest::kernels().iter().filter(|kernel| args.selects(kernel)).collect();
    let kernels: Vec<&'static Kernel> =
        selected.iter().copied().filter(|kernel| !kernel.target.is_ptx()).collect();
    let ptx = selected.len() - kernels.len();
    if kernels.is_empty() {
        match ptx {
            0 => bail!("no image is selected"),
            _ => bail!("{ptx} images are selected, but they are PTX, which is not machine code"),
        }
    }
    let started = Instant::now();
    let disassembler = Disassembler::pinned()?;
    if args.full {
        let [kernel] = kernels.as_slice() else {
            bail!(
                "--full prints one image, but {} are selected: name it, or add --arch",
                kernels.len()
            );
        };
        return print(&disassembler.listing(kernel)?);
    }
    let images = disassembler.mixes(&kernels)?;
    if !args.check {
        print(&text(&images)?)?;
    }
    let broken: Vec<String> = images.iter().flat_map(broken).collect();
    broken
        .iter()
        .for_each(|line| eprintln!("{}: {line}", if args.check { "error" } else { "warning" }));
    let skipped =
        if ptx == 0 { String::new() } else { format!("; {ptx} PTX images are not machine code") };
    print(&format!(
        "{} images in {:.0} s{skipped}\n",
        images.len(),
        started.elapsed().as_secs_f64()
    ))?;
    if args.check && !broken.is_empty() {
        bail!("{} images are not what the manifest declares (`Family::contains`)", broken.len());
    }
    Ok(())
}

/// The violated expectations of the image's kernel, as one line.
fn broken(image: &Image) -> Option<String> {
    let count = |opcode| image.mix.count(opcode);
    let words: Vec<String> = image
        .kernel
        .expects()
        .into_iter()
        .filter(|expect| !expect.holds(count(expect.opcode())))
        .map(|expect| {
            format!(
                "the manifest declares that it {expect}; it occurs {} times",
                count(expect.opcode())
            )
        })
        .collect();
    (!words.is_empty()).then(|| format!("{}: {}", image.kernel.image_name(), words.join("; ")))
}

fn text(images: &[Image]) -> Result<String> {
    let lock = lock::load()?;
    let occurs = |opcode: &&&str| {
        ALWAYS.contains(*opcode) || images.iter().any(|image| image.mix.count(opcode) > 0)
    };
    let columns: Vec<&str> = COLUMNS.iter().filter(occurs).copied().collect();
    let mut header: Vec<String> = ["image", "regs", "spill"].map(String::from).to_vec();
    header.extend(columns.iter().map(|column| column.to_string()));
    header.push("total".into());
    let cells = |image: &Image| {
        let name = image.kernel.image_name();
        // An image that `cargo xtask kernels` has never written has no entry.
        let (registers, spilled) = match lock.get(&name) {
            Some(entry) => (entry.registers.to_string(), entry.spill_bytes.to_string()),
            None => ("?".into(), "?".into()),
        };
        let short = name.trim_start_matches("blockflash_").trim_end_matches(".cubin").to_string();
        let counts = columns.iter().map(|column| image.mix.count(column));
        let counts = counts.chain([image.mix.total()]).map(|count| count.to_string());
        [short, registers, spilled].into_iter().chain(counts).collect()
    };
    Ok(table(std::iter::once(header).chain(images.iter().map(cells))))
}

/// The pinned disassembler, the committed images, and the folder in which it reads them.
struct Disassembler {
    nvdisasm: PathBuf,
    images: store::Images,
    scratch: PathBuf,
}

impl Disassembler {
    fn pinned() -> Result<Self> {
        let nvdisasm = Toolchain::pinned()?.nvcc.with_file_name("nvdisasm");
        Ok(Self { nvdisasm, images: store::load()?, scratch: target_dir("kernels/scratch")? })
    }

    /// Counts the instructions of each kernel.
    fn mixes(&self, kernels: &[&'static Kernel]) -> Result<Vec<Image>> {
        let mut targets: BTreeMap<Target, Vec<&Kernel>> = BTreeMap::new();
        for kernel in kernels {
            targets.entry(kernel.target).or_default().push(kernel);
        }
        let of_target =
            |(&target, kernels): (&Target, &Vec<&'static Kernel>)| self.mixes_of(target, kernels);
        Ok(targets.par_iter().map(of_target).collect::<Result<Vec<_>>>()?.concat())
    }

    /// Counts the instructions of kernels for one target. The disassembler, which takes a quarter
    /// of a second to start, reads all distinct instructions of the target at once: an opcode does
    /// not depend on where an instruction stands.
    fn mixes_of(&self, target: Target, kernels: &[&'static Kernel]) -> Result<Vec<Image>> {
        let code = |kernel: &&'static Kernel| {
            let code = instructions(self.image(kernel)?);
            code.with_context(|| format!("cannot read the image {}", kernel.image_name()))
        };
        let images = kernels.iter().map(code).collect::<Result<Vec<Vec<Instruction>>>>()?;
        let distinct: BTreeSet<Instruction> = images.iter().flatten().copied().collect();
        let distinct = Vec::from_iter(distinct);
        let architecture = target.name().replace("sm_", "SM");
        let listing =
            self.disassemble(target.name(), &distinct.concat(), &["--binary", &architecture])?;
        let opcodes: Vec<&str> = opcodes(&listing).collect();
        ensure!(
            opcodes.len() == distinct.len(),
            "the disassembler lists {} of {} instructions for {target}",
            opcodes.len(),
            distinct.len()
        );
        let opcodes: BTreeMap<&Instruction, &str> = distinct.iter().zip(opcodes).collect();
        let mix = |code: &Vec<Instruction>| Mix::of(code.iter().map(|word| opcodes[word]));
        let mixes = images.iter().map(mix);
        Ok(kernels.iter().zip(mixes).map(|(kernel, mix)| Image { kernel, mix }).collect())
    }

    /// The machine code of a kernel as text.
    fn listing(&self, kernel: &Kernel) -> Result<String> {
        self.disassemble(&kernel.image_name(), self.image(kernel)?, &["--print-code"])
    }

    fn image(&self, kernel: &Kernel) -> Result<&[u8]> {
        let name = kernel.image_name();
        let image = self.images.get(&name).map(Vec::as_slice);
        image.with_context(|| format!("no image {name}: run `cargo xtask kernels`"))
    }

    /// Disassembles a file with this content.
    fn disassemble(&self, name: &str, content: &[u8], arguments: &[&str]) -> Result<String> {
        // A name of its own, so that a concurrent build does not write the same file.
        let path = self.scratch.join(format!("{name}.sass-{}", std::process::id()));
        write(&path, content)?;
        // Data-flow analysis only adds labels of indirect branches; skipping it saves a third of
        // the time.
        let mut disassembler = Command::new(&self.nvdisasm);
        let listing = output(disassembler.arg("--no-dataflow").args(arguments).arg(&path));
        let _ = std::fs::remove_file(&path);
        listing.with_context(|| format!("cannot read the machine code of {name}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_declarations_are_named() {
        let kernel = &manifest::kernels()[0];
        let wanted = kernel.expects().into_iter().filter(|expect| expect.holds(1));
        let lines = |opcodes: &[&str]| {
            opcodes.iter().map(|opcode| format!("/*0000*/ {opcode}.X R0 ;\n")).collect::<String>()
        };
        let wanted: Vec<&str> = wanted.map(|expect| expect.opcode()).collect();
        assert_eq!(broken(&Image { kernel, mix: Mix::of(opcodes(&lines(&wanted))) }), None);
        let with_spill = [wanted.as_slice(), &["LDL"]].concat();
        let line = broken(&Image { kernel, mix: Mix::of(opcodes(&lines(&with_spill))) }).unwrap();
        assert!(
            line.ends_with("the manifest declares that it lacks LDL; it occurs 1 times"),
            "{line}"
        );
        let line = broken(&Image { kernel, mix: Mix::of(opcodes(&lines(&wanted[1..]))) }).unwrap();
        assert!(
            line.contains(&format!(
                "the manifest declares that it contains {}; it occurs 0 times",
                wanted[0]
            )),
            "{line}"
        );
    }
}
