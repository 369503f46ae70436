//! Every command on every page of the book works, and says what the page says.
//!
//! ```text
//! $ command            typed, in a directory of the page's own
//! what it writes       must be just that
//! ...                  whatever it writes here
//! ```

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{Draconis, fuse, skipped};

/// The pages, by name.
fn pages() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/book/src");
    let mut pages: Vec<PathBuf> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    pages.sort();
    pages
}

/// What is typed, each with the lines that the page shows of its output.
fn commands(page: &str) -> Vec<(&str, Vec<&str>)> {
    let mut found: Vec<(&str, Vec<&str>)> = vec![];
    let mut inside = false;
    for line in page.lines() {
        match (inside, line.strip_prefix("$ ")) {
            (false, _) => inside = line == "```console",
            (true, _) if line == "```" => inside = false,
            (true, Some(typed)) => found.push((typed, vec![])),
            (true, None) => found.last_mut().expect("output before a command").1.push(line),
        }
    }
    assert!(!inside, "a block without an end");
    found
}

/// Whether lines are as shown; `...` stands for any of them.
fn matches(shown: &[&str], lines: &[&str]) -> bool {
    match shown.split_first() {
        None => lines.is_empty(),
        Some((&"...", rest)) => (0..=lines.len()).any(|skip| matches(rest, &lines[skip..])),
        Some((line, rest)) => {
            lines.split_first().is_some_and(|(first, more)| first == line && matches(rest, more))
        }
    }
}

fn type_all(draconis: &Draconis, page: &Path) -> usize {
    let name = page.file_stem().unwrap().to_str().unwrap();
    let text = std::fs::read_to_string(page).unwrap();
    let dir = draconis.make_dir(name);
    let own = Path::new(env!("CARGO_BIN_EXE_draconis")).parent().unwrap();
    let path = format!("{}:{}", own.display(), std::env::var("PATH").unwrap());
    let has_lab = own.join("draconis-lab").exists();
    let commands = commands(&text);
    let mounts = commands.iter().any(|(typed, _)| typed.contains("draconis mount"));
    let can_mount = !mounts || fuse("the pages of the book that mount");
    for (typed, shown) in &commands {
        if !can_mount && (typed.contains("mount ") || typed.contains("mnt/")) {
            continue;
        }
        if typed.contains("draconis lab") && !has_lab {
            skipped("the book's commands of draconis lab need draconis-lab to be built");
            continue;
        }
        let mut bash = Command::new("bash");
        bash.args(["-euo", "pipefail", "-c", typed]).current_dir(&dir).stdin(Stdio::null());
        bash.env("PATH", &path).env("DRACONIS_RUNTIME_DIR", draconis.make_dir("run"));
        let output = bash.env("LC_ALL", "C").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let written = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{name}: $ {typed}\n{said}");
        let lines: Vec<&str> = written.lines().collect();
        assert!(matches(shown, &lines), "{name}: $ {typed}\n{written}{said}");
    }
    commands.len()
}

#[test]
fn every_command_of_the_book_works() {
    let draconis = Draconis::new();
    let typed: usize = pages().iter().map(|page| type_all(&draconis, page)).sum();
    assert!(typed > 60, "{typed}");
}

#[test]
fn every_page_is_in_the_summary() {
    let summary = pages().into_iter().find(|page| page.ends_with("SUMMARY.md")).unwrap();
    let summary = std::fs::read_to_string(summary).unwrap();
    for page in pages() {
        let name = page.file_name().unwrap().to_str().unwrap().to_owned();
        assert!(name == "SUMMARY.md" || summary.contains(&format!("({name})")), "{name}");
    }
}
