//! `draconis put`: copies host files into a volume.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use clap::Args;
use draconis_access::destination::ReadSources;
use draconis_access::populate::{self, FileScan};
use draconis_ext::{Error, Follow, InodeNumber, Volume};
use draconis_types::FileType;
use draconis_types::path_bytes::ShowPath;

use crate::edit::{self, NewFileOwner, OwnerArg, TargetName};
use crate::image::{self, BackingFiles, WriteArgs};
use crate::import_tree::{ImportOptions, import_tree, timestamp_policy};
use crate::progress::{ByteProgress, ProgressMode};
use crate::target::ImagePath;

/// Copy files from the host into a volume.
///
/// Keeps owners, modes, times, hard links, holes and extended attributes.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: WriteArgs,
    /// Copy directories recursively; copy symbolic links as links.
    #[arg(short, long, visible_short_alias = 'R')]
    recursive: bool,
    /// Treat the destination as a file, not as a directory.
    #[arg(short = 'T', long)]
    no_target_directory: bool,
    /// Set the owner of all files.
    #[arg(long, value_name = "UID:GID")]
    owner: Option<OwnerArg>,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// Source files; - for standard input (the destination must be a file name).
    #[arg(value_name = "SRC", required = true)]
    sources: Vec<PathBuf>,
    /// Destination file or directory.
    #[arg(value_name = "IMAGE:/path")]
    target: ImagePath,
}

/// Size of one read from standard input, in bytes.
const WRITE_CHUNK_BYTES: usize = 1 << 20;

/// Runs the command. Host files are read while the volume is written, so the process is confined
/// only if it reads nothing but standard input.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Arguments { target, sources, .. } = arguments;
    if sources.iter().any(|source| source == Path::new("-")) {
        ensure!(sources.len() == 1, "-: standard input is put alone; ./- is a file of that name");
        ensure!(
            !arguments.recursive,
            "-: standard input is one file; draconis untar unpacks an archive, and ./- is a \
             file of that name"
        );
        return put_stdin(arguments);
    }
    let stamp = timestamp_policy()?;
    if let Some(source) = sources.iter().find(|source| is_in_image(source)) {
        bail!(
            "{}: no such file; draconis get {0} {} copies it out of the image",
            source.shown(),
            target.image.shown()
        );
    }
    let opened = (
        image::open_writable(&target.image, arguments.place.force)?,
        BackingFiles::open(&target.image, &arguments.place.backing)?,
    );
    edit::edit_open_image(opened, &target.image, &arguments.place, |volume| {
        let there = match volume.resolve(volume.root(), &target.path, Follow::Yes) {
            Ok(there) => Some(there),
            Err(Error::NotFound) => None,
            Err(error) => return Err(edit::with_context(target, error)),
        };
        let is_dir = there.map(|there| volume.inode(there)).transpose()?;
        let is_dir = is_dir.is_some_and(|inode| inode.kind == FileType::Directory);
        let (into, name) = match there {
            Some(there) if is_dir && !arguments.no_target_directory => (there, None),
            _ => {
                ensure!(sources.len() == 1, "{target}: no such directory");
                ensure!(is_dir || !target.path.ends_with(b"/"), "{target}: no such directory");
                let entry = TargetName::from_image_path(volume, target)?;
                (entry.dir, Some(entry.name))
            }
        };
        let gather = FileScan {
            sources,
            name: name.as_deref(),
            recursive: arguments.recursive,
            image: &target.image,
        };
        let source = populate::scan_files(gather, stamp)?;
        let label = if name.is_some() { target.parent() } else { target.to_string() };
        let Arguments { owner, progress, .. } = *arguments;
        import_tree(
            volume,
            &source,
            into,
            label,
            ImportOptions { owner, replace_kinds: false, progress },
        )
    })
}

/// Returns true if a missing source looks like a file in an image.
fn is_in_image(source: &Path) -> bool {
    !source.exists() && ImagePath::from(source.as_os_str().to_owned()).image.is_file()
}

/// Stores standard input in an orphan inode, which replaces the existing file once it is
/// complete.
fn put_stdin(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let target = &arguments.target;
    let mut input = ReadSources::new();
    input.add_input();
    input.refuse_source_as_destination(&target.image)?;
    let maker = NewFileOwner::new(arguments.owner);
    edit::edit_volume(&target.image, &arguments.place, |volume| {
        let there = match volume.resolve(volume.root(), &target.path, Follow::Yes) {
            Ok(there) => Some(volume.inode(there)?),
            Err(Error::NotFound) => None,
            Err(error) => return Err(edit::with_context(target, error)),
        };
        ensure!(
            !there.is_some_and(|there| there.kind == FileType::Directory),
            "{target} is a directory: standard input needs a name in it"
        );
        ensure!(!target.path.ends_with(b"/"), "{target}: no such directory");
        let entry = TargetName::from_image_path(volume, target)?;
        let made = volume.create_tmpfile(entry.dir, &maker.new_file_node());
        let made = made.map_err(|error| edit::with_context(target, error))?;
        volume.add_user(made);
        let done = copy_input_to_file(volume, made, target, arguments.progress).and_then(|()| {
            if entry.lookup(volume)?.is_some() {
                volume
                    .unlink(entry.dir, &entry.name)
                    .map_err(|error| edit::with_context(target, error))?;
            }
            volume
                .link(made, entry.dir, &entry.name)
                .map_err(|error| edit::with_context(target, error))
        });
        volume.remove_users(made, 1);
        done.map(|()| ExitCode::SUCCESS)
    })
}

/// Copies standard input into a file.
fn copy_input_to_file(
    volume: &Volume,
    file: InodeNumber,
    target: &ImagePath,
    progress: ProgressMode,
) -> anyhow::Result<()> {
    let mut progress = ByteProgress::unbounded(progress);
    let mut input = std::io::stdin().lock();
    let mut buffer = vec![0; WRITE_CHUNK_BYTES];
    let mut at = 0;
    loop {
        let len = match input.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(len) => len,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error).context("standard input"),
        };
        let mut put = 0;
        while put < len {
            match volume.write(file, at, &buffer[put..len]) {
                Ok(0) => return Err(edit::with_context(target, Error::NoSpace)),
                Ok(taken) => (put, at) = (put + taken, at + taken as u64),
                Err(error) => return Err(edit::with_context(target, error)),
            }
        }
        progress.add(len as u64);
    }
}
