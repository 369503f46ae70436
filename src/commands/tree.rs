//! `draconis tree`

use std::io::Write;
use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use draconis_ext::{Follow, InodeNumber, Volume};
use draconis_types::FileType;
use draconis_types::path_bytes::ShowPath;

use crate::edit::with_context;
use crate::image::{self, ListedName, ReadArgs, resolve_target};
use crate::report;
use crate::target::{ImagePath, join_path};
use crate::text::{EscapingOutput, escape_control_chars, pluralize};

/// List a directory of a volume recursively, as a tree.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: ReadArgs,
    /// Include names that start with a dot.
    #[arg(short)]
    all: bool,
    /// Descend at most N levels.
    #[arg(short = 'L', long, value_name = "N")]
    level: Option<usize>,
    /// Directory to list (default: the root directory).
    #[arg(value_name = "IMAGE[:/path]")]
    target: ImagePath,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let tree = image::open(&arguments.target.image, &arguments.place, None)?;
    let volume = tree.volume();
    let start = resolve_target(volume, &arguments.target, Follow::Yes)?;
    let top = &arguments.target;
    if volume.inode(start).map_err(|error| with_context(top, error))?.kind != FileType::Directory {
        bail!("{top}: not a directory; draconis ls -l shows what it is");
    }
    // Paths of the directories on the stack, for messages.
    let mut paths = vec![top.path.clone()];
    let mut out = EscapingOutput::new();
    out.write_name(&arguments.target.path)?;
    writeln!(out)?;
    let (mut dirs, mut files, mut failed) = (0u64, 0u64, false);
    let mut seen = std::collections::HashSet::from([start]);
    // One stack entry per directory that is being listed.
    let mut stack = vec![list_level(volume, arguments, start, &top.path, &mut failed)];
    while let Some(rest) = stack.last_mut() {
        let Some(entry) = rest.next() else {
            stack.pop();
            paths.pop();
            continue;
        };
        let last = rest.as_slice().is_empty();
        let (above, here) = stack.split_at(stack.len() - 1);
        for level in above {
            write!(out, "{}", if level.as_slice().is_empty() { "    " } else { "│   " })?;
        }
        debug_assert_eq!(here.len(), 1);
        write!(out, "{}", if last { "└── " } else { "├── " })?;
        out.write_name(&entry.name)?;
        let kind = entry.kind.or_else(|| volume.inode(entry.inode).ok().map(|inode| inode.kind));
        match kind {
            Some(FileType::Symlink) => match volume.read_link(entry.inode) {
                Ok(target) => {
                    write!(out, " -> ")?;
                    out.write_name(&target)?;
                }
                Err(error) => {
                    failed = true;
                    write!(out, " [{error}]")?;
                }
            },
            None => {
                failed = true;
                write!(out, " [cannot be read]")?;
            }
            _ => {}
        }
        writeln!(out)?;
        if kind != Some(FileType::Directory) {
            files += 1;
            continue;
        }
        dirs += 1;
        let deeper = arguments.level.is_none_or(|level| stack.len() < level);
        if deeper && seen.insert(entry.inode) {
            let path = join_path(paths.last().map_or(b"", |path| path), &entry.name);
            stack.push(list_level(volume, arguments, entry.inode, &path, &mut failed));
            paths.push(path);
        }
    }
    writeln!(
        out,
        "\n{}, {}",
        pluralize(dirs, "directory", "directories"),
        pluralize(files, "file", "files")
    )?;
    out.flush()?;
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn list_level(
    volume: &Volume,
    arguments: &Arguments,
    dir: InodeNumber,
    path: &[u8],
    failed: &mut bool,
) -> std::vec::IntoIter<ListedName> {
    let label = format!("{}:{}", arguments.target.image.shown(), escape_control_chars(path));
    match image::list_directory(volume, dir, &label) {
        Ok(listing) => {
            *failed |= listing.damaged;
            let shown = |entry: &ListedName| arguments.all || !entry.name.starts_with(b".");
            listing.names.into_iter().filter(shown).collect::<Vec<_>>().into_iter()
        }
        Err(error) => {
            *failed = true;
            report::print_error(&error);
            vec![].into_iter()
        }
    }
}
