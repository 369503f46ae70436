//! What `draconis --version` says of the build: the commit, and what it is for.
//!
//! Only optimised builds name a commit: others would be built anew after each.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let target = cargo_variable("TARGET");
    let build =
        if cargo_variable("PROFILE") == "release" { commit_id() } else { "development".to_owned() };
    println!("cargo::rustc-env=DRACONIS_BUILD={build}, {target}");
}

fn cargo_variable(name: &str) -> String {
    std::env::var(name).expect("Cargo sets it")
}

/// The commit that git tells, or that an archive or a package of the sources was made of.
fn commit_id() -> String {
    if !Path::new(".git").exists() {
        return packed_commit_id().unwrap_or_else(|| "unknown commit".to_owned());
    }
    for place in ["HEAD", "logs/HEAD"] {
        let path = git_output(&["rev-parse", "--git-path", place]).unwrap_or_default();
        if Path::new(&path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    for place in ["Cargo.toml", "Cargo.lock", "src", "crates"] {
        println!("cargo::rerun-if-changed={place}");
    }
    let Some(commit) = git_output(&["rev-parse", "--short=12", "HEAD"]) else {
        return "unknown commit".to_owned();
    };
    let changed = git_output(&["status", "--porcelain", "--untracked-files=no"]);
    if changed.is_none_or(|list| list.is_empty()) { commit } else { format!("{commit} changed") }
}

/// What `git archive` wrote into the file for it, or `cargo package` beside it.
fn packed_commit_id() -> Option<String> {
    let texts = ["tools/commit", ".cargo_vcs_info.json"];
    texts.iter().find_map(|path| {
        println!("cargo::rerun-if-changed={path}");
        let text = std::fs::read_to_string(path).ok()?;
        let mut words = text.split(|letter: char| !letter.is_ascii_hexdigit());
        words.find(|word| word.len() == 40).map(|word| word[..12].to_owned())
    })
}

fn git_output(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
