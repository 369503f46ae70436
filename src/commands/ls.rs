//! `draconis ls`

use std::io::Write;
use std::process::ExitCode;

use draconis_exchange::contract::{Attributes, Kind};
use draconis_ext::{Follow, InodeNumber, Volume};

use crate::cli::Ls;
use crate::commands::join;
use crate::image::{self, find};
use crate::text::{self, Clock, Output, printable};

pub fn run(arguments: &Ls) -> anyhow::Result<ExitCode> {
    let clock = Clock::new();
    let tree = image::open(&arguments.target.image, arguments.place, None)?;
    let volume = tree.volume();
    let mut list = List { volume, arguments, clock, out: Output::new(), failed: false };
    let start = find(volume, &arguments.target, Follow::Yes)?;
    if volume.inode(start)?.kind == Kind::Directory {
        list.directories(start, &arguments.target.path)?;
    } else {
        list.entry(&arguments.target.path, start)?;
    }
    list.out.flush()?;
    Ok(if list.failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

struct List<'a> {
    volume: &'a Volume,
    arguments: &'a Ls,
    clock: Clock,
    out: Output,
    failed: bool,
}

impl List<'_> {
    /// Lists a directory and, if asked, those below it: a stack, since a volume may be deep.
    fn directories(&mut self, start: InodeNumber, path: &[u8]) -> anyhow::Result<()> {
        let mut stack = vec![(start, path.to_vec())];
        let mut seen = std::collections::HashSet::from([start]);
        let mut first = true;
        while let Some((dir, path)) = stack.pop() {
            if self.arguments.recursive {
                if !first {
                    writeln!(self.out)?;
                }
                self.out.name(&path)?;
                writeln!(self.out, ":")?;
            }
            first = false;
            let listing = match image::names(self.volume, dir, &printable(&path)) {
                Ok(listing) => listing,
                Err(error) => {
                    self.complain(&error);
                    continue;
                }
            };
            self.failed |= listing.damaged;
            let mut below = vec![];
            for entry in &listing.names {
                if entry.name.starts_with(b".") && !self.arguments.all {
                    continue;
                }
                match self.entry(&entry.name, entry.inode) {
                    // The output cannot be written: there is no use in going on.
                    Err(error) if error.is::<std::io::Error>() => return Err(error),
                    Err(error) => self.complain(&error),
                    Ok(()) => {}
                }
                let is_dir = self.arguments.recursive
                    && self.volume.inode(entry.inode).is_ok_and(|i| i.kind == Kind::Directory);
                // A damaged volume may hold a directory below itself.
                if is_dir && seen.insert(entry.inode) {
                    below.push((entry.inode, join(&path, &entry.name)));
                }
            }
            stack.extend(below.into_iter().rev());
        }
        Ok(())
    }

    fn complain(&mut self, error: &anyhow::Error) {
        self.failed = true;
        eprintln!("draconis: {error:#}");
    }

    fn entry(&mut self, name: &[u8], inode: InodeNumber) -> anyhow::Result<()> {
        if self.arguments.long {
            let attributes = self
                .volume
                .attributes(inode)
                .map_err(|error| anyhow::anyhow!("{}: {error}", printable(name)))?;
            write!(self.out, "{} ", long(&attributes, &self.clock))?;
            self.out.name(name)?;
            if attributes.kind == Kind::Symlink {
                write!(self.out, " -> ")?;
                let target = self.volume.read_link(inode)?;
                self.out.name(&target)?;
            }
        } else {
            self.out.name(name)?;
        }
        writeln!(self.out)?;
        Ok(())
    }
}

/// The columns of `ls -ln` up to the name.
fn long(attributes: &Attributes, clock: &Clock) -> String {
    let size = match attributes.kind {
        Kind::CharDevice | Kind::BlockDevice => {
            format!("{}, {}", attributes.device.0, attributes.device.1)
        }
        _ => attributes.size_bytes.to_string(),
    };
    format!(
        "{} {:>3} {:>5} {:>5} {size:>10} {}",
        text::mode(attributes.mode),
        attributes.links,
        attributes.uid,
        attributes.gid,
        clock.minute(attributes.modified)
    )
}
