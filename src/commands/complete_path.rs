//! `draconis complete-path`: completions of a path in an image, for shells.
//!
//! Law: a shell calls this while the user types, so it prints nothing but completions; failures
//! only set the exit status.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use draconis_ext::Follow;
use draconis_types::FileType;

use crate::image::{self, ReadArgs};
use crate::target::ImagePath;

/// List completions of a path in an image (for completion scripts).
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: ReadArgs,
    /// Beginning of the path.
    #[arg(value_name = "IMAGE:/path")]
    target: ImagePath,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    log::set_max_level(log::LevelFilter::Off);
    Ok(match matching_names(arguments) {
        Ok(text) => {
            std::io::stdout().write_all(&text)?;
            ExitCode::SUCCESS
        }
        Err(_) => ExitCode::FAILURE,
    })
}

/// Returns the paths that begin with the given prefix, one per line; directories end in a slash.
fn matching_names(arguments: &Arguments) -> anyhow::Result<Vec<u8>> {
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
            // Names with a newline cannot be offered, because each line is one name.
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
        let is_dir = volume.inode(leads_to).is_ok_and(|inode| inode.kind == FileType::Directory);
        text.extend_from_slice(&path);
        text.extend_from_slice(if is_dir { b"/\n" } else { b"\n" });
    }
    Ok(text)
}
