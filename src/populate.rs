//! Where the files of a new volume come from: a directory, or a tar archive.
//!
//! ```text
//!   directory ─────────────scan──▶ Tree + paths
//!   archive, plain ────────scan──▶ Tree + places in the archive
//!   compressed, or a pipe ──unpack──▶ a file without a name ──▶ as a plain archive
//! ```
//! Law: a scan remembers names and places; contents are read once, when they are written.

mod directory;
mod tar;
mod unpack;
pub mod volume;

use std::collections::HashSet;
use std::path::Path;

use anyhow::Context;
use draconis_exchange::contract::Time;
use draconis_ext::mkfs::{Contents, Node, NodeId, Tree};

/// A tree and where the contents of its files are.
pub struct Source<'a> {
    pub tree: Tree,
    pub contents: Box<dyn Contents + 'a>,
    /// Directories that the source does not describe: they are only on the way to others.
    pub implied: HashSet<NodeId>,
}

impl<'a> Source<'a> {
    /// A tree whose directories are all described.
    pub fn new(tree: Tree, contents: impl Contents + 'a) -> Self {
        Self { tree, contents: Box::new(contents), implied: HashSet::new() }
    }
}

/// What scans are told beforehand.
#[derive(Clone, Copy)]
pub struct Stamp {
    /// When the volume is made.
    pub now: Time,
    /// No time is later than `now`, and only `modified` comes from the source.
    pub reproducible: bool,
}

impl Stamp {
    /// Gives a node its times; what the source does not know becomes `modified`.
    fn set(&self, node: &mut Node, modified: Time, accessed: Option<Time>, changed: Option<Time>) {
        if self.reproducible {
            let modified = modified.min(self.now);
            (node.modified, node.accessed, node.changed) = (modified, modified, modified);
        } else {
            node.modified = modified;
            node.accessed = accessed.unwrap_or(modified);
            node.changed = changed.unwrap_or(modified);
        }
        node.created = self.now;
    }
}

/// Scans `from`; `beside` is where a compressed archive may be unpacked, and what is left out
/// if the directory holds it.
pub fn scan(
    from: &Path,
    beside: &Path,
    root: Node,
    stamp: Stamp,
) -> anyhow::Result<Source<'static>> {
    let name = from.display().to_string();
    let file = if from == Path::new("-") {
        unpack::plain(Box::new(std::io::stdin().lock()), beside).context("standard input")?
    } else {
        let file = std::fs::File::open(from).with_context(|| name.clone())?;
        if file.metadata()?.is_dir() {
            return directory::scan(from, beside, root, stamp);
        }
        match unpack::is_plain(&file).with_context(|| name.clone())? {
            true => file,
            false => unpack::plain(Box::new(file), beside).with_context(|| name.clone())?,
        }
    };
    tar::scan(file, root, stamp).with_context(|| name)
}

pub use directory::{Gather, gather};

/// What a scan leaves out, told once for each kind of it.
#[derive(Default)]
struct LeftOut(std::collections::BTreeSet<String>);

impl LeftOut {
    fn tell(&mut self, what: &str, path: &dyn std::fmt::Display) {
        if self.0.insert(what.to_owned()) {
            eprintln!("draconis: {path}: {what} left out, and wherever else it is");
        }
    }
}
