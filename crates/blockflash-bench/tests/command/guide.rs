//! The guide and the READMEs: a command that they show runs, and every command and option of
//! `blockflash` that they name exists.

use super::harness::Folder;
use std::collections::BTreeSet;
use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// What a line that runs the command from a checkout begins with.
const FROM_CHECKOUT: &str = "cargo run --release -- ";

/// The pages of a folder and of those below it.
fn pages(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in folder.read_dir().unwrap() {
        let path = entry.unwrap().path();
        match path.extension() {
            _ if path.is_dir() => pages(&path, into),
            Some(end) if end == "md" => into.push(path),
            _ => {}
        }
    }
}

fn texts() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files: Vec<_> =
        ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"].map(|name| root.join(name)).into();
    pages(&root.join("docs/src"), &mut files);
    for folder in root.join("crates").read_dir().unwrap() {
        files.extend(Some(folder.unwrap().path().join("README.md")).filter(|path| path.exists()));
    }
    files.iter().map(|file| read_to_string(file).unwrap() + "\n").collect()
}

/// The words of commands, without the name of the program.
#[derive(Default)]
struct Commands {
    /// Lines of blocks for a shell.
    shown: BTreeSet<String>,
    /// Code within sentences, which leaves out what a reader knows.
    named: BTreeSet<String>,
}

fn commands() -> Commands {
    let (mut commands, mut in_shell) = (Commands::default(), false);
    for line in texts().lines() {
        if line.starts_with("```") {
            in_shell = line == "```sh";
        } else if in_shell {
            let words = line.strip_prefix("blockflash ").or(line.strip_prefix(FROM_CHECKOUT));
            commands.shown.extend(words.map(str::to_owned));
        } else {
            let code = line.split('`').skip(1).step_by(2);
            let words = code.filter_map(|code| code.strip_prefix("blockflash "));
            commands.named.extend(words.map(str::to_owned));
        }
    }
    commands
}

#[test]
fn what_is_shown_runs() {
    let commands = commands().shown;
    assert!(commands.len() >= 6, "{commands:?}");
    let folder = Folder::new();
    for words in commands {
        assert_ne!(folder.ok(&words), "", "{words}");
    }
}

#[test]
fn what_is_named_exists() {
    let commands = commands().named;
    assert!(commands.len() >= 12, "{commands:?}");
    let folder = Folder::new();
    for command in commands {
        let words: Vec<&str> = command.split_whitespace().collect();
        let is_name = |word: &&&str| word.starts_with(|c: char| c.is_ascii_lowercase());
        let (names, rest) = words.split_at(words.iter().take_while(is_name).count());
        // The first argument of `bench` may be the name of a suite.
        let names = if names.first() == Some(&"bench") { &names[..1] } else { names };
        let help = folder.ok(&format!("{} --help", names.join(" ")));
        for option in rest.iter().map(|word| word.trim_matches(['[', ']'])) {
            let exists = !option.starts_with("--") || help.contains(option);
            assert!(exists, "`blockflash {command}`: no {option}");
        }
    }
}
