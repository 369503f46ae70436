//! What a new volume is filled with: sources, and what is changed of them on the way.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use anyhow::Context;
use draconis_exchange::contract::Time;
use draconis_ext::mkfs::{Contents, Node, NodeId, Options, Tree, What};

use super::Arguments;
use crate::populate::{self, Digest, Patterns, Source, Stamp, Table, Wanted};

/// Longest list of files and longest table, in bytes.
const LONGEST_LIST: u64 = 256 << 20;
/// A clock that no file is newer than.
const NEVER: Time = Time { seconds: i64::MAX, nanoseconds: 0 };

/// Scans the sources; their tree, and the configuration of an image.
pub fn gather(
    arguments: &Arguments,
    options: &mut Options,
) -> anyhow::Result<(Source<'static>, Option<Vec<u8>>)> {
    let epoch = std::env::var_os("SOURCE_DATE_EPOCH").is_some();
    let made = Time { seconds: i64::from(options.time), nanoseconds: 0 };
    // The time of the newest file is not known before all are.
    let by_newest = arguments.reproducible && !epoch;
    let now = if by_newest { NEVER } else { made };
    let stamp = Stamp { now, reproducible: epoch || arguments.reproducible };
    let table = arguments.devices.as_deref().map(table).transpose()?;
    let mut root =
        Node::new(What::Directory, 0o755).at(if by_newest { Time::default() } else { now });
    (root.uid, root.gid) = options.root_owner;
    let (mut source, config) = if arguments.from.is_empty() {
        (Source::new(Tree::new(root), Nothing), None)
    } else {
        let list = arguments.list.as_deref().map(list).transpose()?;
        let exclude = Patterns::new(arguments.reading.exclude());
        let found = populate::scan(Wanted {
            from: &arguments.from,
            list: list.as_deref(),
            exclude: &exclude,
            choice: arguments.reading.choice(&arguments.image),
            root,
            stamp,
        })?;
        arguments.reading.check_config(found.config.as_deref())?;
        (found.source, found.config)
    };
    let mut stamp = stamp;
    if by_newest {
        stamp.now = newest(&mut source);
        populate::set_times(&mut source.tree, stamp);
        options.time = u32::try_from(stamp.now.seconds).unwrap_or(u32::MAX);
    }
    if let Some(owner) = arguments.owner {
        populate::own(&mut source.tree, owner.uid, owner.gid);
    } else if arguments.squash {
        populate::squash(&mut source.tree);
    }
    if let (Some(table), Some(path)) = (table, &arguments.devices) {
        let laid = populate::devices(&mut source, &table, stamp);
        laid.with_context(|| path.display().to_string())?;
    }
    if arguments.reproducible {
        identities(arguments, options, &source.tree);
    }
    Ok((source, config))
}

/// The newest time of what is described; what is only on the way has none.
fn newest(source: &mut Source<'_>) -> Time {
    for id in &source.implied {
        if let Some(node) = source.tree.node_mut(*id) {
            *node = node.clone().at(Time::default());
        }
    }
    let newest = populate::newest(&mut source.tree).max(Time::default());
    for id in &source.implied {
        if let Some(node) = source.tree.node_mut(*id) {
            *node = node.clone().at(newest);
        }
    }
    Time { nanoseconds: 0, ..newest }
}

/// Identity and hash seed from names, lengths, times, owners and attributes.
fn identities(arguments: &Arguments, options: &mut Options, tree: &Tree) {
    use std::fmt::Write as _;
    let mut sums = String::new();
    let mut dirs = vec![NodeId::ROOT];
    let mut text = String::new();
    while let Some(dir) = dirs.pop() {
        text.clear();
        for (name, id) in tree.names(dir) {
            let node = tree.node(id);
            let length = match &node.what {
                What::File { size_bytes, .. } => *size_bytes,
                What::Directory => {
                    dirs.push(id);
                    0
                }
                _ => 0,
            };
            let Time { seconds, nanoseconds } = node.modified;
            let (kind, mode, owner) = (node.what.kind(), node.mode, (node.uid, node.gid));
            let _ =
                write!(text, "{name:?} {kind:?} {mode} {owner:?} {length} {seconds}.{nanoseconds}");
            for (name, value) in node.attributes() {
                let _ = write!(text, " {name:?}={value:?}");
            }
            text.push('\n');
        }
        // One after the other: memory does not grow with the tree.
        sums = Digest::of(format!("{sums}{text}").as_bytes()).to_string();
    }
    let uuid = |what: &str| -> [u8; 16] {
        let sum = Digest::bytes(format!("{what} {sums}").as_bytes());
        let mut bytes: [u8; 16] = std::array::from_fn(|at| sum[at]);
        // A UUID of version 8: made of something of one's own.
        bytes[6] = bytes[6] & 0x0F | 0x80;
        bytes[8] = bytes[8] & 0x3F | 0x80;
        bytes
    };
    if matches!(&arguments.uuid[..], "random" | "time") {
        options.uuid = uuid("volume");
    }
    if !arguments.extended.iter().any(|list| list.contains("hash_seed")) {
        options.hash_seed = uuid("names");
    }
}

/// The names in a list.
fn list(path: &Path) -> anyhow::Result<Vec<Vec<u8>>> {
    let text = read(path)?;
    let end = if text.contains(&0) { 0 } else { b'\n' };
    let names = text.split(|byte| *byte == end).filter(|name| !name.is_empty());
    Ok(names.map(<[u8]>::to_vec).collect())
}

fn table(path: &Path) -> anyhow::Result<Table> {
    Table::parse(&read(path)?).with_context(|| path.display().to_string())
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut all = vec![];
    let read = match path == Path::new("-") {
        true => std::io::stdin().lock().take(LONGEST_LIST).read_to_end(&mut all),
        false => File::open(path).and_then(|file| file.take(LONGEST_LIST).read_to_end(&mut all)),
    };
    read.with_context(|| path.display().to_string())?;
    Ok(all)
}

struct Nothing;

impl Contents for Nothing {
    fn read(&self, _: u64, _: u64, _: &mut [u8]) -> std::io::Result<()> {
        Err(ErrorKind::NotFound.into())
    }
}

/// Contents of which nothing is known but where they are; whether they are read in their order.
pub struct Blank(pub bool);

impl Contents for Blank {
    fn read(&self, _: u64, _: u64, _: &mut [u8]) -> std::io::Result<()> {
        Ok(())
    }

    fn in_order(&self) -> bool {
        self.0
    }
}
