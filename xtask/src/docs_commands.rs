//! The commands of cargo and pip in texts, and those that start an engine, name what exists. Those
//! of `blockflash` run in the tests of the command.

use crate::Cli;
use crate::workspace::{list, read, root};
use clap::CommandFactory;
use std::path::{Path, PathBuf};

fn pages(folder: &Path, into: &mut Vec<PathBuf>) {
    for path in list(folder).unwrap() {
        match path.extension() {
            _ if path.is_dir() => pages(&path, into),
            Some(end) if end == "md" => into.push(path),
            _ => {}
        }
    }
}

/// Every text with commands, by its path.
fn texts() -> Vec<(PathBuf, String)> {
    let names = ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "SECURITY.md"];
    let mut files: Vec<_> = names.map(|name| root().join(name)).into();
    pages(&root().join("docs/src"), &mut files);
    for folder in list(&root().join("crates")).unwrap() {
        files.extend(Some(folder.join("README.md")).filter(|path| path.exists()));
    }
    files.into_iter().map(|path| (path.clone(), read(&path).unwrap())).collect()
}

/// Names and options of a command of this program.
fn check_xtask(words: &str) -> Result<(), String> {
    let mut command = Cli::command();
    command.build();
    let mut command = &command;
    for word in words.split_whitespace().map(|word| word.trim_matches(['[', ']', '…'])) {
        if let Some(option) = word.strip_prefix("--") {
            let known = command.get_arguments().any(|known| known.get_long() == Some(option));
            known.then_some(()).ok_or_else(|| format!("no option --{option}"))?;
        } else if let Some(found) = command.find_subcommand(word) {
            command = found;
        } else if command.has_subcommands() {
            return Err(format!("no command {word}"));
        }
    }
    Ok(())
}

/// Packages, examples and folders of a line of a shell.
fn check_line(line: &str) -> Result<(), String> {
    let words: Vec<&str> = line.split(" #").next().unwrap_or(line).split_whitespace().collect();
    let after = |option: &str| words.iter().skip_while(|word| **word != option).nth(1);
    let exists = |path: String| match root().join(&path).exists() {
        true => Ok(()),
        false => Err(format!("there is no {path}")),
    };
    let package =
        |engine: &str| format!("crates/blockflash-python/python/blockflash/{engine}/__init__.py");
    let names = |path: &str, what: &str| match read(&root().join(path)).unwrap().contains(what) {
        true => Ok(()),
        false => Err(format!("{path} has no {}", what.trim())),
    };
    match words[..] {
        ["cargo", "xtask", ..] => check_xtask(&words[2..].join(" ")),
        // The tests of the command run them.
        ["blockflash", ..] | ["cargo", "run", "--release", "--", ..] => Ok(()),
        ["cargo", "run", ..] => {
            let (Some(package), Some(example)) = (after("-p"), after("--example")) else {
                return Err("neither a package nor an example".to_owned());
            };
            let examples = format!("crates/{package}/examples/{example}");
            exists(format!("{examples}.rs")).or_else(|_| exists(format!("{examples}/main.rs")))
        }
        ["cargo", "add" | "install", .., package] => exists(format!("crates/{package}/Cargo.toml")),
        ["pip", "install", .., source] => {
            let folder = source.trim_matches('"').split("subdirectory=").nth(1);
            let project = format!("{}/pyproject.toml", folder.unwrap_or("no folder"));
            exists(project.clone())?;
            let extra = words[2].split_once('[').and_then(|(_, rest)| rest.split(']').next());
            extra.map_or(Ok(()), |extra| names(&project, &format!("\n{extra} = [")))
        }
        ["vllm", "serve", ..] => {
            let name = after("--attention-backend").ok_or("no backend is named")?;
            names(&package("vllm"), &format!("NAME = \"{name}\""))
        }
        ["python", "-m", "sglang.launch_server", ..] => {
            let name = after("--attention-backend").ok_or("no backend is named")?;
            names(&package("sglang"), &format!("NAME = \"{name}\""))
        }
        [setting, "python", "-m", "sglang.launch_server", ..] => {
            let (variable, name) = setting.split_once('=').ok_or("no variable is set")?;
            let path = "crates/blockflash-python/python/blockflash/sglang/_names.py";
            names(path, &format!("REPLACES = \"{variable}\""))?;
            names(path, &format!("(\"{name}\", "))
        }
        [variable, "vllm", "serve", .., "--omni", "--diffusion-attention-backend", _] => {
            let variable = variable.strip_suffix("=1").ok_or("no variable is set to 1")?;
            names(&package("vllm_omni"), &format!("VARIABLE = \"{variable}\""))
        }
        [] => Ok(()),
        _ => Err("a line of a shell that nothing checks".to_owned()),
    }
}

#[test]
fn commands_of_texts_exist() {
    let (mut wrong, mut count) = (Vec::new(), 0);
    for (path, text) in texts() {
        let (mut in_shell, mut alias) = (false, None);
        for line in text.replace("\\\n", " ").lines() {
            let mut check = |line: &str| {
                count += 1;
                if let Err(what) = check_line(line) {
                    wrong.push(format!("{}: `{line}`: {what}", path.display()));
                }
            };
            if line.starts_with("```") {
                in_shell = line == "```sh";
            } else if let Some((name, words)) =
                line.strip_prefix("alias ").and_then(|line| line.split_once('='))
            {
                let words = words.trim_matches('"');
                check(words);
                alias = Some((format!("{name} "), format!("{words} ")));
            } else if in_shell {
                let aliased = alias.as_ref().and_then(|(name, words)| {
                    line.strip_prefix(name.as_str()).map(|rest| format!("{words}{rest}"))
                });
                check(aliased.as_deref().unwrap_or(line));
            } else {
                let code = line.split('`').skip(1).step_by(2);
                code.filter(|code| code.starts_with("cargo xtask ")).for_each(check);
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 50, "{count}");
}

#[test]
fn commands_that_do_not_exist_are_found() {
    for line in [
        "cargo xtask tidi",
        "cargo xtask tidy --mend",
        "cargo run --release -p blockflash-dist --example none",
        "cargo add --git https://x.org blockflash-none",
        "pip install \"git+https://x.org#subdirectory=crates/none\"",
        "conda install blockflash",
        "pip install \"blockflash[none] @ git+x#subdirectory=crates/blockflash-python\"",
        "vllm serve MODEL --attention-backend NONE",
        "python -m sglang.launch_server --attention-backend none",
        "BLOCKFLASH_NONE=dsa python -m sglang.launch_server",
        "BLOCKFLASH_SGLANG_REPLACES=none python -m sglang.launch_server",
        "NONE=1 vllm serve MODEL --omni --diffusion-attention-backend TORCH_SDPA",
    ] {
        assert!(check_line(line).is_err(), "{line}");
    }
    check_line("cargo xtask sass [PATTERN] [--check] [--full]").unwrap();
}
