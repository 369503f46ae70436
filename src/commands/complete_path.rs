//! `draconis complete-path`: what a path in an image may go on with, for completion by a shell.
//!
//! Law: a shell waits for this while its user types, so nothing is said but the answer, and
//! where there is none the status tells.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use draconis_exchange::contract::Kind;
use draconis_ext::Follow;

use crate::image::{self, Place};
use crate::target::Target;

/// List completions of a path in an image (for completion scripts).
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: Place,
    /// Beginning of the path.
    #[arg(value_name = "IMAGE:/path")]
    target: Target,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    log::set_max_level(log::LevelFilter::Off);
    Ok(match names(arguments) {
        Ok(text) => {
            std::io::stdout().write_all(&text)?;
            ExitCode::SUCCESS
        }
        Err(_) => ExitCode::FAILURE,
    })
}

/// The paths that begin like the one asked for, a line each; directories end in a slash.
fn names(arguments: &Arguments) -> anyhow::Result<Vec<u8>> {
    let target = &arguments.target;
    let tree = image::open(&target.image, &arguments.place, None)?;
    let volume = tree.volume();
    let cut = target.path.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
    let (dir, begin) = target.path.split_at(cut);
    let number = volume.resolve(volume.root(), dir, Follow::Yes)?;
    let mut found = vec![];
    volume.entries(number, Default::default(), false, |entry| {
        if let Ok(entry) = entry {
            let hidden = entry.name.starts_with(b".") && !begin.starts_with(b".");
            // A line is a name, so a name with a line's end in it cannot be offered.
            let told = entry.name.starts_with(begin) && !hidden && !entry.name.contains(&b'\n');
            if told && !matches!(entry.name, b"." | b"..") {
                found.push((entry.name.to_vec(), entry.inode));
            }
        }
        true
    })?;
    found.sort();
    let mut text = vec![];
    for (name, number) in found {
        let path = [dir, &name].concat();
        let leads_to = volume.resolve(volume.root(), &path, Follow::Yes).unwrap_or(number);
        let is_dir = volume.inode(leads_to).is_ok_and(|inode| inode.kind == Kind::Directory);
        text.extend_from_slice(&path);
        text.extend_from_slice(if is_dir { b"/\n" } else { b"\n" });
    }
    Ok(text)
}
