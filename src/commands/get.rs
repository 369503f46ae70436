//! `draconis get`: copies a file or a tree from a volume into a host directory.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use draconis_access::walk::{TreeListing, chunk_queue, read_ahead};
use draconis_ext::{Follow, Volume};
use draconis_service::sandbox::open_beneath;
use draconis_types::FileType;
use draconis_types::path_bytes::ShowPath;
use rustix::io::Errno;

use crate::extract::{
    ExtractionDest, ExtractionItem, ExtractionSource, TreeExtraction, XattrPairs, split_destination,
};
use crate::image::{self, ReadArgs, resolve_target};
use crate::progress::{ByteProgress, ProgressMode};
use crate::report;
use crate::target::ImagePath;

/// Copy files from a volume to the host.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: ReadArgs,
    /// Copy directories recursively; copy symbolic links as links.
    #[arg(short, long)]
    recursive: bool,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// Source files.
    #[arg(value_name = "IMAGE:/path")]
    target: ImagePath,
    /// Destination file or directory; - for standard output.
    dest: PathBuf,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if arguments.dest == Path::new("-") {
        return write_to_stdout(arguments);
    }
    let (parent, name) = split_destination(&arguments.dest, arguments.target.file_name())?;
    // A confined process cannot see loop devices.
    let sources = image::sources_to_protect(&arguments.target.image, &arguments.place.volume);
    let beneath = open_beneath(&parent).with_context(|| parent.shown().to_string())?;
    let dest = ExtractionDest::open(parent, name, sources)?;
    let tree = image::open(&arguments.target.image, &arguments.place, Some(beneath.as_fd()))?;
    let volume = tree.volume();
    let follow = if arguments.recursive { Follow::No } else { Follow::Yes };
    let top = resolve_target(volume, &arguments.target, follow)?;
    if !arguments.recursive && volume.inode(top)?.kind == FileType::Directory {
        bail!("{} is a directory; -r copies it with all it holds", arguments.target);
    }
    let mut complain = |error: &anyhow::Error| report::print_error(error);
    let walk = TreeListing::new(volume, top, &arguments.target.to_string(), &mut complain)?;
    let plan = walk.write_order();
    let failed = std::thread::scope(|scope| {
        let (send, pieces) = chunk_queue();
        let (walk, plan) = (&walk, &plan);
        scope.spawn(move || read_ahead(volume, walk, plan, send));
        let source = VolumeSource { volume, walk };
        let progress = ByteProgress::new(arguments.progress, walk.bytes);
        let mut copy = TreeExtraction::new(&source, dest, pieces, progress);
        copy.copy_all(plan);
        copy.failed
    });
    Ok(if failed || walk.damaged { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Writes a file to standard output; the process cannot create files.
fn write_to_stdout(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let target = &arguments.target;
    if arguments.recursive {
        bail!(
            "-: standard output takes no tree; draconis tar {target} writes an archive, and ./- \
             is a directory of that name"
        );
    }
    let tree = image::open(&target.image, &arguments.place, None)?;
    super::cat::write_file(tree.volume(), target)?;
    Ok(ExitCode::SUCCESS)
}

/// A listed tree of a volume.
struct VolumeSource<'a> {
    volume: &'a Volume,
    walk: &'a TreeListing,
}

impl ExtractionSource for VolumeSource<'_> {
    fn count(&self) -> usize {
        self.walk.items.len()
    }

    fn item(&self, at: usize) -> ExtractionItem<'_> {
        let item = &self.walk.items[at];
        let (path, attributes, link_to) = (&item.path[..], &item.attributes, item.link_to);
        ExtractionItem { at, path, attributes, link_to, is_implied: false }
    }

    fn read_link(&self, at: usize) -> Result<Vec<u8>, Errno> {
        self.volume.read_link_of(self.walk.items[at].inode()).map_err(|_| Errno::UCLEAN)
    }

    fn xattrs(&self, at: usize) -> Result<XattrPairs, Errno> {
        let number = self.walk.items[at].inode().number;
        let names = self.volume.xattr_names(number).map_err(|_| Errno::UCLEAN)?;
        let read = |name: Vec<u8>| {
            let value = self.volume.xattr(number, &name).map_err(|_| Errno::UCLEAN)?;
            Ok((name, value))
        };
        names.into_iter().map(read).collect()
    }
}
